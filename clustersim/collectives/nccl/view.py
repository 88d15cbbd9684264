"""What NCCL's search and tuner read of a communicator: its nodes with the bandwidths NCCL assumes, and what is asked.

NCCL does not use line rates. It multiplies NVLink counts by a rate of its own per GPU generation, takes PCIe at 3/4 of
the line rate, and gives each socket interconnect one number (nccl src/graph/topo.h, topo.cc).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from clustersim.core.topology import PATH_CLASSES

LOC, NVL, NVB, C2C, PIX, PXB, P2C, PXN, PHB, SYS, NET, DIS = range(len(PATH_CLASSES))
"""Path classes as numbers: smaller is nearer."""

NVLINK_BANDWIDTH = ((100, 40.1), (90, 20.6), (87, 20.0), (86, 12.0), (70, 20.0), (60, 18.0), (0, 20.0))
NVLINK_LINE_RATE = ((100, 50.0), (87, 25.0), (86, 14.0625), (70, 25.0), (0, 20.0))
SOCKET_BANDWIDTH = {"amd": 16.0, "arm": 6.0, "power": 32.0}
INTEL_SOCKET_BANDWIDTH = {"emr": 40.0, "gnr": 40.0, "spr": 22.0, "skl": 10.0, "clx": 10.0, "icx": 10.0, "bdw": 6.0}
INTEL_P2P_OVERHEAD = 6 / 5
"""GB/s of an NVLink by compute capability and above, as NCCL counts and as it signals; of a CPU's own link by vendor
and Intel model; and how much longer peer-to-peer takes through an Intel CPU (nccl src/graph/topo.h)."""


class PcieSlot(msgspec.Struct, frozen=True):
    """Where a device hangs in the PCIe tree.

    ``parent`` is a PCIe switch's index, or ``-1 - s`` for socket s; ``bandwidth`` [GB/s] is what NCCL takes the link up
    for (12 for gen3 x16, 24 for gen4, 48 for gen5).
    """

    parent: int
    bandwidth: float


class Nic(msgspec.Struct, frozen=True):
    """A NIC: its slot, its line rate [GB/s], and whether the GPUs' memory can be reached without the CPU."""

    slot: PcieSlot
    bandwidth: float
    gdr: bool = True


@dataclass(frozen=True)
class NodeView:
    """One node (or one NVLink domain of several hosts) as NCCL sees it, limited to the GPUs the communicator uses.

    Parameters
    ----------
    sm : compute capability, 90 for Hopper.
    gpus, switches, nics : PCIe tree. A NIC is there only if the communicator leaves the node.
    dev : index of each GPU in its machine; it spreads GPUs that share NICs over them.
    nvlinks : (n, n) NVLinks between each pair of GPUs; empty if none are direct.
    nvswitch_links : NVLinks from each GPU to NVSwitches, 0 without.
    socket_host : machine each socket is in; sockets of one machine are joined.
    cpu_vendor, cpu_model : as in :class:`clustersim.core.topology.NodeType`.
    p2p : GPUs may read each other over PCIe. p2p_level : the furthest path over which NCCL has them do it
        (:func:`peer_level`).
    nvls : the switches reduce and multicast.
    c2c : [GB/s] of a coherent link between each GPU and its socket, 0 without.
    link_rate : [GB/s] per GPU link if it is not NVLink; 0 goes by ``sm``.
    """

    sm: int
    gpus: tuple[PcieSlot, ...]
    switches: tuple[PcieSlot, ...] = ()
    nics: tuple[Nic, ...] = ()
    dev: tuple[int, ...] = ()
    nvlinks: tuple[tuple[int, ...], ...] = ()
    nvswitch_links: int = 0
    socket_host: tuple[int, ...] = (0,)
    cpu_vendor: str = "intel"
    cpu_model: str = ""
    p2p: bool = True
    p2p_level: int = PXB
    nvls: bool = False
    c2c: float = 0.0
    link_rate: float = 0.0

    @property
    def hosts(self) -> int:
        """Machines in this NVLink domain that hold used GPUs."""
        return len(set(self.socket_host))


def peer_level(vendor: str, n_gpus: int, version: tuple[int, int], amd: bool, asked: str = "") -> int:
    """The furthest path over which NCCL has GPUs read each other, and not by way of the host's memory.

    ``asked`` is what NCCL_P2P_LEVEL says, which goes before all else. Without it never through a CPU of Intel or Arm;
    through AMD's always before 2.23, since then between two GPUs alone (nccl src/graph/paths.cc, ncclTopoCheckP2p;
    NVIDIA/nccl pull request 1331); RCCL does still (ROCm/rccl 1670).
    """
    if asked:
        return PATH_CLASSES.index(asked)
    return SYS if vendor == "amd" and (amd or n_gpus <= 2 or version < (2, 23)) else PXB


def nvlink_bandwidth(sm: int) -> float:
    """GB/s per direction NCCL expects of one NVLink (nccl src/graph/topo.h)."""
    return next(rate for floor, rate in NVLINK_BANDWIDTH if sm >= floor)


def nvlink_line_rate(sm: int) -> float:
    """GB/s per direction of one NVLink on the wire, from which links are counted."""
    return next(rate for floor, rate in NVLINK_LINE_RATE if sm >= floor)


def socket_bandwidth(vendor: str, model: str) -> float:
    """GB/s per direction NCCL expects between two sockets (nccl src/graph/topo.cc)."""
    if vendor == "intel":
        return INTEL_SOCKET_BANDWIDTH.get(model, 10.0)
    return SOCKET_BANDWIDTH.get(vendor, 10.0)


@dataclass(frozen=True)
class System:
    """A communicator on its machines.

    Parameters
    ----------
    n_nodes : nodes, or NVLink domains where several hosts share one.
    n_ranks : members over all nodes.
    views : the distinct :class:`NodeView` of the nodes; one where all nodes are alike.
    net_latency : [s] the transport reports per message: 0 for InfiniBand and RoCE, tens of microseconds for EFA.
    sharp : the network reduces (InfiniBand SHARP), which CollNet and multi-node NVLS need.
    sm_max : newest compute capability in the group; 0 if all are alike.
    """

    n_nodes: int
    n_ranks: int
    views: tuple[NodeView, ...]
    net_latency: float = 0.0
    sharp: bool = False
    sm_max: int = 0

    @property
    def sm(self) -> int:
        """Oldest compute capability in the group; the tuner's tables go by it."""
        return min(view.sm for view in self.views)

    @property
    def ranks_per_node(self) -> float:
        """Members per node, on average where nodes differ."""
        return self.n_ranks / self.n_nodes


def with_full_nics(system: System) -> System:
    """The same communicator, whose NICs all say that they fill their slots, or have the rate of the fastest if more."""
    fastest = max((nic.bandwidth for view in system.views for nic in view.nics), default=0.0)
    views: dict[NodeView, None] = {}
    for view in system.views:
        rates = (max(fastest, nic.slot.bandwidth) for nic in view.nics)
        nics = (msgspec.structs.replace(nic, bandwidth=rate) for nic, rate in zip(view.nics, rates, strict=True))
        views[replace(view, nics=tuple(nics))] = None
    return replace(system, views=tuple(views))


@dataclass(frozen=True)
class NcclRequest:
    """What NCCL's choice depends on besides kind, size and machine.

    Parameters
    ----------
    dtype, redop : of elements, and how they are reduced.
    version : (major, minor) of NCCL; the newest known constants not newer than it.
    force_ll128 : use LL128 even where NCCL holds it unsafe, as NCCL_PROTO does.
    """

    dtype: str = "fp32"
    redop: str = "sum"
    version: tuple[int, int] = (2, 28)
    force_ll128: bool = False
