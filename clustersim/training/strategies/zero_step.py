"""What all ZeRO stages share: the bucket that gradients fill, and the optimizer step."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from clustersim.core.model import Tensor
from clustersim.core.program import COMPUTE_STREAM, DTYPE_BYTES
from clustersim.training.strategies import base, offloading, sharded
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import WholeModelHooks
from clustersim.training.strategies.zero_config import ZeroConfig, elements

UNSCALE_HOST_BYTES = 8
"""DRAM traffic per parameter of ``unscale_and_clip_grads``, which multiplies an offloaded optimizer's fp32 gradients by
the inverse of loss scale and clipping before Adam reads them, in every step (deepspeed/runtime/zero/stage_1_and_2.py of
02aa38c3, stage3.py of 007cca6a). DeepSpeed's log of a 10-billion-parameter run has 1,113 ms beside 6,479 of Adam and
what follows it (docs/_tutorials/zero-offload.md, zero_offload_dp1_10B_log.png)."""
OVERFLOW_HOST_BYTES = 13
"""The same of stage 3's check of fp16 gradients, which are on the host there: ``isinf`` (an absolute value, a
comparison) and ``isnan`` of ``grad_partitions_flat_buffer``, and ``any`` of both (stage3.py of 007cca6a,
``has_overflow``)."""


@dataclass
class Zero(WholeModelHooks[ZeroConfig]):
    """The hooks of every stage, on the ranks of dp and cp.

    ``filled`` : elements in the bucket. ``reduced``, ``home`` : this step's reductions, and copies to the host.
    ``adds``, ``completes`` : the pass whose gradients are reduced adds to those of an earlier one, is a step's last.

    joined : ``(after) -> after``, what model-parallel ranks do with reduced gradients before their norm.
    lays_whole : a layer's pass is one piece, with what its backward repeats.
    """

    lays_whole: bool = False
    joined: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda after: after

    def __post_init__(self) -> None:
        config = self.config
        self.host = offloading.host_of(self.mesh, self.cost, config)
        self.group = self.mesh.groups("dp", "cp")
        self.ranks = self.group.shape[1]
        self.filled = 0
        self.reduced: list[int] = []
        self.home: list[int] = []
        self.adds = False
        self.completes = True

    def overflows(self, tensor: Tensor) -> bool:
        """Whether a gradient finds no room in the bucket; an empty one takes any."""
        size = elements(self.config.zero_optimization.reduce_bucket_size)
        return bool(self.filled) and self.filled + tensor.numel > size

    def add(self, tensor: Tensor) -> None:
        """A gradient into the bucket, which is sent off first where it is full."""
        if self.overflows(tensor):
            self.reduce()
        self.filled += tensor.numel

    def reduce(self) -> None:
        """reduce_ipg_grads: copy into contiguous memory, average, and send the bucket off."""
        block = self.config.zero_optimization
        numel = self.filled
        if not numel:
            return
        self.filled, k = 0, len(self.reduced)
        nbytes = sharded.nbytes(numel, self.config.param_dtype)
        contiguous = block.stage == 3 or block.contiguous_gradients
        traffic = (2.0 if contiguous else 0.0) * nbytes + (2.0 * nbytes if self.ranks > 1 else 0.0)
        # Two buckets take turns, so that filling waits for the last but one.
        turns = self.reduced[k - 2 : k - 1] if block.overlaps and k >= 2 and block.stage < 3 else ()
        after, self.ops.waits = (*self.ops.waits, *turns), ()
        seconds = base.gradient_pass(traffic, self.cost)
        sent = self.ops.compute(f"fill bucket {k}", seconds, "gradient", after=after, nbytes=traffic)
        if self.ranks > 1:
            sent = self.send(k, numel, nbytes, sent)
        self.reduced.append(sent)
        if not block.overlaps and self.ops.ops[sent].stream != COMPUTE_STREAM:
            self.ops.waits = (sent,)
        if self.config.offloads_optimizer:
            self._send_home(k, numel / self.ranks, sent)

    def _send_home(self, k: int, numel: float, after: int) -> None:
        """A rank's part of a bucket to the host's optimizer.

        The last pass of a step sends it in fp32, cast on the GPU. Those before leave it on the host in the parameters'
        type, whence it comes back to be added to (stage_1_and_2.py of 02aa38c3, ``copy_grads_in_partition``). Stage 3
        keeps it on the host in that type in every pass, and reads it back from there too (stage3.py of 007cca6a,
        ``partition_grads``). Backward waits for copies that are on its stream, without ``overlap_comm``
        (stage_1_and_2.py, ``reduce_ipg_grads``), and for those that the host waits for: to memory that is not
        page-locked (CUDA's "API synchronization behavior"), and the last of stage 3, which is not ``non_blocking``.
        """
        third = self.config.zero_optimization.stage == 3
        pinned = self.config.pins("offload_optimizer")
        dtype = self.config.param_dtype
        kept = sharded.nbytes(numel, dtype)
        waits: tuple[int, ...] = (after,)
        if self.adds or third:
            stream = offloading.GRADIENTS_BACK_STREAM
            waits = (self.host.copy(self.ops, f"h2d gradients of bucket {k}", kept, stream, waits, pinned=pinned),)
        nbytes = (0.0 if self.completes and not third else kept) + (4.0 * numel if self.completes else 0.0)
        home = self.host.copy(self.ops, f"d2h bucket {k}", nbytes, offloading.D2H_STREAM, waits, pinned=pinned)
        self.home.append(home)
        blocks = not pinned or (third and self.completes)
        if blocks or not self.config.zero_optimization.overlaps:
            self.ops.waits = (home,)

    @abstractmethod
    def send(self, k: int, numel: int, nbytes: float, after: int) -> int:
        """The collectives that reduce bucket ``k``; returns the last."""

    def finish(self) -> None:
        """Overflow and norm, Adam on this rank's part, and parameters to everybody."""
        numel = self.model.trained / self.ranks
        after = self._finite_norm(numel, self.joined(tuple(self.home[-1:] or self.reduced[-1:])))
        updated = self._update(numel, after)
        self.reduced = []
        self.home = []
        self.ops.waits = self.publish(updated)

    def gather(self, what: str, nbytes: float, after: int) -> int:
        """All_gather among the ranks that share."""
        return collective(self.ops, "all_gather", what, nbytes, self.group, (after,), dtype=self.config.param_dtype)

    @abstractmethod
    def publish(self, updated: int) -> tuple[int, ...]:
        """Updated parameters to whoever needs them whole; what the next kernel waits for."""

    def _finite_norm(self, numel: float, after: tuple[int, ...]) -> tuple[int, ...]:
        """Whether any rank's gradients overflowed (fp16), and the norm over all of them: one number each, all-reduced.

        The gradients of ``numel`` elements are read for each; the optimizer's factor is applied with its own read.
        """
        ops = self.ops
        dtype = self.config.param_dtype
        everybody = self.mesh.groups("tp", "cp", "dp")
        seconds = base.gradient_pass(sharded.nbytes(numel, dtype), self.cost)
        if dtype == "fp16":
            checked = ops.compute("check overflow", seconds, "gradient", after=after)
            after = sharded.all_reduce_flag(ops, "all_reduce overflow", everybody, (checked,), "max")
        normed = ops.compute("gradient norm", seconds, "gradient", after=after)
        return sharded.all_reduce_flag(ops, "all_reduce gradient norm", everybody, (normed,))

    def _update(self, numel: float, after: tuple[int, ...]) -> int:
        """Adam on this rank's part, on the GPU or on the host; returns the op after which 16-bit parameters are there.

        Gradients are cast to fp32 and unscaled, and masters back to 16 bits. The host casts these before it sends them
        (stage_1_and_2.py of 02aa38c3, ``step``: ``bit16_partition_buffer.data.copy_``).
        """
        config = self.config
        size = DTYPE_BYTES[self.config.param_dtype]
        if config.offloads_optimizer:
            third = config.zero_optimization.stage == 3
            cast = 4.0 + size if size < 4 or not third else 0.0
            checked = OVERFLOW_HOST_BYTES if third and config.param_dtype == "fp16" else 0.0
            traffic = self.cost.optimizer_traffic / self.ranks + numel * (UNSCALE_HOST_BYTES + cast + checked)
            done = self.host.update(self.ops, traffic, after)
            if config.offloads_parameters:
                return done
            # Stage 3 casts to 16 bits into memory that PyTorch takes for it, and that nobody locks.
            pinned = config.pins("offload_optimizer") and not (third and size < 4)
            stream = offloading.H2D_STREAM
            return self.host.copy(self.ops, "h2d parameters", numel * size, stream, (done,), pinned=pinned)
        casts = base.gradient_pass(2.0 * numel * (size + 4.0), self.cost) if size < 4 else 0.0
        seconds = sharded.optimizer(self.cost, 1.0 / self.ranks) + casts
        return self.ops.compute("optimizer", seconds, "optimizer", after=after)
