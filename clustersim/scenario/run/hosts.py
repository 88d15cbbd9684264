"""What a scenario asks of its nodes' hosts: room in their memory, and copies between that and GPUs."""

from __future__ import annotations

import numpy as np

from clustersim.core.host_memory import HostMemory
from clustersim.core.mesh import Mesh
from clustersim.core.topology import Topology


def host_memory(topology: Topology, mesh: Mesh, rank_bytes: float) -> HostMemory:
    """What the ranks of the node that has most of them keep on its host, each ``rank_bytes``, and the least that a
    node's host has; unknown where no file says that of a node, unless another's is too small already."""
    nodes = topology.vertex_node[mesh.gpus[: mesh.workers]]
    kept_bytes = rank_bytes * int(np.bincount(nodes[nodes >= 0]).max())
    rooms = [topology.node_types[node].host_memory for node in np.unique(nodes[nodes >= 0]).tolist()]
    said = [room for room in rooms if room is not None]
    least = min(said, default=None)
    known = len(said) == len(rooms) or (least is not None and least < kept_bytes)
    return HostMemory(kept_bytes, least if known else None)
