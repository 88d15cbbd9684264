"""Sums over intervals of time, for drawing them."""

from __future__ import annotations

import numpy as np

from clustersim.core.arrays import Floats, Ints

Intervals = tuple[Floats, Floats]

NARROW = 0.006
STRETCH = 0.02
CROWD = 5
"""Shares of the window below which a bar is narrow (some five pixels) and over which a crowd of them is averaged, and
how many of them are a crowd."""


def joined(starts: Floats, ends: Floats, gap: float) -> Intervals:
    """Intervals that do not overlap, in any order, with those closer than ``gap`` made one."""
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = ends[order]
    apart = starts[1:] > ends[:-1] + gap
    return starts[np.append(True, apart)], ends[np.append(apart, True)]


def minus(first: Intervals, second: Intervals) -> Intervals:
    """Where at least one of ``first`` intervals is open and none of ``second``: (starts, ends)."""
    times = np.concatenate([*first, *second])
    inside = np.concatenate([np.full(len(a), s) for a, s in zip((*first, *second), (1, -1, 0, 0), strict=True)])
    taken = np.concatenate([np.full(len(a), s) for a, s in zip((*first, *second), (0, 0, 1, -1), strict=True)])
    order = np.argsort(times, kind="stable")
    free = (np.cumsum(inside[order]) > 0) & (np.cumsum(taken[order]) == 0)
    moments = times[order]
    return moments[:-1][free[:-1]], moments[1:][free[:-1]]


def packed(
    row: dict[str, Intervals], begin: float, end: float
) -> tuple[dict[str, Intervals], list[tuple[float, float, dict[str, float]]]]:
    """Tell what can be drawn as bars from stretches where narrow bars alternate with others, or with nothing.

    row : (starts, ends) [s] by kind; no two of them overlap. begin, end : the window [s].

    Returns the intervals to draw as they are, and stretches ``(begin, end, share of its time by kind)``, in order.
    """
    width = (end - begin) * NARROW
    kinds, starts, ends = _flat(row, begin, end)
    thin = np.flatnonzero(ends - starts < width)
    # A run ends where something wide, or as long a nothing, comes between two narrow bars.
    breaks = np.flatnonzero(starts[thin][1:] - ends[thin][:-1] >= width) + 1
    runs = [run for run in np.split(thin, breaks) if len(run) >= CROWD]
    left = np.ones(len(kinds), dtype=bool)
    stretches = []
    for run in runs:
        left[run] = False
        run_starts = starts[run]
        run_ends = ends[run]
        first = float(run_starts[0])
        last = float(run_ends[-1])
        edges = np.linspace(first, last, max(1, round((last - first) / ((end - begin) * STRETCH))) + 1)
        for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            near = run[int(run_ends.searchsorted(low)) : int(run_starts.searchsorted(high))]
            took = np.maximum(np.minimum(ends[near], high) - np.maximum(starts[near], low), 0.0)
            share = np.bincount(kinds[near], weights=took, minlength=len(row)) / (high - low)
            stretches.append((low, high, {n: float(t) for n, t in zip(row, share.tolist(), strict=True) if t > 0}))
    rest = {name: (starts[left & (kinds == k)], ends[left & (kinds == k)]) for k, name in enumerate(row)}
    return rest, stretches


def _flat(row: dict[str, Intervals], begin: float, end: float) -> tuple[Ints, Floats, Floats]:
    """All intervals of a row inside the window by start, with the number of their kind; neighbours of a kind that
    touch are one."""
    parts = []
    for k, (starts, ends) in enumerate(row.values()):
        low = np.clip(starts, begin, end)
        high = np.clip(ends, begin, end)
        if (high > low).any():
            low, high = joined(low[high > low], high[high > low], 0.0)
            parts.append((np.full(len(low), k, dtype=np.int64), low, high))
    if not parts:
        return np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0)
    kinds, starts, ends = (np.concatenate(column) for column in zip(*parts, strict=True))
    order = np.argsort(starts, kind="stable")
    return kinds[order], starts[order], ends[order]
