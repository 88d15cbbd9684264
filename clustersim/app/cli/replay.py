"""``clustersim replay``: a measured run again, its communication simulated on a topology or free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from clustersim.app.cli.common import BACKEND, OUT_FOLDER, PATH, format_option, json_option, print_json, working
from clustersim.app.cli.replay_tables import print_replay
from clustersim.app.cli.tables import stdout
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.outputs import MANIFEST, Folder
from clustersim.core.paths import RUN_FILE
from clustersim.core.texts import short
from clustersim.core.units import format_time, parse_bytes

if TYPE_CHECKING:
    from clustersim.core.mesh import Mesh
    from clustersim.core.timeline import Timeline
    from clustersim.core.topology import Topology
    from clustersim.studies.replay.replay_scale import Scale
    from clustersim.studies.replay.trace_replay import ReplayedTrace

CHAKRA = "chakra"
"""What --format calls a program's traces, which only this command reads."""
SIMULATED = "simulated.npz"
SAVED = ("measured.npz", SIMULATED)
"""What a replay leaves in its folder."""


@click.command(short_help="Run a trace again on another network, other GPUs or more of them.")
@click.argument("files", nargs=-1, required=True, type=PATH)
@click.option("--topology", "name", help="A shipped topology, or a .toml file; without it transfers take no time.")
@click.option("--nodes", type=click.IntRange(min=1), help="How many nodes.  [as many as the trace names]")
@click.option("--times", type=click.IntRange(min=1), default=1, help="How many times as many ranks.")
@click.option(
    "--scale",
    "scales",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one thing: dp=64, gpu=H100-SXM5-80GB (or FROM:TO; dtype=fp32), bucket=100MiB.",
)
@click.option(
    "--backend",
    type=BACKEND,
    help="What collectives run on.  [the trace's own; else nccl, or gloo without a GPU]",
)
@click.option("--out", type=OUT_FOLDER, help="Folder for measured.npz and simulated.npz.")
@format_option
@json_option
def replay(
    files: tuple[Path, ...],
    name: str | None,
    nodes: int | None,
    times: int,
    scales: tuple[str, ...],
    backend: str | None,
    out: Path | None,
    fmt: str | None,
    as_json: bool,
) -> None:
    """Play a measured run again: compute and host times as they were, communication simulated on a topology, or free.

    FILES are profiler traces (one per rank, or a folder of them, with PyTorch's execution traces), an Nsight
    Systems export, the folder of a pipeline's ops.csv and steps.csv, or Chakra traces, which are programs and need a
    --topology. The step time, exposed transfers and each collective's time stand beside the measured ones, and of a
    pipeline each stage's idle share. `--times 2` asks how the same run does on twice the ranks, on twice the machines
    unless --nodes says otherwise.

    `--scale dp=64` asks for so many data-parallel ranks, `--scale gpu=` for another GPU (matrix products take as much
    longer as its FLOP/s are lower, other kernels as its memory bandwidth is, the host stays), `--scale bucket=`
    for gradient buckets of another size; the answer says line by line what is the trace's and what is modelled.
    """
    from clustersim.core.timeline import Timeline
    from clustersim.files import traces
    from clustersim.files.traces.saved import save_run
    from clustersim.studies.replay.replay_scale import AS_MEASURED
    from clustersim.studies.replay.trace_replay import replay as played

    if fmt == CHAKRA or (fmt is None and is_chakra(files)):
        if name is None or times > 1 or scales:
            raise ClusterSimError(f"{files[0]}: a Chakra trace is a program: it needs a --topology, and is not scaled")
        _play_chakra(files, name, nodes, backend, out, as_json)
        return
    folder = None if out is None else _folder(out, files, [name, nodes, times, *scales, backend])
    with working(f"replaying {len(files)} file(s)"):
        measured = traces.read(files, fmt)
        if not isinstance(measured, Timeline):
            raise ClusterSimError(
                f"{files[0]}: holds times of collectives, not a run; `clustersim calibrate` fits them"
            )
        scale = _scale(measured, times, scales)
        machine = _machine(measured, name, nodes, scale.times)
        backend = backend or _backend(measured, machine)
        result = played(measured, *(machine or ()), scale=scale, backend=backend)
        own = None if scale == AS_MEASURED else _at_own_size(measured, name, nodes, scale.times, backend)
        if folder is not None:
            with folder.files() as path_of:
                save_run(result.measured, path_of(SAVED[0]))
                save_run(result.simulated, path_of(SAVED[1]), machine[0] if machine else None)
    if as_json:
        print_json(_json(result, own))
    else:
        print_replay(result, backend, own)
        if out is not None:
            stdout().print(f"wrote {out}/measured.npz and {out}/simulated.npz: `clustersim compare` tells them apart")


def is_replay(folder: Path) -> bool:
    """Whether a folder holds what a replay left, measured and simulated."""
    return (folder / MANIFEST).is_file() and all((folder / name).is_file() for name in SAVED)


def _folder(out: Path, files: tuple[Path, ...], settings: list[object]) -> Folder:
    """Where both runs are kept. Raises :class:`ClusterSimError` where something else is."""
    inputs = [*(str(file.resolve()) for file in files), *settings]
    folder = Folder(out, "replay", ", ".join(file.name for file in files), SAVED, inputs)
    folder.check()
    return folder


def _scale(measured: Timeline, times: int, scales: tuple[str, ...]) -> Scale:
    """What differs from the measured run. Raises :class:`ClusterSimError` for a word or a value that cannot be used."""
    from clustersim.core.device import DTYPES
    from clustersim.core.device_names import device_from_text
    from clustersim.files.traces.joining import DEVICE
    from clustersim.studies.replay.replay_scale import Scale, groups_of

    equals_of: dict[str, str] = {}
    for text in scales:
        key, equals, value = text.partition("=")
        if not equals or key not in SCALES or key in equals_of:
            raise ClusterSimError(
                f"--scale {short(text)}: once each: {', '.join(f'{k}={v}' for k, v in SCALES.items())}"
            )
        equals_of[key] = value
    if dp := equals_of.get("dp"):
        times = _copies(dp, groups_of(measured).degree, times)
    bucket = parse_bytes(equals_of["bucket"]) if "bucket" in equals_of else 0.0
    if bucket and measured.world_size * sum(op.nbytes for op in measured.ops if op.kind == "all_reduce") > 1e6 * bucket:
        raise ClusterSimError(f"--scale bucket={equals_of['bucket']}: over a million buckets; take larger ones")
    if "gpu" not in equals_of:
        return Scale(times, bucket=bucket)
    was, _, gpu = equals_of["gpu"].rpartition(":")
    was = was or next((n.removeprefix(DEVICE) for n in measured.stats if n.startswith(DEVICE)), "")
    if not was:
        raise ClusterSimError(f"--scale gpu={gpu}: the trace does not name its GPU; write gpu=FROM:TO")
    dtype = equals_of.get("dtype", "bf16")
    if dtype not in DTYPES:
        raise ClusterSimError(f"--scale dtype={short(dtype)}: {nearest(dtype, DTYPES)}")
    return Scale(times, device_from_text(was), device_from_text(gpu), bucket, dtype)


def _copies(dp: str, degree: int, times: int) -> int:
    """Copies of every rank for so many data-parallel ranks. Raises :class:`ClusterSimError`."""
    if not dp.isdecimal() or len(dp) > 9 or times > 1 or not int(dp) or int(dp) % degree:
        raise ClusterSimError(
            f"--scale dp={short(dp)}: the run has {degree} data-parallel ranks; a multiple of it, without --times"
        )
    return int(dp) // degree


SCALES = {"dp": "64", "gpu": "H100-SXM5-80GB", "bucket": "100MiB", "dtype": "bf16"}
"""What --scale changes, and how it is written."""


def _backend(measured: Timeline, machine: tuple[Topology, Mesh] | None) -> str:
    """The trace's own, or what is usual on the machine. Raises :class:`ClusterSimError` for one that is not played."""
    from clustersim.collectives.backends import BACKENDS, usual_backend
    from clustersim.files.traces import backend_of

    if machine is None:
        return "nccl"
    library = backend_of(measured)
    if library is not None and library not in BACKENDS:
        raise ClusterSimError(
            f"{measured.source}: its collectives went through {short(library)}, which is not played; say --backend "
            "nccl to see what NCCL would take"
        )
    return library or usual_backend(machine[0], machine[1].gpus)


def _machine(measured: Timeline, name: str | None, nodes: int | None, times: int) -> tuple[Topology, Mesh] | None:
    """What to play on; None where no topology is named."""
    from clustersim.cluster import files as fabrics
    from clustersim.collectives import fitted as fitting

    if name is None:
        if nodes is not None:
            raise click.UsageError("--nodes needs a --topology")
        return None
    seen = 1 if measured.rank_node is None else len(set(measured.rank_node.tolist()))
    machines = nodes or seen * times
    ranks = measured.world_size * times
    if ranks % machines:
        raise ClusterSimError(f"--nodes {machines}: {ranks} ranks do not divide over {machines} machines")
    topology = fitting.load(name, nodes=machines)
    return topology, fabrics.mesh(topology, nproc_per_node=ranks // machines)


def _at_own_size(
    measured: Timeline, name: str | None, nodes: int | None, times: int, backend: str
) -> ReplayedTrace | str:
    """The run played as it was measured, for how far the model is off; or why it cannot be, on this topology.

    nodes : of the larger run, None for as many times the trace's.
    """
    from clustersim.studies.replay.trace_replay import replay as played

    own_nodes = None  # as many as the trace names
    if nodes is not None and measured.rank_node is None and nodes % times == 0:
        own_nodes = nodes // times
    try:
        machine = _machine(measured, name, own_nodes, 1)
        return played(measured, *(machine or ()), backend=backend)
    except ClusterSimError as error:
        return str(error)


def _json(result: ReplayedTrace, own: ReplayedTrace | str | None) -> dict[str, Any]:
    """Seconds and shares of 1; ``predicted`` is what was played; ``own`` : at the trace's own size, or why not."""
    answer = _json_of(result)
    if own is None:
        return answer
    if isinstance(own, str):
        return answer | {"measured_ranks": result.measured.world_size, "at_own_size": None, "why_not": own}
    measured, predicted = own.steps.medians()
    of_own = {
        "ranks": own.program.world_size,
        "nodes": own.machines,
        "predicted_step_s": predicted,
        "predicted_over_measured": predicted / measured if measured else None,
        "totals": own.totals,
    }
    return answer | {"measured_ranks": result.measured.world_size, "at_own_size": of_own}


def _json_of(result: ReplayedTrace) -> dict[str, Any]:
    measured, predicted = result.steps.medians()
    steps = zip(result.steps.steps, result.steps.measured, result.steps.simulated, strict=True)
    return {
        "ranks": result.program.world_size,
        "nodes": result.machines,
        "topology": result.where,
        "free_communication": result.free,
        "measured_step_s": measured,
        "predicted_step_s": predicted,
        "steps": [{"step": s, "measured_s": a, "predicted_s": b} for s, a, b in steps],
        "steps_left_out": result.steps.left_out,
        "slowdown": result.slowdown,
        "stages": [
            {"stage": s.stage, "measured_idle_share": s.measured, "predicted_idle_share": s.simulated}
            for s in result.stages
        ],
        "totals": result.totals,
        "collectives": msgspec.to_builtins(result.collectives),
        "notes": result.notes,
    }


def is_chakra(paths: tuple[Path, ...]) -> bool:
    """Whether the first file is a Chakra trace, by its content."""
    from clustersim.files.launch import chakra_schema
    from clustersim.files.traces import files

    trace_files = files.files_of(paths)
    first = next((path for path in trace_files if path.name.endswith((".et", ".et.gz"))), trace_files[0])
    return chakra_schema.sniff(files.head(first))


def _play_chakra(
    paths: tuple[Path, ...], name: str, nodes: int | None, backend: str | None, out: Path | None, as_json: bool
) -> None:
    """Play the program on ``nodes`` machines (None: as many as its ranks fill), print its times, save it in ``out``."""
    from clustersim.cluster import files as fabrics
    from clustersim.collectives import fitted as fitting
    from clustersim.collectives.backends import usual_backend
    from clustersim.engine import simulate
    from clustersim.explain.metrics import window_after
    from clustersim.files.launch import chakra_reading
    from clustersim.files.traces.saved import save_run
    from clustersim.studies.replay.trace_replay import TOTALS, totals_of

    with working(f"playing {len(paths)} file(s)"):
        program = chakra_reading.read(paths)
        world = program.world_size
        machine = fitting.load(name, nodes=1)
        machines = nodes or -(-world // len(machine.homes))
        if world % machines:
            raise ClusterSimError(f"{paths[0]}: {world} ranks do not divide over {machines} machines; say --nodes")
        topology = fitting.load(name, nodes=machines)
        mesh = fabrics.mesh(topology, nproc_per_node=world // machines)
        backend = backend or usual_backend(topology, mesh.gpus)
        timeline = simulate(program, topology, mesh, backend=backend)
        if out is not None:
            inputs = [*(str(path.resolve()) for path in paths), name, nodes, backend]
            folder = Folder(out, "replay", paths[0].name, (RUN_FILE,), inputs)
            with folder.files() as path_of:
                save_run(timeline, path_of(RUN_FILE), topology)
    totals = totals_of(timeline, range(program.world_size), window_after(timeline, 0))
    if as_json:
        print_json(
            {
                "ranks": program.world_size,
                "nodes": machines,
                "topology": topology.name,
                "totals": totals,
                "notes": program.notes,
            }
        )
        return
    stdout().say(f"{program.world_size} ranks on {machines} x {topology.name}")
    for key, total in TOTALS.items():
        click.echo(f"  {total:50s} {format_time(totals[key]):>10s}")
    click.echo("".join(f"- {note}\n" for note in program.notes), nl=False)
