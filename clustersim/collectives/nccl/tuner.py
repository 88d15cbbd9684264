"""NCCL's choice of algorithm and protocol: a latency and a bandwidth for each pair, and the smallest sum wins.

    time = latency * operations + bytes / bandwidth

The model ranks; it is not meant to predict (nccl src/graph/tuning.cc, enqueue.cc). How a pair is rated is in
:mod:`clustersim.collectives.nccl.ratings`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import msgspec

from clustersim.collectives.nccl.constants import tree_correction
from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.collectives.nccl.ratings import KINDS, Rating, ratings
from clustersim.collectives.nccl.search import exec_channels, search
from clustersim.collectives.nccl.view import NcclRequest, System
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.errors import ProgramError


class TunerCandidate(msgspec.Struct, frozen=True):
    """An algorithm with a protocol, as the tuner rates it for one request.

    Parameters
    ----------
    algorithm, protocol : such as ``"ring"`` and ``"LL128"``.
    latency_s : float [s]. bandwidth : float [bytes/s] of the request's bytes (algorithm bandwidth).
    time_s : float [s], what NCCL compares.
    """

    algorithm: str
    protocol: str
    latency_s: float
    bandwidth: float
    time_s: float


def choose(
    kind: str,
    nbytes: float,
    system: System,
    asked: NcclRequest | None = None,
    *,
    algorithm: str | None = None,
    protocol: str | None = None,
) -> TunerCandidate:
    """What NCCL runs for a collective.

    Parameters
    ----------
    kind : one of :data:`KINDS`. nbytes : float [bytes], the full tensor, NCCL's S.
    algorithm, protocol : pins, as in NCCL_ALGO and NCCL_PROTO (``"Ring"``, ``"NVLSTree"``, ``"LL128"``; lists with
        commas, per collective ``allreduce:tree;broadcast:ring``). A pinned LL128 is used even where NCCL holds it
        unsafe, as there.

    Raises :class:`ProgramError` for an unknown kind or pin, or pins that leave nothing.
    """
    own = [name for name, row in ALGORITHMS.items() if kind in row.kinds]
    algorithms = pinned_algorithms(algorithm, kind, own)
    protocols = pinned_protocols(protocol, kind)
    asked = replace(asked or NcclRequest(), force_ll128=protocols is not None and "LL128" in protocols)
    left = [
        candidate
        for candidate in candidates(kind, nbytes, system, asked)
        if (not algorithms or candidate.algorithm in algorithms) and (not protocols or candidate.protocol in protocols)
    ]
    if not left:
        raise ProgramError(_nothing_left(kind, rated(kind, system, asked), algorithms, protocols))
    return min(left, key=lambda candidate: candidate.time_s)


def candidates(
    kind: str, nbytes: float, system: System, asked: NcclRequest | None = None
) -> tuple[TunerCandidate, ...]:
    """All pairs NCCL would compare, in its order."""
    table = rated(kind, system, asked or NcclRequest())
    return tuple(_timed(rating, kind, nbytes, system) for rating in table if not rating.why)


@lru_cache(maxsize=4096)
def rated(kind: str, system: System, asked: NcclRequest) -> tuple[Rating, ...]:
    """Every pair of NCCL's table, those it would not use with the reason."""
    return ratings(kind, system, search(system), asked)


def _nothing_left(
    kind: str, table: tuple[Rating, ...], algorithms: tuple[str, ...] | None, protocols: tuple[str, ...] | None
) -> str:
    pinned_text = "/".join(",".join(pin) if pin else "any" for pin in (algorithms, protocols))
    able = sorted({f"{r.algorithm}/{r.protocol}" for r in table if not r.why})
    reasons = sorted({r.why for r in table if r.why and (not algorithms or r.algorithm in algorithms)})
    can = [name for name in algorithms or () if name in KINDS[kind]]
    if algorithms and not can:
        reasons = [f"only {', '.join(KINDS[kind])} do it"]
    why = f": {'; '.join(reasons)}" if reasons else ""
    return f"{kind} cannot run as {pinned_text}{why}; possible here: {', '.join(able)}"


def _timed(rating: Rating, kind: str, nbytes: float, system: System) -> TunerCandidate:
    """A rating at a size: trees lose bandwidth at medium sizes, a large ring waits longer per step."""
    latency = rating.latency
    bandwidth = rating.bandwidth
    scale = int(nbytes) >> 6
    if rating.algorithm == "tree" and kind == "all_reduce" and scale:
        shares = tree_correction(rating.protocol)
        index = scale.bit_length() - 1
        bandwidth *= shares[index] if index < len(shares) else 1.0
    if rating.algorithm == "ring" and rating.protocol == "Simple" and system.n_nodes > 1 and kind == "all_reduce":
        blocks = exec_channels(system, search(system))
        if int(nbytes) // (blocks * system.n_ranks) >= 64:
            latency *= 1.9 if system.sm < 80 else 1.4
    time = latency + nbytes / (1000 * bandwidth)
    return TunerCandidate(rating.algorithm, rating.protocol, latency * 1e-6, bandwidth * 1e9, time * 1e-6)


LEAST_TRAFFIC = 16384
"""Bytes that a channel moves at least (nccl src/enqueue.cc, MinTrafficPerChannel)."""


def channels_used(candidate: TunerCandidate, nbytes: float, system: System, kind: str = "all_reduce") -> int:
    """Channels (CUDA blocks) NCCL gives a message of this size: fewer for small ones (nccl src/enqueue.cc)."""
    graphs = search(system)
    blocks = exec_channels(system, graphs)
    algorithm = candidate.algorithm
    protocol = candidate.protocol
    traffic = nbytes * {"all_reduce": 2, "all_gather": system.n_ranks, "reduce_scatter": system.n_ranks}.get(kind, 1)
    if algorithm in ("nvls", "nvls_tree"):
        most = 16 if system.sm < 100 else 24 if system.n_nodes == 1 else 32
        return max(1, min(most, math.ceil(traffic / LEAST_TRAFFIC)))
    ring = graphs["ring"]
    threads = 640 if protocol == "LL128" else 512
    if algorithm == "ring" and protocol == "Simple" and ring.n_channels * ring.bw_intra <= 12:
        threads = 256
    thread_bytes = 64 if protocol == "Simple" else 8
    if algorithm == "ring" and protocol == "LL":
        thread_bytes *= system.n_ranks
    wanted = math.floor(nbytes / (threads * thread_bytes))
    if protocol == "LL":
        traffic *= 4
    return max(1, min(blocks, wanted, math.ceil(traffic / LEAST_TRAFFIC)))
