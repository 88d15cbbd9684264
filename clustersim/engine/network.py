"""The network in simulated time: fluid flows on directed links.

A flow moves payload at a rate that stays constant until a flow that shares one of its links (or shares with one that
shares...) begins or ends. At such an instant the network *drains* what the touched flows moved since their rate was
last set, *solves* for new rates (:mod:`clustersim.engine.fairshare`), and asks the clock to *wake* it at the next end.
Everything that begins or ends at one instant is one change and one solve.

Flows are rows of numpy columns, in order of transfer id, so that two thousand collectives that begin together cost one
event. A flow whose links nobody else uses gets its rate from a table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.clock import SOLVE, Clock
from clustersim.engine.fairshare import TIE, max_min
from clustersim.errors import ProgramError, TopologyError
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

INSTANT = 1e-12
"""Ends this close, relative to the time since 0, are one instant."""

_FLOW = np.dtype(
    [
        ("transfer", np.int64),
        ("load", np.int64),
        ("left", np.float64),  # bytes of payload still to move at `since`
        ("ceiling", np.float64),
        ("rate", np.float64),
        ("since", np.float64),
        ("end", np.float64),  # when it ends if nothing changes
        ("counted", np.bool_),  # its links are in Network._users
    ]
)


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


class Segments:
    """Stretches of constant rate, as blocks of columns: transfer, start [s], end [s], rate [bytes/s]."""

    def __init__(self) -> None:
        self.blocks: list[tuple[Ints, Floats, Floats, Floats]] = []

    def add(self, flows: npt.NDArray[np.void], now: float) -> None:
        """What ``flows`` moved from their ``since`` until ``now``."""
        some = flows[(flows["since"] < now) & (flows["rate"] > 0)]
        if len(some):
            end = np.full(len(some), now)
            self.blocks.append((some["transfer"].copy(), some["since"].copy(), end, some["rate"].copy()))

    def columns(self) -> tuple[Ints, Floats, Floats, Floats]:
        """All of them, sorted by transfer, then start."""
        if not self.blocks:
            return np.array([], dtype=np.int64), np.array([]), np.array([]), np.array([])
        transfer, start, end, rate = (np.concatenate(column) for column in zip(*self.blocks, strict=True))
        order = np.lexsort((start, transfer))
        return transfer[order], start[order], end[order], rate[order]


class Network:
    """Active flows on one topology.

    Parameters
    ----------
    clock, loads : the run's.
    on_end : called as ``on_end(transfers, now)`` with the sorted ids of all transfers that end at an instant.
    """

    def __init__(self, clock: Clock, loads: Loads, on_end: Callable[[Ints, float], None]) -> None:
        self.clock, self.loads, self.on_end = clock, loads, on_end
        self.segments = Segments()
        self.n_flows = self.n_solves = 0
        self._flows = np.zeros(0, dtype=_FLOW)
        self._new: list[npt.NDArray[np.void]] = []
        self._freed: list[Ints] = []
        self._users = np.zeros(loads.topology.n_links, dtype=np.int32)
        self._solve_at = self._due = -1.0  # no instant

    def begin(self, transfers: Ints, loads: Ints, nbytes: Floats, ceilings: Floats) -> None:
        """Start a flow per transfer, now: ``nbytes`` > 0 of payload each, at most ``ceilings`` [bytes/s]."""
        flows = np.zeros(len(transfers), dtype=_FLOW)
        flows["transfer"], flows["load"], flows["left"], flows["ceiling"] = transfers, loads, nbytes, ceilings
        flows["since"], flows["end"] = self.clock.now, np.inf
        self.n_flows += len(flows)
        self._new.append(flows)
        self._ask_solve()

    def moved(self, transfers: Ints, start: Floats, end: Floats, rate: Floats) -> None:
        """Note transfers whose times are known without a solve: nothing else is on their links meanwhile."""
        self.n_flows += int((end > start).sum())
        some = end > start
        self.segments.blocks.append((transfers[some], start[some], end[some], rate[some]))

    def _ask_solve(self) -> None:
        if self._solve_at != self.clock.now:
            self._solve_at = self.clock.now
            self.clock.call(self.clock.now, self._solve, priority=SOLVE)

    def _solve(self) -> None:
        """Bring rates up to date with every change of this instant, then ask to be woken at the next end."""
        self._solve_at = -1.0
        fresh = self._new[0] if len(self._new) == 1 else np.concatenate([*self._new, self._flows[:0]])
        shed = np.concatenate([*self._freed, np.zeros(0, dtype=np.int64)])
        self._new, self._freed = [], []
        if len(self._flows) == 0 and len(fresh) == 1:
            self._set_alone(fresh)
            self._flows = fresh
        else:
            self._count(self._flows)
            taken = self._count(fresh)
            shed = shed[self._users[shed] > 0]
            crowded = len(shed) > 0 or bool(np.any(self._users[taken] > 1))
            if not crowded:
                self._set_alone(fresh)
            if len(fresh):
                merged = np.concatenate([self._flows, fresh])
                self._flows = merged[np.argsort(merged["transfer"], kind="stable")]
            if crowded:
                self._share(self._touched(np.concatenate([shed, taken])))
        self._sleep()

    def _count(self, flows: npt.NDArray[np.void]) -> Ints:
        """Count flows as users of their links, those that are not yet; returns these links."""
        uncounted = ~flows["counted"]
        if not uncounted.any():
            return np.zeros(0, dtype=np.int64)
        flows["counted"] = True
        return self._use(flows["load"][uncounted], 1)

    def _use(self, loads: Ints, more: int) -> Ints:
        """Count users of the links of these loads up or down; returns the links."""
        pairs = [self.loads.pairs[i][0] for i in loads.tolist()]
        for links in pairs:
            self._users[links] += more  # no link twice in one load, so no need for add.at, ten times as slow
        return pairs[0] if len(pairs) == 1 else np.concatenate([*pairs, np.zeros(0, dtype=np.int64)])

    def _set_alone(self, fresh: npt.NDArray[np.void]) -> None:
        """Rates of new flows that share no link."""
        fresh["rate"] = self._alone(fresh)
        fresh["end"] = self.clock.now + fresh["left"] / fresh["rate"]

    def _touched(self, hot: Ints) -> Ints:
        """Positions of the flows on these links, and of all that share with them, and so on."""
        ptr, links, _ = self.loads.csr(self._flows["load"])
        owner = np.repeat(np.arange(len(self._flows)), np.diff(ptr))
        is_hot = np.zeros(len(self._users), dtype=np.bool_)
        is_hot[hot] = True
        touched = self._flows["rate"] == 0  # nobody is ever given nothing: only new flows have no rate yet
        while True:
            reached = touched.copy()
            reached[owner[is_hot[links]]] = True
            if np.array_equal(reached, touched):
                return np.flatnonzero(touched)
            touched = reached
            is_hot[links[touched[owner]]] = True

    def _share(self, rows: Ints) -> None:
        """New rates for the flows in ``rows``; drains only those whose rate changes."""
        if not len(rows):
            return
        flows, now = self._flows[rows], self.clock.now
        rate = self._alone(flows)
        ptr, links, weights = self.loads.csr(flows["load"])
        owner = np.repeat(np.arange(len(flows)), np.diff(ptr))
        sharing = np.zeros(len(flows), dtype=np.bool_)
        sharing[owner[self._users[links] > 1]] = True
        if sharing.any():
            self.n_solves += 1
            ptr, links, weights = self.loads.csr(flows["load"][sharing])
            capacities = self.loads.topology.link_bandwidth
            rate[sharing] = max_min(ptr, links, weights, capacities, flows["ceiling"][sharing])
        changed = np.abs(rate - flows["rate"]) > TIE * flows["rate"]
        self.segments.add(flows[changed], now)
        flows["left"] -= np.where(changed, flows["rate"] * (now - flows["since"]), 0.0)
        np.maximum(flows["left"], 0.0, out=flows["left"])
        flows["rate"][changed] = rate[changed]
        flows["since"][changed] = now
        flows["end"][changed] = now + flows["left"][changed] / rate[changed]
        self._flows[rows] = flows

    def _alone(self, flows: npt.NDArray[np.void]) -> Floats:
        alone = np.array([self.loads.alone[i] for i in flows["load"].tolist()])
        rate: Floats = np.minimum(alone, flows["ceiling"])
        return rate

    def _sleep(self) -> None:
        """Ask the clock for the next end; an earlier request that no longer holds is recognised when it comes."""
        due = float(self._flows["end"].min()) if len(self._flows) else -1.0
        if due not in (-1.0, self._due):
            self.clock.call(due, self._end)
        self._due = due

    def _end(self) -> None:
        now = self.clock.now
        if now != self._due:
            return
        self._due = -1.0
        over = self._flows["end"] <= now * (1 + INSTANT)
        done, self._flows = self._flows[over], self._flows[~over]
        self.segments.add(done, now)
        links = self._use(done["load"][done["counted"]], -1)
        if len(self._flows):
            self._freed.append(links)
            self._ask_solve()
        self.on_end(done["transfer"].copy(), now)
