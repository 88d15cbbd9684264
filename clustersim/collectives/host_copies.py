"""Sends with a CPU at one end or both: DMA between host memory and a GPU, or messages between machines.

NCCL moves data between GPUs only. A parameter server in host memory, or an offloaded optimizer, is fed by the GPU's
copy engines (cudaMemcpyAsync on pinned memory) inside a machine, and by its transport outside.
"""

from __future__ import annotations

import math

import numpy as np

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group, Plan, Request
from clustersim.collectives.costs import costs_of
from clustersim.core.errors import ProgramError

COPY_SHARE = 0.88
"""Share of a PCIe or C2C link's line rate that pinned copies reach: 55.4 GB/s to and 55.1 from an H200 over PCIe gen5
(Bekman, ml-engineering, network benchmarks)."""

COPY_LATENCY = 8e-6
"""Seconds of one asynchronous copy beyond its bytes: a launch (about 5 us) and PCIe end to end (2-5 us)."""

MESSAGE_LATENCY = 10e-6
"""Seconds a message between machines adds on top of its copies: software at both ends."""


def plan(request: Request, group: Group) -> Plan:
    """The Plan of a send with a CPU at an end. Raises :class:`ProgramError` for a collective."""
    if request.kind != "send":
        raise ProgramError(
            f"{request.kind} with a CPU among its members: host memory is reached by sends only (backend 'gloo' runs "
            "collectives on CPUs)"
        )
    src, dst = (int(vertex) for vertex in group.gpus[:2])
    links, weights = router(group.topology).loads(np.array([src]), np.array([dst]), np.array([1.0]))
    outside = np.array([group.topology.link_kinds[link] == "net" for link in links.tolist()], dtype=bool)
    latency = COPY_LATENCY + float(group.topology.link_latency[links].sum())
    share = np.full(len(links), COPY_SHARE)
    if outside.any():
        net = group.node_type.net if group.node_type.net != "none" else "ib"
        costs = costs_of(group)
        share[outside] = costs.p2p_net_share * costs.net_share[net]
        latency += MESSAGE_LATENCY + costs.net_extra[net]
    return Plan(
        kind=request.kind,
        algorithm="message" if outside.any() else "copy",
        protocol="Simple",
        n_channels=1,
        nbytes=request.nbytes,
        latency=latency,
        links=links,
        weights=weights / share,
        ceiling=math.inf,
    )
