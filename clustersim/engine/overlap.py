"""What hidden communication costs compute.

A collective that runs beside compute takes SMs and memory bandwidth from it. The Program says how much
(``overlap_slowdown``); the bill comes when the collective has ended: the rank's next Compute op on the compute stream
is lengthened by that share of the time both were busy.

So a compute op may start only when every transfer of its rank that could end before it has ended. Each outstanding
transfer has an earliest end: its start, plus latency, plus bytes at the idle network's rate; and where a member is
missing, it starts no sooner than anybody can arrive. Compute that is ready before all of those starts at once, and the
rest is *parked* until the clock gets there.

The clock need not stop for each of them. Nothing can end, and no transfer can begin, before the clock's next event or
the end of some parked op, whichever is sooner: what is due before that moment starts at once, on all ranks together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from simpy.events import Event

from clustersim.engine.clock import RELEASE, Clock
from clustersim.engine.meetings import Site
from clustersim.engine.slots import INSTANT
from clustersim.engine.pairs import OpKey
from clustersim.engine.tasks import Task, Who
from clustersim.program import COMPUTE_STREAM, Collective, Op, Program

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(eq=False)
class _Run:
    """When each rank of a role ran one op of its compute stream; ``-inf`` .. ``-inf`` for not yet."""

    task: Task
    start: Floats
    end: Floats


class Overlap:
    """The ledger: outstanding transfers, parked compute, and what each rank owes.

    Parameters
    ----------
    program : its ``overlap_slowdown`` is the price. wake : called at the instant a parked op is due.
    """

    def __init__(self, program: Program, clock: Clock, wake: Callable[[], None]) -> None:
        self.slowdown, self.clock, self.wake = program.overlap_slowdown, clock, wake
        self._sizes = [len(role.ranks) for role in program.roles]
        self._owed = [np.zeros(n) for n in self._sizes]
        self._runs: list[deque[_Run]] = [deque() for _ in self._sizes]
        # Per rank, of the one op of its compute stream that can be parked: when it is due (inf: none), and which.
        self._due = [np.full(n, np.inf) for n in self._sizes]
        self._op = [np.zeros(n, dtype=np.int64) for n in self._sizes]
        self._over = [np.full(n, np.inf) for n in self._sizes]  # not over before, were it not lengthened
        # Per role and stream, of the one transfer a rank can have outstanding there: its start so far, earliest end.
        self._begun: list[dict[str, Floats]] = [{} for _ in self._sizes]
        self._earliest: list[dict[str, Floats]] = [{} for _ in self._sizes]
        self._least: list[dict[str, Floats]] = [{} for _ in self._sizes]  # how long it takes; -inf once it has begun
        self._wake: Event | None = None
        self._wake_at = -1.0

    def governs(self, op: Op) -> bool:
        """Whether an op can be lengthened: compute on the compute stream."""
        return op.stream == COMPUTE_STREAM

    def expect(self, tasks: list[list[Task]], site: Site, meetings: Ints, least: Floats) -> None:
        """These meetings of a site cannot end before the latest arrival so far plus the ``least`` time (G,) [s]."""
        earliest = (site.start + least) * (1 - INSTANT)
        waiting = np.where(site.missing > 0, least, -np.inf)
        for side in site.sides_of(meetings):
            role, i = side.key
            task = tasks[role][i]
            if not len(task.unmet):
                continue  # nobody of this role is there yet
            who = np.arange(task.n)[side.who(meetings)]
            who = who[task.unmet[who] == 0]
            at = side.meeting_of[who]
            books = (self._begun, site.start), (self._earliest, earliest), (self._least, waiting)
            for book, value in books:
                column = book[role].setdefault(task.op.stream, np.full(task.n, np.inf))
                column[who] = value[at]

    def ended(self, task: Task, who: Who, start: Floats) -> None:
        """A transfer of these ranks, begun at ``start`` [s], ends now: note what it costs their next compute."""
        role, now = task.key[0], self.clock.now
        self._begun[role][task.op.stream][who] = np.inf
        self._earliest[role][task.op.stream][who] = np.inf
        self._least[role][task.op.stream][who] = -np.inf
        if isinstance(task.op, Collective):
            self._owed[role][who] += self.slowdown * self._busy(role, who, start, now)
        floor = min([now, *(float(column.min()) for column in self._begun[role].values())])
        runs = self._runs[role]
        while runs and runs[0].task.left == 0 and runs[0].end.max() <= floor:
            runs.popleft()

    def _busy(self, role: int, who: Who, start: Floats, now: float) -> Floats:
        """Seconds each rank's compute stream was busy from ``start`` to now."""
        busy = np.zeros(len(start))
        for run in reversed(self._runs[role]):
            ran_from, ran_to = run.start[who], run.end[who]
            busy += np.maximum(np.minimum(ran_to, now) - np.maximum(ran_from, start), 0.0)
            if ran_to.min() > -np.inf and np.all(ran_to <= start):
                break
        return busy

    def ran(self, task: Task, who: Who, start: Floats, end: Floats) -> None:
        """These ranks run an op of the compute stream from ``start`` to ``end`` [s]."""
        runs = self._runs[task.key[0]]
        run = next((run for run in reversed(runs) if run.task is task), None)
        if run is None:
            run = _Run(task, np.full(task.n, -np.inf), np.full(task.n, -np.inf))
            runs.append(run)
        run.start[who], run.end[who] = start, end

    def park(self, task: Task, who: Who) -> None:
        """Compute that is ready; :meth:`release` says when it may start."""
        role, op = task.key
        ready = task.ready[who]
        self._due[role][who], self._op[role][who] = ready, op
        self._over[role][who] = ready + (task.duration if task.duration.ndim == 0 else task.duration[who])

    def release(self, due: bool) -> list[tuple[OpKey, Ints, Floats]]:
        """Parked compute that may start, and the seconds it is lengthened by; asks to be woken for the rest.

        ``due``: everything that ends now has ended, so compute that is ready now may start.
        """
        released: list[tuple[OpKey, Ints, Floats]] = []
        quiet, now, next_due = self._quiet(), self.clock.now, np.inf
        for role, parked in enumerate(self._due):
            free = parked < np.maximum(self._horizon(role, quiet), quiet)
            if due:
                free |= parked <= now
            positions = np.flatnonzero(free)
            if len(positions):
                released += self._let_go(role, positions)
            next_due = min(next_due, float(parked.min(initial=np.inf)))
        if not released and next_due not in (np.inf, self._wake_at):
            self._wake_at = next_due
            self._wake = self.clock.call(next_due, self._woken, priority=RELEASE)
        return released

    def _let_go(self, role: int, positions: Ints) -> list[tuple[OpKey, Ints, Floats]]:
        ops, owed = self._op[role][positions], self._owed[role][positions]
        self._due[role][positions] = self._over[role][positions] = np.inf
        self._owed[role][positions] = 0.0
        if ops[0] == ops[-1] and not np.any(ops != ops[0]):
            return [((role, int(ops[0])), positions, owed)]
        return [((role, op), positions[ops == op], owed[ops == op]) for op in np.unique(ops).tolist()]

    def _quiet(self) -> float:
        """Nothing happens on any rank before this moment [s], except that parked ops start."""
        if self._wake is not None and self.clock.drop(self._wake):
            self._wake, self._wake_at = None, -1.0
        return min([self.clock.peek(), *(float(over.min(initial=np.inf)) for over in self._over)])

    def _woken(self) -> None:
        if self.clock.now == self._wake_at:  # else somebody released what this was for
            self._wake, self._wake_at = None, -1.0
            self.wake()

    def _horizon(self, role: int, quiet: float) -> Floats:
        """(n,) the earliest end of anything outstanding, per rank [s], where nobody arrives before ``quiet``."""
        horizon = np.full(self._sizes[role], np.inf)
        for stream, column in self._earliest[role].items():
            later = (self._least[role][stream] + quiet) * (1 - INSTANT) if quiet < np.inf else column
            np.minimum(horizon, np.maximum(column, later), out=horizon)
        return horizon
