"""The machine as a directed graph: GPUs, CPUs, NICs and switches, and the links between them.

Vertices and links are numpy columns, because a cluster of 16,384 GPUs has some 100,000 links; :attr:`Topology.graph`
is the same thing as a :class:`networkx.DiGraph` for whoever wants to walk it. A link is directed and carries the
bandwidth of one direction, in bytes per second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from clustersim.core.arrays import Floats as Floats
from clustersim.core.arrays import Ints as Ints
from clustersim.core.calibrated import Calibration, MeasuredNumber
from clustersim.core.device import Device, device
from clustersim.core.errors import TopologyError, nearest, several
from clustersim.core.memo import Keeper

if TYPE_CHECKING:
    import networkx as nx


GPU = "gpu"
CPU = "cpu"
NIC = "nic"
PCIE_SWITCH = "pcie_switch"
NVSWITCH = "nvswitch"
SWITCH = "switch"
VERTEX_KINDS = (GPU, CPU, NIC, PCIE_SWITCH, NVSWITCH, SWITCH)
"""What a vertex can be. ``nvswitch`` also stands for any in-node GPU switch; ``switch`` is a network switch."""

LINK_KINDS = ("nvlink", "xgmi", "c2c", "pcie", "cpu", "net")
"""What a link can be. ``cpu`` joins sockets (UPI, xGMI between CPUs); ``net`` is everything outside a node."""

LINE_RATE = "its line rate"
"""What a share of a link's bandwidth is a share of, unless the link delivers less."""

PATH_CLASSES = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "NET", "DIS")
"""NCCL's path classes, nearest first (nccl src/graph/topo.h)."""


@dataclass(frozen=True)
class NodeType:
    """What all nodes of one build share, beyond their links.

    Parameters
    ----------
    name : str, the node's name, such as ``"hgx-h100"``.
    device : str, the GPU's name in :mod:`clustersim.core.device`, or in the file that describes it.
    n_gpus, n_nics : int, per node.
    cpu_vendor : str, ``"intel"``, ``"amd"``, ``"arm"`` or ``"power"``; NCCL's tuner looks at it.
    cpu_model : str, the generation as NCCL tells it apart: ``"bdw"``, ``"skl"``, ``"spr"``, ``"emr"``, ``"rome"``,
        ``"grace"``...
    net : str, the transport NCCL would use outside, a row of :data:`clustersim.core.transports.TRANSPORTS`, or
    ``"none"``. nvls : bool, NVLink SHARP: the switches can reduce and multicast (Hopper and later, behind NVSwitch).
    p2p : bool, GPUs may read each other's memory over PCIe; not where the file is silent and the GPU cannot.
    p2p_level : str, the furthest of :data:`PATH_CLASSES` over which NCCL is told to let them (NCCL_P2P_LEVEL); empty
        where it goes by its own rule.
    pcie_gen : int, of the GPUs' slots.
    net_share : float, share of its NICs' line rate that collectives were measured to reach on this machine; 0 takes
        the transport's usual share.
    cores : int, CPU cores of the node, which the processes on it share; 0 where it is not said: enough for all.
    host_memory : float [bytes], of the node's CPUs together; None where it is not said.
    sources : text per fact, as the topology file gives it.
    own_gpu : the GPU where a file of the user's describes it; None: the shipped one of that name.
    """

    name: str
    device: str
    n_gpus: int
    n_nics: int
    cpu_vendor: str = "intel"
    cpu_model: str = ""
    net: str = "ib"
    nvls: bool = False
    p2p: bool = True
    p2p_level: str = ""
    pcie_gen: int = 4
    net_share: float = 0.0
    cores: int = 0
    host_memory: float | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    own_gpu: Device | None = None

    @property
    def gpu(self) -> Device:
        """Its GPU, or a core of its CPUs. Raises :class:`TopologyError` for a name that is not known."""
        return self.own_gpu or device(self.device)


@dataclass(frozen=True, eq=False)
class Topology(Keeper):
    """Directed graph of one cluster. Immutable; builders are in :mod:`clustersim.cluster.files`.

    Parameters
    ----------
    name : str
    vertex_names : unique names, ``"node3/gpu0"`` inside a node, ``"leaf4"`` outside.
    vertex_kinds : one of :data:`VERTEX_KINDS` per vertex.
    vertex_node : (V,) int, the node a vertex belongs to; -1 outside every node.
    link_src, link_dst : (L,) int, vertex ids.
    link_bandwidth : (L,) float [bytes/s], line rate of this direction.
    link_latency : (L,) float [s], of the hop (wire and the far vertex's forwarding).
    link_kinds : one of :data:`LINK_KINDS` per link.
    node_types : one :class:`NodeType` per node.
    fabric : str, what joins the nodes, such as ``"rail_optimised"``; for people and for :meth:`describe`.
    routing : how a switch picks among equal next hops: ``"destination"`` (by the destination's place, as InfiniBand's
        fat-tree routing), ``"hash"`` (by a hash of source, destination and flow, as Ethernet's ECMP), or
        ``"adaptive"`` (by load: parallel ways are one link already).
    sharp : bool, the network's switches add up what passes (InfiniBand SHARP), and NCCL is let use it.
    calibration : constants fitted to this machine's own measurements; None: the time models' defaults hold.
    hidden_factor : (L,) float, of a link that delivers less than it says (a cable with errors, a throttled NIC): its
        bandwidth over what drivers and NCCL read. None where every link is what it says.
    measured : a few numbers of its own, which :func:`clustersim.collectives.fitted.load` turns into constants.
    assumed : what its file says that nobody read or measured, in sentences.
    """

    name: str
    vertex_names: tuple[str, ...]
    vertex_kinds: tuple[str, ...]
    vertex_node: Ints
    link_src: Ints
    link_dst: Ints
    link_bandwidth: Floats
    link_latency: Floats
    link_kinds: tuple[str, ...]
    node_types: tuple[NodeType, ...]
    fabric: str = ""
    routing: str = "destination"
    sharp: bool = False
    calibration: Calibration | None = None
    measured: tuple[MeasuredNumber, ...] = ()
    assumed: tuple[str, ...] = ()
    hidden_factor: Floats | None = None

    @cached_property
    def reported_bandwidth(self) -> Floats:
        """(L,) float [bytes/s], what drivers, and so NCCL, take a link for."""
        return self.link_bandwidth if self.hidden_factor is None else self.link_bandwidth / self.hidden_factor

    def __repr__(self) -> str:
        return f"<Topology {self.name}: {several(self.n_nodes, 'node')}, {several(self.n_links, 'link')}>"

    @property
    def n_nodes(self) -> int:
        """How many machines."""
        return len(self.node_types)

    @property
    def collective_library(self) -> str:
        """Whose collectives its GPUs run: NCCL's, or AMD's RCCL's."""
        return self.node_types[0].gpu.collective_library

    @property
    def n_links(self) -> int:
        """How many directed links."""
        return len(self.link_src)

    @cached_property
    def index(self) -> dict[str, int]:
        """Vertex id by name."""
        return {name: i for i, name in enumerate(self.vertex_names)}

    @cached_property
    def gpus(self) -> Ints:
        """(G,) vertex ids of every GPU, node-major: entry ``8 * node + local`` on 8-GPU nodes."""
        return self._of_kind(GPU)

    @cached_property
    def cpus(self) -> Ints:
        """Vertex ids of every CPU socket, node-major."""
        return self._of_kind(CPU)

    @property
    def homes(self) -> Ints:
        """Vertices that ranks run on: the GPUs, or the CPUs of a cluster that has no GPU."""
        return self.gpus if len(self.gpus) else self.cpus

    @cached_property
    def nics(self) -> Ints:
        """Vertex ids of every NIC, node-major."""
        return self._of_kind(NIC)

    def _of_kind(self, kind: str) -> Ints:
        ids = np.array([i for i, k in enumerate(self.vertex_kinds) if k == kind], dtype=np.int64)
        ordered: Ints = ids[np.argsort(self.vertex_node[ids], kind="stable")]
        return ordered

    def vertex(self, name: str) -> int:
        """Vertex id of a name. Raises :class:`TopologyError` with the nearest name."""
        try:
            return self.index[name]
        except KeyError:
            raise TopologyError(f"{self.name}: no vertex {name!r}; {nearest(name, self.vertex_names)}") from None

    def node_gpus(self, node: int) -> Ints:
        """Vertex ids of one node's GPUs, in local-rank order."""
        first, last = np.searchsorted(self.vertex_node[self.gpus], [node, node + 1])  # gpus are node-major
        gpus_here: Ints = self.gpus[first:last]
        return gpus_here

    @cached_property
    def graph(self) -> nx.DiGraph[str]:
        """The same graph for networkx: vertices by name with ``kind`` and ``node``, edges with ``bandwidth`` [bytes/s],
        ``latency`` [s], ``kind`` and ``link`` (the id used everywhere else)."""
        import networkx as nx  # 0.7 s to import

        graph: nx.DiGraph[str] = nx.DiGraph(name=self.name)
        for name, kind, node in zip(self.vertex_names, self.vertex_kinds, self.vertex_node.tolist(), strict=True):
            graph.add_node(name, kind=kind, node=node)
        ends = zip(self.link_src.tolist(), self.link_dst.tolist(), strict=True)
        for link, (src, dst) in enumerate(ends):
            graph.add_edge(
                self.vertex_names[src],
                self.vertex_names[dst],
                bandwidth=float(self.link_bandwidth[link]),
                latency=float(self.link_latency[link]),
                kind=self.link_kinds[link],
                link=link,
            )
        return graph

    def link_name(self, link: int) -> str:
        """``"node0/gpu1 -> node0/nvswitch2"``."""
        return f"{self.vertex_names[self.link_src[link]]} -> {self.vertex_names[self.link_dst[link]]}"

    def rate_words(self, link: int) -> str:
        """What a share of :attr:`link_bandwidth` is a share of: ``"its line rate"``, unless a link delivers less."""
        delivered = 1.0 if self.hidden_factor is None else float(self.hidden_factor[link])
        return LINE_RATE if delivered == 1.0 else f"what it delivers, {delivered:.2g} of {LINE_RATE}"

    def rate_words_named(self, name: str) -> str:
        """:meth:`rate_words` of the link of a name."""
        return self._slow_words.get(name, LINE_RATE)

    @cached_property
    def _slow_words(self) -> dict[str, str]:
        """:meth:`rate_words` of the links that deliver less than their line rate, by their names."""
        slow = [] if self.hidden_factor is None else np.flatnonzero(self.hidden_factor != 1.0).tolist()
        return {self.link_name(link): self.rate_words(link) for link in slow}


def route_latency(topology: Topology, route: Sequence[int]) -> float:
    """Seconds for a first byte to cross a route: the sum over its links."""
    return float(topology.link_latency[list(route)].sum())
