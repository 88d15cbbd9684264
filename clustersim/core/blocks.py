"""Wide rows: one op on many ranks that each have times of their own, kept as arrays instead of a row per rank.

A run whose ranks differ (jitter, a straggler) would need a row for every op and rank: seventeen million for one step of
a 126-layer model on 16,384 GPUs. A :class:`Block` keeps such an op as columns that other blocks can share: an op begins
when the one before it ends, so most columns are somebody else's already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias, cast

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints

Columns: TypeAlias = tuple[Ints, Ints, Floats, Floats, Floats]
"""Op, set, ready, start, end of rows."""


class Column(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A time of every rank that did an op [s]. Never written to: ops share columns.

    Parameters
    ----------
    values : (1,) where all ranks agree, (k,) one each, or (m,) one per meeting of theirs.
    of : (k,) int, each rank's meeting, an index into ``values``; None where there is one value for each rank or all.
    low, high, mean : over ranks.
    since : what ``values`` are counted from, as the end of a kernel is from its start: many kernels take as long, so
        theirs are the same values. None for 0.
    """

    values: Floats
    of: Ints | None
    low: float
    high: float
    mean: float
    since: Column | None = None

    @property
    def wide(self) -> bool:
        """Whether ranks differ."""
        return self.low < self.high

    @property
    def all(self) -> Floats:
        """(k,), or where all agree (1,)."""
        return self.values if self.of is None and self.since is None else self.at(slice(None))

    def at(self, places: Ints | slice) -> Floats:
        """(k,), or where all agree (1,): what is at some places."""
        counted = self.counted(places)
        return counted if self.since is None else self.since.at(places) + counted

    def counted(self, places: Ints | slice) -> Floats:
        """The same, counted from ``since``."""
        return values_at(self.values, self.of, places)

    @property
    def depth(self) -> int:
        """How many columns it is counted from, one after another."""
        return 0 if self.since is None else 1 + self.since.depth


def values_at(values: Floats, of: Ints | None, places: Ints | slice) -> Floats:
    """What a column's ``values`` are at these places of ranks: one for all, one a rank, or those that ``of`` tells."""
    if len(values) == 1:
        return values
    chosen: Floats = values[places] if of is None else values[of[places]]
    return chosen


class WrittenColumns:
    """Columns written out, each once: ops share columns, and are counted from others' columns."""

    def __init__(self) -> None:
        self._remembered: dict[int, tuple[Column, Floats]] = {}

    def __call__(self, column: Column) -> Floats:
        """:attr:`Column.all`."""
        remembered = self._remembered.get(id(column))
        if remembered is None:
            counted = column.counted(slice(None))
            values = counted if column.since is None else self(column.since) + counted
            # With the column, which is told by its identity as long as it is held.
            remembered = self._remembered[id(column)] = column, values
        return remembered[1]


class Block(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One op on the ranks that took part.

    Parameters
    ----------
    op : int, row in :attr:`clustersim.core.timeline.Timeline.ops`. ranks : (k,) int.
    columns : ready, start and end. What a collective's members share is kept once a meeting.
    """

    op: int
    ranks: Ints
    columns: tuple[Column, Column, Column]

    @property
    def ready(self) -> Floats:
        """(k,) or, where all ranks agree, (1,) [s]; made when asked for, as ``start`` and ``end``."""
        return self.columns[0].all

    @property
    def start(self) -> Floats:
        """See :attr:`ready`."""
        return self.columns[1].all

    @property
    def end(self) -> Floats:
        """See :attr:`ready`."""
        return self.columns[2].all

    @property
    def times(self) -> tuple[Floats, Floats, Floats]:
        """Ready, start and end."""
        return self.ready, self.start, self.end


AT_ONCE = 2**20
"""Elements that are copied to be looked at together."""


Meetings: TypeAlias = tuple[Ints | slice, Ints]
"""A place of each meeting in a column, or all of it where it has a number for each already; and the meeting of each
rank."""


def columns(times: Sequence[Floats], meetings: Sequence[Meetings | None]) -> list[Column]:
    """A :class:`Column` for each of ``times``, (k,) or (1,) [s]: equal ones are one, one that is the same for all ranks
    is short, and one of ``meetings`` is kept once a meeting."""
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (values, met) in enumerate(zip(times, meetings, strict=True)):
        whose = id(met[1]) if met and isinstance(met[0], slice) else 0  # the same numbers for others are no equals
        alike.setdefault((len(values), whose), []).append(i)
    built: list[Column | None] = [None] * len(times)
    for (length, _), which in alike.items():
        first_of: dict[int, int] = {}
        odd = np.random.default_rng(0).integers(2**63, size=length, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
        step = max(1, AT_ONCE // max(length, 1))
        for chunk in (which[first : first + step] for first in range(0, len(which), step)):
            table = np.concatenate([times[i] for i in chunk]).reshape(-1, length)
            bits = table.view(np.uint64)
            marks = ((bits ^ (bits >> np.uint64(29))) * odd).sum(axis=1, dtype=np.uint64).tolist()
            facts = (table.min(axis=1).tolist(), table.max(axis=1).tolist(), (table.sum(axis=1) / length).tolist())
            for i, mark, low, high, mean in zip(chunk, marks, *facts, strict=True):
                same = first_of.setdefault(mark, i)
                if same != i and np.array_equal(times[same], times[i]):
                    built[i] = built[same]
                else:
                    built[i] = _column(times[i], meetings[i], low, high, mean)
    return cast("list[Column]", built)


def _column(values: Floats, meetings: Meetings | None, low: float, high: float, mean: float) -> Column:
    if low == high:
        return Column(values[:1].copy(), None, low, high, low)
    if meetings is None:
        return Column(values, None, low, high, mean)
    return Column(values[meetings[0]], meetings[1], low, high, mean)


class RankSets:
    """Sets of ranks with ids, equal sets with equal ones."""

    def __init__(self, world_size: int, known_sets: Iterable[Ints] = ()) -> None:
        self.sets: list[Ints] = []
        self._known: dict[bytes, int] = {}
        self._single = np.full(world_size, -1, dtype=np.int64)
        for ranks in known_sets:
            self.id(ranks)

    def id(self, ranks: Ints) -> int:
        """Id of a set, new or known."""
        key = ranks.tobytes()
        if key not in self._known:
            self._known[key] = len(self.sets)
            self.sets.append(ranks.copy())
        return self._known[key]

    def rows(self, block: Block) -> Columns:
        """A block as rows, one for each set of ranks with the same times."""
        ranks = block.ranks
        k = len(block.ranks)
        if all(len(column) == 1 for column in block.times):
            return (np.array([block.op]), np.array([self.id(ranks)]), *block.times)
        ready, start, end = (np.broadcast_to(column, k) for column in block.times)
        order = np.lexsort((ranks, end, start, ready))
        ranks = ranks[order]
        times = (ready[order], start[order], end[order])
        new = np.any([np.diff(column) != 0 for column in times], axis=0)
        first = np.concatenate([[0], np.flatnonzero(new) + 1])
        sets = self._ids(ranks, first)
        return np.full(len(sets), block.op, dtype=np.int64), sets, times[0][first], times[1][first], times[2][first]

    def _ids(self, ranks: Ints, first: Ints) -> Ints:
        """Ids of the sets that begin at ``first`` in ``ranks``; sets of one rank, the many, without a search each."""
        sizes = np.diff([*first.tolist(), len(ranks)])
        sets = np.empty(len(first), dtype=np.int64)
        alone = sizes == 1
        singles = ranks[first[alone]]
        for rank in singles[self._single[singles] < 0].tolist():
            self._single[rank] = self.id(np.array([rank], dtype=np.int64))
        sets[alone] = self._single[singles]
        for i in np.flatnonzero(~alone).tolist():
            sets[i] = self.id(ranks[first[i] : first[i] + sizes[i]])
        return sets


def no_rows() -> Columns:
    """Columns of nothing."""
    return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0)


def joined(parts: Iterable[Columns]) -> Columns:
    """Rows one after another, sorted by op, then start, then set."""
    op, sets, ready, start, end = (np.concatenate(column) for column in zip(no_rows(), *parts, strict=True))
    order = np.lexsort((sets, start, op))
    return op[order], sets[order], ready[order], start[order], end[order]
