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
* ``offload_optimizer``: each rank's part of the gradients goes to the host as buckets are reduced, Adam runs there at
  the speed of DRAM, and 16-bit parameters come back. PCIe is a stream of its own at a fixed rate.

Stage 3 is in :mod:`clustersim.strategies.zero3`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from clustersim.mesh import Mesh
from clustersim.model import Model, StepCost, Tensor
from clustersim.program import COMPUTE_STREAM, DTYPE_BYTES, Collective
from clustersim.schedules import Action
from clustersim.strategies import base, sharded, zero_memory
from clustersim.strategies.buckets import cut, ready_order
from clustersim.strategies.walk import WHOLE, Part, Place, Rank, walked
from clustersim.strategies.zero3 import Zero3
from clustersim.strategies.zero_config import ZeroConfig, elements, overflows
from clustersim.strategies.zero_step import finite_norm, update
from clustersim.units import format_bytes


class Zero12(Rank[ZeroConfig]):
    """The hooks of stages 1 and 2.

    ``filled`` : elements in the bucket. ``reduced`` : this step's reductions, in order. ``home`` : copies of reduced
    buckets to the host. ``sent`` : elements of each bucket of this step, for who owns what.
    """

    def __post_init__(self) -> None:
        config = self.config
        self.host = sharded.host(self.mesh, self.cost, config.pcie_bandwidth, config.dram_bandwidth)
        self.group, self.final = self.mesh.world_group(), ready_order(self.model)
        self.ranks, self.filled = self.group.shape[1], 0
        self.reduced: list[int] = []
        self.home: list[int] = []
        self.sent: list[int] = []

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[Part]:
        """Backward with its reductions, cut where a gradient finds the bucket full; stage 1 piles gradients up until
        the last backward of a step."""
        block, i = self.config.zero_optimization, place[1]
        if action.kind == "F":
            yield WHOLE
            return
        hooks = block.stage == 2 or (last and block.overlaps)
        piled = block.stage == 1 and action.microbatch > 0
        if hooks and piled and i == len(self.final) - 1:
            self._accumulate()
        yield from cut(self.final[i] if hooks else (), self._overflows, self._add)
        if i:
            return
        if piled and not hooks:
            self._accumulate()
        if last and not hooks:
            for tensor in chain.from_iterable(reversed(self.final)):
                self._add(tensor)
        if hooks or last:
            self._reduce()

    def _accumulate(self) -> None:
        """Gradients of this micro-batch are added to those already there."""
        traffic = 3.0 * sharded.nbytes(self.model.parameters, self.config.param_dtype)
        self.ops.compute("accumulate gradients", base.gradient_pass(traffic, self.cost), "gradient", nbytes=traffic)

    def _overflows(self, tensor: Tensor) -> bool:
        return overflows(self.filled, tensor.numel, self.config.zero_optimization)

    def _add(self, tensor: Tensor) -> None:
        if self._overflows(tensor):
            self._reduce()
        self.filled += tensor.numel

    def _reduce(self) -> None:
        """reduce_ipg_grads: copy, average, and send the bucket off."""
        block, numel = self.config.zero_optimization, self.filled
        if not numel:
            return
        self.filled, k = 0, len(self.reduced)
        nbytes = sharded.nbytes(numel, self.config.param_dtype)
        traffic = (2.0 if block.contiguous_gradients else 0.0) * nbytes + (2.0 * nbytes if self.ranks > 1 else 0.0)
        after = (*self.ops.waits, *self.reduced[k - 2 : k - 1]) if block.overlaps and k >= 2 else self.ops.waits
        seconds = base.gradient_pass(traffic, self.cost)
        sent = self.ops.compute(f"fill bucket {k}", seconds, "gradient", after=after, nbytes=traffic)
        self.ops.waits = ()
        for op in self._collectives(k, numel, nbytes, sent):
            sent = self.ops.add(op)
        self.reduced.append(sent)
        if not block.overlaps and self.ops.ops[sent].stream != COMPUTE_STREAM:
            self.ops.waits = (sent,)
        if self.config.offloads_optimizer:
            share = nbytes / self.ranks
            self.home.append(self.host.copy(self.ops, f"d2h bucket {k}", share, sharded.D2H_STREAM, (sent,)))

    def _collectives(self, k: int, numel: int, nbytes: float, after: int) -> list[Collective]:
        """One all_reduce, or a reduce to each owner of a part of the bucket."""
        block, dtype, step = self.config.zero_optimization, self.config.param_dtype, self.ops.step
        if self.ranks == 1:
            return []
        if block.use_multi_rank_bucket_allreduce or not block.reduce_scatter:
            name = f"all_reduce bucket {k}"
            return [Collective(name, "all_reduce", nbytes, self.group, after=(after,), dtype=dtype, step=step)]
        # Parts are contiguous, and buckets fill from the end: the last rank's part comes first.
        part = -(-self.model.parameters // self.ranks)
        begin = sum(self.sent)
        end = begin + numel
        self.sent.append(numel)
        found, position = [], begin
        while position < end:
            owner = self.ranks - 1 - min(position // part, self.ranks - 1)
            upto = min(end, (position // part + 1) * part) if owner else end
            size = sharded.nbytes(upto - position, dtype)
            name = f"reduce bucket {k} to {owner}"
            found.append(
                Collective(name, "reduce", size, self.group, after=(after,), dtype=dtype, root=owner, step=step)
            )
            position = upto
        return found

    def finish(self) -> None:
        """Overflow and norm, Adam on this rank's part, and parameters to everybody."""
        cost, config, numel = self.cost, self.config, self.model.parameters / self.ranks
        after = tuple(self.home[-1:] or self.reduced[-1:])
        after = finite_norm(self.ops, cost, config, self.group, numel, after)
        self.reduced, self.home, self.sent = [], [], []
        updated = update(self.ops, cost, config, self.host, numel, self.ranks, after)
        size = float(self.model.parameters)
        calls = max(1, int(size // max(1, elements(config.zero_optimization.allgather_bucket_size))))
        self.ops.waits = (updated,)
        for call in range(calls if self.ranks > 1 else 0):
            nbytes = sharded.nbytes(size / calls, config.param_dtype)
            name = f"all_gather parameters {call}"
            op = Collective(name, "all_gather", nbytes, self.group, after=(updated,), dtype=config.param_dtype,
                            step=self.ops.step)  # fmt: skip
            self.ops.waits = (self.ops.add(op),)

    def notes(self) -> tuple[str, ...]:
        """Buckets in words."""
        block, parameters = self.config.zero_optimization, self.model.parameters
        size = elements(block.reduce_bucket_size)
        how = "beside backward" if block.overlaps else "on the compute stream"
        nbytes = format_bytes(float(min(size, parameters) * DTYPE_BYTES[self.config.param_dtype]))
        count = -(-parameters // size)
        return (
            f"zero{block.stage}: {self.ranks} ranks, about {count} bucket(s) of {nbytes}, reduced {how}",
            *(("zero: PCIe is a stream of its own at a fixed rate per GPU",) if self.config.offloads_optimizer else ()),
        )


def _stage(ops: base.OpList, model: Model, cost: StepCost, mesh: Mesh, config: ZeroConfig) -> Rank[ZeroConfig]:
    return (Zero3 if config.zero_optimization.stage == 3 else Zero12)(ops, model, cost, mesh, config)


build = walked(_stage)
STRATEGY = base.Strategy("zero", ZeroConfig, build, holding=zero_memory.holding)
