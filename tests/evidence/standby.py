"""How far standby nodes go, where those that failed are replaced once a day (ByteRobust, arXiv:2509.16293)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
