"""Chains: ops one after another of which nothing but the next waits for any but the last.

A micro-batch's pass through a stage is hundreds of kernels and collectives of the same groups. Whoever replays a run
with other durations can go through such a chain at once: a collective's members end together, so from its first to its
last what each group adds is the slowest member's kernels between two of them, and the collectives' own seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints

ALONE = -1
COMPUTES = 0
"""What an op is for a chain: in none, for others meet in it or not everybody does it; or a kernel. What is more is the
number of who meets whom in a collective."""
FEW = 8
"""Needs of an op that are told apart: of many it is not asked which of them have waited for which."""
AT_ONCE = 2**16
"""Spans of a chain at most: those are looked at together, once for each knob."""


class ChainSeconds(msgspec.Struct, frozen=True, eq=False):
    """What a chain takes [s] in k replays: ``before`` its first collective, (k, r); from the begin of that to the end
    of the last, ``inside``, (k, m) of each meeting; ``behind`` it, (k, r). Without collectives all is ``before``."""

    before: Floats
    inside: Floats
    behind: Floats


def chains(
    needs: Sequence[tuple[int, ...]], apart: Mapping[int, Collection[int]], sorts: Ints, steps: Ints, size: Ints
) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Chains of two ops and more, and what each op waits for without those needs that another of its needs has.

    needs : per op, what it waits for. apart : what some ops may wait for instead: they begin chains. sorts, steps,
    size : (n_ops,) int, what each op is for a chain (:data:`ALONE`), its step, and how many ranks do it.
    """
    straight, latest = _straight(needs, apart, sorts, steps, size)
    waits = np.fromiter((need for own in (*latest, *apart.values()) for need in own), dtype=np.int64)
    once = (np.bincount(waits, minlength=len(needs)) == 1).tolist()
    pieces = []
    for chain in straight:
        piece = [chain[0]]
        for before, op in pairwise(chain):
            if not once[before]:  # others wait for it, too
                pieces.append(piece)
                piece = []
            piece.append(op)
        pieces.append(piece)
    return [piece for piece in pieces if len(piece) > 1], latest


def _straight(
    needs: Sequence[tuple[int, ...]], apart: Mapping[int, Collection[int]], sorts: Ints, steps: Ints, size: Ints
) -> tuple[list[list[int]], list[tuple[int, ...]]]:
    """Ops each of which waits for the one before it alone, or for others that this one has waited for; whoever else
    waits for them. And what each op waits for without what is waited for anyway."""
    chain_of: list[list[int] | None] = [None] * len(needs)
    met: dict[int, int] = {}
    straight: list[list[int]] = []
    latest: list[tuple[int, ...]] = []
    always: list[tuple[int, ...]] = []  # what it waits for in every replay
    longest = (AT_ONCE // np.maximum(size, 1)).tolist()
    for op, (own, sort, step) in enumerate(zip(needs, sorts.tolist(), steps.tolist(), strict=True)):
        if 1 < len(own) <= FEW:
            own = tuple([need for need in own if not any(_earlier(need, other, chain_of, always) for other in own)])
        latest.append(own)
        always.append(tuple([need for need in own if need in apart[op]]) if op in apart else own)
        if sort < COMPUTES:
            continue
        chain = chain_of[own[0]] if len(own) == 1 and op not in apart else None
        if (
            chain is not None
            and chain[-1] == own[0]
            and steps.item(own[0]) == step
            and len(chain) < longest[op]
            and (sort == COMPUTES or met[chain[0]] in {COMPUTES, sort})
        ):
            chain.append(op)
            met[chain[0]] = max(met[chain[0]], sort)
        else:
            chain = [op]
            met[op] = sort
            straight.append(chain)
        chain_of[op] = chain
    return straight, latest


def _earlier(need: int, other: int, chain_of: Sequence[list[int] | None], always: Sequence[tuple[int, ...]]) -> bool:
    """Whether it is known that another op has waited for one: in its chain, or where that begins."""
    if other <= need or other >= len(always):
        return False
    own = chain_of[need]
    chain = chain_of[other]
    if chain is not None and chain is own:
        return True
    begun = always[other if chain is None else chain[0]]
    return any(first == need or (own is not None and chain_of[first] is own and first > need) for first in begun)


def chain_seconds(computes: Floats, transfers: Floats, talks: Bools, met: tuple[Ints, Ints]) -> ChainSeconds:
    """A chain's seconds.

    computes : (c, k, r) float [s], of its kernels. transfers : (t, k, m) float [s], of its collectives.
    talks : (c + t,) bool, which of its ops are collectives. met : of them, who comes, (r,) int, by meeting, and where
        each meeting begins, (m,).
    """
    place, first = met
    parts = np.zeros((len(transfers) + 1, *computes.shape[1:]))
    part_of = np.cumsum(talks)[~talks]
    if len(part_of):
        begins = np.flatnonzero(np.diff(part_of, prepend=-1))
        parts[part_of[begins]] = np.add.reduceat(computes, begins, axis=0)
    if not len(transfers):
        return ChainSeconds(parts[0], parts[0, :, :0], parts[0])
    slowest = np.maximum.reduceat(parts[1:-1][..., place], first, axis=-1)
    return ChainSeconds(parts[0], transfers.sum(axis=0) + slowest.sum(axis=0), parts[-1])
