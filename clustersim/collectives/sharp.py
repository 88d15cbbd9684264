"""CollNet: algorithms of NCCL that let the network's switches add up (InfiniBand SHARP).

Inside an island members reduce as they can, to p heads (CollNetDirect: everybody sends every head its S/p) or along a
chain; what is left leaves by the heads' NICs once, is added in the switches, and comes back once. So a NIC carries S/p
each way instead of a ring's 2 (N-1)/N S/p, and latency does not grow with the islands (nccl src/transport/coll_net.cc,
src/device/all_reduce.h).
"""

from __future__ import annotations

import numpy as np

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Traffic
from clustersim.collectives.build import Part, traffic_of
from clustersim.collectives.hierarchical import grid
from clustersim.collectives.islands import n_islands
from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def needs_sharp(group: Group, name: str) -> None:
    """Raises :class:`ProgramError` for a network whose switches do not reduce."""
    if not group.topology.sharp:
        raise ProgramError(
            f"algorithm {name!r} over several nodes needs a network that reduces: [fabric] sharp = true in the topology"
        )


def between_islands(kind: str, table: Ints) -> list[Part]:
    """What (N, p) heads send into the network and get from it, per byte of S.

    The switches stand between islands, so each head's part is laid as a ring over the islands: it leaves each NIC once
    and arrives once, which is what its NIC and the ports see.
    """
    islands, p = table.shape
    share = between_share(kind, islands * p, islands)
    return [(table.ravel(), np.roll(table, -1, axis=0).ravel(), share, -1)]


def direct_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Everybody to every head of his island, the heads through the network, and back."""
    table = _table(group, "collnet_direct")
    p = table.shape[1]
    rounds = 2 if request.kind == "all_reduce" else 1
    parts: list[Part] = []
    for shift in range(1, p):
        parts.append((table.ravel(), np.roll(table, -shift, axis=1).ravel(), rounds / p, -1))
    parts += between_islands(request.kind, table)
    return traffic_of(parts, rounds * int(p > 1) + 2, 2)


def chain_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Down a chain through each island to the member at the network, and back up; a channel begins at each member."""
    table = _table(group, "collnet_chain")
    p = table.shape[1]
    # Of p channels each carries S/p over p - 1 edges of its island, so every edge of the closed chain has (p-1)/p S.
    down = (table.ravel(), np.roll(table, -1, axis=1).ravel(), (p - 1) / p, -1)
    back = (table.ravel(), np.roll(table, 1, axis=1).ravel(), (p - 1) / p, -1)
    parts: list[Part] = [down, back] if p > 1 else []
    return traffic_of(parts + between_islands(request.kind, table), 2 * (p - 1) + 2, 2)


def _table(group: Group, name: str) -> Ints:
    needs_sharp(group, name)
    if n_islands(group) == 1:
        raise ProgramError(f"algorithm {name!r} needs more than one node; inside one there is no network to reduce in")
    return grid(group)


def between_share(kind: str, n: int, n_islands: int) -> float:
    """What a member, head of a part of its island's S, sends into the network and gets from it, per byte of S."""
    if n_islands == 1:
        return 0.0
    return n_islands / n if kind == "all_reduce" else (n_islands - 1) / n


def sends(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """(sent, received) per byte of S by a member: to the heads of its island and back, and its part in the network.

    >>> sends("all_reduce", 16, 2)
    (1.875, 1.875)
    """
    rounds = 2.0 if kind == "all_reduce" else 1.0
    moved = rounds * (1.0 - n_islands / n) + between_share(kind, n, n_islands)
    return moved, moved


COLLNET_DIRECT = Algorithm("collnet_direct", KINDS, direct_traffic, sends)
COLLNET_CHAIN = Algorithm("collnet_chain", frozenset({"all_reduce"}), chain_traffic, sends)
