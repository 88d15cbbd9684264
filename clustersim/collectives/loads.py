"""From traffic to link loads: what every byte of payload costs each link."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clustersim.cluster import routes as routing
from clustersim.collectives.base import EdgeCosts, Group, Traffic
from clustersim.collectives.islands import kinds_of_members, member_islands
from clustersim.core.arrays import Floats, Ints
from clustersim.core.topology import route_latency

MOST_ROUTES = 2048
"""Routes between islands looked up one by one for :func:`edge_costs`."""


def link_loads(traffic: Traffic, group: Group) -> tuple[Ints, Floats]:
    """Bytes on each link per byte of S, summed over all edges of all channels.

    An edge to or from the NVSwitch engine (-1) is spread over the member's own links to (or from) its switches. Returns
    ``(links (k,), weights (k,))``, links ascending. Raises :class:`clustersim.core.errors.TopologyError` where there is
    no way.
    """
    gpus = np.append(group.gpus, -1)
    router = routing.router(group.topology, traffic.relay)
    return router.loads(gpus[traffic.src], gpus[traffic.dst], traffic.fraction, traffic.rail)


def edge_costs(traffic: Traffic, group: Group, nbytes: float, links: Ints, weights: Floats) -> EdgeCosts:
    """What every edge of the traffic takes, given the link loads of all of it. Islands built alike are asked once.

    Where edges share each link by their loads, an edge's bytes take the largest weight over bandwidth on its route.
    """
    topology = group.topology
    router = routing.router(group.topology, traffic.relay)
    pace = np.zeros(topology.n_links)
    pace[links] = weights / topology.link_bandwidth[links]
    first, inverse = _distinct(traffic, group)
    gpus = np.append(group.gpus, -1)
    src = gpus[traffic.src[first]]
    dst = gpus[traffic.dst[first]]
    rail = traffic.rail[first]
    ptr, crossed, share = router.loads_of_each(src, dst, rail)
    round_of, (hop, alone, busy) = np.repeat(np.arange(len(first)), np.diff(ptr)), np.zeros((3, len(first)))
    for most, column in (
        (hop, topology.link_latency[crossed]),  # to a switch: over parallel links
        (alone, share / topology.link_bandwidth[crossed]),
        (busy, pace[crossed]),
    ):
        np.maximum.at(most, round_of, column)
    for i in np.flatnonzero((src >= 0) & (dst >= 0)).tolist():
        hop[i] = route_latency(topology, router.route(int(src[i]), int(dst[i]), 0, int(rail[i])))
    own = traffic.fraction * alone[inverse]
    return EdgeCosts(hop[inverse], nbytes * own, nbytes * np.maximum(own, busy[inverse]))


def _distinct(traffic: Traffic, group: Group) -> tuple[Ints, Ints]:
    """Edges that may differ in route or load: ``(first of each kind, kind of each edge)``.

    Inside islands built alike an edge is told by its places. Edges between islands are told apart one by one up to
    :data:`MOST_ROUTES`; beyond, neighbours of equal places stand for each other.
    """
    label, local = kinds_of_members(group)
    src = traffic.src
    dst = traffic.dst
    member = np.where(src < 0, dst, src)
    islands = member_islands(group)
    inside = (src < 0) | (dst < 0) | (islands[src] == islands[dst])
    far = np.where(src < 0, -1, np.where(dst < 0, -2, local[dst]))
    rail = np.where(inside, -1, traffic.rail)
    places = np.stack([inside, label[member], local[member], far, rail], axis=1)
    _, place = np.unique(places, axis=0, return_inverse=True)
    place = place.reshape(-1)
    pair = np.where(inside, 0, src * group.size + dst)
    key = np.stack([place, _bucketed(place, pair, ~inside)], axis=1)
    _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
    return first, inverse.reshape(-1)


def _bucketed(place: Ints, pair: Ints, crossing: npt.NDArray[np.bool_]) -> Ints:
    """``pair`` itself, or where too many differ, the place of an edge among equal ones in coarse steps."""
    if len(np.unique(pair)) <= MOST_ROUTES:
        return pair
    order = np.lexsort((pair, place))
    count = np.bincount(place)
    rank = np.empty(len(place), dtype=np.int64)
    rank[order] = np.arange(len(place)) - np.repeat(np.cumsum(count) - count, count)
    steps = max(4, MOST_ROUTES // len(count))
    coarse: Ints = np.where(crossing, rank * steps // np.maximum(count[place], steps), 0)
    return coarse
