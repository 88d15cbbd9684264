"""What hidden communication costs compute.

A collective that runs beside compute takes SMs and memory bandwidth from it. The Program says how much
(``overlap_slowdown``); the bill comes when the collective has ended: the rank's next kernel (op of the compute stream)
is lengthened by that share of the time both were busy.

So a kernel's bill is a function of columns: of the collectives that ended between the start of the kernel before it
and its own, and of what ran beside them. Nothing is noted when a collective ends; a kernel looks for what it owes when
it starts. It only must not start before everything is known that could end before: where some collectives it may depend
on (``Task.soft``) are not over yet, only those ranks start that are ready before their earliest possible end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.meetings import Site
from clustersim.engine.order import Column, Task, watch
from clustersim.engine.sites import Standing
from clustersim.engine.slots import INSTANT

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
    return column if who is None or isinstance(column, float) else column[who]


class Bills:
    """What every rank owes.

    Parameters
    ----------
    slowdown : the price: seconds for each second that a collective ran beside a kernel. lists : the tasks of each role.
    """

    def __init__(self, slowdown: float, lists: list[list[Task]]) -> None:
        self.slowdown = slowdown
        self._streams = [watch(mine) for mine in lists]
        self._kernels = [[task for task in mine if task.place >= 0] for mine in lists]
        self._sizes = [mine[0].n if mine else 0 for mine in lists]
        self.reset({}, lambda site, meeting: 0.0)

    def reset(self, standing: dict[int, Standing], on_its_way: Callable[[Site, int], float]) -> None:
        """Nothing has been played.

        ``standing`` : sites by their first meeting. ``on_its_way`` : before when a transfer under way does not end [s].
        """
        self.standing, self.on_its_way = standing, on_its_way
        # Of each role: collectives over for somebody and not yet paid by everybody; of each
        # rank, how many; of each stream, how many watched collectives each rank is through; and whole kernels that wait for collectives.
        self._open: list[list[Task]] = [[] for _ in self._sizes]
        self._unpaid = [np.zeros(n, dtype=np.int32) for n in self._sizes]
        self._through = [
            {name: np.zeros(n, dtype=np.int32) for name in streams}
            for streams, n in zip(self._streams, self._sizes, strict=True)
        ]
        self.held: list[dict[Task, None]] = [{} for _ in self._sizes]

    def settled(self, kernel: Task) -> bool:
        """Whether every collective its bill may depend on is over on all ranks, or known to be over when."""
        for one in kernel.soft:
            if one.left:
                return False
        return True

    def ended(self, task: Task, who: Piece) -> list[Task]:
        """A watched collective's end is known for these ranks; returns whole kernels that waited for it to settle."""
        r = task.key[0]
        some = slice(None) if who is None else who
        self._through[r][task.op.stream][some] = task.ordinal + 1
        self._unpaid[r][some] += 1
        mine = self._open[r]
        if task not in mine:
            mine.append(task)
        if task.left:
            return []
        task.high = task.end if isinstance(task.end, float) else float(task.end.max())
        free = [kernel for kernel in self.held[r] if self.settled(kernel)]
        for kernel in free:
            del self.held[r][kernel]
        return free

    def over(self, kernel: Task) -> None:
        """All ranks have run a kernel: forget the collectives that everybody has paid."""
        mine = self._open[kernel.key[0]]
        if mine:
            first = kernel.start if isinstance(kernel.start, float) else float(kernel.start.min())
            if any(one.high <= first for one in mine):
                self._open[kernel.key[0]] = [one for one in mine if one.high > first]

    def owed(self, kernel: Task, who: Piece, ready: Column) -> Column:
        """Seconds by which a kernel that these ranks begin at ``ready`` is longer."""
        r = kernel.key[0]
        some = slice(None) if who is None else who
        unpaid = self._unpaid[r][some]
        left = int(np.add.reduce(unpaid)) if isinstance(unpaid, np.ndarray) else int(unpaid)
        if not left:
            return 0.0
        before = at(self._kernels[r][kernel.place - 1].start, who) if kernel.place else -np.inf
        late, early = ready * (1 + INSTANT), before * (1 + INSTANT)
        total: Column = 0.0
        for one in reversed(self._open[r]):
            if left <= 0:
                break
            if not one.above < kernel.place <= one.below:
                continue
            end = at(one.end, who)
            new = end > early if one.left == 0 else (end > early) & (end < np.inf)
            paying = new & (end <= late)
            if isinstance(new, np.ndarray):
                left -= int(np.count_nonzero(new))
                if not paying.any():
                    continue
            else:
                left -= len(unpaid) * bool(new) if isinstance(unpaid, np.ndarray) else int(new)
                if not (paying.any() if isinstance(paying, np.ndarray) else paying):
                    continue
            self._unpaid[r][some] -= paying
            busy = self._beside(r, kernel.place, who, at(one.start, who), end)
            total = total + (np.where(paying, busy, 0.0) if isinstance(paying, np.ndarray) else busy)
        return total * self.slowdown

    def _beside(self, r: int, place: int, who: Piece, start: Column, end: Column) -> Column:
        """Seconds between ``start`` and ``end`` that the kernels before ``place`` ran."""
        busy: Column = 0.0
        plain = isinstance(start, float) and isinstance(end, float)
        for k in range(place - 1, -1, -1):
            run = self._kernels[r][k]
            ran_from, ran_to = at(run.start, who), at(run.end, who)
            if plain and isinstance(ran_from, float) and isinstance(ran_to, float):
                if ran_to <= start:
                    break
                busy = busy + max(min(ran_to, end) - max(ran_from, start), 0.0)  # type: ignore[type-var]
                continue
            after = ran_to > start
            if not (after if isinstance(after, bool | np.bool_) else after.any()):
                break
            part = np.minimum(ran_to, end) - np.maximum(ran_from, start)
            busy = busy + np.maximum(part, 0.0)
        return busy

    def safe(self, kernel: Task, who: Piece, quiet: float) -> Floats:
        """Of each of these ranks, a time before which nothing ends that it may have to pay for [s].

        ``quiet`` : nobody arrives anywhere, and nothing on the clock happens, before [s].
        """
        r = kernel.key[0]
        if isinstance(who, int):
            who = slice(who, who + 1, 1)
        safe = np.full(kernel.n if who is None else size(who), np.inf)
        for last in kernel.soft:
            if not last.left:
                continue
            through = self._through[r][last.op.stream][slice(None) if who is None else who]
            stream = self._streams[r][last.op.stream]
            low, high = int(np.minimum.reduce(through)), int(np.maximum.reduce(through))
            if low == high:
                if low <= last.ordinal:
                    np.minimum(safe, self._earliest(stream[low], who, quiet), out=safe)
                continue
            some = positions(who, kernel.n)
            for k in range(low, min(high, last.ordinal) + 1):
                mask = through == k
                if mask.any():
                    safe[mask] = np.minimum(safe[mask], self._earliest(stream[k], some[mask], quiet))
        return safe * (1 - INSTANT)

    def _earliest(self, one: Task, who: Piece, quiet: float) -> Floats | float:
        """The collective that these ranks come to next on a stream does not end before."""
        if not one.lone:
            return quiet
        site, side = one.meets[0]
        standing = self.standing[site.first]
        meeting = side.meeting_of[slice(None) if who is None else who]
        if meeting[0] == meeting[-1] and (len(standing.site.ranks) == 1 or (meeting == meeting[0]).all()):
            return self._earliest_of(standing, int(meeting[0]), quiet)
        least = _of(standing.latency, meeting) + _of(standing.moving, meeting)
        if standing.missing is None:
            return quiet + least
        start = np.asarray(standing.start)[meeting]
        begins = np.where(standing.missing[meeting] > 0, np.maximum(start, quiet), start)
        found: Floats = np.maximum(begins + least, quiet)
        return found

    def _earliest_of(self, standing: Standing, m: int, quiet: float) -> float:
        """One meeting does not end before."""
        latency, moving = _of(standing.latency, m), _of(standing.moving, m)
        if standing.missing is None:
            return float(quiet + latency + moving)
        start = float(standing.start[m])  # type: ignore[index]
        if standing.missing[m] > 0:
            return float(max(start, quiet) + latency + moving)
        if start + latency + moving > quiet:
            return float(start + latency + moving)
        return max(quiet, self.on_its_way(standing.site, m))


def _of(column: Column, which: Ints | int) -> Column:
    return column if isinstance(column, float) else column[which]
