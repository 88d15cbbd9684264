"""The most likely constants given measurements and priors: Gauss-Newton on ln(predicted / measured)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from clustersim.core.arrays import Floats as Floats

STEP = 1e-3
"""Of a constant's logarithm, for a finite difference; downwards, where no bound stops it."""

ROUNDS = 8
"""Steps of Gauss-Newton at most."""

LOOKED = (-3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)
"""Standard deviations at which constants are looked at alone, before the first step."""

FARTHEST = 0.7
"""A step of ln(constant) goes no farther, so that a first guess far off does not overshoot."""


class Posterior(msgspec.Struct, frozen=True, eq=False):
    """Where constants are, and how sure that is.

    Parameters
    ----------
    moved : (k,) ln(constant / prior's value). covariance : (k, k) of it. errors : (n,) ln(predicted / measured) left.
    """

    moved: Floats
    covariance: Floats
    errors: Floats

    @property
    def spread(self) -> Floats:
        """(k,) standard deviations that are left."""
        return np.sqrt(np.diag(self.covariance))


def posterior(
    log_times: Callable[[Floats], Floats], measured: Floats, sigma: Floats, spread: Floats, first: int = 0
) -> Posterior:
    """Minimise the sum of (error / sigma)^2 over rows and of (moved / spread)^2 over constants.

    Parameters
    ----------
    log_times : ln(seconds) of the rows, (n,), with constants moved by (k,) in the logarithm.
    measured : (n,) ln(seconds). sigma : (n,) what the law itself is unsure of. spread : (k,) of the priors.
    first : how many of the constants are tried alone for a start: a floor that does not bind has no slope.
    """
    prior = spread**-2.0

    def cost_at(moved: Floats) -> float:
        """What is minimised, at these moves of constants."""
        return _cost((log_times(moved) - measured) / sigma, moved, prior)

    alone = [by * spread[i] * unit for i, unit in enumerate(np.eye(len(spread))[:first]) for by in LOOKED]
    moved = min((np.zeros(len(spread)), *alone), key=cost_at)
    errors = log_times(moved) - measured
    slopes = np.zeros((len(measured), len(spread)))
    cost = _cost(errors / sigma, moved, prior)
    for _ in range(ROUNDS):
        log_now = errors + measured
        slopes = np.stack([(log_now - log_times(moved - STEP * unit)) / STEP for unit in np.eye(len(moved))], axis=1)
        step, _ = solved(slopes, errors, sigma**-2.0, moved, prior)
        tried = step
        for _ in range(6):  # a step that makes things worse is halved
            after = log_times(moved + tried) - measured
            if _cost(after / sigma, moved + tried, prior) <= cost:
                break
            tried = tried / 2.0
        moved = moved + tried
        errors = after
        before = cost
        cost = _cost(errors / sigma, moved, prior)
        if before - cost < 1e-4 * max(before, 1.0):
            break
    _, covariance = solved(slopes, errors, sigma**-2.0, moved, prior)
    return Posterior(moved, covariance, errors)


def _cost(misses: Floats, moved: Floats, prior: Floats) -> float:
    return float(misses @ misses + moved @ (prior * moved))


def solved(slopes: Floats, errors: Floats, weight: Floats, moved: Floats, prior: Floats) -> tuple[Floats, Floats]:
    """The step (k,) of the linear problem, and the covariance (k, k) there."""
    hessian = (slopes * weight[:, None]).T @ slopes + np.diag(prior)
    step = np.linalg.solve(hessian, -slopes.T @ (weight * errors) - prior * moved)
    covariance: Floats = np.asarray(np.linalg.inv(hessian), dtype=np.float64)
    return np.clip(step, -FARTHEST, FARTHEST).astype(np.float64), covariance
