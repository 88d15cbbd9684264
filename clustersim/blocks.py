"""Wide rows: one op on many ranks that each have times of their own, kept as arrays instead of a row per rank.

A run whose ranks differ (jitter, a straggler) would need a row for every op and rank: seventeen million for one step of
a 126-layer model on 16,384 GPUs. A :class:`Block` keeps such an op as columns that other blocks can share: an op begins
when the one before it ends, so most columns are somebody else's already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = tuple[Ints, Ints, Floats, Floats, Floats]
"""Op, set, ready, start, end of rows."""


class Block(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One op on the ranks that took part.

    Parameters
    ----------
    op : int, row in :attr:`clustersim.timeline.Timeline.ops`. ranks : (k,) int.
    ready, start, end : [s], (k,) or, where all ranks agree, (1,). Never written to: blocks share them.
    """

    op: int
    ranks: Ints
    ready: Floats
    start: Floats
    end: Floats

    @property
    def times(self) -> tuple[Floats, Floats, Floats]:
        """Ready, start and end, as stored."""
        return self.ready, self.start, self.end

    def of_ranks(self, kept: npt.NDArray[np.bool_]) -> Block:
        """The block without the ranks that ``kept`` (k,) leaves out."""
        if kept.all():
            return self
        times = (column[kept] if len(column) > 1 else column for column in self.times)
        return Block(self.op, self.ranks[kept], *times)

    def between(self, begin: float, end: float) -> Block | None:
        """The block as it was between two times [s], without ranks that did nothing then; None where none did."""
        if self.ready.min() >= begin and self.end.max() <= end and self.end.min() > begin and self.ready.max() < end:
            return self
        kept = np.broadcast_to((self.end > begin) & (self.ready < end), len(self.ranks))
        if not kept.any():
            return None
        some = self if kept.all() else self.of_ranks(kept)
        return Block(some.op, some.ranks, *(np.clip(column, begin, end) for column in some.times))


AT_ONCE = 2**20
"""Elements copied together by :class:`Extents`."""


class Extents:
    """Least, greatest and mean of columns, each looked at once.

    Blocks share their columns, and the views of a run share its blocks: a view starts from what is known of the run.
    """

    def __init__(self, known: Extents | None = None) -> None:
        # By identity: columns in the table are held, so that no other can take the place of one.
        self._place: dict[int, int] = {} if known is None else known._place.copy()
        self._held: list[Floats] = [] if known is None else known._held.copy()
        self._table: Floats = np.empty((0, 3)) if known is None else known._table

    def __reduce__(self) -> tuple[type[Extents], tuple[()]]:
        return Extents, ()  # a copy has columns of its own

    def of(self, columns: Sequence[Floats]) -> Floats:
        """(3, n): the least, the greatest and the mean of each of n columns."""
        places = list(map(self._place.get, map(id, columns)))
        if None in places:
            self._look([column for column, place in zip(columns, places, strict=True) if place is None])
            places = list(map(self._place.get, map(id, columns)))
        return self._table[np.array(places, dtype=np.int64)].T

    def _look(self, columns: list[Floats]) -> None:
        """Reduce columns not met before, those of a length together."""
        alike: dict[int, list[Floats]] = {}
        for column in {id(column): column for column in columns}.values():
            alike.setdefault(len(column), []).append(column)
        for length, which in alike.items():
            step = max(1, AT_ONCE // length)
            for some in (which[at : at + step] for at in range(0, len(which), step)):
                table, first = np.concatenate(some).reshape(-1, length), len(self._held)
                three = table.min(axis=1), table.max(axis=1), table.sum(axis=1) / length
                self._table = np.concatenate([self._table, np.stack(three, axis=1)])
                self._held += some
                self._place.update(zip(map(id, some), range(first, len(self._held)), strict=True))


def totals(blocks: Sequence[Block], extents: Extents) -> tuple[Ints, Floats, Floats, Floats, Floats]:
    """Of each block: op, time from start to end summed over them, first ready, first start, last end [s]."""
    first, _, _ = extents.of([block.ready for block in blocks])
    began, _, begins = extents.of([block.start for block in blocks])
    _, last, over = extents.of([block.end for block in blocks])
    of = np.array([block.op for block in blocks], dtype=np.int64)
    ranks = np.array([len(block.ranks) for block in blocks], dtype=np.int64)
    return of, over * ranks - begins * ranks, first, began, last


class Pool:
    """Columns of times, each kept once: equal ones are one array, and one that is the same for all ranks is short."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, ...], list[Floats]] = {}

    def keep(self, column: Floats) -> Floats:
        """A column equal to this one, which the caller must not write to any more."""
        if column.min() == column.max():
            return column[:1].copy()
        n = len(column)
        # Columns that agree in four places are compared in all; a hash of everything would cost more.
        key = (n, *(float(column[at]) for at in (0, n // 3, n // 2, n - 1)))
        alike = self._known.setdefault(key, [])
        for known in alike:
            if known is column or np.array_equal(known, column):
                return known
        alike.append(column)
        return column


class RankSets:
    """Sets of ranks with ids, equal sets with equal ones."""

    def __init__(self, world_size: int, known: Iterable[Ints] = ()) -> None:
        self.sets: list[Ints] = []
        self._known: dict[bytes, int] = {}
        self._single = np.full(world_size, -1, dtype=np.int64)
        for ranks in known:
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
        ranks, k = block.ranks, len(block.ranks)
        if all(len(column) == 1 for column in block.times):
            return (np.array([block.op]), np.array([self.id(ranks)]), *block.times)
        ready, start, end = (np.broadcast_to(column, k) for column in block.times)
        order = np.lexsort((ranks, end, start, ready))
        ranks, times = ranks[order], (ready[order], start[order], end[order])
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


def joined(parts: Iterable[Columns]) -> Columns:
    """Rows one after another, sorted by op, then start, then set."""
    none = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0)
    op, sets, ready, start, end = (np.concatenate(column) for column in zip(none, *parts, strict=True))
    order = np.lexsort((sets, start, op))
    return op[order], sets[order], ready[order], start[order], end[order]
