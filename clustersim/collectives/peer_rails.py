"""Which way NCCL's sends go: by the NIC on the receiver's rail, and over another GPU where no NVLink is direct.

NCCL's PXN (since 2.12; NCCL_P2P_PXN_LEVEL 2, its default, is "always" for sends and receives): a GPU writes what it has
for a far peer into the local GPU beside the NIC on the peer's rail, over NVLink, and that GPU's proxy posts it. So an
all_to_all never changes rails inside the network, and each NIC carries what its local GPU's peers get.

Inside a hybrid cube mesh (DGX-1) NCCL's sends between two GPUs without an NVLink pass through a third that has one to
each (path class NVB; NCCL_NVB_DISABLE turns it off), rather than over PCIe and between sockets.
"""

from __future__ import annotations

import numpy as np

from clustersim.cluster.routes import router
from clustersim.cluster.routes.local import class_rank
from clustersim.cluster.routes.router import Router
from clustersim.collectives.base import Group
from clustersim.collectives.islands import member_islands, owned_nics, shapes
from clustersim.core.arrays import Ints
from clustersim.core.memo import kept_with_topology
from clustersim.core.topology import GPU

SINCE = (2, 12)
"""NCCL's first version with PXN."""
RELAYS_SINCE = (2, 11)
"""NCCL's first version that documents NCCL_NVB_DISABLE."""


@kept_with_topology(maxsize=64)
def relays(group: Group) -> bool:
    """Whether NCCL's sends between some of these members pass through another GPU of the machine."""
    routes = router(group.topology)
    kinds = group.topology.vertex_kinds
    if group.nccl_version < RELAYS_SINCE:
        return False
    for shape in shapes(group):
        gpus = [gpu for gpu in shape.gpus.tolist() if kinds[gpu] == GPU and routes.nvlink_egress(gpu) > 0]
        pairs = ((a, b) for a in gpus for b in gpus if a != b)
        if any(class_rank(routes.path_class(a, b)) > class_rank("C2C") for a, b in pairs):
            return True
    return False


def peer_rails(src: Ints, dst: Ints, group: Group) -> Ints:
    """(E,) the rail of each edge's receiver; -1, both ends' nearest NICs, where that is not NCCL's way.

    That is inside an island, for a receiver that owns several NICs (its channels take turns), and where no NVLink leads
    the sender to a GPU beside that NIC.
    """
    rails = np.full(len(src), -1, dtype=np.int64)
    islands = member_islands(group)
    away = np.flatnonzero(islands[src] != islands[dst])
    if group.nccl_version < SINCE or not len(away):
        return rails
    own = _own_rails(group)[dst[away]]
    with_rail = own >= 0
    away = away[with_rail]
    own = own[with_rail]
    if not len(away):
        return rails
    wanted, inverse = np.unique(src[away] * (int(own.max()) + 1) + own, return_inverse=True)
    member, rail = np.divmod(wanted, int(own.max()) + 1)
    routes = router(group.topology)
    pairs = zip(group.gpus[member].tolist(), rail.tolist(), strict=True)
    open_way = np.array([_reaches(routes, gpu, wanted) for gpu, wanted in pairs], dtype=np.bool_)
    rails[away] = np.where(open_way[inverse.reshape(-1)], own, -1)
    return rails


@kept_with_topology(maxsize=64)
def _own_rails(group: Group) -> Ints:
    """(n,) the rail of each member's only NIC; -1 for a member with none or several, or that is no GPU."""
    kinds = group.topology.vertex_kinds
    routes = router(group.topology)
    owned = owned_nics(group.topology, group.gpus)
    alone = [
        routes.rail(nics[0]) if len(nics) == 1 and kinds[gpu] == GPU else -1
        for gpu, nics in zip(group.gpus.tolist(), owned, strict=True)
    ]
    return np.array(alone, dtype=np.int64)


def _reaches(routes: Router, gpu: int, rail: int) -> bool:
    """Whether a GPU gets to its node's NIC of a rail without the CPU: beside it, or through a GPU that is."""
    if routes.topology.vertex_kinds[gpu] != GPU:
        return False
    ends = routes.ends(gpu, rail)
    return bool(ends) and all(
        len(legs) == 2 or class_rank(routes.path_class(gpu, port)) <= class_rank("PXB") for port, legs in ends
    )
