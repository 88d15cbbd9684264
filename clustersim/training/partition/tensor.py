"""Tensor and sequence parallelism: exchanges follow from how neighbouring kernels are cut.

Megatron-LM core/tensor_parallel/{layers,mappings}.py; Korthikanti et al., arXiv:2205.05198 s4.2.2. In front of products
cut by columns: an all_gather of the tokens with sequence parallelism, nothing without; behind one cut by rows: a
reduce_scatter, or an all_reduce. Backward mirrors them, and with sequence parallelism gathers the columns' input once
more, of which only a shard was kept: 6 all_gathers and 4 reduce_scatters a block, or 4 all_reduces.

Products and exchanges may be cut in pieces, so that they run beside each other. The list has the pieces as works and
exchanges with their needs; how many SMs a copy takes is not told here.

``userbuffers`` is Transformer Engine's ``tp_comm_overlap`` with Megatron's defaults (pytorch/module/base.py): the
all_gathers in front of qkv and fc1, and of the gradients in front of proj's and fc2's input gradients, as ring
exchanges (t products, t - 1 point-to-point steps that the copy engine makes); the reduce_scatters behind proj and fc2
pipelined with the product in 4 pieces, of which the last one's stays exposed. Its "bulk" pairs (an all_gather beside
the input gradient's product, a reduce_scatter beside the weight gradient's) are what is issued without it too.

``async_tp`` is PyTorch's micro-pipelining over symmetric memory (``_symmetric_memory.py``: ``fused_all_gather_matmul``
and ``fused_matmul_reduce_scatter``): both kinds are t pieces with t - 1 point-to-point copies, also behind the input
gradients of a column that is the only one to read its input: what several read has a sum of products for its gradient,
which torch/_inductor/fx_passes/micro_pipeline_tp.py leaves to NCCL. What t ranks sent is summed at the end. Copy
engines make the copies, beside the SMs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from clustersim.training.partition.base import Exchange
from clustersim.training.partition.nodes import SIZES, Kernels, NodeListing, copy, pieces

TP = ("tp",)
PARTED = "parted"
"""Name of the copy in front of a reduce_scatter that lays each rank's tokens together."""
PIPELINED = 4
"""Pieces of a product whose reduce_scatter is pipelined, Transformer Engine's ``num_splits``."""


@dataclass(frozen=True)
class ExchangeStyle:
    """How tensor-parallel exchanges are played.

    Parameters
    ----------
    tp : ranks. sequence_parallel : all_gather and reduce_scatter in all_reduce's place.
    overlap : ``none``, ``bulk``, ``userbuffers`` or ``async_tp``, see above.
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


@dataclass(frozen=True)
class Products:
    """Linears that tensor parallelism cuts. ``elements`` : of the whole tensor, input or output, per sample, of all its
    tokens on the rank's context-parallel part."""

    name: str
    kernels: Kernels
    elements: float
    manner: ExchangeStyle

    @property
    def pipelined(self) -> bool:
        """Whether they are cut so that exchanges of the pieces run beside them."""
        return self.manner.overlap in {"userbuffers", "async_tp"} and self.kernels[0].kind == "gemm"

    def gathered(self, out: NodeListing, exchange_name: str, part: str) -> None:
        """Products of a tensor whose tokens are gathered first, with sequence parallelism; ``exchange_name`` : its
        name."""
        m = self.manner
        if m.sequence_parallel and self.pipelined:
            self._in_a_ring(out, exchange_name, part)
            return
        if m.sequence_parallel:
            out.exchange(Exchange(exchange_name, "all_gather", TP, self.elements, part, dtype=m.gathered))
            if m.copies_shards:
                moved = self.elements / 2 if m.gathered else self.elements  # 8 bits in place of 16
                out.work(self.name, (copy("joined", moved, moved),), part)
        out.work(self.name, self.kernels, part)

    def _in_a_ring(self, out: NodeListing, exchange_name: str, part: str) -> None:
        """The own piece first, then each one as it is there.

        ``async_tp`` copies the own piece to where others may read it first (symmetric memory); the norm ahead writes to
        Transformer Engine's user buffer itself, and its products of one input are one.
        """
        m = self.manner
        size = self.elements / self.manner.tp
        staged = self.manner.overlap == "async_tp"
        kernels = self.kernels if staged else joined(self.kernels)
        parts = list(zip(*(pieces(kernel, m.tp) for kernel in kernels), strict=True))
        if staged:
            out.work(self.name, (copy("staged", size, size),), part)
        before = out.waiting
        steps: list[int] = []
        for i in range(1, m.tp):
            # What is sent on is what has come.
            needs = tuple(steps[-1:]) or before
            label = f"{exchange_name} {i} of {m.tp - 1}"
            sent = Exchange(label, "copies", TP, size, part, needs, m.gathered, communicator="tp ring")
            steps.append(out.beside(sent))
        out.work(self.name, parts[0], part)
        for step, piece in zip(steps, parts[1:], strict=True):
            out.wait_for(step)
            out.work(self.name, piece, part)

    def scattered(self, out: NodeListing, exchange_name: str, part: str, *, in_pieces: bool) -> None:
        """Products, and the sum of all ranks' partial ones, of each rank's tokens."""
        if in_pieces:
            self._piece_by_piece(out, exchange_name, part)
            return
        out.work(self.name, self.kernels, part)
        if self.manner.copies_shards:
            out.work(self.name, (copy(PARTED, self.elements, self.elements),), part)
        out.exchange(Exchange(exchange_name, "reduce_scatter", TP, self.elements, part))

    def _piece_by_piece(self, out: NodeListing, exchange_name: str, part: str) -> None:
        """Each piece's sum on its way while the next is computed: with ``async_tp`` t pieces, each but the own one
        copied to the rank that sums it; otherwise reduce_scatters of 4 pieces."""
        ring = self.manner.overlap == "async_tp"
        tp = self.manner.tp
        count = tp if ring else PIPELINED
        kind, communicator = ("copies", "tp ring") if ring else ("reduce_scatter", "")
        sent = []
        for i, piece in enumerate(zip(*(pieces(kernel, count) for kernel in self.kernels), strict=True)):
            out.work(self.name, piece, part)
            if ring and i == count - 1:
                break
            size = self.elements / count
            label = f"{exchange_name} {i + 1} of {count}"
            sent.append(out.beside(Exchange(label, kind, TP, size, part, communicator=communicator)))
        out.wait_for(*sent)
        if ring:  # the sum of what came from every rank
            out.work(self.name, (copy("partial sums", self.elements, self.elements / tp),), part)


def joined(kernels: Kernels) -> Kernels:
    """Products of one input as one, like Megatron's ``linear_qkv`` and ``linear_fc1``; others stay apart.

    >>> from clustersim.model.kernels import linear
    >>> [(one.name, one.n) for one in joined((linear("gate", 8, 4, 6), linear("up", 8, 4, 6)))]
    [('gate', 12)]
    """
    first = kernels[0]
    if any((kernel.kind, kernel.batch, kernel.m, kernel.k) != ("gemm", 0, first.m, first.k) for kernel in kernels):
        return kernels
    added: Any = {name: sum(getattr(kernel, name) for kernel in kernels) for name in ("n", *SIZES)}
    return (replace(first, **added),)


class ColumnLinears(Products):
    """Linears on one input, each with 1/t of its outputs on a rank (q, k and v; gate and up; logits)."""

    def forward(self, out: NodeListing, part: str) -> None:
        """Gather the tokens, then the products."""
        self.gathered(out, f"{self.name} input", part)

    def backward(self, out: NodeListing) -> None:
        """Input gradient and its reduction, which runs beside the weight gradient.

        The input's second all_gather, where there is one, is issued first and runs beside the input gradient. Weights
        that are frozen need no input (Megatron-LM tensor_parallel/layers.py, ``LinearWithFrozenWeight``), and an input
        that nothing trained is in front of needs no gradient.
        """
        m = self.manner
        if not any("I" in kernel.halves for kernel in self.kernels):
            out.work(self.name, self.kernels, "I")
            return
        trained = any("W" in kernel.halves for kernel in self.kernels)
        name = f"{self.name} input gradient"
        again: tuple[int, ...] = ()
        if m.sequence_parallel:
            if m.gathers_again and trained:
                again = (out.beside(Exchange(f"{self.name} input again", "all_gather", TP, self.elements, "W")),)
            # Inductor finds a product in front of a reduce_scatter, and not the sum of several (q, k and v; gate, up).
            self.scattered(out, name, "I", in_pieces=m.overlap == "async_tp" and len(self.kernels) == 1)
        else:
            out.work(self.name, self.kernels, "I")
            if not m.beside_weights:
                out.work(self.name, self.kernels, "W")
            out.exchange(Exchange(name, "all_reduce", TP, self.elements, "I"))
        if m.sequence_parallel or m.beside_weights:
            out.work(self.name, self.kernels, "W", needs=again)


class RowLinears(Products):
    """A linear with 1/t of its inputs on a rank, or the lookup in 1/t of an embedding's rows: a partial sum."""

    def forward(self, out: NodeListing, part: str) -> None:
        """The product, then its sum over ranks."""
        name = f"{self.name} output"
        if self.manner.sequence_parallel:
            self.scattered(out, name, part, in_pieces=self.pipelined)
        else:
            out.work(self.name, self.kernels, part)
            out.exchange(Exchange(name, "all_reduce", TP, self.elements, part))

    def backward(self, out: NodeListing) -> None:
        """The output's gradient, gathered with sequence parallelism and whole without, then the products."""
        self.gathered(out, f"{self.name} output gradient", "I")
        out.work(self.name, self.kernels, "W")
