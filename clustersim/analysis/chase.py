"""Who holds whom: from a wait to the rank that arrived last, and from that rank to what held it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.analysis.pieces import KERNEL, NOTHING, PEER, SIDE_KERNEL, Pieces
from clustersim.timeline import Timeline

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

MAX_HOPS = 12
"""A wait for a rank that waits for a rank ...: further than this nobody follows."""


@dataclass(frozen=True)
class Held:
    """The end of a chase: which rank held everybody up, in which op (-1: none), by which rule of
    :mod:`clustersim.analysis.pieces`; and the last arriver at the first wait."""

    rank: int
    op: int
    why: int
    last: int


class Meetings:
    """Who met whom, by op, rank and moment; rows are indexed once, op by op when asked for."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._order = np.argsort(timeline.row_op, kind="stable")
        self._ptr = np.searchsorted(timeline.row_op[self._order], np.arange(len(timeline.ops) + 1))
        self._columns: dict[int, tuple[Ints, Ints]] = {}
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

    def row(self, op: int, rank: int, moment: float) -> int:
        """The row of an op on a rank that is open at a moment [s]; -1 for none."""
        ranks, rows = self.members(op)
        low, high = np.searchsorted(ranks, [rank, rank + 1]).tolist()
        mine = rows[low:high]
        open_then = mine[self.timeline.row_end[mine] >= moment]
        return int(open_then[0]) if len(open_then) else int(mine[-1]) if len(mine) else -1

    def members(self, op: int) -> tuple[Ints, Ints]:
        """An op's rows, one entry per rank and row, sorted by rank, then time."""
        if op not in self._columns:
            t = self.timeline
            rows = self._order[self._ptr[op] : self._ptr[op + 1]]
            rows = rows[np.argsort(t.row_start[rows], kind="stable")]
            sets = [t.rank_sets[s] for s in t.row_set[rows].tolist()]
            ranks = np.concatenate([*sets, np.zeros(0, dtype=np.int64)])
            of = np.repeat(rows, [len(s) for s in sets])
            order = np.argsort(ranks, kind="stable")
            self._columns[op] = ranks[order], of[order]
        return self._columns[op]

    def last_arriver(self, op: int, rank: int, moment: float) -> tuple[int, int]:
        """(rank, op) that came last to the meeting at which a rank waits at a moment [s]; -1 where nobody did."""
        own, best = self.row(op, rank, moment), (-np.inf, -1, -1)
        if own < 0:
            return -1, -1
        t = self.timeline
        allowed = self._partners(op, rank)
        for other in (op, *(int(o) for o in t.ops[op].detail.get("meets", ()))):
            ranks, rows = self.members(other)
            if not len(rows):
                continue
            fits = allowed[ranks] & np.isclose(t.row_start[rows], t.row_start[own], rtol=1e-12, atol=1e-12)
            ready = np.where(fits, t.row_ready[rows], -np.inf)
            at = int(np.argmax(ready))
            if ready[at] > best[0]:
                best = (float(ready[at]), int(ranks[at]), other)
        return best[1], best[2]

    def _partners(self, op: int, rank: int) -> npt.NDArray[np.bool_]:
        """(world_size,) bool: who may meet a rank at an op."""
        info = self.timeline.ops[op]
        groups = info.detail.get("groups")
        if groups is None:
            return np.ones(self.timeline.world_size, dtype=np.bool_)
        if info.kind in {"send", "recv"}:  # a rank may be in two pairs of one op: as sender and as receiver
            found = np.zeros(self.timeline.world_size, dtype=np.bool_)
            pairs = np.asarray(groups)
            found[pairs[(pairs == rank).any(axis=1)]] = True
            return found
        column = self.group_of(op)
        same: npt.NDArray[np.bool_] = column == column[rank]
        return same


class Chase(Meetings):
    """Follows waits through one timeline, with what every rank was doing."""

    def __init__(self, timeline: Timeline, cut: Pieces) -> None:
        super().__init__(timeline)
        self.cut = cut
        self._pieces = np.searchsorted(cut.owner, np.arange(len(cut.ranks) + 1))

    def activity(self, rank: int, begin: float, end: float) -> tuple[int, int]:
        """(rule, op) that took most of a rank's time between two moments [s]."""
        owner = int(self.cut.class_of[rank])
        low, high = int(self._pieces[owner]), int(self._pieces[owner + 1])
        first = low + int(np.searchsorted(self.cut.stop[low:high], begin, side="right"))
        after = low + int(np.searchsorted(self.cut.start[low:high], end, side="left"))
        if after <= first:
            return NOTHING, -1
        part = slice(first, after)
        seconds = np.minimum(self.cut.stop[part], end) - np.maximum(self.cut.start[part], begin)
        why = self.cut.why[part]
        kernels = np.where(why == SIDE_KERNEL, KERNEL, why)
        spent = np.bincount(kernels, weights=np.maximum(seconds, 0.0), minlength=NOTHING + 1)
        spent[NOTHING] += max(0.0, end - begin - float(spent.sum()))  # before a measured rank's first span
        rule = int(np.argmax(spent))
        if not (kernels == rule).any():
            return rule, -1
        best = np.argmax(np.where(kernels == rule, seconds, -1.0))
        return rule, int(self.cut.op[part][best])

    def follow(self, op: int, rank: int, begin: float, end: float) -> Held:
        """What held up the meeting at which ``rank`` waits from ``begin`` to ``end`` [s]."""
        first = -1
        for _ in range(MAX_HOPS):
            late, late_op = self.last_arriver(op, rank, 0.5 * (begin + end))
            first = late if first < 0 else first
            if late < 0 or late == rank:
                return Held(rank, op, PEER, first)
            why, doing = self.activity(late, begin, end)
            if why != PEER or doing in {op, late_op, -1}:
                return Held(late, doing, why, first)
            op, rank = doing, late
        return Held(rank, op, PEER, first)
