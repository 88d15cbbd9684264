"""Where a group's members sit: islands of GPUs joined by NVLink, and the NICs each member owns.

An *island* is what NCCL treats as one node: a machine, or several machines whose GPUs share NVLink switches (an NVL72
rack, NCCL's multi-node NVLink); :mod:`clustersim.cluster.routes` cuts a topology into them. Members are looked at by
their index inside the island, so that a cluster of 2,048 equal nodes is described once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.base import Group
from clustersim.core.arrays import Ints
from clustersim.core.memo import kept_with_topology
from clustersim.core.topology import Topology


@dataclass(frozen=True, eq=False)
class IslandShape:
    """Islands on which a group's members sit alike.

    Parameters
    ----------
    rows : (k,) int, which islands (by order of first appearance in the group) have this shape.
    positions : (k, p) int, the members (positions in the group) of each of them, by index inside the island.
    gpus : (p,) int, vertex ids on the first of them, the one that stands for all.
    """

    rows: Ints
    positions: Ints
    gpus: Ints

    @property
    def size(self) -> int:
        """Members on one island."""
        return int(self.positions.shape[1])


def member_islands(group: Group) -> Ints:
    """(n,) int: the island of each member, numbered by first appearance in the group."""
    island = routing.router(group.topology).islands.of[group.gpus]
    values, first, inverse = np.unique(island, return_index=True, return_inverse=True)
    rank = np.empty(len(values), dtype=np.int64)
    rank[np.argsort(first, kind="stable")] = np.arange(len(values))
    numbered: Ints = rank[inverse.reshape(-1)]
    return numbered


def n_islands(group: Group) -> int:
    """How many islands the group touches."""
    return int(member_islands(group).max()) + 1


@kept_with_topology(maxsize=64)
def shapes(group: Group) -> tuple[IslandShape, ...]:
    """The group's islands, sorted into shapes: same build and same local indices of members."""
    routes = routing.router(group.topology)
    cut = routes.islands
    island = member_islands(group)
    local = cut.local[group.gpus]
    order = np.lexsort((local, island))
    counts = np.bincount(island)
    start = np.concatenate([[0], np.cumsum(counts)])
    build = routes.builds[cut.of[group.gpus[order[start[:-1]]]]]
    alike: list[IslandShape] = []
    for size in np.unique(counts).tolist():
        rows = np.flatnonzero(counts == size)
        positions = order[start[rows][:, None] + np.arange(size)]
        key = np.concatenate([build[rows][:, None], local[positions]], axis=1)
        _, first, label = np.unique(key, axis=0, return_index=True, return_inverse=True)
        for i, representative in enumerate(first.tolist()):
            labelled = label.reshape(-1) == i
            alike.append(IslandShape(rows[labelled], positions[labelled], group.gpus[positions[representative]]))
    return tuple(sorted(alike, key=lambda shape: int(shape.rows[0])))


def kinds_of_members(group: Group) -> tuple[Ints, Ints]:
    """Of each member: the number of its island's shape, and its index inside the island."""
    label = np.empty(group.size, dtype=np.int64)
    for number, shape in enumerate(shapes(group)):
        label[shape.positions] = number
    return label, routing.router(group.topology).islands.local[group.gpus]


def owned_nics(topology: Topology, gpus: Ints) -> list[tuple[int, ...]]:
    """The NICs (vertex ids) each GPU owns: the nearest ones, dealt out among the GPUs that share them.

    Two GPUs and two NICs on one PCIe switch make one NIC each; one GPU beside four NICs owns all four; four GPUs and
    one NIC share it.
    """
    near_of = routing.router(topology).nearest_nics
    sharers: dict[tuple[int, ...], list[int]] = {}
    for node in np.unique(topology.vertex_node[gpus]).tolist():
        for gpu in topology.node_gpus(node).tolist():
            sharers.setdefault(tuple(int(nic) for nic in near_of(gpu)), []).append(gpu)
    owned: dict[int, tuple[int, ...]] = {}
    for near, users in sharers.items():
        for j, gpu in enumerate(users):
            dealt = near[j :: len(users)]
            owned[gpu] = dealt or near[j % len(near) :][:1] if near else ()
    # A CPU owns none of them, and uses what is near.
    return [owned[v] if v in owned else tuple(int(nic) for nic in near_of(v)) for v in gpus.tolist()]


def ports(group: Group, shape: IslandShape) -> list[tuple[int, ...]]:
    """The NICs (vertex ids) by which each member leaves its island: its own, or none where its own is gone and all that
    are near are nearer to other members."""
    owned = owned_nics(group.topology, shape.gpus)
    sets = {frozenset(nics) for nics in owned}
    covered = {nics for nics in sets if nics and nics <= frozenset().union(*(other for other in sets if other < nics))}
    return [() if frozenset(nics) in covered else nics for nics in owned]


@kept_with_topology(maxsize=64)
def heads(group: Group) -> Ints:
    """(N, p) int: the heads of each island, by its first members; as many of each as the smallest island holds.

    Over several islands those alone whose NICs go along: NCCL's search looks for channels of one speed, and keeps the
    largest product of channels and speed (nccl src/graph/search.cc), so that a NIC which says that it is slow, or is
    gone on some island, has no head on any.
    """
    island = member_islands(group)
    counts = np.bincount(island)
    order = np.argsort(island, kind="stable")
    first = np.cumsum(counts) - counts
    table: Ints = order[first[:, None] + np.arange(int(counts.min()))]
    return table[:, _going_along(group, table.shape[1])] if len(counts) > 1 else table


def _going_along(group: Group, p: int) -> Ints:
    """Of the first ``p`` members of an island, those whose NICs are fast enough on every island."""
    router = routing.router(group.topology)
    rates = [
        [sum(router.reported_bandwidth(nic) for nic in nics) for nics in ports(group, shape)[:p]]
        for shape in shapes(group)
    ]
    least = np.array(rates).min(axis=0)
    falling = np.sort(least)[::-1]
    speed = falling[int(np.argmax(falling * np.arange(1, p + 1)))]
    chosen: Ints = np.flatnonzero(least >= speed)
    return chosen
