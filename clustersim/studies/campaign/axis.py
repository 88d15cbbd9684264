"""The course of a training without failures, as one axis: work, saves and evaluations laid end to end.

A failure at a place of this axis falls back to the place behind the last save that counts, and goes over the same part
again. So a whole campaign is a walk over one axis, and both engines share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.errors import ScenarioError
from clustersim.core.limits import counted

MOST_STOPS = 5_000_000


@dataclass(frozen=True)
class SaveKind:
    """One kind of save: every ``interval`` of work [s], training stands still for ``stall`` [s], and ``write`` [s]
    after it began, not before the stall is over, it counts."""

    interval: float
    stall: float
    write: float


@dataclass(frozen=True, eq=False)
class WorkAxis:
    """Where saves lie between the beginning, 0, and ``end``, in seconds of training at its usual pace.

    work, stalls, evaluation : [s] of the axis that each takes; they add up to ``end``.
    behind : of each kind of save (saves,) [s], the places right behind them. counts : where each of them counts.
    """

    end: float
    work: float
    stalls: float
    evaluation: float
    behind: tuple[Floats, ...]
    counts: tuple[Floats, ...]

    def fall_back(self, kind: int, place: Any) -> Any:
        """(n,) places [s] right behind the last save of a kind that counts at these places; 0 where there is none."""
        last = np.searchsorted(self.counts[kind], place, side="right")
        return np.where(last > 0, self.behind[kind][np.maximum(last - 1, 0)], 0.0)


def axis(work: float, saves: Sequence[SaveKind], evaluations: Sequence[tuple[float, float]] = ()) -> WorkAxis:
    """The axis of so much work [s]; every kind of save, of which there is one at least, is made at the end, too.

    evaluations : (every so much work [s], so long [s]); where one falls together with a save it comes first.

    >>> axis(10.0, [SaveKind(5.0, 1.0, 1.0)]).behind[0].tolist()
    [6.0, 12.0]
    """
    stops = sum(work / every for every in (*(save.interval for save in saves), *(every for every, _ in evaluations)))
    counted(stops, MOST_STOPS, "saves and evaluations of a campaign", ScenarioError)
    pieces = [_places(work, save.interval, True) for save in saves]
    pieces += [_places(work, every, False) for every, _ in evaluations]
    lengths = [save.stall for save in saves] + [lasts for _, lasts in evaluations]
    kind = np.repeat(np.arange(len(pieces)), [len(piece) for piece in pieces])
    places = np.concatenate(pieces)
    order = np.lexsort((-kind, places))  # at the end the saves come last
    kind, places, length = kind[order], places[order], np.array(lengths)[kind[order]]
    behind = places + np.cumsum(length)
    behind_saves = [behind[kind == i] for i in range(len(saves))]
    counts = tuple(place + max(save.write - save.stall, 0.0) for place, save in zip(behind_saves, saves, strict=True))
    stalls = float(sum(save.stall * len(place) for save, place in zip(saves, behind_saves, strict=True)))
    evaluated = float(length[kind >= len(saves)].sum())
    return WorkAxis(float(behind[-1]), work, stalls, evaluated, tuple(behind_saves), counts)


def _places(work: float, every: float, at_end: bool) -> Floats:
    """Multiples of ``every`` below ``work``, and ``work`` itself."""
    # A multiple that rounding alone puts below the end is the end.
    places: Floats = every * np.arange(1, np.ceil(work / every * (1 - 1e-12)), dtype=np.float64)
    return np.append(places, work) if at_end else places
