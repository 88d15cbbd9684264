"""Which of several settings a new scenario gets: the first whose memory is likely enough."""

from __future__ import annotations

import itertools
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from clustersim.core.errors import ScenarioError
from clustersim.core.memory_states import UNLIKELY

if TYPE_CHECKING:
    from clustersim.app.cli.drafts import RecipeText
    from clustersim.core.memory_use import Verdict


class RoomChoice(NamedTuple):
    """A scenario's text, whether it fits (None where its degrees do not divide the machine), and why it was taken."""

    text: str
    verdict: Verdict | None
    why: str = ""


def with_room(texts: Iterable[RecipeText], file: Path, reserve: Iterable[RecipeText] = ()) -> RoomChoice:
    """The first of ``texts`` (the fastest first) that runs out less likely than :data:`UNLIKELY`.

    Where none does, the first of the ``reserve``, which is far slower; and where that has none either, the one that
    runs out least likely, of equals the last, which keeps least. ``file`` : what paths in them are relative to.
    """
    best = RoomChoice("", None)
    refused = Counter[str]()
    for recipe, text in itertools.chain(texts, reserve):
        verdict = _verdict_of_text(text, file)
        if verdict is None:
            best = best if best.verdict else RoomChoice(text, None)
        elif verdict.runs_out < UNLIKELY:
            return RoomChoice(text, verdict, _why_written(recipe, refused))
        else:
            refused[recipe] += 1
            if best.verdict is None or verdict.runs_out <= best.verdict.runs_out:
                best = RoomChoice(text, verdict)
    why = f"written: of {', '.join(refused)}'s settings the likeliest to fit; none runs out less often than"
    return best._replace(why=f"{why} {UNLIKELY:.0%}")


def _why_written(recipe: str, refused: Mapping[str, int]) -> str:
    """Why a recipe's setting is written; ``refused`` : how many of each recipe's were looked at before, and run out."""
    which = f"the first of {recipe}'s settings, mostly the faster first, that runs out of memory less often than"
    before = ", ".join(f"{count} of {name}'s" for name, count in refused.items())
    return f"written: {which} {UNLIKELY:.0%}" + (f"; likelier to, and so left out: {before}" if before else "")


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
