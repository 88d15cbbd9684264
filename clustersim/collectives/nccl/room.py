"""What the search asks of a node: what is left of its links, how many channels fit at most, which GPU to try next."""

from __future__ import annotations

import math

from clustersim.collectives.nccl.graph import COLLNET_DIRECT, NVLS, RING, TREE, ChannelGraph
from clustersim.collectives.nccl.links import Vertex
from clustersim.collectives.nccl.view import C2C, DIS, INTEL_P2P_OVERHEAD, NVL, PHB, PIX, SYS
from clustersim.collectives.nccl.wiring import Wiring

Costs = list[tuple[int, int]]
"""What a path takes: links, and [MB/s] of each."""


class FreeBandwidth:
    """Free bandwidth ``free`` [MB/s] of every directed link, and the ``hops`` of what has been laid.

    ``both_ways`` : whether traffic returns by the same path, whose class then counts too (trees).
    """

    def __init__(self, wiring: Wiring, *, both_ways: bool) -> None:
        self.wiring = wiring
        self.both_ways = both_ways
        self.free = [round(rate * 1000) for rate in wiring.bandwidth]
        self.hops = 0
        self.costs: dict[tuple[Vertex, Vertex, float], Costs | None] = {}

    def take(self, start: Vertex, end: Vertex, speed: float, limit: int) -> Costs | None:
        """Charge a path with a speed [GB/s] if it is near enough and every link still has that much."""
        key = (start, end, speed)
        if key not in self.costs:
            self.costs[key] = self._cost(start, end, speed, limit)
        costs = self.costs[key]
        if costs is None:
            return None
        free = self.free
        for done, (link, amount) in enumerate(costs):
            if free[link] < amount:
                for back, given in costs[:done]:
                    free[back] += given
                return None
            free[link] -= amount
        self.hops += len(self.wiring.between(start, end).links)
        return costs

    def give(self, start: Vertex, end: Vertex, costs: Costs) -> None:
        """Take a charge back."""
        for link, amount in costs:
            self.free[link] += amount
        self.hops -= len(self.wiring.between(start, end).links)

    def _cost(self, start: Vertex, end: Vertex, speed: float, limit: int) -> Costs | None:
        """What a path costs each link [MB/s], None if it is too far.

        GPU to GPU traffic crosses an Intel root complex in small packets, and a GPU before Ampere answers inbound PCIe
        traffic with an eighth of it.
        """
        wiring = self.wiring
        path = wiring.between(start, end)
        back = wiring.between(end, start) if self.both_ways else path
        if path.kind >= DIS or max(path.kind, back.kind) > limit:
            return None
        mb_rate = round(speed * 1000)
        through_intel = path.kind == PHB and start[0] == "gpu" and wiring.view.cpu_vendor == "intel"
        over_pcie = round(mb_rate * INTEL_P2P_OVERHEAD) if through_intel else mb_rate
        costs: Costs = []
        for link in path.links:
            amount = over_pcie if wiring.link_kind[link] == PIX else mb_rate
            costs.append((link, amount))
            if wiring.view.sm < 80 and start[0] != "gpu" and wiring.ends[link][1][0] == "gpu":
                costs.append((link ^ 1, amount // 8))
        return costs


def most_channels(wires: Wiring, ask: ChannelGraph) -> int:
    """No more channels than this can be laid at the speeds asked for, so that hopeless attempts are not walked."""
    most = ask.max_channels
    if ask.pattern in (NVLS, COLLNET_DIRECT):
        return most
    if wires.n_nets:
        channel_rate = max(int(ask.bw_inter), 1e-3)
        most = min(most, sum(int(nic.bandwidth // channel_rate) for nic in wires.view.nics), _by_entry(wires, ask))
    if wires.n_gpus > 1:
        most = min(most, _by_gpu(wires, ask), _by_socket(wires, ask))
    return most


def _fits(capacity: float, speed: float) -> int:
    return math.floor(round(capacity * 1000) / round(speed * 1000))


def _by_entry(wires: Wiring, ask: ChannelGraph) -> int:
    """Every channel comes in from a NIC at some GPU, never over NVLink."""
    doors = [link for g in range(wires.n_gpus) for link in wires.out["gpu", g] if wires.link_kind[link] != NVL]
    return sum(_fits(wires.bandwidth[link], ask.bw_inter) for link in doors)


def _by_gpu(wires: Wiring, ask: ChannelGraph) -> int:
    """Every channel leaves all GPUs for another, but the last of an open chain."""
    room = []
    for g in range(wires.n_gpus):
        usable = [
            link
            for link in wires.out["gpu", g]
            if wires.link_kind[link] == NVL or ask.type_intra >= (C2C if wires.link_kind[link] == C2C else PIX)
        ]
        room.append(sum(_fits(wires.bandwidth[link], ask.bw_intra) for link in usable))
    if ask.pattern == RING and not wires.n_nets:
        return min(room)
    return sum(room) // (wires.n_gpus - 1)


def _by_socket(wires: Wiring, ask: ChannelGraph) -> int:
    """Without NVLink, a channel that visits GPUs of several sockets crosses between them."""
    sockets = {wires.socket_of(g) for g in range(wires.n_gpus)}
    if len(sockets) < 2 or wires.has_nvlink:
        return ask.max_channels
    crossings = sum(
        _fits(wires.bandwidth[link], ask.bw_intra)
        for link in range(len(wires.bandwidth))
        if wires.link_kind[link] == SYS
    )
    home = 1 if ask.pattern == RING and not wires.n_nets else 0
    return crossings // (len(sockets) - 1 + home)


class GpuTurns:
    """In which order the GPUs are tried that a channel of one pattern may go on to (nccl src/graph/search.cc)."""

    def __init__(self, wiring: Wiring, pattern: int) -> None:
        self.wiring = wiring
        self.pattern = pattern
        self.n = wiring.n_gpus
        self.ranks: dict[tuple[int, int], list[tuple[int, tuple[int, int]]]] = {}

    def after(self, gpu: int, visited: list[int], towards_net: int, net: int) -> list[int]:
        """GPUs not yet visited: well connected to the channel's NIC first if it matters, then wide, near, next.

        ``towards_net`` : 1 where the next GPU is to leave by the NIC ``net``, -1 where a later one is, 0 where none is
        (``net`` is -1 then).
        """
        if (gpu, net) not in self.ranks:
            self.ranks[gpu, net] = self._rank_all(gpu, net)
        left = [(peer, intra) for peer, intra in self.ranks[gpu, net] if peer not in visited]
        ranked = [peer for peer, _ in left]
        if towards_net == -1 and all(intra == left[0][1] for _, intra in left):
            ranked.reverse()
        return self._neighbours(gpu, ranked) if self.wiring.has_switch else ranked

    def _rank_all(self, gpu: int, net: int) -> list[tuple[int, tuple[int, int]]]:
        scores = []
        for i in range(1, self.n):
            peer = (gpu + i) % self.n
            path = self.wiring.between(("gpu", gpu), ("gpu", peer))
            if not path.links:
                continue
            inter = (0, 0, 0)
            if net >= 0:
                net_path = self.wiring.between(("net", net), ("gpu", peer))
                inter = (-int(net_path.bandwidth), -int(self.wiring.view.gpus[peer].bandwidth), len(net_path.links))
            scores.append((inter, (-int(path.bandwidth), len(path.links)), i, peer))
        return [(peer, intra) for _, intra, _, peer in sorted(scores)]

    def _neighbours(self, gpu: int, ranked: list[int]) -> list[int]:
        """Behind NVSwitches all GPUs look alike; NCCL keeps to the next and the previous one."""
        after = (gpu + 1) % self.n
        before = (gpu - 1) % self.n
        wanted = {RING: [before, after], TREE: [after]}.get(self.pattern, [after, before])
        return [g for g in dict.fromkeys(wanted) if g in ranked]
