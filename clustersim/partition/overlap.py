"""Products and tensor-parallel exchanges in pieces, so that they run beside each other.

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

``delay_wgrad_compute`` is Megatron's beside ``ep_overlap`` (core/models/common/model_chunk_schedule_plan.py): see
:func:`delayed`.

The list has the pieces as works and exchanges with their needs; how many SMs a copy takes is not told here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from clustersim.partition.base import Exchange, Item, Work
from clustersim.partition.nodes import SIZES, Kernels, Listing, copy, pieces

TP = ("tp",)
PARTED = "parted"
"""Name of the copy in front of a reduce_scatter that lays each rank's tokens together."""
PIPELINED = 4
"""Pieces of a product whose reduce_scatter is pipelined, Transformer Engine's ``num_splits``."""


@dataclass(frozen=True)
class Manner:
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
class Products:
    """Linears that tensor parallelism cuts. ``elements`` : of the whole tensor, input or output, per sample, of all its
    tokens on the rank's context-parallel part."""

    name: str
    kernels: Kernels
    elements: float
    manner: Manner


def gathered_products(out: Listing, of: Products, what: str, part: str) -> None:
    """Products of a tensor that arrives in a ring: the own piece first, then each one as it is there. ``what`` : name
    of the exchange.

    ``async_tp`` copies the own piece to where others may read it first (symmetric memory); the norm ahead writes to
    Transformer Engine's user buffer itself, and its products of one input are one.
    """
    tp, size, dtype = of.manner.tp, of.elements / of.manner.tp, of.manner.gathered
    staged = of.manner.overlap == "async_tp"
    kernels = of.kernels if staged else joined(of.kernels)
    parts = list(zip(*(pieces(kernel, tp) for kernel in kernels), strict=True))
    if staged:
        out.work(of.name, (copy("staged", size, size),), part)
    before = out.waiting
    steps: list[int] = []
    for i in range(1, tp):
        # What is sent on is what has come.
        needs = tuple(steps[-1:]) or before
        sent = Exchange(f"{what} {i} of {tp - 1}", "copies", TP, size, part, needs, dtype, communicator="tp ring")
        steps.append(out.beside(sent))
    out.work(of.name, parts[0], part)
    for step, piece in zip(steps, parts[1:], strict=True):
        out.wait_for(step)
        out.work(of.name, piece, part)


def joined(kernels: Kernels) -> Kernels:
    """Products of one input as one, like Megatron's ``linear_qkv`` and ``linear_fc1``; others stay apart.

    >>> from clustersim.models.kernels import linear
    >>> [(one.name, one.n) for one in joined((linear("gate", 8, 4, 6), linear("up", 8, 4, 6)))]
    [('gate', 12)]
    """
    first = kernels[0]
    if any((one.kind, one.batch, one.m, one.k) != ("gemm", 0, first.m, first.k) for one in kernels):
        return kernels
    added: Any = {name: sum(getattr(one, name) for one in kernels) for name in ("n", *SIZES)}
    return (replace(first, **added),)


def reduced_products(out: Listing, of: Products, what: str, part: str) -> None:
    """Products in pieces, each piece's sum on its way while the next is computed: with ``async_tp`` t pieces, each but
    the own one copied to the rank that sums it; otherwise reduce_scatters of 4 pieces."""
    ring = of.manner.overlap == "async_tp"
    count = of.manner.tp if ring else PIPELINED
    parts = list(zip(*(pieces(kernel, count) for kernel in of.kernels), strict=True))
    sent = []
    for i, piece in enumerate(parts):
        out.work(of.name, piece, part)
        if ring and i == count - 1:
            break
        label, kind = f"{what} {i + 1} of {count}", "copies" if ring else "reduce_scatter"
        communicator = "tp ring" if ring else ""
        sent.append(out.beside(Exchange(label, kind, TP, of.elements / count, part, communicator=communicator)))
    out.wait_for(*sent)
    if ring:  # the sum of what came from every rank
        out.work(of.name, (copy("partial sums", of.elements, of.elements / of.manner.tp),), part)


def delayed(items: tuple[Item, ...]) -> tuple[Item, ...]:
    """Backward with its weight gradients later: those of attention behind the layer, the others beside the exchange
    that follows their input gradient, which takes gradients of tokens home from their experts.

    Megatron moves those of the first layer of a chunk on, behind the message to the stage before; here they precede it.
    """
    moved = {i: _later(items, i) for i, item in enumerate(items) if isinstance(item, Work) and item.part == "W"}
    order = sorted(range(len(items)), key=lambda i: (moved.get(i, i), i in moved, i))
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        msgspec.structs.replace(items[i], needs=tuple(sorted(place[n] for n in items[i].needs))) for i in order
    )


def _later(items: tuple[Item, ...], at: int) -> int:
    """Behind which item a weight gradient goes: the last exchange before the next input gradient, or the list."""
    if "attention" in items[at].name.split("+"):
        return len(items)
    following = (i for i in range(at + 1, len(items)) if isinstance(items[i], Work) and items[i].part != "W")
    return next(following, len(items)) - 1
