"""Options of a plan or a sweep by speed and cost, or by days and money, and which of them no other beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, is_narrow, legend_below, plain_axes, titled
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
    families = list(dict.fromkeys(dot.family for dot in sorted(dots, key=lambda dot: (not dot.best, -dot.rate))))
    named_families = families if len(families) <= MOST_FAMILIES else families[: MOST_FAMILIES - 1]
    names = [*named_families, *([OTHER] if len(named_families) < len(families) else [])]
    figure, axes = drawn_on(ax, 4.2)
    best = sorted((dot for dot in dots if dot.best), key=lambda dot: dot.rate)
    axes.plot([dot.rate for dot in best], [dot.cost for dot in best], color=QUIET, lw=1.2, zorder=1)
    axes.set_ylim(*_heights(dots))
    for i, name in enumerate(names):
        family_dots = [dot for dot in dots if (dot.family if dot.family in named_families else OTHER) == name]
        _family(axes, family_dots, name, series[i % len(series)], MARKERS[i % len(MARKERS)])
    _named(axes, best)
    plain_axes(axes, ("bottom", "left"))
    axes.grid(color=FAINT, lw=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(x, fontsize=10)
    if is_narrow(figure):
        axes.locator_params(axis="x", nbins=4)  # more numbers of six digits run into each other
    words = f"{y}; hollow: better only if its prediction holds" if any(dot.tempting for dot in dots) else y
    lines = wrap(words, 60) if is_narrow(figure) else [words]
    axes.set_title("\n".join(lines), loc="left", fontsize=10, color=INK)
    axes.set_xlim(0.0, 1.08 * max(dot.rate * (1 + dot.error * (dot.best or dot.tempting)) for dot in dots))
    above = sum(dot.cost > axes.get_ylim()[1] for dot in dots)
    if above:
        count_text = f"{above} dearer, not drawn"
        axes.text(0.99, 0.98, count_text, transform=axes.transAxes, ha="right", va="top", fontsize=8.5, color=QUIET)
    for side in (axes.xaxis, axes.yaxis):
        side.set_major_formatter(lambda v, _: f"{v:,.4g}" if abs(v) < 1e4 else f"{v:,.0f}")
    legend_below(figure, ax, axes, ncols=min(len(names), 3))
    caption = "; ".join(f"{dot.family}, {dot.label}: {dot.rate:,.4g} at {dot.cost:,.4g}" for dot in best)
    tempting = ", ".join(f"{dot.family}, {dot.label}" for dot in dots if dot.tempting)
    more = f" Hollow, better only if predictions hold: {tempting}." if tempting else ""
    return titled(figure, title, f"{y} over {x}. Not beaten by any other: {caption}.{more}", ax)


def _family(axes: Axes, dots: Sequence[FrontDot], name: str, colour: str, marker: str) -> None:
    """Dots of one family: those that nobody beats, or that are tempting, are large; tempting ones hollow."""
    top = axes.get_ylim()[1]
    dots = [dot for dot in dots if dot.cost <= top]
    shown = any(dot.best or dot.tempting for dot in dots)
    for large in (False, True):
        sized = [dot for dot in dots if (dot.best or dot.tempting) == large]
        for hollow in (False, True):
            drawn = [dot for dot in sized if dot.tempting == hollow]
            axes.scatter(
                [dot.rate for dot in drawn],
                [dot.cost for dot in drawn],
                s=80 if large else 30,
                marker=marker,
                zorder=3 if large else 2,
                alpha=1.0 if large else 0.7,
                label=name if drawn and large == shown and (not hollow or len(drawn) == len(sized)) else None,
                facecolors="white" if hollow else colour,
                edgecolors=colour if hollow else "white",
                lw=1.2 if hollow else 0.6,
            )
        if large:
            _errors(axes, sized, colour)


def _errors(axes: Any, dots: Sequence[FrontDot], color: str) -> None:
    """Bars to where half of published steps lay within: a step that takes longer is slower and dearer by as much."""
    for dot in dots:
        low = 1 / (1 + dot.error)
        high = 1 + dot.error
        axes.plot([dot.rate * low, dot.rate * high], [dot.cost] * 2, color=color, lw=1.0, alpha=0.6, zorder=2)
        axes.plot([dot.rate] * 2, [dot.cost * low, dot.cost * high], color=color, lw=1.0, alpha=0.6, zorder=2)


def _heights(dots: Sequence[FrontDot]) -> tuple[float, float]:
    """From a little below the cheapest to twice the dearest of the best: what lies above is no candidate."""
    cost = np.array([dot.cost for dot in dots])
    shown = [dot for dot in dots if dot.best or dot.tempting]
    top = min(float(cost.max()), 2.0 * max((dot.cost for dot in shown), default=float(cost.max())))
    top = max(top, *(dot.cost * (1 + dot.error) for dot in shown), 0.0)
    low = min(float(cost.min()), *(dot.cost / (1 + dot.error) for dot in shown), float(cost.max()))
    room = max(top - low, 0.1 * low)
    return max(0.0, low - 0.15 * room), top + 0.08 * room


def _named(axes: Any, best: Sequence[FrontDot]) -> None:
    """Labels above those that are not beaten, where one does not run into the one before."""
    span = max((dot.rate for dot in best), default=1.0)
    last = -np.inf
    for dot in best:
        if dot.rate - last < 0.06 * span:
            continue
        last = dot.rate
        axes.annotate(
            dot.label,
            (dot.rate, dot.cost),
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
        machine_rows = [row for row in rows if row.machine == machine]
        best = [row for row in machine_rows if row.option in front]
        rest = [row for row in machine_rows if row.option not in front]
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
    front_texts = (
        f"{row.option}: {row.days:.2f} days, {row.usd:,.0f} USD" for row in said.front if row.days and row.usd
    )
    caption = f"Cost against days of {len(rows)} options. On the front, fastest first: {'; '.join(front_texts)}."
    return titled(figure, title, caption, ax)


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
