"""A plan's options: what each costs against how long it takes, and the front that no other option beats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustersim.errors import ProgramError
from clustersim.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.plots.style import FAINT, INK, MARKERS, QUIET, palette, series

if TYPE_CHECKING:
    from clustersim.planner.rows import Answer, Row


def tradeoff(
    said: Answer, *, deadline: float | None = None, budget: float | None = None, title: str | None = None,
    ax: Axes | None = None,
) -> Figure:  # fmt: skip
    """Money against days for every option that was simulated; those on the front are full, and say how many GPUs.

    Parameters
    ----------
    said : a plan's answer, as :func:`clustersim.planner.plan` returns it, of a plan with tokens and prices.
    deadline : [days]. budget : [USD]. Both are drawn as limits.

    Raises :class:`ProgramError` where no option has both a time and a price.
    """
    rows = [row for row in said.options if row.days is not None and row.usd is not None]
    if not rows:
        raise ProgramError("nothing to draw: no option has both days and a price; give the plan tokens and prices")
    front = {row.option for row in said.front}
    figure, axes = drawn_on(ax, 4.3)
    for i, machine in enumerate(dict.fromkeys(row.machine for row in rows)):
        marker, colour = MARKERS[i % len(MARKERS)], series[i % len(series)]
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


def _places(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    """Days and USD."""
    return [row.days or 0.0 for row in rows], [row.usd or 0.0 for row in rows]


def _best(axes: Axes, rows: Sequence[Row], machine: str, marker: str, colour: str) -> None:
    """Options of the front, and below each how many GPUs it has."""
    axes.scatter(*_places(rows), s=95, ec=INK, lw=0.9, zorder=3, marker=marker, color=colour, label=machine)
    for row in rows:
        axes.annotate(
            f"{row.gpus}", (row.days, row.usd), xytext=(0, -15), textcoords="offset points", ha="center",
            fontsize=9.5, color=INK,
        )  # fmt: skip


def _limits(axes: Axes, deadline: float | None, budget: float | None) -> None:
    colour, dash = palette["stall"], (0, (4, 2))
    if deadline is not None:
        axes.axvline(deadline, color=colour, lw=1.5, ls=dash, zorder=1)
        axes.text(
            deadline, 0.99, " deadline", transform=axes.get_xaxis_transform(), va="top", fontsize=9.5, color=QUIET
        )
    if budget is not None:
        axes.axhline(budget, color=colour, lw=1.5, ls=dash, zorder=1)
        axes.text(
            0.99, budget, "budget", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=9.5,
            color=QUIET,
        )  # fmt: skip
