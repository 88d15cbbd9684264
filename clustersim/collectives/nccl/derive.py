"""From a group on a topology to the :class:`System` NCCL would see."""

from __future__ import annotations

import numpy as np

from clustersim.cluster.routes import Router, router
from clustersim.collectives.base import Group
from clustersim.collectives.nccl.view import Nic, NodeView, PcieSlot, System, nvlink_line_rate, peer_level
from clustersim.core.arrays import Ints
from clustersim.core.errors import TopologyError
from clustersim.core.memo import kept_with_first, kept_with_topology
from clustersim.core.topology import CPU, NVSWITCH, PCIE_SWITCH, Topology
from clustersim.core.transports import FAST_NIC, transport

PCIE_SHARE = 12 / 15.75
"""NCCL takes a gen3 x16 slot for 12 GB/s, and the others in proportion (nccl src/graph/topo.cc)."""

SLOT_BY_GENERATION = {3: 12.0, 4: 24.0, 5: 48.0, 6: 96.0}
"""GB/s of an x16 slot by its PCIe generation: that of gen3, doubled each time."""

XGMI_SHARE = 0.75
"""Of an xGMI link's rate that is left for data: 48 of 64 GB/s on MI300X, as AMD says (rocm.blogs.amd.com, RCCL
bandwidth and xGMI on MI300X) and RCCL counts on (its topo.h, which has 48 for MI350X too, whose links are faster)."""

AMD_AS = 90
"""Row of the tables taken for AMD GPUs, for want of RCCL's own: Hopper's, their contemporaries."""

COHERENT_SINCE = (2, 27)
"""NCCL versions that count a NIC behind a coherent CPU link as near (path class P2C)."""


@kept_with_topology(maxsize=1024)
def system_of(group: Group) -> System:
    """What NCCL would read of a group: its nodes' GPUs, links and NICs, and what the transport says of itself.

    Nodes joined by shared NVSwitches are one (multi-node NVLink, from NCCL 2.21). Nodes that differ in build, in the
    GPUs used or in NIC speed give one view each.

    Raises :class:`TopologyError` for several nodes of which one has no NIC.
    """
    routes = router(group.topology)
    version = group.nccl_version
    domain = routes.islands.of[group.gpus] if version >= (2, 21) else group.nodes
    order = np.argsort(domain, kind="stable")
    cuts = np.flatnonzero(np.diff(domain[order])) + 1
    several = len(cuts) > 0
    views: dict[NodeView, None] = {}
    view_of = _known_views(group.topology)
    for members in np.split(group.gpus[order], cuts):
        island = routes.islands.of[members[0]]  # its build, and the places of the GPUs in it
        key = version, several, int(routes.builds[island]), routes.islands.local[members].tobytes()
        if key not in view_of:
            view_of[key] = _TopologyReader(routes, members, version).view(several)
        views[view_of[key]] = None
    if several and not all(view.nics for view in views):
        bare = next(kind.name for kind in group.topology.node_types)
        raise TopologyError(f"{group.topology.name}: a group over several nodes, but {bare} has no NIC on the network")
    newest = max(view.sm for view in views)
    oldest = min(view.sm for view in views)
    return System(
        n_nodes=len(cuts) + 1,
        n_ranks=group.size,
        views=tuple(views),
        net_latency=_net_latency(routes, group) if several else 0.0,
        sharp=several and group.topology.sharp,
        sm_max=newest if newest > oldest else 0,
    )


@kept_with_first(maxsize=1)
def _known_views(topology: Topology) -> dict[tuple[object, ...], NodeView]:
    """Views of a topology's nodes by what they depend on: groups by the hundred look at nodes of the same build."""
    return {}


def _net_latency(routes: Router, group: Group) -> float:
    """The plug-in's latency on the slowest node type present."""
    latency = 0.0
    first = {group.topology.node_types[int(node)].name: int(node) for node in group.node_ids[::-1]}
    for node in first.values():
        net_transport = transport(group.topology.node_types[node].net)
        if net_transport.reported:
            fastest = max((routes.reported_bandwidth(nic) for nic in routes.nics_of_node(node)), default=0.0)
            latency = max(latency, net_transport.reported_fast if fastest >= FAST_NIC else net_transport.reported)
    return latency


class _TopologyReader:
    """Reads one node, or one NVLink domain, off the topology."""

    def __init__(self, routes: Router, members: Ints, version: tuple[int, int]) -> None:
        self.routes = routes
        self.topology = topology = routes.topology
        self.version = version
        self.gpus = sorted(int(gpu) for gpu in members)
        self.nodes = sorted({int(topology.vertex_node[gpu]) for gpu in self.gpus})
        self.type = topology.node_types[self.nodes[0]]
        gpu = self.type.gpu
        self.sm = gpu.sm or AMD_AS
        island = routes.islands
        inside = island.of[self.gpus[0]]
        island_links = island.links[island.link_start[inside] : island.link_start[inside + 1]].tolist()
        self.out: dict[int, list[int]] = {}
        for link in island_links:
            self.out.setdefault(int(topology.link_src[link]), []).append(link)
        own_nodes = set(self.nodes)
        vertices = island.vertices[island.vertex_start[inside] : island.vertex_start[inside + 1]].tolist()
        local = [v for v in vertices if int(topology.vertex_node[v]) in own_nodes]
        self.cpus = [v for v in local if topology.vertex_kinds[v] == CPU]
        self.parent = self._pcie_tree()
        switches = {v for v in self.parent if topology.vertex_kinds[v] == PCIE_SWITCH}
        self.switches = sorted(switches)

    def _pcie_tree(self) -> dict[int, tuple[int, float]]:
        """Vertex -> (what it hangs from, bytes/s), outwards from the sockets."""
        parent: dict[int, tuple[int, float]] = {}
        frontier = list(self.cpus)
        while frontier:
            reached = []
            for v in frontier:
                for link in self.out.get(v, ()):
                    child = int(self.topology.link_dst[link])
                    if self.topology.link_kinds[link] != "pcie" or child in parent or child in self.cpus:
                        continue
                    parent[child] = (v, float(self.topology.reported_bandwidth[link]))
                    if self.topology.vertex_kinds[child] == PCIE_SWITCH:
                        reached.append(child)
            frontier = reached
        return parent

    def view(self, several: bool) -> NodeView:
        """The node as NCCL sees it; NICs only if the group leaves the node."""
        topology = self.topology
        pairs, to_switch, rate = self._nvlinks()
        first = {node: int(topology.node_gpus(node)[0]) for node in self.nodes}
        hosts = [self.nodes.index(int(topology.vertex_node[cpu])) for cpu in self.cpus] or [0]
        gpus = tuple(self._slot(gpu) for gpu in self.gpus)
        return NodeView(
            sm=self.sm,
            gpus=gpus,
            switches=tuple(self._slot(switch) for switch in self.switches),
            nics=tuple(nic for node in self.nodes for nic in self._nics(node)) if several else (),
            dev=tuple(gpu - first[int(topology.vertex_node[gpu])] for gpu in self.gpus),
            nvlinks=pairs,
            nvswitch_links=to_switch,
            socket_host=tuple(hosts),
            cpu_vendor=self.type.cpu_vendor,
            cpu_model=self.type.cpu_model or _oldest_model(self.type.cpu_vendor, gpus),
            p2p=self.type.p2p,
            p2p_level=peer_level(self.type.cpu_vendor, len(gpus), self.version, self.type.gpu.amd, self.type.p2p_level),
            nvls=self.type.nvls and self.version >= (2, 17),
            c2c=self._coherent() if self.version >= COHERENT_SINCE else 0.0,
            link_rate=rate,
        )

    def _slot(self, vertex: int) -> PcieSlot:
        """Where a vertex hangs. A GPU joined to its CPU by C2C alone has a slot on that socket."""
        if vertex in self.parent:
            above, rate = self.parent[vertex]
            place = -1 - self.cpus.index(above) if above in self.cpus else self.switches.index(above)
            return PcieSlot(place, _as_nccl(rate))
        rate = SLOT_BY_GENERATION.get(self.type.pcie_gen, 48.0)
        ends = [int(self.topology.link_dst[link]) for link in self.out.get(vertex, ())]
        beside = [self.cpus.index(end) for end in ends if end in self.cpus]
        host = self.nodes.index(int(self.topology.vertex_node[vertex]))
        own = [i for i, cpu in enumerate(self.cpus) if self.nodes[host] == int(self.topology.vertex_node[cpu])]
        return PcieSlot(-1 - (beside or own or [0])[0], rate)

    def _nvlinks(self) -> tuple[tuple[tuple[int, ...], ...], int, float]:
        """Links between pairs, links to switches (the fewest any GPU has), GB/s a link if not NVLink."""
        topology = self.topology
        count = len(self.gpus)
        pairs = [[0.0] * count for _ in range(count)]
        to_switch = []
        xgmi = {
            float(topology.reported_bandwidth[link])
            for gpu in self.gpus
            for link in self.out.get(gpu, ())
            if topology.link_kinds[link] == "xgmi"
        }
        link_rate = min(xgmi, default=nvlink_line_rate(self.sm) * 1e9)  # of xGMI, pairs have so many of the thinnest
        for i, gpu in enumerate(self.gpus):
            up = 0.0
            for link in self.out.get(gpu, ()):
                if topology.link_kinds[link] not in ("nvlink", "xgmi"):
                    continue
                end = int(topology.link_dst[link])
                speed = float(topology.reported_bandwidth[link])
                if topology.vertex_kinds[end] == NVSWITCH:
                    up += speed
                elif end in self.gpus:
                    pairs[i][self.gpus.index(end)] += speed
            to_switch.append(up)
        matrix = tuple(tuple(round(speed / link_rate) for speed in row) for row in pairs)
        rate = XGMI_SHARE * link_rate * 1e-9 if xgmi else 0.0
        return matrix if any(map(any, matrix)) else (), round(min(to_switch) / link_rate), rate

    def _coherent(self) -> float:
        """GB/s of the GPUs' C2C links."""
        speeds = [
            float(self.topology.reported_bandwidth[link])
            for link in self.out.get(self.gpus[0], ())
            if self.topology.link_kinds[link] == "c2c"
        ]
        return round(max(speeds, default=0.0) * 1e-9, 3)

    def _nics(self, node: int) -> list[Nic]:
        """The node's NICs that reach the network. Some plug-ins bundle those of one switch into one device."""
        every = (
            (self._slot(nic), self.routes.reported_bandwidth(nic) * 1e-9) for nic in self.routes.nics_of_node(node)
        )
        ports = [(slot, speed) for slot, speed in every if speed > 0]
        net_transport = transport(self.type.net)
        if not net_transport.bundled:
            return [Nic(slot, round(speed, 3), net_transport.direct) for slot, speed in ports]
        bundles: dict[int, tuple[float, float]] = {}
        for slot, speed in ports:
            width, total = bundles.get(slot.parent, (0.0, 0.0))
            bundles[slot.parent] = (width + slot.bandwidth, total + speed)
        return [
            Nic(PcieSlot(place, width), round(total, 3), net_transport.direct)
            for place, (width, total) in bundles.items()
        ]


def _oldest_model(vendor: str, gpus: tuple[PcieSlot, ...]) -> str:
    """The first CPU with slots this fast, where a topology does not say which it is: gen5 came with Sapphire Rapids,
    whose sockets NCCL takes for twice as well joined as those of gen4 and older."""
    return "spr" if vendor == "intel" and any(slot.bandwidth >= 48.0 for slot in gpus) else ""


def _as_nccl(rate: float) -> float:
    """GB/s NCCL takes a PCIe link for, from its line rate [bytes/s]: the nearest generation and width, if any is near.

    >>> _as_nccl(63e9), _as_nccl(15.75e9), _as_nccl(20e9)
    (48.0, 12.0, 15.238)
    """
    taken = rate * 1e-9 * PCIE_SHARE
    steps = round(float(np.log2(taken / 12.0)))
    snapped = 12.0 * 2.0**steps
    return snapped if abs(taken / snapped - 1) < 0.05 else round(taken, 3)
