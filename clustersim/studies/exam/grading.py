"""Anybody's answer beside the sealed one: a person's, another tool's, or what ``clustersim diagnose --json`` says."""

from __future__ import annotations

from pathlib import Path

import msgspec

from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.texts import Plain, decoded, shown
from clustersim.scenario.file.incident_table import KINDS
from clustersim.studies.exam.sealing import ExamAnswer

MOST = 2
"""Points of a whole answer: one for the cause, one for the place."""


class _GivenAnswer(msgspec.Struct):
    """An answer as a person writes it, or as ``diagnose --json`` does."""

    kind: str | None = None
    rank: int | None = None
    host: str | None = None
    port: str | None = None
    suspects: list[ExamAnswer] = []


class ExamGrade(msgspec.Struct, frozen=True):
    """Whether ``cause`` and ``place`` are right, and what would have been."""

    cause: bool
    place: bool
    given: ExamAnswer
    right: ExamAnswer

    @property
    def is_right(self) -> bool:
        """Cause and place."""
        return self.cause and self.place

    @property
    def points(self) -> int:
        """Of :data:`MOST`."""
        return int(self.cause) + int(self.place)

    def to_dict(self) -> Plain:
        """Plain values."""
        return {"points": self.points, "of": MOST, **msgspec.to_builtins(self)}


def given_answer(path: Path) -> ExamAnswer:
    """The answer in a file; of ``diagnose --json`` its first suspect. Raises :class:`ClusterSimError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ClusterSimError(f"{path}: cannot be read: {error.strerror}") from None
    answer_given = decoded(data, _GivenAnswer, f"{path}: is no answer in JSON", ClusterSimError)
    answer = (
        answer_given.suspects[0]
        if answer_given.suspects
        else ExamAnswer(answer_given.kind or "", answer_given.rank, answer_given.host, answer_given.port)
    )
    if answer.kind not in KINDS and answer.kind != "nothing":
        raise ClusterSimError(f"{path}: no kind {shown(answer.kind)}; {nearest(answer.kind, KINDS)} (at $.kind)")
    return answer


def graded(given: ExamAnswer, right: ExamAnswer) -> ExamGrade:
    """One answer beside the right one."""
    is_other = right.other is not None and given.place == (None, None, right.other)
    return ExamGrade(given.kind == right.kind, given.place == right.place or is_other, given, right)
