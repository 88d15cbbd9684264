"""Pieces of columns: some ranks of a role, and the agenda of those that wait."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.order import Column, Task

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Piece: TypeAlias = Ints | slice | int | None
"""Some ranks of a role, by position: sorted positions, an even stretch of them, one, or None for all."""


def size(who: Ints | slice | int) -> int:
    """How many ranks."""
    if isinstance(who, slice):
        return len(range(who.start, who.stop, who.step))
    return 1 if isinstance(who, int) else len(who)


def positions(who: Piece, n: int) -> Ints:
    """The positions of a piece of ``n`` ranks."""
    if isinstance(who, np.ndarray):
        return who
    if isinstance(who, slice):
        return np.arange(who.start, who.stop, who.step)
    return np.arange(n) if who is None else np.array([who])


def at(column: Column, who: Piece) -> Column:
    """A column's times for these ranks."""
    return column if who is None or not isinstance(column, np.ndarray) else column[who]


def lowest(column: Column) -> float:
    """The least of a column."""
    return np.minimum.reduce(column, axis=None) if isinstance(column, np.ndarray) else column


def highest(column: Column) -> float:
    """The most of a column."""
    return np.maximum.reduce(column, axis=None) if isinstance(column, np.ndarray) else column


def item(column: Column, k: int) -> float:
    """The ``k``-th of a column."""
    return column.item(k) if isinstance(column, np.ndarray) else column


def later(one: Column, other: Column) -> Column:
    """The later of two columns; one of them itself where it is."""
    if isinstance(one, float):
        if isinstance(other, float):
            return one if one >= other else other
        one, other = other, one
    if isinstance(other, float):
        if other <= 0.0 or other <= np.minimum.reduce(one):
            return one
        return other if other >= np.maximum.reduce(one) else np.maximum(one, other)
    return one if one is other else np.maximum(one, other)


def one_number(column: Column) -> Column:
    """The one number of a column that has the same everywhere, or else the column."""
    if not isinstance(column, np.ndarray):
        return column
    return column[0].item() if column[0] == column[-1] and (column == column[0]).all() else column


EARLY = 1 - 1e-9
"""A piece is played this much, relatively, before it could matter: columns add in another order than the clock."""

_NEVER = 1e300
"""Later than anything the clock knows of: pieces that nobody will ever notice are played at the end."""


class Agenda:
    """Pieces by the earliest moment at which they could matter to others."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, Task, Piece]] = []
        self._n = 0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def first(self) -> float:
        """When the first one could matter [s]."""
        return min(self._heap[0][0], _NEVER)

    def add(self, key: float, kernel: bool, task: Task, who: Piece) -> None:
        """A piece that matters at ``key`` [s]; of one moment, kernels come last."""
        self._n += 1
        heappush(self._heap, (key, kernel, self._n, task, who))

    def pop(self) -> tuple[float, bool, Task, Piece]:
        """The first one: key, whether it is a kernel, task and ranks."""
        key, kernel, _, task, who = heappop(self._heap)
        return key, kernel, task, who

    def wait(self, task: Task, who: Ints | slice | int) -> None:
        """These ranks are ready, and nobody notices before the task's lookahead has passed."""
        ready = at(task.ready, who)
        due = (float(ready if isinstance(ready, float) else np.minimum.reduce(ready)) + task.look) * EARLY
        if task.waiting is None or due < task.due:
            task.due = due
            self.add(due, False, task, None)
        if task.waiting is None:
            task.waiting = []
        task.waiting.append(who)

    def together(self, task: Task) -> Piece:
        """All ranks of a task that have come while it waited."""
        waiting, task.waiting = task.waiting or [], None
        if len(waiting) == 1:
            return waiting[0]
        who = np.sort(np.concatenate([positions(one, task.n) for one in waiting]))
        if len(who) < task.n:
            return who
        task.ready = one_number(task.ready)
        return None
