"""Trees from or to a root in rounds, one level after another: chains, binary, binomial and k-nomial trees, splits.

As Open MPI 4.1 builds them (ompi/mca/coll/base/coll_base_{topo,bcast,reduce,gather,scatter}.c). A member's number is
counted from the root; one that sends to two children sends one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from clustersim.collectives.base import Apart
from clustersim.collectives.exchanges import bruck, recursive_doubling, round_a_ring
from clustersim.collectives.rounds import Maker, Round, RoundSteps, powers_below, rounds_algorithm
from clustersim.core.arrays import Ints

Levels = list[tuple[Ints, Ints]]
"""(parents, children) of each round from the root outwards."""

RADIX = 4
"""Of the k-nomial tree (coll_tuned_bcast_algorithm_knomial_radix)."""

BOTH = frozenset({"broadcast", "reduce"})


def chain(n: int) -> Levels:
    """Everybody hands it to the next."""
    v = np.arange(n, dtype=np.int64)
    return [(v[i : i + 1], v[i + 1 : i + 2]) for i in range(n - 1)]


def binary(n: int) -> Levels:
    """Levels of 1, 2, 4, ...; member v of level l has the children v + 2^l and v + 2^(l+1)."""
    levels = []
    first = 0
    while 2 * first + 1 < n:
        width = first + 1  # members of the level, 2^l
        parent = np.tile(np.arange(first, first + width, dtype=np.int64), 2)
        child = parent + np.repeat([width, 2 * width], width)
        levels.append((parent[child < n], child[child < n]))
        first += width
    return levels


def in_order_binary(n: int) -> Levels:
    """A binary tree that keeps the order of members, so that reductions need not commute; its root is the last one."""
    levels: Levels = []
    level = [(0, n)] if n > 1 else []
    while level:
        edges = []
        following = []
        for low, size in level:
            top = low + size - 1
            half = size // 2
            for start, count in ((low + half, size - half - 1), (low, half)):
                if count:
                    edges.append((top, start + count - 1))
                    following.append((start, count))
        if edges:
            pairs = np.array(edges, dtype=np.int64)
            levels.append((pairs[:, 0], pairs[:, 1]))
        level = following
    return levels


def binomial(n: int) -> Levels:
    """Round k: the 2^k members that have it send to those 2^k further on."""
    v = np.arange(n, dtype=np.int64)
    return [(v[: min(b, n - b)], v[b : 2 * b]) for b in powers_below(n)]


def in_order_binomial(n: int) -> Levels:
    """Round k, the largest step first: every 2^(k+1)th member sends to the one 2^k further on, and its subtree."""
    v = np.arange(n, dtype=np.int64)
    return [(v[b :: 2 * b] - b, v[b :: 2 * b]) for b in reversed(powers_below(n))]


def knomial(n: int) -> Levels:
    """As the binomial tree with digits of base 4, the highest first."""
    levels = []
    mask = 1
    v = np.arange(n, dtype=np.int64)
    while mask < n:
        child = v[(v % (RADIX * mask) != 0) & (v % mask == 0)]
        levels.append((child // (RADIX * mask) * (RADIX * mask), child))
        mask *= RADIX
    return levels[::-1]


def _whole(shape: Callable[[int], Levels], *, in_order: bool = False) -> Maker:
    """All of S along every edge: outwards for broadcast, inwards and added for reduce.

    ``in_order``: members are not counted from the root, and the last one's sum moves on to it.
    """

    def make(kind: str, n: int, root: int) -> RoundSteps:
        """Its rounds: a level of the tree each, and where a rank order is kept, one more to the root."""
        shift = 0 if in_order else root
        levels = [((parent + shift) % n, (child + shift) % n) for parent, child in shape(n)]
        if kind == "broadcast":
            return RoundSteps(tuple(Round(*ends, 1.0, _all) for ends in levels), np.ones(1))
        rounds = [Round(child, parent, 1.0, _all, reduce=True) for parent, child in reversed(levels)]
        if in_order and root != n - 1:
            rounds.append(Round(np.array([n - 1]), np.array([root]), 1.0, _all))
        return RoundSteps(tuple(rounds), np.ones(1))

    return make


def _all(edge: int) -> Sequence[int]:
    return (0,)


def _binomial(kind: str, n: int, root: int) -> RoundSteps:
    """Whole tensors for broadcast and reduce; for scatter and gather the blocks of the child's subtree."""
    if kind == "broadcast":
        return _whole(binomial)(kind, n, root)
    if kind == "reduce":
        return _whole(in_order_binomial)(kind, n, root)
    outwards = _scattered(n, root)
    if kind == "gather":
        outwards = [replace(outward, src=outward.dst, dst=outward.src) for outward in reversed(outwards)]
    return RoundSteps(tuple(outwards), np.full(n, 1 / n))


def _scattered(n: int, root: int) -> list[Round]:
    """Blocks down the tree, each child those of its subtree; pieces are members."""
    rounds = []
    for parent, child in in_order_binomial(n):
        width = int((child - parent)[0])
        count = np.minimum(width, n - child)

        def pieces(edge: int, child: Ints = child, count: Ints = count) -> list[int]:
            """Blocks of the subtree that this edge leads to."""
            return [(int(child[edge]) + j + root) % n for j in range(int(count[edge]))]

        rounds.append(Round((parent + root) % n, (child + root) % n, count / n, pieces))
    return rounds


def _scatter_allgather(kind: str, n: int, root: int) -> RoundSteps:
    """A broadcast in blocks: scatter them, then gather by recursive doubling (Bruck's rounds beyond a power of two)."""
    rest = bruck("all_gather", n) if n & (n - 1) else recursive_doubling("all_gather", n)
    return RoundSteps((*_scattered(n, root), *rest.rounds), rest.pieces)


def _scatter_allgather_ring(kind: str, n: int, root: int) -> RoundSteps:
    """A broadcast in blocks: scatter them, then n - 1 rounds of a ring."""
    rest = round_a_ring(n)
    return RoundSteps((*_scattered(n, root), *rest.rounds), rest.pieces)


def _split_binary(kind: str, n: int, root: int) -> RoundSteps:
    """A half of S down each side of a binary tree, then pairs across trade; odd members are on the left side."""
    rounds = []
    for parent, child in binary(n):
        sides = (1 - child % 2).tolist()
        rounds.append(Round((parent + root) % n, (child + root) % n, 0.5, partial(lambda sides, e: [sides[e]], sides)))
    odd = np.arange(1, n - 1, 2, dtype=np.int64)
    src = np.concatenate([odd, odd + 1])
    dst = np.concatenate([odd + 1, odd])
    if n % 2 == 0:  # the last one has no pair but the root
        src = np.append(src, 0)
        dst = np.append(dst, n - 1)
    k = len(odd)
    halves = Round((src + root) % n, (dst + root) % n, 0.5, lambda e: [int(e >= k)])
    return RoundSteps((*rounds, halves), np.full(2, 0.5))


_TWO_CHILDREN = (
    Apart(frozenset({"reduce"}), 0.05, "children of a round that begin at different times share their parent's link"),
)
BINOMIAL = rounds_algorithm("binomial", BOTH | {"scatter", "gather"}, _binomial)
TREES = (
    rounds_algorithm("chain", BOTH, _whole(chain)),
    rounds_algorithm("binary", BOTH, _whole(binary), _TWO_CHILDREN),
    rounds_algorithm("in_order_binary", frozenset({"reduce"}), _whole(in_order_binary, in_order=True), _TWO_CHILDREN),
    BINOMIAL,
    rounds_algorithm("knomial", frozenset({"broadcast"}), _whole(knomial)),
    rounds_algorithm("split_binary", frozenset({"broadcast"}), _split_binary),
    rounds_algorithm("scatter_allgather", frozenset({"broadcast"}), _scatter_allgather),
    rounds_algorithm("scatter_allgather_ring", frozenset({"broadcast"}), _scatter_allgather_ring),
)
