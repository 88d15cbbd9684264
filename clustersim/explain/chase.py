"""Who holds whom: from a wait to the rank that arrived last, and from that rank to what held it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Bools, Ints
from clustersim.core.timeline import Timeline
from clustersim.explain.columns import columns_of
from clustersim.explain.pieces import PieceRule, Pieces, TimePartition

MAX_HOPS = 12
"""A wait for a rank that waits for a rank ...: further than this nobody follows."""


@dataclass(frozen=True)
class ChaseEnd:
    """The end of a chase: which rank held everybody up, in which op (-1: none), by which rule of
    :mod:`clustersim.explain.pieces`; and the last arriver at the first wait."""

    rank: int
    op: int
    why: int
    last: int


class RankMeetings:
    """Who met whom, by op, rank and moment."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.columns = timeline, columns_of(timeline)
        self._group_of: dict[int, Ints] = {}

    def group_of(self, op: int) -> Ints:
        """(world_size,) the group each rank is in at an op, -1 for none; all in one where groups are not known."""
        groups = self.timeline.ops[op].detail.get("groups")
        key = id(groups)
        if key not in self._group_of:
            column = np.zeros(self.timeline.world_size, dtype=np.int64)
            if groups is not None:
                column -= 1
                column[np.asarray(groups)] = np.arange(len(groups))[:, None]
            self._group_of[key] = column
        return self._group_of[key]

    def place(self, op: int, rank: int, moment: float) -> int:
        """Which of an op's spans is a rank's that is open at a moment [s], or its last; -1 for none."""
        spans = self.columns.of(op)
        low, high = np.searchsorted(spans.ranks, [rank, rank + 1]).tolist()
        open_then = np.flatnonzero(spans.end[low:high] >= moment)
        return low + int(open_then[0]) if len(open_then) else high - 1 if high > low else -1

    def last_arriver(self, op: int, rank: int, moment: float) -> tuple[int, int]:
        """(rank, op) that came last to the meeting at which a rank waits at a moment [s]; -1 where nobody did."""
        own = self.place(op, rank, moment)
        best = (-np.inf, -1, -1)
        if own < 0:
            return -1, -1
        begun = float(self.columns.of(op).start[own])
        allowed = self._partners(op, rank)
        for met_op in (op, *(int(o) for o in self.timeline.ops[op].detail.get("meets", ()))):
            spans = self.columns.of(met_op)
            if not len(spans.ranks):
                continue
            fits = allowed[spans.ranks] & (np.abs(spans.start - begun) <= 1e-12 * (1 + abs(begun)))
            ready = np.where(fits, spans.ready, -np.inf)
            latest = int(np.argmax(ready))
            if ready[latest] > best[0]:
                best = (float(ready[latest]), int(spans.ranks[latest]), met_op)
        return best[1], best[2]

    def _partners(self, op: int, rank: int) -> Bools:
        """(world_size,) bool: who may meet a rank at an op."""
        info = self.timeline.ops[op]
        groups = info.detail.get("groups")
        if groups is None:
            return np.ones(self.timeline.world_size, dtype=np.bool_)
        if info.kind in {"send", "recv"}:  # a rank may be in two pairs of one op: as sender and as receiver
            partners = np.zeros(self.timeline.world_size, dtype=np.bool_)
            pairs = np.asarray(groups)
            partners[pairs[(pairs == rank).any(axis=1)]] = True
            return partners
        column = self.group_of(op)
        same: Bools = column == column[rank]
        return same


class Chase(RankMeetings):
    """Follows waits through one timeline, with what every rank was doing."""

    def __init__(self, timeline: Timeline, cut: Pieces) -> None:
        super().__init__(timeline)
        self.cut, self._partition = cut, TimePartition(timeline)
        self._pieces = np.searchsorted(cut.owner, np.arange(len(cut.ranks) + 1))

    def activity(self, rank: int, begin: float, end: float) -> tuple[int, int]:
        """(rule, op) that took most of a rank's time between two moments [s]."""
        cut, part = self._doing(rank, begin, end)
        if part.stop <= part.start:
            return PieceRule.NOTHING, -1
        seconds = np.minimum(cut.stop[part], end) - np.maximum(cut.start[part], begin)
        why = cut.why[part]
        kernels = np.where(why == PieceRule.SIDE_KERNEL, PieceRule.KERNEL, why)
        spent = np.bincount(kernels, weights=np.maximum(seconds, 0.0), minlength=PieceRule.NOTHING + 1)
        spent[PieceRule.NOTHING] += max(0.0, end - begin - float(spent.sum()))  # before a measured rank's first span
        rule = int(np.argmax(spent))
        if not (kernels == rule).any():
            return rule, -1
        best = np.argmax(np.where(kernels == rule, seconds, -1.0))
        return rule, int(cut.op[part][best])

    def _doing(self, rank: int, begin: float, end: float) -> tuple[Pieces, slice]:
        """Pieces that hold a rank's time between two moments [s], and which of them do."""
        owner = int(self.cut.class_of[rank])
        cut = self.cut
        if cut.sampled and cut.ranks[owner] != rank:  # its representative is only like it: look at the rank itself
            cut = self._partition.of_rank(self.columns, rank, begin, end)
            return cut, slice(0, len(cut.owner))
        low = int(self._pieces[owner])
        high = int(self._pieces[owner + 1])
        first = low + int(np.searchsorted(cut.stop[low:high], begin, side="right"))
        return cut, slice(first, low + int(np.searchsorted(cut.start[low:high], end, side="left")))

    def follow(self, op: int, rank: int, begin: float, end: float) -> ChaseEnd:
        """What held up the meeting at which ``rank`` waits from ``begin`` to ``end`` [s]."""
        first = -1
        for _ in range(MAX_HOPS):
            late, late_op = self.last_arriver(op, rank, 0.5 * (begin + end))
            first = late if first < 0 else first
            if late < 0 or late == rank:
                return ChaseEnd(rank, op, PieceRule.PEER, first)
            why, doing = self.activity(late, begin, end)
            if why != PieceRule.PEER or doing in {op, late_op, -1}:
                return ChaseEnd(late, doing, why, first)
            op = doing
            rank = late
        return ChaseEnd(rank, op, PieceRule.PEER, first)
