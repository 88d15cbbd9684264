"""Two runs on one time axis: the last step of each, both from their own beginning."""

from __future__ import annotations

from dataclasses import replace

from clustersim.plots.bars import ROW_HEIGHT, Canvas, draw_row, legend, rows_of, spans_inside
from clustersim.plots.drawing import Axes, Figure, drawn_on, plain_axes, titled
from clustersim.plots.style import INK, QUIET, time_unit
from clustersim.plots.tracks import last_step, representatives
from clustersim.timeline import Timeline
from clustersim.units import format_time

_APART = 1.5
"""Rows between the two runs, for the name of the second."""


def gantt_pair(
    a: tuple[str, Timeline], b: tuple[str, Timeline], title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """The last step of two runs above each other, simulated or measured, on one axis that both begin at 0.

    Each is a (name, Timeline). Up to two ranks of each are drawn: where ranks differ the slowest and the fastest.
    ``ax`` : drawn on instead of a new figure.
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
        canvas = Canvas(axes, begin, end, scale, unit, origin=begin, window=longest)
        words = f"{name}: {format_time(end - begin)}"
        axes.text(0, y - 0.62, words, fontsize=9.5, color=INK, va="bottom")
        for row in rows:
            lower = replace(row, y=row.y + y)
            draw_row(canvas, timeline, spans, lower)
            ticks.append((lower.y, row.label))
        canvases.append(canvas)
        low, y = y - 0.5, y + rows[-1].y + 0.5 + _APART
        if end - begin < longest * (1 - 1e-3):
            axes.vlines((end - begin) * scale, low, y - _APART, color=QUIET, lw=0.9, ls=(0, (2, 2)))
    axes.set_xlim(0, longest * scale)
    axes.set_ylim(y - _APART + 0.1, -0.2 - _APART / 2)
    plain_axes(axes)
    axes.set_yticks([at for at, _ in ticks], [label for _, label in ticks], fontsize=9)
    axes.set_xlabel(f"time since the step began [{unit}]", fontsize=9)
    legend(figure, canvases, ax)
    return titled(figure, title, _alt(*((name, end - begin) for name, _, _, begin, end, _ in parts)), ax)


def _alt(one: tuple[str, float], other: tuple[str, float]) -> str:
    took = [f"{name} takes {format_time(seconds)}" for name, seconds in (one, other)]
    return f"Gantt charts of the last step of two runs on one time axis: {took[0]}, {took[1]}."
