"""Ranges from errors of validation: how wide they must be, and how often they hold of somebody left out.

Rows of one publisher are wrong together, so quantiles are over publishers of equal weight, and both width and coverage
are those of publishers whose rows the range was not made from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from clustersim.arrays import Floats
from clustersim.calibration.score import Predicted, Row, grouped, predicted

Groups = Mapping[str, Floats]
SHARES = (0.5, 0.9)
"""Shares of measurements that ``p50`` and ``p90`` are to hold."""
SLACK = 0.03
"""Of coverage, that a handful of publishers cannot tell from chance."""
TINY = 1e-9


def distances(rows: Iterable[Row], group: Callable[[Predicted], str]) -> dict[str, Floats]:
    """Of each group, how far its measurements are from their predictions, relative to the prediction."""
    return {
        name: np.array([abs(1.0 / (1.0 + row.rel_error) - 1.0) for row in some])
        for name, some in grouped(predicted(rows), group).items()
    }


def quantile(groups: Iterable[Floats], share: float) -> float:
    """The distance below which a share of measurements lies, every group weighing the same."""
    groups = list(groups)
    distance = np.concatenate(groups)
    weight = np.concatenate([np.full(len(group), 1.0 / len(group)) for group in groups])
    order = np.argsort(distance, kind="stable")
    below = (np.cumsum(weight[order]) - 0.5 * weight[order]) / weight.sum()
    return float(np.interp(share, below, distance[order]))


def _apart(groups: Groups, share: float) -> list[Floats]:
    """Each group's distances, over the quantile of the others."""
    others = {name: [groups[other] for other in groups if other != name] for name in groups}
    return [mine / max(quantile(others[name], share), TINY) for name, mine in groups.items()]


def widening(groups: Groups, share: float) -> float:
    """What the quantile of others must be multiplied with to hold its share of a group that was left out, but for
    :data:`SLACK`: two groups say little of a third. Never below 1, and 1 of a single group, which says nothing."""
    return max(1.0, quantile(_apart(groups, share), share - SLACK)) if len(groups) > 1 else 1.0


def coverage(groups: Groups) -> tuple[float, ...]:
    """Of each of :data:`SHARES`, the mean share of a group's measurements that a range made of the others holds, as
    wide as :func:`widening` makes it; NaN where there are no others."""
    if len(groups) < 2:
        return tuple(float("nan") for _ in SHARES)
    return tuple(_held(_apart(groups, share), widening(groups, share)) for share in SHARES)


def _held(apart: list[Floats], wide: float) -> float:
    """The mean share of a group within a range so wide."""
    return float(np.mean([np.mean(far <= wide + TINY) for far in apart]))


@dataclass(frozen=True)
class Held:
    """A range, and how often it holds of a group left out (NaN where there is one group only)."""

    p50: float
    p90: float
    rows: int
    groups: int
    held_p50: float
    held_p90: float


def held(groups: Groups) -> Held:
    """The range of some groups of measurements."""
    p50, p90 = (_width(groups, share) for share in SHARES)
    return Held(p50, p90, sum(map(len, groups.values())), len(groups), *coverage(groups))


def _width(groups: Groups, share: float) -> float:
    """The quantile of all, widened for whoever is left out, but not beyond what the worst of them needs."""
    most = max(quantile([mine], share) for mine in groups.values())
    of_all = quantile(groups.values(), share)
    return max(of_all, min(of_all * widening(groups, share), most))


def of_each(groups: Groups, fewest: int) -> dict[str, Held]:
    """The range of each group alone that has at least so many measurements."""
    return {name: held({name: values}) for name, values in groups.items() if len(values) >= fewest}
