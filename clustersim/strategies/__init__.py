"""(model, costs, mesh, knobs) -> Program: how training is spread over ranks. One file and one row per strategy."""

from __future__ import annotations

from clustersim.strategies import ddp, fsdp, parameter_server, single
from clustersim.strategies.base import Strategy, StrategyConfig

STRATEGIES: dict[str, Strategy] = {
    row.name: row for row in (single.STRATEGY, ddp.STRATEGY, parameter_server.STRATEGY, fsdp.STRATEGY)
}
"""Every strategy by the ``kind`` a scenario's ``[strategy]`` names it with."""

__all__ = ["STRATEGIES", "Strategy", "StrategyConfig"]
