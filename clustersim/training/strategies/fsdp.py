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
  limited by launches, the host is not ahead, and the next all_gather is issued when the layer is through. Nor is it
  on a card that is full (``alloc_retries``): memory for an all_gather is freed first, for which the host waits until
  the device has done all it was given.
* Units that are wrapped inside of what is checkpointed (``checkpoint_outside``) are gathered a third time: what is
  recomputed runs their forward hooks, which gather and free them, before backward's.
* Version 1 gathers into the flat parameter itself; version 2 copies each parameter out of the gathered buffer, and
  starts a reduce_scatter only when the one before has given back its input.
* Hybrid sharding all-reduces each reduced shard over the replicas, on a communicator and a stream of its own.
* Under ``no_sync`` gradients pile up unsharded, and nothing is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property

from clustersim.core.mesh import Ints, Mesh
from clustersim.core.model import Model, StepCost
from clustersim.core.units import format_bytes
from clustersim.training.schedules import Action
from clustersim.training.strategies import base, fsdp_memory, offloading, sharded
from clustersim.training.strategies.fsdp_config import (
    FSDPConfig,
    FSDPPlan,
    element_bytes,
    gathered_words,
    kept_bytes,
    plan,
    unit_bytes,
)
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import WHOLE, LayerPart, Place, sampled, walked

MAX_INFLIGHT_ALL_GATHERS = 2
REPLICATE = "replicate"
"""Communicator and stream of hybrid sharding's all_reduce."""


@dataclass
class Shards:
    """What FSDP keeps on one rank while its op list is written: what is gathered, and who waits for what.

    Parameters
    ----------
    places : of the layers, in the order in which :attr:`FSDPPlan.segments` counts them.
    gathered : unit -> ops its first kernel waits for, while it is unsharded. begun : segments with gradients.
    freed : the limiter's queue of free events. buffer_free : version 2: what the next all_gather waits for.
    copied_out : version 2: the last copy-out. reducing : version 2: the reduce_scatter whose input is still held.
    issue : what the host had to wait for before this step's first all_gather. reduced : this step's gradients.
    communicator : of the ranks that share.
    """

    ops: base.OpList
    cost: StepCost
    config: FSDPConfig
    plan: FSDPPlan
    places: InitVar[Sequence[Place]]
    host: offloading.Host | None = None
    gathered: dict[int, tuple[int, ...]] = field(default_factory=dict)
    freed: list[int] = field(default_factory=list)
    begun: set[int] = field(default_factory=set)
    buffer_free: tuple[int, ...] = ()
    copied_out: tuple[int, ...] = ()
    reducing: tuple[int, ...] = ()
    issue: tuple[int, ...] = ()
    reduced: list[int] = field(default_factory=list)
    kernel: int = -1
    communicator: str = "world"

    def __post_init__(self, places: Sequence[Place]) -> None:
        self._first = {places[layers[0]]: s for s, (_, layers) in enumerate(self.plan.segments)}
        self._last = {places[layers[-1]]: s for s, (_, layers) in enumerate(self.plan.segments)}

    def begin_step(self) -> None:
        """All_gathers read parameters, so they wait for the optimizer (_wait_for_computation_stream)."""
        last = len(self.ops.ops) - 1
        self.issue, self.kernel, self.reduced = tuple(i for i in {*self.reduced, last} if i >= 0), -1, []
        self.begun.clear()

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """The hooks around a unit's passes; with a split backward, gradients are there after W."""
        forward = action.kind == "F"
        first = self._first.get(place)
        end = self._last.get(place)
        if forward and place == (0, 0):
            self.freed.clear()  # events of the last backward are long past, so they do not count
        enters, leaves = (first, end) if forward else (end, first)
        if not forward and enters in self.plan.ahead:
            # No hook of a backward that does not come; what was gathered ahead is given back at its end.
            self.gathered.pop(self.plan.segments[enters][0], None)
        if not forward and {enters, leaves} & self.plan.ahead:
            yield WHOLE
            return
        again = self._again(place) if not forward and action.kind != "W" and enters is not None else 0.0
        if again and enters is not None:
            yield from self._recompute(self.plan.segments[enters][0], again)
        if enters is not None and action.kind != "W":
            self.ops.waits = (*self.ops.waits, *self._enter(enters, forward=forward))
        yield LayerPart(1.0 - again)
        self.kernel = self.ops.kernel
        if leaves is not None and forward:
            self._leave_forward(leaves)
        elif leaves is not None and action.kind != "I":
            self._leave_backward(leaves, sync=last or not self.config.no_sync)

    def _again(self, place: Place) -> float:
        """Share of a layer's backward that is its forward again, if that gathers its unit for itself."""
        if not self.config.checkpoint_outside or self.plan.segments[self._first[place]][0] in self.plan.roots:
            return 0.0
        return self.cost.share_again(place[1])

    def _recompute(self, unit: int, share: float) -> Iterator[LayerPart]:
        """A checkpointed block runs forward again, inside of which its unit is gathered and freed."""
        self.ops.waits = (*self.ops.waits, *self._unshard(unit, self.plan.backward, forward=True))
        yield LayerPart(share, f"{self.plan.units[unit].name} again")
        self.kernel = self.ops.kernel
        self._free(unit)

    def _enter(self, s: int, *, forward: bool) -> tuple[int, ...]:
        """Before a segment's pass: gather its unit, and the next one ahead of time; what its first kernel waits for."""
        order = self.plan.segments
        groups = self.plan.shard if forward else self.plan.backward
        ahead = self.config.forward_prefetch if forward else self.config.prefetch == "BACKWARD_PRE"
        after = self._unshard(order[s][0], groups, forward=forward)
        following = s + 1 if forward else s - 1
        if ahead and 0 <= following < len(order):
            self._gather(order[following][0], groups)
        return after

    def _leave_forward(self, s: int) -> None:
        """After a segment's forward: free its unit behind its last segment, unless it is kept for backward."""
        unit = self.plan.segments[s][0]
        keeps = self.config.keeps_root if unit in self.plan.roots else self.config.keeps
        if self.plan.last_of[unit] == s and not keeps:
            self._free(unit)

    def _leave_backward(self, s: int, *, sync: bool) -> None:
        """After a segment's backward: behind its unit's first segment free it, and reduce its gradients if ``sync``."""
        unit = self.plan.segments[s][0]
        first = s not in self.begun
        self.begun.add(s)
        if self.plan.first_of[unit] != s:
            return
        if sync or not self.config.keeps:
            self._free(unit)
        if s and self.config.prefetch == "BACKWARD_POST":
            self._gather(self.plan.segments[s - 1][0], self.plan.backward, after=(self.kernel,))
        self._gradient(unit, first, sync)

    @property
    def numel(self) -> float:
        """Elements of this rank's shard that are trained."""
        return sum(self._padded) / self.plan.degree

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
        name = self.plan.units[unit].name
        nbytes = self._param_bytes(unit)
        if self.host is not None:
            kept = kept_bytes(self.config, self.plan.units[unit], self.plan.degree) / self.plan.degree
            after = (self.host.copy(self.ops, f"h2d {name}", kept, offloading.H2D_STREAM, after),)
        if groups.shape[1] > 1:
            dtype = self.config.param_dtype
            kind = "all_gather"
            communicator = self.communicator if groups is self.plan.shard else "reshard"
            after = (collective(self.ops, kind, name, nbytes, groups, after, dtype=dtype, communicator=communicator),)
        self.gathered[unit] = after

    def _issued_after(self, after: tuple[int, ...]) -> tuple[int, ...]:
        """What holds an all_gather back besides its stream: the step's begin, buffers, a host that is not ahead."""
        waits = {*after, *self.issue, *self.buffer_free}
        if self.config.version == 1 and self.config.limit_all_gathers and len(self.freed) >= MAX_INFLIGHT_ALL_GATHERS:
            waits.add(self.freed.pop(0))
        if self.kernel >= 0:
            behind = self.config.alloc_retries or getattr(self.ops.ops[self.kernel], "bound", "") == "launch"
            waits |= {self.kernel} if behind else set()
        return tuple(sorted(waits))

    def _free(self, unit: int) -> None:
        """Give back a unit's unsharded parameters after the last kernel that reads them."""
        del self.gathered[unit]
        if self.plan.degree > 1 or self.host is not None:
            self.freed.append(self.kernel)

    def _param_bytes(self, unit: int) -> float:
        return self._gathered_bytes[unit]

    @cached_property
    def _gathered_bytes(self) -> list[float]:
        """Of each unit, whole [bytes]."""
        return [unit_bytes(self.config, unit, self.plan.degree) for unit in self.plan.units]

    @cached_property
    def _padded(self) -> list[int]:
        """Of each unit the elements that are reduced."""
        return [unit.padded(self.plan.degree) for unit in self.plan.units]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _gradient(self, unit: int, first: bool, sync: bool) -> None:
        """The post-backward hook: accumulate, or copy, cast, divide and reduce."""
        name = self.plan.units[unit].name
        numel = self._padded[unit]
        if not numel:
            return
        param_bytes, wire, _ = element_bytes(self.config)
        piled = self.config.no_sync and not first
        if not sync:
            traffic = 3.0 * numel * param_bytes if piled else 0.0
            if traffic:
                self.ops.compute(f"accumulate {name}", base.gradient_pass(traffic, self.cost), "gradient")
            return
        traffic = self._copy_traffic(numel, param_bytes, wire) + (3.0 * numel * param_bytes if piled else 0.0)
        seconds = base.gradient_pass(traffic, self.cost)
        after = self.reducing if self.config.version == 2 else ()
        ready = self.ops.compute(f"copy_in {name}", seconds, "gradient", after=after, nbytes=traffic)
        self._reduce(unit, float(numel * wire), ready)

    def _copy_traffic(self, numel: int, param_bytes: int, wire: int) -> float:
        """HBM bytes between a unit's gradients and its reduce_scatter.

        Version 1: autograd writes them into the flat gradient (read, write), which is cast if dtypes differ, and
        divided in place before the reduction. Version 2: one chunk_cat gathers and casts; NCCL averages.
        """
        if self.plan.degree == 1 and self.plan.replicate.shape[1] == 1:
            return 0.0
        if self.config.version == 2:
            return float(numel * (param_bytes + wire))
        return float(numel * (2 * param_bytes + (param_bytes + wire if wire != param_bytes else 0) + 2 * wire))

    def _reduce(self, unit: int, nbytes: float, ready: int) -> None:
        """reduce_scatter over the shards, then all_reduce of what is left over the replicas, then to the host."""
        name = self.plan.units[unit].name
        dtype = self.config.wire_dtype
        plan = self.plan
        done = ready
        if plan.degree > 1:
            done = collective(
                self.ops,
                "reduce_scatter",
                name,
                nbytes,
                plan.shard,
                (done,),
                dtype=dtype,
                redop="avg",
                communicator=self.communicator,
            )
            self.reducing = (done,)
        if plan.replicate.shape[1] > 1:
            done = collective(
                self.ops,
                "all_reduce",
                name,
                nbytes / plan.degree,
                plan.replicate,
                (done,),
                dtype=dtype,
                redop="avg",
                stream=REPLICATE,
                communicator=REPLICATE,
            )
        if self.host is not None:
            numel = plan.units[unit].padded(plan.degree) / plan.degree
            state_bytes = numel * element_bytes(self.config)[2]
            done = self.host.copy(self.ops, f"d2h {name}", state_bytes, offloading.D2H_STREAM, (done,))
        self.reduced.append(done)


CLIP_PASSES = 3
"""Of gradients on the host: read for their norm, read and written for their factor (torch/nn/utils/clip_grad.py)."""


class FSDP(Shards):
    """The hooks of ranks that have a whole model each."""

    def __init__(self, ops: base.OpList, model: Model, cost: StepCost, mesh: Mesh, config: FSDPConfig) -> None:
        host = offloading.host_of(mesh, cost, config) if config.cpu_offload else None
        places = [(0, i) for i in range(len(model.layers))]
        super().__init__(ops, cost, config, plan(model, mesh, config), places, host)

    def finish(self) -> None:
        """Clip and update this rank's shard, when all of its gradients are reduced."""
        after, self.reduced = tuple(self.reduced), []
        nbytes = self.numel * element_bytes(self.config)[2] * self.config.clip_grad_norm
        if self.host is not None:
            if nbytes:
                after = (self.host.update(self.ops, CLIP_PASSES * nbytes, after),)
                after = sharded.all_reduce_flag(self.ops, "all_reduce gradient norm", self.plan.shard, after)
            traffic = self.cost.optimizer_traffic_as_run / self.plan.degree
            self.reduced = [self.host.update(self.ops, traffic, after)]
            return
        if nbytes:
            after = sharded.clip(self.ops, self.cost, self.plan.shard, nbytes, after)
        after = sharded.whole_matrices(self.ops, self.cost, self.plan.shard, after)
        seconds = sharded.optimizer(self.cost, 1.0 / self.plan.degree)
        self.ops.compute("optimizer", seconds, "optimizer", after=after)

    def notes(self) -> tuple[str, ...]:
        """Units, groups and element types in words."""
        config = self.config
        plan = self.plan
        element = element_bytes(config)[0]
        sizes = [unit.numel * element + unit.frozen_bytes(1, element) for unit in plan.units]
        largest = plan.units[sizes.index(max(sizes))]
        size = format_bytes(float(max(sizes)))
        kept = config.reshard_after_forward
        usual = "reshard_after_forward as by default (all units but the root)"
        name = config.sharding_strategy or (usual if kept is None else f"reshard_after_forward={kept}")
        shape = f"{plan.shard.size} ranks = {plan.degree} shards x {plan.replicate.shape[1]} replicas"
        return (
            f"fsdp{config.version}: {shape}, {name}, prefetch {config.prefetch}",
            f"fsdp{config.version}: {len(plan.units)} units, the largest {largest.name} ({size} gathered); "
            f"gathered in {gathered_words(config)}, reduced in {config.wire_dtype}, kept in {config.orig_dtype}",
        )


build = walked(FSDP)
STRATEGY = base.Strategy("fsdp", FSDPConfig, build, holding=fsdp_memory.holding, partly=True, sample=sampled(FSDP))
