"""Curves of a sweep: throughput over GPUs, or step time over one axis, a curve for each combination of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    columns_of,
    drawn_on,
    is_narrow,
    new_figure,
    only_one,
    percents,
    plain_axes,
    titled,
)
from clustersim.app.plots.style import FAINT, INK, QUIET, curve_styles, series
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ClusterSimError, ProgramError

MOST_CURVES = 8
"""More cannot be told apart."""

Columns = Mapping[str, npt.NDArray[Any]]


def sweep_curves(columns: Columns, axes: Sequence[str], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Throughput of a sweep over GPUs, where their number varies, else step time over the longest axis of numbers.

    Parameters
    ----------
    columns : of :func:`clustersim.studies.sweep.read`. axes : which of them are axes.
    ax : drawn on instead of a new figure, where no axis of the sweep has an order: curves are of two axes.

    Rows with an error are left out. Raises :class:`ClusterSimError` where nothing is left, or where the other axes make
    more than :data:`MOST_CURVES` curves.
    """
    good = columns["error"] == "" if "error" in columns else np.zeros(0, dtype=bool)
    if not good.any():
        raise ClusterSimError("nothing to draw: no row of this sweep has a result")
    table = {name: column[good] for name, column in columns.items()}
    counts = {name: len(np.unique(table[name])) for name in axes}
    numbers = [name for name in axes if np.issubdtype(table[name].dtype, np.number) and counts[name] > 1]
    if not numbers and len(np.unique(table["gpus"])) == 1:
        return _bars(table, [name for name in axes if counts[name] > 1] or list(axes[:1]), title, ax)
    only_one(ax, "a sweep over numbers")
    if len(np.unique(table["gpus"])) > 1:
        other_axes = [name for name in axes if counts[name] > 1 and not _one_to_one(table, name)]
        unit = "samples" if np.isnan(table["tokens_per_s"]).any() else "tokens"
        groups = _groups(table, other_axes).items()
        curves = {label: (table["gpus"][rows], table[f"{unit}_per_s"][rows]) for label, rows in groups}
        return scaling(curves, title=title, unit=f"{unit}/s")
    x = max(numbers, key=lambda name: counts[name])
    return _over(table, x, [name for name in axes if name != x and counts[name] > 1], title)


def _one_to_one(table: Columns, name: str) -> bool:
    """Whether an axis is the number of GPUs by another name."""
    pairs = set(zip(table[name].tolist(), table["gpus"].tolist(), strict=True))
    return len(pairs) == len(np.unique(table[name])) == len(np.unique(table["gpus"]))


def _groups(table: Columns, names: Sequence[str]) -> dict[str, Ints]:
    """Rows of each combination of these columns, by what to call it, in the order they appear."""
    groups: dict[str, list[int]] = {}
    for i in range(len(table["gpus"])):
        label = ", ".join(_said(name, table[name][i]) for name in names) or "all"
        groups.setdefault(label, []).append(i)
    if len(groups) > MOST_CURVES:
        raise ClusterSimError(
            f"{len(groups)} curves ({', '.join(names)}) cannot be told apart; at most {MOST_CURVES}: "
            "fix an axis of the sweep, or take the table"
        )
    return {name: np.array(rows, dtype=np.int64) for name, rows in groups.items()}


def _said(name: str, value: Any) -> str:
    return str(value) if isinstance(value, str) else f"{name.rsplit('.', 1)[-1].replace('_', ' ')} {value:g}"


def _over(table: Columns, x: str, other_axes: Sequence[str], title: str | None) -> Figure:
    figure = new_figure(3.5)
    if is_narrow(figure):  # one below the other, as beside each other titles are cut
        figure.set_figheight(6.0)
    left, right = figure.subplots(2, 1) if is_narrow(figure) else figure.subplots(1, 2)
    captions = []
    groups = _groups(table, other_axes)
    styles = curve_styles(groups)
    for label, rows in groups.items():
        rows = rows[np.argsort(table[x][rows], kind="stable")]
        step = table["step_time_s"][rows]
        share = table["share_exposed_communication"][rows]
        styles[label].draw(left, table[x][rows], step, label)
        styles[label].draw(right, table[x][rows], share)
        captions.append(f"{label}: step {step[0]:.4g} s to {step[-1]:.4g} s, exposed {share[0]:.1%} to {share[-1]:.1%}")
    for axis, name in ((left, "step time [s]"), (right, "exposed communication, of the step")):
        _dressed(axis, name, x)
        axis.set_ylim(0.0, max(axis.get_ylim()[1], 0.05) if axis is right else axis.get_ylim()[1] * 1.05)
    percents(right.yaxis)
    if captions[0].split(":")[0] != "all":
        figure.legend(
            loc="outside lower center",
            ncols=min(len(captions), columns_of(figure, 4)),
            frameon=False,
            fontsize=8.5,
            handlelength=3.2,
        )
    return titled(figure, title, f"Curves over {x}. " + "; ".join(captions) + ".")


def _bars(table: Columns, names: Sequence[str], title: str | None, ax: Axes | None) -> Figure:
    step = table["step_time_s"]
    labels = [", ".join(_said(name, table[name][i]) for name in names) for i in range(len(step))]
    if len(labels) > 4 * MOST_CURVES:
        raise ClusterSimError(f"{len(labels)} bars are too many for a picture; take the table")
    figure, axes = drawn_on(ax, 0.8 + 0.3 * len(labels))
    axes.barh(labels[::-1], step[::-1], color=series[0], height=0.6)
    plain_axes(axes, ("left",))
    axes.set_title("step time [s]", loc="left", fontsize=9.5, color=INK)
    for i, value in enumerate(step[::-1].tolist()):
        axes.annotate(f" {value:.4g}", (value, i), va="center", fontsize=8.5)
    alt = "; ".join(f"{name}: {value:.4g} s" for name, value in zip(labels, step.tolist(), strict=True))
    return titled(figure, title, f"Step times. {alt}.", ax)


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
    if is_narrow(figure):  # one above the other
        figure.set_figheight(6.0)
        left, right = figure.subplots(2, 1)
    else:
        left, right = figure.subplots(1, 2, width_ratios=[1.25, 1.0])
    if ideal:
        _draw_ideal(left, list(points.values()))
    styles = curve_styles(points)
    for name, (n, rate) in points.items():
        styles[name].draw(left, n, rate, name)
        styles[name].draw(right, n, rate / n / (rate[0] / n[0]))
    ticks = sorted({int(v) for n, _ in points.values() for v in n})
    _axes(left, unit, ticks, logarithmic=True)
    _axes(right, "efficiency", ticks, logarithmic=False)
    figure.legend(
        loc="outside lower center",
        ncols=min(len(points), 2 if is_narrow(figure) else 4),
        frameon=False,
        fontsize=8.5,
        handlelength=3.4,
    )
    captions = (
        f"{name}: {n[0]:,.0f} to {n[-1]:,.0f} GPUs, {rate[0]:,.4g} to {rate[-1]:,.4g} {unit}, "
        f"{rate[-1] / n[-1] / (rate[0] / n[0]):.0%} efficient at the largest"
        for name, (n, rate) in points.items()
    )
    return titled(figure, title, f"Scaling curves. {'; '.join(captions)}.")


def _draw_ideal(axes: Axes, curves: Sequence[tuple[Floats, Floats]]) -> None:
    """What perfect scaling of the first of (number of GPUs, throughput) would reach."""
    first_n, first_rate = curves[0]
    most = max(float(n.max()) for n, _ in curves)
    n = np.array([first_n[0], most])
    axes.plot(n, first_rate[0] * n / first_n[0], color=QUIET, lw=1.2, ls=(0, (4, 3)), zorder=1)
    axes.annotate(
        "ideal",
        (n[-1], first_rate[0] * n[-1] / n[0]),
        xytext=(-4, 2),
        textcoords="offset points",
        fontsize=8.5,
        color=QUIET,
        ha="right",
    )


def _dressed(axes: Axes, heading: str, x: str) -> None:
    plain_axes(axes, ("bottom", "left"))
    axes.set_title(heading, loc="left", fontsize=9.5, color=INK)
    axes.set_xlabel(x, fontsize=9)
    axes.grid(axis="y", color=FAINT, lw=0.7)


def _points(name: str, n: npt.ArrayLike, rate: npt.ArrayLike) -> tuple[Any, Any]:
    x = np.asarray(n, dtype=np.float64)
    y = np.asarray(rate, dtype=np.float64)
    if x.ndim != 1 or x.shape != y.shape or not len(x) or not (x > 0).all() or not (y > 0).all():
        raise ProgramError(f"curve {name!r} needs as many throughputs as numbers of GPUs, all above zero")
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _axes(axes: Axes, label: str, ticks: Sequence[int], *, logarithmic: bool) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    _dressed(axes, label, "GPUs")
    axes.set_xscale("log", base=2)
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
