"""Recursive halving and doubling: log2 n rounds with one partner each.

In round k of the reduce-scatter member v trades with v xor 2^k and keeps the half of its pieces whose bit k is its own:
S/2, S/4, ... leave every member, the large halves to near partners. The all-gather runs the rounds backwards. Where n
is no power of two, the members beyond it first fold onto a partner and are told the result at the end (Thakur,
Rabenseifner and Gropp 2005), which costs two rounds of whole tensors. Every member uses its own NIC, so channels do not
matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Schedule, Traffic
from clustersim.collectives.build import ScheduleWriter, refuse, traffic_of

Ints = npt.NDArray[np.int64]

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


@dataclass(frozen=True)
class _Round:
    """Everybody of ``src`` sends pieces to its ``dst``: those of which ``v & mask`` agrees with ``want``.

    ``mask``/``want`` (E,) int select the slots v whose pieces move; -1 as mask: only the sender's own piece.
    """

    src: Ints
    dst: Ints
    mask: Ints
    want: Ints
    reduce: bool


def rounds(kind: str, n: int) -> list[_Round]:
    """Fold, halve, double, unfold, as far as the kind needs them."""
    slots = 1 << (n.bit_length() - 1)
    v, extra = np.arange(slots, dtype=np.int64), np.arange(slots, n, dtype=np.int64)
    bits = [1 << k for k in range(slots.bit_length() - 1)]
    found = []
    if len(extra):
        own = kind == "all_gather"  # nothing to add yet: only the extra member's piece moves
        found.append(_Round(extra, extra - slots, np.full(len(extra), -int(own)), 0 * extra, not own))
    if kind != "all_gather":
        # Kept so far: pieces that agree with v in the bits already traded; sent: those that agree with the partner.
        found += [_Round(v, v ^ bit, v * 0 + (2 * bit - 1), (v ^ bit) & (2 * bit - 1), True) for bit in bits]
    if kind != "reduce_scatter":
        found += [_Round(v, v ^ bit, v * 0 + (2 * bit - 1), v & (2 * bit - 1), False) for bit in reversed(bits)]
    if len(extra):
        only = kind == "reduce_scatter"
        found.append(_Round(extra - slots, extra, np.full(len(extra), -2 * int(only)), 0 * extra, False))
    return found


def _piece_slots(kind: str, n: int) -> Ints:
    """The slot that answers for each piece: a piece per slot for all_reduce, else one per member."""
    slots = 1 << (n.bit_length() - 1)
    return np.arange(slots if kind == "all_reduce" else n, dtype=np.int64) % slots


def _moved(step: _Round, edge: int, slot: Ints) -> Ints:
    """Pieces one edge of a round moves."""
    mask = int(step.mask[edge])
    if mask == -1:
        return step.src[edge : edge + 1]
    if mask == -2:
        return step.dst[edge : edge + 1]
    return np.flatnonzero((slot & mask) == step.want[edge])


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Round by round, every pair and the fraction of the tensor that moves."""
    refuse("halving_doubling", request, KINDS)
    n, slot = group.size, _piece_slots(request.kind, group.size)
    parts, crossing = [], 0
    for step in rounds(request.kind, n):
        parts.append((step.src, step.dst, _fractions(step, slot), -1))
        crossing += bool((group.nodes[step.src] != group.nodes[step.dst]).any())
    return traffic_of(parts, len(parts), crossing, rounds=range(len(parts)))


def _fractions(step: _Round, slot: Ints) -> npt.NDArray[np.float64]:
    mask = int(step.mask[0])
    if mask < 0:
        return np.full(len(step.src), 1.0 / len(slot))
    counts = np.bincount(slot & mask, minlength=mask + 1)
    return np.asarray(counts[step.want] / len(slot), dtype=np.float64)


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> Schedule:
    """Every transfer, one per piece. A round of a pair begins when the round before has reached both of them, as a
    blocking exchange does; pieces of a round travel in order, so that the last one tells.
    """
    refuse("halving_doubling", request, KINDS)
    slot, writer = _piece_slots(request.kind, group.size), ScheduleWriter()
    brought: dict[tuple[int, int], list[int]] = {}
    last: dict[int, int] = {}  # member -> what reached it last
    for step in rounds(request.kind, group.size):
        sent = []
        for edge, (src, dst) in enumerate(zip(step.src.tolist(), step.dst.tolist(), strict=True)):
            for piece in _moved(step, edge, slot).tolist():
                ready = (last[member] for member in (src, dst) if member in last)
                after = dict.fromkeys((*brought.get((src, piece), ()), *ready))
                sent.append((dst, piece, writer.send(src, dst, piece, after=tuple(after), reduce=step.reduce)))
        for dst, piece, transfer in sent:
            known = brought.setdefault((dst, piece), [])
            if not step.reduce:
                known.clear()
            known.append(transfer)
            last[dst] = transfer
    return writer.done(np.full(len(slot), 1.0 / len(slot)))


HALVING_DOUBLING = Algorithm("halving_doubling", KINDS, traffic, schedule)
