"""Which options are worth having: those that no other beats in everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from clustersim.arrays import Ints


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
    kept: list[int] = []
    for i, point in enumerate(points):
        earlier_equal = any(tuple(points[j]) == tuple(point) for j in range(i))
        if not earlier_equal and not any(dominates(other, point) for other in points):
            kept.append(i)
    return kept


@dataclass
class Better:
    """Objectives of simulated options, at the worse end of what their run may be off."""

    numbers: list[int] = field(default_factory=list)
    plain: list[tuple[float, ...]] = field(default_factory=list)
    robust: list[tuple[float, ...]] = field(default_factory=list)

    def add(self, number: int, plain: tuple[float, ...], robust: tuple[float, ...]) -> None:
        """One more, or the same once more."""
        if number in self.numbers:
            i = self.numbers.index(number)
            self.plain[i], self.robust[i] = plain, robust
            return
        self.numbers.append(number)
        self.plain.append(plain)
        self.robust.append(robust)

    def some(self, objectives: tuple[float, ...], *, robust: bool = False) -> bool:
        """Whether one of them beats these objectives."""
        return self._beating(objectives, self.robust if robust else self.plain).size > 0

    def first(self, objectives: tuple[float, ...]) -> int | None:
        """The number of the first that does."""
        found = self._beating(objectives, self.plain)
        return self.numbers[int(found[0])] if found.size else None

    def _beating(self, objectives: tuple[float, ...], known: list[tuple[float, ...]]) -> Ints:
        if not known:
            return np.zeros(0, dtype=np.int64)
        rows = np.array(known)
        return np.flatnonzero((rows <= objectives).all(axis=1) & (rows < objectives).any(axis=1))
