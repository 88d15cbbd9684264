"""Rows and bars of a Gantt chart: what every chart of spans draws with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, draw_boxes, inches_wide, legend_below
from clustersim.app.plots.intervals import joined, packed
from clustersim.app.plots.style import AreaStyle, palette
from clustersim.app.plots.tracks import on_stream, phase_of, phases_of, row_intervals, stream_rows, who
from clustersim.core.arrays import Columns, Floats
from clustersim.core.errors import ProgramError
from clustersim.core.timeline import Timeline

LABELS = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient copy, cast or sum",
    "optimizer": "optimizer",
    "input": "input, host",
    "memcpy": "memory copy",
    "other": "other",
    "communication": "transfer",
    "stall": "waiting for peers or a transfer",
    "idle": "idle",
}
"""What a legend calls each colour."""

_BAR = 0.84
_ROW = 1.0
_GAP = 0.45
LINE = 150
"""Letters of a legend, its colours among them, that fit in a line."""
ROW_HEIGHT = 0.3
"""Inches."""


@dataclass(frozen=True)
class BarRow:
    """A stream of a rank at a height."""

    rank: int
    stream: str
    y: float
    label: str


@dataclass
class BarCanvas:
    """Axes with what the drawing functions share. ``scale`` turns seconds from ``origin`` on into the axis' unit."""

    axes: Axes
    begin: float
    end: float
    scale: float
    unit: str
    used: set[str] = field(default_factory=set)
    origin: float = 0.0
    window: float = 0.0
    """Seconds the axis is long; 0 is as long as from ``begin`` to ``end``."""

    @property
    def length(self) -> float:
        """Seconds the axis is long."""
        return self.window or self.end - self.begin

    def bars(self, y: float, starts: Floats, ends: Floats, kind: str) -> None:
        """Bars of one colour, clipped to the window."""
        starts = np.clip(starts, self.begin, self.end)
        ends = np.clip(ends, self.begin, self.end)
        keep = ends > starts
        if not keep.any():
            return
        starts = starts[keep]
        ends = ends[keep]
        window = self.length
        # White edges tell neighbours apart, but among bars of a few pixels they would hide what they surround: there
        # bars that touch are drawn as one.
        edges = kind not in {"idle", "stall"} and np.median(ends - starts) > 0.006 * window
        if not edges:
            starts, ends = joined(starts, ends, 1e-4 * window)
        heights = np.tile([y - _BAR / 2, y + _BAR / 2], (len(starts), 1))
        self._boxes(np.column_stack([starts, ends]), heights, kind, 0.5 if edges else 0.0)

    def _boxes(self, times: Floats, heights: Floats, kind: str, edge: float) -> None:
        """Boxes of one kind: begin and end [s], low and high of each."""
        self.used.add(kind)
        look = AreaStyle("white", "//////", palette["stall"]) if kind == "stall" else AreaStyle(palette[kind])
        draw_boxes(
            self.axes,
            (times - self.origin) * self.scale,
            heights,
            facecolor=look.face,
            edgecolor=look.edge,
            hatch=look.hatch or None,
            linewidth=edge,
            snap=False,
            antialiased=edge > 0,
        )

    def shares(self, y: float, row: dict[str, tuple[Floats, Floats]]) -> dict[str, tuple[Floats, Floats]]:
        """Draw the stretches where narrow bars of several colours alternate; what is left to draw as bars."""
        rest, stretches = packed(row, self.begin, self.end)
        boxes_of: dict[str, list[tuple[float, float, float, float]]] = {}
        for begin, end, parts in stretches:
            high = y + _BAR / 2
            for kind, share in parts.items():
                low = high - share * _BAR
                boxes_of.setdefault(kind, []).append((begin, end, low, high))
                high = low
        for kind, boxes in boxes_of.items():
            columns = np.array(boxes)
            self._boxes(columns[:, :2], columns[:, 2:], kind, 0.0)
        return rest

    def letters(self, seconds: Floats) -> Floats:
        """How many letters there is room for in bars that are so long [s]."""
        room: Floats = seconds / self.length * inches_wide(self.axes) * 1.05 * 72 / 4.8
        return room

    def text(self, y: float, start: float, end: float, word: str, colour: str) -> None:
        """A word in the middle of a bar, where that is inside the window."""
        if word and self.begin <= start and end <= self.end:
            middle = ((start + end) / 2 - self.origin) * self.scale
            self.axes.text(middle, y, word, ha="center", va="center_baseline", fontsize=7.5, color=colour)


def spans_inside(timeline: Timeline, ranks: list[int], begin: float, end: float) -> Columns:
    """Spans of the ranks that touch the window. Raises :class:`ProgramError` where there is none."""
    spans = timeline.spans(ranks)
    touch = (spans["end"] >= begin) & (spans["ready"] <= end)
    if not touch.any():
        raise ProgramError(f"nothing to draw: ranks {ranks} do nothing between {begin} s and {end} s")
    return {name: column[touch] for name, column in spans.items()}


def rows_of(timeline: Timeline, spans: Columns, remarks: dict[int, str]) -> list[BarRow]:
    """A row for every stream a rank uses inside the window, with a gap between ranks."""
    rows: list[BarRow] = []
    y = 0.0
    for rank, streams in stream_rows(timeline, spans, remarks).items():
        for k, (stream, label) in enumerate(streams):
            rows.append(BarRow(rank, stream, y, label if k else f"{who(rank, remarks)}  {label}"))
            y += _ROW
        y += _GAP if streams else 0.0
    return rows


def draw_row(canvas: BarCanvas, timeline: Timeline, spans: Columns, row: BarRow) -> None:
    """One stream of one rank: its ops as bars over an idle ground, the long ones named."""
    canvas.bars(row.y, np.array([canvas.begin]), np.array([canvas.end]), "idle")
    intervals = row_intervals(timeline, spans, row.rank, row.stream)
    for kind, (starts, ends) in canvas.shares(row.y, intervals).items():
        canvas.bars(row.y, starts, ends, kind)
    # A name is written where its op stands for its phase, not on one of a hundred that were drawn as one.
    wide = 0.03 * canvas.length
    apart = {kind for kind, (a, b) in intervals.items() if len(a) and np.median(b - a) > wide} | {"communication"}
    named_ops = on_stream(timeline, row.stream) & np.isin(phases_of(timeline), list(apart))
    room = canvas.letters(spans["end"] - spans["start"])
    named = (spans["rank"] == row.rank) & named_ops[spans["op"]] & (room >= 1)
    columns = (spans[name][named].tolist() for name in ("op", "start", "end"))
    for i, start, end, letters in zip(*columns, room[named].tolist(), strict=True):
        op = timeline.ops[i]
        dark = phase_of(op) in {"forward", "backward", "other"}
        canvas.text(row.y, start, end, _fitting(_words(op.name), letters), "white" if dark else "black")


def _fitting(words: Sequence[str], letters: float) -> str:
    """The longest of some words, longest first, for which there is room; "" for none."""
    return next((word for word in words if len(word) + 1 <= letters), "")


def _words(name: str) -> tuple[str, ...]:
    """What could be written on a bar, longest first; a number says nothing without its noun.

    >>> _words("all_reduce bucket 3"), _words("optimizer")
    (('all_reduce bucket 3', 'bucket 3'), ('optimizer',))
    """
    parts = name.split(" ")
    tails = [" ".join(parts[i:]) for i in range(len(parts)) if i == 0 or len(parts) - i < 3]
    return tuple(dict.fromkeys([name, *(tail for tail in tails if not tail[:1].isdigit())]))


def legend(figure: Figure, canvases: list[BarCanvas], ax: Axes | None = None) -> None:
    """What the colours mean, those that were used, below the figure or the caller's ``ax``; two that look alike are
    one entry."""
    from matplotlib.patches import Patch

    used = set().union(*(canvas.used for canvas in canvases))
    labels_of: dict[str, list[str]] = {}
    for label in LABELS:
        if label in used:
            labels_of.setdefault("stall" if label == "stall" else palette[label], []).append(LABELS[label])
    handles = [
        Patch(facecolor="white", edgecolor=palette["stall"], hatch="//////", lw=0, label=", ".join(labels))
        if colour == "stall"
        else Patch(facecolor=colour, label=", ".join(labels))
        for colour, labels in labels_of.items()
    ]
    letters = sum(len(label) + 6 for labels in labels_of.values() for label in labels)
    ncols = len(handles) if letters <= LINE else -(-len(handles) // 2)
    legend_below(figure, ax, canvases[0].axes, handles, ncols=ncols, handlelength=1.4, columnspacing=1.3)
