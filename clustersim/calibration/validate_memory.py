"""Predict the peak memory of measured steps of FSDP and ZeRO, and say how far off we are.

Compared is what the framework's allocator had *allocated* at its peak, without the driver's context. Rows that report
``nvidia-smi`` show a full card's reservation instead, and are skipped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clustersim.calibration.score import evaluate, number, read_table, score, with_ranges
from clustersim.calibration.sharded_rows import is_sharded, peak_memory, read_sharded
from clustersim.calibration.step_rows import COLUMNS, Row, publisher
from clustersim.ranges import of_memory

GIB = 2.0**30


def validate_memory(path: str | Path) -> dict[str, Any]:
    """Predict ``peak_mem_GiB`` of every row. See :func:`clustersim.calibration.score.score` for the result."""
    table = [row for row in read_table(path, (*COLUMNS, "peak_mem_GiB")) if row["peak_mem_GiB"].strip()]
    return score(
        with_ranges(evaluate(table, _predict), lambda row: of_memory(publisher(row))),
        {
            "case": lambda row: row["case_id"],
            "source": publisher,
            "strategy": lambda row: row["strategy"],
            "model": lambda row: row["model"],
        },
    )


def _predict(row: Row) -> tuple[float, float]:
    """Measured and predicted bytes allocated at the peak."""
    if not is_sharded(row):
        raise ValueError(f"the memory of strategy {row['strategy']!r} is not compared")
    if "nvidia-smi" in row.get("notes", ""):
        raise ValueError("the row shows nvidia-smi's reservation of a full card, not what was allocated")
    return number(row, "peak_mem_GiB") * GIB, peak_memory(read_sharded(row, timed=False)).allocated
