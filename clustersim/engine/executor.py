"""Plays a Program on a Topology: who waits for what, and when each op starts and ends.

An op of one rank may begin when the op before it on its stream and the ops it names in ``after`` have ended. So every
(op, rank) counts down its *unmet* dependencies and remembers the latest end among them, its *ready* time. All ranks of
a role run one op list, so an op's ranks are the elements of numpy arrays, and work is passed on as pairs of an op and
the positions of the ranks that just became ready for it.

Only transfers take simulated time in the event loop. A Compute op's end is known as soon as it is ready: it is computed
at once, perhaps far ahead of the clock. A collective counts arrivals instead; when the last member's arrival is known,
the transfer is handed to a *player* (:mod:`clustersim.engine.players`), which calls back at its end, and the members'
next ops become ready. Nothing that happens at one time can change anything earlier, so this is exact.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.chains import Chain, chains
from clustersim.engine.clock import Clock
from clustersim.engine.deadlock import deadlock
from clustersim.engine.meetings import Site
from clustersim.engine.overlap import Overlap
from clustersim.engine.players import Player
from clustersim.engine.queues import Queues, Served
from clustersim.engine.rows import Rows
from clustersim.engine.tasks import ALL, Task, Who, tasks
from clustersim.program import Collective, Compute, Program, Serve

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Executor:
    """The run of one Program.

    Parameters
    ----------
    program, sites : what to play, and where its ranks meet.
    player : turns a meeting with all members present into simulated time, then calls :meth:`met`.
    rows : collects what happened. progress : called with (ops finished, ops in all).
    """

    def __init__(
        self,
        program: Program,
        sites: tuple[Site, ...],
        clock: Clock,
        player: Player,
        rows: Rows,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.program, self.sites, self.clock, self.player, self.rows = program, sites, clock, player, rows
        self.progress = progress
        self.tasks = tasks(program, sites)
        # Only collectives run on SMs; a program of sends owes nothing, and needs no ledger.
        billed = program.overlap_slowdown > 0 and any(isinstance(op, Collective) for r in program.roles for op in r.ops)
        self.overlap = Overlap(program, clock, self._release) if billed else None
        if not self.overlap:
            for mine in self.tasks:
                chains(mine)
        self.queues = Queues(clock, self._served)
        self._first = np.array([site.first for site in sites], dtype=np.int64)
        self._firsts = self._first.tolist()
        self._work: deque[tuple[Task, Who | int]] = deque()
        self._n_done, self._n_tasks = 0, sum(len(mine) for mine in self.tasks)

    def run(self) -> None:
        """Play to the end. Raises :class:`ProgramError` if ranks wait for each other forever."""
        for mine in self.tasks:
            for task in mine:
                if not task.n_needs and task.n:
                    task.open()
                    self._work.append((task, ALL))
        self._work_off()
        self.clock.run()
        if any(task.left for mine in self.tasks for task in mine):
            raise deadlock(self.program, self.sites, self.tasks)

    def met(self, meetings: Ints, now: float) -> None:
        """Called by the player: these meetings (sorted ids) end now."""
        if len(meetings) == 1:
            meeting = int(meetings[0])
            s = bisect_right(self._firsts, meeting) - 1
            self._over(self.sites[s], meetings - self._firsts[s], now)
        else:
            owner = np.searchsorted(self._first, meetings, side="right") - 1
            for s in np.unique(owner).tolist():
                self._over(self.sites[s], meetings[owner == s] - self._firsts[s], now)
        self._work_off()

    def _over(self, site: Site, meetings: Ints, now: float) -> None:
        """These meetings of a site end now."""
        for side in site.sides_of(meetings):
            task, who = self.tasks[side.key[0]][side.key[1]], side.who(meetings)
            if not self.overlap and (task.n == 1 or (not isinstance(who, slice) and len(who) == 1)):
                p = 0 if isinstance(who, slice) else int(who[0])
                task.start[p] = site.start[side.meeting_of[p]]
                self._end_one(task, p, now)
                continue
            start = site.start[side.meeting_of[who]]
            task.start[who] = start
            if self.overlap:
                self.overlap.ended(task, who, start)
            self._end(task, who, np.full(len(start), now))

    def _work_off(self, due: bool = False) -> None:
        """Do everything that can be done before the clock moves on; ``due``: nothing else can end at this instant."""
        while True:
            while self._work:
                task, who = self._work.popleft()
                if isinstance(who, int):
                    self._one(task, who)
                elif not isinstance(task.op, Compute):
                    self._arrive(task, who)
                elif isinstance(task.op, Serve):
                    self.queues.arrive(task, who)
                elif self.overlap and self.overlap.governs(task.op):
                    self.overlap.park(task, who)
                elif task.chain is not None:
                    self._chain(task.chain, who)
                else:
                    self._compute(task, who)
            released = self.overlap.release(due) if self.overlap else []
            if not released:
                return
            for (role, i), positions, longer in released:
                task = self.tasks[role][i]
                self._compute(task, ALL if len(positions) == task.n else positions, longer)

    def _one(self, task: Task, p: int) -> None:
        """The op of one rank is ready: as for many, without arrays; never where overlap is billed."""
        if not isinstance(task.op, Compute):
            self._arrive_one(task, p)
        elif isinstance(task.op, Serve):
            self.queues.arrive(task, np.array([p], dtype=np.int64))
        elif task.chain is not None:
            self._chain(task.chain, p)
        else:
            start = task.ready.item(p)
            task.start[p] = start
            self._end_one(task, p, start + (task.duration.item() if task.duration.ndim == 0 else task.duration.item(p)))

    def _arrive_one(self, task: Task, p: int) -> None:
        here, ready = False, task.ready.item(p)
        for site, side in task.meets:
            meeting = side.meeting_of.item(p)
            if meeting >= 0:
                here = True
                if site.arrive_alone(meeting, ready):
                    self.player.play(site, np.array([meeting], dtype=np.int64))
        if not here:
            task.start[p] = ready
            self._end_one(task, p, ready)

    def _chain(self, chain: Chain, who: Who | int) -> None:
        times = chain.play(who, chain.tasks[0].ready[who])
        for k, other in chain.out:
            if isinstance(who, int):
                self._met_one(other, who, float(times[k + 1]))
            else:
                self._met_many(other, who, times[:, k + 1])
        if chain.left == 0:
            for task in chain.close():
                self._finish(task)

    def _release(self) -> None:
        self._work_off(due=True)

    def _compute(self, task: Task, who: Who, longer: Floats | float = 0.0) -> None:
        start = task.ready[who]
        duration = task.duration if task.duration.ndim == 0 else task.duration[who]
        end = start + (duration + longer)
        task.start[who] = start
        if self.overlap and self.overlap.governs(task.op):
            self.overlap.ran(task, who, start, end)
        self._end(task, who, end)

    def _served(self, served: list[Served]) -> None:
        for task, position, start, end in served:
            task.start[position] = start
            if self.overlap:
                self._end(task, np.array([position], dtype=np.int64), np.array([end]))
            else:
                self._end_one(task, position, end)
        self._work_off()

    def _arrive(self, task: Task, who: Who) -> None:
        """Ranks reach a collective, send or recv; those with no part in it pass through."""
        ready = task.ready[who]
        absent = np.ones(len(ready), dtype=np.bool_)
        for site, side in task.meets:
            meetings = side.meeting_of[who]
            here = meetings >= 0
            absent &= ~here
            if here.any():
                complete = site.arrive(meetings[here], ready[here])
                if self.overlap:
                    self.overlap.expect(self.tasks, site, np.unique(meetings[here]), self.player.least(site))
                if len(complete):
                    self.player.play(site, complete)
        if absent.any():
            positions = np.arange(task.n)[who][absent]
            task.start[positions] = task.ready[positions]
            self._end(task, positions, task.ready[positions])

    def _end(self, task: Task, who: Who, end: Floats) -> None:
        """Ranks end an op: tell the ops that wait for it, and keep the row once all ranks have ended."""
        task.end[who] = end
        task.left -= len(end)
        for other in task.next:
            self._met_many(other, who, end)
        if task.left == 0:
            self._finish(task)

    def _met_many(self, other: Task, who: Who, end: Floats) -> None:
        """What these ranks' op waits for, one thing of it, has ended."""
        other.open()
        if isinstance(who, slice):
            np.maximum(other.ready, end, out=other.ready)
            other.unmet -= 1
            free = np.flatnonzero(other.unmet == 0)
        else:
            other.ready[who] = np.maximum(other.ready[who], end)
            other.unmet[who] -= 1
            free = who[other.unmet[who] == 0]
        if len(free):
            self._work.append((other, ALL if len(free) == other.n else free))

    def _end_one(self, task: Task, p: int, end: float) -> None:
        """As :meth:`_end`, for one rank."""
        task.end[p] = end
        task.left -= 1
        for other in task.next:
            self._met_one(other, p, end)
        if task.left == 0:
            self._finish(task)

    def _met_one(self, other: Task, p: int, end: float) -> None:
        other.open()
        if other.ready[p] < end:
            other.ready[p] = end
        other.unmet[p] -= 1
        if other.unmet[p] == 0:
            self._work.append((other, p))

    def _finish(self, task: Task) -> None:
        self.rows.add(task)
        task.close()
        self._n_done += 1
        if self.progress:
            self.progress(self._n_done, self._n_tasks)
