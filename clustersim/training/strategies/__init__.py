"""(model, costs, mesh, knobs) -> Program: how training is spread over ranks. One file and one row per strategy."""

from __future__ import annotations

from clustersim.core.row_table import RowTable
from clustersim.training.parallel.config import AtLeastOne
from clustersim.training.strategies import data_parallel, ddp, fsdp, parameter_server, single, steps_of_sgd, zero
from clustersim.training.strategies.base import Strategy, StrategyConfig

_MODULES = single, steps_of_sgd, parameter_server, data_parallel, ddp, fsdp, zero
_ROWS = [module.STRATEGY for module in _MODULES]
STRATEGIES: RowTable[Strategy] = RowTable("clustersim.strategies", "strategy", Strategy, _ROWS)
"""Every strategy by the ``kind`` a scenario's ``[strategy]`` names it with."""

__all__ = ["STRATEGIES", "AtLeastOne", "Strategy", "StrategyConfig"]
