"""A Program on machines that vary: ``[run.variation]`` drawn, and laid on its compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clustersim.arrays import Floats, Ints
from clustersim.mesh import Mesh
from clustersim.program import Compute, Op, Program, Role
from clustersim.topology import Topology
from clustersim.variation import Drawn, Variation, Where, drawn

if TYPE_CHECKING:
    from clustersim.scenario import Scenario

PASSES = ("forward", "backward")


def draw(
    scenario: Scenario, topology: Topology, mesh: Mesh, *, steps: int | None = None, machine: int = 0, best: float = 0.0
) -> Drawn:
    """The scenario's steps on one machine, as of :func:`clustersim.variation.drawn`; ``steps`` : its own when None."""
    run = scenario.file.run
    _, host = np.unique(topology.vertex_node[mesh.gpus[: mesh.workers]], return_inverse=True)
    count = scenario.config.gradient_accumulation_steps
    where = Where(host.ravel().astype(np.int64), mesh.coordinates("dp"), count)
    return drawn(run.variation or Variation(), steps or run.steps, where, run.seed, machine=machine, best=best)


def varied(program: Program, found: Drawn, mesh: Mesh) -> Program:
    """The Program at these paces, with micro-batches of these lengths and these pauses."""
    if found.pace is None and found.lengths is None and found.pauses is None:
        return program
    replica = mesh.coordinates("dp")
    return replace(program, roles=tuple(_varied(role, found, replica) for role in program.roles))


def _varied(role: Role, found: Drawn, replica: Ints) -> Role:
    paced = [i for i, op in enumerate(role.ops) if isinstance(op, Compute) and op.paced]
    if not paced:  # servers that compute no layers
        return role
    ops = list(role.ops)
    if found.lengths is not None:
        for i, number in micro_batches(role):
            _longer(ops, i, found.lengths[ops[i].step, number, replica[role.ranks]], 0.0)
    pace = None if found.pace is None else found.pace[:, role.ranks]
    if found.pauses is not None and found.places is not None:
        _pause(ops, paced, found.pauses[:, role.ranks], found.places[:, role.ranks], pace)
    return replace(role, ops=tuple(ops), pace=pace)


def micro_batches(role: Role) -> Iterator[tuple[int, int]]:
    """(place in the op list, micro-batch) of every op that computes one. Ops that do not say which they are of belong
    to ranks that take one after the other, forward and backward."""
    step, number, back = -1, 0, False
    for i, op in enumerate(role.ops):
        if not isinstance(op, Compute) or not op.paced or op.phase not in PASSES:
            continue
        if op.label is not None and op.label.microbatch >= 0:
            yield i, op.label.microbatch
            continue
        if op.step != step:
            step, number, back = op.step, 0, False
        number += back and op.phase == "forward"
        back = op.phase == "backward"
        yield i, number


def _longer(ops: list[Op], i: int, factor: Floats, more: Floats | float) -> None:
    op = ops[i]
    if isinstance(op, Compute):
        ops[i] = msgspec.structs.replace(op, duration=np.asarray(op.duration) * factor + more)


def _pause(ops: list[Op], paced: list[int], pauses: Floats, places: Floats, pace: Floats | None) -> None:
    """Pauses of each step lengthen the op that is at their place of the step; a pace does not lengthen a pause."""
    of_step = np.array([ops[i].step for i in paced])
    for step in np.flatnonzero(pauses.any(axis=1)).tolist():
        there = np.array(paced)[of_step == step]
        if not len(there):
            continue
        struck = np.minimum((places[step] * len(there)).astype(int), len(there) - 1)
        seconds = pauses[step] if pace is None else pauses[step] / pace[step]
        for k in np.unique(struck[pauses[step] > 0]).tolist():
            one = np.ones(pauses.shape[1])
            _longer(ops, int(there[k]), one, np.where(struck == k, seconds, 0.0))
