"""How a transfer takes time once all its members are there: as one fluid flow, or transfer by transfer.

A player is told that meetings are complete and calls ``on_end`` when they end. :class:`Flows` is ``fidelity="flow"``;
:class:`clustersim.engine.replay.Replay` is ``fidelity="chunk"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.clock import Clock
from clustersim.engine.loads import Loads
from clustersim.engine.network import Network
from clustersim.engine.sites import Site

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
OnEnd: TypeAlias = Callable[[Ints, float], None]


class Player(Protocol):
    """What a play and the timeline need of a player."""

    @property
    def network(self) -> Network:
        """What moves the bytes."""

    on_end: OnEnd

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Start these complete meetings of a site, each at its ``start`` [s], none of which is before now."""

    def not_before(self, site: Site, meeting: int) -> float:
        """A meeting under way does not end before [s]."""

    def transfers(self) -> tuple[Ints, Ints]:
        """For every transfer id: the id of its meeting, and its load."""


def at_each(times: Floats) -> Iterator[tuple[float, npt.NDArray[np.bool_]]]:
    """The distinct times, ascending, each with the mask of the elements that have it."""
    if len(times) and times.min() == times.max():
        yield float(times[0]), np.ones(len(times), dtype=np.bool_)
        return
    for time in np.unique(times).tolist():
        yield time, times == time


class Flows:
    """A meeting is its plan's latency, then one flow; its id is its transfer's id.

    ``clocked`` : the sites it will be asked to play, by their first meeting.
    """

    def __init__(self, clock: Clock, loads: Loads, sites: tuple[Site, ...], clocked: set[int]) -> None:
        self.clock, self.sites = clock, sites
        parts = [site.plans.load for site in sites if site.first in clocked]
        which = np.unique(np.concatenate([*parts, np.zeros(0, dtype=np.int64)]))
        self.network = Network(clock, loads, self._over, which)
        self.on_end: OnEnd = nobody

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Schedule the flows; groups that begin at one instant are one event."""
        if len(meetings) == 1:
            at = start.item(0) + site.plans.latency.item(int(meetings[0]))
            self.clock.call(at, self._begin, site, meetings)
            return
        for time, mask in at_each(start + site.plans.latency[meetings]):
            self.clock.call(time, self._begin, site, meetings[mask])

    def _begin(self, site: Site, meetings: Ints) -> None:
        plans, moves = site.plans, site.plans.nbytes[meetings] > 0
        some, none = meetings[moves], meetings[~moves]
        if len(some):
            self.network.begin(site.first + some, plans.load[some], plans.nbytes[some], plans.ceiling[some])
        if len(none):
            self.on_end(site.first + none, self.clock.now)

    def _over(self, transfers: Ints, now: float) -> None:
        self.on_end(transfers, now)

    def not_before(self, site: Site, meeting: int) -> float:
        """When it would end if it had its links to itself from now on."""
        plans = site.plans
        return self.network.not_before(int(plans.load[meeting]), float(plans.ceiling[meeting]))

    def transfers(self) -> tuple[Ints, Ints]:
        """Transfers are meetings."""
        return meetings(self.sites)


def meetings(sites: tuple[Site, ...]) -> tuple[Ints, Ints]:
    """Every meeting's id and load."""
    loads = np.concatenate([*(site.plans.load for site in sites), np.zeros(0, dtype=np.int64)])
    return np.arange(len(loads), dtype=np.int64), loads


def nobody(transfers: Ints, now: float) -> None:
    """Nobody listens yet."""
