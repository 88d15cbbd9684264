"""What waits for its turn in time: ops of servers, first come, first served; and pieces of columns.

A :class:`~clustersim.core.program.Serve` op that is ready is parked until the clock has reached its ready time: only
then is it certain that nobody came before it. From there on nothing can overtake it, so its start and end are known at
once.

Pieces wait, too. One that nobody can notice yet waits for more ranks of its op (``OpTask.look``). A kernel that is
ready before everything is known that could end before it (:mod:`clustersim.engine.bills`) comes to its turn when
nothing unknown can happen before it: when the clock comes to the moment at which others could notice what it does. That
is later than it is ready, by the least time to the next meeting, and a meeting begins with its last member: so pieces
stay whole, and mostly all of their bills are known by then. Other pieces of the kernel that wait are tried with it
once: those whose bills are known to be complete sooner go with it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Ints
from clustersim.engine.bills import Bills
from clustersim.engine.columns import Piece, at, every, highest, item, lowest, one_number, positions
from clustersim.engine.flows.clock import RELEASE, Clock
from clustersim.engine.order import OpTask

Served: TypeAlias = tuple[OpTask, int, float, float]
"""A task, the position of the rank in its role, and when it starts and ends there [s]."""


class Queues:
    """One queue per rank and stream that holds Serve ops.

    Parameters
    ----------
    clock : tells when somebody's turn to queue up has come. on_served : called with what was served, in order.
    """

    def __init__(self, clock: Clock, on_served: Callable[[list[Served]], None]) -> None:
        self.clock = clock
        self.on_served = on_served
        self._coming: list[tuple[float, tuple[int, int], int, OpTask]] = []
        self._free: dict[tuple[int, str, int], float] = {}
        self._calls: set[float] = set()

    def arrive(self, task: OpTask, who: Ints) -> None:
        """The ops of the ranks at these positions are ready at their ready times, now or later."""
        for position in who.tolist():
            ready = item(task.ready, position)
            heappush(self._coming, (ready, task.key, position, task))
            if ready not in self._calls:
                self._calls.add(ready)
                # After every transfer that ends at the same instant, so that ties go by place in the list.
                self.clock.call(ready, self._due, ready, priority=RELEASE)

    def _due(self, moment: float) -> None:
        self._calls.discard(moment)
        served: list[Served] = []
        while self._coming and self._coming[0][0] <= self.clock.now:
            ready, key, position, task = heappop(self._coming)
            queue = (key[0], task.op.stream, position)
            start = max(ready, self._free.get(queue, 0.0))
            seconds = task.seconds
            self._free[queue] = start + float(seconds if isinstance(seconds, float) else seconds[position])
            served.append((task, position, start, self._free[queue]))
        self.on_served(served)


EARLY = 1 - 1e-9
"""A piece is played this much, relatively, before it could matter: columns add in another order than the clock."""

_NEVER = 1e300
"""Later than anything the clock knows of: pieces that nobody will ever notice are played at the end."""


class Agenda:
    """Pieces by the earliest moment at which they could matter to others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, OpTask, Piece]] = []
        self._n = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float:
        """When the first one could matter [s]."""
        return min(self._heap[0][0], _NEVER)

    def add(self, key: float, kernel: bool, task: OpTask, who: Piece) -> None:
        """A piece that matters at ``key`` [s]; of one moment, kernels come last."""
        self._n += 1
        heappush(self._heap, (key, kernel, self._n, task, who))

    def pop(self) -> tuple[float, bool, OpTask, Piece]:
        """The first one: key, whether it is a kernel, task and ranks."""
        key, kernel, _, task, who = heappop(self._heap)
        return key, kernel, task, who

    def waits(self, task: OpTask, who: Ints | slice | int, until: float) -> bool:
        """These ranks are ready: whether they wait, since nobody notices before the task's lookahead has passed.
        They need not where they would come next: nothing happens before ``until`` [s]."""
        due = (lowest(at(task.ready, who)) + task.look) * EARLY
        if task.waiting is None and due < until and not (self._heap and self._heap[0][0] <= due):
            return False
        if task.waiting is None or due < task.due:
            task.due = due
            self.add(due, False, task, None)
        task.waiting = task.waiting or []
        task.waiting.append(who)
        return True

    def together(self, task: OpTask) -> Piece:
        """All ranks of a task that have come while it waited."""
        waiting, task.waiting = task.waiting or [], None
        if len(waiting) == 1:
            return waiting[0]
        who = np.sort(np.concatenate([positions(piece, task.n) for piece in waiting]))
        if len(who) < task.n:
            return who
        task.ready = one_number(task.ready)
        return None


class KernelTurns:
    """Kernels that are ready, and wait until what they owe is known.

    Parameters
    ----------
    agenda : what else may happen, and when. bills : what they owe. compute : runs ranks that are through.
    """

    def __init__(self, agenda: Agenda, bills: Bills, compute: Callable[[OpTask, Piece], None]) -> None:
        self.bills = bills
        self._agenda = agenda
        self._compute = compute

    def hold(self, task: OpTask, who: Piece, *, tried: bool = False) -> None:
        """A kernel is ready, but not everything is known that could end before: it waits for its turn in time."""
        if who is None:
            self.bills.held[task.key[0]][task] = None
        else:
            self.bills.waiting.setdefault(task, {})[id(who)] = who, tried
        noticed = _noticed(task, who)
        self._agenda.add(max(noticed, (noticed + task.look) * EARLY), True, task, who)

    def come(self, task: OpTask, who: Piece, key: float) -> None:
        """Nothing unknown happens before ``key`` [s], when the first of these ranks is ready for a kernel."""
        pieces = self._taken(task, who)
        if not pieces:
            return  # it has run meanwhile
        gone = []
        for k, piece in enumerate(pieces):
            ready = at(task.ready, piece)
            if self.bills.settled(task) or highest(ready) <= key:
                gone.append(piece)
                continue
            free = (ready <= key) | (ready < self.bills.safe(task, piece, ready, key))
            if np.logical_and.reduce(free, axis=None):
                gone.append(piece)
            elif k:  # it comes with nobody: a piece stays whole until its own turn
                self.bills.waiting[task][id(piece)] = piece, True
            else:
                places = positions(piece, task.n)
                gone.append(places[free])
                self.hold(task, places[~free], tried=True)
        self._compute(
            task, gone[0] if len(gone) == 1 else np.sort(np.concatenate([positions(piece, task.n) for piece in gone]))
        )

    def _taken(self, task: OpTask, who: Piece) -> list[Piece]:
        """A piece of a kernel that waits, and others that may go with it: each is tried with others once."""
        if who is None:
            return [None] if self.bills.held[task.key[0]].pop(task, self) is None else []
        waiting = self.bills.waiting[task]
        if id(who) not in waiting:
            return []
        if self.bills.settled(task):
            taken = [entry for entry, _ in waiting.values()]
            waiting.clear()
            return taken
        del waiting[id(who)]
        fresh = [entry for entry, tried in waiting.values() if not tried]
        for entry in fresh:
            del waiting[id(entry)]
        return [who, *fresh]


def _noticed(task: OpTask, who: Piece) -> float:
    """When the first of these ranks are ready for a task; of those who meet before others can notice, the last [s]."""
    ready = at(task.ready, who)
    if task.gate is None or not isinstance(ready, np.ndarray):
        return float(lowest(ready))
    meeting_of = task.gate.meeting_of if who is None else task.gate.meeting_of[who]
    if meeting_of[0] == meeting_of[-1] and every(meeting_of == meeting_of[0]):
        return float(highest(ready))
    last = np.zeros(len(task.gate.ptr))
    np.maximum.at(last, meeting_of, ready)
    return lowest(last[meeting_of])
