"""What hidden communication costs compute.

A collective that runs beside compute takes SMs and memory bandwidth from it. The Program says how much
(``overlap_slowdown``); the bill comes when the collective has ended: the rank's next kernel (op of the compute stream)
is lengthened by that share of the time both were busy. Of hops that one kernel makes, one is billed
(:class:`clustersim.core.collective_kinds.ExchangeKernel`).

So a kernel's bill is a function of columns: of the collectives that ended between the start of the kernel before it
and its own, and of how long kernels were busy between the start and the end of each. Kernels mostly follow one another
without a *gap*, and then that is all of the time until the last of them was over; before a kernel where somebody's
compute stream stood still, ``OpTask.idle`` has for how long in all, so what stood still beside a collective is a
difference of two moments. Collectives of one stream end in order, so of each stream a number per rank tells which are
paid. A kernel only must not start before everything is known that could end before: where some collectives it may
depend on (``OpTask.soft``) are not over yet, only those ranks start that are ready before their earliest possible end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.engine.columns import (
    Column,
    Piece,
    at,
    every,
    full,
    highest,
    item,
    lowest,
    one_number,
    positions,
    replaced,
    some,
    stacked,
)
from clustersim.engine.flows.loads import INSTANT
from clustersim.engine.order import OpTask, watch
from clustersim.engine.sites import Site, SitePlay


class _Stream:
    """The watched collectives of a role's stream, in order: how many each rank is ``through``, and has ``paid``.

    most, least : any rank is through so many at most, and has paid so many at least.
    """

    __slots__ = ("least", "most", "paid", "tasks", "through")

    def __init__(self, tasks: list[OpTask]) -> None:
        self.tasks = tasks
        self.paid: Column = 0.0
        self.through: Column = 0.0
        self.least = self.most = 0


class Bills:
    """What every rank owes.

    Parameters
    ----------
    slowdown : the price: seconds for each second that a collective ran beside a kernel. lists : the tasks of each role.
    """

    def __init__(self, slowdown: float, lists: list[list[OpTask]]) -> None:
        self.slowdown = slowdown
        self._watched = [watch(role_tasks) for role_tasks in lists]
        self._kernels = [[task for task in role_tasks if task.place >= 0] for role_tasks in lists]
        self.reset({}, lambda site, meeting: 0.0)

    def reset(self, standing: dict[int, SitePlay], on_its_way: Callable[[Site, int], float]) -> None:
        """Nothing has been played.

        ``standing`` : sites by their first meeting. ``on_its_way`` : before when a transfer under way does not end [s].
        """
        self.standing = standing
        self.on_its_way = on_its_way
        self._streams = [{name: _Stream(tasks) for name, tasks in watched.items()} for watched in self._watched]
        self._last = [0] * len(self._streams)  # place of the last kernel that all ranks of a role have run
        self._gaps: list[list[int]] = [[] for _ in self._streams]  # places of kernels before which somebody stood still
        # Kernels that wait for collectives: whole ones, and pieces with whether they were tried before.
        self.held: list[dict[OpTask, None]] = [{} for _ in self._streams]
        self.waiting: dict[OpTask, dict[int, tuple[Piece, bool]]] = {}

    def settled(self, kernel: OpTask) -> bool:
        """Whether every collective its bill may depend on is over on all ranks, or known to be over when."""
        return not any(stream.left for stream in kernel.soft)

    def ended(self, task: OpTask, who: Piece) -> list[OpTask]:
        """A watched collective's end is known for these ranks; returns whole kernels that waited for it to settle."""
        r = task.key[0]
        stream = self._streams[r][task.op.stream]
        stream.through = replaced(stream.through, who, task.ordinal + 1.0, task.n)
        stream.most = max(stream.most, task.ordinal + 1)
        if task.left:
            return []
        task.low, task.high = lowest(task.end), highest(task.end)
        free = [kernel for kernel in self.held[r] if self.settled(kernel)] if self.held[r] else []
        for kernel in free:
            del self.held[r][kernel]
        return free

    def ran(self, kernel: OpTask, who: Piece, start: Column) -> None:
        """These ranks run a kernel from ``start`` on."""
        r = kernel.key[0]
        place = kernel.place
        kernels = self._kernels[kernel.key[0]]
        before = at(kernels[place - 1].end, who) if place else 0.0
        if kernel.idle is None and (start is before or not self._streams[r]):
            return
        gap = start - before
        gaps = self._gaps[r]
        if kernel.idle is None:
            if highest(gap) <= 0.0:
                return
            insort(gaps, place)
        k = bisect_left(gaps, place)
        idle = kernels[gaps[k - 1]].stood if k else 0.0
        if who is None:
            kernel.idle = idle + gap
            return
        if kernel.idle is None:  # others had no gap here
            kernel.idle = idle.copy() if isinstance(idle, np.ndarray) else full(kernel.n, idle)
        kernel.idle[who] = at(idle, who) + gap  # type: ignore[index]

    def over(self, kernel: OpTask) -> None:
        """All ranks have run a kernel: forget what no bill to come can ask for."""
        r = kernel.key[0]
        gaps = self._gaps[kernel.key[0]]
        self._last[r] = kernel.place
        first = self._first(r) if len(gaps) > 1 and gaps[1] < kernel.place else 0
        while len(gaps) > 1 and gaps[1] < first:
            self._kernels[r][gaps.pop(0)].idle = None

    def _first(self, r: int) -> int:
        """The place from which on a bill to come may ask what a role's kernels did."""
        due = (stream.tasks[stream.least] for stream in self._streams[r].values() if stream.least < len(stream.tasks))
        return min([self._last[r], *(paid_kernel.above + 1 for paid_kernel in due)])

    def asked(self, task: OpTask) -> bool:
        """Whether a bill to come may ask when an op that is over began and ended."""
        if task.place >= 0:
            return task.place >= self._first(task.key[0]) - 1
        return task.watched and task.ordinal >= self._streams[task.key[0]][task.op.stream].least

    def owed(self, kernel: OpTask, who: Piece, ready: Column) -> Column:
        """Seconds by which a kernel that these ranks begin at ``ready`` is longer."""
        if isinstance(who, int):
            return item(self.owed(kernel, slice(who, who + 1, 1), np.array([ready])), 0)
        total: Column = 0.0
        for stream in self._streams[kernel.key[0]].values():
            if stream.least >= stream.most or stream.tasks[stream.least].above >= kernel.place:
                continue
            late = highest(ready) * (1 + INSTANT)
            ones = []
            for task in stream.tasks[int(lowest(at(stream.paid, who))) : stream.most]:
                if task.above >= kernel.place or (task.low > late and not task.left):
                    break  # nor is any after it over
                ones.append(task)
            if ones:
                total = total + self._due(stream, kernel, who, ready * (1 + INSTANT), ones)
        return total * self.slowdown if isinstance(total, np.ndarray) or total else 0.0

    def _due(self, stream: _Stream, kernel: OpTask, who: Piece, late: Column, ones: list[OpTask]) -> Column:
        """Seconds beside those of some collectives of a stream, in order, that these ranks must pay for now: what is
        over by ``late``."""
        paid = at(stream.paid, who)
        first = ones[0].ordinal
        if (
            isinstance(paid, float)
            and ones[-1].high <= lowest(late)
            and not any(paid_kernel.left for paid_kernel in ones)
        ):
            return self._due_of_all(stream, kernel, who, ones)
        end = stacked([at(paid_kernel.end, who) for paid_kernel in ones])
        pays = np.asarray(end <= late)
        if isinstance(paid, np.ndarray):
            pays = pays & (paid <= (first if len(ones) == 1 else np.arange(first, first + len(ones))[:, None]))
        payers = np.count_nonzero(pays)
        if not payers:
            return 0.0
        start = stacked([at(paid_kernel.start, who) for paid_kernel in ones])
        if payers < pays.size and any(paid_kernel.left for paid_kernel in ones):
            payer = int(pays.argmax())  # of the others nothing is known but that they do not pay now
            start, end = (np.where(pays, column, item(column, payer)) for column in (start, end))
        count = pays.astype(np.float64)
        due: Floats = np.asarray(self._beside(kernel, who, start, end, ones[0].above)) * count
        if len(ones) > 1:
            due = np.add.reduce(due, 0)
            count = np.add.reduce(count, 0)
        alike = due.size == 1 and isinstance(late, float)
        stream.paid = replaced(stream.paid, who, one_number(paid + (count.item() if alike else count)), kernel.n)
        if first == stream.least:
            stream.least = int(lowest(stream.paid))
        return due.item() if alike else due

    def _due_of_all(self, stream: _Stream, kernel: OpTask, who: Piece, ones: list[OpTask]) -> Column:
        """The same where all of these ranks pay for all of it, as they mostly do: nobody is told apart."""
        start, end = (stacked([at(c, who) for c in cs]) for cs in ([o.start for o in ones], [o.end for o in ones]))
        due = self._beside(kernel, who, start, end, ones[0].above)
        stream.paid = replaced(stream.paid, who, ones[-1].ordinal + 1.0, kernel.n)
        if who is None:
            stream.least = ones[-1].ordinal + 1
        due = due if len(ones) == 1 else np.add.reduce(due, 0)
        return due.item() if isinstance(due, np.ndarray) and due.size == 1 else due

    def _beside(self, kernel: OpTask, who: Piece, start: Column, end: Column, above: int) -> Column:
        """Seconds that kernels of these ranks ran between ``start`` and ``end`` of collectives: columns, or a row each.

        ``end`` is between the start of the kernel before and this one's; at any start kernel ``above`` is over.
        """
        if not kernel.place:
            return 0.0
        kernels = self._kernels[kernel.key[0]]
        gaps = self._gaps[kernel.key[0]]
        over = at(kernels[kernel.place - 1].end, who)
        overlap: Column = np.maximum(np.minimum(end, over) - start, 0.0)
        k = bisect_left(gaps, kernel.place) - 1
        if k < 0 or gaps[k] <= above or highest(at(kernels[gaps[k]].start, who)) <= lowest(start):
            return overlap
        return overlap - (at(kernels[gaps[k]].stood, who) - self._idle_until(start, kernels, gaps[: k + 1], who, above))

    def _idle_until(self, time: Column, kernels: list[OpTask], gaps: list[int], who: Piece, above: int) -> Column:
        """Seconds these ranks' compute streams stood still until a time, at which kernel ``above`` is over."""
        # The gap to which one rank came; others may have come to an earlier one.
        rank = 0 if who is None else positions(who, 0).item(0)
        low = lowest(time)
        high = highest(time)
        first = bisect_right(gaps, above)
        k = bisect_right(gaps, item(time, 0), first, key=lambda place: item(kernels[place].start, rank))
        while k > first and highest(at(kernels[gaps[k - 1]].start, who)) > low:
            k -= 1
        before = at(kernels[gaps[k - 1]].stood, who) if k else 0.0
        idle_until = before
        for place in gaps[k:]:
            began = at(kernels[place - 1].end, who) if place else 0.0
            if lowest(began) >= high:
                break
            idle = at(kernels[place].stood, who)
            now = np.minimum(before + (time - began), idle)
            idle_until = np.maximum(idle_until, now)
            before = idle
        return idle_until

    def safe(self, kernel: OpTask, who: Piece, ready: Column, quiet: float) -> Floats:
        """Of each of these ranks, a time before which nothing ends that it may have to pay for [s].

        ``ready`` : when they could begin the kernel; what is later is late enough. ``quiet`` : nobody arrives anywhere,
        and nothing on the clock happens, before [s].
        """
        r = kernel.key[0]
        if isinstance(who, int):
            who = slice(who, who + 1, 1)
        safe = full(kernel.n if who is None else len(positions(who, kernel.n)), np.inf)
        wanted = highest(ready) * (1 + INSTANT)
        for last in kernel.soft:
            if not last.left:
                continue
            through = at(self._streams[r][last.op.stream].through, who)
            stream = self._watched[r][last.op.stream]
            low = int(lowest(through))
            high = int(highest(through))
            for k in range(low, min(high, last.ordinal) + 1):
                if low == high:
                    np.minimum(safe, self._earliest(stream[k], who, wanted, quiet), out=safe)
                    continue
                mask = np.equal(through, k)
                if some(mask):
                    places = positions(who, kernel.n)[mask]
                    safe[mask] = np.minimum(safe[mask], self._earliest(stream[k], places, wanted, quiet))
        return safe * (1 - INSTANT)

    def _earliest(self, task: OpTask, who: Piece, wanted: float, quiet: float) -> Floats | float:
        """The collective that these ranks come to next on a stream does not end before; no better than ``wanted``."""
        if not task.lone:
            return quiet
        site, side = task.meets[0]
        ranks = side.meeting_of[slice(None) if who is None else who]
        if ranks[0] == ranks[-1] and (len(site.ranks) == 1 or every(ranks == ranks[0])):
            return self._ends_after(task, ranks[:1], wanted, quiet)
        chosen = np.zeros(len(site.ranks), dtype=np.bool_)  # a meeting is looked at once, whoever comes to it
        chosen[ranks] = True
        earliest = np.zeros(len(chosen))
        earliest[chosen] = self._ends_after(task, np.flatnonzero(chosen), wanted, quiet)
        return earliest[ranks]

    def _ends_after(self, task: OpTask, meetings: Ints, wanted: float, quiet: float) -> Floats:
        """These meetings of a collective do not end before."""
        site = task.meets[0][0]
        standing = self.standing[site.first]
        begins = standing.begins(meetings, quiet)
        least = at(standing.latency, meetings) + at(standing.moving, meetings)
        ends_after: Floats = np.maximum(begins + least, quiet)
        if lowest(ends_after) > wanted:
            return ends_after
        if standing.missing is None or some(standing.missing[meetings] > 0):
            ends_after = np.maximum(ends_after, self._held_up(task, meetings, quiet) + least)
        elif len(meetings) == 1:
            ends_after = np.maximum(ends_after, self.on_its_way(site, int(meetings[0])))
        return ends_after

    def _held_up(self, task: OpTask, meetings: Ints, quiet: float) -> Floats:
        """These meetings do not begin before: a missing member must first be through what it waits for itself."""
        site, side = task.meets[0]
        held_until = np.zeros(len(meetings))
        if len(site.sides) > 1 or not side.each:
            return held_until
        members = side.order.reshape(-1, side.each)[meetings]
        away = np.asarray(task.unmet > 0 if isinstance(task.unmet, int) else task.unmet[members] > 0)
        for need in task.before:
            if not need.lone or not need.left or not need.meets:
                continue
            its_site, its_side = need.meets[0]
            standing = self.standing[its_site.first]
            everyone = np.arange(len(its_site.ranks))
            ends = standing.begins(everyone, quiet) + standing.latency + standing.moving
            if standing.missing is not None:
                ends = np.where(standing.end < np.inf, 0.0, ends)
            np.maximum(held_until, np.where(away, ends[its_side.meeting_of[members]], 0.0).max(axis=1), out=held_until)
        return held_until
