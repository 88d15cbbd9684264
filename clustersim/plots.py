"""Figures. matplotlib is imported inside the functions; figures need no display and are saved with ``savefig``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustersim.analysis.metrics import occupancy
from clustersim.errors import ProgramError
from clustersim.program import COMPUTE_STREAM
from clustersim.timeline import OpInfo, Timeline, alike

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

palette: dict[str, str] = {
    "forward": "#0072B2",
    "backward": "#009E73",
    "optimizer": "#CC79A7",
    "gradient": "#56B4E9",
    "input": "#F0E442",
    "memcpy": "#F0E442",
    "other": "#999999",
    "communication": "#E69F00",
    "stall": "#D55E00",
    "idle": "#EFEFEF",
}
"""Colours by phase: Okabe and Ito's set, which colour-blind readers can tell apart. A stall is drawn as a hatch."""

_LABELS = {
    "forward": "forward",
    "backward": "backward",
    "gradient": "gradient copy or cast",
    "optimizer": "optimizer",
    "input": "input, host",
    "memcpy": "memory copy",
    "other": "other",
    "communication": "collective",
    "stall": "waiting for peers or communication",
    "idle": "idle",
}

MAX_RANKS = 4
_BAR, _ROW, _GAP = 0.84, 1.0, 0.45
_WIDTH, _ROW_HEIGHT = 12.0, 0.42
"""Inches."""


def gantt(
    timeline: Timeline,
    ranks: Sequence[int] | None = None,
    window: tuple[float, float] | None = None,
    title: str | None = None,
) -> Figure:
    """Who did what when: a row per stream of each rank.

    Grey is idle. A red hatch is waiting: on a communication stream for peers that have not arrived, on the compute
    stream for communication (which is then exposed).

    Parameters
    ----------
    ranks : which to draw; None picks up to four: the first and the last, the slowest and the fastest.
    window : (begin, end) [s]; None is the whole run.

    Returns a matplotlib Figure. Raises :class:`ProgramError` for ranks or a window with nothing in it.
    """
    from matplotlib.figure import Figure

    remarks = representatives(timeline) if ranks is None else dict.fromkeys(sorted(set(ranks)), "")
    begin, end = (0.0, timeline.makespan) if window is None else window
    spans = _inside(timeline, list(remarks), begin, end)
    if not len(spans["rank"]):
        raise ProgramError(f"nothing to draw: ranks {list(remarks)} do nothing between {begin} s and {end} s")
    rows = _rows(timeline, spans, remarks)
    figure = Figure(figsize=(_WIDTH, 1.45 + _ROW_HEIGHT * (rows[-1].y + 1)), layout="constrained")
    axes = figure.add_subplot()
    scale, unit = next((s, u) for s, u in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")) if (end - begin) * s >= 2 or s == 1e6)
    canvas = _Canvas(axes, begin, end, scale)
    for row in rows:
        _draw_row(canvas, timeline, spans, row)
    _draw_steps(canvas, timeline, rows[-1].y)
    _finish(figure, canvas, rows, unit, title)
    return figure


def representatives(timeline: Timeline, n: int = MAX_RANKS) -> dict[int, str]:
    """Up to ``n`` ranks worth looking at, ascending, each with what it is: the first and last rank, and where ranks
    differ the one that computes longest (its peers wait for it) and the one that computes shortest."""
    if timeline.world_size <= 2:
        return dict.fromkeys(range(timeline.world_size), "")
    chosen: dict[int, str] = {}
    classes, _ = alike(timeline)
    if len(classes) > 1:
        busy = occupancy(timeline, classes)["compute_s"]
        if np.ptp(busy) > 1e-9 * busy.max():
            chosen = {int(classes[busy.argmax()]): "slowest", int(classes[busy.argmin()]): "fastest"}
    for rank in (0, timeline.world_size - 1, *classes.tolist()):
        if len(chosen) < n:
            chosen.setdefault(rank, "")
    return dict(sorted(chosen.items()))


@dataclass(frozen=True)
class _Row:
    """A stream of a rank at a height."""

    rank: int
    stream: str
    y: float
    remark: str


@dataclass
class _Canvas:
    """Axes with what the drawing functions share. ``scale`` turns seconds into the axis' unit."""

    axes: Axes
    begin: float
    end: float
    scale: float
    used: set[str] = field(default_factory=set)

    def bars(self, y: float, starts: Floats, ends: Floats, what: str) -> None:
        """Bars of one colour, clipped to the window."""
        starts, ends = np.clip(starts, self.begin, self.end), np.clip(ends, self.begin, self.end)
        keep = ends > starts
        if not keep.any():
            return
        self.used.add(what)
        starts, ends, window = starts[keep], ends[keep], self.end - self.begin
        # White edges tell neighbours apart, but among bars of a few pixels they would hide what they surround: there
        # bars that touch are drawn as one.
        edges = what not in {"idle", "stall"} and np.median(ends - starts) > 0.006 * window
        if not edges:
            starts, ends = _joined(starts, ends, 1e-4 * window)
        boxes = np.column_stack([starts, ends - starts]) * self.scale
        style: dict[str, Any] = {"fc": palette[what], "ec": "white", "linewidth": 0.5 if edges else 0.0, "snap": False}
        if what == "stall":
            style |= {"fc": "white", "ec": palette["stall"], "hatch": "//////"}
        self.axes.broken_barh(boxes.tolist(), (y - _BAR / 2, _BAR), **style)

    def text(self, y: float, start: float, end: float, words: Sequence[str], colour: str) -> None:
        """The longest of ``words`` that fits in a bar, in its middle."""
        characters = (end - start) / (self.end - self.begin) * _WIDTH * 0.86 * 72 / 4.6
        fitting = [word for word in words if len(word) + 1 <= characters]
        if fitting and self.begin <= start and end <= self.end:
            middle = (start + end) / 2 * self.scale
            self.axes.text(middle, y, fitting[0], ha="center", va="center_baseline", fontsize=7.5, color=colour)


def _inside(timeline: Timeline, ranks: list[int], begin: float, end: float) -> dict[str, npt.NDArray[Any]]:
    """Spans of the ranks that touch the window."""
    spans = timeline.spans(ranks)
    touch = (spans["end"] >= begin) & (spans["ready"] <= end)
    return {name: column[touch] for name, column in spans.items()}


def _rows(timeline: Timeline, spans: dict[str, npt.NDArray[Any]], remarks: dict[int, str]) -> list[_Row]:
    """A row for every stream a rank uses inside the window, compute first, with a gap between ranks."""
    rows: list[_Row] = []
    y = 0.0
    for rank, remark in remarks.items():
        used = {timeline.ops[i].stream for i in np.unique(spans["op"][spans["rank"] == rank]).tolist()}
        for stream in sorted(used, key=lambda name: (name != COMPUTE_STREAM, name)):
            rows.append(_Row(rank, stream, y, remark))
            y += _ROW
        y += _GAP if used else 0.0
    return rows


def _phase(op: OpInfo) -> str:
    return "communication" if op.kind != "compute" else op.phase if op.phase in palette else "other"


def _draw_row(canvas: _Canvas, timeline: Timeline, spans: dict[str, npt.NDArray[Any]], row: _Row) -> None:
    ops = timeline.ops
    streams = np.array([op.stream == row.stream for op in ops], dtype=bool)
    mine = spans["rank"] == row.rank
    here = mine & streams[spans["op"]]
    start, end, ready, op = (spans[name][here] for name in ("start", "end", "ready", "op"))
    canvas.bars(row.y, np.array([canvas.begin]), np.array([canvas.end]), "idle")
    phases = np.array([_phase(ops[i]) for i in op.tolist()])
    for phase in dict.fromkeys(phases.tolist()):
        canvas.bars(row.y, start[phases == phase], end[phases == phase], phase)
    talks = phases == "communication"
    canvas.bars(row.y, ready[talks], start[talks], "stall")
    if row.stream == COMPUTE_STREAM:
        talking = np.array([o.kind != "compute" for o in ops], dtype=bool)[spans["op"]] & mine
        canvas.bars(row.y, *_minus((spans["ready"][talking], spans["end"][talking]), (start, end)), "stall")
    for i, t0, t1, phase in zip(op.tolist(), start.tolist(), end.tolist(), phases.tolist(), strict=True):
        dark = phase in {"forward", "backward", "other"}
        canvas.text(row.y, t0, t1, _words(ops[i].name), "white" if dark else "black")


def _words(name: str) -> tuple[str, ...]:
    """What could be written on a bar, longest first: ``all_reduce bucket 3``, ``bucket 3``, ``3``."""
    parts = name.split(" ")
    return tuple(" ".join(parts[i:]) for i in range(len(parts)) if i == 0 or len(parts) - i < 3)


def _joined(starts: Floats, ends: Floats, gap: float) -> tuple[Floats, Floats]:
    """Intervals that do not overlap, in any order, with those closer than ``gap`` made one."""
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], ends[order]
    apart = starts[1:] > ends[:-1] + gap
    return starts[np.append(True, apart)], ends[np.append(apart, True)]


def _minus(some: tuple[Floats, Floats], others: tuple[Floats, Floats]) -> tuple[Floats, Floats]:
    """Where at least one of ``some`` intervals is open and none of ``others``: (starts, ends)."""
    times = np.concatenate([*some, *others])
    inside = np.concatenate([np.full(len(a), s) for a, s in zip((*some, *others), (1, -1, 0, 0), strict=True)])
    taken = np.concatenate([np.full(len(a), s) for a, s in zip((*some, *others), (0, 0, 1, -1), strict=True)])
    order = np.argsort(times, kind="stable")
    free = (np.cumsum(inside[order]) > 0) & (np.cumsum(taken[order]) == 0)
    moments = times[order]
    return moments[:-1][free[:-1]], moments[1:][free[:-1]]


def _draw_steps(canvas: _Canvas, timeline: Timeline, lowest: float) -> None:
    """A dotted line where each step ends, and its number above; steps are counted from 1, as iterations are."""
    steps = np.array([op.step for op in timeline.ops], dtype=np.int64)[timeline.row_op]
    known = np.unique(steps)
    begin = 0.0
    for step in known.tolist() if len(known) <= 24 else ():
        end = float(timeline.row_end[steps == step].max())
        low, high = max(begin, canvas.begin), min(end, canvas.end)
        if high > low:
            canvas.axes.text(
                (low + high) / 2 * canvas.scale, -0.72, f"step {step + 1}", ha="center", va="bottom", fontsize=9
            )
        if canvas.begin < end < canvas.end:
            canvas.axes.vlines(end * canvas.scale, -0.75, lowest + 0.5, color="black", lw=0.9, ls=(0, (2, 2)))
        begin = end


def _finish(figure: Figure, canvas: _Canvas, rows: list[_Row], unit: str, title: str | None) -> None:
    """Axes, labels, legend."""
    from matplotlib.patches import Patch

    axes = canvas.axes
    axes.set_xlim(canvas.begin * canvas.scale, canvas.end * canvas.scale)
    axes.set_ylim(rows[-1].y + 0.55, -0.6)
    axes.set_yticks([row.y for row in rows], [_label(row, rows) for row in rows], fontsize=9)
    axes.set_xlabel(f"time [{unit}]")
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = [
        Patch(facecolor="white", edgecolor=palette[what], hatch="//////", label=label)
        if what == "stall"
        else Patch(facecolor=palette[what], label=label)
        for what, label in _LABELS.items()
        if what in canvas.used
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=12)


def _label(row: _Row, rows: list[_Row]) -> str:
    first = next(other for other in rows if other.rank == row.rank) is row
    who = f"rank {row.rank}" + (f" ({row.remark})" if row.remark else "")
    return f"{who}  {row.stream}" if first else row.stream
