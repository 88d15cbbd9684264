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

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.order import Column, Task, watch
from clustersim.engine.sites import Standing
from clustersim.engine.slots import INSTANT

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Piece: TypeAlias = Ints | int | None
"""Some ranks of a role, by position: sorted positions, one of them, or None for all."""


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
        self.reset({})

    def reset(self, standing: dict[int, Standing]) -> None:
        """Nothing has been played. ``standing`` : sites by their first meeting."""
        self.standing = standing
        # Of each role: collectives over for somebody and not yet paid by everybody; of each stream, how many watched
        # collectives each rank is through; and whole kernels that wait for collectives.
        self._open: list[list[Task]] = [[] for _ in self._sizes]
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
        self._through[r][task.op.stream][slice(None) if who is None else who] = task.ordinal + 1
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
        if not self._open[r] or not kernel.place:
            return 0.0
        before = at(self._kernels[r][kernel.place - 1].start, who)
        total: Column = 0.0
        late, early = ready * (1 + INSTANT), before * (1 + INSTANT)
        for one in self._open[r]:
            if not one.above < kernel.place <= one.below:
                continue
            end = at(one.end, who)
            paying = (end <= late) & (end > early)
            if not (paying if isinstance(paying, bool | np.bool_) else paying.any()):
                continue
            busy = self._beside(r, kernel.place, who, at(one.start, who), end)
            if isinstance(paying, np.ndarray):
                busy = np.where(paying, busy, 0.0)
            total = total + busy
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

    def safe(self, kernel: Task, who: Ints, quiet: float) -> Floats:
        """Of each of these ranks, a time before which nothing ends that it may have to pay for [s].

        ``quiet`` : nobody arrives anywhere, and nothing on the clock happens, before [s].
        """
        r = kernel.key[0]
        safe = np.full(len(who), np.inf)
        for last in kernel.soft:
            if not last.left:
                continue
            through = self._through[r][last.op.stream][who]
            stream = self._streams[r][last.op.stream]
            low, high = int(through.min()), int(through.max())
            for k in range(low, min(high, last.ordinal) + 1):
                mask = through == k if low < high else slice(None)
                if low == high or mask.any():  # type: ignore[union-attr]
                    safe[mask] = np.minimum(safe[mask], self._earliest(stream[k], who[mask], quiet))
        return safe * (1 - INSTANT)

    def _earliest(self, one: Task, who: Ints, quiet: float) -> Floats | float:
        """The collective that these ranks come to next on a stream does not end before."""
        if not one.lone:
            return quiet
        site, side = one.meets[0]
        standing = self.standing[site.first]
        meeting = side.meeting_of[who]
        least: Column = 0.0
        for part in (standing.latency, standing.moving):
            least = least + (part if isinstance(part, float) else part[meeting])
        if standing.missing is None:
            return quiet + least
        start = np.asarray(standing.start)[meeting]
        begins = np.where(standing.missing[meeting] > 0, np.maximum(start, quiet), start)
        found: Floats = np.maximum(begins + least, quiet)
        return found
