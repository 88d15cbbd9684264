"""Static routes between vertices, and the link loads of many transfers at once."""

from __future__ import annotations

from functools import cached_property
from string import digits

import numpy as np
import numpy.typing as npt

from clustersim.cluster.routes.alike import builds
from clustersim.cluster.routes.loads import Transfers, laid
from clustersim.cluster.routes.local import GPU_LINKS, Template, class_rank, cut, near_gpus, nics_of
from clustersim.cluster.routes.network import mix, network
from clustersim.core.errors import TopologyError
from clustersim.core.memo import kept_with_first
from clustersim.core.topology import GPU, Floats, Ints, Topology

Leg = tuple[int, int]
"""A stretch inside one island, between two vertices."""


class Router:
    """Routes of one topology. Nothing here depends on load; the same call always gives the same route.

    Inside a node a GPU reaches a GPU by its own NVLink, else through NVSwitches, else over PCIe (through host memory
    where peer-to-peer is off). Between nodes it leaves and enters by NICs; if another GPU, one NVLink away, is nearer
    to the NIC, the data goes through that GPU first (NCCL's PXN, applied on both sides).

    Parameters
    ----------
    topology : Topology
    relay : let a GPU forward for two others that share no NVLink (NCCL's NVB, used by its send/recv on hybrid cube
        meshes). Off by default: ring and tree searches do not use it.
    """

    def __init__(self, topology: Topology, relay: bool = False) -> None:
        self.topology = topology
        self.islands = cut(topology, relay)
        self.network = network(topology)
        nodes, first = np.unique(topology.vertex_node, return_index=True)
        self.anchor = dict(zip(nodes.tolist(), first.tolist(), strict=True))  # any vertex of a node tells its island

    @cached_property
    def builds(self) -> Ints:
        """(islands,) a number, equal for islands of which all is alike but where they are."""
        return builds(self.topology, self.islands, self.network, self.anchor)

    # ---- questions about a node -------------------------------------------------------------------------------------

    def path_class(self, a: int, b: int) -> str:
        """NCCL's class of the path between two vertices: NVL, NVB, C2C, PIX, PXB, PHB, SYS; NET between nodes."""
        island = self.islands.of[a]
        if island < 0 or island != self.islands.of[b]:
            return "NET"
        return self._template(a).path_class(int(self.islands.local[a]), int(self.islands.local[b]))

    @kept_with_first(maxsize=None)
    def nics_of_node(self, node: int) -> tuple[int, ...]:
        """NICs of a node in order, without those cut off from the network (if there is one)."""
        node_nics = self._all_nics(node)
        return tuple(v for v in node_nics if self.network.joins(v)) if self.network.out else node_nics

    @kept_with_first(maxsize=None)
    def nearest_nics(self, gpu: int) -> tuple[int, ...]:
        """NICs of the GPU's node with the best path class to it; none if the node has none that is connected."""
        nics = self.nics_of_node(int(self.topology.vertex_node[gpu]))
        ranks = [class_rank(self.path_class(gpu, nic)) for nic in nics]
        nearest = min(ranks, default=class_rank("NET"))
        return tuple(n for n, r in zip(nics, ranks, strict=True) if r == nearest < class_rank("NET"))

    def nvlink_egress(self, gpu: int) -> float:
        """Bytes/s a GPU can send over its NVLink or xGMI links together (C2C counts only between GPUs)."""
        template = self._template(gpu)
        local = int(self.islands.local[gpu])
        kinds = template.link_kinds
        heads = template.head
        out = template.out[local]
        fast = [e for e in out if kinds[e] in GPU_LINKS or (kinds[e] == "c2c" and template.kinds[heads[e]] == GPU)]
        return float(template.bandwidth[fast].sum())

    def nic_bandwidth(self, nic: int) -> float:
        """Bytes/s of a NIC's network links, one direction; 0 if it has none."""
        return float(sum(self.topology.link_bandwidth[e] for e in self.network.out.get(nic, ())))

    def reported_bandwidth(self, nic: int) -> float:
        """The same, as its driver says it."""
        return float(sum(self.topology.reported_bandwidth[e] for e in self.network.out.get(nic, ())))

    # ---- one route --------------------------------------------------------------------------------------------------

    def route(self, src: int, dst: int, flow: int = 0, rail: int = -1) -> tuple[int, ...]:
        """Link ids from a vertex to another.

        Parameters
        ----------
        src, dst : vertex ids of GPUs, CPUs or NICs.
        flow : int, tells parallel flows of a pair apart; equal choices (NVSwitches, near NICs, up-links) go by it.
        rail : number of the NIC to use on both sides if the nodes differ (3 for ``nic3``; another NIC where that one is
            missing or down); -1 for the NICs nearest to each end.

        Raises :class:`TopologyError` where there is no way, naming both vertices.
        """
        return self._find(int(src), int(dst), int(flow), int(rail))

    def reaches(self, src: int, dst: int) -> bool:
        """Whether there is a route."""
        try:
            self.route(src, dst)
        except TopologyError:
            return False
        return True

    @kept_with_first(maxsize=None)
    def _find(self, src: int, dst: int, flow: int, rail: int) -> tuple[int, ...]:
        before, middle, after = self._stretches(src, dst, flow, rail)
        ahead = [link for a, b in before for link in self._leg(a, b, flow)]
        behind = [link for a, b in after for link in self._leg(a, b, flow)]
        return (*ahead, *middle, *behind)

    def hops(self, src: int, dst: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """The links of :meth:`route` hop by hop, each with the share of the transfer that it carries.

        A hop has several links where hardware interleaves over parallel ones, as over NVSwitches. Raises
        :class:`TopologyError` where there is no way.
        """
        before, middle, after = self._stretches(src, dst, 0, -1)
        ahead = [hop for a, b in before for hop in self._spread_leg(a, b)]
        behind = [hop for a, b in after for hop in self._spread_leg(a, b)]
        return (*ahead, *(((link, 1.0),) for link in middle), *behind)

    def _spread_leg(self, a: int, b: int) -> list[tuple[tuple[int, float], ...]]:
        """Hops inside an island: as many as each of its parallel paths, which are equally long, has."""
        paths = self._template(a).paths(int(self.islands.local[a]), int(self.islands.local[b]))
        if not paths:
            raise self._unreachable(a, b)
        base = int(self.islands.link_start[self.islands.of[a]])
        hops = []
        for place in range(len(paths[0][1])):
            shares: dict[int, float] = {}
            for share, path in paths:
                link = int(self.islands.links[base + path[place]])
                shares[link] = shares.get(link, 0.0) + share
            hops.append(tuple(sorted(shares.items())))
        return hops

    def _stretches(
        self, src: int, dst: int, flow: int, rail: int
    ) -> tuple[tuple[Leg, ...], tuple[int, ...], tuple[Leg, ...]]:
        """Legs before the network, links of the network, legs behind it."""
        if src == dst:
            return (), (), ()
        if 0 <= self.islands.of[src] == self.islands.of[dst]:
            return ((src, dst),), (), ()
        leave, enter = self._choose(src, dst, rail, flow)
        middle = self.network.path(leave[0], enter[0], flow)
        if middle is None:
            raise self._unreachable(src, dst)
        return leave[1], tuple(middle), tuple((b, a) for a, b in reversed(enter[1]))

    def _choose(self, src: int, dst: int, rail: int, flow: int) -> tuple[tuple[int, tuple[Leg, ...]], ...]:
        """The port of each end that a flow takes: near NICs in turn; GPUs that share them start apart."""
        leave = self.ends(src, rail)
        enter = self.ends(dst, rail)
        if not leave or not enter:
            raise self._unreachable(src, dst)
        turns = [flow + self._turn(v) for v in (src, dst)]
        return leave[turns[0] % len(leave)], enter[turns[1] % len(enter)]

    @kept_with_first(maxsize=None)
    def _turn(self, vertex: int) -> int:
        near = self.nearest_nics(vertex)
        island = self.islands.of[vertex]
        start = self.islands.vertex_start[island]
        local = int(self.islands.local[vertex])
        earlier = self.islands.vertices[start : start + local].tolist()
        kinds = self.topology.vertex_kinds
        return sum(kinds[v] == GPU and self.nearest_nics(v) == near for v in earlier) if near else 0

    def _leg(self, a: int, b: int, flow: int) -> list[int]:
        island = int(self.islands.of[a])
        paths = self._template(a).paths(int(self.islands.local[a]), int(self.islands.local[b]))
        if not paths:
            raise self._unreachable(a, b)
        path = paths[mix(a, b, flow) % len(paths)][1] if len(paths) > 1 else paths[0][1]
        base = int(self.islands.link_start[island])
        return self.islands.links[[base + e for e in path]].tolist() if path else []

    # ---- the ends of routes between nodes ---------------------------------------------------------------------------

    @kept_with_first(maxsize=None)
    def ends(self, vertex: int, rail: int) -> tuple[tuple[int, tuple[Leg, ...]], ...]:
        """Ports a vertex may use, each with the legs from the vertex to it."""
        return tuple((port, self._legs(vertex, port)) for port in self._ports(vertex, rail))

    def _ports(self, vertex: int, rail: int) -> tuple[int, ...]:
        if self.network.joins(vertex):
            return (vertex,)
        node = int(self.topology.vertex_node[vertex])
        if rail < 0 or node < 0:
            return self.nearest_nics(vertex) if node >= 0 else ()
        wanted = self._rails(node).get(rail)
        live = self.nics_of_node(node)
        if wanted in live:
            return (wanted,)
        if rail > self._last_rail:
            raise TopologyError(f"{self.topology.name}: no node has a NIC {rail}; rails are 0 to {self._last_rail}")
        return (live[rail % len(live)],) if live else ()

    @kept_with_first(maxsize=None)
    def _rails(self, node: int) -> dict[int, int]:
        """NIC by rail: the number its name ends in (``nic3`` stays rail 3 when ``nic0`` is gone), else its place."""
        nics = self._all_nics(node)
        names = [self.topology.vertex_names[nic] for nic in nics]
        numbers = [int(name[len(name.rstrip(digits)) :] or -1) for name in names]
        distinct = len(set(numbers)) == len(nics) and -1 not in numbers
        return dict(zip(numbers if distinct else range(len(nics)), nics, strict=True))

    def rail(self, nic: int) -> int:
        """The rail a NIC is on, as :meth:`route` counts them."""
        rails = self._rails(int(self.topology.vertex_node[nic]))
        return next(rail for rail, rail_nic in rails.items() if rail_nic == nic)

    @cached_property
    def _last_rail(self) -> int:
        return max((rail for node in range(self.topology.n_nodes) for rail in self._rails(node)), default=-1)

    def _all_nics(self, node: int) -> tuple[int, ...]:
        anchor = self.anchor.get(node)
        if anchor is None:
            return ()
        relative = int(self._template(anchor).node[self.islands.local[anchor]])
        start = self.islands.vertex_start[self.islands.of[anchor]]
        return tuple(int(self.islands.vertices[start + v]) for v in nics_of(self._template(anchor), relative))

    def _legs(self, vertex: int, port: int) -> tuple[Leg, ...]:
        """From a vertex to its port: straight, or through a GPU that is nearer to the NIC and one NVLink away (PXN)."""
        if vertex == port:
            return ()
        own = self.path_class(vertex, port)
        if self.topology.vertex_kinds[vertex] == GPU and class_rank(own) > class_rank("PXB"):
            start = int(self.islands.vertex_start[self.islands.of[vertex]])
            near = near_gpus(self._template(port), int(self.islands.local[port]))
            proxies = [int(self.islands.vertices[start + g]) for g in near]
            proxies = [g for g in proxies if class_rank(self.path_class(g, port)) < class_rank(own)]
            proxies = [g for g in proxies if self.path_class(vertex, g) == "NVL"]
            if proxies:
                proxy = proxies[int(self.islands.local[vertex]) % len(proxies)]
                return ((vertex, proxy), (proxy, port))
        return ((vertex, port),)

    # ---- many transfers at once -------------------------------------------------------------------------------------

    def loads(
        self,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        amount: npt.ArrayLike,
        rail: npt.ArrayLike = -1,
        flow: npt.ArrayLike = 0,
    ) -> tuple[Ints, Floats]:
        """What transfers put on links.

        A transfer inside an island is spread over its parallel paths in proportion to their bandwidth (hardware
        interleaves over NVSwitches); one that may use several near NICs is spread over them evenly, as NCCL's channels
        are.

        Parameters
        ----------
        src, dst : (E,) vertex ids. -1 stands for the other end's NVSwitches (multicast or in-switch reduction): the
            bytes cross only the GPU's links to, or from, them.
        amount : (E,) or scalar, bytes (or bytes per byte of payload).
        rail, flow : (E,) or scalar, as in :meth:`route`.

        Returns
        -------
        links : (k,) int, sorted link ids. weights : (k,) float, the sum of what crosses each.

        Raises :class:`TopologyError` for a transfer that has no route.
        """
        return laid(self, Transfers.of(src, dst, amount, rail, flow), apart=False).per_link()

    def loads_of_each(
        self, src: npt.ArrayLike, dst: npt.ArrayLike, rail: npt.ArrayLike = -1
    ) -> tuple[Ints, Ints, Floats]:
        """What a byte of each transfer puts on links: as :meth:`loads` of each by itself, one after another.

        Returns
        -------
        ptr : (E + 1,) int, links of transfer ``i`` are ``links[ptr[i]:ptr[i + 1]]``, sorted. weights : as they.
        """
        transfers = Transfers.of(src, dst, 1.0, rail, 0)
        return laid(self, transfers, apart=True).per_transfer(len(transfers.src))

    # ---- small helpers ----------------------------------------------------------------------------------------------

    def _template(self, vertex: int) -> Template:
        return self.islands.templates[int(self.islands.template[self.islands.of[vertex]])]

    def _unreachable(self, a: int, b: int) -> TopologyError:
        names = self.topology.vertex_names
        return TopologyError(f"{self.topology.name}: no route from {names[a]!r} to {names[b]!r}")


def router(topology: Topology, relay: bool = False) -> Router:
    """The Router of a topology, kept with it (its tables are worth reusing)."""
    return _router(topology, relay)  # by place: asked for with and without a default it would be two


@kept_with_first(maxsize=2)
def _router(topology: Topology, relay: bool) -> Router:
    return Router(topology, relay)
