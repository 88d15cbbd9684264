"""Recursive halving and doubling: log2 n rounds with one partner each.

In round k of the reduce-scatter member v trades with v xor 2^k and keeps the half of its pieces whose bit k is its own:
S/2, S/4, ... leave every member, the large halves to near partners. The all-gather runs the rounds backwards. Where n
is no power of two, the members beyond it first fold onto a partner and are told the result at the end (Thakur,
Rabenseifner and Gropp 2005), which costs two rounds of whole tensors. Every member uses its own NIC, so channels do not
matter.
"""

from __future__ import annotations

import numpy as np

from clustersim.collectives.rounds import Round, RoundSteps, powers_below, rounds_algorithm, trade

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def steps(kind: str, n: int, root: int = 0) -> RoundSteps:
    """Fold, halve, double, unfold, as far as the kind needs them."""
    slots = 1 << (n.bit_length() - 1)
    v = np.arange(slots, dtype=np.int64)
    extra = np.arange(slots, n, dtype=np.int64)
    bits = powers_below(slots)
    # The slot that answers for each piece: a piece per slot for all_reduce, else one per member.
    slot = np.arange(slots if kind == "all_reduce" else n, dtype=np.int64) % slots
    share = 1.0 / len(slot)
    all_slots = slot.tolist()
    rounds = []
    if len(extra) and kind == "all_gather":  # nothing to add yet: only the extra member's piece moves
        rounds.append(Round(extra, extra - slots, share, lambda edge: [slots + edge]))
    elif len(extra):
        rounds.append(Round(extra, extra - slots, 1.0, lambda _: range(len(all_slots)), reduce=True))
    if kind != "all_gather":
        # Kept so far: pieces that agree with v in the bits already traded; sent: those that agree with the partner.
        rounds += [trade(v, v ^ bit, slot & (2 * bit - 1), (v ^ bit) & (2 * bit - 1), reduce=True) for bit in bits]
    if kind != "reduce_scatter":
        rounds += [trade(v, v ^ bit, slot & (2 * bit - 1), v & (2 * bit - 1), reduce=False) for bit in reversed(bits)]
    if len(extra) and kind == "reduce_scatter":
        rounds.append(Round(extra - slots, extra, share, lambda edge: [slots + edge]))
    elif len(extra):
        rounds.append(Round(extra - slots, extra, 1.0, lambda _: range(len(all_slots))))
    return RoundSteps(tuple(rounds), np.full(len(slot), share))


HALVING_DOUBLING = rounds_algorithm("halving_doubling", KINDS, steps)
