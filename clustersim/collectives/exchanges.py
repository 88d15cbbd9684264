"""Exchanges between all members in rounds: recursive doubling, Rabenseifner's halving, butterfly, Bruck, neighbours.

As Open MPI 4.1 runs them (ompi/mca/coll/base/coll_base_{allreduce,allgather,reduce,reduce_scatter_block,alltoall}.c).
Beyond a power of two, p, the first 2r of n = p + r members pair up: one of each pair hands over its tensor and waits.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from clustersim.collectives.rounds import Round, RoundSteps, powers_below, rounds_algorithm, trade
from clustersim.core.arrays import Ints


def _members(n: int, *, odd: bool) -> tuple[Ints, int]:
    """((p,) the members that go on, r): of the first r pairs the odd or the even ones, and everybody beyond."""
    p = 1 << (n.bit_length() - 1)
    v = np.arange(p, dtype=np.int64)
    return np.where(v < n - p, 2 * v + odd, v + n - p), n - p


def recursive_doubling(kind: str, n: int, root: int = 0) -> RoundSteps:
    """In round k everybody trades with the member 2^k away what it has so far; log2 n rounds.

    all_reduce and barrier trade the whole, all_gather the blocks gathered, reduce_scatter what it still owes others.
    Open MPI gathers by Bruck's algorithm beyond a power of two.
    """
    if kind == "all_gather" and n & (n - 1):
        return bruck(kind, n)
    v = np.arange(n, dtype=np.int64)
    if kind == "all_gather":
        return RoundSteps(
            tuple(trade(v, v ^ b, v // b, v // b, reduce=False) for b in powers_below(n)), np.full(n, 1 / n)
        )
    if kind == "reduce_scatter":
        rounds = [step_round for b in powers_below(n) for step_round in _owed_rounds(n, b)]
        return RoundSteps(tuple(rounds), np.full(n, 1 / n))
    members, r = _members(n, odd=True)
    share = float(kind == "all_reduce")
    first = np.arange(0, 2 * r, 2, dtype=np.int64)
    fold = [Round(first, first + 1, share, lambda _: [0], reduce=True)] if r else []
    traded = [
        Round(members, members[np.arange(len(members)) ^ b], share, lambda _: [0], reduce=True)
        for b in powers_below(len(members))
    ]
    unfold = [Round(first + 1, first, share, lambda _: [0])] if r else []
    return RoundSteps((*fold, *traded, *unfold), np.full(1, share))


def _owed_rounds(n: int, b: int) -> list[Round]:
    """Members trade with those ``b`` away: all blocks but those of their own ``b`` neighbours.

    Whose partner would be beyond n is handed what his neighbours received, down a halving tree, and adds it
    (ompi_coll_base_reduce_scatter_block_intra_recursivedoubling).
    """
    v = np.arange(n, dtype=np.int64)

    def moving(src: Ints, dst: Ints, owner: Ints, *, passes: bool = False) -> Round:
        """A round in which an edge moves all blocks but those of its owner's neighbours."""
        blocks = [np.flatnonzero(v // b != sender // b).tolist() for sender in owner.tolist()]
        shares = np.array([len(some) / n for some in blocks])
        return Round(src, dst, shares, lambda edge: blocks[edge], reduce=True, passes=passes)

    src = v[v ^ b < n]
    rounds = [moving(src, src ^ b, src)]
    with_all = n - n // (2 * b) * 2 * b - b  # of the last 2b members, those of the first half whose partner is there
    for half in powers_below(b)[::-1] if 0 < with_all < b else ():
        tree = v // (2 * half) * 2 * half
        left = v[(v >= n // (2 * b) * 2 * b) & (v < n - with_all) & (v & half == 0)]
        src = left[(left < tree[left] + with_all) & (left + half >= tree[left] + with_all)]
        if len(src):
            rounds.append(moving(src, src + half, src ^ b, passes=True))
    return rounds


def rabenseifner(kind: str, n: int, root: int = 0) -> RoundSteps:
    """Reduce-scatter by halving, then gather the blocks by doubling: to all, or for reduce to the root alone."""
    members, r = _members(n, odd=False)
    p, even = len(members), np.arange(0, 2 * r, 2, dtype=np.int64)
    left, right, rounds = range(p // 2), range(p // 2, p), []
    if r:  # both of a pair add one half; the even one goes on with both
        src = np.concatenate([even, even + 1])
        dst = np.concatenate([even + 1, even])
        rounds.append(Round(src, dst, 0.5, lambda e: right if e < r else left, reduce=True))
        rounds.append(Round(even + 1, even, 0.5, lambda _: right))
    v = np.arange(p, dtype=np.int64)
    rounds += [trade(members, members[v ^ b], v % (2 * b), (v ^ b) % (2 * b), reduce=True) for b in powers_below(p)]
    if kind == "reduce":
        return RoundSteps((*rounds, *_gathered(members, root, r)), np.full(p, 1 / p))
    rounds += [trade(members, members[v ^ b], v % (2 * b), v % (2 * b), reduce=False) for b in powers_below(p)[::-1]]
    if r:
        rounds.append(Round(even, even + 1, 1.0, lambda _: range(p)))
    return RoundSteps(tuple(rounds), np.full(p, 1 / p))


def _gathered(members: Ints, root: int, r: int) -> list[Round]:
    """Blocks back to the root, the last halves first; a root that handed over its tensor steps in for member 0."""
    rounds, members, v = [], members.copy(), np.arange(len(members), dtype=np.int64)
    if root < 2 * r and root % 2:
        rounds.append(Round(members[:1], np.array([root]), 1 / len(members), lambda _: [0]))
        members[0] = root
    away = v ^ int(np.flatnonzero(members == root)[0])
    for b in powers_below(len(members))[::-1]:
        src = v[(away & b > 0) & (away < 2 * b)]
        rounds.append(trade(members[src], members[src ^ b], v % (2 * b), src % (2 * b), reduce=False))
    return rounds


def recursive_halving(kind: str, n: int, root: int = 0) -> RoundSteps:
    """Trade halves with the farthest first; member m's block is in slot m // 2 of the pairs, or m - r."""
    members, r = _members(n, odd=True)
    v = np.arange(len(members), dtype=np.int64)
    slot = _slots(n, r)
    rounds = _handed_over(n, r)
    rounds += [
        trade(members, members[v ^ b], slot // b, (v ^ b) // b, reduce=True) for b in powers_below(len(members))[::-1]
    ]
    if r:
        rounds.append(Round(members[:r], members[:r] - 1, 1 / n, lambda e: [2 * e]))
    return RoundSteps(tuple(rounds), np.full(n, 1 / n))


def butterfly(kind: str, n: int, root: int = 0) -> RoundSteps:
    """Trade halves with the nearest first (Traff 2005). Everybody ends with the mirrored slot's blocks, which at a
    power of two are permuted beforehand, and else sent to their owners."""
    members, r = _members(n, odd=True)
    p = len(members)
    rounds = _handed_over(n, r)
    v = np.arange(p, dtype=np.int64)
    width = p.bit_length() - 1
    mirror = np.array([int(f"{i:0{width}b}"[::-1], 2) if width else 0 for i in range(p)], dtype=np.int64)
    key = np.arange(n, dtype=np.int64) if not r else mirror[_slots(n, r)]
    rounds += [trade(members, members[v ^ b], key % (2 * b), (v ^ b) % (2 * b), reduce=True) for b in powers_below(p)]
    if r:
        owner = np.arange(n, dtype=np.int64)
        src = members[mirror[_slots(n, r)]]
        away = owner[src != owner]
        rounds.append(Round(src[away], away, 1 / n, lambda e: [int(away[e])]))
    return RoundSteps(tuple(rounds), np.full(n, 1 / n))


def _slots(n: int, r: int) -> Ints:
    m = np.arange(n, dtype=np.int64)
    return np.where(m < 2 * r, m // 2, m - r)


def _handed_over(n: int, r: int) -> list[Round]:
    even = np.arange(0, 2 * r, 2, dtype=np.int64)
    return [Round(even, even + 1, 1.0, lambda _: range(n), reduce=True)] if r else []


def bruck(kind: str, n: int, root: int = 0) -> RoundSteps:
    """ceil(log2 n) rounds to members 2^k away: all blocks so far, or those whose way has bit k (Bruck et al. 1997)."""
    v = np.arange(n, dtype=np.int64)
    rounds = []
    for b in powers_below(n):
        if kind == "all_gather":
            count = min(b, n - b)
            following = partial(lambda count, e: [(e + j) % n for j in range(count)], count)
            rounds.append(Round(v, (v - b) % n, count / n, following))
        else:
            distances = [j for j in range(n) if j & b]
            passing = partial(lambda b, distances, e: [_pair(e - j % b, j, n) for j in distances], b, distances)
            rounds.append(Round(v, (v + b) % n, len(distances) / n, passing))
    return RoundSteps(tuple(rounds), np.full(n if kind == "all_gather" else n * n, 1 / n))


def _pair(origin: int, distance: int, n: int) -> int:
    """The piece that set out from ``origin`` to the member ``distance`` further on."""
    return origin % n * n + (origin + distance) % n


def round_a_ring(n: int) -> RoundSteps:
    """n - 1 rounds: everybody sends the next member the block it got last, its own first."""
    v = np.arange(n, dtype=np.int64)
    rounds = (Round(v, (v + 1) % n, 1 / n, partial(lambda t, e: [(e - t) % n], t)) for t in range(n - 1))
    return RoundSteps(tuple(rounds), np.full(n, 1 / n))


def neighbor(kind: str, n: int, root: int = 0) -> RoundSteps:
    """n / 2 rounds with the two neighbours in turn, two blocks at a time (Chen et al. 2005); odd groups use a ring."""
    v = np.arange(n, dtype=np.int64)
    if n % 2:
        return round_a_ring(n)
    rounds = [Round(v, v ^ 1, 1 / n, lambda e: [e])]
    blocks = np.stack([v - v % 2, v - v % 2 + 1], axis=1)
    for t in range(1, n // 2):
        step = np.where(v % 2 == t % 2, 1, -1)
        partner = (v + step) % n
        rounds.append(Round(v, partner, 2 / n, partial(lambda blocks, e: blocks[e].tolist(), blocks)))
        blocks = blocks[partner]
    return RoundSteps(tuple(rounds), np.full(n, 1 / n))


EXCHANGES = (
    rounds_algorithm(
        "recursive_doubling", frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier"}), recursive_doubling
    ),
    rounds_algorithm("rabenseifner", frozenset({"all_reduce", "reduce"}), rabenseifner),
    rounds_algorithm("recursive_halving", frozenset({"reduce_scatter"}), recursive_halving),
    rounds_algorithm("butterfly", frozenset({"reduce_scatter"}), butterfly),
    rounds_algorithm("bruck", frozenset({"all_gather", "all_to_all"}), bruck),
    rounds_algorithm("neighbor", frozenset({"all_gather"}), neighbor),
)
