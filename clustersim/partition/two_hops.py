"""Tokens to their experts in two hops: one copy per node, then one per rank over NVLink (deepseek-ai/DeepEP)."""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.byte_matrix import ByteMatrix, byte_matrix
from clustersim.model import Kernel
from clustersim.partition.base import Exchange
from clustersim.partition.dispatch import EP, Spread, read_counts
from clustersim.partition.nodes import Kernels, Listing
from clustersim.partition.routing import distinct


class TwoHops(msgspec.Struct, frozen=True):
    """One copy of a token per node that wants it, to the GPU of the sender's place there, and from it one per rank.

    Both hops are one kernel that pipelines them, so the exchanges run beside each other. Weights travel inside.
    """

    spread: Spread
    by_sender: bool = False

    def prepare(self, out: Listing, part: str) -> None:
        """Nothing: the kernel itself exchanges counts."""

    def there(self, out: Listing, part: str) -> None:
        """Dispatch; DeepEP's host spins until counts are there, HybridEP's does not."""
        self._hops(out, "dispatch", part)
        if self.spread.counted and self.spread.backend == "deepep":
            read_counts(out, part)

    def home(self, out: Listing, part: str) -> None:
        """Combine: sums inside a node, then one row per node."""
        self._hops(out, "combine", part, home=True)

    def gradient_there(self, out: Listing) -> None:
        """A dispatch."""
        self._hops(out, "combine gradient", "I")

    def gradient_home(self, out: Listing) -> None:
        """A combine."""
        self._hops(out, "dispatch gradient", "I", home=True)

    def sorting(self, permute: Kernel, unpermute: Kernel) -> tuple[Kernels, Kernels]:
        """Rows of a rank's tokens are copied for each of its experts, and summed into them."""
        return (permute,), (unpermute,)

    def _hops(self, out: Listing, what: str, part: str, *, home: bool = False) -> None:
        s = self.spread
        if s.ep == 1:
            return
        width, before = s.tokens * s.mixture.hidden, out.waiting
        posted: list[int] = []
        for hop, (copies, matrix) in copies_of(s).items():
            way = byte_matrix(matrix.array.T.tolist()) if matrix is not None and home else matrix
            posted.append(
                out.beside(Exchange(f"{what} {hop}", "all_to_all", EP, width * copies, part, needs=before,
                    communicator=f"ep {hop}", matrix=way))
            )  # fmt: skip
        out.waiting = tuple(posted)


def copies_of(s: Spread) -> dict[str, tuple[float, ByteMatrix | None]]:
    """Copies of a token each hop carries, and between whom.

    Uniform choices of k experts fall into ``distinct`` ranks and nodes; busier positions get more in proportion. What
    a rank brings over its own NVLink from other nodes' ranks of its place, it hands on itself, so that each hands on as
    many copies as it sends.
    """
    m = s.mixture
    nodes = s.ep // s.per_node
    part = m.group_limit / m.groups if m.group_limit and nodes % m.groups == 0 else 1.0
    experts = round(m.experts * part)
    ranks = distinct(round(s.ep * part), experts, m.per_token)
    if nodes == 1:
        return {"nvlink": (ranks, s.routed.matrix)}
    load = np.array(s.routed.load or (1.0,) * s.ep)
    node, place = np.divmod(np.arange(s.ep), s.per_node)
    same = node[:, None] == node[None, :]
    near = np.where(same, load[None, :] / s.per_node, 0.0)
    of_node = np.bincount(node, load)[node] / s.per_node
    far = np.where(~same & (place[:, None] == place[None, :]), of_node[None, :] / (nodes - 1), 0.0)
    away = distinct(round(nodes * part), experts, m.per_token) * (nodes - 1) / nodes
    return {"rdma": (away, byte_matrix(far.tolist())), "nvlink": (ranks, byte_matrix(near.tolist()))}
