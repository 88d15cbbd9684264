"""Replicated parameters beside a split model: gradients reduced in buckets, the optimizer whole or shared out.

What is imitated (Megatron-LM
core/distributed/{distributed_data_parallel,param_and_grad_buffer,finalize_model_grads}.py,
core/optimizer/{distrib_optimizer,clip_grads}.py; facts: MODEL_PARALLEL.md 2.6, 2.7):

* Gradients are reduced in the backward of the last micro-batch only: beside it with ``overlap_grad_reduce``, after it
  without. Dense gradients go over dp and cp, those of routed experts over edp, from buffers of their own.
* A bucket of either buffer holds ``max(40e6, 1e6 dp)`` parameters on pipeline rank 0, chunk 0, where reductions have
  backward to hide behind; everywhere else one bucket holds a chunk. Without overlap there is one bucket a chunk.
  Dense and expert buffers are allocated with the same ``bucket_size`` (``_allocate_buffers_for_parameters``).
* ``align_grad_reduce``: a chunk of an interleaved schedule is reduced as a whole, by pipeline rank r in the r-th
  backward pass behind its last one, so that stages start together (pipeline_parallel/schedules.py, ``grad_sync_func``).
* ``use_distributed_optimizer`` (ZeRO-1): reduce_scatter instead of all_reduce, Adam on the shard, all_gather of the
  parameters: at the end of the step, or with ``overlap_param_gather`` beside the next forward, bucket by bucket in its
  order: the first layer of a bucket waits for it (``_make_forward_pre_hook``, ``next_param_gather_bucket_group``).
* The step ends in this order: reductions; the all_reduce over tp of gradients that tensor-parallel ranks only have
  parts of (norms under sequence parallelism); tied embeddings between first and last stage; the gradient norm, one
  number over *all* ranks: a barrier; Adam; parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from clustersim.core.program import DTYPE_BYTES
from clustersim.training.builder.stage_ops import StageOps
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition.base import LocalLayer, Stage
from clustersim.training.schedules import Action
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place

DENSE = ("dp", "cp")
EXPERT = ("edp",)
SHARD = ("dp_shard", "cp")
INSTANCES = ("dp_replicate",)
"""Of a distributed optimizer with several instances: who shares one out, and who holds the same share."""
EVERYBODY = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True, kw_only=True)
class ReplicaConfig:
    """What the replicated parameters are done with.

    Parameters
    ----------
    parallel : Megatron's own knobs. distributed : share out the optimizer (``use_distributed_optimizer``, ZeRO-1).
    aligned : stages start reductions together. grad_dtype : of gradients and their reduction. param_dtype : of
        parameters. clip : whether the gradients' norm is all-reduced before the update (``clip_grad`` above 0).
    copies : HBM bytes per updated element besides the optimizer's own: gradients and masters copied between dtypes.
    accumulated : HBM bytes per element that adding a micro-batch's gradients to the kept ones moves; 0 where the
        products that make them do it.
    """

    parallel: ParallelConfig
    distributed: bool
    aligned: bool
    grad_dtype: str
    param_dtype: str
    clip: bool = True
    copies: float
    accumulated: float


class GradientBucket(msgspec.Struct):
    """Gradients reduced together: of some layers of one chunk, dense or of experts. ``missing`` : layers still to
    come.
    """

    name: str
    dims: tuple[str, ...]
    numel: int
    layers: frozenset[tuple[int, int]]
    missing: set[tuple[int, int]] = msgspec.field(default_factory=set)
    reduced: int = -1


@dataclass
class ReplicatedHooks:
    """The hooks of one stage; see the module's docstring.

    Parameters
    ----------
    stage_index : this pipeline rank. tied : elements of the tied embedding table on this rank, 0 for none.
    _gathered : chunk and layer -> what its next forward waits for. _arriving : whether a pass began before all of that
        was there. _due : complete chunks, and backward passes until they are reduced.
    """

    stage_ops: StageOps
    stage: Stage
    stage_index: int
    config: ReplicaConfig
    tied: int = 0
    buckets: list[GradientBucket] = field(default_factory=list, init=False)
    _of: dict[tuple[int, int], list[GradientBucket]] = field(default_factory=dict, init=False)
    _sizes: list[float] = field(default_factory=list, init=False)
    _gathered: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict, init=False)
    _last: bool = field(default=False, init=False)
    _arriving: bool = field(default=False, init=False)
    _due: list[tuple[int, int]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for chunk in self.stage.chunks:
            self._sizes.append(float(sum(layer.trained + layer.expert_trained for layer in chunk.layers)))
        for c, chunk in enumerate(self.stage.chunks):
            self.buckets += _buckets(c, chunk.layers, DENSE, self._limit(c), lambda layer: layer.trained)
            self.buckets += _buckets(c, chunk.layers, EXPERT, self._limit(c), lambda layer: layer.expert_trained)
        for bucket in self.buckets:
            for place in bucket.layers:
                self._of.setdefault(place, []).append(bucket)

    def _limit(self, chunk: int) -> float | None:
        if not self.config.parallel.overlap_grad_reduce or self.stage_index or chunk:
            return None
        if buckets := self.config.parallel.ddp_num_buckets:
            return sum(self._sizes) // buckets
        return self.config.parallel.ddp_bucket_size or max(40e6, 1e6 * self.stage_ops.mesh.size(*DENSE))

    def busy(self) -> bool:
        """Whether parameters or gradients may be on their way while the pass runs that :meth:`around` is in."""
        reducing = self._last or any(bucket.reduced >= 0 for bucket in self.buckets)
        return self._arriving or (self.config.parallel.overlap_grad_reduce and reducing)

    def quiet(self, chunk: int, *, last: bool) -> bool:
        """Whether nothing is done around a pass of a chunk but what is done around every such pass. ``last`` : its
        gradients are complete after it."""
        return not last and not self._due and not any(gathered == chunk for gathered, _ in self._gathered)

    # --- hooks -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Gradients are awaited anew."""
        for bucket in self.buckets:
            bucket.missing, bucket.reduced = set(bucket.layers), -1
        self._due.clear()

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """The first kernel of a bucket's layers after an update waits for its parameters. Gradients join the kept ones;
        a bucket of complete ones is reduced at once, where that is overlapped."""
        chunk, layer = place
        if action.kind == "F":
            self.stage_ops.ops.waits = (*self.stage_ops.ops.waits, *self._gathered.pop(place, ()))
        if action.kind != "F" or layer == 0:
            self._arriving = bool(self._gathered)
        self._last = last
        yield WHOLE
        if self.config.accumulated and layer == 0 and action.kind in "BW":
            self._accumulate(chunk)
        for bucket in self._of.get(place, ()) if last else ():
            bucket.missing.discard(place)
            if not bucket.missing and self.config.parallel.overlap_grad_reduce and not self.config.aligned:
                self._reduce(bucket)
        if self.config.parallel.overlap_grad_reduce and self.config.aligned and layer == 0 and action.kind in "BW":
            self._align(chunk, complete=last)

    def _align(self, chunk: int, *, complete: bool) -> None:
        """A backward pass of a chunk is over: reduce what this pipeline rank has waited for long enough."""
        due = [(c, left - 1) for c, left in self._due] + [(chunk, self.stage_index)] * complete
        self._due = [(c, left) for c, left in due if left > 0]
        ready = {c for c, left in due if left <= 0}
        for bucket in self.buckets:
            if not bucket.missing and bucket.reduced < 0 and {c for c, _ in bucket.layers} <= ready:
                self._reduce(bucket)

    def _accumulate(self, chunk: int) -> None:
        """One pass over the chunk's gradients: layers' own would be as long, and many more ops."""
        nbytes = self._sizes[chunk] * self.config.accumulated
        ops = self.stage_ops.ops
        seconds = nbytes / self.stage_ops.rate
        after = (ops.kernel,) if ops.kernel >= 0 else ()
        ops.kernel = ops.compute("accumulate gradients", seconds, "gradient", after=after, nbytes=nbytes)

    def finish(self) -> None:
        """The end of the step; see the module's docstring."""
        for bucket in self.buckets:
            if bucket.reduced < 0:
                self._reduce(bucket)
        after = tuple(bucket.reduced for bucket in self.buckets) or (self.stage_ops.ops.kernel,)
        dtype = self.config.grad_dtype
        after = shared_gradients(self.stage_ops, self.stage, self.tied, dtype, after)
        if self.config.clip:
            nbytes = float(self._updated() * DTYPE_BYTES[dtype])
            after = clip(self.stage_ops, nbytes, after, barrier=not self.config.parallel.optimizer_post_validation)
        self._update(after)

    def _reduce(self, bucket: GradientBucket) -> None:
        kind = "reduce_scatter" if self.config.distributed else "all_reduce"
        nbytes = float(bucket.numel * DTYPE_BYTES[self.config.grad_dtype])
        dtype = self.config.grad_dtype
        dims = self._sharing(bucket)
        after = self.stage_ops.collective(kind, bucket.name, nbytes, dtype, dims, (self.stage_ops.ops.kernel,))
        if dims != bucket.dims:  # each instance's shards are summed over instances
            share = nbytes / self.stage_ops.mesh.size(*dims)
            after = self.stage_ops.collective("all_reduce", bucket.name, share, dtype, INSTANCES, after)
        bucket.reduced = after[0]

    def _sharing(self, bucket: GradientBucket) -> tuple[str, ...]:
        """Dimensions a bucket is reduced over at once: of an instance, where the optimizer has several."""
        several = self.config.distributed and self.stage_ops.mesh.size(*INSTANCES) > 1
        return SHARD if several and bucket.dims == DENSE else bucket.dims

    def _updated(self) -> float:
        """Elements that this rank's optimizer updates."""
        dense = float(self.stage.trained)
        expert = float(self.stage.expert_trained)
        if not self.config.distributed:
            return dense + expert
        size = self.stage_ops.mesh.size
        return dense / size(*SHARD) + (expert / size(*EXPERT) if expert else 0.0)

    def _update(self, after: tuple[int, ...]) -> None:
        numel = self._updated()
        tensors = (
            1 if self.config.distributed else sum(not t.frozen for layer in self.stage.layers for t in layer.tensors)
        )
        seconds = self.stage_ops.cost.update(numel, tensors) + self.config.copies * numel / self.stage_ops.rate
        self.stage_ops.ops.kernel = self.stage_ops.ops.compute("optimizer", seconds, "optimizer", after=after)
        if self.config.distributed:
            self._gather()

    def _gather(self) -> None:
        """Updated parameters to everybody: awaited at once, or by the first layer that uses them."""
        for bucket in sorted(self.buckets, key=lambda held: min(held.layers)):
            nbytes = float(bucket.numel * DTYPE_BYTES[self.config.param_dtype])
            name = f"parameters {bucket.name}"
            kernel = (self.stage_ops.ops.kernel,)
            dtype = self.config.param_dtype
            done = self.stage_ops.collective("all_gather", name, nbytes, dtype, self._sharing(bucket), kernel)
            first = min(bucket.layers)
            self._gathered[first] = (*self._gathered.get(first, ()), *done)
        if not self.config.parallel.overlap_param_gather:
            self.stage_ops.ops.waits = (
                *self.stage_ops.ops.waits,
                *(op for waits in self._gathered.values() for op in waits),
            )
            self._gathered.clear()


def _buckets(
    chunk: int,
    layers: Sequence[LocalLayer],
    dims: tuple[str, ...],
    limit: float | None,
    numel: Callable[[LocalLayer], int],
) -> Iterator[GradientBucket]:
    """Buckets of a chunk's gradients in the order backward completes them; one for all where there is no limit."""
    layers_held: list[tuple[int, int]] = []
    size = count = 0
    gradient_name = "gradients" if dims == DENSE else "expert gradients"
    for i in reversed(range(len(layers))):
        if not numel(layers[i]):
            continue
        layers_held.append((chunk, i))
        size += numel(layers[i])
        if limit is not None and size >= limit:
            yield GradientBucket(f"{gradient_name} {chunk}.{count}", dims, size, frozenset(layers_held))
            layers_held = []
            size = 0
            count = count + 1
    if layers_held:
        yield GradientBucket(f"{gradient_name} {chunk}.{count}", dims, size, frozenset(layers_held))


def shared_gradients(
    stage_ops: StageOps, stage: Stage, tied: int, dtype: str, after: tuple[int, ...]
) -> tuple[int, ...]:
    """Gradients that several model-parallel ranks hold parts of, summed when their own reduction is done.

    Over tp, those of norms and routers under sequence parallelism, all together; between first and last stage, those of
    ``tied`` elements of a shared embedding table.
    """
    size = DTYPE_BYTES[dtype]
    replicated = sum(layer.replicated for layer in stage.layers)
    if replicated:
        after = stage_ops.collective(
            "all_reduce", "replicated gradients", float(replicated * size), dtype, ("tp",), after
        )
    if tied:
        after = stage_ops.collective("all_reduce", "tied embeddings", float(tied * size), dtype, ("embd",), after)
    return after


def clip(stage_ops: StageOps, nbytes: float, after: tuple[int, ...], *, barrier: bool = True) -> tuple[int, ...]:
    """clip_grad_norm_: the norm of this rank's gradients, one number over *all* ranks, and the factor applied.

    The all_reduce is a barrier: no stage updates before the slowest has its gradients; without, a stage goes on by
    its own norm. ``nbytes`` : of the gradients.
    """
    ops = stage_ops.ops
    normed = ops.compute("gradient norm", nbytes / stage_ops.rate, "gradient", after=after, nbytes=nbytes)
    if not barrier:
        ops.kernel = normed
        return (normed,)
    met = stage_ops.collective("all_reduce", "gradient norm", 4.0, "fp32", EVERYBODY, (normed,))
    ops.kernel = ops.compute("clip gradients", 2 * nbytes / stage_ops.rate, "gradient", after=met, nbytes=2 * nbytes)
    return (ops.kernel,)
