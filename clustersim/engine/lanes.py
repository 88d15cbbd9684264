"""A network of few flows at a time: one for each stream of a Program that everybody runs in unison.

The same rules as :class:`clustersim.engine.network.Network`, flow by flow: rates stay until a flow begins or ends,
whatever begins and ends at one instant is one change, and streams that share links share them by weighted max-min.
Which streams meet on the wire repeats from layer to layer, so each combination is solved once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.fairshare import TIE, max_min
from clustersim.engine.meetings import Site
from clustersim.engine.slots import INSTANT, Loads, Segments

Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(eq=False, slots=True)
class _Flow:
    """Bytes ``left`` at ``since`` [s], moving at ``rate`` [bytes/s] of at most ``ceiling``, to end at ``end`` [s]."""

    transfer: int
    load: int
    left: float
    ceiling: float
    since: float
    rate: float = 0.0
    end: float = np.inf


class Lanes:
    """Active flows, in order of transfer.

    Parameters
    ----------
    sites : of one meeting each; a transfer's id is its place among them.
    """

    def __init__(self, loads: Loads, sites: tuple[Site, ...]) -> None:
        self.loads, self.sites = loads, sites
        self.segments = Segments()
        self.now = 0.0
        self.n_flows = self.n_solves = 0
        self._flows: list[_Flow] = []
        self._changed, self._due = False, np.inf
        self._rates: dict[tuple[tuple[int, float], ...], tuple[list[float], bool]] = {}
        self._moved: list[tuple[int, float, float, float]] = []

    def begin(self, site: Site) -> bool:
        """Start a site's flow now; False if it has nothing to move."""
        plans = site.plans
        nbytes = float(plans.nbytes[0])
        if not nbytes > 0:
            return False
        self._flows.append(_Flow(site.first, int(plans.load[0]), nbytes, float(plans.ceiling[0]), self.now))
        self._flows.sort(key=lambda flow: flow.transfer)
        self._changed = True
        self.n_flows += 1
        return True

    def due(self) -> float:
        """When the next flow ends [s]; settles what this instant has changed."""
        if self._changed:
            self._changed = False
            self._share()
            self._due = min((flow.end for flow in self._flows), default=np.inf)
        return self._due

    def pass_to(self, moment: float) -> list[int]:
        """Let time pass; returns the transfers that have ended by ``moment`` [s]."""
        self.now = moment
        over = [flow for flow in self._flows if flow.end <= moment * (1 + INSTANT)]
        if over:
            self._flows = [flow for flow in self._flows if flow not in over]
            self._changed = True
            for flow in over:
                self._note(flow)
        return [flow.transfer for flow in over]

    def close(self) -> None:
        """Hand over what was moved to :attr:`segments`."""
        transfer, start, end, rate = zip(*self._moved, strict=True) if self._moved else ((), (), (), ())
        columns = (np.array(column, dtype=np.float64) for column in (start, end, rate))
        self.segments.blocks.append((np.array(transfer, dtype=np.int64), *columns))  # type: ignore[arg-type]

    def _note(self, flow: _Flow) -> None:
        if flow.since < self.now and flow.rate > 0:
            self._moved.append((flow.transfer, flow.since, self.now, flow.rate))

    def _share(self) -> None:
        """New rates; those that stay as they were are not touched."""
        if not self._flows:
            return
        key = tuple((flow.load, flow.ceiling) for flow in self._flows)
        if key not in self._rates:
            self._rates[key] = self._solved(key)
        rates, crowded = self._rates[key]
        self.n_solves += crowded
        for flow, rate in zip(self._flows, rates, strict=True):
            if abs(rate - flow.rate) > TIE * flow.rate:
                self._note(flow)
                flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
                flow.rate, flow.since = rate, self.now
                flow.end = self.now + flow.left / rate

    def _solved(self, key: tuple[tuple[int, float], ...]) -> tuple[list[float], bool]:
        """Rates of flows of these loads and ceilings, and whether any two share a link."""
        of, ceilings = np.array([load for load, _ in key], dtype=np.int64), np.array([most for _, most in key])
        rates = np.minimum([self.loads.alone[load] for load, _ in key], ceilings)
        ptr, links, _ = self.loads.csr(of)
        _, where, users = np.unique(links, return_inverse=True, return_counts=True)
        shared = np.concatenate([[0], np.cumsum(users[where] > 1)])
        sharing = shared[ptr[1:]] > shared[ptr[:-1]]
        if sharing.any():
            ptr, links, weights = self.loads.csr(of[sharing])
            capacity = self.loads.topology.link_bandwidth
            rates[sharing] = max_min(ptr, links, weights, capacity, ceilings[sharing])
        return rates.tolist(), bool(sharing.any())
