"""Flows that always have one rate, as one object: a class of equals, and who holds them back.

Flows that cross the same slots with the same weights under the same ceiling are equal to max-min fairness, so they
have one rate. A :class:`Shares` solves for the rates of some classes in what the others leave over; whose rates are
affected is for :class:`clustersim.engine.network.Network` to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.fairshare import max_min
from clustersim.engine.loads import INSTANT
from clustersim.engine.spells import Course, Spells

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

CEILING, UNKNOWN = -1, -2
"""What holds a class back where no slot does: its own ceiling; nobody has looked yet."""

SMALL = 64
"""Entries (class x slot) that plain Python fills sooner than numpy."""

SHORT = 8
"""Slots of a class that plain Python books sooner than numpy."""


class Equals:
    """The flows of one class that are on their way.

    number : of the class. slots, weights : what each takes, as arrays, as lists, and as ``pairs``. ceiling : [bytes/s].
    n : flows. rate : [bytes/s] of each. moved : [bytes] that a flow there from the start has moved until ``since`` [s].
    held : the slot that holds them back. booked : what the class takes in the books: rate times flows.
    flows : heap of (``moved`` at its end, transfer, begin); ``planned``, the first one's end that was asked for.
    course : the rates it had. version : tells wakes apart.
    """

    __slots__ = ("booked", "ceiling", "course", "flows", "held", "moved", "n", "number", "pairs", "planned", "rate",
                 "since", "slot_list", "slots", "users", "version", "weight_list", "weights")  # fmt: skip

    def __init__(self, number: int, slots: Ints, weights: Floats, ceiling: float) -> None:
        self.number, self.slots, self.weights, self.ceiling = number, slots, weights, ceiling
        self.slot_list, self.weight_list = slots.tolist(), weights.tolist()
        self.pairs = list(zip(self.slot_list, self.weight_list, strict=True))
        self.users = frozenset(self.slot_list)
        self.flows: list[tuple[float, int, float]] = []
        self.version = 0
        self.empty(0.0)

    def empty(self, now: float) -> None:
        """Nobody is left."""
        self.n, self.rate, self.moved, self.since = 0, 0.0, 0.0, now
        self.held, self.booked, self.planned = UNKNOWN, 0.0, -1.0
        self.course: Course | None = None
        self.version += 1

    def advance(self, now: float) -> None:
        """Let time pass at the present rate."""
        if now > self.since:
            self.moved += self.rate * (now - self.since)
            self.since = now

    def join(self, transfer: int, nbytes: float, now: float) -> None:
        """A flow begins, with so many bytes to move."""
        self.advance(now)
        heappush(self.flows, (self.moved + nbytes, transfer, now))
        self.n += 1

    def over(self, now: float, spells: Spells) -> list[int]:
        """Transfers that end now."""
        self.advance(now)
        most = self.moved + self.rate * now * INSTANT
        done: list[int] = []
        while self.flows and (not done or self.flows[0][0] <= most):
            _, transfer, begin = heappop(self.flows)
            if self.course is not None:
                spells.add(transfer, self.course, begin, now)
            done.append(transfer)
        self.n -= len(done)
        return done

    def set(self, rate: float, now: float) -> bool:
        """From now on at this rate; whether its next end is another than it was."""
        if self.rate == 0.0 or abs(rate - self.rate) > INSTANT * self.rate:
            self.advance(now)
            self.rate = rate
            if self.course is None:
                self.course = Course(now, rate)
            else:
                self.course.set(now, rate)
        elif self.flows[0][0] == self.planned:
            return False
        self.planned = self.flows[0][0]
        self.version += 1
        return True

    @property
    def due(self) -> float:
        """When its next flow ends [s]."""
        return self.since + max(self.flows[0][0] - self.moved, 0.0) / self.rate


def level(some: Sequence[Equals], usage: Floats, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    """Max-min fair rates of these classes in what ``usage`` (of each slot) leaves, and what holds each of them."""
    if len(some) == 1:
        return _level_one(some[0], usage)
    if sum(len(one.slot_list) for one in some) <= SMALL:
        return _level_few(some, usage)
    return _level_many(some, usage, rng)


def _level_one(one: Equals, usage: Floats) -> tuple[list[float], list[int]]:
    if not one.slot_list:
        return [one.ceiling], [CEILING]
    if len(one.slot_list) < SHORT:
        rooms = [(1.0 - usage.item(s)) / (w * one.n) for s, w in zip(one.slot_list, one.weight_list, strict=True)]
        best = min(rooms)
        at = one.slot_list[rooms.index(best)]
    else:
        room = (1.0 - usage[one.slots]) / (one.weights * one.n)
        k = int(room.argmin())
        best, at = float(room[k]), one.slot_list[k]
    return ([one.ceiling], [CEILING]) if one.ceiling <= best else ([max(best, 0.0)], [at])


def _level_few(some: Sequence[Equals], usage: Floats) -> tuple[list[float], list[int]]:
    """Water-filling (:mod:`clustersim.engine.fairshare`) in plain Python."""
    rates, held = [0.0] * len(some), [CEILING] * len(some)
    left: dict[int, float] = {}
    rising = list(range(len(some)))
    while rising:
        weight: dict[int, float] = {}
        for i in rising:
            one = some[i]
            n = one.n
            for s, w in one.pairs:
                weight[s] = weight.get(s, 0.0) + w * n
        if not left:
            left = {s: max(1.0 - usage.item(s), 0.0) for s in weight}
        at, water = CEILING, np.inf
        for s, total in weight.items():
            if left[s] < water * total:
                at, water = s, left[s] / total
        lowest = min([some[i].ceiling for i in rising])
        if lowest <= water:
            at, water = CEILING, lowest
            stops = [i for i in rising if some[i].ceiling <= lowest]
        else:
            stops = [i for i in rising if at in some[i].users]
        for i in stops:
            rates[i], held[i] = water, at
        if len(stops) == len(rising):
            break
        for i in stops:
            for s, w in some[i].pairs:
                left[s] = max(left[s] - w * some[i].n * water, 0.0)
        rising = [i for i in rising if i not in stops]
    return rates, held


def _level_many(some: Sequence[Equals], usage: Floats, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    ptr = np.cumsum([0, *(len(one.slot_list) for one in some)])
    used, slots = np.unique(np.concatenate([one.slots for one in some]), return_inverse=True)
    weights = np.concatenate([one.weights * one.n for one in some])
    room = np.maximum(1.0 - usage[used], 0.0)
    ceilings = np.array([one.ceiling for one in some])
    rates = max_min(ptr, slots, weights, room, ceilings)
    owner = np.repeat(np.arange(len(some)), np.diff(ptr))
    carried = np.bincount(slots, weights * rates[owner], len(used))
    fastest = np.zeros(len(used))
    np.maximum.at(fastest, slots, rates[owner])
    full = (carried[slots] >= room[slots] - 1e-10) & (rates[owner] >= fastest[slots] * (1 - 1e-10))
    held = np.full(len(some), CEILING)
    # Any full slot holds. They are spread, so that few look for another when one goes.
    holds = rng.permutation(np.flatnonzero(full))
    held[owner[holds]] = used[slots[holds]]
    held[rates >= ceilings * (1 - INSTANT)] = CEILING
    return rates.tolist(), held.tolist()
