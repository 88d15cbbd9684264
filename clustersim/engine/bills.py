"""What hidden communication costs compute.

A collective that runs beside compute takes SMs and memory bandwidth from it. The Program says how much
(``overlap_slowdown``); the bill comes when the collective has ended: the rank's next kernel (op of the compute stream)
is lengthened by that share of the time both were busy.

So a kernel's bill is a function of columns: of the collectives that ended between the start of the kernel before it
and its own, and of how long kernels were busy between the start and the end of each. Collectives of one stream end in
order, so of each stream a number per rank tells which are paid; and each kernel keeps how long its rank's kernels were
busy in all until its end (``Task.ran``), so the time beside a collective is a difference of two moments. A kernel only
must not start before everything is known that could end before: where some collectives it may depend on
(``Task.soft``) are not over yet, only those ranks start that are ready before their earliest possible end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.loads import INSTANT
from clustersim.engine.order import Column, Task, watch
from clustersim.engine.pieces import Piece, at, highest, item, lowest, one_number, positions, size
from clustersim.engine.sites import Site, Standing

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class _Stream:
    """The watched collectives of a role's stream, in order: how many each rank is ``through``, and has ``paid``."""

    __slots__ = ("paid", "tasks", "through")

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks = tasks
        self.paid: Column = 0.0
        self.through: Column = 0.0


class Bills:
    """What every rank owes.

    Parameters
    ----------
    slowdown : the price: seconds for each second that a collective ran beside a kernel. lists : the tasks of each role.
    """

    def __init__(self, slowdown: float, lists: list[list[Task]]) -> None:
        self.slowdown = slowdown
        self._watched = [watch(mine) for mine in lists]
        self._kernels = [[task for task in mine if task.place >= 0] for mine in lists]
        self.reset({}, lambda site, meeting: 0.0)

    def reset(self, standing: dict[int, Standing], on_its_way: Callable[[Site, int], float]) -> None:
        """Nothing has been played.

        ``standing`` : sites by their first meeting. ``on_its_way`` : before when a transfer under way does not end [s].
        """
        self.standing, self.on_its_way = standing, on_its_way
        self._streams = [{name: _Stream(tasks) for name, tasks in watched.items()} for watched in self._watched]
        self._kept = [0] * len(self._streams)  # the first kernel whose ``ran`` somebody may still ask for
        # Kernels that wait for collectives: whole ones, and pieces with whether they were tried before.
        self.held: list[dict[Task, None]] = [{} for _ in self._streams]
        self.waiting: dict[Task, dict[int, tuple[Piece, bool]]] = {}

    def settled(self, kernel: Task) -> bool:
        """Whether every collective its bill may depend on is over on all ranks, or known to be over when."""
        return not any(one.left for one in kernel.soft)

    def ended(self, task: Task, who: Piece) -> list[Task]:
        """A watched collective's end is known for these ranks; returns whole kernels that waited for it to settle."""
        r = task.key[0]
        stream = self._streams[r][task.op.stream]
        stream.through = _set(stream.through, who, task.ordinal + 1.0, task.n)
        if task.left:
            return []
        task.low, task.high = lowest(task.end), highest(task.end)
        free = [kernel for kernel in self.held[r] if self.settled(kernel)] if self.held[r] else []
        for kernel in free:
            del self.held[r][kernel]
        return free

    def ran(self, kernel: Task, who: Piece, start: Column, end: Column) -> None:
        """These ranks run a kernel from ``start`` to ``end``."""
        r = kernel.key[0]
        if not self._streams[r]:
            return
        total = end - start
        if kernel.place:
            total = total + at(self._kernels[r][kernel.place - 1].ran, who)
        if who is None:
            kernel.ran = total
        else:
            if not isinstance(kernel.ran, np.ndarray):
                kernel.ran = np.zeros(kernel.n)
            kernel.ran[who] = total

    def over(self, kernel: Task) -> None:
        """All ranks have run a kernel: forget what no bill to come can ask for."""
        r = kernel.key[0]
        first = kernel.place - 1  # the next kernel's bill looks one further back
        for stream in self._streams[r].values():
            paid = int(lowest(stream.paid))
            if isinstance(stream.paid, np.ndarray) and paid == highest(stream.paid):
                stream.paid = paid
            if paid < len(stream.tasks):
                first = min(first, stream.tasks[paid].above)
        for k in range(self._kept[r], first):
            self._kernels[r][k].ran = 0.0
        self._kept[r] = max(first, self._kept[r])

    def owed(self, kernel: Task, who: Piece, ready: Column) -> Column:
        """Seconds by which a kernel that these ranks begin at ``ready`` is longer."""
        if isinstance(who, int):
            return item(self.owed(kernel, slice(who, who + 1, 1), np.array([ready])), 0)
        total: Column = 0.0
        for stream in self._streams[kernel.key[0]].values():
            paid = at(stream.paid, who)
            first, late = int(lowest(paid)), 0.0
            ones = []
            for one in stream.tasks[first : int(highest(stream.through))]:
                late = late or highest(ready) * (1 + INSTANT)
                if one.above >= kernel.place or (one.low > late and not one.left):
                    break  # nor is any after it over
                ones.append(one)
            if ones:
                total = total + self._due(stream, kernel, who, ready * (1 + INSTANT), ones)
        return total * self.slowdown if isinstance(total, np.ndarray) or total else 0.0

    def _due(self, stream: _Stream, kernel: Task, who: Piece, late: Column, ones: list[Task]) -> Column:
        """Seconds beside those of some collectives of a stream, in order, that these ranks must pay for now: what is
        over by ``late``."""
        paid, first = at(stream.paid, who), ones[0].ordinal
        columns = [at(column, who) for one in ones for column in (one.start, one.end)]
        if not any(isinstance(column, np.ndarray) for column in (late, paid, *columns)):
            due = [one for one in ones if one.end <= late]
            stream.paid = _set(stream.paid, who, paid + len(due), kernel.n)
            return sum(self._beside(kernel, who, one.start, one.end, one.above) for one in due)
        n = kernel.n if who is None else size(who)
        end = _stacked(columns[1::2], n)
        pays = end <= late
        if isinstance(paid, np.ndarray):
            pays = pays & (paid <= np.arange(first, first + len(ones))[:, None])
        if not np.logical_or.reduce(pays, axis=None):
            return 0.0
        start = _stacked(columns[::2], n)
        if not np.logical_and.reduce(pays, axis=None):  # of the others nothing is known but that they do not pay now
            payer = int(pays.argmax())
            start, end = (np.where(pays, column, column.item(payer)) for column in (start, end))
        beside = self._beside(kernel, who, start, end, ones[0].above)
        stream.paid = _set(stream.paid, who, one_number(paid + np.add.reduce(pays, 0)), kernel.n)
        total: Floats = np.add.reduce(beside * pays, 0)
        return total

    def _beside(self, kernel: Task, who: Piece, start: Column, end: Column, above: int) -> Column:
        """Seconds that kernels of these ranks ran between ``start`` and ``end`` of collectives: numbers, or a row each.

        ``end`` is between the start of the kernel before and this one's; at any start kernel ``above`` is over.
        """
        kernels, last = self._kernels[kernel.key[0]], kernel.place - 1
        until = self._ran(kernels, last, who, end, self._ran_before(kernels, last, who)) if last >= 0 else 0.0
        # The kernel in which one rank came to it; others may have come to it in an earlier one.
        rank = (
            0 if who is None else who.start if isinstance(who, slice) else who if isinstance(who, int) else who.item(0)
        )
        k = bisect_right(range(last + 1), item(start, 0), above + 1, key=lambda k: item(kernels[k].start, rank))
        k, low, high = max(k - 1, above + 1), lowest(start), highest(start)
        while k > above + 1 and highest(at(kernels[k].start, who)) > low:
            k -= 1
        found = self._ran_before(kernels, k, who)
        while k <= last and lowest(at(kernels[k].start, who)) < high:
            now = self._ran(kernels, k, who, start, self._ran_before(kernels, k, who))
            found = max(found, now) if _numbers(found, now) else np.maximum(found, now)
            k += 1
        return until - found

    def _ran_before(self, kernels: list[Task], k: int, who: Piece) -> Column:
        return at(kernels[k - 1].ran, who) if k > 0 else 0.0

    def _ran(self, kernels: list[Task], k: int, who: Piece, time: Column, before: Column) -> Column:
        """Seconds kernels ran until a time, if it is not before the ``k``-th starts nor after the next one does."""
        one, other = before + (time - at(kernels[k].start, who)), at(kernels[k].ran, who)
        return min(one, other) if _numbers(one, other) else np.minimum(one, other)

    def safe(self, kernel: Task, who: Piece, ready: Column, quiet: float) -> Floats:
        """Of each of these ranks, a time before which nothing ends that it may have to pay for [s].

        ``ready`` : when they could begin the kernel; what is later is late enough. ``quiet`` : nobody arrives anywhere,
        and nothing on the clock happens, before [s].
        """
        r = kernel.key[0]
        if isinstance(who, int):
            who = slice(who, who + 1, 1)
        safe = np.full(kernel.n if who is None else size(who), np.inf)
        wanted = float(np.max(ready)) * (1 + INSTANT)
        for last in kernel.soft:
            if not last.left:
                continue
            through, stream = at(self._streams[r][last.op.stream].through, who), self._watched[r][last.op.stream]
            low, high = int(lowest(through)), int(highest(through))
            for k in range(low, min(high, last.ordinal) + 1):
                if low == high:
                    np.minimum(safe, self._earliest(stream[k], who, wanted, quiet), out=safe)
                    continue
                mask = np.equal(through, k)
                if mask.any():
                    some = positions(who, kernel.n)[mask]
                    safe[mask] = np.minimum(safe[mask], self._earliest(stream[k], some, wanted, quiet))
        return safe * (1 - INSTANT)

    def _earliest(self, one: Task, who: Piece, wanted: float, quiet: float) -> Floats | float:
        """The collective that these ranks come to next on a stream does not end before; no better than ``wanted``."""
        if not one.lone:
            return quiet
        site, side = one.meets[0]
        standing = self.standing[site.first]
        of = side.meeting_of[slice(None) if who is None else who]
        if of[0] == of[-1] and (len(site.ranks) == 1 or (of == of[0]).all()):
            of = of[:1]
        begins = _begins(standing, of, quiet)
        least = _of(standing.latency, of) + _of(standing.moving, of)
        found: Floats = np.maximum(begins + least, quiet)
        if np.minimum.reduce(found) > wanted:
            return found
        if standing.missing is None or np.any(standing.missing[of]):
            found = np.maximum(found, self._held_up(one, of, quiet) + least)
        elif len(of) == 1:
            found = np.maximum(found, self.on_its_way(site, int(of[0])))
        return found

    def _held_up(self, one: Task, meetings: Ints, quiet: float) -> Floats:
        """These meetings do not begin before: a missing member must first be through what it waits for itself."""
        site, side = one.meets[0]
        held = np.zeros(len(meetings))
        if len(site.sides) > 1 or not side.each:
            return held
        members = side.order.reshape(-1, side.each)[meetings]
        away = np.asarray(one.unmet > 0 if isinstance(one.unmet, int) else one.unmet[members] > 0)
        for need in one.before:
            if not need.lone or not need.left or not need.meets:
                continue
            its_site, its_side = need.meets[0]
            standing = self.standing[its_site.first]
            everyone = np.arange(len(its_site.ranks))
            ends = _begins(standing, everyone, quiet) + standing.latency + standing.moving
            if standing.missing is not None:
                ends = np.where(standing.end < np.inf, 0.0, ends)
            np.maximum(held, np.where(away, ends[its_side.meeting_of[members]], 0.0).max(axis=1), out=held)
        return held


def _begins(standing: Standing, meetings: Ints, quiet: float) -> Floats:
    """These meetings do not begin before, where nobody arrives before ``quiet`` [s]."""
    if standing.missing is None:
        return np.full(len(meetings), quiet)
    start = standing.start[meetings]  # type: ignore[index]
    found: Floats = np.where(standing.missing[meetings] > 0, np.maximum(start, quiet), start)
    return found


def _of(column: Column, which: Ints | int) -> Column:
    return column if isinstance(column, float) else column[which]


def _numbers(one: Column, other: Column) -> bool:
    return not isinstance(one, np.ndarray) and not isinstance(other, np.ndarray)


def _stacked(columns: list[Column], n: int) -> Floats:
    """Columns of ``n`` as rows."""
    found = np.empty((len(columns), n))
    for row, column in zip(found, columns, strict=True):
        row[:] = column
    return found


def _set(counts: Column, who: Piece, count: Column, n: int) -> Column:
    """The numbers with those of these ranks replaced."""
    if who is None:
        return count
    if not isinstance(counts, np.ndarray):
        counts = np.full(n, counts)
    counts[who] = count
    return counts
