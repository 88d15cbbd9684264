"""All-reduce the naive ways, to compare with: one member after the other, and a ring that never cuts its tensor.

``sequential`` hands the tensor from member to member, each adding its own, and hands the sum back the same way: O(n)
time in which all links but one idle. ``ring_unsplit`` lets every member's whole tensor go all the way round: n - 1
rounds, (n-1) S out of every member, n/2 times what a ring of cut tensors needs. (Everyone to everyone at once is
``direct``.)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clustersim.collectives import ring
from clustersim.collectives.base import Algorithm, Channel, EdgeCosts, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import traffic_of
from clustersim.collectives.rounds import Round, RoundSteps, rounds_algorithm

KINDS = frozenset({"all_reduce"})


def sequential(kind: str, n: int, root: int = 0) -> RoundSteps:
    """2 (n-1) rounds of one transfer of S: up the line of members and down again."""
    line = np.arange(n, dtype=np.int64)
    up = [Round(line[i : i + 1], line[i + 1 : i + 2], 1.0, lambda _: [0], reduce=True) for i in range(n - 1)]
    down = [Round(sent.dst, sent.src, 1.0, lambda _: [0]) for sent in reversed(up)]
    return RoundSteps((*up, *down), np.ones(1), blocking=False)


def unsplit_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """n - 1 whole tensors over every edge of the ring."""
    n = group.size
    parts = [
        (channel.order, np.roll(channel.order, -1), (n - 1) * channel.share, channel.edge_rails) for channel in channels
    ]
    return traffic_of(parts, n - 1, group.n_nodes - 1)


def unsplit_sends(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """(sent, received) per byte of S by a member: its own tensor and n - 2 others', on to the next."""
    return float(n - 1), float(n - 1)


def unsplit_schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Piece ``c * n + k`` is channel c's part of member k's whole tensor; members add up what they gathered."""
    gathered = ring.schedule(replace(request, kind="all_gather"), group, channels)
    return replace(gathered, chunk_fraction=np.repeat([channel.share for channel in channels], group.size))


def unsplit_fill(request: Request, group: Group, channels: tuple[Channel, ...], costs: EdgeCosts) -> float:
    """As a gathering ring's, whose blocks are whole tensors: ``costs`` has their bytes."""
    return ring.fill(replace(request, kind="all_gather"), group, channels, costs)


SEQUENTIAL = rounds_algorithm("sequential", KINDS, sequential)
RING_UNSPLIT = Algorithm("ring_unsplit", KINDS, unsplit_traffic, unsplit_sends, unsplit_schedule, fill=unsplit_fill)
