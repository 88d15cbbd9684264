"""Plans of sends by the thousand: pairs that are wired alike share a plan, each on its own route.

A pipeline of 16,384 ranks has thirty thousand pairs. What a planner says of one (latency, ceiling, share of the line
rate) depends on the ends, places of nodes wired alike, and on the links between them; so one call serves all pairs of a
kind, and the links of each are put together from its way to a port, the network's path, and the way from the port. The
first pair of a kind is compared with what the planner says: where its links are others, every pair is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives.base import Plan
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class _End:
    """The way between a GPU and its port: the port, the links and the share of the bytes on each, and what is alike."""

    port: int
    links: Ints
    share: Floats
    sign: bytes


class Routes:
    """Ways of pairs on one topology. ``sign`` : of a vertex, where it is and how that is wired; None for unknown."""

    def __init__(self, topology: Topology, sign: Callable[[int], bytes | None]) -> None:
        self.topology, self.sign = topology, sign
        self.router = routing.router(topology)
        self._ends: dict[tuple[int, bool], _End | None] = {}
        self._ways: dict[tuple[int, int], tuple[bytes, Ints, Floats] | None] = {}

    def way(self, src: int, dst: int) -> tuple[bytes, Ints, Floats] | None:
        """What is alike for pairs of a kind; links in the order they are crossed, bytes on each per byte sent.

        None for pairs in one node, with a choice of ports, or without a way.
        """
        if (src, dst) not in self._ways:
            self._ways[src, dst] = self._found(src, dst)
        return self._ways[src, dst]

    def _found(self, src: int, dst: int) -> tuple[bytes, Ints, Floats] | None:
        if self.router._same_island(src, dst):
            return None
        leave, enter = self._end(src, True), self._end(dst, False)
        if leave is None or enter is None:
            return None
        path = self.router.network.path(leave.port, enter.port, 0)
        if path is None:
            return None
        top, net = self.topology, np.array(path, dtype=np.int64)
        parts = leave.sign, enter.sign, top.link_bandwidth[net].tobytes(), top.link_latency[net].tobytes()
        links = np.concatenate([leave.links, net, enter.links])
        return b"|".join(parts), links, np.concatenate([leave.share, np.ones(len(net)), enter.share])

    def _end(self, vertex: int, leaves: bool) -> _End | None:
        if (vertex, leaves) not in self._ends:
            self._ends[vertex, leaves] = self._made(vertex, leaves)
        return self._ends[vertex, leaves]

    def _made(self, vertex: int, leaves: bool) -> _End | None:
        ends, sign, islands = self.router.ends(vertex, -1), self.sign(vertex), self.router.islands
        if len(ends) != 1 or sign is None:
            return None
        port, legs = ends[0]
        links, shares = [np.zeros(0, dtype=np.int64)], [np.zeros(0)]
        for a, b in legs if leaves else [(b, a) for a, b in reversed(legs)]:
            island = int(islands.of[a])
            template = islands.templates[int(islands.template[island])]
            local, share = template.spread(int(islands.local[a]), int(islands.local[b]))
            if not len(local):
                return None
            links.append(islands.links[int(islands.link_start[island]) + local])
            shares.append(share)
        return _End(port, np.concatenate(links), np.concatenate(shares), sign)


def factors(plan: Plan, links: Ints, share: Floats) -> Floats | None:
    """What a plan's weight on each link is, of the share of the bytes there; None where its links are others."""
    order = np.argsort(links)
    if len(links) != len(plan.links) or not np.array_equal(links[order], np.sort(plan.links)):
        return None
    found = np.empty(len(links))
    found[order] = plan.weights[np.argsort(plan.links)]
    return found / share
