"""What happens inside a stretch, counted from when all are there: worked out once for all that are alike.

Each op is played as :mod:`clustersim.engine.play` would: it is ready when all that it waits for has ended on the rank,
a collective begins with the last of its group, and a kernel pays for what ran beside the kernels before it
(:mod:`clustersim.engine.bills`).
"""

from __future__ import annotations

from collections import deque
from operator import itemgetter
from typing import cast

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.program import COMPUTE_STREAM, Compute
from clustersim.engine.beside import around
from clustersim.engine.columns import Column, Piece, at, highest, item, one_number
from clustersim.engine.flows.loads import INSTANT
from clustersim.engine.planning import GroupPlans
from clustersim.engine.stretches import StretchTemplate


class StretchTimes(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The times of a stretch [s], from when each group begins it.

    Parameters
    ----------
    which : of each op the rows of ``times`` of when ranks are ready for it, begin and end it.
    times : (rows, ranks), or (rows, 1) where all ranks agree; and its ``rows``.
    low, high : (rows, groups), of the ranks of each group, or (rows, 1). mean : (rows,), over ranks.
    collectives : places of the collectives among the ops, and ``plans`` of each.
    begin, end : (collectives, groups), when each moves bytes. leave : when ranks have ended the last op, as a column.
    """

    which: tuple[tuple[int, int, int], ...]
    times: Floats
    rows: tuple[Floats, ...]
    low: Floats
    high: Floats
    mean: Floats
    collectives: tuple[int, ...]
    plans: tuple[GroupPlans, ...]
    begin: Floats
    end: Floats
    leave: Column

    @property
    def begun_apart(self) -> bool:
        """Whether each rank begins it when it is ready."""
        return self.collectives[0] > 0


class StretchPlans(GroupPlans, frozen=True, eq=False, dict=True):
    """A stretch as if it were one transfer that takes as long; where its ranks leave it one by one, as the first does.

    ``nbytes`` : all that its collectives move. ``inside`` : what happens; None where it cannot be played as one, or it
    hangs on the ranks' begins. ``collectives`` : plans of its collectives. ``to_a_kernel`` : its last op is one, which
    ranks end one by one. ``begun_apart`` : what happens by how far apart its ranks begin it.
    """

    inside: StretchTimes | None = None
    collectives: tuple[GroupPlans, ...] = ()
    to_a_kernel: bool = False
    begun_apart: BegunApart | None = None

    @property
    def sound(self) -> bool:
        """Whether it can be played as one."""
        return self.inside is not None or self.begun_apart is not None

    @property
    def left_apart(self) -> bool:
        """Whether the ranks of a group do not leave it together."""
        return self.to_a_kernel

    def played(self, ready: Column, start: Column, who: Piece) -> StretchTimes:
        """What happens to these ranks: ``ready``, ``start`` : when each of them, and the last of its group, is there
        [s]."""
        return self.begun_apart.of(ready, start, who) if self.begun_apart else cast("StretchTimes", self.inside)


def stretch_plans(template: StretchTemplate, plans: list[GroupPlans], meeting_of: Ints) -> StretchPlans:
    """A template on groups: ``plans`` of its collectives, and of each rank of the role its group."""
    if template.apart:
        least = np.sum([each.least for each in plans], axis=0)  # one after another, and everybody waits for all
        return _planned(plans, least, None, True, BegunApart(template, plans, meeting_of))
    inside = _StretchPlay(template, plans, meeting_of).inside()
    n = len(plans[0].load)
    least = np.broadcast_to(inside.low[inside.which[-1][2]], n) if inside else np.zeros(n)
    return _planned(plans, least, inside, isinstance(template.ops[-1], Compute))


def _planned(
    plans: list[GroupPlans],
    least: Floats,
    inside: StretchTimes | None,
    to_a_kernel: bool,
    begun_apart: BegunApart | None = None,
) -> StretchPlans:
    """``least`` : no rank of a group leaves it sooner [s]."""
    first = plans[0]
    n = len(first.load)
    moved = np.sum([each.nbytes for each in plans], axis=0)
    fast = np.full(n, np.inf)
    numbers = np.zeros(n), moved, fast, least, least
    return StretchPlans(first.request, first.each, first.load, *numbers, inside, tuple(plans), to_a_kernel, begun_apart)


KNOWN = 16
"""Ways to begin a stretch that are kept in mind: a run soon comes to one, or to none that it had."""

LAST_BITS = 4
"""So many of the last bits of a moment two ways to begin may differ by: as sums do of the same in another order."""


class BegunApart:
    """What happens inside a stretch that each rank begins when it is ready: by how long before the last of its group.

    Worked out anew where ranks begin it as they have not before.
    """

    def __init__(self, template: StretchTemplate, plans: list[GroupPlans], meeting_of: Ints) -> None:
        self._asked = template, plans, meeting_of
        self._known: list[tuple[Floats, StretchTimes]] = []
        self._as_plans: dict[int, StretchPlans] = {}

    def of(self, ready: Column, start: Column, who: Piece) -> StretchTimes:
        """What happens where these ranks are ``ready``, and the last of their groups at ``start`` [s]; of others it
        says nothing."""
        lead = np.subtract(ready, start)
        near = LAST_BITS * np.spacing(highest(start))
        for k, (known, inside) in enumerate(self._known):
            if (np.abs(at(known, who) - lead) <= near).all():
                if k:
                    self._known.insert(0, self._known.pop(k))
                return inside
        template, plans, meeting_of = self._asked
        entry = np.zeros(len(meeting_of))
        entry[slice(None) if who is None else who] = lead
        inside = cast("StretchTimes", _StretchPlay(template, plans, meeting_of, entry).inside())
        self._known = [(entry, inside), *self._known[: KNOWN - 1]]
        return inside

    def plans(self, plans: StretchPlans, inside: StretchTimes) -> StretchPlans:
        """``plans`` with what happens."""
        known = self._as_plans.get(id(inside))
        if known is None:
            known = self._as_plans[id(inside)] = msgspec.structs.replace(plans, inside=inside)
        return known


class _StretchPlay:
    """One play of a template. ``entry`` : when each rank is ready, where they begin it apart [s]."""

    def __init__(
        self, template: StretchTemplate, plans: list[GroupPlans], meeting_of: Ints, entry: Floats | None = None
    ) -> None:
        self.template, self.plans, self.meeting_of = template, plans, meeting_of
        self.n = len(meeting_of)
        self.order = np.argsort(meeting_of, kind="stable")
        self.groups = len(plans[0].load)
        ops = template.ops
        self.kernels = [k for k, op in enumerate(ops) if isinstance(op, Compute) and op.stream == COMPUTE_STREAM]
        self.calls = [k for k, op in enumerate(ops) if isinstance(op, Compute) and op.stream != COMPUTE_STREAM]
        self.collectives = [k for k, op in enumerate(ops) if not isinstance(op, Compute)]
        self.above, self.below = self._places()
        nowhere = np.zeros(self.n) if entry is None else entry
        self.ready = [nowhere] * len(ops)
        self.start = [nowhere] * len(ops)
        self.end = [nowhere] * len(ops)
        self.begin: list[Floats] = []
        self.over: list[Floats] = []
        self.owing = [
            k
            for k in self.collectives
            if template.slowdown > 0 and self.below[k] > self.above[k] + 1 and k not in (0, len(ops) - 1)
        ]
        self.paid: dict[int, Bools] = {k: np.zeros(self.n, dtype=np.bool_) for k in self.owing}
        self.settled = 0  # of them, the first so many, for which all ranks have paid

    def _places(self) -> tuple[list[int], list[int]]:
        """Of each op the last kernel before it, and the first that waits for it, as places among kernels."""
        place = {k: p for p, k in enumerate(self.kernels)}
        return around(self.template.needs, [place.get(k, -1) for k in range(len(self.template.ops))])

    def most(self, column: Floats) -> Floats:
        """(groups,) the most of each group."""
        latest: Floats = column[self.order].reshape(self.groups, -1).max(axis=1)
        return latest

    def inside(self) -> StretchTimes | None:
        """The times; None where something is still owed at the end."""
        queues = deque(self.collectives), deque(self.calls)
        for place, k in enumerate([*self.kernels, None]):
            # What a kernel may have to pay for is played before it; each queue has what is first before first.
            while before := [queue for queue in queues if queue and self.above[queue[0]] < place]:
                self._other(min(before, key=itemgetter(0)).popleft())
            if k is not None:
                self._kernel(place, k)
        if not all(paid.all() for paid in self.paid.values()):
            return None
        return self._told()

    def _other(self, k: int) -> None:
        """What is no kernel."""
        spent = self.template.spent[k]
        if spent is None:
            self._collective(k)
        else:
            self.ready[k] = self.start[k] = ready = self._ready(k)
            self.end[k] = ready + spent

    def _ready(self, k: int) -> Floats:
        needs = self.template.needs[k]
        ready = self.end[needs[0]] if needs else self.ready[k]
        for need in needs[1:]:
            end = self.end[need]
            if end is not ready and (end > ready).any():
                ready = end if (end >= ready).all() else np.maximum(ready, end)
        return ready

    def _collective(self, k: int) -> None:
        plans = self.plans[len(self.begin)]
        self.ready[k] = ready = self._ready(k)
        start = self.most(ready)
        begin = start + plans.latency
        over = begin + plans.moving
        self.begin.append(begin)
        self.over.append(over)
        self.start[k] = start[self.meeting_of]
        if np.array_equal(self.start[k], ready):
            self.start[k] = ready
        self.end[k] = over[self.meeting_of]

    def _kernel(self, place: int, k: int) -> None:
        self.ready[k] = self.start[k] = ready = self._ready(k)
        spent = cast("Floats | float", self.template.spent[k])
        owed = self._owed(place, ready)
        end = ready + spent
        self.end[k] = end if owed is None else ready + (spent + owed)

    def _owed(self, place: int, ready: Floats) -> Floats | None:
        """What ranks must pay at this kernel [s]; None for nothing."""
        total: Floats | None = None
        late = ready * (1 + INSTANT)
        before = np.ones(self.n, dtype=np.bool_)  # who has paid for all before on the stream
        # Who has paid for one has paid for all before it: those that everybody has paid for come first.
        while self.settled < len(self.owing) and self.paid[self.owing[self.settled]].all():
            self.settled += 1
        for queued in range(self.settled, len(self.owing)):
            k = self.owing[queued]
            if self.above[k] >= place or not before.any():
                break
            paid = self.paid[k]
            pays = before & ~paid & (self.end[k] <= late)
            before = paid | pays
            if pays.any():
                self.paid[k] = before
                due = np.where(pays, self._beside(k, place), 0.0)
                total = due if total is None else total + due
        return None if total is None else total * self.template.slowdown

    def _beside(self, k: int, place: int) -> Floats:
        """Seconds that kernels of each rank ran beside a collective."""
        start, end = self.start[k], self.end[k]
        beside = np.zeros(self.n)
        for kernel in self.kernels[self.above[k] + 1 : place]:
            beside += np.maximum(np.minimum(end, self.end[kernel]) - np.maximum(start, self.start[kernel]), 0.0)
        return beside

    def _told(self) -> StretchTimes:
        rows: dict[int, int] = {}
        table: list[Floats] = []
        which = []
        for times in zip(self.ready, self.start, self.end, strict=True):
            numbers = []
            for column in times:
                row = rows.get(id(column))
                if row is None:
                    row = rows[id(column)] = len(table)
                    table.append(column)
                numbers.append(row)
            which.append((numbers[0], numbers[1], numbers[2]))
        values = np.stack(table)
        by_group = values[:, self.order].reshape(len(values), self.groups, -1)
        low, high = by_group.min(axis=2), by_group.max(axis=2)
        mean = values.mean(axis=1)
        if (values == values[:, :1]).all():
            values, low, high = values[:, :1].copy(), low[:, :1].copy(), high[:, :1].copy()
        begin, end = np.stack(self.begin), np.stack(self.over)
        of_each, plans = tuple(which), tuple(self.plans)
        leave = one_number(values[of_each[-1][2]]) if values.shape[1] > 1 else item(values[of_each[-1][2]], 0)
        met = tuple(self.collectives), plans, begin, end
        return StretchTimes(of_each, values, tuple(values), low, high, mean, *met, leave)
