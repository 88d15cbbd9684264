"""The network in simulated time: fluid flows on directed links, each at its weighted max-min fair rate.

It knows the slots on which flows may meet; elsewhere a flow is alone, and the rate it has there is its ceiling. Of
those slots, too, few matter at a time: only one that is asked for more than it has, were all who are there at their
ceilings, can hold somebody back. It is *tight*. From when it first is, until nobody is there, it is *watched*: flows
under one ceiling that cross the same watched slots have one rate, whatever else they cross, and are one class
(:class:`~clustersim.engine.flows.classes.ClassFlows`). So the two hundred workers of a server are two classes, one for
each way through its port, and a flow that comes or goes is an entry of a heap, however many there are. (Of what crosses
many slots, as a collective does, all are watched at all times: it has no equals, and would only change its class.)

Rates stay until a flow begins or ends; whatever begins and ends at one instant is one change. It concerns whoever is
joined by tight slots with those that somebody came to, or left: the rates of all others are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableSequence
from heapq import heappop, heappush
from itertools import count
from typing import cast

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_time
from clustersim.engine.flows.classes import FULL, ClassFlows, CourseSpells, SlotShare
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.fairshare import level
from clustersim.engine.flows.loads import INSTANT, MOST_EDGES, Loads, Slots, taken

MANY = 16
"""Slots of a load from which all of them are watched."""


NOBODY = 1e-9
"""A slot of which less is asked has nobody: rounding. (Of one that varies, infinitely much is asked: it is tight.)"""


class FlowNetwork:
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
        self.clock = clock
        self.loads = loads
        self.on_end = on_end
        self.segments = CourseSpells()
        self.n_flows = self.n_solves = self._edges = 0
        self._slots = slots
        self._opened = False
        self._ways: dict[tuple[int, float], SlotShare] = {}
        self._classes: dict[object, ClassFlows] = {}
        self._active: dict[ClassFlows, None] = {}
        self._numbers = count()
        self._on: dict[int, dict[ClassFlows, None]] = {}  # active classes by watched slot
        self._new: list[tuple[int, int, float, float]] = []
        self._shrunk: dict[ClassFlows, None] = {}
        self._touched: set[int] = set()  # slots that were tight when somebody left
        self._ends: list[tuple[float, int, int, ClassFlows]] = []
        self._due = self._edge = -1.0  # no instant

    def _open(self) -> Slots:
        """Open the books, once all loads are known."""
        slots = self._slots = self._slots or self.loads.slots()
        n = len(self.loads.pairs)
        self._slot_of = {link: slots.slot.item(slots.ptr[n + i]) for i, link in enumerate(self.loads.changing.tolist())}
        self._taken = np.zeros(slots.n)
        self._all_asked = np.zeros(slots.n)
        self._all_asked[list(self._slot_of.values())] = np.inf
        # The same: a few are looked at sooner one by one.
        self._asked = cast(MutableSequence[float], self._all_asked.data)
        self._watched: set[int] = set()
        self._opened = True
        return slots

    def begin(self, flows: list[tuple[int, int, float, float]]) -> None:
        """Start flows, now: of each its transfer, load, payload [bytes] > 0 and ceiling [bytes/s]."""
        self._new += flows
        self.n_flows += len(flows)
        self._ask_solve()

    def not_before(self, transfer: int, load: int, ceiling: float) -> float:
        """A transfer under way of this load and ceiling does not end before [s]: with its links to itself from now
        on."""
        way = self._ways.get((load, ceiling))
        if way is None or way.one is None:
            return 0.0
        one = way.one
        now = self.clock.now
        end = next((end for end, its, _, _ in one.flows if its == transfer), 0.0)
        left = end - one.moved - one.rate * (now - one.since)
        return now + max(left, 0.0) / way.ceiling

    def moved(self, transfers: Ints, start: Floats, end: Floats, rate: Floats) -> None:
        """Note transfers whose times are known without a solve: nothing else is on their links meanwhile."""
        self.n_flows += len(transfers)
        self.segments.whole.append((transfers, start, end, rate))

    def _ask_solve(self) -> None:
        self.clock.last(self._solve)

    def _solve(self) -> None:
        """Bring rates up to date with every change of this instant, then ask to be woken at the next end."""
        now = self.clock.now
        slots = self._slots if self._slots and self._opened else self._open()
        changed = self._shrunk
        self._shrunk = {}
        touched, self._touched = self._touched, set()
        if self.loads.varying and self._vary(now):
            touched.update(self._slot_of.values())
        new = self._new
        self._new = []
        ways = []
        for _, load, _, ceiling in new:
            way = self._ways.get((load, ceiling))
            if way is None:
                mine = slice(slots.ptr[load], slots.ptr[load + 1])
                way = self._ways[load, ceiling] = SlotShare(slots.slot[mine], slots.weight[mine], ceiling, MANY)
            ways.append(way)
            touched.update(self._come(way))
        if not touched <= self._watched:
            self._watch(touched - self._watched, changed, now)
        for (transfer, _, nbytes, _), way in zip(new, ways, strict=True):
            one = way.one or self._class_of(way, now)
            one.join(transfer, nbytes, now, way)
            changed[one] = None
        self._share(touched, changed, now)
        self._sleep()

    def _tight(self, way: SlotShare) -> list[int]:
        """Slots of it that are asked for more than they have."""
        asked = self._asked
        return [slot for slot in way.slot_list if asked[slot] > FULL]

    def _watch(self, fresh: set[int], changed: dict[ClassFlows, None], now: float) -> None:
        """Watch these slots; flows that are there change to another class."""
        self._watched |= fresh
        for one in [one for one in self._active if not one.many]:
            for way in dict.fromkeys(way for *_, way in one.flows):
                if not fresh.isdisjoint(way.slot_list):
                    left = one.leave(way, now, self.segments)
                    changed[one] = None
                    if not one.flows:
                        self._close(one)
                    other = self._class_of(way, now)
                    for transfer, nbytes in left:
                        other.join(transfer, nbytes, now, way)
                    changed[other] = None

    def _class_of(self, way: SlotShare, now: float) -> ClassFlows:
        """The class of a way's flows, by the slots of it that are watched."""
        some = tuple([(slot, weight) for slot, weight, _ in way.entries if slot in self._watched])
        key = way.ceiling, way if way.many else some
        one = way.one = self._classes.get(key)
        if one is None:
            one = way.one = self._classes[key] = ClassFlows(next(self._numbers), key, way, some)
            for slot in one.slot_list:
                self._on.setdefault(slot, {})[one] = None
        if one not in self._active:
            one.empty(now)
            self._active[one] = None
        return one

    def _close(self, one: ClassFlows) -> None:
        """Nobody is left in a class."""
        one.version += 1
        del self._active[one]
        if one.many:
            return
        del self._classes[one.key]
        for slot in one.slot_list:
            del self._on[slot][one]

    def _vary(self, now: float) -> bool:
        """What is left of links that vary; whether that is another than before."""
        if (self._active or self._new) and self._edge <= now:
            self._edges += 1
            if self._edges > MOST_EDGES:
                raise ProgramError(f"links changed {MOST_EDGES:,} times by {format_time(now)}; use a longer every")
            self._edge = min(one.edge(now) for one in self.loads.varying)
            if self._edge < np.inf:
                self.clock.call(self._edge, self._ask_solve)
        before, self._taken = self._taken, taken(self.loads.varying, self._slot_of, len(self._taken), now)
        return not np.array_equal(before, self._taken)

    def _share(self, touched: set[int], changed: dict[ClassFlows, None], now: float) -> None:
        """New rates for who is at these slots, for whoever they are joined with, and for the changed."""
        found = self._joined(touched) if touched else {}
        if found:
            self.n_solves += 1
            takes = [(one.ceiling, *slots) for one, slots in found.items()]
            for one, rate in zip(found, level(takes, self._taken), strict=True):
                self._set(one, rate, now)
        for one in changed:
            if one.flows and one not in found:  # no slot of theirs is tight
                self._set(one, one.ceiling, now)

    def _set(self, one: ClassFlows, rate: float, now: float) -> None:
        if one.set(rate, now):
            heappush(self._ends, (one.due, one.version, one.number, one))

    def _joined(self, slots: set[int]) -> dict[ClassFlows, tuple[list[int], list[float]]]:
        """Classes at these slots and whoever they are joined with, in order, each with what it takes of tight slots."""
        found: dict[ClassFlows, tuple[list[int], list[float]]] = {}
        seen = set(slots)
        while slots:
            more: set[int] = set()
            for one in self._at(slots):
                if one not in found:
                    found[one] = one.tight(self._all_asked, self._asked)
                    more.update(found[one][0])
            slots = more - seen
            seen |= slots
        return found if len(found) < 2 else dict(sorted(found.items(), key=lambda entry: entry[0].number))

    def _at(self, slots: set[int]) -> Iterable[ClassFlows]:
        """Classes at some of these slots."""
        if len(slots) < len(self._active):
            return [one for slot in slots for one in self._on.get(slot, ()) if one.flows]
        return [one for one in self._active if not slots.isdisjoint(one.slot_list)]

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
        now = self.clock.now
        ends = self._ends
        if now != self._due:
            return
        self._due = -1.0
        done: list[int] = []
        while ends and (ends[0][0] <= now * (1 + INSTANT) or ends[0][3].version != ends[0][1]):
            _, version, _, one = heappop(ends)
            if version != one.version:
                continue
            for transfer, way in one.over(now, self.segments):
                done.append(transfer)
                self._touched.update(self._leave(way))
            self._shrunk[one] = None
            if not one.flows:
                self._close(one)
        if self._active:
            self._ask_solve()
        self.on_end(np.array(sorted(done), dtype=np.int64), now)

    def _come(self, way: SlotShare) -> list[int]:
        """A flow comes to its slots: those that are tight now."""
        if way.many:
            asked = self._all_asked[way.slots] + way.asks
            self._all_asked[way.slots] = asked
            found: list[int] = way.slots[asked > FULL].tolist()
            return found
        for slot, _, asks in way.entries:
            self._asked[slot] += asks
        return self._tight(way)

    def _leave(self, way: SlotShare) -> list[int]:
        """A flow leaves its slots: those that were tight. Where nobody is left, they are not watched any more."""
        if way.many:
            asked = self._all_asked[way.slots]
            self._all_asked[way.slots] = left = asked - way.asks
            if self._watched:
                self._watched.difference_update(way.slots[left < NOBODY].tolist())
            found: list[int] = way.slots[asked > FULL].tolist()
            return found
        tight = self._tight(way)
        for slot, _, asks in way.entries:
            self._asked[slot] = rest = self._asked[slot] - asks
            if rest < NOBODY:
                self._asked[slot] = 0.0
                self._watched.discard(slot)
        return tight
