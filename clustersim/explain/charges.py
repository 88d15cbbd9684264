"""The books of lost time: what each cause has cost, piece by piece of the partition."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Set
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.op_infos import of_each
from clustersim.core.program import COMPUTE_STREAM, HOST_CALL
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.chase import Chase, ChaseEnd
from clustersim.explain.columns import columns_of
from clustersim.explain.dimensions import dimension
from clustersim.explain.late_peers import LatePeers, SecondsOf, slow_by_themselves
from clustersim.explain.late_start import LateStart, reduces
from clustersim.explain.pace import UNLIKE, by_experts, of_experts
from clustersim.explain.pieces import (
    PieceRule,
    Pieces,
    PieceState,
    by_class,
    by_structure,
    is_server,
    own_work_of_host,
    staged,
    workers,
)
from clustersim.explain.transfers import OF_LINKS, TransferFacts, sort_of

_WAITS = frozenset((int(PieceRule.PEER), int(PieceRule.QUEUED)))
_EXPOSED = int(PieceState.EXPOSED)
_STALL = int(PieceState.STALL)
_LAUNCH = int(PieceState.LAUNCH)
"""Plain numbers: to look a name up in an enumeration takes as long as ten additions, and there are a million pieces."""
MAX_CHASES = 2000
"""Waits that are followed, the costliest first; what is left is charged as they were."""


@dataclass(frozen=True)
class Blame:
    """What lost time is charged to: a ``cause`` and its ``subject``; who held whom, in which op, and over which link
    (-1: none)."""

    cause: str
    subject: str
    holder: int = -1
    holder_op: int = -1
    link: int = -1


class LostSeconds(NamedTuple):
    """Seconds that each rank of a class (``owner``) lost in one op by one rule, from its first piece of the partition
    to its last, of which one is the ``longest``; ``state`` is the first one's."""

    seconds: float
    piece: int
    last: int
    owner: int
    op: int
    rule: int
    state: int
    longest: int


@dataclass
class Charge:
    """What one cause has cost so far [s, of all ranks together], and its costliest piece."""

    cause: str
    subject: str
    seconds: float = 0.0
    count: int = 0
    worst: float = 0.0
    op: int = -1
    rank: int = -1
    holder_rank: int = -1
    holder_op: int = -1
    link: int = -1
    begin: float = 0.0
    end: float = 0.0
    ranks: set[int] = field(default_factory=set)


def _last_rank(timeline: Timeline, servers: Set[int]) -> tuple[int, int]:
    """The rank that ends last, and of those that train the one that does; of several the first, -1 for none."""
    columns = columns_of(timeline)
    ends = np.nan_to_num(timeline.per_op()["end"], nan=-np.inf, posinf=-np.inf)
    last = -1
    for op in np.argsort(-ends, kind="stable").tolist():
        if not np.isfinite(ends[op]):
            break
        spans = columns.of(op)
        by_end = spans.ranks[np.argsort(-spans.end, kind="stable")].tolist()
        last = int(by_end[0]) if last < 0 else last
        trains = [rank for rank in by_end if rank not in servers]
        if trains:
            return last, int(trains[0])
    return last, last


def messages(op: OpInfo) -> str:
    """What all messages between ranks over one dimension are called; empty for what is none."""
    return f"{dimension(op)} messages" if op.kind in {"send", "recv"} and op.label and op.label.dim else ""


class ChargeBook:
    """The charges while they are made."""

    def __init__(self, timeline: Timeline, cut: Pieces, facts: dict[int, TransferFacts], pace: Floats) -> None:
        self.timeline = timeline
        self.cut = cut
        self.facts = facts
        self.slow = slow_by_themselves(timeline, pace)
        self._by_experts = by_experts(timeline)
        self.charges: dict[tuple[str, str], Charge] = {}
        self._of_transfer: dict[int, Blame] = {}
        self.exposed: defaultdict[int, dict[tuple[str, str], float]] = defaultdict(dict)
        works = np.zeros(timeline.world_size)
        works[workers(timeline)] = 1
        self.weight = np.bincount(cut.class_of, weights=works, minlength=len(cut.ranks))
        self._weights = self.weight.tolist()
        self.late_exposed = 0.0
        self._counted: set[tuple[tuple[str, str], int]] = set()  # causes, and classes whose ranks they have
        self._servers = set(np.flatnonzero(works == 0).tolist())
        self.chase = Chase(timeline, cut, self.slow)
        self._staged = staged(timeline)  # a message waits on while its stage computes
        self._last_rank = _last_rank(timeline, self._servers)
        self._of_server = of_each(timeline.ops, is_server, np.bool_)
        self.could_hide = of_each(timeline.ops, lambda op: reduces(op) and op.stream != COMPUTE_STREAM, bool).tolist()
        self._class_ranks = [np.flatnonzero(cut.class_of == c).tolist() for c in range(len(cut.ranks))]

    def charge_all(self) -> None:
        """Every piece, gathered by op and rank class first."""
        cut = self.cut
        idle = ((cut.state == PieceState.LAUNCH) | ~cut.computes) & (self.weight[cut.owner] > 0)
        who = np.flatnonzero(idle)
        if not len(who):
            return
        key = (cut.why[who] * (len(self.timeline.ops) + 1) + cut.op[who] + 1) * len(cut.ranks) + cut.owner[who]
        groups, inverse = np.unique(key, return_inverse=True)
        launched = np.where(cut.state[who] == _LAUNCH, self._launching()[cut.op[who]], 1.0)
        seconds = np.bincount(inverse, weights=cut.seconds[who] * launched, minlength=len(groups))
        order = np.argsort(inverse, kind="stable")
        ptr = np.searchsorted(inverse[order], np.arange(len(groups)))
        first = who[order[ptr]]
        last = who[order[np.append(ptr[1:], len(order)) - 1]]
        longest = who[np.lexsort((-cut.seconds[who], inverse))[ptr]]
        columns = (seconds, first, last, *(of[first] for of in (cut.owner, cut.op, cut.why, cut.state)), longest)
        waits: list[LostSeconds] = []
        plain: dict[tuple[int, int, int], Blame] = {}
        all_lost = list(map(LostSeconds, *(column.tolist() for column in columns)))
        moved = self._behind_slow(all_lost)
        for lost in all_lost:
            if lost.rule in _WAITS:
                waits.append(lost)
                continue
            if lost.rule == PieceRule.TRANSFER and (lost.op, lost.owner) in moved:
                part, blame = moved[lost.op, lost.owner]
                self.add(blame, lost._replace(seconds=part, state=_STALL))
                self.late_exposed += part * self._weights[lost.owner]
                if part >= lost.seconds:
                    continue
                lost = lost._replace(seconds=lost.seconds - part)
            facts = lost.rule, lost.op, lost.state
            plain_blame = plain.get(facts)
            if plain_blame is None:
                plain_blame = plain[facts] = self._plain(*facts)
            self.add(plain_blame, lost)
        self._waits(waits)

    def _launching(self) -> Floats:
        """(ops,) what share of its time launching an op's kernels takes beyond them, where it is launched more slowly
        than they run: its kernels' own work is not lost, and no other table counts it as launching."""
        return of_each(self.timeline.ops, lambda op: by_class(op).get(_LAUNCH, 0.0), np.float64)

    def _behind_slow(self, all_lost: list[LostSeconds]) -> dict[tuple[int, int], tuple[float, Blame]]:
        """By op and rank class: seconds of exposed transfers that began late because of a slow rank, and its blame."""
        chase = self.chase
        if not (self.slow.any() or chase.late_hosts.any()):
            return {}
        waited: SecondsOf = {}
        exposed: SecondsOf = {}
        for lost in all_lost:
            if lost.rule in (PieceRule.PEER, PieceRule.TRANSFER):
                (waited if lost.rule == PieceRule.PEER else exposed)[lost.op, lost.owner] = lost.seconds
        blames: dict[int, Blame] = {}

        def holder(op: int, rank: int, begin: float, end: float) -> int:
            """The rank that held up this stay, -1 where no slow rank or host did; its blame is kept."""
            end_of_chase = chase.follow(op, rank, begin, end)
            blame = self._of_wait(op, end_of_chase)
            by_host = blame.cause == "host" and chase.late_hosts[end_of_chase.rank]
            if blame.cause not in {"slow rank", "uneven experts"} and not by_host:
                return -1
            blames.setdefault(end_of_chase.rank, replace(blame, holder=end_of_chase.rank, holder_op=end_of_chase.op))
            return end_of_chase.rank

        peers = LatePeers(self.timeline, self.cut, waited, exposed, self.weight.astype(np.float64), holder)
        return {key: (seconds, blames[rank]) for key, (seconds, rank) in peers.moved().items()}

    def _plain(self, why: int, op: int, state: int) -> Blame:
        """Of a piece in which its rank waits for nobody: by its rule, op and state."""
        if why == PieceRule.TRANSFER:
            return self.of_transfer(op)
        if why == PieceRule.NOTHING:
            return self._of_nothing()
        info = self.chase.info(op)
        if why != PieceRule.HOST_WORK and state == PieceState.LAUNCH:
            return Blame("launch", "kernels")
        if why != PieceRule.HOST_WORK or self._is_of_host(op):
            return Blame("host", sort_of(info.name))
        called = info.name.startswith(HOST_CALL)
        return Blame("calls", "layers") if called else Blame("host copies", sort_of(info.name))

    def _of_nothing(self) -> Blame:
        """Of ranks without anything left to do: whoever ends last holds them, a worker that is late by itself, too,
        whose gradients a server has to wait for."""
        last, last_worker = self._last_rank
        if self.timeline.source != "simulated":
            return Blame("idle device", "nothing queued", last)
        if self.slow[last_worker]:
            return replace(self._of_slow(last_worker), holder=last_worker)
        if self.chase.late_hosts[last_worker] and not self._staged:
            op = self.chase.longest_for_host(last_worker)
            if self._is_of_host(op):
                return Blame("host", sort_of(self.timeline.ops[op].name), last_worker, op)
        if last in self._servers:
            return Blame("parameter server", "server", last)
        return Blame(*(("schedule", "stages") if self._staged else ("jitter", "ranks")), last)

    def of_transfer(self, op: int) -> Blame:
        """Of an exposed transfer; kept by hand, since a cache of a method would hold the book, and the run with it."""
        if op not in self._of_transfer:
            self._of_transfer[op] = self._transfer(op)
        return self._of_transfer[op]

    def _transfer(self, op: int) -> Blame:
        """Of an exposed transfer."""
        info = self.chase.info(op)
        facts = self.facts[op]
        if self._serves(op):
            return Blame("parameter server", "server", link=facts.link)
        if facts.limit in OF_LINKS and self.timeline.links is not None:
            return Blame(facts.limit, sort_of(self.timeline.links.link_names[facts.link]), link=facts.link)
        return Blame(facts.limit, messages(info) or sort_of(info.name))

    def _serves(self, op: int) -> bool:
        if not self._of_server.any():
            return False
        return any(self._of_server[o] for o in (op, *self.chase.info(op).detail.get("meets", ())))

    def _waits(self, waits: list[LostSeconds]) -> None:
        """Waits for peers: those of one meeting have one cause, so the longest of them is followed."""
        chase = self.chase
        cut = self.cut
        ranks = cut.ranks.tolist()
        weight = self._weights
        meetings: defaultdict[tuple[int, int], list[LostSeconds]] = defaultdict(list)
        for lost in waits:
            group = chase.group_of(lost.op).item(ranks[lost.owner])
            meetings[lost.op, group].append(lost)
        ranked = sorted(meetings.values(), key=lambda m: -sum(w.seconds * weight[w.owner] for w in m))
        for n, members in enumerate(ranked):
            longest = max(members, key=lambda w: w.seconds)
            chased = None
            if n < MAX_CHASES and longest.rule == PieceRule.PEER:
                ends = (longest.longest, longest.longest) if self._staged else (longest.piece, longest.last)
                window = float(cut.start[ends[0]]), float(cut.stop[ends[1]])
                chased = chase.follow(longest.op, ranks[longest.owner], *window)
            blame = self._of_wait(longest.op, chased)
            if chased is not None:
                blame = replace(blame, holder=chased.rank, holder_op=chased.op)
            for lost in members:
                self.add(blame, lost)

    def _of_wait(self, op: int, chased: ChaseEnd | None) -> Blame:
        if chased is not None and (late_by_itself := self._of_late(chased)) is not None:
            return late_by_itself
        if self._serves(op) or (chased is not None and chased.op >= 0 and self._serves(chased.op)):
            return Blame("parameter server", "server")
        if chased is None:
            return Blame("jitter", "ranks")
        if chased.why in (PieceRule.KERNEL, PieceRule.SIDE_KERNEL) and self._uneven(chased.op, chased.rank):
            return Blame("uneven experts", "experts")
        if by_structure(self.timeline, self.chase.info(op)):
            return Blame("schedule", "stages")
        if chased.why == PieceRule.TRANSFER and chased.op in self.facts:
            return self.of_transfer(chased.op)
        if chased.why == PieceRule.HOST_WORK:
            return Blame("host copies", sort_of(self.timeline.ops[op].name))
        if chased.why == PieceRule.NOTHING and self.timeline.source != "simulated":
            return Blame("late launch", "peers")
        return Blame("jitter", "ranks")

    def _of_late(self, chased: ChaseEnd) -> Blame | None:
        """Of a wait for a rank that is late by itself, whoever passes the wait on, a server as well: its kernels are
        slow, or its host is. None for any other."""
        if chased.rank in self._servers:
            return None
        computes = chased.why in (PieceRule.KERNEL, PieceRule.SIDE_KERNEL)
        if computes and chased.rank >= 0 and self.slow[chased.rank]:
            return self._of_slow(chased.rank)
        if chased.why == PieceRule.HOST_WORK and self._is_of_host(chased.op):
            return Blame("host", sort_of(self.timeline.ops[chased.op].name))
        return None

    def _is_of_host(self, op: int) -> bool:
        """Whether an op is its host's own work; -1 is none."""
        return op >= 0 and own_work_of_host(self.timeline.ops[op])

    def _of_slow(self, rank: int) -> Blame:
        """A slow rank itself, or where it is slow in its experts alone, the routing of tokens to them."""
        if self._by_experts[rank]:
            return Blame("uneven experts", "experts")
        return Blame("slow rank", f"rank {rank}")

    def _uneven(self, op: int, rank: int) -> bool:
        """Whether an op is a pass of experts that takes a rank longer than the median one."""
        if not of_experts(self.chase.info(op)):
            return False
        spans = columns_of(self.timeline).of(op)
        took = spans.end - spans.start
        own = took[spans.ranks == rank]
        return bool(len(own)) and float(own.max()) > (1 + UNLIKE) * float(np.median(took))

    def add(self, blame: Blame, lost: LostSeconds) -> None:
        """Charge what each rank of the piece's class lost."""
        key = blame.cause, blame.subject
        charge = self.charges.get(key)
        if charge is None:
            charge = self.charges[key] = Charge(*key)
        seconds = lost.seconds
        owner = lost.owner
        op = lost.op
        total = seconds * self._weights[owner]
        charge.seconds += total
        charge.count += 1
        if (key, owner) not in self._counted:
            self._counted.add((key, owner))
            charge.ranks.update(self._class_ranks[owner])
        if lost.state == _EXPOSED and self.could_hide[op]:
            step = self.exposed[self.chase.info(op).step]
            step[key] = step.get(key, 0.0) + total
        if (op >= 0) > (charge.op >= 0) or (seconds > charge.worst and (op >= 0 or charge.op < 0)):
            cut = self.cut
            charge.worst, charge.op, charge.rank = seconds, op, int(cut.ranks[owner])
            charge.holder_rank, charge.holder_op, charge.link = blame.holder, blame.holder_op, blame.link
            charge.begin, charge.end = float(cut.start[lost.piece]), float(cut.stop[lost.last])

    def move_late_starts(self, late: dict[int, LateStart]) -> None:
        """Charge to each step's late start what it exposes, out of what its transfers were charged with."""
        world = self.timeline.world_size - len(self._servers)
        for step, fact in late.items():
            booked = self.exposed.get(step, {})
            total = sum(booked.values())
            moved = min(total, fact.idle * world)
            if not total or moved <= 0:
                continue
            for key, seconds in booked.items():
                self.charges[key].seconds -= seconds * moved / total
            charge = self.charges.setdefault(("late start", "backward"), Charge("late start", "backward"))
            charge.seconds += moved
            charge.count += 1
            charge.ranks.update(range(world))
            if moved / world > charge.worst:
                charge.worst, charge.op, charge.rank = moved / world, fact.op, fact.rank
                charge.begin, charge.end = fact.begin, fact.end
