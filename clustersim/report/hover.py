"""The Gantt chart as SVG whose bars say what they are: a ``<title>`` each, which the page shows on hover and on tap."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from clustersim.plots.bars import LABELS
from clustersim.plots.intervals import packed
from clustersim.plots.style import FAINT, INK, QUIET, palette, time_unit
from clustersim.plots.tracks import Spans, phase_of, representatives, row_intervals, stream_rows, who
from clustersim.program import COMPUTE_STREAM
from clustersim.timeline import OpInfo, Timeline
from clustersim.units import format_bytes, format_time

Floats = npt.NDArray[np.float64]

WIDTH, LABEL, ROW, BAR, GAP = 1000.0, 165.0, 22.0, 18.0, 10.0
"""Units of the drawing: its width, the column of names, a row, a bar, and between ranks."""
LEAST = 0.0012
"""Share of the window below which bars are drawn together with their neighbours."""


@dataclass(frozen=True)
class _Row:
    rank: int
    stream: str
    label: str
    y: float


def gantt_svg(timeline: Timeline, begin: float, end: float, label: str, *, origin: float = 0.0) -> str:
    """Rows for the representative ranks over a window [s]; ``label`` says in words what it shows.

    ``origin`` : the moment [s] that the axis calls 0.
    """
    ranks = representatives(timeline)
    spans = timeline.spans(list(ranks))
    touch = (spans["end"] > begin) & (spans["ready"] < end)
    spans = {name: column[touch] for name, column in spans.items()}
    rows = list(_rows(timeline, spans, ranks))
    height = (rows[-1].y if rows else 0.0) + ROW + 30
    names = "".join(_text(LABEL - 8, row.y + BAR * 0.72, row.label, "end", INK) for row in rows)
    bars = "".join(bar for row in rows for bar in _draw(timeline, spans, row, begin, end))
    scale, unit = time_unit(end - begin)
    window = f'data-begin="{(begin - origin) * scale:.9g}" data-end="{(end - origin) * scale:.9g}" data-unit="{unit}"'
    return (
        f'<svg class="gantt" viewBox="0 0 {WIDTH:g} {height:g}" role="img" aria-label="{escape(label)}" tabindex="0" '
        f'{window} data-left="{LABEL:g}" data-right="{WIDTH - 4:g}" xmlns="http://www.w3.org/2000/svg">'
        f'<g class="axis">{_axis(begin, end, height, origin)}</g>{names}<g class="bars">{bars}</g></svg>'
    )


def legend() -> list[tuple[str, str, str]]:
    """(name, class, colour) of everything a chart may show."""
    return [(words, what, palette[what]) for what, words in LABELS.items() if what != "memcpy"]


def _rows(timeline: Timeline, spans: Spans, ranks: dict[int, str]) -> Iterator[_Row]:
    y = 4.0
    for rank, streams in stream_rows(timeline, spans, ranks).items():
        for k, (stream, label) in enumerate(streams):
            yield _Row(rank, stream, label if k else f"{who(rank, ranks)} {label}", y)
            y += ROW
        y += GAP if streams else 0.0


def _draw(timeline: Timeline, spans: Spans, row: _Row, begin: float, end: float) -> Iterator[str]:
    yield _bar("idle", begin, min(end, timeline.makespan), row.y, BAR, begin, end)  # nobody idles behind the end
    intervals = row_intervals(timeline, spans, row.rank, row.stream)
    rest, stretches = packed(intervals, begin, end)
    for low, high, parts in stretches:
        said = ", ".join(f"{LABELS[what]} {share:.0%}" for what, share in parts.items())
        when = f"{format_time(low)} to {format_time(high)}"
        y = row.y + BAR
        for what, share in parts.items():
            y -= share * BAR
            yield _bar(what, low, high, y, share * BAR, begin, end, f"many short ones, {when}\n{said}")
    yield from _ops(timeline, spans, row, rest, begin, end)
    for start, stop in zip(*rest["stall"], strict=True):
        why = "for communication" if row.stream == COMPUTE_STREAM else "for peers"
        told = f"waits {format_time(stop - start)} {why}\nfrom {format_time(start)}"
        yield _bar("stall", start, stop, row.y, BAR, begin, end, told)


def _ops(
    timeline: Timeline, spans: Spans, row: _Row, rest: dict[str, tuple[Floats, Floats]], begin: float, end: float
) -> Iterator[str]:
    """A bar for each op that is wide enough, one for each run of narrow ones of a phase."""
    for phase, (lows, highs) in rest.items():
        if phase == "stall":
            continue
        mine = _of_phase(timeline, spans, row, phase)
        starts = spans["start"][mine]
        for low, high in zip(lows.tolist(), highs.tolist(), strict=True):
            # The bar covers ops that touch each other; they are told apart again where there is room.
            first, last = np.searchsorted(starts, [low - 1e-12, high - 1e-15])
            yield from _told_apart(
                timeline, spans, mine[max(first - (first == last), 0) : max(last, 1)], phase, row, begin, end
            )


def _of_phase(timeline: Timeline, spans: Spans, row: _Row, phase: str) -> npt.NDArray[np.int64]:
    """Rows of the span table that a row draws in a phase's colour, by start."""
    fits = np.array([op.stream == row.stream and phase_of(op) == phase for op in timeline.ops], dtype=bool)
    found = np.flatnonzero((spans["rank"] == row.rank) & fits[spans["op"]])
    ordered: npt.NDArray[np.int64] = found[np.argsort(spans["start"][found], kind="stable")]
    return ordered


def _told_apart(
    timeline: Timeline, spans: Spans, which: npt.NDArray[np.int64], phase: str, row: _Row, begin: float, end: float
) -> Iterator[str]:
    least = (end - begin) * LEAST
    waiting: list[int] = []
    for i in which.tolist():
        waiting.append(i)
        low, high = float(spans["start"][waiting[0]]), float(spans["end"][i])
        if high - low < least:
            continue
        yield _bar(phase, low, high, row.y, BAR, begin, end, _said(timeline, spans, waiting), edge=len(waiting) == 1)
        waiting = []
    if waiting:
        low, high = float(spans["start"][waiting[0]]), float(spans["end"][waiting[-1]])
        yield _bar(phase, low, high, row.y, BAR, begin, end, _said(timeline, spans, waiting))


def _said(timeline: Timeline, spans: Spans, which: list[int]) -> str:
    """What hovering over some spans tells."""
    first, last = which[0], which[-1]
    low, high = float(spans["start"][first]), float(spans["end"][last])
    op = timeline.ops[int(spans["op"][first])]
    if len(which) > 1:
        name = f"{op.name} ... {timeline.ops[int(spans['op'][last])].name} ({len(which)} ops)"
        return f"{name}\n{format_time(high - low)} from {format_time(low)}"
    lines = [op.name, f"{format_time(high - low)} from {format_time(low)}", *_facts(op)]
    return "\n".join(lines)


def _facts(op: OpInfo) -> Iterator[str]:
    if op.kind == "compute":
        yield f"{op.bound}-bound" if op.bound not in {"host", ""} else "on the host"
        if op.flops:
            yield f"{op.flops / 1e9:,.4g} GFLOP"
    else:
        yield f"{op.kind} of {format_bytes(op.nbytes)}"
        chosen = [str(op.detail[k]) for k in ("algorithm", "protocol") if op.detail.get(k)]
        channels = op.detail.get("n_channels")
        if chosen:
            yield ", ".join(chosen) + (f", {channels} channels" if channels else "")
        bound = op.detail.get("lower_bound")
        if isinstance(bound, float) and bound > 0:
            yield f"physical bound {format_time(bound)}"
    yield f"step {op.step + 1}"


def _x(time: float, begin: float, end: float) -> float:
    return LABEL + (WIDTH - LABEL - 4) * (min(max(time, begin), end) - begin) / (end - begin)


def _bar(
    what: str,
    low: float,
    high: float,
    y: float,
    height: float,
    begin: float,
    end: float,
    told: str = "",
    edge: bool = False,
) -> str:
    x0, x1 = _x(low, begin, end), _x(high, begin, end)
    if x1 - x0 < 0.02:
        return ""
    shape = f'class="{what}{" e" if edge and x1 - x0 > 12 else ""}" x="{x0:.2f}" y="{y:.2f}" width="{x1 - x0:.2f}" '
    shape += f'height="{height:.2f}"'
    return f"<rect {shape}><title>{escape(told)}</title></rect>" if told else f"<rect {shape}/>"


def _text(x: float, y: float, words: str, anchor: str, colour: str) -> str:
    # A label longer than its column is set narrower; 5.9 units is an average letter's width.
    squeezed = ""
    if anchor == "end" and 5.9 * len(words) > LABEL - 12:
        squeezed = f'textLength="{LABEL - 12:g}" lengthAdjust="spacingAndGlyphs" '
    return f'<text x="{x:.1f}" y="{y:.1f}" {squeezed}text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'


def _axis(begin: float, end: float, height: float, origin: float) -> str:
    """Ticks at round times, with thin lines down the rows."""
    scale, unit = time_unit(end - begin)
    span = (end - begin) * scale
    step = next(m * 10.0**p for p in range(-3, 9) for m in (1, 2, 5) if span / (m * 10.0**p) <= 8)
    parts = []
    low, high = (begin - origin) * scale, (end - origin) * scale
    for k in range(int(np.ceil(low / step)), int(np.floor(high / step)) + 1):
        x = _x(origin + k * step / scale, begin, end)
        last = (k + 1) * step > high
        parts.append(f'<path d="M{x:.1f} 0V{height - 22:.1f}" stroke="{FAINT}"/>')
        parts.append(_text(x, height - 8, f"{k * step:g}" + (f" {unit}" if last else ""), "middle", QUIET))
    return "".join(parts)
