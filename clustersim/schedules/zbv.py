"""ZBV by search, as its authors' zbv.py does it (Qi et al., arXiv 2401.10241, section 6).

Rank r holds stage r and stage 2p-1-r (chunks 0 and 1); what that buys is told in :mod:`clustersim.schedules.zbv_torch`,
whose steps are counted for F = I = W. Here the same shape is found for any durations, greedily, in 2m rounds: an I on
every rank, then an F on every rank, and before each of them as many W as fit into the wait for its input, or as free
the memory it needs. Of each rank's two chunks the one whose input comes up the V, from the rank behind, has precedence:
it is nearer to its end.

A W that is longer than the gap is run only if the rank is the idlest one otherwise. Who that is, is known after the
attempt, so it is repeated with the idle times of the one before as long as that makes it better.

    bubble = (p-1)F of one chunk for F = I = W; never more than 2p chunk passes held until W.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

import msgspec

from clustersim.errors import ScenarioError
from clustersim.schedules.base import UNIT, Action, Costs, Orders, Schedule
from clustersim.schedules.zero_bubble import COSTS, LIMIT, TRANSFER, late_starts, limit_of

UP = {("F", 1), ("I", 0)}
"""Passes whose input comes from the rank behind; those of the others come from the rank before."""


class Rank(msgspec.Struct):
    """One rank while the search writes its order. ``ends[kind, chunk]`` has the end of each micro-batch's pass."""

    clock: float = 0.0
    idle: float = 0.0
    held: int = 0
    ends: dict[tuple[str, int], list[float]] = msgspec.field(
        default_factory=lambda: {(kind, chunk): [] for kind in "FI" for chunk in (0, 1)}
    )
    pending: deque[Action] = msgspec.field(default_factory=deque)
    order: list[Action] = msgspec.field(default_factory=list)

    def count(self, kind: str, chunk: int) -> int:
        """How many passes of this kind are written; also the micro-batch of the next."""
        return len(self.ends[kind, chunk])


class Rules(NamedTuple):
    """What the search reckons with: chunk passes that may be held, durations, and the time of a message."""

    limit: int
    costs: Costs
    transfer: float


class Search:
    """The ranks and the rules of one attempt. ``excused[r]``: rank r's idle time in the attempt before."""

    def __init__(self, m: int, rules: Rules, excused: Sequence[float], fill: dict[str, bool]) -> None:
        self.p, self.m = len(excused), m
        self.limit, self.costs, self.transfer = rules
        self.ranks = [Rank() for _ in range(self.p)]
        self.fill = fill
        self.excused = [max(excused) - idle for idle in excused]
        self.most_idle = 0.0

    def feeder(self, rank: int, kind: str, chunk: int) -> Rank | None:
        """The rank that the input of this pass comes from; None if it is this rank or the data loader."""
        other = rank + 1 if (kind, chunk) in UP else rank - 1
        return self.ranks[other] if 0 <= other < self.p else None

    def has_input(self, rank: int, kind: str, chunk: int) -> bool:
        """Whether the next pass of this kind has its input scheduled."""
        feeder = self.feeder(rank, kind, chunk)
        return feeder is None or feeder.count(kind, chunk) > self.ranks[rank].count(kind, chunk)

    def arrival(self, rank: int, kind: str, chunk: int) -> float | None:
        """When the input of the next pass of this kind arrives from another rank; None if it need not."""
        feeder = self.feeder(rank, kind, chunk)
        return None if feeder is None else feeder.ends[kind, chunk][self.ranks[rank].count(kind, chunk)] + self.transfer

    def run(self, rank: int, kind: str, chunk: int) -> None:
        """Append the rank's next pass of this kind to its order."""
        me, arrival = self.ranks[rank], self.arrival(rank, kind, chunk)
        start = me.clock if arrival is None else max(me.clock, arrival)
        if me.order:
            me.idle += start - me.clock
            self.most_idle = max(self.most_idle, me.idle)
        me.clock = start + self.costs.of(kind)
        action = Action(kind, me.count(kind, chunk), chunk)
        me.order.append(action)
        me.ends[kind, chunk].append(me.clock)
        if kind == "I":
            me.pending.append(action._replace(kind="W"))
        else:
            me.held += 1

    def weight(self, rank: int) -> None:
        """Append the oldest W that is left."""
        me = self.ranks[rank]
        me.order.append(me.pending.popleft())
        me.clock += self.costs.weight_gradient
        me.held -= 1

    def make_room(self, rank: int) -> None:
        """Run W until one more chunk pass may be held."""
        while self.ranks[rank].held >= self.limit:
            self.weight(rank)

    def fill_wait(self, rank: int, kind: str, chunk: int) -> None:
        """Run the W that fit before this pass's input arrives, and one more if the gap would make us the idlest."""
        me, arrival = self.ranks[rank], self.arrival(rank, kind, chunk)
        if arrival is None:
            return
        while me.pending and arrival >= me.clock + self.costs.weight_gradient:
            self.weight(rank)
        most = max(self.most_idle, self.excused[rank])
        fills = (kind, chunk) == ("I", 0) or self.fill[kind]
        if me.pending and fills and arrival - me.clock > most - me.idle:
            self.weight(rank)


def _down_and_up(search: Search) -> None:
    """Walk the first micro-batch through the V; while it is below, the ranks above run more F0 as far as they fit."""
    for rank in range(search.p):
        search.run(rank, "F", 0)
    for rank in range(search.p - 1, -1, -1):
        me, arrival = search.ranks[rank], search.arrival(rank, "F", 1)
        while (
            arrival is not None
            and me.held + 2 + 2 * rank <= search.limit
            and me.clock + search.costs.forward <= arrival
            and me.count("F", 0) < search.m
        ):
            for above in range(rank + 1):
                search.run(above, "F", 0)
        search.run(rank, "F", 1)


def _level(search: Search) -> None:
    """Further F, chunk by chunk in turn, until each rank has run as many as the one before it, and more of chunk 1."""
    chunk = 0
    for rank in range(1, search.p):
        me, before = search.ranks[rank], search.ranks[rank - 1]

        def behind(me: Rank = me, before: Rank = before) -> bool:
            fewer = me.count("F", 0) + me.count("F", 1) < before.count("F", 0) + before.count("F", 1)
            return fewer or me.count("F", 1) <= before.count("F", 1) < search.m

        while behind():
            for below in range(search.p - 1, rank - 1, -1):
                if search.ranks[below].count("F", chunk) < search.m:
                    search.run(below, "F", chunk)
            chunk = 1 - chunk


def _gradients(search: Search) -> None:
    """One I on every rank: I0 where the rank behind has sent for it, else I1."""
    upward: list[int] = []
    downward: list[int] = []
    for rank, me in enumerate(search.ranks):
        late = me.count("I", 0) < me.count("I", 1)
        comes = search.has_input(rank, "I", 0) or me.count("I", 1) == search.m
        (upward if late and comes else downward).append(rank)
    for rank, chunk in [(rank, 0) for rank in reversed(upward)] + [(rank, 1) for rank in downward]:
        search.fill_wait(rank, "I", chunk)
        search.run(rank, "I", chunk)


def _forwards(search: Search) -> None:
    """One F on every rank that can: F1 where the rank behind has sent for it, else F0 where the rank before has."""
    for rank, me in enumerate(search.ranks):
        if me.count("F", 1) >= search.m:
            continue
        if me.count("F", 1) < me.count("F", 0) and search.has_input(rank, "F", 1):
            chunk = 1
        elif me.count("F", 0) < search.m and search.has_input(rank, "F", 0):
            chunk = 0
        else:
            continue
        search.make_room(rank)
        search.fill_wait(rank, "F", chunk)
        search.run(rank, "F", chunk)


def _attempt(search: Search) -> Search:
    _down_and_up(search)
    _level(search)
    for _ in range(2 * search.m):
        _gradients(search)
        _forwards(search)
    for rank, me in enumerate(search.ranks):
        while me.pending:
            search.weight(rank)
    return search


def zbv(p: int, chunks: int, m: int, **options: Any) -> Orders:
    """The best of four attempts (W that are longer than the gap: before I1 or not, before F or not), each repeated."""
    limit = limit_of(2 * p, options)
    if limit < 2 * p:
        raise ScenarioError(
            f"zbv on {p} pipeline ranks holds {2 * p} chunk passes, which max_in_flight = {limit} does not allow; "
            f"use {2 * p}, or schedule = 'v_half' or 'v_min' (at $.parallel.max_in_flight)"
        )
    rules, found = Rules(limit, options[COSTS.name], options[TRANSFER.name]), list[Search]()
    for before_gradient, before_forward in product((True, False), repeat=2):
        fill = {"I": before_gradient, "F": before_forward}
        best = _attempt(Search(m, rules, [-1.0] * p, fill))
        while best.most_idle > 0:
            again = _attempt(Search(m, rules, [rank.idle for rank in best.ranks], fill))
            if again.most_idle >= best.most_idle:
                break
            best = again
        found.append(best)
        if best.most_idle == 0:
            break
    return tuple(
        tuple((action,) for action in rank.order) for rank in min(found, key=lambda search: search.most_idle).ranks
    )


def _peak(rank: int, p: int, chunks: int, m: int, **options: Any) -> int | None:
    return min(limit_of(2 * p, options), 2 * m) if options[COSTS.name] == UNIT else None


ZBV = Schedule(
    "zbv", zbv, placement="v", chunks=2, splits_backward=True, options=(LIMIT, COSTS, TRANSFER), bubble=late_starts,
    peak=_peak,
)  # fmt: skip
