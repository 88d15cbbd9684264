"""How often our own diagnosis is right, on planted incidents: with all files, with one kind of them missing, with half
of the ranks' dumps and profiles.

An incident is drawn and played, its files are written to a folder of their own, and ``diagnose`` has their paths alone:
neither the scenario nor the answer.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from clustersim import scenario as scenarios
from clustersim.studies.diagnosis.answer import judged, read_files
from clustersim.studies.exam import ExamAnswer, PlantedIncident, graded, planted, write_traces
from clustersim.studies.exam.evidence import ORIGIN, TracesByKind
from clustersim.studies.exam.sealing import answer_of

PER_RANK = ("dumps", "profiles", "inspector")
"""Kinds of evidence of which there is a file for each rank."""


FORMAT_OF = {
    "dumps": "flight_recorder",
    "watchdog": "watchdog",
    "launcher": "watchdog",
    "profiles": "kineto",
    "inspector": "json_lines",
    "steps": "step_timers",
    "nccl": "nccl_debug",
    "counters": "link_counters",
    "gpus": "link_counters",
    "cabling": "ib_ports",
    "tests": "nccl_tests",
}
"""Kinds of evidence -> the format that their files are known for by content, which ``tests/test_exam.py`` checks."""


class DiagnosedIncident(msgspec.Struct, frozen=True):
    """One incident as it was diagnosed: with which files, whether cause and place were right, and how sure it was.

    detected : how far the first line of the watchdog's log is from when the watchdog was played to speak [s]; None
        where no log has one.
    """

    seed: int
    files: str
    right: ExamAnswer
    given: ExamAnswer
    confidence: float
    confident: bool
    detected: float | None = None

    @property
    def is_right(self) -> bool:
        """Cause and place."""
        return graded(self.given, self.right).is_right

    @property
    def is_wrong(self) -> bool:
        """Another cause, or a place that is another."""
        grade = graded(self.given, self.right)
        return not grade.cause or (not grade.place and any(part is not None for part in self.given.place))

    @property
    def cause_right(self) -> bool:
        """The cause alone."""
        return graded(self.given, self.right).cause


class IncidentShare(msgspec.Struct, frozen=True):
    """Shares of 1, of ``count`` incidents: ``right`` in cause and place, in the ``cause`` alone, ``confident``, and
    ``confident_wrong``: sure of another cause or another place. An answer without a place is not right, and not
    wrong."""

    files: str
    count: int
    right: float
    cause: float
    confident: float
    confident_wrong: float


def complete(kept: TracesByKind, rng: np.random.Generator) -> tuple[str, list[Path]]:
    """Every file."""
    return "all files", [path for paths in kept.values() for path in paths]


def one_kind_missing(kept: TracesByKind, rng: np.random.Generator) -> tuple[str, list[Path]]:
    """All but one kind of evidence, drawn from those that are there."""
    kinds = list(kept)
    missing = kinds[int(rng.integers(len(kinds)))]
    return "one kind missing", [path for kind, paths in kept.items() if kind != missing for path in paths]


def half_the_ranks(kept: TracesByKind, rng: np.random.Generator) -> tuple[str, list[Path]]:
    """Of dumps and profiles those of half of the ranks, drawn; all others."""
    left: list[Path] = []
    for kind, paths in kept.items():
        order = rng.permutation(len(paths)).tolist()
        left += [paths[i] for i in sorted(order[: max(1, len(paths) // 2)])] if kind in PER_RANK else paths
    return "half the ranks", left


CASES: tuple[Callable[[TracesByKind, np.random.Generator], tuple[str, list[Path]]], ...] = (
    complete,
    one_kind_missing,
    half_the_ranks,
)


def diagnosed(seed: int, difficulty: str) -> Iterator[DiagnosedIncident]:
    """One incident, diagnosed with all files and with some of them."""
    exam = planted(seed, difficulty)
    with tempfile.TemporaryDirectory() as folder:
        kept = write_traces(exam, Path(folder))
        rng = np.random.default_rng([seed, 11])
        formats = {path: FORMAT_OF[kind] for kind, paths in kept.items() for path in paths}
        known: dict[tuple[Path, ...], Any] = {}
        for case in CASES:
            files, paths = case(kept, rng)
            answer = judged(read_files(paths, formats, known))
            first = answer.suspects[0]
            given = ExamAnswer(first.kind, first.rank, first.host, first.port)
            detected = _detected(exam, kept.get("watchdog", []))
            right = answer_of(exam)
            yield DiagnosedIncident(seed, files, right, given, first.confidence, answer.confident, detected)


_CLOCK = re.compile(r"\[E\d{4} (\d\d):(\d\d):(\d\d\.\d+)")


def _detected(exam: PlantedIncident, paths: list[Path]) -> float | None:
    """The watchdog's log beside the played alarms: when each says that a collective timed out."""
    alarms = [] if exam.hang is None else exam.hang.alarms
    played = [alarm.at for alarm in alarms if alarm.watchdog == "c10d watchdog" and alarm.at is not None]
    lines = [line for path in paths for line in path.read_text().splitlines() if "operation timeout" in line]
    clocks = [_CLOCK.search(line) for line in lines]
    if not played or not lines or not all(clocks):
        return None
    spoken = min(3600 * int(c[1]) + 60 * int(c[2]) + float(c[3]) for c in clocks if c is not None)
    return abs((spoken - (ORIGIN + min(played))) % 86400.0 + 43200.0) % 86400.0 - 43200.0


def shares(rows: list[DiagnosedIncident]) -> list[IncidentShare]:
    """Shares for each set of files."""
    answers = []
    for files in dict.fromkeys(row.files for row in rows):
        own = [row for row in rows if row.files == files]
        wrong = sum(row.confident and row.is_wrong for row in own)
        counts = (
            sum(row.is_right for row in own),
            sum(row.cause_right for row in own),
            sum(row.confident for row in own),
            wrong,
        )
        answers.append(IncidentShare(files, len(own), *(count / len(own) for count in counts)))
    return answers


def mistaken(rows: list[DiagnosedIncident]) -> list[tuple[str, str, str, int]]:
    """(files, right kind, given kind, how often) of what was wrong, the most frequent first."""
    wrong = Counter((row.files, row.right.kind, row.given.kind) for row in rows if not row.is_right)
    return [(*key, count) for key, count in wrong.most_common()]


def kind_shares(rows: list[DiagnosedIncident]) -> list[tuple[str, int, list[float]]]:
    """(kind, incidents, share right with each set of files) of each kind that was planted."""
    sets = list(dict.fromkeys(row.files for row in rows))
    answers = []
    for kind in sorted({row.right.kind for row in rows}):
        own = [row for row in rows if row.right.kind == kind]
        count = len(own) // len(sets)
        answers.append((kind, count, [sum(row.is_right for row in own if row.files == f) / count for f in sets]))
    return answers


def unlike_without_incidents() -> tuple[int, int]:
    """(shipped scenarios whose inputs an empty list of incidents changes, scenarios)."""
    names = scenarios.names()
    unlike = 0
    for name in names:
        scenario = scenarios.load(name)
        unlike += (
            msgspec.json.encode(scenario.inputs()) != msgspec.json.encode(scenario.changed({"incident": []}).inputs())
            or "incident" in scenario.inputs()
        )
    return unlike, len(names)
