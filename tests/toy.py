"""Machines and planners small enough to work out by hand, for the engine's tests; and shipped machines, read once."""

from __future__ import annotations

from functools import cache

import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Op, Program, Role
from clustersim.core.topology import NodeType, Topology


@cache
def machine(name: str, nodes: int) -> Topology:
    """A shipped machine of so many nodes."""
    return fabrics.load(name, nodes=nodes)


def star(n: int, bandwidth: float = 10.0, latency: float = 0.0, per_node: int | None = None) -> Topology:
    """``n`` GPUs around one switch: link ``i`` goes up from GPU ``i``, link ``n + i`` down to it."""
    per_node = per_node or n
    names = [f"node{i // per_node}/gpu{i % per_node}" for i in range(n)] + ["switch"]
    up = np.arange(n), np.full(n, n)
    return Topology(
        name="star",
        vertex_names=tuple(names),
        vertex_kinds=("gpu",) * n + ("switch",),
        vertex_node=np.array([*(i // per_node for i in range(n)), -1]),
        link_src=np.concatenate([up[0], up[1]]),
        link_dst=np.concatenate([up[1], up[0]]),
        link_bandwidth=np.full(2 * n, float(bandwidth)),
        link_latency=np.full(2 * n, float(latency)),
        link_kinds=("net",) * (2 * n),
        node_types=(NodeType("toy", "toy", per_node, 0),) * (n // per_node),
    )


def mesh(topology: Topology) -> Mesh:
    return Mesh(topology.gpus, len(topology.gpus) // topology.n_nodes)


def up_links(request: Request, group: Group) -> Plan:
    """Every byte of payload crosses each member's up link once; no latency."""
    return plan(request, group.gpus)


def plan(request: Request, links: object, latency: float = 0.0, ceiling: float = np.inf) -> Plan:
    crossed = np.asarray(links, dtype=np.int64)
    return Plan(request.kind, "toy", "Simple", 1, request.nbytes, latency, crossed, np.ones(len(crossed)), ceiling, 0.0)


def program(*op_lists: list[Op], ranks: int | list[list[int]] = 2, slowdown: float = 0.0) -> Program:
    """One role per op list. ``ranks``: ranks per role, or their lists."""
    if isinstance(ranks, int):
        ranks = [list(range(r * ranks, (r + 1) * ranks)) for r in range(len(op_lists))]
    roles = tuple(
        Role(f"role{r}", np.array(mine, dtype=np.int64), tuple(ops))
        for r, (mine, ops) in enumerate(zip(ranks, op_lists, strict=True))
    )
    return Program(sum(map(len, ranks)), roles, slowdown)


def all_reduce(name: str, nbytes: float, groups: object, **options: object) -> Collective:
    return Collective(name, "all_reduce", nbytes, np.atleast_2d(np.asarray(groups, dtype=np.int64)), **options)  # type: ignore[arg-type]
