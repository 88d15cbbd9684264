"""Curves over the number of GPUs, or over any other knob."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError
from clustersim.plots.drawing import Axes, Figure, new_figure, percents, plain_axes, titled
from clustersim.plots.style import FAINT, INK, QUIET, curve_styles


def scaling(
    curves: Mapping[str, tuple[npt.ArrayLike, npt.ArrayLike]],
    *,
    title: str | None = None,
    unit: str = "samples/s",
    ideal: bool = True,
) -> Figure:
    """Throughput over GPUs, and beside it the efficiency: throughput per GPU over that of the smallest run.

    Parameters
    ----------
    curves : by name (number of GPUs, throughput), each (n,).
    unit : of the throughput. ideal : draw what perfect scaling of the first curve would reach.

    Raises :class:`ProgramError` for no curves, or a point without GPUs or throughput.
    """
    points = {name: _points(name, *curve) for name, curve in curves.items()}
    if not points:
        raise ProgramError("nothing to draw: no curves")
    figure = new_figure(3.5)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1.0])
    first_n, first_rate = next(iter(points.values()))
    if ideal:
        most = max(float(n.max()) for n, _ in points.values())
        n = np.array([first_n[0], most])
        left.plot(n, first_rate[0] * n / first_n[0], color=QUIET, lw=1.2, ls=(0, (4, 3)), zorder=1)
        left.annotate(
            "ideal", (n[-1], first_rate[0] * n[-1] / n[0]), xytext=(-4, 2), textcoords="offset points", fontsize=8.5,
            color=QUIET, ha="right",
        )  # fmt: skip
    styles = curve_styles(points)
    for name, (n, rate) in points.items():
        styles[name].draw(left, n, rate, name)
        styles[name].draw(right, n, rate / n / (rate[0] / n[0]))
    ticks = sorted({int(v) for n, _ in points.values() for v in n})
    _axes(left, unit, ticks, logarithmic=True)
    _axes(right, "efficiency", ticks, logarithmic=False)
    figure.legend(loc="outside lower center", ncols=min(len(points), 4), frameon=False, fontsize=8.5, handlelength=3.4)
    said = (
        f"{name}: {n[0]:,.0f} to {n[-1]:,.0f} GPUs, {rate[0]:,.4g} to {rate[-1]:,.4g} {unit}, "
        f"{rate[-1] / n[-1] / (rate[0] / n[0]):.0%} efficient at the largest"
        for name, (n, rate) in points.items()
    )
    return titled(figure, title, f"Scaling curves. {'; '.join(said)}.")


def _points(name: str, n: npt.ArrayLike, rate: npt.ArrayLike) -> tuple[Any, Any]:
    x, y = np.asarray(n, dtype=np.float64), np.asarray(rate, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or not len(x) or not (x > 0).all() or not (y > 0).all():
        raise ProgramError(f"curve {name!r} needs as many throughputs as numbers of GPUs, all above zero")
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _axes(axes: Axes, label: str, ticks: Sequence[int], *, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    plain_axes(axes, ("bottom", "left"))
    axes.set_xscale("log", base=2)
    axes.set_xlabel("GPUs", fontsize=9)
    axes.set_title(label, loc="left", fontsize=9.5, color=INK)
    axes.grid(axis="y", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    if logarithmic:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}" if v >= 1 else f"{v:g}"))
    else:
        axes.set_ylim(0.0, max(1.05, axes.get_ylim()[1]))
        percents(axes.yaxis)
    shown = ticks if len(ticks) <= 8 else ticks[:: -(-len(ticks) // 8)]
    axes.set_xticks(shown, [f"{t:,}" for t in shown])
    axes.minorticks_off()
