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

from dataclasses import dataclass, field

from clustersim.mesh import Ints, Mesh
from clustersim.model import Model, StepCost
from clustersim.program import COMPUTE_STREAM, DTYPE_BYTES, Collective, Program
from clustersim.strategies import base, sharded, zero3, zero_memory
from clustersim.strategies.buckets import ready_order
from clustersim.strategies.zero_config import ZeroConfig, elements, overflows
from clustersim.strategies.zero_step import finite_norm, update
from clustersim.units import format_bytes


def build(model: Model, cost: StepCost, mesh: Mesh, config: ZeroConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` iterations on all ranks of the mesh; see the module's docstring."""
    base.check(model, cost, steps)
    ops, paces = base.OpList(), base.pace(cost.jitter, steps, mesh.world_size, seed)
    host = sharded.host(mesh, cost, config.pcie_bandwidth, config.dram_bandwidth)
    if config.zero_optimization.stage == 3:
        zero3.play(ops, model, cost, mesh, config, steps, host)
        return base.program(ops, mesh, cost, (*zero3.notes(model, mesh, config), *cost.notes), paces)
    rank = _Rank(ops, model, cost, config, mesh.world_group(), host)
    for step in range(steps):
        base.begin_step(ops, cost, step)
        for micro_step in range(config.gradient_accumulation_steps):
            boundary = micro_step == config.gradient_accumulation_steps - 1
            base.forward(ops, model, cost, rank.wait)
            rank.wait = ()
            rank.backward(micro_step, boundary)
        rank.step()
    return base.program(ops, mesh, cost, (*_notes(model, mesh, config), *cost.notes), paces)


@dataclass
class _Rank:
    """One rank's ZeRO optimizer while a Program is written.

    Parameters
    ----------
    wait : what the next kernel waits for. filled : elements in the bucket. reduced : this step's reductions, in order.
    home : copies of reduced buckets to the host. sent : elements of each bucket of this step, for who owns what.
    """

    ops: base.OpList
    model: Model
    cost: StepCost
    config: ZeroConfig
    group: Ints
    host: sharded.Host
    wait: tuple[int, ...] = ()
    filled: int = 0
    reduced: list[int] = field(default_factory=list)
    home: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        """Ranks that share."""
        return int(self.group.shape[1])

    def backward(self, micro_step: int, boundary: bool) -> None:
        """Backward with its reductions; stage 1 accumulates until the boundary."""
        block = self.config.zero_optimization
        hooks = block.stage == 2 or (boundary and block.overlaps)
        if hooks and block.stage == 1 and micro_step:
            self._accumulate()
        self._layers(hooks)
        if block.stage == 1 and micro_step and not hooks:
            self._accumulate()
        if boundary and not hooks:
            for tensors in reversed(ready_order(self.model)):
                for tensor in tensors:
                    self._add(tensor.numel)
        if hooks or boundary:
            self._reduce()

    def _accumulate(self) -> None:
        """Gradients of this micro-batch are added to those already there."""
        traffic = 3.0 * sharded.nbytes(self.model.parameters, self.config.param_dtype)
        self.ops.compute("accumulate gradients", base.gradient_pass(traffic, self.cost), "gradient", nbytes=traffic)

    def _layers(self, hooks: bool) -> None:
        """Backward of every layer, cut where a gradient finds the bucket full."""
        final = ready_order(self.model)
        for i in reversed(range(len(self.model.layers))):
            total = sum(tensor.numel for tensor in final[i]) if hooks else 0
            cut = done = 0
            for tensor in final[i] if hooks else ():
                done += tensor.numel
                if self._overflows(tensor.numel):
                    self._kernel(i, (done - cut) / total)
                    cut = done
                self._add(tensor.numel)
            if cut < total or not total:
                self._kernel(i, (total - cut) / total if total else 1.0)

    def _kernel(self, i: int, share: float) -> None:
        base.backward_layer(self.ops, self.model, self.cost, i, share, after=self.wait)
        self.wait = ()

    def _overflows(self, numel: int) -> bool:
        return overflows(self.filled, numel, self.config.zero_optimization)

    def _add(self, numel: int) -> None:
        if self._overflows(numel):
            self._reduce()
        self.filled += numel

    def _reduce(self) -> None:
        """reduce_ipg_grads: copy, average, and send the bucket off."""
        block, numel = self.config.zero_optimization, self.filled
        if not numel:
            return
        self.filled, k = 0, len(self.reduced)
        nbytes = sharded.nbytes(numel, self.config.param_dtype)
        traffic = (2.0 if block.contiguous_gradients else 0.0) * nbytes + (2.0 * nbytes if self.ranks > 1 else 0.0)
        after = (*self.wait, *self.reduced[k - 2 : k - 1]) if block.overlaps and k >= 2 else self.wait
        seconds = base.gradient_pass(traffic, self.cost)
        sent = self.ops.compute(f"fill bucket {k}", seconds, "gradient", after=after, nbytes=traffic)
        self.wait = ()
        for op in self._collectives(k, numel, nbytes, sent):
            sent = self.ops.add(op)
        self.reduced.append(sent)
        if not block.overlaps and self.ops.ops[sent].stream != COMPUTE_STREAM:
            self.wait = (sent,)
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

    def step(self) -> None:
        """Overflow and norm, Adam on this rank's part, and parameters to everybody."""
        cost, config, numel = self.cost, self.config, self.model.parameters / self.ranks
        after = tuple(self.home[-1:] or self.reduced[-1:])
        after = finite_norm(self.ops, cost, config, self.group, numel, after)
        self.reduced, self.home, self.sent = [], [], []
        updated = update(self.ops, cost, config, self.host, numel, self.ranks, after)
        size = float(self.model.parameters)
        calls = max(1, int(size // max(1, elements(config.zero_optimization.allgather_bucket_size))))
        self.wait = (updated,)
        for call in range(calls if self.ranks > 1 else 0):
            nbytes = sharded.nbytes(size / calls, config.param_dtype)
            name = f"all_gather parameters {call}"
            op = Collective(name, "all_gather", nbytes, self.group, after=(updated,), dtype=config.param_dtype,
                            step=self.ops.step)  # fmt: skip
            self.wait = (self.ops.add(op),)


def _notes(model: Model, mesh: Mesh, config: ZeroConfig) -> tuple[str, ...]:
    block = config.zero_optimization
    size = elements(block.reduce_bucket_size)
    count = -(-model.parameters // size)
    how = "beside backward" if block.overlaps else "on the compute stream"
    nbytes = format_bytes(float(min(size, model.parameters) * DTYPE_BYTES[config.param_dtype]))
    return (
        f"zero{block.stage}: {mesh.world_size} ranks, about {count} bucket(s) of {nbytes}, reduced {how}",
        *(("zero: PCIe is a stream of its own at a fixed rate per GPU",) if config.offloads_optimizer else ()),
    )


STRATEGY = base.Strategy("zero", ZeroConfig, build, holding=zero_memory.holding)
