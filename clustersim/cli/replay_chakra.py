"""``clustersim replay`` of Chakra traces: a program of somebody's, played on a machine of ours."""

from __future__ import annotations

from pathlib import Path

import click

from clustersim.cli.common import print_json, stdout, working
from clustersim.errors import ClusterSimError
from clustersim.outputs import Folder
from clustersim.units import format_time


def is_chakra(paths: tuple[Path, ...]) -> bool:
    """Whether the first file is a Chakra trace, by its content."""
    from clustersim.exchange import chakra_schema
    from clustersim.traces import files

    found = files.files_of(paths)
    first = next((path for path in found if path.name.endswith((".et", ".et.gz"))), found[0])
    return chakra_schema.sniff(files.head(first))


def play(paths: tuple[Path, ...], name: str, nodes: int | None, backend: str, out: Path | None, as_json: bool) -> None:
    """Play the program on ``nodes`` machines (None: as many as its ranks fill), print its times, save it in ``out``."""
    from clustersim import fabrics, fitting
    from clustersim.calibration.trace_replay import TOTALS, totals_of
    from clustersim.engine import simulate
    from clustersim.exchange import chakra_reading
    from clustersim.traces.saved import save_run

    with working(f"playing {len(paths)} file(s)"):
        program = chakra_reading.read(paths)
        world, one = program.world_size, fitting.load(name, nodes=1)
        machines = nodes or -(-world // len(one.homes))
        if world % machines:
            raise ClusterSimError(f"{paths[0]}: {world} ranks do not divide over {machines} machines; say --nodes")
        topology = fitting.load(name, nodes=machines)
        mesh = fabrics.mesh(topology, nproc_per_node=world // machines)
        timeline = simulate(program, topology, mesh, backend=backend)
        if out is not None:
            of = [*(str(path.resolve()) for path in paths), name, nodes, backend]
            folder = Folder(out, "replay", paths[0].name, ("run.npz",), of)
            with folder.files() as path_of:
                save_run(timeline, path_of("run.npz"), topology)
    totals = totals_of(timeline, range(program.world_size))
    if as_json:
        print_json({"ranks": program.world_size, "nodes": machines, "topology": topology.name, "totals": totals,
                    "notes": program.notes})  # fmt: skip
        return
    stdout().say(f"{program.world_size} ranks on {machines} x {topology.name}")
    for key, words in TOTALS.items():
        click.echo(f"  {words:50s} {format_time(totals[key]):>10s}")
    click.echo("".join(f"- {note}\n" for note in program.notes), nl=False)
