"""Flows that always have one rate, as one object, and what came of them.

Flows that cross the same watched slots (:mod:`clustersim.engine.flows.network`) with the same weights under one ceiling
are equal to max-min fairness, so they have one rate: a class of :class:`ClassFlows`. The rates a class had over time
are its :class:`RateCourse`, and a transfer is known by the courses it ran with, from when to when
(:class:`CourseSpells`): stretches of constant rate are made of these when the run is over, for most are never looked
at."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.engine.flows.loads import INSTANT

FULL = 1 + INSTANT
"""A slot that is asked for more is tight."""


class SlotShare:
    """What flows of one load and ceiling take of which slot.

    ceiling : [bytes/s], no more than the slots let through. many : whether it crosses so many slots that they are only
    kept as columns: ``slots``, ``weights`` [s/byte], and ``asks``, the part of each that a flow takes at its ceiling.
    entries : else, (slot, weight, part) of each. n : flows on their way; one : their class, where any are; own : of
    many slots, the class that only they are in, once it is made. number : of the ways, in the order in which they were
    first gone.
    """

    __slots__ = ("asks", "ceiling", "entries", "many", "n", "number", "one", "own", "slot_list", "slots", "weights")

    def __init__(self, slots: Ints, weights: Floats, ceiling: float, most: int) -> None:
        self.slots = slots
        self.weights = weights
        self.slot_list: list[int] = slots.tolist()
        self.ceiling = min(ceiling, 1.0 / weights.max()) if len(slots) else ceiling
        self.many, self.asks = len(slots) >= max(most, 1), weights * self.ceiling
        columns = [] if self.many else [self.slot_list, weights.tolist(), self.asks.tolist()]
        self.entries: list[tuple[int, float, float]] = list(zip(*columns, strict=True))
        self.n = 0
        self.number = 0
        self.one: ClassFlows | None = None
        self.own: ClassFlows | None = None


class ClassFlows:
    """The flows of one class that are on their way.

    number, key : of the class. slot_list : the watched slots they cross; of ``many``, all of a way. slots, weights
    [s/byte] : the same, and what a flow takes of each, as columns.
    ceiling : [bytes/s]. rate : [bytes/s] of each.
    moved : [bytes] that a flow there from the start has moved until ``since`` [s].
    flows : heap of (``moved`` at its end, transfer, begin, way); ``planned``, the first one's end that was asked for.
    course : the rates it had. version : tells wakes apart.
    """

    __slots__ = (
        "_watched",
        "ceiling",
        "course",
        "flows",
        "key",
        "many",
        "moved",
        "number",
        "planned",
        "rate",
        "since",
        "slot_list",
        "slots",
        "version",
        "weights",
    )

    def __init__(self, number: int, key: object, share: SlotShare, watched: tuple[tuple[int, float], ...]) -> None:
        self.number = number
        self.key = key
        self.many = share.many
        self.ceiling = share.ceiling
        self._watched = watched
        self.slot_list = share.slot_list if share.many else [slot for slot, _ in watched]
        self.slots = share.slots if share.many else np.array(self.slot_list, dtype=np.int64)
        self.weights = share.weights if share.many else np.array([weight for _, weight in watched])
        self.flows: list[tuple[float, int, float, SlotShare]] = []
        self.version = 0
        self.empty(0.0)

    def empty(self, now: float) -> None:
        """Nobody is there yet, or any more."""
        self.rate = 0.0
        self.moved = 0.0
        self.since = now
        self.planned = -1.0
        self.course: RateCourse | None = None

    def crossed(self, demands: Floats) -> Sequence[tuple[int, float]]:
        """Its watched slots, and what a flow takes of each [s/byte]; of ``many`` those that are asked for more than
        they have. ``demands`` : of each slot."""
        if not self.many:
            return self._watched
        over = demands[self.slots] > FULL
        return list(zip(self.slots[over].tolist(), self.weights[over].tolist(), strict=True))

    def advance(self, now: float) -> None:
        """Let time pass at the present rate."""
        if now > self.since:
            self.moved += self.rate * (now - self.since)
            self.since = now

    def join(self, transfer: int, nbytes: float, now: float, share: SlotShare) -> None:
        """A flow begins, with so many bytes to move."""
        self.advance(now)
        heappush(self.flows, (self.moved + nbytes, transfer, now, share))
        share.n += 1

    def is_new_for(self, share: SlotShare) -> bool:
        """Whether it was made at this instant, and only for the flows of this way: the watched slots are known to
        it."""
        return self.course is None and len(self.flows) == share.n

    def leave(self, share: SlotShare, now: float, spells: CourseSpells) -> list[tuple[int, float]]:
        """A way's flows go elsewhere, before they end: which, and what they have left to move [bytes]."""
        self.advance(now)
        gone = sorted(flow for flow in self.flows if flow[3] is share)
        self.remove(share)
        for _, transfer, begin, _ in gone:
            if self.course is not None:
                spells.add(transfer, self.course, begin, now)
        return [(transfer, max(end - self.moved, 0.0)) for end, transfer, _, _ in gone]

    def remove(self, share: SlotShare) -> None:
        """A way's flows are not here any more."""
        stay = [flow for flow in self.flows if flow[3] is not share]
        share.n -= len(self.flows) - len(stay)
        self.flows = stay
        heapify(stay)

    def put(self, transfer: int, end: float, begin: float, share: SlotShare) -> None:
        """A flow that has been here since ``begin`` [s], and ends when ``end`` [bytes] are moved."""
        heappush(self.flows, (end, transfer, begin, share))
        share.n += 1
        share.one = self

    def over(self, now: float) -> list[tuple[int, float, SlotShare]]:
        """Transfers that end now, since when they were here [s], and their ways."""
        self.advance(now)
        most = self.moved + self.rate * now * INSTANT
        done: list[tuple[int, float, SlotShare]] = []
        while self.flows and (not done or self.flows[0][0] <= most):
            _, transfer, begin, share = heappop(self.flows)
            share.n -= 1
            if not share.n:
                share.one = None
            done.append((transfer, begin, share))
        return done

    def set(self, rate: float, now: float) -> bool:
        """From now on at this rate; whether its next end is another than it was."""
        if self.rate == 0.0 or abs(rate - self.rate) > INSTANT * self.rate:
            self.advance(now)
            self.rate = rate
            if self.course is None:
                self.course = RateCourse(now, rate)
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


class RateCourse:
    """The rate that flows of one class had over time: ``rates[k]`` from ``times[k]`` until the next.

    transfers, begins, ends : who ran with it, from when to when [s], where it is more than one rate.
    """

    __slots__ = ("begins", "ends", "rates", "times", "transfers")

    def __init__(self, now: float, rate: float) -> None:
        self.times = [now]
        self.rates = [rate]
        self.transfers: list[int] = []
        self.begins: list[float] = []
        self.ends: list[float] = []

    def set(self, now: float, rate: float) -> None:
        """From now on it is another."""
        if self.times[-1] == now:
            self.rates[-1] = rate
        else:
            self.times.append(now)
            self.rates.append(rate)


MOST = 2_000_000
"""Stretches kept one by one; of more, the rates of a class are means over longer stretches, with the same bytes."""


FEW = 16
"""Spells of a course up to which they are laid out one by one: a column of so few takes longer. (0: always columns.)"""


class CourseSpells:
    """Which transfer shared which course, from when to when.

    whole : columns of transfers that had one rate from begin to end, as :meth:`columns` gives them.
    """

    def __init__(self) -> None:
        self.whole: list[tuple[Ints, Floats, Floats, Floats]] = []
        self._steady = array("q"), array("d"), array("d"), array("d")
        self._varied: list[RateCourse] = []

    def add(self, transfer: int, course: RateCourse, begin: float, end: float) -> None:
        """A transfer ran with a course's rates from ``begin`` to ``end`` [s]."""
        if end <= begin:
            return
        if len(course.times) == 1:
            ids, begins, ends, rates = self._steady
            ids.append(transfer)
            begins.append(begin)
            ends.append(end)
            rates.append(course.rates[0])
            return
        if not course.transfers:
            self._varied.append(course)
        course.transfers.append(transfer)
        course.begins.append(begin)
        course.ends.append(end)

    def add_all(self, transfers: Ints, course: RateCourse, begin: float, end: float) -> None:
        """Transfers ran together with a course's rates from ``begin`` to ``end`` [s]."""
        if end <= begin:
            return
        n = len(transfers)
        if len(course.times) == 1:
            self.whole.append((transfers, np.full(n, begin), np.full(n, end), np.full(n, course.rates[0])))
            return
        if not course.transfers:
            self._varied.append(course)
        course.transfers += transfers.tolist()
        course.begins += [begin] * n
        course.ends += [end] * n

    def columns(self) -> tuple[Ints, Floats, Floats, Floats]:
        """Stretches of constant rate: transfer, start [s], end [s], rate [bytes/s], sorted by transfer, then start."""
        few = [course for course in self._varied if len(course.transfers) <= FEW]
        varied = [_VariedCourse(course) for course in self._varied if len(course.transfers) > FEW]
        length = sum(course.length(course.times) for course in varied) + sum(map(_length, few))
        if length > MOST:
            varied += map(_VariedCourse, few)
            few = []
        parts = [course.cut(1 + length // MOST) for course in varied]
        parts += [_spells(few)] if few else []
        if len(self._steady[0]):
            parts.append(tuple(np.array(column) for column in self._steady))  # type: ignore[arg-type]
        none = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0)
        parts = [*self.whole, *parts] or [none]
        ids, start, stop, rate = parts[0] if len(parts) == 1 else map(np.concatenate, zip(*parts, strict=True))
        if np.all(ids[1:] > ids[:-1]):
            return ids, start, stop, rate
        order = np.lexsort((start, ids))
        return ids[order], start[order], stop[order], rate[order]


def _length(course: RateCourse) -> int:
    """Stretches of all spells of a course."""
    times = course.times
    return sum(
        1 + max(bisect_left(times, end) - bisect_right(times, begin), 0)
        for begin, end in zip(course.begins, course.ends, strict=True)
    )


def _spells(courses: list[RateCourse]) -> tuple[Ints, Floats, Floats, Floats]:
    """Stretches of the spells of courses, uncut: as :class:`_VariedCourse` gives them, course by course."""
    ids, starts, stops, rates = array("q"), array("d"), array("d"), array("d")
    for course in courses:
        times = course.times
        for transfer, begin, end in zip(course.transfers, course.begins, course.ends, strict=True):
            first = bisect_right(times, begin)
            last = max(bisect_left(times, end), first)
            inside = times[first:last]
            ids.extend([transfer] * (1 + len(inside)))
            starts.append(begin)
            starts.extend(inside)
            stops.extend(inside)
            stops.append(end)
            # From its begin on it has the last rate set until then.
            rates.extend(course.rates[first - 1 : last])
    return np.array(ids), np.array(starts), np.array(stops), np.array(rates)


class _VariedCourse:
    """A course of several rates, and the spells that ran with it, as columns."""

    def __init__(self, course: RateCourse) -> None:
        self.times, self.rates = np.array(course.times), np.array(course.rates)
        self.moved = np.concatenate([[0.0], np.cumsum(self.rates[:-1] * np.diff(self.times))])
        self.transfer = np.array(course.transfers, dtype=np.int64)
        self.begin, self.end = np.array(course.begins), np.array(course.ends)

    def _within(self, times: Floats) -> tuple[Ints, Ints]:
        """Of each spell the first of ``times`` after its begin, and how many are before its end."""
        first = np.searchsorted(times, self.begin, side="right")
        return first, np.maximum(np.searchsorted(times, self.end, side="left") - first, 0)

    def length(self, times: Floats) -> int:
        """Stretches of all spells, cut at ``times``."""
        return int(self._within(times)[1].sum()) + len(self.transfer)

    def cut(self, every: int) -> tuple[Ints, Floats, Floats, Floats]:
        """Stretches cut at each ``every``-th change of rate; each has what was moved in it over its length."""
        times = self.times[::every]
        first, inside = self._within(times)
        count = inside + 1
        begins = np.cumsum(count) - count
        spell = np.repeat(np.arange(len(count)), count)
        place = np.arange(len(spell)) - begins[spell]
        start = times[np.minimum(first[spell] + place - 1, len(times) - 1)]
        start[begins] = self.begin
        end = np.append(start[1:], 0.0)
        end[begins + count - 1] = self.end
        position = np.searchsorted(self.times, start, side="right") - 1
        rate = self.rates[position] if every == 1 else (self._moved(end) - self._moved(start)) / (end - start)
        return self.transfer[spell], start, end, rate

    def _moved(self, time: Floats) -> Floats:
        position = np.searchsorted(self.times, time, side="right") - 1
        moved: Floats = self.moved[position] + self.rates[position] * (time - self.times[position])
        return moved
