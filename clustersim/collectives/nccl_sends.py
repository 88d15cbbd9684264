"""NCCL's grouped sends and receives: what they reach on links, and what they take. The tuner has no say in them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from clustersim.arrays import Floats
from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl_terms import floored, host_floor, inner_hop, norm
from clustersim.collectives.paths import loads_of, placement
from clustersim.costs import Costs
from clustersim.program import COPY_ENGINE

_TO_ONE = frozenset({"send", "sendrecv"})


def direct_shares(kind: str, group: Group, costs: Costs) -> Floats:
    """(4,) of the line rate that sends and receives reach on each edge class."""
    share = costs.send_share if kind in _TO_ONE else costs.p2p_share
    net = costs.p2p_net_share * costs.net_share[placement(group).net]
    return np.array([share, costs.share["pcie/Simple"], costs.share["shm/Simple"], net])


def p2p_law(request: Request, group: Group, costs: Costs) -> Callable[[float], float]:
    """Of grouped sends and receives: all_to_all, scatter, gather, send, sendrecv, barrier."""
    device, floor = p2p_device(request, group, costs), host_floor(request.kind, group, costs)
    if group.launch != "single_process":
        floor = costs.host_p2p + costs.host_p2p_peer * _peers(request, group)
    return lambda wire: floored(device(wire), floor, costs)


P2P_LL = 2.0**14
"""Bytes for a peer up to which a send goes by LL (nccl src/enqueue.cc: NCCL_P2P_LL_THRESHOLD)."""

BATCH = 8
"""Peers whose sends a kernel has in flight at once (nccl src/include/device.h: NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""


def p2p_device(request: Request, group: Group, costs: Costs) -> Callable[[float], float]:
    """Seconds of their kernel alone: peers move together, so it has one hop, or a barrier's rounds.

    Over a network a batch of peers begins when the one before it is through: a hop more for each.
    """
    where, loads = placement(group), loads_of(request, group, "direct", 1)
    per_peer = request.nbytes / (1 if request.kind in _TO_ONE else group.size)
    if request.matrix is not None:
        per_peer = request.nbytes * float(request.matrix.between.max())
    hops = costs.base + loads.steps * inner_hop(loads, "Simple", group, costs)
    outer = 0.0
    if where.islands > 1:
        protocol, waits = ("LL", 1.0) if per_peer <= P2P_LL else ("Simple", 2.0)
        outer = loads.net_steps * (costs.hop[f"net/{protocol}"] + waits * costs.net_extra[where.net])
    if request.protocol == COPY_ENGINE:
        return lambda wire: hops + outer + wire
    limit = _channel_limit(per_peer, group, costs)
    later = outer * (math.ceil((_peers(request, group) + 1) / BATCH) - 1)
    return lambda wire: norm(hops + outer, max(wire, limit), costs.p2p_norm) + later


def _peers(request: Request, group: Group) -> int:
    """Whom a member posts sends and receives for, at most; itself left out."""
    if request.matrix is not None:
        posted = request.matrix.between > 0
        return int(max(posted.sum(axis=0).max(), posted.sum(axis=1).max()))
    return 1 if request.kind in _TO_ONE else group.size - 1


def _channel_limit(per_peer: float, group: Group, costs: Costs) -> float:
    """Seconds a peer's bytes take over the channels a message of that size opens: more of them as it grows."""
    age = placement(group).age
    opened = min(max(per_peer / costs.p2p_channel_bytes[age], 1.0), costs.p2p_max_channels)
    return per_peer / (opened * costs.p2p_channel_rate[age])
