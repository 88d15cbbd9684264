"""The slowest of many ranks: what a step takes when each rank's time varies a little.

A step ends when its last rank does. Laws of a rank's time have mean 1; ``cv`` is the standard deviation over it.
"""

from __future__ import annotations

import math

import numpy as np

from clustersim.core.arrays import Floats

REACH = 14.0
POINTS = 28_001
"""Standard deviations integrated over, and at how many points: the trapezoid rule is exact here to 1e-9."""


def largest_normal(ranks: int) -> tuple[Floats, Floats]:
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
    z, density = largest_normal(ranks)
    return float(np.trapezoid(z * density, z))


def step_with_barriers(ranks: int, cv: float, barriers: int = 1) -> float:
    """Mean step of ranks that meet ``barriers`` times in it, in equal segments, over the mean of one rank:
    ``1 + sqrt(K) cv e_N``. ``cv`` is of the whole step of one rank.

    >>> round(step_with_barriers(1024, 0.02, 16), 3)
    1.26
    """
    return 1.0 + math.sqrt(barriers) * cv * mean_max_normal(ranks)
