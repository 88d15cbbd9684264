"""Published whole steps that no constant was fitted to, and what a user without measurements predicts of them.

Each row of ``tests/data/unseen_steps.csv`` holds a scenario as ``clustersim new scenario`` with its options writes it,
as a table; what the publisher left open was settled, and is said in ``left_open``, before the row was predicted.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from clustersim import load
from clustersim.core.arrays import Floats
from clustersim.scenario.result.trust import trust

TABLE = Path(__file__).parents[1] / "data" / "unseen_steps.csv"
LARGE = ("megascale", "nemotron4", "neox")
"""Beginnings of rows of hundreds of GPUs, stage by stage: minutes of processor time each. They are not played here."""


class UnseenStep(msgspec.Struct, frozen=True):
    """A row with what was predicted of it.

    Parameters
    ----------
    name, source : of the row. kind, arch : which published steps it is like
        (:func:`clustersim.scenario.result.trust.step_kind`), and the generation of its GPU.
    error, memory_error : predicted over published minus 1, of the step and of the peak of memory; None where the
        publisher gives none. p50, p90 : half-widths of the ranges that the run states.
    """

    name: str
    source: str
    kind: str
    arch: str
    error: float | None
    memory_error: float | None
    p50: float
    p90: float


@cache
def unseen_steps() -> tuple[UnseenStep, ...]:
    """Every row but those that are :data:`LARGE`, played."""
    with TABLE.open() as file:
        return tuple(_played(row) for row in csv.DictReader(file) if not row["id"].startswith(LARGE))


def _played(row: dict[str, str]) -> UnseenStep:
    table = json.loads(row["scenario"])
    table["run"].setdefault("steps", 3)
    run = load(table).run()
    around = trust(run.prepared)
    error = run.summary["step_time_s"] / float(row["step_s"]) - 1.0 if row["step_s"] else None
    memory = None
    if row["memory"]:
        held = run.memory.allocated if row["memory"] == "allocated" else run.memory.reserved
        memory = held / 2**30 / float(row["memory_gib"]) - 1.0
    arch = run.prepared.device.arch
    return UnseenStep(row["id"], row["source"], around.kind, arch, error, memory, around.p50, around.p90)


def unseen_distances(steps: Iterable[UnseenStep], error_of: Callable[[UnseenStep], float | None]) -> dict[str, Floats]:
    """Of each publisher, how far its figures are from their predictions, relative to the prediction."""
    groups: dict[str, list[float]] = {}
    for step in steps:
        error = error_of(step)
        if error is not None:
            groups.setdefault(step.source, []).append(abs(1.0 / (1.0 + error) - 1.0))
    return {source: np.array(far) for source, far in groups.items()}
