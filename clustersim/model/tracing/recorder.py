"""Watches a step of a module on fake tensors: every operator, every module, every storage from birth to death.

An operator of the forward pass belongs to the autograd node that was made for it just before it ran; an operator of the
backward pass to the node that runs it; and a tensor that autograd keeps, to the node that first kept it. All three are
told by autograd's sequence numbers, which AOTAutograd joins forward and backward by, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from clustersim.model.tracing import traffic
from clustersim.model.tracing.events import (
    AttentionShape,
    ConvolutionShape,
    Memory,
    ModuleCall,
    OpEvent,
    Product,
    Shape,
    StepTrace,
)

_SEQUENCE: Any = vars(torch.autograd)["_get_sequence_nr"]
"""The number that the next node of autograd will have."""


class Recorder(TorchDispatchMode):
    """Fills a :class:`StepTrace`; on top of a FakeTensorMode. ``module`` : what is traced."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.trace = StepTrace()
        self.backward = False
        self.paused = False
        self.uncounted: set[str] = set()
        self.unfused: set[str] = set()
        self.paths = {id(child): path for path, child in module.named_modules()}
        self.leaves = {path for path, child in module.named_modules() if not any(child.children())}
        self.inside: list[str] = [""]
        self.open: list[ModuleCall] = []
        self.numbers: dict[int, int] = {}
        self.last_node = _SEQUENCE() - 1
        for name, parameter in module.named_parameters():
            number = self.number(parameter, "weight")
            self.trace.memories[number].weights |= {name}
            parameter.register_post_accumulate_grad_hook(self._graded)
        for buffer in module.buffers():
            self.number(buffer, "weight")

    @contextmanager
    def watching(self) -> Iterator[StepTrace]:
        """Record what runs inside the block."""
        with ExitStack() as stack:
            for hook in (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave)):
                stack.callback(hook.remove)
            stack.enter_context(saved_tensors_hooks(self._keep, lambda tensor: tensor))
            stack.enter_context(self)
            yield self.trace

    def turns(self) -> None:
        """The forward pass is over."""
        self.backward = True
        self.trace.turn = len(self.trace.events)

    def number(self, tensor: torch.Tensor, kind: str = "input") -> int:
        """The number of the memory behind a tensor; of one that is new, as this kind."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.numbers:
            number = self.numbers[key] = len(self.trace.memories)
            self.trace.memories.append(Memory(float(storage.nbytes()), kind=kind))
            weakref.finalize(storage, self._died, number, key).atexit = False
        return self.numbers[key]

    def _died(self, number: int, key: int) -> None:
        self.trace.memories[number].died = len(self.trace.events)
        if self.numbers.get(key) == number:
            del self.numbers[key]

    def _graded(self, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            self.trace.memories[self.number(parameter.grad)].kind = "gradient"

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """Autograd keeps a tensor; what comes back is no part of the graph, or the two would keep each other."""
        if not self.backward:
            memory = self.trace.memories[self.number(tensor)]
            if memory.keeper < 0:
                memory.keeper = _SEQUENCE() - 1
        self.paused = True
        apart = tensor.detach()
        self.paused = False
        return apart

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or self.backward:
            return
        self.inside.append(path)
        call = ModuleCall(path, len(self.trace.events), 0)
        self.open.append(call)
        self.trace.calls.append(call)

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        path = self.paths.get(id(module))
        if path is None or self.backward:
            return
        self.inside.pop()
        self.open.pop().stop = len(self.trace.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator, and record it."""
        named = kwargs or {}
        out = func(*args, **named)
        if func.namespace != "prim" and not self.paused:
            self.record(func, args, named, out)
        return out

    def record(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        """An operator has run, or is taken to have."""
        operands = traffic.tensors((args, kwargs))
        results = traffic.tensors(out)
        name = traffic.short_name(func)
        event = self.event(name, operands, results)
        event.nbytes = traffic.traffic(func, operands, results)
        event.launches = traffic.launches(func, results)
        event.flops = traffic.flops(func, args, kwargs, out)
        if traffic.is_uncounted(func):
            self.uncounted.add(name)
        event.sums = name == "add" and len(operands) == 2 and operands[0].shape == operands[1].shape
        if not self.backward:
            event.shape = self._shape(name, args, results)
            event.full = event.shape is not None and results[0].dtype is torch.float32
        self._follow(event, traffic.is_free(func))

    def event(self, name: str, operands: list[Any], results: list[Any]) -> OpEvent:
        """A new event, of the module and the node that run it."""
        trace = self.trace
        index = len(trace.events)
        graded = {
            self.number(tensor): traffic.nbytes(tensor)
            for tensor in operands
            if tensor.requires_grad and not self.backward
        }
        reads = tuple(dict.fromkeys(self.number(tensor) for tensor in operands))
        writes = tuple(dict.fromkeys(self.number(tensor, "activation") for tensor in results))
        for number in writes:
            memory = trace.memories[number]
            if memory.born is None and number not in reads and memory.kind == "activation":
                memory.born = index
        path = self.inside[-1]
        event = OpEvent(
            name,
            self.backward,
            self._node(index),
            path,
            path in self.leaves,
            reads=reads,
            writes=writes,
            graded=graded,
        )
        trace.events.append(event)
        return event

    def _node(self, index: int) -> int:
        """The autograd node of the operator that runs now. An operator before which several were made has them all."""
        running = torch._C._current_autograd_node()
        if self.backward and running is not None:
            return int(running._sequence_nr())
        last = int(_SEQUENCE()) - 1
        for node in range(self.last_node + 1, last + 1):
            self.trace.owners[node] = index
        self.last_node = max(self.last_node, last)
        return last

    def _follow(self, event: OpEvent, free: bool) -> None:
        """What its results are made of: weights alone, or scores."""
        memories = self.trace.memories
        sources = [memories[number] for number in event.reads]
        weights = frozenset[str]().union(*(memory.weights for memory in sources))
        of_weights = bool(weights) and all(memory.kind in {"weight", "cast"} or memory.weights for memory in sources)
        product = event.shape if isinstance(event.shape, Product) else None
        makes_scores = product is not None and product.weight < 0 and product.batch > 1 and product.n > product.k
        event.scores = any(memory.scores for memory in sources)
        for number in event.writes:
            memory = memories[number]
            if memory.kind != "activation" or number in event.reads:
                continue
            if of_weights:
                memory.weights = weights
                memory.kind = "cast" if event.name == "_to_copy" else memory.kind
            memory.scores = makes_scores or (event.scores and event.name in traffic.OPERATORS.spreads and not free)

    def _shape(self, name: str, args: tuple[Any, ...], results: list[Any]) -> Shape | None:
        if name in traffic.PRODUCTS:
            return self._product(name, args)
        if name in traffic.CONVOLUTIONS:
            return _convolution(args, results[0])
        return None

    def _product(self, name: str, args: tuple[Any, ...]) -> Product:
        left, right = args[1:3] if name in {"addmm", "baddbmm"} else args[:2]
        made_of = [self.trace.memories[self.number(tensor)].weights for tensor in (left, right)]
        weight = 1 if made_of[1] else 0 if made_of[0] else -1
        if name == "_grouped_mm" and left.dim() == 2:
            groups = int(right.shape[0])
            return Product(groups, -(-int(left.shape[0]) // groups), int(right.shape[-1]), int(right.shape[-2]), weight)
        batch = int(left.shape[0]) if left.dim() == 3 else 1
        return Product(batch, int(left.shape[-2]), int(right.shape[-1]), int(left.shape[-1]), weight)

    def fused(self, func: Any, operands: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """An operator that only a GPU has has run, and autograd's node of it is the newest."""
        self.record(func, operands, {}, results)
        self.trace.owners[self.trace.events[-1].node] = len(self.trace.events) - 1  # and not the making of its output

    def attention(
        self,
        operands: tuple[torch.Tensor, ...],
        mask: torch.Tensor | None,
        results: list[Any],
        *,
        causal: bool,
        flash: bool,
    ) -> None:
        """A fused attention has run on queries, keys and values; ``mask`` : what was added to its scores; ``results`` :
        its output, and the logarithms of its sums; ``flash`` : FlashAttention is written for it."""
        added = [] if mask is None else [mask]
        event = self.event("attention", [*operands, *added], results)
        self.trace.owners[event.node] = len(self.trace.events) - 1  # and not the making of its output
        queries, keys, values = operands
        *batch, tokens, width = (int(size) for size in queries.shape)
        heads = _product_of(batch)
        products = 2.0 * heads * tokens * int(keys.shape[-2]) * (width + int(values.shape[-1]))
        event.flops = products / 2.0 if causal else products
        kv_heads = _product_of([int(n) for n in keys.shape[:-2]])
        event.shape = AttentionShape(heads, kv_heads, width, tokens, causal, flash)
        event.nbytes = sum(map(traffic.nbytes, (*operands, results[0])))
        event.full = queries.dtype is torch.float32
        event.launches = 1

    def attention_backward(self, gradients: list[Any], forward_flops: float, moved: float) -> None:
        """A fused attention's backward has run: five products of which forward has two."""
        event = self.event("attention_backward", [], gradients)
        event.flops = 2.5 * forward_flops
        event.nbytes = 2.0 * moved
        event.launches = 3


def _product_of(sizes: list[int]) -> int:
    count = 1
    for size in sizes:
        count *= size
    return count


def _convolution(args: tuple[Any, ...], out: torch.Tensor) -> ConvolutionShape:
    """The implicit product of ``aten.convolution``; a transposed one has input and output changed over."""
    taken, weight = args[:2]
    transposed = bool(args[6])
    groups = int(args[8])
    window = _product_of([int(size) for size in weight.shape[2:]])
    large = taken if transposed else out
    positions = int(large.shape[0]) * _product_of([int(size) for size in large.shape[2:]])
    channels_out = int(weight.shape[1]) if transposed else int(weight.shape[0]) // groups
    channels_in = int(weight.shape[0]) // groups if transposed else int(weight.shape[1])
    return ConvolutionShape(
        positions, channels_out, channels_in * window, groups, float(traffic.distinct(taken) + traffic.distinct(out))
    )
