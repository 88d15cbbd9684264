"""Ops that all ranks have ended: somebody is told of them, and their columns are let go of.

A long run has more columns than fit in memory, and nobody asks for most of them again: what waited for an op was told
when it ended, and only bills look back (:meth:`clustersim.engine.bills.Bills.asked`). So while the rest is played, what
is over becomes the rows and blocks of the Timeline, which take far less (:mod:`clustersim.engine.rows`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from clustersim.engine.bills import Bills
from clustersim.engine.order import OpTask
from clustersim.engine.rows import RunRows
from clustersim.engine.stretches import Shortened, n_ops

LONG = 2**26
KEPT = 2**23
"""Ranks x ops from which a run is long, and those that are played, from there on, before their columns are let go
of: where all fit, it only takes time."""


class FinishedOps:
    """Counts the ops that all ranks have ended, and keeps what they did.

    Parameters
    ----------
    short, lists : what is played, and its tasks by role. bills : None for none.
    progress : called with (ops finished, ops in all): over all plays, of no op twice.

    ``after_first_step`` : called, if anything, once all ops of the first of several steps are over.
    """

    def __init__(
        self,
        short: Shortened,
        lists: list[list[OpTask]],
        bills: Bills | None,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._short = short
        self._lists = lists
        self._bills = bills
        self._progress = progress
        self._total, self._told = sum(len(role.ops) for role in short.whole.roles), 0
        steps = Counter(op.step for role in short.program.roles for op in role.ops)
        self._first_step = min(steps, default=0)
        self._in_first_step = steps[self._first_step] if len(steps) > 1 else 0
        self.after_first_step: Callable[[], None] | None = None
        self.reset()

    @property
    def several_steps(self) -> bool:
        """Whether there are more steps than one."""
        return self._in_first_step > 0

    def reset(self) -> None:
        """Nothing has been played."""
        self._n = 0
        self._to_come = self._in_first_step
        self._cells = KEPT - LONG
        self._rows, self._kept = RunRows(self._short), [0] * len(self._lists)

    def __call__(self, task: OpTask) -> None:
        """All ranks have ended this one."""
        ops = n_ops(task.op)
        self._n += ops
        self._cells += task.n * ops
        if self._cells >= KEPT:
            self._cells = 0
            self._keep()
        if self._progress and self._n > self._told:
            self._told = self._n
            self._progress(self._n, self._total)
        if self._to_come and task.op.step == self._first_step:
            self._to_come -= 1
            if not self._to_come and self.after_first_step:
                self.after_first_step()

    def _keep(self) -> None:
        """Keep the first ops of each role, as far as they are over and no bill asks for them."""
        for r, role_tasks in enumerate(self._lists):
            begin = k = self._kept[r]
            while (
                k < len(role_tasks)
                and not role_tasks[k].left
                and not (self._bills and self._bills.asked(role_tasks[k]))
            ):
                k += 1
            self._rows.add(role_tasks[begin:k], brief=True)
            self._kept[r] = k

    def rows(self) -> RunRows:
        """What all ranks did, once everything has been played."""
        for tasks, n_kept in zip(self._lists, self._kept, strict=True):
            self._rows.add(tasks[n_kept:], brief=n_kept > 0)
        return self._rows
