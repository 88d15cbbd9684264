"""What grouped sends and receives take with the ``nccl`` backend, of which NCCL's tuner has no say."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from clustersim.collectives.base import Group, Request
from clustersim.collectives.costs import reported_nic_rate
from clustersim.collectives.expert_kernels import kernel_time, posting
from clustersim.collectives.nccl.p2p_parts import LL_THRESHOLD, P2pParts, parts_of
from clustersim.collectives.nccl_terms import floored, host_floor, inner_hop, kernel_start, norm, over_pcie, work_place
from clustersim.collectives.paths import EDGE_CLASSES, PathLoads, loads_of, placement
from clustersim.core.arrays import Floats
from clustersim.core.collective_kinds import COPY_ENGINE
from clustersim.core.costs import CommunicationCosts
from clustersim.core.transports import transport

_TO_ONE = frozenset({"send", "sendrecv"})


def direct_shares(kind: str, group: Group, costs: CommunicationCosts) -> Floats:
    """(5,) of the line rate that sends and receives reach on each of :data:`EDGE_CLASSES`."""
    share = costs.send_share if kind in _TO_ONE else costs.p2p_share
    net = placement(group).net
    reached = (costs.p2p_net_share * costs.net_share[net], costs.p2p_net_share * transport(net).share)
    return np.array([share, costs.share["pcie/Simple"], costs.share["shm/Simple"], *reached])


def p2p_law(request: Request, group: Group, costs: CommunicationCosts) -> Callable[[float], float]:
    """Of grouped sends and receives: all_to_all, scatter, gather, send, sendrecv, barrier."""
    device, floor = p2p_device(request, group, costs), host_floor(request.kind, group, costs)
    if request.kernel is not None:
        return device
    if group.launch != "single_process":
        floor += costs.host_p2p + costs.host_p2p_peer[work_place(group)] * _peers(request, group)
    return lambda wire: floored(device(wire), floor, costs)


BATCH = 8
"""Peers whose sends a kernel has in flight at once (nccl src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""


def p2p_device(request: Request, group: Group, costs: CommunicationCosts) -> Callable[[float], float]:
    """Seconds of their kernel alone: peers move together, so it has one hop, or a barrier's rounds.

    Over a network a batch of peers begins when the one before it is through: a hop more for each. Simple's hops there
    are pipelined as a ring's: two publishers' messages over EFA and two over InfiniBand had been told a third too slow.
    """
    group_placement = placement(group)
    if request.kernel is not None:
        rate = reported_nic_rate(group.topology, int(group.nodes[0]))
        post = posting(request.kernel.library, group_placement.net, rate)
        return kernel_time(request.kernel, request.nbytes, request.dtype, group.size, group_placement.islands, post)
    loads = loads_of(request, group, "direct", 1)
    parts = _parts(request, group)
    hops = kernel_start(request.kind, group, costs) + loads.steps * inner_hop(loads, parts.protocol, group, costs)
    outer = 0.0
    if group_placement.islands > 1:
        outer = loads.net_steps * (costs.hop["net/Simple"] + 2.0 * costs.net_extra[group_placement.net])
        outer *= costs.ring_net["Simple"]
    if request.protocol == COPY_ENGINE:
        alone = _of_engine(request.kind, loads, group, costs)
        return lambda wire: hops + outer + wire * alone
    later = outer * (math.ceil((_peers(request, group) + 1) / BATCH) - 1)
    moving = _moving_law(parts, group, costs)
    return lambda wire: norm(hops + outer, moving(wire), costs.p2p_norm) + later


def channels_law(request: Request, group: Group, costs: CommunicationCosts) -> Callable[[float], float]:
    """Seconds in which the bytes of grouped sends and receives move, given those they take on the narrowest link: those
    of the channels of one peer, where they carry less than a link does."""
    if request.kernel is not None or request.protocol == COPY_ENGINE:
        return lambda wire: wire
    return _moving_law(_parts(request, group), group, costs)


def _moving_law(parts: P2pParts, group: Group, costs: CommunicationCosts) -> Callable[[float], float]:
    if placement(group).islands > 1:  # NICs are slower than channels
        return lambda wire: wire
    slower = costs.share["nvlink/Simple"] / costs.share[f"nvlink/{parts.protocol}"]
    carried = slower * parts.nbytes / costs.p2p_channel_rate[placement(group).age]
    return lambda wire: norm(wire * slower, carried, costs.p2p_channel_norm)


def _peers(request: Request, group: Group) -> int:
    """Whom a member posts sends and receives for, at most; itself left out."""
    if request.matrix is not None:
        posted = request.matrix.between > 0
        return int(max(posted.sum(axis=0).max(), posted.sum(axis=1).max()))
    return 1 if request.kind in _TO_ONE else group.size - 1


def _of_engine(kind: str, loads: PathLoads, group: Group, costs: CommunicationCosts) -> float:
    """How much longer a copy engine takes for its bytes than links alone let channels: it reaches Simple's share."""
    if placement(group).islands > 1 or over_pcie(loads):
        return 1.0
    links = EDGE_CLASSES.index("nvlink")
    return float(direct_shares(kind, group, costs)[links]) / costs.share["nvlink/Simple"]


def _parts(request: Request, group: Group) -> P2pParts:
    """What a peer's bytes are split into.

    A message says who sends it, not its communicator: a pipeline's is taken to have all GPUs of their node.
    """
    per_peer = request.nbytes / (1 if request.kind in _TO_ONE else group.size)
    if request.kind == "barrier":
        per_peer = 0.0
    if request.matrix is not None:
        per_peer = request.nbytes * float(request.matrix.between.max())
    protocol = "LL" if per_peer <= LL_THRESHOLD else "Simple"
    if placement(group).islands > 1:
        return P2pParts(protocol, 1, per_peer)
    if placement(group).age == "amd":  # RCCL has rules of its own, and its GPUs' links to one peer are narrow
        return P2pParts(protocol, 1, 0.0)
    if request.kind == "send":
        of_nodes = [group.topology.node_gpus(int(node)) for node in group.node_ids]
        group = replace(group, gpus=np.concatenate(of_nodes))
    return parts_of(per_peer, group.size, placement(group).system, group.nccl_version)
