"""Time that ranks spend in states, by algebra on intervals that are arrays over ranks.

One stream does one thing at a time, so its spans are disjoint and in order on every rank, and an op's span on all ranks
is one pair of arrays. The overlap of two streams is the sum of the overlaps of their ops, and of those only neighbours
in time matter: a few numpy calls per op, however many ranks differ. Unions of streams follow by inclusion and
exclusion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import combinations
from typing import TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.blocks import AT_ONCE
from clustersim.timeline import Timeline

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
T = TypeVar("T")

MOST_STREAMS = 4
"""Streams of one role whose union is taken by inclusion and exclusion, which doubles with each."""


class Interval(msgspec.Struct, frozen=True, eq=False, gc=False):
    """From ``start`` to ``end`` [s], arrays over ranks (one element: all of them); empty where ``end <= start``.

    No rank is inside it before ``first`` or after ``last`` [s].
    """

    start: Floats
    end: Floats
    first: float
    last: float


Intervals: TypeAlias = list[Interval]
"""Disjoint on every rank, in order of ``first``; ``last`` in order too."""


def _table(columns: Sequence[Floats], n: int) -> Floats:
    """(len(columns), n): a row for each column."""
    flat = np.concatenate(columns) if columns else np.zeros(0)
    if len(flat) == len(columns) * n:
        return flat.reshape(-1, n)
    table, wide = np.empty((len(columns), n)), np.array([len(column) > 1 for column in columns])
    of_each = np.repeat(wide, np.where(wide, n, 1))
    table[wide], table[~wide] = flat[of_each].reshape(-1, n), flat[~of_each, None]
    return table


def _parts(items: Sequence[T], n: int) -> Iterator[Sequence[T]]:
    """Items a few at a time, so that a table of their columns of ``n`` stays small."""
    step = max(1, AT_ONCE // n)
    return (items[at : at + step] for at in range(0, len(items), step))


def overlap(one: Intervals, other: Intervals) -> Intervals:
    """Where both are: disjoint again, empty ones left out."""
    n = max((len(column) for item in (*one, *other) for column in (item.start, item.end)), default=1)
    found: Intervals = []
    for i, j, start, end in _both(one, other, n):
        for p in np.flatnonzero((end > start).any(axis=1)).tolist():
            a, b = one[i[p]], other[j[p]]
            found.append(Interval(start[p], end[p], max(a.first, b.first), min(a.last, b.last)))
    return _in_order(found)


def shared(one: Intervals, other: Intervals, n: int) -> Floats:
    """(n,) length of their overlap per rank [s]."""
    length = np.zeros(n)
    for _, _, start, end in _both(one, other, n):
        length += np.maximum(end - start, 0.0).sum(axis=0)
    return length


def _both(one: Intervals, other: Intervals, n: int) -> Iterator[tuple[Ints, Ints, Floats, Floats]]:
    """Pairs that some rank may be in together, a few at a time: their places, and (pairs, n) start and end of what
    they share, which is nothing where the end is not after the start."""
    begin = np.searchsorted([b.last for b in other], [a.first for a in one], side="right")
    count = np.maximum(np.searchsorted([b.first for b in other], [a.last for a in one], side="left") - begin, 0)
    i = np.repeat(np.arange(len(one)), count)
    j = np.arange(len(i)) + np.repeat(begin - np.cumsum(count) + count, count)
    step = max(1, AT_ONCE // n)
    for at in range(0, len(i), step):
        some = i[at : at + step], j[at : at + step]
        (start, end), (begun, over) = _tables(one, some[0], n), _tables(other, some[1], n)
        yield *some, np.maximum(start, begun), np.minimum(end, over)


def _tables(intervals: Intervals, which: Ints, n: int) -> tuple[Floats, Floats]:
    """(len(which), n) starts and ends."""
    distinct, place = np.unique(which, return_inverse=True)
    some = [intervals[i] for i in distinct.tolist()]
    return _table([item.start for item in some], n)[place], _table([item.end for item in some], n)[place]


def _in_order(intervals: Intervals) -> Intervals:
    """Sorted by first; ``last`` made to grow, which only makes it a looser bound."""
    latest, ordered = -np.inf, []
    for item in sorted(intervals, key=lambda i: i.first):
        latest = max(latest, item.last)
        ordered.append(Interval(item.start, item.end, item.first, latest))
    return ordered


def total(intervals: Intervals, n: int) -> Floats:
    """(n,) length of disjoint intervals per rank [s]."""
    length = np.zeros(n)
    for some in _parts(intervals, n):
        each = _table([item.end for item in some], n) - _table([item.start for item in some], n)
        length += np.maximum(each, 0.0, out=each).sum(axis=0)
    return length


def union(streams: list[Intervals], within: Intervals | None, n: int) -> Floats:
    """(n,) time any of the streams is busy [s], where ``within`` is busy too if it is given."""
    length = np.zeros(n)
    for count in range(1, len(streams) + 1):
        for chosen in combinations(streams, count):
            *some, last = chosen if within is None else (within, *chosen)
            both = shared(reduce(overlap, some), last, n) if some else total(last, n)
            length += both if count % 2 else -both
    return length


def per_stream(run: Timeline, ops: list[int], begin: str) -> dict[str, Intervals] | None:
    """Intervals of some ops by stream, from ``begin`` (``"ready"`` or ``"start"``) to their ends, on all ranks.

    None where a stream's spans overlap on some rank, which only measured runs do.
    """
    whole = _whole(run, set(ops), begin)
    streams: dict[str, Intervals] = {}
    for op in ops:
        if op in whole:
            streams.setdefault(run.ops[op].stream, []).append(whole[op])
    for stream, intervals in streams.items():
        ordered = _in_order(intervals)
        if not _disjoint(ordered, run.world_size):
            return None
        streams[stream] = ordered
    return streams


def _whole(run: Timeline, ops: set[int], begin: str) -> dict[int, Interval]:
    """Every op's interval on all ranks; ranks without it have an empty one at 0."""
    n = run.world_size
    sets, op_of, set_of, ready, start, end = run._rows()
    left = ready if begin == "ready" else start
    found: dict[int, Interval] = {}
    parts: dict[int, list[tuple[Ints, Floats, Floats]]] = {}
    for row in range(len(op_of)):
        if (op := int(op_of[row])) in ops:
            parts.setdefault(op, []).append((sets[set_of[row]], left[row : row + 1], end[row : row + 1]))
    for block in run.blocks:
        if block.op in ops:
            times = (block.ready if begin == "ready" else block.start), block.end
            parts.setdefault(block.op, []).append((block.ranks, *times))
    whole = {op: mine[0][1:] for op, mine in parts.items() if len(mine) == 1 and len(mine[0][0]) == n}
    lowest = _extremes(run, [begun for begun, _ in whole.values()], 0)
    highest = _extremes(run, [over for _, over in whole.values()], 1)
    for (op, (begun, over)), low, high in zip(whole.items(), lowest, highest, strict=True):
        found[op] = Interval(begun, over, low, high)
    for op, mine in parts.items():
        if op in whole:
            continue
        starts, ends = np.zeros(n), np.zeros(n)
        for ranks, first, last in mine:
            starts[ranks], ends[ranks] = first, last
        found[op] = Interval(starts, ends, min(float(p[1].min()) for p in mine), max(float(p[2].max()) for p in mine))
    return found


def _extremes(run: Timeline, columns: list[Floats], which: int) -> list[float]:
    """The least (0) or greatest (1) of each column."""
    wide = iter(run.extents.of([column for column in columns if len(column) > 1])[which].tolist())
    return [next(wide) if len(column) > 1 else float(column[0]) for column in columns]


def _disjoint(intervals: Intervals, n: int) -> bool:
    busy_until = np.full(n, -np.inf)
    for some in _parts(intervals, n):
        start, end = _table([item.start for item in some], n), _table([item.end for item in some], n)
        if (start[0] >= busy_until).all() and (end >= start).all() and (start[1:] >= end[:-1]).all():
            busy_until = np.maximum(busy_until, end[-1])
            continue  # as most are: nothing empty in between
        longer = end > start
        until = np.maximum.accumulate(np.concatenate([busy_until[None], np.where(longer, end, -np.inf)]), axis=0)
        if (longer & (start < until[:-1])).any():
            return False
        busy_until = until[-1]
    return True
