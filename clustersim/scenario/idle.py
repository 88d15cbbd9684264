"""Knobs that were turned and changed nothing, and why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.analysis.breakdown import breakdown
from clustersim.timeline import Timeline
from clustersim.tomls import plainly

if TYPE_CHECKING:
    from clustersim.scenario import Scenario

SAME = 1e-9
"""Step times this close, relatively, are the same."""
HIDDEN = 0.002
"""Below this share of the step, communication is hidden."""


def idle_knobs(scenario: Scenario, timeline: Timeline) -> list[str]:
    """One sentence for each change of a scenario without which the steps take just as long.

    Runs the scenario once more for every change, without it.
    """
    from clustersim.scenario import load

    now, said = breakdown(timeline), []
    for key, value in scenario.changes.items():
        rest = {k: v for k, v in scenario.changes.items() if k != key}
        other = load(scenario.path, rest)
        if _says(other) == _says(scenario):
            said.append(f"{key}={plainly(value)} changed nothing: it is what the scenario says anyway")
            continue
        before = breakdown(other.run().timeline)
        if abs(before["step_time_s"] - now["step_time_s"]) <= SAME * now["step_time_s"]:
            said.append(f"{key}={plainly(value)} changed nothing: {_why(key, timeline, now)}")
    return said


def _says(scenario: Scenario) -> tuple[object, ...]:
    """Everything a run depends on, defaults filled in."""
    file = scenario.file
    return file.cluster, file.model, file.run, file.strategy["kind"], scenario.config


def _why(key: str, timeline: Timeline, table: dict[str, Any]) -> str:
    talks = any(op.kind != "compute" for op in timeline.ops)
    exposed = float(np.mean(table["exposed_fraction"]))
    about = key.split(".")[0]
    if about in {"cluster", "strategy"} and not talks:
        return "this run has no communication"
    if about in {"cluster", "strategy"} and exposed < HIDDEN:
        return f"communication is hidden behind compute ({exposed:.2%} of the step is exposed)"
    return "no step of this run depends on it"
