"""Paths outside nodes: from one port to another over network switches, static, with ECMP.

Distances are searched among switches only, from the leaf of a destination, and kept; ports never forward.
"""

from __future__ import annotations

import numpy as np

from clustersim.topology import SWITCH, Topology

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A 64-bit hash of integers (splitmix64's finaliser, folded), the same on every machine.

    >>> mix(1, 2, 3) == mix(1, 2, 3) != mix(3, 2, 1)
    True
    """
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


class Network:
    """The part of a topology made of ``net`` links."""

    def __init__(self, topology: Topology) -> None:
        self.hashed = topology.routing == "hash"
        net = [i for i, kind in enumerate(topology.link_kinds) if kind == "net"]
        self.tail, self.head = topology.link_src, topology.link_dst
        self.out: dict[int, list[int]] = {}
        self.into: dict[int, list[int]] = {}
        for link, a, b in zip(net, self.tail[net].tolist(), self.head[net].tolist(), strict=True):
            self.out.setdefault(a, []).append(link)
            self.into.setdefault(b, []).append(link)
        self.switch = np.array([kind == SWITCH for kind in topology.vertex_kinds], dtype=bool)
        self._heads, self._tails = self.head.tolist(), self.tail.tolist()
        self._place: dict[int, int] = {}
        self._leaf_place: dict[int, int] = {}
        self._searches: dict[tuple[int, ...], tuple[dict[int, int], list[int]]] = {}
        self._hops: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._number_ports()

    def _number_ports(self) -> None:
        """A port's place under its first leaf, and a leaf's place among leaves: the digits of destination routing."""
        count: dict[int, int] = {}
        for port, links in self.into.items():
            if self.switch[port]:
                continue
            leaf = self._tails[links[0]]
            self._leaf_place.setdefault(leaf, len(self._leaf_place))
            self._place[port] = count[leaf] = count.get(leaf, -1) + 1

    def joins(self, port: int) -> bool:
        """Whether the network can be entered and left at a vertex."""
        return port in self.out and port in self.into

    def path(self, src: int, dst: int, flow: int) -> list[int] | None:
        """Links from port to port; None when there is no way."""
        leaves = tuple(sorted({self._tails[e] for e in self.into.get(dst, ())}))
        out = self.out.get(src, [])
        if src in leaves:
            return [next(e for e in out if self._heads[e] == dst)]
        distance = self._distances(leaves, [self._heads[e] for e in out])
        best = min((distance.get(self._heads[e], 1 << 30) for e in out), default=1 << 30)
        if best == 1 << 30:
            return None
        first = [e for e in out if distance.get(self._heads[e], 1 << 30) == best]
        route = [first[flow % len(first)]]
        at, step = self._heads[route[0]], 0
        while distance[at]:
            choices = self._choices(at, leaves, distance)
            route.append(choices[self._pick(src, dst, flow, at, step) % len(choices)])
            at, step = self._heads[route[-1]], step + 1
        last = [e for e in self.into[dst] if self._tails[e] == at]
        return [*route, last[flow % len(last)]]

    def _pick(self, src: int, dst: int, flow: int, at: int, step: int) -> int:
        """Which equal-cost hop. By destination: the port's place at the first switch, its leaf's further up, so that
        shifts of neighbours do not collide (d-mod-k, as InfiniBand's fat-tree routing). Or a hash, as Ethernet's."""
        if self.hashed:
            return mix(src, dst, flow, at)
        if step == 0:
            return self._place[dst] + flow
        return self._leaf_place[self._tails[self.into[dst][0]]] + flow

    def _choices(self, at: int, leaves: tuple[int, ...], distance: dict[int, int]) -> list[int]:
        found = self._hops.get((at, leaves))
        if found is None:
            nearer = distance[at] - 1
            found = [e for e in self.out[at] if distance.get(self._heads[e]) == nearer]
            self._hops[at, leaves] = found
        return found

    def _distances(self, leaves: tuple[int, ...], wanted: list[int]) -> dict[int, int]:
        """Hops to the nearest of the leaves, from switches as far out as the first of ``wanted``; resumed when asked
        again, because a search over all of a large network is rarely needed."""
        search = self._searches.get(leaves)
        if search is None:
            start = [v for v in leaves if self.switch[v]]
            search = self._searches[leaves] = (dict.fromkeys(start, 0), start)
        found, level = search
        while level and not any(v in found for v in wanted):
            following = []
            for v in level:
                for e in self.into.get(v, ()):
                    tail = self._tails[e]
                    if tail not in found and self.switch[tail]:
                        found[tail] = found[v] + 1
                        following.append(tail)
            level = following
        self._searches[leaves] = (found, level)
        return found
