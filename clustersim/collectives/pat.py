"""PAT: parallel aggregated trees, NCCL's log-step all_gather and reduce_scatter for one GPU per node (2.23).

Every member's piece travels down a binomial tree of its own, all n trees at once, and what goes the same way in the
same round goes as one message. Far partners come first, while a message is one piece; the last round, to the neighbour,
carries half the tensor (Jeaugey 2025, arXiv:2506.20252). A reduce_scatter is the same backwards.
"""

from __future__ import annotations

import numpy as np

from clustersim.arrays import Ints
from clustersim.collectives.base import Algorithm, Channel, Group, Request, Schedule, Traffic
from clustersim.collectives.build import ScheduleWriter, everyone, refuse, traffic_of

KINDS = frozenset({"all_gather", "reduce_scatter"})


def _distances(kind: str, n: int) -> list[int]:
    """Distance of the partner in each round."""
    far_first = [1 << k for k in reversed(range((n - 1).bit_length()))]
    return far_first if kind == "all_gather" else far_first[::-1]


def _offsets(distance: int, n: int) -> Ints:
    """How far behind the sender the owners of the pieces are that go ``distance`` further in a round."""
    return np.arange(0, n - distance, 2 * distance, dtype=np.int64)


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Round by round, everybody to the member at the round's distance."""
    refuse("pat", request, KINDS)
    n, member = group.size, everyone(group)
    parts, crossing = [], 0
    for distance in _distances(request.kind, n):
        to = (member + (distance if request.kind == "all_gather" else -distance)) % n
        parts.append((member, to, len(_offsets(distance, n)) / n, -1))
        crossing += bool((group.nodes != group.nodes[to]).any())
    return traffic_of(parts, len(parts), crossing, rounds=range(len(parts)))


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> Schedule:
    """Every transfer, one per piece."""
    refuse("pat", request, KINDS)
    n, writer = group.size, ScheduleWriter()
    gathers = request.kind == "all_gather"
    brought: dict[tuple[int, int], list[int]] = {}
    for distance in _distances(request.kind, n):
        sent = []
        for near in range(n):
            far = (near + distance) % n
            src, dst = (near, far) if gathers else (far, near)
            for offset in _offsets(distance, n).tolist():
                piece = (near - offset) % n
                after = tuple(brought.get((src, piece), ()))
                sent.append((dst, piece, writer.send(src, dst, piece, after=after, reduce=not gathers)))
        for dst, piece, transfer in sent:
            brought.setdefault((dst, piece), []).append(transfer)
    return writer.done(np.full(n, 1.0 / n))


PAT = Algorithm("pat", KINDS, traffic, schedule)
