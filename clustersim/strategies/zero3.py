"""DeepSpeed's ZeRO-3: parameters, gradients and optimizer states shared out; parameters are gathered module by module.

What is imitated (deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py):

* Each sub-module (a linear layer, not a block) is gathered before it runs, and the next ones ahead of time, in forward
  and again in backward: see :mod:`clustersim.strategies.zero_trace`. The first pass only records the order. The host
  lets three gathers be outstanding, which bounds how far it runs ahead.
* Gradients are copied into a bucket; when the next one would overflow it, the bucket is reduce-scattered, in every
  micro-step, beside backward (``overlap_comm``, here the default). It is the same communicator as for the gathers, so a
  long reduce_scatter holds up the next all_gather.
* After the step, persistent (small) parameters are gathered once for all.
* ZeRO++: ``zero_quantized_weights`` gathers int8 and dequantises; ``zero_hpz_partition_size`` gathers backward's
  parameters from a second copy inside a few ranks; ``zero_quantized_gradients`` sends int4 gradients by all_to_all
  inside nodes, then between them, in place of the reduce_scatter.
* ``offload_param``: shards come over PCIe before they are gathered. ``offload_optimizer`` as in stages 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from clustersim.errors import ProgramError
from clustersim.mesh import Ints
from clustersim.schedules import Action
from clustersim.strategies import base, sharded
from clustersim.strategies.primitives import collective
from clustersim.strategies.walk import Part, Place
from clustersim.strategies.zero_step import Zero
from clustersim.strategies.zero_trace import Visit, modules, persistent, visits
from clustersim.units import format_bytes

OUTSTANDING = 3
"""Gathers the host issues ahead of the kernels that use them (__max_ongoing_fetch_events)."""
INT4, INT8 = 0.5, 1.0


class Zero3(Zero):
    """The hooks of stage 3.

    ``gathered`` : module -> ops its kernel waits for. ``kernels`` : the last ones, which bound how far the host is
    ahead. ``after_step`` : what gathers wait for at a step's begin.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        block = self.config.zero_optimization
        self.modules = modules(self.model, block)
        self.recording, self.recorded = visits(self.modules, block, recorded=False), visits(self.modules, block)
        self.of_layer = [[m for m, module in enumerate(self.modules) if module.layer == i]
                         for i in range(len(self.model.layers))]  # fmt: skip
        near = self._within(block.zero_hpz_partition_size, "$.strategy.zero_optimization.zero_hpz_partition_size")
        self.near = near if near.shape[1] > 1 else self.group
        self.gathered: dict[int, tuple[int, ...]] = {}
        self.kernels: list[int] = []
        self.after_step: tuple[int, ...] = ()

    def begin_step(self) -> None:
        """Gathers read parameters, so they wait for the optimizer."""
        if self.ops.ops:
            self.after_step = (*self.after_step, len(self.ops.ops) - 1)

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[Part]:
        """Sub-module after sub-module, as the coordinator lets them run; the first pass only records their order."""
        forward, i, n = action.kind == "F", place[1], len(self.modules)
        plan = self.recorded if self.ops.step or action.microbatch else self.recording
        for m in self.of_layer[i] if forward else reversed(self.of_layer[i]):
            self._fetch(plan[m if forward else 2 * n - 1 - m], m == n - 1, forward)
            module = self.modules[m]
            if self.config.zero_optimization.zero_quantized_weights and self.ops.waits and module.numel:
                traffic, name = module.numel * (INT8 + 2.0), f"dequantise {module.name}"
                self.ops.compute(name, base.gradient_pass(traffic, self.cost), "gradient", after=self.ops.waits)
            yield Part(module.share, module.name)
            self.kernels.append(self.ops.kernel)
            for tensor in () if forward else reversed(module.gradients):
                self.add(tensor)
        if not forward and not i:
            self.reduce()
            self.gathered.clear()

    def _fetch(self, visit: Visit, turns: bool, forward: bool) -> None:
        """Gather what is missing, and what comes next ahead of time. ``turns`` : forward ends here, so that what is
        gathered ahead is for backward."""
        groups = self.group if forward else self.near
        if visit.fetch:
            self._gather((visit.module,), groups)
        self.ops.waits = (*self.gathered.pop(visit.module, ()), *self.ops.waits)
        if visit.prefetch:
            self._gather(visit.prefetch, self.near if turns else groups)

    # --- parameters --------------------------------------------------------------------------------------------------

    def _gather(self, which: tuple[int, ...], groups: Ints) -> None:
        """One coalesced all_gather of several modules."""
        block = self.config.zero_optimization
        dtype: str = self.config.param_dtype
        numel = sum(self.modules[m].numel for m in which)
        first = self.modules[which[0]].name
        name = first if len(which) == 1 else f"{first} and {len(which) - 1} more"
        after = (*self.after_step, *self.kernels[-OUTSTANDING : 1 - OUTSTANDING])
        self.after_step = ()
        if self.config.offloads_parameters:
            share = sharded.nbytes(numel, dtype) / self.ranks
            after = (self.host.copy(self.ops, f"h2d {name}", share, sharded.H2D_STREAM, after),)
        if groups.shape[1] > 1:
            quantized = block.zero_quantized_weights
            size, dtype = (numel * INT8, "uint8") if quantized else (sharded.nbytes(numel, dtype), dtype)
            where = "world" if groups is self.group else "hpz"
            after = (collective(self.ops, "all_gather", name, size, groups, after, dtype=dtype, communicator=where),)
        for m in which:
            self.gathered[m] = after

    # --- gradients ---------------------------------------------------------------------------------------------------

    def send(self, k: int, numel: int, nbytes: float, after: int) -> int:
        """A reduce_scatter; or its hops in 4 bits, inside nodes and then between them."""
        what, done = f"bucket {k}", after
        if not self.config.zero_optimization.zero_quantized_gradients:
            dtype = self.config.param_dtype
            return collective(self.ops, "reduce_scatter", what, nbytes, self.group, (after,), dtype=dtype)
        each = max(1, self.mesh.nproc_per_node // self.mesh.size("tp"))
        inside = self._within(each, "$.cluster.gpus_per_node")
        hops = [("node", inside, numel * INT4)]
        if self.mesh.n_nodes > 1:
            hops.append(("rail", _across(inside, self.group), numel * INT4 / each))
        for name, groups, size in hops:
            done = collective(self.ops, "all_to_all", what, size, groups, (done,), dtype="uint8", communicator=name)
        return done

    def _within(self, size: int, where: str) -> Ints:
        """Groups of ``size`` neighbours among the ranks that share."""
        if self.ranks % size:
            raise ProgramError(f"{self.ranks} ranks do not divide into groups of {size} (at {where})")
        return self.group.reshape(-1, size)

    def publish(self, updated: int) -> tuple[int, ...]:
        """Persistent parameters, once for all; the others are gathered when they are used."""
        self.kernels, self.after_step = [], (updated,)
        small = persistent(self.model, self.config.zero_optimization)
        if not small or self.ranks == 1:
            return self.ops.waits
        return (self.gather("persistent", sharded.nbytes(small, self.config.param_dtype), updated),)

    def notes(self) -> tuple[str, ...]:
        """What the coordinator does, in words."""
        live = format_bytes(sharded.nbytes(max(visit.live for visit in self.recorded), self.config.param_dtype))
        calls = sum(visit.fetch + bool(visit.prefetch) for visit in self.recorded)
        return (
            f"zero3: {self.ranks} ranks, {calls} all-gathers a pass, at most {live} gathered at once",
            *self.config.notes,
        )


def _across(inside: Ints, group: Ints) -> Ints:
    """Who is at the same place of the groups ``inside`` that one group was cut into."""
    cut = inside.reshape(len(group), -1, inside.shape[1])
    return np.ascontiguousarray(cut.transpose(0, 2, 1)).reshape(-1, cut.shape[1])
