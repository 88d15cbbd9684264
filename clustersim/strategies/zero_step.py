"""The optimizer step that all ZeRO stages share."""

from __future__ import annotations

from clustersim.mesh import Ints
from clustersim.model import StepCost
from clustersim.program import DTYPE_BYTES
from clustersim.strategies import base, sharded
from clustersim.strategies.zero_config import ZeroConfig


def finite_norm(
    ops: base.OpList, cost: StepCost, config: ZeroConfig, group: Ints, numel: float, after: tuple[int, ...]
) -> tuple[int, ...]:
    """Whether any rank's gradients overflowed (fp16), and the norm over all of them: one number each, all-reduced.

    The gradients of ``numel`` elements are read for each; the optimizer's factor is applied with its own read.
    """
    seconds = base.gradient_pass(sharded.nbytes(numel, config.param_dtype), cost)
    if config.param_dtype == "fp16":
        checked = ops.compute("check overflow", seconds, "gradient", after=after)
        after = sharded.all_reduce_flag(ops, "all_reduce overflow", group, (checked,), "max")
    normed = ops.compute("gradient norm", seconds, "gradient", after=after)
    return sharded.all_reduce_flag(ops, "all_reduce gradient norm", group, (normed,))


def update(
    ops: base.OpList,
    cost: StepCost,
    config: ZeroConfig,
    host: sharded.Host,
    numel: float,
    ranks: int,
    after: tuple[int, ...],
) -> int:
    """Adam on this rank's part, on the GPU or on the host; returns the op after which 16-bit parameters are there.

    On the GPU, gradients are cast to fp32 and unscaled, and masters back to 16 bits.
    """
    size = DTYPE_BYTES[config.param_dtype]
    if config.offloads_optimizer:
        done = host.adam(ops, numel, after)
        if config.offloads_parameters:
            return done
        return host.copy(ops, "h2d parameters", numel * size, sharded.H2D_STREAM, (done,))
    casts = base.gradient_pass(2.0 * numel * (size + 4.0), cost) if size < 4 else 0.0
    seconds = sharded.optimizer(cost, 1.0 / ranks) + casts
    return ops.compute("optimizer", seconds, "optimizer", after=after)
