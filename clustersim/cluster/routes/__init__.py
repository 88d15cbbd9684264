"""Routes over a topology: static, deterministic, and summed into link loads without a search per pair.

>>> from clustersim.cluster import files as fabrics
>>> topology = fabrics.load("hgx-h100", nodes=2)
>>> route = router(topology).route(topology.vertex("node0/gpu0"), topology.vertex("node1/gpu0"), rail=0)
>>> [topology.link_name(link).split(" -> ")[1] for link in route]
['node0/pcie0', 'node0/nic0', 'leaf0', 'node1/nic0', 'node1/pcie0', 'node1/gpu0']
"""

from __future__ import annotations

from clustersim.cluster.routes.cuts import bisection_bandwidth, cut_bandwidth, injection_bandwidth, unreachable_pairs
from clustersim.cluster.routes.router import Router, router

__all__ = ["Router", "bisection_bandwidth", "cut_bandwidth", "injection_bandwidth", "router", "unreachable_pairs"]
