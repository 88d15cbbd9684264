"""What Gloo's collectives ask of the hosts: messages, bytes added and copied, temporaries, buffers.

:mod:`clustersim.collectives.host_law` says how long that takes.
"""

from __future__ import annotations

import math

SEGMENT = 2.0**20
"""Largest segment [bytes] of Gloo's ring (gloo/allreduce.cc, maxSegmentSize)."""

MAPPED = 2.0**25
"""Allocations [bytes] that glibc always maps afresh."""

ELEMENT = 4
"""Bytes of fp32, which segments are rounded up to."""


def ring_messages(n: int, nbytes: float) -> int:
    """Messages a rank sends in one half (reduce-scatter or all-gather) of Gloo's segmented ring.

    Segments are at most 1 MiB, at least two a rank; a tensor with fewer elements than segments leaves some of them
    empty, and those are not sent.

    >>> ring_messages(2, 2.0**20), ring_messages(4, 2.0**26), ring_messages(2, 8.0)
    (2, 48, 1)
    """
    segment = min(math.ceil(nbytes / (2 * n)), SEGMENT)
    segment = ELEMENT * math.ceil(segment / ELEMENT) or ELEMENT
    full = math.ceil(nbytes / segment)
    segments = n * math.ceil(max(full, 2 * n) / n)
    return max(1, round((segments - segments // n) * min(1.0, full / segments)))


def chain_and_total(kind: str, n: int, nbytes: float) -> tuple[int, int]:
    """Messages one after another, and messages of all ranks together."""
    rounds = (n - 1).bit_length()
    if kind in {"all_reduce", "reduce_scatter"}:
        half = ring_messages(n, nbytes)
        return 2 * half, 2 * half * n
    if kind == "reduce":
        half = ring_messages(n, nbytes)
        return half + 1, half * n + n - 1
    if kind == "all_gather":  # half blocks
        return 2 * (n - 1), 2 * (n - 1) * n
    if kind == "broadcast":
        return rounds, n - 1
    if kind == "barrier":
        return rounds, rounds * n
    if kind in {"scatter", "gather"}:
        return n - 1, n - 1
    if kind == "all_to_all":
        return n - 1, (n - 1) * n
    return 1, n if kind == "sendrecv" else 1


def touched(kind: str, n: int) -> float:
    """Bytes per byte of S that the busiest process adds or copies."""
    ring, own = (n - 1) / n, 1 / n
    return {
        "all_reduce": ring, "reduce": ring, "reduce_scatter": ring + 1 + own, "all_gather": 1 + own,
        "gather": 1 + own, "scatter": own, "all_to_all": own,
    }.get(kind, 0.0)  # fmt: skip


SCRATCH = frozenset({"all_gather", "gather", "reduce_scatter"})
"""Kinds for which PyTorch makes a temporary of S bytes."""

ROOTED = frozenset({"scatter", "gather", "send"})
"""Kinds in which one process does what :func:`touched` counts."""


def footprint(kind: str, n: int, here: int) -> float:
    """Bytes per byte of S in the buffers of ``here`` ranks of a node."""
    if kind in {"scatter", "gather"}:  # whole at the root, parts elsewhere
        return 3.0 if kind == "gather" else 2.0
    each = {"all_gather": 2 + 1 / n, "reduce_scatter": 2 + 1 / n, "all_to_all": 2.0, "sendrecv": 2.0}.get(kind, 1.0)
    return each * here
