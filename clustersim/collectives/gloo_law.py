"""How long Gloo's work takes on the host: calls, messages, bytes through sockets, bytes added and copied.

A CPU does everything here, so everything is work for its cores: a collective ends when its longest chain of messages is
through, or when the cores of the busiest node have done the work of all ranks on it, whichever is later:

    T = calls call + messages (message + (calls - 1) turn) + wire + touched (1/reduce + m/memory) + scratch/fault
    wire = sum over rounds of max(links, sockets (1/stream + m/memory)),   m = max(0, 1 - cache/footprint)

``turn`` is how long a message waits for each other rank on its core. m is the part of the bytes that the last-level
cache no longer holds; ``footprint`` are the buffers of all ranks of a node. ``touched`` is what a process adds (the
ring's c = a + b) and copies (PyTorch flattens the lists of all_gather and gather, and clones the input of
reduce_scatter; ProcessGroupGloo.cpp); ``scratch`` are those temporaries where they are so large that malloc maps fresh
pages for every call (glibc: from 32 MiB on, DEFAULT_MMAP_THRESHOLD_MAX).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from clustersim.costs import GlooCosts

SEGMENT = 2.0**20
"""Largest segment [bytes] of Gloo's ring (gloo/allreduce.cc, maxSegmentSize)."""

MAPPED = 2.0**25
"""Allocations [bytes] that glibc always maps afresh."""

ELEMENT = 4
"""Bytes of fp32, which segments are rounded up to."""


@dataclass(frozen=True)
class Work:
    """What one collective asks of the hosts; no constant is in it.

    Parameters
    ----------
    kind : of the collective. nbytes : float [bytes], S.
    calls : how many calls a core serves, at least 1: ranks to a core.
    messages : one after another, on the longest chain or on a core.
    rounds : per round, the seconds per byte of S on the narrowest link, and the bytes of S that the busiest process, or
        core, moves through sockets, in and out together.
    touched, scratch, footprint : float [bytes], see the module.
    """

    kind: str
    nbytes: float
    calls: float
    messages: float
    rounds: tuple[tuple[float, float], ...]
    touched: float
    scratch: float
    footprint: float


def wire(work: Work, costs: GlooCosts) -> float:
    """Seconds per byte of S on links and through sockets."""
    byte = 1.0 / costs.stream + _missed(work, costs) / costs.memory
    return sum(max(link, sockets * byte) for link, sockets in work.rounds)


def seconds(work: Work, costs: GlooCosts) -> float:
    """Seconds of the collective, alone on its machine."""
    touch = 1.0 / costs.reduce + _missed(work, costs) / costs.memory
    return (
        work.calls * costs.call[work.kind]
        + work.messages * (costs.message + (work.calls - 1.0) * costs.turn)
        + wire(work, costs) * work.nbytes
        + work.touched * touch
        + work.scratch / costs.fault
    )


def _missed(work: Work, costs: GlooCosts) -> float:
    return max(0.0, 1.0 - costs.cache / work.footprint) if work.footprint else 0.0


# ---- what each kind asks --------------------------------------------------------------------------------------------


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
