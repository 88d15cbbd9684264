"""Chains: kernels that follow one another, played at once.

A forward pass is a hundred kernels of which each waits for the one before it alone, and which nobody else waits for.
When the first is ready, the times of all of them are known: they are its start and running sums of what each takes.
Nor does any but the first pay for hidden communication: whatever had ended before it, the first has paid for.
"""

from __future__ import annotations

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.program import Compute
from clustersim.engine.columns import Column, Piece
from clustersim.engine.order import OpTask


class Chain:
    """Kernels after a ``first`` one: ``tasks``, in order.

    Where ranks come to it piece by piece, ``_ends`` has a row for the first and each but the last: when each rank has
    run it; and ``_spent`` a row for each of ``tasks``: what it takes [s].
    """

    __slots__ = ("_ends", "_spent", "first", "tasks")

    def __init__(self, first: OpTask) -> None:
        self.first = first
        self.tasks: list[OpTask] = []
        self._ends: Floats | None = None
        self._spent: Floats | None = None

    def reset(self) -> None:
        """Nothing has been played."""
        self._ends = self._spent = None

    def run(self, who: Piece, end: Column) -> Column:
        """These ranks have run the first one: when they have run all."""
        if who is not None:
            return self._piece(who, end)
        self.first.start, self.first.end = self.first.ready, end
        for task in self.tasks:
            task.ready = task.start = end
            end = task.end = end + task.seconds
        return end

    def _piece(self, who: Piece, end: Column) -> Column:
        if self._ends is None or self._spent is None:
            n = self.first.n
            self._ends = np.full((len(self.tasks), n), np.inf)
            self._spent = np.stack([np.broadcast_to(task.seconds, n) for task in self.tasks])
            self.first.start = self.first.ready
            self._name(list(self._ends))
        times = np.empty((len(self.tasks) + 1, *np.shape(end)))
        times[0], times[1:] = end, self._spent[:, who]
        np.add.accumulate(times, axis=0, out=times)
        self._ends[:, who] = times[:-1]
        last: Floats = times[-1]
        return last if times.ndim > 1 else float(last)

    def _name(self, ends: list[Floats]) -> None:
        """Rows as columns of the tasks: the end of one is the start of the next."""
        for task, end in zip([self.first, *self.tasks[:-1]], ends, strict=True):
            task.end = end
        for task, before in zip(self.tasks, ends, strict=True):
            task.ready = task.start = before

    def over(self) -> list[OpTask]:
        """All ranks are through: the tasks before the last, which are over now, too."""
        if self._ends is not None:
            self._name([row.copy() for row in self._ends])  # a row that is kept would keep all
        self._ends = self._spent = None
        for task in (before := [self.first, *self.tasks[:-1]]):
            task.left, task.spent = 0, None
        return before


def link(lists: list[list[OpTask]]) -> None:
    """Find the chains of each role's tasks."""
    for role_tasks in lists:
        heads: dict[int, OpTask] = {}
        for task in role_tasks:
            before = task.before[0] if task.needs == 1 else None
            if before is None or len(before.next) > 1 or task.soft or not _both_kernels(before, task):
                continue
            head = heads[task.key[1]] = heads.get(before.key[1], before)
            head.chain = head.chain or Chain(head)
            head.chain.tasks.append(task)


def _both_kernels(first: OpTask, second: OpTask) -> bool:
    return type(first.op) is type(second.op) is Compute and first.op.stream == second.op.stream
