"""Where the vertices of a machine go on paper: as it is built, from NVSwitches at the bottom to spines at the top.

Inside a node the GPUs stand in a row; below them the NVSwitches, above them PCIe switches with the CPUs between, and on
top the NICs, which meet the leaves above. What hangs on the same PCIe switch stands together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from clustersim.core.topology import CPU, GPU, NIC, NVSWITCH, PCIE_SWITCH, SWITCH, Topology

ROWS = {NVSWITCH: -0.15, GPU: 1.15, PCIE_SWITCH: 2.2, CPU: 2.75, NIC: 3.4}
"""Heights inside a node."""
TIER = 1.25
FIRST_TIER = 5.0
"""Height between network tiers, and of the lowest."""

Places = dict[int, tuple[float, float]]
Neighbours = Mapping[int, set[int]]


def neighbours(topology: Topology, vertices: Iterable[int]) -> dict[int, set[int]]:
    """Who is linked to whom among some vertices, both directions as one."""
    inside = np.zeros(len(topology.vertex_names), dtype=bool)
    chosen = list(vertices)
    inside[chosen] = True
    keep = inside[topology.link_src] & inside[topology.link_dst]
    near: dict[int, set[int]] = {v: set() for v in chosen}
    for a, b in zip(topology.link_src[keep].tolist(), topology.link_dst[keep].tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)
    return near


def place_node(topology: Topology, node: int) -> Places:
    """Places of one node's vertices, x from 0 to (number of columns - 1)."""
    node_vertices = np.flatnonzero(topology.vertex_node == node).tolist()
    kinds = {v: topology.vertex_kinds[v] for v in node_vertices}
    near = neighbours(topology, node_vertices)
    gpus = _gpu_order([v for v in node_vertices if kinds[v] == GPU], near, kinds)
    x = {v: float(i) for i, v in enumerate(gpus)}
    width = max(1.0, len(gpus) - 1.0)
    # Nearest to the GPUs first: each next kind stands over the middle of what it joins.
    for kind in (PCIE_SWITCH, CPU, NIC, NVSWITCH, SWITCH):
        row = [v for v in node_vertices if kinds[v] == kind]
        if kind == NVSWITCH:
            x |= {v: place for v, (place, _) in evenly(row, 0.0, width).items()}
            continue
        # A CPU does not stand where another CPU does.
        near_places = {v: [x[w] for w in near[v] if w in x and kinds[w] not in {kind, NVSWITCH}] for v in row}
        wanted = {v: float(np.mean(places)) if places else width / 2 for v, places in near_places.items()}
        x |= _spread(wanted, 1.0 if kind in {NIC, PCIE_SWITCH} else 1.4, width)
    return {v: (x[v], ROWS.get(kinds[v], ROWS[NIC])) for v in node_vertices}


def _gpu_order(gpus: list[int], near: Neighbours, kinds: Mapping[int, str]) -> list[int]:
    """GPUs by number; those of one PCIe switch or CPU together."""
    parents = {g: min((v for v in near[g] if kinds[v] in {PCIE_SWITCH, CPU}), default=0) for g in gpus}
    first: dict[int, int] = {}
    for g in gpus:
        first.setdefault(parents[g], g)
    return sorted(gpus, key=lambda g: (first[parents[g]], g))


def evenly(row: Sequence[int], y: float, width: float) -> Places:
    """A row at a height, its vertices evenly over a width."""
    return {v: ((i + 0.5) * (width + 1) / len(row) - 0.5, y) for i, v in enumerate(row)}


def _spread(wanted: Mapping[int, float], gap: float, width: float) -> dict[int, float]:
    """Close to where they want to be, but at least ``gap`` apart where the width allows, in order."""
    row = sorted(wanted, key=lambda v: (wanted[v], v))
    if len(row) < 2:
        return dict(wanted)
    gap = min(gap, (width + 0.6) / (len(row) - 1))
    want = np.array([wanted[v] for v in row])
    # Pushed from the left and pulled from the right; the mean of both keeps groups centred.
    steps = gap * np.arange(len(row))
    right = np.maximum.accumulate(want - steps) + steps
    left = np.minimum.accumulate((want - steps)[::-1])[::-1] + steps
    centred = (left + right) / 2
    centred -= np.clip(centred[-1] - (width + 0.3), 0.0, None)
    return dict(zip(row, np.maximum(centred, steps - 0.3).tolist(), strict=True))


def tiers(topology: Topology) -> list[list[int]]:
    """Network switches from those next to the NICs upwards."""
    outside = np.flatnonzero(topology.vertex_node < 0)
    switches = [v for v in outside.tolist() if topology.vertex_kinds[v] == SWITCH]
    if topology.fabric == "dragonfly" and switches:
        return [switches]  # groups stand side by side, not on top of each other
    left = np.zeros(len(topology.vertex_names), dtype=bool)
    left[switches] = True
    below = np.zeros(len(left), dtype=bool)
    below[topology.nics] = True
    groups: list[list[int]] = []
    while left.any():
        reached = np.zeros(len(left), dtype=bool)
        reached[topology.link_dst[below[topology.link_src]]] = True
        tier = reached & left
        if not tier.any():
            tier = left.copy()
        groups.append(np.flatnonzero(tier).tolist())
        left &= ~tier
        below = tier
    return groups


def shared_switches(topology: Topology) -> list[int]:
    """GPU switches that belong to several nodes, as in an NVL72."""
    outside = np.flatnonzero(topology.vertex_node < 0).tolist()
    return [v for v in outside if topology.vertex_kinds[v] != SWITCH]
