"""``clustersim trace``: what somebody's profile or benchmark log says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from msgspec import UNSET, UnsetType

from clustersim.app.cli.common import PATH, format_option, json_option, print_json, working
from clustersim.core.errors import ClusterSimError, few
from clustersim.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.core.timeline import Timeline
    from clustersim.files.traces import Samples, Told
    from clustersim.files.traces.digest import RepeatedCollective, RunDigest, SampleDigest
    from clustersim.files.traces.told import NcclLog

LEFT_OUT = "left out: warm-up, or begun before the first span"
"""Why steps are in no figure."""


class SlowestStage(msgspec.Struct, frozen=True):
    """The stage with the most work, and how many times the others' medians its passes take."""

    stage: int
    forward_ratio: float
    backward_ratio: float


class Pipeline(msgspec.Struct, frozen=True):
    """What a run says of its stages: seconds of a step of each, by part; over ``steps``; and what it means."""

    stages: list[dict[str, float]]
    slowest: SlowestStage
    steps: list[int]
    steps_left_out: list[int]
    text: list[str]


class TraceSteps(msgspec.Struct, frozen=True):
    """The backend that a trace names, its mean step [s] without the warm-up, None where it has no steps; and its
    stages, where it has some."""

    backend: str | None
    step_time_s: float | None
    steady_steps: list[int]
    pipeline: Pipeline | UnsetType = UNSET


@click.command(short_help="Explain a profiler trace or a benchmark log.")
@click.argument("files", nargs=-1, required=True, type=PATH)
@format_option
@click.option("--top", type=click.IntRange(min=1), default=20, help="How many collectives to print.")
@click.option(
    "--topology",
    help="Of nccl-tests: expected beside measured on this machine, and why; of an NCCL log: its choices beside them.",
)
@click.option("--pins", is_flag=True, help="Of an NCCL log: print its choices as lines for a scenario.")
@json_option
def trace(files: tuple[Path, ...], fmt: str | None, top: int, topology: str | None, pins: bool, as_json: bool) -> None:
    """Explain FILES, found out by content: PyTorch profiler traces (one per rank, or a folder of them, with execution
    traces of the same steps where there are some), Nsight Systems exports (sqlite, or CSV), the folder of a pipeline's
    ops.csv and steps.csv, nccl-tests logs, tables of collectives, DeepSpeed comms logs, JSON lines of the NCCL
    inspector and of rccl-tests, NCCL_DEBUG=INFO logs, step times that Megatron-LM, torchtitan, DeepSpeed and
    TensorBoard log, and of a run that hangs Flight Recorder dumps or the log of PyTorch's watchdog (who is missing at
    which collective)."""
    from clustersim.app.cli.replay import is_chakra
    from clustersim.calibrate import beside_machine
    from clustersim.core.timeline import Timeline
    from clustersim.files import traces
    from clustersim.files.traces import digest, nccl_debug
    from clustersim.files.traces.nccl_tests_log import OWN_LINES

    if fmt is None and is_chakra(files):
        raise ClusterSimError(f"{files[0]}: a Chakra trace is a program, which `clustersim replay` plays")
    with working(f"reading {len(files)} file(s)"):
        read = traces.read(files, format=fmt)
        if isinstance(read, traces.Samples):  # what is below the rows needs no word of where to find it
            read = replace(read, notes=tuple(note for note in read.notes if OWN_LINES not in note))
        beside = None
        if topology and isinstance(read, traces.Samples):
            _no_capture(files, fmt)
            beside = beside_machine.beside_machine(read, topology)
        if topology and beside is None:
            read = _on_machine(_choices(read), topology)
        if beside is not None:
            document = msgspec.to_builtins(beside)
            lines = beside_machine.lines(beside)
        elif isinstance(read, Timeline):
            run = digest.of_run(read)
            steps = _steps(read)
            document = msgspec.to_builtins(run) | msgspec.to_builtins(steps)
            lines = _timeline(run, steps, top)
        elif isinstance(read, traces.Samples):
            samples = digest.of_samples(read)
            document = msgspec.to_builtins(samples)
            lines = _samples(samples)
        else:
            document = msgspec.to_builtins(read)
            lines = chain(read.lines, _tail(read.skipped))
        own = _own_logs(files, topology) if fmt is None and isinstance(read, traces.Samples) else []
        document |= {"nccl": msgspec.to_builtins(own)} if own else {}
        lines = chain(lines, *(log.lines for log in own))
    if pins:
        click.echo(nccl_debug.pins(_choices(read)), nl=False)
    elif as_json:
        print_json(document)
    else:
        click.echo("\n".join(lines))


def _on_machine(log: NcclLog, topology: str) -> NcclLog:
    """NCCL's lines beside what this machine would do."""
    from clustersim.collectives import fitted as fitting
    from clustersim.files.traces import nccl_debug

    nodes = log.nodes or nccl_debug.nodes_needed(log, fitting.load(topology, nodes=1))
    return nccl_debug.beside(log, fitting.load(topology, nodes=nodes))


def _own_logs(paths: Sequence[Path], topology: str | None) -> list[NcclLog]:
    """What NCCL says of itself among the rows of a benchmark's logs, which may be why they are slow."""
    from clustersim.files.traces import FORMATS, candidates, files, nccl_debug

    own = []
    for path in files.files_of(paths):
        if FORMATS["nccl_debug"] in candidates(path):
            with suppress(ClusterSimError):  # a few of its lines, of which none tells anything
                log = nccl_debug.read([path])
                own.append(_on_machine(log, topology) if topology else log)
    return own


def _no_capture(paths: Sequence[Path], fmt: str | None) -> None:
    """Raises :class:`ClusterSimError` for captures, which may be of another library than NCCL."""
    from clustersim.files.traces import FORMATS, files, sniff

    for path in paths:
        if fmt == "capture" or (
            fmt is None and any(sniff(file) is FORMATS["capture"] for file in files.files_of(path))
        ):
            raise ClusterSimError(
                f"{path}: a capture, which `clustersim validate capture {path} --topology ...` compares with a machine"
            )


def _choices(read: Timeline | Samples | Told) -> NcclLog:
    """A log with NCCL's choices. Raises :class:`ClusterSimError` for anything else."""
    from clustersim.files.traces.told import NcclLog

    if not isinstance(read, NcclLog):
        raise ClusterSimError(
            f"{read.source}: --topology is for logs of nccl-tests and NCCL_DEBUG=INFO, --pins for the latter; "
            "`clustersim replay` plays a run"
        )
    return read


def _steps(run: Timeline) -> TraceSteps:
    from clustersim.explain.metrics import steady_window
    from clustersim.explain.pipeline import steady
    from clustersim.files import traces

    steady_steps = steady(run)
    numbered = any(op.step for op in run.ops)
    step = steady_window(run).step_time if numbered and steady_steps else None
    return TraceSteps(traces.backend_of(run), step, steady_steps if numbered else [], _pipeline(run))


def _pipeline(run: Timeline) -> Pipeline | UnsetType:
    from clustersim.explain import pipeline
    from clustersim.explain.pipeline import sentences, slowest

    if not pipeline.has_pipeline(run):
        return UNSET
    rows = pipeline.stage_times(run)
    steady_steps = pipeline.steady(run)
    parts = ("stage", "window", "busy", "idle", *pipeline.PARTS, "forward", "backward")
    return Pipeline(
        stages=[{name: getattr(row, name) for name in parts} for row in rows],
        slowest=SlowestStage(*slowest(rows)),
        steps=steady_steps,
        steps_left_out=[step for step in pipeline.windows(run) if step not in steady_steps],
        text=sentences(rows),
    )


def _stages(report: Pipeline) -> Iterator[str]:
    """A line per stage, shares of a step, and what they mean."""
    from clustersim.explain.pipeline import PARTS

    left = f" ({', '.join(map(str, report.steps_left_out))} {LEFT_OUT})" if report.steps_left_out else ""
    yield f"pipeline, mean of {len(report.steps)} step(s){left}"
    yield f"{'stage':>5s} {'forward':>10s} {'backward':>10s} {'busy':>8s} {'idle':>8s}  = " + " ".join(
        f"{part:>9s}" for part in PARTS
    )
    for row in report.stages:
        shares = " ".join(f"{row[part] / row['window']:>9.1%}" for part in PARTS)
        yield (
            f"{row['stage']:>5.0f} {format_time(row['forward']):>10s} {format_time(row['backward']):>10s} "
            f"{row['busy'] / row['window']:>8.1%} {row['idle'] / row['window']:>8.1%}    {shares}"
        )
    yield from report.text


def _timeline(digest: RunDigest, trace_steps: TraceSteps, top: int) -> Iterator[str]:
    steps = f", steps {digest.steps[0]} to {digest.steps[-1]}" if any(digest.steps) else ""
    backend = f", {trace_steps.backend}" if trace_steps.backend else ""
    window_text = format_time(digest.whole_s)
    yield f"{digest.ranks_measured} of {digest.world_size} ranks{backend}, first span to last {window_text}{steps}"
    if trace_steps.step_time_s is not None:
        count = len(trace_steps.steady_steps)
        whose = f"mean of {count}" if count > 1 else "of one step, from its first span to its last"
        yield f"  {'step time':24s} {format_time(trace_steps.step_time_s)}, {whose}"
    steady_steps = trace_steps.steady_steps
    warm_up = [step for step in digest.steps if steady_steps and step < steady_steps[0]]
    if warm_up:
        left = few(warm_up, 3)
        yield f"  shares are of the other steps: step(s) {left} {LEFT_OUT}"
    yield f"  {'compute stream busy':24s} {_range(digest.compute_share)}"
    yield f"  {'transferring':24s} {_range(digest.communication_share)}"
    yield f"  {'of that, exposed':24s} {_range(digest.exposed_transfer_share)}"
    yield f"  {'collectives waiting':24s} {_range(digest.peer_wait_share)}"
    yield f"  {'of that, beside nothing':24s} {_range(digest.waiting_for_peer_share)}"
    if digest.waiting_for_launch_share is not None:
        yield f"  {'waiting for launches':24s} {_range([digest.waiting_for_launch_share])}"
    if trace_steps.pipeline:
        yield from _stages(trace_steps.pipeline)
    yield from _collectives(digest.collectives, top)
    yield from _tail(digest.skipped, digest.hints)


def _collectives(rows: list[RepeatedCollective], top: int) -> Iterator[str]:
    if rows:
        yield f"{'collective':16s} {'size':>10s} {'type':>6s} {'ranks':>5s} {'count':>5s} {'transfer':>10s} " + (
            f"{'busbw GB/s':>10s} {'skew':>10s} {'worst':>10s}"
        )
    for row in rows[:top]:
        mark = "<=" if row.waiting_included else ""
        busbw = _gigabytes(row.busbw) if row.busbw and not mark else "-"
        skew, worst = ("-" if value is None else format_time(value) for value in (row.skew_s, row.skew_max_s))
        yield (
            f"{row.kind:16s} {format_bytes(row.nbytes) if row.nbytes else '-':>10s} {row.dtype:>6s} "
            f"{row.group_size:>5d} {row.count:>5d} {mark + format_time(row.transfer_s):>10s} "
            f"{busbw:>10s} {skew:>10s} {worst:>10s}"
        )
    if len(rows) > top:
        yield f"... and {len(rows) - top} more (--top)"


def _samples(digest: SampleDigest) -> Iterator[str]:
    yield f"{digest.rows} measured collectives"
    yield f"{'collective':16s} {'ranks':>5s} {'nodes':>5s} {'rows':>5s} {'sizes':>22s} {'fastest':>10s} " + (
        f"{'busbw GB/s':>10s}  launch, version"
    )
    for row in digest.tables:
        sizes = f"{format_bytes(row.smallest_bytes)} - {format_bytes(row.largest_bytes)}"
        busbw = _gigabytes(row.busbw_max) if row.busbw_max is not None else "-"
        yield (
            f"{row.kind:16s} {row.ranks or '?':>5} {row.nodes or '?':>5} {row.rows:>5d} {sizes:>22s} "
            f"{format_time(row.fastest_s):>10s} {busbw:>10s}  {row.launch or '-'}, {row.version or '-'}"
        )
    yield from _tail(digest.skipped, digest.notes)


def _gigabytes(rate: float) -> str:
    """GB/s of a rate [bytes/s]; two digits of what is small, as of a barrier's or a CPU's."""
    return f"{rate / 1e9:.2f}" if rate >= 1e8 or not rate else f"{rate / 1e9:.2g}"


def _tail(skipped: Mapping[str, int], hints: Sequence[str] = ()) -> Iterator[str]:
    yield from (f"skipped {count}: {reason}" for reason, count in skipped.items())
    yield from (f"hint: {hint}" for hint in hints)


def _range(shares: list[float]) -> str:
    if not shares:
        return "not known: the collectives were left out, as said below"
    low = 100 * min(shares)
    high = 100 * max(shares)
    mean = 100 * sum(shares) / len(shares)
    return f"{low:.1f} %" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} %, mean {mean:.1f} %"
