"""A plan's front with failures: each option's whole training played, and what of their differences is failure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from msgspec import structs

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.core.units import DAY, HOUR
from clustersim.scenario import Scenario
from clustersim.studies.campaign import ReplicaRuns, play
from clustersim.studies.campaign.job import Job, campaign
from clustersim.studies.campaign.ledger import Percentiles, percentiles
from clustersim.studies.campaign.of_scenario import job_at, job_of, table_of
from clustersim.studies.campaign.whatif import of_rate
from clustersim.studies.plan.options import SearchResult, title
from clustersim.studies.plan.pareto import dominates
from clustersim.studies.plan.rows import ChosenRow, PlanAnswer, PlannedTraining
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.plan.verdict import verdict

REPLICAS = 400


def with_campaign(said: PlanAnswer, plan: PlanFile, searched: SearchResult | None = None) -> PlanAnswer:
    """A plan's answer with the ``campaign`` of each option of its front, and ``failures``; the same where the plan
    names no campaign.

    Days and USD of the front and of each machine and size are then the middle of these plays, in the verdict too where
    the search is given: a price that leaves failures out is nobody's.
    """
    if plan.campaign is None:
        return said
    played = {row.in_full: _played(row, plan) for row in _chosen_rows(said)}
    rows = said.front
    trainings = [played[row.in_full] for row in rows]
    trainings = [
        structs.replace(training, beaten_by=_beaten(i, rows, trainings)) for i, training in enumerate(trainings)
    ]
    front = [_counted(row, training) for row, training in zip(rows, trainings, strict=True)]
    places = [
        place if place.best is None else structs.replace(place, best=_counted(place.best, played[place.best.in_full]))
        for place in said.places
    ]
    answer = structs.replace(said, front=front, places=places, failures=list(_sentences(rows, trainings)))
    return answer if searched is None else structs.replace(answer, verdict=verdict(plan, _failing(searched, played)))


def _chosen_rows(said: PlanAnswer) -> list[ChosenRow]:
    """Options of the front and of places, once each."""
    rows = [*said.front, *(place.best for place in said.places if place.best is not None)]
    return list({row.in_full: row for row in rows}.values())


def _counted(row: ChosenRow, training: PlannedTraining) -> ChosenRow:
    """An option with days and USD of its played training; as it is where that was not played."""
    if training.days is None:
        return structs.replace(row, campaign=training)
    usd = None if training.usd is None else training.usd.p50
    more = 1.0 if not usd or not row.usd else usd / row.usd
    each = None if row.usd_per_1e9 is None else row.usd_per_1e9 * more
    return structs.replace(row, campaign=training, days=training.days.p50, usd=usd, usd_per_1e9=each)


def _failing(searched: SearchResult, played: Mapping[str, PlannedTraining]) -> SearchResult:
    """A search whose played options take as long and cost as much as with failures."""
    options = list(searched.options)
    for option in searched.options:
        training = played.get(title(option.candidate))
        if training is None or training.days is None:
            continue
        usd = None if training.usd is None else training.usd.p50
        rate, cost, gpus, energy = option.objectives
        cost *= 1.0 if not usd or not option.usd else usd / option.usd
        own = {"days": training.days.p50, "usd": usd, "objectives": (rate, cost, gpus, energy)}
        options[option.candidate.number] = structs.replace(option, **own)
    return replace(searched, options=tuple(options))


def _played(row: ChosenRow, plan: PlanFile, rate: float = 1.0) -> PlannedTraining:
    """An option's training, with failures ``rate`` times as often."""
    try:
        loaded = scenario.from_table(row.scenario, row.path)
        loaded = replace(loaded, file=structs.replace(loaded.file, campaign=plan.campaign))
        job = _job(row, loaded)
        job_campaign = of_rate(campaign(table_of(loaded), job), rate)
        if job_campaign.hopeless:
            return PlannedTraining(wrong="does not finish: failures come too often for its recovery")
        runs = play(job_campaign, REPLICAS, seed=0)
    except ScenarioError as error:
        return PlannedTraining(wrong=str(error))
    if not runs.finished.all():
        return PlannedTraining(wrong="does not always finish")
    deadline = plan.limits.deadline
    return PlannedTraining(
        days=percentiles(runs.elapsed / DAY),
        usd=_cost(row, job_campaign.spares or 0, job.gpus / job.nodes, runs),
        ideal_days=job_campaign.axis.work / DAY,
        goodput=float(np.median(runs.goodput("effective_training_time"))),
        in_time=None if deadline is None else float((runs.elapsed <= float(deadline)).mean()),
    )


def goodput(row: ChosenRow, plan: PlanFile, rate: float) -> float | None:
    """Effective training time of an option, p50, with failures ``rate`` times as often; None where it does not
    finish."""
    training = _played(row, plan, rate)
    return None if training.wrong else training.goodput


def _job(row: ChosenRow, loaded: Scenario) -> Job:
    """Of the step that the search has found, unless a step varies or is slow for a while: then it is run."""
    slow = any(slowdown.factor is None for slowdown in table_of(loaded).degraded)
    varies = slow or loaded.file.run.variation is not None or loaded.file.run.jitter
    if varies or not row.tokens_per_step or row.step_s is None:
        return job_of(loaded)[0]
    return job_at(loaded, row.step_s, row.tokens_per_step)


def _cost(row: ChosenRow, spares: int, gpus_per_node: float, runs: ReplicaRuns) -> Percentiles | None:
    """Of the option's GPUs and of spares, at the plan's own price."""
    if row.usd is None or not row.days:
        return None
    hourly = row.usd / (row.days * DAY / HOUR) * (1.0 + spares * gpus_per_node / row.gpus)
    return percentiles(hourly * runs.elapsed / HOUR)


def _beaten(i: int, rows: Sequence[ChosenRow], trainings: Sequence[PlannedTraining]) -> str:
    """Another option that is better in days, cost, GPUs and energy, failures counted."""
    objectives = _objectives(rows[i], trainings[i])
    names = (
        rows[j].option
        for j in range(len(rows))
        if j != i
        and trainings[j].days is not None
        and objectives is not None
        and dominates(_objectives(rows[j], trainings[j]) or (), objectives)
    )
    return str(next(names, ""))


def _objectives(row: ChosenRow, training: PlannedTraining) -> tuple[float, ...] | None:
    if training.days is None:
        return None
    usd = np.inf if training.usd is None else training.usd.p50
    return training.days.p50, usd, float(row.gpus), (row.kwh_per_1e9 or 0.0) / training.goodput


def _sentences(rows: Sequence[ChosenRow], trainings: Sequence[PlannedTraining]) -> Iterator[str]:
    """Of each option and the next: how far apart they are, and how much of that is failure."""
    finishing = [(row, training) for row, training in zip(rows, trainings, strict=True) if training.days is not None]
    for (a, first), (b, second) in pairwise(finishing):
        days = (second.days.p50 if second.days else 0.0) - (first.days.p50 if first.days else 0.0)
        steps = second.ideal_days - first.ideal_days
        yield (
            f"{b.option} takes {days:+,.1f} days against {a.option}: {steps:+,.1f} by its steps and "
            f"{days - steps:+,.1f} by failures, saves and stops"
        )
    for row, training in zip(rows, trainings, strict=True):
        if training.beaten_by:
            yield f"with failures {row.option} is no longer worth having: {training.beaten_by} is better in everything"
        if training.wrong:
            yield f"{row.option}: no campaign ({training.wrong})"
