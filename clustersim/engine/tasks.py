"""Ops in play: what each still waits for, and who waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.meetings import Side, Site
from clustersim.engine.pairs import OpKey
from clustersim.program import Compute, Op, Program, Role, Serve, seconds

if TYPE_CHECKING:
    from clustersim.engine.chains import Chain

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Who: TypeAlias = Ints | slice
"""Positions in a role; ``ALL`` for all of its ranks, which numpy handles without copying."""

ALL = slice(None)


class Task:
    """One op on the ranks of its role, while it is being played.

    key, op : the op. next : tasks that wait for it. meets : where its ranks meet others, and its part there.
    n_needs : ops each rank waits for. left : ranks that have not ended it. duration : scalar or per rank [s].
    chain : the ops that are played with this one, where it is the first of a chain.

    Columns have an element per rank of the role and exist from the first rank that could become ready until the last
    one has ended, so that a long program on many ranks does not hold them all.

    ready : [s], latest end among the dependencies met so far. start, end : [s]. unmet : dependencies still to end.
    """

    def __init__(self, key: OpKey, op: Op, role: Role) -> None:
        self.key, self.op, self.n = key, op, len(role.ranks)
        self.n_needs = 0
        self.next: list[Task] = []
        self.meets: list[tuple[Site, Side]] = []
        self.left = self.n
        self.chain: Chain | None = None
        self.ready = self.start = self.end = np.zeros(0)
        self.unmet = np.zeros(0, dtype=np.int32)
        self.duration: Floats = np.asarray(seconds(role, op) if isinstance(op, Compute) else 0.0, dtype=np.float64)

    def open(self) -> None:
        """Make the columns, once."""
        if not len(self.ready):
            self.ready, self.start, self.end = np.zeros(self.n), np.zeros(self.n), np.zeros(self.n)
            self.unmet = np.full(self.n, self.n_needs, dtype=np.int32)

    def taking_part(self) -> Who:
        """The ranks that really do something: all, or the positions with a group or a peer."""
        if isinstance(self.op, Compute) or any(side.everyone for _, side in self.meets):
            return ALL
        part = np.zeros(self.n, dtype=np.bool_)
        for _, side in self.meets:
            part |= side.meeting_of >= 0
        return ALL if part.all() else np.flatnonzero(part)

    def close(self) -> None:
        """Drop the columns."""
        self.ready = self.start = self.end = np.zeros(0)
        self.unmet = np.zeros(0, dtype=np.int32)


def tasks(program: Program, sites: tuple[Site, ...]) -> list[list[Task]]:
    """One list of tasks per role: each knows which tasks wait for it and where its ranks meet others."""
    lists = []
    for r, role in enumerate(program.roles):
        mine = [Task((r, i), op, role) for i, op in enumerate(role.ops)]
        last: dict[str, int] = {}
        for i, op in enumerate(role.ops):
            before = [last[op.stream]] if op.stream in last and not isinstance(op, Serve) else []
            needs = sorted({*op.after, *before})
            last[op.stream] = i
            mine[i].n_needs = len(needs)
            for need in needs:
                mine[need].next.append(mine[i])
        lists.append(mine)
    for site in sites:
        for side in site.sides:
            lists[side.key[0]][side.key[1]].meets.append((site, side))
    return lists
