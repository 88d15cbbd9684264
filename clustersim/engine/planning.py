"""What each group's transfer is, before the run: plans as columns, each asked for once.

A planner is asked once per distinct request and group. Groups that live inside one node each, at the same places of
nodes wired alike, are congruent: one plan serves them all, its links replaced by the same links of the other node. Two
thousand nodes sharding eight ways cost one call, not two thousand. And what it says of a send (latency, ceiling, share
of the line rate) depends on the places of its ends in islands built alike and on the links between them, so that the
thirty thousand pairs of a pipeline of 16,384 ranks cost a call for each kind and a routing of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives.base import Group, Plan, Request
from clustersim.engine.loads import Loads
from clustersim.errors import ProgramError
from clustersim.mesh import Mesh
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Planner: TypeAlias = Callable[[Request, Group], Plan]


MANY = 8
"""Pairs of one op from which their ways are looked for before the planner is asked."""


@dataclass(frozen=True, eq=False)
class Plans:
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
    def latency_column(self) -> Floats | float:
        """``latency``, or the one number all groups have."""
        return _one_number(self.latency)

    @cached_property
    def moving_column(self) -> Floats | float:
        """Seconds of moving bytes at the rate of an idle network, or the one number all groups have."""
        return _one_number(self.moving)


def _one_number(column: Floats) -> Floats | float:
    return float(column[0]) if len(column) and (column == column[0]).all() else column


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
        self._kinds: dict[Request, dict[bytes, Plan | None]] = {}

    def plans(self, request: Request, groups: Ints, communicator: str = "") -> Plans:
        """Plans of one request on each row of ``groups`` (G, members), global ranks."""
        name = communicator if self.whole else ""  # who stands for nobody is known by the ranks alone
        key = request, name, groups.tobytes(), groups.shape[1]
        if key not in self._columns:
            many = self.congruent and request.kind == "send" and len(groups) >= MANY
            plans = self._sends(request, groups) if many else [self._plan(request, ranks, name) for ranks in groups]
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

    def _sends(self, request: Request, pairs: Ints) -> list[tuple[Plan, int]]:
        """Plan and load id of each of many pairs."""
        kinds, ways = self._kinds.setdefault(request, {}), self._ways(pairs)
        found = []
        for pair, (sign, links) in zip(pairs, ways, strict=True):
            if sign not in kinds:
                plan, _ = self._plan(request, pair)
                # Where the planner takes other links, every pair is asked for.
                kinds[sign] = plan if np.array_equal(plan.links, links) else None
            kind = kinds[sign]
            found.append((kind, self.loads.add(links, kind.weights)) if kind else self._plan(request, pair))
        return found

    def _ways(self, pairs: Ints) -> Iterator[tuple[bytes, Ints]]:
        """Of each pair: what is alike for all of its kind, and the links that a byte sent crosses, in order."""
        top, routes = self.topology, routing.router(self.topology)
        ends, cut = self.mesh.gpus[pairs], routes.islands
        ptr, links, share = routes.loads_of_each(ends[:, 0], ends[:, 1])
        near = cut.of[ends[:, :1]] == cut.of[ends[:, 1:]]
        signs = np.concatenate([routes.builds[cut.of[ends]], cut.local[ends], near], axis=1)
        table, numbers = signs.tobytes(), np.stack([top.link_bandwidth[links], top.link_latency[links], share], axis=1)
        for k, (a, b) in enumerate(pairwise(ptr.tolist())):
            yield table[40 * k : 40 * (k + 1)] + numbers[a:b].tobytes(), links[a:b]

    def _plan(self, request: Request, ranks: Ints, name: str = "") -> tuple[Plan, int]:
        """Plan and load id of one group."""
        if len(ranks) == 1 and (name, ranks.tobytes()) not in self.whole:
            nothing = np.array([], dtype=np.int64), np.array([])
            return Plan(request.kind, "none", "none", 0, 0.0, 0.0, *nothing, np.inf), self.loads.add(*nothing)
        group, place = self.group(ranks, name), None
        if self.congruent and group.n_nodes == 1:
            place = self._nodes.place(group)
        key = (request, name, ranks.tobytes()) if place is None else (request, "", place)
        if key not in self._plans:
            self._plans[key] = _checked(self.planner(request, group), request, ranks)
            return self._plans[key], self.loads.add(self._plans[key].links, self._plans[key].weights)
        plan = self._plans[key]
        links = plan.links if place is None else self._nodes.moved(plan.links, int(group.nodes[0]))
        return plan, self.loads.add(links, plan.weights)

    @cached_property
    def _nodes(self) -> _Nodes:
        return _Nodes(self.topology)


def _checked(plan: Plan, request: Request, ranks: Ints) -> Plan:
    numbers = (plan.latency, plan.nbytes)
    if not (np.all(np.isfinite(numbers)) and min(numbers) >= 0 and plan.ceiling > 0):
        raise ProgramError(
            f"the planner gave {request.kind} of {request.nbytes:g} bytes on ranks {ranks[:4].tolist()}...: latency "
            f"{plan.latency!r} s, {plan.nbytes!r} bytes, ceiling {plan.ceiling!r} bytes/s; none may be negative"
        )
    return plan


class _Nodes:
    """Which nodes are wired alike, and which link of one is which of another: their k-th inner link."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        src, dst = topology.vertex_node[topology.link_src], topology.vertex_node[topology.link_dst]
        self._node = np.where(src == dst, src, -1)
        order = np.argsort(self._node, kind="stable")
        self._first = np.searchsorted(self._node[order], np.arange(topology.n_nodes + 1))
        self._inner = order
        self._position = np.empty(topology.n_links, dtype=np.int64)
        self._position[order] = np.arange(topology.n_links)
        self._shape: dict[int, bytes] = {}

    def place(self, group: Group) -> bytes | None:
        """Where a one-node group sits, the same for congruent groups."""
        node = int(group.nodes[0])
        lowest = int(np.searchsorted(self.topology.vertex_node, node)) if self._sorted else -1
        if lowest < 0:
            return None
        return self._wiring(node, lowest) + (group.gpus - lowest).tobytes()

    def moved(self, links: Ints, node: int) -> Ints:
        """The same links, in another node of the same wiring."""
        home = self._node[links[:1]]
        if not len(links) or home[0] == node:
            return links
        offset = self._position[links] - self._first[home[0]]
        there: Ints = self._inner[self._first[node] + offset]
        return there

    @cached_property
    def _sorted(self) -> bool:
        """Vertices of a node are consecutive, so a place is an offset."""
        inside = self.topology.vertex_node[self.topology.vertex_node >= 0]
        return bool(np.all(np.diff(inside) >= 0)) and bool(np.all(self.topology.vertex_node[: len(inside)] >= 0))

    def _wiring(self, node: int, lowest: int) -> bytes:
        """Everything about a node's inside that a plan may depend on, as bytes."""
        if node not in self._shape:
            top, inner = self.topology, self._inner[self._first[node] : self._first[node + 1]]
            ends = top.link_src[inner] - lowest, top.link_dst[inner] - lowest
            numbers = top.link_bandwidth[inner], top.link_latency[inner]
            kinds = "".join(top.link_kinds[i] + "," for i in inner.tolist())
            text = f"{top.node_types[node].name}|{kinds}|".encode()
            self._shape[node] = text + b"".join(column.tobytes() for column in (*ends, *numbers))
        return self._shape[node]
