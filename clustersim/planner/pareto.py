"""Which options are worth having: those that no other beats in everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]


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
