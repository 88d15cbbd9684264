"""What passes host memory on its way between a GPU and a NIC, where NICs cannot read or write GPU memory.

Without GPUDirect RDMA a GPU writes what it sends into a buffer of its host, which the NIC reads, and what a NIC gets
lies there until the GPU has read it (nccl src/transport/net.cc, ``NCCL_NET_MAP_HOSTMEM``). So every byte of the network
crosses the way to the CPU once, the way from it once, and the host's memory twice, at the sender and at the receiver. A
GPU and a NIC on one PCIe switch share its port to the CPU, which then carries both in both directions: half of its rate
is left for either. Eight A100 with four 200 Gb/s NICs, nv_peer_mem missing on one of two nodes, had 4 channels (two of
the search) and 30 GB/s of 100: NVIDIA/nccl-tests issue 152.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group
from clustersim.collectives.islands import shapes
from clustersim.collectives.nccl.search import search
from clustersim.collectives.nccl.view import System
from clustersim.core.arrays import Floats, Ints
from clustersim.core.memory_rates import host_bandwidth
from clustersim.core.transports import transport

SEARCHED = ("ring", "tree")
"""Algorithms whose channels enter by the NICs of their own search."""


def searched_rails(group: Group, system: System, algorithm: str) -> tuple[int, ...]:
    """The rails of the NICs by which NCCL's channels enter a node whose NICs are staged, one for each channel.

    Where the way to the CPU is what is scarce, it matters which switch a NIC hangs on: NCCL's search counts that, and
    takes NICs of different switches. Nodes whose NICs reach GPU memory follow those that do not, which have the fewest
    channels. Empty where all reach it, or where nodes of several builds do not.
    """
    staged = [view for view in system.views if not all(nic.gdr for nic in view.nics)]
    if algorithm not in SEARCHED or len(staged) != 1:
        return ()
    topology = group.topology
    routes = router(topology)
    for shape in shapes(group):
        nodes = np.unique(topology.vertex_node[shape.gpus]).tolist()
        row = transport(topology.node_types[nodes[0]].net)
        if not row.direct and not row.bundled:
            nics = [nic for node in nodes for nic in routes.nics_of_node(node) if routes.reported_bandwidth(nic) > 0]
            nets = search(replace(system, views=(staged[0],)))[algorithm].nets
            return tuple(routes.rail(nics[entry]) for entry, _ in nets)
    return ()


def host_memory_rate(links: Ints, staged: Floats, group: Group) -> float:
    """Payload bytes/s that the hosts' memory sustains, each byte written to it once and read from it once.

    ``links`` : (k,) crossed. ``staged`` : (k,) bytes on each between a GPU and a NIC, per byte of payload.
    """
    topology = group.topology
    node_types = topology.node_types
    into = np.isin(topology.link_dst[links], topology.cpus) & ~np.isin(topology.link_src[links], topology.cpus)
    entered = topology.link_dst[links[into]]
    held_bytes = np.bincount(entered, weights=staged[into], minlength=1)
    rate = math.inf
    for cpu in np.flatnonzero(held_bytes).tolist():
        kind = node_types[int(topology.vertex_node[cpu])]
        if not transport(kind.net).direct:
            rate = min(rate, host_bandwidth(kind) / (2.0 * float(held_bytes[cpu])))
    return rate
