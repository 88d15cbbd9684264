"""A collective as a film: every piece of every GPU's tensor, from a run that plays each transfer (chunk fidelity)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from clustersim.app.plots.drawing import Axes, Figure, drawn_on, titled
from clustersim.app.plots.style import FAINT, INK, QUIET, series
from clustersim.collectives.base import Group, Request
from clustersim.core.arrays import Bools, Floats
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, one_collective
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time

if TYPE_CHECKING:
    from clustersim.collectives.base import TransferSchedule


ASIDE = 0.22
"""How far beside the straight line pieces of an all-to-all travel: those that come the other way pass."""
_CELL = 0.15
"""Half a piece's width, and its height, where there is room for it."""
_WIDTH = 1.75
_HEIGHT = 1.66
"""Half the size of the picture."""


@dataclass(frozen=True, eq=False)
class _RingDrawing:
    """Where GPUs stand and how large they are: boxes of many GPUs, or of many pieces, are smaller.

    Parameters
    ----------
    spots : (GPUs, 2) float, middles of boxes. wide : half a piece's width. high : a piece's height with its gap.
    pieces : rows of a box.
    """

    spots: Floats
    wide: float
    high: float
    pieces: int

    @classmethod
    def of(cls, n: int, pieces: int) -> _RingDrawing:
        """GPUs on an ellipse, the first at the top left, clockwise."""
        angle = 3 * np.pi / 4 - 2 * np.pi * np.arange(n) / n
        apart = 2 * np.sin(np.pi / n)  # neighbours on a circle of radius 1
        high = min(1.12 * _CELL, 0.55 * apart / (pieces + 0.5))
        room = _HEIGHT - 0.28 - (pieces + 0.5) * high / 2  # outside of a box stands its name
        tall = min(1.36, room / float(np.abs(np.sin(angle)).max()))
        spots = np.column_stack([1.45 * np.cos(angle), tall * np.sin(angle)])
        return cls(spots, min(_CELL, 0.2 * apart), high, pieces)

    @property
    def height(self) -> float:
        """Of the rows of a box."""
        return (self.pieces + 0.5) * self.high

    def row(self, gpu: int, k: int) -> tuple[float, float]:
        """Lower left corner of the k-th piece in a GPU's box."""
        x, y = self.spots[gpu].tolist()
        return x - self.wide, y - self.height / 2 + self.height - (k + 1.12) * self.high


@dataclass(frozen=True, eq=False)
class Film:
    """What was sent when, and what it held.

    Parameters
    ----------
    schedule : of the collective. start, end : (T,) float [s] of each transfer. swaps : an all-to-all, in which
        everybody has a piece for everybody and nothing is added up. machines : of the GPUs.
    """

    schedule: TransferSchedule
    start: Floats
    end: Floats
    swaps: bool = False
    machines: tuple[int, ...] = ()

    @property
    def n(self) -> int:
        """How many GPUs."""
        return int(max(self.schedule.src.max(), self.schedule.dst.max())) + 1

    def held(self, time: float) -> Bools:
        """(GPUs, pieces, GPUs): whose contributions each GPU's copy of each piece holds at a time [s]."""
        s = self.schedule
        n = self.n
        state = np.zeros((n, s.n_chunks, n), dtype=bool)
        if self.swaps:
            own = np.arange(n * n) // n
            state[own, np.arange(n * n), own] = True
        else:
            state[np.arange(n), :, np.arange(n)] = True
        for t in np.argsort(self.end, kind="stable").tolist():
            if self.end[t] > time:
                break
            sender = int(s.src[t])
            receiver = int(s.dst[t])
            piece = int(s.chunk[t])
            if s.reduce[t]:
                state[receiver, piece] |= state[sender, piece]
            else:
                state[receiver, piece] = state[sender, piece]
        return state


def ring_run(n: int = 4, nbytes: float = 64 * 2**20, topology: str = "hgx-a100") -> Film:
    """Play one all-reduce of ``nbytes`` on a ring of ``n`` GPUs of one machine, transfer by transfer."""
    return _played("all_reduce", "ring", nbytes, topology, 1, n)


def swap_run(nbytes: float = 64 * 2**20, topology: str = "hgx-h100", nodes: int = 2, gpus: int = 2) -> Film:
    """Play one all-to-all in which each of ``gpus`` GPUs of each machine has ``nbytes``, transfer by transfer."""
    return _played("all_to_all", "direct", nbytes, topology, nodes, gpus)


def _played(kind: str, algorithm: str, nbytes: float, topology: str, nodes: int, gpus: int) -> Film:
    from clustersim import engine
    from clustersim.cluster import files as fabrics
    from clustersim.collectives import backends
    from clustersim.engine.chunk import schedule_of

    machine = fabrics.load(topology, nodes=nodes)
    mesh = fabrics.mesh(machine, nodes=nodes, nproc_per_node=gpus)
    request = Request(kind, nbytes, algorithm=algorithm)
    group = Group(machine, mesh.gpus)
    plan = backends.plan(request, group, backend="ideal", n_channels=1)
    program = one_collective(Collective(kind, kind, nbytes, mesh.world_group(), algorithm=algorithm))
    timeline = engine.simulate(program, machine, mesh, planner=lambda *_: plan, fidelity="chunk")
    machines = tuple(rank // gpus for rank in range(nodes * gpus))
    return replace(film(schedule_of(request, group, plan), timeline), swaps=kind == "all_to_all", machines=machines)


def film(schedule: TransferSchedule, timeline: Timeline) -> Film:
    """Put a schedule's transfers at the times a chunk-fidelity run of that one collective moved them.

    Raises :class:`ProgramError` where the run played something else.
    """
    use = timeline.links
    if use is None or len(use.transfer_op) != len(schedule.src):
        raise ProgramError("the timeline is not a chunk-fidelity run of this one schedule")
    start = np.full(len(schedule.src), np.inf)
    end = np.full(len(schedule.src), -np.inf)
    np.minimum.at(start, use.segment_transfer, use.segment_start)
    np.maximum.at(end, use.segment_transfer, use.segment_end)
    return Film(schedule, start, end)


def film_frame(shown: Film, time: float, title: str | None = None, *, ax: Axes | None = None) -> Figure:
    """One moment: pieces in each GPU, and those on their way."""
    figure, axes = drawn_on(ax, 5.2, 5.6)
    axes.set_aspect("equal")
    axes.set_xlim(-_WIDTH, _WIDTH)
    axes.set_ylim(-_HEIGHT, _HEIGHT)
    axes.set_axis_off()
    (_draw_swap if shown.swaps else _draw_ring)(axes, shown, time)
    share = (shown.end <= time).mean() if shown.swaps else shown.held(time).all(axis=2).mean()
    subject = f"All-to-all of {shown.n} GPUs" if shown.swaps else f"Ring all-reduce of {shown.n} GPUs"
    state_word = "there" if shown.swaps else "complete"
    return titled(
        figure, title, f"{subject} at {format_time(max(time, 0.0))}: {share:.0%} of pieces are {state_word}.", ax
    )


def _draw_ring(axes: Axes, shown: Film, time: float) -> None:
    """Pieces have a stripe in each GPU's colour whose values are in the sum."""
    ring = _RingDrawing.of(shown.n, shown.schedule.n_chunks)
    state = shown.held(time)
    for gpu in range(shown.n):
        _box(axes, ring, gpu)
        for k, contributions in enumerate(state[gpu]):
            _piece(axes, ring, ring.row(gpu, k), _stripes(contributions), "done" if contributions.all() else "")
    for a, b in {(int(a), int(b)) for a, b in zip(shown.schedule.src, shown.schedule.dst, strict=True)}:
        _arrow(axes, ring, a, b)
    for t, a, b, done in _flying(shown, time):
        contributions = state[a, int(shown.schedule.chunk[t])]
        _piece(axes, ring, _on_the_way(ring, a, b, done), _stripes(contributions), "flies")
    _caption(axes, _ring_words(shown, time, state), time)


def _draw_swap(axes: Axes, shown: Film, time: float) -> None:
    """A piece has the colour of the GPU it comes from and the number of the one it is for."""
    ring = _RingDrawing.of(shown.n, shown.n)
    n = shown.n
    pairs = list(zip(shown.schedule.src.tolist(), shown.schedule.dst.tolist(), strict=True))
    gone = {pair for pair, start in zip(pairs, shown.start.tolist(), strict=True) if start < time}
    arrived = {pair for pair, end in zip(pairs, shown.end.tolist(), strict=True) if end <= time}
    for gpu in range(n):
        _box(axes, ring, gpu)
        x, y = ring.spots[gpu].tolist()
        axes.text(
            x + math.copysign(2.2 * ring.wide, x),
            y,
            f"machine {shown.machines[gpu]}",
            rotation=90,
            fontsize=9,
            color=QUIET,
            ha="center",
            va="center",
        )
        for k in range(n):
            if k == gpu or (k, gpu) in arrived:
                _piece(axes, ring, ring.row(gpu, k), [series[k]], "done", gpu)
            elif (gpu, k) not in gone:
                _piece(axes, ring, ring.row(gpu, k), [series[gpu]], number=k)
    for _, a, b, done in _flying(shown, time):
        across, up = (ring.spots[b] - ring.spots[a]) / np.linalg.norm(ring.spots[b] - ring.spots[a])
        x, y = _on_the_way(ring, a, b, done)
        _piece(axes, ring, (x + ASIDE * up, y - ASIDE * across), [series[a]], "flies", b)
    _caption(axes, f"{len(arrived)} of {len(pairs)} pieces are there", time, -_HEIGHT + 0.2)


def _flying(shown: Film, time: float) -> Iterator[tuple[int, int, int, float]]:
    """Transfers on their way: which, from, to, and what share of the way."""
    for t in np.flatnonzero((shown.start < time) & (time < shown.end)).tolist():
        done = (time - shown.start[t]) / (shown.end[t] - shown.start[t])
        yield t, int(shown.schedule.src[t]), int(shown.schedule.dst[t]), float(done)


def _stripes(contributions: Bools) -> list[str]:
    return [series[k % len(series)] if inside else "#F1F3F5" for k, inside in enumerate(contributions.tolist())]


def _on_the_way(ring: _RingDrawing, a: int, b: int, done: float) -> tuple[float, float]:
    clear = _clear(ring, a, b)
    x, y = _between(ring, a, b, clear + (1 - 2 * clear) * done)
    return x - ring.wide, y - ring.high / 2


def _box(axes: Axes, ring: _RingDrawing, gpu: int) -> None:
    """A GPU and its name: above those of the upper half, below the lower; beside those at the sides."""
    from matplotlib.patches import FancyBboxPatch

    name, width, (x, y) = f"GPU {gpu}", 2.4 * ring.wide, ring.spots[gpu].tolist()
    box = "round,pad=0.06,rounding_size=0.08"
    low = y - ring.height / 2
    edge = series[gpu % len(series)]
    axes.add_patch(FancyBboxPatch((x - width / 2, low), width, ring.height, boxstyle=box, fc="white", ec=edge, lw=2.2))
    if abs(y) < 0.4:
        x, across, upright = x + math.copysign(1.2 * ring.wide + 0.1, -x), "left" if x < 0 else "right", "center"
    else:
        y, across, upright = y + math.copysign(ring.height / 2 + 0.1, y), "center", "bottom" if y > 0 else "top"
    axes.text(x, y, name, ha=across, va=upright, fontsize=10, color=INK)


def _piece(
    axes: Axes,
    ring: _RingDrawing,
    corner: tuple[float, float],
    faces: Sequence[str],
    state: str = "",
    number: int | None = None,
) -> None:
    """A piece with its lower left corner, striped in these colours; ``state`` : it is ``"done"``, or it ``"flies"``."""
    from matplotlib.patches import Rectangle

    (x, y), width, height = corner, 2 * ring.wide, 0.84 * ring.high
    for k, face in enumerate(faces):
        part = width / len(faces)
        axes.add_patch(Rectangle((x + k * part, y), part, height, fc=face, lw=0, zorder=4 + (state == "flies")))
    edge, wide = (INK, 1.3) if state else (QUIET, 0.5)
    axes.add_patch(Rectangle((x, y), width, height, fill=False, zorder=6, ec=edge, lw=wide))
    if number is not None:
        axes.text(
            x + width / 2,
            y + height / 2,
            f"{number}",
            ha="center",
            va="center_baseline",
            fontsize=9,
            color="white",
            zorder=7,
        )


def _arrow(axes: Axes, ring: _RingDrawing, a: int, b: int) -> None:
    from matplotlib.patches import FancyArrowPatch

    clear = _clear(ring, a, b) * 0.86
    start = _between(ring, a, b, clear)
    end = _between(ring, a, b, 1 - clear)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=FAINT, lw=2.4, zorder=1))


def _clear(ring: _RingDrawing, a: int, b: int) -> float:
    """Share of the way from one GPU to another that its box takes, with room for a piece."""
    dx, dy = np.abs(ring.spots[b] - ring.spots[a])
    half_width = 2.3 * ring.wide + 0.16
    half_height = ring.height / 2 + 0.22
    return float(min(half_width / max(dx, 1e-9), half_height / max(dy, 1e-9), 0.45))


def _between(ring: _RingDrawing, a: int, b: int, share: float) -> tuple[float, float]:
    x, y = ring.spots[a] + (ring.spots[b] - ring.spots[a]) * share
    return float(x), float(y)


def _ring_words(shown: Film, time: float, state: Bools) -> str:
    """What is going on."""
    begun = np.flatnonzero(shown.start <= time)
    if state.all():
        return "every GPU has\nevery sum"
    if not len(begun):
        return "start: each GPU has\nits own gradients"
    adds = shown.schedule.reduce[begun[np.argmax(shown.start[begun])]]
    return "reduce-scatter\nadd what arrives" if adds else "all-gather\npass complete sums on"


def _caption(axes: Axes, caption: str, time: float, y: float = 0.14) -> None:
    """Words and the clock, in the middle of a ring."""
    below = 0.42 if "\n" in caption else 0.2
    axes.text(0, y, caption, ha="center", va="center", fontsize=11, color=INK, linespacing=1.5)
    axes.text(0, y - below, format_time(max(time, 0.0)), ha="center", va="center", fontsize=10, color=QUIET)
