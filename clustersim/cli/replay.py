"""``clustersim replay``: a measured run's communication, simulated on a topology."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.cli.common import json_option, print_json, stdout, working
from clustersim.errors import ClusterSimError
from clustersim.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.calibration.trace_replay import Replayed
    from clustersim.timeline import Timeline
    from clustersim.topology import Topology


@click.command(short_help="Simulate a trace's communication on a topology.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--topology", "name", required=True, help="A shipped name, or a .toml file.")
@click.option("--nodes", type=click.IntRange(min=1), default=None, help="Machines; as many as the trace names.")
@click.option("--times", type=click.IntRange(min=1), default=1, show_default=True, help="Copies of every rank.")
@click.option("--backend", type=click.Choice(["nccl", "gloo", "ideal"]), default="nccl", show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None, help="A folder: measured.npz and simulated.npz.")
@json_option
def replay(
    files: tuple[Path, ...], name: str, nodes: int | None, times: int, backend: str, out: Path | None, as_json: bool
) -> None:
    """Simulate what a measured run communicates on a topology, with its compute and host times as they were.

    FILES are profiler traces (one per rank, or a folder of them) or an Nsight Systems export. Step time, exposed
    communication and each collective's time stand beside the measured ones. `--times 2` asks how the same run does on
    twice the ranks, on twice the machines unless --nodes says otherwise.
    """
    from clustersim import fabrics, traces
    from clustersim.calibration.trace_replay import replay as played
    from clustersim.timeline import Timeline

    with working(f"replaying {len(files)} file(s)"):
        measured = traces.read(files)
        if not isinstance(measured, Timeline):
            raise ClusterSimError(
                f"{files[0]}: holds times of collectives, not a run; `clustersim calibrate` fits them"
            )
        machines = nodes or _machines(measured) * times
        ranks = measured.world_size * times
        if ranks % machines:
            raise ClusterSimError(f"--nodes {machines}: {ranks} ranks do not divide over {machines} machines")
        topology = fabrics.load(name, nodes=machines)
        mesh = fabrics.mesh(topology, nproc_per_node=ranks // machines)
        result = played(measured, topology, mesh, times=times, backend=backend)
        if out is not None:
            _save(result, topology, out)
    if as_json:
        print_json({"ranks": ranks, "nodes": machines, "topology": topology.name, "totals": result.totals,
                    "collectives": result.collectives, "notes": result.notes})  # fmt: skip
    else:
        _print(result, f"{ranks} ranks on {machines} x {topology.name}")
        if out is not None:
            stdout().print(f"wrote {out}/measured.npz and {out}/simulated.npz: `clustersim compare` tells them apart")


def _machines(measured: Timeline) -> int:
    return 1 if measured.rank_node is None else len(set(measured.rank_node.tolist()))


def _save(result: Replayed, topology: Topology, out: Path) -> None:
    from clustersim.paths import output_folder
    from clustersim.traces.saved import save_run

    with output_folder(out):
        save_run(result.measured, out / "measured.npz")
        save_run(result.simulated, out / "simulated.npz", topology)


def _print(result: Replayed, where: str) -> None:
    from rich.markup import escape
    from rich.table import Table

    from clustersim.calibration.trace_replay import TOTALS

    console = stdout()
    table = Table(title=f"replay: {escape(where)}", title_justify="left")
    table.add_column("mean over ranks", style="bold")
    for heading in ("measured", "simulated", "difference"):
        table.add_column(heading, justify="right")
    for key, words in TOTALS.items():
        table.add_row(words, *_pair(*result.totals[key]))
    console.print(table)
    table = Table(title="collectives, median transfer time", title_justify="left")
    table.add_column("collective", style="bold")
    for heading in ("size", "type", "ranks", "count", "measured", "simulated", "difference"):
        table.add_column(heading, justify="right")
    for row in result.collectives:
        table.add_row(row["kind"], *_collective(row))
    console.print(table)
    if any(row["waiting_included"] for row in result.collectives):
        console.print("<=: waiting for peers included; the trace does not hold every rank of the group")
    for note in result.notes:
        console.print(f"- {escape(note)}", soft_wrap=True)


def _collective(row: dict[str, Any]) -> tuple[str, ...]:
    seen, played, difference = _pair(row["measured_s"], row["simulated_s"])
    facts = (format_bytes(row["nbytes"]), row["dtype"] or "-", str(row["group_size"]), str(row["count"]))
    return (*facts, f"<={seen}" if row["waiting_included"] else seen, played, difference)


def _pair(measured: float, simulated: float) -> tuple[str, str, str]:
    difference = f"{simulated / measured - 1:+.1%}" if measured > 0 else "-"
    return format_time(measured), format_time(simulated), difference
