"""Replay: a measured run's compute and host times as they were, its communication simulated on a topology.

A profile does not say what waited for what. What is taken from it, rank by rank:

* Kernels keep their measured durations and the order of their streams.
* An op that began when something on another stream had just ended, later than what was before it on its own stream,
  waits for that. What time is left over before it began was the host's, and stays.
* A collective is simulated: it starts when its last member arrives, and takes what the topology and its neighbours
  allow. Its measured duration, waiting for peers included, is not used, but for those that cannot be simulated (a size
  or a group that the profile does not tell), which stay as they were.

A pipeline's stages are known to wait for one another (ops that carry stages and micro-batches): an action waits for the
same micro-batch's one at the stage before it, and recorded sends and receives only tell what time was the host's.

Without a topology the machine is unknown and communication free: what waits for whom is played, and transfers take no
time, but for collectives whose size is not told and whose measured time is all there is.

Waits that were not felt are not seen, but where an execution trace beside the profile tells them: an optimizer that
found its gradients already there is not known to need them. A network much slower than the measured one is therefore
told too optimistically.

The same run on more nodes, faster GPUs or with other buckets: :mod:`clustersim.studies.replay.replay_scale`. Every rank
is copied, data-parallel groups grow, and the others are copied as they are: the same work per GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from clustersim.cluster.routes.cuts import bisection_bandwidth, injection_bandwidth
from clustersim.collectives.base import Group, Plan, Request, bus_factor
from clustersim.core.errors import TraceError
from clustersim.core.limits import check
from clustersim.core.mesh import Mesh
from clustersim.core.program import Compute, Program
from clustersim.core.timeline import Timeline
from clustersim.core.topology import GPU, NodeType, Topology
from clustersim.core.units import format_bandwidth
from clustersim.engine import simulate
from clustersim.explain import pipeline
from clustersim.explain.metrics import SteadyWindow, steady_window, window_after
from clustersim.explain.occupancy import occupancy
from clustersim.files.traces.joining import skipped_of
from clustersim.scenario.run.altered import PASSES
from clustersim.studies.replay.replay_program import ReplayWriter
from clustersim.studies.replay.replay_scale import AS_MEASURED, Scale, bucket_note, rebucketed

ROUNDING = 1e-12
"""Shares of a window below this are what sums of times are off by."""

RANK = 200.0
"""[bytes] of a rank of a replay, whatever it does."""


@dataclass(frozen=True)
class StepTimes:
    """Each step's time [s], measured and played; ``left_out`` are leading steps that were warm-up."""

    steps: tuple[int, ...]
    measured: tuple[float, ...]
    simulated: tuple[float, ...]
    left_out: tuple[int, ...] = ()

    def medians(self) -> tuple[float, float]:
        """Measured and played."""
        return float(np.median(self.measured)), float(np.median(self.simulated))


@dataclass(frozen=True)
class StageIdle:
    """The share of a step that a stage's ranks do no action in, mean over the same steps."""

    stage: int
    measured: float
    simulated: float


class Collectives(msgspec.Struct, frozen=True):
    """Collectives of one kind, size [bytes], type and group: how many, and the medians [s] of their transfers;
    ``measured_s`` holds waiting where ``waiting_included``. ``busbw_measured`` : bytes/s, None where nobody knows.
    ``group_size`` : ranks that met as measured; ``ranks_played`` : as simulated."""

    kind: str
    nbytes: float
    dtype: str
    group_size: int
    count: int
    measured_s: float
    simulated_s: float
    waiting_included: bool
    busbw_measured: float | None
    ranks_played: int


@dataclass
class ReplayedTrace:
    """A replay.

    Parameters
    ----------
    measured, simulated : the two runs. program : what was played.
    steps : the time of each. stages : of a pipeline, how idle each is.
    collectives : by kind, size and group, most bytes first.
    notes : what was assumed. totals : per key of :data:`TOTALS`, (measured, simulated) [s].
    where, machines : the topology's name, and how many of its nodes. free : communication was.
    slowdown : of a pipeline's steps, by how much they are longer than with every forward and every backward at the mean
        of all ranks' (the S of arXiv:2505.05713, whose replay also evens out communication); None of other runs.
    """

    measured: Timeline
    simulated: Timeline
    program: Program
    steps: StepTimes
    collectives: list[Collectives]
    notes: tuple[str, ...] = ()
    totals: dict[str, tuple[float, float]] = field(default_factory=dict)
    stages: tuple[StageIdle, ...] = ()
    where: str = ""
    machines: int = 1
    free: bool = False
    slowdown: float | None = None


def replay(
    measured: Timeline,
    topology: Topology | None = None,
    mesh: Mesh | None = None,
    *,
    scale: Scale = AS_MEASURED,
    **options: Any,
) -> ReplayedTrace:
    """Play a measured run on a topology.

    Parameters
    ----------
    measured : as :func:`clustersim.files.traces.read` gives it. topology : None is free communication.
    mesh : ``scale.times`` as many ranks as the run had; needed with a topology. scale : what else differs.
    options : for :func:`clustersim.engine.simulate` (``backend``, ``launch``, ``nccl_version``, ``fidelity``).

    Raises :class:`TraceError` for a simulated run, or a mesh of another size.
    """
    if measured.source == "simulated":
        raise TraceError("this run is simulated already; `clustersim run` plays it again")
    times = scale.times
    original = measured
    free = topology is None or mesh is None
    _check_ranks(measured, times, topology, mesh)
    if topology is None or mesh is None:
        topology = _unknown_machine(measured.world_size * times)
        mesh = Mesh(topology.gpus, len(topology.gpus))
        options = {"planner": _free}
    if scale.bucket:
        measured = rebucketed(measured, scale.bucket)
    writer = ReplayWriter(measured, scale)
    program = writer.program()
    source = f"replay on {topology.name}"
    simulated = writer.as_measured(simulate(program, topology, mesh, **options), source)
    steady = steady_window(original)
    seen = totals_of(original, writer.ranks, steady)
    played = totals_of(simulated, writer.ranks, window_after(simulated, steady.left_out))
    totals = {key: (seen[key], played[key]) for key in TOTALS}
    rows = _compared(writer, simulated)
    steps = _steps(original, simulated)
    idle = _idle(measured, simulated, steps.steps)
    larger = (joined_by(topology, mesh, free=free),) if times > 1 else ()
    remarks = (*((FREE,) if free else ()), *larger, *((bucket_note(scale.bucket),) if scale.bucket else ()))
    warm_up = (f"step {s} left out as warm-up" for s in steps.left_out)
    notes = (*remarks, *warm_up, *program.notes, *unplayed(original, scale))
    slowdown = None
    if idle:
        alike = _steps(measured, writer.as_measured(simulate(evened(program), topology, mesh, **options), source))
        slowdown = steps.medians()[1] / alike.medians()[1]
    machine = topology.name, topology.n_nodes
    return ReplayedTrace(measured, simulated, program, steps, rows, notes, totals, idle, *machine, free, slowdown)


def joined_by(topology: Topology, mesh: Mesh, *, free: bool) -> str:
    """What network joins the ranks of a larger job, of which a trace says nothing. ``free`` : none is played."""
    ranks = f"the larger job's {mesh.world_size:,} ranks"
    if free:
        return f"{ranks} are joined by no network, and what more of them send takes no time: name one with --topology"
    place = f"{ranks} are on {topology.n_nodes:,} node(s) of {topology.name}, {mesh.nproc_per_node:,} on each"
    if topology.n_nodes == 1:
        return f"{place}: all inside it, and no network joins them"
    kind = "GPU" if len(topology.gpus) else "CPU"
    share = format_bandwidth(float(injection_bandwidth(topology).min()))
    halves = format_bandwidth(bisection_bandwidth(topology))
    return (
        f"{place}, joined by the network of that file, not by one that the trace tells: {share} out of a node for each "
        f"{kind}, {halves} from half of the nodes to the other (clustersim check {topology.name}; --topology, --nodes)"
    )


def unplayed(measured: Timeline, scale: Scale = AS_MEASURED) -> Iterator[str]:
    """What of a trace its reader left out, which no replay plays; and that it then has nothing that grows with ranks.

    Parameters
    ----------
    measured : as it was read. scale : what else differs of the replay.
    """
    for reason, count in skipped_of(measured).items():
        yield f"left out of the trace, and not played: {count} x {reason}"
    talks = any(op.kind != "compute" for op in measured.ops)
    if not talks and measured.world_size * scale.times > 1:
        yield (
            "no collective and no message is in what was read: ranks wait for nobody here, and neither a network nor "
            "more ranks change anything"
        )


def _check_ranks(measured: Timeline, times: int, topology: Topology | None, mesh: Mesh | None) -> None:
    """Raise :class:`TraceError` where memory or the machine does not do for so many times the ranks."""
    ranks = measured.world_size * times
    check(RANK * ranks, f"for a replay of {ranks:,} ranks", "use fewer (--times)", TraceError)
    if topology is not None and mesh is not None and mesh.world_size != ranks:
        raise TraceError(
            f"the run has {measured.world_size} ranks, {times} time(s) as many are {ranks}, but {topology.name} offers "
            f"{mesh.world_size}"
        )


def evened(program: Program) -> Program:
    """The same Program without stragglers: every forward takes the mean of all ranks' forwards, and backwards alike."""
    durations: defaultdict[str, list[float]] = defaultdict(list)
    for op in (op for role in program.roles for op in role.ops):
        if isinstance(op, Compute) and op.phase in PASSES:
            durations[op.phase].append(float(np.mean(op.duration)))
    mean = {phase: float(np.mean(times)) for phase, times in durations.items()}
    roles = tuple(
        replace(
            role,
            ops=tuple(
                msgspec.structs.replace(op, duration=mean[op.phase])
                if isinstance(op, Compute) and op.phase in PASSES
                else op
                for op in role.ops
            ),
        )
        for role in program.roles
    )
    return replace(program, roles=roles)


FREE = "the machine is not known, so communication is free: it takes no time beyond waiting for others"
TOTALS = {
    "window_s": "first span to last, warm-up left out",
    "compute_s": "compute",
    "communication_s": "transferring",
    "exposed_communication_s": "exposed transfer and waiting for a peer",
    "peer_wait_s": "collectives waiting, hidden or not",
}
"""Of the window without the measured run's warm-up: seconds, means over the measured ranks but for the first."""


def _unknown_machine(n: int) -> Topology:
    """GPUs without a link between them."""
    none = np.zeros(0, dtype=np.int64)
    numbers = np.zeros(0)
    return Topology(
        name="free communication",
        vertex_names=tuple(f"node0/gpu{i}" for i in range(n)),
        vertex_kinds=(GPU,) * n,
        vertex_node=np.zeros(n, dtype=np.int64),
        link_src=none,
        link_dst=none,
        link_bandwidth=numbers,
        link_latency=numbers,
        link_kinds=(),
        node_types=(NodeType("unknown", "unknown", n, 0),),
    )


def _free(request: Request, group: Group) -> Plan:
    return Plan(request.kind, "free", "none", 0, 0.0, 0.0, np.zeros(0, dtype=np.int64), np.zeros(0), np.inf)


def _steps(measured: Timeline, simulated: Timeline) -> StepTimes:
    """Steps of both runs without the measured one's warm-up; a pipeline's with what its stages idle in them."""
    if pipeline.has_pipeline(measured):
        seen, played = (
            {s: end - begin for s, (begin, end) in pipeline.windows(run).items()} for run in (measured, simulated)
        )
    else:
        seen, played = pipeline.periods(measured), pipeline.periods(simulated)
    steady_steps = pipeline.steady(measured)
    first, second = (tuple(took[s] for s in steady_steps) for took in (seen, played))
    return StepTimes(tuple(steady_steps), first, second, tuple(s for s in seen if s not in steady_steps))


def _idle(measured: Timeline, simulated: Timeline, steps: Sequence[int]) -> tuple[StageIdle, ...]:
    if not pipeline.has_pipeline(measured):
        return ()
    pairs = zip(*(pipeline.stage_times(run, steps) for run in (measured, simulated)), strict=True)
    return tuple(StageIdle(a.stage, a.idle / a.window, b.idle / b.window) for a, b in pairs if a.window and b.window)


def totals_of(run: Timeline, ranks: Sequence[int], window: SteadyWindow) -> dict[str, float]:
    """Of :data:`TOTALS` in a window, each in seconds, means over these ranks."""
    busy = occupancy(run, np.array(ranks, dtype=np.int64), window.begin, window.end)
    means = {name: float(busy[name].mean()) for name in TOTALS if name != "window_s"}
    nothing = ROUNDING * window.length
    return {"window_s": window.length} | {name: mean if mean > nothing else 0.0 for name, mean in means.items()}


def _compared(writer: ReplayWriter, played: Timeline) -> list[Collectives]:
    """Measured and simulated transfer times of collectives, by kind, size and group; most bytes first."""
    took = dict(zip(played.row_op.tolist(), (played.row_end - played.row_start).tolist(), strict=True))
    rows: defaultdict[tuple[str, float, str, int, int], list[tuple[float, float, bool]]] = defaultdict(list)
    for op, groups in writer.groups.items():
        info = writer.measured.ops[op]
        if groups is None or "rebucketed" in info.detail or op not in took:
            continue  # not simulated, or nobody measured it, or it is in another bucket now
        measured_transfer = "transfer_s" in info.detail
        size = int(info.detail.get("group_size", 0))
        key = info.kind, info.nbytes, str(info.detail.get("dtype", "")), size, groups.shape[1]
        rows[key].append(
            (
                float(info.detail["transfer_s"]) if measured_transfer else writer.shortest[op],
                took[op],
                measured_transfer,
            )
        )
    return [_row(key, pairs) for key, pairs in sorted(rows.items(), key=lambda r: -len(r[1]) * r[0][1])]


def _row(key: tuple[str, float, str, int, int], pairs: list[tuple[float, float, bool]]) -> Collectives:
    kind, nbytes, dtype, size, played = key
    measured, simulated = (float(np.median([pair[i] for pair in pairs])) for i in (0, 1))
    waited = not all(pair[2] for pair in pairs)
    busbw = nbytes / measured * bus_factor(kind, size) if measured > 0 and size else None
    return Collectives(kind, nbytes, dtype, size, len(pairs), measured, simulated, waited, busbw, played)
