"""What waits for what, worked out once before anything is played: ops as tasks.

A task waits for the op before it on its stream and for the ops it names in ``after``. Two more things follow from the
order of a list alone.

*Bills*: a collective that runs beside compute costs the rank's next kernel time (:mod:`clustersim.engine.bills`). All
kernels of a rank run one after another, so what a collective can be beside is a stretch of that order: kernels after
its last kernel ancestor (``above``) and before its first kernel descendant (``below``). Where that stretch is empty, as
it is for a layer's tensor-parallel collectives, nothing is ever owed and nobody needs to watch it. And the collectives
that a kernel's bill may depend on end, on each stream, with the last one whose ``above`` lies before the kernel.

*Lookahead*: the least time from an op to anything that others could notice. So long a piece of a column may wait for
more ranks to come.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.program import (
    COMPUTE_STREAM,
    Collective,
    Compute,
    Op,
    Program,
    Role,
    Serve,
    least_seconds,
    seconds,
)
from clustersim.engine.beside import around
from clustersim.engine.columns import Column, full
from clustersim.engine.pairs import OpKey
from clustersim.engine.sites import Site, SiteSide

if TYPE_CHECKING:
    from clustersim.engine.chains import Chain


class OpTask(msgspec.Struct, eq=False, gc=False):
    """One op on the ranks of its role.

    Of the program: ``n`` ranks; ``needs``, how many tasks each rank waits for; ``before`` and ``next``, what it waits
    for and who waits for it; ``meets``, where its ranks meet others, and its part there; ``lone``, whether all of them
    meet in that one place; ``chain``, those that are played with it.

    Of bills: ``place`` of a kernel among those of its rank, -1 for other ops; ``above`` and ``below``, places of the
    last kernel before a collective and of the first after it; ``watched``, whether a kernel can run beside it, and its
    ``ordinal`` among the watched of its stream; ``soft``, the collectives that a kernel's bill may depend on, the last
    of each stream; ``low`` and ``high``, when the first and the last rank have ended it, once all have; ``idle``, how
    long a rank's compute stream has stood still in all until its start [s], while a bill may ask for it: None for as
    long as before the kernel before it.

    Of looking ahead: ``at_least`` is :attr:`least`, once anybody has asked, the same in every play; ``open``, how many
    must be looked at before it.

    Of a play: ``ready``, ``start``, ``end`` as columns; ``unmet``, needs still open, one number or (n,); ``left``,
    ranks that have not ended it; ``spent``, seconds, while some ranks still need them; ``look``, how long a piece may
    wait for others, ``waiting`` pieces that do, and when they are ``due`` [s]; ``gate``, the meetings through which all
    goes that others could notice, if there are such: nobody is noticed before the last of a meeting.
    """

    key: OpKey
    op: Op
    role: Role
    n: int
    left: int
    needs: int = 0
    next: list[OpTask] = []
    before: list[OpTask] = []
    meets: list[tuple[Site, SiteSide]] = []
    lone: bool = False
    chain: Chain | None = None
    place: int = -1
    above: int = -1
    below: int = 0
    ordinal: int = 0
    watched: bool = False
    soft: tuple[OpTask, ...] = ()
    look: float = 0.0
    gate: SiteSide | None = None
    ready: Column = 0.0
    start: Column = 0.0
    end: Column = 0.0
    unmet: Ints | int = 0
    low: float = np.inf
    high: float = np.inf
    due: float = np.inf
    idle: Column | None = None
    spent: Column | None = None
    waiting: list[Ints | slice | int] | None = None
    at_least: float = -1.0
    open: int = 0

    def reset(self) -> None:
        """Nothing has been played."""
        self.ready = self.start = self.end = 0.0
        self.unmet = self.needs
        self.left = self.n
        self.low = self.high = self.due = np.inf
        self.idle = self.spent = self.waiting = None
        if self.chain is not None:
            self.chain.reset()

    def split(self) -> Ints:
        """From now on, what each rank still waits for is counted by itself."""
        if isinstance(self.unmet, int):
            self.unmet = np.full(self.n, self.unmet)
            self.ready = full(self.n, self.ready) if isinstance(self.ready, float) else self.ready.copy()
        return self.unmet

    @property
    def seconds(self) -> Column:
        """What the op takes, without what is owed [s]."""
        if self.spent is None:
            spent = seconds(self.role, cast(Compute, self.op))
            if isinstance(spent, np.ndarray) and spent.size != 1:
                self.spent = spent
            else:  # of a lone rank, too: a number is added up sooner than a column of one
                self.spent = float(np.asarray(spent).item())
        return self.spent

    @property
    def stood(self) -> Column:
        """``idle``, where it is known [s]."""
        return 0.0 if self.idle is None else self.idle

    @property
    def least(self) -> float:
        """No rank ends it sooner after it is ready [s]."""
        if self.at_least < 0.0:
            self.at_least = self._least()
        return self.at_least

    def _least(self) -> float:
        if isinstance(self.op, Compute):
            return least_seconds(self.role, self.op)
        return min((site.plans.shortest for site, _ in self.meets), default=0.0) if self.lone else 0.0


def tasks(program: Program, sites: tuple[Site, ...]) -> list[list[OpTask]]:
    """One list of tasks per role: each knows who waits for it and where its ranks meet others."""
    lists = []
    for r, role in enumerate(program.roles):
        n = len(role.ranks)
        role_tasks = [OpTask((r, i), op, role, n, n) for i, op in enumerate(role.ops)]
        last: dict[str, int] = {}
        for i, op in enumerate(role.ops):
            before = last.get(op.stream)
            last[op.stream] = i
            needs = list(op.after) if len(op.after) < 2 else [*dict.fromkeys(op.after)]
            if before is not None and before not in needs and not isinstance(op, Serve):
                needs.append(before)
            role_tasks[i].needs = role_tasks[i].unmet = len(needs)
            for need in needs:
                role_tasks[need].next.append(role_tasks[i])
                role_tasks[i].before.append(role_tasks[need])
        lists.append(role_tasks)
    for site in sites:
        for side in site.sides:
            task = lists[side.key[0]][side.key[1]]
            task.meets.append((site, side))
            task.lone = len(task.meets) == 1 and side.everyone
    return lists


def watch(role_tasks: list[OpTask]) -> dict[str, list[OpTask]]:
    """Find what may be billed in one role's tasks; returns the watched collectives of each stream, in order."""
    kernels = [t for t in role_tasks if t.op.stream == COMPUTE_STREAM and type(t.op) is Compute]
    for place, task in enumerate(kernels):
        task.place = place
    needs = [[task_before.key[1] for task_before in task.before] for task in role_tasks]
    above, below = around(needs, [task.place for task in role_tasks])
    watched: dict[str, list[OpTask]] = {}
    for i, task in enumerate(role_tasks):
        if isinstance(task.op, Collective) and not _within(task.op) and below[i] > above[i] + 1:
            streams = watched.setdefault(task.op.stream, [])
            task.watched, task.above, task.below, task.ordinal = True, above[i], below[i], len(streams)
            streams.append(task)
    _soften(kernels, watched)
    return watched


def _within(op: Collective) -> bool:
    """Whether another collective's kernel makes this one, too, and takes the SMs for both."""
    return op.kernel is not None and op.kernel.within


def _soften(kernels: list[OpTask], watched: dict[str, list[OpTask]]) -> None:
    """Tell kernels which of the watched collectives their bills may depend on."""
    position = dict.fromkeys(watched, 0)
    for kernel in kernels:
        soft = []
        for name, stream in watched.items():
            while position[name] < len(stream) and stream[position[name]].above < kernel.place:
                position[name] += 1
            if position[name] and stream[position[name] - 1].below > kernel.place:
                soft.append(stream[position[name] - 1])
        kernel.soft = tuple(soft)


class LookAhead:
    """Sets every task's ``look``: no transfer on the clock begins, and nothing watched is reached, sooner after it is
    ready. These are shortest ways from what is noticed back to all tasks. Nobody waits in a circle, so at first one
    walk from the last tasks back finds them. Of more that is noticed they only become shorter: what another play has on
    the clock besides is all that is looked at again (Dijkstra's way, as where there is a circle).

    lists : the tasks of each role. unasked : roles of which nobody asks, and through which nobody is noticed later than
    at once.
    """

    def __init__(self, lists: list[list[OpTask]], unasked: frozenset[int] = frozenset()) -> None:
        self._lists = lists
        self._unasked = unasked
        self._tasks = [task for r, role_tasks in enumerate(lists) if r not in unasked for task in role_tasks]
        self._at_once: list[OpTask] = []  # a server's ops are noticed at once, and they are a hundred thousand
        self._heap: list[tuple[float, OpKey, OpTask]] = []
        self._known: dict[int, float] = {}
        self._clocked: set[int] = set()
        self.settled = 0  # how many tasks were looked at
        for task in self._tasks:
            task.look = np.inf

    def clock(self, clocked: set[int]) -> None:
        """``clocked`` : the first meetings of the sites on the clock; those of before are among them."""
        fresh = clocked - self._clocked
        first_time = not self._clocked
        self._clocked |= fresh
        for task in self._tasks:
            if first_time and (task.watched or isinstance(task.op, Serve)):
                self.reach(task, 0.0)
            for site, _ in task.meets:
                # Who comes late makes it end late for those who watch.
                if site.first in fresh or (first_time and task.watched):
                    self.reach_all(site, 0.0)
        if not (first_time and self._walk_back()):
            self.settle()
        for task in reversed(self._tasks):
            task.gate = _gate(task)

    def _walk_back(self) -> bool:
        """Look at every task once, after all that waits for it and all whom these meet; whether that can be had."""
        noticed = [*self._at_once]
        known = self._known.copy()
        if self._look_once() == len(self._tasks):
            self._at_once.clear()
            return True
        self._known = known
        for task in self._tasks:
            task.look = np.inf
        for task in noticed:
            task.look = 0.0
        return False

    def _look_once(self) -> int:
        """The walk; returns how many tasks it came to."""
        ready: list[OpTask] = []
        looked = 0
        for task in self._tasks:
            task.open = len(task.next)
            if not task.open:
                ready.append(task)
        to_come: dict[int, int] = {}  # sides of a site that nobody has looked at, by its first meeting
        while ready:
            task = ready.pop()
            looked += 1
            look = min([following.look for following in task.next], default=np.inf) + task.least
            if look < task.look:
                task.look = look
            for site, _ in task.meets:
                n_sides = len(site.sides) if not self._unasked else len(self._who_meet(site))
                if n_sides > 1:
                    task.open += 1
                    to_come[site.first] = to_come.get(site.first, n_sides) - 1
                    self._known[site.first] = min(self._known.get(site.first, np.inf), look)
            if not task.open:
                ready += _free(task)
                continue
            for site, _ in task.meets:
                if to_come.get(site.first) == 0:
                    ready += self._met(site)
        self.settled += looked
        return looked

    def _met(self, site: Site) -> list[OpTask]:
        """All who meet have been looked at; returns what can be, now."""
        free = []
        for task in self._who_meet(site):
            task.look = min(task.look, self._known[site.first])
            task.open -= 1
            free += [] if task.open else _free(task)
        return free

    def reach(self, task: OpTask, look: float) -> None:
        """Something is noticed so long after a task is ready [s]."""
        if look < task.look:
            task.look = look
            if look:
                heappush(self._heap, (look, task.key, task))
            else:
                self._at_once.append(task)

    def reach_all(self, site: Site, look: float) -> None:
        """The same of all who meet."""
        if look < self._known.get(site.first, np.inf):
            self._known[site.first] = look
            for task in self._who_meet(site):
                self.reach(task, look)

    def _who_meet(self, site: Site) -> list[OpTask]:
        """The tasks that meet at a site, but for those of whom nobody asks."""
        unasked = self._unasked
        return [self._lists[side.key[0]][side.key[1]] for side in site.sides if side.key[0] not in unasked]

    def settle(self) -> None:
        """Go back from all that was reached."""
        while self._at_once or self._heap:
            self.settled += 1
            look, task = (0.0, self._at_once.pop()) if self._at_once else heappop(self._heap)[::2]
            for task_before in task.before if look == task.look else ():
                if task_before.look > look or task_before.meets:
                    sooner = look + task_before.least
                    self.reach(task_before, sooner)
                    for site, _ in task_before.meets:
                        self.reach_all(site, sooner)


def unasked(program: Program, sites: tuple[Site, ...], clocked: set[int]) -> frozenset[int]:
    """Roles of one rank, such as servers, whose every meeting is on the clock: they have no pieces that could wait, and
    whoever meets them is noticed at once. ``clocked`` : sites, by their first meeting."""
    lone = {r for r, role in enumerate(program.roles) if len(role.ranks) == 1}
    return frozenset(lone - {side.key[0] for site in sites if site.first not in clocked for side in site.sides})


def _free(task: OpTask) -> list[OpTask]:
    """What a task waits for, as far as it was the last to be looked at before it."""
    free = []
    for task_before in task.before:
        task_before.open -= 1
        if not task_before.open:
            free.append(task_before)
    return free


def _gate(task: OpTask) -> SiteSide | None:
    """See :class:`OpTask`; those of all that comes next are known."""
    if not isinstance(task.op, Compute):
        return task.meets[0][1] if task.lone else None
    if len(task.next) == 1 and not isinstance(task.op, Serve):
        return task.next[0].gate
    gates = [following.gate for following in task.next if following.gate or following.look < np.inf]
    alike = gates and all(gate and gate.meeting_of is gates[0].meeting_of for gate in gates)  # type: ignore[union-attr]
    return gates[0] if alike and not isinstance(task.op, Serve) else None
