"""The mesh of a scenario as a table: groups over each dimension, the links they run over, and one rank's place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.cluster.routes import Router
from clustersim.core.facts import DimensionGroups, MeshMap
from clustersim.core.mesh import Ints, Mesh
from clustersim.core.topology import NVSWITCH, Topology

PAIRS = 8
"""Neighbours of a group whose routes are looked at, inside a node and between nodes."""
NAMES = {"cpu": "PCIe, sockets", "pcie": "PCIe", "c2c": "C2C", "xgmi": "xGMI", "nvlink": "NVLink"}
"""Kinds of links inside a node, the slowest first."""


@dataclass(frozen=True)
class DimensionRow:
    """Groups over one dimension or several.

    Parameters
    ----------
    dims : ``("dp", "cp")``. degree : members of a group. groups : how many there are. first : members of the first one.
    inside : groups whose members are all on one node. nodes : nodes of the group that is on most.
    links : what the routes between neighbours by rank use, in words, nearest first: ``("NVSwitch", "NIC (ib)")``.
    """

    dims: tuple[str, ...]
    degree: int
    groups: int
    first: tuple[int, ...]
    inside: int
    nodes: int
    links: tuple[str, ...]


@dataclass(frozen=True)
class RankView:
    """One worker: torchrun's variables, the GPU it drives, and its place in every dimension.

    environment : variable -> value. vertex : ``"node2/gpu1"``. coordinate : dimension -> index.
    groups : dimensions -> the ranks it talks to along them, itself included.
    """

    environment: dict[str, int]
    vertex: str
    coordinate: dict[str, int]
    groups: dict[tuple[str, ...], tuple[int, ...]]


def dimensions(mesh: Mesh) -> list[tuple[str, ...]]:
    """The dimensions worth a row: those along which more than one rank is."""
    dim_sets: list[tuple[str, ...]] = [("tp",), ("cp",), ("cp_a2a",), ("cp_p2p",), ("dp",), ("dp_shard",)]
    dim_sets += [("dp_replicate",), ("dp", "cp"), ("dp_shard", "cp"), ("pp",)]
    if mesh.layout.ep > 1 or mesh.layout.etp is not None:
        dim_sets += [("etp",), ("ep",), ("edp",)]
    # A group that is another row's very array (dp_shard where nothing is replicated) has its row already.
    rows = {id(mesh.groups(*dims)): dims for dims in reversed(dim_sets) if mesh.size(*dims) > 1}
    return list(reversed(rows.values()))


def rows(topology: Topology, mesh: Mesh) -> list[DimensionRow]:
    """A row for each dimension with more than one rank."""
    router = Router(topology)
    return [_row(router, mesh, dims) for dims in dimensions(mesh)]


MOST_RANKS = 1024
"""Ranks of a world whose groups are all listed."""


def drawable(topology: Topology, mesh: Mesh) -> MeshMap:
    """The mesh for a picture."""
    dims = []
    for row in rows(topology, mesh):
        of_rank = np.full(mesh.workers, -1, dtype=np.int64)
        for i, group in enumerate(mesh.groups(*row.dims)):
            of_rank[group] = i
        few = of_rank.tolist() if mesh.workers <= MOST_RANKS else None
        dims.append(DimensionGroups(" x ".join(row.dims), row.degree, list(row.links), list(row.first), few))
    return MeshMap(mesh.workers, mesh.nproc_per_node, dims)


def _row(router: Router, mesh: Mesh, dims: tuple[str, ...]) -> DimensionRow:
    groups = mesh.groups(*dims)
    nodes = np.sort(router.topology.vertex_node[mesh.gpus][groups], axis=1)
    touched = 1 + (np.diff(nodes, axis=1) != 0).sum(axis=1)
    looked = [groups[0], groups[int(touched.argmax())]]
    return DimensionRow(
        dims,
        int(groups.shape[1]),
        len(groups),
        tuple(groups[0].tolist()),
        int((touched == 1).sum()),
        int(touched.max()),
        tuple(dict.fromkeys(name for pair in _neighbours(router, mesh, looked) for name in _words(router, *pair))),
    )


def _neighbours(router: Router, mesh: Mesh, groups: Sequence[Ints]) -> Iterator[tuple[int, int]]:
    """GPUs of some ranks next to each other in their groups, those on one node first."""
    gpus = [(int(a), int(b)) for group in groups for a, b in zip(mesh.gpus[group], mesh.gpus[group][1:], strict=False)]
    node = router.topology.vertex_node
    near = [pair for pair in gpus if node[pair[0]] == node[pair[1]]]
    yield from near[:PAIRS]
    yield from [pair for pair in gpus if node[pair[0]] != node[pair[1]]][:PAIRS]


def _words(router: Router, a: int, b: int) -> Iterator[str]:
    """What joins two GPUs: the network where a route uses it, else the slowest kind of link inside the node."""
    topology = router.topology
    route = router.route(a, b)
    kinds = {topology.link_kinds[link] for link in route}
    if "net" in kinds:
        net = topology.node_types[int(topology.vertex_node[a])].net
        yield f"NIC ({net})" if net != "none" else "NIC"
    elif any(topology.vertex_kinds[int(topology.link_dst[link])] == NVSWITCH for link in route):
        yield "NVSwitch"
    else:
        yield from [name for kind, name in NAMES.items() if kind in kinds][:1]


def rank_view(topology: Topology, mesh: Mesh, rank: int) -> RankView:
    """One worker. Raises :class:`ProgramError` for a rank that is none."""
    coordinate = mesh.coordinate(rank)
    per_node = mesh.nproc_per_node
    environment = {
        "RANK": rank,
        "LOCAL_RANK": rank % per_node,
        "WORLD_SIZE": mesh.world_size,
        "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node,
        "GROUP_WORLD_SIZE": mesh.n_nodes,
    }
    groups = {}
    for dims in dimensions(mesh):
        table = mesh.groups(*dims)
        groups[dims] = tuple(table[int(np.flatnonzero((table == rank).any(axis=1))[0])].tolist())
    return RankView(environment, topology.vertex_names[int(mesh.gpus[rank])], coordinate, groups)
