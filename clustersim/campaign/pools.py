"""Rates of failures, and how many spare nodes they need: nodes fail apart from each other, and come back from repair.

A rate is failures per node and time, a time is in the same unit in all arguments of a call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np


def mtbf(nodes: float, rate: float) -> float:
    """Mean time between failures of a job, ``1/(N r)``; infinite where nothing fails.

    >>> round(mtbf(2048, 6.5e-3) * 24, 2)  # hours, at 6.5 per 1000 node-days
    1.8
    """
    return 1.0 / (nodes * rate) if rate > 0 else math.inf


def poisson_quantile(q: float, mean: float) -> int:
    """The smallest count whose Poisson distribution function reaches q."""
    from scipy.special import pdtr

    counts = np.arange(math.ceil(mean + 12.0 * math.sqrt(mean) + 12.0))
    return int(np.searchsorted(pdtr(counts, mean), q))


def spares_refilled_daily(nodes: int, daily: float, q: float = 0.99) -> int:
    """Standby nodes that are enough on a share ``q`` of days: a binomial quantile (ByteRobust, arXiv:2509.16293).

    ``daily`` : probability that a node fails in a day.
    """
    from scipy.special import bdtr

    counts = np.arange(nodes + 1)
    return int(np.searchsorted(bdtr(counts, nodes, daily), q))


@dataclass(frozen=True)
class Standby:
    """Nodes that stand by for a job's own.

    Parameters
    ----------
    nodes : of the job. daily : probability that a node fails in a day. standby : nodes that stand by: while they are
        enough the job goes on after ``ready``, else after ``other`` [time].
    switch : share of losses that take a whole switch of nodes, more than stand by.
    """

    nodes: int
    daily: float
    standby: int
    ready: float
    other: float
    switch: float = 0.0

    def gain(self, instead: float) -> float:
        """How many times sooner the job goes on than after ``instead`` [time], on average over days on which any node
        is lost (ByteRobust, figure 12)."""
        from scipy.special import bdtr

        short = (1.0 - float(bdtr(self.standby, self.nodes, self.daily))) / (1.0 - (1.0 - self.daily) ** self.nodes)
        late = self.switch + (1.0 - self.switch) * short
        return instead / ((1.0 - late) * self.ready + late * self.other)


def spares_for(nodes: float, rate: float, repair: float, short: float = 0.01) -> int:
    """Spares that fall short for no larger share of time than ``short``: nodes in repair are Poisson with mean ``N r
    MTTR``, whatever the repair's law (an M/G/inf queue).

    >>> spares_for(2048, 6.5e-3, 2.0)
    39
    """
    return poisson_quantile(1.0 - short, nodes * rate * repair)
