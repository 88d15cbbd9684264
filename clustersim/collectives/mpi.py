"""The ``mpi`` backend: collectives of processes on hosts, as Open MPI 4.1 runs them.

Open MPI chooses by kind, communicator size and bytes (:mod:`clustersim.collectives.mpi_rules`), and a pin forces it as
``coll_tuned_*_algorithm`` does. Ranks of a node talk through shared memory (``vader``), others over ``tcp`` or, on
fabrics with verbs, ``ucx``; a pinned protocol says otherwise. How long that takes the hosts is
:mod:`clustersim.collectives.host_law`.

Tensors on a GPU are staged through host memory, before and after. With CUDA support (``opal_cuda_support``) only those
that are added are (ompi/mca/coll/cuda copies them, adds on the host and copies back); all others go from GPU to GPU.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from clustersim.collectives.base import Channel, Group, Plan, Request, Traffic
from clustersim.collectives.build import traffic_of
from clustersim.collectives.costs import mpi_costs_of
from clustersim.collectives.host_law import HostRound, HostWork
from clustersim.collectives.host_path import HostRequest, host_plan, most_per_core, on_hosts, on_links
from clustersim.collectives.mpi_rules import chosen, forced, kinds
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.trees import in_order_binomial
from clustersim.core.arrays import Bools
from clustersim.core.errors import ProgramError, nearest

TRANSPORTS = ("vader", "vader/none", "tcp", "ucx")
"""What a protocol pin may say; ``vader/none`` is shared memory with btl_vader_single_copy_mechanism = none."""

EAGER = {"vader": 4096.0, "tcp": 65536.0, "ucx": 8192.0}
"""Largest message [bytes] sent at once (btl_vader_eager_limit, btl_tcp_eager_limit; UCX: UCX_RNDV_THRESH, about)."""

ROWS = {
    "linear": "direct",
    "basic_linear": "direct",
    "linear_sync": "direct",
    "linear_nb": "direct",
    "two_proc": "direct",
    "pairwise": "direct",
    "modified_bruck": "bruck",
    "segmented_ring": "ring",
    "pipeline": "chain",
    "binary_tree": "binary",
    "split_binary_tree": "split_binary",
    "in-order_binary": "in_order_binary",
}
"""Rows of ALGORITHMS for Open MPI's names, where they differ. Without segments, which no rule asks for, a pipeline is a
chain and a segmented ring a ring (coll_base_allreduce.c hands it on)."""

ROOTED = frozenset({"broadcast", "reduce", "scatter", "gather"})
ADDING = frozenset({"all_reduce", "reduce", "reduce_scatter"})
ELEMENTS = {"fp64": 8.0, "int64": 8.0, "fp16": 2.0, "bf16": 2.0, "uint8": 1.0, "fp8": 1.0}
"""Bytes of an element, where not 4."""


def names(kind: str) -> tuple[str, ...]:
    """Open MPI's names of its algorithms for a kind; none for kinds that it has one way for."""
    return kinds()[kind].names if kind in kinds() else ()


class MpiAlgorithm(msgspec.Struct, frozen=True):
    """One algorithm over the group: Open MPI's name of it, and for which kind."""

    name: str
    kind: str


def plan(request: Request, group: Group, n_channels: int | None = None, cuda: bool = False) -> Plan:
    """The Plan of one collective under Open MPI, which has one channel.

    ``cuda``: Open MPI was built and started with CUDA support. Raises :class:`ProgramError` for a pin that it does not
    have.
    """
    if n_channels not in (None, 1):
        raise ProgramError(f"Open MPI has one channel, not {n_channels}")
    direct = cuda and request.kind not in ADDING
    members = group if direct else on_hosts(group, "Open MPI")
    return host_plan(request, group, members, asked_of(request, members, gpus=direct), mpi_costs_of(group))


def work(request: Request, group: Group) -> HostWork:
    """What a collective asks of the hosts of its ranks, without copies between GPU and host."""
    return asked_of(request, on_hosts(group, "Open MPI")).work


def asked_of(request: Request, members: Group, *, gpus: bool = False) -> HostRequest:
    """The algorithm and transport taken, with their link loads and work; ``gpus``: no core moves their bytes."""
    parts = parts_of(request, members.size)
    nbytes = request.nbytes
    local, net = _transports(request, members, gpus)
    load = np.zeros(members.topology.n_links)
    legs = []
    added = 0.0
    for part in parts:
        part_request = replace(request, kind=part.kind, algorithm=None)
        traffic = _traffic(part, part_request, members)
        added += _added(part, traffic, members.size)
        if overlapping := len(parts) == 1 and _overlaps(part):
            traffic = replace(traffic, round=traffic.round[:0])
        on, rounds = on_links(traffic, members)
        played = _MpiTraffic(part, traffic, nbytes, members, (local, net))
        load += on
        for leg, in_round in zip(rounds, traffic.rounds, strict=True):
            host_round = _leg(leg, in_round, played, overlapping=overlapping)
            legs.append(replace(host_round, moved=0.0) if gpus else host_round)
    n = members.size
    kind = request.kind
    busy = max(1.0, most_per_core(members))
    copied = {"all_reduce": 1.0, "reduce_scatter": 1.0, "all_gather": 1 / n, "all_to_all": 1 / n}.get(kind, 0.0)
    copied += sum({"bruck": 1.0, "modified_bruck": 2.0 + (n - 1).bit_length()}.get(part.name, 0.0) for part in parts)
    buffers = {"broadcast": 1.0, "send": 1.0, "barrier": 0.0, "all_gather": 1 + 1 / n}.get(kind, 2.0)
    name = ROWS.get(parts[0].name, parts[0].name) if len(parts) == 1 else _name(request, n)
    return HostRequest(
        name,
        local if members.n_nodes == 1 else net,
        load,
        HostWork(
            kind=kind,
            nbytes=nbytes,
            calls=busy,
            legs=tuple(legs),
            touched=(added + copied) * nbytes * busy,
            scratch=0.0,
            footprint=buffers * members.ranks_per_node * nbytes,
        ),
    )


# ---- what Open MPI chooses ------------------------------------------------------------------------------------------


def _name(request: Request, n: int) -> str:
    """Open MPI's name of the algorithm: pinned, or by its rules; it falls back where there are too few elements."""
    kind = request.kind
    pin = request.algorithm
    name = (forced(kind, n, pin) if pin else None) or chosen(kind, n, request.nbytes)
    count = request.nbytes / ELEMENTS.get(request.dtype, 4.0)
    if kind == "all_reduce" and name in {"ring", "segmented_ring"} and count < n:
        return "recursive_doubling"
    if name == "rabenseifner" and count < 1 << (n.bit_length() - 1):
        return "basic_linear" if kind == "all_reduce" else "linear"
    return "basic_linear" if name.startswith("scatter_allgather") and count < n else name


def parts_of(request: Request, n: int) -> tuple[MpiAlgorithm, ...]:
    """The algorithms that follow one another: most are one, some are built of two other collectives."""
    kind = request.kind
    if kind not in kinds() or request.matrix is not None:  # sends, and MPI_Alltoallv, which sends to everybody at once
        if request.algorithm:
            forced(kind, n, request.algorithm)
        return (MpiAlgorithm("linear", kind),)
    name = _name(request, n)
    built = {
        ("all_reduce", "nonoverlapping"): ("reduce", "broadcast"),
        ("all_gather", "linear"): ("gather", "broadcast"),
        ("reduce_scatter", "basic_linear"): ("reduce", "scatter"),
    }.get((kind, name))
    if (kind, name) == ("all_reduce", "basic_linear"):
        return MpiAlgorithm("linear", "reduce"), MpiAlgorithm("basic_linear", "broadcast")
    if not built:
        return (MpiAlgorithm(name, kind),)
    return tuple(
        MpiAlgorithm(_name(replace(request, kind=part_kind, algorithm=None), n), part_kind) for part_kind in built
    )


def _transports(request: Request, members: Group, gpus: bool) -> tuple[str, str]:
    """(inside a node, between nodes)."""
    if request.protocol:
        if request.protocol not in TRANSPORTS:
            raise ProgramError(
                f"Open MPI has no transport {request.protocol!r}; {nearest(request.protocol, TRANSPORTS)}"
            )
        if request.protocol in {"tcp", "ucx"}:
            return request.protocol, request.protocol
    net = "tcp" if members.node_type.net == "tcp" else "ucx"
    return "ucx" if gpus else request.protocol or "vader", net


# ---- its rounds -----------------------------------------------------------------------------------------------------


def _traffic(part: MpiAlgorithm, request: Request, members: Group) -> Traffic:
    n = members.size
    if part.kind == "barrier" and part.name not in {"recursive_doubling", "bruck", "two_proc"}:
        return _barrier(part.name, n)
    if part.kind == "barrier" and part.name == "bruck":
        return ALGORITHMS["direct"].traffic(request, members, ())
    row = "recursive_doubling" if part.kind == "barrier" else ROWS.get(part.name, part.name)
    ring = (Channel(0, np.arange(n, dtype=np.int64), 1.0),) if row == "ring" else ()
    return ALGORITHMS[row].traffic(request, members, ring)


def _barrier(name: str, n: int) -> Traffic:
    """Everybody tells member 0 and is told; a token goes round twice; or up a binomial tree and down."""
    v = np.arange(n, dtype=np.int64)
    if name == "double_ring":
        edges = [(v[i : i + 1], (v[i : i + 1] + 1) % n) for i in range(n)] * 2
    elif name == "linear":
        edges = [(v[1:], 0 * v[1:]), (0 * v[1:], v[1:])]
    else:
        down = in_order_binomial(n)
        edges = [*((child, parent) for parent, child in reversed(down)), *down]
    return traffic_of([(src, dst, 0.0, -1) for src, dst in edges], len(edges), 0, rounds=range(len(edges)))


class _MpiTraffic(msgspec.Struct, frozen=True, eq=False):
    """A part with its traffic over ``members``: ``whole`` bytes, by the ``ways`` inside a node and between nodes."""

    part: MpiAlgorithm
    traffic: Traffic
    whole: float
    members: Group
    ways: tuple[str, str]


def _leg(leg: HostRound, in_round: Bools, played: _MpiTraffic, *, overlapping: bool) -> HostRound:
    """The round with its messages: one after another on a chain or a core, and further ones of the busiest process."""
    part = played.part
    traffic = played.traffic
    members = played.members
    ways = played.ways
    src = traffic.src[in_round]
    dst = traffic.dst[in_round]
    n = members.size
    out = np.bincount(src, minlength=n)
    into = np.bincount(dst, minlength=n)
    degree = int(max(out.max(), into.max()))
    shared = most_per_core(members)
    size = float(traffic.fraction[in_round].max(initial=0.0)) * played.whole
    path = _path(ways[bool((members.nodes[src] != members.nodes[dst]).any())], size)
    if part.name == "linear_sync" and part.kind == "gather":  # the root calls for each block, and for its rest
        return replace(leg, messages=3.0 * degree, path=path)
    if overlapping:
        return replace(leg, posts=max(int((out + into).max()), 2 * len(src) / n * shared), path=path)
    serial = traffic.steps if ROWS.get(part.name, part.name) == "ring" else degree if part.name == "pairwise" else 1
    path = _path(ways[bool((members.nodes[src] != members.nodes[dst]).any())], size / serial) if degree == 1 else path
    per_core = max(1.0, shared * len(src) / (n * degree))
    return replace(leg, messages=serial * per_core, posts=(degree - 1) * per_core if serial == 1 else 0.0, path=path)


def _overlaps(part: MpiAlgorithm) -> bool:
    """Whether repetitions overlap: in a tree from or to a root nobody waits for the others, and what is measured is how
    much the busiest process does, not how long the last one waits."""
    row = ROWS.get(part.name, part.name)
    return part.kind in ROOTED and row in {"direct", "chain", "binary", "in_order_binary", "binomial", "knomial"}


def _path(transport: str, size: float) -> str:
    """The way of a message of this size."""
    medium, _, mechanism = transport.partition("/")
    if size <= EAGER[medium]:
        return f"{medium}/eager"
    return f"{medium}/rendezvous" if medium != "vader" else "vader/fragments" if mechanism else "vader/single"


def _added(part: MpiAlgorithm, traffic: Traffic, n: int) -> float:
    """Bytes per byte of S that the busiest process adds, round by round."""
    if part.kind not in ADDING:
        return 0.0
    if not len(traffic.round):
        return (n - 1) / n if ROWS.get(part.name, part.name) == "ring" else float(n - 1)
    adds = traffic.adds
    added = 0.0
    for in_round in traffic.rounds:
        added += float(np.bincount(traffic.dst[in_round & adds], traffic.fraction[in_round & adds], n).max(initial=0.0))
    return added
