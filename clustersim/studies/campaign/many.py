"""Many replicas of a campaign at once: numpy over replicas, an event of each in every round.

Exactly the campaign that :mod:`clustersim.studies.campaign.replica` plays as SimPy processes, drawn in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Bools, Floats
from clustersim.scenario.file.campaign_units import Duration
from clustersim.studies.campaign import ledger
from clustersim.studies.campaign.job import LONGEST, NOTHING, Campaign
from clustersim.studies.campaign.ledger import ReplicaRuns

Ints: TypeAlias = npt.NDArray[np.intp]
LEAST = 1e-12
"""Pace of a job of which nothing is left: it waits."""


class Draws:
    """Durations by number, drawn for many replicas at a time."""

    def __init__(self, durations: Sequence[Duration | None], rng: np.random.Generator) -> None:
        durations_given = [NOTHING if duration is None else duration for duration in durations]
        self.mean = np.array([float(duration) for duration in durations_given])
        self.sigma = np.array([duration.sigma for duration in durations_given])
        self.exponential = np.array([duration.law == "exponential" for duration in durations_given])
        self.rng = rng

    def __call__(self, which: Ints) -> Floats:
        """(n,) [s], of the durations of these numbers (n,)."""
        sigma = self.sigma[which]
        drawn = self.mean[which]
        if sigma.any():
            drawn = drawn * np.exp(sigma * self.rng.standard_normal(len(which)) - sigma * sigma / 2.0)
        if self.exponential[which].any():
            drawn = drawn * np.where(self.exponential[which], self.rng.exponential(size=len(which)), 1.0)
        return drawn


class ReplicaBatch:
    """Replicas under way. Arrays have a column, or an element, for each.

    time, place : elapsed [s], and where on the axis [s]. failing, slowing, stopping : when each cause, slowdown and
    planned stop comes next [s]. pause : what must pass before training goes on [s]. saved : of each tier the place that
    it has. until, loss : what is slow or missing, how long, and what share of the pace it takes. spare : when each
    spare is ready; the last is the node that was lost. nodes_at : when lost nodes are replaced.
    """

    def __init__(self, campaign: Campaign, n: int, rng: np.random.Generator) -> None:
        c = self.campaign = campaign
        self.rng = rng
        self.n = n
        self.time, self.place, self.nodes_at = np.zeros(n), np.zeros(n), np.zeros(n)
        self.ledger, self.failures = np.zeros((n, len(ledger.PARTS))), np.zeros(n, dtype=np.int64)
        self.scale = np.array([cause.scale for cause in c.causes])
        self.failing = np.full((max(1, len(c.causes)), n), np.inf)
        self.lives = {k: cause.lives(n, rng, LONGEST * c.axis.end) for k, cause in enumerate(c.causes) if cause.ages}
        for k, cause in enumerate(c.causes):
            aged = self.lives[k].following(np.arange(n)) if k in self.lives else None
            self.failing[k] = cause.scale * rng.exponential(size=n) if aged is None else aged
        self.slowing = np.array([slowdown.scale * rng.exponential(size=n) for slowdown in c.slowdowns]).reshape(-1, n)
        self.stopping = np.array([np.full(n, stop.every) for stop in c.stops]).reshape(-1, n)
        self.pause = np.zeros((n, len(ledger.PAUSES)))
        self.saved = np.zeros((len(c.tiers), n))
        self.until, self.loss = np.zeros((n, 4)), np.zeros((n, 4))
        self.spare = np.zeros((n, (c.spares or 0) + 1))
        self.pace: Floats = c.pace(rng.random(n), rng.standard_normal(n) if c.job.step_cv else 0.0)
        self._tables()

    def _tables(self) -> None:
        """What differs from cause to cause, by number of the cause."""
        c = self.campaign
        rng = self.rng
        self.loses = np.array([cause.loses for cause in c.causes])
        self.silent = np.array([cause.silent for cause in c.causes])
        self.usable = np.array([[i in usable_tiers for usable_tiers in c.usable] for i in range(len(c.tiers))])
        self.detect = Draws([c.report if cause.detect is None else cause.detect for cause in c.causes], rng)
        self.repair = Draws([cause.repair for cause in c.causes], rng)
        self.fixed = Draws([c.timeout, c.locate, c.replace, c.restart], rng)
        self.load = Draws([tier.load for tier in c.tiers], rng)
        self.lasts = Draws([slowdown.lasts for slowdown in c.slowdowns], rng)
        self.slow_scale = np.array([slowdown.scale for slowdown in c.slowdowns])
        self.slow_loss = np.array([slowdown.loss for slowdown in c.slowdowns])
        self.stop_every, self.stop_lasts = (
            np.array([getattr(stop, name) for stop in c.stops]) for name in ("every", "lasts")
        )

    def play(self) -> ReplicaRuns:
        """Until all are at the end of the axis, or take too long."""
        end = self.campaign.axis.end
        live = np.arange(self.n)
        while live.size:
            self._round(live)
            live = live[(self.place[live] < end) & (self.time[live] < LONGEST * end)]
        finished = self.place >= end
        laid = self.campaign.axis
        finished_row = np.array([laid.work, laid.stalls, laid.evaluation])
        columns = np.where(
            finished[:, None], finished_row, np.column_stack([self.place, 0 * self.place, 0 * self.place])
        )
        self.ledger[:, [ledger.PRODUCTIVE, ledger.STALLS, ledger.EVALUATION]] += columns
        return ReplicaRuns(self.time, self.ledger, self.failures, finished)

    def _round(self, i: Ints) -> None:
        """One event of each of these replicas: a pause is over and something ends the training behind it."""
        failing = self.failing[:, i]
        cause = failing.argmin(axis=0)
        when = failing[cause, np.arange(len(i))]
        over = self.time[i] + self.pause[i].sum(axis=1)
        failed = when < over
        now = np.where(failed, when, over)
        self._pass(i, now - self.time[i])
        self.time[i] = now
        failed[~failed] = self._train(i[~failed], when[~failed])
        self._fail(i[failed], cause[failed])

    def _pass(self, i: Ints, passed: Floats) -> None:
        """Book what has passed of a pause."""
        pause = self.pause[i]
        before = np.cumsum(pause, axis=1) - pause
        self.ledger[np.ix_(i, ledger.PAUSES)] += np.clip(passed[:, None] - before, 0.0, pause)
        self.pause[i] = 0.0

    def _train(self, i: Ints, when: Floats) -> Bools:
        """Train until something happens; returns (n,) whether it is a failure, at ``when``."""
        now = self.time[i]
        end = self.campaign.axis.end
        slowed = self.until[i] > now[:, None]
        pace = np.maximum(self.pace[i] - (self.loss[i] * slowed).sum(axis=1), LEAST)
        relief = np.where(slowed, self.until[i], np.inf).min(axis=1)
        slow = np.maximum(self.slowing[:, i].min(axis=0, initial=np.inf), now)
        stop = np.maximum(self.stopping[:, i].min(axis=0, initial=np.inf), now)
        rest = end - self.place[i]
        finish = now + rest / pace
        event = np.minimum.reduce([finish, when, relief, slow, stop])
        ends = finish <= event
        moved = np.where(ends, rest, (event - now) * pace)
        # At full pace the difference of two clocks is dust.
        self.ledger[i, ledger.VARIATION] += np.where(pace == 1.0, 0.0, event - now - moved)
        self.place[i] = np.where(ends, end, self.place[i] + moved)
        self.time[i] = event
        failed: Bools = ~ends & (when <= event)
        goes_on = ~ends & ~failed
        self._slow_down(i[goes_on & (slow <= event)])
        self._stop(i[goes_on & (slow > event) & (stop <= event)])
        return failed

    def _slow_down(self, i: Ints) -> None:
        """Something is slow from now on."""
        if not i.size:
            return
        which = self.slowing[:, i].argmin(axis=0)
        self.slowing[which, i] += self.slow_scale[which] * self.rng.exponential(size=len(i))
        self._hinder(i, self.time[i] + self.lasts(which), self.slow_loss[which])

    def _hinder(self, i: Ints, until: Floats, loss: Floats) -> None:
        """A share of the pace is gone until then."""
        if (self.until[i].min(axis=1) > self.time[i]).any():  # no place is free
            self.until = np.pad(self.until, ((0, 0), (0, 4)))
            self.loss = np.pad(self.loss, ((0, 0), (0, 4)))
        free = self.until[i].argmin(axis=1)
        self.until[i, free], self.loss[i, free] = until, loss

    def _stop(self, i: Ints) -> None:
        """A planned stop: save, stand still, start again."""
        if not i.size:
            return
        c = self.campaign
        which = self.stopping[:, i].argmin(axis=0)
        tier = c.saves_all
        self.saved[tier, i] = self.place[i]
        back = self.fixed(np.full(len(i), 3)) + self.load(np.full(len(i), tier))
        self.pause[i, 0] = c.tiers[tier].save.stall + self.stop_lasts[which] + back
        self.stopping[which, i] = self.time[i] + self.stop_every[which]

    def _fail(self, i: Ints, cause: Ints) -> None:
        """A failure: fall back, lose nodes, and begin the recovery, whatever was going on."""
        if not i.size:
            return
        self.failures[i] += 1
        self.failing[cause, i] = self.time[i] + self.scale[cause] * self.rng.exponential(size=len(i))
        for k, lives in self.lives.items():
            failing_now = i[cause == k]
            self.failing[k, failing_now] = lives.following(failing_now)
        dropped = (self.loses[cause] == 1) & (self.campaign.policy == "drop_replica")
        tier = self._fall_back(i, cause, dropped)
        self._lose_nodes(i, cause)
        silent = self.rng.random(len(i)) < self.silent[cause]
        kind = np.zeros(len(i), dtype=np.intp)
        detection = np.where(silent, self.fixed(kind), self.detect(cause)) + self.fixed(kind + 1)
        self._recover(i, cause, dropped, detection, tier)

    def _fall_back(self, i: Ints, cause: Ints, dropped: Bools) -> Ints:
        """To the last save that is there; returns (n,) the tier it is of. Not where only a replica is dropped."""
        place = self.place[i]
        for k in range(len(self.saved)):
            self.saved[k, i] = np.maximum(self.saved[k, i], self.campaign.axis.fall_back(k, place))
        usable_saves = np.where(self.usable[:, cause], self.saved[:, i], -1.0)
        tier: Ints = usable_saves.argmax(axis=0)
        back = np.where(dropped, place, usable_saves.max(axis=0))
        self.ledger[i, ledger.LOST] += place - back
        self.place[i] = back
        return tier

    def _lose_nodes(self, i: Ints, cause: Ints) -> None:
        """Nodes go to repair, and the spares that are ready first take their places."""
        if self.campaign.spares is None:
            return
        for k in range(int(self.loses[cause].max())):
            lost = self.loses[cause] > k
            j = i[lost]
            self.spare[j, -1] = self.time[j] + self.repair(cause[lost])
            first = self.spare[j].argmin(axis=1)
            self.nodes_at[j] = np.maximum(self.nodes_at[j], self.spare[j, first])
            self.spare[j, first] = self.spare[j, -1]

    def _recover(self, i: Ints, cause: Ints, dropped: Bools, detection: Floats, tier: Ints) -> None:
        """Lay out the pause, or what goes on beside it."""
        c = self.campaign
        kind = np.zeros(len(i), dtype=np.intp)
        noticed = self.time[i] + detection
        replacing = (self.loses[cause] > 0) | (c.policy == "requeue")
        replace = np.where(replacing, self.fixed(kind + 2), 0.0)
        wait = np.maximum(self.nodes_at[i] - noticed, 0.0)
        restart = self.fixed(kind + 3)
        load = self.load(tier)
        beside = dropped | ((c.policy == "shrink") & (wait > 0))
        until = noticed + wait + np.where(dropped, replace + load, 0.0)
        if beside.any():
            self.nodes_at[i[beside]] = 0.0  # their nodes come for what is missing, not for the job
            self._hinder(i[beside], until[beside], np.full(int(beside.sum()), 1.0 / c.job.copies))
        waiting = np.where(beside, 0.0, wait) + np.where(dropped, 0.0, replace)
        loading = np.where(dropped, 0.0, load)
        self.pause[i] = np.column_stack([0.0 * wait, detection, waiting, restart, loading])


def play(campaign: Campaign, n: int, seed: int, batch: int = 0) -> ReplicaRuns:
    """Replicas of a campaign; the same seed and number of batch, the same replicas."""
    rng = np.random.default_rng([seed, batch])
    return ReplicaBatch(campaign, n, rng).play()
