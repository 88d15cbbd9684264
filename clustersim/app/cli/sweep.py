"""``clustersim sweep``: many scenarios, a row for each."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import to_builtins

from clustersim.app.cli.common import OUT_FOLDER, jobs_option, json_option, page_option
from clustersim.app.cli.study import say_study
from clustersim.app.cli.tables import rich_table, stdout
from clustersim.core.errors import ClusterSimError
from clustersim.core.figures import FIGURES
from clustersim.core.outputs import output_folder, together
from clustersim.core.units import format_bytes, format_time

if TYPE_CHECKING:
    from clustersim.core.arrays import Columns
    from clustersim.studies.sweep import SweepOutcome, SweepProgress
    from clustersim.studies.sweep.crews import Executor

SHOWN = 40
"""Rows of a table on a terminal."""

EVERY = 10.0
"""Seconds between two lines of progress where stderr is no terminal."""


@click.command(short_help="Simulate one scenario with many values of some keys.")
@click.argument("file")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder for results.jsonl, table, picture.")
@jobs_option
@click.option(
    "--executor",
    type=click.Choice(["processes", "dask"]),
    default="processes",
    help="What runs the scenarios: processes of this machine, or a Dask cluster.",
)
@click.option("--address", help="The Dask scheduler, such as tcp://host:8786.")
@click.option("--resume/--no-resume", default=True, help="Keep the results that are in OUT.")
@page_option
@json_option
def sweep(
    file: str,
    out: Path,
    jobs: int | None,
    executor: str,
    address: str | None,
    resume: bool,
    page: Path | None,
    as_json: bool,
) -> int | None:
    """Simulate every scenario of a sweep: FILE is a .toml file, or the name of a shipped one.

    Rows are appended to OUT/results.jsonl as they finish; run the same command again to go on after an interruption.
    A scenario that is there is not simulated again.
    """
    from clustersim.studies import sweep as sweeps

    plan = sweeps.load(file)
    with _telling(f"sweep {plan.name}") as tell:
        outcome = sweeps.sweep(
            plan, out, executor=_executor(executor, address, jobs), jobs=jobs, resume=resume, progress=tell
        )
    table = sweeps.read(out)
    wrote = _write(table, list(plan.columns), plan.title, out)
    names = list(table)
    lines = [dict(zip(names, row, strict=True)) for row in zip(*(c.tolist() for c in table.values()), strict=True)]
    document = to_builtins(outcome, enc_hook=str) | {"rows": lines}
    shown = list(plan.columns), plan.title, outcome
    say_study(document, out, page, as_json, lambda pages: _print(table, *shown, wrote + pages))
    return 1 if outcome.lost else None


def _executor(name: str, address: str | None, jobs: int | None) -> Executor | None:
    from clustersim.studies import sweep as sweeps

    if name == "dask":
        if address is None:
            raise click.UsageError("--executor dask needs --address, such as tcp://127.0.0.1:8786")
        if jobs is not None:
            raise click.UsageError("--jobs is of this machine's processes; a Dask cluster has its own workers")
        return sweeps.Dask(address)
    if address is not None:
        raise click.UsageError("--address needs --executor dask")
    return None


def _write(table: Columns, axes: list[str], title: str, out: Path) -> list[str]:
    """The table as CSV and a picture where one can be drawn; their names."""
    from clustersim.app import plots
    from clustersim.studies import sweep as sweeps

    with output_folder(out), together(out) as path_of:
        sweeps.write(table, path_of("table.csv"))
        try:
            figure = plots.sweep_curves(table, axes, title)
        except ClusterSimError:
            return ["table.csv"]
        plots.save(figure, path_of("curves.png"))
    return ["table.csv", "curves.png"]


def _print(table: Columns, axes: list[str], title: str, outcome: SweepOutcome, wrote: list[str]) -> None:
    console = stdout()
    if "" in table.get("error", ()):
        from clustersim.studies.plan import of_sweep, swept

        console.say(of_sweep.answer(swept.load(outcome.folder)).verdict)
    if table:
        console.print(_table(table, axes, title))
    if len(table.get("key", ())) > SHOWN:
        console.print(f"... and {len(table['key']) - SHOWN:,} more rows")
    same = outcome.cases - outcome.scenarios
    counts = [
        f"{outcome.computed:,} simulated",
        f"{outcome.kept:,} kept",
        *([f"{same:,} the same as others"] if same else []),
    ]
    console.print(f"{outcome.cases:,} scenarios: {', '.join(counts)}", highlight=False)
    for error in dict.fromkeys(text for text in table.get("error", ()) if text):
        count = int((table["error"] == error).sum())
        console.say(f"- {count:,} without a result: {error}")
    console.say(
        *(f"no row for {lost_scenario.scenario}: {lost_scenario.error}" for lost_scenario in outcome.lost[:5]),
        style="bold red",
    )
    console.say(f"wrote {outcome.folder}/results.jsonl, {', '.join(wrote)}")


COLUMNS = {figure.key: figure.column for figure in FIGURES}


def _table(table: Columns, axes: list[str], title: str) -> Any:
    tokens = not (table["tokens_per_s"] != table["tokens_per_s"]).all()
    rate = "tokens_per_s" if tokens else "samples_per_s"
    figures = ("step_time_s", rate, "mfu", "exposed_communication_s")
    heads = ("GPUs", *(COLUMNS[key] for key in figures), "peak memory", "memory")
    rows = []
    for i in range(min(SHOWN, len(table["key"]))):
        row = {name: column[i] for name, column in table.items()}
        cells = [str(row[name]) for name in axes]
        if row["error"]:
            rows.append([*cells, *[""] * 6, "-"])
            continue
        share = f"{row['mfu']:.1%}" if row["mfu"] == row["mfu"] else "", f"{row['share_exposed_communication']:.1%}"
        memory = format_bytes(float(row["peak_memory_bytes"])), row["memory"]
        step = f"{row['gpus']:,.0f}", format_time(float(row["step_time_s"])), f"{row[rate]:,.0f}"
        rows.append([*cells, *step, *share, *memory])
    head = [*((name, table[name].dtype.kind != "U") for name in axes), *((name, True) for name in heads)]
    return rich_table(title, head, rows)


@contextmanager
def _telling(title: str) -> Iterator[Any]:
    """Say on stderr how far the sweep is and how long it will take: a bar on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield _Lines(title)
        return
    from rich import progress
    from rich.console import Console

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn())
    with progress.Progress(*columns, progress.TextColumn("{task.fields[left]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, left="")

        def tell(now: SweepProgress) -> None:
            """Move the bar."""
            bar.update(task, completed=now.done, total=now.total, left=_left(now))

        yield tell


class _Lines:
    """Progress in a log: a line once it takes long, then one every :data:`EVERY` seconds."""

    def __init__(self, title: str) -> None:
        self.what, self.next = title, time.monotonic() + EVERY / 5

    def __call__(self, now: SweepProgress) -> None:
        if time.monotonic() >= self.next and now.done < now.total:
            self.next = time.monotonic() + EVERY
            click.echo(f"{self.what}: {now.done:,} of {now.total:,}{_left(now)}", err=True)


def _left(now: SweepProgress) -> str:
    failed = f", {now.failed:,} failed" if now.failed else ""
    return failed if now.left_s is None else f", about {format_time(round(now.left_s, 0) or 1.0)} left{failed}"
