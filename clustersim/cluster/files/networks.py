"""What joins nodes: one switch, rail-optimised leaf/spine, fat trees, dragonfly. Each is a function nodes -> Topology.

Parallel cables between the same two switches are one link with their summed bandwidth. A builder lays out as much of
the network as the nodes need; leaves keep the up-link bandwidth they were designed with.

Under ``routing = "adaptive"`` switches spread every transfer over the ways there are, by load (Slingshot; InfiniBand
where a subnet manager turns it on). What they spread over is one link here: a tree has one spine for all of a tier, and
a group of a dragonfly one vertex, ``local``, for the links among its switches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, get_args

import numpy as np

from clustersim.cluster.files.draft import ClusterPorts, TopologyDraft, lay
from clustersim.cluster.files.node import NodeBuild
from clustersim.cluster.files.schema import (
    OWN,
    Dragonfly,
    FabricSpec,
    FatTree,
    NoFabric,
    OneSwitch,
    RailOptimised,
    Routing,
)
from clustersim.core.errors import TopologyError, nearest, several
from clustersim.core.topology import NIC, Ints, Topology

ADAPTIVE = "adaptive"


def join(nodes: Sequence[NodeBuild], spec: FabricSpec, name: str) -> Topology:
    """Nodes joined as a fabric says. Raises :class:`TopologyError` for numbers that make no network."""
    _check_own(nodes, spec)
    draft = lay(nodes)
    kind = str(spec.__struct_config__.tag)
    if isinstance(spec, NoFabric):
        return draft.topology(name, kind)
    build, above_zero = _BUILDERS[type(spec)]
    for knob, value in above_zero(spec).items():
        if not (isinstance(value, int | float) and value > 0):
            raise TopologyError(f"{knob} must be above zero, not {value!r}")
    if len(draft.ports):
        build(draft, spec, name)
    return draft.topology(name, kind, spec.routing, spec.sharp)


def _check_own(nodes: Sequence[NodeBuild], spec: FabricSpec) -> None:
    """Raise :class:`TopologyError` for what a Python caller may give, and a file that was read cannot say."""
    for node in nodes:
        if not isinstance(node, NodeBuild):
            raise TopologyError(f"a node is what fabrics.node(name) gives, not {node!r}")
    if not nodes:
        raise TopologyError("a cluster has at least one node; there is none")
    if isinstance(spec, NoFabric):
        return
    if spec.routing not in get_args(Routing):
        raise TopologyError(f"unknown routing {spec.routing!r}; {nearest(str(spec.routing), get_args(Routing))}")
    for knob in ("port_latency", "switch_latency"):
        seconds = getattr(spec, knob)
        if not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
            raise TopologyError(f"{knob} is a number of seconds, such as 3e-7, not {seconds!r}")


def one_switch(nodes: Sequence[NodeBuild], *, name: str = "one_switch", **knobs: Any) -> Topology:
    """Every NIC on one non-blocking switch; ``knobs`` : of :class:`clustersim.cluster.files.schema.OneSwitch`."""
    return join(nodes, OneSwitch(source=OWN, **knobs), name)


def rail_optimised(nodes: Sequence[NodeBuild], *, name: str = "rail_optimised", **knobs: Any) -> Topology:
    """NIC i of every node of a scalable unit on that unit's leaf i; ``knobs`` : of
    :class:`clustersim.cluster.files.schema.RailOptimised`."""
    return join(nodes, RailOptimised(source=OWN, **knobs), name)


def fat_tree(nodes: Sequence[NodeBuild], *, name: str = "fat_tree", **knobs: Any) -> Topology:
    """A folded Clos; ``knobs`` : of :class:`clustersim.cluster.files.schema.FatTree`. Raises :class:`TopologyError`
    when the NICs do not fit."""
    return join(nodes, FatTree(source=OWN, **knobs), name)


def dragonfly(nodes: Sequence[NodeBuild], *, name: str = "dragonfly", **knobs: Any) -> Topology:
    """Groups of switches that are all joined; ``knobs`` : of :class:`clustersim.cluster.files.schema.Dragonfly`."""
    return join(nodes, Dragonfly(source=OWN, **knobs), name)


def _one_switch(draft: TopologyDraft, spec: OneSwitch, name: str) -> None:
    switch = draft.add_switches(["switch0"])
    _attach(draft, np.broadcast_to(switch, draft.ports.vertex.shape), spec.port_latency)


def _rail_optimised(draft: TopologyDraft, spec: RailOptimised, name: str) -> None:
    """``radix`` ports a switch, half of a leaf's down (so ``nodes_per_unit`` is ``radix / 2`` unless given). Up to
    ``radix`` leaves meet at one tier of spines; more, at spines of 32-leaf same-rail pods below cores (NVIDIA's
    SuperPOD reference layout).
    """
    per_unit = spec.nodes_per_unit or max(spec.radix // 2, 1)
    ports = draft.ports
    half = max(spec.radix // 2, 1)
    units = math.ceil(len(draft.node_types) / per_unit)
    # Leaves of one rail are neighbours, so that a pod holds one rail's leaves and same-rail traffic stays below cores.
    number = ports.rail * units + ports.node // per_unit
    used, leaf_of = np.unique(number, return_inverse=True)
    leaves = draft.add_switches([f"leaf{i}" for i in range(len(used))])
    _attach(draft, leaves[leaf_of], spec.port_latency)
    up = per_unit * float(ports.rate.max()) / spec.oversubscription
    pods = (used // units) * math.ceil(units / half) + (used % units) // half
    _clos(draft, leaves, pods, up, spec)


def _fat_tree(draft: TopologyDraft, spec: FatTree, name: str) -> None:
    """NICs fill leaves in node order. ``oversubscription`` is a leaf's down-link : up-link bandwidth."""
    radix = spec.radix
    ratio = spec.oversubscription
    ports = draft.ports
    down = min(max(round(radix * ratio / (1 + ratio)), 1), radix - 1)
    n_leaves = math.ceil(len(ports) / down)
    needed = 1 if n_leaves == 1 else 2 if n_leaves <= radix else 3
    levels = max(needed, 2) if spec.levels is None else spec.levels
    pod = max(radix // 2, 1)
    if levels not in (2, 3) or needed > levels or n_leaves > radix * pod:
        most = down * radix * (1 if levels == 2 else pod)
        raise TopologyError(f"{name}: a {levels}-tier fat tree of radix {radix} holds {most} NICs, not {len(ports)}")
    leaves = draft.add_switches([f"leaf{i}" for i in range(n_leaves)])
    _attach(draft, leaves[np.arange(len(ports)) // down], spec.port_latency)
    pods = np.arange(n_leaves) // pod if levels == 3 else np.zeros(n_leaves, dtype=np.int64)
    _clos(draft, leaves, pods, down * float(ports.rate.max()) / ratio, spec, three=levels == 3)


def without_effect(topology: Topology, spec: FabricSpec) -> Iterator[str]:
    """That leaves of a fat tree are oversubscribed where all NICs are on one, so that nothing ever goes up from it."""
    if not isinstance(spec, FatTree) or spec.oversubscription == 1:
        return
    names = topology.vertex_names
    ends = zip(topology.link_src.tolist(), topology.link_dst.tolist(), topology.link_kinds, strict=True)
    plugged = [(src, dst) for src, dst, kind in ends if kind == "net" and topology.vertex_kinds[src] == NIC]
    leaves = {names[dst] for _, dst in plugged}
    if len(leaves) == 1:
        yield (
            f"oversubscription = {spec.oversubscription:g} of [fabric]: all {several(len(plugged), 'NIC')} are on "
            f"{leaves.pop()}, a switch of {spec.radix} ports (radix), so that it {NO_EFFECT}"
        )


NO_EFFECT = "changes nothing at this size"
"""How the sentence on what a fabric has without effect ends."""


def _dragonfly(draft: TopologyDraft, spec: Dragonfly, name: str) -> None:
    """Switch s of a group is joined to switch s of every other. The ``global_links_per_switch`` links of a switch are
    shared evenly by the other groups; ``taper`` scales them. ``routing`` other than adaptive takes the one shortest
    way, which neighbours then share.
    """
    ports = draft.ports
    size = spec.switches_per_group
    n_switches = math.ceil(len(ports) / spec.nics_per_switch)
    rate = float(ports.rate.max())
    groups = math.ceil(n_switches / size)
    if groups > 1 and spec.routing != ADAPTIVE:
        n_switches = groups * size
    switches = draft.add_switches([f"group{i // size}/switch{i % size}" for i in range(n_switches)])
    _attach(draft, switches[np.arange(len(ports)) // spec.nics_per_switch], spec.port_latency)
    share = rate * spec.taper * spec.global_links_per_switch / max(groups - 1, 1)
    lay_groups = _pooled_groups if spec.routing == ADAPTIVE else _minimal_groups
    lay_groups(draft, switches, size, rate, share, spec.switch_latency)


def _shape(spec: Dragonfly) -> dict[str, float]:
    names = ("switches_per_group", "nics_per_switch", "taper", "global_links_per_switch")
    return {name: getattr(spec, name) for name in names}


Lay = Callable[[TopologyDraft, Any, str], None]
_BUILDERS: dict[type[FabricSpec], tuple[Lay, Callable[[Any], dict[str, float]]]] = {
    OneSwitch: (_one_switch, lambda spec: {}),
    RailOptimised: (
        _rail_optimised,
        lambda spec: {
            "nodes_per_unit": spec.nodes_per_unit or 1,
            "oversubscription": spec.oversubscription,
            "radix": spec.radix,
        },
    ),
    FatTree: (_fat_tree, lambda spec: {"oversubscription": spec.oversubscription, "radix": spec.radix - 1}),
    Dragonfly: (_dragonfly, _shape),
}
"""Who lays the switches of a fabric around its nodes, and what must be above zero for it."""


def _minimal_groups(draft: TopologyDraft, switches: Ints, size: int, rate: float, share: float, latency: float) -> None:
    """A cable between any two switches of a group, and between those of the same place in any two groups."""
    place = np.arange(len(switches)) % size
    group = np.arange(len(switches)) // size
    a, b = np.triu_indices(len(switches), 1)
    inside = group[a] == group[b]
    draft.add_cables(switches[a[inside]], switches[b[inside]], rate, latency)
    far = ~inside & (place[a] == place[b])
    draft.add_cables(switches[a[far]], switches[b[far]], share, latency)


def _pooled_groups(draft: TopologyDraft, switches: Ints, size: int, rate: float, share: float, latency: float) -> None:
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


def _attach(draft: TopologyDraft, switch: Ints, latency: float) -> None:
    """A cable from every NIC to its switch, at the rate of its port."""
    ports: ClusterPorts = draft.ports
    draft.add_cables(ports.vertex, switch, ports.rate, latency)


def _clos(
    draft: TopologyDraft, leaves: Ints, pod: Ints, up: float, spec: RailOptimised | FatTree, *, three: bool = False
) -> None:
    """Spines above leaves, and cores above spines for ``three`` tiers, or if the leaves are more than one tier reaches.

    ``up`` [bytes/s] is what one leaf sends upwards, spread evenly over the spines it sees; adaptive ones are one.
    """
    radix = spec.radix
    latency = spec.switch_latency
    pooled = spec.routing == ADAPTIVE
    if len(leaves) <= 1:
        return
    if not three and len(leaves) <= radix:
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


def _full_mesh(draft: TopologyDraft, low: Ints, high: Ints, bandwidth: float, latency: float) -> None:
    draft.add_cables(np.repeat(low, len(high)), np.tile(high, len(low)), bandwidth, latency)
