"""``clustersim trace``: what somebody's profile or benchmark log says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.cli.common import PATH, json_option, print_json, working
from clustersim.errors import ClusterSimError
from clustersim.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.timeline import Timeline
    from clustersim.traces import Samples, Told


@click.command(short_help="Explain a profiler trace or a benchmark log.")
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("--format", "fmt", help="The format of FILES.  [found by their content]")
@click.option("--top", type=click.IntRange(min=1), default=20, help="How many collectives to print.")
@click.option("--topology", help="Of an NCCL log: compare its choices with those predicted on this machine.")
@click.option("--pins", is_flag=True, help="Of an NCCL log: print its choices as lines for a scenario.")
@json_option
def trace(files: tuple[Path, ...], fmt: str | None, top: int, topology: str | None, pins: bool, as_json: bool) -> None:
    """Explain FILES, found out by content: PyTorch profiler traces (one per rank, or a folder of them, with execution
    traces of the same steps where there are some), Nsight Systems sqlite exports, the folder of a pipeline's ops.csv
    and steps.csv, nccl-tests logs, tables of collectives, DeepSpeed comms logs, JSON lines of the NCCL inspector and of
    rccl-tests, NCCL_DEBUG=INFO logs, and Flight Recorder dumps of a run that hangs (who is missing at which
    collective)."""
    from clustersim import fitting, traces
    from clustersim.timeline import Timeline
    from clustersim.traces import nccl_debug
    from clustersim.traces.digest import digest

    with working(f"reading {len(files)} file(s)"):
        read = traces.read(files, format=fmt)
        if topology:
            log = _choices(read)
            read = nccl_debug.beside(log, fitting.load(topology, nodes=log.facts["nodes"] or 1))
        said = digest(read) | (_steps(read) | _pipeline(read) if isinstance(read, Timeline) else {})
    if pins:
        click.echo(nccl_debug.pins(_choices(read)), nl=False)
    elif as_json:
        print_json(said)
    else:
        lines = {
            "timeline": lambda: _timeline(said, top),
            "samples": lambda: _samples(said),
            "told": lambda: _told(said),
        }
        click.echo("\n".join(lines[said["what"]]()))


def _choices(read: Timeline | Samples | Told) -> Told:
    """A log with NCCL's choices. Raises :class:`ClusterSimError` for anything else."""
    from clustersim import traces

    if not isinstance(read, traces.Told) or "choices" not in read.facts:
        raise ClusterSimError(
            f"{read.source}: --topology and --pins are for an NCCL_DEBUG=INFO log; `clustersim replay` plays a run"
        )
    return read


def _told(said: dict[str, Any]) -> Iterator[str]:
    yield from said["lines"]
    yield from _tail(said)


def _steps(run: Timeline) -> dict[str, Any]:
    """The backend that a trace names, and its median step [s] without the warm-up; None where it has no steps."""
    from statistics import median

    from clustersim import traces
    from clustersim.analysis.pipeline import steady, windows

    found, kept = windows(run), steady(run)
    told = any(step for step in found)
    step = median(end - begin for begin, end in (found[s] for s in kept)) if told and kept else None
    return {"backend": traces.backend_of(run), "step_time_s": step, "steady_steps": kept if told else []}


def _pipeline(run: Timeline) -> dict[str, Any]:
    """What a run with stages says of them: seconds of a step; nothing for a run without."""
    from clustersim.analysis import pipeline
    from clustersim.analysis.pipeline_words import sentences, slowest

    if not pipeline.has_pipeline(run):
        return {}
    rows, kept = pipeline.stage_times(run), pipeline.steady(run)
    stage, forward, backward = slowest(rows)
    parts = ("stage", "window", "busy", "idle", *pipeline.PARTS, "forward", "backward")
    return {
        "pipeline": {
            "stages": [{name: getattr(row, name) for name in parts} for row in rows],
            "slowest": {"stage": stage, "forward_ratio": forward, "backward_ratio": backward},
            "steps": kept,
            "steps_left_out": [step for step in pipeline.windows(run) if step not in kept],
            "text": sentences(rows),
        }
    }


def _stages(said: dict[str, Any]) -> Iterator[str]:
    """A line per stage, shares of a step, and what they mean."""
    from clustersim.analysis.pipeline import PARTS

    left = said["steps_left_out"]
    yield f"pipeline, mean of {len(said['steps'])} step(s)" + (
        f" ({', '.join(map(str, left))} left out as warm-up)" if left else ""
    )
    yield f"{'stage':>5s} {'forward':>10s} {'backward':>10s} {'busy':>8s} {'idle':>8s}  = " + " ".join(
        f"{part:>9s}" for part in PARTS
    )
    for row in said["stages"]:
        shares = " ".join(f"{row[part] / row['window']:>9.1%}" for part in PARTS)
        yield (
            f"{row['stage']:>5d} {format_time(row['forward']):>10s} {format_time(row['backward']):>10s} "
            f"{row['busy'] / row['window']:>8.1%} {row['idle'] / row['window']:>8.1%}    {shares}"
        )
    yield from said["text"]


def _timeline(said: dict[str, Any], top: int) -> Iterator[str]:
    steps = f", steps {said['steps'][0]} to {said['steps'][-1]}" if any(said["steps"]) else ""
    backend = f", {said['backend']}" if said["backend"] else ""
    whole = format_time(said["window_s"])
    yield f"{said['ranks_measured']} of {said['world_size']} ranks{backend}, first span to last {whole}{steps}"
    if said["step_time_s"] is not None:
        yield f"  {'step time':24s} {format_time(said['step_time_s'])}, median of {len(said['steady_steps'])}"
    for key, words in (("compute_share", "compute stream busy"), ("transfer_share", "transferring"),
                       ("exposed_transfer_share", "of that, exposed"),
                       ("waiting_for_peers_share", "collectives waiting")):  # fmt: skip
        yield f"  {words:24s} {_range(said[key])}"
    if said["waiting_for_launch_share"] is not None:
        yield f"  {'waiting for launches':24s} {_range([said['waiting_for_launch_share']])}"
    if "pipeline" in said:
        yield from _stages(said["pipeline"])
    yield from _collectives(said["collectives"], top)
    yield from _tail(said)


def _collectives(rows: list[dict[str, Any]], top: int) -> Iterator[str]:
    if rows:
        yield f"{'collective':16s} {'size':>10s} {'type':>6s} {'ranks':>5s} {'count':>5s} {'transfer':>10s} " + (
            f"{'busbw GB/s':>10s} {'skew':>10s} {'worst':>10s}"
        )
    for row in rows[:top]:
        mark = "<=" if row["waiting_included"] else ""
        busbw = f"{row['busbw'] / 1e9:.2f}" if row["busbw"] and not mark else "-"
        skews = [format_time(row[key]) if row[key] is not None else "-" for key in ("skew_s", "skew_max_s")]
        yield (
            f"{row['kind']:16s} {format_bytes(row['nbytes']) if row['nbytes'] else '-':>10s} {row['dtype']:>6s} "
            f"{row['group_size']:>5d} "
            f"{row['count']:>5d} {mark + format_time(row['transfer_s']):>10s} "
            f"{busbw:>10s} {skews[0]:>10s} {skews[1]:>10s}"
        )
    if len(rows) > top:
        yield f"... and {len(rows) - top} more (--top)"


def _samples(said: dict[str, Any]) -> Iterator[str]:
    yield f"{said['rows']} measured collectives"
    yield f"{'collective':16s} {'ranks':>5s} {'nodes':>5s} {'rows':>5s} {'sizes':>22s} {'fastest':>10s} " + (
        f"{'busbw GB/s':>10s}  launch, version"
    )
    for row in said["tables"]:
        sizes = f"{format_bytes(row['smallest_bytes'])} - {format_bytes(row['largest_bytes'])}"
        busbw = f"{row['busbw_max'] / 1e9:.2f}" if row["busbw_max"] is not None else "-"
        yield (
            f"{row['kind']:16s} {row['ranks'] or '?':>5} {row['nodes'] or '?':>5} {row['rows']:>5d} {sizes:>22s} "
            f"{format_time(row['fastest_s']):>10s} {busbw:>10s}  {row['launch'] or '-'}, {row['version'] or '-'}"
        )
    yield from _tail(said)


def _tail(said: dict[str, Any]) -> Iterator[str]:
    for reason, count in said["skipped"].items():
        yield f"skipped {count}: {reason}"
    yield from (f"hint: {hint}" for hint in [*said.get("hints", []), *said.get("notes", [])])


def _range(shares: list[float]) -> str:
    low, high = 100 * min(shares), 100 * max(shares)
    return f"{low:.1f} %" if f"{low:.1f}" == f"{high:.1f}" else f"{low:.1f} to {high:.1f} %"
