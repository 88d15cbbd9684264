"""Ops in line: where in a role's list ops one after another wait for one another alone.

A pass that is written once and repeated (:mod:`clustersim.core.repeated`) is looked through once for each way in which
it hangs on what is before it; in its other places the same is found, so many places on.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TypeAlias

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.program import COMPUTE_STREAM, HOST_STREAM, Collective, Compute, Op, Role
from clustersim.core.repeated import PassRepeat, RepeatedOps, distinct, written

LEAST = 2
"""Collectives of a stretch at least."""

_LOOKED_BACK = 8
"""Intervals behind a line that are looked at."""


Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""First and last places."""


def _among(place: int, intervals: Intervals) -> bool:
    return any(first <= place <= last for first, last in intervals)


class OpsInLine(msgspec.Struct, eq=False, gc=False):
    """Ops one after another in a role's list, from ``begin`` to ``end``, that wait for one another, or for what the
    first waits for.

    ``groups``, ``stream`` : of its ``collectives``, by place; 0 for none yet. ``gates`` : places of ops that wait for
    all before and that all after wait for. ``cuts`` : what others wait for without waiting for the last gate.
    ``behind`` : first and last places of ops that are over where all that the first op waits for is. ``calls`` :
    whether the host's calls are among the ops: these pass by most collectives.
    """

    begin: int
    needs: tuple[int, ...]
    end: int = -1
    groups: int = 0
    stream: str = ""
    step: int = -1
    behind: Intervals = ()
    calls: bool = False
    gates: list[int] = msgspec.field(default_factory=list)
    collectives: list[int] = msgspec.field(default_factory=list)
    ends: set[int] = msgspec.field(default_factory=set)  # what nothing in the run waits for so far
    cuts: set[int] = msgspec.field(default_factory=set)

    def add(self, i: int, op: Op, groups: int, needs: tuple[int, ...]) -> None:
        """The next op."""
        self.end = i
        latest = max(needs, default=-1) if i > self.begin else i
        while self.gates and self.gates[-1] > latest:
            self.gates.pop()  # this op passes by it
        self.ends.difference_update(needs)
        if groups:
            self.groups, self.stream = groups, op.stream
            self.collectives.append(i)
        elif op.stream == HOST_STREAM:
            self.calls = True
        if not self.ends:
            self.gates.append(i)
        self.ends.add(i)

    def goes_on(self, op: Op, groups: int, needs: tuple[int, ...]) -> bool:
        """Whether an op is the next."""
        if op.step != self.step or not needs:
            return False
        if groups and self.groups and (groups != self.groups or op.stream != self.stream):
            return False
        begin = self.begin
        needed = self.needs
        within = False
        for need in needs:
            if need >= begin:
                within = True
            elif need not in needed and not _among(need, self.behind):
                return False
        return within or (bool(self.behind) and all(need in needs for need in needed))

    def uncovered(self, needs: tuple[int, ...]) -> tuple[int, ...]:
        """What an op of the line needs without waiting, by its line, for all that comes behind that."""
        return tuple([need for need in needs if not _among(need, self.behind)])

    def moved(self, shift: int, needs: tuple[int, ...]) -> OpsInLine:
        """The same so many places on."""
        gates, met, ends, cuts = (
            [i + shift for i in places] for places in (self.gates, self.collectives, self.ends, self.cuts)
        )
        return OpsInLine(
            self.begin + shift,
            needs,
            self.end + shift,
            self.groups,
            self.stream,
            self.step,
            (),
            self.calls,
            gates,
            met,
            set(ends),
            set(cuts),
        )


class _FoundInPass(msgspec.Struct, frozen=True, gc=False):
    """What was found in a pass, at place ``begin``: ops of lines that wait for what is outside, by their places from
    there on; lines that end in it, the last of them, which may be too short, and the one that may go on behind it."""

    begin: int
    of_lines: frozenset[int]
    lines: tuple[OpsInLine, ...]
    last: OpsInLine | None
    open: OpsInLine | None


class _PassStreams(msgspec.Struct, frozen=True, gc=False):
    """Of each stream of a pass the first of its ops and the last, counted from the begin of the pass."""

    first: dict[str, int]
    last: dict[str, int]


class LineSearch:
    """The lines of a role that have :data:`LEAST` collectives, in order."""

    def __init__(self, role: Role) -> None:
        self._ops = written(role.ops)
        self._inside = _OwnGroups(role)
        self.lines: list[OpsInLine] = []
        self._begins: list[int] = []
        self._last: dict[str, int] = {}
        self._line: OpsInLine | None = None
        self._over_line: OpsInLine | None = None  # the last that is over
        # Calls pass by collectives, but come to a pass when the one before is over: so there a line is of one pass.
        self._of_lines: set[int] = set()  # ops of lines that wait for what is before these
        self._calls = any(op.stream == HOST_STREAM and type(op) is Compute for _, op in distinct(role.ops))
        self._streams: dict[int, _PassStreams] = {}
        self._known: dict[tuple[int, tuple[int, ...], tuple[int, ...]], _FoundInPass] = {}
        done = 0
        for repeat in role.ops.passes if isinstance(role.ops, RepeatedOps) else ():
            self._over(done, repeat.begin)
            self._over_pass(repeat)
            done = repeat.end
        self._over(done, len(self._ops))
        self._close()

    def _close(self) -> None:
        """The line is over."""
        line = self._line
        if line and len(line.collectives) >= LEAST and line.gates:
            self._keep(line)
        self._over_line = line or self._over_line
        self._line = None

    def _keep(self, line: OpsInLine) -> None:
        self.lines.append(line)
        self._begins.append(line.begin)

    def _groups(self, op: Op) -> int:
        """The number of a collective's groups; 0 for what can be no part of a line but as a kernel."""
        return self._inside(op.groups) if type(op) is Collective else 0

    def _fits(self, op: Op, groups: int) -> bool:
        """Whether an op can be part of a line."""
        if groups:
            return True
        return type(op) is Compute and (op.stream == COMPUTE_STREAM or (self._calls and op.stream == HOST_STREAM))

    def _behind(self, needs: tuple[int, ...]) -> Intervals:
        """See :class:`OpsInLine`: the line before this one as far as its last gate, if that is waited for, and what was
        over when that line began."""
        line = self._over_line
        if not line or not line.gates or line.gates[-1] not in needs:
            return ()
        return ((line.begin, line.gates[-1]), *((need, need) for need in line.needs), *line.behind)[:_LOOKED_BACK]

    def _over(self, begin: int, end: int, tail: int = -1, shift: int = 0) -> None:
        """Look at ops one by one; those from ``tail`` on wait for what is ``shift`` places on."""
        last = self._last
        for i in range(begin, end):
            op = self._ops[i]
            after = op.after if not shift or i < tail else tuple([need + shift for need in op.after])
            before = last.get(op.stream, -1)
            last[op.stream] = i
            needs = after if before < 0 or before in after else (*after, before)
            groups = self._groups(op)
            fits = self._fits(op, groups)
            line = self._line
            if line and not (fits and line.goes_on(op, groups, needs)):
                self._close()
                line = None
            if fits and line is None:
                line = self._line = OpsInLine(i, needs, step=op.step, behind=self._behind(needs))
            if line and any(need < line.begin for need in needs):
                self._cut(line.uncovered(needs), line.begin)
                self._of_lines.add(i)
            else:
                self._cut(needs, line.begin if line else i)
            if line:
                line.add(i, op, groups, needs)

    def _cut(self, needs: tuple[int, ...], below: int) -> None:
        """Somebody waits for these, of which those below a place may be in lines that are over."""
        for need in needs:
            k = bisect_right(self._begins, need) - 1 if need < below else -1
            if k >= 0 and need <= self.lines[k].end:
                gate = self.lines[k].gates[-1]
                if need != gate and gate not in needs:
                    self.lines[k].cuts.add(need)

    def _over_pass(self, repeat: PassRepeat) -> None:
        """Look at a pass; of one that is known, at what it waits for."""
        op = self._ops[repeat.begin]
        before = self._last.get(op.stream, -1)
        needs = op.after if before < 0 or before in op.after else (*op.after, before)
        groups = self._groups(op)
        goes_on = self._line and not self._calls and self._fits(op, groups) and self._line.goes_on(op, groups, needs)
        if self._calls:
            self._close()
        if repeat.tail == repeat.begin or goes_on:
            self._over(repeat.begin, repeat.end, repeat.tail, repeat.shift)
            return
        self._close()
        streams = self._streams_of(repeat)
        outside = self._outside(repeat, streams)
        flat = [need for needed in outside.values() for need in needed]
        behind = self._behind(tuple(flat))
        key = (
            repeat.home,
            tuple(-1 if need < 0 else flat.index(need) for need in flat),
            tuple(_among(need, behind) + _among(need, tuple((last, last) for _, last in behind[:1])) for need in flat),
        )
        remembered = self._known.get(key)
        if remembered is None:
            self._known[key] = self._looked_at(repeat, flat)
            return
        for k, needed in outside.items():
            covered = behind if k in remembered.of_lines else ()
            self._cut(tuple(need for need in needed if not _among(need, covered)), repeat.begin)
        self._as_remembered(remembered, repeat.begin - remembered.begin, flat)
        self._last.update({stream: repeat.begin + k for stream, k in streams.last.items()})

    def _looked_at(self, repeat: PassRepeat, flat: list[int]) -> _FoundInPass:
        """Look at every op of a pass, and what came of it; ``flat`` : what it waits for outside."""
        n_lines = len(self.lines)
        line_before = self._over_line
        self._over(repeat.begin, repeat.end, repeat.tail, repeat.shift)
        moved = tuple(line.moved(0, ()) for line in self.lines[n_lines:])
        line = self._line
        last = self._over_line if self._over_line is not line_before else None
        last = last.moved(0, _told(last.needs, flat, repeat.begin)) if last else None
        still_open = line.moved(0, _told(line.needs, flat, repeat.begin)) if line else None
        of_lines = frozenset(i - repeat.begin for i in self._of_lines if i >= repeat.begin)
        return _FoundInPass(repeat.begin, of_lines, moved, last, still_open)

    def _as_remembered(self, remembered: _FoundInPass, shift: int, flat: list[int]) -> None:
        """The lines of a pass that is known, so many places later."""
        for line in remembered.lines:
            self._keep(line.moved(shift, ()))
        if remembered.last:
            self._over_line = remembered.last.moved(shift, _taken(remembered.last.needs, flat, shift))
        if remembered.open:
            needs = _taken(remembered.open.needs, flat, shift)
            self._line = remembered.open.moved(shift, needs)
            self._line.behind = self._behind(needs)

    def _streams_of(self, repeat: PassRepeat) -> _PassStreams:
        if repeat.home not in self._streams:
            names = [op.stream for op in self._ops[repeat.begin : repeat.end]]
            last = {stream: k for k, stream in enumerate(names)}
            first = {stream: k for k, stream in reversed(list(enumerate(names)))}
            self._streams[repeat.home] = _PassStreams(first, last)
        return self._streams[repeat.home]

    def _outside(self, repeat: PassRepeat, streams: _PassStreams) -> dict[int, list[int]]:
        """What ops of a pass wait for that is outside of it, by their places counted from its begin; -1 where an op is
        the first of its stream."""
        outside = {
            k: [need for need in self._ops[repeat.begin + k].after if need < repeat.begin]
            for k in range(repeat.tail - repeat.begin)
        }
        for stream, k in streams.first.items():
            outside.setdefault(k, []).append(self._last.get(stream, -1))
        return outside


def _told(needs: tuple[int, ...], outside: list[int], begin: int) -> tuple[int, ...]:
    """What is needed, that before a pass by its place in ``outside``: below zero."""
    return tuple([-1 - outside.index(need) if need < begin else need for need in needs])


def _taken(needs: tuple[int, ...], outside: list[int], shift: int) -> tuple[int, ...]:
    """The same so many places on, with other needs ``outside``."""
    return tuple([outside[-1 - need] if need < 0 else need + shift for need in needs])


class _OwnGroups:
    """Groups of several ranks that are wholly in a role, by number; equal ones have one, and each array is looked at
    once."""

    def __init__(self, role: Role) -> None:
        self._ranks = role.ranks
        self._known: dict[int, int] = {}
        self._equal: dict[tuple[int, bytes], int] = {}

    def __call__(self, groups: Ints) -> int:
        """The number, from 1 on; 0 for others."""
        known = self._known.get(id(groups))
        if known is None:
            inside = groups.shape[1] > 1 and groups.size == len(self._ranks) and np.isin(groups, self._ranks).all()
            equal = self._equal.setdefault((groups.shape[1], groups.tobytes()), len(self._equal) + 1)
            known = self._known[id(groups)] = equal if inside else 0
        return known
