"""What each group's transfer is, before the run: plans as columns, each asked for once.

A planner is asked once per distinct request and group. Groups whose members sit at the same places of islands built
alike, and whose traffic crosses the network alike (the same edges meet on links of the same speed), are images of
each other (:mod:`~clustersim.engine.images`): one plan serves them all, its links replaced by the same links of the
other group. Two thousand nodes sharding eight ways cost one call, as do sixty-four shards over thirty-two nodes each,
and the thirty thousand pairs of a pipeline cost a call for each kind of pair and a routing of all of them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TypeAlias

import msgspec
import numpy as np

from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.topology import Topology
from clustersim.engine.columns import lowest, one_number
from clustersim.engine.flows.loads import Loads
from clustersim.engine.images import GroupImages

Planner: TypeAlias = Callable[[Request, Group], Plan]


class GroupPlans(msgspec.Struct, frozen=True, eq=False, dict=True):
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

    @property
    def left_apart(self) -> bool:
        """Whether the ranks of a group do not leave it together."""
        return False

    def part(self, rows: slice) -> GroupPlans:
        """Those of some groups."""
        numbers = (column[rows] for column in (self.latency, self.nbytes, self.alone, self.moving, self.least))
        return GroupPlans(self.request, self.each[rows], self.load[rows], *numbers)

    @cached_property
    def lower_bound(self) -> float:
        """[s] of the group that could be fastest: pairs of one op may be near or far."""
        return min(group_plan.lower_bound for group_plan in self.each)

    @cached_property
    def shortest(self) -> float:
        """The least of ``least`` [s]."""
        return lowest(self.least)

    @cached_property
    def columns(self) -> tuple[Floats | float, Floats | float]:
        """``latency`` and ``moving``, or of each the one number all groups have."""
        return one_number(self.latency), one_number(self.moving)


class Communicators:
    """The communicators of a run.

    Parameters
    ----------
    launch, nccl_version : as in :class:`Group`.
    whole : communicator and ranks, as bytes -> the GPUs of the group that they stand for.
    """

    def __init__(
        self,
        topology: Topology,
        mesh: Mesh,
        *,
        launch: str = "process_per_gpu",
        nccl_version: tuple[int, int] = (2, 28),
        whole: Mapping[tuple[str, bytes], Ints] | None = None,
    ) -> None:
        self.topology = topology
        self.gpus = mesh.gpus
        self.whole = whole or {}
        self._manner = launch, nccl_version
        self._known: dict[tuple[str, bytes], Group] = {}

    def of(self, ranks: Ints, communicator: str = "") -> Group:
        """The communicator of these global ranks, or of whom they stand for; one object per distinct list."""
        key = communicator, ranks.tobytes()
        if key not in self._known:
            gpus = self.whole[key] if key in self.whole else self.gpus[ranks]
            self._known[key] = Group(self.topology, gpus, *self._manner)
        return self._known[key]


class PlanBook:
    """Plans of a run, cached.

    Parameters
    ----------
    planner : asked for every plan. groups : whom it is asked about; the plan of a group that ranks stand for is theirs.
    congruent : let groups at the same places of nodes wired alike share one plan; for planners that look at nothing
        but the request and the group's surroundings.
    """

    def __init__(self, planner: Planner, groups: Communicators, loads: Loads, *, congruent: bool = False) -> None:
        self.planner = planner
        self.groups = groups
        self.loads = loads
        self.congruent = congruent and not groups.whole
        self._plans: dict[tuple[Request, str, bytes], Plan] = {}

    def plans(self, request: Request, groups: Ints, communicator: str = "") -> GroupPlans:
        """Plans of one request on each row of ``groups`` (G, members), global ranks."""
        name = communicator if self.groups.whole else ""  # who stands for nobody is known by the ranks alone
        # A group of one needs no plan, and one of everybody is the image of no other.
        alike = self.congruent and 1 < groups.shape[1] < len(self.groups.gpus)
        plans = self._alike(request, groups) if alike else [self._plan(request, ranks, name) for ranks in groups]
        latency = np.array([p.latency - p.host for p, _ in plans])  # a program's launches run ahead
        nbytes = np.array([p.nbytes for p, _ in plans])
        load = np.array([load for _, load in plans], dtype=np.int64)
        rate = np.minimum([p.ceiling for p, _ in plans], [self.loads.alone[i] for i in load.tolist()])
        moving = np.where(nbytes > 0, nbytes, 0.0) / rate
        return GroupPlans(request, tuple(p for p, _ in plans), load, latency, nbytes, rate, moving, latency + moving)

    def _alike(self, request: Request, groups: Ints) -> list[tuple[Plan, int]]:
        """Plan and load id of each of several groups."""
        plans: dict[int, tuple[Plan, int]] = {}
        kinds = self._images.kinds(groups)
        edges = [self._edges(request, groups[rows]) for rows in kinds]
        for rows, net in self._images.crossed(groups, kinds, edges):
            plan, _ = self._plan(request, groups[rows[0]])
            links = self._images.links(plan.links, groups[rows], net) if len(rows) > 1 else None
            if links is None:
                plans.update((row, self._plan(request, groups[row])) for row in rows.tolist())
            else:
                ids = self.loads.add_each(links, plan.weights)
                plans.update((row, (plan, i)) for row, i in zip(rows.tolist(), ids, strict=True))
        return [plans[row] for row in range(len(groups))]

    def _edges(self, request: Request, groups: Ints) -> Ints:
        """What crosses the network in groups at places alike, for :meth:`GroupImages.crossed`; one alone is not
        asked."""
        if len(groups) == 1:
            return np.zeros((0, 3), dtype=np.int64)
        return self._images.edges(request, self.groups.of(groups[0]), self._plan(request, groups[0])[0])

    def _plan(self, request: Request, ranks: Ints, name: str = "") -> tuple[Plan, int]:
        """Plan and load id of one group."""
        if len(ranks) == 1 and (name, ranks.tobytes()) not in self.groups.whole:
            nothing = np.array([], dtype=np.int64), np.array([])
            return Plan(request.kind, "none", "none", 0, 0.0, 0.0, *nothing, np.inf), self.loads.add(*nothing)
        key = request, name, ranks.tobytes()
        if key not in self._plans:
            self._plans[key] = _checked(self.planner(request, self.groups.of(ranks, name)), request, ranks)
        plan = self._plans[key]
        return plan, self.loads.add(plan.links, plan.weights)

    @cached_property
    def _images(self) -> GroupImages:
        return GroupImages(self.groups.topology, self.groups.gpus)


def _checked(plan: Plan, request: Request, ranks: Ints) -> Plan:
    numbers = (plan.latency, plan.nbytes)
    if not (np.all(np.isfinite(numbers)) and min(numbers) >= 0 and plan.ceiling > 0):
        raise ProgramError(
            f"the planner gave {request.kind} of {request.nbytes:g} bytes on ranks {ranks[:4].tolist()}...: latency "
            f"{plan.latency!r} s, {plan.nbytes!r} bytes, ceiling {plan.ceiling!r} bytes/s; none may be negative"
        )
    return plan
