"""What a topology holds, what it can move, and what in it looks wrong."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.cluster.files.leaves import ports, position, rails, spread, straddling
from clustersim.core.device import device
from clustersim.core.errors import TopologyError, few
from clustersim.core.topology import CPU, GPU, NIC, PCIE_SWITCH, Floats, Ints, Topology
from clustersim.core.units import format_bandwidth

NIC_RATES = (1.25e9, 2.5e9, 3.125e9, 5e9, 6.25e9, 7e9, 12.5e9, 25e9, 50e9, 100e9, 200e9)
"""Bytes/s of the ports that exist: 10, 20, 25, 40, 50, 56, 100, 200, 400, 800, 1,600 Gb/s."""

ODD = 3
"""How many times as many NICs have another rate, where a NIC of a node is odd."""
FAR = 2.0
"""How many times as fast a device is as the way up from its PCIe switch, where that looks wrong."""
ASLEEP = 3.0
"""How many times as fast another device's PCIe link is as a GPU's, where that looks wrong: generations next to each
other are twice as fast."""


@dataclass(frozen=True)
class TopologyReport:
    """The answer of :func:`check`.

    Parameters
    ----------
    name, fabric : of the topology.
    n_nodes : int.
    vertices, links : how many of each kind. devices : GPUs (or CPUs) of each name.
    ports : NICs by line rate [bytes/s]. rails : the most leaf switches that NICs of one node are plugged into; 1
        where those are not the same NICs of every node. spread : how many nodes share the same leaf switches, most
        first.
    injection_bandwidth : (G,) float [bytes/s], what each GPU (in the order of ``Topology.gpus``) can send out of its
        node (or NVLink domain) while all send; where there is only one, to the others.
    bisection_bandwidth : float [bytes/s], from half of the nodes to the other half, one direction.
    n_unreachable : ordered pairs of GPUs without a route. unreachable : the first few, by name.
    warnings : what looks wrong, a sentence each.
    """

    name: str
    fabric: str
    n_nodes: int
    vertices: dict[str, int]
    links: dict[str, int]
    devices: dict[str, int]
    ports: dict[float, int]
    rails: int
    spread: tuple[int, ...]
    injection_bandwidth: Floats
    bisection_bandwidth: float
    n_unreachable: int
    unreachable: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...]


def check(topology: Topology) -> TopologyReport:
    """Count, measure and look for mistakes."""
    count, pairs = routing.unreachable_pairs(topology)
    return TopologyReport(
        name=topology.name,
        fabric=topology.fabric,
        n_nodes=topology.n_nodes,
        vertices=dict(Counter(topology.vertex_kinds)),
        links=dict(Counter(topology.link_kinds)),
        devices=dict(Counter(topology.node_types[n].device for n in topology.vertex_node[topology.homes].tolist())),
        ports={rate: len(nics) for rate, nics in _nic_rates(topology).items()},
        rails=rails(topology),
        spread=spread(topology),
        injection_bandwidth=routing.injection_bandwidth(topology),
        bisection_bandwidth=routing.bisection_bandwidth(topology),
        n_unreachable=count,
        unreachable=pairs,
        warnings=tuple(warning for look in _LOOKS for warning in look(topology)),
    )


def _some(topology: Topology, vertices: Ints) -> str:
    """A few names, and how many more."""
    return few((topology.vertex_names[v] for v in vertices.tolist()), 3)


def _near_rate(rate: float) -> bool:
    return any(abs(rate / nic_rate - 1) < 0.05 for nic_rate in NIC_RATES)


def _overfull(rate: float, slot: float) -> bool:
    """A port far beyond its slot that would be a known one at an eighth."""
    return rate > 2 * slot and _near_rate(rate / 8)


def _nic_rates(topology: Topology) -> dict[float, Ints]:
    """NICs by the rate that their network link says; what it delivers of that (``factor``) is no port's rate."""
    net = ports(topology)
    rates = np.round(topology.reported_bandwidth[net])
    nics = topology.link_src[net]
    return {float(rate): nics[rates == rate] for rate in np.unique(rates)}


def _slips(topology: Topology) -> Iterator[str]:
    """Bits taken for bytes: eight times, or an eighth of, a port that exists, when the rate itself does not."""
    slots = _slot_rates(topology)
    for rate, nics in _nic_rates(topology).items():
        # 100 GB/s and 200 GB/s are also ports that exist (800G, 1.6T), so a slot that cannot feed them tells.
        slot = float(slots[nics[0]])
        if _overfull(rate, slot):
            yield (
                f"{_some(topology, nics)}: {format_bandwidth(rate)} is more than the slot's {format_bandwidth(slot)} "
                f"and 8 x {format_bandwidth(rate / 8)}: was Gb/s written as GB/s?"
            )
        elif not _near_rate(rate) and (_near_rate(rate * 8) or _near_rate(rate / 8)):
            right = rate * 8 if _near_rate(rate * 8) else rate / 8
            yield (
                f"{_some(topology, nics)}: no port runs at {format_bandwidth(rate)}, but one does at "
                f"{format_bandwidth(right)}: are bits and bytes mixed up?"
            )


def _slot_rates(topology: Topology) -> Floats:
    """(V,) bytes/s a vertex's own node can hand it; infinite if nothing says."""
    inside = topology.vertex_node[topology.link_src] >= 0
    ends = topology.link_dst[inside]
    rate = topology.reported_bandwidth[inside]
    rates = np.bincount(ends, weights=rate, minlength=len(topology.vertex_names))
    return np.where(rates > 0, rates, np.inf)


def _slots(topology: Topology) -> Iterator[str]:
    slots = _slot_rates(topology)
    for rate, nics in _nic_rates(topology).items():
        narrow = nics[slots[nics] < 0.95 * rate]
        if len(narrow) and not _overfull(rate, float(slots[narrow[0]])):
            yield (
                f"{_some(topology, narrow)}: the port's {format_bandwidth(rate)} is above the PCIe slot's "
                f"{format_bandwidth(float(slots[narrow[0]]))}"
            )


def _gpus_without_nic(topology: Topology) -> Iterator[str]:
    if topology.n_nodes < 2:
        return
    routes = routing.router(topology)
    lone = np.array([gpu for gpu in topology.gpus.tolist() if not routes.ends(gpu, -1)], dtype=np.int64)
    if len(lone):
        yield f"{_some(topology, lone)}: no NIC that is connected, in a cluster of {topology.n_nodes} nodes"


def _asymmetric(topology: Topology) -> Iterator[str]:
    """Two directions that differ, or a link without a way back."""
    n = len(topology.vertex_names)
    forth = topology.link_src * n + topology.link_dst
    back = topology.link_dst * n + topology.link_src
    order = np.argsort(forth)
    place = np.clip(np.searchsorted(forth[order], back), 0, max(len(forth) - 1, 0))
    reverse = order[place] if len(forth) else order
    alone = forth[reverse] != back
    rate = topology.reported_bandwidth
    uneven = ~alone & (np.abs(rate[reverse] / rate - 1) > 1e-9)
    for defect, rows in (("has no way back", np.flatnonzero(alone)), ("differs by direction", np.flatnonzero(uneven))):
        if len(rows):
            more = f" ({len(rows)} such links)" if len(rows) > 1 else ""
            yield f"{topology.link_name(int(rows[0]))} {defect}{more}"


def _isolated(topology: Topology) -> Iterator[str]:
    touched = np.zeros(len(topology.vertex_names), dtype=bool)
    touched[topology.link_src] = touched[topology.link_dst] = True
    # One GPU alone is a machine; anything else without a link is a mistake.
    lone = np.flatnonzero(~touched)
    lone = lone if len(topology.vertex_names) > 1 else lone[:0]
    if len(lone):
        kinds = sorted({topology.vertex_kinds[v] for v in lone.tolist()})
        yield f"{_some(topology, lone)} ({', '.join(kinds)}): no link"


def _odd_nics(topology: Topology) -> Iterator[str]:
    """A few NICs of a node slower or faster than most of them; those of one position on every node together."""
    odd_of: dict[int, tuple[Ints, str]] = {}
    net = ports(topology)
    nics = topology.link_src[net]
    rates = np.round(topology.reported_bandwidth[net])
    nodes = np.unique(topology.vertex_node[nics]).tolist()
    for node in nodes:
        on_node = topology.vertex_node[nics] == node
        node_rates, counts = np.unique(rates[on_node], return_counts=True)
        most = int(np.argmax(counts))
        for rate, count in zip(node_rates.tolist(), counts.tolist(), strict=True):
            if rate != node_rates[most] and count * ODD <= counts[most]:
                beside = f"{counts[most]} NICs of {format_bandwidth(float(node_rates[most]))}"
                odd_of.setdefault(node, (nics[on_node & (rates == rate)], f"{format_bandwidth(rate)} beside {beside}"))
    if not odd_of:
        return
    odd, oddity = next(iter(odd_of.values()))
    positions = {
        (tuple(position(topology, nic) for nic in nics.tolist()), wording) for nics, wording in odd_of.values()
    }
    place = "on one node; is it of another network?"
    if len(nodes) > 1 and len(odd_of) == len(nodes) and len(positions) == 1:
        names = ", ".join(position(topology, nic) for nic in odd.tolist())
        yield f"{names} on every node: {oddity}, on all {len(nodes)} nodes; is it of another network?"
        return
    more = f" (and on {len(odd_of) - 1} more of {len(nodes)} nodes)" if len(odd_of) > 1 else ""
    yield f"{_some(topology, odd)}: {oddity} {place}{more}"


def _uneven_nics(topology: Topology) -> Iterator[str]:
    """Nodes whose NICs, all or those of the commonest rate, cannot be shared out evenly among the GPUs: 7 for 8."""
    net = ports(topology)
    nics = topology.link_src[net]
    rates = np.round(topology.reported_bandwidth[net])
    uneven: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for node in np.unique(topology.vertex_node[topology.gpus]).tolist():
        on_node = topology.vertex_node[nics] == node
        gpus = int((topology.vertex_node[topology.gpus] == node).sum())
        counts = np.unique(rates[on_node], return_counts=True)[1]
        count = len(np.unique(nics[on_node]))
        if count > 1 and all(gpus % n and n % gpus for n in (count, int(counts.max()))):
            uneven[count, gpus].append(node)
    for (count, gpus), nodes in uneven.items():
        more = f" (and on {len(nodes) - 1} more nodes)" if len(nodes) > 1 else ""
        yield f"node{nodes[0]}: {count} NICs for {gpus} GPUs{more}: some share one and others do not; is one missing?"


def _odd_nvlinks(topology: Topology) -> Iterator[str]:
    """GPUs with fewer NVLinks than others of their node, where all end at switches or each joins one other: meshes of
    direct links are uneven by design."""
    wired = np.array([kind == "nvlink" for kind in topology.link_kinds], dtype=bool)
    out = np.flatnonzero(wired & np.isin(topology.link_src, topology.gpus))
    ends = np.unique(np.column_stack([topology.link_src[out], topology.link_dst[out]]), axis=0)
    direct = ends[[topology.vertex_kinds[end] == GPU for end in ends[:, 1].tolist()]]
    if len(np.unique(direct[:, 0])) < len(direct):
        return
    size = len(topology.vertex_names)
    rates = np.round(np.bincount(topology.link_src[out], weights=topology.reported_bandwidth[out], minlength=size))
    for node in np.unique(topology.vertex_node[topology.gpus]).tolist():
        gpus = topology.gpus[topology.vertex_node[topology.gpus] == node]
        most, least = float(rates[gpus].max()), float(rates[gpus].min())
        if least < most:
            yield (
                f"{_some(topology, gpus[rates[gpus] < most])}: {format_bandwidth(least)} of NVLink, and other GPUs of "
                f"the node have {format_bandwidth(most)}; is a link down (nvidia-smi nvlink -s)?"
            )
            return  # nodes are mostly alike


UNSEEN = "the rate they say is delivered (factor), which NCCL does not see"
"""How the sentence on parts that hide how slow they are ends."""


def hidden_parts(topology: Topology) -> Iterator[str]:
    """Parts that a change makes slower than they say."""
    if topology.hidden_factor is None:
        return
    slower = np.flatnonzero(topology.hidden_factor < 1)
    for factor in np.unique(topology.hidden_factor[slower]).tolist():
        links = slower[topology.hidden_factor[slower] == factor]
        names = topology.link_name(int(links[0]))
        more = f" and {len(links) - 1} more links" if len(links) > 1 else ""
        yield f"{names}{more}: {factor:g} of {UNSEEN}"


def _slow_switches(topology: Topology) -> Iterator[str]:
    """PCIe switches whose way up is far slower than a device below them."""
    kinds = topology.vertex_kinds
    pcie = np.array([kind == "pcie" for kind in topology.link_kinds], dtype=bool)
    up: dict[int, float] = {}
    below: dict[int, float] = {}
    ends = zip(topology.link_src[pcie].tolist(), topology.link_dst[pcie].tolist(), strict=True)
    for (src, dst), rate in zip(ends, topology.link_bandwidth[pcie].tolist(), strict=True):
        if kinds[src] == PCIE_SWITCH and kinds[dst] in {CPU, PCIE_SWITCH}:
            up[src] = max(up.get(src, 0.0), rate)
        elif kinds[dst] == PCIE_SWITCH and kinds[src] in {GPU, NIC}:
            below[dst] = max(below.get(dst, 0.0), rate)
    slow = [v for v, rate in up.items() if rate * FAR < below.get(v, 0.0)]
    if slow:
        rate = format_bandwidth(up[slow[0]])
        yield (
            f"{_some(topology, np.array(slow))}: {rate} up from a PCIe switch with devices of "
            f"{format_bandwidth(below[slow[0]])} below it; virtual machines often report a switch's link wrongly"
        )


def _slow_gpus(topology: Topology) -> Iterator[str]:
    """GPUs whose PCIe link is a fraction of another device's of their node: one that sleeps, or has few lanes."""
    pcie = np.flatnonzero(np.array([kind == "pcie" for kind in topology.link_kinds], dtype=bool))
    devices = np.array([kind in {GPU, NIC} for kind in topology.vertex_kinds], dtype=bool)
    own = pcie[devices[topology.link_src[pcie]]]
    rates = np.zeros(len(topology.vertex_names))
    np.maximum.at(rates, topology.link_src[own], topology.reported_bandwidth[own])
    fastest = np.zeros(topology.n_nodes)
    inside = topology.vertex_node >= 0
    np.maximum.at(fastest, topology.vertex_node[inside], rates[inside])
    gpus = topology.gpus[rates[topology.gpus] > 0]
    slow = gpus[rates[gpus] * ASLEEP < fastest[topology.vertex_node[gpus]]]
    if len(slow):
        has = format_bandwidth(float(rates[slow[0]]))
        most = format_bandwidth(float(fastest[topology.vertex_node[slow[0]]]))
        yield (
            f"{_some(topology, slow)}: PCIe of {has}, and another device of the node has {most}: few lanes, or a GPU "
            "that sleeps (nvidia-smi -q -d PCIE while a job runs)"
        )


def _assumed(topology: Topology) -> Iterator[str]:
    yield from (f"assumed: {text}" for text in topology.assumed)


def _unknown_devices(topology: Topology) -> Iterator[str]:
    """GPUs that neither the table of devices nor a file describes."""
    for name in sorted({kind.device for kind in topology.node_types if kind.device and kind.own_gpu is None}):
        try:
            device(name)
        except TopologyError as error:
            yield f"{error} Collectives can be played on it, a model's step cannot"


_LOOKS = (
    _unknown_devices,
    _slips,
    _gpus_without_nic,
    _asymmetric,
    _isolated,
    _slots,
    _odd_nics,
    _uneven_nics,
    straddling,
    _odd_nvlinks,
    hidden_parts,
    _slow_switches,
    _slow_gpus,
    _assumed,
)
