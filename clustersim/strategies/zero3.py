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

from clustersim.mesh import Ints
from clustersim.program import COMPUTE_STREAM, Collective
from clustersim.schedules import Action
from clustersim.strategies import base, sharded
from clustersim.strategies.walk import Part, Place, Rank
from clustersim.strategies.zero_config import ZeroConfig, overflows
from clustersim.strategies.zero_step import finite_norm, update
from clustersim.strategies.zero_trace import Visit, modules, persistent, visits
from clustersim.units import format_bytes

OUTSTANDING = 3
"""Gathers the host issues ahead of the kernels that use them (__max_ongoing_fetch_events)."""
INT4, INT8 = 0.5, 1.0


class Zero3(Rank[ZeroConfig]):
    """The hooks of stage 3.

    ``gathered`` : module -> ops its kernel waits for. ``kernels`` : the last ones, which bound how far the host is
    ahead. ``filled`` : elements in the gradient bucket. ``reduced``, ``home`` : reductions and copies to the host of
    this step. ``after_step`` : what gathers wait for at a step's begin.
    """

    def __post_init__(self) -> None:
        config, block = self.config, self.config.zero_optimization
        self.host = sharded.host(self.mesh, self.cost, config.pcie_bandwidth, config.dram_bandwidth)
        self.modules = modules(self.model, block)
        self.recording, self.recorded = visits(self.modules, block, recorded=False), visits(self.modules, block)
        self.of_layer = [[m for m, module in enumerate(self.modules) if module.layer == i]
                         for i in range(len(self.model.layers))]  # fmt: skip
        self.world, self.ranks = self.mesh.world_group(), self.mesh.world_size
        near = sharded.shard_groups(
            self.mesh, block.zero_hpz_partition_size, "$.strategy.zero_optimization.zero_hpz_partition_size"
        )
        self.near = near if near.shape[1] > 1 else self.world
        self.gathered: dict[int, tuple[int, ...]] = {}
        self.kernels: list[int] = []
        self.reduced: list[int] = []
        self.home: list[int] = []
        self.filled, self.after_step = 0, tuple[int, ...]()

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
                self._add(tensor.numel)
        if not forward and not i:
            self._reduce()
            self.gathered.clear()

    def _fetch(self, visit: Visit, turns: bool, forward: bool) -> None:
        """Gather what is missing, and what comes next ahead of time. ``turns`` : forward ends here, so that what is
        gathered ahead is for backward."""
        groups = self.world if forward else self.near
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
            size, dtype = (
                (numel * INT8, "uint8") if block.zero_quantized_weights else (sharded.nbytes(numel, dtype), dtype)
            )
            communicator = "world" if groups is self.world else "hpz"
            op = Collective(
                f"all_gather {name}", "all_gather", float(size), groups, after=after, dtype=dtype,
                communicator=communicator, step=self.ops.step,
            )  # fmt: skip
            after = (self.ops.add(op),)
        for m in which:
            self.gathered[m] = after

    # --- gradients ---------------------------------------------------------------------------------------------------

    def _add(self, numel: int) -> None:
        if overflows(self.filled, numel, self.config.zero_optimization):
            self._reduce()
        self.filled += numel

    def _reduce(self) -> None:
        """Copy, average and reduce-scatter the bucket."""
        block, numel = self.config.zero_optimization, self.filled
        if not numel:
            return
        self.filled, k = 0, len(self.reduced)
        nbytes = sharded.nbytes(numel, self.config.param_dtype)
        traffic = (4.0 if self.ranks > 1 else 2.0) * nbytes
        sent = self.ops.compute(
            f"fill bucket {k}", base.gradient_pass(traffic, self.cost), "gradient", after=self.ops.waits, nbytes=traffic
        )
        self.ops.waits = ()
        for kind, size, groups, dtype, communicator in self._reduction(numel, nbytes):
            op = Collective(
                f"{kind} bucket {k}", kind, size, groups, after=(sent,), dtype=dtype, communicator=communicator,
                step=self.ops.step,
            )  # fmt: skip
            sent = self.ops.add(op)
        self.reduced.append(sent)
        if not block.overlaps and self.ops.ops[sent].stream != COMPUTE_STREAM:
            self.ops.waits = (sent,)
        if self.config.offloads_optimizer:
            copied = self.host.copy(self.ops, f"d2h bucket {k}", nbytes / self.ranks, sharded.D2H_STREAM, (sent,))
            self.home.append(copied)

    def _reduction(self, numel: int, nbytes: float) -> list[tuple[str, float, Ints, str, str]]:
        """(kind, bytes, groups, element type, communicator) of what reduces a bucket, in order."""
        if self.ranks == 1:
            return []
        if not self.config.zero_optimization.zero_quantized_gradients:
            return [("reduce_scatter", nbytes, self.world, self.config.param_dtype, "world")]
        inside = sharded.shard_groups(self.mesh, self.mesh.nproc_per_node, "$.cluster.gpus_per_node")
        hops = [("all_to_all", numel * INT4, inside, "uint8", "node")]
        if self.mesh.n_nodes > 1:
            hops.append(("all_to_all", numel * INT4 / self.mesh.nproc_per_node, inside.T.copy(), "uint8", "rail"))
        return hops

    def finish(self) -> None:
        """Norm, Adam on this rank's part, and persistent parameters to everybody."""
        config, numel = self.config, self.model.parameters / self.ranks
        after = tuple(self.home[-1:] or self.reduced[-1:])
        after = finite_norm(self.ops, self.cost, config, self.world, numel, after)
        updated = update(self.ops, self.cost, config, self.host, numel, self.ranks, after)
        self.reduced, self.home, self.kernels, self.after_step = [], [], [], (updated,)
        small = persistent(self.model, config.zero_optimization)
        if small and self.ranks > 1:
            nbytes = sharded.nbytes(small, config.param_dtype)
            op = Collective(
                "all_gather persistent", "all_gather", nbytes, self.world, after=(updated,), dtype=config.param_dtype,
                step=self.ops.step,
            )  # fmt: skip
            self.ops.waits = (self.ops.add(op),)

    def notes(self) -> tuple[str, ...]:
        """What the coordinator does, in words."""
        live = format_bytes(sharded.nbytes(max(visit.live for visit in self.recorded), self.config.param_dtype))
        calls = sum(visit.fetch + bool(visit.prefetch) for visit in self.recorded)
        return (
            f"zero3: {self.ranks} ranks, {calls} all-gathers a pass, at most {live} gathered at once",
            *(("zero: PCIe is a stream of its own at a fixed rate per GPU",) if self.config.offloads_optimizer else ()),
        )
