"""What transfers put on links: distinct loads, by number."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError, TopologyError
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


class Loads:
    """Distinct loads: which links a payload byte crosses and how much of each it takes.

    ``alone[i]`` is the payload rate [bytes/s] of load ``i`` with its links to itself, ceilings aside.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.pairs: list[tuple[Ints, Floats]] = []
        self.alone: list[float] = []
        self._known: dict[tuple[bytes, bytes], int] = {}

    def add(self, links: Ints, weights: Floats) -> int:
        """Id of a load; equal loads have one id. Links of weight 0 are left out.

        Raises
        ------
        ProgramError : for a link twice in one load. TopologyError : for a link without bandwidth.
        """
        links, weights = np.asarray(links, dtype=np.int64), np.asarray(weights, dtype=np.float64)
        if not np.all(weights > 0):
            links, weights = links[weights > 0], weights[weights > 0]
        key = links.tobytes(), weights.tobytes()
        if key not in self._known:
            capacity = self.topology.link_bandwidth[links]
            if len(links) and not capacity.min() > 0:
                name = self.topology.link_name(int(links[np.argmin(capacity)]))
                raise TopologyError(f"{self.topology.name}: traffic is routed over {name}, which has no bandwidth")
            # Links in order are told apart by their neighbours; sorting them would cost as much as routing them.
            if not np.all(links[1:] > links[:-1]) and len(np.unique(links)) != len(links):
                raise ProgramError("a plan names a link twice; its weights must be summed per link")
            self._known[key] = len(self.pairs)
            self.pairs.append((links, weights))
            self.alone.append(float(np.min(capacity / weights)) if len(links) else np.inf)
        return self._known[key]

    def csr(self, loads: Ints) -> tuple[Ints, Ints, Floats]:
        """The loads' links one after another: ``(ptr (n+1,), links (E,), weights (E,))``."""
        pairs = [self.pairs[i] for i in loads.tolist()]
        ptr = np.cumsum([0, *(len(links) for links, _ in pairs)], dtype=np.int64)
        if not pairs:
            return ptr, np.array([], dtype=np.int64), np.array([])
        return ptr, np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
