"""Op lists in which a pass is written once and repeated: each micro-batch does what the one before did, further on.

Of a repeated op only two things are its own: what it waits for, which is as far before it as before, and the
micro-batch in its label. So a list keeps the ops of one pass, and of each further pass from where it goes; who asks for
an op is given it as if it had been written out. Who only asks what ops of all passes have in common reads them once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, overload

import msgspec

from clustersim.core.label import Label

if TYPE_CHECKING:
    from clustersim.core.op_infos import OpInfo
    from clustersim.core.program import Op

Item = TypeVar("Item")
Moved = TypeVar("Moved", "Op", "OpInfo")


class MadeWhenAsked(Sequence[Item]):
    """A list whose items are made when they are asked for, by ``_at``; once all have been, they are kept."""

    @overload
    def __getitem__(self, place: int) -> Item: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[Item, ...]: ...
    def __getitem__(self, place: int | slice) -> Item | tuple[Item, ...]:
        written: tuple[Item, ...] | None = self.__dict__.get("_all")
        if written is not None:  # somebody went through all: they need not be made again
            return written[place]
        if isinstance(place, slice):
            return tuple(self._at(i) for i in range(len(self))[place])
        return self._at(range(len(self))[int(place)])

    def __iter__(self) -> Iterator[Item]:
        return iter(self._all)

    @cached_property
    def _all(self) -> tuple[Item, ...]:
        return tuple(map(self._at, range(len(self))))

    def _at(self, i: int) -> Item:
        """The item at a place from 0 on."""
        raise NotImplementedError


class PassRepeat(msgspec.Struct, frozen=True, gc=False):
    """A pass that is written once, at one of its places.

    Parameters
    ----------
    begin, end : its first place, and the one behind its last. tail : from where on its ops are those of ``home``; those
        before wait for what is outside of it, and are its own.
    shift : places from where it is written to here; 0 where it is written here. home : the number of what is written.
    microbatch : which it is of.
    """

    begin: int
    tail: int
    end: int
    shift: int
    home: int
    microbatch: int


class RepeatedOps(MadeWhenAsked["Op"]):
    """An op list, some passes of which are repeated.

    Parameters
    ----------
    written : (n,) an op for each place; of a repeated one that of its home, or one that has another duration.
    passes : ascending, those that are written too. own : places in repeated passes that have an op of their own.
    """

    def __init__(self, written: Sequence[Op], passes: Sequence[PassRepeat], own: frozenset[int] = frozenset()) -> None:
        self.written = tuple(written)
        self.passes = tuple(passes)
        self.own = own
        self._begins = [repeat.begin for repeat in passes]

    def __len__(self) -> int:
        return len(self.written)

    def __getstate__(self) -> tuple[tuple[Op, ...], tuple[PassRepeat, ...], frozenset[int]]:
        return self.written, self.passes, self.own

    def __setstate__(self, state: tuple[tuple[Op, ...], tuple[PassRepeat, ...], frozenset[int]]) -> None:
        RepeatedOps.__init__(self, *state)

    def _at(self, i: int) -> Op:
        op = self.written[i]
        repeat = self._pass_of(i)
        return op if repeat is None or not repeat.shift else moved(op, repeat.shift, repeat.microbatch)

    def after(self, i: int) -> tuple[int, ...]:
        """What the op at a place waits for."""
        repeat = self._pass_of(i)
        shift = repeat.shift if repeat else 0
        after = self.written[i].after
        return tuple([need + shift for need in after]) if shift else after

    def passes_among(self, first: int, last: int) -> Iterator[PassRepeat]:
        """Passes with an op of ``tail`` from place ``first`` to ``last``."""
        for p in range(max(bisect_right(self._begins, first) - 1, 0), bisect_right(self._begins, last)):
            if self.passes[p].end > first and self.passes[p].tail <= last:
                yield self.passes[p]

    def lasting(self, written: Sequence[Op]) -> RepeatedOps:
        """The list with ``written`` ops that differ from its own in how long they take."""
        changed = [i for i, (new, old) in enumerate(zip(written, self.written, strict=True)) if new is not old]
        own = {i for i in changed if (repeat := self._pass_of(i)) and repeat.shift}
        for i in changed:  # what was written there goes on in other passes
            home = self._pass_of(i)
            others = (repeat for repeat in self.passes if home and repeat.home == home.home and repeat.shift)
            places = (i + repeat.shift for repeat in others) if home and not home.shift else iter(())
            own |= set(list(places)[:1])
        return RepeatedOps(written, self.passes, self.own | own)

    def _pass_of(self, i: int) -> PassRepeat | None:
        """The pass that an op of ``tail`` is in."""
        p = bisect_right(self._begins, i) - 1
        return self.passes[p] if p >= 0 and self.passes[p].tail <= i < self.passes[p].end else None

    def distinct(self) -> Iterator[tuple[int, Op]]:
        """Places, and the ops there, of everything that is written."""
        done = 0
        for repeat in self.passes:
            if repeat.shift:
                yield from ((i, self.written[i]) for i in range(done, repeat.tail))
                done = repeat.end
        yield from ((i, self.written[i]) for i in range(done, len(self.written)))
        yield from ((i, self._at(i)) for i in sorted(self.own))


def moved(op: Moved, shift: int, microbatch: int) -> Moved:
    """The same op, or what it was, so many places on, in another micro-batch."""
    after = tuple([need + shift for need in op.after])
    return msgspec.structs.replace(op, after=after, label=in_microbatch(op.label, microbatch))


def in_microbatch(label: Label | None, microbatch: int) -> Label | None:
    """The label in another micro-batch."""
    return None if label is None else msgspec.structs.replace(label, microbatch=microbatch)


def written(ops: Sequence[Op]) -> Sequence[Op]:
    """An op for each place, as it is but for what it waits for and its micro-batch."""
    return ops.written if isinstance(ops, RepeatedOps) else ops


def lasting(ops: Sequence[Op], others: Sequence[Op]) -> Sequence[Op]:
    """``ops`` with ``others``, which differ from what is written in how long they take."""
    return ops.lasting(others) if isinstance(ops, RepeatedOps) else tuple(others)


def distinct(ops: Sequence[Op]) -> Iterator[tuple[int, Op]]:
    """Places and ops of everything that is written."""
    return ops.distinct() if isinstance(ops, RepeatedOps) else enumerate(ops)
