"""The machines of a plan as it is read: their topologies, and what of ``[parallel]`` is tried on them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from clustersim import scenario
from clustersim.core.errors import ClusterSimError
from clustersim.core.mesh import Mesh
from clustersim.core.texts import Table
from clustersim.core.topology import Topology
from clustersim.scenario.run.parts import machine, shape_of
from clustersim.studies.plan.candidates import base
from clustersim.studies.plan.knobs import combinations
from clustersim.studies.plan.known import Place
from clustersim.studies.plan.spec import PlanFile


def tried_parallel(plan: PlanFile, path: str | Path, machines: Mapping[Place, tuple[Topology, Mesh]]) -> list[Table]:
    """What is tried as ``[parallel]``."""
    if not plan.tried.parallel:
        return [{}]
    base_scenario = scenario.from_table(base(plan), path)
    per_node = max(mesh.nproc_per_node for _, mesh in machines.values())
    return combinations(plan.tried.parallel, shape_of(base_scenario), per_node, str(path))


def machines_of(plan: PlanFile, path: str | Path) -> tuple[dict[Place, tuple[Topology, Mesh]], list[str]]:
    """Every machine with every number of nodes, and each machine's device."""
    built = {}
    devices = []
    for m, machine_spec in enumerate(plan.machines):
        topology = None
        for nodes in sorted(machine_spec.nodes):
            machine_scenario = scenario.from_table(base(plan), path, {"cluster": machine_spec.cluster(nodes)})
            topology, _ = built[m, nodes] = machine(machine_scenario)
        if topology is None:
            raise ClusterSimError(f"{path}: nodes is empty; list the numbers to try (at $.machines[{m}].nodes)")
        devices.append(" and ".join(dict.fromkeys(kind.device for kind in topology.node_types)))
    return built, devices
