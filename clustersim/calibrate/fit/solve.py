"""Constants from measurements: robust least squares with priors, intervals, and a refusal where the data cannot tell.

With r = ln(predicted / measured) of a row, n the rows of its series and z how many standard deviations of its prior a
constant has moved, what is minimised is

    sum over rows  2 (sqrt(1 + (r / NOISE)^2) - 1) / sqrt(n)   +   sum over constants  z^2

and, over rows that nobody measured but whose time is expected, sum (r / how far expectations are off)^2 / sqrt(n).

The soft L1 loss keeps a warm-up spike or one odd size from pulling a constant far. Rows of a series (one collective,
one algorithm and protocol, one group) share the model's own error, so a series of n sizes counts as sqrt(n)
measurements. Intervals come from the Gauss-Newton Hessian at the solution, so they hold the prior, too; where errors
stay larger than NOISE, rows are taken to be that much less sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.calibrated import Constant
from clustersim.core.ranges import NORMAL_HALF

NOISE = 0.05
"""Usual |ln(predicted / measured)| that no constant can mend: measurements repeat to 1-4 %, the law is no better."""

STEP = 1e-2
"""In standard deviations of a constant's prior, for a finite difference."""

UNFELT = 0.9
"""A constant whose rows, with all else known, leave this much of its prior's spread is not felt by them."""

UNTOLD = 0.85
"""A constant that is left with this much of its prior's spread, all others free, cannot be told apart from them."""

TWINS = 0.95
"""Two constants whose errors are this correlated act as one; the wider is given up where it is wide at all."""

CERTAIN = 1.96
"""Standard deviations of a 95 % interval."""

UNUSED = "no row uses it"
"""Why a constant is refused that has nothing to do with the rows."""

STEPS = 3
"""Single steps tried before the search proper."""

ROUNDS = 4
"""Times that rows of a class that got worse count more before constants are moved less far."""

MORE = 4.0
"""How much more they count each time."""

ALL = "all"
"""The class of all rows."""

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
"""How far all constants are moved, where a class got worse nevertheless."""

NONE_EXPECTED: Floats = np.empty(0)
"""Of a model whose rows were all measured."""

FARTHEST = 4.0
"""Bound of a constant, in standard deviations of its prior."""


@dataclass(frozen=True)
class Knob:
    """A constant that a fit may move.

    Parameters
    ----------
    name : its flat name. default : its value in SI units, above 0.
    spread : standard deviation of ln(value / default) before any measurement is seen.
    most : what it cannot exceed, 1 for a share.
    """

    name: str
    default: float
    spread: float
    most: float = math.inf

    def at(self, z: float) -> float:
        """The constant, ``z`` standard deviations of its prior away from its default."""
        return min(self.default * math.exp(self.spread * z), self.most)


class TimeModel(Protocol):
    """A time model with the rows of a measurement in hand: all that a fit needs to know of it."""

    @property
    def part(self) -> str:
        """``"nccl"``, ``"gloo"`` or ``"mpi"``, as in :class:`clustersim.core.calibrated.Calibration`."""

    @property
    def measured(self) -> Floats:
        """(n,) seconds."""

    @property
    def series(self) -> Sequence[str]:
        """(n,) what each row is one of: rows of one series are wrong together."""

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Constants that may matter on these machines."""

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds with these constants instead of their defaults; only of some rows where ``rows`` says which."""


@dataclass(frozen=True)
class FittedConstant:
    """A constant after a fit.

    Parameters
    ----------
    knob : the constant. value : float, SI. low, high : its 95 % interval; for a refused one that of its prior.
    refused : why the data cannot tell it, so that it keeps its default; empty where it was fitted.
    """

    knob: Knob
    value: float
    low: float
    high: float
    refused: str = ""


@dataclass(frozen=True, eq=False)
class FitResult:
    """All constants of a fit, and the times of its rows, (n,) seconds: measured, and predicted before and after.

    ``share`` : how far constants were moved of the way to where all rows together would have them."""

    part: str
    constants: tuple[FittedConstant, ...]
    measured: Floats
    before: Floats
    after: Floats
    share: float = 1.0

    @property
    def values(self) -> dict[str, float]:
        """Fitted constants by flat name, without the refused."""
        return {name: constant.value for name, constant in self.told.items()}

    @property
    def told(self) -> dict[str, Constant]:
        """The same with their intervals."""
        return {c.knob.name: Constant(c.value, c.low, c.high) for c in self.constants if not c.refused}

    @property
    def refused(self) -> dict[str, str]:
        """Why each of the others is refused, by flat name."""
        return {c.knob.name: c.refused for c in self.constants if c.refused}


def fit(
    model: TimeModel, classes: Sequence[str] = (), before: Floats | None = None, expected: Floats = NONE_EXPECTED
) -> FitResult:
    """Fit those constants of a model that its rows can tell; the one told worst is given up first.

    classes : (n,) of each row, such as how large it is: in none of them are the rows predicted worse after than before.
    Where constants that are best for all rows would do that, the rows of that class count more; where that does not
    help, all constants are moved a part of the way (:attr:`FitResult.share`), or none is.
    before : (n,) seconds that were predicted before; None: those of the constants' defaults. Defaults can be worse than
    other times, and then so may the result be (:func:`worse_classes`).
    expected : (m,) of the model's last m rows, which nobody measured: their times are what was expected before, and
    this is the standard deviation of ln(true / expected). Constants must not leave them without a reason, but they tell
    none, and are no rows of the result.
    """
    problem = _FitProblem(model, before, expected)
    candidates = [_fit(problem)]
    for _ in range(ROUNDS):
        worse = worse_classes(candidates[-1], classes)
        if not worse:
            return candidates[-1]
        problem.count(np.where([row_class in worse for row_class in classes], MORE, 1.0))
        candidates.append(_fit(problem))
    parts = (_part_of(problem, result, share) for result in candidates for share in SHARES)
    return min(
        parts,
        key=lambda r: (
            bool(worse_classes(r, classes)),
            r.share == 0,
            float(np.abs(np.log(r.after / r.measured)).mean()),
        ),
    )


def worse_classes(result: FitResult, classes: Sequence[str]) -> list[str]:
    """Classes whose median |relative error| is larger after than before, in tenths of a percent; :data:`ALL` rows
    together are one."""
    errors = [np.abs(times / result.measured - 1.0) for times in (result.before, result.after)]
    rows_of = {name: np.array([row_class == name for row_class in classes]) for name in dict.fromkeys(classes)}
    rows_of |= {ALL: np.ones(len(result.measured), dtype=bool)} if rows_of else {}
    medians = {name: [round(float(np.median(error[rows])), 3) for error in errors] for name, rows in rows_of.items()}
    return [name for name, (before, after) in medians.items() if after > before]


def _part_of(problem: _FitProblem, result: FitResult, share: float) -> FitResult:
    """The result with every constant moved a share of the way from its default; none is fitted where that is 0."""
    constants = []
    for c in result.constants:
        if not c.refused:
            value = c.knob.at(share * math.log(c.value / c.knob.default) / c.knob.spread)
            refused = "" if share else "a size class would be predicted worse"
            c = FittedConstant(c.knob, value, min(c.low, value), max(c.high, value), refused)
        constants.append(c)
    after = problem.after({c.knob.name: c.value for c in constants if not c.refused})
    return FitResult(result.part, tuple(constants), result.measured, result.before, after, share)


def _fit(problem: _FitProblem) -> FitResult:
    """The fit of all rows, each as it counts."""
    model = problem.model
    refused = {k.name: why for k in model.knobs if (why := problem.unfelt(k))}
    free_knobs = [k for k in model.knobs if k.name not in refused]
    solution = _Solution(np.zeros(0), np.zeros((0, 0)), np.zeros(0))
    start = problem.scan(free_knobs)
    while free_knobs:
        solution = problem.solve(free_knobs, start)
        covariance = solution.covariance(NOISE)
        untold = _untold(free_knobs, covariance)
        if untold is None:
            break
        worst, why = untold
        refused[free_knobs[worst].name] = why
        del free_knobs[worst]
        start = np.delete(solution.z, worst)
    sd = np.sqrt(np.diag(solution.covariance(solution.noise)))
    fitted_constants = {
        k.name: _fitted(k, *estimate) for k, *estimate in zip(free_knobs, solution.z.tolist(), sd.tolist(), strict=True)
    }
    constants = tuple(fitted_constants.get(k.name) or _fitted(k, 0.0, 1.0, refused[k.name]) for k in model.knobs)
    after = problem.after({name: constant.value for name, constant in fitted_constants.items()})
    return FitResult(model.part, constants, model.measured[: problem.n_measured], problem.before, after)


def _fitted(knob: Knob, z: float, sd: float, refused: str = "") -> FittedConstant:
    low, high = (knob.at(z + side * CERTAIN * sd) for side in (-1.0, 1.0))
    return FittedConstant(knob, knob.at(z), low, high, refused)


def _untold(knobs: Sequence[Knob], covariance: Floats) -> tuple[int, str] | None:
    """The constant told least, if it cannot be told (too wide, or wide and one with another), and why."""
    sd = np.sqrt(np.diag(covariance))
    together = np.abs(covariance / np.outer(sd, sd) - np.eye(len(sd)))
    untold = (sd > UNTOLD) | ((together.max(axis=1) > TWINS) & (sd > UNTOLD / 2))
    if not untold.any():
        return None
    index = int(np.argmax(np.where(untold, sd, 0.0)))
    twin = int(np.argmax(together[index]))
    if together[index, twin] < 0.3:
        return index, "the rows hardly depend on it"
    return index, f"the rows cannot tell it from {knobs[twin].name}"


@dataclass(frozen=True, eq=False)
class _Solution:
    """Where a fit ended.

    Parameters
    ----------
    z : (k,) of the constants. jacobian : (n, k) of the measured rows' residuals, in units of :data:`NOISE`, as the loss
    weighs them. errors : (n,) ln(predicted / measured).
    """

    z: Floats
    jacobian: Floats
    errors: Floats

    @property
    def noise(self) -> float:
        """Spread of the errors that are left; not below what was expected."""
        return max(NOISE, float(np.median(np.abs(self.errors))) / NORMAL_HALF) if len(self.errors) else NOISE

    def covariance(self, noise: float) -> Floats:
        """(k, k) of z, for rows that are this uncertain: the inverse of the Gauss-Newton Hessian."""
        rows = self.jacobian * (NOISE / noise)
        return np.asarray(np.linalg.inv(rows.T @ rows + np.eye(len(self.z))), dtype=np.float64)


def _values(knobs: Sequence[Knob], z: Floats) -> dict[str, float]:
    return {k.name: k.at(position) for k, position in zip(knobs, z.tolist(), strict=True)}


def weights(series: Sequence[str]) -> Floats:
    """(n,) what each row counts, so that a series of n rows counts as sqrt(n)."""
    _, which, count = np.unique(list(series), return_inverse=True, return_counts=True)
    return np.asarray(count[which.reshape(-1)] ** -0.5, dtype=np.float64)


class _FitProblem:
    """A model's rows, what each counts, and which of them feel which constant."""

    def __init__(self, model: TimeModel, before: Floats | None, expected: Floats) -> None:
        self.model = model
        self.log_measured = np.log(model.measured)
        self.n_measured = len(self.log_measured) - len(expected)
        self.weight = weights(model.series)
        self.weight[self.n_measured :] *= (NOISE / expected) ** 2
        self.scale: Floats = NOISE / np.sqrt(self.weight)
        self.defaults = model.predict({})
        self.before = self.defaults[: self.n_measured] if before is None else before
        self.feels = {k.name: self._feels(k) for k in model.knobs}

    def count(self, more: Floats) -> None:
        """Let measured rows count so many times more, and what is expected of others as much as the most of them."""
        self.weight = self.weight * np.append(more, np.full(len(self.weight) - self.n_measured, more.max()))
        self.scale = NOISE / np.sqrt(self.weight)

    def after(self, values: Mapping[str, float]) -> Floats:
        """(n,) seconds of the measured rows with these constants."""
        return self.model.predict(values, np.arange(self.n_measured))

    def _feels(self, knob: Knob) -> Ints:
        """Rows whose time a constant changes, somewhere within its bounds."""
        moved = [self.model.predict({knob.name: knob.at(z)}) for z in (-FARTHEST, FARTHEST)]
        return np.flatnonzero((moved[0] != self.defaults) | (moved[1] != self.defaults))

    def unfelt(self, knob: Knob) -> str:
        """Why a constant cannot be fitted even with all others known; empty where it can."""
        rows = self.feels[knob.name]
        rows = rows[rows < self.n_measured]
        if not len(rows):
            return UNUSED
        # A bandwidth that is not the narrowest at its default may be at its true value: look both ways.
        moved = [np.log(self.model.predict({knob.name: knob.at(z)}, rows) / self.defaults[rows]) for z in (-2.0, 2.0)]
        slope = np.maximum(*np.abs(moved)) / 2.0
        left = (1.0 + float(((slope / self.scale[rows]) ** 2).sum())) ** -0.5
        return "the rows hardly depend on it" if left > UNFELT else ""

    def _slope(self, knob: Knob, other_values: Mapping[str, float], z: float, log_times: Floats) -> Floats:
        """d ln(predicted) / dz of the rows that feel a constant; towards smaller values, which no bound stops."""
        rows = self.feels[knob.name]
        moved = self.model.predict({**other_values, knob.name: knob.at(z - STEP)}, rows)
        slope: Floats = (log_times[rows] - np.log(moved)) / STEP
        return slope

    def scan(self, knobs: Sequence[Knob]) -> Floats:
        """(k,) z to start from: the best single steps of one or two standard deviations, one after another.

        A rate that is not the narrowest where a search begins has no slope there, and would never be moved.
        """
        z = np.zeros(len(knobs))
        cost = self._cost(knobs, z)
        for _ in range(STEPS):
            single = (np.where(unit > 0, start, z) for unit in np.eye(len(z)) for start in (-2.0, -1.0, 1.0, 2.0))
            tried = ((self._cost(knobs, moved), moved) for moved in single)
            best, moved = min(tried, key=lambda pair: pair[0], default=(cost, z))
            if best >= cost:
                break
            cost = best
            z = moved
        return z

    def _cost(self, knobs: Sequence[Knob], z: Floats) -> float:
        return float(self._loss(self._residuals(knobs, z) ** 2)[0].sum())

    def _residuals(self, knobs: Sequence[Knob], z: Floats) -> Floats:
        """(n + k,) errors of the rows, by their scales, and z."""
        return np.concatenate([(np.log(self.model.predict(_values(knobs, z))) - self.log_measured) / self.scale, z])

    def solve(self, knobs: Sequence[Knob], start: Floats) -> _Solution:
        """The minimum over these constants, from ``start``."""
        from scipy.optimize import least_squares

        n, residuals = len(self.log_measured), partial(self._residuals, knobs)

        def jacobian(z: Floats) -> Floats:
            """(rows + knobs, knobs) float: slopes of log times over their scale, and of the prior (one each)."""
            now = _values(knobs, z)
            out = np.zeros((n, len(knobs)))
            log_times = np.log(self.model.predict(now))
            for i, knob in enumerate(knobs):
                out[self.feels[knob.name], i] = self._slope(knob, now, float(z[i]), log_times)
            return np.vstack([out / self.scale[:, None], np.eye(len(knobs))])

        done = least_squares(
            residuals, start, jac=jacobian, loss=self._loss, bounds=(-FARTHEST, FARTHEST), xtol=1e-4, ftol=1e-5
        )
        measured = slice(self.n_measured)
        return _Solution(done.x, done.jac[measured], done.fun[measured] * self.scale[measured])

    def _loss(self, squares: Floats) -> Floats:
        """Soft L1 for measured rows, plain squares for what is expected of others and for priors: the value and two
        derivatives by the squared residual."""
        n = self.n_measured
        weight = self.weight[:n]
        out = np.stack([squares, np.ones_like(squares), np.zeros_like(squares)])
        root = np.sqrt(1.0 + squares[:n] / weight)
        out[:, :n] = 2.0 * weight * (root - 1.0), 1.0 / root, -0.5 / (weight * root**3)
        return out
