"""The constants of kinds, learned from the published tables of many machines: what a machine that none saw gets.

Every machine may differ from its kind as a whole (a factor of :mod:`clustersim.collectives.fitted.priors`), so that one
operator's slow host does not become everybody's. What all machines have more of, though, is their kind's, and has a
factor of its own: without one each would be slower than the documents by itself, and a machine that none saw not at
all. What is left moves the documented values, which are taken to be surer for the kind than for any one machine.
Leaving machines out costs one linear solve each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.calibrate.fit.nccl import MeasuredCollective, NcclTimes
from clustersim.calibrate.fit.solve import weights
from clustersim.collectives.costs import costs_of
from clustersim.collectives.fitted.bayes import STEP, solved
from clustersim.collectives.fitted.machine import moved_costs
from clustersim.collectives.fitted.priors import Factor, priors
from clustersim.collectives.nccl_backend import seconds_of
from clustersim.core.arrays import Bools, Floats
from clustersim.core.costs import COSTS, CommunicationCosts, flat, most_of, overlaid

SURE = 0.4
"""A documented value is this much surer for a kind than for one machine of it."""

WIDE = 1.5
WIDEST = 0.45
"""Machines of one kind are let differ by so many times their prior spread, or so much, so that none pulls its kind."""

NOISE = 0.05
"""|ln(predicted / measured)| from which on an error counts by its size, not by its square."""

ROUNDS = 5


@dataclass(frozen=True, eq=False)
class LearnedConstants:
    """Constants learned from all rows, and what it takes to leave some of them out.

    Parameters
    ----------
    at : (k,) ln(constant / documented value), first of all priors, then of the factors that machines have in common,
        then of each machine's.
    slopes : (n, k). errors : (n,) ln(predicted / measured). weight : (n,). prior : (k,) inverse variances.
    """

    at: Floats
    slopes: Floats
    errors: Floats
    weight: Floats
    prior: Floats

    def without(self, held_out: Bools) -> dict[str, float]:
        """The constants that the other rows make most likely, by flat name."""
        weight = np.where(held_out, 0.0, self.weight)
        step, _ = solved(self.slopes, self.errors, weight, self.at, self.prior)
        return _values(self.at + step)


def learn(rows: Sequence[MeasuredCollective], machines: Sequence[str]) -> LearnedConstants:
    """Fit the constants of kinds to rows of many machines; ``machines`` : (n,) whose row it is."""
    tables = _Tables(rows, machines)
    spread = SURE * np.array([prior.spread for prior in priors().constants.values()])
    common = SURE * np.array([factor.spread for factor in _common()])
    of_factors = np.minimum(WIDE * np.array([factor.spread for factor in priors().factors.values()]), WIDEST)
    prior = np.concatenate([spread**-2.0, common**-2.0, np.tile(of_factors**-2.0, len(tables.names))])
    point = np.zeros(len(prior))
    for _ in range(ROUNDS):
        times_here = tables.log_times(point)
        errors = times_here - tables.measured
        slopes = tables.slopes(point, times_here)
        # The soft L1 loss as weights: a series of n sizes counts as sqrt(n) rows, an error far off by its size.
        weight = tables.weight / (NOISE**2 * np.sqrt(1.0 + (errors / NOISE) ** 2))
        step, _ = solved(slopes, errors, weight, point, prior)
        if np.abs(step).max() < 1e-2:
            break
        point = point + step
    return LearnedConstants(point, slopes, errors, weight, prior)


def _common() -> list[Factor]:
    """Factors that machines have in common."""
    return [factor for factor in priors().factors.values() if factor.common]


def _of_kinds() -> int:
    """How many numbers are of no machine: constants, and the factors that machines have in common."""
    return len(priors().constants) + len(_common())


def _values(point: Floats) -> dict[str, float]:
    constants = priors().constants
    moves = np.array([[factor.moves(name) for factor in _common()] for name in constants])
    moved = np.exp(point[: len(constants)] + moves @ point[len(constants) : _of_kinds()]).tolist()
    values = {name: constants[name].value * by for name, by in zip(constants, moved, strict=True)}
    return {name: value if "generation" in name else min(value, most_of(name)) for name, value in values.items()}


def with_learned(costs: CommunicationCosts, values: Mapping[str, float]) -> CommunicationCosts:
    """A machine's constants with those of its kind learned anew; what its own file says of it stays."""
    usual = flat(COSTS)
    own = flat(costs)
    return overlaid(costs, {name: value for name, value in values.items() if own[name] == usual[name]})


class _Tables:
    """Rows by machine, and their times with constants moved."""

    def __init__(self, rows: Sequence[MeasuredCollective], machines: Sequence[str]) -> None:
        self.rows = rows
        self.names = tuple(dict.fromkeys(machines))
        self.machine = np.array([self.names.index(machine) for machine in machines])
        self.measured = np.log(np.array([row.seconds for row in rows]))
        series = NcclTimes(tuple(rows)).series
        # Sizes of one series are wrong together, and so are one operator's: he counts by the root of their number.
        several = [len({series[i] for i in np.flatnonzero(self.machine == m).tolist()}) for m in range(len(self.names))]
        self.weight = weights(series) * np.array(several)[self.machine] ** -0.5
        self.parts: dict[tuple[int, int], tuple[CommunicationCosts, list[int]]] = {}
        for i, row in enumerate(rows):
            costs = costs_of(row.choice.group)
            self.parts.setdefault((int(self.machine[i]), id(costs)), (costs, []))[1].append(i)

    def log_times(self, point: Floats) -> Floats:
        """(n,) ln(seconds)."""
        values = _values(point)
        factors = point[_of_kinds() :].reshape(-1, len(priors().factors))
        out = np.zeros(len(self.rows))
        for (machine, _), (base, row_indices) in self.parts.items():
            costs = moved_costs(with_learned(base, values), (), factors[machine])
            out[row_indices] = np.log(list(seconds_of((self.rows[i].choice for i in row_indices), costs)))
        return out

    def slopes(self, point: Floats, times_here: Floats) -> Floats:
        """(n, k) by each constant and by each machine's factors."""
        columns = np.zeros((len(self.rows), len(point)))
        n = _of_kinds()
        factors = len(priors().factors)
        unit = np.eye(len(point))
        for i in range(n):
            columns[:, i] = (times_here - self.log_times(point - STEP * unit[i])) / STEP
        for j in range(factors):  # a factor moves its own machine's rows alone, so all machines move at once
            every = [n + m * factors + j for m in range(len(self.names))]
            moved = (times_here - self.log_times(point - STEP * unit[every].sum(axis=0))) / STEP
            columns[np.arange(len(self.rows)), np.array(every)[self.machine]] = moved
        return columns
