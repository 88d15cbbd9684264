"""Tensor and sequence parallelism: exchanges follow from how neighbouring kernels are cut.

Megatron-LM core/tensor_parallel/{layers,mappings}.py; Korthikanti et al., arXiv:2205.05198 s4.2.2. In front of products
cut by columns: an all_gather of the tokens with sequence parallelism, nothing without; behind one cut by rows: a
reduce_scatter, or an all_reduce. Backward mirrors them, and with sequence parallelism gathers the columns' input once
more, of which only a shard was kept: 6 all_gathers and 4 reduce_scatters a block, or 4 all_reduces.
"""

from __future__ import annotations

from clustersim.partition.base import Exchange
from clustersim.partition.nodes import Listing
from clustersim.partition.overlap import TP, Products, gathered_products, reduced_products


class Columns(Products):
    """Linears on one input, each with 1/t of its outputs on a rank (q, k and v; gate and up; logits)."""

    def forward(self, out: Listing, part: str) -> None:
        """Gather the tokens, then the products."""
        name = f"{self.name} input"
        if self.manner.sequence_parallel and self.manner.pipelined:
            gathered_products(out, self, name, part)
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
            reduced_products(out, self, name, "I")
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


class Rows(Products):
    """A linear with 1/t of its inputs on a rank, or the lookup in 1/t of an embedding's rows: a partial sum."""

    def forward(self, out: Listing, part: str) -> None:
        """The product, then its sum over ranks."""
        name, m = f"{self.name} output", self.manner
        if m.sequence_parallel and m.pipelined and self.kernels[0].kind == "gemm":
            reduced_products(out, self, name, part)
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
            gathered_products(out, self, name, "I")
        else:
            if m.sequence_parallel:
                m.gather(out, name, self.name, self.elements, "I")
            out.work(self.name, self.kernels, "I")
        out.work(self.name, self.kernels, "W")
