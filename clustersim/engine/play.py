"""Plays tasks: whole columns ahead of the clock, pieces of them where a clock is needed.

An op is handled once for all ranks of its role. Its *ready* column is the maximum over the ends of what it waits for; a
collective's start is the maximum over its group; and whatever shares no link ends a known time after it starts. So most
of a run is a walk over the ops in which time does not pass at all: no event, and no counter per rank. A column is never
written to after it is made, so ops share them: the end of one is the ready time of the next.

The clock is needed for transfers that share links (*clocked* sites), for first come first served, and for nothing else.
Where a clocked transfer has ended, its ranks go on as a *piece* of a column: their own op counts what each rank still
waits for. A piece that nobody could notice before a known time (``OpTask.look``) waits until the clock would pass that
time, and becomes one with others of its op that come meanwhile; where all have come, it is a whole column again.

With bills (:mod:`clustersim.engine.bills`) a kernel must also wait until everything is known that could end before it.
Where this cannot be had by playing other columns first, it is had by order in time: of all that waits, the piece that
is ready first is played, for nothing that is still unknown can happen before it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias, cast

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import Compute, Serve
from clustersim.engine.agenda import Agenda, KernelTurns, Queues, Served
from clustersim.engine.bills import Bills
from clustersim.engine.columns import Column, Piece, at, full, item, later, one_number, positions, size, some
from clustersim.engine.flows.clock import Clock
from clustersim.engine.inside import StretchPlans
from clustersim.engine.order import OpTask
from clustersim.engine.sites import Site, SitePlay, spread

Begin: TypeAlias = Callable[[Site, Ints, Floats], None]

_EVERYONE = slice(None)

FIRST_LOOK = 2**12
NEXT_LOOK = 1.25
"""Events after which a play is looked at, and of how many times as many it is again: so it takes little of the play."""


class Play:
    """One play of the tasks of a Program.

    Parameters
    ----------
    lists : the tasks of each role. standing : sites by their first meeting, some clocked. bills : None for none.
    begin : starts transfers of a clocked site: called with the site, complete meetings, and when each is complete.
    finished : called with each task that all ranks have ended.
    """

    def __init__(
        self,
        lists: list[list[OpTask]],
        standing: dict[int, SitePlay],
        clock: Clock,
        begin: Begin,
        bills: Bills | None,
        finished: Callable[[OpTask], None],
    ) -> None:
        self.lists = lists
        self.standing = standing
        self.clock = clock
        self.bills = bills
        self.finished = finished
        self.begin = begin
        self.queues = Queues(clock, self._served)
        self._firsts = sorted(standing)  # each site's first meeting
        self._all_firsts = np.array(self._firsts, dtype=np.int64)  # the same: of one it is found sooner in a list
        self._work: deque[tuple[OpTask, Piece]] = deque()
        self._agenda = Agenda()
        self._turns = KernelTurns(self._agenda, bills, self._compute) if bills else None

    def run(self, look: Callable[[float], None] | None = None) -> None:
        """Play to the end, or until nothing more can happen. ``look`` : called now and then, ever more seldom, with the
        time [s]."""
        for role_tasks in self.lists:
            for task in role_tasks:
                if not task.needs and task.n:
                    self._work.append((task, None))
        clock = self.clock
        next_look = FIRST_LOOK if look else np.inf
        while True:
            self._work_off()
            if clock.peek() == np.inf:
                return
            clock.step()
            if look and clock.n_events >= next_look:
                next_look *= NEXT_LOOK
                look(clock.now)

    def _work_off(self) -> None:
        """Do everything that can be done before the clock moves on."""
        work = self._work
        agenda = self._agenda
        while True:
            while work:
                self._go(*work.popleft())
            if not agenda or self.clock.peek() <= agenda.first:
                return
            key, kernel, task, who = agenda.pop()
            if kernel and self._turns:
                self._turns.come(task, who, key)
            elif task.waiting:
                self._go(task, agenda.together(task))

    # ---- an op is ready ---------------------------------------------------------------------------------------------

    def _go(self, task: OpTask, who: Piece) -> None:
        if not isinstance(task.op, Compute):
            self._arrive(task, who)
        elif isinstance(task.op, Serve):
            self.queues.arrive(task, positions(who, task.n))
        elif self._turns and task.soft and not self._turns.bills.settled(task):
            self._turns.hold(task, who)
        else:
            self._compute(task, who)

    def _compute(self, task: OpTask, who: Piece) -> None:
        start = at(task.ready, who)
        spent = at(task.seconds, who)
        if self.bills and task.place >= 0:
            owed = self.bills.owed(task, who, start)
            spent = spent + owed if isinstance(owed, np.ndarray) or owed else spent
            self.bills.ran(task, who, start)
        if not task.chain:
            self._end(task, who, None, start + spent)
            return
        last = task.chain.tasks[-1]
        self._end(last, who, None, task.chain.run(who, start + spent))
        for task_after in () if last.left else task.chain.over():
            self.finished(task_after)

    def _arrive(self, task: OpTask, who: Piece) -> None:
        """Ranks reach a collective, send or recv."""
        site, side = task.meets[0] if task.lone else (None, None)
        standing = self.standing[site.first] if site else None
        if side and standing and standing.whole and who is None:
            if standing.come(side, task.ready):
                self._complete(standing)
        elif isinstance(who, int) or task.n == 1:
            self._arrive_one(task, who if isinstance(who, int) else 0)
        elif side and standing:
            positions_of = _EVERYONE if who is None else who
            self._come(standing, side.meeting_of[positions_of], at(task.ready, who))
        else:
            self._arrive_apart(task, who)

    def _arrive_apart(self, task: OpTask, who: Piece) -> None:
        """Ranks that meet in several places reach them; those with no part in any pass through."""
        ready = at(task.ready, who)
        positions_of = _EVERYONE if who is None else who
        absent = np.ones(task.n if who is None else size(who), dtype=np.bool_)
        for site, side in task.meets:
            meetings = side.meeting_of[positions_of]
            met = meetings >= 0
            absent &= ~met
            if some(met):
                times = ready if isinstance(ready, float) else ready[met]
                self._come(self.standing[site.first], meetings[met], times)
        if some(absent):
            left_over = None if len(absent) == task.n and absent.all() else positions(who, task.n)[absent]
            self._end(task, left_over, at(task.ready, left_over), at(task.ready, left_over))

    def _arrive_one(self, task: OpTask, p: int) -> None:
        met = False
        ready = item(task.ready, p)
        for site, side in task.meets:
            meeting = int(side.meeting_of[p])
            if meeting >= 0:
                met = True
                if self.standing[site.first].come_one(meeting, ready):
                    self._begin(self.standing[site.first], np.array([meeting], dtype=np.int64))
        if not met:
            self._end(task, None if task.n == 1 else p, ready, ready)

    def _come(self, standing: SitePlay, meetings: Ints, times: Column) -> None:
        """Some ranks reach their meetings: what is complete now begins."""
        complete = standing.come_some(meetings, times)
        if len(complete):
            self._begin(standing, complete)

    # ---- transfers --------------------------------------------------------------------------------------------------

    def _complete(self, standing: SitePlay) -> None:
        """Everybody is there, at all meetings of a site."""
        if standing.clocked:
            self.begin(standing.site, *standing.complete())
            return
        if standing.site.plans.left_apart:
            self._leave(standing, None)
            return
        start, end = standing.over()
        for side in standing.site.sides:
            task = self.lists[side.key[0]][side.key[1]]
            # Only who watches asks when each of its ranks began.
            began = start if side.gathers and not task.watched and task.lone else spread(side, start)
            self._end(task, None, began, spread(side, end))

    def _begin(self, standing: SitePlay, meetings: Ints) -> None:
        start = cast(Floats, standing.start)[meetings]
        if standing.clocked:
            self.begin(standing.site, meetings, start)
        elif standing.site.plans.left_apart:
            self._leave(standing, meetings)
        else:
            parts = (c if isinstance(c, float) else c[meetings] for c in (standing.latency, standing.moving))
            self._over(standing, meetings, (start + next(parts)) + next(parts))

    def _leave(self, standing: SitePlay, meetings: Ints | None) -> None:
        """Everybody is there, at these meetings of a stretch or at all (None), and each rank leaves at its own time."""
        site = standing.site
        (side,) = site.sides
        task = self.lists[side.key[0]][side.key[1]]
        start = standing.start
        whole = meetings is None or len(meetings) == len(site.ranks)
        who = None if whole else side.who(cast(Ints, meetings))
        began = spread(side, start) if whole else cast(Floats, start)[side.meeting_of[who]]
        plans = cast(StretchPlans, site.plans)
        inside = plans.played(at(task.ready, who), began, who)
        if plans.begun_apart:  # of pieces it is known once all are there
            site.played = plans.begun_apart.plans(plans, inside) if whole else None
        standing.moved(meetings, inside.end[-1])
        self._end(task, who, began, began + at(inside.leave, who))

    def met(self, meetings: Ints, now: float) -> None:
        """These clocked meetings (sorted ids) end now."""
        if len(meetings) == 1:
            meeting = meetings.item(0)
            first = self._firsts[bisect_right(self._firsts, meeting) - 1]
            self._over_one(self.standing[first], meeting - first, now)
        else:
            firsts = self._all_firsts[self._all_firsts.searchsorted(meetings, side="right") - 1]
            bounds = [0, *(np.flatnonzero(firsts[1:] != firsts[:-1]) + 1).tolist(), len(firsts)]
            for begin, end in pairwise(bounds):
                first = firsts.item(begin)
                self._over(self.standing[first], meetings[begin:end] - first, now)
        self._work_off()

    def _over(self, standing: SitePlay, meetings: Ints, end: Column) -> None:
        """These meetings of a site end."""
        if len(meetings) == 1:
            self._over_one(standing, meetings.item(0), end if isinstance(end, float) else end.item(0))
            return
        standing.end[meetings] = end  # type: ignore[index]
        for side in standing.site.sides_of(meetings):
            task = self.lists[side.key[0]][side.key[1]]
            who = side.who(meetings)
            if side.lone:
                m = side.meeting_of.item(0)
                self._end(task, None, item(standing.start, m), item(standing.end, m))
            elif isinstance(who, slice):
                self._end(task, None, *(one_number(spread(side, c)) for c in (standing.start, standing.end)))
            else:
                ids = side.meeting_of[who]
                self._end(task, who, standing.start[ids], end if isinstance(end, float) else standing.end[ids])  # type: ignore[index]

    def _over_one(self, standing: SitePlay, meeting: int, end: float) -> None:
        """A meeting of a site ends."""
        site = standing.site
        start = item(standing.start, meeting)
        standing.end[meeting] = end  # type: ignore[index]
        for side in (site.sides[0], site.sides[meeting + 1]) if site.apart else site.sides:
            task = self.lists[side.key[0]][side.key[1]]
            who = None if side.lone else side.piece(meeting)
            self._end(task, None if who is None or size(who) == task.n else who, start, end)

    def _served(self, served: list[Served]) -> None:
        for task, position, start, end in served:
            self._end(task, None if task.n == 1 else position, start, end)
        self._work_off()

    # ---- an op has ended --------------------------------------------------------------------------------------------

    def _end(self, task: OpTask, who: Piece, start: Column | None, end: Column) -> None:
        """Ranks have run an op, from ``start`` on, or (None) from when they were ready: tell the ops that wait for
        it."""
        if who is None:
            task.start, task.end, task.left = task.ready if start is None else start, end, 0
        else:
            if task.left == task.n:
                task.start = task.ready if start is None else np.zeros(task.n)
                task.end = full(task.n, np.inf)
            if start is not None:
                task.start[who] = start  # type: ignore[index]
            task.end[who] = end  # type: ignore[index]
            task.left -= size(who)
        for following in task.next:
            if who is None and isinstance(following.unmet, int):
                following.ready = later(following.ready, end)
                following.unmet -= 1
                if not following.unmet:
                    self._work.append((following, None))
            elif following.needs == 1 and isinstance(following.op, Compute):
                following.ready = (
                    task.end
                )  # the only thing that it waits for: one column, and nobody needs to be counted
                self._put(following, who)
            elif isinstance(who, int):
                self._met_one(following, who, float(end))
            else:
                self._met(following, who, end)
        if self.bills and task.watched:
            self._work.extend((kernel, None) for kernel in self.bills.ended(task, who))
        if not task.left:
            task.spent = None
            if self.bills and task.place >= 0:
                self.bills.over(task)
            self.finished(task)

    def _met(self, task: OpTask, who: Piece, end: Column) -> None:
        """Something that these ranks wait for has ended."""
        unmet = task.split()
        ready = cast(Floats, task.ready)
        positions_of = _EVERYONE if who is None else who
        ready[positions_of] = np.maximum(ready[positions_of], end)
        left = unmet[positions_of] - 1
        unmet[positions_of] = left
        if not left.item(left.argmax()):
            self._put(task, who)
        else:
            free = (left == 0).nonzero()[0]
            if len(free):
                self._put(task, free if who is None else positions(who, task.n)[free])

    def _met_one(self, task: OpTask, p: int, end: float) -> None:
        unmet = task.split()
        if task.ready[p] < end:  # type: ignore[index]
            task.ready[p] = end  # type: ignore[index]
        unmet[p] -= 1
        if unmet[p] == 0:
            self._put(task, p)

    # ---- pieces -----------------------------------------------------------------------------------------------------

    def _put(self, task: OpTask, who: Piece) -> None:
        """Some ranks are ready for a task."""
        if who is None or size(who) == task.n:
            task.ready = one_number(task.ready)
            self._work.append((task, None))
        elif task.look <= 0.0 or task.soft or not self._agenda.waits(task, who, self.clock.peek()):
            self._work.append((task, who))
