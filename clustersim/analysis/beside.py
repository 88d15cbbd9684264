"""What hidden communication cost the kernels that ran beside it."""

from __future__ import annotations

import numpy as np

from clustersim.analysis.columns import SomeRanks
from clustersim.arrays import Floats
from clustersim.program import COMPUTE_STREAM


def lost_beside(some: SomeRanks, seconds: dict[int, Floats]) -> dict[int, Floats]:
    """Per compute op and rank, what hidden collectives cost it [s]: the engine's own rule, read off the Timeline.

    A collective costs the rank's next compute op ``overlap_slowdown`` times the time both were busy.
    """
    slowdown, ops = some.timeline.stats.get("overlap_slowdown", 0.0), some.timeline.ops
    if not slowdown:
        return {}
    main = [i for i in seconds if ops[i].stream == COMPUTE_STREAM]
    talks = [i for i, op in enumerate(ops) if op.kind not in {"compute", "send", "recv"}]
    began, over = _matrix(some, main)
    started, ended = _matrix(some, talks)
    lost = np.zeros_like(began)
    for rank in range(len(some.ranks)):
        kernels = np.flatnonzero(~np.isnan(began[:, rank]))
        kernels = kernels[np.argsort(began[kernels, rank], kind="stable")]
        here = np.flatnonzero(~np.isnan(started[:, rank]))
        if not len(kernels) or not len(here):
            continue
        low, high = began[kernels, rank], over[kernels, rank]
        end = ended[here, rank]
        beside = _busy(low, high, end) - _busy(low, high, started[here, rank])
        payer = np.searchsorted(low, end * (1 - 1e-12), side="left")
        paid = payer < len(kernels)
        np.add.at(lost[:, rank], kernels[payer[paid]], slowdown * beside[paid])
    return {i: lost[k] for k, i in enumerate(main)}


def _matrix(some: SomeRanks, ops: list[int]) -> tuple[Floats, Floats]:
    """(len(ops), r) float [s], start and end of each op on each rank; nan where it did not run."""
    start, end = (np.full((len(ops), len(some.ranks)), np.nan) for _ in range(2))
    for k, i in enumerate(ops):
        at, spans = some.times(i)
        start[k, at], end[k, at] = spans.start, spans.end
    return start, end


def _busy(low: Floats, high: Floats, moments: Floats) -> Floats:
    """Seconds of disjoint sorted intervals before each moment."""
    before = np.concatenate([[0.0], np.cumsum(high - low)])
    at = np.searchsorted(low, moments, side="right")
    last = np.maximum(at - 1, 0)
    inside = np.where(at > 0, np.minimum(moments, high[last]) - low[last], 0.0)
    busy: Floats = before[last] + inside
    return busy
