"""Published steps of optimizers and parameters on the host (``tests/data/offload_steps.csv``), and what is predicted.

Rows were chosen, and what a publisher left open was settled, before any was predicted.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustersim import load
from clustersim.core.program import Compute
from tests.tables import table_rows

TABLE = Path(__file__).parents[1] / "data" / "offload_steps.csv"
STEADY = 1
"""The step that parts are of."""


class OffloadRow(msgspec.Struct, frozen=True):
    """A row.

    part : what was measured: a whole ``step``, the ``optimizer`` with parameters on their way back, or the ``update``
    alone. measured_s : of it [s]; without_s : of the same publisher's step without offload, NaN where none is given.
    parameters : that were updated, where the scenario's model has another number of them. threads, bound : of a rank,
    as published.
    """

    id: str
    publisher: str
    part: str
    measured_s: float
    without_s: float
    parameters: float
    threads: int | str | None
    bound: bool
    scenario: str

    @property
    def table(self) -> dict[str, Any]:
        """The scenario, with what is known of the host."""
        table: dict[str, Any] = json.loads(self.scenario)
        table["run"]["steps"] = STEADY + 2
        known = {"host_threads": self.threads, "bind_cores": self.bound}
        table["strategy"] |= {name: value for name, value in known.items() if value}
        return table


def offload_rows() -> tuple[OffloadRow, ...]:
    """Every row."""
    return tuple(
        OffloadRow(
            id=row["id"],
            publisher=row["publisher"],
            part=row["part"],
            measured_s=float(row["measured_s"]),
            without_s=float(row["without_s"] or math.nan),
            parameters=float(row["parameters"] or math.nan),
            threads="all" if row["threads"] == "all" else int(row["threads"]) if row["threads"] else None,
            bound=row["bound"] == "yes",
            scenario=row["scenario"],
        )
        for row in table_rows(TABLE)
    )


def predicted_s(row: OffloadRow) -> float:
    """Seconds of the row's part of a step."""
    run = load(row.table).run()
    if row.part == "step":
        return float(run.summary["step_time_s"])
    names = {"h2d parameters"} if row.part == "optimizer" else set()
    ops = [op for op in run.prepared.program.roles[0].ops if isinstance(op, Compute) and op.step == STEADY]
    seconds = sum(float(np.max(op.duration)) for op in ops if op.phase == "optimizer" or op.name in names)
    return seconds if math.isnan(row.parameters) else seconds * row.parameters / run.prepared.model.trained


def errors_of_steps() -> dict[str, np.ndarray]:
    """Of each publisher, how far whole steps are from what is predicted, relative to that."""
    errors: dict[str, list[float]] = {}
    for row in offload_rows():
        if row.part == "step":
            errors.setdefault(row.publisher, []).append(abs(row.measured_s / predicted_s(row) - 1.0))
    return {publisher: np.array(values) for publisher, values in errors.items()}
