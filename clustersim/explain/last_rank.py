"""Whom a measured run waits for: the rank that comes last to most of its collectives.

It need not be the one whose kernels take longest: a rank whose host launches late is the last to collectives with the
shortest kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import of_each
from clustersim.core.timeline import Timeline

SAME_CLOCK = 50e-6
"""Ends of one collective lie this close [s] on ranks that share a clock; what is beyond is a clock's offset."""


@dataclass(frozen=True)
class LastRank:
    """A rank that was the last to ``times`` of ``collectives`` that waited for somebody."""

    rank: int
    times: int
    collectives: int

    def __str__(self) -> str:
        return f"rank {self.rank} is the last to {self.times} of {self.collectives} that waited"


@kept_with_first(maxsize=None)
def last_to_most(run: Timeline) -> LastRank | None:
    """The rank that is the last to more than half of the collectives that a measured run waited in; None for none."""
    spans = run.spans()
    waited = of_each(run.ops, lambda op: op.detail.get("skew_s", 0.0) > SAME_CLOCK, np.bool_)[spans["op"]]
    order = np.lexsort((spans["ready"], spans["op"]))
    order = order[waited[order]]
    ops = spans["op"][order]
    last = spans["rank"][order][np.append(ops[1:] != ops[:-1], True)] if len(order) else order
    ranks, times = np.unique(last, return_counts=True)
    if not len(ranks) or 2 * times.max() <= len(last):
        return None
    return LastRank(int(ranks[times.argmax()]), int(times.max()), len(last))
