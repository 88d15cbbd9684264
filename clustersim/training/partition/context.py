"""Context parallelism: attention over sequences that are shared out, 1/c to each rank.

Transformer Engine pytorch/attention/dot_product_attention/context_parallel.py. Only attention needs the others' tokens;
everything else has 1/c of them. A causal sequence is cut in 2c chunks and rank r has r and 2c-1-r (``headtail``), so
that every ring step costs every rank the same: half of (s/c)^2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition.base import Exchange
from clustersim.training.partition.nodes import (
    ARITHMETIC,
    Kernels,
    LayerNode,
    LocalKernels,
    NodeListing,
    Nodes,
    NodeSequence,
    copy,
    scaled,
)
from clustersim.training.partition.share import LayerShares


class AttentionTensors(msgspec.Struct, frozen=True):
    """Elements per sample of a rank's queries, outputs, keys and values."""

    queries: float
    outputs: float
    keys: float
    values: float


def attention_node(name: str, kernel: Kernel, share: LayerShares, parallel: ParallelConfig, block: int) -> LayerNode:
    """Attention of one block as its context-parallel ranks play it.

    kernel : the rank's, with 1/c of the arithmetic. block : its number, for a list of ``cp_comm_type``.

    Raises :class:`ModelError` for attention that is not fused: scores in memory cannot be shared out like this.
    """
    if kernel.kind != "attention":
        raise ModelError(
            f"cp = {share.cp} needs fused attention, which can be merged step by step; the model has {kernel.name!r} "
            "as a kernel of its own (at $.model.attention)"
        )
    tensors = _tensors(kernel, share)
    pair = tensors.keys + tensors.values
    comm = parallel.cp_comm(block)
    c = share.cp
    uneven = kernel.causal and parallel.cp_load_balancer == "none"
    if comm == "all_gather" and parallel.framework == "torchtitan":
        return Stepwise(name, kernel, tensors.outputs, kernel.heads / share.local_kv_heads * pair, c, uneven)
    if comm == "all_gather":
        # With consecutive chunks the last rank sees all earlier ones: c^2 / 2 - (c - 1)^2 / 2 of c / 2 on average.
        return GatheredAttention(name, (scaled(kernel, (2 * c - 1) / c, ARITHMETIC) if uneven else kernel,), tensors, c)
    if comm == "p2p":
        return RingAttention(name, kernel, pair, c, ("cp",), uneven)
    if comm == "a2a":
        return SwappedHeads(name, LocalKernels(name, (_fewer_heads(kernel, c),)), tensors, ("cp",))
    inner, outer = parallel.hierarchical_context_parallel_sizes or (1, c)
    ring = RingAttention(name, _fewer_heads(kernel, inner), pair, outer, ("cp_p2p",), uneven)
    return SwappedHeads(name, ring, tensors, ("cp_a2a",))


def _fewer_heads(kernel: Kernel, ranks: int) -> Kernel:
    """Whole heads for each rank; where they do not divide (DeepSpeed lets them) ranks with one more set the pace."""
    heads = -(-kernel.heads // ranks)
    return scaled(kernel, heads * ranks / kernel.heads, ARITHMETIC, heads=heads)


def _tensors(kernel: Kernel, share: LayerShares) -> AttentionTensors:
    """Sizes from the kernel: it reads and writes ``seq (heads + kv heads) (head + value dimension)`` once."""
    tokens = kernel.seq / share.cp
    widths = kernel.nbytes / (tokens * (kernel.heads + share.local_kv_heads))
    value = widths - kernel.head_dim
    return AttentionTensors(
        tokens * kernel.heads * kernel.head_dim,
        tokens * kernel.heads * value,
        tokens * share.local_kv_heads * kernel.head_dim,
        tokens * share.local_kv_heads * value,
    )


class RingAttention(msgspec.Struct, frozen=True):
    """Keys and values go round while a rank attends to those it has (Ring Attention, arXiv:2310.01889).

    ``pair`` : elements of a rank's keys and values. ``uneven`` : a causal sequence in consecutive chunks, of which the
    last rank, whom all wait for, attends to each earlier one whole. The transfer of step i + 1 is issued before the
    i-th product and waits for the product before that, whose stream it is on (two compute streams, double buffering).
    """

    name: str
    kernel: Kernel
    pair: float
    ranks: int
    dims: tuple[str, ...]
    uneven: bool = False

    @property
    def kernels(self) -> Kernels:
        """A kernel for each step. The first has the diagonal; the others half a square with nothing masked."""
        c = self.ranks
        attention = self.kernel
        step = replace(
            attention,
            flops=attention.flops / c,
            backward_flops=attention.backward_flops / c,
            seq=attention.seq // c,
            saved=0.0,
        )
        later = scaled(step, 2 if self.uneven else 1, ARITHMETIC, causal=False)
        return (replace(step, saved=attention.saved), *(later,) * (c - 1))

    def forward(self, out: NodeListing, part: str) -> None:
        """c steps, c - 1 transfers."""
        c = self.ranks
        kernels = self.kernels
        before = out.waiting
        sent: list[int] = []
        for i in range(c):
            # Transfers 1 and 2 are on their way before the first product.
            while len(sent) < min(i + 2, c - 1):
                # What is sent on is what has come.
                needs = tuple(sent[-1:]) or before
                label = f"{self.name} keys and values {len(sent) + 1} of {c - 1}"
                sent.append(out.beside(Exchange(label, "ring", self.dims, self.pair, part, needs=needs)))
            out.wait_for(*sent[max(0, i - 1) : i])
            out.work(self.name, (kernels[i],), part)

    def backward(self, out: NodeListing) -> None:
        """c steps, c transfers: keys and values, then with their gradient so far, at last the gradient alone."""
        c = self.ranks
        kernels = self.kernels
        before = out.waiting
        sent: list[int] = []
        for i in range(c):
            size = self.pair * ((i < c - 1) + (i > 0))
            content = ("keys and values", "keys, values and gradients", "gradients")[(i > 0) + (i == c - 1 and i > 0)]
            needs = tuple(sent[-1:]) or before
            label = f"{self.name} {content} {i + 1} of {c}"
            sent.append(out.beside(Exchange(label, "ring", self.dims, size, "I", needs=needs)))
            out.wait_for(*sent[max(0, i - 1) : i])
            out.work(self.name, (kernels[c - 1 - i],), "I")
        out.wait_for(sent[-1])


class GatheredAttention(msgspec.Struct, frozen=True):
    """Keys and values of all ranks are gathered first (Llama 3, arXiv:2407.21783 s3.3.2)."""

    name: str
    kernels: Kernels
    tensors: AttentionTensors
    ranks: int

    def forward(self, out: NodeListing, part: str) -> None:
        """Two all_gathers, then one kernel for all of them."""
        self._exchange(out, "all_gather", "", part)
        out.work(self.name, self.kernels, part)

    def backward(self, out: NodeListing) -> None:
        """They are gathered again, and their gradients are summed where they belong."""
        self._exchange(out, "all_gather", " again", "I")
        out.work(self.name, self.kernels, "I")
        self._exchange(out, "reduce_scatter", " gradient", "I")

    def _exchange(self, out: NodeListing, kind: str, suffix: str, part: str) -> None:
        for name, elements in (("keys", self.tensors.keys), ("values", self.tensors.values)):
            out.exchange(Exchange(f"{self.name} {name}{suffix}", kind, ("cp",), elements * self.ranks, part))


class Stepwise(msgspec.Struct, frozen=True):
    """PyTorch's ``context_parallel``: keys and values of all ranks are gathered beside the first step, which needs the
    own ones alone; every step is a kernel of its own, and its outputs and gradients are summed up in fp32, op by op.
    Gradients of keys and values go round a ring in fp32, each transfer beside the next step.

    torch/distributed/tensor/experimental/_context_parallel/_attention.py, ``_templated_ring_attention``, _SDPAMerger.
    torchtitan copies keys and values out to all query heads before it (models/llama3/model.py, ``repeat_kv``).

    outputs, pair : elements of a rank's outputs, and of its keys and values as they are sent.
    """

    name: str
    kernel: Kernel
    outputs: float
    pair: float
    ranks: int
    uneven: bool = False

    @property
    def kernels(self) -> Kernels:
        """A kernel for each step."""
        return RingAttention(self.name, self.kernel, self.pair, self.ranks, ("cp",), self.uneven).kernels

    def forward(self, out: NodeListing, part: str) -> None:
        """c steps; each but the first is merged into what is there."""
        # Passes of 16 bits: cast 3, difference 6, product 4, difference 6; or of half the rows, joined again by 4.
        merged = copy("merged", 10.0 * self.outputs, 6.0 * self.outputs)
        for i, kernel in self._steps(out, "", part):
            out.work(self.name, (kernel, merged) if i else (kernel,), part)

    def backward(self, out: NodeListing) -> None:
        """c steps; sums of all three gradients, and those of keys and values joined to be sent."""
        read = 3.0 * (self.outputs + self.pair) + 2.0 * self.pair
        written = 2.0 * (self.outputs + 2.0 * self.pair)
        sent = -1
        for i, kernel in self._steps(out, " again", "I"):
            out.work(self.name, (kernel,), "I")
            if i:
                out.wait_for(sent)
            out.work(self.name, (copy("summed", read, written),), "I")
            label = f"{self.name} gradients {i + 1} of {self.ranks}"
            sent = out.beside(Exchange(label, "ring", ("cp",), self.pair, "I", dtype="fp32"))
        out.wait_for(sent)

    def _steps(self, out: NodeListing, suffix: str, part: str) -> Iterator[tuple[int, Kernel]]:
        label = f"{self.name} keys and values{suffix}"
        size = self.pair * self.ranks
        gathered = out.beside(Exchange(label, "all_gather", ("cp",), size, part, needs=out.waiting))
        for i, kernel in enumerate(self.kernels):
            if i == 1:
                out.wait_for(gathered)
            yield i, kernel


class SwappedHeads(msgspec.Struct, frozen=True):
    """Heads for tokens: each rank attends with 1/c of the heads to the whole sequence (Ulysses, arXiv:2309.14509)."""

    name: str
    inside: LayerNode
    tensors: AttentionTensors
    dims: tuple[str, ...]

    @property
    def kernels(self) -> Kernels:
        """Those inside."""
        return self.inside.kernels

    def forward(self, out: NodeListing, part: str) -> None:
        """Queries, keys and values in, outputs back."""
        t = self.tensors
        self._swap(out, {"queries": t.queries, "keys": t.keys, "values": t.values}, part)
        self.inside.forward(out, part)
        self._swap(out, {"output": t.outputs}, part)

    def backward(self, out: NodeListing) -> None:
        """The mirror."""
        self.attended(out)
        self._swap(out, self._gradients(), "I")

    def attended(self, out: NodeListing) -> None:
        """Backward up to the gradients of queries, keys and values of all tokens and a few heads."""
        self._swap(out, {"output gradient": self.tensors.outputs}, "I")
        self.inside.backward(out)

    def sent_home(self, out: NodeListing) -> tuple[int, ...]:
        """Those gradients on their way, values first, then keys and queries, which nothing waits for yet."""
        names = self._gradients()
        self._swap(out, {"value gradient": names.pop("value gradient")}, "I")
        return tuple(
            out.beside(Exchange(f"{self.name} {name}", "all_to_all", self.dims, elements, "I"))
            for name, elements in reversed(names.items())
        )

    def _gradients(self) -> dict[str, float]:
        t = self.tensors
        return {"query gradient": t.queries, "key gradient": t.keys, "value gradient": t.values}

    def _swap(self, out: NodeListing, named: dict[str, float], part: str) -> None:
        for name, elements in named.items():
            out.exchange(Exchange(f"{self.name} {name}", "all_to_all", self.dims, elements, part))


@dataclass(frozen=True)
class Ulysses(NodeSequence):
    """Products that make queries, keys and values, and an attention whose gradients come home beside their backward:
    DeepSpeed's ``sp_overlap_comm`` (deepspeed/sequence/layer.py).

    Autograd runs the last product of forward first: gradients of values are awaited at once, those of keys and queries
    where their own products begin, or what is between (rotation), which needs both.
    """

    projections: LocalKernels
    attention: SwappedHeads

    def backward(self, out: NodeListing) -> None:
        """See above."""
        name, (q, k, v), between = self.projections.name, self.projections.kernels, self.nodes[1:-1]
        self.attention.attended(out)
        sent = self.attention.sent_home(out)
        LocalKernels(name, (v,)).backward(out)
        if between:
            out.wait_for(*sent)
            sent = ()
        NodeSequence(between).backward(out)
        for i, kernel in enumerate((k, q)):
            out.wait_for(*sent[i : i + 1])
            LocalKernels(name, (kernel,)).backward(out)


def coming_home_beside(nodes: Nodes) -> Nodes:
    """A layer's nodes, with its attention a :class:`Ulysses` where queries, keys and values have a product each."""
    swap_place = next((i for i, node in enumerate(nodes) if isinstance(node, SwappedHeads)), None)
    projection_places = [
        i for i, node in enumerate(nodes[:swap_place]) if {"q", "k", "v"} == {kernel.name for kernel in node.kernels}
    ]
    if swap_place is None or not projection_places:
        return nodes
    projections = nodes[projection_places[-1]]
    attention = nodes[swap_place]
    if not (isinstance(projections, LocalKernels) and isinstance(attention, SwappedHeads)):
        return nodes
    first = projection_places[-1]
    return (*nodes[:first], Ulysses(nodes[first : swap_place + 1], projections, attention), *nodes[swap_place + 1 :])
