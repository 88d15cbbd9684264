"""How much a machine can move at most: into the network, across a cut, between halves; and who cannot reach whom."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from clustersim.cluster.routes.local import GPU_LINKS
from clustersim.cluster.routes.router import Router, router
from clustersim.core.topology import PATH_CLASSES, SWITCH, Floats, Ints, Topology

EXAMPLES = 10
"""Pairs without a route that are named."""


def injection_bandwidth(topology: Topology) -> Floats:
    """(G,) bytes/s each GPU can send out of its island (node, or NVLink domain) while all GPUs there send as much;
    of a cluster without GPUs, each CPU.

    A GPU spreads evenly over its nearest NICs; a NIC carries what its slot carries. Where there is only one island (or
    no NIC) it is what a GPU can send to the others there: NVLink if it has any, else all its links.
    """
    routes = router(topology)
    gpus = topology.homes
    n = len(topology.vertex_names)
    egress = np.bincount(topology.link_src, weights=topology.link_bandwidth, minlength=n)
    several = len(routes.islands.template) > 1
    near = [routes.nearest_nics(gpu) if several else () for gpu in gpus.tolist()]
    load = np.zeros(n)
    for nics in near:
        load[list(nics)] += 1 / max(len(nics), 1)
    inside = topology.vertex_node[topology.link_src] >= 0
    slot = np.bincount(topology.link_dst[inside], weights=topology.link_bandwidth[inside], minlength=n)
    nvlink = np.array([kind in GPU_LINKS for kind in topology.link_kinds], dtype=np.float64)
    fast = np.bincount(topology.link_src, weights=topology.link_bandwidth * nvlink, minlength=n)
    out: Floats = egress[gpus].astype(np.float64)
    for i, (gpu, nics) in enumerate(zip(gpus.tolist(), near, strict=True)):
        if nics:
            share = [min(routes.nic_bandwidth(nic), slot[nic] or np.inf) / load[nic] for nic in nics]
            out[i] = min(out[i], min(share))
        else:
            out[i] = fast[gpu] or out[i]
    return out


def bisection_bandwidth(topology: Topology) -> float:
    """Bytes/s from the first half of the nodes to the second; on one node, from half of its GPUs to the other half.

    0 with one GPU.
    """
    gpus = topology.homes
    if topology.n_nodes > 1:
        first = topology.vertex_node[gpus] < topology.n_nodes // 2
    else:
        first = np.arange(len(gpus)) < len(gpus) // 2
    return cut_bandwidth(topology, gpus[first].tolist(), gpus[~first].tolist())


def cut_bandwidth(topology: Topology, a: Sequence[int], b: Sequence[int]) -> float:
    """Bytes/s that vertices ``a`` together can send to vertices ``b``: maximum flow = minimum cut, at line rates."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import maximum_flow

    if not len(a) or not len(b) or not topology.n_links:
        return 0.0
    n = len(topology.vertex_names)
    unit = _unit(topology, a, b)
    src = np.r_[topology.link_src, np.full(len(a), n), np.asarray(b)]
    dst = np.r_[topology.link_dst, np.asarray(a), np.full(len(b), n + 1)]
    ends = np.full(len(a) + len(b), float(np.iinfo(np.int32).max))
    capacity = np.r_[np.round(topology.link_bandwidth / unit), ends].astype(np.int32)
    graph = coo_matrix((capacity, (src, dst)), shape=(n + 2, n + 2)).tocsr()
    return float(maximum_flow(graph, n, n + 1).flow_value) * unit


def _unit(topology: Topology, a: Sequence[int], b: Sequence[int]) -> float:
    """Bytes/s that one unit of flow stands for: 32-bit integers must hold the whole flow. Where all bandwidths are
    multiples of one that is large enough, that one, and the flow is exact."""
    island_of = router(topology).islands.of
    inside = np.zeros(len(island_of), dtype=bool)
    inside[np.asarray(a)] = True
    rate = topology.link_bandwidth
    most = rate[inside[topology.link_src]].sum()
    if not np.isin(island_of[np.asarray(a)], island_of[np.asarray(b)]).any():
        home = np.isin(island_of, island_of[np.asarray(a)])
        most = min(most, rate[home[topology.link_src] & ~home[topology.link_dst]].sum())
    least = max(float(most), float(rate.max())) / 2e9
    common = float(np.gcd.reduce(np.round(rate).astype(np.int64)))
    return common if common >= least and np.all(rate == np.round(rate)) else least


def unreachable_pairs(topology: Topology) -> tuple[int, tuple[tuple[str, str], ...]]:
    """How many ordered pairs of GPUs have no route, and the first few by name.

    Pairs inside an island are tried once per distinct build; pairs between islands, once per two parts of the network
    (sets of switches that all reach each other).
    """
    routes = router(topology)
    names = topology.vertex_names
    count, examples = _inside(routes)
    groups = _groups(routes)
    for a in groups:
        for b in groups:
            lost, pair = _across(routes, groups[a], groups[b])
            if lost and not (a and b and routes.reaches(*pair)):
                count += lost
                examples.append((names[pair[0]], names[pair[1]]))
    return count, tuple(examples[:EXAMPLES])


def _inside(routes: Router) -> tuple[int, list[tuple[str, str]]]:
    islands = routes.islands
    names = routes.topology.vertex_names
    count = 0
    examples: list[tuple[str, str]] = []
    for number, template in enumerate(islands.templates):
        lost = [(a, b) for a in template.gpus for b in template.gpus if not template.paths(a, b)]
        alike = np.flatnonzero(islands.template == number)
        count += len(lost) * len(alike)
        if lost:
            start = int(islands.vertex_start[alike[0]])
            island_vertices = islands.vertices[start:]
            examples += [(names[island_vertices[a]], names[island_vertices[b]]) for a, b in lost[:EXAMPLES]]
    return count, examples


def _groups(routes: Router) -> dict[tuple[int, ...], Ints]:
    """GPUs by the parts of the network that the ports they get out by belong to."""
    part = _parts(routes.topology)
    joined = PATH_CLASSES[: PATH_CLASSES.index("NET")]
    groups: dict[tuple[int, ...], list[int]] = {}
    for gpu in routes.topology.gpus.tolist():
        usable = (port for port, legs in routes.ends(gpu, -1) if all(routes.path_class(*leg) in joined for leg in legs))
        heads = {int(part[routes.topology.link_dst[e]]) for port in usable for e in routes.network.out[port]}
        groups.setdefault(tuple(sorted(heads)), []).append(gpu)
    return {key: np.array(gpus, dtype=np.int64) for key, gpus in groups.items()}


def _parts(topology: Topology) -> Ints:
    """Strongly connected component of every vertex, over network links between switches."""
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    switch = np.array([kind == SWITCH for kind in topology.vertex_kinds], dtype=bool)
    both = switch[topology.link_src] & switch[topology.link_dst]
    src = topology.link_src[both]
    dst = topology.link_dst[both]
    n = len(switch)
    graph = coo_matrix((np.ones(len(src), dtype=np.int8), (src, dst)), shape=(n, n)).tocsr()
    labels: Ints = connected_components(graph, directed=True, connection="strong")[1].astype(np.int64)
    return labels


def _across(routes: Router, a: Ints, b: Ints) -> tuple[int, tuple[int, int]]:
    """Ordered pairs of two groups that sit on different islands: how many, and the first one."""
    island_of = routes.islands.of
    n = int(island_of.max(initial=0)) + 1
    count = len(a) * len(b) - int(np.bincount(island_of[a], minlength=n) @ np.bincount(island_of[b], minlength=n))
    if not count:
        return 0, (-1, -1)
    elsewhere = b[island_of[b] != island_of[a[0]]]
    src = a[0] if len(elsewhere) else a[island_of[a] != island_of[b[0]]][0]
    return count, (int(src), int(elsewhere[0] if len(elsewhere) else b[0]))
