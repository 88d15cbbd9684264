"""From times per rank to the Timeline's rows: ranks that did an op at exactly the same times share a row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, overload
from weakref import ref

import msgspec
import numpy as np

from clustersim.collectives.base import Group
from clustersim.collectives.islands import n_islands
from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.blocks import Block, Columns, Meetings, RankSets, columns, joined
from clustersim.core.blocks import Column as BlockColumn
from clustersim.core.mesh import Mesh
from clustersim.core.op_infos import InfoPass, RepeatedInfos
from clustersim.core.program import Collective, Compute, Op, Program, Role, Send
from clustersim.core.repeated import RepeatedOps
from clustersim.core.timeline import LinkUse, OpInfo
from clustersim.core.topology import Topology
from clustersim.engine import laid_out
from clustersim.engine.columns import Column, item
from clustersim.engine.flows.loads import Loads
from clustersim.engine.inside import StretchPlans
from clustersim.engine.order import OpTask
from clustersim.engine.pairs import OpKey
from clustersim.engine.sites import Site
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


def infos(short: Shortened, rows: RunRows, sites: tuple[Site, ...], topology: Topology, mesh: Mesh) -> Sequence[OpInfo]:
    """What each op was, role by role."""
    homes = [_homes(short, r) for r in range(len(short.whole.roles))]
    transfers = _TransferDetails(short, rows, topology, mesh)
    for site, place in _each(short, sites, homes):
        transfers.add(site, place)
    return _of_ops(short.whole, rows.firsts, homes, transfers.by_place())


class _TransferDetails:
    """What a viewer is told of the transfers of each op, site by site."""

    def __init__(self, short: Shortened, rows: RunRows, topology: Topology, mesh: Mesh) -> None:
        self._short = short
        self._rows = rows
        self._topology = topology
        self._mesh = mesh
        self._details: dict[OpKey, dict[str, Any]] = {}
        self._groups: dict[OpKey, list[Ints]] = {}
        self._partners: dict[OpKey, set[int]] = {}
        self._islands: dict[int, int] = {}  # by ranks: ops share their groups
        self._known: dict[tuple[int, int, int], dict[str, Any]] = {}  # by plans, members and islands
        self._alike: dict[tuple[int, int], dict[str, Any]] = {}  # of ops that meet nowhere else, by plans and groups

    def add(self, site: Site, place: OpKey) -> None:
        """Of a site whose first op is at this place of the Program."""
        shape = id(site.plans), id(site.ranks)
        alone = len(site.sides) == 1 and site.sides[0].everyone
        if alone and shape in self._alike:
            self._details[place] = self._alike[shape]
            return
        detail = self._of_site(site)
        if _is_pair(site):
            self._of_both(site, detail)
        elif alone:
            groups = {"n_groups": len(site.ranks), "groups": site.ranks}
            self._details[place] = self._alike[shape] = detail | groups
        else:
            self._of_sides(site, detail.copy())

    def _of_site(self, site: Site) -> dict[str, Any]:
        """:func:`_detail`, once for all sites of which it is the same."""
        ranks = id(site.ranks)
        if site.plans.each[0].algorithm == "nvls_tree" and ranks not in self._islands:
            self._islands[ranks] = n_islands(Group(self._topology, self._mesh.gpus[site.ranks[0]]))
        kind = id(site.plans), site.ranks.shape[1], self._islands.get(ranks, 1)
        if kind not in self._known:
            self._known[kind] = _detail(site, kind[2])
        return self._known[kind]

    def _of_both(self, site: Site, detail: dict[str, Any]) -> None:
        """Of a send and its recv that meet nobody elsewhere."""
        facts = {**detail, "n_groups": len(site.ranks), "groups": site.ranks}
        for side, partner in (site.sides, site.sides[::-1]):
            meets = (self._rows.row_of(partner.key),)
            self._details[self._short.place(side.key)] = {**facts, "meets": meets}

    def _of_sides(self, site: Site, detail: dict[str, Any]) -> None:
        """Of ops that meet others, here or elsewhere."""
        for side in site.sides:
            key = self._short.place(side.key)
            if side.lone:  # a server's op meets one client's
                meets = (self._rows.row_of(site.sides[0].key),)
                self._details[key] = {**detail, "n_groups": 1, "groups": site.ranks[side.meeting_of], "meets": meets}
                continue
            op_detail = self._details.setdefault(key, detail if len(site.sides) == 1 else detail.copy())
            op_detail["n_groups"] += len(site.ranks)
            op_detail["lower_bound"] = min(op_detail["lower_bound"], detail["lower_bound"])
            self._groups.setdefault(key, []).append(site.ranks)
            if len(site.sides) > 1:
                self._partners.setdefault(key, set()).update(self._rows.row_of(side.key) for side in site.sides)

    def by_place(self) -> dict[OpKey, dict[str, Any]]:
        """Of each op of the Program that has transfers; groups and partners of all its sites are put together here."""
        for key, groups in self._groups.items():
            detail = self._details[key]
            detail["groups"] = groups[0] if len(groups) == 1 else np.concatenate(groups)
            if len(self._partners.get(key, ())) > 1:
                own = self._rows.firsts[key[0]] + key[1]
                detail["meets"] = tuple(sorted(self._partners[key] - {own}))
        return self._details


def _is_pair(site: Site) -> bool:
    """Whether a send and its recv meet here alone: all ranks of both ops come."""
    return site.plans.request.kind == "send" and len(site.sides) == 2 and all(side.everyone for side in site.sides)


def _of_ops(
    program: Program, firsts: Sequence[int], homes: list[Ints], details: dict[OpKey, dict[str, Any]]
) -> Sequence[OpInfo]:
    """What each op was, by its ``details``; ops of passes that repeat share what is known of those they repeat.

    firsts : of each role, the row of its first op. homes : of each role, :func:`_homes`.
    """
    if not any(isinstance(role.ops, RepeatedOps) for role in program.roles):
        return tuple(
            _info(op, role, first, details.get((r, i), {}))
            for r, (role, first) in enumerate(zip(program.roles, firsts, strict=True))
            for i, op in enumerate(role.ops)
        )
    home = np.concatenate([places + first for places, first in zip(homes, firsts, strict=True)])
    places, of = np.unique(home, return_inverse=True)
    ends = np.searchsorted(places, [*firsts, len(home)]).tolist()
    made = [
        _info(role.ops[i], role, first, details.get((r, i), {}))
        for r, (role, first, bounds) in enumerate(zip(program.roles, firsts, pairwise(ends), strict=True))
        for i in (places[slice(*bounds)] - first).tolist()
    ]
    passes = [
        InfoPass(first + each.tail, first + each.end, each.microbatch)
        for role, first in zip(program.roles, firsts, strict=True)
        if isinstance(role.ops, RepeatedOps)
        for each in role.ops.passes
    ]
    return RepeatedInfos(made, of.reshape(-1), passes)


def _homes(short: Shortened, r: int) -> Ints:
    """Of each op of a role the one whose facts it shares but for what it waits for and its micro-batch: where its pass
    is written, if it meets nobody of another role."""
    ops = short.whole.roles[r].ops
    home = np.arange(len(ops))
    if not isinstance(ops, RepeatedOps):
        return home
    alone = np.zeros(len(ops), dtype=np.bool_)
    for op in short.program.roles[r].ops:
        if isinstance(op, Stretch):
            alone[op.first : op.last + 1] = True
    computes: dict[int, Bools] = {}
    for each in ops.passes:
        there = slice(each.tail, each.end)
        if each.home not in computes:
            computes[each.home] = np.array([isinstance(op, Compute) for op in ops.written[there]], dtype=np.bool_)
        written = slice(each.tail - each.shift, each.end - each.shift)
        shared = computes[each.home] | (alone[there] & alone[written])
        home[there] -= np.where(shared, each.shift, 0)
    return home


def _each(short: Shortened, sites: tuple[Site, ...], homes: list[Ints]) -> Iterator[tuple[Site, OpKey]]:
    """Sites, those of stretches by their collectives as far as they are at their ``homes``, with the place of the first
    op in the Program."""
    inner: dict[tuple[int, int], Site] = {}
    for site in sites:
        r, i = short.place(site.sides[0].key)
        inside = site.plans.inside if isinstance(site.plans, StretchPlans) else None
        if not inside:
            yield site, (r, i)
            continue
        places = i + np.array(inside.collectives)
        for k in np.flatnonzero(homes[r][places] == places).tolist():
            place, plans = inside.collectives[k], inside.plans[k]
            shape = id(plans), id(site.ranks)
            if shape not in inner:
                inner[shape] = msgspec.structs.replace(site, plans=plans)
            yield inner[shape], (r, i + place)


def _detail(site: Site, islands: int) -> dict[str, Any]:
    """What a viewer is told of a site's transfers; nobody has counted its groups yet."""
    plan = site.plans.each[0]
    request = site.plans.request
    matrix = request.matrix
    # Of an all-to-all that is not even, what a member sends to others per byte of S, in the mean.
    uneven = {} if matrix is None else {"between": float(matrix.between.sum()) / matrix.n}
    within = {"within": True} if request.kernel is not None and request.kernel.within else {}
    return {
        "algorithm": plan.algorithm,
        "protocol": plan.protocol,
        "n_channels": plan.n_channels,
        "group_size": site.ranks.shape[1],
        "dtype": request.dtype,
        "n_groups": 0,
        "lower_bound": site.plans.lower_bound,
        "nbytes": request.nbytes,
        "latency": plan.latency - plan.host,
        "ceiling": plan.ceiling,
        "n_islands": islands,
        **uneven,
        **within,
    }


def _info(op: Op, role: Role, first: int, detail: dict[str, Any]) -> OpInfo:
    after = tuple(first + i for i in op.after) if first else tuple(op.after)
    if isinstance(op, Compute):
        facts = op.phase, op.bound, op.nbytes, op.flops, op.step
        return OpInfo(
            op.name, "compute", op.stream, *facts, role.name, after, label=op.label, stage=role.stage, mix=op.mix
        )
    kind = op.kind if isinstance(op, Collective) else "send" if isinstance(op, Send) else "recv"
    return OpInfo(
        op.name,
        kind,
        op.stream,
        op.phase,
        "communication",
        op.nbytes,
        0.0,
        op.step,
        role.name,
        after,
        detail,
        op.label,
        role.stage,
    )
