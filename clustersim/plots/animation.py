"""A collective as a film: every piece of every GPU's tensor, from a run that plays each transfer (chunk fidelity)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
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

FPS, FRAMES_A_STEP, HOLD = 12, 9, 14
"""Frames a second, frames for one ring step, frames that the result stands still."""
_RADIUS, _CELL = 1.0, 0.15


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


def ring_frame(shown: Film, time: float, title: str | None = None) -> Figure:
    """One moment: pieces in each GPU, and those on their way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    _draw(figure, shown, time)
    complete = shown.held(time).all(axis=2).mean()
    alt = f"Ring all-reduce of {shown.n} GPUs at {format_time(max(time, 0.0))}: {complete:.0%} of pieces are complete."
    return titled(figure, title, alt)


def ring_animation(shown: Film, path: str | Path, title: str | None = None) -> Path:
    """Write the whole film as a GIF; returns its path."""
    from matplotlib.animation import PillowWriter
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    titled(figure, title, f"Ring all-reduce of {shown.n} GPUs, moment by moment.")
    last = float(shown.end.max())
    steps = 2 * (shown.n - 1)
    times = np.concatenate([np.linspace(0.0, last, steps * FRAMES_A_STEP + 1), np.full(HOLD, last)])
    writer = PillowWriter(fps=FPS)
    with writer.saving(figure, str(path), dpi=100):
        for time in times.tolist():
            for axes in list(figure.axes):
                axes.remove()
            _draw(figure, shown, time)
            writer.grab_frame()
    return Path(path)


def _draw(figure: Figure, shown: Film, time: float) -> None:
    axes = figure.add_subplot()
    axes.set_aspect("equal")
    axes.set_xlim(-1.75, 1.75)
    axes.set_ylim(-1.66, 1.66)
    axes.set_axis_off()
    spots = _spots(shown.n)
    state = shown.held(time)
    flying = np.flatnonzero((shown.start <= time) & (time < shown.end))
    for gpu, spot in enumerate(spots):
        _gpu(axes, spot, gpu, state[gpu])
    for a, b in {(int(a), int(b)) for a, b in zip(shown.schedule.src, shown.schedule.dst, strict=True)}:
        _arrow(axes, spots[a], spots[b], shown.schedule.n_chunks)
    for t in flying.tolist():
        a, b = int(shown.schedule.src[t]), int(shown.schedule.dst[t])
        done = (time - shown.start[t]) / (shown.end[t] - shown.start[t])
        clear = _clear(spots[a], spots[b], shown.schedule.n_chunks)
        x, y = _between(spots[a], spots[b], clear + (1 - 2 * clear) * done)
        _piece(axes, x - _CELL, y - _CELL / 2, state[a, int(shown.schedule.chunk[t])], 2 * _CELL, on_the_way=True)
    _caption(axes, shown, time, flying, state)


def _spots(n: int) -> Floats:
    """GPUs on a circle, the first at the top left, clockwise."""
    angle = 3 * np.pi / 4 - 2 * np.pi * np.arange(n) / n
    return np.column_stack([np.cos(angle) * 1.45 * _RADIUS, np.sin(angle) * 1.36 * _RADIUS])


def _gpu(axes: Axes, spot: Floats, gpu: int, pieces: Bools) -> None:
    """A GPU: its name, and a row for each piece of its tensor."""
    from matplotlib.patches import FancyBboxPatch

    width, height = 2.4 * _CELL, (len(pieces) + 0.5) * _CELL * 1.12
    box = "round,pad=0.06,rounding_size=0.08"
    low = spot[1] - height / 2
    edge = series[gpu % len(series)]
    axes.add_patch(FancyBboxPatch((spot[0] - width / 2, low), width, height, boxstyle=box, fc="white", ec=edge, lw=2.2))
    above = spot[1] >= 0  # names stand outside of the ring
    at, align = (low + height + 0.1, "bottom") if above else (low - 0.1, "top")
    axes.text(spot[0], at, f"GPU {gpu}", ha="center", va=align, fontsize=10, color=INK)
    for k, held in enumerate(pieces):
        _piece(axes, spot[0] - _CELL, low + height - (k + 1.12) * _CELL * 1.12, held, 2 * _CELL)


def _piece(axes: Axes, x: float, y: float, held: Bools, width: float, on_the_way: bool = False) -> None:
    """A piece: a stripe in each GPU's colour whose values are in the sum."""
    from matplotlib.patches import Rectangle

    n = len(held)
    for k, inside in enumerate(held.tolist()):
        face = series[k % len(series)] if inside else "#F1F3F5"
        axes.add_patch(Rectangle((x + k * width / n, y), width / n, _CELL * 0.94, fc=face, lw=0, zorder=4 + on_the_way))
    complete = bool(held.all())
    edge: dict[str, Any] = {"ec": INK, "lw": 1.3} if complete or on_the_way else {"ec": QUIET, "lw": 0.5}
    axes.add_patch(Rectangle((x, y), width, _CELL * 0.94, fill=False, zorder=6, **edge))


def _arrow(axes: Axes, a: Floats, b: Floats, n_chunks: int) -> None:
    from matplotlib.patches import FancyArrowPatch

    clear = _clear(a, b, n_chunks) * 0.86
    start, end = _between(a, b, clear), _between(a, b, 1 - clear)
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=FAINT, lw=2.4, zorder=1))


def _clear(a: Floats, b: Floats, n_chunks: int) -> float:
    """Share of the way from one GPU to another that its box takes, with room for a piece."""
    dx, dy = np.abs(b - a)
    half_width, half_height = 2.3 * _CELL + 0.16, (n_chunks + 0.5) * _CELL * 0.56 + 0.22
    return float(min(half_width / max(dx, 1e-9), half_height / max(dy, 1e-9), 0.45))


def _between(a: Floats, b: Floats, share: float) -> tuple[float, float]:
    x, y = a + (b - a) * share
    return float(x), float(y)


def _caption(axes: Axes, shown: Film, time: float, flying: npt.NDArray[np.int64], state: Bools) -> None:
    """What is going on, in the middle of the ring."""
    if len(flying):
        reducing = bool(shown.schedule.reduce[flying[0]])
        words = "reduce-scatter\nadd what arrives" if reducing else "all-gather\npass complete sums on"
    else:
        words = "every GPU has\nevery sum" if state.all() else "start: each GPU has\nits own gradients"
    axes.text(0, 0.14, words, ha="center", va="center", fontsize=11, color=INK, linespacing=1.5)
    axes.text(0, -0.28, format_time(max(time, 0.0)), ha="center", va="center", fontsize=10, color=QUIET)
