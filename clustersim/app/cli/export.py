"""``clustersim export``: a saved run, a sweep or a scenario's program as what other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import OUT_FILE, OUT_FOLDER, PATH, rank_list, rank_words, ranks_option, working
from clustersim.app.cli.tables import stdout
from clustersim.core.outputs import Folder, fresh, writing

if TYPE_CHECKING:
    from clustersim.scenario.run.running import Prepared


@click.command(short_help="Write a run for Perfetto or as CSV, a program as Chakra traces, a machine for SimGrid.")
@click.argument("run", type=PATH)
@click.argument("file", type=OUT_FILE, required=False)
@click.option(
    "--chakra",
    type=OUT_FOLDER,
    metavar="DIR",
    help="A folder for a scenario's program as Chakra traces, and its machine for ASTRA-sim.",
)
@ranks_option
def export(run: Path, file: Path | None, chakra: Path | None, ranks: tuple[str, ...]) -> None:
    """Write the spans of a saved run RUN (a folder) to FILE, in the format its name ends with.

    Without --ranks it is all of them, or the leading nodes that a viewer opens at ease, and the answer says which.
    .json and .json.gz (Chrome's, for ui.perfetto.dev), .pftrace (Perfetto's own), .csv and .csv.gz. Where RUN is of
    `clustersim sweep`, its table: .csv or .parquet.

    Where RUN is a scenario, its machine as SimGrid's platform (.xml), or with --chakra its program for others' engines.
    """
    chosen = rank_list(ranks)
    if (file is None) == (chakra is None):
        raise click.UsageError("name one FILE, or a folder with --chakra")
    if chakra is not None:
        _chakra(run, chakra, chosen)
    elif file is not None and file.suffix == ".xml":
        _simgrid(run, file)
    elif file is not None:
        _spans(run, file, chosen)


def _spans(run: Path, file: Path, ranks: list[int] | None) -> None:
    """A sweep's table, or a run's spans."""
    from clustersim.files import traces
    from clustersim.files.traces.saved import load_run
    from clustersim.studies import sweep as sweeps

    if sweeps.is_sweep(run):
        with working(f"writing {file}"):
            table = sweeps.read(run)
            sweeps.write(table, file)
        stdout().say(f"wrote {file}: {len(table.get('key', ())):,} rows")
        return
    saved = load_run(run)
    with working(f"writing {file}"):
        written = traces.write(saved.timeline, file, ranks, saved.memory)
    stdout().say(f"wrote {file}: {rank_words(written, saved.timeline.world_size)}")


def _prepared(name: Path) -> Prepared:
    from clustersim import scenario

    return scenario.load(str(name)).prepare()


def _simgrid(name: Path, file: Path) -> None:
    from clustersim.files.launch.machines import simgrid

    with working(f"writing {file}"):
        topology = _prepared(name).topology
        text = simgrid(topology)
        with writing(file), fresh(file) as path:
            path.write_text(text, encoding="utf-8")
    stdout().say(f"wrote {file}: {topology.n_links:,} links of {topology.name}")


def _chakra(name: Path, folder: Path, ranks: list[int] | None) -> None:
    """A file a rank, and what ASTRA-sim needs beside them."""
    from clustersim.files.launch import chakra, machines

    with working(f"writing {folder}"):
        prepared = _prepared(name)
        program = prepared.program
        title = name.stem
        files = chakra.file_names(program, title, ranks)
        names = [*files, *machines.ASTRA]
        out = Folder(folder, "export", title, names, [title, prepared.scenario.inputs(), ranks])
        with out.files() as path_of:
            groups = chakra.write(program, title, files, path_of)
            for file, data in machines.astra(prepared.topology, prepared.mesh, groups).items():
                path_of(file).write_bytes(data)
    stdout().say(f"wrote {folder}: {len(files):,} Chakra traces, and ASTRA-sim's files of {prepared.topology.name}:")
    click.echo(machines.astra_command(title, bool(groups)))
