"""Fully sharded data parallelism: every rank holds 1/N of each unit and borrows the rest while it computes.

What is imitated (torch/distributed/fsdp/_runtime_utils.py, _limiter_utils.py, _fully_shard/*, 2.x):

* A *unit* (a block; the root holds embedding, final norm and head) is all-gathered before its forward, freed after it,
  all-gathered again before its backward, and its gradient is reduce-scattered after it. The root stays gathered.
* All of that runs on one communicator, so in the order in which the host *issues* it: a reduce_scatter that waits for
  its gradient delays an all_gather behind it. That is what backward prefetch is about:
  BACKWARD_PRE issues the next unit's all_gather before the current unit's gradients are computed, so that it goes out
  beside them; BACKWARD_POST after them, just ahead of their reduce_scatter; None when the next unit needs it, behind
  that reduce_scatter.
* The host runs ahead of the device. What holds it back is the limiter of version 1: freeing a unit puts an event into a
  queue, and an all_gather that finds two of them waits for the older (``limit_all_gathers``). In version 2 an
  all_gather waits for the copy-out of the one before the last, since two output buffers exist. Where a forward is
  limited by launches, the host is not ahead, and the next all_gather is issued when the layer is through.
* Version 1 gathers into the flat parameter itself; version 2 copies each parameter out of the gathered buffer, and
  starts a reduce_scatter only when the one before has given back its input.
* Hybrid sharding all-reduces each reduced shard over the replicas, on a communicator and a stream of its own.
* Under ``no_sync`` gradients pile up unsharded, and nothing is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from clustersim.mesh import Ints, Mesh
from clustersim.model import Model, StepCost
from clustersim.program import Collective, Program
from clustersim.strategies import base, fsdp_memory, sharded
from clustersim.strategies.fsdp_config import FSDPConfig, Plan, element_bytes, plan
from clustersim.units import format_bytes

MAX_INFLIGHT_ALL_GATHERS = 2
REPLICATE = "replicate"
"""Communicator and stream of hybrid sharding's all_reduce."""


def build(model: Model, cost: StepCost, mesh: Mesh, config: FSDPConfig, steps: int, seed: int) -> Program:
    """The Program of ``steps`` iterations on all ranks of the mesh; see the module's docstring."""
    base.check(model, cost, steps)
    ops, paces = base.OpList(), base.pace(cost.jitter, steps, mesh.world_size, seed)
    host = sharded.host(mesh, cost, config.pcie_bandwidth, config.dram_bandwidth) if config.cpu_offload else None
    rank = FSDPRank(ops, cost, config, plan(model, mesh, config), host)
    for step in range(steps):
        base.begin_step(ops, cost, step)
        rank.begin()
        for micro_step in range(config.gradient_accumulation_steps):
            last = micro_step == config.gradient_accumulation_steps - 1
            _forward(rank, model)
            _backward(rank, model, first=not micro_step, sync=last or not config.no_sync)
        _optimize(rank, mesh)
    return base.program(ops, mesh, cost, (*_notes(mesh, config, rank.plan), *cost.notes), paces)


def _forward(rank: FSDPRank, model: Model) -> None:
    """Unit after unit: gather, compute, free."""
    rank.begin_forward()
    for s, (_, layers) in enumerate(rank.plan.segments):
        after = rank.enter_forward(s)
        for i in layers:
            rank.kernel, after = base.forward_layer(rank.ops, model, rank.cost, i, after), ()
        rank.leave_forward(s)


def _backward(rank: FSDPRank, model: Model, *, first: bool, sync: bool) -> None:
    """The same in reverse; gradients of a unit are reduced as soon as its first layer has been through."""
    for s, (_, layers) in reversed(list(enumerate(rank.plan.segments))):
        after = rank.enter_backward(s)
        for i in reversed(layers):
            rank.kernel, after = base.backward_layer(rank.ops, model, rank.cost, i, after=after), ()
        rank.leave_backward(s, first=first, sync=sync)


@dataclass
class FSDPRank:
    """What FSDP keeps on one rank while a Program is written: what is gathered, and who waits for what.

    Its hooks are called around each segment of :attr:`Plan.segments`; whoever writes the kernels sets ``kernel``, the
    last of them.

    Parameters
    ----------
    gathered : unit -> ops its first kernel waits for, while it is unsharded.
    freed : the limiter's queue of free events. buffer_free : version 2: what the next all_gather waits for.
    copied_out : version 2: the last copy-out. reducing : version 2: the reduce_scatter whose input is still held.
    issue : what the host had to wait for before this step's first all_gather. reduced : this step's gradients.
    """

    ops: base.OpList
    cost: StepCost
    config: FSDPConfig
    plan: Plan
    host: sharded.Host | None
    gathered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    buffer_free: tuple[int, ...] = ()
    copied_out: tuple[int, ...] = ()
    reducing: tuple[int, ...] = ()
    issue: tuple[int, ...] = ()
    reduced: list[int] = field(default_factory=list)
    kernel: int = -1

    def begin(self) -> None:
        """A step begins: all_gathers read parameters, so they wait for the optimizer (_wait_for_computation_stream)."""
        last = len(self.ops.ops) - 1
        self.issue, self.kernel, self.reduced = tuple(i for i in {*self.reduced, last} if i >= 0), -1, []

    def begin_forward(self) -> None:
        """A forward begins. Events of the last backward are long past, so they do not count."""
        self.freed.clear()

    def enter_forward(self, s: int) -> tuple[int, ...]:
        """Before a segment's forward: gather its unit; what its first kernel waits for."""
        order = self.plan.segments
        after = self._unshard(order[s][0], self.plan.shard, forward=True)
        if self.config.forward_prefetch and s + 1 < len(order):
            self._gather(order[s + 1][0], self.plan.shard)
        return after

    def leave_forward(self, s: int) -> None:
        """After a segment's forward: free its unit behind its last segment, unless it is kept for backward."""
        unit = self.plan.segments[s][0]
        keeps = self.config.keeps_root if unit == 0 else self.config.keeps
        if self.plan.last_of(unit) == s and not keeps:
            self._free(unit)

    def enter_backward(self, s: int) -> tuple[int, ...]:
        """Before a segment's backward: gather its unit again, and the next one ahead of time."""
        following = self.plan.segments[s - 1][0] if s else None
        after = self._unshard(self.plan.segments[s][0], self.plan.backward, forward=False)
        if following is not None and self.config.prefetch == "BACKWARD_PRE":
            self._gather(following, self.plan.backward)
        return after

    def leave_backward(self, s: int, *, first: bool, sync: bool) -> None:
        """After a segment's backward: behind its unit's first segment free it, and reduce its gradients if ``sync``.

        ``first`` : nothing has piled up from earlier micro-batches.
        """
        unit = self.plan.segments[s][0]
        following = self.plan.segments[s - 1][0] if s else None
        if self.plan.first_of(unit) != s:
            return
        if sync or not self.config.keeps:
            self._free(unit)
        if following is not None and self.config.prefetch == "BACKWARD_POST":
            self._gather(following, self.plan.backward, after=(self.kernel,))
        self._gradient(unit, first, sync)

    # --- parameters --------------------------------------------------------------------------------------------------

    def _unshard(self, unit: int, groups: Ints, *, forward: bool) -> tuple[int, ...]:
        """The pre-forward and pre-backward hook: what the unit's first kernel waits for."""
        self._gather(unit, groups)
        waits = self.gathered[unit]
        if not waits or self.config.version == 1:
            self.gathered[unit] = ()
            return waits
        traffic = 2.0 * self._param_bytes(unit)
        seconds = base.gradient_pass(traffic, self.cost)
        name = f"copy_out {self.plan.units[unit].name}"
        copied = (self.ops.compute(name, seconds, "gradient", after=waits, nbytes=traffic),)
        self.buffer_free = self.copied_out if forward else copied
        self.copied_out, self.gathered[unit] = copied, ()
        return ()  # the copy is the kernel before

    def _gather(self, unit: int, groups: Ints, after: tuple[int, ...] = ()) -> None:
        """Issue a unit's all_gather, unless it is unsharded already."""
        if unit in self.gathered:
            return
        if groups.shape[1] == 1 and self.host is None:
            self.gathered[unit] = ()
            return
        after, self.issue = self._issued_after(after), ()
        name, nbytes = self.plan.units[unit].name, self._param_bytes(unit)
        if self.host is not None:
            after = (self.host.copy(self.ops, f"h2d {name}", nbytes / self.plan.degree, sharded.H2D_STREAM, after),)
        if groups.shape[1] > 1:
            dtype, kind = self.config.param_dtype, "all_gather"
            communicator = "world" if groups is self.plan.shard else "reshard"
            op = Collective(
                f"{kind} {name}", kind, nbytes, groups, after=after, dtype=dtype, communicator=communicator,
                step=self.ops.step,
            )  # fmt: skip
            after = (self.ops.add(op),)
        self.gathered[unit] = after

    def _issued_after(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """What holds an all_gather back besides its stream: the step's begin, buffers, a host that is not ahead."""
        waits = {*after, *self.issue, *self.buffer_free}
        if self.config.version == 1 and self.config.limit_all_gathers and len(self.freed) >= MAX_INFLIGHT_ALL_GATHERS:
            waits.add(self.freed.pop(0))
        if self.kernel >= 0 and getattr(self.ops.ops[self.kernel], "bound", "") == "launch":
            waits.add(self.kernel)
        return tuple(sorted(waits))

    def _free(self, unit: int) -> None:
        """Give back a unit's unsharded parameters after the last kernel that reads them."""
        del self.gathered[unit]
        if self.plan.degree > 1 or self.host is not None:
            self.freed.append(self.kernel)

    def _param_bytes(self, unit: int) -> float:
        return float(self.plan.units[unit].padded(self.plan.degree) * element_bytes(self.config)[0])

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _gradient(self, unit: int, first: bool, sync: bool) -> None:
        """The post-backward hook: accumulate, or copy, cast, divide and reduce."""
        name, numel = self.plan.units[unit].name, self.plan.units[unit].padded(self.plan.degree)
        held, wire, _ = element_bytes(self.config)
        piled = self.config.no_sync and not first
        if not sync:
            traffic = 3.0 * numel * held if piled else 0.0
            if traffic:
                self.ops.compute(f"accumulate {name}", base.gradient_pass(traffic, self.cost), "gradient")
            return
        traffic = self._copy_traffic(numel, held, wire) + (3.0 * numel * held if piled else 0.0)
        seconds = base.gradient_pass(traffic, self.cost)
        after = self.reducing if self.config.version == 2 else ()
        ready = self.ops.compute(f"copy_in {name}", seconds, "gradient", after=after, nbytes=traffic)
        self._reduce(unit, float(numel * wire), ready)

    def _copy_traffic(self, numel: int, held: int, wire: int) -> float:
        """HBM bytes between a unit's gradients and its reduce_scatter.

        Version 1: autograd writes them into the flat gradient (read, write), which is cast if dtypes differ, and
        divided in place before the reduction. Version 2: one chunk_cat gathers and casts; NCCL averages.
        """
        if self.plan.degree == 1 and self.plan.replicate.shape[1] == 1:
            return 0.0
        if self.config.version == 2:
            return float(numel * (held + wire))
        return float(numel * (2 * held + (held + wire if wire != held else 0) + 2 * wire))

    def _reduce(self, unit: int, nbytes: float, ready: int) -> None:
        """reduce_scatter over the shards, then all_reduce of what is left over the replicas, then to the host."""
        name, dtype, plan, done = self.plan.units[unit].name, self.config.wire_dtype, self.plan, ready
        if plan.degree > 1:
            op = Collective(
                f"reduce_scatter {name}", "reduce_scatter", nbytes, plan.shard, after=(done,), dtype=dtype, redop="avg",
                step=self.ops.step,
            )  # fmt: skip
            done = self.ops.add(op)
            self.reducing = (done,)
        if plan.replicate.shape[1] > 1:
            op = Collective(
                f"all_reduce {name}", "all_reduce", nbytes / plan.degree, plan.replicate, stream=REPLICATE,
                after=(done,), dtype=dtype, redop="avg", communicator=REPLICATE, step=self.ops.step,
            )  # fmt: skip
            done = self.ops.add(op)
        if self.host is not None:
            numel = plan.units[unit].padded(plan.degree) / plan.degree
            kept = numel * element_bytes(self.config)[2]
            done = self.host.copy(self.ops, f"d2h {name}", kept, sharded.D2H_STREAM, (done,))
        self.reduced.append(done)


def _optimize(rank: FSDPRank, mesh: Mesh) -> None:
    """Clip and update this rank's shard, when all of its gradients are reduced."""
    ops, config, degree = rank.ops, rank.config, rank.plan.degree
    numel = sum(unit.padded(degree) for unit in rank.plan.units) / degree
    after = tuple(rank.reduced)
    if config.clip_grad_norm:
        after = sharded.clip(ops, rank.cost, rank.plan.shard, numel * element_bytes(config)[2], after)
    if rank.host is not None:
        rank.reduced = [rank.host.adam(ops, numel, after)]
        return
    ops.compute("optimizer", sharded.optimizer(rank.cost, 1.0 / degree), "optimizer", after=after)
    rank.reduced = []


def _notes(mesh: Mesh, config: FSDPConfig, plan: Plan) -> tuple[str, ...]:
    """Units, groups and element types in words."""
    largest = max(plan.units, key=lambda unit: unit.numel)
    size = format_bytes(float(largest.numel * element_bytes(config)[0]))
    name = config.sharding_strategy or f"reshard_after_forward={config.reshard_after_forward}"
    shape = f"{plan.degree} shards x {plan.replicate.shape[1]} replicas"
    return (
        f"fsdp{config.version}: {mesh.world_size} ranks = {shape}, {name}, prefetch {config.prefetch}",
        f"fsdp{config.version}: {len(plan.units)} units, the largest {largest.name} ({size} gathered); "
        f"gathered in {config.param_dtype}, reduced in {config.wire_dtype}, kept in {config.orig_dtype}",
    )


STRATEGY = base.Strategy("fsdp", FSDPConfig, build, holding=fsdp_memory.holding)
