"""From traffic to link loads: what every byte of payload costs each link."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives.base import EdgeCosts, Group, Traffic
from clustersim.collectives.islands import kinds_of_members, member_islands
from clustersim.topology import route_latency

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


def edge_costs(traffic: Traffic, group: Group, nbytes: float, links: Ints, weights: Floats) -> EdgeCosts:
    """What every edge of the traffic takes, given the link loads of all of it. Islands built alike are asked once.

    Where edges share each link by their loads, an edge's bytes take the largest weight over bandwidth on its route.
    """
    topology, router = group.topology, routing.router(group.topology)
    pace = np.zeros(topology.n_links)
    pace[links] = weights / topology.link_bandwidth[links]
    first, inverse = _distinct(traffic, group)
    hop, alone, busy = (np.empty(len(first)) for _ in range(3))
    for i, edge in enumerate(first.tolist()):
        src, dst, rail = int(traffic.src[edge]), int(traffic.dst[edge]), int(traffic.rail[edge])
        ends = [int(group.gpus[m]) if m >= 0 else -1 for m in (src, dst)]
        crossed, share = router.loads([ends[0]], [ends[1]], 1.0, [rail])
        latency = topology.link_latency[crossed].max(initial=0.0)  # to a switch: over parallel links
        hop[i] = route_latency(topology, router.route(ends[0], ends[1], 0, rail)) if src >= 0 and dst >= 0 else latency
        alone[i] = (share / topology.link_bandwidth[crossed]).max(initial=0.0)
        busy[i] = pace[crossed].max(initial=0.0)
    own = traffic.fraction * alone[inverse]
    return EdgeCosts(hop[inverse], nbytes * own, nbytes * np.maximum(own, busy[inverse]))


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
