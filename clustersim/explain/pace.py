"""How fast each rank computes, against the others that run the same ops; and which ranks stand for all.

On 16,384 GPUs that jitter no two ranks have the same times. Sums over ranks are taken over all of them even so; what
needs a rank's whole course of time (which state it was in when) is worked out for some (:func:`classes`): of those that
are equal one, and of too many different ones a choice by how fast they are, one from the middle of every equal part of
the ranks in order of pace, the slowest and the fastest, and those whom the others waited for most often.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.blocks import AT_ONCE
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import OpInfo, kinds, of_each
from clustersim.core.sheets import BlockColumns
from clustersim.core.timeline import Timeline, alike
from clustersim.explain.columns import columns_of, did

SLOW = 0.03
"""A rank is slow where its kernels take this much longer than its role's median."""
OUTLIER = 5.0
"""The slowest of a few thousand normal draws is some four standard deviations away; what is further is no accident."""
UNLIKE = 0.1
"""Paces further apart than this, or experts' loads, are no chance."""
PAIR = 2
"""So many ranks have no median that is not half of each."""
FEW = 4
"""Of fewer ranks than this the spread says nothing."""


@kept_with_first(maxsize=None)
def kernel_seconds(
    timeline: Timeline, begin: float = 0.0, end: float = np.inf, *, without_experts: bool = False
) -> Floats:
    """(world_size,) float [s]: time of each rank's compute ops that began in a window, queueing left out."""

    def counts(op: OpInfo) -> bool:
        """Whether an op's time is the GPU's, and asked for."""
        return op.kind == "compute" and op.bound != "host" and not (without_experts and of_experts(op))

    compute = of_each(timeline.ops, counts, bool)
    # A little slack: the first op of a step begins at the very end of the step before.
    slack = 1e-9 * max(timeline.makespan, 1e-30)
    low = begin - slack
    high = end - slack
    sets, op, set_of, _, start, stop = timeline._rows()
    rows = np.flatnonzero(compute[op] & (start >= low) & (start < high))
    of_set = np.bincount(set_of[rows], weights=stop[rows] - start[rows], minlength=len(sets))
    seconds = np.zeros(timeline.world_size)
    for ranks, value in zip(sets, of_set.tolist(), strict=True):
        if value:
            seconds[ranks] += value
    for blocks in timeline.shelf.columns:
        first_start, last_start = (edge[blocks.which[1]] for edge in (blocks.low, blocks.high))
        chosen = np.flatnonzero(compute[blocks.op] & (last_start >= low) & (first_start < high))
        step = max(1, AT_ONCE // len(blocks.ranks))
        for first in range(0, len(chosen), step):
            began, ended = _starts_and_ends(blocks, chosen[first : first + step])
            spent = np.where((began >= low) & (began < high), ended - began, 0.0)
            seconds[blocks.ranks] += spent.sum(axis=1)
    return seconds


def _starts_and_ends(blocks: BlockColumns, chosen: Ints) -> tuple[Floats, Floats]:
    """(k, m) float [s] each, of ``m`` of the blocks on their ``k`` ranks."""
    which = blocks.which[1:, chosen]
    numbers, place = np.unique(which, return_inverse=True)
    table = blocks.stacked(numbers, np.arange(len(blocks.ranks)))
    began, ended = (np.take(table, places, axis=1) for places in place.reshape(which.shape))
    return began, ended


@kept_with_first(maxsize=None)
def roles(timeline: Timeline) -> Ints:
    """(world_size,) int: ranks with equal numbers ran ops of the same roles."""
    names = list(dict.fromkeys(op.role for op in kinds(timeline.ops)))
    number = of_each(timeline.ops, lambda op: names.index(op.role), np.int64)
    used = np.array([did(timeline, number == k) for k in range(len(names))]).reshape(-1, timeline.world_size).T
    _, role_of = np.unique(used, axis=0, return_inverse=True)
    return np.asarray(role_of, dtype=np.int64).ravel()


def skews(timeline: Timeline) -> Floats:
    """(n_ops,) float [s]: from the first rank's arrival at a collective to the last one's; nan for other ops."""
    first = np.full(len(timeline.ops), np.inf)
    last = np.full(len(timeline.ops), -np.inf)
    _, op, _, ready, *_ = timeline._rows()
    np.minimum.at(first, op, ready)
    np.maximum.at(last, op, ready)
    for blocks in timeline.shelf.columns:
        np.minimum.at(first, blocks.op, blocks.low[blocks.which[0]])
        np.maximum.at(last, blocks.op, blocks.high[blocks.which[0]])
    talks = of_each(timeline.ops, lambda op: op.kind not in {"compute", "send", "recv"}, bool)
    spread: Floats = np.where(talks & np.isfinite(first), last - first, np.nan)
    return spread


def of_experts(op: OpInfo) -> bool:
    """Whether an op is a pass of routed experts, whose time follows the tokens that they get.

    >>> of_experts(OpInfo("bwd layers.3 experts", "compute", "compute"))
    True
    """
    return op.kind == "compute" and op.name.endswith(" experts")


def pace_ratios(timeline: Timeline, begin: float = 0.0, end: float = np.inf) -> Floats:
    """(world_size,) float: each rank's kernel time in a window, or the whole run, over the median of its role; 1
    without any."""
    return _over_median(timeline, kernel_seconds(timeline, begin, end))


def peers_named(timeline: Timeline, rank: int) -> str:
    """What a rank's pace is over, in words."""
    role = roles(timeline)
    return "its only peer" if np.count_nonzero(role == role[rank]) == PAIR else "the median of its peers"


def _over_median(timeline: Timeline, seconds: Floats) -> Floats:
    """(world_size,) float: each rank's seconds over the median of its role; 1 where that has none.

    Of two ranks it is over the quicker one's: half of what they differ by would be the slower one's own.
    """
    role = roles(timeline)
    ratio = np.ones(timeline.world_size)
    for r in np.unique(role).tolist():
        members = role == r
        usual = float(seconds[members].min() if members.sum() == PAIR else np.median(seconds[members]))
        if usual > 0:
            ratio[members] = seconds[members] / usual
    return ratio


def by_experts(timeline: Timeline) -> Bools:
    """(world_size,) bool: ranks slower than the median of their role in passes of experts, and in other kernels less
    than half as much: a slow GPU is as slow in all of them."""
    if not any(map(of_experts, kinds(timeline.ops))):
        return np.zeros(timeline.world_size, dtype=np.bool_)
    longer = _over_median(timeline, kernel_seconds(timeline)) - 1
    elsewhere = _over_median(timeline, kernel_seconds(timeline, without_experts=True)) - 1
    by_those: Bools = (longer > 0) & (elsewhere < 0.5 * longer)
    return by_those


def slow_ranks(timeline: Timeline, ratio: Floats) -> Bools:
    """(world_size,) bool: ranks :data:`SLOW` behind the median and further from it than the spread of the others
    explains (:data:`OUTLIER` robust standard deviations, 1.4826 times the median deviation)."""
    role = roles(timeline)
    slow = np.zeros(timeline.world_size, dtype=np.bool_)
    for r in np.unique(role).tolist():
        members = np.flatnonzero(role == r)
        spread = 1.4826 * float(np.median(np.abs(ratio[members] - 1))) if len(members) >= FEW else 0.0
        slow[members] = ratio[members] - 1 > max(SLOW, OUTLIER * spread)
    return slow


MOST_SPANS = 1_500_000
"""Spans that are worked through one by one; what a gigabyte of memory and a few seconds of a core are enough for."""
LEAST = 64
"""And this many ranks, however many ops each has."""


@dataclass(frozen=True, eq=False)
class RankClasses:
    """Ranks by who stands for them.

    ranks : (c,) int, the representatives, ascending. class_of : (world_size,) int, index into ``ranks``.
    sampled : whether a rank may differ from its representative; else they have exactly the same spans.
    """

    ranks: Ints
    class_of: Ints
    sampled: bool


@kept_with_first(maxsize=None)
def classes(timeline: Timeline, most_spans: int = MOST_SPANS) -> RankClasses:
    """Every class of equals, or where those have more than ``most_spans`` spans together, a choice of ranks."""
    ranks, class_of = alike(timeline)
    spans_per_rank = int(timeline.per_op()["ranks"].sum()) / max(timeline.world_size, 1)
    most = max(LEAST, int(most_spans / max(spans_per_rank, 1.0)))
    if len(ranks) <= most:
        return RankClasses(ranks, class_of, False)
    stands_for = _even(timeline, most // 2)
    awaited = _awaited(timeline)[: most // 2]
    stands_for[awaited] = awaited
    chosen, stands_in = np.unique(stands_for, return_inverse=True)
    return RankClasses(chosen.astype(np.int64), np.asarray(stands_in, dtype=np.int64).ravel(), True)


def _even(timeline: Timeline, n: int) -> Ints:
    """(world_size,) who stands for each rank: about ``n`` ranks of the same role and the nearest pace."""
    seconds = kernel_seconds(timeline)
    role = roles(timeline)
    stands_for = np.arange(timeline.world_size)
    for r in np.unique(role).tolist():
        members = np.flatnonzero(role == r)
        members = members[np.argsort(seconds[members], kind="stable")]
        # The slowest and the fastest stand for themselves alone: they are there to be seen, not to weigh.
        inner = members[1:-1]
        parts = max(1, round(n * len(members) / timeline.world_size) - 2)
        part = np.arange(len(inner)) * parts // max(len(inner), 1)
        middle = np.searchsorted(part, np.arange(parts)) + np.bincount(part, minlength=parts) // 2
        if len(inner):
            stands_for[inner] = inner[np.minimum(middle, len(inner) - 1)][part]
    return stands_for


def _awaited(timeline: Timeline) -> Ints:
    """Ranks that came last to a collective of all, those who did most often first."""
    talks = of_each(timeline.ops, lambda op: op.kind != "compute", np.bool_)
    _, row_op, *_ = timeline._rows()
    parts = np.bincount(row_op, minlength=len(talks))
    for blocks in timeline.shelf.columns:
        np.add.at(parts, blocks.op, 1)
    times = np.zeros(timeline.world_size, dtype=np.int64)
    several = talks & (parts > 1)
    for blocks in timeline.shelf.columns:
        alone = talks[blocks.op] & (parts[blocks.op] == 1)
        if (np.diff(blocks.ranks) > 0).all():
            _count_last(blocks, blocks.which[0][alone], times)
        else:
            several[blocks.op[alone]] = True
    columns = columns_of(timeline)
    for i in np.flatnonzero(several).tolist():
        spans = columns.of(i)
        last = spans.ready.argmax()
        times[spans.ranks[last]] += int(spans.ready[last] > spans.ready.min())
    order = np.argsort(-times, kind="stable")
    return order[times[order] > 0]


def _count_last(blocks: BlockColumns, ready: Ints, times: Ints) -> None:
    """Add to the ``times`` of each rank how often it is the last; ``ready`` : of each op, the number of its column."""
    numbers, counts = np.unique(ready, return_counts=True)
    differ = blocks.low[numbers] < blocks.high[numbers]
    numbers = numbers[differ]
    counts = counts[differ]
    everyone = np.arange(len(blocks.ranks))
    step = max(1, AT_ONCE // len(everyone))
    for first in range(0, len(numbers), step):
        chunk = slice(first, first + step)
        last = blocks.stacked(numbers[chunk], everyone).argmax(axis=0)
        np.add.at(times, blocks.ranks[last], counts[chunk])
