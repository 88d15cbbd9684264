"""All-reduce the naive ways, to compare with: one member after the other, and a ring that never cuts its tensor.

``sequential`` hands the tensor from member to member, each adding its own, and hands the sum back the same way: O(n)
time in which all links but one idle. ``ring_unsplit`` lets every member's whole tensor go all the way round: n - 1
rounds, (n-1) S out of every member, n/2 times what a ring of cut tensors needs. (Everyone to everyone at once is
``direct``.)
"""

from __future__ import annotations

import numpy as np

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Schedule, Traffic
from clustersim.collectives.build import ScheduleWriter, Way, everyone, refuse, traffic_of

KINDS = frozenset({"all_reduce"})


def sequential_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """2 (n-1) rounds of one transfer of S: up the line of members and down again."""
    refuse("sequential", request, KINDS)
    line = everyone(group)
    src = np.concatenate([line[:-1], line[:0:-1]])
    dst = np.concatenate([line[1:], line[-2::-1]])
    crossing = int((group.nodes[src] != group.nodes[dst]).sum())
    parts = [(src[i : i + 1], dst[i : i + 1], 1.0, -1) for i in range(len(src))]
    return traffic_of(parts, len(parts), crossing, rounds=range(len(parts)))


def sequential_schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> Schedule:
    """Each transfer waits for the one before."""
    refuse("sequential", request, KINDS)
    writer = ScheduleWriter()
    before: tuple[int, ...] = ()
    last = group.size - 1
    for i in range(last):
        before = (writer.send(i, i + 1, 0, after=before, reduce=True),)
    for i in range(last, 0, -1):
        before = (writer.send(i, i - 1, 0, after=before),)
    return writer.done(np.ones(1))


def unsplit_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """n - 1 whole tensors over every edge of the ring."""
    refuse("ring_unsplit", request, KINDS)
    n = group.size
    parts = [
        (channel.order, np.roll(channel.order, -1), (n - 1) * channel.share, channel.edge_rails) for channel in channels
    ]
    return traffic_of(parts, n - 1, group.n_nodes - 1)


def unsplit_schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> Schedule:
    """Piece ``c * n + k`` is channel c's part of member k's whole tensor; members add up what they gathered."""
    refuse("ring_unsplit", request, KINDS)
    writer, n = ScheduleWriter(), group.size
    fractions: list[float] = []
    for c, channel in enumerate(channels):
        order, rail = channel.order.tolist(), channel.edge_rails.tolist()
        arrived: list[tuple[int, ...]] = [()] * n
        for step in range(n - 1):
            piece = [c * n + order[(i - step - 1) % n] for i in range(n)]
            arrived = [
                (writer.send(order[i - 1], order[i], piece[i], after=arrived[i - 1], way=Way(rail[i - 1], c)),)
                for i in range(n)
            ]
        fractions += [channel.share] * n
    return writer.done(np.array(fractions))


SEQUENTIAL = Algorithm("sequential", KINDS, sequential_traffic, sequential_schedule)
RING_UNSPLIT = Algorithm("ring_unsplit", KINDS, unsplit_traffic, unsplit_schedule)
