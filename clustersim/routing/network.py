"""Paths outside nodes: from one port to another over network switches, static, with ECMP.

Distances are searched among switches only, from the leaf of a destination, and kept; ports never forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from clustersim.memo import kept_with_first
from clustersim.topology import SWITCH, Ints, Topology

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


class Network:
    """The part of a topology made of ``net`` links."""

    def __init__(self, topology: Topology) -> None:
        self.hashed = topology.routing == "hash"
        net = [i for i, kind in enumerate(topology.link_kinds) if kind == "net"]
        self.links = np.array(net, dtype=np.int64)
        self.tail, self.head = topology.link_src, topology.link_dst
        self.out: dict[int, list[int]] = {}
        self.into: dict[int, list[int]] = {}
        for link, a, b in zip(net, self.tail[net].tolist(), self.head[net].tolist(), strict=True):
            self.out.setdefault(a, []).append(link)
            self.into.setdefault(b, []).append(link)
        self.switch = np.array([kind == SWITCH for kind in topology.vertex_kinds], dtype=bool)
        self._heads, self._tails = self.head.tolist(), self.tail.tolist()
        self._places = np.zeros((2, len(self.switch)), dtype=np.int64)
        self._levels: dict[tuple[int, ...], _Level] = {}
        self._firsts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        self._number_ports()

    @cached_property
    def _sides(self) -> tuple[_Ports, _Ports]:
        """Where vertices are left by and entered from."""
        return _Ports(self.out, self._heads, self.switch), _Ports(self.into, self._tails, self.switch)

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
        first = [out[k] for k in self._nearest(tuple(self._heads[e] for e in out), leaves)]
        if not first:
            return None
        route = [first[flow % len(first)]]
        at = self._heads[route[0]]
        while choices := self._nearer(at, leaves):
            route.append(choices[self._pick(src, dst, flow, at, len(route) - 1) % len(choices)])
            at = self._heads[route[-1]]
        last = [e for e in self.into[dst] if self._tails[e] == at]
        return [*route, last[flow % len(last)]]

    def paths(self, src: Ints, dst: Ints, flow: Ints) -> tuple[Ints, Ints]:
        """:meth:`path` of many pairs of ports: ``(rows, links)``, sorted by row, each row's links as they are crossed.

        Ports under the same leaves have the same choices, so they are looked for once for each two sets of leaves.

        Raises
        ------
        LookupError : for pairs without a way; its argument is the first one's row.
        """
        leaving, entering = self._sides
        out, into = leaving.kind[src], entering.kind[dst]
        if entering.direct[into].any():  # ports wired to ports
            return self._one_by_one(src, dst, flow)

        def first(out: int, into: int) -> Sequence[int]:
            key = leaving.ends[out], entering.leaves[into]
            found = self._firsts.get(key)
            if found is None:
                found = self._firsts[key] = self._nearest(*key)
            return found

        def nearer(at: int, into: int) -> Sequence[int]:
            return self._nearer(at, entering.leaves[into])

        def last(at: int, into: int) -> Sequence[int]:
            return [k for k, v in enumerate(entering.ends[into]) if v == at]

        row = np.arange(len(src))
        rows, links = [row], [leaving.links(src, _chosen(first, out, into, flow))]
        at = self.head[links[0]]
        while len(row):
            pick = self._picks(src[row], dst[row], flow[row], at[row], len(rows) - 1)
            link = _chosen(nearer, at[row], into[row], pick)
            row, link = row[link >= 0], link[link >= 0]
            rows.append(row)
            links.append(link)
            at[row] = self.head[link]
        rows.append(np.arange(len(src)))
        links.append(entering.links(dst, _chosen(last, at, into, flow)))
        order = np.argsort(np.concatenate(rows), kind="stable")
        return np.concatenate(rows)[order], np.concatenate(links)[order]

    def _one_by_one(self, src: Ints, dst: Ints, flow: Ints) -> tuple[Ints, Ints]:
        rows, links = [], []
        for row, ends in enumerate(zip(src.tolist(), dst.tolist(), flow.tolist(), strict=True)):
            path = self.path(*ends)
            if path is None:
                raise LookupError(row)
            rows += [row] * len(path)
            links += path
        return np.array(rows, dtype=np.int64), np.array(links, dtype=np.int64)

    def _picks(self, src: Ints, dst: Ints, flow: Ints, at: Ints, step: int) -> npt.NDArray[np.int64 | np.uint64]:
        """:meth:`_pick` of many."""
        if self.hashed:
            return mixed(src, dst, flow, at)
        digits: Ints = self._places[min(step, 1), dst]
        return digits + flow

    def _pick(self, src: int, dst: int, flow: int, at: int, step: int) -> int:
        """Which equal-cost hop. By destination: the port's place at the first switch, its leaf's further up, so that
        shifts of neighbours do not collide (d-mod-k, as InfiniBand's fat-tree routing). Or a hash, as Ethernet's."""
        if self.hashed:
            return mix(src, dst, flow, at)
        return int(self._places[min(step, 1), dst]) + flow

    def _nearer(self, at: int, leaves: tuple[int, ...]) -> Sequence[int]:
        """Links from a switch to those a hop nearer to the leaves; none from a leaf."""
        nearer: _Level | None = None
        for level in self._away(leaves):
            if at in level.members:
                return self._to(nearer, at) if nearer else ()
            nearer = level
        return ()

    def _to(self, level: _Level, at: int) -> list[int]:
        found = level.links.get(at)
        if found is None:
            found = level.links[at] = [e for e in self.out[at] if self._heads[e] in level.members]
        return found

    def _nearest(self, heads: tuple[int, ...], leaves: tuple[int, ...]) -> list[int]:
        """Places of those heads of up-links from which the leaves are nearest."""
        for level in self._away(leaves):
            if found := [k for k, v in enumerate(heads) if v in level.members]:
                return found
        return []

    def _away(self, leaves: tuple[int, ...]) -> Iterator[_Level]:
        """The leaves, the switches a hop away from one of them, those two hops away, and so on, until they repeat: a
        switch is as many hops away as the first level that has it. Leaves under the same spines share all but one."""
        level = self._level(v for v in leaves if self.switch[v])
        seen: set[_Level] = set()
        while level not in seen:
            yield level
            seen.add(level)
            if level.farther is None:
                tails = {self._tails[e] for v in level.members for e in self.into.get(v, ())}
                level.farther = self._level(v for v in tails if self.switch[v])
            level = level.farther

    def _level(self, switches: Iterable[int]) -> _Level:
        key = tuple(sorted(switches))
        if key not in self._levels:
            self._levels[key] = _Level(key)
        return self._levels[key]


class _Level:
    """Some switches, ``members``; those a hop ``farther`` away; and the ``links`` to them by where these begin."""

    def __init__(self, switches: tuple[int, ...]) -> None:
        self.members = frozenset(switches)
        self.farther: _Level | None = None
        self.links: dict[int, list[int]] = {}


class _Ports:
    """The links of all vertices on one side. ``kind``, by number, of each one's far ``ends``; and of a kind the
    ``leaves`` among them, each once, and whether some are no switches (``direct``)."""

    def __init__(self, links: dict[int, list[int]], far: list[int], switch: npt.NDArray[np.bool_]) -> None:
        known: dict[tuple[int, ...], int] = {(): 0}
        self.kind, self._first = np.zeros((2, len(switch)), dtype=np.int64)
        vertices, each = list(links), list(links.values())
        self.kind[vertices] = [known.setdefault(tuple([far[k] for k in some]), len(known)) for some in each]
        self._first[vertices] = np.cumsum([0, *map(len, each)])[:-1]
        self._links = np.array([link for some in each for link in some], dtype=np.int64)
        self.ends = list(known)
        self.leaves = [tuple(sorted(set(ends))) for ends in known]
        self.direct = np.array([not switch[list(ends)].all() for ends in known])

    def links(self, vertices: Ints, place: Ints) -> Ints:
        """Each vertex's link at a place in its list. Raises :class:`LookupError` with the first row that has none."""
        if len(missing := np.flatnonzero(place < 0)):
            raise LookupError(int(missing[0]))
        found: Ints = self._links[self._first[vertices] + place]
        return found


def _chosen(choices: Callable[[int, int], Sequence[int]], a: Ints, b: Ints, pick: npt.ArrayLike) -> Ints:
    """One of ``choices(a, b)`` for each row, the ``pick``-th counted round; -1 where there are none."""
    size = int(b.max(initial=0)) + 1
    codes, of = np.unique(a * size + b, return_inverse=True)
    found = [choices(*divmod(code, size)) for code in codes.tolist()]
    distinct = list({id(some): some for some in found}.values())  # most share theirs with others
    sizes = [len(some) for some in distinct]
    known = {id(some): at for some, at in zip(distinct, zip(sizes, np.cumsum(sizes) - sizes, strict=True), strict=True)}
    count, first = np.array([known[id(some)] for some in found], dtype=np.int64).reshape(-1, 2).T
    flat = np.array([*(one for some in distinct for one in some), -1], dtype=np.int64)
    turn = np.asarray(pick) % np.maximum(count, 1)[of].astype(np.asarray(pick).dtype)
    return np.where(count[of] > 0, flat[np.minimum(first[of] + turn.astype(np.int64), len(flat) - 1)], -1)


@kept_with_first(maxsize=1)
def network(topology: Topology) -> Network:
    """The Network of a topology, kept with it."""
    return Network(topology)
