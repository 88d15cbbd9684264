"""Where the time went: a bar for each group of ranks or each run, its parts adding up to the step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.app.plots.style import INK, NOT_RECORDED_AREA, AreaStyle, kernels, palette, series, time_unit
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.timeline import Timeline
from clustersim.explain.breakdown import NOT_RECORDED, Breakdown
from clustersim.explain.per_step import per_step
from clustersim.explain.pieces import KERNELS, servers, workers

STATE_STYLE: dict[str, AreaStyle] = {
    "compute-bound": AreaStyle(kernels["compute"], width=0.6),
    "memory-bound": AreaStyle(kernels["memory"], width=0.6),
    "launch-bound": AreaStyle(kernels["launch"], width=0.6),
    "recomputation": AreaStyle(kernels["compute"], "...."),
    "optimizer": AreaStyle(palette["optimizer"], width=0.6),
    "exposed transfer": AreaStyle(palette["communication"], width=0.6),
    "waiting for a peer": AreaStyle("white", "//////", palette["stall"]),
    "bubble": AreaStyle("#C9CED3", "......"),
    "host": AreaStyle(palette["other"], width=0.6),
    NOT_RECORDED: NOT_RECORDED_AREA,
}
"""Colour and hatch of each state of :func:`clustersim.explain.breakdown.breakdown`."""

MAX_GROUPS = 12
LEAST = 0.002
"""Share of the longest bar below which a state is not drawn: under two pixels."""


def breakdown(
    table: Breakdown,
    title: str | None = None,
    groups: Mapping[str, npt.ArrayLike] | None = None,
    *,
    word: str = "step",
    ax: Axes | None = None,
) -> Figure:
    """Seconds of a step, or what ``word`` says, in each state, a bar for each group of ranks.

    groups : ranks by name; None makes a bar of all ranks, and one for each of up to a dozen sorts of rank that differ.

    Raises :class:`ProgramError` for a table without ranks.
    """
    seconds = table.seconds
    if not seconds.size:
        raise ProgramError("nothing to draw: the breakdown has no ranks")
    chosen = rank_groups(seconds) if groups is None else {n: np.asarray(r, dtype=np.int64) for n, r in groups.items()}
    bars = {name: seconds[np.isin(table.rank, ranks)].mean(axis=0) for name, ranks in chosen.items()}
    return _drawn(bars, table.states, 0.34, title, word, ax)


def breakdowns(timelines: Mapping[str, Timeline], title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """Seconds of a step in each state, a bar for each run, mean over the ranks that train.

    ``timelines`` : by what to call each run. Raises :class:`ProgramError` for no runs.
    """
    tables = {name: per_step(timeline) for name, timeline in timelines.items()}
    if not tables:
        raise ProgramError("nothing to draw: no runs")
    states = list(dict.fromkeys(state for table in tables.values() for state in table))
    bars = {name: np.array([table.get(state, 0.0) for state in states]) for name, table in tables.items()}
    return _drawn(bars, states, 0.42, title, "step", ax)


def _drawn(
    bars: Mapping[str, Floats],
    states: list[str],
    bar_height: float,
    title: str | None,
    word: str,
    ax: Axes | None,
) -> Figure:
    """A picture of these bars, each so many inches high."""
    figure, axes = drawn_on(ax, bar_height * len(bars) + (1.35 if title else 1.0))
    _stack(axes, bars, states)
    axes.set_xlabel(f"time of a {word} [{time_unit(_longest(bars))[1]}]", fontsize=9)
    legend_below(figure, ax, axes, ncols=len(states), handlelength=1.4, columnspacing=1.2)
    parts = []
    for name, bar in bars.items():
        total = float(bar.sum()) or 1.0
        caption = ", ".join(f"{s} {v / total:.1%}" for s, v in zip(states, bar.tolist(), strict=True) if v > 0)
        parts.append(f"{name}: {caption}")
    return titled(figure, title, f"Where the time of a {word} goes. {'; '.join(parts)}.", ax)


def working_groups(timeline: Timeline, table: Breakdown) -> dict[str, Ints]:
    """The groups of :func:`rank_groups` of the ranks that train, and the servers, who are in no mean, as one more."""
    train = workers(timeline)
    groups = rank_groups(table.seconds[train], train)
    serving = servers(timeline)
    if not len(serving):
        return groups
    if len(train) > 1:
        groups = {f"all {len(train)} workers": train} | dict(list(groups.items())[1:])
    return groups | {"server" if len(serving) == 1 else f"{len(serving)} servers": serving}


def rank_groups(seconds: Floats, ranks: Ints | None = None) -> dict[str, Ints]:
    """All ranks, then ranks whose times are alike to a tenth of a percent of the step, the most stalled last.

    seconds : (w, k) float [s]. ranks : (w,) int, whose they are; None is 0 to w - 1.
    """
    w = len(seconds)
    numbers = np.arange(w) if ranks is None else ranks
    everyone = {f"all {w} ranks" if w > 1 else f"rank {numbers[0]}": numbers}
    step = seconds.sum(axis=1).max()
    _, which = np.unique(np.round(seconds / (step or 1.0), 3), axis=0, return_inverse=True)
    which = which.reshape(-1)
    if which.max() == 0 or which.max() + 1 > MAX_GROUPS:
        return everyone if which.max() == 0 else everyone | _extremes(seconds, numbers)
    first = [int(np.argmax(which == k)) for k in range(which.max() + 1)]
    for k in sorted(range(len(first)), key=first.__getitem__):
        members = numbers[which == k]
        everyone[_named(members)] = members
    return everyone


def _extremes(seconds: Floats, numbers: Ints) -> dict[str, Ints]:
    """Where every rank differs: the one that computes longest, the middle, and shortest."""
    order = np.argsort(seconds[:, : len(KERNELS)].sum(axis=1), kind="stable")
    places = {"computes longest": order[-1], "median": order[len(order) // 2], "computes shortest": order[0]}
    picked = {name: int(numbers[place]) for name, place in places.items()}
    return {f"rank {rank} ({name})": np.array([rank]) for name, rank in picked.items()}


def _named(members: Ints) -> str:
    if len(members) == 1:
        return f"rank {members[0]}"
    if members[-1] - members[0] == len(members) - 1:
        return f"ranks {members[0]}-{members[-1]}"
    return f"{len(members)} ranks, as {members[0]}"


def _stack(axes: Axes, bars: Mapping[str, Floats], states: list[str]) -> None:
    """A bar of seconds per name, in the colours and hatches of its states, with the shares written in."""
    longest = _longest(bars)
    scale, _ = time_unit(longest)
    y = np.arange(len(bars))[::-1]
    left = np.zeros(len(bars))
    for k, state in enumerate(states):
        width = np.array([bar[k] for bar in bars.values()]) * scale
        if width.max() < LEAST * longest * scale:
            continue
        look = STATE_STYLE.get(state, AreaStyle(series[k % len(series)], width=0.6))
        axes.barh(
            y,
            width,
            left=left,
            height=0.72,
            label=state,
            color=look.face,
            edgecolor=look.edge,
            linewidth=look.width,
            hatch=look.hatch or None,
        )
        dark = state in {"compute-bound", "host"}
        totals = np.array([bar.sum() for bar in bars.values()]) * scale
        _percentages(axes, (y, left, width, totals), dark=dark, hatched=bool(look.hatch))
        left += width
    plain_axes(axes)
    axes.set_yticks(y, list(bars), fontsize=9)
    axes.set_xlim(0, longest * scale)


def _longest(bars: Mapping[str, Floats]) -> float:
    """Seconds of the longest bar."""
    return max(float(bar.sum()) for bar in bars.values())


def _percentages(axes: Axes, places: tuple[Ints, Floats, Floats, Floats], *, dark: bool, hatched: bool) -> None:
    """Shares, where there is room for them: on a hatch in a box, since none could be read across its marks.

    places : of each bar its height, where the state begins, how long it is, and how long the bar is.
    """
    longest = places[3].max()
    for height, start, size, total in zip(*places, strict=True):
        if size > 0.045 * longest:
            axes.text(
                start + size / 2,
                height,
                f"{size / total:.0%}",
                ha="center",
                va="center_baseline",
                fontsize=8,
                color="white" if dark and not hatched else INK,
                bbox={"fc": "white", "ec": "none", "pad": 1.0} if hatched else None,
            )
