"""A measured run as a Program: what :mod:`clustersim.studies.replay.trace_replay` says is taken from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.label import Label
from clustersim.core.op_infos import OpDetail
from clustersim.core.program import (
    COLLECTIVES,
    COMM_STREAM,
    COMPUTE_STREAM,
    DTYPE_BYTES,
    Collective,
    Compute,
    Op,
    Program,
    Recv,
    Role,
    Send,
)
from clustersim.core.timeline import WITHOUT_GPU, OpInfo, Timeline
from clustersim.explain import pipeline
from clustersim.files.traces.pipeline_csv import STEPS_APART
from clustersim.studies.replay.replay_peers import MeasuredSpan, Peers, peers_of, side_by_side
from clustersim.studies.replay.replay_scale import Scale, groups_of
from clustersim.studies.replay.replay_spread import CopySpread, own_seconds, spread_of

JUST = 1e-6
"""Seconds by which clocks of one device may disagree on what ended before what began."""


class _RankProgress:
    """What a rank has done since ``origin`` [s], after the op ``first`` if there is one.

    ``at`` : the index of each measured op.
    ``talked`` [s] : until when messages between stages kept it. ``ended`` : when each op ended, and its index.
    ``last`` : the same of each stream's last op.
    """

    def __init__(self, origin: float, first: int | None = None) -> None:
        self.origin = self.talked = origin
        self.first = () if first is None else (first,)
        self.ended = [(origin, i) for i in self.first]
        self.last: dict[str, tuple[float, tuple[int, ...]]] = {}
        self.at: dict[int, int] = {}

    def released(self, span: MeasuredSpan) -> tuple[float, tuple[int, ...], tuple[int, ...]]:
        """When a span could have begun [s], which op that was the end of, and what it waits for besides its stream."""
        free, before = self.last.get(span.stream, (self.origin, self.first))
        latest = max((pair for pair in self.ended if pair[0] <= span.begin + JUST), default=(self.origin, -1))
        came_early = span.begin + JUST < free  # while its stream was busy, after what made what it sends
        if latest[0] > free or (came_early and latest[1] >= 0):
            return latest[0], (latest[1],), (latest[1],)
        return free, before, () if span.stream in self.last else self.first

    def wrote(self, span: MeasuredSpan, index: int) -> None:
        """A span was written as this op."""
        self.at[span.op] = index
        self.ended.append((span.end, index))
        self.last[span.stream] = max(self.last.get(span.stream, (self.origin, ())), (span.end, (index,)))


class ReplayWriter:
    """Turns the measured spans of each rank into an op list."""

    def __init__(self, measured: Timeline, scale: Scale) -> None:
        self.measured = measured
        self.times = scale.times
        self.scale = scale
        self.data_parallel = groups_of(measured)
        columns = measured.spans()
        self.ranks = np.unique(columns["rank"]).tolist()
        self.spans: dict[int, list[MeasuredSpan]] = {rank: [] for rank in self.ranks}
        for rank, op, ready, start, end in zip(*(columns[c].tolist() for c in columns), strict=True):
            info = measured.ops[op]
            begin = start if info.kind == "compute" else ready
            self.spans[rank].append(MeasuredSpan(op, _stream(info), begin, end))
        side_by_side(measured, self.spans, JUST)
        self.origin = min(span.begin for spans in self.spans.values() for span in spans)
        self.shortest: dict[int, float] = {}
        for span in (span for spans in self.spans.values() for span in spans):
            self.shortest[span.op] = min(self.shortest.get(span.op, np.inf), span.end - span.begin)
        self.peers = peers_of(measured, self.spans) if pipeline.has_pipeline(measured) else {}
        self.waits_seen = any(info.kind == "recv" for info in measured.ops)
        self.recorded = {
            (info.kind, info.step, info.stage, info.label.action, info.label.microbatch): i
            for i, info in enumerate(measured.ops)
            if info.label and info.label.dim == "pp"
        }
        self.begins = {step: begin for step, (begin, _) in pipeline.windows(measured).items()}
        self.kept: Counter[str] = Counter()
        self.met: dict[int, Ints] = {}  # ops that are met for and then take their measured time: who meets
        self.groups = {i: self._groups(i) for i, info in enumerate(measured.ops) if info.kind != "compute"}
        self.spread = CopySpread()
        self.origins: list[int] = []  # of each op of the program, role by role: the measured op, -1 for what is added

    def program(self) -> Program:
        """One role per measured rank; ranks that were not measured do what the measured ones do, in turn."""
        who: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for rank in range(self.measured.world_size):
            who[rank if rank in who else self.ranks[rank % len(self.ranks)]].append(rank)
        lists = {rank: tuple(self._ops(rank)) for rank in who}
        stages = {
            rank: max((self.measured.ops[span.op].stage for span in spans), default=-1)
            for rank, spans in self.spans.items()
        }
        if self.times > 1:
            own = {rank: own_seconds(ops, self._kept(ops)) for rank, ops in lists.items()}
            self.spread = spread_of(self.measured, self.data_parallel, own, stages)
        roles = []
        for rank, alike in who.items():
            copied = range(self.times)
            ranks = np.sort(np.array([r + i * self.measured.world_size for i in copied for r in alike], dtype=np.int64))
            ops = self._varied(rank, ranks, lists[rank])
            roles.append(Role(f"rank {rank}", ranks, ops, stage=stages[rank]))
        return Program(self.measured.world_size * self.times, tuple(roles), notes=tuple(self.notes()))

    def _kept(self, ops: Sequence[Op]) -> frozenset[int]:
        """Ops that are communication as long as measured: they do not vary with the rank."""
        bound = "communication"
        return frozenset(i for i, op in enumerate(ops) if isinstance(op, Compute) and op.bound == bound)

    def _varied(self, rank: int, ranks: Ints, ops: tuple[Op, ...]) -> tuple[Op, ...]:
        """The ops of a measured rank, whose copies beyond the measured world take what is drawn for them."""
        copies = ranks >= self.measured.world_size
        if not self.spread.sigma:
            return ops
        factors: dict[int, Floats] = {}
        for step in {op.step for op in ops}:
            factors[step] = np.ones(len(ranks))
            factors[step][copies] = self.spread.factors(rank, step, int(copies.sum()))
        kept = self._kept(ops)
        return tuple(
            msgspec.structs.replace(op, duration=op.duration * factors[op.step])
            if isinstance(op, Compute) and i not in kept
            else op
            for i, op in enumerate(ops)
        )

    def _groups(self, i: int) -> Ints | None:
        """Who meets, in the larger world; None for what cannot be simulated."""
        info = self.measured.ops[i]
        world = self.measured.world_size
        if self._handed_on(info):
            return None
        members = tuple(info.detail.get("members", ()))
        size = int(info.detail.get("group_size", 0))
        measured_bytes = info.nbytes > 0 or info.kind == "barrier"
        everybody = len(members) == world or (not members and size == world)
        copies = world * np.arange(self.times, dtype=np.int64)[:, None]
        groups = copies + np.array(members or range(world), dtype=np.int64)
        if everybody or self.data_parallel.grows.get(i):
            groups = groups.reshape(1, -1)
        reason = ""
        how = "kept as measured"
        if info.kind not in COLLECTIVES:
            reason = f"{info.kind}: whom it talks to is not known"
        elif not (members or everybody):
            reason = f"{info.kind} of {size} ranks: which ones is not known"
        elif not measured_bytes:
            reason = f"{info.kind}: its size is not known"
            if members:
                self.met[i], how = groups, "as long as measured, from its last member's arrival on"
        if reason:
            self.kept[f"{how}, {{}}: {reason}"] += 1
            return None
        return groups

    def _handed_on(self, info: OpInfo) -> bool:
        """Whether it is a message between stages, which follows from the actions it is between."""
        return bool(self.peers) and info.kind in ("send", "recv")

    def _ops(self, rank: int) -> list[Op]:
        """The rank's op list, in the order in which things began."""
        ops: list[Op] = []
        so_far = _RankProgress(self.origin)
        step = None
        for span in sorted(self.spans[rank], key=lambda s: (s.begin, s.end, s.op)):
            info = self.measured.ops[span.op]
            if STEPS_APART in self.measured.stats and info.step != step:
                step = info.step
                self._add(ops, self._together(step, ops), -1)
                so_far = _RankProgress(self.begins[step], len(ops) - 1)
            if self._handed_on(info):
                so_far.talked = max(so_far.talked, span.end)
                continue
            free, before, after = so_far.released(span)
            peers = self.peers.get((rank, span.op), Peers())
            wait = span.begin - max(free, so_far.talked)
            stream = f"host of {span.stream}"
            if wait > JUST and (peers.source < 0 or self.waits_seen):
                self._add(ops, Compute("host", wait, stream, before, "other", "host", step=info.step), -1)
                after = (len(ops) - 1,)
            if peers.source >= 0:  # it asks when its rank is free, and goes on with what it gets
                self._add(ops, *self._message(Recv, info, peers.source, after or before))
                after = (*after, len(ops) - 1)
            after = tuple(sorted({*after, *(so_far.at[i] for i in info.after if i in so_far.at)}))
            so_far.wrote(span, self._write(ops, span, after, peers))
        return ops

    def _add(self, ops: list[Op], op: Op, origin: int) -> None:
        ops.append(op)
        self.origins.append(origin)

    def _together(self, step: int, ops: list[Op]) -> Op:
        """Where a step begins on all ranks at once."""
        last = {op.stream: i for i, op in enumerate(ops)}
        everybody = np.arange(self.measured.world_size * self.times, dtype=np.int64).reshape(1, -1)
        return Collective(
            "step", "barrier", 0.0, everybody, "step", tuple(last.values()), communicator=f"step {step}", step=step
        )

    def _write(self, ops: list[Op], span: MeasuredSpan, after: tuple[int, ...], peers: Peers) -> int:
        """The op, after a meeting if it only takes its measured time, and what it hands on; returns the op's index."""
        info = self.measured.ops[span.op]
        if span.op in self.met:
            self._add(
                ops,
                Collective(
                    info.name,
                    "barrier",
                    0.0,
                    self.met[span.op],
                    span.stream,
                    after,
                    communicator=f"op {span.op}",
                    step=info.step,
                ),
                -1,
            )
            after = ()
        self._add(ops, self._op(span, after), span.op)
        index = len(ops) - 1
        if peers.target >= 0:
            self._add(ops, *self._message(Send, info, peers.target, (index,)))
        return index

    def _message(
        self, kind: type[Recv] | type[Send], info: OpInfo, peer: int, after: tuple[int, ...]
    ) -> tuple[Op, int]:
        """A message between stages, which costs a latency at most, and the measured op if it was recorded."""
        message_label = info.label or Label()
        letter = "F" if message_label.action == "F" else "B"
        ranks = peer + self.measured.world_size * np.arange(self.times, dtype=np.int64)
        name = "send" if kind is Send else "recv"
        label = Label(action=message_label.action, microbatch=message_label.microbatch, dim="pp")
        tag = f"{letter} {message_label.microbatch}"
        stream = f"{COMM_STREAM} pp {name} {letter} {peer}"
        op = kind(f"{name} {tag}", 0.0, ranks, stream, after, f"{info.step} {tag}", step=info.step, label=label)
        return op, self.recorded.get((name, info.step, info.stage, letter, message_label.microbatch), -1)

    def _op(self, span: MeasuredSpan, after: tuple[int, ...]) -> Op:
        info = self.measured.ops[span.op]
        groups = self.groups.get(span.op)
        if groups is None:
            phase = info.phase if info.kind == "compute" else "other"
            bound = info.bound if info.kind == "compute" else "communication"
            took = self.shortest[span.op] if span.op in self.met else span.end - span.begin
            took = self.scale.seconds(info, took, self.data_parallel.sharded)
            flops, nbytes = (info.flops, info.nbytes) if info.kind == "compute" else (0.0, 0.0)
            return Compute(info.name, took, span.stream, after, phase, bound, flops, nbytes, info.step, info.label)
        dtype = str(info.detail.get("dtype", ""))
        # A communicator of its own for each: ranks meet by what was joined, in whatever order they came.
        return Collective(
            info.name,
            info.kind,
            info.nbytes,
            groups,
            span.stream,
            after,
            dtype if dtype in DTYPE_BYTES else "fp32",
            communicator=f"op {span.op}",
            step=info.step,
            label=info.label,
        )

    def as_measured(self, played: Timeline, source: str) -> Timeline:
        """The played run with the measured run's ops, so that the two can be compared op by op; the host's own time
        is left out, as a profile leaves it out."""
        origin = np.array(self.origins, dtype=np.int64)
        # "meets" points into the played run's ops, one list a rank; here all ranks of a collective are one op.
        details: dict[int, OpDetail] = {}
        for i, op in reversed(list(enumerate(played.ops))):
            detail = details[int(origin[i])] = op.detail.copy()
            detail.pop("meets", None)
        ops = tuple(
            msgspec.structs.replace(
                op, detail=op.detail | details.get(i, {}) if self.groups.get(i) is not None else op.detail
            )
            for i, op in enumerate(self.measured.ops)
        )
        ready = played.row_ready.copy()
        came = dict(zip(zip(played.row_op.tolist(), played.row_set.tolist(), strict=True), ready.tolist(), strict=True))
        for row, (op, ranks) in enumerate(zip(played.row_op.tolist(), played.row_set.tolist(), strict=True)):
            if int(origin[op]) in self.met:  # it began to wait where its meeting did
                ready[row] = came.get((op - 1, ranks), ready[row])
        measured = origin[played.row_op] >= 0
        cpus = self.times * self.measured.stats.get(WITHOUT_GPU, 0.0)
        links = None if played.links is None else replace(played.links, transfer_op=origin[played.links.transfer_op])
        row_set = played.row_set[measured]
        start = played.row_start[measured]
        end = played.row_end[measured]
        return Timeline(
            played.world_size,
            ops,
            played.rank_sets,
            origin[played.row_op][measured],
            row_set,
            ready[measured],
            start,
            end,
            links=links,
            source=source,
            rank_node=played.rank_node,
            stats=played.stats | ({WITHOUT_GPU: cpus} if cpus else {}),
        )

    def notes(self) -> list[str]:
        """What was assumed."""
        reasons = (reason.format(count) for reason, count in sorted(self.kept.items()))
        sentences = [*self.scale.said(self.measured, self.data_parallel), *reasons]
        if self.times > 1:
            sentences.append(self.spread.note())
        if self.peers:
            sentences.append(
                "messages between stages have no bytes: an action waits for its micro-batch's one before it"
            )
        if self.peers and not self.waits_seen:
            sentences.append(
                "no receives were recorded: time between actions is left out where another stage may be the cause"
            )
        if len(self.ranks) < self.measured.world_size:
            sentences.append(
                f"{len(self.ranks)} of {self.measured.world_size} ranks were measured; the others are taken to do the "
                "same at the same time, so nobody waits for them"
            )
        return sentences


def _stream(info: OpInfo) -> str:
    """A stream per communicator: a profile's collectives need not have shared one."""
    if info.kind == "compute":
        return info.stream if info.stream == COMPUTE_STREAM else f"stream {info.stream}"
    return f"{COMM_STREAM} {info.detail.get('communicator', '')}".strip()
