"""Stretches: collectives of the same groups with the kernels between them, played as one.

A layer's tensor-parallel collectives and the kernels between wait for nothing but one another, and nobody else waits
for any but the last. Once the first has begun, the ranks of a group go together: what each op does is as long after
that whenever it was. So a stretch is worked out once (:class:`StretchTemplate`), for all micro-batches alike, and a
Program is played with one op in its place (:class:`Stretch`); what happened inside is laid out where rows are made.

A stretch begins and ends with a *gate*: an op that waits for all before it, and that all after it wait for. The first
is a collective, or ranks would begin at times of their own. Where the host's calls pass by all collectives, a stretch
is a pass with its calls, from what it waits for on: what it takes hangs on how far apart its ranks begin it, and is
worked out anew where that is new (:class:`clustersim.engine.inside.BegunApart`).
Nothing inside may share a link with others, or be beside a collective that is not (:mod:`clustersim.engine.bills`).
Where it might be, the stretch is *opened*: its ops are played one by one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Op, Program, Role, seconds
from clustersim.core.repeated import RepeatedOps, written
from clustersim.engine.beside import around
from clustersim.engine.in_line import LEAST, LineSearch, OpsInLine

ALIKE = 2
"""So many stretches of a kind there must be: ops of one that is like no other are played as fast by themselves, and
keep no columns of their own."""


class StretchTemplate(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What stretches have in common that differ by when they begin.

    ``ops`` : of one of them. ``needs`` : of each op the places in ``ops`` of what it waits for.
    ``spent`` : of each op what a kernel or call takes on each rank [s], or one number; None for a collective.
    ``slowdown`` : as in :class:`~clustersim.core.program.Program`. ``least`` : sum of the kernels' least durations [s].
    """

    ops: tuple[Op, ...]
    needs: tuple[tuple[int, ...], ...]
    spent: tuple[Floats | float | None, ...]
    slowdown: float
    least: float

    @property
    def apart(self) -> bool:
        """Whether ranks begin it at times of their own."""
        return isinstance(self.ops[0], Compute)


class Stretch(Collective, frozen=True, eq=False, gc=False):
    """Ops of a role that are played as one: from place ``first`` to ``last`` of ``whole``, the role's list."""

    first: int = 0
    last: int = -1
    whole: Sequence[Op] = ()
    template: StretchTemplate | None = None

    @property
    def inner(self) -> Sequence[Op]:
        """Them."""
        return self.whole[self.first : self.last + 1]

    @property
    def kernels(self) -> float:
        """What its kernels take on the fastest rank at the usual pace, together [s]."""
        return self.template.least if self.template else 0.0


def n_ops(op: Op) -> int:
    """How many ops of a Program an op that is played stands for."""
    return op.last + 1 - op.first if type(op) is Stretch else 1


class Shortened:
    """A Program with stretches in place of their ops.

    program : what is played. whole : what it stands for. places : of each role the place in its whole list of each op
    that is played, of a stretch that of its first.
    """

    def __init__(self, whole: Program, opened: set[tuple[int, int]], *, op_by_op: bool = False) -> None:
        self.whole = whole
        self.places: list[list[int]] = []
        roles = []
        for r, role in enumerate(whole.roles):
            found = [] if op_by_op else [s for s in _stretches(role) if (r, s[0]) not in opened]
            slowdown = whole.overlap_slowdown
            short, places = _with(role, found, slowdown)
            billed = _billed(short) if slowdown > 0 and found else set()
            if billed:
                short, places = _with(role, [s for s in found if s[0] not in billed], slowdown)
            roles.append(short)
            self.places.append(places)
        self.program = replace(whole, roles=tuple(roles)) if any(map(_shorter, whole.roles, roles)) else whole

    def place(self, key: tuple[int, int]) -> tuple[int, int]:
        """Role and place in its whole list of an op that is played; of a stretch, of its first."""
        return key[0], self.places[key[0]][key[1]]

    @property
    def any(self) -> bool:
        """Whether there are stretches."""
        return self.program is not self.whole


def _shorter(role: Role, short: Role) -> bool:
    return len(short.ops) < len(role.ops)


def _stretches(role: Role) -> list[tuple[int, int]]:
    """First and last place of each stretch of a role."""
    ops = written(role.ops)
    return [piece for line in LineSearch(role).lines for piece in _pieces(line, ops)]


def _pieces(line: OpsInLine, ops: Sequence[Op]) -> list[tuple[int, int]]:
    """First and last place of the stretches of a line: between gates, and none with a cut inside."""
    whole = _whole_pass(line, ops) if line.calls else None
    if whole:
        return [whole]
    pieces = []
    collectives = set(line.collectives)
    for low, high in pairwise([-1, *sorted(line.cuts), line.end]):
        between = [gate for gate in line.gates if low < gate <= high]
        meeting = [gate for gate in between if gate in collectives]
        # What others wait for beyond the last gate passes by it where it is no gate itself.
        if len(meeting) >= LEAST:
            pieces.append((meeting[0], between[-1]))
    return pieces


def _whole_pass(line: OpsInLine, ops: Sequence[Op]) -> tuple[int, int] | None:
    """First and last place of a line with the host's calls, as far as a kernel by which all is paid for; None where
    others wait for what is inside."""
    last = next((gate for gate in reversed(line.gates) if _is_kernel(ops[gate])), -1)
    inside = bisect_right(line.collectives, last)
    return (line.begin, last) if inside >= LEAST and not any(cut < last for cut in line.cuts) else None


def _is_kernel(op: Op) -> bool:
    return type(op) is Compute and op.stream == COMPUTE_STREAM


def _with(role: Role, stretches: list[tuple[int, int]], slowdown: float) -> tuple[Role, list[int]]:
    """The role with these stretches as one op each, and the place in its list of each of its ops."""
    if not stretches:
        return role, list(range(len(role.ops)))
    templates = _Templates(role, slowdown)
    found = [(begin, end, templates.of(begin, end)) for begin, end in stretches]
    times = Counter(id(template) for *_, template in found)
    short = _ShortList(role)
    done = 0
    for begin, end, template in found:
        if times[id(template)] >= ALIKE:
            short.extend(done, begin)
            short.add_stretch(begin, end, template)
            done = end + 1
    short.extend(done, len(role.ops))
    return replace(role, ops=tuple(short.ops)), short.places


class _ShortList:
    """A role's list with stretches in it, in the making; ``places`` : of each op in the whole list, of a stretch that
    of its first."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self.ops: list[Op] = []
        self.places: list[int] = []
        self._now = [-1] * len(role.ops)  # the new place of an op; -1 inside a stretch
        self._latest: dict[str, int] = {}  # of each stream the new place of its last op

    def extend(self, begin: int, end: int) -> None:
        """Ops that are played by themselves."""
        for i in range(begin, end):
            op = self._role.ops[i]
            after = self._after(op, op.stream)
            self._now[i] = self._latest[op.stream] = len(self.ops)
            self.places.append(i)
            self.ops.append(msgspec.structs.replace(op, after=after) if op.after or after else op)

    def add_stretch(self, begin: int, end: int, template: StretchTemplate) -> None:
        """A stretch, on the stream of its collectives."""
        first = self._role.ops[begin]
        meeting = first_meeting(template.ops)
        after = self._after(first, meeting.stream)
        self._now[end] = len(self.ops)
        self._latest |= dict.fromkeys([op.stream for op in template.ops], len(self.ops))
        self.places.append(begin)
        self.ops.append(
            Stretch(
                first.name,
                "barrier",
                0.0,
                meeting.groups,
                meeting.stream,
                after,
                communicator=meeting.communicator,
                step=first.step,
                first=begin,
                last=end,
                whole=self._role.ops,
                template=template,
            )
        )

    def _after(self, op: Op, stream: str) -> tuple[int, ...]:
        """What an op waits for by its new place, on a stream; inside a stretch it waits for the last, too."""
        after = tuple([self._now[need] for need in op.after if self._now[need] >= 0])
        before = self._latest.get(op.stream, -1)
        if before < 0 or before in after or self.ops[before].stream == stream:
            return after
        return (*after, before)


class _Templates:
    """The templates of a role."""

    def __init__(self, role: Role, slowdown: float) -> None:
        self._role = role
        self._slowdown = slowdown
        self._known: dict[object, StretchTemplate] = {}
        self._equal: dict[object, StretchTemplate] = {}

    def of(self, begin: int, end: int) -> StretchTemplate:
        """Of the ops from ``begin`` to ``end``."""
        # Arrays of groups and durations are the Program's, and live as long as it; so do ops that are written once.
        listed = written(self._role.ops)[begin : end + 1]
        first = first_meeting(listed)
        key = id(first.groups), first.step, *self._asked(begin, end, listed)
        known = self._known.get(key)
        if known is None:
            # What is written several times often asks for the same; each step has a pace of its own.
            ops = tuple(self._role.ops[begin : end + 1])
            asked = id(first.groups), first.step, *((op.stream, _asks(op, begin + k)) for k, op in enumerate(ops))
            known = self._known[key] = self._equal.get(asked) or self._made(ops, begin)
            self._equal[asked] = known
        return known

    def _made(self, ops: tuple[Op, ...], begin: int) -> StretchTemplate:
        needs = tuple(_within(ops, begin))
        spent = tuple(_spent(self._role, op) if isinstance(op, Compute) else None for op in ops)
        least = sum(float(np.min(op.duration)) for op in ops if isinstance(op, Compute))
        return StretchTemplate(ops, needs, spent, self._slowdown, least)

    def _asked(self, begin: int, end: int, listed: Sequence[Op]) -> Iterator[object]:
        """What the times of these ops depend on; of those that a pass repeats, which they are."""
        ops = self._role.ops
        if not isinstance(ops, RepeatedOps):
            yield from map(_asks, listed, range(begin, end + 1))
            return
        done = begin
        for each in ops.passes_among(begin, end):
            low, high = max(each.tail, done), min(each.end, end + 1)
            yield from (_asks(ops[i], i) for i in range(done, low))
            # Ops of a pass wait for others of it alone: as far before them as at its home.
            yield from map(id, listed[low - begin : high - begin])
            done = high
        yield from (_asks(ops[i], i) for i in range(done, end + 1))


def _asks(op: Op, i: int) -> tuple[object, ...]:
    """What the times of an op depend on, once its stretch has begun."""
    after = op.after
    # Mostly it is the one before.
    needs: object = i - after[0] if len(after) == 1 else tuple([i - need for need in after])
    if type(op) is Compute:
        duration = op.duration
        return needs, duration if isinstance(duration, float) else id(duration), op.paced
    return needs, *terms(op)  # type: ignore[arg-type]


def terms(op: Collective) -> tuple[object, ...]:
    """What a collective asks of its backend."""
    asked = op.kind, op.nbytes, op.dtype, op.redop, op.root, op.algorithm, op.protocol
    return *asked, id(op.matrix), id(op.kernel), op.communicator


def first_meeting(ops: Sequence[Op]) -> Collective:
    """The first collective of a stretch."""
    return next(op for op in ops if isinstance(op, Collective))


def _within(ops: tuple[Op, ...], begin: int) -> Iterator[tuple[int, ...]]:
    last: dict[str, int] = {}
    for k, op in enumerate(ops):
        needs = [need - begin for need in op.after if need >= begin]
        if op.stream in last and last[op.stream] not in needs:
            needs.append(last[op.stream])
        last[op.stream] = k
        yield tuple(needs)


def _spent(role: Role, op: Compute) -> Floats | float:
    takes = seconds(role, op)
    return takes if isinstance(takes, np.ndarray) and takes.ndim else float(takes)


def _billed(role: Role) -> set[int]:
    """The first places of stretches that may be beside a collective, and so may be billed for it."""
    works = [isinstance(op, Stretch) or _is_kernel(op) for op in role.ops]
    kernels = np.flatnonzero(works).tolist()
    place = np.where(works, np.cumsum(works) - 1, -1).tolist()
    needs: list[tuple[int, ...]] = []
    last: dict[str, int] = {}
    for i, op in enumerate(role.ops):
        needs.append(op.after if op.stream not in last else (*op.after, last[op.stream]))
        last[op.stream] = i
    billed: set[int] = set()
    for op, own, above, below in zip(role.ops, place, *around(needs, place), strict=True):
        if isinstance(op, Collective) and below - above - 1 > (own >= 0):
            # The first behind it may begin with what would have to pay for it.
            beside = [role.ops[k] for k in kernels[above + 1 : below + 1]]
            billed.update(other.first for other in beside if isinstance(other, Stretch))
    return billed
