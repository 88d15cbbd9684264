"""(model, costs, mesh, knobs) -> Program: how training is spread over ranks. One file and one row per strategy."""

from __future__ import annotations

from clustersim.strategies import data_parallel, ddp, fsdp, parameter_server, single, steps_of_sgd, zero
from clustersim.strategies.base import Strategy, StrategyConfig

STRATEGIES: dict[str, Strategy] = {
    row.name: row
    for row in (
        single.STRATEGY,
        steps_of_sgd.STRATEGY,
        parameter_server.STRATEGY,
        data_parallel.STRATEGY,
        ddp.STRATEGY,
        fsdp.STRATEGY,
        zero.STRATEGY,
    )
}
"""Every strategy by the ``kind`` a scenario's ``[strategy]`` names it with."""

__all__ = ["STRATEGIES", "Strategy", "StrategyConfig"]
