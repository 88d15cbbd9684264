"""Meetings of the same ops: who comes, and, while they are played, who is there and when each starts and ends."""

from __future__ import annotations

from typing import cast

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.engine.columns import Column, full, highest
from clustersim.engine.pairs import OpKey
from clustersim.engine.planning import GroupPlans

_NOBODY = np.zeros(0, dtype=np.int64)

_ONLY_MEETING = np.zeros(1, dtype=np.int64)
_NOBODY_MISSING = np.zeros(1, dtype=np.int64)

UNCOUNTED = 1
"""Meetings of a site up to which nobody is counted where all come as a whole: columns of one take longer than the rest
of a send. (0: always counted.)"""


class SiteSide(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One op's part in a site.

    Parameters
    ----------
    key : the op. meeting_of : (n_ranks,) int, the site's meeting each rank of the role comes to; -1 for none.
    everyone : every rank of the role comes. lone : the role has one rank, and the op one meeting.
    order, ptr : positions of the ranks by meeting; those of meeting ``m`` from ``ptr[m]``.
    each : ranks at each meeting, where it is the same number at all, else 0. straight : ``order`` is 0, 1, 2...
    pieces : of meetings that were asked for. gathers : whether all ranks of a role come, as many to each meeting, and
        more than one; ``leaders`` are then the positions of the first rank at each.
    """

    key: OpKey
    meeting_of: Ints
    everyone: bool
    order: Ints
    ptr: Ints
    lone: bool = False
    each: int = 1
    straight: bool = True
    pieces: dict[int, Ints | slice | int] = {}
    gathers: bool = False
    leaders: Ints = _NOBODY

    def piece(self, meeting: int) -> Ints | slice | int:
        """Positions of the ranks that come to one meeting: one number, an even stretch, or all of them."""
        if self.lone:
            return 0
        piece = self.pieces.get(meeting)
        if piece is None:
            piece = self.pieces[meeting] = _stretch(self.order[self.ptr[meeting] : self.ptr[meeting + 1]])
        return piece

    def who(self, meetings: Ints) -> Ints | slice:
        """Sorted positions in the role of the ranks that come to these meetings; ``slice(None)`` for all of them."""
        if self.lone or (self.everyone and len(meetings) == len(self.ptr) - 1):
            return slice(None)
        if self.each and self.everyone:
            members = self.order.reshape(-1, self.each)[meetings].ravel()
        else:
            members = np.concatenate([self.order[self.ptr[m] : self.ptr[m + 1]] for m in meetings.tolist()])
        return members if self.straight else np.sort(members)


class Site(msgspec.Struct, eq=False, gc=False):
    """Meetings of the same ops.

    Parameters
    ----------
    first : int, id of the first meeting; the others follow.
    sides : one per op taking part. ranks : (G, members) int, who meets.
    plans : what is transferred. played : that of a stretch, as its ranks began it in this play, once that is known.
    apart : the sides after the first come to one meeting each, in order. as_roles : whether all ranks of the sides'
    roles come, and together they are all members.
    """

    first: int
    sides: tuple[SiteSide, ...]
    ranks: Ints
    plans: GroupPlans
    apart: bool = False
    as_roles: bool = False
    played: GroupPlans | None = None

    def __post_init__(self) -> None:
        self.as_roles = not self.apart and sum([len(side.order) for side in self.sides]) == self.ranks.size

    def sides_of(self, meetings: Ints) -> tuple[SiteSide, ...]:
        """The sides that take part in these meetings."""
        if not self.apart:
            return self.sides
        return (self.sides[0], *(self.sides[m + 1] for m in meetings.tolist()))


def _stretch(positions: Ints) -> Ints | slice | int:
    """Positions as one number, or as a slice where they are evenly apart: numpy need not copy those."""
    first = int(positions[0])
    n = len(positions)
    if n == 1:
        return first
    step = int(positions[1]) - first
    if step > 0 and np.array_equal(positions, np.arange(first, first + n * step, step)):
        return slice(first, first + n * step, step)
    return positions


class SitePlay:
    """The meetings of a site in one play.

    site : who meets. clocked : whether its transfers are played on the clock.
    latency : before a transfer moves bytes [s]. moving : what it takes then, with its links to itself [s].
    start : the latest arrival so far [s]. end : inf for not known; both a number or one per meeting.
    times : views of where the start and end of each meeting are kept, (G,) each [s].
    missing : (G,) members still to arrive; None while roles arrive as a whole.
    """

    __slots__ = ("_came", "clocked", "end", "latency", "missing", "moving", "site", "start", "times")

    def __init__(self, site: Site, clocked: bool, alone: tuple[Column, Column], times: tuple[Floats, Floats]) -> None:
        self.site = site
        self.clocked = clocked
        self.times = times
        self.latency, self.moving = alone
        self.start: Column = 0.0
        self.end: Column = np.inf
        self.missing: Ints | None = None
        self._came: list[SiteSide] = []

    def come(self, side: SiteSide, ready: Column) -> bool:
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

    def _latest(self, side: SiteSide, ready: Column) -> Column:
        """The latest arrival of a role at each meeting."""
        if isinstance(ready, float):
            return ready
        if len(self.site.ranks) == 1:
            return highest(ready)
        column = ready if side.straight else ready[side.order]
        if side.each == 1:
            return column
        latest: Floats = (
            column.reshape(-1, side.each).max(axis=1) if side.each else np.maximum.reduceat(column, side.ptr[:-1])
        )
        return latest

    @property
    def whole(self) -> bool:
        """Whether roles can arrive as a whole: none has, rank by rank, and together they are all members."""
        return self.missing is None and self.site.as_roles

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
                self.missing -= side.each or np.diff(side.ptr)
            self.times[0][:], self.times[1][:] = self.start, np.inf
            self.start, self.end = self.times
        return self.missing

    def complete(self) -> tuple[Ints, Floats]:
        """Everybody is there, at all meetings, which end one by one: their numbers, and when they start [s]."""
        n = len(self.site.ranks)
        if n > UNCOUNTED:
            self.split()
            return np.arange(n), cast(Floats, self.start)
        start, end = self.times
        start[0], end[0] = self.start, np.inf
        self.start, self.end, self.missing = start, end, _NOBODY_MISSING
        return _ONLY_MEETING, start

    def over(self) -> tuple[Column, Column]:
        """Everybody is there, and all of its meetings are free: when they start and end is known, and kept."""
        # as the clock would add
        start = self.start
        end = (self.start + self.latency) + self.moving
        self.times[0][:], self.times[1][:] = start, end
        self.start, self.end = self.times
        return start, end

    def moved(self, meetings: Ints | None, takes: Floats) -> None:
        """Everybody is there, at these meetings or at all (None), which move bytes no longer than ``takes`` from then
        on [s]."""
        if meetings is None:
            self.times[0][:], self.times[1][:] = self.start, self.start + takes
            self.start, self.end = self.times
        else:
            cast(Floats, self.end)[meetings] = cast(Floats, self.start)[meetings] + takes[meetings]

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
        latest = cast(Floats, self.start)
        if len(missing) == 1:
            missing[0] -= len(meetings)
            latest[0] = max(latest.item(0), highest(times))
            return _NOBODY if missing.item(0) else _ONLY_MEETING
        came = np.bincount(meetings, minlength=len(missing))
        missing -= came
        np.maximum.at(latest, meetings, times)
        complete: Ints = ((missing == 0) & (came > 0)).nonzero()[0]
        return complete

    def begins(self, meetings: Ints, quiet: float) -> Floats:
        """These meetings do not begin before [s], where nobody arrives before ``quiet`` [s]."""
        if self.missing is None:
            return full(len(meetings), quiet)
        start = cast(Floats, self.start)[meetings]
        begins: Floats = np.where(self.missing[meetings] > 0, np.maximum(start, quiet), start)
        return begins


def spread(side: SiteSide, column: Column) -> Column:
    """What a site's meetings did, for each rank of a role whose ranks all come to it."""
    if isinstance(column, float):
        return column
    if len(column) == 1:
        return float(column[0])
    return column if side.straight and side.each == 1 else column[side.meeting_of]
