"""Rates of failures, and how many spare nodes they need: nodes fail apart from each other, and come back from repair.

A rate is failures per node and time, a time is in the same unit in all arguments of a call.
"""

from __future__ import annotations

import math

import numpy as np


def mtbf(nodes: float, rate: float) -> float:
    """Mean time between failures of a job, ``1/(N r)``; infinite where nothing fails.

    >>> round(mtbf(2048, 6.5e-3) * 24, 2)  # hours, at 6.5 per 1000 node-days
    1.8
    """
    return 1.0 / (nodes * rate) if rate > 0 else math.inf


def count_range(mean: float, inside: float = 0.95) -> tuple[int, int]:
    """Quantiles of a Poisson count that hold this share of runs between them.

    >>> count_range(419)
    (379, 460)
    """
    outside = (1.0 - inside) / 2.0
    return _poisson_quantile(outside, mean), _poisson_quantile(1.0 - outside, mean)


def _poisson_quantile(q: float, mean: float) -> int:
    """The smallest count whose distribution function reaches q."""
    from scipy.special import pdtr

    counts = np.arange(math.ceil(mean + 12.0 * math.sqrt(mean) + 12.0))
    return int(np.searchsorted(pdtr(counts, mean), q))


def in_repair(nodes: float, rate: float, repair: float) -> float:
    """Mean number of nodes in repair, whatever the repair's law: an M/G/inf queue, Poisson with mean ``N r MTTR``."""
    return nodes * rate * repair


def spares_for(nodes: float, rate: float, repair: float, short: float = 0.01) -> int:
    """Spares that fall short for no larger share of time than ``short``.

    >>> spares_for(2048, 6.5e-3, 2.0)
    39
    """
    return _poisson_quantile(1.0 - short, in_repair(nodes, rate, repair))
