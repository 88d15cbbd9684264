"""Causes of failure: shipped sets with their sources, and each as one process of the whole job.

Units that failed are new again: a superposition of renewal processes with Weibull lives. Where the hazard is constant
no unit is older than another, and failures are Poisson. Where it falls (shape below 1) a unit that was replaced or
repaired is as likely to fail as any was on the first day: with shape 0.7 a tenth more failures in a third of a mean
life than if it went on as old as the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Floats
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.paths import data_path
from clustersim.core.units import quantity
from clustersim.scenario.file.campaign_schema import CampaignTable, FailureCause
from clustersim.scenario.file.campaign_units import Duration, Rate
from clustersim.scenario.file.reading import convert, read_toml

FILE = "campaign_failures.toml"
POINTS = 1000
"""Of the renewal function's grid: simulated counts agree to 1 %, for shapes from 0.5 to 2."""


class CauseSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A shipped set of causes: what it is of, in words, and where its figures are from."""

    title: str
    source: str
    failures: tuple[FailureCause, ...]


class _CauseSets(msgspec.Struct, frozen=True):
    sets: dict[str, CauseSet]


@lru_cache(maxsize=1)
def sets() -> dict[str, CauseSet]:
    """Every shipped set by name."""
    path = data_path("data") / FILE
    return convert({"sets": read_toml(path)}, _CauseSets, FILE, dec_hook=quantity).sets


def renewals(x: float, shape: float) -> float:
    """Mean number of failures of a unit until x, in scales of its Weibull life: ``m = F + integral m dF``, by Xie's
    midpoint rule (M. Xie, Communications in Statistics 1989).

    >>> round(renewals(2.0, 1.0), 3)
    2.0
    """
    if x <= 0:
        return 0.0
    grid = np.linspace(0.0, x, POINTS + 1)
    step = grid[1]
    cdf = -np.expm1(-(grid**shape))
    half = -np.expm1(-((grid[:-1] + step / 2) ** shape))
    renewed = np.zeros(POINTS + 1)
    gain = np.zeros(POINTS + 1)
    for i in range(1, POINTS + 1):
        renewed[i] = (cdf[i] + half[i - 1 : 0 : -1] @ gain[1:i] - half[0] * renewed[i - 1]) / (1.0 - half[0])
        gain[i] = renewed[i] - renewed[i - 1]
    return float(renewed[-1])


class UnitLives:
    """When units fail, for many replicas.

    due : (replicas, units) [s], the next failure of each unit behind ``until``. times : (replicas, n) [s], failures
    until then, ascending, with infinity behind them. at : (replicas,) how many of them have been told.
    """

    def __init__(self, life: float, shape: float, units: int, n: int, rng: np.random.Generator, end: float) -> None:
        self.life = life
        self.shape = shape
        self.rng = rng
        self.end = end
        self.due = life * rng.weibull(shape, (n, units))
        self.times, self.at, self.until = np.full((n, 1), np.inf), np.zeros(n, dtype=np.intp), 0.0

    def following(self, i: npt.NDArray[np.intp]) -> Floats:
        """(n,) [s]: the next failure of each of these replicas; infinite behind ``end``."""
        while self.until < self.end and np.isinf(self.times[i, self.at[i]]).any():
            self._until(min(self.end, max(2.0 * self.until, self.end / 32.0)))
        next_times: Floats = self.times[i, self.at[i]]
        self.at[i] += np.isfinite(next_times)
        return next_times

    def _until(self, until: float) -> None:
        """Know of every failure until then."""
        rows = []
        times = []
        row, unit = np.nonzero(self.due < until)
        while row.size:
            now = self.due[row, unit]
            rows.append(row)
            times.append(now)
            again = now + self.life * self.rng.weibull(self.shape, row.size)
            self.due[row, unit] = again
            row = row[again < until]
            unit = unit[again < until]
        self.until = until
        if not rows:
            return
        every = np.concatenate(rows)
        when = np.concatenate(times)
        order = np.lexsort((when, every))
        count = np.bincount(every, minlength=len(self.times))
        place = np.arange(len(every)) - np.repeat(np.cumsum(count) - count, count)
        new = np.full((len(self.times), int(count.max()) + 1), np.inf)
        new[every[order], place] = when[order]
        self.times = np.sort(np.hstack([self.times, new]), axis=1)


@dataclass(frozen=True)
class Cause:
    """One way in which the whole job fails: by the first of its units whose life is over. A unit that failed is new
    again, repaired or replaced.

    Parameters
    ----------
    life : [s], the scale of a unit's Weibull life; infinite for one that never happens. shape : of it. units : nodes,
        GPUs, racks or switches; 1 for a cause of the whole job.
    scope, silent, detect, repair : as in the table, with its defaults. loses : nodes.
    """

    name: str
    life: float
    shape: float = 1.0
    units: int = 1
    scope: str = "node"
    loses: int = 1
    silent: float = 0.0
    detect: Duration | None = None
    repair: Duration | None = None

    @property
    def scale(self) -> float:
        """Of the job's first failure [s], Weibull with the same shape: ``life units^(-1/shape)``."""
        return float(self.life * self.units ** (-1.0 / self.shape))

    @property
    def ages(self) -> bool:
        """Whether it matters how old a unit is."""
        return self.shape != 1.0 and math.isfinite(self.life)

    def expected(self, time: float) -> float:
        """Failures expected in so long [s]."""
        return self.units * renewals(time / self.life, self.shape) if self.ages else float(time / self.scale)

    def lives(self, n: int, rng: np.random.Generator, end: float) -> UnitLives:
        """Failures of n replicas until ``end`` [s], one after the other."""
        return UnitLives(self.life, self.shape, self.units, n, rng, end)

    def many(self, factor: float) -> Cause:
        """The same of so many times as many units; of a whole job, so many times as often."""
        units = max(1, round(self.units * factor))
        rest = self.units * factor / units
        return replace(self, units=units, life=self.life * rest ** (-1.0 / self.shape))


def causes_of(table: CampaignTable, job: Any) -> tuple[Cause, ...]:
    """The causes of a campaign. Raises :class:`ScenarioError` for an unknown set, or racks of no size."""
    every = failures_of(table)
    return tuple(_cause(failure, table, job, f"$.campaign.failures[{i}]") for i, failure in enumerate(every))


def failures_of(table: CampaignTable) -> tuple[FailureCause, ...]:
    """As a table says them, or of the shipped set that it names. Raises :class:`ScenarioError` for an unknown set."""
    failures = table.failures
    if not isinstance(failures, str):
        return failures
    if failures not in sets():
        raise ScenarioError(f"no failures {failures!r}; {nearest(failures, sets())} (at $.campaign.failures)")
    return sets()[failures].failures


def _cause(failure: FailureCause, table: CampaignTable, job: Any, field: str) -> Cause:
    units = 1 if failure.scope == "job" else _nodes_of(failure.scope, table, f"{field}.scope")
    many = units_of(failure.rate, table, job, f"{field}.rate")
    return Cause(
        failure.name,
        life_of(failure.rate, table, failure.shape),
        failure.shape,
        many,
        failure.scope,
        0 if failure.scope == "job" else min(units, job.nodes),
        failure.silent,
        failure.detect,
        failure.repair if failure.repair is not None else table.nodes.repair,
    )


def life_of(rate: Rate, table: CampaignTable, shape: float = 1.0) -> float:
    """Scale [s] of a unit's life; infinite at rate 0."""
    per_unit = float(rate) * table.factor
    return 1.0 / per_unit / math.gamma(1.0 + 1.0 / shape) if per_unit > 0 else math.inf


def units_of(rate: Rate, table: CampaignTable, job: Any, field: str) -> int:
    """How many a job has of what a rate is counted of; of nodes of so many GPUs, as many as hold the job's."""
    if rate.gpus:
        return math.ceil(int(job.gpus) / rate.gpus)
    return {"job": 1, "gpu": int(job.gpus)}.get(rate.of) or math.ceil(job.nodes / _nodes_of(rate.of, table, field))


def _nodes_of(unit: str, table: CampaignTable, field: str) -> int:
    """Nodes of a node, rack or switch."""
    size = 1 if unit == "node" else getattr(table.nodes, unit)
    if size is None:
        raise ScenarioError(f"how many nodes has a {unit}? write campaign.nodes.{unit} (at {field})")
    return int(size)


def check(table: CampaignTable, job: Any, causes: Sequence[Cause]) -> None:
    """Spares, timeouts, policies and names that do not go together. Raises :class:`ScenarioError`."""
    spares = table.nodes.spares
    if spares is not None and spares > job.nodes:
        raise ScenarioError(
            f"spares = {spares:,} are more than the job's {job.nodes:,} node(s) (at $.campaign.nodes.spares)"
        )
    if spares is not None and any(cause.loses and cause.repair is None for cause in causes):
        raise ScenarioError(
            "spares run out, so say when lost nodes are back: repair = '2 d' (at $.campaign.nodes.repair)"
        )
    if table.detection.timeout is None and any(cause.silent for cause in causes):
        name = next(cause.name for cause in causes if cause.silent)
        raise ScenarioError(f"nothing reports {name!r}; say when it is noticed (at $.campaign.detection.timeout)")
    if table.recovery.policy in ("drop_replica", "shrink") and job.copies < 2:
        raise ScenarioError(
            f"policy = {table.recovery.policy!r} of a job whose replicas of the model ({job.replicas:,}) keep one copy "
            "of the optimizer states; use 'replace' (at $.campaign.recovery.policy)"
        )
    names = [slowdown.name for slowdown in table.degraded]
    if len(set(names)) < len(names):
        raise ScenarioError("two tables of one name (at $.campaign.degraded)")
