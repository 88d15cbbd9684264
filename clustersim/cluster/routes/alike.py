"""Which islands are built alike, so that what is found out about one of them holds for the others."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from clustersim.cluster.routes.local import Islands
from clustersim.cluster.routes.network import NetworkLinks
from clustersim.core.topology import Ints, Topology


def builds(top: Topology, cut: Islands, network: NetworkLinks, anchor: dict[int, int]) -> Ints:
    """(islands,) a number, equal for islands of which all is alike but where they are: the inside, the types of
    their nodes, and names and speeds of the NICs that reach the network. ``anchor`` : a vertex of each node."""
    wires = network.links
    rates = (top.link_bandwidth, top.reported_bandwidth)
    ends = (top.link_src, top.link_dst)
    speeds = [np.bincount(end[wires], rate[wires], len(cut.of)) for rate in rates for end in ends]
    live = np.array([network.joins(nic) for nic in top.nics.tolist()], dtype=np.int64)
    named = _numbered(top.vertex_names[nic].rpartition("/")[2] for nic in top.nics.tolist())
    nics = _by_island(
        cut.of[top.nics],
        len(cut.template),
        cut.local[top.nics],
        live,
        named,
        *(speed[top.nics].view(np.int64) for speed in speeds),
    )
    typed = _numbered(kind.name for kind in top.node_types)
    home = np.array([cut.of[anchor[node]] if node in anchor else -1 for node in range(top.n_nodes)])
    types = _by_island(home, len(cut.template), typed)
    return _numbered(zip(cut.template.tolist(), types, nics, strict=True))


def places_of_links(top: Topology, cut: Islands) -> tuple[Ints, Ints]:
    """(links,) island of each link, -1 for the network's, and its place among those of the island."""
    island = np.full(top.n_links, -1, dtype=np.int64)
    place = np.zeros(top.n_links, dtype=np.int64)
    island[cut.links] = np.repeat(np.arange(len(cut.template)), np.diff(cut.link_start))
    place[cut.links] = np.arange(len(cut.links)) - cut.link_start[island[cut.links]]
    return island, place


def _numbered(keys: Iterable[object]) -> Ints:
    """Equal keys as equal numbers, from 0 in order of appearance."""
    number_of: dict[object, int] = {}
    return np.array([number_of.setdefault(key, len(number_of)) for key in keys], dtype=np.int64)


def _by_island(island: Ints, n: int, *columns: Ints) -> list[bytes]:
    """Rows of columns, those of each of ``n`` islands as bytes."""
    order = np.argsort(island, kind="stable")
    table = np.stack(columns, axis=1)[order]
    table_bytes = table.tobytes()
    width = table.shape[1] * table.itemsize
    offsets = (np.searchsorted(island[order], np.arange(n + 1)) * width).tolist()
    return [table_bytes[a:b] for a, b in pairwise(offsets)]
