"""Adapters beside products that tensor parallelism cuts: what a rank computes of them, and their exchanges.

Megatron-Bridge's ``ParallelLinearAdapter`` (src/megatron/bridge/peft/utils.py), which is NeMo's: beside a linear cut by
columns the first product makes 1/t of the rank's outputs, which are gathered, and the second 1/t of the linear's.
Beside one cut by rows the first makes partial sums of the rank, which are summed, and the second 1/t of the linear's
outputs, which are gathered. Neither product knows sequence parallelism: a linear cut by columns hands over the input
that it has gathered (``return_layernorm_output_gathered``), whose gradient it reduces with its own; where its gather is
in pieces beside the product, the adapter gathers for itself. Behind a row cut each rank takes its tokens of the whole
output, so that backward gathers the gradient once more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clustersim.core.errors import ScenarioError
from clustersim.core.model import ADAPTER, Kernel, product_beside
from clustersim.training.partition.base import Exchange
from clustersim.training.partition.nodes import Kernels, LayerNode, LocalKernels, NodeListing, Nodes, copy
from clustersim.training.partition.share import LayerShares, local_kernel, rows
from clustersim.training.partition.tensor import TP, ColumnLinears, ExchangeStyle, RowLinears


@dataclass(frozen=True)
class LocalAdapter:
    """One adapter as a rank has it.

    Parameters
    ----------
    name : of the section it is in. ahead : kernels in front of its products, which are ``down`` and ``up``.
    behind : its scaling and the sum. inputs, middle, outputs : elements per sample, over all tensor-parallel ranks, of
        what it reads, of its first product and of its second. column : whether its linear is cut by columns.
    """

    name: str
    ahead: Kernels
    down: Kernel
    up: Kernel
    behind: Kernels
    inputs: float
    middle: float
    outputs: float
    column: bool
    manner: ExchangeStyle

    @property
    def kernels(self) -> Kernels:
        """All of them."""
        return (*self.ahead, self.down, self.up, *self.behind)

    @property
    def product(self) -> str:
        """Beside which it is."""
        return product_beside(self.down.name)

    @property
    def _gathers(self) -> bool:
        """Whether it gathers its input itself."""
        m = self.manner
        return self.column and m.sequence_parallel and m.overlap == "userbuffers"

    def _exchange(self, out: NodeListing, what: str, kind: str, elements: float, part: str) -> None:
        out.exchange(Exchange(f"{self.name} adapter {what}", kind, TP, elements, part))

    def forward(self, out: NodeListing, part: str) -> None:
        """The first product, its other ranks' parts, the second, and where it is cut by rows those of the output."""
        if self._gathers:
            self._exchange(out, "input", "all_gather", self.inputs, part)
        out.work(self.name, (*self.ahead, self.down), part)
        self._exchange(out, "low rank", "all_gather" if self.column else "all_reduce", self.middle, part)
        joined = (copy(f"{self.product}{ADAPTER}joined", self.middle, self.middle),) if self.column else ()
        out.work(self.name, (*joined, self.up), part)
        if not self.column:
            self._exchange(out, "output", "all_gather", self.outputs, part)
            out.work(self.name, (copy(f"{self.product}{ADAPTER}joined", self.outputs, self.outputs),), part)
        out.work(self.name, self.behind, part)

    def backward(self, out: NodeListing) -> None:
        """The adjoint; gradients of weights run beside the reductions that follow those of inputs."""
        m = self.manner
        out.work(self.name, self.behind, "I")
        if not self.column:
            if m.sequence_parallel:
                self._exchange(out, "output gradient", "all_gather", self.outputs, "I")
            own = self.outputs / m.tp
            out.work(self.name, (copy(f"{self.product}{ADAPTER}parted", own, own),), "I")
        out.work(self.name, (self.up,), "I")
        self._exchange(out, "low rank gradient", "all_reduce", self.middle, "I")
        out.work(self.name, (self.up,), "W")
        out.work(self.name, (self.down,), "I")
        if self.column and "I" in self.down.halves and (self._gathers or not m.sequence_parallel):
            kind = "reduce_scatter" if self._gathers else "all_reduce"
            self._exchange(out, "input gradient", kind, self.inputs, "I")
        out.work(self.name, (self.down,), "W")
        out.work(self.name, self.ahead, "I")


@dataclass(frozen=True)
class AdaptedLinears:
    """Linears, and behind them the adapters that read what they read; in backward these come first."""

    base: LayerNode
    adapters: tuple[LocalAdapter, ...]

    @property
    def kernels(self) -> Kernels:
        """Of both."""
        return (*self.base.kernels, *(kernel for adapter in self.adapters for kernel in adapter.kernels))

    def forward(self, out: NodeListing, part: str) -> None:
        """In order."""
        for node in (self.base, *self.adapters):
            node.forward(out, part)

    def backward(self, out: NodeListing) -> None:
        """In reverse."""
        for node in (*reversed(self.adapters), self.base):
            node.backward(out)


def parted(kernels: Kernels) -> tuple[Kernels, dict[int, Kernels]]:
    """Kernels without those of adapters, and these by the ``id`` of the kernel that they stand behind."""
    plain: list[Kernel] = []
    beside: dict[int, Kernels] = {}
    for kernel in kernels:
        if product_beside(kernel.name):
            beside[id(plain[-1])] = (*beside.get(id(plain[-1]), ()), kernel)
        else:
            plain.append(kernel)
    return tuple(plain), beside


def adapted(nodes: Nodes, kernels: Kernels, share: LayerShares) -> Nodes:
    """Nodes of a group of products, the first of which has adapters of these ``kernels`` behind it.

    Raises :class:`ScenarioError` beside products that are cut neither by columns nor by rows.
    """
    base = nodes[0]
    if share.tp == 1:
        return (
            base,
            LocalKernels(getattr(base, "name", ""), tuple(local_kernel(k, share) for k in kernels)),
            *nodes[1:],
        )
    names = list(dict.fromkeys(product_beside(kernel.name) for kernel in kernels))
    cut = {kernel.cut for kernel in base.kernels}
    if not isinstance(base, ColumnLinears | RowLinears) or cut - {"column", "row"}:
        raise ScenarioError(
            f"tp = {share.tp}: an adapter beside {names[0]!r}, which is not cut by columns or rows, is not played; "
            "take it out of target_modules, or use tp = 1 (at $.model.adapter.target_modules)"
        )
    adapters = tuple(_local(base, tuple(k for k in kernels if product_beside(k.name) == name), share) for name in names)
    return (AdaptedLinears(base, adapters), *nodes[1:])


def _local(base: ColumnLinears | RowLinears, kernels: Kernels, share: LayerShares) -> LocalAdapter:
    """An adapter as one rank runs it. Its first product keeps the whole input where a column cut hands it over."""
    column = isinstance(base, ColumnLinears)
    down, up = (next(k for k in kernels if k.name.endswith(end)) for end in ("_A", "_B"))
    inputs, middle, outputs = (rows(down) * size / share.cp for size in (down.k, down.n, up.n))
    local = {k.name: local_kernel(k, share) for k in kernels}
    if column:
        local[down.name] = replace(local[down.name], saved=down.saved / share.cp)
    local[up.name] = replace(local[up.name], saved=up.saved / share.cp)
    *first, total = (local[k.name] for k in kernels[kernels.index(up) + 1 :])
    # The gradients of the input, the linear's and the adapter's, are added where both are.
    total = replace(total, backward_nbytes=3.0 * inputs / (1 if column else share.tp))
    ahead = tuple(local[k.name] for k in kernels[: kernels.index(down)])
    behind = (*first, total)
    return LocalAdapter(
        base.name, ahead, local[down.name], local[up.name], behind, inputs, middle, outputs, column, base.manner
    )
