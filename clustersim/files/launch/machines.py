"""A topology in the words of other simulators: ASTRA-sim's analytical network and system, SimGrid's platform XML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import quoteattr

import numpy as np

from clustersim.cluster.routes import router
from clustersim.core.errors import TopologyError
from clustersim.core.limits import counted
from clustersim.core.mesh import Mesh
from clustersim.core.paths import json_text
from clustersim.core.topology import CPU, GPU, NIC, Topology

MOST_ROUTES = 200_000
"""Of a SimGrid platform, which has one of every pair of hosts."""

Hops = tuple[tuple[tuple[int, float], ...], ...]
"""Of a route: the links of each hop, with the share that each carries."""


ASTRA = ("network.yml", "system.json", "comm_group.json")
"""Files of ASTRA-sim beside the traces."""


def astra(topology: Topology, mesh: Mesh, groups: Mapping[int, Sequence[int]]) -> dict[str, bytes]:
    """ASTRA-sim 2's analytical network, system and process groups (by number) of the same machine: :data:`ASTRA`.

    The network has a dimension inside the node and one between nodes, with what a GPU has of each: its own links, and
    its share of the node's NICs. Durations are replayed.
    """
    dims = list(_dims(topology, mesh))
    network = "".join(
        f"{name}: [ {', '.join(cells)} ]{unit}\n"
        for name, unit, cells in (
            ("topology", "", [shape for shape, *_ in dims]),
            ("npus_count", "", [str(n) for _, n, *_ in dims]),
            ("bandwidth", "  # GB/s of an NPU, each direction", [f"{rate / 1e9:.6g}" for *_, rate, _ in dims]),
            ("latency", "  # ns of a link", [f"{hop * 1e9:.6g}" for *_, hop in dims]),
        )
    )
    gpu = topology.node_types[0].gpu
    rings = {f"{kind}-implementation": ["ring"] * len(dims) for kind in ("all-reduce", "all-gather", "reduce-scatter")}
    system = {
        "scheduling-policy": "FIFO",
        "endpoint-delay": 1,
        "active-chunks-per-dimension": 2,
        "preferred-dataset-splits": 4,
        **rings,
        "all-to-all-implementation": ["direct"] * len(dims),
        "collective-optimization": "localBWAware",
        "boost-mode": 0,
        "roofline-enabled": 0,
        "track-local-mem": 0,
        "local-mem-bw": gpu.memory_bandwidth / 1e9,
        "peak-perf": max(gpu.peak.values()) / 1e12,
    }
    listed = {str(number): list(members) for number, members in groups.items()}
    return dict(zip(ASTRA, (network.encode(), json_text(system), json_text(listed)), strict=True))


def _dims(topology: Topology, mesh: Mesh) -> Iterator[tuple[str, int, float, float]]:
    """Shape, size, bandwidth [bytes/s] and latency [s] of each dimension. Raises :class:`TopologyError`."""
    per_node = mesh.nproc_per_node
    nodes = mesh.world_size // mesh.nproc_per_node
    first = int(mesh.gpus[0])
    own_links = np.flatnonzero(topology.link_src == first)
    fast = [i for i in own_links.tolist() if topology.link_kinds[i] in ("nvlink", "xgmi")] or own_links.tolist()
    ends = {int(topology.link_dst[i]) for i in fast}
    direct = all(topology.vertex_kinds[i] == GPU for i in ends)
    shape = "Switch" if not direct else "FullyConnected" if len(ends) >= per_node - 1 else "Ring"
    yield shape, per_node, float(topology.link_bandwidth[fast].sum()), float(topology.link_latency[fast].max())
    if nodes < 2:
        return
    at_home = topology.vertex_node[topology.link_src] == topology.vertex_node[first]
    out = [
        i
        for i in np.flatnonzero(at_home).tolist()
        if topology.link_kinds[i] == "net" and topology.vertex_kinds[topology.link_src[i]] == NIC
    ]
    if not out:
        raise TopologyError(f"{topology.name}: no network leaves a node, and ASTRA-sim would need one for {nodes}")
    share = float(topology.link_bandwidth[out].sum()) / per_node
    yield "Switch", nodes, share, float(topology.link_latency[out].max())


def astra_command(name: str, groups: bool) -> str:
    """How ASTRA-sim is started in the folder of the files."""
    which = "comm_group.json" if groups else "empty"
    return (
        f"AstraSim_Analytical_Congestion_Unaware --workload-configuration={name} --system-configuration=system.json "
        "--network-configuration=network.yml --remote-memory-configuration=no_memory_expansion.json "
        f"--comm-group-configuration={which}"
    )


def simgrid(topology: Topology) -> str:
    """SimGrid's platform XML (version 4.1): a host for each GPU and CPU, and the routes that transfers take here.

    Every pair of hosts that reach each other has its own route (``routing="Full"``): by itself SimGrid would take the
    fewest links, so PCIe where NVSwitches are. Links over which a hop is spread (:meth:`Router.hops`) are one link of
    all their bandwidth, which all routes over some of them share. A GPU's speed is its fp32 peak. Raises
    :class:`TopologyError` for a cluster too large for it.
    """
    kinds = topology.vertex_kinds
    hosts = [v for v, kind in enumerate(kinds) if kind in (GPU, CPU)]
    counted(len(hosts) ** 2, MOST_ROUTES, f"{topology.name}: routes of a SimGrid platform", TopologyError)
    routes = _routes_between(topology, hosts)
    bundles = _bundles(routes, topology.n_links)
    lines = [
        '<?xml version="1.0"?>',
        '<!DOCTYPE platform SYSTEM "https://simgrid.org/simgrid.dtd">',
        '<platform version="4.1">',
        f'  <zone id={quoteattr(topology.name)} routing="Full">',
    ]
    names = {v: quoteattr(topology.vertex_names[v]) for v in hosts}
    for v, name in names.items():
        speed = topology.node_types[topology.vertex_node[v]].gpu.peak["fp32"] if kinds[v] == GPU else 1e9
        lines.append(f'    <host id={name} speed="{speed!r}f"/>')
    ids = {}
    for first, members in _members(bundles).items():
        more = f" and {len(members) - 1} more" if len(members) > 1 else ""
        ids[first] = quoteattr(f"{first}: {topology.link_name(first)}{more}")
        rate = float(topology.link_bandwidth[members].sum())
        hop = float(topology.link_latency[members].max())
        lines.append(f'    <link id={ids[first]} bandwidth="{rate!r}Bps" latency="{hop!r}s"/>')
    for (a, b), hops in routes.items():
        crossed = "".join(f"<link_ctn id={ids[bundles[shares[0][0]]]}/>" for shares in hops)
        lines.append(f'    <route src={names[a]} dst={names[b]} symmetrical="NO">{crossed}</route>')
    return "\n".join([*lines, "  </zone>", "</platform>", ""])


def _routes_between(topology: Topology, hosts: Sequence[int]) -> dict[tuple[int, int], Hops]:
    """Of each pair that has one."""
    ways = router(topology)
    pairs = ((a, b) for a in hosts for b in hosts if a != b)
    return {(a, b): ways.hops(a, b) for a, b in pairs if ways.reaches(a, b)}


def _bundles(routes: Mapping[tuple[int, int], Hops], n_links: int) -> list[int]:
    """The first link of the bundle that each link is in: links are together where a hop is spread over them."""
    first = list(range(n_links))
    for hop in {tuple(link for link, _ in shares) for hops in routes.values() for shares in hops}:
        together = {first[link] for link in hop}
        if len(together) > 1:
            least = min(together)
            first = [least if root in together else root for root in first]
    return first


def _members(bundles: Sequence[int]) -> dict[int, list[int]]:
    """Links by the first of their bundle."""
    members: dict[int, list[int]] = {}
    for link, first in enumerate(bundles):
        members.setdefault(first, []).append(link)
    return members
