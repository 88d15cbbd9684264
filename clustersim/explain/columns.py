"""A Timeline's spans op by op, as arrays over ranks, without a row for every op and rank.

Ops that all ranks did at the same times, and blocks, are looked at as they are kept: nothing is copied, so that a few
thousand ops on 16,384 GPUs are a few thousand views.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Columns, Floats, Ints
from clustersim.core.blocks import Block, WrittenColumns
from clustersim.core.memo import kept_with_first
from clustersim.core.timeline import Timeline

MOST_KEPT = 2048
"""Ranks of an op whose spans are kept once they were looked up: of more ranks there are few ops, and much to keep."""


OFTEN = 3
MOST_TABLES = 32
"""Times that a rank is asked for before its spans are laid out in a table of its own, and how many tables are kept."""


class OpSpans(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Spans of one op: ``ranks`` (k,) int, ascending, and ``ready``, ``start``, ``end`` (k,) float [s].

    A rank that did the op several times (measured runs) is there as often, in order of start.
    """

    ranks: Ints
    ready: Floats
    start: Floats
    end: Floats


@dataclass(frozen=True, eq=False)
class RankSpans:
    """Spans of one rank: ``op``, ``at`` (position in the op's :class:`OpSpans`), ``ready``, ``start``, ``end``."""

    op: Ints
    at: Ints
    ready: Floats
    start: Floats
    end: Floats


class RankSpan(NamedTuple):
    """One span of one rank: its ``op``, ``at`` (position in the op's :class:`OpSpans`), ``start`` and ``end`` [s]."""

    op: int
    at: int
    start: float
    end: float


@kept_with_first(maxsize=None)
def columns_of(timeline: Timeline) -> OpColumns:
    """Every op's spans, for all who ask."""
    return OpColumns(timeline)


class OpColumns:
    """Every op's spans, looked up when asked for."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        sets, op, set_of, *times = timeline._rows()
        order = np.lexsort((times[1], op))
        self._sets, self._of, self._times = sets, set_of[order], np.stack([column[order] for column in times])
        self._ptr = np.searchsorted(op[order], np.arange(len(timeline.ops) + 1))
        self._blocks: dict[int, list[int]] = {}
        self._known: dict[int, OpSpans] = {}
        self._asked: dict[int, int] = {}
        self._tables: dict[int, RankTable] = {}
        self._written = WrittenColumns()
        self._ascending: dict[int, tuple[Ints, bool]] = {}
        for i, block in enumerate(timeline.blocks):
            self._blocks.setdefault(block.op, []).append(i)

    @cached_property
    def _by_end(self) -> tuple[Ints, Floats, Floats, Floats]:
        """Ops in order of their last end, those ends, the first moment any of those from there on is ready, and the
        first moment each op is: two binary searches find the few that can be open in a window."""
        ops = self.timeline.per_op()
        order = np.argsort(ops["end"], kind="stable")
        ready = ops["ready"]
        return order, ops["end"][order], np.minimum.accumulate(ready[order][::-1])[::-1], ready

    @cached_property
    def _whose(self) -> tuple[Ints, Ints]:
        """The lowest and the highest rank that did each op: other stages' ops need not be looked at."""
        n = len(self.timeline.ops)
        lowest = np.full(n, self.timeline.world_size)
        highest = np.full(n, -1)
        sets, op, set_of, *_ = self.timeline._rows()
        edges = np.array([(ranks.min(), ranks.max()) for ranks in sets], dtype=np.int64).reshape(-1, 2)[set_of]
        np.minimum.at(lowest, op, edges[:, 0])
        np.maximum.at(highest, op, edges[:, 1])
        for blocks in self.timeline.shelf.columns:
            lowest[blocks.op] = np.minimum(lowest[blocks.op], blocks.ranks.min())
            highest[blocks.op] = np.maximum(highest[blocks.op], blocks.ranks.max())
        return lowest, highest

    def of(self, op: int) -> OpSpans:
        """The spans of an op."""
        op_spans = self._known.get(op)
        if op_spans is None:
            op_spans = self._looked_up(op)
            if len(op_spans.ranks) <= MOST_KEPT:
                self._known[op] = op_spans
        return op_spans

    def _looked_up(self, op: int) -> OpSpans:
        parts = []
        for row in range(int(self._ptr[op]), int(self._ptr[op + 1])):
            ranks = self._sets[self._of[row]]
            parts.append((ranks, *np.broadcast_to(self._times[:, row : row + 1], (3, len(ranks)))))
        for i in self._blocks.get(op, ()):
            block = self.timeline.blocks[i]
            parts.append((block.ranks, *self._of_block(block)))
        if not parts:
            none = np.zeros(0)
            return OpSpans(np.zeros(0, dtype=np.int64), none, none, none)
        spans = OpSpans(*(parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))))
        if self._are_ascending(spans.ranks, shared=len(parts) == 1):
            return spans
        order = np.lexsort((spans.start, spans.ranks))
        return OpSpans(spans.ranks[order], spans.ready[order], spans.start[order], spans.end[order])

    def _of_block(self, block: Block) -> tuple[Floats, ...]:
        """Ready, start and end of each rank [s]."""
        n = len(block.ranks)
        times = [self._written(column) for column in block.columns] if n <= MOST_KEPT else block.times
        return tuple(column if len(column) == n else np.broadcast_to(column, n) for column in times)

    def _are_ascending(self, ranks: Ints, *, shared: bool) -> bool:
        """Whether no rank is there twice, and all are in order; of arrays that ops share it is asked once."""
        remembered = self._ascending.get(id(ranks)) if shared else None
        if remembered is None:
            remembered = ranks, len(ranks) < 2 or bool((ranks[1:] > ranks[:-1]).all())
            if shared:
                self._ascending[id(ranks)] = remembered
        return remembered[1]

    def of_rank(self, rank: int, begin: float, end: float) -> RankSpans:
        """Spans of a rank that end at or after ``begin`` and are ready at or before ``end`` [s], by op, then start."""
        times_asked = self._asked[rank] = self._asked.get(rank, 0) + 1
        return self._in_table(rank, begin, end) if times_asked > OFTEN else self._among_ops(rank, begin, end)

    def _among_ops(self, rank: int, begin: float, end: float) -> RankSpans:
        """Op by op, of those that may be open: nothing is made ready for it."""
        order, ends, since, ready = self._by_end
        near = order[int(np.searchsorted(ends, begin)) : int(np.searchsorted(since, end, side="right"))]
        lowest, highest = self._whose
        place_in = _PlaceOfRank(rank)
        rows = []
        for op in np.sort(near[(ready[near] <= end) & (lowest[near] <= rank) & (rank <= highest[near])]).tolist():
            spans = self.of(op)
            first = place_in(spans.ranks)
            while first < len(spans.ranks) and spans.ranks.item(first) == rank:
                until = spans.end.item(first)
                since_ready = spans.ready.item(first)
                if until >= begin and since_ready <= end:
                    rows.append((op, first, since_ready, spans.start.item(first), until))
                first += 1
        table = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return RankSpans(table[0].astype(np.int64), table[1].astype(np.int64), table[2], table[3], table[4])

    def ended(self, rank: int, begin: float, end: float) -> list[RankSpan]:
        """Spans of a rank that end at or after ``begin`` and at or before ``end`` [s], by op, then start."""
        table = self._table(rank)
        first = int(table.ends.searchsorted(begin))
        places = table.order[first : int(table.ends.searchsorted(end, side="right"))].tolist()
        places.sort()
        self._find(table, rank, places)
        op, at, start, ends = table.op, table.at, table.start, table.end
        return [RankSpan(op.item(k), at.item(k), start.item(k), ends.item(k)) for k in places]

    def _table(self, rank: int) -> RankTable:
        """The table of a rank that is asked for time and again, as a walk along its ops does."""
        table = self._tables.pop(rank, None) or _rank_table(self.timeline, rank)
        self._tables[rank] = table  # the last asked for is the last to go
        if len(self._tables) > MOST_TABLES:
            del self._tables[next(iter(self._tables))]
        return table

    def _find(self, table: RankTable, rank: int, places: list[int]) -> None:
        """Have ``at`` of some places of a rank's table, which nobody may have asked for yet."""
        place_in = _PlaceOfRank(rank)
        for k in places:
            if table.at.item(k) < 0:
                table.at[k] = place_in(self.of(table.op.item(k)).ranks) + table.turn.item(k)

    def _in_table(self, rank: int, begin: float, end: float) -> RankSpans:
        """In the rank's table."""
        table = self._table(rank)
        near = table.near(begin, end)
        self._find(table, rank, near.tolist())
        return RankSpans(table.op[near], table.at[near], table.ready[near], table.start[near], table.end[near])


class _PlaceOfRank:
    """The place of one rank in arrays of ascending ranks, searched once in each: ops share theirs."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # With the array, which is told by its identity as long as it is held.
        self._known: dict[int, tuple[Ints, int]] = {}

    def __call__(self, ranks: Ints) -> int:
        remembered = self._known.get(id(ranks))
        if remembered is None:
            remembered = self._known[id(ranks)] = ranks, int(ranks.searchsorted(self._rank))
        return remembered[1]


@dataclass(frozen=True, eq=False)
class RankTable:
    """All spans of one rank, (m,) each, by op, then start; ``turn`` counts those of one op from 0.

    ``at`` : their places among the op's, -1 for what nobody has asked for yet.
    ``order`` : by end. ``ends`` : in that order. ``since`` : the first moment any of those from there on is ready.
    """

    op: Ints
    turn: Ints
    at: Ints
    ready: Floats
    start: Floats
    end: Floats
    order: Ints
    ends: Floats
    since: Floats

    def near(self, begin: float, end: float) -> Ints:
        """Places of the spans that end at or after ``begin`` and are ready at or before ``end`` [s], ascending."""
        first = int(np.searchsorted(self.ends, begin))
        near = self.order[first : int(np.searchsorted(self.since, end, side="right"))]
        return np.sort(near[self.ready[near] <= end])


def _rank_table(timeline: Timeline, rank: int) -> RankTable:
    spans = timeline.spans([rank])
    by_op = np.argsort(spans["op"], kind="stable")
    op, ready, start, end = (spans[name][by_op] for name in ("op", "ready", "start", "end"))
    turn = np.arange(len(op)) - np.searchsorted(op, op)
    order = np.argsort(end, kind="stable")
    since = np.minimum.accumulate(ready[order][::-1])[::-1]
    return RankTable(op, turn, np.full(len(op), -1), ready, start, end, order, end[order], since)


class RankSubset:
    """Some ranks of a timeline, numbered from 0: ``place`` (world_size,) int is each one's number, -1 for none."""

    def __init__(self, timeline: Timeline, ranks: Ints) -> None:
        self.timeline, self.ranks, self.columns = timeline, ranks, columns_of(timeline)
        self.place = np.full(timeline.world_size, -1, dtype=np.int64)
        self._everyone = self.place[ranks] = np.arange(len(ranks))
        self._places: dict[int, tuple[Ints, Ints, Bools | None]] = {}

    def times(self, op: int) -> tuple[Ints, OpSpans]:
        """Numbers of those who did an op, and their spans of it."""
        spans = self.columns.of(op)
        remembered = self._places.get(id(spans.ranks))
        if remembered is None:
            remembered = self._places[id(spans.ranks)] = self._places_of(spans.ranks)
        _, places, chosen = remembered
        if chosen is None:
            return places, spans
        return places, OpSpans(spans.ranks[chosen], spans.ready[chosen], spans.start[chosen], spans.end[chosen])

    def _places_of(self, ranks: Ints) -> tuple[Ints, Ints, Bools | None]:
        """An array of ranks (it is told by its identity as long as it is held); the numbers of those of them that are
        of the subset; and which they are, None for all."""
        places = self.place[ranks]
        if np.array_equal(places, self._everyone):
            return ranks, self._everyone, None
        chosen = places >= 0
        return (ranks, places, None) if chosen.all() else (ranks, places[chosen], chosen)

    def column(self, op: int, begin: str) -> Floats:
        """(r,) float [s] from ``"start"`` or ``"ready"`` (time in a server's queue included) to the end; nan: did not
        run."""
        places, spans = self.times(op)
        took: Floats = spans.end - (spans.ready if begin == "ready" else spans.start)
        if places is self._everyone:
            return took
        seconds = np.full(len(self.ranks), np.nan)
        seconds[places] = took
        return seconds


def did(timeline: Timeline, chosen: Bools) -> Bools:
    """(world_size,) bool: ranks that did at least one of some ops; ``chosen`` is (n_ops,)."""
    sets, op, set_of, *_ = timeline._rows()
    did_it = np.zeros(timeline.world_size, dtype=np.bool_)
    for s in np.unique(set_of[chosen[op]]).tolist():
        did_it[sets[s]] = True
    for blocks in timeline.shelf.columns:
        if chosen[blocks.op].any():
            did_it[blocks.ranks] = True
    return did_it


def cuts(spans: Columns, n: int, length: float, scale: float) -> tuple[Floats, Ints, Ints, Ints]:
    """Where any span of a rank begins or ends, as sorted and unique keys (a rank's place times a scale, and a moment
    within it), the window's edges among them; and which of them each span's ready, start and end are."""
    base = np.arange(n) * scale
    offset = spans["owner"] * scale
    marks = np.concatenate([base, base + length, *(spans[name] + offset for name in ("ready", "start", "end"))])
    order = np.argsort(marks, kind="stable")  # a few sorted runs: far from random
    ordered = marks[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    place = np.empty(len(marks), dtype=np.int64)
    place[order] = np.cumsum(new) - 1
    ready, start, end = place[2 * n :].reshape(3, -1)
    return ordered[new], ready, start, end


def seen(recorded: tuple[Floats, Floats], scale: float, left: Floats, owner: Ints) -> Bools:
    """Whether a piece lies between its rank's first and last span of the whole run.

    recorded : (n,) float each, from when and until when the spans of each rank are, within the window.
    """
    first, last = (moments + np.arange(len(moments)) * scale for moments in recorded)
    overlaps: Bools = (left >= first[owner]) & (left < last[owner])
    return overlaps


def stretches(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """The numbers from each ``left`` up to its ``right``, one after another, and how many there are of each."""
    counts = np.maximum(right - left, 0)
    numbers: Ints = np.repeat(left - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
    return numbers, counts
