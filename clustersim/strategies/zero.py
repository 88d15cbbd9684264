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
from clustersim.model import Model, StepCost
from clustersim.program import DTYPE_BYTES
from clustersim.schedules import Action
from clustersim.strategies import base, sharded, zero_memory
from clustersim.strategies.buckets import cut, ready_order
from clustersim.strategies.primitives import collective
from clustersim.strategies.walk import WHOLE, Part, Place, walked
from clustersim.strategies.zero3 import Zero3
from clustersim.strategies.zero_config import ZeroConfig, elements
from clustersim.strategies.zero_step import Zero
from clustersim.units import format_bytes


class Zero12(Zero):
    """The hooks of stages 1 and 2. ``sent`` : elements of each bucket of this step, for who owns what."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.final = ready_order(self.model)
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

    def _accumulate(self) -> None:
        """Gradients of this micro-batch are added to those already there."""
        traffic = 3.0 * sharded.nbytes(self.model.parameters, self.config.param_dtype)
        self.ops.compute("accumulate gradients", base.gradient_pass(traffic, self.cost), "gradient", nbytes=traffic)

    def send(self, k: int, numel: int, nbytes: float, after: int) -> int:
        """One all_reduce, or a reduce to each owner of a part of the bucket."""
        block, dtype = self.config.zero_optimization, self.config.param_dtype
        if block.use_multi_rank_bucket_allreduce or not block.reduce_scatter:
            return collective(self.ops, "all_reduce", f"bucket {k}", nbytes, self.group, (after,), dtype=dtype)
        # Parts are contiguous, and buckets fill from the end: the last rank's part comes first.
        part, done = -(-self.model.parameters // self.ranks), after
        position = sum(self.sent)
        end = position + numel
        self.sent.append(numel)
        while position < end:
            owner = self.ranks - 1 - min(position // part, self.ranks - 1)
            upto = min(end, (position // part + 1) * part) if owner else end
            size, what = sharded.nbytes(upto - position, dtype), f"bucket {k} to {owner}"
            done = collective(self.ops, "reduce", what, size, self.group, (after,), root=owner, dtype=dtype)
            position = upto
        return done

    def publish(self, updated: int) -> tuple[int, ...]:
        """All parameters, in calls of a bucket each."""
        self.sent, size = [], float(self.model.parameters)
        calls = max(1, int(size // max(1, elements(self.config.zero_optimization.allgather_bucket_size))))
        nbytes, done = sharded.nbytes(size / calls, self.config.param_dtype), updated
        for call in range(calls if self.ranks > 1 else 0):
            done = self.gather(f"parameters {call}", nbytes, updated)
        return (done,)

    def notes(self) -> tuple[str, ...]:
        """Buckets in words."""
        block, parameters = self.config.zero_optimization, self.model.parameters
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


build = walked(hooks)
STRATEGY = base.Strategy("zero", ZeroConfig, build, holding=zero_memory.holding)
