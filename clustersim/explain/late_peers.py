"""Transfers that are exposed because a slow rank let them begin late.

A collective begins when its last member arrives. A rank that arrived earlier, and computed meanwhile, waits beside its
own kernels, where no wait is seen; what it pays comes after: the transfer runs when it has nothing left to compute. Had
the last member been on time, the transfer would have begun at the rank's own arrival, and so much of it would have been
hidden. Transfers behind it, on the same stream or of its result, are as late, less what the rank has paid by then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from heapq import nlargest
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.op_infos import each_kind
from clustersim.core.timeline import Timeline
from clustersim.explain.chase import RankMeetings
from clustersim.explain.columns import RankSubset, columns_of
from clustersim.explain.graph import lost_beside
from clustersim.explain.pace import SLOW, kernel_seconds, roles, slow_ranks
from clustersim.explain.pieces import PieceRule, Pieces, is_server

SecondsOf: TypeAlias = dict[tuple[int, int], float]
"""By op and rank class [s]."""
HolderOf: TypeAlias = Callable[[int, int, float, float], int]
"""The slow rank behind a wait at an op, of a rank, between two moments [s]; -1 where none is."""
MOST_FOLLOWED = 2000
"""Meetings whose last arrival is followed, the costliest first."""
_SAME = 1e-12
"""Moments nearer than this, relative, are one."""


class LatePeers:
    """Lateness that slow ranks brought upon each transfer of the window, rank class by rank class.

    Parameters
    ----------
    waited, exposed : what each class waits at an op with nothing beside it, and what it sees of the transfer [s].
    weight : (c,) float, ranks of each class.
    """

    def __init__(
        self, timeline: Timeline, cut: Pieces, waited: SecondsOf, exposed: SecondsOf, weight: Floats, holder: HolderOf
    ) -> None:
        self.timeline, self.cut = timeline, cut
        self.waited, self.exposed = waited, exposed
        self._times: dict[int, Floats] = {}
        self._holders = self._followed(weight, holder)

    def moved(self) -> dict[tuple[int, int], tuple[float, int]]:
        """By op and rank class, seconds of the exposed transfer that a slow rank is the reason for, and that rank."""
        late: dict[int, tuple[Floats, Ints]] = {}
        last: dict[tuple[str, str], int] = {}
        moved = {}
        for i, op in enumerate(self.timeline.ops):
            before = last.get((op.role, op.stream), -1)
            last[op.role, op.stream] = i
            if i not in self._holders:
                continue
            lateness, who, own = self._lateness(i, [before, *op.after], late)
            for owner in np.flatnonzero(lateness > 0).tolist():
                paid = self.waited.get((i, owner), 0.0) if own[owner] else 0.0
                lateness[owner] = max(0.0, lateness[owner] - paid)
                seconds = min(self.exposed.get((i, owner), 0.0), float(lateness[owner]))
                if seconds > 0:
                    moved[i, owner] = seconds, int(who[owner])
                    lateness[owner] -= seconds
            if lateness.any():
                late[i] = lateness, who
        return moved

    def _of(self, op: int) -> Floats:
        """(3, c) float [s], when each class's representative was ready, started and ended; nan where it did not."""
        if op not in self._times:
            spans = columns_of(self.timeline).of(op)
            table = np.full((3, len(self.cut.ranks)), np.nan)
            if len(spans.ranks):
                place = np.minimum(np.searchsorted(spans.ranks, self.cut.ranks), len(spans.ranks) - 1)
                ran = spans.ranks[place] == self.cut.ranks
                for row, column in enumerate((spans.ready, spans.start, spans.end)):
                    table[row, ran] = column[place[ran]]
            self._times[op] = table
        return self._times[op]

    def _idle(self, moment: Floats) -> Floats:
        """(c,) float [s], what each class has waited and seen of transfers from the window's begin to a moment."""
        keys, stops, seconds, before = self._idle_table
        scale = 2.0 * (self.cut.end - self.cut.begin)
        key = np.arange(len(moment)) * scale + np.clip(np.nan_to_num(moment) - self.cut.begin, 0.0, 0.5 * scale)
        piece = np.maximum(np.searchsorted(keys, key, side="right") - 1, 0)
        left = np.clip(stops[piece] - key, 0.0, None)
        idle: Floats = before[piece + 1] - np.minimum(left, seconds[piece]) * (seconds[piece] > 0)
        return idle

    @cached_property
    def _idle_table(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Begin and end of the pieces as keys that ascend, their idle seconds, and the sum of those before each."""
        cut = self.cut
        shift = cut.owner * 2.0 * (cut.end - cut.begin) - cut.begin
        idle = (cut.why == PieceRule.PEER) | (cut.why == PieceRule.TRANSFER)
        seconds = np.where(idle, cut.seconds, 0.0)
        return cut.start + shift, cut.stop + shift, seconds, np.concatenate([[0.0], np.cumsum(seconds)])

    def _followed(self, weight: Floats, holder: HolderOf) -> dict[int, Ints]:
        """(c,) int per collective of the window, the slow rank that it waited for; -1 for none."""
        meetings = RankMeetings(self.timeline)
        times = self.timeline.per_op()
        inside = (times["end"] > self.cut.begin) & (times["ready"] < self.cut.end)
        held_up: dict[int, Ints] = {}
        waits: list[tuple[float, int, int]] = []
        for i in np.flatnonzero(inside).tolist():
            op = self.timeline.ops[i]
            if op.kind in {"compute", "send", "recv"} or is_server(op):
                continue
            ready, start, _ = self._of(i)
            own = np.nan_to_num(start - ready) * weight
            held_up[i] = np.full(len(own), -1)
            group = meetings.group_of(i)[self.cut.ranks]
            total = np.bincount(group + 1, weights=own)[1:]
            waits += [(float(total[g]), i, g) for g in np.flatnonzero(total > 0).tolist()]
        for _, i, g in nlargest(MOST_FOLLOWED, waits):
            ready, start, _ = self._of(i)
            members = np.flatnonzero(meetings.group_of(i)[self.cut.ranks] == g)
            longest = members[np.nanargmax((start - ready)[members])]
            held_up[i][members] = holder(i, int(self.cut.ranks[longest]), float(ready[longest]), float(start[longest]))
        return held_up

    def _lateness(self, op: int, needs: list[int], late: dict[int, tuple[Floats, Ints]]) -> tuple[Floats, Ints, Bools]:
        """(c,) how late an op began [s], the slow rank behind it, and whether it was late itself: a rank whose own
        transfer before held it up is as late as that one was, but no later than its own kernels let it be."""
        ready, start, _ = self._of(op)
        who = self._holders[op].copy()
        own = np.where(who >= 0, np.nan_to_num(start - ready), 0.0)
        behind = np.zeros(len(own))
        source = np.full(len(own), -1)
        arrived = np.full(len(own), -np.inf)
        for n in needs:
            if n >= 0 and self.timeline.ops[n].kind == "compute":
                arrived = np.fmax(arrived, self._of(n)[2])
            elif n in late:
                seconds, held_by = late[n]
                waits = np.abs(self._of(n)[2] - ready) <= _SAME * (1 + np.abs(ready))
                more = waits & (seconds > behind)
                behind[more] = seconds[more]
                source[more] = held_by[more]
        begin = np.maximum(arrived, self.cut.begin)
        spare = ready - begin - (self._idle(ready) - self._idle(begin))  # what it has paid since is no lateness now
        behind = np.fmin(behind, np.fmax(spare, 0.0))
        who = np.where(behind > own, source, who)
        return own + behind, who, own > 0


MOST_SLOW = 64
"""Slow ranks whose own kernels are told apart from what transfers beside them cost, the slowest first."""


def slow_by_themselves(timeline: Timeline, ratio: Floats) -> Bools:
    """(world_size,) bool: :func:`~clustersim.explain.pace.slow_ranks`, without those whose kernels take longer only
    because longer transfers run beside them, as beside a slow link: nothing is wrong with such a GPU."""
    slow = slow_ranks(timeline, ratio)
    if not slow.any() or not timeline.stats.get("overlap_slowdown", 0.0):
        return slow
    role = roles(timeline)
    worst = np.flatnonzero(slow)
    worst = worst[np.argsort(-ratio[worst], kind="stable")][:MOST_SLOW]
    usual = {r: int(np.argmin(np.where(role == r, np.abs(ratio - 1), np.inf))) for r in np.unique(role[worst]).tolist()}
    subset = RankSubset(timeline, np.unique([*worst.tolist(), *usual.values()]))
    computes = (i for i, op in each_kind(timeline.ops) if op.kind == "compute")
    seconds = kernel_seconds(timeline)[subset.ranks]
    for lost in lost_beside(subset, {i: subset.column(i, "ready") for i in computes}).values():
        seconds = seconds - np.nan_to_num(lost)
    alone = dict(zip(subset.ranks.tolist(), seconds.tolist(), strict=True))
    for rank in worst.tolist():
        slow[rank] = alone[rank] > (1 + SLOW) * alone[usual[int(role[rank])]]
    return slow
