"""Options of a plan or a sweep by speed and cost, or by days and money, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.app.plots.style import FAINT, INK, MARKERS, QUIET, palette, series
from clustersim.core.errors import ClusterSimError, ProgramError

if TYPE_CHECKING:
    from clustersim.studies.plan.rows import PlanAnswer, PlanRow

MOST_FAMILIES = 7
"""More colours cannot be told apart: the rest is "other"."""
OTHER = "other"


@dataclass(frozen=True)
class FrontDot:
    """One option.

    Parameters
    ----------
    family : gives the colour. rate, cost : its place. label : written beside it where it is ``best``.
    tempting : it would be best if its prediction held; drawn hollow.
    error : relative, of rate and cost; a bar for the best and the tempting ones.
    """

    family: str
    label: str
    rate: float
    cost: float
    best: bool
    error: float = 0.0
    tempting: bool = False


def front(dots: Sequence[FrontDot], *, x: str, y: str, title: str | None = None, ax: Axes | None = None) -> Figure:
    """Cost over speed: right is faster, down is cheaper; those that no other beats are large and joined by a line.

    dots : (n,). x, y : what the axes hold.

    Raises :class:`ClusterSimError` for no dots.
    """
    if not dots:
        raise ClusterSimError("nothing to draw: no option was simulated")
    families = list(dict.fromkeys(one.family for one in sorted(dots, key=lambda one: (not one.best, -one.rate))))
    known = families if len(families) <= MOST_FAMILIES else families[: MOST_FAMILIES - 1]
    names = [*known, *([OTHER] if len(known) < len(families) else [])]
    figure, axes = drawn_on(ax, 4.2)
    best = sorted((one for one in dots if one.best), key=lambda one: one.rate)
    axes.plot([one.rate for one in best], [one.cost for one in best], color=QUIET, lw=1.2, zorder=1)
    for i, name in enumerate(names):
        mine = [one for one in dots if (one.family if one.family in known else OTHER) == name]
        _family(axes, mine, name, series[i % len(series)], MARKERS[i % len(MARKERS)])
    _named(axes, best)
    plain_axes(axes, ("bottom", "left"))
    axes.grid(color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, fontsize=10)
    axes.set_title(y, loc="left", fontsize=10, color=INK)
    axes.set_xlim(0.0, 1.08 * max(one.rate * (1 + one.error * (one.best or one.tempting)) for one in dots))
    axes.set_ylim(*_heights(dots))
    for side in (axes.xaxis, axes.yaxis):
        side.set_major_formatter(lambda v, _: f"{v:,.4g}" if abs(v) < 1e4 else f"{v:,.0f}")
    legend_below(figure, ax, axes, ncols=min(len(names), 3))
    said = "; ".join(f"{one.family}, {one.label}: {one.rate:,.4g} at {one.cost:,.4g}" for one in best)
    tempting = ", ".join(f"{one.family}, {one.label}" for one in dots if one.tempting)
    more = f" Hollow, better only if predictions hold: {tempting}." if tempting else ""
    return titled(figure, title, f"{y} over {x}. Not beaten by any other: {said}.{more}", ax)


def _family(axes: Axes, dots: Sequence[FrontDot], name: str, colour: str, marker: str) -> None:
    """Dots of one family: those that nobody beats, or that are tempting, are large; tempting ones hollow."""
    shown = any(one.best or one.tempting for one in dots)
    for large in (False, True):
        some = [one for one in dots if (one.best or one.tempting) == large]
        for hollow in (False, True):
            drawn = [one for one in some if one.tempting == hollow]
            axes.scatter(
                [one.rate for one in drawn],
                [one.cost for one in drawn],
                s=80 if large else 30,
                marker=marker,
                zorder=3 if large else 2,
                alpha=1.0 if large else 0.7,
                label=name if drawn and large == shown and (not hollow or len(drawn) == len(some)) else None,
                facecolors="white" if hollow else colour,
                edgecolors=colour if hollow else "white",
                lw=1.2 if hollow else 0.6,
            )
        if large:
            _errors(axes, some, colour)


def _errors(axes: Any, dots: Sequence[FrontDot], color: str) -> None:
    """Bars to where half of published steps lay within: a step that takes longer is slower and dearer by as much."""
    for one in dots:
        low = 1 / (1 + one.error)
        high = 1 + one.error
        axes.plot([one.rate * low, one.rate * high], [one.cost] * 2, color=color, lw=1.0, alpha=0.6, zorder=2)
        axes.plot([one.rate] * 2, [one.cost * low, one.cost * high], color=color, lw=1.0, alpha=0.6, zorder=2)


def _heights(dots: Sequence[FrontDot]) -> tuple[float, float]:
    """From a little below the cheapest to twice the dearest of the best: what lies above is no candidate."""
    cost = np.array([one.cost for one in dots])
    shown = [one for one in dots if one.best or one.tempting]
    top = min(float(cost.max()), 2.0 * max((one.cost for one in shown), default=float(cost.max())))
    top = max(top, *(one.cost * (1 + one.error) for one in shown), 0.0)
    low = min(float(cost.min()), *(one.cost / (1 + one.error) for one in shown), float(cost.max()))
    room = max(top - low, 0.1 * low)
    return max(0.0, low - 0.15 * room), top + 0.08 * room


def _named(axes: Any, best: Sequence[FrontDot]) -> None:
    """Labels above those that are not beaten, where one does not run into the one before."""
    span = max((one.rate for one in best), default=1.0)
    last = -np.inf
    for one in best:
        if one.rate - last < 0.06 * span:
            continue
        last = one.rate
        axes.annotate(
            one.label,
            (one.rate, one.cost),
            xytext=(9, -13),
            textcoords="offset points",
            ha="left",
            fontsize=8.5,
            color=INK,
            zorder=4,
        )


def tradeoff(
    said: PlanAnswer,
    *,
    deadline: float | None = None,
    budget: float | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Money against days for every option that was simulated; those on the front are full, and say how many GPUs.

    Parameters
    ----------
    said : a plan's answer, as :func:`clustersim.studies.plan.plan` returns it, of a plan with tokens and prices.
    deadline : [days]. budget : [USD]. Both are drawn as limits.

    Raises :class:`ProgramError` where no option has both a time and a price.
    """
    rows = [row for row in said.options if row.days is not None and row.usd is not None]
    if not rows:
        raise ProgramError("nothing to draw: no option has both days and a price; give the plan tokens and prices")
    front = {row.option for row in said.front}
    figure, axes = drawn_on(ax, 4.3)
    for i, machine in enumerate(dict.fromkeys(row.machine for row in rows)):
        marker = MARKERS[i % len(MARKERS)]
        colour = series[i % len(series)]
        mine = [row for row in rows if row.machine == machine]
        best = [row for row in mine if row.option in front]
        rest = [row for row in mine if row.option not in front]
        axes.scatter(*_places(rest), s=34, alpha=0.35, lw=0, marker=marker, color=colour)
        _best(axes, best, machine, marker, colour)
    _limits(axes, deadline, budget)
    plain_axes(axes, ("bottom", "left"))
    axes.tick_params(labelsize=10)
    axes.grid(axis="y", color=FAINT, lw=0.8)
    axes.set_axisbelow(True)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda v, _: f"{v:g}")
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:,.0f}")
    axes.set_ylim(0.0, 1.12 * max(_places(rows)[1]))
    axes.set_xlabel("days", fontsize=10.5)
    axes.set_title("USD; the number below a point is its GPUs", loc="left", fontsize=10.5, color=INK)
    legend_below(figure, ax, axes, ncols=4, fontsize=10)
    told = (f"{one.option}: {one.days:.2f} days, {one.usd:,.0f} USD" for one in said.front if one.days and one.usd)
    words = f"Cost against days of {len(rows)} options. On the front, fastest first: {'; '.join(told)}."
    return titled(figure, title, words, ax)


def _places(rows: Sequence[PlanRow]) -> tuple[list[float], list[float]]:
    """Days and USD."""
    return [row.days or 0.0 for row in rows], [row.usd or 0.0 for row in rows]


def _best(axes: Axes, rows: Sequence[PlanRow], machine: str, marker: str, colour: str) -> None:
    """Options of the front, and below each how many GPUs it has."""
    axes.scatter(*_places(rows), s=95, ec=INK, lw=0.9, zorder=3, marker=marker, color=colour, label=machine)
    for row in rows:
        axes.annotate(
            f"{row.gpus}",
            (row.days, row.usd),
            xytext=(0, -15),
            textcoords="offset points",
            ha="center",
            fontsize=9.5,
            color=INK,
        )


def _limits(axes: Axes, deadline: float | None, budget: float | None) -> None:
    colour = palette["stall"]
    dash = (0, (4, 2))
    if deadline is not None:
        axes.axvline(deadline, color=colour, lw=1.5, ls=dash, zorder=1)
        axes.text(
            deadline, 0.99, " deadline", transform=axes.get_xaxis_transform(), va="top", fontsize=9.5, color=QUIET
        )
    if budget is not None:
        axes.axhline(budget, color=colour, lw=1.5, ls=dash, zorder=1)
        axes.text(
            0.99,
            budget,
            "budget",
            transform=axes.get_yaxis_transform(),
            ha="right",
            va="bottom",
            fontsize=9.5,
            color=QUIET,
        )
