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
from clustersim.core.topology import GPU, Floats, Ints, Topology

COPY_SHARE = 0.88
"""Share of a PCIe link's line rate that pinned copies reach: 55.4 GB/s to and 55.1 from an H200 over PCIe gen5 (Bekman,
ml-engineering, network benchmarks). Gen4 has a little less: 0.80 to 0.85 on A100 and RTX 4090 (NVIDIA/nvbandwidth
issues 15 and 42)."""
C2C_SHARE_TO_HOST = 0.67
C2C_SHARE_FROM_HOST = 0.77
"""The same of NVLink-C2C: 346 of 450 GB/s by a GH200's copy engine, and 15 % less on the way back (NVIDIA/nvbandwidth
issue 23)."""

COPY_LATENCY = 8e-6
"""Seconds of one asynchronous copy beyond its bytes: a launch (about 5 us) and PCIe end to end (2-5 us)."""

MESSAGE_LATENCY = 10e-6
"""Seconds a message between machines adds on top of its copies: software at both ends."""


def copy_shares(topology: Topology, links: Ints) -> Floats:
    """(links,) float, of the line rate of each that a copy between a GPU and a host reaches."""
    shares = np.full(len(links), COPY_SHARE)
    for i, link in enumerate(links.tolist()):
        if topology.link_kinds[link] == "c2c":
            leaves = topology.vertex_kinds[topology.link_src[link]] == GPU
            shares[i] = C2C_SHARE_TO_HOST if leaves else C2C_SHARE_FROM_HOST
    return shares


def near_cpus(topology: Topology, gpus: Ints) -> Ints:
    """(gpus,) vertex ids of the CPU that each reaches over the fewest links, the first of equal ones; -1 for none."""
    ways = router(topology)
    near = np.full(len(gpus), -1)
    for i, gpu in enumerate(gpus.tolist()):
        own = topology.cpus[topology.vertex_node[topology.cpus] == topology.vertex_node[gpu]].tolist()
        own = [cpu for cpu in own if ways.reaches(gpu, cpu)]
        near[i] = min(own, key=lambda cpu: len(ways.route(gpu, cpu)), default=-1)
    return near


def copy_rate(topology: Topology, gpus: Ints, cpus: Ints, *, to_host: bool) -> float:
    """[bytes/s] that each of the ``gpus`` copies at to its own of the ``cpus``, or from it, while all of them do: of
    the one whose links are shared most, which a step waits for. What goes the other way at the same time has links of
    its own."""
    ends = (gpus, cpus) if to_host else (cpus, gpus)
    links, weights = router(topology).loads(*ends, np.ones(len(gpus)))
    rates = topology.link_bandwidth[links] * copy_shares(topology, links)
    return float((rates / weights).min())


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
    share = copy_shares(group.topology, links)
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
