"""The Gantt chart: who did what when, a row per stream of each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustersim.analysis.metrics import occupancy
from clustersim.errors import ProgramError
from clustersim.plots.intervals import joined, packed
from clustersim.plots.style import INK, QUIET, WIDTH, new_figure, palette, plain_axes, time_unit, titled
from clustersim.plots.tracks import Spans, phase_of, representatives, row_intervals, stream_rows, who
from clustersim.timeline import Timeline
from clustersim.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

LABELS = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient copy or cast",
    "optimizer": "optimizer",
    "input": "input, host",
    "memcpy": "memory copy",
    "other": "other",
    "communication": "transfer",
    "stall": "waiting for peers or a transfer",
    "idle": "idle",
}
"""What a legend calls each colour."""

_BAR, _ROW, _GAP = 0.84, 1.0, 0.45
_ROW_HEIGHT = 0.3
"""Inches."""


def gantt(
    timeline: Timeline,
    ranks: Sequence[int] | None = None,
    window: tuple[float, float] | None = None,
    title: str | None = None,
    zoom: tuple[float, float] | None = None,
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

    Returns a matplotlib Figure. Raises :class:`ProgramError` for ranks or a window with nothing in it.
    """
    remarks = representatives(timeline) if ranks is None else dict.fromkeys(sorted(set(ranks)), "")
    windows = [(0.0, timeline.makespan) if window is None else window, *([zoom] if zoom else [])]
    spans = [_inside(timeline, list(remarks), *part) for part in windows]
    rows = [_rows(timeline, some, remarks) for some in spans]
    heights = [_ROW_HEIGHT * (some[-1].y + 1) + 0.5 for some in rows]
    figure = new_figure(sum(heights) + (0.95 if title else 0.6))
    canvases = []
    for i, part in enumerate(windows):
        axes = figure.add_subplot(len(windows), 1, i + 1)
        canvas = _Canvas(axes, *part, *time_unit(part[1] - part[0]))
        for row in rows[i]:
            _draw_row(canvas, timeline, spans[i], row)
        _draw_steps(canvas, timeline, rows[i][-1].y)
        _finish(canvas, rows[i])
        canvases.append(canvas)
    if zoom:
        _mark(canvases[0], zoom, rows[0][-1].y)
    _legend(figure, canvases)
    return titled(figure, title, _alt(timeline, remarks, *windows[0]))


@dataclass(frozen=True)
class _Row:
    """A stream of a rank at a height."""

    rank: int
    stream: str
    y: float
    label: str


@dataclass
class _Canvas:
    """Axes with what the drawing functions share. ``scale`` turns seconds into the axis' unit."""

    axes: Axes
    begin: float
    end: float
    scale: float
    unit: str
    used: set[str] = field(default_factory=set)

    def bars(self, y: float, starts: Floats, ends: Floats, what: str) -> None:
        """Bars of one colour, clipped to the window."""
        starts, ends = np.clip(starts, self.begin, self.end), np.clip(ends, self.begin, self.end)
        keep = ends > starts
        if not keep.any():
            return
        starts, ends, window = starts[keep], ends[keep], self.end - self.begin
        # White edges tell neighbours apart, but among bars of a few pixels they would hide what they surround: there
        # bars that touch are drawn as one.
        edges = what not in {"idle", "stall"} and np.median(ends - starts) > 0.006 * window
        if not edges:
            starts, ends = joined(starts, ends, 1e-4 * window)
        self._boxes(starts, ends, y - _BAR / 2, _BAR, what, 0.5 if edges else 0.0)

    def _boxes(self, starts: Floats, ends: Floats, y: float, height: float, what: str, edge: float) -> None:
        self.used.add(what)
        boxes = np.column_stack([starts, ends - starts]) * self.scale
        style: dict[str, Any] = {
            "fc": palette[what],
            "ec": "white",
            "linewidth": edge,
            "snap": False,
            "antialiased": edge > 0,
        }
        if what == "stall":
            style |= {"fc": "white", "ec": palette["stall"], "hatch": "//////"}
        self.axes.broken_barh(boxes.tolist(), (y, height), **style)

    def shares(self, y: float, row: dict[str, tuple[Floats, Floats]]) -> dict[str, tuple[Floats, Floats]]:
        """Draw the stretches where narrow bars of several colours alternate; what is left to draw as bars."""
        rest, stretches = packed(row, self.begin, self.end)
        for begin, end, parts in stretches:
            low = y + _BAR / 2
            for what, share in parts.items():
                low -= share * _BAR
                self._boxes(np.array([begin]), np.array([end]), low, share * _BAR, what, 0.0)
        return rest

    def text(self, y: float, start: float, end: float, words: Sequence[str], colour: str) -> None:
        """The longest of ``words`` that fits in a bar, in its middle."""
        characters = (end - start) / (self.end - self.begin) * WIDTH * 0.84 * 72 / 4.8
        fitting = [word for word in words if len(word) + 1 <= characters]
        if fitting and self.begin <= start and end <= self.end:
            middle = (start + end) / 2 * self.scale
            self.axes.text(
                middle, y, fitting[0], ha="center", va="center_baseline", fontsize=7.5, color=colour, parse_math=False
            )


def _inside(timeline: Timeline, ranks: list[int], begin: float, end: float) -> Spans:
    """Spans of the ranks that touch the window. Raises :class:`ProgramError` where there is none."""
    spans = timeline.spans(ranks)
    touch = (spans["end"] >= begin) & (spans["ready"] <= end)
    if not touch.any():
        raise ProgramError(f"nothing to draw: ranks {ranks} do nothing between {begin} s and {end} s")
    return {name: column[touch] for name, column in spans.items()}


def _rows(timeline: Timeline, spans: Spans, remarks: dict[int, str]) -> list[_Row]:
    """A row for every stream a rank uses inside the window, with a gap between ranks."""
    rows: list[_Row] = []
    y = 0.0
    for rank, streams in stream_rows(timeline, spans, remarks).items():
        for k, (stream, label) in enumerate(streams):
            rows.append(_Row(rank, stream, y, label if k else f"{who(rank, remarks)}  {label}"))
            y += _ROW
        y += _GAP if streams else 0.0
    return rows


def _draw_row(canvas: _Canvas, timeline: Timeline, spans: Spans, row: _Row) -> None:
    canvas.bars(row.y, np.array([canvas.begin]), np.array([canvas.end]), "idle")
    intervals = row_intervals(timeline, spans, row.rank, row.stream)
    for what, (starts, ends) in canvas.shares(row.y, intervals).items():
        canvas.bars(row.y, starts, ends, what)
    here = spans["rank"] == row.rank
    # A name is written where its op stands for its phase, not on one of a hundred that were drawn as one.
    wide = 0.03 * (canvas.end - canvas.begin)
    apart = {what for what, (a, b) in intervals.items() if len(a) and np.median(b - a) > wide} | {"communication"}
    columns = (spans[name][here].tolist() for name in ("op", "start", "end"))
    for i, start, end in zip(*columns, strict=True):
        op = timeline.ops[i]
        if op.stream == row.stream and phase_of(op) in apart:
            dark = phase_of(op) in {"forward", "backward", "other"}
            canvas.text(row.y, start, end, _words(op.name), "white" if dark else "black")


def _words(name: str) -> tuple[str, ...]:
    """What could be written on a bar, longest first: ``all_reduce bucket 3``, ``bucket 3``, ``3``."""
    parts = name.split(" ")
    return tuple(" ".join(parts[i:]) for i in range(len(parts)) if i == 0 or len(parts) - i < 3)


def _draw_steps(canvas: _Canvas, timeline: Timeline, lowest: float) -> None:
    """A dotted line where each step ends, and its number above; steps are counted from 1, as iterations are."""
    ends = timeline.per_op()["end"]
    steps = np.array([op.step for op in timeline.ops], dtype=np.int64)
    known = np.unique(steps[np.isfinite(ends)])
    begin = 0.0
    for step in known.tolist() if len(known) <= 24 else ():
        end = float(ends[steps == step].max())
        low, high = max(begin, canvas.begin), min(end, canvas.end)
        if high - low > 0.05 * (canvas.end - canvas.begin):
            middle = (low + high) / 2 * canvas.scale
            canvas.axes.text(
                middle, -0.72, f"step {step + 1}", ha="center", va="bottom", fontsize=9, color=QUIET, clip_on=False
            )
        if canvas.begin < end < canvas.end:
            canvas.axes.vlines(end * canvas.scale, -0.75, lowest + 0.5, color=INK, lw=0.9, ls=(0, (2, 2)))
        begin = end


def _mark(canvas: _Canvas, zoom: tuple[float, float], lowest: float) -> None:
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


def _finish(canvas: _Canvas, rows: list[_Row]) -> None:
    """Limits, labels, ticks."""
    axes = canvas.axes
    axes.set_xlim(canvas.begin * canvas.scale, canvas.end * canvas.scale)
    axes.set_ylim(rows[-1].y + 0.55, -0.6)
    plain_axes(axes)
    axes.set_yticks([row.y for row in rows], [row.label for row in rows], fontsize=9, parse_math=False)
    axes.set_xlabel(f"time [{canvas.unit}]", fontsize=9)


def _legend(figure: Figure, canvases: list[_Canvas]) -> None:
    from matplotlib.patches import Patch

    used = set().union(*(canvas.used for canvas in canvases))
    handles = [
        Patch(facecolor="white", edgecolor=palette[what], hatch="//////", lw=0, label=label)
        if what == "stall"
        else Patch(facecolor=palette[what], label=label)
        for what, label in LABELS.items()
        if what in used
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=8.5,
        handlelength=1.4, columnspacing=1.3,
    )  # fmt: skip


def _alt(timeline: Timeline, remarks: dict[int, str], begin: float, end: float) -> str:
    ranks = ", ".join(who(rank, remarks).removeprefix("rank ") for rank in remarks)
    busy = occupancy(timeline, np.array(sorted(remarks)))
    share = {name: float(column.mean()) / (timeline.makespan or 1.0) for name, column in busy.items()}
    return (
        f"Gantt chart of rank(s) {ranks} of {timeline.world_size} from {format_time(begin)} to {format_time(end)}. "
        f"Over the run they compute {share['compute_s']:.0%} of the time, transfer {share['communication_s']:.0%}, "
        f"and their compute streams wait for communication {share['exposed_communication_s']:.0%}."
    )
