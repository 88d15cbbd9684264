"""DeepSpeed's ZeRO-1 and ZeRO-2: parameters whole on every rank, optimizer states (and gradients) shared out.

What is imitated (deepspeed/runtime/zero/stage_1_and_2.py):

* Backward fills a bucket of ``reduce_bucket_size`` elements. A gradient that would overflow it sends the bucket off
  first; one larger than the bucket goes alone. The default bucket holds 5e8 elements, so that most models send one
  bucket, at the end of backward, beside nothing.
* A bucket is *all-reduced* in full and every rank keeps the part it owns, although the option is called
  ``reduce_scatter``: twice the bytes of a reduce_scatter. ``use_multi_rank_bucket_allreduce = false`` reduces each part
  to its owner instead: that is the volume the ZeRO paper counts.
* Without ``overlap_comm`` reductions run on the compute stream: backward waits. With it they run beside backward, and
  two buckets take turns, so that filling waits for the last but one.
* Stage 1 reduces at the accumulation boundary only: after backward, or from hooks with ``overlap_comm``. Stage 2 has
  given away gradients after each micro-step, so it reduces every time.
* The step: an all_reduce of the overflow flag (fp16) and one of the norm, Adam on 1/N of the fp32 masters, and
  all_gather of the 16-bit parameters in calls of ``allgather_bucket_size`` elements.
* ``offload_optimizer``: each rank's part of the gradients goes to the host as buckets are reduced, in fp32 for the step
  and in 16 bits for a later micro-step, which has them back to add to. There they are unscaled, Adam runs as fast as a
  rank's threads read and write (:class:`~clustersim.core.memory_rates.HostWork`), and parameters are cast to 16 bits
  and come back. Without ``overlap_comm`` backward waits for the copies, and without ``pin_memory`` a thread of the host
  moves them.

Stage 3 is in :mod:`clustersim.training.strategies.zero3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.holding import Holding, always, piling_up
from clustersim.core.mesh import Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.units import format_bytes
from clustersim.training.schedules import Action
from clustersim.training.strategies import base, sharded
from clustersim.training.strategies.buckets import cut, ready_order
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place, sampled, walked
from clustersim.training.strategies.zero3 import Zero3, again_of, modules, persistent, visits_of
from clustersim.training.strategies.zero_config import ZeroConfig, elements
from clustersim.training.strategies.zero_step import Zero


class Zero12(Zero):
    """The hooks of stages 1 and 2. ``sent`` : elements of each bucket of this pass, for who owns what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.final = ready_order(self.model)
        self.sent: list[int] = []

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """Backward with its reductions, cut where a gradient finds the bucket full; stage 1 piles gradients up until
        the last backward of a step."""
        block = self.config.zero_optimization
        i = place[1]
        if action.kind == "F":
            yield WHOLE
            return
        self.adds = action.microbatch > 0
        self.completes = last
        hooks = block.stage == 2 or (last and block.overlaps)
        piled = block.stage == 1 and action.microbatch > 0
        if hooks and piled and i == len(self.final) - 1:
            self._accumulate()
        yield from cut(self.final[i] if hooks else (), self.overflows, self.add)
        if i:
            return
        if piled and not hooks:
            self._accumulate()
        if last and not hooks:
            for tensor in chain.from_iterable(reversed(self.final)):
                self.add(tensor)
        if hooks or last:
            self.reduce()
            self.sent = []

    def _accumulate(self) -> None:
        """Gradients of this micro-batch are added to those already there."""
        traffic = 3.0 * sharded.nbytes(self.model.trained, self.config.param_dtype)
        self.ops.compute("accumulate gradients", base.gradient_pass(traffic, self.cost), "gradient", nbytes=traffic)

    def send(self, k: int, numel: int, nbytes: float, after: int) -> int:
        """One all_reduce, or a reduce to each owner of a part of the bucket."""
        block = self.config.zero_optimization
        dtype = self.config.param_dtype
        if block.use_multi_rank_bucket_allreduce or not block.reduce_scatter:
            return collective(self.ops, "all_reduce", f"bucket {k}", nbytes, self.group, (after,), dtype=dtype)
        # Parts are contiguous, and buckets fill from the end: the last rank's part comes first.
        part = -(-self.model.trained // self.ranks)
        done = after
        position = sum(self.sent)
        end = position + numel
        self.sent.append(numel)
        while position < end:
            owner = self.ranks - 1 - min(position // part, self.ranks - 1)
            upto = min(end, (position // part + 1) * part) if owner else end
            size = sharded.nbytes(upto - position, dtype)
            bucket_name = f"bucket {k} to {owner}"
            done = collective(self.ops, "reduce", bucket_name, size, self.group, (after,), root=owner, dtype=dtype)
            position = upto
        return done

    def publish(self, updated: int) -> tuple[int, ...]:
        """All trained parameters, in calls of a bucket each."""
        size = float(self.model.trained)
        calls = max(1, int(size // max(1, elements(self.config.zero_optimization.allgather_bucket_size))))
        nbytes = sharded.nbytes(size / calls, self.config.param_dtype)
        done = updated
        for call in range(calls if self.ranks > 1 else 0):
            done = self.gather(f"parameters {call}", nbytes, updated)
        return (done,)

    def notes(self) -> tuple[str, ...]:
        """Buckets in words."""
        block = self.config.zero_optimization
        parameters = self.model.trained
        size = elements(block.reduce_bucket_size)
        how = "beside backward" if block.overlaps else "on the compute stream"
        nbytes = format_bytes(float(min(size, parameters) * DTYPE_BYTES[self.config.param_dtype]))
        count = -(-parameters // size)
        return (
            f"zero{block.stage}: {self.ranks} ranks, about {count} bucket(s) of {nbytes}, reduced {how}",
            *self.config.notes,
        )


def hooks(ops: base.OpList, model: Model, cost: StepCost, mesh: Mesh, config: ZeroConfig) -> Zero:
    """The hooks of whatever stage is asked for."""
    return (Zero3 if config.zero_optimization.stage == 3 else Zero12)(ops, model, cost, mesh, config)


def holding(model: Model, mesh: Mesh, config: ZeroConfig) -> Holding:
    """Bytes of one rank at every moment of a step: the table of the ZeRO paper, with DeepSpeed's buckets on top.

    Psi parameters, N ranks, 16-bit parameters and gradients, Adam: 4 Psi + 12 Psi/N bytes for stage 1, 2 Psi + 14 Psi/N
    for stage 2, 16 Psi/N for stage 3 (arXiv:1910.02054, figure 1).
    """
    block = config.zero_optimization
    ranks = mesh.world_size
    n = len(model.layers)
    size = DTYPE_BYTES[config.param_dtype]
    numel = float(model.trained)
    updated = 0.0 if config.offloads_optimizer else numel / ranks
    kept_share = 1.0 if block.stage < 3 else 0.0 if config.offloads_parameters else 1.0 / ranks
    return Holding(
        parameters=(size * numel + model.frozen_bytes) * kept_share,
        updated=updated,
        masters=4.0 * updated if size < 4 else 0.0,
        state_bytes=4,
        gradients=_gradients(model, ranks, config),
        gathered=_gathered(model, config) if block.stage == 3 else always(0.0, n),
        buffers=_buffers(model, updated, config),
        away=numel / ranks if config.offloads_optimizer else 0.0,
        away_bytes=(numel * config.away_bytes + model.frozen_bytes * config.offloads_parameters) / ranks,
    )


def _gradients(model: Model, ranks: int, config: ZeroConfig) -> Floats:
    """Stage 1 keeps them whole until the step. Later stages keep a part, stage 3 in a buffer made once; a host's
    optimizer takes them away."""
    size = DTYPE_BYTES[config.param_dtype]
    n = len(model.layers)
    by_layer = np.array([float(size) * layer.trained for layer in model.layers])
    if config.zero_optimization.stage == 1:
        if config.gradient_accumulation_steps > 1:
            return always(by_layer.sum(), n)
        return piling_up(by_layer)
    if config.offloads_optimizer:
        return always(0.0, n)
    if config.zero_optimization.stage == 2 and config.gradient_accumulation_steps == 1:
        return piling_up(by_layer / ranks)
    return always(by_layer.sum() / ranks, n)


def most_gathered(model: Model, config: ZeroConfig) -> float:
    """Bytes that stage 3 holds at the most beside a rank's shards, as the release's coordinator gathers them."""
    return float(_gathered(model, config).max())


def _gathered(model: Model, config: ZeroConfig) -> Floats:
    """What stage 3's coordinator has gathered while each layer runs, and what it never lets go."""
    block = config.zero_optimization
    n = len(model.layers)
    size = DTYPE_BYTES[config.param_dtype]
    all_modules = modules(model, block)
    held_bytes = always(size * float(persistent(model, block)), n)
    hpz = size * model.parameters / block.zero_hpz_partition_size if block.zero_hpz_partition_size > 1 else 0.0
    live = np.zeros(2 * n + 1)
    for k, visit in enumerate(visits_of(model, block, config.prefetches, ())):
        layer = all_modules[visit.module].layer
        moment = layer if k < len(all_modules) else 2 * n - 1 - layer
        live[moment] = max(live[moment], size * float(visit.live))
    return held_bytes + live + hpz


def _buffers(model: Model, updated: float, config: ZeroConfig) -> Floats:
    """Buckets of contiguous gradients (two of them take turns where reductions overlap), and fp32 gradients of the
    step."""
    block = config.zero_optimization
    n = len(model.layers)
    size = DTYPE_BYTES[config.param_dtype]
    bucket = float(size * min(elements(block.reduce_bucket_size), model.trained))
    buffers = np.zeros(2 * n + 1)
    if block.stage == 3:
        buffers[:] = bucket
    elif block.contiguous_gradients:
        buffers[n : 2 * n] = bucket * (2.0 if block.overlaps else 1.0)
    if size < 4:
        buffers[2 * n] += 4.0 * updated
    return buffers


build = walked(hooks)


def least_ops(model: Model, cost: StepCost, mesh: Mesh, config: ZeroConfig) -> int:
    """Kernels and gathers of one pass: stage 3 goes from sub-module to sub-module, of which each expert has several."""
    block = config.zero_optimization
    if block.stage < 3:
        return 2 * len(model.layers)
    uses = visits_of(model, block, config.prefetches, again_of(cost))
    gathers = sum(visit.fetch + bool(visit.prefetch) for visit in uses) if mesh.world_size > 1 else 0
    return 2 * len(modules(model, block)) + gathers


STRATEGY = base.Strategy(
    "zero", ZeroConfig, build, holding=holding, partly=True, sample=sampled(hooks), least_ops=least_ops
)
