"""What fills a GPU's memory: at the peak, and moment by moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from clustersim.app.plots.drawing import (
    Axes,
    Figure,
    drawn_on,
    inches_wide,
    is_narrow,
    legend_below,
    plain_axes,
    titled,
)
from clustersim.app.plots.style import INK, byte_unit, palette, part_styles
from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError
from clustersim.core.memory_parts import part_label
from clustersim.core.units import format_bytes


def footprint(
    parts: Mapping[str, float], capacity: float | None = None, title: str | None = None, *, ax: Axes | None = None
) -> Figure:
    """One GPU's memory at its peak, as a bar of what holds it, against what the GPU has.

    parts : bytes by what holds them, as :meth:`clustersim.training.memory.MemoryUse.parts` gives them. capacity :
    [bytes].
    """
    sizes = {part_label(name): float(n) for name, n in parts.items() if n > 0}
    if not sizes:
        raise ProgramError("nothing to draw: nothing holds memory")
    total = sum(sizes.values())
    scale, unit = byte_unit(max(total, capacity or 0.0))
    figure, axes = drawn_on(ax, 1.9 if title else 1.6)
    left = 0.0
    styles = part_styles(sizes)
    for name, nbytes in sizes.items():
        width = nbytes / scale
        label = f"{name} {format_bytes(nbytes)}"
        look = styles[name]
        axes.barh(0, width, left=left, height=0.7, fc=look.face, hatch=look.hatch, ec="white", lw=0.8, label=label)
        left += width
    if capacity:
        _limit(axes, capacity / scale, f"{format_bytes(capacity)} of the GPU", vertical=True)
    plain_axes(axes)
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.75)
    axes.set_xlim(0, max(total, capacity or 0.0) / scale * 1.02)
    axes.set_xlabel(f"memory [{unit}]", fontsize=9)
    legend_below(figure, ax, axes, ncols=min(len(sizes), 4), handlelength=1.2)
    caption = ", ".join(f"{name} {format_bytes(n)}" for name, n in sizes.items())
    return titled(figure, title, f"Memory of one GPU at its peak: {caption}.{_room(total, capacity)}", ax)


def footprints(
    runs: Mapping[str, Mapping[str, float]],
    capacity: float | None = None,
    title: str | None = None,
    *,
    ax: Axes | None = None,
) -> Figure:
    """One GPU's memory at its fullest moment, a bar for each run.

    Parameters
    ----------
    runs : bytes by what holds them, by run: a column of :class:`clustersim.training.memory.MemoryCourse` at its peak,
        or any parts of a whole. capacity : of the GPU [bytes].

    Raises :class:`ProgramError` where nothing holds memory.
    """
    totals = {name: float(sum(parts.values())) for name, parts in runs.items()}
    if not totals or not max(totals.values()):
        raise ProgramError("nothing to draw: nothing holds memory")
    names = dict.fromkeys(name for run in runs.values() for name in run)
    parts = [name for name in names if any(run.get(name) for run in runs.values())]
    longest = max(*totals.values(), capacity or 0.0)
    scale, unit = byte_unit(longest)
    figure, axes = drawn_on(ax, 0.46 * len(runs) + (1.6 if title else 1.3))
    y = np.arange(len(runs))[::-1]
    left = np.zeros(len(runs))
    styles = part_styles(parts)
    for part in parts:
        width = np.array([run.get(part, 0.0) for run in runs.values()]) / scale
        look = styles[name := part_label(part)]
        axes.barh(y, width, left=left, height=0.7, fc=look.face, hatch=look.hatch, ec="white", lw=0.8, label=name)
        left += width
    for height, end, total in zip(y, left, totals.values(), strict=True):
        over = bool(capacity and total > capacity)
        label = f" {format_bytes(total)}" + (", too much" if over else "")
        axes.text(end, height, label, va="center", fontsize=9.5, color=palette["stall"] if over else INK)
    if capacity:
        height = capacity / scale
        colour = palette["stall"]
        box = {"fc": "white", "ec": "none", "pad": 1.0}
        axes.axvline(height, color=colour, lw=1.6, ls=(0, (4, 2)), zorder=0)
        label = f"{format_bytes(capacity)} of the GPU"
        axes.text(height, len(runs) - 0.5, label, fontsize=9, ha="center", va="bottom", color=colour, bbox=box)
    plain_axes(axes)
    axes.set_yticks(y, list(runs), fontsize=10)
    axes.set(xlim=(0, longest / scale * 1.2), ylim=(-0.55, len(runs) - 0.1))
    axes.set_xlabel(f"memory of one GPU [{unit}]", fontsize=10)
    legend_below(figure, ax, axes, ncols=min(len(parts), 5), fontsize=9, handlelength=1.3)
    return titled(figure, title, _alt(runs, totals, capacity), ax)


def _alt(runs: Mapping[str, Mapping[str, float]], totals: Mapping[str, float], capacity: float | None) -> str:
    captions = [
        f"{name}: {format_bytes(totals[name])}, "
        + ", ".join(f"{part_label(part)} {format_bytes(n)}" for part, n in run.items() if n > 0)
        for name, run in runs.items()
    ]
    limit = f" The GPU has {format_bytes(capacity)}." if capacity else ""
    return f"Memory of one GPU. {'; '.join(captions)}.{limit}"


def memory_over_time(
    moments: Sequence[str],
    parts: Mapping[str, Floats],
    capacity: float | None = None,
    title: str | None = None,
    *,
    ax: Axes | None = None,
) -> Figure:
    """One GPU's memory through a step, stacked by what holds it, against what the GPU has.

    moments : (m,) names, such as ``fwd layers.0``. parts : (m,) bytes by what holds them. capacity : [bytes].
    """
    columns = {
        part_label(name): np.asarray(n, dtype=np.float64) for name, n in parts.items() if np.any(np.asarray(n) > 0)
    }
    if not columns or not len(moments):
        raise ProgramError("nothing to draw: nothing holds memory")
    total = np.sum(list(columns.values()), axis=0)
    scale, unit = byte_unit(max(float(total.max()), capacity or 0.0))
    figure, axes = drawn_on(ax, 3.4)
    if ax is None and is_narrow(figure):
        figure.set_figheight(3.4 + 0.19 * ((len(columns) + 1) // 2))
    below = _stack(axes, columns, scale)
    peak = int(np.argmax(total))
    if capacity:
        _limit(axes, capacity / scale, f"{format_bytes(capacity)} of the GPU", vertical=False)
    _peak(axes, f"peak {format_bytes(float(total[peak]))} at {moments[peak]}", (peak + 0.5, below[peak]), len(moments))
    plain_axes(axes, ("bottom", "left"))
    _moment_ticks(axes, moments)
    axes.set_xlim(0, len(moments))
    axes.set_ylim(0, max(float(total.max()) * 1.12, (capacity or 0.0) * 1.06) / scale)
    axes.set_ylabel(f"memory [{unit}]", fontsize=9)
    handles = axes.get_legend_handles_labels()[0]
    # Beside the areas it would leave a phone a third of its width for them.
    side = "lower center" if is_narrow(figure) else "right upper"
    legend_below(figure, ax, axes, handles[::-1], side=side, handlelength=1.2)
    alt = f"Memory of one GPU over {len(moments)} moments of a step; peak at {moments[peak]}."
    return titled(figure, title, alt + _room(float(total.max()), capacity), ax)


def _stack(axes: Axes, columns: Mapping[str, Floats], scale: float) -> Floats:
    """Areas one on the other; returns the top of the last."""
    styles = part_styles(columns)
    below = np.zeros(len(next(iter(columns.values()))))
    edges = np.arange(len(below) + 1)
    for name, nbytes in columns.items():
        top = below + nbytes / scale
        axes.fill_between(
            edges,
            np.append(below, below[-1]),
            np.append(top, top[-1]),
            step="post",
            ec="white",
            lw=0.5,
            label=name,
            fc=styles[name].face,
            hatch=styles[name].hatch,
        )
        below = top
    return below


def _peak(axes: Axes, label: str, place: tuple[float, float], n_moments: int) -> None:
    """How much the most is, above it; near an end it reads from there inwards."""
    share = place[0] / n_moments
    half = 0.5 * LETTER * len(label) / inches_wide(axes)
    side = "left" if share < half else "right" if share > 1 - half else "center"
    axes.annotate(
        label,
        place,
        xytext=(0, 5),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=8.5,
        color=INK,
    )


LETTER = 0.075
"""Inches that a letter of nine points takes."""


def _phases(moments: Sequence[str], least: float) -> list[tuple[int, int, str]]:
    """(begin, end, name) of the phases, each as long as the first word of the moments is the same. Those side by side
    whose names are wider than they are have one name together; ``least`` : moments that a letter takes."""
    kinds = [moment.split(" ")[0] for moment in moments]
    starts = [i for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    names = {"fwd": "forward", "bwd": "backward"}
    phases: list[tuple[int, int, list[str]]] = []
    crowded = False
    for start, end in zip(starts, [*starts[1:], len(kinds)], strict=True):
        name = names.get(kinds[start], kinds[start])
        tight = len(name) + 1 > (end - start) / least
        if tight and crowded and end < len(kinds):
            begin, _, together = phases.pop()
            phases.append((begin, end, together if name in together else [*together, name]))
        else:
            phases.append((start, end, [name]))
        crowded = tight
    return [(begin, end, ", ".join(sorted(together))) for begin, end, together in phases]


def _moment_ticks(axes: Axes, moments: Sequence[str]) -> None:
    """Phases below the axis, with the names that there is room for: the widest phases' first."""
    least = LETTER * len(moments) / inches_wide(axes)
    phases = _phases(moments, least)
    axes.set_xticks([begin for begin, *_ in phases], [""] * len(phases))
    taken: list[tuple[float, float]] = []
    for begin, end, name in sorted(phases, key=lambda phase: phase[0] - phase[1]):
        width = least * len(name)
        middle = (begin + end) / 2
        right = min(middle + width / 2, max(float(len(moments)), middle))  # the last one ends with the axis
        if any(right - width < other_right + least and left < right + least for left, other_right in taken):
            continue
        taken.append((right - width, right))
        axes.text(
            right,
            -0.04,
            name,
            transform=axes.get_xaxis_transform(),
            ha="right",
            va="top",
            fontsize=9,
            color=INK,
        )


def _limit(axes: Axes, place: float, label: str, *, vertical: bool) -> None:
    colour = palette["stall"]
    dash = (0, (4, 2))
    if vertical:
        axes.axvline(place, 0.0, 0.86, color=colour, lw=1.6, ls=dash)
        axes.text(place, 0.5, label, ha="right", va="bottom", fontsize=8.5, color=colour)
    else:
        axes.axhline(place, color=colour, lw=1.6, ls=dash)
        axes.text(
            0.005,
            place,
            label,
            ha="left",
            va="bottom",
            fontsize=8.5,
            color=colour,
            transform=axes.get_yaxis_transform(),
            bbox={"fc": "white", "ec": "none", "pad": 1.2, "alpha": 0.85},
        )


def _room(total: float, capacity: float | None) -> str:
    if not capacity:
        return ""
    spare = capacity - total
    return f" {format_bytes(abs(spare))} {'to spare' if spare >= 0 else 'too much'} of {format_bytes(capacity)}."
