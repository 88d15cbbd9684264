"""Paths outside nodes: from one port to another over network switches, static, with ECMP.

Distances are searched among switches only, from the leaf of a destination, and kept; ports never forward.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from clustersim.cluster.routes.levels import Levels
from clustersim.core.memo import kept_with_first
from clustersim.core.topology import SWITCH, Ints, Topology

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


def mixed(*values: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    """:func:`mix` of columns.

    >>> mixed([1, 5], 2, 3).tolist() == [mix(1, 2, 3), mix(5, 2, 3)]
    True
    """
    state = np.zeros(1, dtype=np.uint64)
    for value in values:
        state = state + np.asarray(value).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return state


class NetworkLinks:
    """The part of a topology made of ``net`` links."""

    def __init__(self, topology: Topology) -> None:
        self.hashed = topology.routing == "hash"
        net = [i for i, kind in enumerate(topology.link_kinds) if kind == "net"]
        self.links = np.array(net, dtype=np.int64)
        self.tail = topology.link_src
        self.head = topology.link_dst
        self.out: dict[int, list[int]] = {}
        self.into: dict[int, list[int]] = {}
        for link, a, b in zip(net, self.tail[net].tolist(), self.head[net].tolist(), strict=True):
            self.out.setdefault(a, []).append(link)
            self.into.setdefault(b, []).append(link)
        self.switch = np.array([kind == SWITCH for kind in topology.vertex_kinds], dtype=bool)
        self._heads, self._tails = self.head.tolist(), self.tail.tolist()
        self._places = np.zeros((2, len(self.switch)), dtype=np.int64)
        self._levels = Levels(self.switch, self._tails, self.into)
        self._number_ports()

    @cached_property
    def _sides(self) -> tuple[_SidePorts, _SidePorts]:
        """Where vertices are left by and entered from."""
        return _SidePorts(self.out, self._heads, self.switch), _SidePorts(self.into, self._tails, self.switch)

    def _number_ports(self) -> None:
        """A port's place under its first leaf, and a leaf's place among leaves: the digits of destination routing."""
        count: dict[int, int] = {}
        leaves: dict[int, int] = {}
        switch = self.switch.tolist()
        for port, links in self.into.items():
            if not switch[port]:
                leaf = self._tails[links[0]]
                count[leaf] = count.get(leaf, -1) + 1
                self._places[:, port] = count[leaf], leaves.setdefault(leaf, len(leaves))

    def joins(self, port: int) -> bool:
        """Whether the network can be entered and left at a vertex."""
        return port in self.out and port in self.into

    def path(self, src: int, dst: int, flow: int) -> list[int] | None:
        """Links from port to port; None when there is no way."""
        leaves = tuple(sorted({self._tails[e] for e in self.into.get(dst, ())}))
        out = self.out.get(src, [])
        if src in leaves:
            return [next(e for e in out if self._heads[e] == dst)]
        first = [out[k] for k in self._levels.nearest([self._heads[e] for e in out], leaves)]
        if not first:
            return None
        route = [first[flow % len(first)]]
        switch = self._heads[route[0]]
        while choices := self._levels.nearer(switch, leaves):
            route.append(choices[self._pick(src, dst, flow, switch, len(route) - 1) % len(choices)])
            switch = self._heads[route[-1]]
        last = [e for e in self.into[dst] if self._tails[e] == switch]
        return [*route, last[flow % len(last)]]

    def paths(self, src: Ints, dst: Ints, flow: Ints) -> tuple[Ints, Ints]:
        """:meth:`path` of many pairs of ports: ``(rows, links)``, sorted by row, each row's links as they are crossed.

        They go a hop at a time, all by the links that :class:`~clustersim.cluster.routes.levels.Levels` looks up.

        Raises :class:`LookupError` for pairs without a way; its argument is the first one's row.
        """
        leaving, entering = self._sides
        kinds, kind_of = np.unique(entering.kind[dst], return_inverse=True)
        if entering.direct[kinds].any():  # ports wired to ports
            return self._one_by_one(src, dst, flow)
        levels = self._levels.numbers([entering.leaves[kind] for kind in kinds.tolist()])[:, kind_of]
        row, (which, link) = np.arange(len(src)), leaving.links(src)
        hops = self._levels.away(self.head[link], levels[:, which])
        left = np.full(len(src), len(levels) - 1)
        np.minimum.at(left, which, hops)
        first = hops == left[which]
        rows = [row]
        links = [_turned(which[first], link[first], flow)]
        switches = self.head[links[0]]
        while len(row := row[left[row] > 0]):
            pick = self._picks(src[row], dst[row], flow[row], switches[row], len(rows) - 1)
            left[row] -= 1
            rows.append(row)
            links.append(self._levels.links(switches[row], levels[left[row], row], pick))
            switches[row] = self.head[links[-1]]
        which, link = entering.links(dst)
        last = self.tail[link] == switches[which]
        rows.append(np.arange(len(src)))
        links.append(_turned(which[last], link[last], flow))
        order = np.argsort(np.concatenate(rows), kind="stable")
        return np.concatenate(rows)[order], np.concatenate(links)[order]

    def _one_by_one(self, src: Ints, dst: Ints, flow: Ints) -> tuple[Ints, Ints]:
        rows = []
        links = []
        for row, ends in enumerate(zip(src.tolist(), dst.tolist(), flow.tolist(), strict=True)):
            path = self.path(*ends)
            if path is None:
                raise LookupError(row)
            rows += [row] * len(path)
            links += path
        return np.array(rows, dtype=np.int64), np.array(links, dtype=np.int64)

    def _picks(self, src: Ints, dst: Ints, flow: Ints, switches: Ints, step: int) -> npt.NDArray[np.int64 | np.uint64]:
        """:meth:`_pick` of many."""
        if self.hashed:
            return mixed(src, dst, flow, switches)
        digits: Ints = self._places[min(step, 1), dst]
        return digits + flow

    def _pick(self, src: int, dst: int, flow: int, switch: int, step: int) -> int:
        """Which equal-cost hop. By destination: the port's place at the first switch, its leaf's further up, so that
        shifts of neighbours do not collide (d-mod-k, as InfiniBand's fat-tree routing). Or a hash, as Ethernet's."""
        if self.hashed:
            return mix(src, dst, flow, switch)
        return int(self._places[min(step, 1), dst]) + flow


class _SidePorts:
    """The links of all vertices on one side. ``kind``, by number, of each one's far ends; and of a kind the ``leaves``
    among them, each once, and whether some are no switches (``direct``)."""

    def __init__(self, links: dict[int, list[int]], far: list[int], switch: npt.NDArray[np.bool_]) -> None:
        kind_numbers: dict[tuple[int, ...], int] = {(): 0}
        self.kind, self._first, self._count = np.zeros((3, len(switch)), dtype=np.int64)
        vertices = list(links)
        link_lists = list(links.values())
        self.kind[vertices] = [
            kind_numbers.setdefault(tuple([far[k] for k in vertex_links]), len(kind_numbers))
            for vertex_links in link_lists
        ]
        self._count[vertices] = [len(vertex_links) for vertex_links in link_lists]
        self._first[vertices] = np.cumsum(self._count[vertices]) - self._count[vertices]
        self._links = np.array([link for vertex_links in link_lists for link in vertex_links], dtype=np.int64)
        self.leaves = [tuple(sorted(set(ends))) for ends in kind_numbers]
        self.direct = np.array([not switch[list(ends)].all() for ends in kind_numbers])

    def links(self, vertices: Ints) -> tuple[Ints, Ints]:
        """All links of some vertices: which of them each is of, and the link."""
        count = self._count[vertices]
        which = np.repeat(np.arange(len(vertices)), count)
        before = np.cumsum(count) - count - self._first[vertices]
        return which, self._links[np.arange(len(which)) - before[which]]


def _turned(which: Ints, links: Ints, turn: Ints) -> Ints:
    """Of the links of each row, which ``which`` (ascending) says, the ``turn``-th, counted round. Raises
    :class:`LookupError` with the first row that has none."""
    count = np.bincount(which, minlength=len(turn))
    if not count.all():
        raise LookupError(int(np.argmin(count)))
    turned_links: Ints = links[np.cumsum(count) - count + turn % count]
    return turned_links


@kept_with_first(maxsize=1)
def network(topology: Topology) -> NetworkLinks:
    """The Network of a topology, kept with it."""
    return NetworkLinks(topology)
