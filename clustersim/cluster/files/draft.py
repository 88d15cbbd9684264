"""A Topology under construction: nodes laid side by side by tiling their arrays, then switches added around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.cluster.files.node import Domain, NodeBuild, wire_columns
from clustersim.core.topology import NIC, SWITCH, Floats, Ints, NodeType, Topology


class ClusterPorts(msgspec.Struct, frozen=True):
    """Every NIC of a cluster, node-major: vertex id, node, place in the node (its rail), port rate [bytes/s]."""

    vertex: Ints
    node: Ints
    rail: Ints
    rate: Floats

    def __len__(self) -> int:
        return len(self.vertex)


class TopologyDraft(msgspec.Struct):
    """Columns that grow until :meth:`topology` freezes them."""

    names: list[str] = msgspec.field(default_factory=list)
    kinds: list[str] = msgspec.field(default_factory=list)
    node: list[Ints] = msgspec.field(default_factory=list)
    links: list[tuple[Ints, Ints, Floats, Floats]] = msgspec.field(default_factory=list)
    link_kinds: list[str] = msgspec.field(default_factory=list)
    node_types: list[NodeType] = msgspec.field(default_factory=list)
    ports: ClusterPorts = msgspec.field(default_factory=lambda: join_ports([]))

    def add_vertices(self, names: Iterable[str], kinds: Sequence[str], node: Ints) -> Ints:
        """New vertices; their ids."""
        first = len(self.names)
        self.names += names
        self.kinds += kinds
        self.node.append(node)
        return np.arange(first, first + len(kinds), dtype=np.int64)

    def add_switches(self, names: Sequence[str]) -> Ints:
        """New network switches; their ids."""
        return self.add_vertices(names, [SWITCH] * len(names), np.full(len(names), -1, dtype=np.int64))

    def add_links(
        self, src: Ints, dst: Ints, bandwidth: npt.ArrayLike, latency: npt.ArrayLike, kinds: list[str]
    ) -> None:
        """New directed links."""
        rate = np.broadcast_to(np.asarray(bandwidth, dtype=np.float64), src.shape)
        hop = np.broadcast_to(np.asarray(latency, dtype=np.float64), src.shape)
        self.links.append((src, dst, rate, hop))
        self.link_kinds += kinds

    def add_cables(self, a: Ints, b: Ints, bandwidth: npt.ArrayLike, latency: float) -> None:
        """New network links, both directions of each, side by side."""
        src = np.stack([a, b], axis=1).ravel()
        dst = np.stack([b, a], axis=1).ravel()
        rate = np.repeat(np.broadcast_to(np.asarray(bandwidth, dtype=np.float64), a.shape), 2)
        self.add_links(src, dst, rate, latency, ["net"] * len(src))

    def topology(self, name: str, fabric: str, routing: str = "destination", sharp: bool = False) -> Topology:
        """The finished, immutable graph."""
        none = (np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), np.zeros(0))
        src, dst, bandwidth, latency = map(np.concatenate, zip(none, *self.links, strict=True))
        return Topology(
            name=name,
            vertex_names=tuple(self.names),
            vertex_kinds=tuple(self.kinds),
            vertex_node=np.concatenate(self.node),
            link_src=src,
            link_dst=dst,
            link_bandwidth=bandwidth,
            link_latency=latency,
            link_kinds=tuple(self.link_kinds),
            node_types=tuple(self.node_types),
            fabric=fabric,
            routing=routing,
            sharp=sharp,
        )


def join_ports(parts: Sequence[ClusterPorts]) -> ClusterPorts:
    """Ports of several runs of nodes, one after the other."""
    none = ClusterPorts(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))
    columns = ([getattr(port_set, name) for port_set in (none, *parts)] for name in ClusterPorts.__struct_fields__)
    return ClusterPorts(*map(np.concatenate, columns))


def lay(nodes: Sequence[NodeBuild]) -> TopologyDraft:
    """Nodes side by side, named ``node0/...``; equal neighbours are tiled, and share their domains."""
    draft = TopologyDraft()
    parts = []
    for _, run in groupby(nodes, key=id):
        alike = list(run)
        parts.append(_lay_run(draft, alike[0], len(alike)))
    draft.ports = join_ports(parts)
    return draft


def _lay_run(draft: TopologyDraft, node: NodeBuild, count: int) -> ClusterPorts:
    """``count`` copies of a node."""
    first = len(draft.node_types)
    size = len(node.kinds)
    numbers = np.arange(first, first + count, dtype=np.int64)
    names = [f"node{i}/{name}" for i in numbers for name in node.kinds]
    ids = draft.add_vertices(names, list(node.kinds.values()) * count, np.repeat(numbers, size))
    base = ids[:: max(size, 1)]
    src, dst, bandwidth, latency, kinds = wire_columns(node.wires, node.kinds)
    draft.add_links(
        (base[:, None] + src).ravel(),
        (base[:, None] + dst).ravel(),
        np.tile(bandwidth, count),
        np.tile(latency, count),
        kinds * count,
    )
    draft.node_types += [node.type] * count
    if node.domain:
        _lay_domains(draft, node, node.domain, base)
    local = np.array([i for i, kind in enumerate(node.kinds.values()) if kind == NIC], dtype=np.int64)
    rate = np.array([node.ports[name] for name, kind in node.kinds.items() if kind == NIC], dtype=np.float64)
    rails = np.arange(len(local), dtype=np.int64)
    return ClusterPorts(
        (base[:, None] + local).ravel(), np.repeat(numbers, len(local)), np.tile(rails, count), np.tile(rate, count)
    )


def _lay_domains(draft: TopologyDraft, node: NodeBuild, domain: Domain, base: Ints) -> None:
    """The shared parts of the nodes of a run, domain by domain."""
    size = len(node.kinds)
    src, dst, bandwidth, latency, kinds = wire_columns(domain.wires, [*node.kinds, *domain.kinds])
    done = sum(name.startswith("domain") for name in draft.names) // max(len(domain.kinds), 1)
    sizes = domain.sizes(len(base))
    ends = np.cumsum(sizes)
    for number, (size_here, end) in enumerate(zip(sizes, ends, strict=True), start=done):
        names = [f"domain{number}/{name}" for name in domain.kinds]
        shared = draft.add_vertices(names, list(domain.kinds.values()), np.full(len(names), -1, dtype=np.int64))
        for node_base in base[end - size_here : end]:
            a = np.where(src < size, node_base + src, shared[0] + src - size)
            b = np.where(dst < size, node_base + dst, shared[0] + dst - size)
            draft.add_links(a, b, bandwidth, latency, kinds)
