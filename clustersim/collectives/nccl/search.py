"""NCCL's topology search: how many channels each algorithm gets, at what speed, over which paths.

For each algorithm NCCL walks down a list of speeds. At each it tries identical channels, then different ones, a simpler
tree, farther path classes and alternating NICs, and keeps the best product of channels and speed; then it doubles the
channels of a fast solution and tries to raise the speed again (nccl src/graph/search.cc, as of 2.28). Nothing here
knows a machine: the result follows from the :class:`~clustersim.collectives.nccl.view.NodeView`.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from msgspec.structs import replace

from clustersim.collectives.mesh_rings import EIGHT_DIES, closed_rings, zigzag
from clustersim.collectives.nccl.graph import (
    BALANCED_TREE,
    COLLNET_DIRECT,
    NVLS,
    RING,
    TREE,
    ChannelGraph,
    hopeless,
    speeds,
)
from clustersim.collectives.nccl.links import LOCAL_BANDWIDTH
from clustersim.collectives.nccl.room import most_channels
from clustersim.collectives.nccl.view import DIS, LOC, NVL, PIX, PXN, SYS, NodeView, System
from clustersim.collectives.nccl.walk import ChannelWalk
from clustersim.collectives.nccl.wiring import Wiring, wiring
from clustersim.core.crew_memo import shared_by_crew

MAX_CHANNELS = 64
_GLOBAL_BUDGET = 1 << 19
_BUDGET = 1 << 14
_SAME_BUDGET = 1 << 8


@lru_cache(maxsize=1024)
def search(system: System) -> dict[str, ChannelGraph]:
    """Search result per algorithm: ``ring``, ``tree``, ``nvls``, ``nvls_tree`` and with SHARP ``collnet_direct`` and
    ``collnet_chain``. Where nodes differ, the weakest decides, as when NCCL's ranks compare their results."""
    return _merged([_search_view(view, system.sharp) for view in system.views])


def exec_channels(system: System, graphs: dict[str, ChannelGraph]) -> int:
    """Channels a collective of unlimited size runs on, one CUDA block each (nccl src/graph/connect.cc)."""
    ring = graphs["ring"]
    count = min(MAX_CHANNELS, 2 * min(ring.n_channels, graphs["tree"].n_channels))
    if system.sm >= 90 and system.n_nodes > 1 and ring.bw_intra > 45 and count < 16:
        count *= 2
    return count


def search_channels(algorithm: str, system: System) -> int:
    """Distinct channels of an algorithm; the ring's for those that have no graph of their own."""
    graphs = search(system)
    return max(1, graphs.get(algorithm, graphs["ring"]).n_channels)


@lru_cache(maxsize=1024)
@shared_by_crew
def _search_view(view: NodeView, sharp: bool) -> dict[str, ChannelGraph]:
    wires = wiring(view)
    ring = _ChannelSearch(wires, RING, 1, MAX_CHANNELS // 2).result()
    tree = _ChannelSearch(wires, BALANCED_TREE, ring.n_channels, ring.n_channels).result()
    graphs = {"ring": ring, "tree": tree, "nvls": _ChannelSearch(wires, NVLS, 1, MAX_CHANNELS).result()}
    if sharp:
        graphs["collnet_chain"] = _ChannelSearch(wires, TREE, ring.n_channels, ring.n_channels).result()
        graphs["collnet_direct"] = _ChannelSearch(wires, COLLNET_DIRECT, 1, MAX_CHANNELS).result()
    return graphs


def _merged(nodes: list[dict[str, ChannelGraph]]) -> dict[str, ChannelGraph]:
    graphs = {}
    for name in nodes[0]:
        node_graphs = [node[name] for node in nodes]
        most = {
            field: max(getattr(g, field) for g in node_graphs)
            for field in ("pattern", "type_intra", "type_inter", "cross_nic")
        }
        least = {field: min(getattr(g, field) for g in node_graphs) for field in ("n_channels", "bw_intra", "bw_inter")}
        graphs[name] = replace(node_graphs[0], **most, **least, same_channels=all(g.same_channels for g in node_graphs))
    graphs["nvls_tree"] = graphs["nvls"]
    return graphs


class _ChannelSearch:
    """The search of one pattern on one node."""

    def __init__(self, wires: Wiring, pattern: int, low: int, high: int) -> None:
        self.wires = wires
        self.n = wires.n_gpus
        self.inter = wires.n_nets > 0
        self.sm = wires.view.sm
        self.speeds = speeds(self.sm, self.inter)
        self.alternate = wires.n_nets > 1 and pattern in (RING, BALANCED_TREE)
        self.try_same = pattern != NVLS
        gpus = [("gpu", g) for g in range(self.n)]
        between = [wires.between(a, b).kind for a in gpus for b in gpus if a != b]
        outside = [wires.between(g, ("net", n)).kind for g in gpus for n in range(wires.n_nets)]
        self.near_intra, far_intra = (min(between), max(between)) if self.n > 1 else (LOC, SYS)
        self.near_inter, self.far_inter = (min(outside), max(outside)) if self.inter else (PIX, SYS)
        self.far_intra = self.far_inter if self.inter else far_intra
        if pattern in (NVLS, COLLNET_DIRECT):
            high = min(32 if pattern == NVLS else 9, self.n)
        if pattern == NVLS and not self.inter:
            low = high
        if self.n == 1 and pattern != RING:
            pattern = TREE
        if pattern == RING and low == 1 and high >= 2 and self._split_nvlink():
            low = 2
        self.best = ChannelGraph(
            pattern, low, high, type_intra=self.near_intra, type_inter=self.near_inter, same_channels=self.try_same
        )
        self.max_bw, self.total_bw = self._limits()
        self.budget = _GLOBAL_BUDGET
        self.kinds_intra = between
        self.kinds_inter = outside
        self.tried: dict[ChannelGraph, int] = {}

    def _split_nvlink(self) -> bool:
        """Two NVLink islands joined by something slower."""
        island = list(range(self.n))
        for a in range(self.n):
            for b in range(a + 1, self.n):
                if self.wires.between(("gpu", a), ("gpu", b)).kind == NVL:
                    island[b] = island[a]
        return sum(island.count(i) > 1 for i in set(island)) == 2

    def _limits(self) -> tuple[float, float]:
        """GB/s of the widest path a channel could use, and of everything that leaves one GPU."""
        wires = self.wires
        if not self.inter and self.n == 1:
            return LOCAL_BANDWIDTH, LOCAL_BANDWIDTH
        widest = 0.0
        total = 0.0
        ends = [("net", n) for n in range(wires.n_nets)] or [("gpu", g) for g in range(self.n)]
        for g in range(self.n):
            vertex = ("gpu", g)
            widest = max([widest, *(wires.between(vertex, end).bandwidth for end in ends if end != vertex)])
            nvlink = sum(wires.bandwidth[link] for link in wires.out[vertex] if wires.link_kind[link] == NVL)
            total = max(total, nvlink, wires.view.gpus[g].bandwidth)
        return widest, total

    def _try(self, ask: ChannelGraph) -> int:
        """One attempt; returns what is left of its budget (-1: it found all it was asked for).

        An attempt that admits no other path than an earlier one, or that cannot find more bandwidth, is not walked;
        NCCL spends time there, and might find the same bandwidth with fewer hops.
        """
        budget = _SAME_BUDGET if ask.same_channels else _BUDGET
        key = replace(ask, type_intra=self._reach(ask.type_intra, self.kinds_intra))
        key = replace(key, type_inter=self._reach(ask.type_inter, self.kinds_inter))
        if ask.pattern == TREE and not self.best.n_channels:
            # It leaves by the NIC it came by; once there is a layout, which of them counts as better differs.
            key = replace(key, cross_nic=0)
        if key in self.tried:
            left = self.tried[key]
        else:
            most = most_channels(self.wires, ask)
            if hopeless(ask, self.best, most):
                return budget
            self.best, left = ChannelWalk(self.wires, ask, self.best, budget, most).run()
            self.tried[key] = left
        self.budget -= budget
        return left

    @staticmethod
    def _reach(limit: int, kinds: list[int]) -> int:
        """The farthest class that exists within a limit."""
        return max((kind for kind in kinds if kind <= limit), default=LOC)

    def result(self) -> ChannelGraph:
        """The layout NCCL would settle on."""
        view = self.wires.view
        if self.best.pattern == NVLS and (not self.wires.has_switch or not view.nvls or self.sm < 90):
            return self.best
        tabled = self._tabled() if self.best.pattern == RING else None
        if tabled is not None:
            return tabled
        self._fastest_feasible()
        self._duplicate()
        self._raise_speed()
        if self.best.n_channels == 0 and self.best.pattern != NVLS:
            order = tuple(range(self.n))
            return replace(
                self.best, n_channels=1, bw_intra=0.1, bw_inter=0.1, type_intra=SYS, type_inter=SYS, orders=(order,)
            )
        return self.best

    def _tabled(self) -> ChannelGraph | None:
        """RCCL's own rings where it has them in a table, with which it does not search: on one node those of GPUs
        joined by xGMI each to each, and of four MI250X; on several those of the former, with a NIC for each GPU."""
        view, n = self.wires.view, self.n
        if view.link_rate <= 0 or n < 4 or n % 2:
            return None
        pairs = {(a, b): count for a, row in enumerate(view.nvlinks) for b, count in enumerate(row) if a != b}
        full = len(set(pairs.values())) == 1
        best = replace(self.best, same_channels=False)
        if not view.nics:
            rings = closed_rings(n) if full else EIGHT_DIES if n == 8 else ()
            crossed = Counter(pair for ring in rings for pair in zip(ring, ring[1:] + ring[:1], strict=True))
            rate = view.link_rate * min((pairs[pair] / times for pair, times in crossed.items()), default=0.0)
            return replace(best, n_channels=len(rings), bw_intra=rate, bw_inter=rate, orders=rings) if rate else None
        if not full or len(view.nics) < n:
            return None
        rate = view.link_rate * pairs[0, 1]
        return replace(
            best,
            n_channels=n,
            bw_intra=rate,
            bw_inter=min(rate, *(nic.bandwidth for nic in view.nics)),
            cross_nic=2,
            orders=tuple(zigzag(n, first) for first in range(n)),
            nets=tuple((first, (first + n // 2) % n) for first in range(n)),
        )

    def _fastest_feasible(self) -> None:
        """First pass: down the list of speeds, relaxing one demand after the other."""
        ask = self.best
        total = self.total_bw
        if self.n > 1 and ask.pattern != RING:
            total *= self.n / (self.n - 1)
        speed_index = 0
        last = len(self.speeds) - 1
        while speed_index < last and (
            self.speeds[speed_index] > self.max_bw or self.speeds[speed_index] * ask.min_channels > total
        ):
            speed_index += 1
        ask = replace(ask, bw_intra=self.speeds[speed_index], bw_inter=self.speeds[speed_index])
        while True:
            left = self._try(ask)
            if left == -1 or self.best.n_channels * self.best.bw_inter >= self.total_bw:
                return
            relaxed = self._relaxed(ask, left)
            if relaxed is None:
                if self.budget < 0 and self.best.n_channels:
                    return
                if speed_index == last or (
                    self.best.n_channels and self.speeds[speed_index + 1] / self.best.bw_inter <= 0.49
                ):
                    return
                speed_index += 1
                relaxed = self._strict(ask, self.speeds[speed_index])
            ask = relaxed

    def _strict(self, ask: ChannelGraph, speed: float) -> ChannelGraph:
        """All demands again, at another speed."""
        near = {"type_intra": self.near_intra, "type_inter": self.near_inter, "cross_nic": 0}
        pattern = self.best.pattern
        same = self.try_same
        return replace(ask, pattern=pattern, same_channels=same, **near, bw_intra=speed, bw_inter=speed)

    def _relaxed(self, ask: ChannelGraph, left: int) -> ChannelGraph | None:
        """The next demand to give up at this speed, or None if there is no more."""
        best = self.best
        through_amd = self.wires.view.cpu_vendor == "amd" and ask.type_intra == SYS
        if ask.same_channels and not through_amd:
            return replace(ask, same_channels=False)
        ask = replace(ask, same_channels=self.try_same)
        self.budget += max(left, 0)
        if self.budget < 0 and best.n_channels:
            return None
        if self.sm >= 90 and ask.pattern == BALANCED_TREE:
            return replace(ask, pattern=TREE)
        ask = replace(ask, pattern=best.pattern)
        far_intra = ask.type_inter if self.inter else self.far_intra
        if ask.type_intra < far_intra and (not best.n_channels or ask.type_intra < best.type_intra):
            return replace(ask, type_intra=ask.type_intra + 1)
        ask = replace(ask, type_intra=self.near_intra)
        nearer = not best.n_channels or ask.type_inter < best.type_inter or ask.type_inter < PXN
        if self.inter and ask.type_inter < self.far_inter and nearer and ask.type_inter + 1 < DIS:
            return replace(ask, type_inter=ask.type_inter + 1)
        ask = replace(ask, type_inter=self.near_inter)
        if self.alternate and ask.cross_nic == 0:
            return replace(ask, cross_nic=2)
        return None

    def _duplicate(self) -> None:
        """Two half-speed channels for each fast one: a single block could not drive it."""
        best = self.best
        if not best.n_channels or best.pattern == NVLS or best.bw_intra < 25:
            return
        if self.sm > 80 and best.bw_intra < 50 and best.n_channels > 4:
            return
        count = min(2 * best.n_channels, best.max_channels)
        halves = -(-count // best.n_channels)
        extra = count - best.n_channels
        self.best = replace(
            best,
            n_channels=count,
            bw_intra=best.bw_intra / halves,
            bw_inter=best.bw_inter / halves,
            orders=best.orders + best.orders[:extra],
            nets=best.nets + best.nets[:extra],
        )

    def _raise_speed(self) -> None:
        """Second pass: the same channels faster, rings as a whole, trees inside the node, NVLS outside."""
        speed_index = next((i for i, v in enumerate(self.speeds) if v <= self.best.bw_inter), len(self.speeds) - 1)
        wanted = {
            "bw_intra": self.speeds[speed_index],
            "bw_inter": self.speeds[speed_index],
            "min_channels": self.best.n_channels,
        }
        ask = replace(self.best, **wanted, n_channels=0, hops=0, orders=(), nets=())
        left = -1
        while left != 0 and speed_index > 0:
            best = self.best
            faster = self.speeds[speed_index - 1]
            if best.pattern == RING:
                ask = replace(ask, bw_intra=faster, bw_inter=faster)
            elif best.pattern == NVLS and ask.bw_inter == best.bw_inter and ask.bw_inter < 2 * ask.bw_intra:
                count = best.n_channels
                ask = replace(ask, bw_inter=faster, min_channels=count, max_channels=count)
            elif best.pattern != NVLS and ask.bw_intra == best.bw_intra and ask.bw_intra < 2 * ask.bw_inter:
                ask = replace(ask, bw_intra=faster)
            else:
                return
            speed_index -= 1
            left = self._try(ask)
