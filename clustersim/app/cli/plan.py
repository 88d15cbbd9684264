"""``clustersim plan``: which machine, how many, and how to train on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import structs

from clustersim.app.cli.common import OUT_FOLDER, jobs_option, json_option, page_option, working
from clustersim.app.cli.study import say_study, written_study
from clustersim.app.cli.tables import number_table, rich_table, stdout
from clustersim.core.errors import ClusterSimError

if TYPE_CHECKING:
    from clustersim.app.cli.fitting import Terminal
    from clustersim.studies.plan.rows import ChosenRow, PlaceRow, PlanAnswer, PlanRow


@click.command(short_help="Find the best machines, sizes and strategies within limits.")
@click.argument("file")
@click.option("--out", type=OUT_FOLDER, required=True, help="Folder for results.jsonl, plan.json, front.png.")
@jobs_option
@click.option("--exhaustive", is_flag=True, help="Simulate also what cannot win by its bounds.")
@click.option("--robust", is_flag=True, help="Say also which option is safest where predictions are off.")
@page_option
@json_option
def plan(
    file: str, out: Path, jobs: int | None, exhaustive: bool, robust: bool, page: Path | None, as_json: bool
) -> None:
    """Search the options of a plan: FILE is a .toml file, or the name of a shipped one.

    An option that does not fit in memory or breaks a limit is ruled out, one that cannot win even by its bounds is not
    simulated, and all others are. The answer is the front (options that no other beats in speed, cost, GPUs and energy
    at once), why each is on it, and why the others are not; with --robust also which option loses least if predictions
    are off, and what to measure before you decide. Results are kept in OUT: the same command goes on after an
    interruption.
    """
    from clustersim.app.report.plan import pictures
    from clustersim.studies import plan as planner

    read, path = planner.load(file)
    with working(f"planning {path.stem}") as progress:
        searched = planner.search(
            read,
            path,
            out,
            planner.SearchOptions(None, jobs, exhaustive, robust),
            progress=progress,
            told=lambda message: click.echo(f"{path.stem}: {message}", err=True),
        )
        result = planner.with_campaign(planner.told(read, searched, path), read, searched)
        result = structs.replace(planner.kept(result, out), launch=_launch(result.front, out))
    folder = planner.folder_for(read, path, out)
    title = read.title or path.stem
    wrote = [f"{out}/results.jsonl", *written_study(folder, planner.FILE, result, pictures(result))]
    say_study(result, out, page, as_json, lambda pages: _print(title, result, out, wrote + pages))


def _launch(front: list[ChosenRow], out: Path) -> str:
    """The command that writes the fastest option's launch files, for the framework that has most words for it; nothing
    where none can launch it."""
    from clustersim import scenario
    from clustersim.files import launch as exchange
    from clustersim.files.frameworks import WRITTEN

    if not front:
        return ""
    front_scenario = scenario.from_table(front[0].scenario, front[0].path)
    exports = []
    for to in WRITTEN:
        with contextlib.suppress(ClusterSimError):
            written = exchange.written(front_scenario, to)
            exports.append((len(written.wordless), to, Path(next(iter(written.texts))).suffix))
    if not exports:
        return ""
    _, to, suffix = min(exports, key=lambda export: export[0])
    return f"clustersim export-config {out} --to {to} -o launch{suffix}"


def _print(title: str, result: PlanAnswer, out: Path, wrote: list[str]) -> None:
    from clustersim.app.report.plan import failures, robust

    console = stdout()
    console.say(result.verdict)
    unit = result.unit
    figures = ("GPUs", f"{unit}/s", "MFU", "+-", f"USD/1e9 {unit}", f"kWh/1e9 {unit}", "days", "USD")
    console.print(number_table(title, ("option", *figures), _numbered(enumerate(result.front, 1))))
    if len(result.places) > 1:
        _print_places(console, result, figures)
    if rivals := [numbered for numbered in result.numbered_others() if numbered[0]]:
        console.print(
            number_table(
                "tempting, or the best with another degree, strategy or dtype"
                if result.tempting
                else "the best with another degree, strategy or dtype",
                ("option", *figures),
                _numbered(rivals),
            )
        )
    for part in (*failures(result), *robust(result)):
        if part.grid is not None:
            console.print(rich_table(part.heading.lower(), part.grid.head, part.grid.rows))
        console.say(*(f"- {line}" for line in part.words))
    for row in result.front:
        if row.limited_by and row.stage_bytes:
            stage_text = " ".join(f"{b / 2**30:.0f}" for b in row.stage_bytes)
            fit = f"; {row.fit}" if row.fit and row.fit not in row.why else ""  # told once
            console.say(f"- {row.option}: at the least {row.limited_by}; GiB by stage {stage_text}{fit}")
    for heading, rows in (("why these", result.front), ("tempting", result.tempting), ("why not", result.alternatives)):
        if rows:
            console.say(heading, style="bold")
        console.say(*(f"- {row.option}: {row.why}" for row in rows))
    console.say(*(f"! {warning}" for warning in result.warnings))
    counts = ", ".join(f"{n:,} {label}" for label, n in result.counts.items() if n)
    console.say(f"{sum(result.counts.values()):,} options: {counts}")
    if result.front:
        console.say(f"run one by its number: clustersim run {out} --option 1 (so do explain, memory, export-config)")
    if result.launch:
        console.say(f"launch it: {result.launch}")
    console.say(*(f"assumed: {line}" for line in result.assumptions))
    console.say(f"wrote {', '.join(wrote)}")


def _numbered(rows: Iterable[tuple[int, PlanRow]]) -> Iterator[tuple[str, ...]]:
    """Rows of a table of options, each with the number that --option takes."""
    return ((f"{number}. {row.option}", *_cells(row)) for number, row in rows)


def _print_places(console: Terminal, result: PlanAnswer, figures: Sequence[str]) -> None:
    from clustersim.studies.plan.rows import BEST_OF_PLACES

    columns = ("nodes x machine", *figures, "USD/GPU-h")
    of_places = ((f"{place.nodes:,} x {place.machine}", *_place_cells(place)) for place in result.places)
    console.print(number_table(BEST_OF_PLACES, columns, of_places))
    for place in result.places:
        best = f"{place.best.option}: " if place.best else ""
        fit = f"; {place.best.fit}" if place.best and place.best.fit else ""
        console.say(f"- {place.gpus:,} GPUs of {place.machine}: {best}{place.why}{fit}")


def _place_cells(place: PlaceRow) -> tuple[str, ...]:
    price = "-" if place.usd_per_gpu_hour is None else f"{place.usd_per_gpu_hour:,.2f}"
    if place.best is None:
        return (f"{place.gpus:,}", *["-"] * 7, price)
    return (*_cells(place.best), price)


def _cells(row: PlanRow) -> tuple[str, ...]:
    def number(value: float | None, form: str = ",.0f") -> str:
        """A cell: the number in this form, "-" for none."""
        return "-" if value is None else format(value, form)

    return (
        number(row.gpus),
        number(row.rate),
        number(row.mfu, ".1%"),
        f"{row.error:.0%}",
        number(row.usd_per_1e9),
        number(row.kwh_per_1e9),
        number(row.days, ",.1f"),
        number(row.usd),
    )
