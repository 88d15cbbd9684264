"""Closed forms of runs that fail, wait and vary, which campaigns played and published figures are checked with.

All times of one call are in one unit; ``mtbf`` is the mean time between failures of the whole job. What the product
itself computes with is in :mod:`clustersim.studies.campaign`'s ``renewal``, ``maxima`` and ``pools``.

Sources: A. Kokolis et al., arXiv:2410.21680; ByteRobust, arXiv:2509.16293; the rest follows from its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from clustersim.studies.campaign.maxima import largest_normal, mean_max_normal, step_with_barriers
from clustersim.studies.campaign.renewal import expected_time

P95 = 1.6448536269514722
"""Standard deviations from the mean to the 95th percentile of a normal law."""


def spread(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """Standard deviation of the time of a run (:func:`clustersim.studies.campaign.renewal.expected_time`).

    A segment fails ``K`` times, geometric with success ``p = e^{-w/M}``, ``w = tau + delta``. Each failure costs the
    time ``X`` until it came (below ``w``) and a recovery ``D``, so the variance of ``n = work/tau`` segments is
    ``n (E[K] (Var X + Var D) + Var[K] (E X + E D)^2)``.
    """
    w = tau + delta
    m = mtbf
    if math.isinf(m):
        return 0.0
    p = math.exp(-w / m)
    tries = (1 - p) / p
    var_tries = (1 - p) / p**2
    mean_x = m - w * p / (1 - p)
    var_x = 2 * m**2 - (w**2 + 2 * w * m) * p / (1 - p) - mean_x**2
    mean_d = m * math.expm1(recovery / m)
    var_d = m**2 * (math.exp(2 * recovery / m) - 1 - 2 * recovery / m * math.exp(recovery / m))
    return math.sqrt(work / tau * (tries * (var_x + var_d) + var_tries * (mean_x + mean_d) ** 2))


def percentile_95(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """95th percentile of that time, by the normal limit of many segments."""
    run = (mtbf, delta, recovery, tau, work)
    return expected_time(*run) + P95 * spread(*run)


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


def share_of_wall_time(mtbf: float, recovery: float) -> float:
    """``1 - R/M``: M is counted in wall time. Published figures use this, and the two below it."""
    return 1.0 - recovery / mtbf


def share_of_renewals(mtbf: float, recovery: float) -> float:
    """``M/(M + R)``: nothing fails during recovery."""
    return mtbf / (mtbf + recovery)


def share_without_memory(mtbf: float, recovery: float) -> float:
    """``e^{-R/M}``: recovery fails as work does."""
    return math.exp(-recovery / mtbf)


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


def sd_max_normal(ranks: int) -> float:
    """Standard deviation of the largest of ``ranks`` normal variables: it falls as ranks are added."""
    z, density = largest_normal(ranks)
    return math.sqrt(float(np.trapezoid(z * z * density, z)) - mean_max_normal(ranks) ** 2)


def quantile_max_normal(ranks: int, q: float) -> float:
    """Quantile of that largest, ``Phi^-1(q^(1/N))``."""
    from scipy.special import ndtri_exp

    return float(ndtri_exp(math.log(q) / ranks))


def mean_max_lognormal(ranks: int, cv: float) -> float:
    """Mean of the largest of ``ranks`` lognormal variables of mean 1.

    >>> round(mean_max_lognormal(16384, 0.1), 4)
    1.4794
    """
    sigma = math.sqrt(math.log1p(cv * cv))
    z, density = largest_normal(ranks)
    return float(np.trapezoid(np.exp(sigma * z - sigma * sigma / 2) * density, z))


def mean_max_exponential(ranks: int) -> float:
    """Mean of the largest of ``ranks`` exponential variables of mean 1: the harmonic number."""
    from scipy.special import digamma

    return float(digamma(ranks + 1) + np.euler_gamma)


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


def rate(count: float, nodes: float, time: float) -> float:
    """Failures per node and time, of a count."""
    return count / nodes / time


def first_of_weibull(nodes: int, shape: float, mean_life: float) -> float:
    """Mean time to the first failure of new nodes whose lives are Weibull: ``eta N^(-1/k) Gamma(1 + 1/k)``, where
    ``mean_life = eta Gamma(1 + 1/k)``. With a shape below 1 it comes fast.

    >>> round(first_of_weibull(2048, 0.7, 24_000), 3)
    0.446
    """
    return float(mean_life * nodes ** (-1.0 / shape))


def daily_probabilities(spares: Mapping[int, int], q: float = 0.99) -> tuple[float, float]:
    """The smallest and the largest daily probability of a failure for which these are the spares by number of nodes."""
    from scipy.special import bdtri

    low = max(float(bdtri(k - 1, n, q)) for n, k in spares.items())
    return low, min(float(bdtri(k, n, q)) for n, k in spares.items())


def availability(mttf: float, mttr: float) -> float:
    """Of a node: ``MTTF/(MTTF + MTTR)``."""
    return mttf / (mttf + mttr)


def interruptions_with_racks(nodes: int, rate: float, racks: int, rack_rate: float) -> float:
    """Interruptions of a job per time, where whole racks fail too."""
    return nodes * rate + racks * rack_rate


def nodes_lost_with_racks(nodes: int, rate: float, rack_rate: float) -> float:
    """Nodes lost per time: one of a node's failure, all of its own of a rack's, however large racks are."""
    return nodes * (rate + rack_rate)


def working_replicas(replicas: int, failures: float, away: float) -> float:
    """Mean share of replicas that work, where a failure takes one away and the others go on: ``1 - lambda L/D``
    (M/G/inf). ``failures`` : of the job per time. ``away`` : how long a replica is gone."""
    return 1.0 - failures * away / replicas


def lognormal_sigma(median: float, mean: float) -> float:
    """Standard deviation of the logarithm: ``sqrt(2 ln(mean/median))``."""
    return math.sqrt(2.0 * math.log(mean / median))


def lognormal_p95(median: float, mean: float) -> float:
    """95th percentile of a lognormal time."""
    return median * math.exp(P95 * lognormal_sigma(median, mean))


def lognormal_sd(median: float, mean: float) -> float:
    """Standard deviation of a lognormal time."""
    return mean * math.sqrt(math.expm1(lognormal_sigma(median, mean) ** 2))


def bytes_per_parameter(nbytes: float, parameters: float) -> float:
    """What was saved of each parameter [bytes]."""
    return nbytes / parameters


def overhead(stall: float, every: float) -> float:
    """Share of time spent in stalls of which one follows each ``every`` of work: ``d/(tau + d)``.

    >>> round(overhead(40, 100 * 105.22), 5)
    0.00379
    """
    return stall / (every + stall)


def goodput(steps: float, step_s: float, elapsed: float) -> float:
    """Time of new steps over elapsed time: Llama 3's effective training time, Gemini's goodput."""
    return steps * step_s / elapsed


def loss_per_stop(goodput: float, stops: int, time: float) -> float:
    """The most that each stop may cost for this goodput; in ``time``'s unit."""
    return (1.0 - goodput) * time / stops


def lost_to_detection(stops: int, silent: float, timeout: float, time: float) -> float:
    """Share of time waited for a timeout, where a share ``silent`` of stops says nothing."""
    return stops * silent * timeout / time


def cost(gpus: int, hours: float, usd_per_gpu_hour: float) -> float:
    """[USD], of GPUs that are paid for whether they work or not."""
    return gpus * hours * usd_per_gpu_hour


def requeue_time(machines: float) -> float:
    """[s] until a whole job has its pods and images again: ``450 + 104 log2(n/128)``, a fit within 6 % of ByteRobust's
    454, 545, 635 and 768 s at 128, 256, 512 and 1,024 machines (arXiv:2509.16293 table 7)."""
    return 450.0 + 104.0 * math.log2(machines / 128.0)


def expected_time_of_safe_recovery(mtbf: float, delta: float, recovery: float, tau: float, work: float) -> float:
    """Mean time of a run where nothing strikes recovery: ``(M + R)`` in the place of ``M e^{R/M}``."""
    return (mtbf + recovery) * math.expm1((tau + delta) / mtbf) * work / tau


def checkpoint_bytes(parameters: float, per_parameter: float = 14.0) -> float:
    """[bytes] of a whole checkpoint.

    ``per_parameter`` : 2 of weights alone; 14 of bf16 weights, an fp32 copy and Adam's two moments; 12 without the bf16
    weights; 16 with fp32 gradients. Sharding changes who writes, not how much.
    """
    return parameters * per_parameter
