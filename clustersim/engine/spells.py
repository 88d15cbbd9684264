"""Flows that share a rate, and what came of them: stretches of constant rate, made when the run is over."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.slots import INSTANT

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Left: TypeAlias = tuple[int, int, float, float]
"""Transfer, load, bytes left, ceiling."""


class Course:
    """The rate that flows of one sharing had over time: ``rates[k]`` from ``times[k]`` until the next."""

    def __init__(self, now: float, rate: float) -> None:
        self.times, self.rates = [now], [rate]

    def set(self, now: float, rate: float) -> None:
        """From now on it is another."""
        if self.times[-1] == now:
            self.rates[-1] = rate
        else:
            self.times.append(now)
            self.rates.append(rate)


class Sharing:
    """Flows with one bottleneck, and so one rate.

    Parameters
    ----------
    row, slot : the crowd's: where its links are counted, and which link holds it back (-1: a ceiling).
    rate : [bytes/s] of each flow. moved : [bytes] each flow that was there from the start has moved until ``since``.
    due : [s] when the next flow ends. least : [bytes/s], no member's ceiling is lower.
    """

    def __init__(self, row: int, slot: int, rate: float, now: float) -> None:
        self.row, self.slot, self.rate = row, slot, rate
        self.moved, self.since, self.due, self.least = 0.0, now, np.inf, np.inf
        self.course = Course(now, rate)
        self.flows: list[tuple[float, int, int, float, float]] = []  # moved at its end, transfer, load, ceiling, begin

    def _advance(self, now: float) -> None:
        self.moved += self.rate * (now - self.since)
        self.since = now

    def set(self, now: float, rate: float) -> None:
        """Another rate from now on."""
        if rate != self.rate:
            self._advance(now)
            self.rate = rate
            self.course.set(now, rate)
        self._plan()

    def _plan(self) -> None:
        self.due = self.since + max(self.flows[0][0] - self.moved, 0.0) / self.rate if self.flows else np.inf

    def enter(self, now: float, transfer: int, load: int, nbytes: float, ceiling: float) -> None:
        """A flow joins, with so many bytes to move."""
        self._advance(now)
        heappush(self.flows, (self.moved + nbytes, transfer, load, ceiling, now))
        self.least = min(self.least, ceiling)
        self._plan()

    def pop_due(self, now: float, spells: Spells) -> list[tuple[int, int]]:
        """Transfer and load of the flows that end now."""
        self._advance(now)
        done: list[tuple[int, int]] = []
        most = self.moved + self.rate * now * INSTANT
        while self.flows and (not done or self.flows[0][0] <= most):
            _, transfer, load, _, begin = heappop(self.flows)
            spells.add(transfer, self.course, begin, now)
            done.append((transfer, load))
        self._plan()
        return done

    def leave_all(self, now: float, spells: Spells) -> list[Left]:
        """Everybody leaves, with what they have left."""
        self._advance(now)
        found = []
        for end, transfer, load, ceiling, begin in sorted(self.flows, key=lambda flow: flow[1]):
            spells.add(transfer, self.course, begin, now)
            found.append((transfer, load, max(end - self.moved, 0.0), ceiling))
        self.flows = []
        return found


MOST = 2_000_000
"""Stretches kept one by one; of more, the rates of a sharing are means over longer stretches, with the same bytes."""


class Spells:
    """Which transfer shared which course, from when to when."""

    def __init__(self) -> None:
        self._spells: list[tuple[int, Course, float, float]] = []

    def add(self, transfer: int, course: Course, begin: float, end: float) -> None:
        """A transfer ran with a course's rates from ``begin`` to ``end`` [s]."""
        if end > begin:
            self._spells.append((transfer, course, begin, end))

    def columns(self) -> tuple[Ints, Floats, Floats, Floats]:
        """Stretches of constant rate: transfer, start [s], end [s], rate [bytes/s], sorted by transfer, then start."""
        steady: list[tuple[int, float, float, float]] = []
        together: dict[int, tuple[Course, list[tuple[int, float, float]]]] = {}
        for transfer, course, begin, end in self._spells:
            if len(course.times) == 1:
                steady.append((transfer, begin, end, course.rates[0]))
            else:
                together.setdefault(id(course), (course, []))[1].append((transfer, begin, end))
        varied = [_Varied(course, spells) for course, spells in together.values()]
        length = sum(one.length(one.times) for one in varied)
        parts = [one.cut(1 + length // MOST) for one in varied]
        if steady:
            parts.append(tuple(np.array(column) for column in zip(*steady, strict=True)))  # type: ignore[arg-type]
        none = np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0), np.zeros(0)
        ids, start, stop, rate = (np.concatenate(column) for column in zip(none, *parts, strict=True))
        order = np.lexsort((start, ids))
        return ids[order], start[order], stop[order], rate[order]


class _Varied:
    """A course of several rates, and the spells that ran with it, as columns."""

    def __init__(self, course: Course, spells: list[tuple[int, float, float]]) -> None:
        self.times, self.rates = np.array(course.times), np.array(course.rates)
        self.moved = np.concatenate([[0.0], np.cumsum(self.rates[:-1] * np.diff(self.times))])
        self.transfer = np.array([spell[0] for spell in spells], dtype=np.int64)
        self.begin, self.end = np.array([s[1] for s in spells]), np.array([s[2] for s in spells])

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
        at = np.searchsorted(self.times, start, side="right") - 1
        rate = self.rates[at] if every == 1 else (self._moved(end) - self._moved(start)) / (end - start)
        return self.transfer[spell], start, end, rate

    def _moved(self, time: Floats) -> Floats:
        at = np.searchsorted(self.times, time, side="right") - 1
        moved: Floats = self.moved[at] + self.rates[at] * (time - self.times[at])
        return moved
