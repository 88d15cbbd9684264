"""From times per rank to the Timeline's rows: ranks that did an op at exactly the same times share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload
from weakref import ref

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.blocks import Block, Columns, Meetings, RankSets, columns, joined
from clustersim.core.blocks import Column as BlockColumn
from clustersim.core.program import Compute
from clustersim.core.timeline import LinkUse
from clustersim.core.topology import Topology
from clustersim.engine import laid_out
from clustersim.engine.columns import Column, item
from clustersim.engine.flows.loads import Loads
from clustersim.engine.order import OpTask
from clustersim.engine.pairs import OpKey
from clustersim.engine.stretches import Shortened, Stretch

WIDE = 4
"""Ranks from which an op whose ranks differ is kept as a block: finding ranks that agree costs more than it saves."""

DEEP = 4
"""Columns that one is counted from, at most: more would take longer to add up than they save."""


class RunRows:
    """What happened, collected role by role: rows, and blocks where many ranks differ."""

    def __init__(self, short: Shortened) -> None:
        self.firsts: list[int] = np.cumsum([0, *(len(role.ops) for role in short.whole.roles)]).tolist()[:-1]
        self._places = short.places
        self._book = RankSets(short.whole.world_size)
        self._parts: list[Columns] = []
        self._blocks: list[Block] = []
        self._kept: dict[int, dict[int, tuple[ref[Floats], BlockColumn]]] = {}
        self._ranks: dict[bytes, Ints] = {}
        self._spent: dict[bytes, Floats] = {}

    def row_of(self, key: OpKey) -> int:
        """Index in :attr:`Timeline.ops` of a role's op; of a stretch, of its first."""
        r, i = key
        return self.firsts[r] + self._places[r][i]

    def add(self, tasks: list[OpTask], *, brief: bool = False) -> None:
        """Keep what the ranks of a role did: make blocks, or rows, of its finished tasks, and let go of the columns
        they were played with, which are not written to any more. ``brief`` : in as few bytes as can be."""
        role = tasks[0].key[0] if tasks else 0
        drafts = _ColumnDrafts(self._kept.get(role, {}))
        agreed = []
        apart = []
        for task in tasks:
            if type(task.op) is Stretch:
                self._lay_out(task)
                continue
            who = _taking_part(task)
            ready = task.ready
            start = task.start
            end = task.end
            if task.n == 1:
                ready, start, end = item(ready, 0), item(start, 0), item(end, 0)
            if who is None and isinstance(ready, float) and isinstance(start, float) and isinstance(end, float):
                agreed.append((self.row_of(task.key), ready, start, end))
            elif who is None or len(who):
                apart.append((task, who, drafts.numbers(task, who)))
        if agreed:
            op, ready, start, end = (np.array(column) for column in zip(*agreed, strict=True))
            self._parts.append((op, np.full(len(op), self._book.id(tasks[0].role.ranks)), ready, start, end))
        columns_made = drafts.made()
        for task, who, which in apart:
            if brief and who is None and isinstance(task.op, Compute):
                columns_made[which[2]] = self._since(task, columns_made[which[1]], columns_made[which[2]])
            self._block(task, who, (columns_made[which[0]], columns_made[which[1]], columns_made[which[2]]))
            task.ready = task.start = task.end = 0.0
            task.spent = None
        if brief:
            self._kept[role] = drafts.alive(columns_made)

    def _lay_out(self, task: OpTask) -> None:
        """Keep the ops of a stretch."""
        first = self.row_of(task.key)
        start = laid_out.begun(task)
        agreed = laid_out.agreed(task, start)
        if agreed:
            op = np.arange(first, first + len(agreed[0]))
            self._parts.append((op, np.full(len(op), self._book.id(task.role.ranks)), *agreed))
        else:
            for block in laid_out.blocks(task, start, first):
                self._keep(block)
        task.ready = task.start = task.end = 0.0

    def _block(self, task: OpTask, who: Ints | None, columns: tuple[BlockColumn, BlockColumn, BlockColumn]) -> None:
        """Keep an op."""
        ranks = task.role.ranks
        if who is not None:
            ranks = self._ranks.setdefault(ranks[who].tobytes(), ranks[who])  # equal ones are one
        self._keep(Block(self.row_of(task.key), ranks, columns))

    def _keep(self, block: Block) -> None:
        """As rows where that is less."""
        ready, start, end = block.columns
        if len(block.ranks) < WIDE or not (end.low < end.high or start.low < start.high or ready.low < ready.high):
            self._parts.append(self._book.rows(block))
        else:
            self._blocks.append(block)

    def _since(self, task: OpTask, start: BlockColumn, end: BlockColumn) -> BlockColumn:
        """When a kernel ended, as its start and what it took, where that gives the same bits."""
        if end.since is not None or len(end.values) < task.n or end.of is not None or start.depth >= DEEP:
            return end
        spent = np.atleast_1d(task.seconds)
        if not np.array_equal(start.all + spent, end.values):
            return end  # it paid a bill
        return BlockColumn(self._spent.setdefault(spent.tobytes(), spent), None, end.low, end.high, end.mean, start)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """By op."""
        return tuple(sorted(self._blocks, key=lambda block: block.op))

    def columns(self) -> tuple[tuple[Ints, ...], Columns]:
        """Rank sets, and rows sorted by op, then start, then set."""
        return tuple(self._book.sets), joined(self._parts)


class _ColumnDrafts:
    """The distinct columns of a role's ops. Ops share them: what is ready of one is the end of another.

    ``kept`` : columns already made of arrays that are still played with, by identity.
    """

    def __init__(self, kept_columns: dict[int, tuple[ref[Floats], BlockColumn]]) -> None:
        self._values: list[Floats] = []
        self._meetings: list[Meetings | None] = []
        self._known: dict[object, int] = {}
        self._kept = kept_columns
        self._done: dict[int, BlockColumn] = {}

    def numbers(self, task: OpTask, who: Ints | None) -> tuple[int, int, int]:
        """Which columns the ready, start and end of an op are."""
        numbers_of = self._known
        numbers = []
        for which, column in enumerate((task.ready, task.start, task.end)):
            # By identity: the tasks hold their columns, so no other can take the place of one. No time is negative.
            key = column if isinstance(column, float) else -id(column) if who is None else (task.key, which)
            number = numbers_of.get(key)
            if number is None:
                number = numbers_of[key] = len(self._values)
                before = self._kept.get(id(column)) if who is None else None
                if before and before[0]() is column:
                    self._done[number] = before[1]
                self._meetings.append(_meetings(task, column) if which and who is None else None)
                many = column if isinstance(column, np.ndarray) else np.array([column])
                self._values.append(many if who is None or len(many) == 1 else many[who])
            numbers.append(number)
        return numbers[0], numbers[1], numbers[2]

    def made(self) -> list[BlockColumn]:
        """The columns by number."""
        built = columns(self._values, self._meetings)
        for number, column in self._done.items():
            built[number] = column
        return built

    def alive(self, built: list[BlockColumn]) -> dict[int, tuple[ref[Floats], BlockColumn]]:
        """What the next ops may share."""
        entries = [(ref(value), column) for value, column in zip(self._values, built, strict=True)]
        self._values = []
        return {id(values): entry for entry in entries if (values := entry[0]()) is not None}


def _meetings(task: OpTask, column: Column) -> Meetings | None:
    """Of an op whose ranks meet in groups: a place of each meeting in the column, and the meeting of each rank; None
    for others."""
    if len(task.meets) != 1 or not task.meets[0][1].gathers:
        return None
    side = task.meets[0][1]
    apart = isinstance(column, np.ndarray) and len(column) < task.n  # a number for each meeting already
    return slice(None) if apart else side.leaders, side.meeting_of


def _taking_part(task: OpTask) -> Ints | None:
    """Positions of the ranks that really do something: those with a group or a peer; None for all."""
    if task.lone or isinstance(task.op, Compute) or any(side.everyone for _, side in task.meets):
        return None
    part = np.zeros(task.n, dtype=np.bool_)
    for _, side in task.meets:
        part |= side.meeting_of >= 0
    return None if part.all() else np.flatnonzero(part)


def link_use(loads: Loads, segments: tuple[Ints, Floats, Floats, Floats], op: Ints, load: Ints) -> LinkUse:
    """What the transfers did to links; ``op``, ``load`` : (T,) of each transfer."""
    topology = loads.topology
    return LinkUse(
        *segments,
        transfer_op=op,
        transfer_load=load,
        loads=tuple(loads.pairs),
        link_names=_LinkNames(topology),
        link_bandwidth=topology.link_bandwidth,
        link_kinds=topology.link_kinds,
        changing=tuple(loads.changing.tolist()),
    )


class _LinkNames(Sequence[str]):
    """Names made when asked for: a cluster has a hundred thousand links, a figure shows ten."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology

    def __len__(self) -> int:
        return self._topology.n_links

    @overload
    def __getitem__(self, link: int) -> str: ...
    @overload
    def __getitem__(self, link: slice) -> Sequence[str]: ...
    def __getitem__(self, link: int | slice) -> str | Sequence[str]:
        chosen = range(len(self))[link]
        return self._topology.link_name(chosen) if isinstance(chosen, int) else [self[i] for i in chosen]
