"""How long a run takes that fails and starts again: exact where failures are exponential and costs are fixed.

A run is cut into segments: ``tau`` of work, then a save of ``delta``. A failure falls back to the last save that was
finished, and costs ``recovery`` before work goes on. All times of one call are in one unit; ``mtbf`` is the mean time
between failures of the whole job.

Sources: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 2006);
J. W. Young (CACM 1974).
"""

from __future__ import annotations

import math


def expected_time(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """Mean time of ``work``, its last save counted: ``M e^{R/M} (e^{(tau+delta)/M} - 1) work/tau`` (Daly).

    Failures strike recovery too, which begins anew. Infinite where the exponents are beyond any number: such a run does
    not end.

    >>> round(expected_time(36, 0.5, 5, 6, 1000), 1)
    1364.2
    """
    if math.isinf(mtbf):
        return work * (tau + delta) / tau
    try:
        return mtbf * math.exp(recovery / mtbf) * math.expm1((tau + delta) / mtbf) * work / tau
    except OverflowError:
        return math.inf


def efficiency(mtbf: float, delta: float, recovery: float, tau: float) -> float:
    """Work over mean time; 0 where a run does not end.

    >>> round(efficiency(180, 2, 10, 26.8328), 4)
    0.8117
    """
    return 1.0 / expected_time(mtbf, delta, recovery, tau, 1.0)


def young_interval(delta: float, mtbf: float) -> float:
    """Young's interval between saves, ``sqrt(2 delta M)``."""
    return math.sqrt(2.0 * delta * mtbf)


def daly_interval(delta: float, mtbf: float) -> float:
    """Daly's, to higher order: ``sqrt(2 d M) (1 + sqrt(x)/3 + x/9) - d``, ``x = d/2M``; M where d is 2M or more."""
    if delta >= 2.0 * mtbf:
        return mtbf
    x = delta / (2.0 * mtbf)
    return young_interval(delta, mtbf) * (1.0 + math.sqrt(x) / 3.0 + x / 9.0) - delta


def best_interval(delta: float, mtbf: float) -> float:
    """The exact best time of work between saves, ``M (1 + W0(-e^{-1 - delta/M}))``: where the mean time is least.

    >>> round(best_interval(5, 108.2), 3)
    29.648
    """
    from scipy.special import lambertw

    if math.isinf(mtbf) or delta <= 0:
        return 0.0 if delta <= 0 else math.inf
    return mtbf * (1.0 + float(lambertw(-math.exp(-1.0 - delta / mtbf)).real))


def mean_lost_work(window: float, mtbf: float) -> float:
    """Mean time since the last save, of failures that fall into a window of ``tau + delta``; half the window to first
    order: ``M - w e^{-w/M} / (1 - e^{-w/M})``."""
    return mtbf - window / math.expm1(window / mtbf)


def survival(time: float, mtbf: float) -> float:
    """Probability of no failure for so long."""
    return math.exp(-time / mtbf)
