"""Hierarchical: inside each island first, then between islands, each member on its own rail, then inside again.

An all_reduce is a ring reduce-scatter over the p members of an island, a ring all_reduce of the own 1/p over the
members at the same place of all N islands, and a ring all-gather inside: 2 (N-1)/N S/p cross each member's NIC, and
NVLink carries 2 (p-1)/p S. One phase ends before the next begins. Needs as many members on every island.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from clustersim.collectives.base import Algorithm, Channel, EdgeCosts, Group, Request, Traffic, TransferSchedule
from clustersim.collectives.build import ScheduleWriter, least_sent, traffic_of
from clustersim.collectives.islands import member_islands
from clustersim.collectives.waves import Wave, Waves
from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError

KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter"})


def grid(group: Group) -> Ints:
    """(N, p) int: members by island and place. Raises :class:`ProgramError` where islands hold different numbers."""
    island = member_islands(group)
    counts = np.bincount(island)
    if counts.min() != counts.max():
        raise ProgramError(
            f"algorithm 'hierarchical' needs as many members on every node; here they hold {counts.min()} to "
            f"{counts.max()}: use 'ring' or 'tree'"
        )
    table: Ints = np.argsort(island, kind="stable").reshape(len(counts), -1)
    return table


def _phases(kind: str, shape: tuple[int, int]) -> list[tuple[str, bool, float]]:
    """(what, between islands, bytes per ring edge and byte of S) of each phase."""
    islands, p = shape
    inside = (p - 1) / p
    outside = (islands - 1) / islands / p
    down = [("reduce_scatter", False, inside), ("reduce_scatter", True, outside)]
    up = [("all_gather", True, outside), ("all_gather", False, inside)]
    chosen = {"all_reduce": down + up, "reduce_scatter": down, "all_gather": up}[kind]
    return [phase for phase in chosen if phase[2] > 0]


def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
    """Rings inside and between islands, a round each."""
    table = grid(group)
    parts = []
    steps = {False: 0, True: 0}
    for _, between, fraction in _phases(request.kind, table.shape):
        axis = 0 if between else 1
        parts.append((table.ravel(), np.roll(table, -1, axis=axis).ravel(), fraction, -1))
        steps[between] += table.shape[axis] - 1
    return traffic_of(parts, steps[False] + steps[True], steps[True], rounds=range(len(parts)))


def schedule(request: Request, group: Group, channels: tuple[Channel, ...]) -> TransferSchedule:
    """Every transfer, one per member's piece; rings pass pieces on as they come."""
    table = grid(group)
    writer = ScheduleWriter()
    islands, p = table.shape
    brought: dict[tuple[int, int], list[int]] = {}
    for phase, between, _ in _phases(request.kind, table.shape):
        for line in range(p if between else islands):
            ring = (table[:, line] if between else table[line]).tolist()
            # Pieces that end (or begin) at each place: one between islands, a whole column inside them.
            owned = [[member] for member in ring] if between else table.T.tolist()
            _ring(writer, phase, ring, owned, brought)
    return writer.done(np.full(group.size, 1.0 / group.size))


def _ring(
    writer: ScheduleWriter,
    phase: str,
    ring: list[int],
    owned: list[list[int]],
    brought: dict[tuple[int, int], list[int]],
) -> None:
    n = len(ring)
    reduces = phase == "reduce_scatter"
    for step in range(n - 1):
        sent = []
        for i in range(n):
            src = ring[i]
            dst = ring[(i + 1) % n]
            for piece in owned[(i - step - reduces) % n]:
                after = tuple(brought.get((src, piece), ()))
                sent.append((dst, piece, writer.send(src, dst, piece, after=after, reduce=reduces)))
        for dst, piece, transfer in sent:
            needed = brought.get((dst, piece), []) if reduces else []
            brought[dst, piece] = [*needed, transfer]


def waves(request: Request, group: Group, channels: tuple[Channel, ...]) -> Waves:
    """The same, a piece of every member at a time. A slot is a row of pieces at a member: of the column it holds."""
    table = grid(group)
    phases = _phases(request.kind, table.shape)
    islands, p = table.shape
    ways = [np.roll(table, -1, axis=axis).ravel() for axis in (1, 0) if table.shape[axis] > 1]
    counts = [group.size * (islands - 1 if between else (p - 1) * islands) for _, between, _ in phases]
    return Waves(
        src=np.tile(table.ravel(), len(ways)),
        dst=np.concatenate(ways),
        rail=np.full(len(ways) * group.size, -1, dtype=np.int64),
        fraction=np.full(len(ways) * group.size, 1.0 / group.size),
        n_slots=islands * group.size,
        n_transfers=sum(counts),
        each=partial(_waves, phases, table.shape),
    )


def _waves(phases: list[tuple[str, bool, float]], shape: tuple[int, int]) -> Iterator[Wave]:
    islands, p = shape
    n = islands * p
    first = 0
    island, place = (axis.ravel() for axis in np.indices(shape))
    own_row = island * p + place
    right = island * p + (place + 1) % p
    down = (island + 1) % islands * p + place
    for phase, between, _ in phases:
        reduces = phase == "reduce_scatter"
        if between:
            for step in range(islands - 1):
                rows = (island - step - reduces) % islands * n
                transfer = first + (place * (islands - 1) + step) * islands + island
                yield Wave(transfer, slice(-n, None), rows + own_row, rows + down, reduces)
            first += n * (islands - 1)
            continue
        for step in range(p - 1):
            sent = first + ((island * (p - 1) + step) * p + place) * islands
            for row in range(islands):
                yield Wave(sent + row, slice(0, n), row * n + own_row, row * n + right, False)
        first += n * (p - 1) * islands


def fill(request: Request, group: Group, channels: tuple[Channel, ...], costs: EdgeCosts) -> float:
    """Hops of the slowest ring of each phase, all but one edge; the bytes are in the rounds of the traffic."""
    table = grid(group)
    n = group.size
    total = 0.0
    for i, (_, between, _) in enumerate(_phases(request.kind, table.shape)):
        hop = costs.hop[i * n : (i + 1) * n].reshape(table.shape)
        axis = 0 if between else 1
        total += float((hop.sum(axis=axis) - hop.min(axis=axis)).max())
    return total


HIERARCHICAL = Algorithm("hierarchical", KINDS, traffic, least_sent, schedule, fill=fill, waves=waves)
