"""The order in which a ring visits the GPUs inside one island.

Behind NVLink switches every order is as good, and rotations spread the ends. In a mesh (DGX-1V's hybrid cube mesh, four
GPUs joined pairwise) the orders of all channels together should use every NVLink evenly; on PCIe neighbours should be
near. Both are small travelling-salesman problems, solved exactly (Held and Karp 1962) one channel at a time, with the
links other channels already use made dear, until no channel wants to move. NCCL searches for the same thing by
backtracking (src/graph/search.cc).
"""

from __future__ import annotations

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.mesh_rings import closed_rings, zigzag
from clustersim.core.arrays import Floats, Ints
from clustersim.core.memo import kept_with_first
from clustersim.core.topology import NVSWITCH, PATH_CLASSES, Topology

EXACT = 10
"""Largest number of GPUs for which the order is searched exactly; larger PCIe boxes are taken in slot order."""

ANY = -1
"""As the last stop of a path: wherever it ends."""

CYCLE = -2
"""As the last stop of a path: it closes to where it began."""

_CROWDING = 4  # power of the load: high enough that evenness beats length
_SWEEPS = 8


def local_paths(topology: Topology, gpus: Ints, ends: tuple[tuple[int, int], ...]) -> list[Ints]:
    """Paths through all of ``gpus``, one per entry of ``ends`` = (first, last) as indices into ``gpus``.

    ``last`` may be :data:`ANY` or :data:`CYCLE`. Returns (p,) int arrays of indices into ``gpus``.
    """
    n = len(gpus)
    if n <= 3 or n > EXACT or _switched(topology, gpus):
        return [_rotation(n, first, last) for first, last in ends]
    if is_full_mesh(topology, gpus):
        if ends == ((0, CYCLE),) * len(closed_rings(n)):
            return [np.array(ring, dtype=np.int64) for ring in closed_rings(n)]
        partner = dict(ends)
        if all(partner.get(last) == first for first, last in ends) and len(partner) == n:
            return _changing_places(partner, [first for first, _ in ends])
    shortest = _searched(topology, tuple(gpus.tolist()), ends)
    return [np.array(path, dtype=np.int64) for path in shortest]


def is_full_mesh(topology: Topology, gpus: Ints) -> bool:
    """Whether an even number of GPUs, four at the least, are joined by xGMI, each pair as well as any other: those
    of which RCCL has the rings in a table (:mod:`clustersim.collectives.mesh_rings`)."""
    n = len(gpus)
    by_nvidia = topology.node_types[int(topology.vertex_node[gpus[0]])].gpu.sm > 0
    if n < 4 or n % 2 or by_nvidia:
        return False
    capacity, _ = _neighbours(topology, tuple(gpus.tolist()))
    inside = np.isin(topology.link_src, gpus) & np.isin(topology.link_dst, gpus)
    kinds = {topology.link_kinds[link] for link in np.flatnonzero(inside).tolist()}
    return kinds == {"xgmi"} and bool(np.all(capacity[~np.eye(n, dtype=np.bool_)] == 1.0))


def _changing_places(partner: dict[int, int], firsts: list[int]) -> list[Ints]:
    """Zigzags of a full mesh from each first member to its partner: by label, partners are half way round."""
    half = [member for member, other in sorted(partner.items()) if member < other]
    members = np.array([*half, *(partner[member] for member in half)], dtype=np.int64)
    label = {int(member): i for i, member in enumerate(members)}
    return [members[list(zigzag(len(members), label[first]))] for first in firsts]


def mesh_degree(topology: Topology, gpus: Ints) -> int:
    """Rings needed to use every direct GPU link both ways; 1 behind switches and on PCIe."""
    if len(gpus) <= 2 or _switched(topology, gpus):
        return 1
    capacity, _ = _neighbours(topology, tuple(gpus.tolist()))
    if not capacity.any():
        return 1
    return 2 * max(1, round(float(capacity.sum(axis=1).max() / capacity[capacity > 0].min())))


def _rotation(n: int, first: int, last: int) -> Ints:
    path = (first + np.arange(n)) % n
    if last < 0 or n == 1:
        return path
    return np.concatenate([path[path != last], [last]])


def _switched(topology: Topology, gpus: Ints) -> bool:
    """Whether every GPU hangs on an NVLink switch."""
    kinds = topology.vertex_kinds
    out = np.isin(topology.link_src, gpus)
    ends = zip(topology.link_src[out].tolist(), topology.link_dst[out].tolist(), strict=True)
    to_switch = {src for src, dst in ends if kinds[dst] == NVSWITCH}
    return all(int(gpu) in to_switch for gpu in gpus)


@kept_with_first(maxsize=256)
def _searched(
    topology: Topology, gpus: tuple[int, ...], ends: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, ...], ...]:
    capacity, distance = _neighbours(topology, gpus)
    load = np.zeros_like(capacity)
    paths: list[tuple[int, ...]] = [()] * len(ends)
    for _ in range(_SWEEPS):
        moved = False
        for c, (first, last) in enumerate(ends):
            _count(load, paths[c], last, -1)
            cost = distance + np.where(capacity > 0, _crowding(load, capacity), 0.0)
            best = _shortest(cost, first, last)
            if paths[c] and _length(cost, paths[c], last) <= _length(cost, best, last) * (1 + 1e-12):
                best = paths[c]
            moved |= best != paths[c]
            paths[c] = best
            _count(load, best, last, 1)
        if not moved:
            break
    return tuple(paths)


def _neighbours(topology: Topology, gpus: tuple[int, ...]) -> tuple[Floats, Floats]:
    """NVLink capacity of each pair (1 = the thickest), and a cost that only pairs without NVLink pay."""
    n = len(gpus)
    router = routing.router(topology)
    index = {gpu: i for i, gpu in enumerate(gpus)}
    capacity = np.zeros((n, n))
    distance = np.zeros((n, n))
    for link in np.flatnonzero(np.isin(topology.link_src, gpus) & np.isin(topology.link_dst, gpus)).tolist():
        pair = index[int(topology.link_src[link])], index[int(topology.link_dst[link])]
        capacity[pair] += topology.link_bandwidth[link]
    for i in range(n):
        for j in range(n):
            if i != j and capacity[i, j] == 0:
                rank = PATH_CLASSES.index(router.path_class(gpus[i], gpus[j]))
                # Slot order breaks ties, so that equal machines give the order people expect.
                distance[i, j] = 1e3 * 2.0**rank + 1e-3 * ((j - i) % n)
    top = capacity.max()
    return (capacity / top if top > 0 else capacity), distance


def _crowding(load: Floats, capacity: Floats) -> Floats:
    safe = np.where(capacity > 0, capacity, 1.0)
    cost: Floats = ((load + 1) / safe) ** _CROWDING - (load / safe) ** _CROWDING
    return cost


def _edges(path: tuple[int, ...], last: int) -> tuple[list[int], list[int]]:
    closed = path + path[:1] if last == CYCLE else path
    return list(closed[:-1]), list(closed[1:])


def _count(load: Floats, path: tuple[int, ...], last: int, change: int) -> None:
    np.add.at(load, _edges(path, last), change)


def _length(cost: Floats, path: tuple[int, ...], last: int) -> float:
    return float(cost[_edges(path, last)].sum())


def _shortest(cost: Floats, first: int, last: int) -> tuple[int, ...]:
    """Cheapest Hamiltonian path from ``first`` to ``last``: best[visited, at] over subsets, O(2^n n^2)."""
    n = len(cost)
    best = np.full((1 << n, n), np.inf)
    came = np.zeros((1 << n, n), dtype=np.int64)
    best[1 << first, first] = 0.0
    bits = 1 << np.arange(n)
    for visited in range(1 << n):
        if not visited >> first & 1 or not np.isfinite(best[visited]).any():
            continue
        step = best[visited][:, None] + cost
        into = step.argmin(axis=0)
        value = step.min(axis=0)
        free = np.flatnonzero((visited & bits) == 0)
        target = visited | bits[free]
        better = value[free] < best[target, free]
        best[target[better], free[better]] = value[free[better]]
        came[target[better], free[better]] = into[free[better]]
    everyone = (1 << n) - 1
    end = best[everyone] + (cost[:, first] if last == CYCLE else 0.0)
    vertex = last if last >= 0 else int(np.argmin(end))
    path = [vertex]
    visited = everyone
    while vertex != first or len(path) < n:
        vertex, visited = int(came[visited, vertex]), visited & ~(1 << vertex)
        path.append(vertex)
    return tuple(reversed(path))
