"""The front of a pipeline: how long the links of a collective wait for its first pieces, and drain after its last.

A pipelined stream (an edge of a tree, or of a ring that broadcasts) begins when its first piece has come through all
edges before it, and from then on shares its links with every other stream that has begun. So what delays a collective
beyond the bytes of its narrowest link is what that link leaves unused until all its streams have begun, and the way of
the last piece from it to the end. One pass follows the fronts of all channels together, each edge sending one piece:
streams of different channels fill each other's gaps, and in part pay for them with slower fronts.

What this leaves out is the end: streams that began first end first, and those that are left on a link then wait for the
pieces of streams before them, which share other links with others. So where many streams share links the sum is some
pieces too short, whatever the size (tests/test_flow_and_chunk.py has the bounds). Following all streams to their ends
as fluids instead is no nearer to the replay (at most 7 % off instead of 5 %, on 45 groups of 7 machines).
"""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.base import EdgeCosts, Group, Traffic
from clustersim.core.arrays import Bools, Floats, Ints

MOST_FRONTS = 150_000
"""Edges times steps of a traffic that :func:`pipeline_fill` still follows within a fraction of a second."""

TOGETHER = 0.02
"""Fronts this near to their ends, as a part of a piece, end together."""

INSTANT = 1e-9
"""Arrivals this close [s] are one."""

PASSES = 4
"""Rounds of pouring what capped streams leave over to the others."""


class Routes(msgspec.Struct, frozen=True, eq=False):
    """Links of every edge, one edge after another.

    Parameters
    ----------
    ptr : (E,) int, where an edge's links begin. edge, link : (K,) int. weight : (K,) float, bytes per byte of the edge.
    bandwidth : (L,) float [bytes/s] of the links crossed; ``link`` indexes it.
    """

    ptr: Ints
    edge: Ints
    link: Ints
    weight: Floats
    bandwidth: Floats

    def per_link(self, of_edge: Floats) -> Floats:
        """(L,) bytes (or bytes/s) on every link, given those of every edge."""
        return np.bincount(self.link, self.weight * of_edge[self.edge], len(self.bandwidth)).astype(np.float64)

    def least(self, of_link: Floats) -> Floats:
        """(E,) the least of a quantity over each edge's links."""
        least: Floats = np.minimum.reduceat(of_link[self.link], self.ptr)
        return least


def few_enough(traffic_edges: int, steps: int) -> bool:
    """Whether fronts can be followed edge by edge."""
    return 0 < traffic_edges * steps <= MOST_FRONTS


def routes(traffic: Traffic, group: Group) -> Routes:
    """Every edge's links, as :meth:`clustersim.cluster.routes.Router.loads` spreads one byte over them."""
    router = routing.router(group.topology, traffic.relay)
    ptr, links, weight = router.loads_of_each(group.gpus[traffic.src], group.gpus[traffic.dst], traffic.rail)
    used, link = np.unique(links, return_inverse=True)
    edge = np.repeat(np.arange(len(traffic.src)), np.diff(ptr))
    return Routes(ptr[:-1], edge, link.reshape(-1), weight, group.topology.link_bandwidth[used])


def pipeline_fill(
    traffic: Traffic, group: Group, nbytes: float, depth: Ints, waits: tuple[Ints, Ints], costs: EdgeCosts
) -> float:
    """Seconds of a pipelined collective beyond the bytes of its slowest link.

    Parameters
    ----------
    nbytes : float [bytes], S. depth : (E,) int, pieces each edge sends.
    waits : two (P,) int: edge ``waits[1][i]`` passes on what ``waits[0][i]`` brought.
    """
    on = routes(traffic, group)
    size = nbytes * traffic.fraction
    start, unused, left = _fronts(size / depth, depth, costs.hop, waits, on)
    tail = _tails(start, costs.hop, costs.alone / depth, waits)
    busy = on.per_link(size) / on.bandwidth
    by_link = (unused + busy)[on.link] - _end_before(left, on) + tail[on.edge]
    return float(max(by_link.max(), (start + costs.alone + tail).max()) - busy.max())


def _end_before(left: Floats, on: Routes) -> Floats:
    """(K,) seconds from the end of an edge's stream on a link to the end of that link's last stream.

    Streams that share alike end in the order of what they have ``left`` once all have begun; then the link still has
    to carry what the others have more.
    """
    order = np.lexsort((-left[on.edge], on.link))
    link = on.link[order]
    weight = on.weight[order]
    remaining = left[on.edge][order]
    new = np.concatenate([[True], link[1:] != link[:-1]])
    first = np.maximum.accumulate(np.where(new, np.arange(len(link)), 0))
    total, count = (np.cumsum(weight * x) - weight * x for x in (remaining, np.ones(len(link))))
    more = (total - total[first]) - (count - count[first]) * remaining
    seconds = np.empty(len(link))
    seconds[order] = np.maximum(0.0, more) / on.bandwidth[link]
    return seconds


def _fronts(piece: Floats, depth: Ints, hop: Floats, waits: tuple[Ints, Ints], on: Routes) -> tuple[Floats, ...]:
    """Follow first pieces until all are through.

    Returns (E,) when each edge's first piece sets out, (L,) seconds a link goes unused before all its streams have
    begun, and (E,) bytes the streams then have left.
    """
    before, after = waits
    unmet = np.bincount(after, minlength=len(piece))
    begun = unmet == 0
    through = np.zeros(len(piece), dtype=bool)
    start = np.zeros(len(piece))
    arrival = np.full(len(piece), np.inf)
    left = piece.copy()
    budget = piece * depth
    unused = np.zeros(len(on.bandwidth))
    streams = np.bincount(on.link, minlength=len(on.bandwidth))
    rate = np.zeros(len(piece))
    now = 0.0
    while not through.all() or np.isfinite(arrival).any():
        supply = np.full(len(piece), np.inf)
        flowing = rate[before] > 0
        np.minimum.at(supply, after[flowing], rate[before][flowing])
        active = begun & ((budget > 0) | ~through)
        rate = _shares(active, np.where(through, supply, np.inf), on)
        waiting = np.bincount(on.link, begun[on.edge], len(unused)) < streams
        moving = begun & ~through
        ends = (left[moving] / rate[moving]).min() if moving.any() else np.inf
        passed = max(0.0, min(float(ends), float(arrival.min()) - now))
        unused += np.where(waiting, passed * np.maximum(0.0, 1.0 - on.per_link(rate) / on.bandwidth), 0.0)
        now += passed
        left = left - rate * passed
        budget = budget - rate * passed
        done = moving & (left <= TOGETHER * piece)
        through |= done
        arrival[done] = now + hop[done]
        arrived = arrival <= now + INSTANT
        arrival[arrived] = np.inf
        np.subtract.at(unmet, after[arrived[before]], 1)
        fresh = (unmet == 0) & ~begun
        begun |= fresh
        start[fresh] = now
    return start, unused, np.maximum(budget, 0.0)


def _shares(active: Bools, ceiling: Floats, on: Routes) -> Floats:
    """(E,) bytes/s: links shared alike among active streams; what capped ones leave is poured over the others.

    A few rounds instead of exact max-min: nothing exceeds a link, and a link that could be full nearly is.
    """
    count = on.per_link(active.astype(np.float64))
    level = np.divide(on.bandwidth, count, out=np.full(len(count), np.inf), where=count > 0)
    rate = np.where(active, np.minimum(on.least(level), ceiling), 0.0)
    for _ in range(PASSES - 1):
        used = on.per_link(rate)
        room = np.divide(on.bandwidth, used, out=np.ones(len(used)), where=used > 0)
        rate = np.minimum(rate * on.least(room), ceiling)
    return rate


def _tails(start: Floats, hop: Floats, piece: Floats, waits: tuple[Ints, Ints]) -> Floats:
    """(E,) seconds from the end of a last piece on an edge until it has come everywhere, over links left to itself."""
    before, after = waits
    tail = hop.copy()
    order = np.argsort(-start[before], kind="stable")  # an edge sets out before those it feeds
    for edge, fed in zip(before[order].tolist(), after[order].tolist(), strict=True):
        tail[edge] = max(tail[edge], hop[edge] + piece[fed] + tail[fed])
    return tail
