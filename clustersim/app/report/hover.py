"""The Gantt chart as SVG whose bars say what they are: a ``<title>`` each, which the page shows on hover and on tap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clustersim.app.plots.bars import LABELS
from clustersim.app.plots.intervals import Intervals, packed
from clustersim.app.plots.style import FAINT, INK, QUIET, palette, time_unit
from clustersim.app.plots.tracks import of_phase, on_stream, row_intervals, stream_rows, who
from clustersim.app.report.pages import paired
from clustersim.core.arrays import Columns, Ints
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.core.units import format_bytes, format_time
from clustersim.explain.representatives import representatives

if TYPE_CHECKING:
    from markupsafe import Markup

ROW = 22.0
BAR = 18.0
GAP = 10.0
LINE = 14.0
"""Units of the drawing: a row, a bar, between ranks, and a line of text."""


class GanttFrame(msgspec.Struct, frozen=True):
    """How wide a drawing is, and its column of names; without a column names stand above their rows."""

    width: float
    column: float


DESK = GanttFrame(1000.0, 165.0)
PHONE = GanttFrame(380.0, 0.0)
"""Frames in which letters are as large as others of a page."""
LEAST = 0.0012
"""Share of the window below which bars are drawn together with their neighbours."""


class _HoverRow(msgspec.Struct, frozen=True):
    rank: int
    stream: str
    label: str
    y: float


class _Bar(msgspec.Struct, frozen=True):
    """``what`` its colour means, from ``low`` to ``high`` [s], at a height, and what hovering over it tells; with an
    ``edge`` it stands apart from its neighbours."""

    what: str
    low: float
    high: float
    y: float
    told: str = ""
    height: float = BAR
    edge: bool = False


class _GanttChart(msgspec.Struct, frozen=True):
    """The spans that touch a window [s], drawn in a frame."""

    timeline: Timeline
    spans: Columns
    begin: float
    end: float
    frame: GanttFrame

    @property
    def left(self) -> float:
        """Where the window begins."""
        return max(self.frame.column, 4.0)

    @property
    def right(self) -> float:
        """Where it ends."""
        return self.frame.width - 4.0

    def x(self, time: float) -> float:
        """Where a moment [s] is; one outside the window is at its edge."""
        share = (min(max(time, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return self.left + (self.right - self.left) * share

    def drawn(self, bar: _Bar) -> str:
        """A bar as SVG; nothing where it would be too narrow to be seen."""
        x0 = self.x(bar.low)
        x1 = self.x(bar.high)
        if x1 - x0 < 0.02:
            return ""
        shape = f'class="{bar.what}{" e" if bar.edge and x1 - x0 > 12 else ""}" x="{x0:.2f}" y="{bar.y:.2f}" '
        shape += f'width="{x1 - x0:.2f}" height="{bar.height:.2f}"'
        return f"<rect {shape}><title>{escape(bar.told)}</title></rect>" if bar.told else f"<rect {shape}/>"


def gantt_svg(
    timeline: Timeline, begin: float, end: float, label: str, *, origin: float = 0.0, frame: GanttFrame = DESK
) -> str:
    """Rows for the representative ranks over a window [s]; ``label`` says in words what it shows.

    ``origin`` : the moment [s] that the axis calls 0.
    """
    ranks = representatives(timeline)
    spans = timeline.spans(list(ranks))
    touch = (spans["end"] > begin) & (spans["ready"] < end)
    chart = _GanttChart(timeline, {name: column[touch] for name, column in spans.items()}, begin, end, frame)
    rows = list(_rows(chart, ranks))
    height = (rows[-1].y if rows else 0.0) + ROW + 30
    names = "".join(_name(chart, row) for row in rows)
    bars = "".join(chart.drawn(bar) for row in rows for bar in _bars(chart, row))
    scale, unit = time_unit(end - begin)
    window = f'data-begin="{(begin - origin) * scale:.9g}" data-end="{(end - origin) * scale:.9g}" data-unit="{unit}"'
    return (
        f'<svg class="gantt" viewBox="0 0 {frame.width:g} {height:g}" role="img" aria-label="{escape(label)}" '
        f'tabindex="0" {window} data-left="{chart.left:g}" data-right="{chart.right:g}" '
        f'xmlns="http://www.w3.org/2000/svg"><g class="axis">{_axis(chart, height, origin)}</g>{names}'
        f'<g class="bars">{bars}</g></svg>'
    )


def gantt_pair(timeline: Timeline, begin: float, end: float, label: str, *, origin: float = 0.0) -> Markup:
    """:func:`gantt_svg` for a desk and for a phone, of which a page shows the one that its window has room for."""
    frames = {"desk": DESK, "phone": PHONE}
    svgs = {
        place: gantt_svg(timeline, begin, end, label, origin=origin, frame=frame) for place, frame in frames.items()
    }
    return paired(svgs)


def legend(charts: Sequence[str]) -> list[tuple[str, str, str]]:
    """(name, class, colour) of everything that these charts show; what looks alike is one entry."""
    rows: dict[str, tuple[str, str, str]] = {}
    for kind, label in LABELS.items():
        if any(f'class="{kind}' in chart for chart in charts):
            look = "stall" if kind == "stall" else palette[kind]
            before = f"{rows[look][0]}, " if look in rows else ""
            rows[look] = (before + label, kind, palette[kind])
    return list(rows.values())


def _rows(chart: _GanttChart, ranks: dict[int, str]) -> Iterator[_HoverRow]:
    y = 4.0
    above = 0.0 if chart.frame.column else LINE
    for rank, streams in stream_rows(chart.timeline, chart.spans, ranks).items():
        for k, (stream, label) in enumerate(streams):
            y += above
            yield _HoverRow(rank, stream, label if k else f"{who(rank, ranks)} {label}", y)
            y += ROW
        y += GAP if streams else 0.0


def _name(chart: _GanttChart, row: _HoverRow) -> str:
    """What a row is of: beside it, or above it where the frame has no column of names."""
    if chart.frame.column:
        return _text(chart.frame.column - 8, row.y + BAR * 0.72, row.label, "end", INK, chart.frame.column - 12)
    return _text(chart.left, row.y - 3, row.label, "start", INK, chart.frame.width - 8)


def _bars(chart: _GanttChart, row: _HoverRow) -> Iterator[_Bar]:
    yield _Bar("idle", chart.begin, min(chart.end, chart.timeline.makespan), row.y)  # nobody idles behind the end
    intervals = row_intervals(chart.timeline, chart.spans, row.rank, row.stream)
    rest, stretches = packed(intervals, chart.begin, chart.end)
    for low, high, parts in stretches:
        shares_text = ", ".join(f"{LABELS[kind]} {share:.0%}" for kind, share in parts.items())
        when = f"{format_time(low)} to {format_time(high)}"
        y = row.y + BAR
        for kind, share in parts.items():
            y -= share * BAR
            yield _Bar(kind, low, high, y, f"many short ones, {when}\n{shares_text}", share * BAR)
    yield from _ops(chart, row, rest)
    for start, stop in zip(*rest["stall"], strict=True):
        why = "for communication" if row.stream == COMPUTE_STREAM else "for peers"
        wait_text = f"waits {format_time(stop - start)} {why}\nfrom {format_time(start)}"
        yield _Bar("stall", start, stop, row.y, wait_text)


def _ops(chart: _GanttChart, row: _HoverRow, rest: dict[str, Intervals]) -> Iterator[_Bar]:
    """A bar for each op that is wide enough, one for each run of narrow ones of a phase."""
    for phase, (lows, highs) in rest.items():
        if phase == "stall":
            continue
        on_row = _of_phase(chart, row, phase)
        starts = chart.spans["start"][on_row]
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            # The bar covers ops that touch each other; they are told apart again where there is room.
            first, last = np.searchsorted(starts, [low - 1e-12, high - 1e-15])
            yield from _told_apart(chart, on_row[max(first - (first == last), 0) : max(last, 1)], phase, row.y)


def _of_phase(chart: _GanttChart, row: _HoverRow, phase: str) -> Ints:
    """Rows of the span table that a row draws in a phase's colour, by start."""
    spans = chart.spans
    fits = on_stream(chart.timeline, row.stream) & of_phase(chart.timeline, phase)
    row_spans = np.flatnonzero((spans["rank"] == row.rank) & fits[spans["op"]])
    ordered: Ints = row_spans[np.argsort(spans["start"][row_spans], kind="stable")]
    return ordered


def _told_apart(chart: _GanttChart, which: Ints, phase: str, y: float) -> Iterator[_Bar]:
    least = (chart.end - chart.begin) * LEAST
    waiting: list[int] = []
    for i in which.tolist():
        waiting.append(i)
        low, high = _from_to(chart, waiting)
        if high - low < least:
            continue
        yield _Bar(phase, low, high, y, _said(chart, waiting), edge=len(waiting) == 1)
        waiting = []
    if waiting:
        yield _Bar(phase, *_from_to(chart, waiting), y, _said(chart, waiting))


def _from_to(chart: _GanttChart, which: list[int]) -> tuple[float, float]:
    """When the first of some spans begins, and the last ends [s]."""
    return float(chart.spans["start"][which[0]]), float(chart.spans["end"][which[-1]])


def _said(chart: _GanttChart, which: list[int]) -> str:
    low, high = _from_to(chart, which)
    first, last = (chart.timeline.ops[int(chart.spans["op"][i])] for i in (which[0], which[-1]))
    when = f"{format_time(high - low)} from {format_time(low)}"
    if len(which) > 1:
        return f"{first.name} ... {last.name} ({len(which)} ops)\n{when}"
    return "\n".join([first.name, when, *_facts(first)])


def _facts(op: OpInfo) -> Iterator[str]:
    if op.kind == "compute":
        yield f"{op.bound}-bound" if op.bound not in {"host", ""} else "on the host"
        if op.flops:
            yield f"{op.flops / 1e9:,.4g} GFLOP"
    else:
        yield f"{op.kind} of {format_bytes(op.nbytes)}"
        chosen = [name for name in (op.detail.get("algorithm"), op.detail.get("protocol")) if name]
        channels = op.detail.get("n_channels")
        if chosen:
            yield ", ".join(chosen) + (f", {channels} channels" if channels else "")
        bound = op.detail.get("lower_bound")
        if isinstance(bound, float) and bound > 0:
            yield f"physical bound {format_time(bound)}"
    yield f"step {op.step + 1}"


def _text(x: float, y: float, label: str, anchor: str, colour: str, room: float = np.inf) -> str:
    # A label longer than its room is set narrower; 5.9 units is an average letter's width.
    squeezed = ""
    if 5.9 * len(label) > room:
        squeezed = f'textLength="{room:g}" lengthAdjust="spacingAndGlyphs" '
    return f'<text x="{x:.1f}" y="{y:.1f}" {squeezed}text-anchor="{anchor}" fill="{colour}">{escape(label)}</text>'


def _axis(chart: _GanttChart, height: float, origin: float) -> str:
    """Ticks at round times, with thin lines down the rows."""
    scale, unit = time_unit(chart.end - chart.begin)
    span = (chart.end - chart.begin) * scale
    most = 8 if chart.frame.column else 5
    step = next(m * 10.0**p for p in range(-3, 9) for m in (1, 2, 5) if span / (m * 10.0**p) <= most)
    parts = []
    low, high = ((moment - origin) * scale for moment in (chart.begin, chart.end))
    for k in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1):
        x = chart.x(origin + k * step / scale)
        last = (k + 1) * step > high
        parts.append(f'<path d="M{x:.1f} 0V{height - 22:.1f}" stroke="{FAINT}"/>')
        anchor = "start" if x < 12 else "end" if x > chart.frame.width - 20 else "middle"
        parts.append(_text(x, height - 8, f"{k * step:g}" + (f" {unit}" if last else ""), anchor, QUIET))
    return "".join(parts)
