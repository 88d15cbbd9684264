"""What a planner asks of a campaign: each question is the same campaign with one thing changed, played."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from clustersim.core.units import DAY
from clustersim.scenario.file.campaign_units import Duration
from clustersim.studies.campaign.axis import SaveKind, axis
from clustersim.studies.campaign.job import Campaign, SaveTier
from clustersim.studies.campaign.ledger import ReplicaRuns
from clustersim.studies.campaign.many import play
from clustersim.studies.campaign.renewal import best_interval, efficiency

REPLICAS = 300
"""Of each question."""
PEERS_STALL = 1.84
"""[s] of an in-memory save, the longest of GEMINI's that ByteRobust measured (arXiv:2509.16293, table 8)."""
FACTORS = (1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 8.0)


@dataclass(frozen=True)
class QuestionAnswer:
    """What became of a question: days p50 and p95, None where it does not finish, and effective training time, p50."""

    question: str
    days_p50: float | None
    days_p95: float | None
    effective_training_time: float
    finishes: bool = True


@dataclass(frozen=True)
class KnobPoint:
    """One value of a knob: the effective training time that was simulated, p50 and p5, and the closed form's."""

    x: float
    simulated: float
    worst: float
    closed_form: float


def asked(c: Campaign) -> Iterator[tuple[str, Campaign]]:
    """Questions that this campaign can be asked."""
    save = c.tiers[0].save
    yield "save twice as often", with_interval(c, save.interval / 2)
    yield "save half as often", with_interval(c, save.interval * 2)
    if save.stall > 0:
        yield "save for free", with_saves(c, stall=0.0)
    if any(cause.silent for cause in c.causes):
        yield "a timeout of a third", replace(c, timeout=_times(c.timeout, 1 / 3))
        yield "a timeout three times as long", replace(c, timeout=_times(c.timeout, 3.0))
    if c.spares is not None:
        yield "no spare nodes", replace(c, spares=0)
        yield "twice the spare nodes", replace(c, spares=2 * c.spares)
    yield (
        "find failures at once",
        replace(c, report=_times(c.report, 0), timeout=_times(c.timeout, 0), locate=_times(c.locate, 0)),
    )
    yield "restart twice as fast", replace(c, restart=_times(c.restart, 0.5))
    yield "load twice as fast", replace(c, tiers=tuple(replace(tier, load=_times(tier.load, 0.5)) for tier in c.tiers))
    yield from _about_tiers(c)
    yield from _about_policy(c)
    if c.job.swapped:
        yield "swap the slowest 0.5 % of hosts", replace(c, job=replace(c.job, machines=c.job.swapped))
    if c.job.machines != (1.0,) or c.slowdowns:
        yield "nothing is ever slow", replace(c, job=replace(c.job, machines=(1.0,), step_cv=0.0), slowdowns=())
    if len(c.causes) > 1:
        worst = max(c.causes, key=lambda cause: cause.expected(c.axis.end))
        yield f"without failures of {worst.name}", _without(c, worst.name)
    for cause in c.causes:
        if cause.name.upper() == "NIC":
            yield "one more nine of the NIC", seldom(c, cause.name, 10.0)
    yield "half as many failures", of_rate(c, 0.5)


def _about_tiers(c: Campaign) -> Iterator[tuple[str, Campaign]]:
    """Checkpoints elsewhere. A save to peers stalls as long as was measured, and best often."""
    if all(tier.name == "storage" for tier in c.tiers):
        near = with_peers(c)
        yield "save to peers' memory as well", near
    else:
        near = c
    if any(tier.name == "memory" for tier in near.tiers) and any(
        cause.scope in ("rack", "switch") for cause in c.causes
    ):
        yield "a second replica in another rack", with_second_domain(near)


def _about_policy(c: Campaign) -> Iterator[tuple[str, Campaign]]:
    """Elastic against rigid, where there are copies to go on with."""
    if c.policy in ("drop_replica", "shrink"):
        yield "stop at every failure", replace(c, policy="replace")
    if c.policy != "drop_replica" and c.job.copies > 1:
        yield "go on without the replica", replace(c, policy="drop_replica")
    if c.policy == "replace" and c.job.copies > 1 and c.spares is not None:
        yield "go on smaller while no spare is free", replace(c, policy="shrink")


def answers(c: Campaign, seed: int) -> list[QuestionAnswer]:
    """Every question answered, beside the campaign as it is."""
    return [_answer(question, changed, seed) for question, changed in [("as it is", c), *asked(c)]]


def over_interval(c: Campaign, seed: int) -> list[KnobPoint]:
    """Intervals of the first kind of save from an eighth to eight times the campaign's own [s]."""
    save = c.tiers[0].save
    taus = (save.interval * factor for factor in FACTORS)
    return [_point(tau, with_interval(c, tau), seed) for tau in taus if save.write <= tau <= c.axis.work]


def over_nodes(c: Campaign, seed: int) -> list[KnobPoint]:
    """Nodes of the job from an eighth to eight times, each of which fails as often, with the best interval of each size
    and saves that take as long."""
    sizes = (c.job.nodes * factor for factor in FACTORS)
    return [_point(n, of_size(c, int(n)), seed) for n in sizes if n >= 1 and n.is_integer()]


def largest_job(points: Sequence[KnobPoint], goodput: float = 0.9) -> float | None:
    """Nodes at which the effective training time falls below this, between points; None where it does not.

    >>> largest_job([KnobPoint(10, 0.95, 0.9, 0.9), KnobPoint(1000, 0.85, 0.8, 0.8)])
    100.0
    """
    for a, b in pairwise(points):
        if a.simulated >= goodput > b.simulated:
            share = (a.simulated - goodput) / (a.simulated - b.simulated)
            return float(round(math.exp(math.log(a.x) + share * math.log(b.x / a.x)), 6))
    return None


def with_interval(c: Campaign, interval: float) -> Campaign:
    """Saves of the first kind so often [s]; no write may take longer."""
    return _laid(c, interval=min(max(interval, c.tiers[0].save.write, c.tiers[0].save.stall), c.axis.work))


def with_saves(c: Campaign, stall: float) -> Campaign:
    """Saves of the first kind for which training stands still so long [s], at the best interval."""
    interval = max(best_interval(stall, c.mtbf), c.tiers[0].save.write, c.job.step_s)
    return _laid(c, interval=min(interval, c.axis.work), stall=stall)


def with_peers(c: Campaign) -> Campaign:
    """Saves to peers' memory beside the others, at the best interval."""
    hit = sum(cause.expected(c.axis.end) for cause in c.causes if cause.scope in ("node", "job"))
    interval = best_interval(PEERS_STALL, c.axis.end / hit) if hit else c.axis.work
    interval = min(max(interval, c.job.step_s, PEERS_STALL), c.axis.work)
    tiers = (*c.tiers, SaveTier("memory", SaveKind(interval, PEERS_STALL, PEERS_STALL), Duration(PEERS_STALL)))
    usable = tuple(
        (*usable_tiers, len(c.tiers)) if cause.scope in ("node", "job") else usable_tiers
        for cause, usable_tiers in zip(c.causes, c.usable, strict=True)
    )
    laid = axis(c.axis.work, [tier.save for tier in tiers], c.evaluations)
    return replace(c, tiers=tiers, usable=usable, axis=laid)


def with_second_domain(c: Campaign) -> Campaign:
    """Saves to memory that are there after the loss of a rack or a switch, too: each is kept in two of them."""
    memory = [i for i, tier in enumerate(c.tiers) if tier.name == "memory"]
    return replace(c, usable=tuple(tuple(sorted({*usable_tiers, *memory})) for usable_tiers in c.usable))


def seldom(c: Campaign, name: str, times: float) -> Campaign:
    """Failures of a cause so many times as rare."""
    causes = (
        replace(cause, life=cause.life * times ** (1.0 / cause.shape)) if cause.name == name else cause
        for cause in c.causes
    )
    return replace(c, causes=tuple(causes))


def of_rate(c: Campaign, factor: float) -> Campaign:
    """All causes so many times as often."""
    return replace(
        c, causes=tuple(replace(cause, life=cause.life * factor ** (-1.0 / cause.shape)) for cause in c.causes)
    )


def of_size(c: Campaign, nodes: int) -> Campaign:
    """The job on another number of nodes, with the best interval."""
    factor = nodes / c.job.nodes
    replicas, copies = (max(1, round(n * factor)) for n in (c.job.replicas, c.job.copies))
    job = replace(
        c.job,
        nodes=nodes,
        gpus=round(c.job.gpus * factor),
        replicas=replicas,
        copies=copies,
        machines=_slowest_of(c.job.machines, factor),
    )
    spares = None if c.spares is None else math.ceil(c.spares * factor)
    grown = replace(c, causes=tuple(cause.many(factor) for cause in c.causes), job=job, spares=spares)
    return with_saves(grown, c.tiers[0].save.stall)


def _slowest_of(machines: Sequence[float], factor: float) -> tuple[float, ...]:
    """Mean steps on machines so many times as large, each as slow as the slowest of so many: quantiles of ``F^factor``
    where those of this size have the law F."""
    u = ((np.arange(len(machines)) + 0.5) / len(machines)) ** (1.0 / factor)
    return tuple(np.quantile(machines, u, method="inverted_cdf").tolist())


def _laid(c: Campaign, **changes: float) -> Campaign:
    tiers = (replace(c.tiers[0], save=replace(c.tiers[0].save, **changes)), *c.tiers[1:])
    return replace(c, tiers=tiers, axis=axis(c.axis.work, [tier.save for tier in tiers], c.evaluations))


def _without(c: Campaign, name: str) -> Campaign:
    remaining = [i for i, cause in enumerate(c.causes) if cause.name != name]
    return replace(c, causes=tuple(c.causes[i] for i in remaining), usable=tuple(c.usable[i] for i in remaining))


def _times(duration: Duration, factor: float) -> Duration:
    return Duration(duration * factor, duration.law, duration.sigma)


def _played(c: Campaign, seed: int) -> ReplicaRuns | None:
    return None if c.hopeless else play(c, REPLICAS, seed)


def _answer(question: str, c: Campaign, seed: int) -> QuestionAnswer:
    runs = _played(c, seed)
    if runs is None or not runs.finished.all():
        return QuestionAnswer(question, None, None, 0.0, finishes=False)
    p50, p95 = np.percentile(runs.elapsed / DAY, [50, 95])
    return QuestionAnswer(question, float(p50), float(p95), float(np.median(runs.goodput("effective_training_time"))))


def _point(x: float, c: Campaign, seed: int) -> KnobPoint:
    save = c.tiers[0].save
    runs = _played(c, seed)
    law = efficiency(c.mtbf, save.stall, c.recovery, save.interval) if math.isfinite(c.mtbf) else 1.0
    if runs is None:
        return KnobPoint(x, 0.0, 0.0, law)
    worst, middle = np.percentile(runs.goodput("effective_training_time"), [5, 50])
    return KnobPoint(x, float(middle), float(worst), law)
