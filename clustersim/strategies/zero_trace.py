"""Which parameters ZeRO-3 gathers, when, and when it lets them go: DeepSpeed's parameter coordinator without a clock.

What is imitated (deepspeed/runtime/zero/partitioned_param_coordinator.py): the first pass records the order in which
sub-modules are used (forward, then backward in reverse). From then on, when a sub-module is reached, its parameters are
gathered if they are not there, and those that follow in the recorded order are gathered ahead in one call, until
``stage3_prefetch_bucket_size`` or ``stage3_max_live_parameters`` is reached. After use a sub-module's parameters are
released unless they are used again within ``stage3_max_reuse_distance`` parameters of the record. Tensors below
``stage3_param_persistence_threshold`` are never released.
"""

from __future__ import annotations

import msgspec

from clustersim.model import Layer, Model, Tensor
from clustersim.strategies.zero_config import ZeroOptimization, elements


class Module(msgspec.Struct, frozen=True):
    """A sub-module with parameters to gather.

    name : str. layer : index of the model's layer. numel : elements gathered. gradients : tensors, all of them.
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


def modules(model: Model, block: ZeroOptimization) -> tuple[Module, ...]:
    """Sub-modules in forward order. A layer without parameters to gather is one module of nothing."""
    threshold = elements(block.stage3_param_persistence_threshold)
    found: list[Module] = []
    for i, layer in enumerate(model.layers):
        groups = _by_module(layer)
        sizes = [sum(t.numel for t in tensors if t.numel >= threshold) for tensors in groups.values()]
        whole = sum(sizes)
        if not whole:
            own = tuple(t for t in layer.tensors if not t.tied_to)
            found.append(Module(layer.name, i, 0, own, 1.0))
            continue
        small = tuple(t for tensors, n in zip(groups.values(), sizes, strict=True) if not n for t in tensors)
        for (name, tensors), n in zip(groups.items(), sizes, strict=True):
            if n:
                found.append(Module(name, i, n, (*tensors, *small), n / whole))
                small = ()
    return tuple(found)


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


def visits(found: tuple[Module, ...], block: ZeroOptimization, *, recorded: bool = True) -> tuple[Visit, ...]:
    """Forward and backward over the modules; ``recorded``: the order is known, so that there is prefetching."""
    order = (*range(len(found)), *reversed(range(len(found))))
    walk = _Walk([m.numel for m in found], order, block, recorded)
    return tuple(walk.visit(k) for k in range(len(order)))


class _Walk(msgspec.Struct):
    """The coordinator's state: what is available, and how far prefetching has read the record."""

    sizes: list[int]
    order: tuple[int, ...]
    block: ZeroOptimization
    recorded: bool
    available: set[int] = msgspec.field(default_factory=set)
    live: int = 0
    read: int = 0

    def visit(self, k: int) -> Visit:
        module = self.order[k]
        fetch = module not in self.available and self.sizes[module] > 0
        if fetch:
            self._gather(module)
        self.read = max(self.read, k + 1)
        ahead = self._prefetch() if self.recorded else ()
        visit = Visit(module, fetch, ahead, self.live)
        if module in self.available and not self._soon(module, k):
            self.available.remove(module)
            self.live -= self.sizes[module]
        return visit

    def _gather(self, module: int) -> None:
        self.available.add(module)
        self.live += self.sizes[module]

    def _prefetch(self) -> tuple[int, ...]:
        room = elements(self.block.stage3_max_live_parameters) - self.live
        room, ahead, taken = min(room, elements(self.block.stage3_prefetch_bucket_size)), [], 0
        while self.read < len(self.order) and taken < room:
            module = self.order[self.read]
            self.read += 1
            if module not in self.available and self.sizes[module]:
                self._gather(module)
                ahead.append(module)
                taken += self.sizes[module]
        return tuple(ahead)

    def _soon(self, module: int, k: int) -> bool:
        """Whether it is used again within the reuse distance (its own use counts where it begins)."""
        if not self.recorded:
            return False
        distance, limit = 0, elements(self.block.stage3_max_reuse_distance)
        for later in self.order[k + 1 :]:
            if distance >= limit:
                return False
            if later == module:
                return True
            distance += self.sizes[later]
        return False
