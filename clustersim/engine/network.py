"""The network in simulated time: fluid flows on directed links, each at its weighted max-min fair rate.

It knows the slots on which flows may meet; elsewhere a flow is alone, and the rate it has there is its ceiling.

Rates stay until a flow begins or ends; whatever begins and ends at one instant is one change. Max-min rates have a
certificate (Bertsekas & Gallager, Data Networks, section 6.5.2): every flow has a *holder*, a full slot
(:mod:`clustersim.engine.loads`) on which nobody is faster, or it is at its own ceiling. So a change is *mended* where
it happened. The rates of what began, of what shares with what ended, and of those whose holder has room now, are worked
out in what the others leave over. Whoever is then faster than one of them on a slot that holds that one, or is
overtaken on the slot that holds himself, or whose holder is no longer full, joins them, until nobody does: then
everybody has a holder again, and the rates are max-min.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.clock import SOLVE, Clock
from clustersim.engine.fairshare import SHORT, level
from clustersim.engine.flows import UNKNOWN, Equals, Spells
from clustersim.engine.loads import INSTANT, MOST_EDGES, Loads, Slots, taken
from clustersim.errors import ProgramError
from clustersim.units import format_time

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

FEW = 12
"""Classes that are solved all together sooner than one finds out which of them a change concerns."""

SLACK = 1e-11
"""How far, relatively, one rate may be above another by rounding alone."""

NOT_FULL = 1e-9
"""A slot with so much room left holds nobody."""


class Network:
    """Active flows on one topology.

    Parameters
    ----------
    clock, loads : the run's. slots : where flows of these loads may hold each other up; None for wherever they meet,
        once the first one begins.
    on_end : called as ``on_end(transfers, now)`` with the sorted ids of all transfers that end at an instant.
    """

    def __init__(
        self, clock: Clock, loads: Loads, on_end: Callable[[Ints, float], None], slots: Slots | None = None
    ) -> None:
        self.clock, self.loads, self.on_end = clock, loads, on_end
        self.segments = Spells()
        self.n_flows = self.n_solves = self._edges = 0
        self._slots, self._opened = slots, False
        self._classes: dict[tuple[int, float], Equals] = {}
        self._active: dict[Equals, None] = {}
        self._on: dict[int, list[Equals]] = {}  # classes by slot, also those without a flow now: their rate is zero
        self._new: list[tuple[int, int, float, float]] = []
        self._shrunk: dict[Equals, None] = {}
        self._ends: list[tuple[float, int, int, Equals]] = []
        self._solve_at = self._due = self._edge = -1.0  # no instant
        self._few = True  # the books below are not kept while few are there
        self._rng = np.random.default_rng(0)

    def _open(self) -> Slots:
        """Open the books, once all loads are known."""
        slots = self._slots = self._slots or self.loads.slots()
        n = len(self.loads.pairs)
        self._slot_of = {link: slots.slot.item(slots.ptr[n + i]) for i, link in enumerate(self.loads.changing.tolist())}
        self._usage, self._taken = np.zeros(slots.n), np.zeros(slots.n)
        self._users = np.zeros(slots.n, dtype=np.int64)  # classes on each slot
        self._held = np.zeros(slots.n, dtype=np.int64)  # classes each slot holds
        self._holds: dict[int, dict[Equals, None]] = {}
        alike: dict[tuple[bytes, bytes], int] = {}
        self._kind: list[int] = []  # of each load the first that takes as much of the same slots
        for load in range(n):
            mine = slice(slots.ptr[load], slots.ptr[load + 1])
            key = slots.slot[mine].tobytes(), slots.weight[mine].tobytes()
            self._kind.append(alike.setdefault(key, load))
        self._opened = True
        return slots

    def begin(self, transfers: Ints, loads: Ints, nbytes: Floats, ceilings: Floats) -> None:
        """Start a flow per transfer, now: ``nbytes`` > 0 of payload each, at most ``ceilings`` [bytes/s]."""
        self._new += zip(transfers.tolist(), loads.tolist(), nbytes.tolist(), ceilings.tolist(), strict=True)
        self.n_flows += len(transfers)
        self._ask_solve()

    def not_before(self, load: int, ceiling: float) -> float:
        """No flow of this load and ceiling ends before [s]: that is when, with its links to itself from now on."""
        one = self._classes.get((self._kind[load], ceiling)) if self._opened else None
        if one is None or not one.n:
            return 0.0
        now = self.clock.now
        left = one.flows[0][0] - one.moved - one.rate * (now - one.since)
        return now + max(left, 0.0) / ceiling

    def moved(self, transfers: Ints, start: Floats, end: Floats, rate: Floats) -> None:
        """Note transfers whose times are known without a solve: nothing else is on their links meanwhile."""
        self.n_flows += len(transfers)
        self.segments.whole.append((transfers, start, end, rate))

    def _ask_solve(self) -> None:
        if self._solve_at != self.clock.now:
            self._solve_at = self.clock.now
            self.clock.call(self.clock.now, self._solve, priority=SOLVE)

    def _solve(self) -> None:
        """Bring rates up to date with every change of this instant, then ask to be woken at the next end."""
        self._solve_at, now = -1.0, self.clock.now
        slots = self._slots if self._slots and self._opened else self._open()
        if self.loads.varying:
            self._vary(now)
        new, self._new = self._new, []
        shrunk, self._shrunk = self._shrunk, {}
        grown: dict[Equals, None] = {}
        for transfer, load, nbytes, ceiling in new:
            key = self._kind[load], ceiling
            one = self._classes.get(key)
            if one is None:
                mine = slice(slots.ptr[key[0]], slots.ptr[key[0] + 1])
                one = self._classes[key] = Equals(len(self._classes), slots.slot[mine], slots.weight[mine], ceiling)
                for slot in one.slot_list:
                    self._on.setdefault(slot, []).append(one)
            if not one.n:
                one.empty(now)
                self._active[one] = None
                self._users[one.slots] += 1
            one.join(transfer, nbytes, now)
            grown[one] = None
        if len(self._active) <= FEW:
            self._all(now)
        else:
            self._changed(grown, shrunk, now)
        self._sleep()

    def _vary(self, now: float) -> None:
        """What is left of links that vary; where that is another than before, everybody is booked anew."""
        gone = taken(self.loads.varying, self._slot_of, len(self._taken), now)
        if not np.array_equal(gone, self._taken):
            self._taken, self._few = gone, True
        if (self._active or self._new) and self._edge <= now:
            self._edges += 1
            if self._edges > MOST_EDGES:
                raise ProgramError(f"links changed {MOST_EDGES:,} times by {format_time(now)}; use a longer every")
            self._edge = min(one.edge(now) for one in self.loads.varying)
            if self._edge < np.inf:
                self.clock.call(self._edge, self._ask_solve)

    def _all(self, now: float) -> None:
        """A handful of classes in all: solved together, without books."""
        self._few = True
        some = list(self._active)
        if not some:
            return
        self.n_solves += _shared(some)
        rates, _ = level(some, self._taken, self._rng)
        for one, rate in zip(some, rates, strict=True):
            if one.set(rate, now):
                heappush(self._ends, (one.due, one.version, one.number, one))

    def _changed(self, grown: Iterable[Equals], shrunk: Iterable[Equals], now: float) -> None:
        if self._few:  # from few to many: everybody is booked anew
            self._few = False
            self._usage[:] = self._taken
            self._held[:] = 0
            self._holds.clear()
            for one in self._active:
                one.held = UNKNOWN
            self._mend(dict(self._active), now)
            return
        work: dict[Equals, None] = {}
        for one in grown:
            if one.n == 1 and one.held == UNKNOWN and not (self._users[one.slots] > 1).any():
                (rate,), (held,) = level([one], self._taken, self._rng)  # its slots to itself
                self._book(one, rate, held, now)
            else:
                work[one] = None
        for one in shrunk:
            if one.n:
                work[one] = None
            for slot in self._holding(one):
                work.update(self._holds[slot])
        if work:
            self._mend(work, now)

    def _mend(self, work: dict[Equals, None], now: float) -> None:
        """New rates for these classes, and for whoever they concern."""
        self.n_solves += 1
        for one in work:
            self._lift(one)
        while True:
            rates, held = level(list(work), self._usage, self._rng)
            more = self._faster(work, rates, held) or self._loosened(work, rates)
            if not more:
                break
            for one in more:
                self._lift(one)
            work |= more
        for one, rate, slot in zip(work, rates, held, strict=True):
            self._book(one, rate, slot, now)

    def _faster(self, work: dict[Equals, None], rates: list[float], held: list[int]) -> dict[Equals, None]:
        """Others that are faster than one of these on the slot that holds it."""
        if len(work) == len(self._active):
            return {}
        low: dict[int, float] = {}
        for rate, slot in zip(rates, held, strict=True):
            if slot >= 0:
                low[slot] = min(rate, low.get(slot, np.inf))
        found = {one for slot, rate in low.items() for one in self._on[slot] if one.rate > rate * (1 + SLACK)}
        return dict.fromkeys(sorted(found - work.keys(), key=lambda one: one.number))

    def _loosened(self, work: dict[Equals, None], rates: list[float]) -> dict[Equals, None]:
        """Others that are overtaken on the slot that holds them, or whose holder has room."""
        found: dict[Equals, None] = {}
        seen: dict[int, None] = {}
        for one, rate in zip(work, rates, strict=True):
            for slot in self._holding(one):
                seen[slot] = None
                if rate > next(iter(self._holds[slot])).rate * (1 + SLACK):
                    found.update(self._holds[slot])
        for slot in seen:
            more = sum(one.weight_list[one.slot_list.index(slot)] * rate * one.n
                       for one, rate in zip(work, rates, strict=True) if slot in one.users)  # fmt: skip
            if self._usage[slot] + more < 1 - NOT_FULL:
                found.update(self._holds[slot])
        return found

    def _holding(self, one: Equals) -> list[int]:
        """Slots of a class that hold somebody back."""
        if len(one.slot_list) < SHORT:
            return [slot for slot in one.slot_list if self._holds.get(slot)]
        mask = self._held[one.slots] > 0
        found: list[int] = one.slots[mask].tolist() if mask.any() else []
        return found

    def _book(self, one: Equals, rate: float, slot: int, now: float) -> None:
        one.held, one.booked = slot, rate * one.n
        if slot >= 0:
            self._holds.setdefault(slot, {})[one] = None
            self._held[slot] += 1
        self._use(one, one.booked)
        if one.set(rate, now):
            heappush(self._ends, (one.due, one.version, one.number, one))

    def _lift(self, one: Equals) -> None:
        """Take a class out of the books."""
        if one.held == UNKNOWN:
            return
        if one.held >= 0:
            del self._holds[one.held][one]
            self._held[one.held] -= 1
        self._use(one, -one.booked)
        one.held, one.booked = UNKNOWN, 0.0

    def _use(self, one: Equals, booked: float) -> None:
        if len(one.slot_list) < SHORT:
            for slot, weight in one.pairs:
                self._usage[slot] += weight * booked
        else:
            self._usage[one.slots] += one.weights * booked

    def _sleep(self) -> None:
        """Ask the clock for the next end; an earlier request that no longer holds is recognised when it comes."""
        ends = self._ends
        while ends and ends[0][3].version != ends[0][1]:
            heappop(ends)
        due = ends[0][0] if ends else -1.0
        if due not in (-1.0, self._due):
            self.clock.call(due, self._end)
        self._due = due

    def _end(self) -> None:
        now, ends = self.clock.now, self._ends
        if now != self._due:
            return
        self._due = -1.0
        done: list[int] = []
        while ends and (ends[0][0] <= now * (1 + INSTANT) or ends[0][3].version != ends[0][1]):
            _, version, _, one = heappop(ends)
            if version != one.version:
                continue
            done += one.over(now, self.segments)
            self._shrunk[one] = None
            if not one.n:
                if not self._few:
                    self._lift(one)
                one.empty(now)
                del self._active[one]
                self._users[one.slots] -= 1
        if self._active:
            self._ask_solve()
        self.on_end(np.array(sorted(done), dtype=np.int64), now)


def _shared(some: list[Equals]) -> bool:
    """Whether any two flows are on one slot."""
    seen: set[int] = set()
    for one in some:
        if one.slot_list and (one.n > 1 or not seen.isdisjoint(one.slot_list)):
            return True
        seen.update(one.slot_list)
    return False
