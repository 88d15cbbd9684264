"""When at least one of some intervals is open."""

from __future__ import annotations

import numpy as np

from clustersim.core.arrays import Floats


class BusyTime:
    """When at least one of these intervals is open: (n,) float [s] each, joined once for many questions.

    >>> BusyTime(np.array([4.0, 0.0, 1.0]), np.array([5.0, 2.0, 3.0])).within(0.5, 4.5)
    3.0
    """

    def __init__(self, start: Floats, end: Floats) -> None:
        order = np.argsort(start, kind="stable")
        start = start[order]
        until = np.maximum.accumulate(end[order])
        opens = np.append(True, start[1:] > until[:-1])[: len(start)]
        self._start = start[opens]
        self._end = until[np.append(opens[1:], True)[: len(start)]]

    def within(self, begin: float, stop: float) -> float:
        """Seconds of [begin, stop] in which one is open."""
        near = self._near(begin, stop)
        inside = np.minimum(self._end[near], stop) - np.maximum(self._start[near], begin)
        seconds: float = sum(inside.tolist(), 0.0)
        return seconds

    def _near(self, begin: float, stop: float) -> slice:
        """Which of the joined intervals reach into [begin, stop]: no others are looked at."""
        return slice(int(np.searchsorted(self._end, begin, side="right")), int(np.searchsorted(self._start, stop)))
