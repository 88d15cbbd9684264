"""A pass through many equal layers, played with few of them: what a repeat of ops adds, the others add as well.

A pass through a model is a list of ops in which the same ones come again, layer by layer: they wait for what is as far
before them, and take as long. Of such *repeats* the first and the last ones are kept and those between are left out.
Where the repeats in the middle of the kept ones begin and end each op as long after the repeat before, and nothing but
they is under way meanwhile, the run is at every moment where it was a repeat before: each repeat that is left out would
have added as much again. That is looked at, op by op; where it is not so, everything is played.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.program import Collective, Compute, Op, Program
from clustersim.core.timeline import Timeline

KEPT = 10
"""Rounds that are played, half of them from the begin and half from the end."""
HALF = KEPT // 2
SETTLED = 3, 8
"""The first of them that is to be as the others, and the one behind the last."""
REACH = 2
"""Rounds before its own of which an op may wait for something."""
EVEN = 1e-9
"""How far times between two repeats may differ, relatively: they are differences of sums of thousands of times."""


class KeptRepeats(msgspec.Struct, frozen=True, gc=False):
    """Rounds of a shortened Program: :data:`KEPT` of ``size`` ops each from place ``first`` on, and so many that are
    ``left_out`` behind the first half of them."""

    first: int
    size: int
    left_out: int


class AddedTime(msgspec.Struct, frozen=True, gc=False):
    """What repeats that are ``left_out`` add: each as much as is spent from ``begin`` to ``end`` [s] of what was
    played."""

    begin: float
    end: float
    left_out: int


def with_few_layers(program: Program) -> tuple[Program, tuple[KeptRepeats, ...]]:
    """A Program with fewer repeats, where it has many, and which; the same Program and none where not."""
    if len(program.roles) > 1:
        return program, ()
    (role,) = program.roles
    marks = _marks(role.ops)
    repeats = [] if marks is None else list(_repeats(marks))
    ops = _without(role.ops, repeats)
    if not repeats or ops is None:
        return program, ()
    kept = []
    left_out = 0
    for first, size, count in repeats:
        kept.append(KeptRepeats(first - left_out, size, count - KEPT))
        left_out += (count - KEPT) * size
    return replace(program, roles=(replace(role, ops=ops),)), tuple(kept)


def _marks(ops: Sequence[Op]) -> Ints | None:
    """(ops,) equal for ops that take as long in the same surroundings; None where they cannot be told."""
    numbers: dict[object, int] = {}
    marks = []
    for i, op in enumerate(ops):
        after = op.after
        # What waits for many ends something, and is no part of a repeat.
        needs: object = i - after[0] if len(after) == 1 else tuple([i - need for need in after]) if after else None
        if type(op) is Compute:
            if type(op.duration) is not float:
                return None
            mark: object = needs, op.step, op.stream, op.duration, op.paced, op.phase, op.bound
        elif type(op) is Collective:
            asked = op.kind, op.nbytes, op.dtype, op.redop, op.root, op.algorithm, op.protocol, op.communicator
            mark = needs, op.step, op.stream, id(op.groups), id(op.matrix), id(op.kernel), asked
        else:
            return None
        marks.append(numbers.setdefault(mark, len(numbers)))
    return np.array(marks, dtype=np.int64)


def _repeats(marks: Ints) -> Iterator[tuple[int, int, int]]:
    """First place, size and count of repeats, ascending, of which there are more than are kept."""
    taken: list[tuple[int, int, int]] = []
    for size in _sizes(marks):
        alike = np.concatenate([[False], marks[size:] == marks[:-size], [False]])
        begins, ends = np.flatnonzero(alike[1:] != alike[:-1]).reshape(-1, 2).T
        long = np.flatnonzero(ends - begins >= KEPT * size)
        for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
            if all(end + size <= first or begin >= first + s * n for first, s, n in taken):
                taken.append((begin, size, (end - begin) // size + 1))
    yield from sorted(taken)


def _sizes(marks: Ints) -> list[int]:
    """How far from each other equal marks are often, ascending."""
    order = np.argsort(marks, kind="stable")
    apart = np.diff(order)[np.diff(marks[order]) == 0]
    often = np.bincount(apart) if len(apart) else np.zeros(0, dtype=np.int64)
    sizes: list[int] = np.flatnonzero(often >= KEPT).tolist()
    return [size for size in sizes if size * (KEPT + 1) < len(marks)]


def _without(ops: Sequence[Op], repeats: Sequence[tuple[int, int, int]]) -> tuple[Op, ...] | None:
    """The ops without what is left out of repeats; None where one waits for something that has no place any more."""
    left = np.zeros(len(ops), dtype=bool)
    moved = np.zeros(len(ops), dtype=bool)  # behind what is left out: they wait for as far before as they did
    for first, size, count in repeats:
        begin, end = first + HALF * size, first + (count - HALF) * size
        left[begin:end] = True
        moved[end : end + HALF * size] = True
        for i in range(first + (count - 1) * size, first + count * size):
            if any(i - need > REACH * size for need in ops[i].after):
                return None
    place = np.where(left, -1, np.cumsum(~left) - 1).tolist()
    kept = []
    for i in np.flatnonzero(~left).tolist():
        op = ops[i]
        if not op.after or place[i] == i:
            kept.append(op)
            continue
        back = i - place[i] if moved[i] else 0
        after = tuple([need - back if back else place[need] for need in op.after])
        if min(after) < 0:
            if not _implied(ops, op, place):
                return None
            after = tuple([need for need in after if need >= 0])
        kept.append(msgspec.structs.replace(op, after=after))
    return tuple(kept)


def _implied(ops: Sequence[Op], op: Op, place: Sequence[int]) -> bool:
    """Whether what an op waits for and is left out ends before something else that it waits for: on its stream."""
    last: dict[str, int] = {}
    for need in op.after:
        if place[need] >= 0:
            last[ops[need].stream] = max(last.get(ops[need].stream, -1), need)
    return all(place[need] >= 0 or need < last.get(ops[need].stream, -1) for need in op.after)


def added_times(timeline: Timeline, repeats: Sequence[KeptRepeats]) -> tuple[AddedTime, ...] | None:
    """What repeats that are left out add, by the Timeline of a shortened Program of one role; None where some kept ones
    are not as the ones before."""
    per_op = timeline.per_op()
    start = per_op["start"]
    end = per_op["end"]
    times = []
    for kept in repeats:
        time = _added(start, end, kept)
        if time is None:
            return None
        times.append(time)
    return tuple(times)


def _added(start: Floats, end: Floats, kept: KeptRepeats) -> AddedTime | None:
    first, behind = SETTLED
    own = slice(kept.first + first * kept.size, kept.first + behind * kept.size)
    starts = start[own].reshape(-1, kept.size)
    ends = end[own].reshape(-1, kept.size)
    later = np.concatenate([np.diff(starts, axis=0), np.diff(ends, axis=0)])
    each = float(later.mean())
    if np.ptp(later) > EVEN * each:
        return None
    # From when to when nothing else is under way: the state of the run is that of these repeats.
    begin, until = float(starts[1].min()), float(ends[-2].max())
    beside = (start < until) & (end > begin)
    beside[own] = False
    if beside.any() or each <= 0.0:
        return None
    since = float(ends[1].max())
    return AddedTime(since, since + each, kept.left_out)
