"""How long a run takes that fails and starts again: exact where failures are exponential and costs are fixed.

A run is cut into segments: ``tau`` of work, then a save of ``delta``. A failure falls back to the last save that was
finished, and costs ``recovery`` before work goes on. All times of one call are in one unit; ``mtbf`` is the mean time
between failures of the whole job.

Sources: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps" (FGCS 2006);
J. W. Young (CACM 1974); A. Kokolis et al., arXiv:2410.21680.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

P95 = 1.6448536269514722
"""Standard deviations from the mean to the 95th percentile of a normal law."""


def expected_time(
    mtbf: float, delta: float, recovery: float, tau: float, work: float, *, recovery_fails: bool = True
) -> float:
    """Mean time of ``work``, its last save counted: ``M e^{R/M} (e^{(tau+delta)/M} - 1) work/tau`` (Daly).

    ``recovery_fails`` : failures strike recovery too, which begins anew; else ``(M + R)`` takes the place of
    ``M e^{R/M}``. Infinite where the exponents are beyond any number: such a run does not end.

    >>> round(expected_time(36, 0.5, 5, 6, 1000), 1)
    1364.2
    """
    if math.isinf(mtbf):
        return work * (tau + delta) / tau
    try:
        each = mtbf * math.exp(recovery / mtbf) if recovery_fails else mtbf + recovery
        return each * math.expm1((tau + delta) / mtbf) * work / tau
    except OverflowError:
        return math.inf


def spread(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """Standard deviation of that time.

    A segment fails ``K`` times, geometric with success ``p = e^{-w/M}``, ``w = tau + delta``. Each failure costs the
    time ``X`` until it came (below ``w``) and a recovery ``D``, so the variance of ``n = work/tau`` segments is
    ``n (E[K] (Var X + Var D) + Var[K] (E X + E D)^2)``.
    """
    w, m = tau + delta, mtbf
    if math.isinf(m):
        return 0.0
    p = math.exp(-w / m)
    tries, var_tries = (1 - p) / p, (1 - p) / p**2
    mean_x = m - w * p / (1 - p)
    var_x = 2 * m**2 - (w**2 + 2 * w * m) * p / (1 - p) - mean_x**2
    mean_d = m * math.expm1(recovery / m)
    var_d = m**2 * (math.exp(2 * recovery / m) - 1 - 2 * recovery / m * math.exp(recovery / m))
    return math.sqrt(work / tau * (tries * (var_x + var_d) + var_tries * (mean_x + mean_d) ** 2))


def percentile_95(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """95th percentile of that time, by the normal limit of many segments."""
    run = (mtbf, delta, recovery, tau, work)
    return expected_time(*run) + P95 * spread(*run)


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


def kokolis_ettr(mtbf: float, restart: float, write: float, interval: float) -> float:
    """Expected effective training time ratio to first order, queueing excluded (Kokolis):
    ``(1 - (u0 + dt/2)/M) / (1 + w/dt)``. Below about 0.7 it is too low.

    >>> round(kokolis_ettr(108.17, 5, 0, 60), 3)
    0.676
    """
    return (1.0 - (restart + interval / 2.0) / mtbf) / (1.0 + write / interval)


def longest_recovery(mtbf: float, ettr: float) -> float:
    """The longest restart that, with an interval as long and free saves, still gives this ratio (Kokolis)."""
    return (1.0 - ettr) * mtbf / 1.5


def mean_lost_work(window: float, mtbf: float) -> float:
    """Mean time since the last save, of failures that fall into a window of ``tau + delta``; half the window to first
    order: ``M - w e^{-w/M} / (1 - e^{-w/M})``."""
    return mtbf - window / math.expm1(window / mtbf)


def share_of_wall_time(mtbf: float, recovery: float) -> float:
    """``1 - R/M``: M is counted in wall time. Published figures use this, and the two below it."""
    return 1.0 - recovery / mtbf


def share_of_renewals(mtbf: float, recovery: float) -> float:
    """``M/(M + R)``: nothing fails during recovery."""
    return mtbf / (mtbf + recovery)


def share_without_memory(mtbf: float, recovery: float) -> float:
    """``e^{-R/M}``: recovery fails as work does."""
    return math.exp(-recovery / mtbf)


def survival(time: float, mtbf: float) -> float:
    """Probability of no failure for so long."""
    return math.exp(-time / mtbf)


def time_lost(parts: Iterable[float], interval: float) -> float:
    """What a failure costs to first order: detection, replacement, restart, loading, warm-up, half an interval."""
    return sum(parts) + interval / 2.0


def loss_of_causes(causes: Iterable[tuple[float, float]], interval: float) -> float:
    """Share of time lost to first order, ``sum l_i (R_i + tau/2)``, over (rate, recovery) of each cause.

    >>> round(loss_of_causes([(3 / 1440, 5), (0.5 / 1440, 120)], 10), 4)
    0.0642
    """
    return sum(rate * time_lost([recovery], interval) for rate, recovery in causes)


def loss_of_planned_stops(delta: float, recovery: float, every: float) -> float:
    """Share of time lost to stops that save first: no work is lost."""
    return (delta + recovery) / every
