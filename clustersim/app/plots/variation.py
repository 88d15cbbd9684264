"""Steps that vary, as distributions: over steps, over machines, and with the slowest hosts swapped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import Figure, new_figure, plain_axes, titled
from clustersim.app.plots.style import INK, series
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_time

if TYPE_CHECKING:
    from clustersim.studies.what_if.spread import Distribution

BINS = 60


def distributions(spreads: Mapping[str, Distribution], still: float, title: str | None = None) -> Figure:
    """A row for each: how often steps take so much longer than one that does not vary, with p50, p95 and p99.

    spreads : by name. still : a step that does not vary [s].

    Raises :class:`ProgramError` for nothing to draw.
    """
    if not spreads:
        raise ProgramError("nothing to draw: no distribution")
    figure = new_figure(0.9 + 1.0 * len(spreads))
    every = {name: 100.0 * (np.array(spread.quantiles) / still - 1.0) for name, spread in spreads.items()}
    low = min(0.0, *(spread.min() for spread in every.values()))
    high = max(spread.max() for spread in every.values())
    edges = np.linspace(low, high if high > low else low + 1.0, BINS + 1)
    rows = figure.subplots(len(spreads), 1, sharex=True)
    for axes, (name, late), colour in zip(np.atleast_1d(rows), every.items(), series, strict=False):
        axes.hist(late, bins=edges.tolist(), color=colour, alpha=0.85)
        plain_axes(axes, ("bottom",))
        axes.set_yticks([])
        marks = {"p50": spreads[name].p50, "p95": spreads[name].p95, "p99": spreads[name].p99}
        axes.set_title(name, loc="left", fontsize=10, color=INK)
        marks_text = ", ".join(f"{mark} {format_time(value)}" for mark, value in marks.items())
        axes.set_title(marks_text, loc="right", fontsize=9.5, color=INK)
        for value, dashes in zip(marks.values(), ("-", "--", ":"), strict=True):
            axes.axvline(100.0 * (value / still - 1.0), color=INK, lw=1.2, ls=dashes)
    np.atleast_1d(rows)[-1].set_xlabel(
        f"longer than a step that does not vary, {format_time(still)} [%]; lines: p50, p95 (dashed), p99 (dotted)",
        fontsize=9,
    )
    caption = "; ".join(
        f"{name}: p50 {format_time(spread.p50)}, p95 {format_time(spread.p95)}, p99 {format_time(spread.p99)}"
        for name, spread in spreads.items()
    )
    return titled(figure, title, f"Step times, {caption}.")
