"""What options of a search share: machines, stages, orders, and the least that layers take, each worked out once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.device import AS_IS, Device
from clustersim.core.memo import Keeper, kept_with_first
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model
from clustersim.core.topology import Topology
from clustersim.scenario import Scenario
from clustersim.scenario.run.parts import cost_of
from clustersim.studies.plan.candidates import PlanCandidate
from clustersim.studies.plan.spec import PlanFile
from clustersim.training.partition.base import Partition
from clustersim.training.schedules import Schedule

T = TypeVar("T")
Place = tuple[int, int]
"""Index of a machine, and nodes."""
MOST_PARTS = 64
"""Partitions that are kept."""


@dataclass(eq=False)
class KnownMachines(Keeper):
    """What is known of the machines, and of forms that options share.

    machines : (index of a machine, nodes) -> its topology and ranks.
    """

    plan: PlanFile
    path: str | Path
    machines: Mapping[Place, tuple[Topology, Mesh]]
    _parts: OrderedDict[object, tuple[Partition, Schedule]] = field(default_factory=OrderedDict)
    _counted: tuple[Partition, tuple[Floats, Floats]] | None = None
    _made: dict[object, Any] = field(default_factory=dict)

    def once(self, question: str, key: object, make: Callable[[], T]) -> T:
        """What ``make`` gives, worked out once for each ``key`` of a sort of ``question``."""
        answer = self._made.get((question, key), self)
        if answer is self:
            answer = self._made[question, key] = make()
        return cast(T, answer)

    def parts(self, key: object, make: Callable[[], tuple[Partition, Schedule]]) -> tuple[Partition, Schedule]:
        """Stages and schedule, which forms of other data parallelism share."""
        if key not in self._parts:
            self._parts[key] = make()
            if len(self._parts) > MOST_PARTS:
                self._parts.popitem(last=False)
        return self._parts[key]

    def counts(self, parts: Partition) -> tuple[Floats, Floats]:
        """(ranks,) elements of dense parameters and of experts' that are trained, of the stages looked at last."""
        if self._counted is None or self._counted[0] is not parts:
            rows = [(stage.trained, stage.expert_trained) for stage in parts.stages]
            dense, expert = np.array(rows, dtype=np.float64).T
            self._counted = parts, (dense, expert)
        return self._counted[1]

    @kept_with_first(maxsize=None)
    def room(self, place: Place) -> float:
        """Bytes of the GPU with least memory."""
        topology, mesh = self.machines[place]
        nodes = np.unique(topology.vertex_node[mesh.gpus]).tolist()
        sizes: list[float] = [topology.node_types[n].gpu.memory_bytes for n in nodes]
        return min(sizes)

    @kept_with_first(maxsize=None)
    def way_out(self, place: Place) -> float:
        """What leads out of the node of the first rank [bytes/s]."""
        topology, mesh = self.machines[place]
        node = topology.vertex_node[mesh.gpus[0]]
        leaving = (topology.vertex_node[topology.link_src] == node) & (topology.vertex_node[topology.link_dst] != node)
        return float(topology.link_bandwidth[leaving].sum()) or float("inf")

    def place(self, option: PlanCandidate) -> Place:
        """Where it runs."""
        return self.plan.machines.index(option.machine), option.nodes

    def device(self, machine: int, scenario: Scenario, model: Model) -> Device:
        """The GPU of a machine, as it is fitted there."""

        def made() -> Device:
            """From the scenario's fit on the machine."""
            topology, mesh = next(pair for (m, _), pair in self.machines.items() if m == machine)
            return cost_of(scenario, topology, mesh, model, AS_IS)[0]

        return self.once("device", machine, made)
