"""What the searches for zero bubbles share: ranks that write their order pass by pass, and the rules of doing so.

A rank runs its passes as soon as their inputs are there. A weight gradient has none to wait for, so it is run where the
rank would idle, or must free what it holds. Which pass is next is for the schedule to say
(:mod:`~clustersim.training.schedules.zero_bubble`, :mod:`~clustersim.training.schedules.zbv`).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import msgspec

from clustersim.training.schedules.base import UNIT, Action, Options, Orders, PassCosts, ScheduleOption

COSTS = ScheduleOption(
    "costs", PassCosts, UNIT, "durations of a chunk's F, I and W that the search reckons with, in any unit"
)
TRANSFER = ScheduleOption(
    "transfer", float, 0.0, "time of a message between neighbours that the search reckons with, as costs", 0
)
LIMIT = ScheduleOption("max_in_flight", int, None, "micro-batches that a rank may hold until their weight gradients", 1)

UP = {("F", 1), ("I", 0)}
"""Passes whose input comes from the rank behind; those of the others come from the rank before."""


class Rules(NamedTuple):
    """What a search reckons with: chunk passes that may be held, durations, and the time of a message."""

    limit: int
    costs: PassCosts
    transfer: float


def rules(default: int, options: Options) -> Rules:
    """As asked; ``default`` is what a rank may hold where that is not said."""
    given = options[LIMIT.name]
    return Rules(default if given is None else int(given), options[COSTS.name], options[TRANSFER.name])


class GreedyRank(msgspec.Struct):
    """One rank while the search writes its order: its clock, its idle time since its first forward, and what it holds.

    ``ends[kind, chunk]`` has the end of each micro-batch's pass; ``pending`` the W that could be run now.
    """

    clock: float = 0.0
    idle: float = 0.0
    held: int = 0
    ends: dict[tuple[str, int], list[float]] = msgspec.field(
        default_factory=lambda: {(kind, chunk): [] for kind in "FI" for chunk in (0, 1)}
    )
    pending: deque[Action] = msgspec.field(default_factory=deque)
    order: list[Action] = msgspec.field(default_factory=list)

    def count(self, kind: str, chunk: int = 0) -> int:
        """How many passes of this kind are written; also the micro-batch of the next."""
        return len(self.ends[kind, chunk])


class GreedySearch:
    """The ranks and the rules of one attempt; ``most_idle`` is the idle time of the idlest rank."""

    def __init__(self, p: int, m: int, rules: Rules) -> None:
        self.p = p
        self.m = m
        self.limit, self.costs, self.transfer = rules
        self.ranks = [GreedyRank() for _ in range(p)]
        self.most_idle = 0.0

    def worth(self, rank: int, kind: str, chunk: int, gap: float) -> bool:
        """Whether to run a W that is longer than the gap before a pass."""
        raise NotImplementedError

    def feeder(self, rank: int, kind: str, chunk: int = 0) -> GreedyRank | None:
        """The rank that the input of this pass comes from; None if it is this rank or the data loader."""
        peer_rank = rank + 1 if (kind, chunk) in UP else rank - 1
        return self.ranks[peer_rank] if 0 <= peer_rank < self.p else None

    def arrival(self, rank: int, kind: str, chunk: int = 0) -> float | None:
        """When the input of the next pass of this kind arrives from another rank; None if it need not."""
        feeder = self.feeder(rank, kind, chunk)
        return None if feeder is None else feeder.ends[kind, chunk][self.ranks[rank].count(kind, chunk)] + self.transfer

    def run(self, rank: int, kind: str, chunk: int = 0) -> None:
        """Append the rank's next pass of this kind to its order."""
        me = self.ranks[rank]
        arrival = self.arrival(rank, kind, chunk)
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

    def all_weights(self, rank: int) -> None:
        """Append every W that is left."""
        while self.ranks[rank].pending:
            self.weight(rank)

    def make_room(self, rank: int) -> None:
        """Run W until one more chunk pass may be held."""
        while self.ranks[rank].held >= self.limit:
            self.weight(rank)

    def fill_wait(self, rank: int, kind: str, chunk: int = 0) -> None:
        """Run the W that fit before this pass's input arrives, and one more if the gap left is worth it."""
        me = self.ranks[rank]
        arrival = self.arrival(rank, kind, chunk)
        if arrival is None:
            return
        while me.pending and arrival >= me.clock + self.costs.weight_gradient:
            self.weight(rank)
        if me.pending and self.worth(rank, kind, chunk, arrival - me.clock):
            self.weight(rank)

    def orders(self) -> Orders:
        """What every rank has written."""
        return tuple(tuple((action,) for action in rank.order) for rank in self.ranks)
