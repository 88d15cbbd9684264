"""Which of several settings a new scenario gets: the first whose memory is likely enough."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clustersim.core.errors import ScenarioError
from clustersim.core.memory_states import UNLIKELY

if TYPE_CHECKING:
    from clustersim.core.memory_use import Verdict


class RoomChoice(NamedTuple):
    """A scenario's text, whether it fits (None where its degrees do not divide the machine), and why it was taken."""

    text: str
    verdict: Verdict | None
    why: str = ""


def with_room(texts: Iterable[str], file: Path, reserve: Iterable[str] = ()) -> RoomChoice:
    """The first of ``texts`` (the fastest first) that runs out less likely than :data:`UNLIKELY`.

    Where none does, the first of the ``reserve``, which is far slower; and where that has none either, the one that
    runs out least likely, of equals the last, which keeps least. ``file`` : what paths in them are relative to.
    """
    best = RoomChoice("", None)
    for tried, text in enumerate(itertools.chain(texts, reserve), 1):
        verdict = _verdict_of_text(text, file)
        if verdict is None:
            best = best if best.verdict else RoomChoice(text, None)
        elif verdict.runs_out < UNLIKELY:
            which = (
                "of its recipe's settings, those mostly faster first, the first that runs out of memory less often than"
            )
            before = f"; the {tried - 1} before it would more often" if tried > 1 else ""
            return RoomChoice(text, verdict, f"written: {which} {UNLIKELY:.0%}{before}")
        elif best.verdict is None or verdict.runs_out <= best.verdict.runs_out:
            best = RoomChoice(text, verdict)
    why = f"written: of its recipe's settings the likeliest to fit; none runs out less often than {UNLIKELY:.0%}"
    return best._replace(why=why)


def _verdict_of_text(text: str, file: Path) -> Verdict | None:
    """Whether GPU and host have the memory that a scenario of this text, in this file, needs; None where its degrees do
    not divide the machine."""
    from clustersim.scenario import from_table
    from clustersim.scenario.run.held import held

    scenario = from_table(tomllib.loads(text), file)
    try:
        parts = held(scenario)
    except ScenarioError:
        return None
    return parts.verdict
