"""Tree: reduce up to a root, broadcast down again, piece by piece.

Between islands the tree is binary, and there are two of them, each with half of the payload, built so that an inner
node of one is a leaf of the other: together they use every NIC fully in both directions (Sanders, Speck, Traff 2009;
NCCL src/graph/trees.cc). Inside an island the members are a chain below the one beside the channel's NIC. 2 (n-1)/n S
leave a member over NVLink on average; S per island leave by the NICs where two islands meet, 2 S where more do.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from clustersim.collectives.base import Algorithm, Apart, Channel, EdgeCosts, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import RailChannel, ScheduleWriter, least_sent, pieces, traffic_of
from clustersim.collectives.front import few_enough, pipeline_fill
from clustersim.collectives.islands import member_islands
from clustersim.core.arrays import Ints

Number = TypeVar("Number", np.int64, np.float64)
KINDS = frozenset({"all_reduce", "broadcast", "reduce"})


def binary_tree(n: int) -> Ints:
    """(n,) int: parent of each node in NCCL's binary tree, -1 at the root (node 0).

    A node's lowest set bit is its height; odd nodes are leaves.

    >>> binary_tree(6).tolist()
    [-1, 2, 4, 2, 0, 4]
    """
    node = np.arange(n, dtype=np.int64)
    bit = node & -node
    up = (node ^ bit) | (bit << 1)
    parent = np.where(up < n, up, node ^ bit)
    parent[0] = -1
    return parent


def double_tree(n: int) -> tuple[Ints, Ints]:
    """Parents in two trees over n nodes: the second mirrors the first (n even) or is it shifted by one (n odd)."""
    first = binary_tree(n)
    if n % 2 == 0:
        mirrored = first[::-1]
        return first, np.where(mirrored < 0, -1, n - 1 - mirrored)
    shifted = np.roll(first, 1)
    return first, np.where(shifted < 0, -1, (shifted + 1) % n)


def member_trees(group: Group, channel: Channel, root: int | None) -> list[tuple[Ints, float]]:
    """Of one channel: each tree's parent by member ((n,) int, -1 at the root), and its fraction of S.

    ``root`` None keeps each tree's own; else the tree is turned to hang from that member.
    """
    islands = member_islands(group)[channel.order]
    new = np.concatenate([[True], islands[1:] != islands[:-1]])
    heads = channel.order[new]
    chain = np.full(group.size, -1, dtype=np.int64)
    chain[channel.order[1:]] = channel.order[:-1]
    parents = []
    over = double_tree(len(heads)) if len(heads) > 1 else (binary_tree(1),)
    for above in over:
        parent = chain.copy()
        parent[heads] = np.where(above >= 0, heads[above], -1)
        if root is not None:
            _reroot(parent, root)
        parents.append((parent, channel.share / len(over)))
    return parents


def _reroot(parent: Ints, root: int) -> None:
    """Turn every edge on the way from ``root`` to the old root, in place."""
    below = -1
    member = root
    while member >= 0:
        above = int(parent[member])
        parent[member] = below
        below = member
        member = above


def levels(parent: Ints) -> Ints:
    """(n,) int: hops from each member to the root."""
    return _path_sums(parent, (parent >= 0).astype(np.int64))


def _path_sums(parent: Ints, step: npt.NDArray[Number]) -> npt.NDArray[Number]:
    """(n,) sum of ``step`` over each member's way to the root, whose own is 0, by pointer doubling."""
    up = np.where(parent < 0, np.arange(len(parent)), parent)
    total = step
    while (parent[up] >= 0).any():
        total = total + total[up]
        up = up[up]
    return total


def _root(request: Request) -> int | None:
    return None if request.kind == "all_reduce" else request.root


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Each tree edge carries its tree's part of S: up for all_reduce and reduce, down for all_reduce and broadcast."""
    parts = []
    deepest = 0
    ways = 1 + (request.kind == "all_reduce")
    islands = member_islands(group)
    outer = 0
    for channel in channels:
        for parent, fraction in member_trees(group, channel, _root(request)):
            child = np.flatnonzero(parent >= 0)
            above = parent[child]
            if request.kind != "broadcast":
                parts.append((child, above, fraction, channel.nic))
            if request.kind != "reduce":
                parts.append((above, child, fraction, channel.nic))
            deepest = max(deepest, int(levels(parent).max()))
            crossing = np.full(group.size, -1, dtype=np.int64)
            leaving = child[islands[child] != islands[above]]
            crossing[islands[leaving]] = islands[parent[leaving]]
            outer = max(outer, int(levels(crossing).max()))
    return traffic_of(parts, ways * deepest, ways * outer)


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Every transfer, pipelined: a member passes a piece on as soon as it has it from all its children."""
    writer = ScheduleWriter()
    lane = 0
    fractions: list[float] = []
    for channel in channels:
        for parent, fraction in member_trees(group, channel, _root(request)):
            k = pieces(request.nbytes * fraction)
            depth = levels(parent)
            order = np.argsort(-depth, kind="stable").tolist()
            for piece in range(k):
                _one_piece(
                    writer, request.kind, parent.tolist(), order, len(fractions) + piece, RailChannel(channel.nic, lane)
                )
            fractions += [fraction / k] * k
            lane += 1
    return writer.done(np.array(fractions))


def _one_piece(
    writer: ScheduleWriter, kind: str, parent: list[int], order: list[int], piece: int, rail_channel: RailChannel
) -> None:
    """One piece up and down; ``order`` lists the members deepest first."""
    arrived: list[list[int]] = [[] for _ in parent]
    if kind != "broadcast":
        for member in order:
            if parent[member] >= 0:
                sent = writer.send(member, parent[member], piece, after=arrived[member], reduce=True, way=rail_channel)
                arrived[parent[member]].append(sent)
    if kind != "reduce":
        had = {member: arrived[member] if parent[member] < 0 else [] for member in order}
        for member in reversed(order):
            if parent[member] >= 0:
                above = parent[member]
                had[member] = [writer.send(above, member, piece, after=had[above], way=rail_channel)]


def fill(request: Request, group: Group, channels: tuple[Channel, ...], costs: EdgeCosts) -> float:
    """Seconds beyond the bytes of the slowest link: waiting for the first pieces, and draining after the last.

    Where there are too many edges to follow: what the first piece takes to the farthest member over links left to
    itself, less the place it has among the slowest edge's pieces.
    """
    trees = [tree for channel in channels for tree in member_trees(group, channel, _root(request))]
    depth = [pieces(request.nbytes * fraction) for _, fraction in trees]
    ways = 2 if request.kind == "all_reduce" else 1
    flow = traffic(request, group, channels)
    if few_enough(len(flow.src), flow.steps):
        per_edge = np.repeat(depth, [ways * (group.size - 1)] * len(trees))
        return pipeline_fill(flow, group, request.nbytes, per_edge, _waits(request.kind, trees), costs)
    first = 0
    longest = 0.0
    for (parent, _), k in zip(trees, depth, strict=True):
        child = np.flatnonzero(parent >= 0)
        total = 0.0
        for _ in range(ways):
            step = np.zeros(group.size)
            edges = slice(first, first + len(child))
            step[child] = costs.hop[edges] + costs.alone[edges] / k
            total += float(_path_sums(parent, step).max())
            first += len(child)
        longest = max(longest, total - float(costs.busy.max(initial=0.0)) / k)
    return longest


def _waits(kind: str, trees: list[tuple[Ints, float]]) -> tuple[Ints, Ints]:
    """Which edge of :func:`traffic` passes on what which other edge brought: ``(before, after)``."""
    before = []
    after = []
    first = 0
    for parent, _ in trees:
        child = np.flatnonzero(parent >= 0)
        edge = np.cumsum(parent >= 0) - 1  # of a member and its parent
        inner = child[parent[parent[child]] >= 0]
        top = child[parent[parent[child]] < 0]
        up = first
        down = first + (len(child) if kind == "all_reduce" else 0)
        if kind != "broadcast":
            before.append(up + edge[inner])
            after.append(up + edge[parent[inner]])
        if kind != "reduce":
            before.append(down + edge[parent[inner]])
            after.append(down + edge[inner])
        if kind == "all_reduce":
            before.append(up + np.repeat(edge[top], len(top)))
            after.append(down + np.tile(edge[top], len(top)))
        first = down + len(child)
    return np.concatenate(before), np.concatenate(after)


_SHARED = "streams of a pipeline share links, and the last ones to end wait for pieces of others"
APART = (
    Apart(
        frozenset({"all_reduce"}),
        0.30,
        "under NCCL's cap of a channel chunk's fill is that of slower links than its lanes hold: 0.2 ms on two nodes",
    ),
    Apart(frozenset({"broadcast"}), 0.08, _SHARED),
    Apart(frozenset({"reduce"}), 0.01, _SHARED),
)

TREE = Algorithm("tree", KINDS, traffic, least_sent, schedule, layout="tree", fill=fill, apart=APART)
