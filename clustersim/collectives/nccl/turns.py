"""In which order the search tries the GPUs a channel may go on to (nccl src/graph/search.cc)."""

from __future__ import annotations

from clustersim.collectives.nccl.graph import RING, TREE
from clustersim.collectives.nccl.wiring import Wiring


class Turns:
    """The order for channels of one pattern on one node; ranks are worked out once."""

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
        left = [(other, intra) for other, intra in self.ranks[gpu, net] if other not in visited]
        ranked = [other for other, _ in left]
        alike = all(intra == left[0][1] for _, intra in left)
        ranked = ranked[::-1] if towards_net == -1 and alike else ranked
        return self._neighbours(gpu, ranked) if self.wiring.has_switch else ranked

    def _rank_all(self, gpu: int, net: int) -> list[tuple[int, tuple[int, int]]]:
        scores = []
        for i in range(1, self.n):
            other = (gpu + i) % self.n
            path = self.wiring.between(("gpu", gpu), ("gpu", other))
            if not path.links:
                continue
            inter = (0, 0, 0)
            if net >= 0:
                way = self.wiring.between(("net", net), ("gpu", other))
                inter = (-int(way.bandwidth), -int(self.wiring.view.gpus[other].bandwidth), len(way.links))
            scores.append((inter, (-int(path.bandwidth), len(path.links)), i, other))
        return [(other, intra) for _, intra, _, other in sorted(scores)]

    def _neighbours(self, gpu: int, ranked: list[int]) -> list[int]:
        """Behind NVSwitches all GPUs look alike; NCCL keeps to the next and the previous one."""
        after, before = (gpu + 1) % self.n, (gpu - 1) % self.n
        wanted = {RING: [before, after], TREE: [after]}.get(self.pattern, [after, before])
        return [g for g in dict.fromkeys(wanted) if g in ranked]
