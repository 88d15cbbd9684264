"""Predict the peak memory of measured steps, and say how far off we are.

Three figures are published as "memory", and a row is compared with its own: what the framework's allocator had
*allocated* at its peak; what it had *reserved* from the driver, which torchtitan logs; and what ``nvidia-smi`` shows,
with the driver's context and libraries beside it. A reservation of a full card says nothing, and is skipped.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path

from clustersim import scenario
from clustersim.calibration.hybrid_rows import is_hybrid, scenario_table
from clustersim.calibration.score import Score, evaluate, number, read_table, score, with_ranges
from clustersim.calibration.sharded_rows import is_sharded, read_sharded
from clustersim.calibration.software import Row
from clustersim.calibration.step_play import peak_memory
from clustersim.calibration.step_rows import COLUMNS, publisher
from clustersim.device import device_from_text
from clustersim.memory_use import MemoryUse
from clustersim.models.sized import BY_COUNT
from clustersim.ranges import of_memory
from clustersim.scenario.held import held

GIB = 2.0**30
FULL = 0.96
"""Share of a card above which what is reserved of it is no longer what a step needs."""


def validate_memory(path: str | Path) -> Score:
    """Predict ``peak_mem_GiB`` of every row."""
    table = [row for row in read_table(path, (*COLUMNS, "peak_mem_GiB")) if row["peak_mem_GiB"].strip()]
    return score(
        with_ranges(evaluate(table, _predict), lambda row: of_memory(publisher(row))),
        {
            "case": lambda row: str(row.cells["case_id"]),
            "source": lambda row: publisher(row.cells),
            "figure": lambda row: figure(row.cells),
            "strategy": lambda row: str(row.cells["strategy"]),
            "model": lambda row: str(row.cells["model"]),
        },
    )


def figure(row: Row) -> str:
    """Which of the three a row states.

    >>> figure({"notes": "memory: nvidia-smi GB"}), figure({"framework": "torchtitan"}), figure({})
    ('nvidia-smi', 'reserved', 'allocated')
    """
    if "nvidia-smi" in row.get("notes", ""):
        return "nvidia-smi"
    named = f"{row.get('framework', '')} {row.get('other', '')}"
    return "reserved" if "torchtitan" in named else "allocated"


def _predict(row: Row) -> tuple[float, float]:
    # Gigabytes are GiB in the table's column but where the row says that they are as printed.
    stated = number(row, "peak_mem_GiB") * (1e9 if "GB as printed" in row.get("notes", "") else GIB)
    which = figure(row)
    if which != "allocated" and stated > FULL * device_from_text(row["gpu"].split(" (")[0]).memory_bytes:
        raise ValueError(f"the row shows a full card: {stated / GIB:.1f} GiB {which}, not what the step needs")
    use = _use(row)
    return stated, {"allocated": use.allocated, "reserved": use.reserved, "nvidia-smi": use.shown}[which]


def _use(row: Row) -> MemoryUse:
    if is_hybrid(row):
        return _held(json.dumps(scenario_table(row), sort_keys=True))
    if not is_sharded(row):
        raise ValueError(f"the memory of strategy {row['strategy']!r} is not compared")
    run = read_sharded(row, timed=False)
    if any(BY_COUNT in note for note in run.model.notes):  # a step's time follows from the count, activations do not
        raise ValueError("the row gives no layers and d_model, which decide what activations take")
    return peak_memory(run)


@lru_cache(maxsize=256)
def _held(table: str) -> MemoryUse:
    return held(scenario.from_table(json.loads(table), "row.toml")).use
