"""Curves named at their ends: how one figure grows with another, and what a formula says beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.app.plots.style import FAINT, INK, MARKERS, series, time_unit
from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_bandwidth, format_bytes, format_time

Curve: TypeAlias = tuple[npt.ArrayLike, npt.ArrayLike]
Points: TypeAlias = tuple[Floats, Floats]

GAP = 0.075
"""Least distance of two names, as a share of the height."""
MOST_TICKS = 9
LAW_DASHES: tuple[Any, ...] = ((0, (5, 4)), (0, (1, 2)), (0, (6, 2, 1, 2)))


class Axis(msgspec.Struct, frozen=True):
    """What an axis holds, in ``words``, and whether it is logarithmic. ``[s]``, ``[bytes]`` or ``[bytes/s]`` at the end
    is turned into a unit people use; ``[%]`` stays."""

    words: str
    log: bool = False

    def label(self, top: float) -> str:
        """The words with the unit people use for values up to ``top``."""
        if self.words.endswith("[s]"):
            return f"{self.words[:-3]}[{time_unit(top)[1]}]"
        if self.words.endswith("[bytes/s]"):
            return f"{self.words[:-9]}[GB/s]"
        return self.words.removesuffix("[bytes]").strip()

    def written(self, value: float, top: float) -> str:
        """A value as a tick of an axis up to ``top`` has it."""
        if self.words.endswith("[s]"):
            return f"{value * time_unit(top)[0]:,.4g}"
        if self.words.endswith("[bytes/s]"):
            return f"{value / 1e9:,.4g}"
        if self.words.endswith("[bytes]"):
            return format_bytes(value)
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:,.4g}"  # 16,384 GPUs, not 1.638e+04

    def told(self, value: float) -> str:
        """A value with its unit."""
        if self.words.endswith("[s]"):
            return format_time(value)
        if self.words.endswith("[bytes/s]"):
            return format_bandwidth(value)
        return f"{value:.4g} %" if self.words.endswith("[%]") else self.written(value, value)


def lines(
    curves: Mapping[str, Curve],
    *,
    x: str | Axis = "devices",
    y: str | Axis = "time [s]",
    laws: Mapping[str, Curve] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Curves over anything, each named where it ends.

    Parameters
    ----------
    curves : by name (x, y), each (n,). laws : the same, of formulas: thin and dashed.
    x, y : what the axes hold; words alone are those of an :class:`Axis` that is not logarithmic.

    Raises :class:`ProgramError` for no curves, points that do not pair, and values a logarithmic axis cannot show.
    """
    x, y = (Axis(axis) if isinstance(axis, str) else axis for axis in (x, y))
    points = {name: _points(name, curve, x, y) for name, curve in curves.items()}
    if not points:
        raise ProgramError("nothing to draw: no curves")
    figure, axes = drawn_on(ax, 3.9)
    for i, (name, curve) in enumerate((laws or {}).items()):
        dash = LAW_DASHES[i % len(LAW_DASHES)]
        axes.plot(*_points(name, curve, x, y), color=INK, lw=1.1, ls=dash, zorder=4, label=name)
    for i, (a, b) in enumerate(points.values()):
        colour = series[i % len(series)]
        marker = MARKERS[i % len(MARKERS)]
        axes.plot(a, b, color=colour, marker=marker, lw=2.2, ms=6.5, mec="white", zorder=3)
    _axes(axes, points, x, y)
    _names(axes, points, y)
    if laws:
        legend_below(figure, ax, axes, ncols=len(laws), fontsize=9.5)
    return titled(figure, title, _alt(points, x, y), ax)


def _points(name: str, curve: Curve, x: Axis, y: Axis) -> Points:
    a, b = (np.asarray(values, dtype=np.float64) for values in curve)
    if a.ndim != 1 or a.shape != b.shape or not len(a) or not (np.isfinite(a) & np.isfinite(b)).all():
        raise ProgramError(f"curve {name!r} needs as many values as places on its axis, all of them numbers")
    if (x.log and a.min() <= 0) or (y.log and b.min() <= 0):
        raise ProgramError(f"curve {name!r} has a value that is not above zero, on a logarithmic axis")
    order = np.argsort(a, kind="stable")
    return a[order], b[order]


def _axes(axes: Axes, points: Mapping[str, Points], x: Axis, y: Axis) -> None:
    plain_axes(axes, ("bottom", "left"))
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    if x.log:
        axes.set_xscale("log", base=2)
    if y.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0.0)
    every = np.unique(np.concatenate([a for a, _ in points.values()]))
    axes.set_xlim(*_margins(every, logarithmic=x.log))
    top = max(float(b.max()) for _, b in points.values())
    axes.set_xlabel(x.label(float(every.max())), fontsize=10.5)
    axes.set_title(y.label(top), loc="left", fontsize=10.5, color=INK)
    axes.yaxis.set_major_formatter(lambda v, _: y.written(v, top))
    shown = _far_enough(every, logarithmic=x.log)
    axes.set_xticks(shown, [x.written(v, float(every.max())) for v in shown])
    axes.minorticks_off()


def _margins(places: Floats, *, logarithmic: bool) -> tuple[float, float]:
    """Ends of the axis: a little room at the left, a quarter for names at the right."""
    low = float(places.min())
    high = float(places.max())
    if logarithmic:
        ratio = max(high / low, 2.0)
        return low / ratio**0.03, high * ratio**0.33
    room = (high - low) or 1.0
    return low - 0.03 * room, high + 0.33 * room


def _far_enough(places: Floats, *, logarithmic: bool) -> list[float]:
    """Places for ticks: all of them, without those that would run into the one before."""
    positions = np.log(places) if logarithmic else places
    least = (positions[-1] - positions[0]) / MOST_TICKS if len(positions) > 1 else 0.0
    shown = [len(positions) - 1]
    for i in range(len(positions) - 2, -1, -1):
        if positions[shown[-1]] - positions[i] >= least * 0.999:
            shown.append(i)
    return [float(place) for place in places[shown[::-1]]]


def _names(axes: Axes, points: Mapping[str, Points], y: Axis) -> None:
    """Each curve's name and last value, right of its end, names pushed apart where ends are near."""
    to_share = axes.transData + axes.transAxes.inverted()
    ends = {name: (float(a[-1]), float(b[-1])) for name, (a, b) in points.items()}
    share = {name: float(to_share.transform(end)[1]) for name, end in ends.items()}
    order = sorted(share, key=share.__getitem__)
    height = np.array([share[name] for name in order])
    spread = _apart(height)
    right = max(float(to_share.transform(end)[0]) for end in ends.values()) + 0.03
    colour = {name: series[i % len(series)] for i, name in enumerate(points)}
    for name, label_height in zip(order, spread.tolist(), strict=True):
        axes.annotate(
            f"{name}  {y.told(ends[name][1])}",
            ends[name],
            xytext=(right, label_height),
            textcoords="axes fraction",
            fontsize=10,
            color=INK,
            va="center",
            bbox={"fc": "white", "ec": "none", "pad": 1.5},
            arrowprops={
                "arrowstyle": "-",
                "color": colour[name],
                "lw": 1.4,
                "shrinkA": 0,
                "shrinkB": 5,
                "relpos": (0.0, 0.5),
            },
        )


def _apart(height: Floats) -> Floats:
    """Ascending heights moved as little as need be to be :data:`GAP` apart, none above the top."""
    spread = height.copy()
    for i in range(1, len(spread)):
        spread[i] = max(spread[i], spread[i - 1] + GAP)
    over = max(0.0, float(spread[-1]) - 1.0)
    spread[-1] -= over
    for i in range(len(spread) - 2, -1, -1):
        spread[i] = min(spread[i], spread[i + 1] - GAP)
    return spread


def _alt(points: Mapping[str, Points], x: Axis, y: Axis) -> str:
    ends_texts = [
        f"{name}: {y.told(b[0])} at {x.told(a[0])}, {y.told(b[-1])} at {x.told(a[-1])}"
        for name, (a, b) in points.items()
    ]
    subject, over = (axis.words.split(" [")[0] for axis in (y, x))
    return f"{subject[0].upper()}{subject[1:]} over {over}. " + "; ".join(ends_texts) + "."
