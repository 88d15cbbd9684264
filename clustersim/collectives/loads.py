"""From traffic to link loads: what every byte of payload costs each link."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives.base import Group, Traffic
from clustersim.collectives.islands import kinds_of_members, member_islands
from clustersim.topology import NVSWITCH

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def link_loads(traffic: Traffic, group: Group) -> tuple[Ints, Floats]:
    """Bytes on each link per byte of S, summed over all edges of all channels.

    An edge to or from the NVSwitch engine (-1) is spread over the member's own links to (or from) its switches. Returns
    ``(links (k,), weights (k,))``, links ascending. Raises :class:`clustersim.errors.TopologyError` where there is no
    way.
    """
    src = np.where(traffic.src >= 0, group.gpus[traffic.src], -1)
    dst = np.where(traffic.dst >= 0, group.gpus[traffic.dst], -1)
    return routing.router(group.topology).loads(src, dst, traffic.fraction, traffic.rail)


def edge_costs(traffic: Traffic, group: Group, links: Ints, weights: Floats) -> tuple[Floats, Floats]:
    """Of every edge of the traffic: latency ``hop`` (E,) [s], and ``busy`` (E,) [s per byte of S].

    ``busy`` is what the edge's bytes take where all edges share each link by their loads: the largest weight over
    bandwidth on its route. Islands built alike are asked once.
    """
    topology = group.topology
    pace = np.zeros(topology.n_links)
    pace[links] = weights / topology.link_bandwidth[links]
    first, inverse = _distinct(traffic, group)
    hop, busy = np.empty(len(first)), np.empty(len(first))
    for i, edge in enumerate(first.tolist()):
        route = _edge_route(traffic, group, edge)
        engine = traffic.src[edge] < 0 or traffic.dst[edge] < 0  # over parallel links, not one after the other
        latency = topology.link_latency[route]
        hop[i] = latency.max(initial=0.0) if engine else latency.sum()
        busy[i] = pace[route].max(initial=0.0)
    return hop[inverse], busy[inverse]


def _edge_route(traffic: Traffic, group: Group, edge: int) -> Ints:
    """Links of one edge; for an engine edge the member's links to or from its switches."""
    topology, src, dst = group.topology, int(traffic.src[edge]), int(traffic.dst[edge])
    if src >= 0 and dst >= 0:
        route = routing.router(topology).route(int(group.gpus[src]), int(group.gpus[dst]), 0, int(traffic.rail[edge]))
        return np.asarray(route, dtype=np.int64)
    near, far = (topology.link_src, topology.link_dst) if dst < 0 else (topology.link_dst, topology.link_src)
    mine = np.flatnonzero(near == group.gpus[max(src, dst)])
    return np.array([link for link in mine.tolist() if topology.vertex_kinds[far[link]] == NVSWITCH], dtype=np.int64)


def _distinct(traffic: Traffic, group: Group) -> tuple[Ints, Ints]:
    """Edges that may differ in route or load: ``(first of each kind, kind of each edge)``."""
    label, local = kinds_of_members(group)
    src, dst, rail = traffic.src, traffic.dst, traffic.rail
    islands = member_islands(group)
    inside = (src < 0) | (dst < 0) | (islands[src] == islands[dst])
    engine = np.where(src < 0, -1, np.where(dst < 0, -2, 0))
    member = np.where(src < 0, dst, src)
    key = np.stack(
        [
            np.where(inside, label[member], src + group.size),
            np.where(inside, local[member], dst),
            np.where(inside, np.where(engine < 0, engine, local[dst]), rail),
        ],
        axis=1,
    )
    _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)
