"""Compute ops in a row: nobody but the next one waits for what comes between them, so they are played at one blow.

A worker's forward and backward are hundreds of ops of which each waits only for the one before it. Where ranks run at
paces of their own that would be hundreds of steps of the executor per rank and training step; as a chain it is one. The
sums are the same, one after another, so the times are the same to the bit.
"""

from __future__ import annotations

from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.tasks import Task, Who
from clustersim.program import Compute, Serve

Floats: TypeAlias = npt.NDArray[np.float64]

LONGEST = 256
"""Ops of one chain at most: its times are kept until the last rank has ended it."""


class Chain:
    """Tasks of one role, each but the first waiting for the one before it and nothing else.

    Parameters
    ----------
    tasks : in order. times : (n_ranks, tasks + 1) float [s], when a rank was ready and when each op ended.
    """

    def __init__(self, tasks: list[Task]) -> None:
        self.tasks, self.n = tasks, tasks[0].n
        self.times = np.zeros((0, 0))
        self.left = self.n
        inside = {id(task) for task in tasks}
        self.out = [(k, o) for k, task in enumerate(tasks) for o in task.next if id(o) not in inside]

    @cached_property
    def durations(self) -> Floats:
        """(n_ranks, tasks) float [s]."""
        found = np.empty((self.n, len(self.tasks)))
        for k, task in enumerate(self.tasks):
            found[:, k] = task.duration
        return found

    def play(self, who: Who | int, ready: Floats | float) -> Floats:
        """(..., tasks + 1) when each op of these ranks begins, and the last one ends."""
        if not len(self.times):
            self.times = np.zeros((self.n, len(self.tasks) + 1))
        rows: Floats = np.concatenate([np.asarray(ready)[..., None], self.durations[who]], axis=-1)
        np.add.accumulate(rows, axis=-1, out=rows)
        self.times[who] = rows
        self.left -= 1 if rows.ndim == 1 else len(rows)
        return rows

    def close(self) -> list[Task]:
        """The tasks, with their columns, once all ranks have played; the chain forgets them."""
        columns = list(np.ascontiguousarray(self.times.T))
        for k, task in enumerate(self.tasks):
            task.ready = task.start = columns[k]
            task.end, task.left = columns[k + 1], 0
        self.times = np.zeros((0, 0))
        del self.durations
        return self.tasks


def chains(tasks: list[Task]) -> None:
    """Find the chains in a role's tasks, and set :attr:`Task.chain` of the first of each."""
    run: list[Task] = []
    for task in tasks:
        if run and _follows(task, run[-1]) and len(run) < LONGEST:
            run.append(task)
            continue
        _set(run)
        run = [task] if isinstance(task.op, Compute) and not isinstance(task.op, Serve) else []
    _set(run)


def _follows(task: Task, before: Task) -> bool:
    """Whether a task waits for the one before it in the list and for nothing else."""
    plain = isinstance(task.op, Compute) and not isinstance(task.op, Serve)
    return plain and task.n_needs == 1 and any(task is other for other in before.next)


def _set(run: list[Task]) -> None:
    if len(run) > 1:
        run[0].chain = Chain(run)
