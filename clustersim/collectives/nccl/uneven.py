"""What NCCL makes of nodes that differ: each searches for itself, and the least of all results counts, field by field.

A node with a slower NIC may find more channels at half the speed where the others find fewer at the full one; together
they have the fewer at the half (nccl src/init.cc: after the ranks' third gather, the least of channels and of speeds).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from clustersim.cluster.routes import router
from clustersim.collectives.base import Group
from clustersim.collectives.channels import channels
from clustersim.collectives.nccl.derive import system_of
from clustersim.collectives.nccl.graph import ChannelGraph
from clustersim.collectives.nccl.search import search
from clustersim.collectives.nccl.view import NodeView, System
from clustersim.core.errors import few
from clustersim.core.topology import NIC
from clustersim.core.units import format_bandwidth

UNEVEN = "nodes differ, and NCCL takes the fewest channels and the least speed of any"
"""How the sentence begins."""
SHOWN = {"ring": "rings", "nvls": "NVLS trees"}
"""Search results that are told: trees have as many channels as rings."""
NO_RING = "no ring of NCCL's takes"
"""How the sentence on slow NICs begins."""
LOST = 0.95
"""Of the bandwidth that the weaker node found: below that, taking the least of all has lost some."""


def of_group(group: Group) -> Iterator[str]:
    """Sentences of a group that spans nodes, of GPUs that NCCL runs on: if nodes differ, and if NICs are left out."""
    if np.unique(group.nodes).size > 1 and group.node_type.gpu.sm:
        system = system_of(group)
        yield from filter(None, (uneven_nodes(system), _left_out(group, system)))


def _left_out(group: Group, system: System) -> str:
    """NICs that say they are slower than others of their node, where no ring takes their rail; empty where one does."""
    rates = [[nic.bandwidth for nic in view.nics] for view in system.views]
    if all(min(each, default=0.0) == max(each, default=0.0) for each in rates):
        return ""
    count = search(system)["ring"].n_channels
    rails = {rail for ring in channels(group, count) for rail in ring.edge_rails.tolist()} if count else set()
    topology = group.topology
    find = router(topology)
    nics = [v for v, kind in enumerate(topology.vertex_kinds) if kind == NIC]
    fastest = max(map(find.reported_bandwidth, nics))
    out = [v for v in nics if find.reported_bandwidth(v) < fastest and rails and find.rail(v) not in rails]
    if not out:
        return ""
    names = few([topology.vertex_names[v] for v in out], 4)
    rate = format_bandwidth(max(map(find.reported_bandwidth, out)))
    return f"{NO_RING} {names}: {rate} beside {format_bandwidth(fastest)}; other NICs carry its part"


def uneven_nodes(system: System) -> str:
    """What nodes that differ get, in a sentence; empty where all are alike."""
    if system.n_nodes < 2 or len(system.views) < 2:
        return ""
    apart = [search(replace(system, views=(view,))) for view in system.views]
    together = search(system)
    parts = []
    for name, title in SHOWN.items():
        graphs = [result[name] for result in apart]
        if not all(graph.n_channels for graph in graphs):
            continue
        each = " and ".join(dict.fromkeys(map(_channels, graphs)))
        parts.append(f"{title} of {each} by themselves, together {_channels(together[name])}")
    text = f"{UNEVEN}: {'; '.join(parts)}"
    least = min(map(_bandwidth, (result["ring"] for result in apart)))
    if _bandwidth(together["ring"]) >= LOST * least:
        return text
    without = search(replace(system, views=tuple(map(_without_slower, system.views))))["ring"]
    if _bandwidth(without) > _bandwidth(together["ring"]):
        text += f"; without NICs slower than others of their node (NCCL_IB_HCA, remove = true) {_channels(without)}"
    return text


def _channels(graph: ChannelGraph) -> str:
    return f"{graph.n_channels} x {graph.bw_inter:g} GB/s"


def _bandwidth(graph: ChannelGraph) -> float:
    return graph.n_channels * graph.bw_inter


def _without_slower(view: NodeView) -> NodeView:
    fastest = max(nic.bandwidth for nic in view.nics)
    return replace(view, nics=tuple(nic for nic in view.nics if nic.bandwidth == fastest))
