"""PyTorch's DistributedDataParallel: every rank holds the whole model; gradients are averaged bucket by bucket.

What is imitated (torch/nn/parallel/distributed.py, torch/csrc/distributed/c10d/reducer.cpp, 2.13):

* Gradients are packed into buckets in the order backward makes them. A bucket closes when its size *reaches* the limit,
  so it overshoots by up to one tensor. The first bucket is small (1 MiB), so that communication starts early.
* Iteration 1 does not know that order yet: one bucket holds everything and nothing overlaps. Buckets are rebuilt at
  iteration 2. With ``find_unused_parameters`` they are never rebuilt: they follow the registration order, reversed.
* When a bucket's gradients are all there *and* every earlier bucket has been launched, its all_reduce is launched on
  NCCL's own stream, beside the rest of backward.
* Each gradient is copied into its bucket and, after the all_reduce, back; ``gradient_as_bucket_view`` saves both.
* ``no_sync``: all but the last micro-batch of a step only accumulate.

One rank launches no collectives (NCCL returns at once in place), but still pays for the copies. The broadcast of
parameters at construction is not part of a step and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from clustersim.core.holding import Holding, always
from clustersim.core.memo import kept_with_first
from clustersim.core.mesh import Mesh
from clustersim.core.mix import Mix
from clustersim.core.model import Model, Tensor
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES, Compute
from clustersim.core.units import format_bytes
from clustersim.training.schedules import Action
from clustersim.training.strategies import base
from clustersim.training.strategies.buckets import DDPBucket, assign, cut, ready_order
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import LayerPart, Place, WholeModelHooks, sampled, walked

MIB = 2**20
DEFAULT_BUCKET_CAP_MB = 25
DEFAULT_FIRST_BUCKET_BYTES = MIB
HOOK_STREAM = "comm_hook"
"""Where a comm hook's decompression runs: the stream on which c10d runs a future's callbacks."""


class DDPConfig(base.StrategyConfig, frozen=True, tag_field="kind", tag="ddp"):
    """Knobs of DistributedDataParallel, by its own names.

    Parameters
    ----------
    framework : whose data parallelism it is; absent: ``pytorch`` of a whole model, and beside a split one, or a setting
        of ``[parallel]`` that changes a step though no degree is above 1, ``megatron``. PyTorch's has buckets of 25 MiB
        beside backward and gradients in ``param_dtype``, and updates 16-bit parameters in place. Megatron-Core's has
        the fields of ``[parallel]``: one bucket behind backward without ``overlap_grad_reduce``; of bf16 parameters
        gradients in fp32 and fp32 main parameters; weight gradients added up by their products; a norm of all gradients
        ahead of the update; a vocabulary padded to 128. The other knobs here are PyTorch's.
    bucket_cap_mb : [MiB]; None is 25 with a small first bucket. Given, it is the limit of the first bucket too.
    first_bucket_bytes : [bytes], limit of the first bucket, whatever the rest says.
    gradient_as_bucket_view : gradients live inside the buckets; no copies.
    static_graph, find_unused_parameters : as in DDP. Finding unused parameters costs one small all_reduce a step; the
        walk over the graph is host work beside running kernels and is not modelled.
    broadcast_buffers : rank 0's BatchNorm statistics go to all at the start of a forward that follows a synced one.
    comm_hook : ``"fp16_compress"`` or ``"bf16_compress"``: gradients are cast, reduced at half the bytes, cast back.
    algorithm, protocol : pins for the gradients' all_reduce, as NCCL_ALGO and NCCL_PROTO.
    """

    framework: Literal["pytorch", "megatron"] | None = None
    bucket_cap_mb: Annotated[float, msgspec.Meta(gt=0)] | None = None
    first_bucket_bytes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    find_unused_parameters: bool = False
    broadcast_buffers: bool = True
    comm_hook: Literal["fp16_compress", "bf16_compress"] | None = None
    algorithm: str | None = None
    protocol: str | None = None

    @property
    def rebuilds(self) -> bool:
        """Whether iteration 1 uses one big bucket and iteration 2 rebuilds."""
        return self.static_graph or not self.find_unused_parameters

    @property
    def limits(self) -> tuple[int, int]:
        """Bytes at which the first bucket closes, and all others."""
        cap = int((DEFAULT_BUCKET_CAP_MB if self.bucket_cap_mb is None else self.bucket_cap_mb) * MIB)
        first = DEFAULT_FIRST_BUCKET_BYTES if self.bucket_cap_mb is None else cap
        return (self.first_bucket_bytes or first), cap

    @property
    def wire_dtype(self) -> str:
        """Element type that is all-reduced."""
        return self.comm_hook.removesuffix("_compress") if self.comm_hook else self.param_dtype


def buckets(model: Model, config: DDPConfig, iteration: int) -> tuple[DDPBucket, ...]:
    """Buckets of a training iteration (counted from 1) in the order they are launched."""
    return _buckets(model, DTYPE_BYTES[config.param_dtype], config.limits, config.rebuilds, iteration > 1)


@kept_with_first(maxsize=64)
def _buckets(
    model: Model, element: int, limits: tuple[int, int], rebuilds: bool, rebuilt: bool
) -> tuple[DDPBucket, ...]:
    if rebuilds and rebuilt:
        final = ready_order(model)
        return tuple(assign((t for i in reversed(range(len(final))) for t in final[i]), element, *limits))
    registered = [t for layer in model.layers for t in layer.tensors if not t.tied_to and not t.frozen]
    # The small first bucket is filled from the front of the model, then the list is turned round: it is launched last.
    limits = (2**63, 2**63) if rebuilds else limits
    return tuple(reversed(assign(registered, element, *limits)))


class DDP(WholeModelHooks[DDPConfig]):
    """The hooks of one rank, with the state c10d's Reducer keeps: what each bucket still lacks, what is launched."""

    def __post_init__(self) -> None:
        self.group = self.mesh.world_group()  # one array for all ops: the engine recognises it
        self.final = ready_order(self.model)
        self.layouts = [buckets(self.model, self.config, iteration) for iteration in (1, 2)]

    def begin_step(self) -> None:
        """Buckets are awaited anew; the first forward waits for rank 0's buffers."""
        self.layout = self.layouts[min(self.ops.step, 1)]
        self.bucket_of = {name: b for b, bucket in enumerate(self.layout) for name in bucket.names}
        self.missing = [len(bucket.names) for bucket in self.layout]
        self.filled = [False] * len(self.layout)
        self.launched: list[int] = []
        self.ops.waits = self._broadcast_buffers()

    def _broadcast_buffers(self) -> tuple[int, ...]:
        """Rank 0's buffers to everybody, before a step's first forward. The later forwards of a no_sync step skip it:
        only a synced forward sets require_forward_param_sync again."""
        elements = sum(layer.buffers for layer in self.model.layers)
        if not (self.config.broadcast_buffers and elements and self.group.size > 1):
            return ()
        dtype = self.config.param_dtype
        nbytes = float(elements * DTYPE_BYTES[dtype])
        return (collective(self.ops, "broadcast", "buffers", nbytes, self.group, self.ops.here, dtype=dtype),)

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """All but a step's last backward are under no_sync."""
        if action.kind == "B" and last:
            return cut(self.final[place[1]], self._completes_bucket, self._mark_ready)
        return super().around(place, action, last=last)

    def _completes_bucket(self, tensor: Tensor) -> bool:
        """Count a gradient as ready; whether its bucket lacks nothing now."""
        self.missing[self.bucket_of[tensor.name]] -= 1
        return not self.missing[self.bucket_of[tensor.name]]

    def _mark_ready(self, tensor: Tensor) -> None:
        """Fill the gradient's bucket if it is complete, and launch every bucket whose turn has come: in order."""
        bucket = self.bucket_of[tensor.name]
        if self.missing[bucket]:
            return
        self._fill(bucket)
        self.filled[bucket] = True
        while len(self.launched) < len(self.layout) and self.filled[len(self.launched)]:
            b = len(self.launched)  # on NCCL's stream, behind what the compute stream has been given so far
            reduced = self._all_reduce(f"bucket {b}", self._wire(b), self.config.wire_dtype, (self._last_kernel(),))
            self.launched.append(reduced)

    def _fill(self, b: int) -> None:
        """What the compute stream spends on a bucket: accumulation, the copies of its tensors, the hook's cast.

        The copies happen one by one as gradients appear. One op at the end of the bucket delays its launch and the rest
        of backward by exactly as much.
        """
        bucket = self.layout[b]
        config = self.config
        traffic = 0.0
        seconds = 0.0
        if config.gradient_accumulation_steps > 1:
            traffic += 3.0 * bucket.nbytes
        if not config.gradient_as_bucket_view:
            traffic += 2.0 * bucket.nbytes
            seconds += self.cost.per_tensor * len(bucket.names)
        if config.comm_hook:  # buffer.to(dtype).div_(world_size)
            cast = bucket.nbytes + self._wire(b) if config.wire_dtype != config.param_dtype else 0.0
            traffic += cast + 2.0 * self._wire(b)
        seconds += base.gradient_pass(traffic, self.cost)
        if seconds:
            self.ops.compute(f"copy bucket {b}", seconds, "gradient", nbytes=traffic)

    def _wire(self, b: int) -> float:
        return float(self.layout[b].numel * DTYPE_BYTES[self.config.wire_dtype])

    def _last_kernel(self) -> int:
        """The last op on the compute stream."""
        index = len(self.ops.ops) - 1
        while self.ops.ops[index].stream != COMPUTE_STREAM:
            index -= 1
        return index

    def _all_reduce(self, name: str, nbytes: float, dtype: str, after: tuple[int, ...]) -> int:
        if self.group.size == 1:
            return after[0]
        return collective(
            self.ops,
            "all_reduce",
            name,
            nbytes,
            self.group,
            after,
            dtype=dtype,
            algorithm=self.config.algorithm,
            protocol=self.config.protocol,
        )

    def finish(self) -> None:
        """The end of backward (finalize_backward): wait for each bucket in turn and copy it back; then update."""
        config = self.config
        waits = []
        end = self._last_kernel()
        if config.find_unused_parameters and not config.static_graph:
            n_tensors = sum(len(bucket.names) for bucket in self.layout)
            waits.append(self._all_reduce("unused-parameter bitmap", 4.0 * n_tensors, "int32", (end,)))
        for b, bucket in enumerate(self.layout):
            reduced = self.launched[b]
            if config.comm_hook and config.wire_dtype != config.param_dtype:
                uncast = base.gradient_pass(self._wire(b) + bucket.nbytes, self.cost)
                op = Compute(
                    f"uncast bucket {b}",
                    uncast,
                    HOOK_STREAM,
                    (reduced,),
                    "gradient",
                    "memory",
                    step=self.ops.step,
                    mix=Mix(memory=uncast),
                )
                reduced = self.ops.add(op)
            if not config.gradient_as_bucket_view:
                back = base.gradient_pass(2.0 * bucket.nbytes, self.cost) + self.cost.per_tensor * len(bucket.names)
                self.ops.compute(
                    f"copy back bucket {b}", back, "gradient", after=(reduced,), nbytes=2.0 * bucket.nbytes
                )
            elif b == len(self.layout) - 1:  # streams run in order: the last one is the last to end
                waits.append(reduced)
        self.ops.compute("optimizer", self.cost.optimizer, "optimizer", after=tuple(waits))

    def notes(self) -> tuple[str, ...]:
        """The bucket layout in words."""
        first, rebuilt = (_sizes(layout) for layout in self.layouts)
        how = f"ddp: {self.group.size} ranks, gradients all-reduced in {self.config.wire_dtype}"
        if not self.config.rebuilds:
            return (how, f"ddp: {rebuilt}, in reverse registration order, never rebuilt (find_unused_parameters)")
        return (how, f"ddp: iteration 1 has {first} and overlaps nothing", f"ddp: from iteration 2: {rebuilt}")


def _sizes(layout: Sequence[DDPBucket]) -> str:
    sizes = [format_bytes(bucket.nbytes) for bucket in layout]
    shown = ", ".join(sizes) if len(sizes) <= 12 else f"{', '.join(sizes[:6])}, ... {', '.join(sizes[-3:])}"
    return f"{len(sizes)} bucket{'s' * (len(sizes) != 1)} ({shown})"


def holding(model: Model, mesh: Mesh, config: DDPConfig) -> Holding:
    """Everything, and buckets as large as the gradients, which zero_grad does not free; views of them are both."""
    base_holding = base.whole(model, config)
    buckets = always(float(DTYPE_BYTES[config.param_dtype] * model.trained), len(model.layers))
    if config.gradient_as_bucket_view:
        return msgspec.structs.replace(base_holding, gradients=buckets, fresh="")
    return msgspec.structs.replace(base_holding, buffers=buckets)


build = walked(DDP)
STRATEGY = base.Strategy("ddp", DDPConfig, build, holding=holding, partly=True, sample=sampled(DDP))
