"""One machine as arrays, ready to be tiled: vertices, directed links, and the rate of each NIC's port."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.cluster.files.names import expand
from clustersim.cluster.files.schema import TRAITS, DomainSpec, LinksSpec, NodeSpec
from clustersim.core.device import Device, device
from clustersim.core.errors import TopologyError, nearest
from clustersim.core.texts import Table
from clustersim.core.topology import GPU, NIC, Floats, Ints, NodeType

Ends = tuple[str, str]


class Wire(msgspec.Struct, frozen=True):
    """A directed link by the names of its ends: bandwidth [bytes/s], latency [s], kind."""

    bandwidth: float
    latency: float
    kind: str


class Domain(msgspec.Struct, frozen=True, eq=False):
    """Vertices that at most ``nodes`` consecutive nodes share, and their links (the same from every node)."""

    nodes: int
    kinds: Mapping[str, str]
    wires: Mapping[Ends, Wire]
    evenly: bool = False

    def sizes(self, count: int) -> list[int]:
        """How many of ``count`` nodes are in each domain.

        >>> Domain(18, {}, {}).sizes(20), Domain(18, {}, {}, evenly=True).sizes(20)
        ([18, 2], [10, 10])
        """
        domains = -(-count // self.nodes)
        if self.evenly:
            return [(count + i) // domains for i in range(domains)][::-1]
        return [min(self.nodes, count - i * self.nodes) for i in range(domains)]


class NodeBuild(msgspec.Struct, frozen=True, eq=False):
    """The build of one machine.

    Parameters
    ----------
    type : NodeType
    kinds : vertex kind by name, in order.
    ports : line rate [bytes/s] of each NIC, by name.
    wires : directed links by (source name, destination name).
    domain : what it shares with its neighbours, or None.
    """

    type: NodeType
    kinds: Mapping[str, str]
    ports: Mapping[str, float]
    wires: Mapping[Ends, Wire]
    domain: Domain | None = None
    sources: Mapping[str, str] = msgspec.field(default_factory=dict)


def wire_columns(wires: Mapping[Ends, Wire], names: Iterable[str]) -> tuple[Ints, Ints, Floats, Floats, list[str]]:
    """Links as columns of source, destination, bandwidth, latency and kind; vertices by their place among ``names``."""
    index = {name: i for i, name in enumerate(names)}
    src = np.array([index[a] for a, _ in wires], dtype=np.int64)
    dst = np.array([index[b] for _, b in wires], dtype=np.int64)
    bandwidth = np.array([w.bandwidth for w in wires.values()], dtype=np.float64)
    latency = np.array([w.latency for w in wires.values()], dtype=np.float64)
    return src, dst, bandwidth, latency, [w.kind for w in wires.values()]


def build_node(
    name: str, spec: NodeSpec, base: NodeBuild | None, domain: DomainSpec | None, origin: str, gpu: Device | None = None
) -> NodeBuild:
    """A machine from its description, on top of the one it extends; ``gpu`` : as its file describes it. Raises
    :class:`TopologyError`."""
    kinds, ports, wires = _inherited(spec, base, origin)
    sources = dict(base.sources) if base else {}
    for entry in spec.vertices:
        for vertex in expand(entry.names):
            kinds[vertex] = entry.kind
            if entry.bandwidth is not None:
                ports[vertex] = float(entry.bandwidth)
                sources[vertex] = entry.source
    add_wires(wires, spec.links, kinds, f"{origin}: $.node.links")
    sources |= {f"{entry.a} - {entry.b}": entry.source for entry in spec.links}
    for vertex, kind in kinds.items():
        if kind == NIC and vertex not in ports:
            raise TopologyError(
                f"{origin}: NIC {vertex!r} in $.node.vertices has no bandwidth; give it one, '400 Gb/s'"
            )
    shared = base.domain if base and domain is None else _domain(domain, kinds, origin)
    return NodeBuild(_node_type(name, spec, base, kinds, origin, gpu), kinds, ports, wires, shared, sources)


def _inherited(
    spec: NodeSpec, base: NodeBuild | None, origin: str
) -> tuple[dict[str, str], dict[str, float], dict[Ends, Wire]]:
    if base is None:
        return {}, {}, {}
    gone: set[str] = set()
    for pattern in spec.remove:
        names = set(expand(pattern)) if "[" in pattern else set(fnmatch.filter(base.kinds, pattern))
        if not names or not names <= set(base.kinds):
            raise TopologyError(f"{origin}: $.node.remove: no vertex {pattern!r}; {nearest(pattern, base.kinds)}")
        gone |= names
    kinds = {name: kind for name, kind in base.kinds.items() if name not in gone}
    ports = {name: rate for name, rate in base.ports.items() if name not in gone}
    return kinds, ports, {ends: wire for ends, wire in base.wires.items() if not gone & set(ends)}


def traits_of(spec: NodeSpec, origin: str, gpu: Device | None = None, *, extends: bool = False) -> Table:
    """What a file says of a node's kind, and of its ``gpu`` where the file describes it. Raises :class:`TopologyError`
    where one that ``extends`` none has no GPU, and where the name of it is another's."""
    traits = {f: value for f in ("device", *TRAITS) if (value := getattr(spec, f)) is not None}
    if (memory := traits.get("host_memory")) is not None:
        if not memory:
            raise TopologyError(f"{origin}: $.node.host_memory is 0 B: write what the node has, or leave it out")
        traits["host_memory"] = float(memory)
    if gpu is not None:
        if traits.setdefault("device", gpu.name) != gpu.name:
            raise TopologyError(f"{origin}: $.node.device is {traits['device']!r}; $.device describes {gpu.name!r}")
        return traits | {"own_gpu": gpu}
    if "device" in traits:
        traits["own_gpu"] = None
        # A name that is not known is an error of whoever asks for the GPU.
        with contextlib.suppress(TopologyError):
            traits.setdefault("p2p", device(traits["device"]).p2p)
    if "device" not in traits and not extends:
        raise TopologyError(f"{origin}: $.node.device is missing: the name of the GPU, such as 'H100-SXM5-80GB'")
    return traits


def _node_type(
    name: str, spec: NodeSpec, base: NodeBuild | None, kinds: Mapping[str, str], origin: str, gpu: Device | None
) -> NodeType:
    given = traits_of(spec, origin, gpu, extends=base is not None)
    n_gpus, n_nics = (list(kinds.values()).count(kind) for kind in (GPU, NIC))
    if base:
        return replace(
            base.type, name=name, n_gpus=n_gpus, n_nics=n_nics, sources={**base.type.sources, **spec.sources}, **given
        )
    return NodeType(name=name, n_gpus=n_gpus, n_nics=n_nics, sources=dict(spec.sources), **given)


def _domain(spec: DomainSpec | None, kinds: Mapping[str, str], origin: str) -> Domain | None:
    if spec is None:
        return None
    if spec.nodes < 1:
        raise TopologyError(f"{origin}: $.domain.nodes is {spec.nodes}; at least one node shares a domain")
    shared = {vertex: entry.kind for entry in spec.vertices for vertex in expand(entry.names)}
    wires: dict[Ends, Wire] = {}
    add_wires(wires, spec.links, {**kinds, **shared}, f"{origin}: $.domain.links")
    return Domain(spec.nodes, shared, wires, spec.filled == "evenly")


def add_wires(
    wires: dict[Ends, Wire], entries: Iterable[LinksSpec], known_kinds: Mapping[str, str], origin: str
) -> None:
    """Put the links of a file into ``wires``; a later entry replaces the same ends. Raises :class:`TopologyError`."""
    for i, entry in enumerate(entries):
        a = expand(entry.a)
        b = expand(entry.b)
        for field_name, names in (("a", a), ("b", b)):
            for name in names:
                if name not in known_kinds:
                    raise TopologyError(f"{origin}[{i}].{field_name}: no vertex {name!r}; {nearest(name, known_kinds)}")
        wire = Wire(float(entry.bandwidth), float(entry.latency), entry.kind)
        for ends in _pairs(entry, a, b, f"{origin}[{i}]"):
            wires[ends] = wire
            if not entry.directed:
                wires[ends[::-1]] = wire


def _pairs(entry: LinksSpec, a: list[str], b: list[str], origin: str) -> list[Ends]:
    if entry.pattern == "all":
        return [(x, y) for x in a for y in b if x != y]
    long = max(len(a), len(b))
    short = min(len(a), len(b))
    if long % short:
        raise TopologyError(f"{origin}: cannot zip {len(a)} vertices of {entry.a!r} with {len(b)} of {entry.b!r}")
    return [(a[i * len(a) // long], b[i * len(b) // long]) for i in range(long)]
