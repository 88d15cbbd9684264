"""A scenario's Program on its machine: who plans the collectives, and the engine's play."""

from __future__ import annotations

from typing import Any

from clustersim import engine
from clustersim.core.mesh import Mesh
from clustersim.core.program import Program
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.core.units import parse_nccl_version
from clustersim.scenario import Scenario


def backend_of(scenario: Scenario, topology: Topology, mesh: Mesh) -> str:
    """Who plans the collectives: what the scenario says, or who usually does."""
    from clustersim.collectives.backends import usual_backend

    run = scenario.file.run
    if run.opal_cuda_support:
        return "mpi_cuda"
    return run.backend or usual_backend(topology, mesh.gpus[: mesh.workers])


def play(scenario: Scenario, program: Program, topology: Topology, mesh: Mesh, **how: Any) -> Timeline:
    """Simulate a Program on the software that a scenario says; ``how`` : of :func:`clustersim.engine.simulate`."""
    run = scenario.file.run
    launch = scenario.strategy.launch or run.launch
    how = {"backend": backend_of(scenario, topology, mesh)} | ({"op_by_op": True} if run.op_by_op else {}) | how
    return engine.simulate(
        program, topology, mesh, launch=launch, nccl_version=parse_nccl_version(run.nccl_version), **how
    )
