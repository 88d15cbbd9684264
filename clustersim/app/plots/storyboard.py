"""Every step of a collective as a small table of numbers: which GPU holds what of each chunk, and what just moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.drawing import Axes, Figure, new_figure, titled
from clustersim.app.plots.style import INK, QUIET, palette
from clustersim.core.arrays import Bools, Floats
from clustersim.core.errors import ProgramError

Move: TypeAlias = tuple[int, int, int, bool]
"""(sender, receiver, chunk, whether the receiver adds it to its own)."""

COLUMNS = 4
"""Panels side by side."""


def storyboard(states: Sequence[npt.ArrayLike], moves: Sequence[Sequence[Move]], title: str | None = None) -> Figure:
    """A panel for the start and one after each step, a column a GPU and a row a chunk.

    Parameters
    ----------
    states : (steps + 1) arrays (GPUs, chunks) of numbers, before the first step and after each.
    moves : (steps), what moved in each.

    The fuller a cell's colour, the more GPUs' numbers are in it; white figures on the full colour are complete sums. An
    orange frame has just arrived. Raises :class:`ProgramError` where states and moves do not match.
    """
    shown = [np.asarray(state) for state in states]
    if not shown or shown[0].ndim != 2 or any(state.shape != shown[0].shape for state in shown):
        raise ProgramError("a storyboard needs states of one shape, (GPUs, chunks)")
    if len(moves) != len(shown) - 1:
        raise ProgramError(f"{len(shown)} states and {len(moves)} steps; there is a state before and after every step")
    n, chunks = shown[0].shape
    inside = _contributions(n, chunks, moves)
    rows = -(-len(shown) // COLUMNS)
    figure = new_figure(rows * (0.30 * chunks + 0.75) + 0.55)
    for k, state in enumerate(shown):
        axes = figure.add_subplot(rows, COLUMNS, k + 1)
        adds = k and all(add for *_, add in moves[k - 1])
        caption = f"step {k}: {'add' if adds else 'keep'} what arrives" if k else "start"
        _panel(axes, state, inside[k].mean(axis=2), moves[k - 1] if k else (), caption)
    alt_text = (
        "fuller colour: more GPUs' numbers are in the sum      white on blue: complete      orange frame: just arrived"
    )
    figure.supxlabel(alt_text, fontsize=9.5, color=QUIET)
    return titled(figure, title, _alt(shown, inside))


def _contributions(n: int, chunks: int, moves: Sequence[Sequence[Move]]) -> list[Bools]:
    """(GPUs, chunks, GPUs) at the start and after each step: whose numbers each copy of each chunk holds."""
    state = np.zeros((n, chunks, n), dtype=bool)
    state[np.arange(n), :, np.arange(n)] = True
    states = [state]
    for step in moves:
        new = states[-1].copy()
        for src, dst, chunk, add in step:
            new[dst, chunk] = states[-1][src, chunk] | (states[-1][dst, chunk] & add)
        states.append(new)
    return states


def _panel(axes: Axes, state: npt.NDArray[np.generic], share: Floats, step: Sequence[Move], caption: str) -> None:
    from matplotlib.colors import to_rgb
    from matplotlib.patches import Rectangle

    n, chunks = state.shape
    full = np.array(to_rgb(palette["forward"]))
    arrived = {(dst, chunk) for _, dst, chunk, _ in step}
    for gpu in range(n):
        for chunk in range(chunks):
            depth = 1.0 if share[gpu, chunk] == 1.0 else 0.55 * float(share[gpu, chunk]) ** 1.2
            face = tuple(1.0 - depth * (1.0 - full))
            new = (gpu, chunk) in arrived
            edge, width = (palette["communication"], 2.6) if new else ("white", 1.2)
            box = Rectangle((gpu + 0.06, chunk + 0.06), 0.88, 0.88, fc=face, ec=edge, lw=width, zorder=2 + new)
            axes.add_patch(box)
            axes.text(
                gpu + 0.5,
                chunk + 0.52,
                f"{state[gpu, chunk]}",
                ha="center",
                va="center",
                fontsize=11,
                zorder=5,
                color="white" if depth == 1.0 else INK,
            )
    for src, dst, chunk, _ in step:
        _arrow(axes, src, dst, chunk, n)
    axes.set_xlim(-0.35, n + 0.35)
    axes.set_ylim(chunks, 0)
    axes.xaxis.tick_top()
    axes.set_xticks(np.arange(n) + 0.5, [f"GPU {g}" for g in range(n)], fontsize=8.5, color=INK)
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.set_title(caption, fontsize=10.5, color=INK)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _arrow(axes: Axes, src: int, dst: int, chunk: int, n: int) -> None:
    """From a cell to its neighbour's; around the end, out at one side and in at the other."""
    style = {"arrowstyle": "-|>", "color": palette["stall"], "lw": 1.6, "shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    y = chunk + 0.52
    ends = [(src + 0.80, dst + 0.20)] if dst == src + 1 else [(src + 0.80, n + 0.32), (-0.32, dst + 0.20)]
    for begin, end in ends:
        axes.annotate("", (end, y), xytext=(begin, y), arrowprops=style, zorder=6, annotation_clip=False)


def _alt(states: Sequence[npt.NDArray[np.generic]], inside: Sequence[Bools]) -> str:
    captions = [
        f"{'start' if k == 0 else f'after step {k}'}: "
        + ", ".join(f"GPU {g} holds {' '.join(str(v) for v in row)}" for g, row in enumerate(state.tolist()))
        + f", {inside[k].all(axis=2).mean():.0%} complete"
        for k, state in enumerate(states)
    ]
    return f"{len(states)} tables of what each GPU holds of each chunk. " + "; ".join(captions) + "."
