"""A pass that does what one before it did is not laid again: its ops are those, so many places on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from clustersim.core.program import Op
from clustersim.core.repeated import PassRepeat, in_microbatch
from clustersim.training.schedules.base import Action
from clustersim.training.strategies.base import OpList


class _LaidPass(NamedTuple):
    """A pass as it was laid at its home.

    ``entered`` : what an op could wait for outside of it, its last the kernel before. ``waits``, ``kernel`` : as the
    op list has them behind it. ``own`` : ops that wait for what is outside.
    """

    number: int
    begin: int
    own: int
    ops: tuple[Op, ...]
    entered: tuple[int, ...]
    waits: tuple[int, ...]
    kernel: int


class RepeatedPasses:
    """Lays the passes of one rank: :data:`clustersim.training.strategies.walk.LayPass`.

    Parameters
    ----------
    alike : what a pass is, equal for those that do the same; None for one that is laid by itself.
    """

    def __init__(self, ops: OpList, alike: Callable[[Action, bool], object | None]) -> None:
        self._ops = ops
        self._alike = alike
        self._known: dict[object, _LaidPass | None] = {}

    def __call__(self, action: Action, lay: Callable[[], None], *, last: bool) -> None:
        """Lay a pass with ``lay``, or as one that was laid before. ``last`` : gradients are complete after it."""
        ops = self._ops
        what = None if ops.owed else self._alike(action, last)
        if what is None:
            lay()
            return
        entered = (*ops.waits, ops.kernel)
        key = what, ops.step, ops.kernel >= 0, tuple(map(entered.index, entered))
        if key in self._known:
            known = self._known[key]
            lay() if known is None else self._again(known, action, entered)
            return
        begin = len(ops.ops)
        lay()
        laid = self._known[key] = self._laid(begin, entered)
        if laid is not None:
            end = begin + len(laid.ops)
            ops.passes.append(PassRepeat(begin, begin + laid.own, end, 0, laid.number, action.microbatch))

    def _laid(self, begin: int, entered: tuple[int, ...]) -> _LaidPass | None:
        """What was just laid; None where it cannot be repeated."""
        ops = self._ops
        laid = tuple(ops.ops[begin:])
        outside = {k: {need for need in op.after if need < begin} for k, op in enumerate(laid)}
        own = 1 + max((k for k, needs in outside.items() if needs), default=-1)
        left = {need for need in (*ops.waits, ops.kernel) if need < begin}
        if not laid or not left.union(*outside.values()) <= set(entered):
            return None
        return _LaidPass(len(self._known), begin, own, laid, entered, ops.waits, ops.kernel)

    def _again(self, known: _LaidPass, action: Action, entered: tuple[int, ...]) -> None:
        """Lay a known pass once more."""
        ops = self._ops
        begin = len(ops.ops)
        shift = begin - known.begin
        now = dict(zip(known.entered, entered, strict=True))

        def moved(needs: Sequence[int]) -> tuple[int, ...]:
            """Places of the same ops in the new pass."""
            return tuple([need + shift if need >= known.begin else now[need] for need in needs])

        for op in known.ops[: known.own]:
            label = in_microbatch(op.label, action.microbatch)
            ops.ops.append(msgspec.structs.replace(op, after=moved(op.after), label=label))
        ops.ops += known.ops[known.own :]
        ops.waits = moved(known.waits)
        (ops.kernel,) = moved((known.kernel,))
        ops.passes.append(PassRepeat(begin, begin + known.own, len(ops.ops), shift, known.number, action.microbatch))
