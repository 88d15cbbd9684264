"""What a walk through a role's list remembers of transfers before: which are under way, and who was told of them."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np


class UnderWay:
    """Transfers that cross the same slots, of whichever streams, and which of them nobody was told of yet.

    end : when the last of them ends [s]. untold : of each stream, (end [s], its site's first meeting).
    """

    def __init__(self) -> None:
        self.end = -np.inf
        self._stream = ""  # whose the last one is
        self._end_beside = -np.inf  # of the last one of another stream
        self.untold: dict[str, list[tuple[float, int]]] = {}

    def add(self, stream: str, end: float, first: int | None) -> None:
        """One more that ends then; ``first`` : its site's first meeting, unless it is known to share."""
        if stream == self._stream:
            self.end = max(self.end, end)
        elif end > self.end:
            self._stream, self._end_beside, self.end = stream, self.end, end
        else:
            self._end_beside = max(self._end_beside, end)
        if first is not None:
            self.untold.setdefault(stream, []).append((end, first))

    def beside(self, stream: str) -> float:
        """When the last of those of other streams ends [s]."""
        return self._end_beside if stream == self._stream else self.end

    def told(self, stream: str, now: float) -> list[int]:
        """Those of other streams under way then: of one that is over, or was told, nobody asks again, for time goes
        on."""
        own = self.untold.pop(stream, None)
        under_way = [first for each in self.untold.values() for end, first in each if end > now]
        self.untold = {stream: own} if own else {}
        return under_way


def still(kinds: dict[tuple[bool, int], UnderWay], now: float) -> dict[tuple[bool, int], UnderWay]:
    """Those, by whether they are collectives and slots, of which one is not over."""
    return {kind: transfers for kind, transfers in kinds.items() if transfers.end > now}


class EarlierCollectives:
    """Collectives of one stream and the same plans, by place in their list: the last, and which nobody was told of."""

    def __init__(self) -> None:
        self.last = -1
        self._untold: list[int] = []

    def add(self, place: int) -> None:
        """One more, after all others."""
        self.last = place
        self._untold.append(place)

    def told(self, after: int) -> list[int]:
        """Those after a place that were not told before."""
        cut = bisect_right(self._untold, after)
        told = self._untold[cut:]
        del self._untold[cut:]
        return told
