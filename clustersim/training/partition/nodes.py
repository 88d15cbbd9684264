"""What a local layer is made of: nodes, and the list of items that they write when they are played.

A layer is a tuple of nodes. Forward plays them in order, backward plays each one's adjoint in reverse order: an
all_gather becomes a reduce_scatter, and the other way round. So an exchange is written once, where it belongs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from clustersim.core.model import Kernel
from clustersim.training.partition.base import Exchange, Item, Work

Kernels = tuple[Kernel, ...]
ARITHMETIC = ("flops", "backward_flops")
TRAFFIC = ("nbytes", "backward_nbytes")
WAITS = "read counts"
"""Work in which the host waits for the device (:func:`clustersim.training.partition.dispatch.read_counts`)."""
SIZES = (*ARITHMETIC, *TRAFFIC, "saved")
"""Fields of a kernel that grow with its work."""


def has_weights(kernel: Kernel) -> bool:
    """Whether the kernel is a product with weights, whose backward has a part of its own for them (W)."""
    return kernel.kind in {"gemm", "conv"} and not kernel.batch


def makes_both(kernel: Kernel) -> bool:
    """Whether backward makes a gradient of its weights apart from that of its inputs; of one alone it is part of I."""
    return has_weights(kernel) and "W" in kernel.halves and "I" in kernel.halves


class NodeListing:
    """Items in the order a rank issues them.

    Work waits for the exchanges it was told of, and what no exchange parts is one Work, but for :data:`WAITS`, behind
    which the host calls nothing ahead. ``waiting`` are the exchanges on the way of the data: the next work (but weight
    gradients, which are beside that way) needs them.
    """

    def __init__(self, items: tuple[Item, ...] = (), waiting: tuple[int, ...] = ()) -> None:
        self.items: list[Item] = list(items)
        self.waiting = waiting

    def work(self, name: str, kernels: Kernels, part: str, needs: tuple[int, ...] = ()) -> None:
        """Kernels of a pass in order of forward; backward runs them in reverse, and W only products with weights."""
        if part in "IW":
            kernels = tuple(k for k in reversed(kernels) if (k.halves if part == "I" else makes_both(k)))
        if not kernels:
            return
        if part != "W":
            needs, self.waiting = tuple(sorted({*needs, *self.waiting})), ()
        for i in range(len(self.items) - 1, -1, -1):
            item = self.items[i]
            if isinstance(item, Exchange) or WAITS in {name, item.name}:
                break
            # Earlier work of the same pass, with nothing waited for since: a rank's kernels run one after the other, so
            # it is one piece of work, unless the new one waits for more. Only weight gradients may change places with
            # others: nothing of the layer waits for them.
            if item.part != part and (item.needs or "W" not in {item.part, part}):
                break
            if item.part == part and set(needs) <= set(item.needs):
                names = item.name if name in item.name.split("+") else f"{item.name}+{name}"
                self.items[i] = Work(names, (*item.kernels, *kernels), part, item.needs)
                return
        self.items.append(Work(name, kernels, part, needs))

    def exchange(self, exchange: Exchange) -> None:
        """Append an exchange on the way of the data: it waits for what is waited for, and the next work for it."""
        needs = tuple(sorted({*exchange.needs, *self.waiting}))
        self.waiting = (self.beside(msgspec.structs.replace(exchange, needs=needs)),)

    def beside(self, exchange: Exchange) -> int:
        """Append an exchange beside that way, which has only the needs it says, and return its index."""
        self.items.append(exchange)
        return len(self.items) - 1

    def wait_for(self, *exchanges: int) -> None:
        """The next work needs these too."""
        self.waiting = (*self.waiting, *exchanges)


class LayerNode(Protocol):
    """A part of a layer."""

    @property
    def kernels(self) -> Kernels:
        """Its kernels in local shapes, for what they keep."""

    def forward(self, out: NodeListing, part: str) -> None:
        """Append what a forward pass issues; ``part`` is F, or R for a repeated one."""

    def backward(self, out: NodeListing) -> None:
        """Append what backward issues, in its order."""


Nodes = tuple[LayerNode, ...]


@dataclass(frozen=True)
class LocalKernels:
    """Kernels with no exchange between them."""

    name: str
    kernels: Kernels

    def forward(self, out: NodeListing, part: str) -> None:
        """All of them."""
        out.work(self.name, self.kernels, part)

    def backward(self, out: NodeListing) -> None:
        """Input gradients, then weight gradients."""
        out.work(self.name, self.kernels, "I")
        out.work(self.name, self.kernels, "W")


@dataclass(frozen=True)
class GradientSums(LocalKernels):
    """Kernels that only backward has: sums of gradients."""

    def forward(self, out: NodeListing, part: str) -> None:
        """Nothing."""


@dataclass(frozen=True)
class NodeSequence:
    """Nodes one after the other."""

    nodes: Nodes

    @property
    def kernels(self) -> Kernels:
        """Of all of them."""
        return tuple(kernel for node in self.nodes for kernel in node.kernels)

    def forward(self, out: NodeListing, part: str) -> None:
        """In order."""
        for node in self.nodes:
            node.forward(out, part)

    def backward(self, out: NodeListing) -> None:
        """In reverse."""
        for node in reversed(self.nodes):
            node.backward(out)


class LayoutChange(msgspec.Struct, frozen=True):
    """A tensor that changes its layout over some dimensions between two kernels: an exchange and its adjoint.

    kinds : forward and backward, ``""`` for none. dims, elements, dtype : as of :class:`Exchange`.
    """

    name: str
    kinds: tuple[str, str]
    dims: tuple[str, ...]
    elements: float
    dtype: str | None = None
    kernels: Kernels = ()

    def forward(self, out: NodeListing, part: str) -> None:
        """The exchange."""
        if self.kinds[0]:
            out.exchange(Exchange(self.name, self.kinds[0], self.dims, self.elements, part, dtype=self.dtype))

    def backward(self, out: NodeListing) -> None:
        """Its adjoint."""
        if self.kinds[1]:
            name = f"{self.name} gradient"
            out.exchange(Exchange(name, self.kinds[1], self.dims, self.elements, "I", dtype=self.dtype))


class CrossEntropy(msgspec.Struct, frozen=True):
    """Cross-entropy over a vocabulary that tensor parallelism divides (Megatron-LM tensor_parallel/cross_entropy.py).

    Three fp32 all_reduces of one number per token: the largest logit, the target's logit, the sum of exponentials.
    PyTorch's ``loss_parallel`` has as many.
    """

    name: str
    kernels: tuple[Kernel]
    tokens: float

    def forward(self, out: NodeListing, part: str) -> None:
        """A pass for the maximum, one for exponentials, one that divides; each third has its share of the traffic."""
        first, second, third = pieces(self.kernels[0], 3)
        out.work(self.name, (first,), part)
        self._reduce(out, "largest logit", part)
        out.work(self.name, (second,), part)
        self._reduce(out, "target logit", part)
        self._reduce(out, "sum of exponentials", part)
        out.work(self.name, (third,), part)

    def _reduce(self, out: NodeListing, name: str, part: str) -> None:
        out.exchange(Exchange(name, "all_reduce", ("tp",), self.tokens, part, dtype="fp32"))

    def backward(self, out: NodeListing) -> None:
        """The softmax minus one at the target, without an exchange."""
        out.work(self.name, self.kernels, "I")


def scaled(kernel: Kernel, part: float, names: Sequence[str] = SIZES, **changes: Any) -> Kernel:
    """The kernel with these of its sizes multiplied by ``part``, and other fields changed."""
    return replace(kernel, **{name: getattr(kernel, name) * part for name in names} | changes)


def pieces(kernel: Kernel, count: int) -> Kernels:
    """The kernel in so many equal parts of its rows, each a launch of its own where it launches that many.

    >>> whole = Kernel("up", "gemm", m=8, n=4, k=4, flops=256.0, launches=1)
    >>> [(part.m, part.flops, part.launches) for part in pieces(whole, 2)]
    [(4, 128.0, 1), (4, 128.0, 1)]
    """
    sizes: Any = {name: getattr(kernel, name) / count for name in SIZES}
    piece = replace(kernel, m=-(-kernel.m // count), **sizes)
    if kernel.kind != "memory":
        return (piece,) * count
    return tuple(replace(piece, launches=(kernel.launches + i) // count) for i in range(count))


def copy(name: str, read: float, written: float) -> Kernel:
    """A kernel, alike in every pass, that reads and writes so many elements per sample."""
    moved = read + written
    return Kernel(name, "memory", nbytes=moved, backward_nbytes=moved, launches=1, backward_launches=1)


def forward_items(nodes: Nodes, part: str = "F") -> tuple[tuple[Item, ...], tuple[int, ...]]:
    """Items of a forward pass through nodes, and the exchanges that what follows must wait for."""
    out = NodeListing()
    NodeSequence(nodes).forward(out, part)
    return tuple(out.items), out.waiting


def backward_items(nodes: Nodes, again: tuple[Item, ...] = (), waiting: tuple[int, ...] = ()) -> tuple[Item, ...]:
    """Items of backward through nodes, after those of a repeated forward (with what must be waited for behind it).

    It ends at the first node whose kernels have a backward; where none has, there is none.
    """
    computing = [i for i, node in enumerate(nodes) if node.kernels]
    reached = [i for i in computing if any(kernel.halves for kernel in nodes[i].kernels)]
    if computing and not reached:
        return ()
    ends = reached[0] if reached and reached[0] > computing[0] else 0
    out = NodeListing(again, waiting)
    NodeSequence(nodes[ends:]).backward(out)
    return tuple(out.items)
