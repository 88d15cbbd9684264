"""Chunk fidelity: a collective played transfer by transfer, as its algorithm's schedule lists them.

Exact and slow, for teaching and as the oracle of the fluid macro-flow. Every transfer is a flow of its own over the
route between two GPUs, at line rate; it may start when the transfers it names have *arrived* (drained, plus the route's
latency) and the one before it on its lane has *drained*. Launch and protocol costs, which a plan lumps into its latency
and weights, are no part of a schedule and are not played.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.collectives.base import Group, Plan, Request, Schedule
from clustersim.collectives.channels import channels
from clustersim.collectives.registry import ALGORITHMS
from clustersim.engine import chunk, need
from clustersim.engine.clock import Clock
from clustersim.engine.loads import Loads
from clustersim.engine.network import Network
from clustersim.engine.planning import PlanBook
from clustersim.engine.players import OnEnd, at_each, nobody
from clustersim.engine.sites import Site
from clustersim.errors import ProgramError

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Steps:
    """A schedule on its links, ready to play.

    Parameters
    ----------
    nbytes, latency : (T,) float [bytes], [s]. load : (T,) int, id in :class:`Loads`.
    n_needs : (T,) int, transfers each waits for, its lane's predecessor included.
    apart : no two lanes can hold each other up: their links carry all of them at full rate at once.
    next_ptr, next : CSR, who waits for a transfer's arrival. lane_next : (T,) who waits for it to drain; -1 for none.
    """

    nbytes: Floats
    latency: Floats
    load: Ints
    n_needs: Ints
    next_ptr: Ints
    next: Ints
    lane_next: Ints
    apart: bool


@dataclass(eq=False)
class _Playing:
    """One meeting on the air: ``first`` is the id of its first transfer; ``unmet`` and ``left`` count down."""

    meeting: int
    first: int
    steps: Steps
    unmet: Ints
    left: int


class Replay:
    """The player of ``fidelity="chunk"``.

    Raises :class:`ProgramError` when made, where the transfers of all sites would not fit in memory.
    """

    def __init__(self, clock: Clock, loads: Loads, book: PlanBook, sites: tuple[Site, ...]) -> None:
        self.clock, self.loads, self.book = clock, loads, book
        self.network = Network(clock, loads, self._drained)
        self.on_end: OnEnd = nobody
        self._steps: dict[tuple[Request, bytes], Steps] = {}
        self._playing: dict[int, _Playing] = {}
        self._meetings: list[Ints] = []
        self._loads: list[Ints] = []
        self._n = 0
        self._only_one = sum(len(site.ranks) for site in sites) == 1
        self.columns = self._by_columns(sites[0]) if self._only_one else None
        if not self.columns:
            self._prepare(sites)

    def _by_columns(self, site: Site) -> chunk.Played | None:
        """The only meeting of a run, where its schedule is told as waves and its lanes never meet."""
        request, group, plan = site.plans.request, self.book.group(site.ranks[0]), site.plans.each[0]
        algorithm = ALGORITHMS.get(plan.algorithm)
        if group.size == 1 or request.kind == "send" or not algorithm or not algorithm.waves:
            return None
        waves = algorithm.waves(request, group, plan.channels or channels(group, plan.n_channels, algorithm.layout))
        return chunk.lay(waves, request.nbytes, group, self.loads) if waves else None

    def _prepare(self, sites: tuple[Site, ...]) -> None:
        total = 0
        for site in sites:
            for plan, ranks in zip(site.plans.each, site.ranks, strict=True):
                total += len(self._steps_of(site, plan, ranks).nbytes)
                _must_fit(total)

    def _steps_of(self, site: Site, plan: Plan, ranks: Ints) -> Steps:
        key = site.plans.request, ranks.tobytes()
        if key not in self._steps:
            group = self.book.group(ranks)
            schedule = schedule_of(site.plans.request, group, plan)
            self._steps[key] = steps(schedule, site.plans.request.nbytes, group, self.loads)
        return self._steps[key]

    def play(self, site: Site, meetings: Ints, start: Floats) -> None:
        """Begin each meeting's first transfers at the meeting's start."""
        for time, mask in at_each(start):
            self.clock.call(time, self._begin, site, meetings[mask])

    def _begin(self, site: Site, meetings: Ints) -> None:
        if self.columns:
            self.columns = replace(self.columns, begin=self.clock.now)
            self.clock.call(chunk.last(self.columns), self._landed, site.first)
            return
        for m in meetings.tolist():
            steps = self._steps_of(site, site.plans.each[m], site.ranks[m])
            playing = _Playing(site.first + m, self._n, steps, steps.n_needs.copy(), len(steps.nbytes))
            self._n += playing.left
            self._meetings.append(np.full(playing.left, playing.meeting, dtype=np.int64))
            self._loads.append(steps.load)
            if playing.left and self._only_one and steps.apart:
                self._leap(playing)
            elif playing.left:
                self._playing[playing.first] = playing
                self._start(playing, np.flatnonzero(playing.unmet == 0))
            else:
                self.on_end(np.array([playing.meeting]), self.clock.now)

    def _leap(self, playing: _Playing) -> None:
        """Play a meeting that has the network to itself and whose lanes do not meet: every transfer runs at full rate,
        so its times follow from those before it, a front of transfers at a time, without an event each."""
        steps, n = playing.steps, playing.left
        rate = np.array(self.loads.alone)[steps.load]
        start, end = np.full(n, self.clock.now), np.zeros(n)
        front, last = np.flatnonzero(playing.unmet == 0), self.clock.now
        while len(front):
            end[front] = start[front] + steps.nbytes[front] / rate[front]
            arrived = end[front] + steps.latency[front]
            last = max(last, float(arrived.max()))
            follow, which = _following(steps, front)
            np.maximum.at(start, follow, arrived[which])
            behind = steps.lane_next[front]
            some = behind >= 0
            start[behind[some]] = np.maximum(start[behind[some]], end[front][some])  # one before each on its lane
            follow = np.concatenate([follow, behind[some]])
            np.subtract.at(playing.unmet, follow, 1)
            front = np.unique(follow[playing.unmet[follow] == 0])
        self.network.moved(playing.first + np.arange(n), start, end, rate)
        self.clock.call(last, self._landed, playing.meeting)

    def _landed(self, meeting: int) -> None:
        self.on_end(np.array([meeting]), self.clock.now)

    def _start(self, playing: _Playing, which: Ints) -> None:
        moves = playing.steps.nbytes[which] > 0
        some, steps = which[moves], playing.steps
        if len(some):
            ceilings = np.full(len(some), np.inf)
            self.network.begin(playing.first + some, steps.load[some], steps.nbytes[some], ceilings)
        if not moves.all():
            self.clock.call(self.clock.now, self._left_the_sender, playing, which[~moves])

    def _drained(self, transfers: Ints, now: float) -> None:
        """The network's call: these transfers (sorted ids) have left their senders."""
        first = np.array(list(self._playing), dtype=np.int64)  # ascending, as they began
        owner = np.searchsorted(first, transfers, side="right") - 1
        for p in np.unique(owner).tolist():
            self._left_the_sender(self._playing[int(first[p])], transfers[owner == p] - first[p])

    def _left_the_sender(self, playing: _Playing, which: Ints) -> None:
        steps, now = playing.steps, self.clock.now
        for time, mask in at_each(now + steps.latency[which]):
            self.clock.call(time, self._arrived, playing, which[mask])
        follow = steps.lane_next[which]
        self._count_down(playing, follow[follow >= 0])

    def _arrived(self, playing: _Playing, which: Ints) -> None:
        steps = playing.steps
        playing.left -= len(which)
        if playing.left == 0:
            del self._playing[playing.first]
            self.on_end(np.array([playing.meeting]), self.clock.now)
        waiting = [steps.next[steps.next_ptr[t] : steps.next_ptr[t + 1]] for t in which.tolist()]
        self._count_down(playing, np.concatenate(waiting))

    def _count_down(self, playing: _Playing, waiting: Ints) -> None:
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


def schedule_of(request: Request, group: Group, plan: Plan) -> Schedule:
    """The schedule a plan's algorithm follows. Raises :class:`ProgramError` where it would not fit in memory."""
    if group.size == 1 or request.kind == "send":
        return _one_send(group.size - 1)
    chosen = ALGORITHMS.get(plan.algorithm)
    if chosen is None or chosen.schedule is None:
        known = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.schedule and request.kind in a.kinds))
        raise ProgramError(
            f"algorithm {plan.algorithm!r} has no schedule to replay transfer by transfer; use fidelity 'flow', "
            f"or for {request.kind} one of: {known}"
        )
    laid = plan.channels or channels(group, plan.n_channels, chosen.layout)
    traffic = chosen.traffic(request, group, laid)
    # Every edge of the traffic sends about once per step: near enough to refuse before building a billion of them.
    _must_fit(len(traffic.src) * traffic.steps)
    return chosen.schedule(request, group, laid)


def _must_fit(transfers: int) -> None:
    what = f"at chunk fidelity, for {transfers:,} transfers one by one"
    need.check(need.replay(transfers), what, "use fidelity 'flow', fewer ranks or fewer channels")


def _one_send(n: int) -> Schedule:
    """``n`` transfers, 0 or 1, of everything from member 0 to member 1."""
    here, there = np.zeros(n, dtype=np.int64), np.ones(n, dtype=np.int64)
    none, ptr = np.zeros(0, dtype=np.int64), np.zeros(n + 1, dtype=np.int64)
    return Schedule(here, there, here, n, here.astype(bool), ptr, none, here - 1, np.ones(n))


def steps(schedule: Schedule, nbytes: float, group: Group, loads: Loads) -> Steps:
    """Put a schedule of a tensor of ``nbytes`` on the links between the group's GPUs."""
    n = len(schedule.src)
    ends = np.stack([group.gpus[schedule.src], group.gpus[schedule.dst], schedule.rail], axis=1)
    _, first, of = np.unique(schedule.lane, return_index=True, return_inverse=True)
    lanes = len(schedule.lane) > 0 and bool(np.all(ends[first][of] == ends))  # each between two ends, by one rail
    if not lanes:
        _, first, of = np.unique(ends, axis=0, return_index=True, return_inverse=True)
        of = of.reshape(-1)
    load, latency = chunk.routes(ends[first], group, loads, relay=schedule.relay)
    waiting = np.repeat(np.arange(n), np.diff(schedule.after_ptr))
    order = np.argsort(schedule.after, kind="stable")
    lane_next = _lane_next(schedule.lane, n)
    return Steps(
        nbytes=nbytes * schedule.chunk_fraction[schedule.chunk],
        latency=latency[of],
        load=load[of],
        n_needs=np.diff(schedule.after_ptr) + np.bincount(lane_next[lane_next >= 0], minlength=n),
        next_ptr=np.searchsorted(schedule.after[order], np.arange(n + 1)),
        next=waiting[order],
        lane_next=lane_next,
        apart=lanes and chunk.apart(load, loads),
    )


def _following(steps: Steps, front: Ints) -> tuple[Ints, Ints]:
    """Who waits for the arrival of these transfers: ``(transfers, place in front of what each waits for)``."""
    first, count = steps.next_ptr[front], steps.next_ptr[front + 1] - steps.next_ptr[front]
    which = np.repeat(np.arange(len(front)), count)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count)
    return steps.next[first[which] + inside], which


def _lane_next(lane: Ints, n: int) -> Ints:
    """For every transfer the next one on its lane; -1 for the last, and where there are no lanes."""
    follows = np.full(n, -1, dtype=np.int64)
    if len(lane):
        order = np.argsort(lane, kind="stable")
        same = lane[order[:-1]] == lane[order[1:]]
        follows[order[:-1][same]] = order[1:][same]
    return follows
