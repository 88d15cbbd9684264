"""Where a step's time goes, as one short list: for a table, or to put runs side by side."""

from __future__ import annotations

from clustersim.core.timeline import Timeline
from clustersim.explain.breakdown import breakdown
from clustersim.explain.pieces import workers


def per_step(timeline: Timeline) -> dict[str, float]:
    """Seconds of a steady step in each state, mean over the ranks that train.

    The states are those of :func:`clustersim.explain.breakdown.breakdown`; they add up to the step time.
    """
    table = breakdown(timeline)
    mean = table.seconds[workers(timeline)].mean(axis=0)
    return dict(zip(table.states, mean.tolist(), strict=True))
