"""What joins nodes: one switch, rail-optimised leaf/spine, fat trees, dragonfly. Each is a function nodes -> Topology.

Parallel cables between the same two switches are one link with their summed bandwidth. A builder lays out as much of
the network as the nodes need; leaves keep the up-link bandwidth they were designed with.

Under ``routing = "adaptive"`` switches spread every transfer over the ways there are, by load (Slingshot; InfiniBand
where a subnet manager turns it on). What they spread over is one link here: a tree has one spine for all of a tier, and
a group of a dragonfly one vertex, ``local``, for the links among its switches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from clustersim.errors import TopologyError
from clustersim.fabrics.draft import Draft, Ports, lay
from clustersim.fabrics.node import Node
from clustersim.topology import Ints, Topology

ADAPTIVE = "adaptive"
PORT_LATENCY, SWITCH_LATENCY = 300e-9, 230e-9
"""Seconds between a NIC and its switch (half of 0.6 us from NIC to NIC, HDR InfiniBand) and between two switches."""


def no_fabric(nodes: Sequence[Node], *, name: str = "nodes") -> Topology:
    """Nodes that nothing joins; inside each, everything works."""
    return lay(nodes).topology(name, "none")


def one_switch(
    nodes: Sequence[Node], *, name: str = "one_switch", port_latency: float = PORT_LATENCY, routing: str = "destination"
) -> Topology:
    """Every NIC on one non-blocking switch. ``port_latency`` [s] is of each NIC-switch hop."""
    draft = lay(nodes)
    if len(draft.ports):
        switch = draft.add_switches(["switch0"])
        _attach(draft, np.broadcast_to(switch, draft.ports.vertex.shape), port_latency)
    return draft.topology(name, "one_switch", routing)


def rail_optimised(
    nodes: Sequence[Node],
    *,
    name: str = "rail_optimised",
    radix: int = 64,
    nodes_per_unit: int | None = None,
    oversubscription: float = 1.0,
    port_latency: float = PORT_LATENCY,
    switch_latency: float = SWITCH_LATENCY,
    routing: str = "destination",
) -> Topology:
    """NIC i of every node of a scalable unit on that unit's leaf i.

    ``radix`` ports a switch, half of a leaf's down (so ``nodes_per_unit`` is ``radix / 2`` unless given). Up to
    ``radix`` leaves meet at one tier of spines; more, at spines of 32-leaf same-rail pods below cores (NVIDIA's
    SuperPOD reference layout).
    """
    per_unit = nodes_per_unit or max(radix // 2, 1)
    _positive("nodes_per_unit", per_unit, "oversubscription", oversubscription, "radix", radix)
    draft = lay(nodes)
    ports = draft.ports
    if not len(ports):
        return draft.topology(name, "rail_optimised", routing)
    units = math.ceil(len(nodes) / per_unit)
    # Leaves of one rail are neighbours, so that a pod holds one rail's leaves and same-rail traffic stays below cores.
    number = ports.rail * units + ports.node // per_unit
    used, leaf_of = np.unique(number, return_inverse=True)
    leaves = draft.add_switches([f"leaf{i}" for i in range(len(used))])
    _attach(draft, leaves[leaf_of], port_latency)
    up = per_unit * float(ports.rate.max()) / oversubscription
    pods = (used // units) * math.ceil(units / max(radix // 2, 1)) + (used % units) // max(radix // 2, 1)
    _clos(draft, leaves, pods, up, radix, switch_latency, pooled=routing == ADAPTIVE)
    return draft.topology(name, "rail_optimised", routing)


def fat_tree(
    nodes: Sequence[Node],
    *,
    name: str = "fat_tree",
    radix: int = 64,
    levels: int | None = None,
    oversubscription: float = 1.0,
    port_latency: float = PORT_LATENCY,
    switch_latency: float = SWITCH_LATENCY,
    routing: str = "destination",
) -> Topology:
    """A folded Clos of ``radix``-port switches; NICs fill leaves in node order.

    ``oversubscription`` is a leaf's down-link : up-link bandwidth. ``levels`` is 2 (leaf, spine) or 3 (leaf, spine of a
    pod, core); None takes the fewest that reach. Raises :class:`TopologyError` when the NICs do not fit.
    """
    _positive("oversubscription", oversubscription, "radix", radix - 1)
    down = min(max(round(radix * oversubscription / (1 + oversubscription)), 1), radix - 1)
    draft = lay(nodes)
    ports = draft.ports
    if not len(ports):
        return draft.topology(name, "fat_tree", routing)
    n_leaves = math.ceil(len(ports) / down)
    needed = 1 if n_leaves == 1 else 2 if n_leaves <= radix else 3
    levels = max(needed, 2) if levels is None else levels
    pod = max(radix // 2, 1)
    if levels not in (2, 3) or needed > levels or n_leaves > radix * pod:
        most = down * radix * (1 if levels == 2 else pod)
        raise TopologyError(f"{name}: a {levels}-tier fat tree of radix {radix} holds {most} NICs, not {len(ports)}")
    leaves = draft.add_switches([f"leaf{i}" for i in range(n_leaves)])
    _attach(draft, leaves[np.arange(len(ports)) // down], port_latency)
    pods = np.arange(n_leaves) // pod if levels == 3 else np.zeros(n_leaves, dtype=np.int64)
    up = down * float(ports.rate.max()) / oversubscription
    _clos(draft, leaves, pods, up, radix, switch_latency, levels, pooled=routing == ADAPTIVE)
    return draft.topology(name, "fat_tree", routing)


def dragonfly(
    nodes: Sequence[Node],
    *,
    name: str = "dragonfly",
    switches_per_group: int = 32,
    nics_per_switch: int = 16,
    global_links_per_switch: int = 16,
    taper: float = 1.0,
    port_latency: float = PORT_LATENCY,
    switch_latency: float = SWITCH_LATENCY,
    routing: str = ADAPTIVE,
) -> Topology:
    """Groups whose switches are all joined; switch s of a group is joined to switch s of every other.

    The ``global_links_per_switch`` links of a switch are shared evenly by the other groups; ``taper`` scales them.
    ``routing`` other than adaptive takes the one shortest way, which neighbours then share.
    """
    _positive("switches_per_group", switches_per_group, "nics_per_switch", nics_per_switch, "taper", taper)
    _positive("global_links_per_switch", global_links_per_switch)
    draft = lay(nodes)
    ports = draft.ports
    if not len(ports):
        return draft.topology(name, "dragonfly", routing)
    n_switches, rate = math.ceil(len(ports) / nics_per_switch), float(ports.rate.max())
    groups = math.ceil(n_switches / switches_per_group)
    if groups > 1 and routing != ADAPTIVE:
        n_switches = groups * switches_per_group
    names = [f"group{i // switches_per_group}/switch{i % switches_per_group}" for i in range(n_switches)]
    switches = draft.add_switches(names)
    _attach(draft, switches[np.arange(len(ports)) // nics_per_switch], port_latency)
    share = rate * taper * global_links_per_switch / max(groups - 1, 1)
    if routing == ADAPTIVE:
        _pooled_groups(draft, switches, switches_per_group, rate, share, switch_latency)
    else:
        _minimal_groups(draft, switches, switches_per_group, rate, share, switch_latency)
    return draft.topology(name, "dragonfly", routing)


def _minimal_groups(draft: Draft, switches: Ints, size: int, rate: float, share: float, latency: float) -> None:
    """A cable between any two switches of a group, and between those of the same place in any two groups."""
    place, group = np.arange(len(switches)) % size, np.arange(len(switches)) // size
    a, b = np.triu_indices(len(switches), 1)
    inside = group[a] == group[b]
    draft.add_cables(switches[a[inside]], switches[b[inside]], rate, latency)
    far = ~inside & (place[a] == place[b])
    draft.add_cables(switches[a[far]], switches[b[far]], share, latency)


def _pooled_groups(draft: Draft, switches: Ints, size: int, rate: float, share: float, latency: float) -> None:
    """Switches below their group's ``local``, and all of those joined.

    To one other switch there are the direct cable and ``size - 2`` ways of two hops, each of which is another pair's
    direct cable: were all switches to send so at once, half of ``size`` cables' rate would be left to each (Kim et al.,
    "Technology-Driven, Highly-Scalable Dragonfly Topology", ISCA 2008, on non-minimal routing).
    """
    if len(switches) == 1:
        return
    group = np.arange(len(switches)) // size
    local = draft.add_switches([f"group{g}/local" for g in range(int(group.max()) + 1)])
    draft.add_cables(switches, local[group], rate * size / 2, latency / 2)
    a, b = np.triu_indices(len(local), 1)
    draft.add_cables(local[a], local[b], size * share, 2 * latency)


def _attach(draft: Draft, switch: Ints, latency: float) -> None:
    """A cable from every NIC to its switch, at the rate of its port."""
    ports: Ports = draft.ports
    draft.add_cables(ports.vertex, switch, ports.rate, latency)


def _clos(
    draft: Draft, leaves: Ints, pod: Ints, up: float, radix: int, latency: float, levels: int = 0, *, pooled: bool
) -> None:
    """Spines above leaves, and cores above spines if the leaves fill more than one tier reaches.

    ``up`` [bytes/s] is what one leaf sends upwards, spread evenly over the spines it sees; ``pooled`` ones are one.
    """
    if len(leaves) <= 1:
        return
    if levels != 3 and len(leaves) <= radix:
        width = 1 if pooled else _tier(len(leaves), radix, radix)
        spines = draft.add_switches([f"spine{i}" for i in range(width)])
        _full_mesh(draft, leaves, spines, up / len(spines), latency)
        return
    all_spines: list[Ints] = []
    pods, counts = np.unique(pod, return_counts=True)
    width = 1 if pooled else _tier(int(counts.max()), radix, radix // 2)
    for number, value in enumerate(pods):
        spines = draft.add_switches([f"pod{number}/spine{i}" for i in range(width)])
        _full_mesh(draft, leaves[pod == value], spines, up / width, latency)
        all_spines.append(spines)
    if len(pods) == 1:
        return
    # Spine j of every pod meets the cores of plane j, as in a k-ary fat tree; a plane's cores are one bundle.
    cores = draft.add_switches([f"core{j}" for j in range(width)])
    climb = up * int(counts.max()) / width
    for j in range(width):
        plane = np.array([spines[j] for spines in all_spines], dtype=np.int64)
        draft.add_cables(plane, np.full(len(plane), cores[j]), climb, latency)


def _tier(n_leaves: int, radix: int, down_ports: int) -> int:
    """How many spines of ``down_ports`` take the ``radix / 2`` up-links of each leaf; at least 2, for ECMP."""
    return max(2, min(math.ceil(n_leaves * (radix // 2) / max(down_ports, 1)), radix // 2))


def _full_mesh(draft: Draft, low: Ints, high: Ints, bandwidth: float, latency: float) -> None:
    draft.add_cables(np.repeat(low, len(high)), np.tile(high, len(low)), bandwidth, latency)


def _positive(*pairs: object) -> None:
    for name, value in zip(pairs[::2], pairs[1::2], strict=True):
        if not (isinstance(value, int | float) and value > 0):
            raise TopologyError(f"{name} must be above zero, not {value!r}")
