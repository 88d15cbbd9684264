"""DeepSpeed's ``sp_overlap_comm``: Ulysses' gradients come home beside the products behind queries, keys and values
(deepspeed/sequence/layer.py)."""

from __future__ import annotations

import msgspec

from clustersim.partition.context import Swapped
from clustersim.partition.nodes import Kernels, Listing, Local, Nodes


class Ulysses(msgspec.Struct, frozen=True):
    """Products that make queries, keys and values, and an attention whose gradients come home beside their backward.

    Autograd runs the last product of forward first: gradients of values are awaited at once, those of keys and queries
    where their own products begin, or what is between (rotation), which needs both.
    """

    projections: Local
    between: Nodes
    attention: Swapped

    @property
    def kernels(self) -> Kernels:
        """All of them."""
        nodes = (self.projections, *self.between, self.attention)
        return tuple(kernel for node in nodes for kernel in node.kernels)

    def forward(self, out: Listing, part: str) -> None:
        """In order."""
        for node in (self.projections, *self.between, self.attention):
            node.forward(out, part)

    def backward(self, out: Listing) -> None:
        """See above."""
        name, (q, k, v) = self.projections.name, self.projections.kernels
        self.attention.attended(out)
        sent = self.attention.sent_home(out)
        Local(name, (v,)).backward(out)
        if self.between:
            out.wait_for(*sent)
            sent = ()
        for node in reversed(self.between):
            node.backward(out)
        for i, kernel in enumerate((k, q)):
            out.wait_for(*sent[i : i + 1])
            Local(name, (kernel,)).backward(out)


def coming_home_beside(nodes: Nodes) -> Nodes:
    """A layer's nodes, with its attention a :class:`Ulysses` where queries, keys and values have a product each."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node, Swapped)), None)
    made = [i for i, node in enumerate(nodes[:at]) if {"q", "k", "v"} == {kernel.name for kernel in node.kernels}]
    if at is None or not made:
        return nodes
    projections, attention = nodes[made[-1]], nodes[at]
    if not (isinstance(projections, Local) and isinstance(attention, Swapped)):
        return nodes
    return (*nodes[: made[-1]], Ulysses(projections, nodes[made[-1] + 1 : at], attention), *nodes[at + 1 :])
