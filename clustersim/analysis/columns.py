"""A Timeline's spans op by op, as arrays over ranks, without a row for every op and rank.

Ops that all ranks did at the same times, and blocks, are looked at as they are kept: nothing is copied, so that a few
thousand ops on 16,384 GPUs are a few thousand views.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.timeline import Timeline

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class OpSpans:
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


class OpColumns:
    """Every op's spans, looked up when asked for."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        sets, op, of, *times = timeline._rows()
        order = np.lexsort((times[1], op))
        self._sets, self._of, self._times = sets, of[order], [column[order] for column in times]
        self._ptr = np.searchsorted(op[order], np.arange(len(timeline.ops) + 1))
        self._blocks: dict[int, list[int]] = {}
        self._known: dict[int, OpSpans] = {}
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

    def of(self, op: int) -> OpSpans:
        """The spans of an op."""
        found = self._known.get(op)
        if found is None:
            found = self._known[op] = self._looked_up(op)
        return found

    def _looked_up(self, op: int) -> OpSpans:
        parts = []
        for row in range(int(self._ptr[op]), int(self._ptr[op + 1])):
            ranks = self._sets[self._of[row]]
            parts.append((ranks, *(column[row : row + 1] for column in self._times)))
        for i in self._blocks.get(op, ()):
            block = self.timeline.blocks[i]
            parts.append((block.ranks, *block.times))
        if not parts:
            none = np.zeros(0)
            return OpSpans(np.zeros(0, dtype=np.int64), none, none, none)
        whole = [tuple(np.broadcast_to(column, len(part[0])) for column in part) for part in parts]
        several = len(whole) > 1
        spans = OpSpans(*((np.concatenate(c) if several else c[0]) for c in zip(*whole, strict=True)))
        if len(spans.ranks) < 2 or bool((spans.ranks[1:] > spans.ranks[:-1]).all()):
            return spans
        order = np.lexsort((spans.start, spans.ranks))
        return OpSpans(spans.ranks[order], spans.ready[order], spans.start[order], spans.end[order])

    def of_rank(self, rank: int, begin: float, end: float) -> RankSpans:
        """Spans of a rank that end at or after ``begin`` and are ready at or before ``end`` [s], by op, then start."""
        order, ends, since, ready = self._by_end
        near = order[int(np.searchsorted(ends, begin)) : int(np.searchsorted(since, end, side="right"))]
        rows = []
        for op in np.sort(near[ready[near] <= end]).tolist():
            spans = self.of(op)
            first = int(np.searchsorted(spans.ranks, rank))
            while first < len(spans.ranks) and spans.ranks[first] == rank:
                if spans.end[first] >= begin and spans.ready[first] <= end:
                    rows.append((op, first, spans.ready[first], spans.start[first], spans.end[first]))
                first += 1
        table = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return RankSpans(table[0].astype(np.int64), table[1].astype(np.int64), table[2], table[3], table[4])


class SomeRanks:
    """Some ranks of a timeline, numbered from 0: ``place`` (world_size,) int is each one's number, -1 for none."""

    def __init__(self, timeline: Timeline, ranks: Ints) -> None:
        self.timeline, self.ranks, self.columns = timeline, ranks, OpColumns(timeline)
        self.place = np.full(timeline.world_size, -1, dtype=np.int64)
        self.place[ranks] = np.arange(len(ranks))

    def times(self, op: int) -> tuple[Ints, OpSpans]:
        """Numbers of those who did an op, and their spans of it."""
        spans = self.columns.of(op)
        at = self.place[spans.ranks]
        kept = at >= 0
        if kept.all():
            return at, spans
        return at[kept], OpSpans(spans.ranks[kept], spans.ready[kept], spans.start[kept], spans.end[kept])

    def column(self, op: int, begin: str) -> Floats:
        """(r,) float [s] from ``"start"`` or ``"ready"`` (time in a server's queue included) to the end; nan: did not
        run."""
        at, spans = self.times(op)
        seconds = np.full(len(self.ranks), np.nan)
        seconds[at] = spans.end - (spans.ready if begin == "ready" else spans.start)
        return seconds


def did(timeline: Timeline, chosen: Bools) -> Bools:
    """(world_size,) bool: ranks that did at least one of some ops; ``chosen`` is (n_ops,)."""
    sets, op, of, *_ = timeline._rows()
    found = np.zeros(timeline.world_size, dtype=np.bool_)
    for s in np.unique(of[chosen[op]]).tolist():
        found[sets[s]] = True
    seen: set[int] = set()
    for block in timeline.blocks:
        if chosen[block.op] and id(block.ranks) not in seen:
            seen.add(id(block.ranks))
            found[block.ranks] = True
    return found
