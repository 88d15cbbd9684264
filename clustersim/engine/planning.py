"""What each group's transfer is, before the run: plans as columns, each asked for once.

A planner is asked once per distinct request and group. Groups whose members sit at the same places of islands built
alike, and whose traffic crosses the network alike (the same edges meet on links of the same speed), are images of
each other: one plan serves them all, its links replaced by the same links of the other group. Two thousand nodes
sharding eight ways cost one call, as do sixty-four shards over thirty-two nodes each, and the thirty thousand pairs of
a pipeline cost a call for each kind of pair and a routing of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives.base import Group, Plan, Request
from clustersim.engine.loads import Loads
from clustersim.errors import ProgramError
from clustersim.mesh import Mesh
from clustersim.routing.alike import places_of_links
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Planner: TypeAlias = Callable[[Request, Group], Plan]


class Plans(msgspec.Struct, frozen=True, eq=False, dict=True):
    """One request on several groups.

    Parameters
    ----------
    request : the request. each : the plan of every group; congruent groups share the first one's.
    load : (G,) int, id in :class:`Loads`. latency : (G,) [s]. nbytes : (G,) [bytes].
    alone : (G,) float [bytes/s], the rate with its links to itself, at most the plan's ceiling.
    moving : (G,) float [s], bytes at that rate.
    least : (G,) float [s], no transfer is shorter: latency plus ``moving``.
    """

    request: Request
    each: tuple[Plan, ...]
    load: Ints
    latency: Floats
    nbytes: Floats
    alone: Floats
    moving: Floats
    least: Floats

    @cached_property
    def lower_bound(self) -> float:
        """[s] of the group that could be fastest: pairs of one op may be near or far."""
        return min(one.lower_bound for one in self.each)

    @cached_property
    def columns(self) -> tuple[Floats | float, Floats | float]:
        """``latency`` and ``moving``, or of each the one number all groups have."""
        return one_number(self.latency), one_number(self.moving)


def one_number(column: Floats | float) -> Floats | float:
    """The one number of a column that has the same everywhere, or else the column."""
    if not isinstance(column, np.ndarray) or not len(column):
        return column
    return column[0].item() if column[0] == column[-1] and (column == column[0]).all() else column


class PlanBook:
    """Plans of a run, cached.

    Parameters
    ----------
    planner : asked for every plan. launch, nccl_version : as in :class:`Group`.
    congruent : let groups at the same places of nodes wired alike share one plan; for planners that look at nothing
        but the request and the group's surroundings.
    whole : communicator and ranks, as bytes -> the GPUs of the group that they stand for: its plan is theirs.
    """

    def __init__(
        self,
        planner: Planner,
        topology: Topology,
        mesh: Mesh,
        loads: Loads,
        *,
        launch: str = "process_per_gpu",
        nccl_version: tuple[int, int] = (2, 28),
        congruent: bool = False,
        whole: Mapping[tuple[str, bytes], Ints] | None = None,
    ) -> None:
        self.planner, self.topology, self.mesh, self.loads = planner, topology, mesh, loads
        self.launch, self.nccl_version, self.congruent = launch, nccl_version, congruent
        self.whole = whole or {}
        self._groups: dict[tuple[str, bytes], Group] = {}
        self._plans: dict[tuple[Request, str, bytes], Plan] = {}
        self._columns: dict[tuple[Request, str, bytes, int], Plans] = {}
        self._kinds: dict[tuple[Request, bytes], _Kind] = {}

    def plans(self, request: Request, groups: Ints, communicator: str = "") -> Plans:
        """Plans of one request on each row of ``groups`` (G, members), global ranks."""
        name = communicator if self.whole else ""  # who stands for nobody is known by the ranks alone
        key = request, name, groups.tobytes(), groups.shape[1]
        if key not in self._columns:
            # A group of one needs no plan, and one of everybody is the image of no other.
            alike = self.congruent and not self.whole and 1 < groups.shape[1] < self.mesh.world_size
            plans = self._alike(request, groups) if alike else [self._plan(request, ranks, name) for ranks in groups]
            latency = np.array([p.latency - p.host for p, _ in plans])  # a program's launches run ahead
            nbytes = np.array([p.nbytes for p, _ in plans])
            load = np.array([load for _, load in plans], dtype=np.int64)
            ceiling = np.array([p.ceiling for p, _ in plans])
            rate = np.minimum(ceiling, [self.loads.alone[i] for i in load.tolist()])
            moving = np.where(nbytes > 0, nbytes, 0.0) / rate
            columns = load, latency, nbytes, rate, moving, latency + moving
            self._columns[key] = Plans(request, tuple(p for p, _ in plans), *columns)
        return self._columns[key]

    def group(self, ranks: Ints, communicator: str = "") -> Group:
        """The communicator of these global ranks, or of whom they stand for; one object per distinct list."""
        key = communicator, ranks.tobytes()
        if key not in self._groups:
            gpus = self.whole[key] if key in self.whole else self.mesh.gpus[ranks]
            self._groups[key] = Group(self.topology, gpus, self.launch, self.nccl_version)
        return self._groups[key]

    def _alike(self, request: Request, groups: Ints) -> list[tuple[Plan, int]]:
        """Plan and load id of each of several groups."""
        found: dict[int, tuple[Plan, int]] = {}
        for place, rows in self._images.places(groups).items():
            kind = self._kinds.get((request, place))
            if kind is None:
                kind = self._kinds[request, place] = _Kind(groups[rows[0]])
                if len(rows) == 1:  # others may come with other ops
                    found[rows[0]] = self._plan(request, kind.first)
                    continue
            for some, net, plan, names in self._served(request, kind, groups[rows]):
                mine = [rows[k] for k in some]
                if names is None:
                    found.update((row, self._plan(request, groups[row])) for row in mine)
                    continue
                for row, links in zip(mine, self._images.links(names, groups[mine], net), strict=True):
                    found[row] = plan, self.loads.add(links, plan.weights)
        return [found[row] for row in range(len(groups))]

    def _served(
        self, request: Request, kind: _Kind, groups: Ints
    ) -> Iterator[tuple[list[int], Ints, Plan, Names | None]]:
        """Groups of a kind by the plan that serves them: rows, links of the network of each, the plan, its links."""
        if kind.edges is None:
            kind.edges = self._images.edges(request, self.group(kind.first), self._plan(request, kind.first)[0])
            list(self._served(request, kind, kind.first[None]))
        for told, some, net in self._images.crossed(groups, kind.edges):
            if told not in kind.plans:
                plan, _ = self._plan(request, groups[some[0]])
                kind.plans[told] = plan, self._images.named(plan.links, groups[some[0]], net[0])
            yield some, net, *kind.plans[told]

    def _plan(self, request: Request, ranks: Ints, name: str = "") -> tuple[Plan, int]:
        """Plan and load id of one group."""
        if len(ranks) == 1 and (name, ranks.tobytes()) not in self.whole:
            nothing = np.array([], dtype=np.int64), np.array([])
            return Plan(request.kind, "none", "none", 0, 0.0, 0.0, *nothing, np.inf), self.loads.add(*nothing)
        key = request, name, ranks.tobytes()
        if key not in self._plans:
            self._plans[key] = _checked(self.planner(request, self.group(ranks, name)), request, ranks)
        plan = self._plans[key]
        return plan, self.loads.add(plan.links, plan.weights)

    @cached_property
    def _images(self) -> _Images:
        return _Images(self.topology, self.mesh.gpus)


def _checked(plan: Plan, request: Request, ranks: Ints) -> Plan:
    numbers = (plan.latency, plan.nbytes)
    if not (np.all(np.isfinite(numbers)) and min(numbers) >= 0 and plan.ceiling > 0):
        raise ProgramError(
            f"the planner gave {request.kind} of {request.nbytes:g} bytes on ranks {ranks[:4].tolist()}...: latency "
            f"{plan.latency!r} s, {plan.nbytes!r} bytes, ceiling {plan.ceiling!r} bytes/s; none may be negative"
        )
    return plan


Names: TypeAlias = tuple[npt.NDArray[np.bool_], Ints, Ints]
"""What links are to a group: whether each is in the network; a member on its island; its place there."""


class _Kind(msgspec.Struct, eq=False):
    """Groups at places alike: ranks of the ``first``; ``edges``, once a second has come; plans by what edges cross."""

    first: Ints
    edges: Ints | None = None
    plans: dict[bytes, tuple[Plan, Names | None]] = msgspec.field(default_factory=dict)


class _Images:
    """Groups of which one is another on other islands, and which link of one is which of the other.

    Inside islands a link is told by its place. In the network, by what crosses it: every edge of a group's traffic has
    a mark, a link the sum of the marks of all it carries, and links with equal sums carry the same edges' bytes.

    ``gpus`` : (ranks,) int, the GPU of each.
    """

    def __init__(self, topology: Topology, gpus: Ints) -> None:
        self.topology, self.gpus, self.routes = topology, gpus, routing.router(topology)
        self._island, self._place = places_of_links(topology, self.routes.islands)
        self._net = self._island < 0
        self._places: dict[tuple[bytes, int], dict[bytes, list[int]]] = {}
        self._crossed: dict[tuple[bytes, bytes], list[tuple[bytes, list[int], Ints]]] = {}

    def places(self, groups: Ints) -> dict[bytes, list[int]]:
        """The rows of groups by where members sit: who on one island, how it is built, and where on it."""
        key = groups.tobytes(), groups.shape[1]
        if key not in self._places:
            cut, gpus = self.routes.islands, self.gpus[groups]
            home = cut.of[gpus]
            order = np.argsort(home, axis=1, kind="stable")
            new = np.diff(np.take_along_axis(home, order, 1), axis=1, prepend=-2) != 0
            start = np.maximum.accumulate(np.where(new, np.arange(home.shape[1]), 0), axis=1)
            beside = np.empty_like(order)  # of each member the first on its island
            np.put_along_axis(beside, order, np.take_along_axis(order, start, 1), 1)
            found = self._places.setdefault(key, {})
            for row, told in enumerate(np.concatenate([beside, self.routes.builds[home], cut.local[gpus]], axis=1)):
                found.setdefault(told.tobytes(), []).append(row)
        return self._places[key]

    def edges(self, request: Request, group: Group, plan: Plan) -> Ints:
        """(E, 3) int: sender, receiver and rail of all that crosses the network in a plan, where it is told."""
        from clustersim.collectives import ALGORITHMS

        home = self.routes.islands.of[group.gpus]
        edges = np.array([[0, 1, -1]] if request.kind == "send" else np.zeros((0, 3)), dtype=np.int64)
        if plan.channels and plan.algorithm in ALGORITHMS and (home != home[0]).any():
            traffic = ALGORITHMS[plan.algorithm].traffic(request, group, plan.channels)
            edges = np.stack([traffic.src, traffic.dst, traffic.rail], axis=1)
            edges = edges[(edges[:, :2] >= 0).all(axis=1)]
        if len(edges) and request.kind != "send":
            # Its lower bound looks at ways from the first member to some others, by all rails.
            others = np.sort(np.unique(home, return_index=True)[1])[1:5]
            rails = np.arange(-1, len(self.routes.nics_of_node(int(group.nodes[0]))))
            bound = np.stack(np.broadcast_arrays(0, others[:, None], rails), axis=-1).reshape(-1, 3)
            edges = np.unique(np.concatenate([edges, bound]), axis=0)
        away: Ints = edges[home[edges[:, 0]] != home[edges[:, 1]]]
        return away

    def crossed(self, groups: Ints, edges: Ints) -> list[tuple[bytes, list[int], Ints]]:
        """What tells how edges share links of which speed; the rows of groups of which it is true; and those links
        (rows, L), in one order."""
        key = groups.tobytes(), edges.tobytes()
        if key not in self._crossed:
            self._crossed[key] = self._cross(groups, edges)
        return self._crossed[key]

    def _cross(self, groups: Ints, edges: Ints) -> list[tuple[bytes, list[int], Ints]]:
        n, top = len(groups), self.topology
        if not len(edges):
            return [(b"", list(range(n)), np.zeros((n, 0), dtype=np.int64))]
        src, dst = self.gpus[groups[:, edges[:, 0]]].ravel(), self.gpus[groups[:, edges[:, 1]]].ravel()
        ptr, links, share = self.routes.loads_of_each(src, dst, np.tile(edges[:, 2], n))
        edge, net = np.repeat(np.arange(len(src)), np.diff(ptr)), self._net[links]
        edge, links, share = edge[net], links[net], share[net]
        mark = np.random.default_rng(0).uniform(1.0, 2.0, len(edges))
        cells, cell = np.unique(edge // len(edges) * top.n_links + links, return_inverse=True)
        total = np.bincount(cell, share * mark[edge % len(edges)], len(cells))
        row, link = np.divmod(cells, top.n_links)
        numbers = np.stack([total, top.link_latency[link], top.link_bandwidth[link], row], axis=1)
        order = np.lexsort(numbers.T)
        link, table, ends = link[order], numbers[order, :3], np.searchsorted(row, np.arange(n + 1)).tolist()
        found: dict[bytes, list[int]] = {}
        for k, (a, b) in enumerate(pairwise(ends)):
            found.setdefault(table[a:b].tobytes(), []).append(k)
        return [(told, some, np.stack([link[ends[k] : ends[k + 1]] for k in some])) for told, some in found.items()]

    def named(self, links: Ints, group: Ints, net: Ints) -> Names | None:
        """What these links are to a group that crosses the links ``net``; None where one is nothing."""
        home, outside = self.routes.islands.of[self.gpus[group]], self._net[links]
        among = np.where(outside, links, self._island[links])
        member, place = np.full(len(links), -1, dtype=np.int64), self._place[links]
        if not (np.isin(links[outside], net).all() and np.isin(among[~outside], home).all()):
            return None
        for which, known, column in ((outside, net, place), (~outside, home, member)):
            order = np.argsort(known, kind="stable")
            column[which] = order[np.searchsorted(known[order], among[which])]
        return outside, member, place

    def links(self, names: Names, groups: Ints, net: Ints) -> Ints:
        """(rows, k) the links so named of each group."""
        (outside, member, place), cut = names, self.routes.islands
        found = np.empty((len(groups), len(place)), dtype=np.int64)
        found[:, outside] = net[:, place[outside]]
        home = cut.of[self.gpus[groups[:, member[~outside]]]]
        found[:, ~outside] = cut.links[cut.link_start[home] + place[~outside]]
        return found
