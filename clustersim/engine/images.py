"""Groups of which one is another on other islands, and which link of one is which of the other.

Inside islands a link is told by its place. In the network, by what crosses it: every edge of a group's traffic has a
mark, a link the sum of the marks of all it carries, and links with equal sums carry the same edges' bytes.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TypeAlias

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.cluster.routes.alike import places_of_links
from clustersim.collectives.base import Group, Plan, Request
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.arrays import Floats, Ints
from clustersim.core.topology import Topology

Crossed: TypeAlias = list[tuple[Ints, Ints]]
"""Groups that cross the network alike: their rows, and (rows, L) the links that each crosses, in one order."""

EDGES = 2**16
"""Edges that are routed together: some 50 MB."""


class GroupImages:
    """The images of groups on one machine.

    ``gpus`` : (ranks,) int, the GPU of each.
    """

    def __init__(self, topology: Topology, gpus: Ints) -> None:
        self.topology, self.gpus, self.routes = topology, gpus, routing.router(topology)
        self._island, self._place = places_of_links(topology, self.routes.islands)
        self._net = self._island < 0
        self._crossed: dict[tuple[bytes, ...], Crossed] = {}

    def kinds(self, groups: Ints) -> list[Ints]:
        """The rows of groups by where members sit: who on one island, how it is built, and where on it."""
        cut = self.routes.islands
        gpus = self.gpus[groups]
        home = cut.of[gpus]
        order = np.argsort(home, axis=1, kind="stable")
        new = np.diff(np.take_along_axis(home, order, 1), axis=1, prepend=-2) != 0
        start = np.maximum.accumulate(np.where(new, np.arange(home.shape[1]), 0), axis=1)
        beside = np.empty_like(order)  # of each member the first on its island
        np.put_along_axis(beside, order, np.take_along_axis(order, start, 1), 1)
        kinds: dict[bytes, list[int]] = {}
        for row, key in enumerate(np.concatenate([beside, self.routes.builds[home], cut.local[gpus]], axis=1)):
            kinds.setdefault(key.tobytes(), []).append(row)
        return [np.array(rows) for rows in kinds.values()]

    def edges(self, request: Request, group: Group, plan: Plan) -> Ints:
        """(E, 3) int: sender, receiver and rail of all that crosses the network in a plan, where it is told."""
        home = self.routes.islands.of[group.gpus]
        edges = np.array([[0, 1, -1]] if request.kind == "send" else np.zeros((0, 3)), dtype=np.int64)
        if plan.channels and plan.algorithm in ALGORITHMS and (home != home[0]).any():
            traffic = ALGORITHMS[plan.algorithm].traffic(request, group, plan.channels)
            edges = np.stack([traffic.src, traffic.dst, traffic.rail], axis=1)
            edges = edges[(edges[:, :2] >= 0).all(axis=1)]
        if len(edges) and request.kind != "send":
            # Its lower bound looks at ways from the first member to some others, by all rails.
            next_homes = np.sort(np.unique(home, return_index=True)[1])[1:5]
            rails = np.arange(-1, len(self.routes.nics_of_node(int(group.nodes[0]))))
            bound = np.stack(np.broadcast_arrays(0, next_homes[:, None], rails), axis=-1).reshape(-1, 3)
            edges = np.unique(np.concatenate([edges, bound]), axis=0)
        away: Ints = edges[home[edges[:, 0]] != home[edges[:, 1]]]
        return away

    def crossed(self, groups: Ints, kinds: list[Ints], edges: list[Ints]) -> Crossed:
        """The rows of each of some ``kinds`` by how its ``edges`` share links of which speed."""
        key = groups.tobytes(), *(edge.tobytes() for edge in edges)
        if key not in self._crossed:
            self._crossed[key] = self._cross(groups, kinds, edges)
        return self._crossed[key]

    def _cross(self, groups: Ints, kinds: list[Ints], edges: list[Ints]) -> Crossed:
        size = np.array([len(edge) for edge in edges])
        kind = np.empty(len(groups), dtype=np.int64)
        for number, rows in enumerate(kinds):
            kind[rows] = number
        table = np.concatenate(edges)
        first = np.cumsum(size) - size
        mark = np.random.default_rng(0).uniform(1.0, 2.0, len(table))
        crossings: dict[tuple[int, bytes], tuple[list[int], list[Ints]]] = {}
        done = np.cumsum(size[kind])
        for part in np.split(np.arange(len(groups)), np.searchsorted(done, np.arange(EDGES, done[-1], EDGES))):
            count = size[kind[part]]
            row = np.repeat(np.arange(len(part)), count)
            edge = np.arange(len(row)) - np.repeat(np.cumsum(count) - count - first[kind[part]], count)
            link, marks, ends = self._links(groups[part], row, table[edge], mark[edge])
            for k, kind_of, (a, b) in zip(part.tolist(), kind[part].tolist(), pairwise(ends), strict=True):
                entry = crossings.setdefault((kind_of, marks[a:b].tobytes()), ([], []))
                entry[0].append(k)
                entry[1].append(link[a:b])
        return [(np.array(rows), np.stack(net)) for rows, net in crossings.values()]

    def _links(self, groups: Ints, row: Ints, edges: Ints, mark: Floats) -> tuple[Ints, Floats, list[int]]:
        """Links of the network that edges of groups cross, told by the sum of their marks, latency and bandwidth; in
        the order of these, row after row, which begin at the last of the three."""
        top = self.topology
        src = self.gpus[groups[row, edges[:, 0]]]
        dst = self.gpus[groups[row, edges[:, 1]]]
        ptr, links, share = self.routes.loads_of_each(src, dst, edges[:, 2])
        edge = np.repeat(np.arange(len(src)), np.diff(ptr))
        net = self._net[links]
        edge = edge[net]
        links = links[net]
        share = share[net]
        cells, cell = np.unique(row[edge] * top.n_links + links, return_inverse=True)
        total = np.bincount(cell, share * mark[edge], len(cells))
        row, link = np.divmod(cells, top.n_links)
        numbers = np.stack([total, top.link_latency[link], top.link_bandwidth[link], row], axis=1)
        order = np.lexsort(numbers.T)
        return link[order], numbers[order, :3], np.searchsorted(row, np.arange(len(groups) + 1)).tolist()

    def links(self, links: Ints, groups: Ints, net: Ints) -> Ints | None:
        """(rows, k) the same links of each of groups that cross the network alike, of which the first one's are
        ``links``; None where one is nothing to it. ``net`` : as in :data:`Crossed`."""
        cut = self.routes.islands
        home = cut.of[self.gpus[groups]]
        outside = self._net[links]
        inside = links[~outside]
        if not (np.isin(links[outside], net[0]).all() and np.isin(self._island[inside], home[0]).all()):
            return None
        image_links = np.empty((len(groups), len(links)), dtype=np.int64)
        image_links[:, outside] = net[:, _places(net[0], links[outside])]
        start = cut.link_start[home[:, _places(home[0], self._island[inside])]]
        image_links[:, ~outside] = cut.links[start + self._place[inside]]
        return image_links


def _places(sources: Ints, wanted: Ints) -> Ints:
    """Where each wanted number first is among those known."""
    order = np.argsort(sources, kind="stable")
    places: Ints = order[np.searchsorted(sources[order], wanted)]
    return places
