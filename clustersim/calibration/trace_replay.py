"""Replay: a measured run's compute and host times as they were, its communication simulated on a topology.

A profile does not say what waited for what. What is taken from it, rank by rank:

* Kernels keep their measured durations and the order of their streams.
* An op that began when something on another stream had just ended, later than what was before it on its own stream,
  waits for that. What time is left over before it began was the host's, and stays.
* A collective is simulated: it starts when its last member arrives, and takes what the topology and its neighbours
  allow. Its measured duration, waiting for peers included, is not used, but for those that cannot be simulated (a size
  or a group that the profile does not tell), which stay as they were.

Waits that were not felt are not seen: an optimizer that found its gradients already there is not known to need them. A
network much slower than the measured one is therefore told too optimistically.

The same run on more nodes: every rank is copied, groups that were everybody become everybody, and the others are copied
as they are. That is data parallelism with the same work per GPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.analysis.metrics import occupancy
from clustersim.collectives.base import bus_factor
from clustersim.engine import simulate
from clustersim.errors import TraceError
from clustersim.mesh import Mesh
from clustersim.program import (
    COLLECTIVES,
    COMM_STREAM,
    COMPUTE_STREAM,
    DTYPE_BYTES,
    Collective,
    Compute,
    Op,
    Program,
    Role,
)
from clustersim.timeline import OpInfo, Timeline
from clustersim.topology import Topology

Ints: TypeAlias = npt.NDArray[np.int64]

JUST = 1e-6
"""Seconds by which clocks of one device may disagree on what ended before what began."""


@dataclass(frozen=True)
class Span:
    """One op of one rank: ``op`` its row in the measured ops, ``begin`` its own arrival, ``end`` [s]."""

    op: int
    stream: str
    begin: float
    end: float


@dataclass
class Replayed:
    """A replay.

    Parameters
    ----------
    measured, simulated : the two runs. program : what was played. times : ranks of it per measured rank.
    collectives : a dict per kind, size and group: ``kind, nbytes, dtype, group_size, count``, and the medians of
        ``measured_s`` and ``simulated_s``, transfer only; ``measured_s`` holds waiting where ``waiting_included``.
    notes : what was assumed. totals : per key of :data:`TOTALS`, (measured, simulated) [s].
    """

    measured: Timeline
    simulated: Timeline
    program: Program
    times: int
    collectives: list[dict[str, Any]]
    notes: tuple[str, ...] = ()
    totals: dict[str, tuple[float, float]] = field(default_factory=dict)


def replay(measured: Timeline, topology: Topology, mesh: Mesh, *, times: int = 1, **options: Any) -> Replayed:
    """Play a measured run on a topology.

    Parameters
    ----------
    measured : as :func:`clustersim.traces.read` gives it. mesh : ``times`` as many ranks as the run had.
    options : for :func:`clustersim.engine.simulate` (``backend``, ``launch``, ``nccl_version``, ``fidelity``).

    Raises :class:`TraceError` for a simulated run, or a mesh of another size.
    """
    if measured.source == "simulated":
        raise TraceError("this run is simulated already; `clustersim run` plays it again")
    if mesh.world_size != measured.world_size * times:
        raise TraceError(
            f"the run has {measured.world_size} ranks, {times} time(s) as many are {measured.world_size * times}, but "
            f"{topology.name} offers {mesh.world_size}"
        )
    writer = _Writer(measured, times)
    program = writer.program()
    simulated = writer.as_measured(simulate(program, topology, mesh, **options), f"replay on {topology.name}")
    seen, played = _totals(measured, writer.ranks), _totals(simulated, writer.ranks)
    totals = {key: (seen[key], played[key]) for key in TOTALS}
    rows = writer.compared(simulated)
    return Replayed(measured, simulated, program, times, rows, program.notes, totals)


TOTALS = {
    "step_s": "first span to last",
    "compute_s": "compute",
    "communication_s": "transferring",
    "exposed_communication_s": "exposed communication, waiting for peers included",
    "peer_wait_s": "waiting for peers",
}
"""Of the whole window: seconds, means over the measured ranks but for the first."""


def _totals(run: Timeline, ranks: Sequence[int]) -> dict[str, float]:
    begin = min(float(run.row_ready.min()), float(run.row_start.min()))
    busy = occupancy(run, np.array(ranks, dtype=np.int64))
    means = {name: float(busy[name].mean()) for name in TOTALS if name != "step_s"}
    return {"step_s": run.makespan - begin, **means}


class _Writer:
    """Turns the measured spans of each rank into an op list."""

    def __init__(self, measured: Timeline, times: int) -> None:
        self.measured, self.times = measured, times
        columns = measured.spans()
        self.ranks = np.unique(columns["rank"]).tolist()
        self.spans: dict[int, list[Span]] = {rank: [] for rank in self.ranks}
        for rank, op, ready, start, end in zip(*(columns[c].tolist() for c in columns), strict=True):
            info = measured.ops[op]
            begin = start if info.kind == "compute" else ready
            self.spans[rank].append(Span(op, _stream(info), begin, end))
        self.origin = min(span.begin for spans in self.spans.values() for span in spans)
        self.shortest: dict[int, float] = {}
        for span in (span for spans in self.spans.values() for span in spans):
            self.shortest[span.op] = min(self.shortest.get(span.op, np.inf), span.end - span.begin)
        self.kept: Counter[str] = Counter()
        self.groups = {i: self._groups(info) for i, info in enumerate(measured.ops) if info.kind != "compute"}
        self.origins: list[int] = []  # of each op of the program, role by role: the measured op, -1 for the host's time

    def program(self) -> Program:
        """One role per measured rank; ranks that were not measured do what the measured ones do, in turn."""
        who: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        for rank in range(self.measured.world_size):
            who[rank if rank in who else self.ranks[rank % len(self.ranks)]].append(rank)
        roles = []
        for rank, alike in who.items():
            ranks = np.array(
                [r + copy * self.measured.world_size for copy in range(self.times) for r in alike], dtype=np.int64
            )
            roles.append(Role(f"rank {rank}", np.sort(ranks), tuple(self._ops(self.spans[rank]))))
        return Program(self.measured.world_size * self.times, tuple(roles), notes=tuple(self.notes()))

    def _groups(self, info: OpInfo) -> Ints | None:
        """Who meets, in the larger world; None for what cannot be simulated."""
        world, size = self.measured.world_size, int(info.detail.get("group_size", 0))
        members = tuple(info.detail.get("members", ()))
        reason = ""
        if info.kind not in COLLECTIVES:
            reason = f"{info.kind}: whom it talks to is not known"
        elif not info.nbytes > 0 and info.kind != "barrier":
            reason = f"{info.kind}: its size is not known"
        elif not members and size != world:
            reason = f"{info.kind} of {size} ranks: which ones is not known"
        if reason:
            self.kept[reason] += 1
            return None
        if not members or len(members) == world:
            return np.arange(world * self.times, dtype=np.int64).reshape(1, -1)
        return np.array(members, dtype=np.int64) + world * np.arange(self.times, dtype=np.int64)[:, None]

    def _ops(self, spans: list[Span]) -> list[Op]:
        """The rank's op list, in the order in which things began."""
        ops: list[Op] = []
        origin = self.origin
        ended: list[tuple[float, int]] = []  # of all that is written: when, and its index
        last: dict[str, tuple[float, tuple[int, ...]]] = {}  # stream -> the same of its last op
        for span in sorted(spans, key=lambda s: (s.begin, s.end, s.op)):
            free, before = last.get(span.stream, (origin, ()))
            released = max((pair for pair in ended if pair[0] <= span.begin + JUST), default=(origin, -1))
            after: tuple[int, ...] = ()
            if released[0] > free:
                free, before = released[0], (released[1],)
                after = before
            if span.begin - free > JUST:
                wait, stream, step = span.begin - free, f"host of {span.stream}", self.measured.ops[span.op].step
                ops.append(Compute("host", wait, stream, before, "other", "host", step=step))
                after = (len(ops) - 1,)
                self.origins.append(-1)
            ops.append(self._op(span, after))
            self.origins.append(span.op)
            ended.append((span.end, len(ops) - 1))
            last[span.stream] = max(last.get(span.stream, (origin, ())), (span.end, (len(ops) - 1,)))
        return ops

    def _op(self, span: Span, after: tuple[int, ...]) -> Op:
        info = self.measured.ops[span.op]
        groups = self.groups.get(span.op)
        if groups is None:
            phase = info.phase if info.kind == "compute" else "other"
            bound = info.bound if info.kind == "compute" else "communication"
            return Compute(info.name, span.end - span.begin, span.stream, after, phase, bound, step=info.step)
        dtype = str(info.detail.get("dtype", ""))
        # A communicator of its own for each: ranks meet by what was joined, in whatever order they came.
        return Collective(
            info.name, info.kind, info.nbytes, groups, span.stream, after, dtype if dtype in DTYPE_BYTES else "fp32",
            communicator=f"op {span.op}", step=info.step,
        )  # fmt: skip

    def as_measured(self, played: Timeline, source: str) -> Timeline:
        """The played run with the measured run's ops, so that the two can be compared op by op; the host's own time
        is left out, as a profile leaves it out."""
        of = np.array(self.origins, dtype=np.int64)
        # "meets" points into the played run's ops, one list a rank; here all ranks of a collective are one op.
        details = {
            int(of[i]): {key: value for key, value in op.detail.items() if key != "meets"}
            for i, op in reversed(list(enumerate(played.ops)))
        }
        ops = tuple(
            msgspec.structs.replace(
                op, detail={**op.detail, **details.get(i, {})} if self.groups.get(i) is not None else op.detail
            )
            for i, op in enumerate(self.measured.ops)
        )
        kept = of[played.row_op] >= 0
        links = None if played.links is None else replace(played.links, transfer_op=of[played.links.transfer_op])
        row_set, ready = played.row_set[kept], played.row_ready[kept]
        start, end = played.row_start[kept], played.row_end[kept]
        return Timeline(
            played.world_size, ops, played.rank_sets, of[played.row_op][kept], row_set, ready, start, end, links=links,
            source=source, rank_node=played.rank_node, stats=played.stats,
        )  # fmt: skip

    def compared(self, played: Timeline) -> list[dict[str, Any]]:
        """Measured and simulated transfer times of collectives, by kind, size and group; most bytes first."""
        took = dict(zip(played.row_op.tolist(), (played.row_end - played.row_start).tolist(), strict=True))
        rows: defaultdict[tuple[Any, ...], list[tuple[float, float, bool]]] = defaultdict(list)
        for op in (op for op, groups in self.groups.items() if groups is not None):
            info = self.measured.ops[op]
            known = "transfer_s" in info.detail
            key = info.kind, info.nbytes, str(info.detail.get("dtype", "")), int(info.detail.get("group_size", 0))
            rows[key].append((float(info.detail["transfer_s"]) if known else self.shortest[op], took[op], known))
        return [_row(key, found) for key, found in sorted(rows.items(), key=lambda r: -len(r[1]) * r[0][1])]

    def notes(self) -> list[str]:
        """What was assumed."""
        said = [f"kept as measured, {count}: {reason}" for reason, count in sorted(self.kept.items())]
        if len(self.ranks) < self.measured.world_size:
            said.append(
                f"{len(self.ranks)} of {self.measured.world_size} ranks were measured; the others are taken to do the "
                "same at the same time, so nobody waits for them"
            )
        return said


def _row(key: tuple[Any, ...], found: list[tuple[float, float, bool]]) -> dict[str, Any]:
    kind, nbytes, dtype, size = key
    measured, simulated = (float(np.median([pair[i] for pair in found])) for i in (0, 1))
    return {
        "kind": kind, "nbytes": nbytes, "dtype": dtype, "group_size": size, "count": len(found),
        "measured_s": measured, "simulated_s": simulated, "waiting_included": not all(pair[2] for pair in found),
        "busbw_measured": nbytes / measured * bus_factor(kind, size) if measured > 0 and size else None,
    }  # fmt: skip


def _stream(info: OpInfo) -> str:
    """A stream per communicator: a profile's collectives need not have shared one."""
    if info.kind == "compute":
        return info.stream if info.stream == COMPUTE_STREAM else f"stream {info.stream}"
    return f"{COMM_STREAM} {info.detail.get('communicator', '')}".strip()
