"""Published whole steps that no constant was fitted to, and what a user without measurements predicts of them.

Each row of ``tests/data/unseen_steps.csv`` holds a scenario as ``clustersim new scenario`` with its options writes it,
as a table; what the publisher left open was settled, and is said in ``left_open``, before the row was predicted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from clustersim import load
from clustersim.core.arrays import Floats
from clustersim.scenario import Scenario
from clustersim.scenario.result.trust import trust
from tests.tables import table_rows

TABLE = Path(__file__).parents[1] / "data" / "unseen_steps.csv"
LARGE = ("megascale", "nemotron4", "neox", "mbridge-405b", "split-nemo-gpt3-175b", "moe-automodel-dsv3", "moe10-xtuner")
"""Beginnings of rows of hundreds of GPUs, stage by stage: minutes of processor time each. They are not played here."""


class UnseenStep(msgspec.Struct, frozen=True):
    """A row with what was predicted of it.

    Parameters
    ----------
    name, publisher, chosen : the row's id, who measured it, and in which set it was chosen.
    kind, arch : which published steps it is like (:func:`clustersim.scenario.result.trust.step_kind`), and the
        generation of its GPU.
    error, memory_error : predicted over published minus 1, of the step and of the peak of memory; None where the
        publisher gives none.
    first_error : of the step when the row was first played, before anything was mended for what its set showed; where
        nobody wrote that down, ``error``.
    memory_figure : what a publisher read: ``"allocated"``, ``"reserved"``, ``"nvidia-smi"``, or empty.
    p50, p90 : half-widths of the ranges that the run states.
    """

    name: str
    publisher: str
    chosen: str
    kind: str
    arch: str
    error: float | None
    first_error: float | None
    memory_error: float | None
    memory_figure: str
    p50: float
    p90: float


@cache
def unseen_steps() -> tuple[UnseenStep, ...]:
    """Every row but those that are :data:`LARGE`, played: minutes of processor time."""
    return tuple(map(_played, _rows()))


def first_errors() -> Iterator[tuple[str, str, float | None]]:
    """Of every timed row: the generation of its GPU, its kind, and its first error where that was written down. None is
    played for it."""
    for row in _rows():
        if row["first_error"] or row["step_s"]:
            prepared = _scenario(row).prepare()
            error = float(row["first_error"]) if row["first_error"] else None
            yield prepared.device.arch, trust(prepared).kind, error


def _rows() -> list[dict[str, str]]:
    return [row for row in table_rows(TABLE) if not row["id"].startswith(LARGE)]


def _scenario(row: dict[str, str]) -> Scenario:
    table = json.loads(row["scenario"])
    # Steps that do not vary are one like the other once the first is over.
    varies = table["run"].get("jitter") != 0.0
    table["run"].setdefault("steps", 3 if varies else 2)
    return load(table)


def _played(row: dict[str, str]) -> UnseenStep:
    run = _scenario(row).run()
    around = trust(run.prepared)
    error = run.summary["step_time_s"] / float(row["step_s"]) - 1.0 if row["step_s"] else None
    memory = None
    if row["memory"]:
        held = run.memory.allocated if row["memory"] == "allocated" else run.memory.reserved
        memory = held / 2**30 / float(row["memory_gib"]) - 1.0
    first = float(row["first_error"]) if row["first_error"] else error
    return UnseenStep(
        row["id"],
        publisher_of(row["source"]),
        row["set"],
        around.kind,
        run.prepared.device.arch,
        error,
        first,
        memory,
        row["memory"],
        around.p50,
        around.p90,
    )


def publisher_of(source: str) -> str:
    """Who measured a row, by its source: a repository's owner and name, or the source as it is.

    >>> publisher_of("github FlagOpen/FlagPerf training/nvidia/llama3_8B"), publisher_of("MegaScale, table 1")
    ('FlagOpen/FlagPerf', 'MegaScale, table 1')
    """
    repository = re.search(r"github (\S+/\S+)", source)
    return repository[1] if repository else source


def unseen_distances(steps: Iterable[UnseenStep]) -> dict[str, Floats]:
    """Of each publisher, how far its steps were from their first predictions, relative to the prediction."""
    return _distances((step.publisher, step.first_error) for step in steps)


def unseen_memory_distances(steps: Iterable[UnseenStep]) -> dict[str, Floats]:
    """Of each publisher, how far its peaks of the allocator's memory are from their predictions, relative to those;
    what nvidia-smi shows holds more than an allocator's."""
    of_allocator = (step for step in steps if step.memory_figure != "nvidia-smi")
    return _distances((step.publisher, step.memory_error) for step in of_allocator)


def _distances(errors: Iterable[tuple[str, float | None]]) -> dict[str, Floats]:
    groups: dict[str, list[float]] = {}
    for publisher, error in errors:
        if error is not None:
            groups.setdefault(publisher, []).append(abs(1.0 / (1.0 + error) - 1.0))
    return {publisher: np.array(far) for publisher, far in groups.items()}
