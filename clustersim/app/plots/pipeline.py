"""The pipeline grid of the papers: stages over time, a box for each action of each micro-batch, idle time white."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    draw_boxes,
    drawn_on,
    inches_wide,
    is_narrow,
    legend_below,
    plain_axes,
    titled,
)
from clustersim.app.plots.style import FAINT, INK, QUIET, AreaStyle, time_unit
from clustersim.core.errors import ProgramError
from clustersim.core.op_infos import OpInfo, of_each
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain import pipeline, plays

if TYPE_CHECKING:
    from matplotlib.patches import Patch

SHADES = {"F": 0.86, "I": 0.72, "B": 0.66, "W": 0.52, "R": 0.78}
"""Lightness of each action: forward light, backward dark, its halves on both sides of it."""
NAMES = {"F": "forward", "R": "recomputed forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
REST = {
    "collective, waiting included": AreaStyle("white", "//////", QUIET),
    "optimizer, other": AreaStyle(QUIET, width=0.3),
}
"""What is no action of the schedule, and how it is drawn."""
_ROW = 0.36
_BAR = 0.86
EDGE_SHARE = 0.15
"""Of a box's width that its white edge may be: hundreds of passes beside each other were white all over."""
FIGURE_SPACE = "\u2007"
"""As wide as a digit: words on the right begin at one place, and a film's frames are as wide as each other."""
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ScheduleGrid:
    """What is drawn: the window [s], each row's stage and rank from the top down, the actions; drawn ``until`` [s]."""

    begin: float
    end: float
    rows: tuple[tuple[int, int], ...]
    done: tuple[plays.TimedAction, ...]
    until: float

    @property
    def microbatches(self) -> list[int]:
        """Those that are drawn, ascending."""
        return sorted({a.microbatch for a in self.done})


def pipeline_grid(
    timeline: Timeline,
    window: tuple[float, float] | None = None,
    title: str | None = None,
    ranks: Sequence[int] | None = None,
    arrows: bool = False,
    *,
    ax: Axes | None = None,
) -> Figure:
    """Stages over time: colour by micro-batch, light for forward and dark for backward, white where nobody works.

    Parameters
    ----------
    window : (begin, end) [s]; None is the steady step whose time is the median. ranks : a row for each; None is the
        first replica, one rank per stage. arrows : draw who hands a micro-batch to whom.

    Raises :class:`ProgramError` for a run without stages, and for a window without actions.
    """
    return _drawn(timeline, _grid(timeline, window, ranks), title, arrows, ax)


def pipeline_frame(
    timeline: Timeline, window: tuple[float, float], until: float, title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """A frame of a film of :func:`pipeline_grid`: what comes later than ``until`` [s] is not drawn yet."""
    grid = _grid(timeline, window, None)
    return _drawn(timeline, replace(grid, until=min(until, grid.end)), title, ax=ax)


def _drawn(
    timeline: Timeline, grid: ScheduleGrid, title: str | None, arrows: bool = False, ax: Axes | None = None
) -> Figure:
    figure, axes = drawn_on(ax, _ROW * len(grid.rows) + (1.55 if title else 1.25))
    scale, unit = time_unit(grid.end - grid.begin)
    rest = _draw_rest(axes, timeline, grid, scale)
    _draw_actions(axes, grid, scale)
    if arrows:
        _draw_arrows(axes, grid, scale)
    _finish(axes, grid, scale, unit, {s: len(r) for s, r in enumerate(pipeline.stages(timeline))})
    handles = _legend(grid, rest, rows=ax is None and not is_narrow(figure))
    legend_below(figure, ax, axes, handles, ncols=len(handles) // 2, handlelength=1.4, columnspacing=1.1)
    rests = zip(grid.rows, _without_pass(grid), strict=True)
    idle = ", ".join(f"stage {s} {share:.0%}" for (s, _), share in rests)
    caption = (
        f"Pipeline of {len(grid.rows)} stages and {len(grid.microbatches)} micro-batches over "
        f"{format_time(grid.end - grid.begin)}: a box for each forward and backward. Without a pass: {idle}."
    )
    return titled(figure, title, caption, ax)


def usual_step(timeline: Timeline) -> tuple[float, float]:
    """(begin, end) [s] of the steady step whose time is the (lower) median."""
    step_windows, steady_steps = pipeline.windows(timeline), pipeline.steady(timeline)
    return step_windows[
        sorted(steady_steps, key=lambda s: step_windows[s][1] - step_windows[s][0])[(len(steady_steps) - 1) // 2]
    ]


def _grid(timeline: Timeline, window: tuple[float, float] | None, ranks: Sequence[int] | None) -> ScheduleGrid:
    stage_ranks = pipeline.stages(timeline)
    if not stage_ranks or not pipeline.has_pipeline(timeline):
        raise ProgramError("nothing to draw: no op of this run has a pipeline stage and a micro-batch")
    begin, end = window or usual_step(timeline)
    chosen = [int(r[0]) for r in stage_ranks] if ranks is None else sorted(set(ranks))
    stage_of = {int(r): s for s, column in enumerate(stage_ranks) for r in column}
    unknown = [rank for rank in chosen if rank not in stage_of]
    if unknown:
        raise ProgramError(f"nothing to draw: rank(s) {unknown} are at no stage")
    rows = tuple(sorted((stage_of[rank], rank) for rank in chosen))
    done = (a for action in pipeline.actions(timeline, chosen).values() for a in action)
    inside = tuple(a for a in done if a.end > begin and a.start < end)
    if not inside:
        raise ProgramError(f"nothing to draw: no action between {begin:g} s and {end:g} s")
    return ScheduleGrid(begin, end, rows, inside, end)


def shade(place: float | None, lightness: float) -> tuple[float, float, float]:
    """A colour of the rainbow from blue (0) to red (1), or grey (None), that looks as light as any other of that
    lightness (Oklab, Ottosson 2020), as red, green, blue."""
    hue = np.radians(265.0 - 245.0 * (place or 0.0))
    chroma = 0.0 if place is None else 0.115
    a = chroma * np.cos(hue)
    b = chroma * np.sin(hue)
    cone = (
        np.array(
            [
                lightness + 0.3963377774 * a + 0.2158037573 * b,
                lightness - 0.1055613458 * a - 0.0638541728 * b,
                lightness - 0.0894841775 * a - 1.2914855480 * b,
            ]
        )
        ** 3
    )
    linear = (
        np.array(
            [
                [4.0767416621, -3.3077115913, 0.2309699292],
                [-1.2684380046, 2.6097574011, -0.3413193965],
                [-0.0041960863, -0.7034186147, 1.7076147010],
            ]
        )
        @ cone
    )
    linear = np.clip(linear, 0.0, 1.0)
    red, green, blue = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055).tolist()
    return red, green, blue


def _places(grid: ScheduleGrid) -> dict[int, float]:
    """Micro-batch -> its place in the rainbow."""
    micro = grid.microbatches
    return {m: i / max(1, len(micro) - 1) for i, m in enumerate(micro)}


def _draw_actions(axes: Axes, grid: ScheduleGrid, scale: float) -> None:
    y_of = {rank: y for y, (_, rank) in enumerate(grid.rows)}
    places = _places(grid)
    chunks = sorted({a.chunk for a in grid.done})
    inches = inches_wide(axes) / (grid.end - grid.begin)
    boxes: list[tuple[float, float, float, float]] = []
    colours = []
    for a in grid.done:
        low = max(a.start, grid.begin)
        high = min(a.end, grid.until)
        y = y_of[a.rank]
        if high <= low:
            continue
        boxes.append((low, high, y - _BAR / 2, y + _BAR / 2))
        colours.append(shade(places[a.microbatch], SHADES.get(a.action, 0.7)))
        text = f"{a.microbatch}" + (LETTERS[chunks.index(a.chunk) % 26] if len(chunks) > 1 else "")
        if (high - low) * inches > 0.062 * len(text) + 0.01:
            axes.text(
                ((low + high) / 2 - grid.begin) * scale,
                y,
                text,
                ha="center",
                va="center_baseline",
                fontsize=7,
                color=INK if SHADES.get(a.action, 0.7) > 0.6 else "white",
            )
    if boxes:
        columns = np.array(boxes)
        edges = np.minimum(0.5, EDGE_SHARE * (columns[:, 1] - columns[:, 0]) * inches * 72)
        across = (columns[:, :2] - grid.begin) * scale
        draw_boxes(axes, across, columns[:, 2:], facecolor=colours, edgecolor="white", linewidth=edges)


def _rest_of(op: OpInfo) -> int:
    """Which of :data:`REST` an op is, -1 for none."""
    return -1 if op.bound == "host" or (op.label and op.label.action) else int(op.kind == "compute")


def _draw_rest(axes: Axes, timeline: Timeline, grid: ScheduleGrid, scale: float) -> list[str]:
    """What is no action and no message between stages, half as high; returns which of :data:`REST` there were."""
    spans = timeline.spans([rank for _, rank in grid.rows])
    y_of = np.zeros(timeline.world_size)
    y_of[[rank for _, rank in grid.rows]] = np.arange(len(grid.rows))
    y = y_of[spans["rank"]]
    low = np.maximum(spans["ready"], grid.begin)
    high = np.minimum(spans["end"], grid.end)
    rest = of_each(timeline.ops, _rest_of, np.int64)[spans["op"]]
    drawn = np.flatnonzero((high > low) & (rest >= 0))
    high = np.maximum(low, np.minimum(high, grid.until))
    boxes = np.column_stack([low, high, y - _BAR / 4, y + _BAR / 4])[drawn]
    drawn_kinds = [list(REST)[number] for number in dict.fromkeys(rest[drawn].tolist())]
    for kind in drawn_kinds:
        look = REST[kind]
        corners = boxes[rest[drawn] == list(REST).index(kind)]
        draw_boxes(
            axes,
            (corners[:, :2] - grid.begin) * scale,
            corners[:, 2:],
            facecolor=look.face,
            edgecolor=look.edge,
            hatch=look.hatch or None,
            linewidth=look.width,
        )
    return sorted(drawn_kinds)


def _draw_arrows(axes: Axes, grid: ScheduleGrid, scale: float) -> None:
    """From the end of an action to the beginning of the one that goes on with its micro-batch at another stage."""
    y_of = {s: y for y, (s, _) in reversed(list(enumerate(grid.rows)))}
    ways = plays.paths(grid.done)
    ended = {
        (a.microbatch, "F" if a.action == "F" else "B", a.stage, a.chunk): a for a in grid.done if a.action in "FBI"
    }
    for a in grid.done:
        needs = plays.before(a, ways.get(a.microbatch, ()))
        source = ended.get((a.microbatch, *needs)) if needs else None
        if source is not None and source.stage != a.stage and source.end <= a.start + 1e-9 and a.start <= grid.until:
            begin, end = ((t - grid.begin) * scale for t in (source.end, a.start))
            up = 1 if y_of[a.stage] > y_of[source.stage] else -1
            axes.annotate(
                "",
                (end, y_of[a.stage] - up * _BAR / 2),
                (begin, y_of[source.stage] + up * _BAR / 2),
                arrowprops={
                    "arrowstyle": "-|>,head_width=0.12,head_length=0.2",
                    "lw": 0.5,
                    "color": QUIET,
                    "shrinkA": 0,
                    "shrinkB": 0,
                },
            )


def _finish(axes: Axes, grid: ScheduleGrid, scale: float, unit: str, sizes: dict[int, int]) -> None:
    """Limits, rules between rows, names on the left; on the right the share in which a row has no pass: the host may
    hold a GPU inside of one, so a run's idle time is another figure."""
    n = len(grid.rows)
    length = grid.end - grid.begin
    axes.set_xlim(0, length * scale)
    axes.set_ylim(n - 0.45, -0.55)
    plain_axes(axes)
    for y in range(n + 1):
        axes.axhline(y - 0.5, color=FAINT, lw=0.6, zorder=0)
    plain = len({stage for stage, _ in grid.rows}) == n and set(sizes.values()) == {1}
    names = [f"stage {stage}" + ("" if plain else f" (rank {rank})") for stage, rank in grid.rows]
    axes.set_yticks(range(n), names, fontsize=9)
    axes.set_xlabel(f"time [{unit}]" + (f" from {format_time(grid.begin)} on" if grid.begin else ""), fontsize=9)
    for y, share in enumerate(_without_pass(grid)):
        share_text = f"{share:>4.0%} no pass".replace(" ", FIGURE_SPACE, 4 - len(f"{share:.0%}"))
        axes.text(
            1.008, y, share_text, transform=axes.get_yaxis_transform(), fontsize=8.5, color=QUIET, va="center_baseline"
        )


def _without_pass(grid: ScheduleGrid) -> list[float]:
    """Share of what is drawn in which each row does no action."""
    busy = {rank: 0.0 for _, rank in grid.rows}
    reached = dict.fromkeys(busy, grid.begin)
    for a in sorted(grid.done, key=lambda a: a.start):
        busy[a.rank] += max(0.0, min(a.end, grid.until) - max(a.start, reached[a.rank]))
        reached[a.rank] = max(reached[a.rank], a.end)
    length = grid.until - grid.begin
    return [1 - busy[rank] / length if length > 0 else 0.0 for _, rank in grid.rows]


def _legend(grid: ScheduleGrid, rest: list[str], rows: bool) -> list[Patch]:
    """Actions by their shades and what else there is, then some micro-batches of the rainbow; in two ``rows`` or one
    after the other."""
    from matplotlib.patches import Patch

    present = {a.action for a in grid.done}
    above = [Patch(fc=shade(None, SHADES[k]), label=name) for k, name in NAMES.items() if k in present]
    above += [
        Patch(label=label, fc=look.face, ec=look.edge, hatch=look.hatch or None, linewidth=look.width)
        for label, look in REST.items()
        if label in rest
    ]
    micro = grid.microbatches
    places = _places(grid)
    shown = sorted({micro[round(i * (len(micro) - 1) / 4)] for i in range(5)})
    below = [
        Patch(fc=shade(places[m], SHADES["F"]), label=f"micro-batch {m}" if m == shown[0] else str(m)) for m in shown
    ]
    chunks = sorted({a.chunk for a in grid.done})
    if len(chunks) > 1:
        letters = f"{LETTERS[0]} to {LETTERS[(len(chunks) - 1) % 26]}: chunk {chunks[0]} to {chunks[-1]}"
        below.append(Patch(fc="none", label=letters))
    shorter = min((above, below), key=len) if rows else []
    shorter += [Patch(fc="none", label=" ")] * abs(len(above) - len(below)) if rows else []
    return [*above, *below]
