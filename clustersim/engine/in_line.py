"""Ops in line: where in a role's list ops one after another wait for one another alone.

A pass that is written once and repeated (:mod:`clustersim.core.repeated`) is looked through once for each way in which
it hangs on what is before it; in its other places the same is found, so many places on.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Op, Role
from clustersim.core.repeated import PassRepeat, RepeatedOps, written

LEAST = 2
"""Collectives of a stretch at least."""


class OpsInLine(msgspec.Struct, eq=False, gc=False):
    """Ops one after another in a role's list, from ``begin`` to ``end``, that wait for one another, or for what the
    first waits for. ``groups``, ``stream`` : of its collectives; 0 for none yet. ``gates`` : places of collectives that
    wait for all before and that all after wait for. ``cuts`` : what others wait for without waiting for the last
    gate."""

    begin: int
    needs: tuple[int, ...]
    end: int = -1
    groups: int = 0
    stream: str = ""
    step: int = -1
    gates: list[int] = msgspec.field(default_factory=list)
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
            elif need not in needed:
                return False
        return within

    def moved(self, shift: int, needs: tuple[int, ...]) -> OpsInLine:
        """The same so many places on."""
        gates, ends, cuts = ([i + shift for i in places] for places in (self.gates, self.ends, self.cuts))
        return OpsInLine(
            self.begin + shift,
            needs,
            self.end + shift,
            self.groups,
            self.stream,
            self.step,
            gates,
            set(ends),
            set(cuts),
        )


class _FoundInPass(msgspec.Struct, frozen=True, gc=False):
    """What was found in a pass, at place ``begin``: lines that end in it, and the one that may go on behind it."""

    begin: int
    lines: tuple[OpsInLine, ...]
    open: OpsInLine | None


class _PassStreams(msgspec.Struct, frozen=True, gc=False):
    """Of each stream of a pass the first of its ops and the last, counted from the begin of the pass."""

    first: dict[str, int]
    last: dict[str, int]


class LineSearch:
    """The lines of a role that have :data:`LEAST` gates, in order."""

    def __init__(self, role: Role) -> None:
        self._ops = written(role.ops)
        self._inside = _OwnGroups(role)
        self.lines: list[OpsInLine] = []
        self._begins: list[int] = []
        self._last: dict[str, int] = {}
        self._line: OpsInLine | None = None
        self._streams: dict[int, _PassStreams] = {}
        self._known: dict[tuple[int, tuple[int, ...]], _FoundInPass] = {}
        done = 0
        for repeat in role.ops.passes if isinstance(role.ops, RepeatedOps) else ():
            self._over(done, repeat.begin)
            self._over_pass(repeat)
            done = repeat.end
        self._over(done, len(self._ops))
        self._close()

    def _close(self) -> None:
        """The line is over."""
        if self._line and len(self._line.gates) >= LEAST:
            self._keep(self._line)
        self._line = None

    def _keep(self, line: OpsInLine) -> None:
        self.lines.append(line)
        self._begins.append(line.begin)

    def _groups(self, op: Op) -> int:
        """The number of a collective's groups; 0 for what can be no part of a line but as a kernel."""
        return self._inside(op.groups) if type(op) is Collective else 0

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
            fits = groups > 0 or (type(op) is Compute and op.stream == COMPUTE_STREAM)
            line = self._line
            if line and not (fits and line.goes_on(op, groups, needs)):
                self._close()
                line = None
            if fits and line is None:
                line = self._line = OpsInLine(i, needs, step=op.step)
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
        fits = self._groups(op) > 0 or (type(op) is Compute and op.stream == COMPUTE_STREAM)
        if repeat.tail == repeat.begin or (self._line and fits and self._line.goes_on(op, self._groups(op), needs)):
            self._over(repeat.begin, repeat.end, repeat.tail, repeat.shift)
            return
        self._close()
        streams = self._streams_of(repeat)
        outside = self._outside(repeat, streams)
        flat = [need for needed in outside.values() for need in needed]
        key = repeat.home, tuple(-1 if need < 0 else flat.index(need) for need in flat)
        remembered = self._known.get(key)
        if remembered is None:
            n_lines = len(self.lines)
            self._over(repeat.begin, repeat.end, repeat.tail, repeat.shift)
            moved = tuple(line.moved(0, ()) for line in self.lines[n_lines:])
            line = self._line
            needs = tuple(-1 - flat.index(n) if n < repeat.begin else n for n in line.needs) if line else ()
            self._known[key] = _FoundInPass(repeat.begin, moved, line.moved(0, needs) if line else None)
            return
        for needed in outside.values():
            self._cut(tuple(needed), repeat.begin)
        shift = repeat.begin - remembered.begin
        for line in remembered.lines:
            self._keep(line.moved(shift, ()))
        if remembered.open:
            needs = tuple(flat[-1 - n] if n < 0 else n + shift for n in remembered.open.needs)
            self._line = remembered.open.moved(shift, needs)
        self._last.update({stream: repeat.begin + k for stream, k in streams.last.items()})

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
