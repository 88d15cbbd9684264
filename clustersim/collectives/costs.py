"""Which constants hold for a group: those of the time models, with what its own machine was measured to do."""

from __future__ import annotations

import math
from functools import lru_cache

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group
from clustersim.core.calibrated import Calibration
from clustersim.core.costs import COSTS, GLOO_COSTS, MPI_COSTS, CommunicationCosts, GlooCosts, MpiCosts, overlaid
from clustersim.core.topology import Topology
from clustersim.core.transports import FAST_NIC, transport


def costs_of(group: Group) -> CommunicationCosts:
    """NCCL's constants on the group's machine.

    The share of its NICs that a topology file gives (``[node] net_share``) replaces the transport's; what is fitted to
    the machine's own measurements (``[calibration]``, ``[measured]``) replaces both.
    """
    machine = group.node_type
    return _nccl(machine.net, machine.net_share or _streamed(group), _hop(group), group.topology.calibration)


def costs_of_kind(group: Group) -> CommunicationCosts:
    """NCCL's constants on a machine of this kind of which nothing was measured."""
    return _nccl(group.node_type.net, _streamed(group), _hop(group), None)


def _streamed(group: Group) -> float:
    """Share of a NIC that its streams reach, where their rate is less than the transport's usual share; else 0."""
    net_transport = transport(group.node_type.net)
    if math.isinf(net_transport.nic_rate):
        return 0.0
    line = _line_rate(group)
    return net_transport.nic_rate / line if net_transport.nic_rate < net_transport.share * line else 0.0


def _hop(group: Group) -> float:
    """Seconds that a hop takes beyond one of InfiniBand, where the NICs are of a faster generation of their kind; else
    0."""
    hop_fast = transport(group.node_type.net).hop_fast
    return hop_fast if hop_fast and reported_nic_rate(group.topology, int(group.nodes[0])) >= FAST_NIC else 0.0


def reported_nic_rate(topology: Topology, node: int) -> float:
    """bytes/s that the driver of a node's fastest NIC reports; 0 without one. It tells a NIC's generation
    (:data:`clustersim.core.transports.FAST_NIC`): one that delivers less is no older for it."""
    routes = router(topology)
    return max((routes.reported_bandwidth(nic) for nic in routes.nics_of_node(node)), default=0.0)


def _line_rate(group: Group) -> float:
    """bytes/s of the fastest NIC of the group's first node; 0 without one."""
    routes = router(group.topology)
    return max((routes.nic_bandwidth(nic) for nic in routes.nics_of_node(int(group.nodes[0]))), default=0.0)


def gloo_costs_of(group: Group) -> GlooCosts:
    """Gloo's constants on the group's machine."""
    calibration = group.topology.calibration
    return overlaid(GLOO_COSTS, calibration.values("gloo")) if calibration else GLOO_COSTS


def mpi_costs_of(group: Group) -> MpiCosts:
    """Open MPI's constants on the group's machine."""
    calibration = group.topology.calibration
    return overlaid(MPI_COSTS, calibration.values("mpi")) if calibration else MPI_COSTS


# A calibration is one object per loaded topology and hashes by identity, so two machines never share an entry.
@lru_cache(maxsize=64)
def _nccl(net: str, net_share: float, hop: float, calibration: Calibration | None) -> CommunicationCosts:
    listed = net in COSTS.net_share
    fitted = {f"net_share.{net}": net_share} if net_share and listed else {}
    if hop and listed:
        fitted[f"net_extra.{net}"] = hop
    return overlaid(COSTS, fitted | (calibration.values("nccl") if calibration else {}))
