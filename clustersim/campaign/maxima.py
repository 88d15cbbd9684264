"""The slowest of many ranks: what a step takes when each rank's time varies a little.

A step ends when its last rank does. Laws of a rank's time have mean 1; ``cv`` is the standard deviation over it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float64]

REACH, POINTS = 14.0, 28_001
"""Standard deviations integrated over, and at how many points: the trapezoid rule is exact here to 1e-9."""


def _density(ranks: int) -> tuple[Floats, Floats]:
    """z, and the density ``N phi(z) Phi(z)^(N-1)`` of the largest of N normal variables, both (points,)."""
    from scipy.special import log_ndtr

    z = np.linspace(-REACH, REACH, POINTS)
    log_phi = -0.5 * z * z - 0.5 * math.log(2 * math.pi)
    return z, np.exp(math.log(ranks) + log_phi + (ranks - 1) * log_ndtr(z))


def mean_max_normal(ranks: int) -> float:
    """Mean of the largest of ``ranks`` normal variables, in standard deviations above their mean.

    >>> round(mean_max_normal(1024), 4)
    3.2482
    """
    z, density = _density(ranks)
    return float(np.trapezoid(z * density, z))


def sd_max_normal(ranks: int) -> float:
    """Standard deviation of that largest: it falls as ranks are added."""
    z, density = _density(ranks)
    return math.sqrt(float(np.trapezoid(z * z * density, z)) - mean_max_normal(ranks) ** 2)


def quantile_max_normal(ranks: int, q: float) -> float:
    """Its quantile, ``Phi^-1(q^(1/N))``."""
    from scipy.special import ndtri_exp

    return float(ndtri_exp(math.log(q) / ranks))


def mean_max_lognormal(ranks: int, cv: float) -> float:
    """Mean of the largest of ``ranks`` lognormal variables of mean 1.

    >>> round(mean_max_lognormal(16384, 0.1), 4)
    1.4794
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    z, density = _density(ranks)
    return float(np.trapezoid(np.exp(sigma * z - sigma * sigma / 2) * density, z))


def mean_max_exponential(ranks: int) -> float:
    """Mean of the largest of ``ranks`` exponential variables of mean 1: the harmonic number."""
    from scipy.special import digamma

    return float(digamma(ranks + 1) + np.euler_gamma)


def step_with_barriers(ranks: int, cv: float, barriers: int = 1) -> float:
    """Mean step of ranks that meet ``barriers`` times in it, in equal segments, over the mean of one rank:
    ``1 + sqrt(K) cv e_N``. ``cv`` is of the whole step of one rank.

    >>> round(step_with_barriers(1024, 0.02, 16), 3)
    1.26
    """
    return 1.0 + math.sqrt(barriers) * cv * mean_max_normal(ranks)


def step_of_two_levels(ranks: int, constant_cv: float, fresh_cv: float) -> float:
    """Mean step over runs, of GPUs whose speed differs for good and jitters each step: ``1 + sqrt(a^2 + b^2) e_N``.
    Within one run only the second part moves."""
    return step_with_barriers(ranks, math.hypot(constant_cv, fresh_cv))


def step_with_slow_nodes(nodes: int, share: float, factor: float) -> float:
    """Mean step where each node is slow by ``factor`` with probability ``share``: ``1 + (s - 1)(1 - (1 - p)^N)``.

    >>> round(step_with_slow_nodes(128, 0.005, 1.25), 3)
    1.118
    """
    return 1.0 - (factor - 1.0) * math.expm1(nodes * math.log1p(-share))
