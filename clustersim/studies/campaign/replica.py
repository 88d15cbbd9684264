"""One replica of a campaign as SimPy processes: the job, each cause of failure, and the repair of each lost node.

This is the campaign to read. :mod:`clustersim.studies.campaign.many` plays thousands of the same at once.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import numpy as np
import simpy

from clustersim.scenario.file.campaign_units import Duration
from clustersim.studies.campaign.causes import Cause
from clustersim.studies.campaign.job import LONGEST, Campaign, PlannedStop, Slowdown
from clustersim.studies.campaign.ledger import PARTS, ReplicaRuns

Steps = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True)
class StateSpan:
    """The job was in a state, one of :data:`PARTS` or ``training``, from one time to another [s]."""

    begin: float
    end: float
    state: str


class Replica:
    """A job under way.

    place : on the axis [s]. saved : of each tier the place that it has. hindered : (until, share of the pace that is
    gone). ledger : part -> [s]. spans : what it did, in order. awaited : nodes that were asked for.
    """

    def __init__(self, campaign: Campaign, rng: np.random.Generator) -> None:
        self.campaign, self.rng, self.env = campaign, rng, simpy.Environment()
        self.place = 0.0
        self.failures = 0
        self.saved = [0.0 for _ in campaign.tiers]
        self.ledger = dict.fromkeys(PARTS, 0.0)
        self.spans: list[StateSpan] = []
        self.hindered: list[tuple[float, float]] = []
        self.due = {stop: stop.every for stop in campaign.stops}
        self.pace = float(campaign.pace(rng.random(), rng.standard_normal() if campaign.job.step_cv else 0.0))
        self.awaited: list[simpy.Event] = []
        end = LONGEST * campaign.axis.end
        self.lives = {cause: cause.lives(1, rng, end) for cause in campaign.causes if cause.ages}
        self.pool = None if campaign.spares is None else simpy.Container(self.env, init=campaign.spares)

    def play(self) -> Replica:
        """Until the end of the axis, or :data:`LONGEST` times as long."""
        self.job = self.env.process(self._work())
        for cause in self.campaign.causes:
            self.env.process(self._failures(cause))
        for slowdown in self.campaign.slowdowns:
            self.env.process(self._slowdowns(slowdown))
        self.env.run(until=self.job)
        return self

    @property
    def runs(self) -> ReplicaRuns:
        """What became of it, as :func:`clustersim.studies.campaign.many.play` returns thousands."""
        row = np.array([[self.ledger[part] for part in PARTS]])
        done = np.array([self.place >= self.campaign.axis.end])
        return ReplicaRuns(np.array([self.env.now]), row, np.array([self.failures]), done)

    # ---- the job -----------------------------------------------------------------------------------------------------

    def _work(self) -> Steps:
        laid = self.campaign.axis
        trouble: Cause | Slowdown | PlannedStop | None = None
        while self.place < laid.end and self.env.now < LONGEST * laid.end:
            if isinstance(trouble, Cause):
                trouble = yield from self._recover(trouble)
            elif isinstance(trouble, PlannedStop):
                trouble = yield from self._stop(trouble)
            else:
                trouble = yield from self._train()
        finished = self.place >= laid.end
        seconds_of = (laid.work, laid.stalls, laid.evaluation) if finished else (self.place, 0.0, 0.0)
        for part, seconds in zip(("productive", "checkpoint stalls", "evaluation"), seconds_of, strict=True):
            self.ledger[part] += seconds

    def _train(self) -> Steps:
        """Until the end, a failure, something slow that comes or goes, or a planned stop; returns what it was."""
        begin = self.env.now
        self.hindered = [(until, loss) for until, loss in self.hindered if until > begin]
        pace = max(self.pace - sum(loss for _, loss in self.hindered), 1e-12)
        finish = begin + (self.campaign.axis.end - self.place) / pace
        stop = min(self.due, key=self.due.__getitem__, default=None)
        due = math.inf if stop is None else max(self.due[stop], begin)
        ends = min([finish, due, *(until for until, _ in self.hindered)])
        trouble: Any = None
        try:
            yield self.env.timeout(ends - begin)
            trouble = stop if due <= ends < finish else None
        except simpy.Interrupt as interrupt:
            trouble = interrupt.cause
        passed = self.env.now - begin
        rest = self.campaign.axis.end - self.place
        moved = rest if self.env.now >= finish else passed * pace
        self.place = self.campaign.axis.end if self.env.now >= finish else self.place + moved
        if pace != 1.0:  # else the difference of two clocks is dust
            self.ledger["step variation"] += passed - moved
        self._span(begin, "training")
        return trouble

    def _recover(self, cause: Cause) -> Steps:
        """Fall back, replace what was lost, start again; returns the next failure, where one comes before the end."""
        c = self.campaign
        self.failures += 1
        self.env.process(self._failures(cause))
        dropped = c.policy == "drop_replica" and cause.loses == 1
        load = self._fall_back(cause, dropped)
        self._lose_nodes(cause)
        delay = c.timeout if self.rng.random() < cause.silent else c.report if cause.detect is None else cause.detect
        detection = self._draw(delay) + self._draw(c.locate)
        replace = self._draw(c.replace) if cause.loses or c.policy == "requeue" else 0.0
        restart = self._draw(c.restart)
        if dropped:
            self.env.process(self._rejoin(detection, replace + load))
            return (yield from self._pass([("detection", detection), ("restart", restart)]))
        phases: list[tuple[str, float]] = [("waiting for nodes", replace), ("restart", restart), ("loading", load)]
        trouble = yield from self._pass([("detection", detection)])
        if trouble is None and c.policy == "shrink" and not all(waiting.triggered for waiting in self.awaited):
            self.env.process(self._rejoin(0.0, 0.0))
        elif trouble is None:
            trouble = yield from self._wait_for_nodes()
        return trouble or (yield from self._pass(phases))

    def _fall_back(self, cause: Cause, dropped: bool) -> float:
        """To the last save that is there; returns the time to load it [s]."""
        c = self.campaign
        for i, place in enumerate(self.saved):
            self.saved[i] = max(place, float(c.axis.fall_back(i, self.place)))
        best = max(c.usable[c.causes.index(cause)], key=lambda i: self.saved[i])
        if not dropped:
            self._mark_lost(self.place - self.saved[best])
            self.place = self.saved[best]
        return self._draw(c.tiers[best].load)

    def _mark_lost(self, lost: float) -> None:
        """So much of the last training [s of the axis] was in vain."""
        self.ledger["lost work"] += lost
        for i in reversed(range(len(self.spans))):
            span = self.spans[i]
            if lost > 0 and span.state == "training":
                cut = max(span.begin, span.end - lost / self.pace)
                training_before = [StateSpan(span.begin, cut, "training")] if cut > span.begin else []
                self.spans[i : i + 1] = [*training_before, StateSpan(cut, span.end, "lost work")]
                lost -= (span.end - cut) * self.pace
            elif lost <= 0:
                return

    def _stop(self, stop: PlannedStop) -> Steps:
        """Save, stand still, start again; returns the failure that comes before that is over."""
        c = self.campaign
        self.saved[c.saves_all] = self.place
        self.due[stop] = self.env.now + stop.every
        tier = c.tiers[c.saves_all]
        lasts = tier.save.stall + stop.lasts + self._draw(c.restart) + self._draw(tier.load)
        return (yield from self._pass([("maintenance", lasts)]))

    def _pass(self, phases: list[tuple[str, float]]) -> Steps:
        """Let times pass, one after the other; returns the failure that breaks them off, or None."""
        for part, seconds in phases:
            trouble = yield from self._until(self.env.timeout(seconds), part)
            if trouble is not None:
                return trouble
        return None

    def _wait_for_nodes(self) -> Steps:
        while self.awaited:
            trouble = yield from self._until(self.awaited[0], "waiting for nodes")
            if trouble is not None:
                return trouble
            self.awaited.pop(0)
        return None

    def _until(self, event: simpy.Event, part: str) -> Steps:
        """Wait for an event, and book it. What only makes training slow is no trouble here."""
        trouble: Any = None
        while trouble is None and not event.processed:
            begin = self.env.now
            try:
                yield event
            except simpy.Interrupt as interrupt:
                trouble = interrupt.cause if isinstance(interrupt.cause, Cause) else None
            self.ledger[part] += self.env.now - begin
            self._span(begin, part)
        return trouble

    # ---- what happens beside it --------------------------------------------------------------------------------------

    def _failures(self, cause: Cause) -> Steps:
        """The next failure of a cause; when it has come, the job begins the wait for the one after it."""
        lives = self.lives.get(cause)
        if lives is None:
            when = self.env.now + cause.scale * self.rng.exponential()
        else:
            when = float(lives.following(np.array([0]))[0])
        if math.isfinite(when):
            yield self.env.timeout(when - self.env.now)
            if self.job.is_alive:
                self.job.interrupt(cause)

    def _slowdowns(self, slowdown: Slowdown) -> Steps:
        while math.isfinite(slowdown.scale):
            yield self.env.timeout(slowdown.scale * self.rng.exponential())
            self.hindered.append((self.env.now + self._draw(slowdown.lasts), slowdown.loss))
            if self.job.is_alive:
                self.job.interrupt(slowdown)

    def _rejoin(self, delay: float, after: float) -> Steps:
        """A replica is missing until its nodes are there, and a while longer."""
        c = self.campaign
        nodes = self.awaited
        self.awaited = []
        missing = (math.inf, 1.0 / c.job.copies)
        self.hindered.append(missing)
        yield self.env.timeout(delay)
        yield self.env.all_of(nodes)
        yield self.env.timeout(after)
        self.hindered.remove(missing)
        if self.job.is_alive:
            self.job.interrupt(None)

    def _lose_nodes(self, cause: Cause) -> None:
        if self.pool is not None:
            for _ in range(cause.loses):
                self.env.process(self._repair(cause))
                self.awaited.append(self.pool.get(1))

    def _repair(self, cause: Cause) -> Steps:
        yield self.env.timeout(self._draw(cause.repair))
        if self.pool is not None:
            yield self.pool.put(1)

    def _draw(self, duration: Duration | None) -> float:
        if duration is None:
            return 0.0
        if duration.law == "lognormal":
            return duration * math.exp(duration.sigma * self.rng.standard_normal() - duration.sigma**2 / 2.0)
        return duration * (self.rng.exponential() if duration.law == "exponential" else 1.0)

    def _span(self, begin: float, state: str) -> None:
        if self.env.now > begin:
            self.spans.append(StateSpan(begin, self.env.now, state))


def replica(campaign: Campaign, seed: int) -> Replica:
    """Play one replica; the same seed, the same replica."""
    return Replica(campaign, np.random.default_rng(seed)).play()
