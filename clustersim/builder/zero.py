"""DeepSpeed's ZeRO-2 and 3 beside tensor and context parallelism, as Megatron-DeepSpeed has them.

The rules are those of :mod:`clustersim.strategies.zero` and :mod:`~clustersim.strategies.zero3`, over the ranks that
hold the same part of the model. A local layer is cut at its exchanges only, so that gradients fill buckets, and stage 3
gathers parameters, layer by layer. A pipeline has neither: stages 2 and 3 give gradients away after every micro-batch,
and a pipeline's stage adds them up until its last (deepspeed/runtime/pipe/engine.py asserts stage < 2).
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.builder.laying import Here
from clustersim.builder.stage_memory import StateBytes
from clustersim.builder.tail import shared_gradients
from clustersim.model import Layer, Model, StepCost, Tensor
from clustersim.partition.base import Stage
from clustersim.program import DTYPE_BYTES
from clustersim.strategies import zero
from clustersim.strategies.base import OpList
from clustersim.strategies.zero_config import ZeroConfig, elements
from clustersim.strategies.zero_step import Zero
from clustersim.strategies.zero_trace import modules, visits


def zero_hooks(here: Here, ops: OpList, stage: Stage, cost: StepCost, config: ZeroConfig) -> Zero:
    """The hooks of the only stage of a model without pipeline. ``cost`` : the host's rates."""
    model = layerwise(stage)
    update = here.cost.update  # of one flat tensor
    cost = replace(cost, optimizer=update(model.parameters, 1), optimizer_floor=update(0.0, 1))
    hooks = zero.hooks(ops, model, cost, here.mesh, config)
    hooks.joined = lambda after: shared_gradients(here, ops, stage, 0, config.param_dtype, after)
    return hooks


def layerwise(stage: Stage) -> Model:
    """What a rank holds, as a model whose layers have one tensor each."""
    layers = (
        Layer(layer.name, layer.kind, (Tensor(f"{layer.name}.weight", layer.parameters),) * bool(layer.parameters), ())
        for layer in stage.layers
    )
    return Model("part", "part", tuple(layers))


def zero_states(stage: Stage, ranks: int, config: ZeroConfig, states: float) -> StateBytes:
    """Bytes of model states per element on one of the ranks that share. ``states`` : of the optimizer's, whole.

    Gathered at once is what stage 3's coordinator holds at the most; buckets are a number of bytes.
    """
    model, block = layerwise(stage), config.zero_optimization
    size, share = float(DTYPE_BYTES[config.param_dtype]), 1.0 / ranks
    third = block.stage == 3
    gathered = max(visit.live for visit in visits(modules(model, block), block)) / model.parameters if third else 0.0
    bucket = size * min(elements(block.reduce_bucket_size), model.parameters)
    away = 0.0 if config.offloads_optimizer else share
    kept = 0.0 if config.offloads_parameters else share
    borrows = ranks > 1 or config.offloads_parameters
    return StateBytes(
        parameters=(size * (kept if third else 1.0), 0.0),
        gradients=(size * away, 0.0),
        masters=(4.0 * away if size < 4 else 0.0, 0.0),
        states=(states * away, 0.0),
        gathered=(size * gathered if borrows else 0.0, 0.0),
        buckets=bucket * (1.0 if third or not block.overlaps else 2.0),
    )
