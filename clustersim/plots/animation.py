"""A collective as a film: every piece of every GPU's tensor, from a run that plays each transfer (chunk fidelity)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError
from clustersim.plots.style import FAINT, INK, QUIET, series, titled
from clustersim.timeline import Timeline
from clustersim.units import format_time

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from clustersim.collectives.base import Schedule

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_CELL = 0.15
"""Half a piece's width, and its height, where there is room for it."""
_WIDTH, _HEIGHT = 1.75, 1.66
"""Half the size of the picture."""


@dataclass(frozen=True, eq=False)
class _Ring:
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
    def of(cls, n: int, pieces: int) -> _Ring:
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


@dataclass(frozen=True, eq=False)
class Film:
    """What was sent when, and what it held.

    Parameters
    ----------
    schedule : of the collective. start, end : (T,) float [s] of each transfer.
    """

    schedule: Schedule
    start: Floats
    end: Floats

    @property
    def n(self) -> int:
        """How many GPUs."""
        return int(max(self.schedule.src.max(), self.schedule.dst.max())) + 1

    def held(self, time: float) -> Bools:
        """(GPUs, pieces, GPUs): whose contributions each GPU's copy of each piece holds at a time [s]."""
        s, n = self.schedule, self.n
        state = np.zeros((n, s.n_chunks, n), dtype=bool)
        state[np.arange(n), :, np.arange(n)] = True
        for t in np.argsort(self.end, kind="stable").tolist():
            if self.end[t] > time:
                break
            sender, receiver, piece = int(s.src[t]), int(s.dst[t]), int(s.chunk[t])
            if s.reduce[t]:
                state[receiver, piece] |= state[sender, piece]
            else:
                state[receiver, piece] = state[sender, piece]
        return state


def ring_run(n: int = 4, nbytes: float = 64 * 2**20, topology: str = "hgx-a100") -> Film:
    """Play one all-reduce of ``nbytes`` on a ring of ``n`` GPUs of one machine, transfer by transfer."""
    from clustersim import collectives, engine, fabrics
    from clustersim.collectives.base import Group, Request
    from clustersim.engine.replay import schedule_of
    from clustersim.program import Collective, Program, Role

    machine = fabrics.load(topology, nodes=1)
    mesh = fabrics.mesh(machine, nodes=1, nproc_per_node=n)
    request = Request("all_reduce", nbytes, algorithm="ring")
    group = Group(machine, mesh.gpus)
    plan = collectives.plan(request, group, backend="ideal", n_channels=1)
    ranks = mesh.world_group()
    op = Collective("all_reduce", "all_reduce", nbytes, ranks, algorithm="ring")
    program = Program(n, (Role("worker", ranks[0], (op,)),))
    timeline = engine.simulate(program, machine, mesh, planner=lambda *_: plan, fidelity="chunk")
    return film(schedule_of(request, group, plan), timeline)


def film(schedule: Schedule, timeline: Timeline) -> Film:
    """Put a schedule's transfers at the times a chunk-fidelity run of that one collective moved them.

    Raises :class:`ProgramError` where the run played something else.
    """
    use = timeline.links
    if use is None or len(use.transfer_op) != len(schedule.src):
        raise ProgramError("the timeline is not a chunk-fidelity run of this one schedule")
    start, end = np.full(len(schedule.src), np.inf), np.full(len(schedule.src), -np.inf)
    np.minimum.at(start, use.segment_transfer, use.segment_start)
    np.maximum.at(end, use.segment_transfer, use.segment_end)
    return Film(schedule, start, end)


def film_frame(shown: Film, time: float, title: str | None = None) -> Figure:
    """One moment: pieces in each GPU, and those on their way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    _draw(figure, shown, time)
    complete = shown.held(time).all(axis=2).mean()
    alt = f"Ring all-reduce of {shown.n} GPUs at {format_time(max(time, 0.0))}: {complete:.0%} of pieces are complete."
    return titled(figure, title, alt)


def _draw(figure: Figure, shown: Film, time: float) -> None:
    axes = figure.add_subplot()
    axes.set_aspect("equal")
    axes.set_xlim(-_WIDTH, _WIDTH)
    axes.set_ylim(-_HEIGHT, _HEIGHT)
    axes.set_axis_off()
    ring = _Ring.of(shown.n, shown.schedule.n_chunks)
    state = shown.held(time)
    flying = np.flatnonzero((shown.start <= time) & (time < shown.end))
    for gpu in range(shown.n):
        _gpu(axes, ring, gpu, state[gpu])
    for a, b in {(int(a), int(b)) for a, b in zip(shown.schedule.src, shown.schedule.dst, strict=True)}:
        _arrow(axes, ring, a, b)
    for t in flying.tolist():
        a, b = int(shown.schedule.src[t]), int(shown.schedule.dst[t])
        done = (time - shown.start[t]) / (shown.end[t] - shown.start[t])
        clear = _clear(ring, a, b)
        x, y = _between(ring, a, b, clear + (1 - 2 * clear) * done)
        held = state[a, int(shown.schedule.chunk[t])]
        _piece(axes, ring, (x - ring.wide, y - ring.high / 2), held, on_the_way=True)
    _caption(axes, shown, time, state)


def _gpu(axes: Axes, ring: _Ring, gpu: int, pieces: Bools) -> None:
    """A GPU: its name, and a row for each piece of its tensor."""
    from matplotlib.patches import FancyBboxPatch

    width, (x, y) = 2.4 * ring.wide, ring.spots[gpu].tolist()
    box = "round,pad=0.06,rounding_size=0.08"
    low = y - ring.height / 2
    edge = series[gpu % len(series)]
    axes.add_patch(FancyBboxPatch((x - width / 2, low), width, ring.height, boxstyle=box, fc="white", ec=edge, lw=2.2))
    _name(axes, ring, gpu)
    for k, held in enumerate(pieces):
        _piece(axes, ring, (x - ring.wide, low + ring.height - (k + 1.12) * ring.high), held)


def _name(axes: Axes, ring: _Ring, gpu: int) -> None:
    """Above GPUs of the upper half, below those of the lower; beside those at the sides, where pieces pass."""
    x, y = ring.spots[gpu].tolist()
    style: dict[str, Any] = {"fontsize": 10, "color": INK}
    if abs(y) < 0.4:
        aside = math.copysign(1.2 * ring.wide + 0.1, -x)
        axes.text(x + aside, y, f"GPU {gpu}", ha="left" if x < 0 else "right", va="center", **style)
    else:
        up = math.copysign(ring.height / 2 + 0.1, y)
        axes.text(x, y + up, f"GPU {gpu}", ha="center", va="bottom" if up > 0 else "top", **style)


def _piece(axes: Axes, ring: _Ring, at: tuple[float, float], held: Bools, on_the_way: bool = False) -> None:
    """A piece with its lower left corner: a stripe in each GPU's colour whose values are in the sum."""
    from matplotlib.patches import Rectangle

    n, (x, y) = len(held), at
    width, height = 2 * ring.wide, 0.84 * ring.high
    for k, inside in enumerate(held.tolist()):
        face = series[k % len(series)] if inside else "#F1F3F5"
        axes.add_patch(Rectangle((x + k * width / n, y), width / n, height, fc=face, lw=0, zorder=4 + on_the_way))
    complete = bool(held.all())
    edge: dict[str, Any] = {"ec": INK, "lw": 1.3} if complete or on_the_way else {"ec": QUIET, "lw": 0.5}
    axes.add_patch(Rectangle((x, y), width, height, fill=False, zorder=6, **edge))


def _arrow(axes: Axes, ring: _Ring, a: int, b: int) -> None:
    from matplotlib.patches import FancyArrowPatch

    clear = _clear(ring, a, b) * 0.86
    start, end = _between(ring, a, b, clear), _between(ring, a, b, 1 - clear)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=FAINT, lw=2.4, zorder=1))


def _clear(ring: _Ring, a: int, b: int) -> float:
    """Share of the way from one GPU to another that its box takes, with room for a piece."""
    dx, dy = np.abs(ring.spots[b] - ring.spots[a])
    half_width, half_height = 2.3 * ring.wide + 0.16, ring.height / 2 + 0.22
    return float(min(half_width / max(dx, 1e-9), half_height / max(dy, 1e-9), 0.45))


def _between(ring: _Ring, a: int, b: int, share: float) -> tuple[float, float]:
    x, y = ring.spots[a] + (ring.spots[b] - ring.spots[a]) * share
    return float(x), float(y)


def _caption(axes: Axes, shown: Film, time: float, state: Bools) -> None:
    """What is going on, in the middle of the ring."""
    begun = np.flatnonzero(shown.start <= time)
    if state.all():
        words = "every GPU has\nevery sum"
    elif not len(begun):
        words = "start: each GPU has\nits own gradients"
    elif shown.schedule.reduce[begun[np.argmax(shown.start[begun])]]:
        words = "reduce-scatter\nadd what arrives"
    else:
        words = "all-gather\npass complete sums on"
    axes.text(0, 0.14, words, ha="center", va="center", fontsize=11, color=INK, linespacing=1.5)
    axes.text(0, -0.28, format_time(max(time, 0.0)), ha="center", va="center", fontsize=10, color=QUIET)
