"""How far predictions are from measurements: every row on a diagonal, and the error of each part of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.drawing import Axes, Figure, new_figure, percents, plain_axes, titled
from clustersim.app.plots.style import FAINT, INK, MARKERS, QUIET, series
from clustersim.core.arrays import Bools, Floats
from clustersim.core.errors import ProgramError

MOST = 8
"""Parts that get a colour of their own; the rest share the last."""


def accuracy(
    measured: npt.ArrayLike,
    predicted: npt.ArrayLike,
    part: Sequence[str],
    *,
    title: str | None = None,
    unit: str = "s",
    part_name: str = "",
) -> Figure:
    """Predicted over measured on logarithmic axes with the line of identity, and beside it the error by part.

    Parameters
    ----------
    measured, predicted : (n,) float, above zero, in one ``unit`` of which axes show powers of ten.
    part : (n,) str, such as the size class or the platform of each row; parts with most rows get a colour first.
    part_name : what the parts are, for the axis.

    The right panel has, per part, a bar from the 10th to the 90th percentile of the signed relative error of its rows,
    thick between the quartiles, and a dot at the median.

    Raises :class:`ProgramError` without rows, or with values that are not above zero.
    """
    x = np.asarray(measured, dtype=np.float64)
    y = np.asarray(predicted, dtype=np.float64)
    if not len(x) or x.shape != y.shape or len(part) != len(x) or not ((x > 0) & (y > 0)).all():
        raise ProgramError("nothing to draw: an accuracy figure needs rows, each measured and predicted above zero")
    part_of = np.asarray(part)
    names = sorted(set(part_of.tolist()), key=lambda name: (-int((part_of == name).sum()), name))
    figure = new_figure(max(4.2, 1.6 + 0.27 * len(names)))
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.0])
    _diagonal(left, x, y, {name: part_of == name for name in names}, unit)
    _errors(right, {name: y[part_of == name] / x[part_of == name] - 1.0 for name in names}, part_name)
    error = np.abs(y / x - 1.0)
    caption = (
        f"Predicted against measured for {len(x):,} rows in {len(names)} parts ({', '.join(names[:6])}"
        f"{', ...' if len(names) > 6 else ''}): half of the rows are within {np.median(error):.1%}, nine in ten within "
        f"{np.percentile(error, 90):.0%}."
    )
    return titled(figure, title, caption)


def _diagonal(axes: Axes, x: Floats, y: Floats, parts: Mapping[str, Bools], unit: str) -> None:
    low = 0.7 * min(x.min(), y.min())
    high = 1.4 * max(x.max(), y.max())
    axes.fill_between([low, high], [0.8 * low, 0.8 * high], [1.25 * low, 1.25 * high], color=FAINT, alpha=0.55, lw=0)
    axes.plot([low, high], [low, high], color=QUIET, lw=1.0)
    for i, rows in enumerate(parts.values()):
        k = min(i, MOST - 1)
        axes.plot(x[rows], y[rows], ls="", marker=MARKERS[k], ms=3.2, color=series[k], alpha=0.55, mec="none", zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set_xlabel(f"measured [{unit}]", fontsize=9)
    axes.set_ylabel(f"predicted [{unit}]", fontsize=9)
    axes.set_title("each row; the band is from 20 % below to 25 % above", loc="left", fontsize=9.5, color=INK)
    plain_axes(axes, ("bottom", "left"))


def _errors(axes: Axes, errors: Mapping[str, Floats], part_name: str) -> None:
    for i, error in enumerate(errors.values()):
        k = min(i, MOST - 1)
        p10, q1, middle, q3, p90 = np.percentile(error, [10, 25, 50, 75, 90])
        axes.plot([p10, p90], [i, i], color=series[k], lw=1.4, solid_capstyle="butt")
        axes.plot([q1, q3], [i, i], color=series[k], lw=6.0, solid_capstyle="butt")
        axes.plot(middle, i, marker=MARKERS[k], ms=6, color="white", mec=INK, mew=1.2)
        axes.annotate(
            f"n = {len(error):,}",
            (1.0, i),
            xycoords=("axes fraction", "data"),
            xytext=(2, 0),
            textcoords="offset points",
            fontsize=8,
            color=QUIET,
            va="center",
        )
    axes.axvline(0.0, color=QUIET, lw=1.0, zorder=0)
    spread = np.concatenate([np.percentile(error, [10, 90]) for error in errors.values()])
    axes.set_xlim(max(-1.0, min(-0.25, 1.1 * spread.min())), min(1.5, max(0.25, 1.1 * spread.max())))
    axes.set_yticks(range(len(errors)), [name or "(none)" for name in errors])
    axes.set_ylim(len(errors) - 0.5, -0.5)
    percents(axes.xaxis)
    axes.set_xlabel("predicted over measured, less 1", fontsize=9)
    heading = f"error by {part_name}" if part_name else "error"
    axes.set_title(f"{heading}: median, quartiles, 10 to 90 %", loc="left", fontsize=9.5, color=INK)
    axes.grid(axis="x", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    plain_axes(axes)
