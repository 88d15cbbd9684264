"""Runs side by side: where a step's time goes in each, a bar a run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clustersim.analysis.per_step import per_step
from clustersim.errors import ProgramError
from clustersim.plots.drawing import Axes, Figure, drawn_on, legend_below, titled
from clustersim.plots.shares import alt, stack
from clustersim.timeline import Timeline


def breakdowns(timelines: Mapping[str, Timeline], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Seconds of a step in each state, a bar for each run, mean over the ranks that train.

    Parameters
    ----------
    timelines : by what to call each run. ax : drawn on instead of a new figure.

    Raises :class:`ProgramError` for no runs.
    """
    tables = {name: per_step(timeline) for name, timeline in timelines.items()}
    if not tables:
        raise ProgramError("nothing to draw: no runs")
    states = list(next(iter(tables.values())))
    bars = {name: np.array([table[state] for state in states]) for name, table in tables.items()}
    figure, axes = drawn_on(ax, 0.42 * len(bars) + (1.35 if title else 1.0))
    stack(axes, bars, states)
    legend_below(figure, ax, axes, ncols=len(states), handlelength=1.4, columnspacing=1.2)
    return titled(figure, title, alt(states, bars), ax)
