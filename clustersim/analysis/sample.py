"""Which ranks stand for all: every rank of a class of equals, and of too many different ones a choice.

On 16,384 GPUs that jitter no two ranks have the same times. Sums over ranks are taken over all of them even so; what
needs a rank's whole course of time (which state it was in when) is worked out for some, chosen by how fast they are:
one from the middle of every equal part of the ranks in order of pace, the slowest and the fastest, and those whom the
others waited for most often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.analysis.columns import columns_of
from clustersim.analysis.pace import kernel_seconds, roles
from clustersim.arrays import Ints
from clustersim.memo import kept_with_first
from clustersim.timeline import Timeline, alike

MOST_SPANS = 1_500_000
"""Spans that are worked through one by one; what a gigabyte of memory and a few seconds of a core are enough for."""
LEAST = 64
"""And this many ranks, however many ops each has."""


@dataclass(frozen=True, eq=False)
class Classes:
    """Ranks by who stands for them.

    ranks : (c,) int, the representatives, ascending. class_of : (world_size,) int, index into ``ranks``.
    sampled : whether a rank may differ from its representative; else they have exactly the same spans.
    """

    ranks: Ints
    class_of: Ints
    sampled: bool


@kept_with_first(maxsize=None)
def classes(timeline: Timeline, most_spans: int = MOST_SPANS) -> Classes:
    """Every class of equals, or where those have more than ``most_spans`` spans together, a choice of ranks."""
    ranks, class_of = alike(timeline)
    each = int(timeline.per_op()["ranks"].sum()) / max(timeline.world_size, 1)
    most = max(LEAST, int(most_spans / max(each, 1.0)))
    if len(ranks) <= most:
        return Classes(ranks, class_of, False)
    stands_for = _even(timeline, most // 2)
    awaited = _awaited(timeline)[: most // 2]
    stands_for[awaited] = awaited
    chosen, of = np.unique(stands_for, return_inverse=True)
    return Classes(chosen.astype(np.int64), np.asarray(of, dtype=np.int64).ravel(), True)


def _even(timeline: Timeline, n: int) -> Ints:
    """(world_size,) who stands for each rank: about ``n`` ranks of the same role and the nearest pace."""
    seconds, role = kernel_seconds(timeline), roles(timeline)
    stands_for = np.arange(timeline.world_size)
    for r in np.unique(role).tolist():
        mine = np.flatnonzero(role == r)
        mine = mine[np.argsort(seconds[mine], kind="stable")]
        # The slowest and the fastest stand for themselves alone: they are there to be seen, not to weigh.
        inner = mine[1:-1]
        parts = max(1, round(n * len(mine) / timeline.world_size) - 2)
        part = np.arange(len(inner)) * parts // max(len(inner), 1)
        middle = np.searchsorted(part, np.arange(parts)) + np.bincount(part, minlength=parts) // 2
        if len(inner):
            stands_for[inner] = inner[np.minimum(middle, len(inner) - 1)][part]
    return stands_for


def _awaited(timeline: Timeline) -> Ints:
    """Ranks that came last to a collective of all, those who did most often first."""
    columns, times = columns_of(timeline), np.zeros(timeline.world_size, dtype=np.int64)
    for i, op in enumerate(timeline.ops):
        if op.kind != "compute" and len(ready := columns.of(i).ready):
            times[columns.of(i).ranks[int(np.argmax(ready))]] += int(np.ptp(ready) > 0)
    order = np.argsort(-times, kind="stable")
    return order[times[order] > 0]
