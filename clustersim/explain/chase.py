"""Who holds whom: from a wait to the rank that arrived last, and from that rank to what held it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.op_infos import OpInfo, each_kind, kind_of, kinds
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import Timeline
from clustersim.explain.columns import columns_of
from clustersim.explain.pace import roles
from clustersim.explain.pieces import (
    PieceRule,
    Pieces,
    PieceState,
    TimePartition,
    is_server,
    kernel_state,
    staged,
    workers,
)

MAX_HOPS = 12
"""A wait for a rank that waits for a rank ...: further than this nobody follows."""
MOST_WAITS = 512
"""Waits of a late rank that are looked at, the longest first, to see whom it waited for."""
MOST_LOOKED_UP = 20_000
"""And of all late ranks together: a second or two. Later ones are charged as if nothing had held them."""
NOTABLE = 0.01
"""Share of the window: a host that keeps its GPU waiting so much longer than its peers' do makes its rank late."""
LONG = 0.02
"""Share of the window: to look further than this at a rank that nobody chose, all of the window is cut up for it."""
SAME = 1e-12
"""Moments nearer than this, relative, are the same."""
MOST_BEHIND = 64
"""Ops of a server, each hanging on the one before, that are followed back to a message."""
MOST_OTHERS = 128
"""Such ranks whose windows are kept."""


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
        self._infos = kinds(timeline.ops)
        self.kind_of = kind_of(timeline.ops)
        self._group_of: dict[int, Ints] = {}

    def info(self, op: int) -> OpInfo:
        """What an op was, but for what it waits for and its micro-batch."""
        return self._infos[self.kind_of.item(op)]

    def group_of(self, op: int) -> Ints:
        """(world_size,) the group each rank is in at an op, -1 for none; all in one where groups are not known."""
        groups = self.info(op).detail.get("groups")
        key = id(groups)
        if key not in self._group_of:
            column = np.zeros(self.timeline.world_size, dtype=np.int64)
            if groups is not None:
                column -= 1
                column[np.asarray(groups)] = np.arange(len(groups))[:, None]
            self._group_of[key] = column
        return self._group_of[key]

    def groups_at(self, ops: Ints, ranks: Ints) -> Ints:
        """(n,) int: the group that each of ``n`` ranks is in at an op of its own, as :meth:`group_of` has it."""
        _, kind = np.unique(self.kind_of[ops], return_inverse=True)
        groups = np.empty(len(ops), dtype=np.int64)
        for lot in np.split(np.argsort(kind, kind="stable"), np.cumsum(np.bincount(kind))[:-1]):
            if len(lot):
                groups[lot] = self.group_of(int(ops[lot[0]]))[ranks[lot]]
        return groups

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
        for met_op in (op, *(int(o) for o in self.info(op).detail.get("meets", ()))):
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
        info = self.info(op)
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

    def __init__(self, timeline: Timeline, cut: Pieces, slow: Bools) -> None:
        """``slow`` : (world_size,) which ranks are; whoever is not is followed back to what held it earlier."""
        super().__init__(timeline)
        self.slow = slow
        self.late_hosts = late_hosts(timeline, cut)
        self._staged = staged(timeline)
        self._peers = roles(timeline) if self._staged else peer_groups(timeline)
        self._others: dict[int, Pieces] = {}
        self._known_awaited: dict[tuple[int, int, float], int] = {}
        self.cut, self._partition = cut, TimePartition(timeline)
        self._pieces = np.searchsorted(cut.owner, np.arange(len(cut.ranks) + 1))

    def activity(self, rank: int, begin: float, end: float) -> tuple[int, int]:
        """(rule, op) that took most of a rank's time between two moments [s]."""
        cut, part, seconds = self._spent(rank, begin, end)
        if part.stop <= part.start:
            return PieceRule.NOTHING, -1
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
        low = int(self._pieces[owner])
        high = int(self._pieces[owner + 1])
        if cut.sampled and cut.ranks[owner] != rank:  # its representative is only like it: look at the rank itself
            if end - begin < LONG * (cut.end - cut.begin) and rank not in self._others:
                cut = self._partition.of_rank(self.columns, rank, begin, end)
                return cut, slice(0, len(cut.owner))
            cut = self._whole(rank)
            low = 0
            high = len(cut.owner)
        first = low + int(np.searchsorted(cut.stop[low:high], begin, side="right"))
        return cut, slice(first, low + int(np.searchsorted(cut.start[low:high], end, side="left")))

    def _spent(self, rank: int, begin: float, end: float) -> tuple[Pieces, slice, Floats]:
        """Pieces that hold a rank's time between two moments [s], which of them do, and how much of it each [s]."""
        cut, part = self._doing(rank, begin, end)
        return cut, part, np.minimum(cut.stop[part], end) - np.maximum(cut.start[part], begin)

    def _whole(self, rank: int) -> Pieces:
        """The partition of the whole window for a rank that nobody chose, kept while few are."""
        if rank not in self._others:
            if len(self._others) >= MOST_OTHERS:
                del self._others[next(iter(self._others))]
            self._others[rank] = self._partition.of_rank(self.columns, rank, self.cut.begin, self.cut.end)
        return self._others[rank]

    def follow(self, op: int, rank: int, begin: float, end: float) -> ChaseEnd:
        """What held up the meeting at which ``rank`` waits from ``begin`` to ``end`` [s]."""
        first = -1
        for _ in range(MAX_HOPS):
            op = self._first_to_come(op, rank, begin, end)
            late, late_op = self.last_arriver(op, rank, 0.5 * (begin + end))
            first = late if first < 0 else first
            if late < 0 or late == rank:
                return ChaseEnd(rank, op, PieceRule.PEER, first)
            if is_server(self.info(late_op)) and (worker_end := self._behind_server(late_op, rank, late, begin, end)):
                return replace(worker_end, last=first)
            why, doing = self.activity(late, begin, end)
            if self._is_late_host(late, doing):
                return ChaseEnd(late, doing, PieceRule.HOST_WORK, first)
            if why != PieceRule.PEER and (host_op := self._held_by_host(op, rank, late, begin, end)) >= 0:
                return ChaseEnd(late, host_op, PieceRule.HOST_WORK, first)
            if why != PieceRule.PEER and (earlier := self._held_before(op, rank, late, begin, end)):
                op, begin, end = earlier
                rank = late
                continue
            if why != PieceRule.PEER or doing in {op, late_op, -1}:
                return ChaseEnd(late, doing, why, first)
            op = doing
            rank = late
        return ChaseEnd(rank, op, PieceRule.PEER, first)

    def _held_by_host(self, op: int, rank: int, late: int, begin: float, end: float) -> int:
        """The op of its host for which a late rank's GPU waited longest since the step of ``op`` began, if it is late
        because of it: a ``rank`` of its role, which waits for it, waited less for its own. -1 where it is not."""
        if not self.late_hosts[late] or self.slow[late] or self._peers[late] != self._peers[rank]:
            return -1
        since = max(self.cut.begin, self._step_begins[self.timeline.ops[op].step])
        host_op, seconds = self._for_host(late, since, end)
        return host_op if seconds - self._for_host(rank, since, end)[1] > 0.5 * (end - begin) else -1

    def _first_to_come(self, op: int, rank: int, begin: float, end: float) -> int:
        """The op that ended a wait of a pipeline's rank from ``begin`` to ``end`` [s]: a stage waits for activations
        and gradients at once, and what it does next is by whichever comes first."""
        place = self.place(op, rank, 0.5 * (begin + end)) if self._staged else -1
        if place < 0 or self.columns.of(op).start[place] <= end + SAME * (1 + abs(end)):
            return op
        spans = self.columns.of_rank(rank, begin, end)
        middle = 0.5 * (begin + end)
        waits = np.flatnonzero((spans.ready <= middle) & (spans.start > middle))
        came = [(float(spans.start[k]), int(spans.op[k])) for k in waits.tolist()]
        return min((pair for pair in came if self.timeline.ops[pair[1]].kind != "compute"), default=(0.0, op))[1]

    def _is_late_host(self, rank: int, op: int) -> bool:
        """Whether a rank is late because of its host, and the op is that host's work, on whichever stream it is."""
        return op >= 0 and bool(self.late_hosts[rank]) and kernel_state(self.timeline.ops[op]) == PieceState.HOST

    def _behind_server(self, op: int, rank: int, server: int, begin: float, end: float) -> ChaseEnd | None:
        """The worker that a server waited for from ``begin`` to ``end`` [s] before it could come to ``op``, at which
        ``rank`` waits, if that worker is late by itself: by its host or by a slow GPU. None where it is not, and where
        the server's own work or its link took the time."""
        message, worker = self._hangs_on(op, server, begin, end)
        if worker < 0 or worker == rank:
            return None
        host_op = self._held_by_host(message, rank, worker, begin, end)
        if host_op >= 0:
            return ChaseEnd(worker, host_op, PieceRule.HOST_WORK, worker)
        why, doing = self.activity(worker, begin, end)
        if self.slow[worker] and why == PieceRule.KERNEL:
            return ChaseEnd(worker, doing, why, worker)
        return None

    def _hangs_on(self, op: int, server: int, begin: float, end: float) -> tuple[int, int]:
        """(op, worker) of the message without which a server could not come to an op, if it set out late: most of the
        time from ``begin`` to ``end`` [s] was over by then. A server beside a worker hangs on that one's backward, too.
        -1 where it did not."""
        late = begin + 0.5 * (end - begin)
        for _ in range(MOST_BEHIND):
            needs = [(self._ended(n, server), n) for n in self.timeline.ops[op].after]
            ended, op = max(needs, default=(-np.inf, -1))
            if not np.isfinite(ended) or ended <= late:
                return -1, -1
            info = self.info(op)
            if info.kind == "compute" and info.stream == COMPUTE_STREAM:
                return op, server
            if info.kind == "recv":
                spans = self.columns.of(op)
                came = float(spans.start[self.place(op, server, -np.inf)])
                return (op, self.last_arriver(op, server, came)[0]) if came > late else (-1, -1)
        return -1, -1

    def _ended(self, op: int, rank: int) -> float:
        """When a rank ended an op [s]; never where it did not do it."""
        place = self.place(op, rank, np.inf)
        return float(self.columns.of(op).end[place]) if place >= 0 else -np.inf

    def longest_for_host(self, rank: int) -> int:
        """The op of its host for which a rank's GPU waited longest in the window, -1 for none."""
        return self._for_host(rank, self.cut.begin, self.cut.end)[0]

    def _for_host(self, rank: int, begin: float, end: float) -> tuple[int, float]:
        """Between two moments [s]: the op of its host for which a rank's GPU waited longest (-1: none), and the seconds
        that it waited for any."""
        cut, part, spent = self._spent(rank, begin, end)
        seconds = np.where(cut.state[part] == PieceState.HOST, np.maximum(spent, 0.0), 0.0)
        if not seconds.any():
            return -1, 0.0
        return int(cut.op[part][np.argmax(seconds)]), float(seconds.sum())

    def _held_before(self, op: int, rank: int, late: int, begin: float, end: float) -> tuple[int, float, float] | None:
        """(op, begin, end [s]) of the longest wait of a late rank for whom it waited for most since the step of ``op``
        began, if it is late because of it: it has computed no longer than a ``rank`` of its role, which waits for it.
        None where no rank and no host is slow, or this rank is."""
        role = roles(self.timeline)
        by_host = bool(self.late_hosts.any()) and role[late] == role[rank]  # of another stage, more work is no lateness
        if not (self.slow.any() or by_host) or self.slow[late] or len(self._known_awaited) > MOST_LOOKED_UP:
            return None
        since = max(self.cut.begin, self._step_begins[self.timeline.ops[op].step])
        if since >= begin or (
            role[late] == role[rank]
            and self._seconds(late, since, end) - self._seconds(rank, since, end) > 0.5 * (end - begin)
        ):
            return None
        cut, part = self._doing(late, since, begin)
        seconds = np.where(cut.why[part] == PieceRule.PEER, cut.seconds[part], 0.0)
        longest: dict[int, int] = {}
        waited: dict[int, float] = {}
        for piece in np.argsort(-seconds, kind="stable")[:MOST_WAITS].tolist():
            if seconds[piece] <= 0:
                break
            piece_at = part.start + piece
            awaited = self._awaited(late, int(cut.op[piece_at]), float(cut.start[piece_at] + cut.stop[piece_at]) / 2)
            longest.setdefault(awaited, piece_at)
            waited[awaited] = waited.get(awaited, 0.0) + float(seconds[piece])
        holder = max(waited, key=lambda r: waited[r], default=-1)
        if holder < 0 or waited[holder] < 0.5 * (end - begin):
            return None
        piece_at = longest[holder]
        return int(cut.op[piece_at]), float(cut.start[piece_at]), float(cut.stop[piece_at])

    def _awaited(self, rank: int, op: int, moment: float) -> int:
        """The last arriver at an op at which a rank waits at a moment [s]; asked for again and again."""
        key = rank, op, moment
        if key not in self._known_awaited:
            self._known_awaited[key] = self.last_arriver(op, rank, moment)[0]
        return self._known_awaited[key]

    def _seconds(self, rank: int, begin: float, end: float) -> float:
        """Seconds in which a rank runs kernels between two moments [s]."""
        cut, part, spent = self._spent(rank, begin, end)
        return float(spent[cut.why[part] == PieceRule.KERNEL].sum())

    @cached_property
    def _step_begins(self) -> dict[int, float]:
        """When each step's first op was ready [s]."""
        ready = self.timeline.per_op()["ready"]
        begins: dict[int, float] = {}
        for i, op in each_kind(self.timeline.ops):
            begins[op.step] = min(begins.get(op.step, np.inf), float(ready[i]))
        return begins


def late_hosts(timeline: Timeline, cut: Pieces) -> Bools:
    """(world_size,) bool: ranks whose GPU waits for its host longer than the median of its peers does, by more than
    :data:`NOTABLE` of the window. Servers, which have no GPU's work to wait with, never are."""
    waits = cut.state == PieceState.HOST
    by_class = np.bincount(cut.owner[waits], weights=cut.seconds[waits], minlength=len(cut.ranks))
    late = np.zeros(timeline.world_size, dtype=np.bool_)
    notable = NOTABLE * (cut.end - cut.begin)
    if by_class.max(initial=0.0) <= notable:
        return late
    group = peer_groups(timeline)
    seconds = by_class[cut.class_of]
    for g in np.unique(group[group >= 0]).tolist():
        members = group == g
        late[members] = seconds[members] - np.median(seconds[members]) > notable
    return late


def peer_groups(timeline: Timeline) -> Ints:
    """(world_size,) int: ranks with equal numbers do the same for a step, so that one later than the others stands out;
    -1 for a server and nothing else.

    Beside a server all workers are peers, whether one of them serves or not. Of a pipeline those of a stage are; where
    each stage is one rank, all of them: every host calls its stage's layers and loads what that needs.
    """
    group = np.full(timeline.world_size, -1, dtype=np.int64)
    trains = workers(timeline)
    group[trains] = 0
    if staged(timeline):
        role = roles(timeline)[trains]
        count = np.bincount(role)
        group[trains] = np.where(count[role] > 1, role + 1, 0)
    return group
