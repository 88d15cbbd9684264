"""How a transfer takes time once all its members are there: as one fluid flow, or transfer by transfer.

A player is told that meetings are complete and calls ``on_end`` when they end. :class:`FlowPlayer` is
``fidelity="flow"``; :class:`Replay` is ``fidelity="chunk"``, exact and slow (:mod:`clustersim.engine.chunk`), for
teaching and as the oracle of the fluid macro-flow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeAlias

import msgspec
import numpy as np

from clustersim.collectives.base import Request
from clustersim.collectives.channels import channels
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.engine import chunk
from clustersim.engine.columns import highest, lowest
from clustersim.engine.flows import bundles
from clustersim.engine.flows.clock import Clock
from clustersim.engine.flows.loads import Loads, Slots
from clustersim.engine.flows.network import FlowNetwork
from clustersim.engine.pacing import Pacing, Paid, pacing
from clustersim.engine.planning import PlanBook
from clustersim.engine.sites import Site

OnEnd: TypeAlias = Callable[[Ints, float], None]


class Player(Protocol):
    """What a play and the timeline need of a player."""

    @property
    def network(self) -> FlowNetwork:
        """What moves the bytes."""

    on_end: OnEnd

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Start these complete meetings of a site, each at its ``start`` [s], none of which is before now."""

    def not_before(self, site: Site, meeting: int) -> float:
        """A meeting under way does not end before [s]."""

    def transfers(self) -> tuple[Ints | slice, Ints]:
        """For every transfer id: the id of its meeting (or all of them, where they are the same), and its load."""


def at_each(times: Floats) -> Iterator[tuple[float, Bools]]:
    """The distinct times, ascending, each with the mask of the elements that have it."""
    if len(times) and lowest(times) == highest(times):
        yield float(times[0]), np.ones(len(times), dtype=np.bool_)
        return
    for time in np.unique(times).tolist():
        yield time, times == time


class FlowPlayer:
    """A meeting is its plan's latency, then one flow; its id is its transfer's id.

    ``slots`` : where it may have to wait for another; elsewhere it is bound by the rate it has alone.
    """

    def __init__(self, clock: Clock, loads: Loads, sites: tuple[Site, ...], slots: Slots | None) -> None:
        self.clock = clock
        self.sites = sites
        self.network = FlowNetwork(clock, loads, lambda transfers, now: self.on_end(transfers, now), slots)
        self.on_end: OnEnd = nobody
        self._beginning: dict[float, list[tuple[Site, Ints]]] = {}

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Schedule the flows; all that begin at one instant are one event."""
        if len(meetings) == 1:
            begins = start.item(0) + site.plans.latency.item(int(meetings[0]))
            self._ask(begins, site, meetings)
            return
        for time, mask in at_each(start + site.plans.latency[meetings]):
            self._ask(time, site, meetings[mask])

    def _ask(self, time: float, site: Site, meetings: Ints) -> None:
        """These begin then: one event, whatever else does."""
        beginning = self._beginning.get(time)
        if beginning is None:
            beginning = self._beginning[time] = []
            self.clock.call(time, self._begin_all, time)
        beginning.append((site, meetings))

    def _begin_all(self, time: float) -> None:
        for site, meetings in self._beginning.pop(time):
            self._begin(site, meetings)

    def _begin(self, site: Site, meetings: Ints) -> None:
        plans = site.plans
        first = site.first
        if len(meetings) >= bundles.BUNDLED_FROM and self._begin_together(site, meetings):
            return
        # mostly it is one
        load = plans.load.item
        nbytes = plans.nbytes.item
        alone = plans.alone.item
        flows = [(first + m, load(m), nbytes(m), alone(m)) for m in meetings.tolist() if nbytes(m) > 0]
        if flows:
            self.network.begin(flows)
        if len(flows) < len(meetings):
            self.on_end(first + meetings[plans.nbytes[meetings] <= 0], self.clock.now)

    def _begin_together(self, site: Site, meetings: Ints) -> bool:
        """Start flows that are equal but for their loads as one bundle; whether they are."""
        nbytes = site.plans.nbytes[meetings]
        alone = site.plans.alone[meetings]
        if nbytes.item(0) <= 0 or (nbytes != nbytes[0]).any() or (alone != alone[0]).any():
            return False
        loads = site.plans.load[meetings]
        return self.network.begin_together(site.first + meetings, loads, nbytes.item(0), alone.item(0))

    def not_before(self, site: Site, meeting: int) -> float:
        """When it would end if it had its links to itself from now on."""
        plans = site.plans
        return self.network.not_before(site.first + meeting, plans.load.item(meeting), plans.alone.item(meeting))

    def transfers(self) -> tuple[slice, Ints]:
        """Transfers are meetings."""
        return slice(None), np.concatenate([*(site.plans.load for site in self.sites), np.zeros(0, dtype=np.int64)])


def nobody(transfers: Ints, now: float) -> None:
    """Nobody listens yet."""


class _ActiveMeeting(msgspec.Struct, eq=False):
    """One meeting on the air: ``first`` is the id of its first transfer; ``unmet`` and ``left`` count down."""

    meeting: int
    first: int
    steps: chunk.ChunkSteps
    unmet: Ints
    left: int


class Replay:
    """The player of ``fidelity="chunk"``.

    Raises :class:`ProgramError` when made, where the transfers of all sites would not fit in memory.
    """

    def __init__(self, clock: Clock, loads: Loads, book: PlanBook, sites: tuple[Site, ...]) -> None:
        self.clock = clock
        self.loads = loads
        self.book = book
        self.network = FlowNetwork(clock, loads, self._drained)
        self.on_end: OnEnd = nobody
        self._steps: dict[tuple[Request, bytes], chunk.ChunkSteps] = {}
        self._playing: dict[int, _ActiveMeeting] = {}
        self._meetings: list[Ints] = []
        self._loads: list[Ints] = []
        self._n = 0
        only_one = sum(len(site.ranks) for site in sites) == 1
        self.columns = self._by_columns(sites[0]) if only_one else None
        if not self.columns:
            self._prepare(sites)

    def _by_columns(self, site: Site) -> chunk.WavePlay | None:
        """The only meeting of a run, where its schedule is told as waves and its lanes never meet."""
        request = site.plans.request
        group = self.book.groups.of(site.ranks[0])
        plan = site.plans.each[0]
        algorithm = ALGORITHMS.get(plan.algorithm)
        if group.size == 1 or request.kind == "send" or not algorithm or not algorithm.waves:
            return None
        waves = algorithm.waves(request, group, plan.channels or channels(group, plan.n_channels, algorithm.layout))
        return chunk.lay(waves, request.nbytes, group, self.loads, self._pace(site, 0)) if waves else None

    def _pace(self, site: Site, meeting: int) -> Pacing:
        """How the transfers of a meeting go, by its plan."""
        plans = site.plans
        group = self.book.groups.of(site.ranks[meeting])
        _, links, weights = self.loads.csr(plans.load[meeting : meeting + 1])
        paid = Paid(links, weights, float(plans.alone[meeting]), float(plans.latency[meeting]))
        return pacing(plans.request, group, plans.each[meeting], paid)

    def _prepare(self, sites: tuple[Site, ...]) -> None:
        total = 0
        for site in sites:
            for meeting in range(len(site.ranks)):
                total += len(self._steps_of(site, meeting).nbytes)
                chunk.must_fit(total)

    def _steps_of(self, site: Site, meeting: int) -> chunk.ChunkSteps:
        plan = site.plans.each[meeting]
        ranks = site.ranks[meeting]
        key = site.plans.request, ranks.tobytes()
        if key not in self._steps:
            group = self.book.groups.of(ranks)
            schedule = chunk.schedule_of(site.plans.request, group, plan)
            pace = self._pace(site, meeting)
            self._steps[key] = chunk.steps(schedule, site.plans.request.nbytes, group, self.loads, pace)
        return self._steps[key]

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Begin each meeting's first transfers, when what its plan takes beyond them has passed."""
        if self.columns:
            begin = start + self.columns.delay
        else:
            begin = start + [self._steps_of(site, m).begin for m in meetings.tolist()]
        for time, mask in at_each(begin):
            self.clock.call(time, self._begin, site, meetings[mask])

    def _begin(self, site: Site, meetings: Ints) -> None:
        if self.columns:
            self.columns = replace(self.columns, begin=self.clock.now)
            self.clock.call(chunk.last(self.columns), self._landed, site.first)
            return
        for m in meetings.tolist():
            steps = self._steps_of(site, m)
            playing = _ActiveMeeting(site.first + m, self._n, steps, steps.n_needs.copy(), len(steps.nbytes))
            self._n += playing.left
            self._meetings.append(np.full(playing.left, playing.meeting, dtype=np.int64))
            self._loads.append(steps.load)
            if playing.left:
                self._playing[playing.first] = playing
                self._start(playing, np.flatnonzero(playing.unmet == 0))
            else:
                self.on_end(np.array([playing.meeting]), self.clock.now)

    def _landed(self, meeting: int) -> None:
        self.on_end(np.array([meeting]), self.clock.now)

    def _start(self, playing: _ActiveMeeting, which: Ints) -> None:
        moves = playing.steps.nbytes[which] > 0
        moving = which[moves]
        steps = playing.steps
        if len(moving):
            flows = (playing.first + moving).tolist(), steps.load[moving].tolist(), steps.nbytes[moving].tolist()
            self.network.begin(list(zip(*flows, steps.ceiling[moving].tolist(), strict=True)))
        if not moves.all():
            self.clock.call(self.clock.now, self._left_the_sender, playing, which[~moves])

    def _drained(self, transfers: Ints, now: float) -> None:
        """The network's call: these transfers (sorted ids) have left their senders."""
        first = np.array(list(self._playing), dtype=np.int64)  # ascending, as they began
        owner = np.searchsorted(first, transfers, side="right") - 1
        for p in np.unique(owner).tolist():
            self._left_the_sender(self._playing[int(first[p])], transfers[owner == p] - first[p])

    def _left_the_sender(self, playing: _ActiveMeeting, which: Ints) -> None:
        steps = playing.steps
        now = self.clock.now
        for time, mask in at_each(now + steps.latency[which]):
            self.clock.call(time, self._arrived, playing, which[mask])
        follow = steps.lane_next[which]
        self._count_down(playing, follow[follow >= 0])

    def _arrived(self, playing: _ActiveMeeting, which: Ints) -> None:
        steps = playing.steps
        playing.left -= len(which)
        if playing.left == 0:
            del self._playing[playing.first]
            self.on_end(np.array([playing.meeting]), self.clock.now)
        waiting = [steps.next[steps.next_ptr[t] : steps.next_ptr[t + 1]] for t in which.tolist()]
        self._count_down(playing, np.concatenate(waiting))

    def _count_down(self, playing: _ActiveMeeting, waiting: Ints) -> None:
        np.subtract.at(playing.unmet, waiting, 1)
        ready = np.unique(waiting[playing.unmet[waiting] == 0])
        if len(ready):
            self._start(playing, ready)

    def not_before(self, site: Site, meeting: int) -> float:
        """A meeting under way does not end before [s]: it may end now."""
        return 0.0

    def transfers(self) -> tuple[Ints, Ints]:
        """For every transfer id: the id of its meeting, and its load."""
        none = np.zeros(0, dtype=np.int64)
        return np.concatenate([*self._meetings, none]), np.concatenate([*self._loads, none])
