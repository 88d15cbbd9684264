"""``clustersim validate``: predict every row of a table of measurements, and say how far off the predictions are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from clustersim.app.cli.commands import Commands
from clustersim.app.cli.common import OUT_PICTURE, PATH, json_option, print_json, working
from clustersim.app.cli.pictures import write_picture
from clustersim.app.cli.tables import markdown_table, rich_table, stdout
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.texts import Table

if TYPE_CHECKING:
    import rich.table

    from clustersim.calibrate.score import Dimension, Row, Score, Statistics

markdown_option = click.option("--markdown", is_flag=True, help="Print a Markdown table instead, without cases.")
by_option = click.option(
    "--by", multiple=True, help="Split the errors only by this, such as size_class or platform; may be repeated."
)
worst_option = click.option(
    "--worst",
    type=click.IntRange(min=1),
    default=None,
    metavar="N",
    help="Print the N cases with the largest errors, and the likely reasons.",
)
plot_option = click.option("--plot", type=OUT_PICTURE, help="Draw predicted over measured, coloured by the first --by.")
table_argument = click.argument("table", type=PATH)
tables_argument = click.argument("tables", type=PATH, nargs=-1, required=True, metavar="TABLE...")


def looked_at(command: Callable[..., None]) -> Callable[..., None]:
    """The table, and every way to look at how far predictions are from it."""
    for part in (json_option, markdown_option, plot_option, worst_option, by_option):
        command = part(command)
    return command


@click.group(
    cls=Commands,
    where={
        "all": "evidence/evidence_command:evidence",
        "campaign": "evidence/evidence_command:campaign_cases",
        "memory": "evidence/steps_command:memory",
        "score": "evidence/predictions_command:score",
        "steps": "evidence/steps_command:steps",
    },
    short_help="Predict a table of measurements, and print the errors.",
)
def validate() -> None:
    """Predict every row of a table of measurements, and print the error by case, source, size and platform."""


class ValidationOptions(msgspec.Struct, frozen=True):
    """What a person asks for: JSON, or a Markdown table, the parts ``by`` which errors are split, how many of the worst
    cases, and a picture's path."""

    as_json: bool
    markdown: bool
    by: tuple[str, ...]
    worst: int | None = None
    plot: Path | None = None

    def check(self, dimensions: Iterable[str]) -> None:
        """Refuse what the error cannot be split by: predictions take minutes, and come after."""
        for name in self.by:
            if name not in dimensions:
                raise ClusterSimError(f"--by {name}: the error is not split by that; {nearest(name, dimensions)}")


@validate.command()
@tables_argument
@looked_at
@click.option(
    "--cross-validate",
    "holdout",
    type=click.Choice(["half", "scale", "platform", "publisher", "transport", "three-numbers"]),
    help="Predict rows that constants were not fitted to: every other size of a log, its runs on more than 4 nodes, a "
    "whole platform, a whole publisher, all platforms of a transport, or a platform of which three numbers are known.",
)
def nccl(tables: tuple[Path, ...], holdout: str | None, **options: Any) -> None:
    """nccl-tests results: each TABLE in the columns of nccl_tests.csv, or in those of a database of kernels."""
    from clustersim.calibrate import validate_nccl as kind
    from clustersim.calibrate.cross_validate import cross_validate

    looks = ValidationOptions(**options)
    looks.check(kind.DIMENSIONS)
    names = ", ".join(map(str, tables))
    with working(f"predicting {names}") as progress:
        result = kind.validate_nccl(*tables) if holdout is None else cross_validate(tables, holdout, progress)
    held_out = "" if holdout is None else f", held out: {holdout}"
    look(
        result,
        f"nccl-tests: {names}{held_out}",
        TableKind("size_class", "size_class", kind.DIMENSIONS, kind.identity),
        looks,
    )


@validate.command()
@click.argument("folder", type=PATH)
@click.option("--topology", required=True, help="A shipped topology, or a file such as calibrate writes.")
@click.option("--anchor", type=click.Choice(["single"]), help="Scale compute by the measured step of one rank.")
@by_option
@markdown_option
@json_option
def capture(folder: Path, topology: str, anchor: str | None, **options: Any) -> None:
    """Collectives and training steps of a capture: FOLDER is what clustersim capture wrote."""
    from clustersim.calibrate.validate_capture import validate_capture

    looks = ValidationOptions(**options)
    with working(f"predicting {folder}"):
        result = validate_capture(folder, topology, anchor)
    show(result, f"capture: {folder} on {topology}", looks)
    for note in () if looks.as_json or looks.markdown else result.notes or ():
        click.echo(note)


def show(result: Score, title: str, looks: ValidationOptions) -> None:
    """Print the error by parts, or as JSON or Markdown."""
    from clustersim.calibrate.score import reasons

    looks.check(result.by)
    groups = {"": {"all": result.overall}, **{name: result.by[name] for name in looks.by or result.by}}
    if looks.as_json:
        plain_score = msgspec.to_builtins(result)
        print_json(plain_score | {"rows": [row.pop("cells") | row for row in plain_score["rows"]]})
        return
    if looks.markdown:
        click.echo("\n".join(markdown_table(HEADINGS, _parts(groups), words=2)))
        return
    console = stdout()
    console.print(_table(title, groups))
    overall = result.overall
    if overall.held_p50 is not msgspec.UNSET and overall.held_p90 is not msgspec.UNSET:
        half = percent(overall.held_p50)
        most = percent(overall.held_p90)
        console.print(f"measured within the stated p50 range: {half}, within p90: {most} of rows")
    console.say(*(f"skipped {count}: {reason}" for reason, count in reasons(result.rows)))


class TableKind(msgspec.Struct, frozen=True):
    """How one kind of table is looked at: by which part it is drawn where none is asked for, by which part reasons are
    looked for, what the parts are, and what two rows have in common that measure the same thing."""

    drawn_by: str
    reason_by: str
    dimensions: Mapping[str, Dimension]
    identity: Callable[[Table], tuple[object, ...]]


def look(result: Score, title: str, kind: TableKind, looks: ValidationOptions) -> None:
    """The error by parts; the worst cases and the picture, where they are asked for."""
    show(result, title, looks)
    if looks.worst is not None:
        _print_worst(result.rows, looks.worst, kind)
    if looks.plot is not None:
        from clustersim.app import plots
        from clustersim.calibrate.score import predicted

        drawn_by = looks.by[0] if looks.by else kind.drawn_by
        rows = predicted(result.rows)
        parts = [kind.dimensions[drawn_by](row) for row in rows]
        times = [row.measured for row in rows], [row.predicted for row in rows]
        figure = plots.accuracy(*times, parts, part_name=drawn_by.replace("_", " "))
        click.echo(write_picture(figure, looks.plot), err=True)


def _print_worst(rows: list[Row], n: int, kind: TableKind) -> None:
    from clustersim.calibrate.worst import worst

    heads = ("case", "rows", "median |error|", "median error", "repeats differ by", "likely reason")
    cells = []
    for case in worst(rows, n, kind.dimensions[kind.reason_by], kind.identity):
        spread = "-" if math.isnan(case.spread) else percent(case.spread)
        numbers = (str(case.n_rows), percent(case.error), percent(case.signed), spread)
        cells.append((case.case, *numbers, case.reason))
    numeric = ((name, 0 < i < 5) for i, name in enumerate(heads))
    stdout().print(rich_table(f"the {n} cases missed most", numeric, cells))


Groups = Mapping[str, Mapping[str, "Statistics"]]
HEADINGS = ("by", "", "rows", "cases", "skipped", "median |error|", "p90 |error|", "median error")


def _cells(dimension: str, value: str, n: Statistics) -> list[str]:
    counts = map(str, (n.n_rows, n.n_cases, n.n_skipped))
    errors = map(percent, (n.median_abs_rel_error, n.p90_abs_rel_error, n.median_rel_error))
    return [dimension.replace("_", " "), _short(value), *counts, *errors]


def _table(title: str, groups: Groups) -> rich.table.Table:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in {"by", ""} else "right")
    for dimension, parts in groups.items():
        table.add_section()
        for i, (value, numbers) in enumerate(parts.items()):
            table.add_row(*map(escape, _cells("" if i else dimension, value, numbers)))
    return table


def _parts(groups: Groups) -> Iterator[list[str]]:
    for dimension, parts in groups.items():
        if dimension != "case":
            # A part without a prediction says nothing about accuracy; the count of skipped rows is in the first line.
            for value, numbers in parts.items():
                if numbers.n_cases:
                    yield _cells(dimension, value, numbers)


def _short(value: str) -> str:
    """The end of a long source tells it from its neighbours."""
    value = value.removeprefix("https://").removeprefix("github.com/")
    return (value if len(value) <= 64 else f"{value[:20]} ... {value[-39:]}") or "(empty)"


def percent(value: float | None) -> str:
    """A share as a table has it; ``-`` for None."""
    return "-" if value is None else f"{100 * value:.1f} %"
