"""What each change of a scenario did: how much longer or shorter a step is, or why it is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from clustersim.analysis.breakdown import breakdown
from clustersim.timeline import Timeline
from clustersim.tomls import plainly
from clustersim.units import format_time

if TYPE_CHECKING:
    from clustersim.scenario import Scenario

SAME = 1e-9
"""Step times this close, relatively, are the same."""
HIDDEN = 0.002
"""Below this share of the step, communication is hidden."""


def each_change(scenario: Scenario, timeline: Timeline) -> tuple[list[str], list[str]]:
    """A sentence for each change of a scenario, by a run without it: of those that matter, and of those without which
    the steps take just as long."""
    from clustersim.scenario import load

    now, did, said = breakdown(timeline), [], []
    took, exposed = now.step_time_s, float(np.mean(now.exposed_fraction))
    for key, value in scenario.changes.items():
        rest = {k: v for k, v in scenario.changes.items() if k != key}
        other = load(scenario.path, rest)
        if _says(other) == _says(scenario):
            said.append(f"{key}={plainly(value)} changed nothing: it is what the scenario says anyway")
            continue
        without = breakdown(other.run().timeline).step_time_s
        if abs(without - took) <= SAME * took:
            said.append(f"{key}={plainly(value)} changed nothing: {_why(key, timeline, exposed)}")
        else:
            change = f"{abs(1 - without / took):.1%} {'less' if without < took else 'more'}"
            did.append(f"without {key}={plainly(value)} a step takes {format_time(without)}, {change} (run again)")
    return did, said


def _says(scenario: Scenario) -> tuple[object, ...]:
    """Everything a run depends on, defaults filled in."""
    file = scenario.file
    return file.cluster, file.model, file.run, file.strategy["kind"], scenario.config


def _why(key: str, timeline: Timeline, exposed: float) -> str:
    talks = any(op.kind != "compute" for op in timeline.ops)
    about = key.split(".")[0]
    if about in {"cluster", "strategy"} and not talks:
        return "this run has no communication"
    if about in {"cluster", "strategy"} and exposed < HIDDEN:
        return f"communication is hidden behind compute ({exposed:.2%} of the step is exposed)"
    return "no step of this run depends on it"
