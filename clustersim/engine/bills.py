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

from clustersim.engine.loads import INSTANT
from clustersim.engine.order import Column, Task, watch
from clustersim.engine.pieces import Piece, at, positions, size
from clustersim.engine.sites import Site, Standing

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


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
        # Of each role, collectives over for somebody and not yet paid by everybody; of each rank, how many; of each
        # stream, how many watched collectives each rank is through; and whole kernels that wait for collectives.
        self._open: list[list[Task]] = [[] for _ in self._sizes]
        self._unpaid = [np.zeros(n, dtype=np.int32) for n in self._sizes]
        self._through = [
            {name: np.zeros(n, dtype=np.int32) for name in streams}
            for streams, n in zip(self._streams, self._sizes, strict=True)
        ]
        self.held: list[dict[Task, None]] = [{} for _ in self._sizes]

    def settled(self, kernel: Task) -> bool:
        """Whether every collective its bill may depend on is over on all ranks, or known to be over when."""
        return not any(one.left for one in kernel.soft)

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
        many = len(unpaid) if isinstance(unpaid, np.ndarray) else 1
        due: list[tuple[Column, Column, npt.NDArray[np.bool_] | bool]] = []
        for one in reversed(self._open[r]):
            if left <= 0:
                break
            if not one.above < kernel.place <= one.below:
                continue
            end = at(one.end, who)
            new = end > early if one.left == 0 else (end > early) & (end < np.inf)
            paying = new & (end <= late)
            left -= int(np.count_nonzero(new)) if isinstance(new, np.ndarray) else many * bool(new)
            if paying.any() if isinstance(paying, np.ndarray) else paying:
                self._unpaid[r][some] -= paying
                due.append((at(one.start, who), end, paying))
        return self._beside(r, kernel.place, who, many, due) * self.slowdown if due else 0.0

    def _beside(
        self, r: int, place: int, who: Piece, n: int, due: list[tuple[Column, Column, npt.NDArray[np.bool_] | bool]]
    ) -> Column:
        """Seconds of kernels before ``place`` that ran beside collectives: their start, end, and which of ``n`` ranks
        pay."""
        since = min(start if isinstance(start, float) else float(np.minimum.reduce(start)) for start, _, _ in due)
        runs: list[tuple[Column, Column]] = []
        for k in range(place - 1, -1, -1):
            run = self._kernels[r][k]
            ran_from, ran_to = at(run.start, who), at(run.end, who)
            if (ran_to if isinstance(ran_to, float) else np.maximum.reduce(ran_to)) <= since:
                break
            runs.append((ran_from, ran_to))
        if not runs:
            return 0.0
        if all(isinstance(column, float) for pair in (*runs, *(one[:2] for one in due)) for column in pair):
            return sum(max(min(b, e) - max(a, s), 0.0) for s, e, _ in due for a, b in runs)
        # Collectives x runs x ranks.
        ran, of, pays = np.empty((2, len(runs), n)), np.empty((2, len(due), 1, n)), np.empty((len(due), n))
        for k, pair in enumerate(runs):
            ran[0, k], ran[1, k] = pair
        for k, (start, end, paying) in enumerate(due):
            of[0, k, 0], of[1, k, 0], pays[k] = start, end, paying
        busy = np.minimum(ran[1], of[1])
        busy -= np.maximum(ran[0], of[0])
        np.maximum(busy, 0.0, out=busy)
        total: Floats = np.add.reduce(np.add.reduce(busy, 1) * pays, 0)
        return total

    def safe(self, kernel: Task, who: Piece, ready: Column, quiet: float) -> Floats:
        """Of each of these ranks, a time before which nothing ends that it may have to pay for [s].

        ``ready`` : when they could begin the kernel; what is later is late enough. ``quiet`` : nobody arrives anywhere,
        and nothing on the clock happens, before [s].
        """
        r = kernel.key[0]
        if isinstance(who, int):
            who = slice(who, who + 1, 1)
        safe = np.full(kernel.n if who is None else size(who), np.inf)
        wanted = float(np.max(ready)) * (1 + INSTANT)
        for last in kernel.soft:
            if not last.left:
                continue
            through = self._through[r][last.op.stream][slice(None) if who is None else who]
            stream = self._streams[r][last.op.stream]
            low, high = int(np.minimum.reduce(through)), int(np.maximum.reduce(through))
            for k in range(low, min(high, last.ordinal) + 1):
                if low == high:
                    np.minimum(safe, self._earliest(stream[k], who, wanted, quiet), out=safe)
                    continue
                mask = through == k
                if mask.any():
                    some = positions(who, kernel.n)[mask]
                    safe[mask] = np.minimum(safe[mask], self._earliest(stream[k], some, wanted, quiet))
        return safe * (1 - INSTANT)

    def _earliest(self, one: Task, who: Piece, wanted: float, quiet: float) -> Floats | float:
        """The collective that these ranks come to next on a stream does not end before; no better than ``wanted``."""
        if not one.lone:
            return quiet
        site, side = one.meets[0]
        standing = self.standing[site.first]
        of = side.meeting_of[slice(None) if who is None else who]
        if of[0] == of[-1] and (len(site.ranks) == 1 or (of == of[0]).all()):
            of = of[:1]
        begins = _begins(standing, of, quiet)
        least = _of(standing.latency, of) + _of(standing.moving, of)
        found: Floats = np.maximum(begins + least, quiet)
        if np.minimum.reduce(found) > wanted:
            return found
        if standing.missing is None or standing.missing[of].any():
            found = np.maximum(found, self._held_up(one, of, quiet) + least)
        elif len(of) == 1:
            found = np.maximum(found, self.on_its_way(site, int(of[0])))
        return found

    def _held_up(self, one: Task, meetings: Ints, quiet: float) -> Floats:
        """These meetings do not begin before: a missing member must first be through what it waits for itself."""
        site, side = one.meets[0]
        held = np.zeros(len(meetings))
        if len(site.sides) > 1 or not side.each:
            return held
        members = side.order.reshape(-1, side.each)[meetings]
        away = np.asarray(one.unmet > 0 if isinstance(one.unmet, int) else one.unmet[members] > 0)
        for need in one.before:
            if not need.lone or not need.left or not need.meets:
                continue
            its_site, its_side = need.meets[0]
            standing = self.standing[its_site.first]
            everyone = np.arange(len(its_site.ranks))
            ends = _begins(standing, everyone, quiet) + standing.latency + standing.moving
            if standing.missing is not None:
                ends = np.where(standing.end < np.inf, 0.0, ends)
            np.maximum(held, np.where(away, ends[its_side.meeting_of[members]], 0.0).max(axis=1), out=held)
        return held


def _begins(standing: Standing, meetings: Ints, quiet: float) -> Floats:
    """These meetings do not begin before, where nobody arrives before ``quiet`` [s]."""
    if standing.missing is None:
        return np.full(len(meetings), quiet)
    start = standing.start[meetings]  # type: ignore[index]
    found: Floats = np.where(standing.missing[meetings] > 0, np.maximum(start, quiet), start)
    return found


def _of(column: Column, which: Ints | int) -> Column:
    return column if isinstance(column, float) else column[which]
