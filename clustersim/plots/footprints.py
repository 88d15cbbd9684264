"""Memory of one GPU, run beside run: a bar each, cut by what holds it, against what the GPU has."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clustersim.errors import ProgramError
from clustersim.plots.drawing import Axes, Figure, drawn_on, legend_below, plain_axes, titled
from clustersim.plots.style import INK, byte_unit, palette, part_styles
from clustersim.units import format_bytes


def footprints(
    runs: Mapping[str, Mapping[str, float]], capacity: float | None = None, title: str | None = None, *,
    ax: Axes | None = None,
) -> Figure:  # fmt: skip
    """One GPU's memory at its fullest moment, a bar for each run.

    Parameters
    ----------
    runs : bytes by what holds them, by run: a column of :class:`clustersim.memory.Course` at its peak, or any parts of
        a whole. capacity : of the GPU [bytes]. ax : drawn on instead of a new figure.

    Raises :class:`ProgramError` where nothing holds memory.
    """
    totals = {name: float(sum(parts.values())) for name, parts in runs.items()}
    if not totals or not max(totals.values()):
        raise ProgramError("nothing to draw: nothing holds memory")
    parts = [
        p for p in dict.fromkeys(p for held in runs.values() for p in held) if any(r.get(p) for r in runs.values())
    ]
    scale, unit = byte_unit(max(*totals.values(), capacity or 0.0))
    figure, axes = drawn_on(ax, 0.46 * len(runs) + (1.6 if title else 1.3))
    y, left = np.arange(len(runs))[::-1], np.zeros(len(runs))
    styles = part_styles(parts)
    for part in parts:
        width = np.array([held.get(part, 0.0) for held in runs.values()]) / scale
        name = part.replace("_", " ")
        look = styles[name]
        axes.barh(y, width, left=left, height=0.7, fc=look.face, hatch=look.hatch, ec="white", lw=0.8, label=name)
        left += width
    for at, end, total in zip(y, left, totals.values(), strict=True):
        over = bool(capacity and total > capacity)
        words = f" {format_bytes(total)}" + (", too much" if over else "")
        axes.text(end, at, words, va="center", fontsize=9.5, color=palette["stall"] if over else INK)
    longest = max(*totals.values(), capacity or 0.0) / scale
    if capacity:
        _limit(axes, capacity / scale, len(runs) - 0.5, f"{format_bytes(capacity)} of the GPU")
    plain_axes(axes)
    axes.set_yticks(y, list(runs), fontsize=10)
    axes.set_ylim(-0.55, len(runs) - 0.1)
    axes.set_xlim(0, longest * 1.2)
    axes.set_xlabel(f"memory of one GPU [{unit}]", fontsize=10)
    legend_below(figure, ax, axes, ncols=min(len(parts), 5), fontsize=9, handlelength=1.3)
    return titled(figure, title, _alt(runs, totals, capacity), ax)


def _limit(axes: Axes, x: float, y: float, words: str) -> None:
    """A line at what a GPU has, with its words on top."""
    axes.axvline(x, color=palette["stall"], lw=1.6, ls=(0, (4, 2)), zorder=0)
    box = {"fc": "white", "ec": "none", "pad": 1.0}
    axes.text(x, y, words, fontsize=9, ha="center", va="bottom", color=palette["stall"], bbox=box)


def _alt(runs: Mapping[str, Mapping[str, float]], totals: Mapping[str, float], capacity: float | None) -> str:
    said = [
        f"{name}: {format_bytes(totals[name])}, "
        + ", ".join(f"{part.replace('_', ' ')} {format_bytes(n)}" for part, n in held.items() if n > 0)
        for name, held in runs.items()
    ]
    limit = f" The GPU has {format_bytes(capacity)}." if capacity else ""
    return f"Memory of one GPU. {'; '.join(said)}.{limit}"
