"""DeepSpeed's ZeRO-2 and 3 beside tensor and context parallelism, as Megatron-DeepSpeed has them.

The rules are those of :mod:`clustersim.training.strategies.zero` and :mod:`~clustersim.training.strategies.zero3`, over
the ranks that hold the same part of the model. A local layer is cut at its exchanges only, so that gradients fill
buckets, and stage 3 gathers parameters, layer by layer. A pipeline has neither: stages 2 and 3 give gradients away
after every micro-batch, and a pipeline's stage adds them up until its last (deepspeed/runtime/pipe/engine.py asserts
stage < 2). Routed experts that are spread have buckets, groups and shards of their own under stage 2; stage 3 refuses
them (runtime/engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from clustersim.core.model import Layer, Model, StepCost, Tensor
from clustersim.core.program import DTYPE_BYTES
from clustersim.training.builder.gradients import EXPERT, shared_gradients
from clustersim.training.builder.stage_memory import StateBytes
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.partition.base import Stage
from clustersim.training.schedules import Action
from clustersim.training.strategies import zero
from clustersim.training.strategies.walk import Hooks, LayerPart, Place
from clustersim.training.strategies.zero_config import ZeroConfig, elements


def zero_hooks(stage_ops: StageOps, stage: Stage, cost: StepCost, config: ZeroConfig) -> Hooks:
    """The hooks of the only stage of a model without pipeline. ``cost`` : the host's rates."""
    model = layerwise(stage)
    update = stage_ops.cost.update  # of one flat tensor
    cost = replace(
        cost,
        optimizer=update(model.parameters, 1),
        optimizer_floor=update(0.0, 1),
        optimizer_traffic=stage_ops.cost.update_traffic(model.parameters),
    )
    hooks = zero.hooks(stage_ops.ops, model, cost, stage_ops.mesh, config)
    hooks.lays_whole = True
    hooks.joined = lambda after: shared_gradients(stage_ops, stage, 0, config.param_dtype, after)
    return ExpertHooks(hooks, stage_ops, stage, config) if stage.expert_trained else hooks


@dataclass
class ExpertHooks:
    """Stage 2's hooks, and beside them what the ranks that hold the same experts do with these.

    deepspeed/runtime/zero/stage_1_and_2.py ``average_tensor``: a bucket's experts are all-reduced over the group of
    their own parameters, in every micro-batch; each of the group updates its share of them and gathers the others'.
    ``filled`` : elements in the bucket. ``reduced`` : this step's reductions.
    """

    dense: Hooks
    stage_ops: StageOps
    stage: Stage
    config: ZeroConfig
    filled: int = field(default=0, init=False)
    reduced: list[int] = field(default_factory=list, init=False)

    def begin_step(self) -> None:
        """The dense ones'."""
        self.reduced = []
        self.dense.begin_step()

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """A full bucket is sent off behind the layer that fills it, and what is left at the end of a backward."""
        yield from self.dense.around(place, action, last=last)
        if action.kind != "B":
            return
        self.filled += self.stage.chunks[place[0]].layers[place[1]].expert_trained
        if self.filled and (self.filled >= elements(self.config.zero_optimization.reduce_bucket_size) or not place[1]):
            self._reduce()

    def _reduce(self) -> None:
        k = len(self.reduced)
        ops = self.stage_ops.ops
        nbytes = float(self.filled * DTYPE_BYTES[self.config.param_dtype])
        self.filled = 0
        # Copied into contiguous memory, and divided there.
        seconds = 4.0 * nbytes / self.stage_ops.rate
        after, ops.waits = (*ops.waits, ops.kernel), ()
        copied = (ops.compute(f"fill expert bucket {k}", seconds, "gradient", after=after, nbytes=4.0 * nbytes),)
        done = self._exchange("all_reduce", f"expert bucket {k}", nbytes, copied)
        self.reduced.append(done[0])
        if not self.config.zero_optimization.overlaps:
            ops.waits = done

    def _exchange(self, kind: str, name: str, nbytes: float, after: tuple[int, ...]) -> tuple[int, ...]:
        return self.stage_ops.collective(kind, name, nbytes, self.config.param_dtype, EXPERT, after)

    def finish(self) -> None:
        """Norm and update of the dense ones, then the experts'."""
        self.dense.finish()
        ops = self.stage_ops.ops
        cost = self.stage_ops.cost
        size = DTYPE_BYTES[self.config.param_dtype]
        numel = self.stage.expert_trained / self.stage_ops.groups(EXPERT).shape[1]
        seconds = cost.update(numel, 1) + 2.0 * numel * (size + 4.0) / self.stage_ops.rate * (size < 4)
        after, ops.waits = (*ops.waits, *self.reduced[-1:]), ()
        updated = (ops.compute("optimizer experts", seconds, "optimizer", after=after),)
        ops.waits = self._exchange("all_gather", "expert parameters", float(self.stage.expert_trained * size), updated)


def layerwise(stage: Stage) -> Model:
    """What a rank holds, as a model whose layers have one tensor each."""
    layers = (
        Layer(layer.name, layer.kind, (Tensor(f"{layer.name}.weight", layer.trained),) * bool(layer.trained), ())
        for layer in stage.layers
    )
    return Model("part", "part", tuple(layers))


def zero_states(stage: Stage, ranks: int, experts: int, config: ZeroConfig, states: float) -> StateBytes:
    """Bytes of model states per element on one of the ``ranks`` that share, and of the ``experts`` ranks that share
    routed experts. ``states`` : of the optimizer's, whole.

    Gathered is :func:`clustersim.training.strategies.zero.most_gathered`; buckets are a number of bytes.
    """
    model = layerwise(stage)
    block = config.zero_optimization
    size = float(DTYPE_BYTES[config.param_dtype])
    share = 1.0 / ranks
    third = block.stage == 3
    gathered = zero.most_gathered(model, config) / model.parameters if third else 0.0
    bucket = size * min(elements(block.reduce_bucket_size), model.parameters)
    away = 0.0 if config.offloads_optimizer else share
    kept_share = 0.0 if config.offloads_parameters else share
    borrows = ranks > 1 or config.offloads_parameters
    spread = 0.0 if config.offloads_optimizer else 1.0 / experts
    return StateBytes(
        parameters=(size * (kept_share if third else 1.0), size),
        gradients=(size * away, size * spread),
        masters=(4.0 * away if size < 4 else 0.0, 4.0 * spread if size < 4 else 0.0),
        states=(states * away, states * spread),
        gathered=(gathered if borrows else 0.0, 0.0),
        buckets=bucket * (1.0 if third or not block.overlaps else 2.0),
        host=(config.away_bytes + states * config.offloads_optimizer) * share,
    )
