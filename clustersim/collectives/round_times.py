"""When the rounds of an algorithm are over: each member goes on to its next round when it is through with its own.

Nobody waits for members that it has nothing to do with. So what an algorithm in rounds takes is the longest way through
its sends: one begins when both its ends are through with their rounds before (:class:`Steps`, ``blocking``), and takes
its bytes on the link of its route that its own round loads most, and the hop. Where all members are alike that is the
sum over rounds of the busiest link's time. Members of different rounds that meet on a link are not seen here.
"""

from __future__ import annotations

import math

import numpy as np

from clustersim.collectives.base import Group, Traffic
from clustersim.collectives.loads import edge_costs, link_loads
from clustersim.core.arrays import Floats


def by_members(traffic: Traffic, group: Group, nbytes: float, hop: Floats) -> tuple[float, float]:
    """Payload rate [bytes/s] and latency [s] of ``nbytes`` in rounds; ``hop`` (E,) [s] of each edge's route."""
    busy = round_paces(traffic, group)
    pace = longest_way(traffic, group.size, busy)
    latency = longest_way(traffic, group.size, nbytes * busy, hop) - nbytes * pace
    return (1.0 / pace if pace else math.inf), max(latency, 0.0)


def round_paces(traffic: Traffic, group: Group) -> Floats:
    """(E,) seconds per byte of S of each edge, sharing links with the others of its round by their loads."""
    busy = np.zeros(len(traffic.src))
    busy_of: dict[tuple[bytes, ...], Floats] = {}  # the rounds of a ring are all the same
    for chosen in traffic.rounds:
        part = traffic.only(chosen)
        key = part.src.tobytes(), part.dst.tobytes(), part.fraction.tobytes()
        if key not in busy_of:
            busy_of[key] = edge_costs(part, group, 1.0, *link_loads(part, group)).busy
        busy[chosen] = busy_of[key]
    return busy


def longest_way(traffic: Traffic, n: int, busy: Floats, hop: Floats | float = 0.0) -> float:
    """When the last of ``n`` members is through [s]; edges send for ``busy`` (E,) [s] and arrive a ``hop`` [s] later.

    Where rounds do not block, a send waits for what came in earlier rounds, and until its sender's earlier ones left.
    """
    hop = np.broadcast_to(hop, busy.shape)
    through = np.zeros(n)
    left = np.zeros(n)
    for chosen in traffic.rounds:
        src = traffic.src[chosen]
        dst = traffic.dst[chosen]
        begin = np.maximum(through[src], through[dst] if traffic.blocking else left[src])
        drained = begin + busy[chosen]
        after = through.copy()
        np.maximum.at(after, dst, drained + hop[chosen])
        if traffic.blocking:
            np.maximum.at(after, src, drained + hop[chosen])
        np.maximum.at(left, src, drained)
        through = after
    return float(through.max(initial=0.0))
