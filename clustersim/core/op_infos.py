"""What each op of a run was, of which those of repeated passes (:mod:`clustersim.core.repeated`) are kept once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Ints
from clustersim.core.label import Label
from clustersim.core.mix import Mix
from clustersim.core.repeated import MadeWhenAsked, moved


class OpDetail(TypedDict, total=False):
    """What is known of an op that only some are known of; a fact that is not known is left out.

    Of a transfer
    -------------
    algorithm, protocol, n_channels : what was chosen. dtype, nbytes : of the request, where they are not the op's own.
    group_size : members. n_groups : groups that did it. groups : (n_groups, members) int, the ranks that met.
    meets : the other ops they came from, where they did not all run one op. n_islands : of NVLink, of a group.
    latency, ceiling : alone on an idle network [s], [bytes/s of payload]. lower_bound : the least that it takes [s].
    between : what a member of an uneven all-to-all sends to others per byte of S, in the mean.
    within : whether the kernel of another collective makes it, too.

    Of a measured one
    -----------------
    communicator, purpose : as the profiler names its process group. members : of it. whole : whether all were seen.
    transfer_s : from the last member's start to the first one's end [s]. skew_s : between first and last start [s].
    rebucketed : whether it is made of other buckets than were measured.
    kernel : of a kernel, that its own name says what bounds it.
    """

    algorithm: str
    protocol: str
    n_channels: int
    dtype: str
    nbytes: float
    group_size: int
    n_groups: int
    groups: Ints
    meets: tuple[int, ...]
    n_islands: int
    latency: float
    ceiling: float
    lower_bound: float
    between: float
    within: bool
    communicator: str
    purpose: str
    members: tuple[int, ...]
    whole: bool
    transfer_s: float
    skew_s: float
    rebucketed: bool
    kernel: bool


class OpInfo(msgspec.Struct, frozen=True, gc=False):
    """What a span was: the label side of an op, shared by simulated and measured runs.

    Parameters
    ----------
    name, stream, phase, bound : as in :mod:`clustersim.core.program`. kind : ``"compute"``, a collective's kind,
        ``"send"`` or ``"recv"``.
    nbytes : float [bytes], NCCL's S for a collective, HBM bytes for compute. flops : of one rank. step : the training
        step it belongs to.
    mix : of a simulated compute op, what its time at its rank's usual pace is spent on; None where unknown.
    label : what it belongs to, as fields; None where unknown. stage : the pipeline stage of its ranks, -1 for none.
    detail : what is known of a transfer or a measured kernel beside that.
    """

    name: str
    kind: str
    stream: str
    phase: str = "other"
    bound: str = "compute"
    nbytes: float = 0.0
    flops: float = 0.0
    step: int = 0
    role: str = ""
    after: tuple[int, ...] = ()
    detail: OpDetail = {}
    label: Label | None = None
    stage: int = -1
    mix: Mix | None = None


def takes_sms(op: OpInfo) -> bool:
    """Whether an op is a collective that takes SMs from what is computed beside it, and not a hop of another's."""
    return op.kind not in {"compute", "send", "recv"} and not op.detail.get("within", False)


class InfoPass(msgspec.Struct, frozen=True, gc=False):
    """Places of the ops of a pass that may repeat those of another, and the micro-batch it is of."""

    begin: int
    end: int
    microbatch: int


class RepeatedInfos(MadeWhenAsked[OpInfo]):
    """What the ops were, as if all had been written out.

    Parameters
    ----------
    written : of ops of which nothing else is repeated. of : (n_ops,) int, an index into it for each op.
    passes : that repeat others, ascending.
    """

    def __init__(self, written: Sequence[OpInfo], of: Ints, passes: Sequence[InfoPass]) -> None:
        self.written = tuple(written)
        self.of = of
        self.passes = tuple(passes)
        self._home = np.unique(of, return_index=True)[1]  # where each is written

    def __len__(self) -> int:
        return len(self.of)

    def __getstate__(self) -> tuple[tuple[OpInfo, ...], Ints, tuple[InfoPass, ...]]:
        return self.written, self.of, self.passes

    def __setstate__(self, state: tuple[tuple[OpInfo, ...], Ints, tuple[InfoPass, ...]]) -> None:
        RepeatedInfos.__init__(self, *state)

    def _at(self, i: int) -> OpInfo:
        number = int(self.of[i])
        info = self.written[number]
        shift = i - int(self._home[number])
        return moved(info, shift, int(self.microbatch[i])) if shift else info

    def after(self, i: int) -> tuple[int, ...]:
        """What the op at a place waits for."""
        number = int(self.of[i])
        shift = i - int(self._home[number])
        return tuple([need + shift for need in self.written[number].after])

    @cached_property
    def microbatch(self) -> Ints:
        """(n_ops,) int, of each op's label; -1 without one."""
        own = [-1 if info.label is None else info.label.microbatch for info in self.written]
        numbers: Ints = np.array(own, dtype=np.int64)[self.of]
        labelled = np.array([info.label is not None for info in self.written], dtype=np.bool_)[self.of]
        for each in self.passes:
            place = slice(each.begin, each.end)
            there = labelled[place] & (self._home[self.of[place]] != np.arange(each.begin, each.end))
            numbers[place] = np.where(there, each.microbatch, numbers[place])
        return numbers


def of_each(ops: Sequence[OpInfo], fact: Callable[[OpInfo], Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(n_ops,) a fact of each op, other than what it waits for and its micro-batch: asked once of those that are
    repeated."""
    if isinstance(ops, RepeatedInfos):
        return np.array([fact(op) for op in ops.written], dtype=dtype)[ops.of]
    return np.array([fact(op) for op in ops], dtype=dtype)


def each_kind(ops: Sequence[OpInfo]) -> Iterator[tuple[int, OpInfo]]:
    """Place of each op, and what it was, but for what it waits for and its micro-batch: none is written out."""
    if isinstance(ops, RepeatedInfos):
        return zip(range(len(ops)), map(ops.written.__getitem__, ops.of.tolist()), strict=True)
    return iter(enumerate(ops))


def after_of(ops: Sequence[OpInfo], i: int) -> tuple[int, ...]:
    """What an op waits for."""
    return ops.after(i) if isinstance(ops, RepeatedInfos) else ops[i].after


def kind_of(ops: Sequence[OpInfo]) -> Ints:
    """(n_ops,) int, which of :func:`kinds` each op is one of."""
    return ops.of if isinstance(ops, RepeatedInfos) else np.arange(len(ops))


def kinds(ops: Sequence[OpInfo]) -> Sequence[OpInfo]:
    """The ops, of those that are repeated one."""
    return ops.written if isinstance(ops, RepeatedInfos) else ops


def microbatches(ops: Sequence[OpInfo]) -> Ints:
    """(n_ops,) int, the micro-batch of each op's label; -1 without one."""
    if isinstance(ops, RepeatedInfos):
        return ops.microbatch
    return np.array([-1 if op.label is None else op.label.microbatch for op in ops], dtype=np.int64)
