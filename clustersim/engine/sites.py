"""Meetings while they are played: who is there, and when each meeting starts and ends."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.meetings import Side, Site

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Column: TypeAlias = Floats | float


class Standing:
    """The meetings of a site in one play.

    site : who meets. clocked : whether its transfers are played on the clock.
    latency : before a transfer moves bytes [s]. moving : what it takes then, with its links to itself [s].
    start : the latest arrival so far [s]. end : inf for not known; both a number or one per meeting.
    missing : (G,) members still to arrive; None while roles arrive as a whole.
    """

    __slots__ = ("_came", "clocked", "end", "latency", "missing", "moving", "site", "start")

    def __init__(self, site: Site, clocked: bool, latency: Column, moving: Column) -> None:
        self.site, self.clocked, self.latency, self.moving = site, clocked, latency, moving
        self.start: Column = 0.0
        self.end: Column = np.inf
        self.missing: Ints | None = None
        self._came: list[Side] = []

    def come(self, side: Side, ready: Column) -> bool:
        """All ranks of a role arrive; whether everybody is there."""
        latest = self._latest(side, ready)
        if isinstance(self.start, float) and isinstance(latest, float):
            self.start = max(self.start, latest)
        elif isinstance(self.start, float) and self.start == 0.0:
            self.start = latest
        else:
            self.start = np.maximum(self.start, latest)
        self._came.append(side)
        return len(self._came) == len(self.site.sides)

    def _latest(self, side: Side, ready: Column) -> Column:
        """The latest arrival of a role at each meeting."""
        if isinstance(ready, float):
            return ready
        if len(self.site.ranks) == 1:
            return float(np.maximum.reduce(ready))
        column = ready if side.straight else ready[side.order]
        if side.each == 1:
            return column
        if side.each:
            return column.reshape(-1, side.each).max(axis=1)
        latest: Floats = np.maximum.reduceat(column, side.ptr[:-1])
        return latest

    @property
    def whole(self) -> bool:
        """Whether roles can arrive as a whole: none has, rank by rank, and together they are all members."""
        site = self.site
        return self.missing is None and not site.apart and sum(len(s.order) for s in site.sides) == site.ranks.size

    @property
    def started(self) -> bool:
        """Whether somebody is there, and somebody may be missing."""
        return self.missing is not None or 0 < len(self._came) < len(self.site.sides)

    def split(self) -> Ints:
        """From now on, ranks arrive and meetings end one by one."""
        if self.missing is None:
            n = len(self.site.ranks)
            self.missing = np.full(n, self.site.ranks.shape[1], dtype=np.int64)
            for side in self._came:
                self.missing -= np.diff(side.ptr)
            self.start = np.full(n, self.start) if isinstance(self.start, float) else self.start.copy()
            self.end = np.full(n, np.inf)
        return self.missing

    def come_one(self, meeting: int, time: float) -> bool:
        """One rank arrives; whether its meeting is complete."""
        missing = self.split()
        if self.start[meeting] < time:  # type: ignore[index]
            self.start[meeting] = time  # type: ignore[index]
        missing[meeting] -= 1
        return bool(missing[meeting] == 0)

    def come_some(self, meetings: Ints, times: Column) -> Ints:
        """Some ranks arrive (an element each); returns the meetings that are now complete."""
        missing = self.split()
        assert isinstance(self.start, np.ndarray)
        if len(missing) == 1:
            missing[0] -= len(meetings)
            self.start[0] = max(self.start[0], times if isinstance(times, float) else times.max())
            return np.flatnonzero(missing == 0)
        came = np.bincount(meetings, minlength=len(missing))
        missing -= came
        np.maximum.at(self.start, meetings, times)
        return np.flatnonzero((missing == 0) & (came > 0))


def spread(side: Side, column: Column) -> Column:
    """What a site's meetings did, for each rank of a role whose ranks all come to it."""
    if isinstance(column, float):
        return column
    if len(column) == 1:
        return float(column[0])
    return column if side.straight and side.each == 1 else column[side.meeting_of]
