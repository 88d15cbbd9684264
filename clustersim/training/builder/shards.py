"""Sharded parameters beside a split model: FSDP2 on the layers of one stage, over ``dp_shard`` and ``cp``.

The rules are :mod:`clustersim.training.strategies.fsdp`'s own; here the walk calls its hooks. What a pipeline changes
(torchtitan; PyTorch's pipelining runtime; facts: MODEL_PARALLEL.md 2.6): parameters of up to three chunks stay gathered
between micro-batches, since each would gather them anew, and gradients are reduced in the last backward of each chunk
only.
Routed experts that are spread are units of their own over ``edp`` (torchtitan models/moe: its mesh ``efsdp``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import msgspec

from clustersim.core.mesh import Mesh
from clustersim.core.model import StepCost
from clustersim.training.builder.gradients import EXPERT, INSTANCES, SHARD, clip, shared_gradients
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.builder.unshard import MOST_ACTIVE, regathered
from clustersim.training.partition.base import Stage
from clustersim.training.schedules import Action, Order
from clustersim.training.strategies import sharded
from clustersim.training.strategies.fsdp import Shards
from clustersim.training.strategies.fsdp_config import FSDPConfig, FSDPPlan, element_bytes, last_unit
from clustersim.training.strategies.walk import LayerPart, Place


def experts_outside(config: FSDPConfig, mesh: Mesh) -> bool:
    """Whether FSDP leaves a rank's experts as they are: nobody else has them, and its knobs say so."""
    return config.experts_outside and mesh.size(*EXPERT) == 1


class ShardHooks(Shards):
    """The hooks of one stage.

    cost : the host's rates. config : FSDP's knobs, version 2. tied : elements of the tied embedding on this rank.
    order : what the rank runs in a step.
    """

    def __init__(
        self, stage_ops: StageOps, stage: Stage, cost: StepCost, config: FSDPConfig, tied: int, order: Order = ()
    ) -> None:
        if stage_ops.mesh.size("pp") > 1:
            config = msgspec.structs.replace(config, reshard_after_forward=False, no_sync=True)
        wrapped = sharded.units(
            stage.layers, config.blocks_per_unit, config.min_num_params, each=True, ends_apart=config.ends_apart
        )
        places = [(c, i) for c, chunk in enumerate(stage.chunks) for i in range(len(chunk.layers))]
        shard = stage_ops.groups(SHARD)
        spans = sharded.segments(len(places), wrapped)
        plan = FSDPPlan(wrapped, spans, shard, shard, stage_ops.groups(INSTANCES), last_unit(config, spans))
        super().__init__(stage_ops.ops, cost, config, plan, places)
        self.stage_ops = stage_ops
        self.stage = stage
        self.tied = tied
        self.outside = experts_outside(config, stage_ops.mesh) * stage.expert_parameters
        wrapped_experts = stage.expert_parameters and not self.outside
        self.experts = self._experts(cost, config, places) if wrapped_experts else None
        self._busy = True
        of_unit = [(places[unit.layers[0]][0], k) for k, unit in enumerate(wrapped) if k and unit.layers]
        self._units = {c: [k for chunk, k in of_unit if chunk == c] for c in range(len(stage.chunks))}
        more = len(stage.chunks) > MOST_ACTIVE
        self._regathered = regathered(order) if more else {}

    def _experts(self, cost: StepCost, config: FSDPConfig, places: list[Place]) -> Shards:
        """The experts of each layer as a unit; nothing is left for the root."""
        layers = [(i, layer) for i, layer in enumerate(self.stage.layers) if layer.expert_parameters]
        expert_units = (
            sharded.ShardUnit(f"{layer.name}.experts", (i,), layer.expert_parameters) for i, layer in layers
        )
        units = (sharded.ShardUnit("root", (), 0, is_block=False), *expert_units)
        groups = self.stage_ops.groups(EXPERT)
        spans = tuple((k, unit.layers) for k, unit in enumerate(units) if k)
        plan = FSDPPlan(units, spans, groups, groups, groups.reshape(-1, 1))
        return Shards(self.ops, cost, config, plan, places, communicator="edp")

    def begin_step(self) -> None:
        """All_gathers read parameters."""
        super().begin_step()
        if self.experts:
            self.experts.begin_step()

    def busy(self) -> bool:
        """Whether parameters or gradients may be on their way while the pass runs that :meth:`around` is in."""
        return self._busy

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """As for a whole model; a layer's experts are gathered behind the rest of it and reduced ahead of it."""
        first = 0 if action.kind == "F" else len(self.stage.chunks[place[0]].layers) - 1
        if place[1] == first:
            self._regather(action)
            all_gathered = all(self.gathered.get(unit) == () for unit in range(len(self.plan.units)))
            self._busy = last or bool(self.reduced) or not all_gathered or self.experts is not None
        for part in super().around(place, action, last=last):
            experts = self.experts.around(place, action, last=last) if self.experts else iter((part,))
            yield next(experts)
            deque(experts, 0)

    def _regather(self, action: Action) -> None:
        """Give back and gather whole chunks ahead of a pass, where the rank has more of them than stay gathered."""
        due = self._regathered.get((action.kind, action.microbatch, action.chunk))
        if due is None:
            return
        for unit in (k for chunk in due.evicted for k in self._units[chunk]):
            if unit in self.gathered:
                self._free(unit)
        for unit in (k for chunk in due.gathered for k in self._units[chunk]):
            self._gather(unit, self.plan.shard)

    def finish(self) -> None:
        """Clip and update this rank's shard, when all of its gradients are reduced."""
        ops = self.ops
        numel = self.numel + (self.experts.numel if self.experts else self.outside)
        after = (*self.reduced, *(self.experts.reduced if self.experts else ())) or (ops.kernel,)
        after = shared_gradients(self.stage_ops, self.stage, self.tied, self.config.orig_dtype, after)
        if self.config.clip_grad_norm:
            after = clip(self.stage_ops, numel * element_bytes(self.config)[2], after)
        tensors = sum(len(layer.tensors) + len(layer.expert_tensors) for layer in self.stage.layers)
        seconds = self.stage_ops.cost.update(numel, tensors)
        ops.kernel = ops.compute("optimizer", seconds, "optimizer", after=after)
        self.reduced = []
        if self.experts:
            self.experts.reduced = []
