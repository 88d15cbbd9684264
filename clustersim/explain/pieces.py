"""Every instant of every rank, in one state: the partition that breakdown, stalls and the report are sums of.

A rank's streams may all be busy at once, so a rule says which of them an instant belongs to, in this order:

1. a kernel on the compute stream (or, where a measured run names its streams otherwise, any kernel);
2. a kernel on another stream of the device, such as a communication hook's cast;
3. a transfer that is running: nothing computes, so it is *exposed*;
4. a transfer that waits for a peer to arrive: a *stall*, or a *bubble* where the schedule itself is the reason;
5. the host: copies to and from it, its own work, loading input;
6. work that is ready and queues for a server;
7. nothing. In a simulated run a rank without any open op has done its whole list while others have not (a stall, or
   between stages, and of workers that wait for nobody, a bubble); on a real machine its queue is
   empty because the host has not launched anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Bools, Columns, Floats, Ints
from clustersim.core.blocks import no_rows
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import kinds, of_each
from clustersim.core.program import COMPUTE_STREAM, HOST_CALL
from clustersim.core.sheets import Sheet
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.columns import OpColumns, cuts, did, seen, stretches
from clustersim.explain.occupancy import on_host, stays_on_device
from clustersim.explain.pace import RankClasses, classes

STATES = (
    "compute-bound",
    "memory-bound",
    "launch-bound",
    "recomputation",
    "optimizer",
    "exposed transfer",
    "waiting for a peer",
    "bubble",
    "host",
)
"""What an instant of a rank can be."""
KERNELS = STATES[:5]
"""Those in which it computes. An op has the state that limits most of it; :func:`by_class` tells its kernels apart."""


class PieceState(IntEnum):
    """The places of :data:`STATES`."""

    COMPUTE, MEMORY, LAUNCH, AGAIN, OPTIMIZER, EXPOSED, STALL, BUBBLE, HOST = range(len(STATES))


class PieceRule(IntEnum):
    """Why an instant has its state: the rules above, in order."""

    KERNEL, SIDE_KERNEL, TRANSFER, PEER, HOST_WORK, QUEUED, NOTHING = range(7)


_OF_BOUND = {"memory": PieceState.MEMORY, "launch": PieceState.LAUNCH, "host": PieceState.HOST}


@dataclass(frozen=True, eq=False)
class Pieces:
    """A partition of ``[begin, end]`` for one rank of each class of ranks that behave alike, or nearly (``sampled``).

    Parameters
    ----------
    begin, end : float [s], the window.
    ranks : (c,) int, the representatives. class_of : (world_size,) int, index into ``ranks``.
    owner : (n,) int, index into ``ranks``. start, stop : (n,) float [s]; sorted by owner, then start.
    state : (n,) int, index into :data:`STATES`. why : (n,) int, the rule that gave it.
    op : (n,) int, the op the instant belongs to; -1 for none.
    beside : (n,) int, a transfer that runs hidden beside a kernel; -1 for none.
    """

    begin: float
    end: float
    ranks: Ints
    class_of: Ints
    owner: Ints
    start: Floats
    stop: Floats
    state: Ints
    why: Ints
    op: Ints
    beside: Ints
    sampled: bool = False

    @property
    def seconds(self) -> Floats:
        """(n,) float [s], length of each piece."""
        length: Floats = self.stop - self.start
        return length

    @property
    def computes(self) -> Bools:
        """(n,) bool, whether it is a kernel's; the host's work that holds the compute stream is none."""
        computing: Bools = (self.why <= PieceRule.SIDE_KERNEL) & (self.state != PieceState.HOST)
        return computing

    @property
    def weight(self) -> Floats:
        """(c,) float, how many ranks each representative stands for."""
        return np.bincount(self.class_of, minlength=len(self.ranks)).astype(np.float64)


def pieces(
    timeline: Timeline, begin: float | None = None, end: float | None = None, chosen: RankClasses | None = None
) -> Pieces:
    """The partition of a timeline, or of the window from ``begin`` to ``end`` [s].

    ``chosen`` : who stands for whom; None is :func:`clustersim.explain.pace.classes`.
    """
    t0 = 0.0 if begin is None else begin
    t1 = timeline.makespan if end is None else end
    chosen = chosen or classes(timeline)
    return TimePartition(timeline).of(chosen, _spans(timeline, chosen.ranks, t0, t1), t0, t1)


def is_server(op: OpInfo) -> bool:
    """Whether an op belongs to a parameter server."""
    return "server" in op.role


def _spans(timeline: Timeline, ranks: Ints, t0: float, t1: float) -> Columns:
    """Spans that touch the window as columns owner, op, ready, start, end; times from ``t0`` on."""
    ops = timeline.per_op()
    inside = (ops["end"] > t0) & (ops["ready"] < t1)
    parts = [_of_sheet(sheet, ranks, t0, t1) for sheet in timeline.sheets(ranks, of_ops=inside)]
    columns = [np.concatenate(column) for column in zip(no_rows(), *parts, strict=True)]
    if (np.diff(columns[0]) < 0).any():
        order = np.argsort(columns[0], kind="stable")  # sheets hold whole ranks
        columns = [column[order] for column in columns]
    return dict(zip(("owner", "op", "ready", "start", "end"), columns, strict=True))


def _of_sheet(sheet: Sheet, ranks: Ints, t0: float, t1: float) -> tuple[npt.NDArray[Any], ...]:
    """The same of the ranks of a sheet, by owner, then start, then op."""
    inside = (sheet.end > t0) & (sheet.ready < t1)
    ready, start, end = (np.clip(column - t0, 0.0, t1 - t0) for column in (sheet.ready, sheet.start, sheet.end))
    order = np.argsort(start, axis=1, kind="stable")  # ops are ascending
    inside = np.take_along_axis(inside, order, axis=1)
    owner = np.repeat(np.searchsorted(ranks, sheet.ranks), inside.sum(axis=1))
    times = (np.take_along_axis(column, order, axis=1)[inside] for column in (ready, start, end))
    return owner, sheet.op[order][inside], *times


AT_ONCE = 2**16
"""Spans that are cut up together: whole ranks of them."""


class TimePartition:
    """What a timeline's ops mean for the partition, worked out once for many windows and ranks."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self._n_streams, self._stream, self._running, self._waiting, self._kernel, self._peer = _of_ops(timeline)
        idle = PieceState.BUBBLE if staged(timeline) else PieceState.STALL
        self._nothing = idle if timeline.source == "simulated" else PieceState.HOST

    def of(self, chosen: RankClasses, spans: Columns, t0: float, t1: float) -> Pieces:
        """The partition of ``[t0, t1]`` [s] for the chosen ranks, whose spans are given from ``t0`` on."""
        # one float orders by rank, then by time
        n = len(chosen.ranks)
        scale = 2.0 * (t1 - t0) if t1 > t0 else 1.0
        chunk = max(1, AT_ONCE * n // max(len(spans["owner"]), 1))
        edges = [*range(0, n, chunk), n]
        ends = np.searchsorted(spans["owner"], edges).tolist()
        parts = []
        for (first, last), (a, b) in zip(pairwise(edges), pairwise(ends), strict=True):
            chunk_spans = {name: column[a:b] for name, column in spans.items()} | {"owner": spans["owner"][a:b] - first}
            within = self._recorded(chosen.ranks[first:last], t0, t1)
            who, left, right, why, op, beside = self._cut(chunk_spans, within, t1 - t0, scale)
            shift = t0 - who * scale
            parts.append((who + first, left + shift, right + shift, self._states(why, op), why, op, beside))
        owner, start, stop, state, rule, ops, hidden = (np.concatenate(column) for column in zip(*parts, strict=True))
        common = t0, t1, chosen.ranks, chosen.class_of
        return Pieces(*common, owner, start, stop, state, rule, ops, hidden, chosen.sampled)

    def _cut(
        self, spans: Columns, recorded: tuple[Floats, Floats], length: float, scale: float
    ) -> tuple[Ints, Floats, Floats, Ints, Ints, Ints]:
        """Owner, begin and end (as keys), rule, op and hidden transfer of each piece of some ranks, which were
        ``recorded`` from and until when."""
        key, ready, start, end = cuts(spans, len(recorded[0]), length, scale)
        owner = (key / scale + 1e-9).astype(np.int64)
        inside = owner[1:] == owner[:-1]
        if self.timeline.source != "simulated":  # what a rank did before its profile began, and after, nobody saw
            inside &= seen(recorded, scale, key[:-1], owner[:-1])
        why, op, beside = (column[:-1][inside] for column in self._holders(spans["op"], ready, start, end, len(key)))
        return owner[:-1][inside], key[:-1][inside], key[1:][inside], why, op, beside

    def _recorded(self, ranks: Ints, t0: float, t1: float) -> tuple[Floats, Floats]:
        """(ranks,) float each [s from ``t0`` on]: within a window, from when and until when ranks have spans. One that
        had spans before it was seen from its begin on: a window may begin after a step that is left out."""
        if self.timeline.source == "simulated":
            return np.zeros(len(ranks)), np.full(len(ranks), t1 - t0)
        first, last = (np.clip(moments[ranks] - t0, 0.0, t1 - t0) for moments in _first_and_last(self.timeline))
        return first, last

    def of_rank(self, columns: OpColumns, rank: int, begin: float, end: float) -> Pieces:
        """The partition of a window for one rank alone."""
        rank_spans = columns.of_rank(rank, begin, end)
        order = np.lexsort((rank_spans.op, rank_spans.start))
        spans: Columns = {"owner": np.zeros(len(order), dtype=np.int64), "op": rank_spans.op[order]}
        for name, column in (("ready", rank_spans.ready), ("start", rank_spans.start), ("end", rank_spans.end)):
            spans[name] = np.clip(column[order] - begin, 0.0, end - begin)
        alone = RankClasses(np.array([rank]), np.zeros(self.timeline.world_size, dtype=np.int64), False)
        return self.of(alone, spans, begin, end)

    def _holders(self, ops: Ints, ready: Ints, start: Ints, end: Ints, n: int) -> tuple[Ints, Ints, Ints]:
        """Per piece the rule, its op, and the transfer hidden beside it; spans begin and end at numbers of pieces."""
        by = np.argsort(self._stream[ops], kind="stable")
        ops, stream = ops[by], self._stream[ops][by].astype(np.int64)
        begin, ready, start, end = stream * n, *(column[by] + stream * n for column in (ready, start, end))
        # Queued work is ready long before the stream is free; its own time begins where its predecessor's ends. And
        # of two spans of a stream at once, which only measured runs have, the later holds it.
        ready[1:] = np.maximum(ready[1:], np.maximum.accumulate(end)[:-1])
        ready = np.minimum(ready, start)
        end[:-1] = np.minimum(end[:-1], ready[1:])
        ready = ready - begin
        start = start - begin
        end = end - begin
        base = len(self.timeline.ops)
        name = stream * base + ops  # the least number wins: the first rule, then the first stream
        best = np.full(n, PieceRule.NOTHING * self._n_streams * base)
        hidden = np.full(n, self._n_streams * base)
        for rule, left, right in (
            (self._waiting[ops], ready, np.minimum(start, end)),
            (self._running[ops], start, end),
        ):
            position, counts = stretches(left, right)
            np.minimum.at(best, position, np.repeat(rule * self._n_streams * base + name, counts))
        moves = self._running[ops] == PieceRule.TRANSFER
        position, counts = stretches(start[moves], end[moves])
        np.minimum.at(hidden, position, np.repeat(name[moves], counts))
        why = best // (self._n_streams * base) if base else best + PieceRule.NOTHING
        op = np.where(why < PieceRule.NOTHING, best % max(base, 1), -1)
        beside = np.where(hidden < self._n_streams * base, hidden % max(base, 1), -1)
        return why, op, np.where(why <= PieceRule.SIDE_KERNEL, beside, -1)

    def _states(self, why: Ints, op: Ints) -> Ints:
        return np.select(
            [
                why <= PieceRule.SIDE_KERNEL,
                why == PieceRule.TRANSFER,
                why == PieceRule.PEER,
                why == PieceRule.HOST_WORK,
                why == PieceRule.QUEUED,
            ],
            [self._kernel[op], PieceState.EXPOSED, self._peer[op], PieceState.HOST, PieceState.STALL],
            self._nothing,
        )


@kept_with_first(maxsize=None)
def _first_and_last(timeline: Timeline) -> tuple[Floats, Floats]:
    """(world_size,) float each [s]: when the first span of a rank is ready, and when its last ends; without spans
    neither is ever."""
    spans = timeline.spans()
    first = np.full(timeline.world_size, np.inf)
    last = np.full(timeline.world_size, -np.inf)
    np.minimum.at(first, spans["rank"], spans["ready"])
    np.maximum.at(last, spans["rank"], spans["end"])
    return first, last


@kept_with_first(maxsize=None)
def _of_ops(timeline: Timeline) -> tuple[int, npt.NDArray[np.int16], Ints, Ints, Ints, Ints]:
    """How many streams there are; and per op its stream, the rules of an instant it runs in and of one it waits in, and
    the states of its kernel and of its wait for a peer; those two have a last one for no op."""
    ops = timeline.ops
    names = {name: i for i, name in enumerate(dict.fromkeys(op.stream for op in kinds(ops)))}
    usual = COMPUTE_STREAM in names
    stream = of_each(ops, lambda op: names[op.stream], np.int16)
    kernel = of_each(ops, kernel_state, np.int64)
    peer = of_each(ops, lambda op: PieceState.BUBBLE if by_structure(timeline, op) else PieceState.STALL, np.int64)
    running = of_each(ops, lambda op: _running(op, usual=usual), np.int64)
    waiting = of_each(ops, lambda op: PieceRule.QUEUED if op.kind == "compute" else PieceRule.PEER, np.int64)
    kernel, peer = np.append(kernel, PieceState.BUBBLE), np.append(peer, PieceState.BUBBLE)
    return len(names), stream, running, waiting, kernel, peer


def _running(op: OpInfo, *, usual: bool) -> int:
    """The rule of an instant that an op runs in; ``usual`` : the compute stream has its usual name."""
    if op.kind != "compute":
        return PieceRule.TRANSFER
    if op.stream == COMPUTE_STREAM or not (usual or on_host(op)):
        return PieceRule.KERNEL
    return PieceRule.HOST_WORK if on_host(op) else PieceRule.SIDE_KERNEL


def kernel_state(op: OpInfo) -> int:
    """State of a rank that runs a compute op."""
    if stays_on_device(op):
        return PieceState.MEMORY
    if on_host(op):
        return PieceState.HOST
    return PieceState.OPTIMIZER if op.phase == "optimizer" else _OF_BOUND.get(op.bound, PieceState.COMPUTE)


def own_work_of_host(op: OpInfo) -> bool:
    """Whether an op is its host's own work, such as loading input, and neither a copy nor a call of the framework."""
    return kernel_state(op) == PieceState.HOST and op.phase != "memcpy" and not op.name.startswith(HOST_CALL)


def by_class(op: OpInfo) -> dict[int, float]:
    """Shares of a compute op's time by state: of its kernels, where those are known, else all in its own."""
    state = kernel_state(op)
    mix = op.mix
    if mix is None or state not in {PieceState.COMPUTE, PieceState.MEMORY, PieceState.LAUNCH} or mix.seconds <= 0:
        return {state: 1.0}
    states = PieceState.COMPUTE, PieceState.MEMORY, PieceState.LAUNCH, PieceState.AGAIN
    parts = zip(states, (mix.peak + mix.products + mix.unfilled, mix.memory, mix.launch, mix.again), strict=True)
    return {state: seconds / mix.seconds for state, seconds in parts if seconds}


@kept_with_first(maxsize=None)
def staged(timeline: Timeline) -> bool:
    """Whether ranks run different op lists by the schedule's own structure, as a pipeline's stages do."""
    stages = {op.stage for op in kinds(timeline.ops)} - {-1}
    roles = {op.role for op in kinds(timeline.ops)}
    return len(stages or roles) > 1 and not any("server" in role for role in roles)


def only_serves(role: str) -> bool:
    """Whether ranks of a role are servers and nothing else."""
    return "server" in role and "worker" not in role


def workers(timeline: Timeline) -> Ints:
    """Ranks that train: all but those that are servers and nothing else, and of a measured run those that it has
    anything of."""
    if timeline.source != "simulated":
        return ranks_with_spans(timeline)
    roles = list(dict.fromkeys(op.role for op in kinds(timeline.ops)))
    serves = np.array([only_serves(role) for role in roles], dtype=bool)
    if not serves.any():
        return np.arange(timeline.world_size)
    number = {role: i for i, role in enumerate(roles)}
    of_op = serves[of_each(timeline.ops, lambda op: number[op.role], np.int64)]
    return np.flatnonzero(~did(timeline, of_op))


def servers(timeline: Timeline) -> Ints:
    """Ranks that are servers and nothing else."""
    return np.setdiff1d(ranks_with_spans(timeline), workers(timeline))


@kept_with_first(maxsize=None)
def ranks_with_spans(timeline: Timeline) -> Ints:
    """Ranks that did anything: of a measured run those whose files there are."""
    return np.flatnonzero(did(timeline, np.ones(len(timeline.ops), dtype=np.bool_)))


def by_structure(timeline: Timeline, op: OpInfo) -> bool:
    """Whether a wait at this op is the schedule's own: its peer is at another stage of a pipeline, or, where nobody
    says stages, runs another op list or hands work on point to point. Ranks of one stage that meet differ only in pace
    and load; and a server that is not ready is a stall."""
    meets = op.detail.get("meets", ())
    if is_server(op) or any(is_server(timeline.ops[met_op]) for met_op in meets):
        return False
    if op.stage >= 0 and meets:
        return any(timeline.ops[met_op].stage != op.stage for met_op in meets)
    if op.kind in {"send", "recv"}:
        return op.label is None or op.label.dim in {"", "pp"}
    return bool(meets)
