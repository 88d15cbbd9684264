"""NVLS and NVLSTree: NVLink switches that add and multicast (NVLink SHARP, Hopper and later).

Each of the p members of an island is the *head* of S/p (of islands that hold different numbers, as many of each as the
smallest has: NCCL's ranks take the least of their searches). To reduce, a head reads its part through the switch, which
fetches it from everybody and adds: S leaves every member, S/p arrives. To give the result out, a head stores its part
once and the switch copies it to all: S/p leaves, S arrives. An all_reduce is both: S (1 + 1/p) each way, against
2 (p-1)/p S of a ring. NVLSTree reduces each head's part between islands over a double binary tree on the head's rail.

Where the network's switches reduce, too (InfiniBand SHARP), NVLS goes on over several islands: each head's S/p crosses
its NIC once each way, however many islands there are.
"""

from __future__ import annotations

import numpy as np

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Traffic
from clustersim.collectives.build import Part, everyone, traffic_of
from clustersim.collectives.islands import heads, n_islands
from clustersim.collectives.sharp import between_islands, between_share, needs_sharp
from clustersim.collectives.tree import double_tree, levels
from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})
TREE_KINDS = frozenset({"all_reduce"})


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """What each member sends to and gets from its switches, and over several islands what heads send to the network's.

    Raises :class:`ProgramError` for several islands whose network does not reduce.
    """
    _check(group)
    table = heads(group)
    several = n_islands(group) > 1
    if several:
        needs_sharp(group, "nvls")
    parts = _inside(request.kind, group, table)
    if several:
        parts += between_islands(request.kind, table)
    return traffic_of(parts, 2 if request.kind == "all_reduce" else 1, 2 * several)


def tree_traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Reduce inside by the switch, between islands by two trees per head, and multicast."""
    _check(group)
    table = heads(group)
    n, p = table.shape
    if n == 1:
        raise ProgramError("algorithm 'nvls_tree' needs more than one node; inside one use 'nvls'")
    parts = _inside(request.kind, group, table)
    deepest = 0
    for parent in double_tree(n):
        child = np.flatnonzero(parent >= 0)
        below = table[child].ravel()
        above = table[parent[child]].ravel()
        parts += [(below, above, 0.5 / p, -1), (above, below, 0.5 / p, -1)]
        deepest = max(deepest, int(levels(parent).max()))
    return traffic_of(parts, 2 + 2 * deepest, 2 * deepest)


def _inside(kind: str, group: Group, table: Ints) -> list[Part]:
    member, head = everyone(group), table.ravel()
    every, some = (np.full(len(positions), -1, dtype=np.int64) for positions in (member, head))
    share = 1.0 / table.shape[1]
    reads: list[Part] = [(member, every, 1.0, -1), (some, head, share, -1)]
    stores: list[Part] = [(head, some, share, -1), (every, member, 1.0, -1)]
    return {"all_reduce": reads + stores, "reduce_scatter": reads, "all_gather": stores}[kind]


def _check(group: Group) -> None:
    for node in group.node_ids.tolist():
        kind = group.topology.node_types[node]
        if not kind.nvls:
            raise ProgramError(f"{kind.name!r} has no NVLink SHARP, which algorithms 'nvls' and 'nvls_tree' run in")


def sends(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """(sent, received) per byte of S by a member, the head of a part of its island's S.

    >>> sends("reduce_scatter", 8)  # everything goes to the switch, a part comes back
    (1.0, 0.125)
    """
    part = n_islands / n
    between = 2.0 * (n_islands - 1) / n  # heads exchange their parts over trees, up and down
    sent = {"all_reduce": 1.0 + part, "reduce_scatter": 1.0, "all_gather": part}[kind]
    received = {"all_reduce": 1.0 + part, "reduce_scatter": part, "all_gather": 1.0}[kind]
    return sent + between, received + between


def sends_with_sharp(kind: str, n: int, n_islands: int = 1) -> tuple[float, float]:
    """:func:`sends` of NVLS, whose heads' parts go through a network that reduces."""
    sent, received = sends(kind, n, n_islands)
    tree = 2.0 * (n_islands - 1) / n
    share = between_share(kind, n, n_islands)
    return sent - tree + share, received - tree + share


NVLS = Algorithm("nvls", KINDS, traffic, sends_with_sharp)
NVLS_TREE = Algorithm("nvls_tree", TREE_KINDS, tree_traffic, sends)
