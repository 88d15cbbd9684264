"""One GPU, no communication: the baseline everything else is measured against."""

from __future__ import annotations

from clustersim.errors import ProgramError
from clustersim.mesh import Mesh
from clustersim.model import Model, StepCost
from clustersim.program import DTYPE_BYTES, Program
from clustersim.strategies import base


class SingleConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="single"):
    """Knobs of plain training on one GPU; see :class:`clustersim.strategies.base.StrategyConfig`."""


def build(model: Model, cost: StepCost, mesh: Mesh, config: SingleConfig, steps: int, seed: int) -> Program:
    """Forward, backward and optimizer of every step, in order on one stream.

    Gradient accumulation runs forward and backward several times; from the second time on, each gradient is added to
    the one already there (two reads and a write).

    Raises :class:`ProgramError` for a mesh of several ranks.
    """
    base.check(model, cost, steps)
    if mesh.world_size != 1:
        raise ProgramError(
            f"strategy 'single' uses one GPU, but the mesh has {mesh.world_size} ranks; "
            "use 'ddp', or one node and one process (at $.strategy.kind)"
        )
    ops, paces = base.OpList(), base.pace(cost.jitter, steps, 1, seed)
    accumulate = base.gradient_pass(3.0 * model.parameters * DTYPE_BYTES[config.param_dtype], cost)
    for step in range(steps):
        base.begin_step(ops, cost, step)
        for micro_step in range(config.gradient_accumulation_steps):
            base.forward(ops, model, cost)
            base.backward(ops, model, cost)
            if micro_step:
                ops.compute("accumulate gradients", accumulate, "gradient")
        ops.compute("optimizer", cost.optimizer, "optimizer")
    return base.program(ops, mesh, cost, ("single: one GPU, no communication", *cost.notes), paces)


STRATEGY = base.Strategy("single", SingleConfig, build, world_size=1)
