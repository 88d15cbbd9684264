"""Tensor and sequence parallelism: exchanges follow from how neighbouring kernels are cut.

Megatron-LM core/tensor_parallel/{layers,mappings}.py; Korthikanti et al., arXiv:2205.05198 s4.2.2. In front of products
cut by columns: an all_gather of the tokens with sequence parallelism, nothing without; behind one cut by rows: a
reduce_scatter, or an all_reduce. Backward mirrors them, and with sequence parallelism gathers the columns' input once
more, of which only a shard was kept: 6 all_gathers and 4 reduce_scatters a block, or 4 all_reduces.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from clustersim.model import Kernel
from clustersim.partition import overlap
from clustersim.partition.base import Exchange
from clustersim.partition.listing import Listing
from clustersim.partition.nodes import Kernels, copy

TP = ("tp",)
PARTED = "parted"
"""Name of the copy in front of a reduce_scatter that lays each rank's tokens together."""


@dataclass(frozen=True)
class Manner:
    """How tensor-parallel exchanges are played.

    Parameters
    ----------
    tp : ranks. sequence_parallel : all_gather and reduce_scatter in all_reduce's place.
    overlap : ``none``, ``bulk``, ``userbuffers`` or ``async_tp``, see :mod:`clustersim.partition.overlap`.
    beside_weights : without sequence parallelism, backward's all_reduce runs beside the weight gradient.
    gathers_again : with it, the columns' gathered input is not kept but gathered once more for the weight gradient
        (Megatron-LM's autograd function); PyTorch's DTensor keeps it, as any linear keeps its input.
    copies_shards : collectives cut tensors along the first dimension, DTensor's sequence is the second: what was
        gathered is put together, and what is reduced taken apart, by a copy (torch.chunk and torch.cat in
        torch/distributed/_functional_collectives.py).
    gathered : type of the elements that all_gathers carry; the activations' own when None.
    """

    tp: int
    sequence_parallel: bool = False
    overlap: str = "none"
    beside_weights: bool = True
    gathers_again: bool = True
    copies_shards: bool = False
    gathered: str | None = None

    def gather(self, out: Listing, name: str, work: str, elements: float, part: str) -> None:
        """All tokens of every rank, in front of a product."""
        out.exchange(Exchange(name, "all_gather", TP, elements, part, dtype=self.gathered))
        if self.copies_shards:
            moved = elements / 2 if self.gathered else elements  # 8 bits in place of 16
            out.work(work, (copy("joined", moved, moved),), part)

    def scatter(self, out: Listing, name: str, work: str, elements: float, part: str) -> None:
        """The sum of all ranks' partial products, of each rank's tokens."""
        if self.copies_shards:
            out.work(work, (copy(PARTED, elements, elements),), part)
        out.exchange(Exchange(name, "reduce_scatter", TP, elements, part))

    @property
    def pipelined(self) -> bool:
        """Whether products are cut so that exchanges of the pieces run beside them."""
        return self.overlap in {"userbuffers", "async_tp"}


@dataclass(frozen=True)
class Columns:
    """Linears on one input, each with 1/t of its outputs on a rank (q, k and v; gate and up; logits).

    Parameters
    ----------
    elements : of the input per sample, of all its tokens on the rank's context-parallel part.
    """

    name: str
    kernels: Kernels
    elements: float
    manner: Manner

    def forward(self, out: Listing, part: str) -> None:
        """Gather the tokens, then the products."""
        name = f"{self.name} input"
        if self.manner.sequence_parallel and self.manner.pipelined:
            m, staged = self.manner, self.manner.overlap == "async_tp"
            of = overlap.Products(self.name, self.kernels, self.elements, m.tp)
            overlap.gathered_products(out, of, name, part, dtype=m.gathered, staged=staged)
            return
        if self.manner.sequence_parallel:
            self.manner.gather(out, name, self.name, self.elements, part)
        out.work(self.name, self.kernels, part)

    def backward(self, out: Listing) -> None:
        """Input gradient and its reduction, which runs beside the weight gradient.

        The input's second all_gather, where there is one, is issued first and runs beside the input gradient.
        """
        if not self.manner.sequence_parallel:
            self._all_reduced(out)
            return
        again: tuple[int, ...] = ()
        if self.manner.gathers_again:
            name = f"{self.name} input again"
            again = (out.beside(Exchange(name, "all_gather", TP, self.elements, "W")),)
        name = f"{self.name} input gradient"
        # Inductor finds a product in front of a reduce_scatter, and not the sum of several (q, k and v; gate and up).
        if self.manner.overlap == "async_tp" and len(self.kernels) == 1:
            of = overlap.Products(self.name, self.kernels, self.elements, self.manner.tp)
            overlap.reduced_products(out, of, name, "I", ring=True)
        else:
            out.work(self.name, self.kernels, "I")
            self.manner.scatter(out, name, self.name, self.elements, "I")
        out.work(self.name, self.kernels, "W", needs=again)

    def _all_reduced(self, out: Listing) -> None:
        out.work(self.name, self.kernels, "I")
        if not self.manner.beside_weights:
            out.work(self.name, self.kernels, "W")
        out.exchange(Exchange(f"{self.name} input gradient", "all_reduce", TP, self.elements, "I"))
        if self.manner.beside_weights:
            out.work(self.name, self.kernels, "W")


class Rows(msgspec.Struct, frozen=True):
    """A linear with 1/t of its inputs on a rank, or the lookup in 1/t of an embedding's rows: a partial sum.

    Parameters
    ----------
    elements : of the output per sample, of all its tokens on the rank's context-parallel part.
    """

    name: str
    kernels: tuple[Kernel]
    elements: float
    manner: Manner

    def forward(self, out: Listing, part: str) -> None:
        """The product, then its sum over ranks."""
        name, m = f"{self.name} output", self.manner
        if m.sequence_parallel and m.pipelined and self.kernels[0].kind == "gemm":
            ring = m.overlap == "async_tp"
            of = overlap.Products(self.name, self.kernels, self.elements, m.tp)
            overlap.reduced_products(out, of, name, part, ring=ring)
            return
        out.work(self.name, self.kernels, part)
        if m.sequence_parallel:
            m.scatter(out, name, self.name, self.elements, part)
        else:
            out.exchange(Exchange(name, "all_reduce", TP, self.elements, part))

    def backward(self, out: Listing) -> None:
        """The output's gradient, gathered with sequence parallelism and whole without, then the products."""
        name, m = f"{self.name} output gradient", self.manner
        if m.sequence_parallel and m.pipelined and self.kernels[0].kind == "gemm":
            staged = m.overlap == "async_tp"
            of = overlap.Products(self.name, self.kernels, self.elements, m.tp)
            overlap.gathered_products(out, of, name, "I", dtype=m.gathered, staged=staged)
        else:
            if m.sequence_parallel:
                m.gather(out, name, self.name, self.elements, "I")
            out.work(self.name, self.kernels, "I")
        out.work(self.name, self.kernels, "W")
