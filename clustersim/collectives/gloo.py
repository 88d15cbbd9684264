"""The ``gloo`` backend: collectives of CPU processes over TCP, as PyTorch's ProcessGroupGloo runs them.

Gloo chooses by kind alone: a ring in 1 MiB segments for all_reduce, a ring of half blocks for all_gather, a binomial
tree for broadcast, a ring and a gather for reduce, direct sends for the rest (facebookincubator/gloo:
gloo/{allreduce,allgather,broadcast,alltoall}.cc). reduce_scatter is an all_reduce of a copy (pytorch:
ProcessGroupGloo.cpp). Ranks talk in rank order over the one network interface Gloo binds to; ranks of a node talk over
loopback. Tensors on a GPU are staged through host memory, before and after. How long that takes the hosts is
:mod:`clustersim.collectives.host_law`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from clustersim.collectives.base import Channel, Group, Plan, Request, Traffic
from clustersim.collectives.build import Part, everyone, traffic_of
from clustersim.collectives.costs import gloo_costs_of
from clustersim.collectives.direct import DIRECT
from clustersim.collectives.host_law import HostRound, HostWork
from clustersim.collectives.host_path import HostRequest, host_plan, most_per_core, on_hosts, on_links
from clustersim.collectives.ring import RING
from clustersim.collectives.trees import BINOMIAL
from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError

SEGMENT = 2.0**20
"""Largest segment [bytes] of Gloo's ring (gloo/allreduce.cc, maxSegmentSize)."""

MAPPED = 2.0**25
"""Allocations [bytes] that glibc always maps afresh."""

ELEMENT = 4
"""Bytes of fp32, which segments are rounded up to."""


SCRATCH = frozenset({"all_gather", "gather", "reduce_scatter"})
"""Kinds for which PyTorch makes a temporary of S bytes."""

ROOTED = frozenset({"scatter", "gather", "send"})
"""Kinds in which one process does what :func:`_touched` counts."""


def plan(request: Request, group: Group, n_channels: int | None = None) -> Plan:
    """The Plan of one collective under Gloo, which has one channel.

    Raises :class:`ProgramError` for a pin that is not what Gloo would run.
    """
    if n_channels not in (None, 1):
        raise ProgramError(f"Gloo has one channel, not {n_channels}")
    hosts = on_hosts(group, "Gloo")
    host_request = _asked(request, hosts)
    if request.algorithm not in (None, host_request.algorithm):
        raise ProgramError(f"Gloo runs {request.kind!r} as {host_request.algorithm!r}, not {request.algorithm!r}")
    return host_plan(request, group, hosts, host_request, gloo_costs_of(group))


def work(request: Request, group: Group) -> HostWork:
    """What a collective asks of the hosts of its ranks; Gloo's own part, without copies between GPU and host."""
    return _asked(request, on_hosts(group, "Gloo")).work


def _asked(request: Request, hosts: Group) -> HostRequest:
    algorithm, traffic = _choice(request, hosts)
    load, legs = on_links(traffic, hosts)
    n = hosts.size
    size = request.nbytes
    kind = request.kind
    shared = most_per_core(hosts)
    busy = max(1.0, shared)
    chain, total = chain_and_total(kind, n, size)
    per_node = 1.0 if kind in ROOTED else busy
    return HostRequest(
        algorithm,
        "TCP",
        load,
        HostWork(
            kind=kind,
            nbytes=size,
            calls=busy,
            legs=(HostRound(0.0, 0.0, max(chain, total / n * shared)), *legs),
            touched=_touched(kind, n) * size * per_node,
            scratch=size * per_node if kind in SCRATCH and size >= MAPPED else 0.0,
            footprint=_footprint(kind, n, hosts.ranks_per_node) * size,
        ),
    )


# ---- what Gloo chooses ----------------------------------------------------------------------------------------------


def _choice(request: Request, hosts: Group) -> tuple[str, Traffic]:
    """The algorithm, and who sends how much to whom."""
    n = hosts.size
    if request.kind in {"all_reduce", "reduce_scatter"}:
        return "ring", RING.traffic(dataclasses.replace(request, kind="all_reduce"), hosts, _rank_ring(n))
    if request.kind == "all_gather":
        return "ring", RING.traffic(request, hosts, _rank_ring(n))
    if request.kind == "reduce":
        return "ring", _reduce(request, hosts)
    if request.kind == "broadcast":
        tree = BINOMIAL.traffic(request, hosts, ())
        return "binomial", dataclasses.replace(tree, rail=0 * tree.rail)  # over the one interface
    return "direct", DIRECT.traffic(request, hosts, ())


def _rank_ring(n: int) -> tuple[Channel, ...]:
    """Gloo's ring: every rank sends to the rank below, over the one interface."""
    return (Channel(0, np.arange(n - 1, -1, -1, dtype=np.int64), 1.0, nic=0),)


def _reduce(request: Request, hosts: Group) -> Traffic:
    """A reduce-scatter round the ring, then every block to the root."""
    n = hosts.size
    ring = RING.traffic(dataclasses.replace(request, kind="reduce_scatter"), hosts, _rank_ring(n))
    passed, blocks = reduced_bytes(n, request.nbytes)
    payload = max(request.nbytes, 1.0)
    rest = np.delete(everyone(hosts), request.root)
    root = np.full(len(rest), request.root, dtype=np.int64)
    round_it: Part = (ring.src, ring.dst, passed[ring.src] / payload, ring.rail)
    to_root: Part = (rest, root, blocks[rest] / payload, 0)
    return traffic_of([round_it, to_root], ring.steps + 1, ring.net_steps + 1, rounds=[0, 1])


def reduced_bytes(n: int, nbytes: float) -> tuple[Floats, Floats]:
    """((n,), (n,)) bytes that each rank sends to the rank below, and then to the root: its block.

    Every segment goes round but the last two of the rank's own block, however many a block has; blocks are whole
    segments, and the last ones what is left (sizes are those of real TCP connections).

    >>> [part.tolist() for part in reduced_bytes(4, 9.6e6)]
    [[7502848.0, 7502848.0, 7502848.0, 9600000.0], [3145728.0, 3145728.0, 3145728.0, 162816.0]]
    """
    segment, segments = _segments(n, nbytes)
    sizes = np.clip(nbytes - segment * np.arange(segments), 0.0, segment).reshape(n, -1)
    return nbytes - sizes[:, -2:].sum(axis=1), sizes.sum(axis=1)


# ---- what it asks of the hosts --------------------------------------------------------------------------------------


def ring_messages(n: int, nbytes: float) -> int:
    """Messages a rank sends in one half (reduce-scatter or all-gather) of Gloo's segmented ring.

    Segments are at most 1 MiB, at least two a rank; a tensor with fewer elements than segments leaves some of them
    empty, and those are not sent.

    >>> ring_messages(2, 2.0**20), ring_messages(4, 2.0**26), ring_messages(2, 8.0)
    (2, 48, 1)
    """
    segment, segments = _segments(n, nbytes)
    return _filled(segments - segments // n, segments, math.ceil(nbytes / segment))


def _filled(messages: int, segments: int, full: int) -> int:
    """Of so many messages, those that are not empty."""
    return max(1, round(messages * min(1.0, full / segments)))


def _segments(n: int, nbytes: float) -> tuple[float, int]:
    """Bytes of a segment, and how many there are, empty ones too."""
    segment = min(math.ceil(nbytes / (2 * n)), SEGMENT)
    segment = ELEMENT * math.ceil(segment / ELEMENT) or ELEMENT
    return segment, n * math.ceil(max(math.ceil(nbytes / segment), 2 * n) / n)


def chain_and_total(kind: str, n: int, nbytes: float) -> tuple[int, int]:
    """Messages one after another, and messages of all ranks together."""
    rounds = (n - 1).bit_length()
    if kind in {"all_reduce", "reduce_scatter"}:
        half = ring_messages(n, nbytes)
        return 2 * half, 2 * half * n
    if kind == "reduce":
        segment, segments = _segments(n, nbytes)
        passed = _filled(segments - 2, segments, math.ceil(nbytes / segment))
        return passed + 1, passed * n + n - 1
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


def _touched(kind: str, n: int) -> float:
    """Bytes per byte of S that the busiest process adds or copies."""
    ring = (n - 1) / n
    own = 1 / n
    return {
        "all_reduce": ring,
        "reduce": ring,
        "reduce_scatter": ring + 1 + own,
        "all_gather": 1 + own,
        "gather": 1 + own,
        "scatter": own,
        "all_to_all": own,
    }.get(kind, 0.0)


def _footprint(kind: str, n: int, per_node: int) -> float:
    """Bytes per byte of S in the buffers of ``per_node`` ranks of a node."""
    if kind in {"scatter", "gather"}:  # whole at the root, parts elsewhere
        return 3.0 if kind == "gather" else 2.0
    factor = {"all_gather": 2 + 1 / n, "reduce_scatter": 2 + 1 / n, "all_to_all": 2.0, "sendrecv": 2.0}.get(kind, 1.0)
    return factor * per_node
