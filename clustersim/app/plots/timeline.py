"""The Gantt chart: who did what when, a row per stream of each rank; of one run, or of two on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from clustersim.app.plots.bars import ROW_HEIGHT, BarCanvas, BarRow, draw_row, legend, rows_of, spans_inside
from clustersim.app.plots.drawing import Axes, Figure, drawn_on, new_figure, only_one, plain_axes, titled
from clustersim.app.plots.style import INK, QUIET, time_unit
from clustersim.app.plots.tracks import who
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain.occupancy import occupancy
from clustersim.explain.representatives import last_step, representatives

_APART = 1.5
"""Rows between two runs, for the name of the second."""


def gantt(
    timeline: Timeline,
    ranks: Sequence[int] | None = None,
    window: tuple[float, float] | None = None,
    title: str | None = None,
    zoom: tuple[float, float] | None = None,
    *,
    ax: Axes | None = None,
) -> Figure:
    """Who did what when: a row per stream of each rank.

    Grey is idle. A red hatch is waiting: on a communication stream for peers that have not arrived, on the compute
    stream for communication (which is then exposed). Where bars are too narrow to be told apart, the colours of a
    stretch share its height as they shared its time.

    Parameters
    ----------
    ranks : which to draw; None picks up to four: the first and the last, the slowest and the fastest.
    window : (begin, end) [s]; None is the whole run.
    zoom : (begin, end) [s] of a part to draw once more below, larger.
    ax : drawn on instead of a new figure; without ``zoom``, which takes an axes of its own.

    Returns a matplotlib Figure. Raises :class:`ProgramError` for ranks or a window with nothing in it.
    """
    only_one(ax if zoom else None, "a Gantt chart with a zoom")
    remarks = representatives(timeline) if ranks is None else dict.fromkeys(sorted(set(ranks)), "")
    windows = [(0.0, timeline.makespan) if window is None else window, *([zoom] if zoom else [])]
    spans = [spans_inside(timeline, list(remarks), *part) for part in windows]
    rows = [rows_of(timeline, span, remarks) for span in spans]
    heights = [ROW_HEIGHT * (row[-1].y + 1) + 0.5 for row in rows]
    figure = new_figure(sum(heights) + (0.95 if title else 0.6)) if ax is None else drawn_on(ax, 0.0)[0]
    canvases = []
    for i, part in enumerate(windows):
        axes = ax or figure.add_subplot(len(windows), 1, i + 1)
        canvas = BarCanvas(axes, *part, *time_unit(part[1] - part[0]))
        for row in rows[i]:
            draw_row(canvas, timeline, spans[i], row)
        _draw_steps(canvas, timeline, rows[i][-1].y)
        _finish(canvas, rows[i])
        canvases.append(canvas)
    if zoom:
        _mark(canvases[0], zoom, rows[0][-1].y)
    legend(figure, canvases, ax)
    return titled(figure, title, _alt(timeline, remarks, *windows[0]), ax)


def _draw_steps(canvas: BarCanvas, timeline: Timeline, lowest: float) -> None:
    """A dotted line where each step ends, and its number above; steps are counted from 1, as iterations are."""
    ends = timeline.per_op()["end"]
    steps = timeline.op_steps
    step_numbers = np.unique(steps[np.isfinite(ends)])
    begin = 0.0
    for step in step_numbers.tolist() if len(step_numbers) <= 24 else ():
        end = float(ends[steps == step].max())
        low = max(begin, canvas.begin)
        high = min(end, canvas.end)
        if high - low > 0.05 * (canvas.end - canvas.begin):
            middle = (low + high) / 2 * canvas.scale
            canvas.axes.text(
                middle, -0.72, f"step {step + 1}", ha="center", va="bottom", fontsize=9, color=QUIET, clip_on=False
            )
        if canvas.begin < end < canvas.end:
            canvas.axes.vlines(end * canvas.scale, -0.75, lowest + 0.5, color=INK, lw=0.9, ls=(0, (2, 2)))
        begin = end


def _mark(canvas: BarCanvas, zoom: tuple[float, float], lowest: float) -> None:
    """A frame around the part that is drawn again below."""
    from matplotlib.patches import Rectangle

    begin, end = (min(max(t, canvas.begin), canvas.end) * canvas.scale for t in zoom)
    if end <= begin:
        return
    frame = Rectangle(
        (begin, -0.56), end - begin, lowest + 1.1, fill=False, ec=INK, lw=1.4, joinstyle="round", clip_on=False
    )
    frame.set_in_layout(False)
    canvas.axes.add_patch(frame)


def _finish(canvas: BarCanvas, rows: list[BarRow]) -> None:
    """Limits, labels, ticks."""
    axes = canvas.axes
    axes.set_xlim(canvas.begin * canvas.scale, canvas.end * canvas.scale)
    axes.set_ylim(rows[-1].y + 0.55, -0.6)
    plain_axes(axes)
    axes.set_yticks([row.y for row in rows], [row.label for row in rows], fontsize=9)
    axes.set_xlabel(f"time [{canvas.unit}]", fontsize=9)


def _alt(timeline: Timeline, remarks: dict[int, str], begin: float, end: float) -> str:
    ranks = ", ".join(who(rank, remarks).removeprefix("rank ") for rank in remarks)
    busy = occupancy(timeline, np.array(sorted(remarks)))
    share = {name: float(column.mean()) / (timeline.makespan or 1.0) for name, column in busy.items()}
    return (
        f"Gantt chart of rank(s) {ranks} of {timeline.world_size} from {format_time(begin)} to {format_time(end)}. "
        f"Over the run they compute {share['compute_s']:.0%} of the time, transfer {share['communication_s']:.0%}, "
        f"and their compute streams wait for communication {share['exposed_communication_s']:.0%}."
    )


def gantt_pair(
    a: tuple[str, Timeline], b: tuple[str, Timeline], title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """The last step of two runs above each other, simulated or measured, on one axis that both begin at 0.

    Each is a (name, Timeline). Up to two ranks of each are drawn: where ranks differ the slowest and the fastest.
    Raises :class:`ProgramError` for a run with nothing in it.
    """
    parts = []
    for name, timeline in (a, b):
        remarks = representatives(timeline, 2)
        begin, end = last_step(timeline)
        spans = spans_inside(timeline, list(remarks), begin, end)
        parts.append((name, timeline, spans, begin, end, rows_of(timeline, spans, remarks)))
    longest = max(end - begin for _, _, _, begin, end, _ in parts)
    height = sum(rows[-1].y + 1 for *_, rows in parts) + 2 * _APART
    figure, axes = drawn_on(ax, ROW_HEIGHT * height + (1.35 if title else 1.0))
    (scale, unit), y, canvases = time_unit(longest), _APART / 2, []
    ticks: list[tuple[float, str]] = []
    for name, timeline, spans, begin, end, rows in parts:
        canvas = BarCanvas(axes, begin, end, scale, unit, origin=begin, window=longest)
        axes.text(0, y - 0.62, f"{name}: {format_time(end - begin)}", fontsize=9.5, color=INK, va="bottom")
        for row in rows:
            lower = replace(row, y=row.y + y)
            draw_row(canvas, timeline, spans, lower)
            ticks.append((lower.y, row.label))
        canvases.append(canvas)
        low = y - 0.5
        y = y + rows[-1].y + 0.5 + _APART
        if end - begin < longest * (1 - 1e-3):
            axes.vlines((end - begin) * scale, low, y - _APART, color=QUIET, lw=0.9, ls=(0, (2, 2)))
    axes.set_xlim(0, longest * scale)
    axes.set_ylim(y - _APART + 0.1, -0.2 - _APART / 2)
    plain_axes(axes)
    axes.set_yticks([height for height, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.set_xlabel(f"time since the step began [{unit}]", fontsize=9)
    legend(figure, canvases, ax)
    took = ", ".join(f"{name} takes {format_time(end - begin)}" for name, _, _, begin, end, _ in parts)
    return titled(figure, title, f"Gantt charts of the last step of two runs on one time axis: {took}.", ax)
