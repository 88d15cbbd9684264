"""Links whose rate changes while a run goes on: one that slows down, recovers, or flaps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

MOST_EDGES = 30_000
"""Changes of rates that a run follows, some seconds of work: a link that flaps every microsecond is none."""


@dataclass(frozen=True)
class Varying:
    """Links that have ``factor`` of their rate, above 0 and at most 1, from ``begin`` to ``end`` [s], and again
    ``every`` so many seconds; at 0 only once."""

    links: tuple[int, ...]
    factor: float
    begin: float
    end: float
    every: float = 0.0

    def at(self, now: float) -> float:
        """The factor at a moment.

        >>> flap = Varying((0,), 0.5, begin=1.0, end=2.0, every=10.0)
        >>> [flap.at(t) for t in (0.0, 1.0, 1.5, 2.0, 11.0)]
        [1.0, 0.5, 0.5, 1.0, 0.5]
        """
        start, slack = self._start(now), self._slack(now)
        return self.factor if start <= now + slack and now + slack < start + self.end - self.begin else 1.0

    def edge(self, now: float) -> float:
        """When it changes next, after ``now`` [s]; infinite for never."""
        start = self._start(now)
        later = (start + self.every,) if self.every else ()
        return min((t for t in (start, start + self.end - self.begin, *later) if t > now + self._slack(now)),
                   default=math.inf)  # fmt: skip

    def _slack(self, now: float) -> float:
        """A moment this close to an edge is the edge."""
        return max(1e-9 * self.every, 1e-12 * now)

    def _start(self, now: float) -> float:
        """When the spell before this moment began, or the first one will."""
        if not self.every or now < self.begin:
            return self.begin
        return self.begin + self.every * math.floor((now - self.begin + self._slack(now)) / self.every)


def taken(varying: Sequence[Varying], slot_of: dict[int, int], n_slots: int, now: float) -> Floats:
    """(n_slots,) float: the part of each slot that is not there now; ``slot_of`` : by link."""
    left = np.ones(n_slots)
    for one in varying:
        factor = one.at(now)
        for link in one.links:
            left[slot_of[link]] *= factor
    gone: Floats = 1.0 - left
    return gone
