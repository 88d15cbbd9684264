"""Channels: the parallel rings and trees of one collective, laid over all rails.

Channel ``c`` starts on NIC slot ``c`` of every island and each next one on the next slot, so that all NICs carry the
same load in both directions. A ring enters an island at the GPU that owns the slot's NIC and must leave it from
another GPU: by the same NIC where two members sit beside it (A100: two GPUs and two NICs a switch), else by the NIC of
that other GPU, on which it then enters the next island. So rails alternate from island to island, as NCCL's
``crossNic = 2`` does (src/graph/connect.cc), and an odd number of islands closes over a third rail; no ring edge
changes rail in the fabric. Where RCCL has the rings in a table, rings change places in pairs.
"""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.base import Channel, Group
from clustersim.collectives.islands import IslandShape, owned_nics, ports, shapes
from clustersim.collectives.local_paths import ANY, CYCLE, is_full_mesh, local_paths, mesh_degree
from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError, nearest
from clustersim.core.memo import kept_with_topology

ALIKE = 0.01
"""NICs whose rates differ by less are taken for equal."""
LAYOUTS = ("ring", "tree")


class IslandSlot(msgspec.Struct, frozen=True):
    """One way in and out of an island.

    Parameters
    ----------
    rails : of NICs used side by side (EFA: four 100 Gb/s NICs a GPU are one slot); -1 without NICs.
    owners : members (index in the shape) whose own NICs these are. near : members to which they are nearest.
    """

    rails: tuple[int, ...]
    owners: tuple[int, ...]
    near: tuple[int, ...]


def channels(group: Group, n_channels: int, layout: str = "ring", rails: tuple[int, ...] = ()) -> tuple[Channel, ...]:
    """Lay out ``n_channels`` channels over all rails.

    Parameters
    ----------
    n_channels : int, NCCL's search channels. A channel whose slot holds several NICs comes back as that many
        :class:`Channel` of one ``index``, each with its part of the share.
    layout : ``"ring"``, or ``"tree"``: each island's order is a chain hanging below the GPU that owns the channel's
        NIC, and the rail is the same everywhere.
    rails : those that the channels enter by, one after the other; none for all in order.

    Returns
    -------
    tuple of Channel; shares sum to 1.
    """
    if layout not in LAYOUTS:
        raise ProgramError(f"no channel layout {layout!r}; {nearest(layout, LAYOUTS)}")
    if n_channels < 1:
        raise ProgramError(f"a collective needs at least one channel, not {n_channels}")
    return _laid_out(group, n_channels, layout, rails)


@kept_with_topology(maxsize=64)
def _laid_out(group: Group, n_channels: int, layout: str, rails: tuple[int, ...]) -> tuple[Channel, ...]:
    island_shapes = shapes(group)
    n_islands = sum(len(shape.rows) for shape in island_shapes)
    slots = [_slots(group, shape) if n_islands > 1 else [] for shape in island_shapes]
    slots = _entered(slots, rails) or _as_searched(group, island_shapes, slots, n_channels)
    offsets = _offsets(
        n_islands, min(map(len, slots)) if layout == "ring" and _must_alternate(island_shapes, slots) else 1
    )
    turns = _turns(group, island_shapes, slots)
    cases = [3 * offsets[shape.rows] + offsets[shape.rows + 1] for shape in island_shapes]
    paths = [
        _paths(group, shape, own, n_channels, layout, np.unique(case).tolist(), turns)
        for shape, own, case in zip(island_shapes, slots, cases, strict=True)
    ]
    sizes = np.zeros(n_islands, dtype=np.int64)
    for shape in island_shapes:
        sizes[shape.rows] = shape.size
    starts = np.cumsum(sizes) - sizes
    channels: list[Channel] = []
    sides = list(zip(island_shapes, slots, strict=True))
    for c in range(n_channels):
        order = np.empty(group.size, dtype=np.int64)
        for shape, case, path in zip(island_shapes, cases, paths, strict=True):
            for value in np.unique(case).tolist():
                chosen = case == value
                places = starts[shape.rows[chosen]][:, None] + np.arange(shape.size)
                order[places] = shape.positions[chosen][:, path[value][c]]
        channels.extend(_striped(c, n_channels, order, starts + sizes - 1, sides, offsets, turns))
    return tuple(channels)


def natural_channels(group: Group) -> int:
    """How many channels use everything: one per NIC slot, or per direction of every NVLink of a GPU in a mesh."""
    island_shapes = shapes(group)
    if sum(len(shape.rows) for shape in island_shapes) > 1:
        return max(len(_slots(group, shape)) for shape in island_shapes)
    return mesh_degree(group.topology, island_shapes[0].gpus)


def _slots(group: Group, shape: IslandShape) -> list[IslandSlot]:
    """The distinct sets of NICs that members own, in member order."""
    topology = group.topology
    router = routing.router(topology)
    owned = ports(group, shape)
    near = [{int(nic) for nic in router.nearest_nics(int(gpu))} for gpu in shape.gpus]
    slots: list[IslandSlot] = []
    for nics in dict.fromkeys(owned):
        if nics:
            owners = tuple(i for i, own in enumerate(owned) if own == nics)
            beside = tuple(i for i, close in enumerate(near) if set(nics) <= close)
            slots.append(IslandSlot(tuple(router.rail(nic) for nic in nics), owners, beside))
    everyone = tuple(range(shape.size))
    return slots or [IslandSlot((-1,), everyone, everyone)]


def _as_searched(
    group: Group, shapes: tuple[IslandShape, ...], slots: list[list[IslandSlot]], n_channels: int
) -> list[list[IslandSlot]]:
    """Slots in the order in which channels take them, where NICs say that they differ: each channel the one with most
    rate left for it, so that a slow NIC has fewer channels than the others, or none; of equals the one with fewest.

    That is what NCCL's search comes to: its channels have one speed, and a NIC takes as many as its rate has room for.
    Rates are those that NCCL reads, and the least of all islands, for a ring edge stays on its rail: a rail that some
    island has no NIC on has no channel.
    """
    slots = _on_common_rails(slots)
    counts = {len(own) for own in slots}
    if len(counts) > 1 or not min(counts, default=0):
        return slots
    rates = [[_slot_rate(group, shape, slot) for slot in own] for shape, own in zip(shapes, slots, strict=True)]
    least = np.array(rates).min(axis=0)
    if least.min() >= (1.0 - ALIKE) * least.max():
        return slots
    taken = np.zeros(len(least), dtype=np.int64)
    turns = []
    for _ in range(n_channels):
        slot = int(np.lexsort((taken, -least / (taken + 1)))[0])
        turns.append((int(taken[slot]), slot))
        taken[slot] += 1
    return [[_turned(own[slot], turn) for turn, slot in sorted(turns)] for own in slots]


def _entered(slots: list[list[IslandSlot]], rails: tuple[int, ...]) -> list[list[IslandSlot]]:
    """Of every island the slots of these rails, in their order; nothing where an island lacks one of them.

    A rail that more channels enter by than another stands there once for each, and its owners take turns.
    """
    of_rail = [{rail: slot for slot in own for rail in slot.rails} for own in slots]
    if not rails or any(rail not in rails_of for rails_of in of_rail for rail in rails):
        return []
    uses = [rails[:place].count(rail) for place, rail in enumerate(rails)]
    evenly = len(rails) == len(set(rails)) * (max(uses) + 1)
    turns = [(rail, use) for rail, use in zip(rails, uses, strict=True) if use == 0 or not evenly]
    return [[_turned(rails_of[rail], use) for rail, use in turns] for rails_of in of_rail]


def _on_common_rails(slots: list[list[IslandSlot]]) -> list[list[IslandSlot]]:
    """Of islands with different numbers of slots, those whose rails every island has; all of them where none is."""
    if len({len(own) for own in slots}) < 2:
        return slots
    common = set.intersection(*({slot.rails for slot in own} for own in slots))
    common_slots = [[slot for slot in own if slot.rails in common] for own in slots]
    return common_slots if common and len({len(own) for own in common_slots}) == 1 else slots


def _turned(slot: IslandSlot, turn: int) -> IslandSlot:
    """A slot whose owners take turns."""
    first = turn % len(slot.owners)
    return msgspec.structs.replace(slot, owners=slot.owners[first:] + slot.owners[:first])


def _slot_rate(group: Group, shape: IslandShape, slot: IslandSlot) -> float:
    """What NCCL takes a slot's NICs for [bytes/s]."""
    owned = owned_nics(group.topology, shape.gpus)
    router = routing.router(group.topology)
    return float(sum(router.reported_bandwidth(nic) for nic in owned[slot.owners[0]]))


def _must_alternate(island_shapes: tuple[IslandShape, ...], slots: list[list[IslandSlot]]) -> bool:
    """Whether some slot has no second member beside it, and every island has another slot to leave by."""
    lonely = any(
        shape.size > 1 and len(slot.near) < 2 for shape, own in zip(island_shapes, slots, strict=True) for slot in own
    )
    return lonely and all(len(own) > 1 for own in slots)


def _turns(group: Group, island_shapes: tuple[IslandShape, ...], slots: list[list[IslandSlot]]) -> bool:
    """Whether every island is a full mesh with a slot for each GPU, whose rings change places with a neighbour's."""
    return all(
        shape.size == len(own) and len(own) % 4 == 0 and is_full_mesh(group.topology, shape.gpus)
        for shape, own in zip(island_shapes, slots, strict=True)
    )


def _slot_of(channel: int, offset: int, n_slots: int, turns: bool) -> int:
    """The slot of a channel at an offset of 0, 1 or 2: so many slots on; or, where rings of a full mesh change places,
    its own, its neighbour's, or that of the pair beside it. From any of these to another it is one for one both ways,
    which :func:`local_paths` asks for."""
    return channel % n_slots ^ (0, 1, 3)[offset] if turns else (channel + offset) % n_slots


def _offsets(n_islands: int, n_slots: int) -> Ints:
    """(n_islands + 1,) the offset by which a ring enters island k: 0 1 0 1 ... and back to 0."""
    offsets = np.arange(n_islands + 1, dtype=np.int64) % 2 if n_slots > 1 else np.zeros(n_islands + 1, dtype=np.int64)
    offsets[-1] = 0
    if n_slots > 1 and n_islands % 2:
        offsets[-2] = 2 if n_slots > 2 else 0
    return offsets


def _paths(
    group: Group,
    shape: IslandShape,
    slots: list[IslandSlot],
    n_channels: int,
    layout: str,
    cases: list[int],
    turns: bool,
) -> dict[int, list[Ints]]:
    """Local paths of every channel, by case = 3 * entry offset + exit offset; an island has one case."""
    paths = {}
    for case in cases:
        sides = [
            tuple(_slot_of(c, offset, len(slots) or 1, turns) for offset in divmod(case, 3)) for c in range(n_channels)
        ]
        ends = tuple(_ends(shape, slots, side, c, layout) for c, side in enumerate(sides))
        paths[case] = local_paths(group.topology, shape.gpus, ends)
    return paths


def _ends(shape: IslandShape, slots: list[IslandSlot], sides: tuple[int, ...], c: int, layout: str) -> tuple[int, int]:
    """First and last member of channel c's path through an island, which it enters and leaves by these slots."""
    if not slots:  # one island: rings close inside it, and chains take turns at the head
        return (0, CYCLE) if layout == "ring" else (c % shape.size, ANY)
    turn = c // len(slots)
    way_in, way_out = (slots[side] for side in sides)
    first = way_in.owners[turn % len(way_in.owners)]
    if layout == "tree":
        return first, ANY
    leaving = way_out.near if way_out is way_in else way_out.owners
    rest = [i for i in leaving if i > first] + [i for i in leaving if i < first]
    return (first, rest[0]) if rest else (first, ANY)


def _striped(
    c: int,
    n_channels: int,
    order: Ints,
    last: Ints,
    sides: list[tuple[IslandShape, list[IslandSlot]]],
    offsets: Ints,
    turns: bool,
) -> list[Channel]:
    """Channel c, once per NIC of its slot; ``last`` : of each island, where its members end in ``order``."""
    slots = [own for _, own in sides]
    if not slots[0]:
        return [Channel(c, order, 1.0 / n_channels)]
    width = max(len(slot.rails) for own in slots for slot in own)
    channels = []
    for stripe in range(width):
        rails = np.full(len(order), -1, dtype=np.int64)
        for shape, own in sides:
            by_offset = [own[_slot_of(c, offset, len(own), turns)].rails for offset in range(3)]
            choice = np.array([r[stripe % len(r)] for r in by_offset], dtype=np.int64)
            rails[last[shape.rows]] = choice[offsets[shape.rows + 1]]
        first = slots[0][c % len(slots[0])].rails
        channels.append(Channel(c, order, 1.0 / (n_channels * width), first[stripe % len(first)], rails))
    return channels
