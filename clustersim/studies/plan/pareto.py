"""Which options are worth having: those that no other beats in everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


def dominates(a: Sequence[float], b: Sequence[float]) -> bool:
    """Whether ``a`` is at least as good as ``b`` everywhere and better somewhere; smaller is better.

    >>> dominates((1, 2), (1, 3)), dominates((1, 2), (1, 2)), dominates((0, 3), (1, 2))
    (True, False, False)
    """
    return all(x <= y for x, y in zip(a, b, strict=True)) and any(x < y for x, y in zip(a, b, strict=True))


def front(points: Sequence[Sequence[float]]) -> list[int]:
    """Indices of the points that no other dominates, in order; of equal points the first.

    >>> front([(1, 3), (2, 2), (3, 3), (1, 3)])
    [0, 1]
    """
    unbeaten: list[int] = []
    for i, point in enumerate(points):
        earlier_equal = any(tuple(points[j]) == tuple(point) for j in range(i))
        if not earlier_equal and not any(dominates(rival, point) for rival in points):
            unbeaten.append(i)
    return unbeaten


@dataclass
class ParetoObjectives:
    """Objectives of simulated options by number, as they are and at the worse end of what their run may be off."""

    known: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] = field(default_factory=dict)

    def first(self, objectives: tuple[float, ...], *, robust: bool = False) -> int | None:
        """The number of the first that beats these objectives, each as it is or, ``robust``, at its worst."""
        if not self.known:
            return None
        rows = np.array([pair[robust] for pair in self.known.values()])
        better = np.flatnonzero((rows <= objectives).all(axis=1) & (rows < objectives).any(axis=1))
        return list(self.known)[int(better[0])] if better.size else None
