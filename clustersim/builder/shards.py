"""Sharded parameters beside a split model: FSDP2 on the layers of one stage, over ``dp_shard`` and ``cp``.

The rules are :mod:`clustersim.strategies.fsdp`'s own; here the walk calls its hooks. What a pipeline changes
(torchtitan; PyTorch's pipelining runtime; facts: MODEL_PARALLEL.md 2.6): parameters stay gathered between
micro-batches, since each would gather them anew, and gradients are reduced in the last backward of each chunk only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from clustersim.builder.laying import Here, Laid
from clustersim.builder.tail import clip, shared_gradients
from clustersim.model import StepCost
from clustersim.partition.base import Stage
from clustersim.schedules.base import Action
from clustersim.strategies import sharded
from clustersim.strategies.fsdp import FSDPRank
from clustersim.strategies.fsdp_config import FSDPConfig, Plan, element_bytes

SHARD, REPLICATE = ("dp_shard", "cp"), ("dp_replicate",)
Place = tuple[int, int]
"""A layer: (chunk, place in the chunk)."""


@dataclass
class Sharded:
    """The hooks of one stage.

    Parameters
    ----------
    cost : the host's rates. config : FSDP's knobs, version 2. tied : elements of the tied embedding on this rank.
    """

    here: Here
    laid: Laid
    stage: Stage
    cost: StepCost
    config: FSDPConfig
    tied: int = 0
    rank: FSDPRank = field(init=False)
    _first: dict[Place, int] = field(default_factory=dict, init=False)
    _last: dict[Place, int] = field(default_factory=dict, init=False)
    _begun: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        if self.here.mesh.size("pp") > 1:
            self.config = msgspec.structs.replace(self.config, reshard_after_forward=False, no_sync=True)
        places = [(c, i) for c, chunk in enumerate(self.stage.chunks) for i in range(len(chunk.layers))]
        wrapped = sharded.units(self.stage.layers, self.config.blocks_per_unit, self.config.min_num_params)
        segments = sharded.segments(len(places), wrapped)
        for s, (_, layers) in enumerate(segments):
            self._first[places[layers[0]]] = self._last[places[layers[-1]]] = s
        shard = self.here.groups(SHARD)
        plan = Plan(wrapped, segments, shard, shard, self.here.groups(REPLICATE))
        self.rank = FSDPRank(self.laid.ops, self.cost, self.config, plan, None)

    def begin_step(self) -> None:
        """All_gathers read parameters, so they wait for the optimizer."""
        self.rank.begin()
        self._begun.clear()

    def before(self, chunk: int, layer: int, action: Action) -> tuple[int, ...]:
        """The pre-forward and pre-backward hooks."""
        ends = self._first if action.kind == "F" else self._last
        if action.kind == "W" or (chunk, layer) not in ends:
            return ()
        s = ends[chunk, layer]
        return self.rank.enter_forward(s) if action.kind == "F" else self.rank.enter_backward(s)

    def after(self, chunk: int, layer: int, action: Action, *, last: bool) -> None:
        """The post-forward and post-backward hooks; with a split backward, gradients are there after W."""
        self.rank.kernel = self.laid.kernel
        ends = self._last if action.kind == "F" else self._first
        if action.kind == "I" or (chunk, layer) not in ends:
            return
        s = ends[chunk, layer]
        if action.kind == "F":
            self.rank.leave_forward(s)
            return
        self.rank.leave_backward(s, first=s not in self._begun, sync=last or not self.config.no_sync)
        self._begun.add(s)

    def finish(self) -> None:
        """Clip and update this rank's shard, when all of its gradients are reduced."""
        plan = self.rank.plan
        numel = sum(unit.padded(plan.degree) for unit in plan.units) / plan.degree
        after = tuple(self.rank.reduced) or (self.laid.kernel,)
        after = shared_gradients(self.here, self.laid, self.stage, self.tied, self.config.orig_dtype, after)
        if self.config.clip_grad_norm:
            after = clip(self.here, self.laid, numel * element_bytes(self.config)[2], after)
        tensors = sum(len(layer.tensors) for layer in self.stage.layers)
        seconds = self.here.cost.update(numel, tensors)
        self.laid.kernel = self.laid.ops.compute("optimizer", seconds, "optimizer", after=after)
        self.rank.reduced = []
