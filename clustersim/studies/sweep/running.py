"""A sweep played: what is left to do, who does it, and the rows as they finish."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from clustersim import scenario
from clustersim.core.errors import ClusterSimError
from clustersim.core.outputs import Folder
from clustersim.core.tomls import plainly
from clustersim.scenario.file.reading import Table
from clustersim.scenario.run.identity import version
from clustersim.studies.sweep import spec
from clustersim.studies.sweep.crews import Executor, crew
from clustersim.studies.sweep.driving import Driver
from clustersim.studies.sweep.left import ABOUT, CASES, PendingScenarios, ScenarioTask
from clustersim.studies.sweep.row import line, line_of
from clustersim.studies.sweep.spec import Sweep
from clustersim.studies.sweep.store import Store

Told = Callable[["SweepProgress"], None]

FILES = (ABOUT, CASES, "table.csv", "curves.png")
"""What a sweep leaves beside its rows, which are recognised line by line."""


@dataclass(frozen=True)
class SweepProgress:
    """How far a sweep is: ``done`` of ``total`` scenarios, ``kept`` of them from before, ``failed`` with an error.

    left_s : float [s], an estimate from the pace so far; None while there is none.
    """

    done: int
    total: int
    kept: int
    failed: int
    left_s: float | None


class LostScenario(msgspec.Struct, frozen=True):
    """A scenario that killed its worker each time, by its changes, and the last error."""

    scenario: str
    error: str


class SweepOutcome(msgspec.Struct, frozen=True):
    """What a sweep came to.

    Parameters
    ----------
    folder : of the rows. cases : points of the grid. scenarios : different ones among them.
    kept : rows that were there. computed : rows that are new. failed : those of them with an error.
    lost : those that have no row.
    """

    folder: Path
    cases: int
    scenarios: int
    kept: int
    computed: int
    failed: int
    lost: tuple[LostScenario, ...] = ()


def sweep(
    source: str | Path | Table | Sweep,
    out: str | Path,
    *,
    executor: Executor | None = None,
    jobs: int | None = None,
    resume: bool = True,
    progress: Told | None = None,
) -> SweepOutcome:
    """Simulate every scenario of a sweep that has no row in ``out`` yet.

    Parameters
    ----------
    source : a :class:`Sweep`, a file, its tables as a dict, or the name of a shipped one.
    out : folder of the rows, ``results.jsonl``.
    executor : whatever has ``submit()`` and returns futures: an executor of ``concurrent.futures``, a Dask
        ``Client``, submitit's. None takes ``jobs`` processes of this machine (a script that calls this needs
        ``if __name__ == "__main__":``); ``jobs=1`` stays in this one.
    resume : keep the rows that are there. progress : called whenever rows have been written.

    Raises
    ------
    ScenarioError : the sweep cannot be read, or a value of an axis cannot be read in any scenario.
    ClusterSimError : the folder cannot be written, or the workers are gone for good. Rows so far are kept.
    """
    plan = source if isinstance(source, Sweep) else spec.load(source)
    store = Store(Path(out))
    folder = Folder(store.path, "sweep", plan.name, FILES, (plan.name, plan.base))
    with closing(crew(executor, jobs)) as team, store.writing(folder, resume=resume) as writer:
        stored_keys = store.keys()
        left = PendingScenarios.of(plan, stored_keys, store.path)
        counter = _ProgressCounter(progress, left.scenarios, left.scenarios - len(left.cases))

        def took(lines: Sequence[bytes]) -> None:
            """Write rows, and count them."""
            writer.append(lines)
            counter(lines)

        took([line(row_identity, error) for row_identity, error in left.unreadable])
        driver: Driver[ScenarioTask] = Driver(team, partial(compute, plan.base, str(plan.base_path), version()), took)
        driver.run(left.tasks(plan))
    lost = tuple(
        LostScenario(", ".join(f"{key}={plainly(value)}" for key, value in task.changes.items()), error)
        for task, error in driver.given_up
    )
    return SweepOutcome(store.path, len(plan), left.scenarios, counter.kept, counter.computed, counter.failed, lost)


def compute(base: Table, path: str, expected: str, tasks: Sequence[ScenarioTask]) -> tuple[float, list[bytes]]:
    """In a worker: (seconds, a line for each task)."""
    return timed(
        "sweep", expected, tasks, lambda task: line_of(scenario.from_table(base, path, task.changes), task.identity)
    )


def timed(
    who: str, expected: str, tasks: Sequence[ScenarioTask], row: Callable[[ScenarioTask], bytes]
) -> tuple[float, list[bytes]]:
    """Seconds, and a line for each task. Raises :class:`ClusterSimError` where ``who`` is of another version."""
    if version() != expected:
        raise ClusterSimError(f"the worker has clustersim {version()}, the {who} {expected}")
    begin = time.perf_counter()
    lines = [row(task) for task in tasks]
    return time.perf_counter() - begin, lines


class _ProgressCounter:
    """Counts rows and tells how far the sweep is."""

    def __init__(self, tell: Told | None, total: int, kept_rows: int) -> None:
        self.tell = tell
        self.total = total
        self.kept = kept_rows
        self.computed = self.failed = 0
        self.begin = time.monotonic()

    def __call__(self, lines: Sequence[bytes]) -> None:
        self.computed += len(lines)
        self.failed += sum(b'"error":{"class":' in line for line in lines)
        if self.tell is not None:
            left = self.total - self.kept - self.computed
            pace = (time.monotonic() - self.begin) / self.computed if self.computed else None
            self.tell(
                SweepProgress(self.kept + self.computed, self.total, self.kept, self.failed, pace and pace * left)
            )
