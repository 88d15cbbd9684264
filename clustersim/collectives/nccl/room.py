"""What is left of a node's links while the search lays channels: each takes its speed from every link it crosses."""

from __future__ import annotations

from clustersim.collectives.nccl.links import Vertex
from clustersim.collectives.nccl.view import DIS, INTEL_P2P_OVERHEAD, PHB, PIX
from clustersim.collectives.nccl.wiring import Wiring

Costs = list[tuple[int, int]]
"""What a path takes: links, and [MB/s] of each."""


class Room:
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
        whole = round(speed * 1000)
        through_intel = path.kind == PHB and start[0] == "gpu" and wiring.view.cpu_vendor == "intel"
        over_pcie = round(whole * INTEL_P2P_OVERHEAD) if through_intel else whole
        costs: Costs = []
        for link in path.links:
            amount = over_pcie if wiring.link_kind[link] == PIX else whole
            costs.append((link, amount))
            if wiring.view.sm < 80 and start[0] != "gpu" and wiring.ends[link][1][0] == "gpu":
                costs.append((link ^ 1, amount // 8))
        return costs
