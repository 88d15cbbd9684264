"""Direct: whoever has something for another member sends it there at once, all pairs together.

The textbook's "everyone to everyone": one hop, n (n-1) transfers. For all_to_all, scatter, gather and send it is what
NCCL does (grouped sends and receives); as an all_reduce it moves (n-1) S out of every member.
Between nodes each goes by its receiver's rail (:mod:`~clustersim.collectives.peer_rails`), so channels do not matter.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import Part, RailChannel, ScheduleWriter, everyone, least_sent, traffic_of
from clustersim.collectives.islands import member_islands, n_islands
from clustersim.collectives.peer_rails import peer_rails, relays
from clustersim.collectives.rounds import Round, RoundSteps, all_sends, in_rounds, powers_below
from clustersim.core.arrays import Ints

_ALL_PAIRS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all"})
KINDS = _ALL_PAIRS | {"broadcast", "reduce", "scatter", "gather", "send", "sendrecv", "barrier"}

MOST_PAIRS = 2**15
"""Pairs beyond which a group's traffic is represented by a sample of shifts."""


def edges(request: Request, group: Group) -> tuple[Ints, Ints]:
    """(E,) senders and (E,) receivers; for all pairs by growing shift, as NCCL posts them."""
    n = group.size
    kind = request.kind
    if request.matrix is not None:  # who has nothing for another posts no send (PyTorch skips counts of zero)
        src, dst = edges(replace(request, matrix=None), group)
        sent = request.matrix.array[src, dst] > 0
        return src[sent], dst[sent]
    member = everyone(group)
    rest = np.delete(everyone(group), request.root)
    if kind in _ALL_PAIRS:
        shift = np.arange(1, n, dtype=np.int64)
        return np.tile(member, n - 1), ((member + shift[:, None]) % n).ravel()
    if kind in {"broadcast", "scatter"}:
        return np.full(n - 1, request.root, dtype=np.int64), rest
    if kind in {"reduce", "gather"}:
        return rest, np.full(n - 1, request.root, dtype=np.int64)
    if kind == "send":
        return member[:1], member[1:2]
    return member, (member + 1) % n


def _fraction(kind: str, n: int) -> float:
    """Bytes of one transfer per byte of S."""
    if kind == "barrier":
        return 0.0
    return 1.0 / n if kind in {"all_gather", "reduce_scatter", "all_to_all", "scatter", "gather"} else 1.0


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """One edge per transfer; large groups sample the shifts between islands, with the same bytes per member."""
    n = group.size
    fraction = _fraction(request.kind, group.size)
    if request.kind == "barrier":
        return in_rounds(_barrier(n).rounds, group, blocking=False)
    if request.matrix is None and request.kind in _ALL_PAIRS and n * (n - 1) > MOST_PAIRS:
        parts = _sampled(group, fraction)
    else:
        src, dst = edges(request, group)
        share = fraction if request.matrix is None else request.matrix.array[src, dst]
        parts = [(src, dst, share, peer_rails(src, dst, group))]
    return replace(traffic_of(parts, 1, int(n_islands(group) > 1)), relay=relays(group))


@lru_cache(maxsize=32)
def _barrier(n: int) -> RoundSteps:
    """Dissemination: in round k everybody tells the member 2^k further on (Hensgen, Finkel and Manber 1988)."""
    member = np.arange(n, dtype=np.int64)
    rounds = [Round(member, (member + shift) % n, 0.0, lambda _: [0], reduce=True) for shift in powers_below(n)]
    return RoundSteps(tuple(rounds), np.zeros(1), blocking=False)


def _sampled(group: Group, fraction: float) -> list[Part]:
    """Pairs inside islands exactly; for the rest a few shifts whose edges carry the others' bytes."""
    island = member_islands(group)
    n = group.size
    order = np.argsort(island, kind="stable")
    counts = np.bincount(island)
    most = int(counts.max())
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    first = np.cumsum(counts) - counts
    parts: list[Part] = []
    for step in range(1, most):  # inside: turn by `step` within the island
        turn = counts[island] > step
        member = everyone(group)[turn]
        sources = island[member]
        local = (place[member] - first[sources] + step) % counts[sources]
        parts.append((member, order[first[sources] + local], fraction, -1))
    if len(counts) == 1:
        return parts
    shifts = _shifts(n, most, max(2, MOST_PAIRS // n))
    src = np.tile(order, len(shifts))
    dst = order[((np.arange(n) + shifts[:, None]) % n).ravel()]
    away = island[src] != island[dst]
    src = src[away]
    dst = dst[away]
    share = fraction * (n - counts[island]) / np.bincount(src, minlength=n)
    parts.append((src, dst, share[src], peer_rails(src, dst, group)))
    return parts


def _shifts(n: int, most: int, count: int) -> Ints:
    """Shifts that leave every island, spread over distances and over places inside the far island."""
    step = np.linspace(most, n - most, count).astype(np.int64)
    shifts: Ints = np.unique(np.clip(step + np.arange(count) % most, most, max(most, n - most)))
    return shifts


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Every transfer, none waiting for another."""
    n = group.size
    kind = request.kind
    writer = ScheduleWriter()
    if kind == "barrier":
        return all_sends(_barrier(n))
    senders, receivers = edges(request, group)
    rails = peer_rails(senders, receivers, group)
    for src, dst, rail in zip(senders.tolist(), receivers.tolist(), rails.tolist(), strict=True):
        adds = kind in {"all_reduce", "reduce_scatter", "reduce"}
        writer.send(src, dst, _piece(kind, src, dst, n), reduce=adds, way=RailChannel(rail, 0))
    pieces = {"all_to_all": n * n, "sendrecv": n}.get(kind, n if _fraction(kind, n) < 1.0 else 1)
    sizes = np.full(pieces, _fraction(kind, n)) if request.matrix is None else request.matrix.array.ravel()
    return replace(writer.done(sizes), relay=relays(group))


def _piece(kind: str, src: int, dst: int, n: int) -> int:
    if kind in {"all_gather", "gather", "sendrecv"}:
        return src
    if kind in {"reduce_scatter", "scatter"}:
        return dst
    return src * n + dst if kind == "all_to_all" else 0


def sends(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """(sent, received) per byte of S, the mean over members; an all_reduce sends whole tensors to everybody."""
    return (float(n - 1), float(n - 1)) if kind == "all_reduce" else least_sent(kind, n, n_islands)


DIRECT = Algorithm("direct", KINDS, traffic, sends, schedule)
