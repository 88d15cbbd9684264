"""What no algorithm can beat: the bytes that must cross each cut of the machine, over the bandwidth of the cut.

Cuts looked at: every member alone (the links of its GPU), and every island against the rest (its NICs). An all_reduce
must send and receive S across each cut. Where nothing on the way reduces, m parts moreover send 2 (m-1) S in total
(Patarasuk and Yuan 2009), which switches that reduce and multicast (NVLink SHARP) need not.
"""

from __future__ import annotations

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.base import Group, Request
from clustersim.collectives.islands import member_islands
from clustersim.core.arrays import Floats, Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.memo import kept_with_first, kept_with_topology
from clustersim.core.topology import Topology, route_latency

_ROOT_SENDS = frozenset({"broadcast", "scatter"})
_DIRECT = frozenset({"NVL", "NVB", "LOC"})


def lower_bound(request: Request, group: Group) -> float:
    """Seconds that no algorithm of this kind beats on this topology, at line rate and with hop latencies only.

    Counts what leaves by the links members' routes use: GPU links alone where every pair of members has them.
    """
    if group.size < 2:
        return 0.0
    slopes = _slopes(group, request.kind, request.root, request.matrix)
    return max(latency + request.nbytes * slope for latency, slope in slopes)


@kept_with_topology(maxsize=1024)
def _slopes(group: Group, kind: str, root: int, matrix: ByteMatrix | None) -> tuple[tuple[float, float], ...]:
    """Every bound as (latency [s], seconds per byte of S): what must cross a cut grows with S alone."""
    request = Request(kind, 1.0, root=root, matrix=matrix)
    in_switch = all(group.topology.node_types[int(node)].nvls for node in group.node_ids)
    bounds = [(0.0, 0.0)]
    for part, out, into, latency in _cuts(group):
        counts = np.bincount(part)
        needs = _crossing(request, group, part, counts)
        for need, bandwidth in zip(needs, (out, into), strict=True):
            crossed = matrix is None or bool(need.any())
            bounds.append((latency if crossed else 0.0, _longest(need, bandwidth)))
            if request.kind == "all_reduce" and not (in_switch and len(counts) == group.size):
                bounds.append((latency, 2.0 * (len(counts) - 1) / float(bandwidth.sum())))
    return tuple(bounds)


def _longest(need: Floats, bandwidth: Floats) -> float:
    used = (need > 0) & (bandwidth > 0)
    return float((need[used] / bandwidth[used]).max(initial=0.0))


@kept_with_topology(maxsize=1024)
def _cuts(group: Group) -> tuple[tuple[Ints, Floats, Floats, float], ...]:
    """Per way to cut the group: part of each member, bandwidth out of and into each part [bytes/s], latency [s]."""
    topology = group.topology
    islands = member_islands(group)
    routes = routing.router(group.topology)
    several = int(islands.max()) > 0
    gpus = group.gpus.tolist()
    direct = not several and all(routes.path_class(gpus[0], gpu) in _DIRECT for gpu in gpus[1:])
    out, into = (side[group.gpus] for side in _vertex_bandwidth(topology, direct))
    first = np.unique(islands, return_index=True)[1]
    beside = np.flatnonzero(islands == islands[0])[1:2]
    cuts: list[tuple[Ints, Floats, Floats, float]] = [
        (np.arange(group.size, dtype=np.int64), out, into, _latency(group, beside if len(beside) else first[1:5]))
    ]
    if several:
        island_of = routes.islands.of[group.gpus[first]]
        out, into = (side[island_of] for side in _island_bandwidth(topology))
        cuts.append((islands, out, into, _latency(group, first[1:5])))
    return tuple(cuts)


def _summed(ends: Ints, bandwidth: Floats, n: int) -> Floats:
    return np.asarray(np.bincount(ends, weights=bandwidth, minlength=n), dtype=np.float64)


def _latency(group: Group, members: Ints) -> float:
    """Shortest way [s] from member 0 to one of these members: by the near NICs, or by a rail that both ends have, which
    may spare a spine."""
    router = routing.router(group.topology)
    topology = group.topology
    first = int(group.gpus[0])
    rails = range(-1, len(router.nics_of_node(int(topology.vertex_node[first]))))
    ways = (router.route(first, int(group.gpus[member]), 0, rail) for member in members.tolist() for rail in rails)
    return min(route_latency(topology, route) for route in ways)


@kept_with_first(maxsize=16)
def _vertex_bandwidth(topology: Topology, direct: bool) -> tuple[Floats, Floats]:
    """Line rate out of and into every vertex, by GPU links alone if ``direct``."""
    bandwidth = topology.link_bandwidth
    if direct:
        bandwidth = np.where(np.isin(np.array(topology.link_kinds), ("nvlink", "xgmi")), bandwidth, 0.0)
    n = len(topology.vertex_kinds)
    return _summed(topology.link_src, bandwidth, n), _summed(topology.link_dst, bandwidth, n)


@kept_with_first(maxsize=16)
def _island_bandwidth(topology: Topology) -> tuple[Floats, Floats]:
    """Line rate out of and into every island of a machine: all links that cross its edge."""
    island_of = routing.router(topology).islands.of
    src = island_of[topology.link_src]
    dst = island_of[topology.link_dst]
    n = int(island_of.max()) + 1
    edge = np.where(src != dst, topology.link_bandwidth, 0.0)
    return _summed(src[src >= 0], edge[src >= 0], n), _summed(dst[dst >= 0], edge[dst >= 0], n)


def _crossing(request: Request, group: Group, part: Ints, counts: Ints) -> tuple[Floats, Floats]:
    """Bytes that must leave and enter each part."""
    size = request.nbytes
    kind = request.kind
    n = group.size
    own: Floats = size * counts / n
    rest: Floats = size * (n - counts) / n
    if kind == "all_reduce":
        counts_whole = np.full(len(counts), float(size))
        return counts_whole, counts_whole
    if kind == "all_gather":
        return own, rest
    if kind == "reduce_scatter":  # what enters is already reduced
        return rest, own
    if request.matrix is not None:
        away = size * request.matrix.array * (part[:, None] != part[None, :])
        return _summed(part, away.sum(axis=1), len(counts)), _summed(part, away.sum(axis=0), len(counts))
    if kind == "all_to_all":
        both: Floats = own * (n - counts)
        return both, both
    if kind in {"send", "sendrecv"}:
        return _pairwise(request, group, part, len(counts))
    if kind == "barrier":
        return np.zeros(len(counts)), np.zeros(len(counts))
    # The root's part against the others: broadcast, scatter and their mirror images reduce and gather.
    rooted = np.arange(len(counts)) == part[request.root]
    entire = kind in {"broadcast", "reduce"}
    at_root = np.where(rooted, size if entire else rest, 0.0)
    elsewhere = np.where(rooted, 0.0, size if entire else own)
    return (at_root, elsewhere) if kind in _ROOT_SENDS else (elsewhere, at_root)


def _pairwise(request: Request, group: Group, part: Ints, parts: int) -> tuple[Floats, Floats]:
    out = np.zeros(parts)
    into = np.zeros(parts)
    pairs = [(0, 1)] if request.kind == "send" else [(i, (i + 1) % group.size) for i in range(group.size)]
    for src, dst in pairs:
        if part[src] != part[dst]:
            out[part[src]] += request.nbytes
            into[part[dst]] += request.nbytes
    return out, into
