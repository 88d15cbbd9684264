"""The books of lost time: what each cause has cost, piece by piece of the partition."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from itertools import pairwise

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.op_infos import of_each
from clustersim.core.program import COMPUTE_STREAM, HOST_CALL
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.booking import Blame, Charge, LostSeconds, booked, by_step
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

_WAITS = (int(PieceRule.PEER), int(PieceRule.QUEUED))
_EXPOSED = int(PieceState.EXPOSED)
_STALL = int(PieceState.STALL)
_LAUNCH = int(PieceState.LAUNCH)
"""Plain numbers: to look a name up in an enumeration takes as long as ten additions, and there are a million pieces."""
MAX_CHASES = 2000
"""Waits that are followed, the costliest first; what is left is charged as they were."""


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
        self._of_kind: dict[tuple[int, str, int, bool], Blame] = {}
        self.exposed: dict[int, dict[tuple[str, str], float]] = {}
        works = np.zeros(timeline.world_size)
        works[workers(timeline)] = 1
        self.weight: Floats = np.bincount(cut.class_of, weights=works, minlength=len(cut.ranks)).astype(np.float64)
        self.late_exposed = 0.0
        self._servers = set(np.flatnonzero(works == 0).tolist())
        self.chase = Chase(timeline, cut, self.slow)
        self._staged = staged(timeline)  # a message waits on while its stage computes
        self._last_rank = _last_rank(timeline, self._servers)
        self._of_server = of_each(timeline.ops, is_server, np.bool_)
        self._any_server = bool(self._of_server.any())
        self.could_hide = of_each(timeline.ops, lambda op: reduces(op) and op.stream != COMPUTE_STREAM, np.bool_)

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
        seconds = np.bincount(inverse, weights=cut.seconds[who] * launched, minlength=len(groups)).astype(np.float64)
        order = np.argsort(inverse, kind="stable")
        ptr = np.searchsorted(inverse[order], np.arange(len(groups)))
        first = who[order[ptr]]
        last = who[order[np.append(ptr[1:], len(order)) - 1]]
        longest = who[np.lexsort((-cut.seconds[who], inverse))[ptr]]
        owner, op, why, state = (of[first] for of in (cut.owner, cut.op, cut.why, cut.state))
        self._charge(LostSeconds(seconds, first, last, owner, op, why, state, longest))

    def _charge(self, lost: LostSeconds) -> None:
        """All that was lost: first what nobody was waited for, then waits, the costliest meeting first."""
        blames: list[Blame] = []
        lost, blamed = self._moved(lost, blames)
        waiting = np.isin(lost.rule, _WAITS)
        waits = np.flatnonzero(waiting)
        plain = np.flatnonzero(~waiting & (blamed < 0))
        blamed[plain] = self._plain_blames(lost.at(plain), blames)
        order, blamed[waits] = self._waits(lost.at(waits), blames)
        placed = np.concatenate([np.flatnonzero(~waiting), waits[order]])
        lost = lost.at(placed)
        blamed = blamed[placed]
        self.charges = booked(lost, blames, blamed, self.cut, self.weight)
        hidden = np.flatnonzero((lost.state == _EXPOSED) & self.could_hide[lost.op])
        step = self.timeline.op_steps[lost.op[hidden]]
        self.exposed = by_step(lost.at(hidden), blames, blamed[hidden], step, self.weight)

    def _moved(self, lost: LostSeconds, blames: list[Blame]) -> tuple[LostSeconds, Ints]:
        """What was lost, with each exposed transfer that began late because of a slow rank divided into what that rank
        is the reason for, which comes first, and the rest; and the numbers of their ``blames``, -1 for what has none
        yet."""
        moved = self._behind_slow(lost)
        if not moved:
            return lost, np.full(len(lost.op), -1)
        transfers = np.flatnonzero(lost.rule == PieceRule.TRANSFER)
        whose = zip(lost.op[transfers].tolist(), lost.owner[transfers].tolist(), strict=True)
        late = [(place, *moved[key]) for place, key in zip(transfers.tolist(), whose, strict=True) if key in moved]
        blames += [blame for _, _, blame in late]
        places = np.array([place for place, _, _ in late], dtype=np.int64)
        part = np.array([seconds for _, seconds, _ in late], dtype=np.float64)
        self.late_exposed += sum((part * self.weight[lost.owner[places]]).tolist())
        left = lost.seconds.copy()
        left[places] -= part
        rest = np.setdiff1d(np.arange(len(left)), places[part >= lost.seconds[places]])
        at = np.concatenate([places, rest])
        order = np.argsort(at, kind="stable")
        divided = replace(
            lost.at(at[order]),
            seconds=np.concatenate([part, left[rest]])[order],
            state=np.concatenate([np.full(len(part), _STALL), lost.state[rest]])[order],
        )
        return divided, np.concatenate([np.arange(len(part)), np.full(len(rest), -1)])[order]

    def _launching(self) -> Floats:
        """(ops,) what share of its time launching an op's kernels takes beyond them, where it is launched more slowly
        than they run: its kernels' own work is not lost, and no other table counts it as launching."""
        return of_each(self.timeline.ops, lambda op: by_class(op).get(_LAUNCH, 0.0), np.float64)

    def _behind_slow(self, lost: LostSeconds) -> dict[tuple[int, int], tuple[float, Blame]]:
        """By op and rank class: seconds of exposed transfers that began late because of a slow rank, and its blame."""
        chase = self.chase
        if not (self.slow.any() or chase.late_hosts.any()):
            return {}
        waited: SecondsOf = {}
        exposed: SecondsOf = {}
        for rule, known in ((PieceRule.PEER, waited), (PieceRule.TRANSFER, exposed)):
            own = lost.at(np.flatnonzero(lost.rule == rule))
            places = zip(own.op.tolist(), own.owner.tolist(), strict=True)
            known.update(zip(places, own.seconds.tolist(), strict=True))
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

        peers = LatePeers(self.timeline, self.cut, waited, exposed, self.weight, holder)
        return {key: (seconds, blames[rank]) for key, (seconds, rank) in peers.moved().items()}

    def _plain_blames(self, lost: LostSeconds, blames: list[Blame]) -> Ints:
        """Number among ``blames`` of each loss in which its rank waits for nobody; those that have none yet get one.
        Transfers are told apart by op, others by what their ops have in common."""
        kind = np.where(lost.op < 0, -1, self.chase.kind_of[lost.op])
        name = np.where(lost.rule == PieceRule.TRANSFER, lost.op, kind)
        keys = (lost.rule * len(PieceState) + lost.state) * (len(self.timeline.ops) + 1) + name + 1
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        known: dict[Blame, int] = {}
        numbers = np.empty(len(first), dtype=np.int64)
        for k, place in enumerate(first.tolist()):
            blame = self._plain(lost.rule.item(place), lost.op.item(place), lost.state.item(place))
            number = known.setdefault(blame, len(blames))
            if number == len(blames):
                blames.append(blame)
            numbers[k] = number
        of_each_loss: Ints = numbers[which.reshape(-1)]
        return of_each_loss

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
        facts = self.facts[op]
        serves = self._serves(op)
        key = self.chase.kind_of.item(op), facts.limit, facts.link, serves
        if key not in self._of_kind:
            self._of_kind[key] = self._transfer(self.chase.info(op), facts, serves=serves)
        return self._of_kind[key]

    def _transfer(self, info: OpInfo, facts: TransferFacts, *, serves: bool) -> Blame:
        """Of an exposed transfer; ``serves`` : a parameter server's."""
        if serves:
            return Blame("parameter server", "server", link=facts.link)
        if facts.limit in OF_LINKS and self.timeline.links is not None:
            return Blame(facts.limit, sort_of(self.timeline.links.link_names[facts.link]), link=facts.link)
        return Blame(facts.limit, messages(info) or sort_of(info.name))

    def _serves(self, op: int) -> bool:
        if not self._any_server:
            return False
        return any(self._of_server[o] for o in (op, *self.chase.info(op).detail.get("meets", ())))

    def _waits(self, lost: LostSeconds, blames: list[Blame]) -> tuple[Ints, Ints]:
        """Waits for peers: those of one meeting have one cause, so the longest of them is followed.

        Returns the order in which they are charged, the costliest meetings first, and of each the number of its blame.
        """
        chase = self.chase
        ranks = self.cut.ranks[lost.owner]
        meeting = lost.op * (self.timeline.world_size + 1) + chase.groups_at(lost.op, ranks) + 1
        _, first, which = np.unique(meeting, return_index=True, return_inverse=True)
        which = which.reshape(-1)
        cost = np.bincount(which, weights=lost.seconds * self.weight[lost.owner], minlength=len(first))
        ranked = np.lexsort((first, -cost))
        place = np.empty(len(ranked), dtype=np.int64)
        place[ranked] = np.arange(len(ranked))
        order = np.argsort(place[which], kind="stable")
        begins = np.searchsorted(place[which][order], np.arange(len(ranked) + 1)).tolist()
        numbers = np.empty(len(ranked), dtype=np.int64)
        unfollowed: dict[bool, int] = {}
        for n, (a, b) in enumerate(pairwise(begins)):
            op = lost.op.item(order.item(a))
            chased = None
            if n < MAX_CHASES:
                members = order[a:b]
                longest = members.item(lost.seconds[members].argmax())
                chased = self._chased(lost, longest, int(ranks[longest]))
            serves = self._serves(op)
            if chased is None and serves in unfollowed:
                numbers[n] = unfollowed[serves]
                continue
            blame = self._of_wait(op, chased)
            if chased is None:
                unfollowed[serves] = len(blames)
            else:
                blame = replace(blame, holder=chased.rank, holder_op=chased.op)
            numbers[n] = len(blames)
            blames.append(blame)
        return order, numbers[place[which]]

    def _chased(self, lost: LostSeconds, place: int, rank: int) -> ChaseEnd | None:
        """Who held up the meeting of a wait; None for work that queues."""
        if lost.rule.item(place) != PieceRule.PEER:
            return None
        longest = lost.longest.item(place)
        ends = (longest, longest) if self._staged else (lost.piece.item(place), lost.last.item(place))
        return self.chase.follow(lost.op.item(place), rank, self.cut.start.item(ends[0]), self.cut.stop.item(ends[1]))

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
        return op >= 0 and own_work_of_host(self.chase.info(op))

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
