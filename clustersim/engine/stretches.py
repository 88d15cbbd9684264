"""Stretches: collectives of the same groups with the kernels between them, played as one.

A layer's tensor-parallel collectives and the kernels between wait for nothing but one another, and nobody else waits
for any but the last. Once the first has begun, the ranks of a group go together: what each op does is as long after
that whenever it was. So a stretch is worked out once (:class:`StretchTemplate`), for all micro-batches alike, and a
Program is played with one op in its place (:class:`Stretch`); what happened inside is laid out where rows are made.

A stretch begins and ends with a *gate*: a collective that waits for all before it, and that all after it wait for.
Nothing inside may share a link with others, or be beside a collective that is not (:mod:`clustersim.engine.bills`).
Where it might be, the stretch is *opened*: its ops are played one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Op, Program, Role, seconds

LEAST = 2
"""Collectives of a stretch at least."""


class StretchTemplate(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What stretches have in common that differ by when they begin.

    ``ops`` : of one of them. ``needs`` : of each op the places in ``ops`` of what it waits for.
    ``spent`` : of each op what a kernel takes on each rank [s], or one number; None for a collective.
    ``slowdown`` : as in :class:`~clustersim.core.program.Program`. ``least`` : sum of the kernels' least durations [s].
    """

    ops: tuple[Op, ...]
    needs: tuple[tuple[int, ...], ...]
    spent: tuple[Floats | float | None, ...]
    slowdown: float
    least: float


class Stretch(Collective, frozen=True, eq=False, gc=False):
    """Ops of a role that are played as one; ``first`` is the place of the first of ``inner`` in the role's list."""

    first: int = 0
    inner: tuple[Op, ...] = ()
    template: StretchTemplate | None = None

    @property
    def kernels(self) -> float:
        """What its kernels take on the fastest rank at the usual pace, together [s]."""
        return self.template.least if self.template else 0.0


def n_ops(op: Op) -> int:
    """How many ops of a Program an op that is played stands for."""
    return len(op.inner) if type(op) is Stretch else 1


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
    runs, cuts = _runs(role)
    return [piece for run in runs for piece in _pieces(run, sorted(cuts.get(run.begin, ())))]


class _OpsInLine(msgspec.Struct, eq=False, gc=False):
    """Ops one after another in a role's list, from ``begin`` to ``end``, that wait for one another, or for what the
    first waits for. ``groups``, ``stream`` : of its collectives; 0 for none yet. ``gates`` : places of collectives that
    wait for all before and that all after wait for."""

    begin: int
    needs: tuple[int, ...]
    end: int = -1
    groups: int = 0
    stream: str = ""
    step: int = -1
    gates: list[int] = []
    ends: set[int] = set()  # what nothing in the run waits for so far

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


def _runs(role: Role) -> tuple[list[_OpsInLine], dict[int, set[int]]]:
    """The runs of a role; and of each, by where it begins, what others wait for without waiting for its last gate."""
    inside = _OwnGroups(role)
    runs: list[_OpsInLine] = []
    run_of: list[_OpsInLine | None] = [None] * len(role.ops)
    cuts: dict[int, set[int]] = {}
    last: dict[str, int] = {}
    run: _OpsInLine | None = None
    for i, op in enumerate(role.ops):
        before = last.get(op.stream, -1)
        last[op.stream] = i
        needs = op.after if before < 0 or before in op.after else (*op.after, before)
        groups = inside(op.groups) if type(op) is Collective else 0
        fits = groups > 0 or (type(op) is Compute and op.stream == COMPUTE_STREAM)
        if run and not (fits and _goes_on(run, op, groups, needs)):
            if len(run.gates) >= LEAST:
                runs.append(run)
                run_of[run.begin : i] = [run] * (i - run.begin)
            run = None
        if fits and run is None:
            run = _OpsInLine(i, needs, step=op.step, gates=[], ends=set())
        for need in needs:
            other = run_of[need]
            if other is not None and need != other.gates[-1] and other.gates[-1] not in needs:
                cuts.setdefault(other.begin, set()).add(need)
        if run:
            run.add(i, op, groups, needs)
    if run and len(run.gates) >= LEAST:
        runs.append(run)
    return runs, cuts


def _goes_on(run: _OpsInLine, op: Op, groups: int, needs: tuple[int, ...]) -> bool:
    """Whether an op is the next of a run."""
    if op.step != run.step or not needs:
        return False
    if groups and run.groups and (groups != run.groups or op.stream != run.stream):
        return False
    begin = run.begin
    known = run.needs
    within = False
    for need in needs:
        if need >= begin:
            within = True
        elif need not in known:
            return False
    return within


def _pieces(run: _OpsInLine, cuts: list[int]) -> list[tuple[int, int]]:
    """First and last place of the stretches of a run: between gates, and none with a cut inside."""
    pieces = []
    gates = run.gates
    for low, high in pairwise([-1, *cuts, run.end]):
        between = [gate for gate in gates if low < gate <= high]
        # What others wait for beyond the last gate passes by it where it is no gate itself.
        if len(between) >= LEAST:
            pieces.append((between[0], between[-1]))
    return pieces


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


def _with(role: Role, stretches: list[tuple[int, int]], slowdown: float) -> tuple[Role, list[int]]:
    """The role with these stretches as one op each, and the place in its list of each of its ops."""
    if not stretches:
        return role, list(range(len(role.ops)))
    templates = _Templates(role, slowdown)
    ops: list[Op] = []
    places: list[int] = []
    now = [-1] * len(role.ops)  # the new place of an op; -1 inside a stretch
    done = 0
    for begin, end in [*stretches, (len(role.ops), len(role.ops))]:
        for i in range(done, begin):
            op = role.ops[i]
            now[i] = len(ops)
            places.append(i)
            ops.append(msgspec.structs.replace(op, after=_moved(op.after, now)) if op.after else op)
        if begin < len(role.ops):
            first = role.ops[begin]
            now[end] = len(ops)
            places.append(begin)
            ops.append(
                Stretch(
                    first.name,
                    "barrier",
                    0.0,
                    first.groups,  # type: ignore[union-attr]
                    first.stream,
                    _moved(first.after, now),
                    communicator=first.communicator,  # type: ignore[union-attr]
                    step=first.step,
                    first=begin,
                    inner=role.ops[begin : end + 1],
                    template=templates.of(begin, end),
                )
            )
        done = end + 1
    return replace(role, ops=tuple(ops)), places


def _moved(after: tuple[int, ...], now: list[int]) -> tuple[int, ...]:
    """What an op waits for by its new place; inside a stretch it waits for the last, too."""
    return tuple(now[need] for need in after if now[need] >= 0)


class _Templates:
    """The templates of a role."""

    def __init__(self, role: Role, slowdown: float) -> None:
        self._role = role
        self._slowdown = slowdown
        self._known: dict[object, StretchTemplate] = {}

    def of(self, begin: int, end: int) -> StretchTemplate:
        """Of the ops from ``begin`` to ``end``."""
        ops = self._role.ops[begin : end + 1]
        # Arrays of groups and durations are the Program's, and live as long as it.
        first: Collective = ops[0]  # type: ignore[assignment]
        key = id(first.groups), first.step, *map(_asks, ops, range(begin, end + 1))
        known = self._known.get(key)
        if known is None:
            needs = tuple(_within(ops, begin))
            spent = tuple(_spent(self._role, op) if isinstance(op, Compute) else None for op in ops)
            least = sum(float(np.min(op.duration)) for op in ops if isinstance(op, Compute))
            known = self._known[key] = StretchTemplate(ops, needs, spent, self._slowdown, least)
        return known


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
    n = len(role.ops)
    works = [isinstance(op, Stretch) or (type(op) is Compute and op.stream == COMPUTE_STREAM) for op in role.ops]
    count = np.concatenate([[0], np.cumsum(works)])
    above = [-1] * n  # the last kernel or stretch that an op waits for
    below = [n] * n  # the first that waits for it
    needs_of: list[tuple[int, ...]] = []
    last: dict[str, int] = {}
    for i, op in enumerate(role.ops):
        needs = op.after if op.stream not in last else (*op.after, last[op.stream])
        last[op.stream] = i
        needs_of.append(needs)
        above[i] = max((need if works[need] else above[need] for need in needs), default=-1)
        if above[i] >= 0:
            above[i] = max(above[i], *(above[need] for need in needs))
    for i in range(n - 1, -1, -1):
        least = i if works[i] else below[i]
        for need in needs_of[i]:
            below[need] = min(below[need], least)
    billed: set[int] = set()
    for i, op in enumerate(role.ops):
        between = count[below[i]] - count[above[i] + 1] - isinstance(op, Stretch)
        if isinstance(op, Collective) and between > 0:
            beside = role.ops[max(above[i], 0) : below[i] + 1]
            billed.update(other.first for other in beside if isinstance(other, Stretch))
    return billed
