"""Replicated parameters beside a split model: gradients reduced in buckets, the optimizer whole or shared out.

What is imitated (Megatron-LM
core/distributed/{distributed_data_parallel,param_and_grad_buffer,finalize_model_grads}.py,
core/optimizer/{distrib_optimizer,clip_grads}.py; facts: MODEL_PARALLEL.md 2.6, 2.7):

* Gradients are reduced in the backward of the last micro-batch only: beside it with ``overlap_grad_reduce``, after it
  without. Dense gradients go over dp and cp, those of routed experts over edp, from buffers of their own.
* A bucket holds ``max(40e6, 1e6 dp)`` parameters on pipeline rank 0, chunk 0, where reductions have backward to hide
  behind; everywhere else one bucket holds a chunk. Without overlap there is one bucket a chunk.
* ``use_distributed_optimizer`` (ZeRO-1): reduce_scatter instead of all_reduce, Adam on the shard, all_gather of the
  parameters: at the end of the step, or with ``overlap_param_gather`` beside the next forward, which waits chunk by
  chunk.
* The step ends in this order: reductions; the all_reduce over tp of gradients that tensor-parallel ranks only have
  parts of (norms under sequence parallelism); tied embeddings between first and last stage; the gradient norm, one
  number over *all* ranks: a barrier; Adam; parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from clustersim.builder.laying import Here, Laid
from clustersim.label import Label
from clustersim.partition.base import LocalLayer, Stage
from clustersim.program import DTYPE_BYTES, Collective
from clustersim.schedules.base import Action

DENSE, EXPERT = ("dp", "cp"), ("edp",)


@dataclass(frozen=True)
class ReplicaConfig:
    """Knobs of the replicated parameters.

    Parameters
    ----------
    distributed : share out the optimizer (``use_distributed_optimizer``, ZeRO-1).
    overlap_grad_reduce, overlap_param_gather : as in Megatron. bucket_size : parameters; None is Megatron's default.
    grad_dtype : of gradients and their reduction. param_dtype : of parameters.
    clip : whether the gradients' norm is all-reduced before the update (``clip_grad`` above 0).
    copies : HBM bytes per updated element besides the optimizer's own: gradients and masters copied between dtypes.
    """

    distributed: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    bucket_size: int | None = None
    grad_dtype: str = "fp32"
    param_dtype: str = "bf16"
    clip: bool = True
    copies: float = 6.0


@dataclass
class Bucket:
    """Gradients reduced together: of some layers of one chunk, dense or of experts. ``missing`` : layers still to
    come.
    """

    name: str
    dims: tuple[str, ...]
    numel: int
    layers: frozenset[tuple[int, int]]
    missing: set[tuple[int, int]] = field(default_factory=set)
    reduced: int = -1


@dataclass
class Replicated:
    """The hooks of one stage; see the module's docstring.

    Parameters
    ----------
    stage_index : this pipeline rank. tied : elements of the tied embedding table on this rank, 0 for none.
    gathered : chunk -> what its next forward waits for.
    """

    here: Here
    laid: Laid
    stage: Stage
    stage_index: int
    config: ReplicaConfig
    tied: int = 0
    buckets: list[Bucket] = field(default_factory=list, init=False)
    _of: dict[tuple[int, int], list[Bucket]] = field(default_factory=dict, init=False)
    _gathered: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False)
    _first: dict[int, tuple[int, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for c, chunk in enumerate(self.stage.chunks):
            self.buckets += _buckets(c, chunk.layers, DENSE, self._limit(c), lambda layer: layer.parameters)
            self.buckets += _buckets(c, chunk.layers, EXPERT, None, lambda layer: layer.expert_parameters)
        for bucket in self.buckets:
            for place in bucket.layers:
                self._of.setdefault(place, []).append(bucket)

    def _limit(self, chunk: int) -> float | None:
        if not self.config.overlap_grad_reduce or self.stage_index or chunk:
            return None
        return self.config.bucket_size or max(40e6, 1e6 * self.here.mesh.size(*DENSE))

    # --- hooks -------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Gradients are awaited anew."""
        for bucket in self.buckets:
            bucket.missing, bucket.reduced = set(bucket.layers), -1

    def before(self, chunk: int, layer: int, action: Action) -> tuple[int, ...]:
        """The first kernel of a chunk after an update waits for its parameters."""
        return self._gathered.pop(chunk, ()) if action.kind == "F" else ()

    def after(self, chunk: int, layer: int, action: Action, *, last: bool) -> None:
        """A bucket whose gradients are complete is reduced at once, where reductions are overlapped."""
        if not last:
            return
        for bucket in self._of.get((chunk, layer), ()):
            bucket.missing.discard((chunk, layer))
            if not bucket.missing and self.config.overlap_grad_reduce:
                self._reduce(bucket)

    def finish(self) -> None:
        """The end of the step; see the module's docstring."""
        for bucket in self.buckets:
            if bucket.reduced < 0:
                self._reduce(bucket)
        after = tuple(bucket.reduced for bucket in self.buckets)
        after = self._replicated(after)
        after = self._tied(after)
        after = self._norm(after)
        self._update(after)

    # --- reductions --------------------------------------------------------------------------------------------------

    def _reduce(self, bucket: Bucket) -> None:
        kind = "reduce_scatter" if self.config.distributed else "all_reduce"
        nbytes = float(bucket.numel * DTYPE_BYTES[self.config.grad_dtype])
        here = (self.laid.kernel,)
        bucket.reduced = self._collective(kind, bucket.name, nbytes, bucket.dims, here, self.config.grad_dtype)

    def _replicated(self, after: tuple[int, ...]) -> tuple[int, ...]:
        numel = sum(layer.replicated for layer in self.stage.layers)
        if not numel or self.here.mesh.size("tp") == 1:
            return after
        nbytes = float(numel * DTYPE_BYTES[self.config.grad_dtype])
        name = "replicated gradients"
        return (self._collective("all_reduce", name, nbytes, ("tp",), after, self.config.grad_dtype),)

    def _tied(self, after: tuple[int, ...]) -> tuple[int, ...]:
        if not self.tied:
            return after
        nbytes = float(self.tied * DTYPE_BYTES[self.config.grad_dtype])
        return (self._collective("all_reduce", "tied embeddings", nbytes, ("embd",), after, self.config.grad_dtype),)

    def _norm(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """The squared norm of this rank's part, one number over everybody, and the factor applied."""
        if not self.config.clip:
            return after
        numel = sum(self._updated())
        nbytes = float(numel * DTYPE_BYTES[self.config.grad_dtype])
        rate = self.here.cost.where.device.stream_rate()
        ops = self.laid.ops
        normed = ops.compute("gradient norm", nbytes / rate, "gradient", after=after, nbytes=nbytes)
        everybody = self.here.groups(("tp", "cp", "dp", "pp"))
        if everybody.size > 1:
            label = Label("gradient norm", dim="world")
            normed = ops.add(
                Collective(
                    "all_reduce gradient norm", "all_reduce", 4.0, everybody, "world", (normed,), "fp32",
                    communicator="world", step=ops.step, label=label,
                )
            )  # fmt: skip
        self.laid.kernel = ops.compute(
            "clip gradients", 2 * nbytes / rate, "gradient", after=(normed,), nbytes=2 * nbytes
        )
        return (self.laid.kernel,)

    def _updated(self) -> tuple[float, float]:
        """Dense and expert elements that this rank's optimizer updates."""
        dense, expert = float(self.stage.parameters), float(self.stage.expert_parameters)
        if not self.config.distributed:
            return dense, expert
        size = self.here.mesh.size
        return dense / size(*DENSE), expert / size(*EXPERT) if expert else 0.0

    def _update(self, after: tuple[int, ...]) -> None:
        numel = sum(self._updated())
        tensors = 1 if self.config.distributed else sum(len(layer.tensors) for layer in self.stage.layers)
        rate = self.here.cost.where.device.stream_rate()
        seconds = self.here.cost.update(numel, tensors) + self.config.copies * numel / rate
        self.laid.kernel = self.laid.ops.compute("optimizer", seconds, "optimizer", after=after)
        if not self.config.distributed:
            return
        for bucket in self.buckets:
            nbytes = float(bucket.numel * DTYPE_BYTES[self.config.param_dtype])
            here = (self.laid.kernel,)
            name = f"parameters {bucket.name}"
            done = self._collective("all_gather", name, nbytes, bucket.dims, here, self.config.param_dtype)
            for chunk in {c for c, _ in bucket.layers}:
                self._gathered[chunk] = (*self._gathered.get(chunk, ()), done)
        if not self.config.overlap_param_gather:  # the step ends when all parameters are there
            everything = tuple(op for waits in self._gathered.values() for op in waits)
            self._gathered.clear()
            self.laid.waits = (*self.laid.waits, *everything)

    def _collective(
        self, kind: str, name: str, nbytes: float, dims: tuple[str, ...], after: tuple[int, ...], dtype: str
    ) -> int:
        """A collective over mesh dimensions; where a group has one rank, what it would have waited for."""
        groups = self.here.groups(dims)
        if groups.shape[1] == 1:
            return after[-1]
        dim = "-".join(dims)
        ops, label = self.laid.ops, Label(name, dim=dim)
        op = Collective(
            f"{kind} {name}", kind, nbytes, groups, dim, after, dtype, communicator=dim, step=ops.step, label=label
        )
        return ops.add(op)


def _buckets(
    chunk: int,
    layers: Sequence[LocalLayer],
    dims: tuple[str, ...],
    limit: float | None,
    numel: Callable[[LocalLayer], int],
) -> Iterator[Bucket]:
    """Buckets of a chunk's gradients in the order backward completes them; one for all where there is no limit."""
    held: list[tuple[int, int]] = []
    size = count = 0
    what = "gradients" if dims == DENSE else "expert gradients"
    for i in reversed(range(len(layers))):
        if not numel(layers[i]):
            continue
        held.append((chunk, i))
        size += numel(layers[i])
        if limit is not None and size >= limit:
            yield Bucket(f"{what} {chunk}.{count}", dims, size, frozenset(held))
            held, size, count = [], 0, count + 1
    if held:
        yield Bucket(f"{what} {chunk}.{count}", dims, size, frozenset(held))
