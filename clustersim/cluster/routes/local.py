"""Paths inside a node (or a rack that shares NVSwitches), worked out once per distinct build.

An *island* is what links other than the network's join: a node, or the 18 trays of an NVL72 rack. Islands with the
same parts and links share one :class:`Template`, which answers by local index.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.core.memo import kept_with_first
from clustersim.core.topology import CPU, GPU, NIC, NVSWITCH, PATH_CLASSES, PCIE_SWITCH, Floats, Ints, Topology
from clustersim.core.transports import transport

Path = tuple[int, ...]
GPU_LINKS = ("nvlink", "xgmi")
"""Links that carry GPU-GPU traffic by themselves."""


class Wires(NamedTuple):
    """The links inside an island as columns; ``bandwidth`` [bytes/s]."""

    src: Ints
    dst: Ints
    bandwidth: Floats
    kinds: tuple[str, ...]


class IslandReach(NamedTuple):
    """``p2p`` : GPUs may read each other over PCIe; ``level`` : rank of the furthest path class over which they are let
    (NCCL_P2P_LEVEL). ``relay`` : a GPU may forward for two others over NVLink (NCCL's NVB). ``staged`` : NICs neither
    read nor write GPU memory (no GPUDirect), so that the host's lies between."""

    p2p: bool
    level: int
    relay: bool
    staged: bool


class Template:
    """The inside of one kind of island; vertices and links are local indices.

    ``kinds`` : of vertices. ``node`` : (V,) int, node number relative to the island's first; -1 for shared switches.
    """

    def __init__(self, kinds: tuple[str, ...], node: Ints, wires: Wires, reach: IslandReach) -> None:
        self.kinds = kinds
        self.node = node
        self.reach = reach
        self.bandwidth, self.link_kinds, self.head = wires.bandwidth, wires.kinds, wires.dst.tolist()
        self.out: list[list[int]] = [[] for _ in kinds]
        for link, tail in enumerate(wires.src.tolist()):
            self.out[tail].append(link)
        self._classes: dict[tuple[int, int], str] = {}

    @cached_property
    def gpus(self) -> list[int]:
        """Local indices of the GPUs."""
        return [v for v, kind in enumerate(self.kinds) if kind == GPU]

    @kept_with_first(maxsize=None)
    def spread(self, a: int, b: int) -> tuple[Ints, Floats]:
        """:meth:`paths` as columns: links crossed, and the share of the transfer on each."""
        pairs = [(link, share) for share, path in self.paths(a, b) for link in path]
        links = np.array([link for link, _ in pairs], dtype=np.int64)
        return links, np.array([share for _, share in pairs], dtype=np.float64)

    def engine(self, gpu: int, *, to_switch: bool) -> tuple[Ints, Floats]:
        """Links between a GPU and its NVSwitches in one direction, and the share of its traffic on each."""
        if to_switch:
            links = [e for e in self.out[gpu] if self.kinds[self.head[e]] == NVSWITCH]
        else:
            tails = (v for v, kind in enumerate(self.kinds) if kind == NVSWITCH)
            links = [e for v in tails for e in self.out[v] if self.head[e] == gpu]
        rate = self.bandwidth[links]
        return np.array(links, dtype=np.int64), rate / rate.sum() if links else rate

    @kept_with_first(maxsize=None)
    def paths(self, a: int, b: int) -> tuple[tuple[float, Path], ...]:
        """Every path a transfer is spread over, as (share, links); empty when there is none."""
        if a == b:
            return ((1.0, ()),)
        if self.kinds[a] == self.kinds[b] == GPU:
            direct = self._peer_nvlink(a, b)
            if direct:
                return direct
            if not self.reach.p2p or class_rank(self._class_of(a, b, self._shortest(a, b))) > self.reach.level:
                return self._through_host(a, b)
        if self.reach.staged and {self.kinds[a], self.kinds[b]} == {GPU, NIC}:
            return self._through_host(a, b)
        path = self._shortest(a, b)
        return () if path is None else ((1.0, path),)

    def _peer_nvlink(self, a: int, b: int) -> tuple[tuple[float, Path], ...]:
        """The NVLink paths that two GPUs may use, by a third where need be."""
        direct = self._nvlink(a, b, (NVSWITCH,)) if self.reach.level >= class_rank("NVL") else ()
        if not direct and self.reach.relay and self.reach.level >= class_rank("NVB"):
            direct = self._nvlink(a, b, (NVSWITCH, GPU), most=2)
        return direct

    def _nvlink(self, a: int, b: int, through: tuple[str, ...], most: int = 99) -> tuple[tuple[float, Path], ...]:
        """All shortest NVLink paths; hardware interleaves addresses over links, so shares go by bandwidth."""
        level: list[tuple[int, Path]] = [(a, ())]
        seen = {a}
        for _ in range(most):
            following = [
                (self.head[e], (*path, e)) for v, path in level for e in self.out[v] if self.link_kinds[e] in GPU_LINKS
            ]
            arrived = [path for v, path in following if v == b]
            if arrived:
                width = np.array([self.bandwidth[list(path)].min() for path in arrived])
                return tuple(zip((width / width.sum()).tolist(), arrived, strict=True))
            level = [(v, path) for v, path in following if v not in seen and self.kinds[v] in through]
            seen |= {v for v, _ in level}
            if not level:
                break
        return ()

    def _through_host(self, a: int, b: int) -> tuple[tuple[float, Path], ...]:
        """What cannot be read or written from afar NCCL stages in host memory, at the sender's CPU."""
        ways = ((self._shortest(a, v), v) for v, kind in enumerate(self.kinds) if kind == CPU)
        for _, cpu in sorted((len(route), cpu) for route, cpu in ways if route is not None):
            up = self._shortest(a, cpu)
            down = self._shortest(cpu, b)
            if up is not None and down is not None:
                return ((1.0, up + down),)
        return ()

    def _shortest(self, a: int, b: int) -> Path | None:
        """Fewest hops over PCIe switches and CPUs, then widest, then lowest ids; never through a GPU or a NIC."""
        heap: list[tuple[int, float, Path, int]] = [(0, -np.inf, (), a)]
        done: set[int] = set()
        while heap:
            hops, width, path, v = heapq.heappop(heap)
            if v == b:
                return path
            if v in done or (v != a and self.kinds[v] not in (PCIE_SWITCH, CPU)):
                continue
            done.add(v)
            for e in self.out[v]:
                heapq.heappush(heap, (hops + 1, max(width, -float(self.bandwidth[e])), (*path, e), self.head[e]))
        return None

    def path_class(self, a: int, b: int) -> str:
        """NCCL's class of the path between two vertices; ``"DIS"`` when there is none."""
        path_kind = self._classes.get((a, b))  # by hand: asked for every GPU and NIC of a cluster
        if path_kind is None:
            path_kind = self._classes[a, b] = self._classify(a, b)
        return path_kind

    def _classify(self, a: int, b: int) -> str:
        if a == b:
            return "LOC"
        if NIC in (self.kinds[a], self.kinds[b]):  # as near as it is, by whichever way its bytes go
            path = self._shortest(a, b)
        else:
            path = next((links for _, links in self.paths(a, b)), None)
        return self._class_of(a, b, path)

    def _class_of(self, a: int, b: int, path: Path | None) -> str:
        if path is None:
            return "DIS"
        inner = [self.kinds[self.head[e]] for e in path[:-1]]
        ends = {self.kinds[a], self.kinds[b]}
        if ends == {GPU} and NVSWITCH not in inner and GPU in inner:
            return "NVB"
        if all(self.link_kinds[e] in GPU_LINKS for e in path):
            return "NVL"
        if all(self.link_kinds[e] == "c2c" for e in path):
            return "C2C"
        cpus = inner.count(CPU) + (CPU in ends)
        if cpus:
            return "SYS" if cpus > 1 else "PHB"
        return "PXB" if inner.count(PCIE_SWITCH) > 1 else "PIX"


class Islands(msgspec.Struct, frozen=True, eq=False):
    """A topology cut into islands.

    ``of`` (V,) int is the island of a vertex (-1: network switches), ``local`` (V,) its index there; ``vertices`` and
    ``links`` list global ids island by island from ``vertex_start`` and ``link_start``; ``template`` says which of
    ``templates`` an island follows.
    """

    of: Ints
    local: Ints
    vertices: Ints
    vertex_start: Ints
    links: Ints
    link_start: Ints
    template: Ints
    templates: tuple[Template, ...]


def cut(topology: Topology, relay: bool) -> Islands:
    """Find the islands of a topology and their templates."""
    inside = np.array([kind != "net" for kind in topology.link_kinds], dtype=bool)
    component_of = _components(topology, inside)
    vertices = np.argsort(component_of, kind="stable")
    vertices = vertices[component_of[vertices] >= 0]
    n = int(component_of.max(initial=-1)) + 1
    vertex_start = np.searchsorted(component_of[vertices], np.arange(n + 1))
    local = np.full(len(component_of), -1, dtype=np.int64)
    local[vertices] = np.arange(len(vertices)) - np.repeat(vertex_start[:-1], np.diff(vertex_start))
    ids = np.flatnonzero(inside)
    links = ids[np.argsort(component_of[topology.link_src[ids]], kind="stable")]
    link_start = np.searchsorted(component_of[topology.link_src[links]], np.arange(n + 1))
    template, templates = _templates(topology, relay, (vertices, vertex_start, links, link_start, local))
    return Islands(component_of, local, vertices, vertex_start, links, link_start, template, templates)


def _components(topology: Topology, inside: np.typing.NDArray[np.bool_]) -> Ints:
    """Island number per vertex: nodes, merged where shared switches join them; -1 outside."""
    n_vertices = len(topology.vertex_names)
    label = np.arange(n_vertices, dtype=np.int64)
    member = topology.vertex_node >= 0
    if member.any():
        first = np.full(int(topology.vertex_node.max()) + 1, n_vertices, dtype=np.int64)
        np.minimum.at(first, topology.vertex_node[member], np.flatnonzero(member))
        label[member] = first[topology.vertex_node[member]]
    src = topology.link_src[inside]
    dst = topology.link_dst[inside]
    while len(src):
        low = np.minimum(label[src], label[dst])
        new = label.copy()
        np.minimum.at(new, src, low)
        np.minimum.at(new, dst, low)
        np.minimum.at(new, label, new.copy())  # a whole node moves when one of its parts does
        new = new[new]
        if np.array_equal(new, label):
            break
        label = new
    touched = member.copy()
    touched[src] = touched[dst] = True
    component_of = np.full(n_vertices, -1, dtype=np.int64)
    component_of[touched] = np.unique(label[touched], return_inverse=True)[1]
    return component_of


def _templates(
    topology: Topology, relay: bool, columns: tuple[Ints, Ints, Ints, Ints, Ints]
) -> tuple[Ints, tuple[Template, ...]]:
    vertices, vertex_start, links, link_start, local = columns
    n = len(vertex_start) - 1
    home = topology.vertex_node[vertices]
    first = np.full(n, _NOWHERE)
    np.minimum.at(first, np.repeat(np.arange(n), np.diff(vertex_start)), np.where(home >= 0, home, _NOWHERE))
    node = np.where(home >= 0, home - np.repeat(first, np.diff(vertex_start)), -1)
    src = local[topology.link_src[links]]
    dst = local[topology.link_dst[links]]
    rate = topology.link_bandwidth[links]
    # All that tells islands apart, of all islands one after another, as bytes: an island's are a stretch of each.
    kinds = _coded(topology.vertex_kinds, vertices)
    link_kinds = _coded(topology.link_kinds, links)
    parts = [(column, vertex_start) for column in (kinds, node)]
    parts += [(column, link_start) for column in (src, dst, rate, link_kinds)]
    stretches = [(column.tobytes(), (start * column.itemsize).tolist()) for column, start in parts]
    template_of: dict[tuple[object, ...], int] = {}
    number = np.zeros(n, dtype=np.int64)
    templates: list[Template] = []
    for i, its_first in enumerate(first.tolist()):
        own = None if its_first == _NOWHERE else topology.node_types[its_first]
        level = class_rank(own.p2p_level) if own is not None and own.p2p_level else class_rank("SYS")
        reach = IslandReach(own is None or own.p2p, level, relay, own is not None and not transport(own.net).direct)
        key = (reach, *(table_bytes[offsets[i] : offsets[i + 1]] for table_bytes, offsets in stretches))
        if key not in template_of:
            template_of[key] = len(templates)
            v = slice(vertex_start[i], vertex_start[i + 1])
            e = slice(link_start[i], link_start[i + 1])
            wires = Wires(src[e], dst[e], rate[e], tuple(topology.link_kinds[j] for j in links[e].tolist()))
            inside = tuple(topology.vertex_kinds[j] for j in vertices[v].tolist())
            templates.append(Template(inside, node[v], wires, reach))
        number[i] = template_of[key]
    return number, tuple(templates)


_NOWHERE = np.iinfo(np.int64).max
"""The first node of an island that has none."""


def _coded(kinds: Sequence[str], which: Ints) -> np.typing.NDArray[np.int8]:
    """The kinds of some vertices or links as numbers."""
    number = {kind: i for i, kind in enumerate(dict.fromkeys(kinds))}
    return np.array([number[kind] for kind in kinds], dtype=np.int8)[which]


def class_rank(name: str) -> int:
    """Place of a path class in NCCL's order, nearest first."""
    return PATH_CLASSES.index(name)


def near_gpus(template: Template, nic: int) -> list[int]:
    """GPUs of the NIC's own node with the best path class to it."""
    node_gpus = [g for g in template.gpus if template.node[g] == template.node[nic]]
    ranks = [class_rank(template.path_class(g, nic)) for g in node_gpus]
    return [g for g, rank in zip(node_gpus, ranks, strict=True) if rank == min(ranks)]


def nics_of(template: Template, node: int) -> list[int]:
    """NICs of one node of an island."""
    return [v for v, kind in enumerate(template.kinds) if kind == NIC and template.node[v] == node]
