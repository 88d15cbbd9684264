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

from collections.abc import Callable, MutableSequence
from heapq import heappop, heappush
from itertools import count
from typing import cast

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.units import format_time
from clustersim.engine.flows.bundles import BundleWay, FlowBundle
from clustersim.engine.flows.classes import FULL, ClassFlows, CourseSpells, RateCourse, SlotShare
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.joining import JoinedClasses
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
        self._crossing: dict[int, list[SlotShare]] = {}  # ways of few slots by slot
        self._new: list[tuple[int, int, float, float]] = []
        self._new_bundles: list[FlowBundle] = []
        self._bundles: dict[FlowBundle, None] = {}
        self._bundle_ways: dict[tuple[bytes, float], BundleWay] = {}
        self._shrunk: dict[ClassFlows, None] = {}
        self._touched: set[int] = set()  # slots that were tight when somebody left
        self._ends: list[tuple[float, int, int, ClassFlows]] = []
        self._due = self._edge = -1.0  # no instant

    def _open(self) -> Slots:
        """Open the books, once all loads are known, where they are not open yet."""
        if self._slots and self._opened:
            return self._slots
        slots = self._slots = self._slots or self.loads.slots()
        n = len(self.loads.pairs)
        self._slot_of = {link: slots.slot.item(slots.ptr[n + i]) for i, link in enumerate(self.loads.changing.tolist())}
        self._taken = np.zeros(slots.n)
        self._all_asked = np.zeros(slots.n)
        self._all_asked[list(self._slot_of.values())] = np.inf
        # The same: a few are looked at sooner one by one.
        self._asked = cast(MutableSequence[float], self._all_asked.data)
        self._joined = JoinedClasses(self._active, self._on, self._all_asked)
        self._watched: set[int] = set()
        self._opened = True
        return slots

    def begin(self, flows: list[tuple[int, int, float, float]]) -> None:
        """Start flows, now: of each its transfer, load, payload [bytes] > 0 and ceiling [bytes/s]."""
        self._new += flows
        self.n_flows += len(flows)
        self._ask_solve()

    def begin_together(self, transfers: Ints, loads: Ints, nbytes: float, ceiling: float) -> bool:
        """Start flows of one payload [bytes] > 0 and one ceiling [bytes/s] as a bundle, now: of each its transfer,
        ascending, and load. Whether they are one: not where slots let some through more slowly than others."""
        key = loads.tobytes(), ceiling
        way = self._bundle_ways.get(key)
        if way is None:
            way = self._bundle_ways[key] = BundleWay([self._way(load, ceiling) for load in loads.tolist()])
        if not way.ceiling:
            return False
        self._new_bundles.append(FlowBundle(transfers, way, nbytes))
        self.n_flows += len(transfers)
        self._ask_solve()
        return True

    def _way(self, load: int, ceiling: float) -> SlotShare:
        """What a flow of this load and ceiling takes."""
        share = self._ways.get((load, ceiling))
        if share is None:
            slots = self._open()
            entries = slice(slots.ptr[load], slots.ptr[load + 1])
            share = self._ways[load, ceiling] = SlotShare(slots.slot[entries], slots.weight[entries], ceiling, MANY)
            share.number = len(self._ways)
            for slot, *_ in share.entries:
                self._crossing.setdefault(slot, []).append(share)
        return share

    def not_before(self, transfer: int, load: int, ceiling: float) -> float:
        """A transfer under way of this load and ceiling does not end before [s]: with its links to itself from now
        on."""
        bundle = next((bundle for bundle in self._bundles if bundle.has(transfer)), None)
        transfer = bundle.transfers.item(0) if bundle else transfer
        share = bundle or self._ways.get((load, ceiling))
        if share is None or share.one is None:
            return 0.0
        flow_class = share.one
        now = self.clock.now
        end = next((end for end, its, _, _ in flow_class.flows if its == transfer), 0.0)
        left = end - flow_class.moved - flow_class.rate * (now - flow_class.since)
        return now + max(left, 0.0) / share.ceiling

    def moved(self, transfers: Ints, start: Floats, end: Floats, rate: Floats) -> None:
        """Note transfers whose times are known without a solve: nothing else is on their links meanwhile."""
        self.n_flows += len(transfers)
        self.segments.whole.append((transfers, start, end, rate))

    def _ask_solve(self) -> None:
        self.clock.last(self._solve)

    def _solve(self) -> None:
        """Bring rates up to date with every change of this instant, then ask to be woken at the next end."""
        now = self.clock.now
        if not self._opened:
            self._open()
        changed = self._shrunk
        self._shrunk = {}
        touched = self._touched
        self._touched = set()
        if self.loads.varying and self._vary(now):
            touched.update(self._slot_of.values())
        new = self._new
        self._new = []
        ways = []
        for _, load, _, ceiling in new:
            share = self._way(load, ceiling)
            ways.append(share)
            touched.update(self._come(share))
        bundles = self._new_bundles
        self._new_bundles = []
        for bundle in bundles:
            touched.update(self._ask(bundle.way.slots, bundle.way.asks))
        if touched and not touched <= self._watched:
            self._watch(touched - self._watched, changed, now)
        for (transfer, _, nbytes, _), share in zip(new, ways, strict=True):
            flow_class = share.one or self._class_of(share, now)
            flow_class.join(transfer, nbytes, now, share)
            changed[flow_class] = None
        for bundle in bundles:
            self._join(bundle, changed, now)
        self._share(touched, changed, now)
        self._sleep()

    def _join(self, bundle: FlowBundle, changed: dict[ClassFlows, None], now: float) -> None:
        """A bundle begins: as one flow, or where a slot of it is watched, as flows of their own."""
        transfers: list[tuple[int, SlotShare]]
        if bundle.way.slot_set.isdisjoint(self._watched):
            self._bundles[bundle] = None
            transfers = [(bundle.transfers.item(0), bundle)]
        else:
            transfers = list(zip(bundle.transfers.tolist(), bundle.way.members, strict=True))
        for transfer, share in transfers:
            flow_class = share.one or self._class_of(share, now)
            flow_class.join(transfer, bundle.nbytes, now, share)
            changed[flow_class] = None

    def _take_apart(self, bundle: FlowBundle, fresh: set[int], changed: dict[ClassFlows, None], now: float) -> None:
        """Slots of a bundle are watched from now on: its flows go on alone, who crosses them in other classes."""
        del self._bundles[bundle]
        flow_class = cast(ClassFlows, bundle.one)
        flow_class.advance(now)
        ((end, _, begin, _),) = [flow for flow in flow_class.flows if flow[3] is bundle]
        flow_class.remove(bundle)
        for transfer, share in zip(bundle.transfers.tolist(), bundle.way.members, strict=True):
            if not share.many and fresh.isdisjoint(share.slot_list):
                flow_class.put(transfer, end, begin, share)
                continue
            if flow_class.course is not None:
                self.segments.add(transfer, flow_class.course, begin, now)
            new_class = self._class_of(share, now)
            new_class.join(transfer, max(end - flow_class.moved, 0.0), now, share)
            changed[new_class] = None
        changed[flow_class] = None
        if not flow_class.flows:
            self._close(flow_class)

    def _watch(self, fresh: set[int], changed: dict[ClassFlows, None], now: float) -> None:
        """Watch these slots; flows that are there change to another class."""
        self._watched |= fresh
        for bundle in [bundle for bundle in self._bundles if not bundle.way.slot_set.isdisjoint(fresh)]:
            self._take_apart(bundle, fresh, changed, now)
        under_way = {share: None for slot in fresh for share in self._crossing.get(slot, ()) if share.n}
        for share in sorted(under_way, key=lambda share: share.number):
            flow_class = cast(ClassFlows, share.one)
            if flow_class.is_new_for(share):
                flow_class.number = next(self._numbers)  # as if it had left for the class that it is in
                continue
            left = flow_class.leave(share, now, self.segments)
            changed[flow_class] = None
            if not flow_class.flows:
                self._close(flow_class)
            new_class = self._class_of(share, now)
            for transfer, nbytes in left:
                new_class.join(transfer, nbytes, now, share)
            changed[new_class] = None

    def _class_of(self, share: SlotShare, now: float) -> ClassFlows:
        """The class of a way's flows, by the slots of it that are watched."""
        flow_class = share.own or self._shared_class(share)
        share.one = flow_class
        if flow_class not in self._active:
            flow_class.empty(now)
            self._active[flow_class] = None
        return flow_class

    def _shared_class(self, share: SlotShare) -> ClassFlows:
        """The class of whoever crosses the same watched slots; of many slots, a way's own, which is asked for once."""
        watched = self._watched
        watched_slots = (
            tuple([(slot, weight) for slot, weight, _ in share.entries if slot in watched]) if watched else ()
        )
        key = share.ceiling, share if share.many else watched_slots
        flow_class = self._classes.get(key)
        if flow_class is None:
            flow_class = self._classes[key] = ClassFlows(next(self._numbers), key, share, watched_slots)
            for slot in flow_class.slot_list:
                self._on.setdefault(slot, {})[flow_class] = None
        if share.many:
            share.own = flow_class
        return flow_class

    def _close(self, flow_class: ClassFlows) -> None:
        """Nobody is left in a class."""
        flow_class.version += 1
        del self._active[flow_class]
        if flow_class.many:
            return
        del self._classes[flow_class.key]
        for slot in flow_class.slot_list:
            del self._on[slot][flow_class]

    def _vary(self, now: float) -> bool:
        """What is left of links that vary; whether that is another than before."""
        if (self._active or self._new or self._new_bundles) and self._edge <= now:
            self._edges += 1
            if self._edges > MOST_EDGES:
                raise ProgramError(f"links changed {MOST_EDGES:,} times by {format_time(now)}; use a longer every")
            self._edge = min(change.edge(now) for change in self.loads.varying)
            if self._edge < np.inf:
                self.clock.call(self._edge, self._ask_solve)
        before, self._taken = self._taken, taken(self.loads.varying, self._slot_of, len(self._taken), now)
        return not np.array_equal(before, self._taken)

    def _share(self, touched: set[int], changed: dict[ClassFlows, None], now: float) -> None:
        """New rates for who is at these slots, for whoever they are joined with, and for the changed."""
        joined: dict[ClassFlows, float] = {}
        if touched:
            joined = self._joined.rates(touched, self._taken)
        if joined:
            self.n_solves += 1
            for flow_class, rate in joined.items():
                self._set(flow_class, rate, now)
        for flow_class in changed:
            if flow_class.flows and flow_class not in joined:  # no slot of theirs is tight
                self._set(flow_class, flow_class.ceiling, now)

    def _set(self, flow_class: ClassFlows, rate: float, now: float) -> None:
        before = flow_class.rate
        if rate == before and flow_class.flows[0][0] == flow_class.planned:
            return  # as most of who is joined
        if flow_class.set(rate, now):
            heappush(self._ends, (flow_class.due, flow_class.version, flow_class.number, flow_class))

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
        done_bundles: list[Ints] = []
        while ends and (ends[0][0] <= now * (1 + INSTANT) or ends[0][3].version != ends[0][1]):
            _, version, _, flow_class = heappop(ends)
            if version != flow_class.version:
                continue
            course = cast(RateCourse, flow_class.course)
            for transfer, begin, share in flow_class.over(now):
                if isinstance(share, FlowBundle):
                    done_bundles.append(share.transfers)
                    self.segments.add_all(share.transfers, course, begin, now)
                    self._release(share.way.slots, share.way.asks)
                    del self._bundles[share]
                else:
                    done.append(transfer)
                    self.segments.add(transfer, course, begin, now)
                    self._touched.update(self._leave(share))
            self._shrunk[flow_class] = None
            if not flow_class.flows:
                self._close(flow_class)
        if self._active:
            self._ask_solve()
        transfers = np.array(sorted(done), dtype=np.int64)
        if done_bundles:
            transfers = np.sort(np.concatenate([transfers, *done_bundles]))
        self.on_end(transfers, now)

    def _come(self, share: SlotShare) -> list[int]:
        """A flow comes to its slots: those that are tight now."""
        if share.many:
            return self._ask(share.slots, share.asks)
        asked = self._asked
        tight = []
        for slot, _, asks in share.entries:
            asked[slot] = demand = asked[slot] + asks
            if demand > FULL:
                tight.append(slot)
        return tight

    def _leave(self, share: SlotShare) -> list[int]:
        """A flow leaves its slots: those that were tight. Where nobody is left, they are not watched any more."""
        if share.many:
            return self._release(share.slots, share.asks)
        asked = self._asked
        tight = []
        for slot, _, asks in share.entries:
            demand = asked[slot]
            if demand > FULL:
                tight.append(slot)
            asked[slot] = rest = demand - asks
            if rest < NOBODY:
                asked[slot] = 0.0
                self._watched.discard(slot)
        return tight

    def _ask(self, slots: Ints, asks: Floats) -> list[int]:
        """So much more is asked of these slots: those that are tight now."""
        demands = self._all_asked[slots] + asks
        self._all_asked[slots] = demands
        tight_slots: list[int] = slots[demands > FULL].tolist()
        return tight_slots

    def _release(self, slots: Ints, asks: Floats) -> list[int]:
        """So much less is asked: those that were tight. Where nobody is left, slots are not watched any more."""
        demands = self._all_asked[slots]
        self._all_asked[slots] = left = demands - asks
        if self._watched:
            self._watched.difference_update(slots[left < NOBODY].tolist())
        tight_slots: list[int] = slots[demands > FULL].tolist()
        return tight_slots
