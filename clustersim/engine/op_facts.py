"""What each op of a run was: its own facts, and what a viewer is told of the transfers that it made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from clustersim.collectives.base import Group
from clustersim.collectives.islands import n_islands
from clustersim.core.arrays import Bools, Ints
from clustersim.core.mesh import Mesh
from clustersim.core.op_infos import InfoPass, OpDetail, RepeatedInfos
from clustersim.core.program import Collective, Compute, Op, Program, Role, Send
from clustersim.core.repeated import RepeatedOps
from clustersim.core.timeline import OpInfo
from clustersim.core.topology import Topology
from clustersim.engine.inside import StretchPlans
from clustersim.engine.pairs import OpKey
from clustersim.engine.rows import RunRows
from clustersim.engine.sites import Site
from clustersim.engine.stretches import Shortened, Stretch


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
        self._details: dict[OpKey, OpDetail] = {}
        self._groups: dict[OpKey, list[Ints]] = {}
        self._partners: dict[OpKey, set[int]] = {}
        self._islands: dict[int, int] = {}  # by ranks: ops share their groups
        self._known: dict[tuple[int, int, int], OpDetail] = {}  # by plans, members and islands
        self._alike: dict[tuple[int, int], OpDetail] = {}  # of ops that meet nowhere else, by plans and groups

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
            self._details[place] = self._alike[shape] = detail | {"n_groups": len(site.ranks), "groups": site.ranks}
        else:
            self._of_sides(site, detail.copy())

    def _of_site(self, site: Site) -> OpDetail:
        """:func:`_detail`, once for all sites of which it is the same."""
        ranks = id(site.ranks)
        if site.plans.each[0].algorithm == "nvls_tree" and ranks not in self._islands:
            self._islands[ranks] = n_islands(Group(self._topology, self._mesh.gpus[site.ranks[0]]))
        kind = id(site.plans), site.ranks.shape[1], self._islands.get(ranks, 1)
        if kind not in self._known:
            self._known[kind] = _detail(site, kind[2])
        return self._known[kind]

    def _of_both(self, site: Site, detail: OpDetail) -> None:
        """Of a send and its recv that meet nobody elsewhere."""
        facts = detail | {"n_groups": len(site.ranks), "groups": site.ranks}
        for side, partner in (site.sides, site.sides[::-1]):
            meets = (self._rows.row_of(partner.key),)
            self._details[self._short.place(side.key)] = facts | {"meets": meets}

    def _of_sides(self, site: Site, detail: OpDetail) -> None:
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

    def by_place(self) -> dict[OpKey, OpDetail]:
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
    program: Program, firsts: Sequence[int], homes: list[Ints], details: dict[OpKey, OpDetail]
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


def _detail(site: Site, islands: int) -> OpDetail:
    """What a viewer is told of a site's transfers; nobody has counted its groups yet."""
    plan = site.plans.each[0]
    request = site.plans.request
    matrix = request.matrix
    detail: OpDetail = {
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
    }
    if matrix is not None:
        detail["between"] = float(matrix.between.sum()) / matrix.n
    if request.kernel is not None and request.kernel.within:
        detail["within"] = True
    return detail


def _info(op: Op, role: Role, first: int, detail: OpDetail) -> OpInfo:
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
