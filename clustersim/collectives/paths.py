"""Traffic of an algorithm on links, by what kind of path each edge takes, and what of the line rate each kind reaches.

Loads are per byte of S, so they are worked out once per group and algorithm, whatever the message size.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from clustersim.cluster.routes import router
from clustersim.collectives.base import Channel, Group, Request, Traffic
from clustersim.collectives.channels import channels
from clustersim.collectives.islands import kinds_of_members, member_islands
from clustersim.collectives.loads import link_loads
from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.search import search
from clustersim.collectives.nccl.view import LOC, System
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.staged import searched_rails
from clustersim.core.arrays import Floats, Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.costs import CommunicationCosts, generation
from clustersim.core.memo import kept_with_topology
from clustersim.core.topology import PATH_CLASSES
from clustersim.core.transports import transport

EDGE_CLASSES = ("nvlink", "pcie", "shm", "net", "to_nic")
"""What a byte crosses on a link: NVLink, PCIe between GPUs, host memory between GPUs, the network from NIC to NIC, and
the links inside a node between a GPU and its NIC, which reach what the transport usually does however slow the NIC."""
_CLASS_OF_PATH = {"NVL": "nvlink", "NVB": "nvlink", "C2C": "nvlink", "LOC": "nvlink", "PIX": "pcie", "PXB": "pcie"}


SHARP = frozenset({"nvls", "collnet_direct", "collnet_chain"})
"""Algorithms whose bytes the network's switches add up."""


class PathLoads(msgspec.Struct, frozen=True, eq=False):
    """Link loads per edge class of one algorithm on one group, per byte of S.

    ``links`` (k,), ``by_class`` (5, k) bytes on each link per payload byte; steps as in Traffic. ``channels`` : the
    paths through the group they were worked out from.
    """

    links: Ints
    by_class: Floats
    steps: int
    net_steps: int
    channels: tuple[Channel, ...]


class Placement(msgspec.Struct, eq=False):
    """What is computed once per group: its system, its shape, and loads.

    ``islands`` and ``per_island``: NVLink domains (nodes, for most machines) and members on the fullest; ``age``: GPU
    generation; ``net``: transport.
    """

    system: System
    islands: int
    per_island: int
    age: str
    net: str
    loads: dict[tuple[str, str, int, int, ByteMatrix | None], PathLoads] = msgspec.field(default_factory=dict)
    routed: dict[tuple[object, ...], PathLoads] = msgspec.field(default_factory=dict)


@kept_with_topology(maxsize=1024)
def placement(group: Group) -> Placement:
    """Where a group's members sit, as NCCL sees their system."""
    system = system_of(group)
    counts = np.bincount(member_islands(group))
    net = group.node_type.net
    # NCCL's system has no AMD GPUs and takes a Hopper's place for them; the constants have a generation of their own.
    age = generation(0 if group.node_type.gpu.sm == 0 else system.sm)
    return Placement(system, len(counts), int(counts.max()), age, net if net != "none" else "ib")


def loads_of(request: Request, group: Group, algorithm: str, count: int) -> PathLoads:
    """What an algorithm over ``count`` channels puts on the links, worked out once per group."""
    group_placement = placement(group)
    key = (request.kind, algorithm, count, request.root, request.matrix)
    if key not in group_placement.loads:
        row = ALGORITHMS[algorithm]
        laid = _channels(group, algorithm, count, row.layout)
        traffic = row.traffic(request, group, laid)
        # Gathering and reducing round a ring move the same bytes over the same edges.
        columns = (column.tobytes() for column in (traffic.src, traffic.dst, traffic.fraction, traffic.rail))
        moved = (algorithm, traffic.steps, traffic.net_steps, traffic.relay, *columns)
        if moved not in group_placement.routed:
            group_placement.routed[moved] = _route(traffic, group, laid)
        group_placement.loads[key] = group_placement.routed[moved]
    return group_placement.loads[key]


def _channels(group: Group, algorithm: str, count: int, layout: str) -> tuple[Channel, ...]:
    """NCCL's own orders where its search laid them out inside one island; else channels over all rails."""
    group_placement = placement(group)
    graph = search(group_placement.system).get(algorithm)
    if group_placement.islands > 1:
        return channels(group, count, layout, searched_rails(group, group_placement.system, algorithm))
    if graph is None or len(graph.orders) != count or algorithm != "ring":
        return channels(group, count, layout)
    if any(len(order) != group.size for order in graph.orders):  # NCCL before 2.21 sees a rack's trays as nodes
        return channels(group, count, layout)
    position = np.argsort(group.gpus, kind="stable")
    return tuple(Channel(i, position[list(order)], 1.0 / count) for i, order in enumerate(graph.orders))


def _route(traffic: Traffic, group: Group, laid: tuple[Channel, ...]) -> PathLoads:
    """Traffic onto links, one row per edge class."""
    classes = _edge_classes(traffic, group)
    parts = [link_loads(traffic.only(classes == index), group) for index in range(len(EDGE_CLASSES))]
    crossed = np.zeros(group.topology.n_links, dtype=np.bool_)
    for edges, _ in parts:
        crossed[edges] = True
    links = np.flatnonzero(crossed)
    by_class = np.zeros((len(EDGE_CLASSES), len(links)))
    for row, (edges, amount) in zip(by_class, parts, strict=True):
        row[np.searchsorted(links, edges)] = amount
    kinds = group.topology.link_kinds
    inside = np.array([kinds[link] != "net" for link in links], dtype=np.bool_)
    net = EDGE_CLASSES.index("net")
    by_class[EDGE_CLASSES.index("to_nic"), inside] = by_class[net, inside]
    by_class[net, inside] = 0.0
    return PathLoads(links, by_class, traffic.steps, traffic.net_steps, laid)


def _edge_classes(traffic: Traffic, group: Group) -> Ints:
    """(E,) index into EDGE_CLASSES. Nodes of one type share the answer, so a pair of local GPUs is asked about once."""
    islands = member_islands(group)
    src = traffic.src
    dst = traffic.dst
    inside = (src < 0) | (dst < 0) | (islands[src] == islands[dst])
    classes = np.where(inside, EDGE_CLASSES.index("nvlink"), EDGE_CLASSES.index("net")).astype(np.int64)
    pairs = np.flatnonzero(inside & (src >= 0) & (dst >= 0))
    if not len(pairs):
        return classes
    label, local = kinds_of_members(group)
    key = (label[src[pairs]] * 4096 + local[src[pairs]]) * 4096 + local[dst[pairs]]
    _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
    routes = router(group.topology, traffic.relay)
    views = placement(group).system.views
    level = min(view.p2p_level for view in views) if all(view.p2p for view in views) else LOC
    answer = []
    for e in pairs[first]:
        path = routes.path_class(int(group.gpus[src[e]]), int(group.gpus[dst[e]]))
        far = "pcie" if PATH_CLASSES.index(path) <= level else "shm"
        answer.append(EDGE_CLASSES.index(_CLASS_OF_PATH.get(path, far)))
    classes[pairs] = np.array(answer, dtype=np.int64)[inverse]
    return classes


def shares_of(algorithm: str, protocol: str, group: Group, costs: CommunicationCosts) -> Floats:
    """(5,) of the line rate that each of :data:`EDGE_CLASSES` reaches."""
    group_placement = placement(group)
    age = costs.share_generation[group_placement.age]
    inside = {c: costs.share[f"{c}/{protocol}"] * age for c in ("nvlink", "pcie", "shm")}
    if algorithm == "tree":
        inside = {c: s * costs.tree_share for c, s in inside.items()}
    elif algorithm in {"nvls", "nvls_tree"}:
        inside["nvlink"] = costs.nvls_share[group_placement.age] * (
            costs.nvls_tree_share if algorithm == "nvls_tree" else 1.0
        )
    growth = 1.0 + costs.scale_net * max(0.0, math.log2(group_placement.islands) - 1.0)
    carried = costs.share[f"net/{protocol}"] / growth
    if algorithm in SHARP and group_placement.islands > 1:
        carried *= costs.sharp_share
    net = group_placement.net
    reached = (carried * costs.net_share[net], carried * transport(net).share)
    return np.array([*(inside[c] for c in ("nvlink", "pcie", "shm")), *reached])
