"""Sharded parameters beside a split model: FSDP2 on the layers of one stage, over ``dp_shard`` and ``cp``.

The rules are :mod:`clustersim.strategies.fsdp`'s own; here the walk calls its hooks. What a pipeline changes
(torchtitan; PyTorch's pipelining runtime; facts: MODEL_PARALLEL.md 2.6): parameters stay gathered between
micro-batches, since each would gather them anew, and gradients are reduced in the last backward of each chunk only.
"""

from __future__ import annotations

import msgspec

from clustersim.builder.laying import Here
from clustersim.builder.tail import clip, shared_gradients
from clustersim.model import StepCost
from clustersim.partition.base import Stage
from clustersim.strategies import sharded
from clustersim.strategies.base import OpList
from clustersim.strategies.fsdp import Shards
from clustersim.strategies.fsdp_config import FSDPConfig, Plan, element_bytes

SHARD, REPLICATE = ("dp_shard", "cp"), ("dp_replicate",)


class Sharded(Shards):
    """The hooks of one stage.

    Parameters
    ----------
    cost : the host's rates. config : FSDP's knobs, version 2. tied : elements of the tied embedding on this rank.
    """

    def __init__(
        self, here: Here, ops: OpList, stage: Stage, cost: StepCost, config: FSDPConfig, tied: int = 0
    ) -> None:
        if here.mesh.size("pp") > 1:
            config = msgspec.structs.replace(config, reshard_after_forward=False, no_sync=True)
        wrapped = sharded.units(stage.layers, config.blocks_per_unit, config.min_num_params)
        places = [(c, i) for c, chunk in enumerate(stage.chunks) for i in range(len(chunk.layers))]
        shard = here.groups(SHARD)
        plan = Plan(wrapped, sharded.segments(len(places), wrapped), shard, shard, here.groups(REPLICATE))
        super().__init__(ops, cost, config, plan, places)
        self.here, self.stage, self.tied = here, stage, tied

    def finish(self) -> None:
        """Clip and update this rank's shard, when all of its gradients are reduced."""
        ops, numel = self.ops, self.numel
        after = tuple(self.reduced) or (ops.kernel,)
        after = shared_gradients(self.here, ops, self.stage, self.tied, self.config.orig_dtype, after)
        if self.config.clip_grad_norm:
            after = clip(self.here, ops, numel * element_bytes(self.config)[2], after)
        tensors = sum(len(layer.tensors) for layer in self.stage.layers)
        seconds = self.here.cost.update(numel, tensors)
        ops.kernel = ops.compute("optimizer", seconds, "optimizer", after=after)
        self.reduced = []
