"""Plays a Program whose ranks all run one list and always meet all together, a whole column of ranks at a time.

Then a transfer begins and ends at one moment for everybody, and whatever depends on an op of the compute stream begins
after *every* rank has begun that op: its start is the latest arrival. So the ops can be taken one after another, each
on all ranks at once, and only transfers need a clock: it runs ahead to the moment the last rank could begin the next
kernel, by when every transfer that a rank must pay for (:mod:`clustersim.engine.overlap`) has ended.

The rules are the executor's, and so are the results. It is what full sharding and plain data parallelism do, whose
programs it plays several times as fast.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.lanes import Lanes
from clustersim.engine.meetings import Site
from clustersim.engine.network import Loads
from clustersim.engine.rows import Rows
from clustersim.program import COMPUTE_STREAM, Compute, Op, Program, Serve, seconds

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Column: TypeAlias = Floats | float
"""Times of all ranks in order, or the one time they share [s]."""

# An op comes to a dozen calls on short columns: the ufuncs' own reductions save what the methods go through first.
_least, _most, _any = np.minimum.reduce, np.maximum.reduce, np.logical_or.reduce


def in_unison(program: Program, sites: tuple[Site, ...]) -> bool:
    """Whether all ranks run one list and every meeting is of all of them."""
    if len(program.roles) != 1 or any(len(site.sides) > 1 or len(site.ranks) > 1 for site in sites):
        return False
    n = program.world_size
    whole = all(site.ranks.shape[1] == n for site in sites)
    return whole and not any(isinstance(op, Serve) for op in program.roles[0].ops)


class Unison:
    """The run of one such Program; :meth:`run` plays it.

    Parameters
    ----------
    rows : collects what happened. progress : called with (ops finished, ops in all).
    """

    def __init__(
        self,
        program: Program,
        sites: tuple[Site, ...],
        loads: Loads,
        rows: Rows,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.role, self.rows, self.progress = program.roles[0], rows, progress
        self.ops = self.role.ops
        self.network = Lanes(loads, sites)
        self.site_of = {site.sides[0].key[1]: site for site in sites}
        self.n_events = self._n_done = 0
        self._needs, self._next = _order(self.ops)
        self._unmet = [len(needs) for needs in self._needs]
        self._end: list[Column] = [0.0] * len(self.ops)
        self._high: list[float] = [0.0] * len(self.ops)
        self._work = deque(i for i, needs in enumerate(self._needs) if not needs)
        self._bill = (
            _Bill(program.overlap_slowdown, program.world_size) if program.overlap_slowdown > 0 and sites else None
        )
        self._calls: list[tuple[float, int]] = []  # transfers that begin to move bytes: when, and the op
        self._begun: dict[int, tuple[Column, float]] = {}  # arrivals and start of transfers not over yet

    def run(self) -> None:
        """Play to the end."""
        held: _Held | None = None
        while True:
            while self._work:
                i = self._work.popleft()
                ready, high = self._ready(i)
                op = self.ops[i]
                if not isinstance(op, Compute):
                    self._begun[i] = ready, high
                    heappush(self._calls, (high + float(self.site_of[i].plans.latency[0]), i))
                elif self._bill and op.stream == COMPUTE_STREAM:
                    held = _Held(i, op, ready, high)
                else:
                    self._compute(i, ready, seconds(self.role, op))
            moment = self._moment()
            if held and self._bill and held.high < moment:
                self._charged(held, self._bill)
                held = None
            elif moment < np.inf:
                self._happen(moment)
            else:
                self.network.close()
                return

    def _ready(self, i: int) -> tuple[Column, float]:
        """When each rank could begin an op, and when the last one could [s]."""
        alike, column, high = 0.0, None, 0.0
        for need in self._needs[i]:
            end = self._end[need]
            if isinstance(end, float):
                alike = max(alike, end)
            elif column is None:
                column, high = end, self._high[need]
            elif end is not column:
                column, high = np.maximum(column, end), max(high, self._high[need])
        if column is None or alike >= high:
            return alike, alike
        if alike <= 0.0 or alike <= _least(column):
            return column, high
        return np.maximum(column, alike), high

    def _compute(self, i: int, start: Column, spent: Column) -> None:
        end = start + spent
        high = end if isinstance(end, float) else float(_most(end))
        self._over(i, start, start, end, high)

    def _charged(self, held: _Held, bill: _Bill) -> None:
        """An op of the compute stream, lengthened by what its rank owes."""
        owed = bill.owed(held.ready, held.high)
        spent = seconds(self.role, held.op)
        self._compute(held.i, held.ready, spent if owed is None else spent + owed)
        bill.ran(held.ready, self._end[held.i], self._high[held.i], self._begun)

    def _moment(self) -> float:
        """When something happens to a transfer next [s]."""
        first = self._calls[0][0] if self._calls else np.inf
        # What begins now is still a change of this instant, and shares are worked out once an instant.
        return first if first <= self.network.now else min(first, self.network.due())

    def _happen(self, moment: float) -> None:
        network = self.network
        over = network.pass_to(moment)
        self.n_events += len(over)
        while self._calls and self._calls[0][0] <= moment:
            _, i = heappop(self._calls)
            self.n_events += 1
            if not network.begin(self.site_of[i]):
                over.append(self.site_of[i].first)
        for transfer in sorted(over):
            i = network.sites[transfer].sides[0].key[1]
            arrivals, start = self._begun.pop(i)
            if self._bill:
                self._bill.due.append((start, moment))
            self._over(i, arrivals, start, moment, moment)

    def _over(self, i: int, ready: Column, start: Column, end: Column, high: float) -> None:
        self._end[i], self._high[i] = end, high
        self.rows.add_all(i, ready, start, end)
        for other in self._next[i]:
            self._unmet[other] -= 1
            if not self._unmet[other]:
                self._work.append(other)
        self._n_done += 1
        if self.progress:
            self.progress(self._n_done, len(self.ops))


class _Held(NamedTuple):
    """The next op of the compute stream, when each rank could begin it, and when the last one could [s]."""

    i: int
    op: Compute
    ready: Column
    high: float


def _order(ops: tuple[Op, ...]) -> tuple[list[list[int]], list[list[int]]]:
    """For each op, which it waits for, and which wait for it."""
    needs: list[list[int]] = []
    following: list[list[int]] = [[] for _ in ops]
    last: dict[str, int] = {}
    for i, op in enumerate(ops):
        before = last.get(op.stream)
        last[op.stream] = i
        mine = list(op.after) if len(op.after) < 2 else [*dict.fromkeys(op.after)]
        if before is not None and before not in mine:
            mine.append(before)
        needs.append(mine)
        for need in mine:
            following[need].append(i)
    return needs, following


class _Bill:
    """What hidden transfers cost compute: the first kernel a rank begins after one has ended is lengthened.

    Parameters
    ----------
    n : ranks, 1 where all keep the same time. due : start and end [s] of transfers that some rank has not paid for, in
        order of their ends.
    """

    def __init__(self, slowdown: float, n: int) -> None:
        self.slowdown = slowdown
        self.due: list[tuple[float, float]] = []
        self._before: Column = -np.inf  # when each rank began its latest run
        # Runs of the compute stream that a transfer may still have been beside, in order: rows of two tables.
        self._from, self._to = np.empty((_ROOM, n)), np.empty((_ROOM, n))
        self._last: list[float] = []

    def ran(self, start: Column, end: Column, last: float, begun: dict[int, tuple[Column, float]]) -> None:
        """Note a run and its ``last`` end; ``begun``: arrivals and start of the transfers that are not over [s]."""
        if len(self._last) == len(self._to):
            since = [at for _, at in begun.values()] + [at for at, _ in self.due]
            self._make_room(min(since, default=np.inf))
        self._before = start
        at = len(self._last)
        self._from[at], self._to[at] = start, end
        self._last.append(last)

    def _make_room(self, since: float) -> None:
        """Forget runs over before ``since``; a table still more than half full grows."""
        gone = bisect_right(self._last, since)
        kept = len(self._last) - gone
        room = len(self._to) if kept * 2 <= len(self._to) else 2 * len(self._to)
        for name in ("_from", "_to"):
            table = np.empty((room, self._to.shape[1]))
            table[:kept] = getattr(self, name)[gone : len(self._last)]
            setattr(self, name, table)
        self._last = self._last[gone:]

    def owed(self, ready: Column, high: float) -> Column | None:
        """Seconds by which each rank's kernel is longer that begins at ``ready``, the last at ``high`` [s]; None: 0."""
        if not self.due or self.due[0][1] > high:
            return None
        begun, over = np.array(self.due).T[:, :, None]
        # Who reached an end with the kernel before has paid with that one.
        paying = (ready >= over) & (self._before < over)
        low = ready if isinstance(ready, float) else _least(ready)
        due, self.due = self.due, [one for one in self.due if one[1] > low]
        if not _any(paying, None):
            return None
        runs = slice(bisect_right(self._last, min(start for start, _ in due)), len(self._last))
        # Transfers x runs x ranks, the latest run first: seconds that a run was beside a transfer.
        beside = np.minimum(self._to[runs][::-1], over[:, None])
        beside -= np.maximum(self._from[runs][::-1], begun[:, None])
        busy = np.add.reduce(np.maximum(beside, 0.0, out=beside), 1)
        busy *= self.slowdown
        owed: Floats = np.add.reduce(np.where(paying, busy, 0.0), 0)
        return float(owed[0]) if len(owed) == 1 else owed


_ROOM = 64
"""Runs a table has room for at first."""
