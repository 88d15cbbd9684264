"""What a sweep still has to do: its cases, less those that have a row, those on one machine together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.outputs import output_folder, together
from clustersim.core.paths import json_text, plain
from clustersim.scenario.file.reading import Changes, override
from clustersim.scenario.run.identity import Fingerprints, Identity, identity, version
from clustersim.studies.sweep.row import Failure, failure
from clustersim.studies.sweep.spec import Question, Sweep

CASES = "cases.jsonl"
ABOUT = "sweep.json"
"""Files beside the rows: which row is whose, and what the sweep is."""


class SweepDescription(msgspec.Struct, frozen=True):
    """What the rows of a folder are of, for tables and pictures: a sweep's name and title, its base scenario, the
    columns of its axes, what it is to decide, how many cases it has, and the version that plays it."""

    name: str
    title: str
    base: str
    axes: tuple[str, ...]
    question: Question | None
    cases: int
    version: str

    @classmethod
    def of(cls, plan: Sweep) -> SweepDescription:
        """That of a sweep."""
        return cls(plan.name, plan.title, plan.base_path.stem, plan.columns, plan.question, len(plan), version())


@dataclass(frozen=True)
class ScenarioTask:
    """One scenario on its way to a worker: its identity, and how the base is changed."""

    identity: Identity
    changes: Changes


@dataclass(frozen=True)
class PendingScenarios:
    """What a sweep still has to do.

    Parameters
    ----------
    scenarios : different ones in all. cases : numbers of those to compute, those on one machine together.
    unreadable : scenarios that no file could say, with their error.
    """

    scenarios: int
    cases: Sequence[int]
    unreadable: Sequence[tuple[Identity, Failure]]

    @classmethod
    def of(cls, plan: Sweep, stored_keys: set[str], folder: Path) -> PendingScenarios:
        """Find out, and write which row is whose: ``cases.jsonl``, a line for each point of the grid."""
        fingerprint = Fingerprints()
        seen = set()
        bad = _RefusedValues(plan)
        machines: dict[bytes, list[int]] = {}
        unreadable: list[tuple[Identity, Failure]] = []
        with output_folder(folder), together(folder) as path_of, path_of(CASES).open("wb") as file:
            for i in range(len(plan)):
                case = plan.case(i)
                try:
                    identity_of = fingerprint(plan.scenario(case))
                    error = None
                except ScenarioError as wrong:
                    table = override(plan.base, case.changes)
                    identity_of = identity(plain(table), {})
                    error = failure(wrong, plan.base_path.parent)
                bad.count(i, error)
                file.write(msgspec.json.encode({"key": identity_of.key, "axes": dict(case.axes)}) + b"\n")
                if identity_of.key in seen:
                    continue
                seen.add(identity_of.key)
                if identity_of.key in stored_keys:
                    continue
                if error is not None:
                    unreadable.append((identity_of, error))
                else:
                    machines.setdefault(msgspec.json.encode(identity_of.inputs["cluster"]), []).append(i)
            bad.check()
            path_of(ABOUT).write_bytes(json_text(SweepDescription.of(plan)))
        return cls(len(seen), [i for group in machines.values() for i in group], unreadable)

    def tasks(self, plan: Sweep) -> Iterator[ScenarioTask]:
        """What to hand out, made when it is."""
        fingerprint = Fingerprints()
        for i in self.cases:
            case = plan.case(i)
            yield ScenarioTask(fingerprint(plan.scenario(case)), dict(case.changes))


class _RefusedValues:
    """Values of axes that no scenario can be read with: the sweep's own mistakes, told before anything runs."""

    def __init__(self, plan: Sweep) -> None:
        self.plan = plan
        self.all = [[0] * len(axis.points) for axis in plan.axes]
        self.bad = [[0] * len(axis.points) for axis in plan.axes]
        self.error: dict[tuple[int, int], str] = {}

    def count(self, i: int, error: Failure | None) -> None:
        """Case ``i`` was read, or not."""
        for axis, place in enumerate(self.plan.places(i)):
            self.all[axis][place] += 1
            if error is not None:
                self.bad[axis][place] += 1
                self.error.setdefault((axis, place), error.message)

    def check(self) -> None:
        """Raise :class:`ScenarioError` for the first such value."""
        for (axis, place), message in self.error.items():
            if self.bad[axis][place] == self.all[axis][place]:
                shown = self.plan.axes[axis].points[place].shown
                values_text = ", ".join(f"{name} = {value!r}" for name, value in shown.items())
                raise ScenarioError(f"{self.plan.path}: {values_text}: {message} (at $.axes[{axis}], value {place})")
