"""From a ``[campaign]`` table and what a step is to a campaign in SI floats, which both engines play."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from clustersim.core.errors import ScenarioError
from clustersim.scenario.file.campaign_schema import CampaignTable, Checkpoint
from clustersim.scenario.file.campaign_units import Duration
from clustersim.studies.campaign.axis import SaveKind, WorkAxis, axis
from clustersim.studies.campaign.causes import Cause, causes_of, check, life_of, units_of
from clustersim.studies.campaign.renewal import best_interval, expected_time

NOTHING = Duration(0.0)
LONGEST = 50.0
"""A campaign that takes so many times longer than without failures does not finish."""
SURVIVORS = {"job": ("memory", "local", "storage"), "node": ("memory", "storage")}
"""Tiers of checkpoints that are there after a failure of a scope; after any other, storage alone."""


@dataclass(frozen=True)
class Job:
    """What a step of the training is.

    Parameters
    ----------
    nodes, gpus : of the job. replicas : of the model (data parallelism). copies : whole ones of the optimizer states,
        of which a failure takes one; fewer than replicas, often one, where states are sharded over them.
    step_s : [s]. parameters : of the model. bytes_per_parameter : that strategy and optimizer keep [bytes].
    tokens_per_step, mfu : None where the model has no tokens, or no peak is known. lacking : bytes that the step needs
        and a GPU does not have. host_lacking : bytes that its ranks keep on a host, which does not have them.
    slower : name of a ``[[campaign.degraded]]`` -> how many times longer a step is, simulated.
    machines : the mean step on machines that could be had, over ``step_s``; each replica has one of them. swapped : the
        same machines with others in place of the slowest hosts. step_cv : of steps on one and the same machine.
    """

    nodes: int
    gpus: int
    step_s: float
    replicas: int = 1
    copies: int = 1
    parameters: float = 0.0
    bytes_per_parameter: float = 14.0
    tokens_per_step: float | None = None
    mfu: float | None = None
    lacking: float = 0.0
    host_lacking: float = 0.0
    slower: Mapping[str, float] = field(default_factory=dict)
    machines: tuple[float, ...] = (1.0,)
    swapped: tuple[float, ...] = ()
    step_cv: float = 0.0


@dataclass(frozen=True)
class SaveTier:
    """A kind of save: what it is called, how it is laid out, and how long it takes to load."""

    name: str
    save: SaveKind
    load: Duration


@dataclass(frozen=True)
class Slowdown:
    """Something slow for a while: ``scale`` [s] is the mean time between two, ``loss`` the share of pace that goes."""

    name: str
    scale: float
    lasts: Duration
    loss: float


@dataclass(frozen=True)
class PlannedStop:
    """A planned stop: its name, elapsed time between two [s], and how long it lasts beside its save and restart [s]."""

    name: str
    every: float
    lasts: float


@dataclass(frozen=True, eq=False)
class Campaign:
    """A whole training, ready to be played.

    Parameters
    ----------
    job, axis, causes, tiers : as named; ``axis`` has a kind of save for each tier.
    usable : (causes) of tuples, the tiers that are there after a failure of each cause.
    policy, report, timeout, locate, replace, restart : as in the table. spares : None for as many as asked for.
    slowdowns, stops : as named. steps : of the training. evaluations : (every so much work [s], so long [s]).
    """

    job: Job
    steps: float
    axis: WorkAxis
    causes: tuple[Cause, ...]
    tiers: tuple[SaveTier, ...]
    usable: tuple[tuple[int, ...], ...]
    policy: str
    report: Duration
    timeout: Duration
    locate: Duration
    replace: Duration
    restart: Duration
    spares: int | None
    slowdowns: tuple[Slowdown, ...] = ()
    stops: tuple[PlannedStop, ...] = ()
    evaluations: tuple[tuple[float, float], ...] = ()

    def pace(self, which: Any, noise: Any) -> Any:
        """Of replicas: (n,) over the usual one.

        which : uniform variables, which machine each has. noise : normal ones: the mean of n steps that vary by a share
        c of themselves varies by ``c/sqrt(n)``, of as many steps as a training has hardly at all.
        """
        machines = np.array(self.job.machines)
        mean = machines[(np.asarray(which) * len(machines)).astype(int)]
        return 1.0 / (mean * np.maximum(1.0 + self.job.step_cv / math.sqrt(self.steps) * noise, 0.1))

    @property
    def saves_all(self) -> int:
        """The tier that a planned stop saves to: storage, where there is any."""
        return max(range(len(self.tiers)), key=lambda i: (self.tiers[i].name == "storage", -i))

    @property
    def mtbf(self) -> float:
        """Mean time between failures of the job over its length without any [s]; infinite where nothing fails."""
        expected = sum(cause.expected(self.axis.end) for cause in self.causes)
        return self.axis.end / expected if expected else math.inf

    @property
    def recovery(self) -> float:
        """Mean time from a failure to training, nodes at hand [s]."""
        counts = [cause.expected(self.axis.end) for cause in self.causes]
        if not sum(counts):
            return 0.0
        recoveries = (
            self._detection(cause) + float(self.replace) * (cause.loses > 0 or self.policy == "requeue")
            for cause in self.causes
        )
        mean = sum(n * time for n, time in zip(counts, recoveries, strict=True)) / sum(counts)
        return mean + float(self.locate) + float(self.restart) + float(self.tiers[0].load)

    def _detection(self, cause: Cause) -> float:
        report = self.report if cause.detect is None else cause.detect
        return (1.0 - cause.silent) * float(report) + cause.silent * float(self.timeout)

    def expected(self) -> float:
        """Mean elapsed time by Daly's closed form [s], infinite for a campaign that does not end. Exact for one kind of
        synchronous save, exponential failures and a fixed recovery; evaluations, stops and waits come on top."""
        save = self.tiers[0].save
        tau = min(save.interval, self.axis.work)
        plain_time = expected_time(self.mtbf, save.stall, self.recovery, tau, self.axis.work)
        return plain_time * math.fsum(self.job.machines) / len(self.job.machines) + self.axis.evaluation

    @property
    def hopeless(self) -> bool:
        """Whether it does not finish."""
        return self.policy != "drop_replica" and not self.expected() < LONGEST * self.axis.end


def campaign(table: CampaignTable, job: Job) -> Campaign:
    """The campaign that a table describes for a job. Raises :class:`ScenarioError` naming the field."""
    steps = steps_of(table, job)
    work = steps * job.step_s
    stops = tuple(_stops(table))
    causes = causes_of(table, job)
    check(table, job, causes)
    tiers = tuple(_tier(table, job, i, work, causes) for i in range(len(table.checkpoints)))
    evaluations = tuple(_evaluations(table, job))
    laid = axis(work, [tier.save for tier in tiers], evaluations)
    detection = table.detection
    recovery = table.recovery
    return Campaign(
        job=job,
        steps=steps,
        axis=laid,
        causes=causes,
        tiers=tiers,
        usable=tuple(_usable(cause, tiers) for cause in causes),
        policy=recovery.policy,
        report=detection.report or NOTHING,
        timeout=detection.timeout or NOTHING,
        locate=detection.locate or NOTHING,
        replace=recovery.replace or NOTHING,
        restart=recovery.restart or NOTHING,
        spares=table.nodes.spares,
        slowdowns=tuple(_slowdowns(table, job)),
        stops=stops,
        evaluations=evaluations,
    )


def steps_of(table: CampaignTable, job: Job) -> float:
    """How many steps are trained. Raises :class:`ScenarioError`."""
    if table.steps is not None:
        return float(table.steps)
    if table.duration is not None:
        return float(table.duration) / job.step_s
    if job.tokens_per_step is None:
        raise ScenarioError("tokens of a model that has none; write steps (at $.campaign.tokens)")
    return math.ceil((table.tokens or 0.0) / job.tokens_per_step)


def _work(every: Any, job: Job) -> float:
    """Training time [s] between two of what is done every so often: whole steps, one at least."""
    steps = every if every.unit == "steps" else max(1.0, round(every / job.step_s))
    return float(steps) * job.step_s


def _tier(table: CampaignTable, job: Job, i: int, work: float, causes: tuple[Cause, ...]) -> SaveTier:
    checkpoint = table.checkpoints[i]
    field_path = f"$.campaign.checkpoints[{i}]"
    nbytes = job.parameters * (checkpoint.bytes_per_parameter or job.bytes_per_parameter)
    given_s = checkpoint.write if checkpoint.asynchronous or checkpoint.write is not None else checkpoint.stall
    write = _time(table, given_s, nbytes, "write", field_path)
    stall = _stall(table, checkpoint, job, nbytes, write, field_path)
    load = checkpoint.load if checkpoint.load is not None else Duration(_time(table, None, nbytes, "read", field_path))
    interval = _work(checkpoint.every, job)
    if checkpoint.every.unit == "best":
        rate = sum(c.expected(work) for c in causes if _needs(table, c, checkpoint)) / work
        interval = job.step_s * max(1.0, round(best_interval(stall, 1.0 / rate) / job.step_s)) if rate else work
    if max(stall, write) > interval:
        longest = max(stall, write)
        raise ScenarioError(
            f"a checkpoint of {longest:,.1f} s is longer than its interval of {interval:,.1f} s; "
            f"save less often (at {field_path}.every)"
        )
    return SaveTier(checkpoint.tier, SaveKind(min(interval, work), stall, write), load)


def _time(table: CampaignTable, given_s: float | None, nbytes: float, direction: str, field_path: str) -> float:
    """Seconds to write or read a checkpoint: what is said, or what the storage takes."""
    if given_s is not None:
        return float(given_s)
    if table.storage is None:
        name = "load" if direction == "read" else "write"
        raise ScenarioError(f"how long does it take? write {name}, or a table [campaign.storage] (at {field_path})")
    return nbytes / float(getattr(table.storage, direction))


def _stall(
    table: CampaignTable, checkpoint: Checkpoint, job: Job, nbytes: float, write: float, field_path: str
) -> float:
    if checkpoint.stall is not None:
        return float(checkpoint.stall)
    barrier = 0.0 if table.storage is None else float(table.storage.barrier or 0)
    if not checkpoint.asynchronous:
        return write + barrier
    if table.storage is None or table.storage.copy is None:
        raise ScenarioError(
            f"how long does training stand still? write stall, or campaign.storage.copy (at {field_path})"
        )
    return nbytes / (job.gpus * table.storage.copy) + barrier


def _needs(table: CampaignTable, cause: Cause, checkpoint: Checkpoint) -> bool:
    """Whether, of all kinds of saves, it is this one that a failure of a cause falls back to."""
    tiers = [tier.tier for tier in table.checkpoints if tier.tier in SURVIVORS.get(cause.scope, ("storage",))]
    order = ("memory", "local", "storage")
    return bool(tiers) and min(tiers, key=order.index) == checkpoint.tier


def _usable(cause: Cause, tiers: tuple[SaveTier, ...]) -> tuple[int, ...]:
    """Tiers that are there after a failure of a cause. Raises :class:`ScenarioError` for none."""
    names = SURVIVORS.get(cause.scope, ("storage",))
    usable = tuple(i for i, tier in enumerate(tiers) if tier.name in names)
    if not usable:
        raise ScenarioError(
            f"no checkpoint survives {cause.name!r}, which takes a {cause.scope}; add one with "
            'tier = "storage" (at $.campaign.checkpoints)'
        )
    return usable


def _evaluations(table: CampaignTable, job: Job) -> Iterator[tuple[float, float]]:
    for stop in table.calendar:
        if stop.kind == "evaluation":
            yield _work(stop.every, job), float(stop.lasts or 0)


def _slowdowns(table: CampaignTable, job: Job) -> Iterator[Slowdown]:
    for i, slowdown in enumerate(table.degraded):
        factor = job.slower[slowdown.name] if slowdown.factor is None else slowdown.factor
        scale = life_of(slowdown.rate, table) / units_of(slowdown.rate, table, job, f"$.campaign.degraded[{i}].rate")
        yield Slowdown(slowdown.name, scale, slowdown.lasts, 1.0 - 1.0 / max(factor, 1.0))


def _stops(table: CampaignTable) -> Iterator[PlannedStop]:
    for i, stop in enumerate(table.calendar):
        field_path = f"$.campaign.calendar[{i}].every"
        if stop.every.unit == "best" or (stop.kind == "maintenance" and stop.every.unit != "time") or not stop.every:
            right = "elapsed time" if stop.kind == "maintenance" else "steps or training time"
            raise ScenarioError(
                f"every = {str(stop.every)!r} of {stop.kind}: write {right} above zero (at {field_path})"
            )
        if stop.kind == "maintenance":
            yield PlannedStop(stop.name, float(stop.every), float(stop.lasts or 0))
