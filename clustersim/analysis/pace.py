"""How fast each rank computes, against the others that run the same ops."""

from __future__ import annotations

import numpy as np

from clustersim.analysis.columns import did
from clustersim.arrays import Bools, Floats, Ints
from clustersim.memo import kept_with_first
from clustersim.timeline import Timeline

SLOW = 0.03
"""A rank is slow where its kernels take this much longer than its role's median."""
OUTLIER = 5.0
"""The slowest of a few thousand normal draws is some four standard deviations away; what is further is no accident."""
FEW = 4
"""Of fewer ranks than this the spread says nothing."""


@kept_with_first(maxsize=None)
def kernel_seconds(timeline: Timeline, begin: float = 0.0, end: float = np.inf) -> Floats:
    """(world_size,) float [s]: time of each rank's compute ops that began in a window, queueing left out."""
    compute = np.array([op.kind == "compute" and op.bound != "host" for op in timeline.ops], dtype=bool)
    # A little slack: the first op of a step begins at the very end of the step before.
    slack = 1e-9 * max(timeline.makespan, 1e-30)
    low, high = begin - slack, end - slack
    sets, op, of, _, start, stop = timeline._rows()
    rows = np.flatnonzero(compute[op] & (start >= low) & (start < high))
    of_set = np.bincount(of[rows], weights=stop[rows] - start[rows], minlength=len(sets))
    seconds = np.zeros(timeline.world_size)
    for ranks, value in zip(sets, of_set.tolist(), strict=True):
        if value:
            seconds[ranks] += value
    for block in timeline.blocks:
        if compute[block.op]:
            inside = (block.start >= low) & (block.start < high)
            seconds[block.ranks] += np.where(inside, block.end - block.start, 0.0)
    return seconds


@kept_with_first(maxsize=None)
def roles(timeline: Timeline) -> Ints:
    """(world_size,) int: ranks with equal numbers ran ops of the same roles."""
    names = list(dict.fromkeys(op.role for op in timeline.ops))
    number = np.array([names.index(op.role) for op in timeline.ops], dtype=np.int64)
    used = np.array([did(timeline, number == k) for k in range(len(names))]).reshape(-1, timeline.world_size).T
    _, of = np.unique(used, axis=0, return_inverse=True)
    return np.asarray(of, dtype=np.int64).ravel()


def skews(timeline: Timeline) -> Floats:
    """(n_ops,) float [s]: from the first rank's arrival at a collective to the last one's; nan for other ops."""
    first, last = np.full(len(timeline.ops), np.inf), np.full(len(timeline.ops), -np.inf)
    _, op, _, ready, *_ = timeline._rows()
    np.minimum.at(first, op, ready)
    np.maximum.at(last, op, ready)
    for block in timeline.blocks:
        first[block.op] = min(first[block.op], float(block.ready.min()))
        last[block.op] = max(last[block.op], float(block.ready.max()))
    talks = np.array([op.kind not in {"compute", "send", "recv"} for op in timeline.ops], dtype=bool)
    spread: Floats = np.where(talks & np.isfinite(first), last - first, np.nan)
    return spread


def pace_ratios(timeline: Timeline) -> Floats:
    """(world_size,) float: each rank's kernel time in the whole run over the median of its role; 1 without any."""
    seconds = kernel_seconds(timeline)
    role, ratio = roles(timeline), np.ones(timeline.world_size)
    for r in np.unique(role).tolist():
        mine = role == r
        median = float(np.median(seconds[mine]))
        if median > 0:
            ratio[mine] = seconds[mine] / median
    return ratio


def slow_ranks(timeline: Timeline, ratio: Floats) -> Bools:
    """(world_size,) bool: ranks :data:`SLOW` behind the median and further from it than the spread of the others
    explains (:data:`OUTLIER` robust standard deviations, 1.4826 times the median deviation)."""
    role, slow = roles(timeline), np.zeros(timeline.world_size, dtype=np.bool_)
    for r in np.unique(role).tolist():
        mine = np.flatnonzero(role == r)
        spread = 1.4826 * float(np.median(np.abs(ratio[mine] - 1))) if len(mine) >= FEW else 0.0
        slow[mine] = ratio[mine] - 1 > max(SLOW, OUTLIER * spread)
    return slow
