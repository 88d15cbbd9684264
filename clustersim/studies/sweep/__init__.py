"""What if: a base scenario, axes over its fields, and the rows that come out, on one machine or many.

>>> plan = from_table({"base": "ddp_resnet50_1x8_v100", "axes": [{"key": "run.steps", "values": [3, 4]}]})
>>> [dict(case.axes) for case in plan.cases()]
[{'run.steps': 3}, {'run.steps': 4}]
"""

from __future__ import annotations

from clustersim.scenario.run.identity import Fingerprints
from clustersim.studies.sweep.crews import Dask, Processes
from clustersim.studies.sweep.running import SweepOutcome, SweepProgress, sweep
from clustersim.studies.sweep.spec import Sweep, SweepCase, from_table, load
from clustersim.studies.sweep.store import Store
from clustersim.studies.sweep.table import about, is_sweep, read, rows, write

__all__ = [
    "Dask",
    "Fingerprints",
    "Processes",
    "Store",
    "Sweep",
    "SweepCase",
    "SweepOutcome",
    "SweepProgress",
    "about",
    "from_table",
    "is_sweep",
    "load",
    "read",
    "rows",
    "sweep",
    "write",
]
