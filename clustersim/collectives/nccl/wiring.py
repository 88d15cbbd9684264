"""The paths NCCL takes over the links of a node.

What a path may be used for depends on its class, the worst link it crosses (nccl src/graph/paths.cc).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import msgspec

from clustersim.collectives.nccl.links import LOCAL_BANDWIDTH, Vertex, links_of, socket_of
from clustersim.collectives.nccl.view import C2C, DIS, LOC, NET, NVB, NVL, P2C, PHB, PIX, PXB, PXN, NodeView


class Path(msgspec.Struct, frozen=True):
    """Links crossed (ids), the narrowest [GB/s], and the path class."""

    links: tuple[int, ...]
    bandwidth: float
    kind: int


_NOWHERE = Path((), 0.0, DIS)


class Wiring:
    """Links and paths of a :class:`NodeView`. Vertices are ``("gpu", 0)``, ``("pci", 1)``, ``("cpu", 0)``,
    ``("nic", 0)`` (the card), ``("net", 0)`` (its port) and ``("nvs", 0)``, all NVSwitches as one.

    ``bandwidth``, ``ends``, ``link_kind`` are per directed link; ``path[a, b]`` is known between GPUs, ports, the
    switch and sockets.
    """

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self.n_gpus = len(view.gpus)
        self.n_nets = len(view.nics)
        self.has_switch = view.nvswitch_links > 0
        self.has_nvlink = self.has_switch or any(map(any, view.nvlinks))
        links = links_of(view)
        self.ends = links.ends
        self.bandwidth = links.bandwidth
        self.link_kind = links.kind
        self.out = links.out
        self.path: dict[tuple[Vertex, Vertex], Path] = {}
        for base in self._bases():
            self._paths_to(base)
        self._ports: dict[tuple[int, int | None], list[int]] = {}
        self._local_gpus: dict[int, int | None] = {}
        self._divert()
        self._local_gpus = {n: self.local_gpu(n) for n in range(self.n_nets)}

    # ------------------------------------------------------------------------------------------ paths

    def _bases(self) -> Iterable[Vertex]:
        yield from (("cpu", s) for s in range(len(self.view.socket_host)))
        yield from (("gpu", g) for g in range(self.n_gpus))
        yield from (("net", n) for n in range(self.n_nets))
        if self.has_switch:
            yield ("nvs", 0)

    def _paths_to(self, base: Vertex) -> None:
        """Breadth first from ``base``: fewest hops, then widest. A GPU relays only between two NVLink peers."""
        paths: dict[Vertex, Path] = {base: Path((), LOCAL_BANDWIDTH, LOC)}
        frontier = [base]
        while frontier:
            reached: list[Vertex] = []
            for vertex in frontier:
                path_here = paths[vertex]
                for link in self.out[vertex]:
                    next_vertex = self.ends[link][1]
                    kind = self.link_kind[link]
                    relay = vertex != base and vertex[0] == "gpu"
                    if relay and (kind != NVL or next_vertex[0] != "gpu" or len(path_here.links) > 1):
                        continue
                    rate = min(path_here.bandwidth, self.bandwidth[link])
                    before = paths.get(next_vertex, _NOWHERE)
                    longer = before.bandwidth == 0 or len(before.links) > len(path_here.links)
                    if not longer or before.bandwidth >= rate:
                        continue
                    back = link ^ 1  # links are made in pairs
                    worst = max(path_here.kind, self._step(vertex, next_vertex, link, path_here))
                    paths[next_vertex] = Path((back, *path_here.links), rate, worst)
                    if next_vertex not in reached:
                        reached.append(next_vertex)
            frontier = reached
        for start, path in paths.items():
            if start[0] in {"gpu", "net", "cpu", "nvs"}:
                self.path[start, base] = path

    def _step(self, vertex: Vertex, next_vertex: Vertex, link: int, path: Path) -> int:
        """Class one more link gives a path."""
        kind = self.link_kind[link]
        if kind == NET:
            return LOC
        if vertex[0] == "pci" and next_vertex[0] == "pci":
            return PXB
        if kind == PIX and "cpu" in (vertex[0], next_vertex[0]):
            return PHB
        if vertex[0] == "gpu" and path.kind == NVL and kind == NVL and path.links:
            return NVB
        return kind

    def between(self, a: Vertex, b: Vertex) -> Path:
        """The path NCCL would use, of class DIS if there is none."""
        return self.path.get((a, b), _NOWHERE)

    # ------------------------------------------------------------------------------------------ detours

    def _divert(self) -> None:
        """Replace paths that exist but may not be used: GPUs without peer access, NICs without GPUDirect, PXN."""
        gpus = [("gpu", g) for g in range(self.n_gpus)]
        for a in gpus:
            for b in gpus:
                if a != b and not self._peer(a, b):
                    self._via(a, self._local_cpu(b), b)
        if self.view.c2c:
            self._coherent()
        for n in range(self.n_nets):
            net: Vertex = ("net", n)
            direct = self.view.nics[n].gdr and self.view.sm >= 35
            for gpu in gpus:
                self._relay(gpu, net)
                near = self.between(gpu, net).kind
                if near < PHB and not (direct and near <= PXN):
                    self._via(net, self._local_cpu(gpu), gpu)
                    self._via(gpu, self._local_cpu(gpu), net)

    def _peer(self, a: Vertex, b: Vertex) -> bool:
        kind = self.between(a, b).kind
        return kind <= self.view.p2p_level and (self.view.p2p or kind <= NVB)

    def _local_cpu(self, gpu: Vertex) -> Vertex:
        return ("cpu", self.socket_of(gpu[1]))

    def _via(self, a: Vertex, middle: Vertex, b: Vertex, kind: int | None = None) -> None:
        first = self.between(a, middle)
        second = self.between(middle, b)
        worst = max(first.kind, second.kind)
        if {first.kind, second.kind} == {PHB, C2C}:
            worst = P2C
        rate = min(first.bandwidth, second.bandwidth)
        self.path[a, b] = Path(first.links + second.links, rate, worst if kind is None else kind)

    def _coherent(self) -> None:
        """A NIC on the socket a GPU reaches coherently is as near as a NIC behind a PCIe switch."""
        for n in range(self.n_nets):
            for g in range(self.n_gpus):
                cpu = self._local_cpu(("gpu", g))
                kinds = {self.between(("gpu", g), cpu).kind, self.between(("net", n), cpu).kind}
                for ends in ((("gpu", g), ("net", n)), (("net", n), ("gpu", g))):
                    path = self.between(*ends)
                    if kinds == {PHB, C2C}:
                        self.path[ends] = Path(path.links, path.bandwidth, min(P2C, path.kind))

    def _relay(self, gpu: Vertex, net: Vertex) -> None:
        """PXN: leave by a NIC of another GPU, over NVLink, where that is wider or avoids the CPU."""
        local = self.local_gpu(net[1])
        if local is None or ("gpu", local) == gpu:
            return
        peer = ("gpu", local)
        near = self.between(peer, net)
        own_path = self.between(gpu, net)
        better = near.bandwidth > own_path.bandwidth or own_path.kind > PXN
        beside = self.between(peer, gpu).kind <= NVL and self._host(peer) == self._host(gpu)
        if near.kind <= PXB and beside and better:
            self._via(gpu, peer, net, PXN)

    def socket_of(self, gpu: int) -> int:
        """The socket a GPU's PCIe slot belongs to."""
        return socket_of(self.view, self.view.gpus[gpu])

    def _host(self, gpu: Vertex) -> int:
        return self.view.socket_host[self._local_cpu(gpu)[1]]

    # ------------------------------------------------------------------------------------------ who is near

    def nearest(self, vertex: Vertex, kind: str) -> list[int]:
        """Indices of the GPUs (``"gpu"``) or ports (``"net"``) with the widest, then nearest path from a vertex."""
        best: tuple[float, int] = (0.0, -DIS)
        chosen: list[int] = []
        for i in range(self.n_gpus if kind == "gpu" else self.n_nets):
            path = self.between(vertex, (kind, i))
            score = (path.bandwidth, -path.kind)
            if score > best:
                best = score
                chosen = []
            if score == best and path.bandwidth > 0:
                chosen.append(i)
        return chosen

    def local_net(self, gpu: int, channel: int) -> int:
        """The port a GPU prefers for a channel; GPUs that share ports start at different ones."""
        nets = self.nearest(("gpu", gpu), "net")
        sharers = self.nearest(("net", nets[0]), "gpu")
        start = self.view.dev[gpu] if self.view.dev else gpu
        count = len(nets)
        if count & (count - 1) == 0:
            start = mirror_bits(start, count)
        return nets[(start + channel % -(-count // len(sharers))) % count]

    def local_gpu(self, net: int) -> int | None:
        """The GPU that prefers a port, if any does."""
        if net in self._local_gpus:
            return self._local_gpus[net]
        near = self.nearest(("net", net), "gpu")
        trials = ((gpu, channel) for channel in range(self.n_nets) for gpu in near)
        return next((gpu for gpu, channel in trials if self.local_net(gpu, channel) == net), None)

    def ports(self, limit: int, gpu: int | None) -> list[int]:
        """Ports in the order NCCL tries them from a GPU (None: from anywhere): preferred ones first, then all within a
        path class, nearest first."""
        known_ports = self._ports.get((limit, gpu))
        if known_ports is None:
            known_ports = self._ports[limit, gpu] = self._rank_ports(limit, gpu)
        return known_ports

    def _rank_ports(self, limit: int, gpu: int | None) -> list[int]:
        gpus = range(self.n_gpus) if gpu is None else [gpu]
        preferred = [self._preferred(g) for g in gpus]
        if self.view.hosts > 1:  # several hosts in one NVLink domain: one port of every GPU before a second of any
            depth = max(map(len, preferred))
            ranked = [nets[i] for i in range(depth) for nets in preferred if i < len(nets)]
        else:
            ranked = [net for nets in preferred for net in nets]
        for kind in range(limit + 1):
            for g in gpus:
                ranked += [n for n in range(self.n_nets) if self.between(("gpu", g), ("net", n)).kind == kind]
        return list(dict.fromkeys(ranked))

    def _preferred(self, gpu: int) -> list[int]:
        nets = [self.local_net(gpu, channel) for channel in range(self.n_nets + 1)]
        again = next((i for i, net in enumerate(nets) if i and net == nets[0]), len(nets))
        return nets[:again]


def mirror_bits(value: int, power: int) -> int:
    """The bits of a value below a power of two, in reverse order.

    >>> [mirror_bits(i, 4) for i in range(4)]
    [0, 2, 1, 3]
    """
    mirrored = 0
    low = 1
    high = power >> 1
    while low < power:
        if value & low:
            mirrored |= high
        low = low << 1
        high = high >> 1
    return mirrored


@lru_cache(maxsize=256)
def wiring(view: NodeView) -> Wiring:
    """The links and paths of a node, computed once."""
    return Wiring(view)
