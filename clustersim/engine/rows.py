"""From times per rank to the Timeline's rows: ranks that did an op at exactly the same times share a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from clustersim.engine.meetings import OpKey, Site
from clustersim.engine.network import Network
from clustersim.engine.tasks import Task
from clustersim.mesh import Mesh
from clustersim.program import Collective, Compute, Op, Program, Role, Send
from clustersim.timeline import LinkUse, OpInfo, Timeline
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
_Block: TypeAlias = tuple[Ints, Ints, Floats, Floats, Floats]


class Rows:
    """Rows of a run, collected op by op."""

    def __init__(self, program: Program) -> None:
        self.program = program
        sizes = [len(role.ops) for role in program.roles]
        self._first = np.cumsum([0, *sizes]).tolist()
        self.rank_sets: list[Ints] = []
        self._known: dict[bytes, int] = {}
        self._single = np.full(program.world_size, -1, dtype=np.int64)
        self._blocks: list[_Block] = []

    def row_of(self, key: OpKey) -> int:
        """Index in :attr:`Timeline.ops` of a role's op."""
        return int(self._first[key[0]]) + key[1]

    def add(self, task: Task) -> None:
        """Keep what the ranks of a finished op did."""
        who = task.taking_part()
        ranks = self.program.roles[task.key[0]].ranks[who]
        times = task.ready[who], task.start[who], task.end[who]
        if not len(ranks):
            return
        if all(column.min() == column.max() for column in times):
            sets, first = np.array([self._set(ranks)]), np.array([0])
        else:
            order = np.lexsort((ranks, *times[::-1]))
            ranks, times = ranks[order], (times[0][order], times[1][order], times[2][order])
            new = np.any([np.diff(column) != 0 for column in times], axis=0)
            first = np.concatenate([[0], np.flatnonzero(new) + 1])
            sets = self._sets(ranks, first)
        op = np.full(len(sets), self.row_of(task.key), dtype=np.int64)
        self._blocks.append((op, sets, times[0][first], times[1][first], times[2][first]))

    def _sets(self, ranks: Ints, first: Ints) -> Ints:
        """Ids of the sets that begin at ``first`` in ``ranks``; sets of one rank, the many, without a search each."""
        sizes = np.diff([*first.tolist(), len(ranks)])
        sets = np.empty(len(first), dtype=np.int64)
        alone = sizes == 1
        singles = ranks[first[alone]]
        for rank in singles[self._single[singles] < 0].tolist():
            self._single[rank] = self._set(np.array([rank], dtype=np.int64))
        sets[alone] = self._single[singles]
        for i in np.flatnonzero(~alone).tolist():
            sets[i] = self._set(ranks[first[i] : first[i] + sizes[i]])
        return sets

    def _set(self, ranks: Ints) -> int:
        key = ranks.tobytes()
        if key not in self._known:
            self._known[key] = len(self.rank_sets)
            self.rank_sets.append(ranks.copy())
        return self._known[key]

    def columns(self) -> _Block:
        """Op, set, ready, start, end of every row, sorted by op, then start, then set."""
        empty: _Block = (
            np.zeros(0, dtype=np.int64),
            np.zeros(0, dtype=np.int64),
            np.zeros(0),
            np.zeros(0),
            np.zeros(0),
        )
        op, sets, ready, start, end = (np.concatenate(c) for c in zip(*self._blocks, empty, strict=True))
        order = np.lexsort((sets, start, op))
        return op[order], sets[order], ready[order], start[order], end[order]


def timeline(
    program: Program,
    topology: Topology,
    mesh: Mesh,
    rows: Rows,
    sites: tuple[Site, ...],
    network: Network,
    transfers: tuple[Ints, Ints],
    stats: dict[str, float],
) -> Timeline:
    """The finished run as a Timeline."""
    op, sets, ready, start, end = rows.columns()
    return Timeline(
        world_size=program.world_size,
        ops=_ops(program, rows, sites),
        rank_sets=tuple(rows.rank_sets),
        row_op=op,
        row_set=sets,
        row_ready=ready,
        row_start=start,
        row_end=end,
        links=_link_use(topology, rows, sites, network, transfers),
        rank_node=topology.vertex_node[mesh.gpus],
        stats=stats,
    )


def _link_use(
    topology: Topology, rows: Rows, sites: tuple[Site, ...], network: Network, transfers: tuple[Ints, Ints]
) -> LinkUse:
    owner = [np.full(len(site.ranks), rows.row_of(site.sides[0].key), dtype=np.int64) for site in sites]
    op_of_meeting = np.concatenate([*owner, np.zeros(0, dtype=np.int64)])
    return LinkUse(
        *network.segments.columns(),
        transfer_op=op_of_meeting[transfers[0]],
        transfer_load=transfers[1],
        loads=tuple(network.loads.pairs),
        link_names=_LinkNames(topology),
        link_bandwidth=topology.link_bandwidth,
        link_kinds=topology.link_kinds,
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
        found = range(len(self))[link]
        return self._topology.link_name(found) if isinstance(found, int) else [self[i] for i in found]


def _ops(program: Program, rows: Rows, sites: tuple[Site, ...]) -> tuple[OpInfo, ...]:
    details: dict[OpKey, dict[str, Any]] = {}
    groups: dict[OpKey, list[Ints]] = {}
    partners: dict[OpKey, set[int]] = {}
    for site in sites:
        plan = site.plans.each[0]
        for side in site.sides:
            details.setdefault(
                side.key,
                {
                    "algorithm": plan.algorithm,
                    "protocol": plan.protocol,
                    "n_channels": plan.n_channels,
                    "group_size": site.ranks.shape[1],
                    "dtype": site.plans.request.dtype,
                    "n_groups": 0,
                    "lower_bound": plan.lower_bound,
                    "nbytes": site.plans.request.nbytes,
                    "latency": plan.latency,
                    "ceiling": plan.ceiling,
                },
            )["n_groups"] += len(site.ranks)
            groups.setdefault(side.key, []).append(site.ranks)
            partners.setdefault(side.key, set()).update(rows.row_of(other.key) for other in site.sides)
    for key, detail in details.items():
        mine = groups[key]
        detail["groups"] = mine[0] if len(mine) == 1 else np.concatenate(mine)
        if len(partners[key]) > 1:
            detail["meets"] = tuple(sorted(partners[key] - {rows.row_of(key)}))
    return tuple(
        _info(op, role, rows.row_of((r, 0)), details.get((r, i), {}))
        for r, role in enumerate(program.roles)
        for i, op in enumerate(role.ops)
    )


def _info(op: Op, role: Role, first: int, detail: dict[str, Any]) -> OpInfo:
    after = tuple(first + i for i in op.after)
    if isinstance(op, Compute):
        facts = op.phase, op.bound, op.nbytes, op.flops, op.step
        return OpInfo(op.name, "compute", op.stream, *facts, role.name, after)
    kind = op.kind if isinstance(op, Collective) else "send" if isinstance(op, Send) else "recv"
    return OpInfo(
        op.name, kind, op.stream, op.phase, "communication", op.nbytes, 0.0, op.step, role.name, after, detail
    )
