"""Rings that RCCL has in tables for AMD's machines: of a full mesh, those that load every link alike.

RCCL does not search for the rings of a machine that it knows: its models of eight GPUs with a link to each other
(rccl src/graph/rome_models.cc, models 79 and 81) list 14 rings on one node, which cross every link twice each way, and
on several nodes eight, each entering at one GPU's NIC and leaving at another's, which cross every link once. Both
follow from the zigzag 0, 1, -1, 2, -2, ... by which Walecki splits a complete graph (Alspach, The wonderful Walecki
construction, 2008).
"""

from __future__ import annotations

from functools import lru_cache

Order = tuple[int, ...]

EIGHT_DIES: tuple[Order, ...] = (
    (0, 1, 3, 2, 4, 5, 7, 6),
    (0, 6, 7, 5, 4, 2, 3, 1),
    (0, 1, 5, 4, 6, 7, 3, 2),
    (0, 2, 3, 7, 6, 4, 5, 1),
)
"""RCCL's rings of four MI250X, of two dies each (model 52): two orders, each both ways."""


def zigzag(n: int, first: int) -> Order:
    """The path first, first + 1, first - 1, first + 2, ... modulo ``n``; of an even ``n`` it ends at first + n / 2.

    Those of all first members of an even ``n`` cross every pair of members once each way.
    """
    return tuple((first + (step // 2 + 1 if step % 2 else -(step // 2))) % n for step in range(n))


@lru_cache(maxsize=64)
def closed_rings(n: int) -> tuple[Order, ...]:
    """2 (n - 1) rings of an even number of members, which cross every pair of them twice each way.

    One member joins both ends of a zigzag of the others, which goes round with the turns.
    """
    around = [(n - 1, *zigzag(n - 1, turn)) for turn in range(n - 1)]
    return tuple(ring for order in around for ring in (order, order[:1] + order[:0:-1]))
