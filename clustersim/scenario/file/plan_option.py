"""The scenarios of a plan's answer: each option of its front, and each other that is told beside it and was run, keeps
the tables that it was simulated with.

Any command that takes a scenario takes one of these. To read one back needs nothing of the search that found it.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from clustersim.core.errors import ScenarioError
from clustersim.core.paths import RUN_FILE
from clustersim.core.texts import Table, decoded, short, text_of
from clustersim.scenario import Scenario, from_table
from clustersim.scenario.file.reading import Changes

FILE = "plan.json"
"""The answer, in the folder of a plan."""


class _PlanScenario(msgspec.Struct, frozen=True):
    scenario: Table
    path: str
    option: str = ""


class _OtherOption(msgspec.Struct, frozen=True):
    scenario: Table | msgspec.UnsetType = msgspec.UNSET
    path: str = ""
    option: str = ""


class _NumberedRows(msgspec.Struct, frozen=True):
    front: list[_PlanScenario]
    tempting: list[_OtherOption] = []
    alternatives: list[_OtherOption] = []


def option_of(folder: Path, place: int, changes: Changes | None = None) -> tuple[Scenario, str]:
    """The option of a plan's folder that has number ``place``, and its name: those of the front from 1, then the others
    that were run, in the order in which they are told.

    Raises :class:`ScenarioError` where there is none.
    """
    file = folder / FILE
    if not file.is_file():
        raise ScenarioError(_no_plan(folder))
    answer = decoded(text_of(file, ScenarioError), _NumberedRows, f"{file}: is damaged", ScenarioError)
    if not answer.front:
        raise ScenarioError(f"{file}: has no front; did any option fit?")
    others = [
        _PlanScenario(other.scenario, other.path, other.option)
        for other in (*answer.tempting, *answer.alternatives)
        if not isinstance(other.scenario, msgspec.UnsetType)
    ]
    rows = [*answer.front, *others]
    if place > len(rows):
        raise ScenarioError(
            f"{file}: there is no {place}: options 1 to {len(rows)} were run, the first {len(answer.front)} of them on "
            f"the front (at --option)"
        )
    row = rows[place - 1]
    return from_table(row.scenario, os.path.normpath(folder / row.path), changes), row.option


def _no_plan(folder: Path) -> str:
    """What to do with a folder that is no plan's."""
    shown = short(str(folder))
    if not (folder / RUN_FILE).is_file():
        return f"{shown}: a folder without {FILE}; name a scenario, or a folder that `clustersim plan --out` wrote"
    return (
        f"{shown}: holds a run that is over, where a scenario is needed: name the scenario that was run; "
        f"`clustersim explain {shown}` and `clustersim report {shown}` say what the run did, and the report what its "
        "memory holds"
    )
