"""torchtitan's own way to experts, an ``all_to_all_single`` each way (torchtitan distributed/expert_parallel.py and
models/common/moe, 2025 and 2026), as exchanges and kernels in the order a rank issues them.

Counts go by an all_to_all ahead of the tokens, and the host reads both sides' splits. Weights stay at home. Rows are
picked by index, put back by index, and summed at home as products of one row in fp32. Under tensor parallelism a layer
gathers its tokens, and hands on partial sums that a reduce_scatter adds: the router sees them all on every rank, and
where experts are cut, too, so do ``ExpertTensorParallel``'s exchanges: each rank sends all of its position's rows.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel
from clustersim.training.partition.base import Exchange
from clustersim.training.partition.dispatch import EP, AllToAll, read_counts
from clustersim.training.partition.nodes import Kernels, LayoutChange, LocalKernels, NodeListing, Nodes, copy
from clustersim.training.partition.tensor import PARTED, TP, ExchangeStyle

PUT = 2.0
"""Passes of 16-bit elements that put rows where they belong, or pick them."""
SUMMED = (6.0, 7.0)
"""Passes, forward and backward, over the rows of all tokens: forward writes zeros (1), casts what was put among them to
fp32 (1 read, 2 written) and reads it for the product (2); backward writes its gradient in fp32 (2), reads the rows
again for the weights' (2) and casts (2 read, 1 written)."""
SORTED_BACK = 3.0
"""Of an index's gradient: zeros, and rows read and added to them."""


class TorchAllToAll(AllToAll, frozen=True):
    """Each copy of a token to its expert's position; ranks that cut the same experts exchange alike."""

    def prepare(self, out: NodeListing, part: str) -> None:
        """Counts of the own tokens for every expert, to those who have them."""
        s = self.spread
        if s.counted and s.ep > 1:
            size = float(s.mixture.experts)
            out.exchange(Exchange("tokens per expert", "all_to_all", EP, size, part, dtype="int64", per_sample=False))

    def there(self, out: NodeListing, part: str) -> None:
        """The host reads the splits; then hidden states go."""
        if self.spread.counted and self.spread.ep > 1:
            read_counts(out, part)
        self._swap(out, "dispatch", self.spread.mixture.row, part)

    def home(self, out: NodeListing, part: str) -> None:
        """Each row to its token: of cut experts a partial sum."""
        self._swap(out, "combine", self.spread.mixture.row, part, home=True)

    def gradient_there(self, out: NodeListing) -> None:
        """The adjoint of :meth:`home`."""
        self._swap(out, "combine gradient", self.spread.mixture.row, "I")

    def gradient_home(self, out: NodeListing) -> None:
        """The adjoint of :meth:`there`."""
        self._swap(out, "dispatch gradient", self.spread.mixture.row, "I", home=True)

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """Rows are sorted by index, also for one expert a rank, and put back by it."""
        s = self.spread
        if s.ep == 1:
            return (), ()
        elements = s.received * s.mixture.row
        there = Kernel(
            "sort_rows",
            "memory",
            nbytes=2.0 * elements,
            backward_nbytes=SORTED_BACK * elements,
            launches=1,
            backward_launches=2,
            cut="expert",
        )
        home = replace(there, name="unsort_rows", backward_nbytes=2.0 * elements, backward_launches=1)
        return (there,), (home,)


def summed(combine: Kernel, own: float, every: float) -> Kernel:
    """The kernel that sums rows: ``own`` elements that a rank got back, ``every`` of all tokens that it has seen."""
    forward, backward = (PUT * own + passes * every for passes in SUMMED)
    return replace(combine, nbytes=forward, backward_nbytes=backward)


def of_all_tokens(nodes: Nodes, elements: float, manner: ExchangeStyle) -> Nodes:
    """A mixture's nodes between the all_gather of its tokens over ``tp`` and the reduce_scatter of its partial sums.

    ``elements`` : of all tokens' hidden states, per sample.
    """
    moved = (copy("joined", elements, elements),) if manner.copies_shards else ()
    parted = (replace(moved[0], name=PARTED),) if moved else ()
    ahead = LayoutChange("moe input", ("all_gather", "reduce_scatter"), TP, elements)
    behind = LayoutChange("moe output", ("reduce_scatter", "all_gather"), TP, elements)
    return (ahead, LocalKernels("router", moved), *nodes, LocalKernels("moe", parted), behind)
