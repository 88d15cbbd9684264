"""DeepSpeed's ZeRO-3: parameters, gradients and optimizer states shared out; parameters are gathered module by module.

What is imitated (deepspeed/runtime/zero/stage3.py, partitioned_param_coordinator.py):

* Each sub-module (a linear layer, not a block) is gathered before it runs, in forward, in a forward that checkpointing
  repeats, and again in backward. The first pass records the order in which sub-modules are used. From then on those
  that follow in it are gathered ahead in one call, until ``stage3_prefetch_bucket_size`` or
  ``stage3_max_live_parameters`` is reached. After use a sub-module's parameters are released unless they are used again
  within ``stage3_max_reuse_distance`` parameters of the record. Tensors below the persistence threshold never are.
* The host lets three gathers be outstanding, which bounds how far it runs ahead.
* Releases before 0.6 (``version``) wait for the device before each gather, for reductions too, and after it
  (``torch.cuda.synchronize`` in _allgather_param and _synchronize_communication), so that nothing is computed beside
  one. A hook sets the place in the record back after the whole model has counted as its first module, so that no
  later pass is recognised: nothing is gathered ahead or kept (deepspeedai/DeepSpeed issue 1069, pull requests 1188 and
  1453, which ends both).
* Gradients are copied into a bucket; when the next one would overflow it, the bucket is reduce-scattered, in every
  micro-step, beside backward (``overlap_comm``, here the default). It is the same communicator as for the gathers, so a
  long reduce_scatter holds up the next all_gather.
* After the step, persistent (small) parameters are gathered once for all.
* ZeRO++: ``zero_quantized_weights`` gathers int8 and dequantises; ``zero_hpz_partition_size`` gathers backward's
  parameters from a second copy inside a few ranks; ``zero_quantized_gradients`` sends int4 gradients by all_to_all
  inside nodes, then between them, in place of the reduce_scatter.
* ``offload_param``: shards come over PCIe before they are gathered. ``offload_optimizer`` as in stages 1 and 2, but
  every micro-step leaves its gradients on the host in 16 bits and has them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import accumulate, groupby

import msgspec
import numpy as np

from clustersim.core.errors import ProgramError
from clustersim.core.memo import kept_with_first
from clustersim.core.mesh import Ints
from clustersim.core.model import Layer, Model, StepCost, Tensor
from clustersim.core.units import format_bytes
from clustersim.training.schedules import Action
from clustersim.training.strategies import base, offloading, sharded
from clustersim.training.strategies.primitives import collective
from clustersim.training.strategies.walk import LayerPart, Place
from clustersim.training.strategies.zero_config import ZeroOptimization, elements
from clustersim.training.strategies.zero_step import Zero

OUTSTANDING = 3
"""Gathers the host issues ahead of the kernels that use them (__max_ongoing_fetch_events)."""
INT4 = 0.5
INT8 = 1.0


class Module(msgspec.Struct, frozen=True):
    """A sub-module with parameters to gather.

    name : str. layer : index of the model's layer. numel : elements gathered. gradients : its tensors that have one.
    share : of the layer's time spent in it; a GEMM's work grows with its weight.
    """

    name: str
    layer: int
    numel: int
    gradients: tuple[Tensor, ...]
    share: float


class Visit(msgspec.Struct, frozen=True):
    """One use of a sub-module.

    module : index. fetch : whether it must be gathered now. prefetch : modules gathered ahead, in one call.
    live : elements gathered while it runs.
    """

    module: int
    fetch: bool
    prefetch: tuple[int, ...]
    live: int


@kept_with_first(maxsize=64)
def modules(model: Model, block: ZeroOptimization) -> tuple[Module, ...]:
    """Sub-modules in forward order. A layer without parameters to gather is one module of nothing."""
    threshold = elements(block.stage3_param_persistence_threshold)
    all_modules: list[Module] = []
    for i, layer in enumerate(model.layers):
        groups = _by_module(layer)
        sizes = [sum(t.numel for t in tensors if t.numel >= threshold) for tensors in groups.values()]
        total = sum(sizes)
        if not total:
            own = tuple(t for t in layer.tensors if not t.tied_to and not t.frozen)
            all_modules.append(Module(layer.name, i, 0, own, 1.0))
            continue
        small = tuple(t for tensors, n in zip(groups.values(), sizes, strict=True) if not n for t in tensors)
        for (name, tensors), n in zip(groups.items(), sizes, strict=True):
            if n:
                trained = tuple(t for t in (*tensors, *small) if not t.frozen)
                all_modules.append(Module(name, i, n, trained, n / total))
                small = ()
    return tuple(all_modules)


def _by_module(layer: Layer) -> dict[str, list[Tensor]]:
    """A layer's own tensors by the module that registers them: ``a.b.weight`` belongs to ``a.b``."""
    groups: dict[str, list[Tensor]] = {}
    for tensor in layer.tensors:
        if not tensor.tied_to:
            groups.setdefault(tensor.name.rpartition(".")[0] or tensor.name, []).append(tensor)
    return groups


def persistent(model: Model, block: ZeroOptimization) -> int:
    """Elements that are never released, and are gathered again after each step."""
    threshold = elements(block.stage3_param_persistence_threshold)
    return sum(t.numel for layer in model.layers for t in layer.tensors if not t.tied_to and t.numel < threshold)


def visits(
    all_modules: tuple[Module, ...],
    block: ZeroOptimization,
    *,
    recorded: bool = True,
    recomputed: Collection[int] = (),
) -> tuple[Visit, ...]:
    """Forward and backward over the modules; ``recorded``: the order is known, so that there is prefetching.

    Backward runs the forward of layers ``recomputed`` again, all modules of one before its backward.
    """
    backward: list[int] = []
    for layer, group in groupby(reversed(range(len(all_modules))), lambda m: all_modules[m].layer):
        modules_back = list(group)
        backward += [*modules_back[::-1], *modules_back] if layer in recomputed else modules_back
    order = (*range(len(all_modules)), *backward)
    walk = _PrefetchWalk([m.numel for m in all_modules], order, block, recorded)
    return tuple(walk.visit(k) for k in range(len(order)))


@kept_with_first(maxsize=64)
def visits_of(model: Model, block: ZeroOptimization, recorded: bool, recomputed: tuple[int, ...]) -> tuple[Visit, ...]:
    """:func:`visits` of a model's modules: options of a plan that share a model ask for the same again and again."""
    return visits(modules(model, block), block, recorded=recorded, recomputed=recomputed)


def again_of(cost: StepCost) -> tuple[int, ...]:
    """Layers whose forward backward runs again."""
    return tuple(i for i, repeats in enumerate(cost.recomputed) if repeats)


class _PrefetchWalk(msgspec.Struct):
    """The coordinator's state: what is available, and how far prefetching has read the record.

    ``before`` : elements of all uses ahead of each place in the order. ``following`` : where the module of each place
    is used next, -1 for nowhere. With both, no use walks along the record: a mixture of experts has 10,000s of modules.
    """

    sizes: list[int]
    order: tuple[int, ...]
    block: ZeroOptimization
    recorded: bool
    available: set[int] = msgspec.field(default_factory=set)
    live: int = 0
    read: int = 0
    before: list[int] = msgspec.field(default_factory=list)
    following: list[int] = msgspec.field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = list(accumulate((self.sizes[module] for module in self.order), initial=0))
        self.following = [-1] * len(self.order)
        place_of: dict[int, int] = {}
        for place in reversed(range(len(self.order))):
            self.following[place] = place_of.get(self.order[place], -1)
            place_of[self.order[place]] = place

    def visit(self, k: int) -> Visit:
        """What the coordinator does at the k-th module: gather it, prefetch, and release it if nobody needs it soon."""
        module = self.order[k]
        fetch = module not in self.available and self.sizes[module] > 0
        if fetch:
            self._gather(module)
        self.read = max(self.read, k + 1)
        ahead = self._prefetch() if self.recorded else ()
        visit = Visit(module, fetch, ahead, self.live)
        if module in self.available and not self._soon(k):
            self.available.remove(module)
            self.live -= self.sizes[module]
        return visit

    def _gather(self, module: int) -> None:
        self.available.add(module)
        self.live += self.sizes[module]

    def _prefetch(self) -> tuple[int, ...]:
        room = elements(self.block.stage3_max_live_parameters) - self.live
        room = min(room, elements(self.block.stage3_prefetch_bucket_size))
        ahead = []
        taken = 0
        while self.read < len(self.order) and taken < room:
            module = self.order[self.read]
            self.read += 1
            if module not in self.available and self.sizes[module]:
                self._gather(module)
                ahead.append(module)
                taken += self.sizes[module]
        return tuple(ahead)

    def _soon(self, k: int) -> bool:
        """Whether it is used again within the reuse distance (its own use counts where it begins)."""
        following = self.following[k]
        if not self.recorded or following < 0:
            return False
        return self.before[following] - self.before[k + 1] < elements(self.block.stage3_max_reuse_distance)


class Zero3(Zero):
    """The hooks of stage 3.

    ``coming`` : visits of this pass that are still to come. ``gathered`` : module -> ops its kernel waits for.
    ``kernels`` : the last ones, which bound how far the host is ahead. ``after_step`` : what gathers wait for at a
    step's begin.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        block = self.config.zero_optimization
        self.modules = modules(self.model, block)
        again = again_of(self.cost)
        self.recording = visits_of(self.model, block, False, again)
        self.recorded = visits_of(self.model, block, self.config.prefetches, again)
        self.coming: Iterator[Visit] = iter(())
        self.of_layer = [
            [m for m, module in enumerate(self.modules) if module.layer == i] for i in range(len(self.model.layers))
        ]
        near = self._within(block.zero_hpz_partition_size, "$.strategy.zero_optimization.zero_hpz_partition_size")
        self.near = near if near.shape[1] > 1 else self.group
        self.gathered: dict[int, tuple[int, ...]] = {}
        self.kernels: list[int] = []
        self.after_step: tuple[int, ...] = ()

    def begin_step(self) -> None:
        """Gathers read parameters, so they wait for the optimizer."""
        if self.ops.ops:
            self.after_step = (*self.after_step, len(self.ops.ops) - 1)

    def around(self, place: Place, action: Action, *, last: bool) -> Iterator[LayerPart]:
        """Sub-module after sub-module, as the coordinator lets them run; the first pass only records their order."""
        forward = action.kind == "F"
        self.adds = action.microbatch > 0
        self.completes = last
        i = place[1]
        here = self.of_layer[i]
        if forward and not i:
            self.coming = iter(self.recorded if self.ops.step or action.microbatch else self.recording)
        repeats = not forward and any(self.cost.recomputed[i : i + 1])
        again = self.cost.share_again(i) if repeats and not self.lays_whole else 0.0
        for m in here if repeats else ():
            if self.lays_whole:
                self._fetch(next(self.coming), False, False)
            else:
                yield from self._visit(m, forward=False, share=again, suffix=" again")
        for m in here if forward else reversed(here):
            yield from self._visit(m, forward=forward, share=1.0 - again)
            for tensor in () if forward else reversed(self.modules[m].gradients):
                self.add(tensor)
        if not forward and not i:
            self.reduce()
            self.gathered.clear()

    def _visit(self, m: int, *, forward: bool, share: float, suffix: str = "") -> Iterator[LayerPart]:
        """One use of a sub-module, which takes ``share`` of its part of the layer's pass."""
        self._fetch(next(self.coming), forward and m == len(self.modules) - 1, forward)
        module = self.modules[m]
        if self.config.zero_optimization.zero_quantized_weights and self.ops.waits and module.numel:
            traffic = module.numel * (INT8 + 2.0)
            name = f"dequantise {module.name}"
            self.ops.compute(name, base.gradient_pass(traffic, self.cost), "gradient", after=self.ops.waits)
        yield LayerPart(module.share * share, module.name + suffix)
        self.kernels.append(self.ops.kernel)

    def _fetch(self, visit: Visit, turns: bool, forward: bool) -> None:
        """Gather what is missing, and what comes next ahead of time. ``turns`` : forward ends here, so that what is
        gathered ahead is for backward."""
        groups = self.group if forward else self.near
        if visit.fetch:
            self._gather((visit.module,), groups)
        self.ops.waits = (*self.gathered.pop(visit.module, ()), *self.ops.waits)
        if visit.prefetch:
            self._gather(visit.prefetch, self.near if turns else groups)

    def _awaited(self) -> tuple[int, ...]:
        """What the host waits for before it issues a gather."""
        if not self.config.prefetches:
            return (*self.kernels[-1:], *self.reduced[-1:], *self.home[-1:])
        return tuple(self.kernels[-OUTSTANDING : 1 - OUTSTANDING])

    # --- parameters --------------------------------------------------------------------------------------------------

    def _gather(self, which: tuple[int, ...], groups: Ints) -> None:
        """One coalesced all_gather of several modules."""
        block = self.config.zero_optimization
        dtype: str = self.config.param_dtype
        numel = sum(self.modules[m].numel for m in which)
        first = self.modules[which[0]].name
        name = first if len(which) == 1 else f"{first} and {len(which) - 1} more"
        after = (*self.after_step, *self._awaited())
        self.after_step = ()
        if self.config.offloads_parameters:
            share = sharded.nbytes(numel, dtype) / self.ranks
            pinned = self.config.pins("offload_param")
            after = (self.host.copy(self.ops, f"h2d {name}", share, offloading.H2D_STREAM, after, pinned=pinned),)
        if groups.shape[1] > 1:
            quantized = block.zero_quantized_weights
            size, dtype = (numel * INT8, "uint8") if quantized else (sharded.nbytes(numel, dtype), dtype)
            communicator = "world" if groups is self.group else "hpz"
            after = (
                collective(self.ops, "all_gather", name, size, groups, after, dtype=dtype, communicator=communicator),
            )
        for m in which:
            self.gathered[m] = after

    # --- gradients ---------------------------------------------------------------------------------------------------

    def send(self, k: int, numel: int, nbytes: float, after: int) -> int:
        """A reduce_scatter; or its hops in 4 bits, inside nodes and then between them."""
        bucket_name = f"bucket {k}"
        done = after
        if not self.config.zero_optimization.zero_quantized_gradients:
            dtype = self.config.param_dtype
            return collective(self.ops, "reduce_scatter", bucket_name, nbytes, self.group, (after,), dtype=dtype)
        per_node = max(1, self.mesh.nproc_per_node // self.mesh.size("tp"))
        inside = self._within(per_node, "$.cluster.gpus_per_node")
        hops = [("node", inside, numel * INT4)]
        if self.mesh.n_nodes > 1:
            hops.append(("rail", _across(inside, self.group), numel * INT4 / per_node))
        for name, groups, size in hops:
            done = collective(
                self.ops, "all_to_all", bucket_name, size, groups, (done,), dtype="uint8", communicator=name
            )
        return done

    def _within(self, size: int, field: str) -> Ints:
        """Groups of ``size`` neighbours among the ranks that share."""
        if self.ranks % size:
            raise ProgramError(f"{self.ranks} ranks do not divide into groups of {size} (at {field})")
        return self.group.reshape(-1, size)

    def publish(self, updated: int) -> tuple[int, ...]:
        """Persistent parameters, once for all; the others are gathered when they are used."""
        self.kernels = []
        self.after_step = (updated,)
        small = persistent(self.model, self.config.zero_optimization)
        if not small or self.ranks == 1:
            return self.ops.waits
        return (self.gather("persistent", sharded.nbytes(small, self.config.param_dtype), updated),)

    def notes(self) -> tuple[str, ...]:
        """What the coordinator does, in words."""
        live = format_bytes(sharded.nbytes(max(visit.live for visit in self.recorded), self.config.param_dtype))
        calls = sum(visit.fetch + bool(visit.prefetch) for visit in self.recorded)
        return (
            f"zero3: {self.ranks} ranks, {calls} all-gathers a micro-batch, at most {live} gathered at once",
            *self._regathered(),
            *self._updated_in_pieces(),
            *self.config.notes,
        )

    def _updated_in_pieces(self) -> tuple[str, ...]:
        """Where DeepSpeed updates a rank's part in several pieces, that it is played in one.

        As ``_create_fp16_sub_groups`` makes them (deepspeed/runtime/zero/stage3.py of DeepSpeed 0.17.6)."""
        size = elements(self.config.zero_optimization.sub_group_size)
        part = self.model.trained // self.ranks
        if part <= size:
            return ()
        return (
            f"zero3: a rank's {part:,} parameters are updated in one piece, where DeepSpeed's sub_group_size updates "
            f"about {size:,} at a time",
        )

    def _regathered(self) -> tuple[str, ...]:
        """How often what is gathered is, where that is not once forward and once backward: a count by hand is off."""
        gathered: Counter[int] = Counter()
        for visit in self.recorded:
            gathered.update([visit.module] * visit.fetch)
            gathered.update(visit.prefetch)
        sizes = {module: self.modules[module].numel for module in gathered}
        once = sum(sizes.values())
        times = sum(sizes[module] * count for module, count in gathered.items()) / once if once else 0.0
        more = sum(count > 2 for count in gathered.values())
        if not more:
            return ()
        return (
            f"zero3: a micro-batch gathers {times:.2f} times what is shared out; {more} modules a third time, as "
            "recomputation and backward use them more than stage3_max_reuse_distance parameters apart",
        )


def _across(inside: Ints, group: Ints) -> Ints:
    """Who is at the same place of the groups ``inside`` that one group was cut into."""
    cut = inside.reshape(len(group), -1, inside.shape[1])
    return np.ascontiguousarray(cut.transpose(0, 2, 1)).reshape(-1, cut.shape[1])
