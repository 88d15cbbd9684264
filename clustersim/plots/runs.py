"""Runs side by side: where a step's time goes in each, a bar a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clustersim.analysis.per_step import per_step
from clustersim.errors import ProgramError
from clustersim.plots.shares import alt, stack
from clustersim.plots.style import new_figure, titled
from clustersim.timeline import Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def breakdowns(timelines: Mapping[str, Timeline], title: str | None = None) -> Figure:
    """Seconds of a step in each state, a bar for each run, mean over the ranks that train.

    Parameters
    ----------
    timelines : by what to call each run.

    Raises :class:`ProgramError` for no runs.
    """
    tables = {name: per_step(timeline) for name, timeline in timelines.items()}
    if not tables:
        raise ProgramError("nothing to draw: no runs")
    states = list(next(iter(tables.values())))
    bars = {name: np.array([table[state] for state in states]) for name, table in tables.items()}
    figure = new_figure(0.42 * len(bars) + (1.35 if title else 1.0))
    axes = figure.add_subplot()
    stack(axes, bars, states)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=8.5, handlelength=1.4,
        columnspacing=1.2,
    )  # fmt: skip
    return titled(figure, title, alt(states, bars))
