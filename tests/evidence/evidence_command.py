"""``clustersim validate all`` and ``validate campaign``: everything there is a table of, and whole trainings alone."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.app.cli.common import PATH, json_option, print_json, working
from clustersim.app.cli.validate import markdown_option, table_argument
from tests.evidence.rows_shown import show_rows

if TYPE_CHECKING:
    from tests.evidence.cases import CheckedFigure
    from tests.evidence.evidence import Error, EvidenceLine

HEAD = (
    "what",
    "rows",
    "cases",
    "publisher left out",
    "three numbers known",
    "GPU left out",
    "one own step known",
    "as shipped",
    "in the 50 % range",
    "in the 90 % range",
)
GOODPUT = "goodput of whole trainings"
"""How far published goodputs are off, as ``clustersim validate campaign`` has it."""


@click.command("all")
@click.argument("folder", type=PATH)
@click.option("--quick", is_flag=True, help="Leave out what plays steps again: the GPU left out, one own step known.")
@markdown_option
@json_option
def evidence(folder: Path, quick: bool, as_json: bool, markdown: bool) -> None:
    """Every table of FOLDER: errors of publishers and GPUs left out, with three numbers or one own step known, as
    shipped, and ranges.

    Tables are named nccl_tests, training_steps, training_steps_hybrid and run_reliability (.csv or .csv.gz). Errors
    are the median and the 90th percentile over cases, of goodput in points the median and the worst; ranges are made
    without the machine or publisher that they are tried on.
    """
    from tests.evidence import cases
    from tests.evidence import evidence as kind

    with working(f"predicting {folder}") as progress:
        lines = kind.evidence(folder, progress, again=not quick)
        table = kind.table_of(folder, "run_reliability")
        points = cases.in_points(cases.validate(table)) if table else None
    rows = [_cells(line) for line in lines]
    records = [asdict(line) for line in lines]
    if points:
        count = f"{points['n_cases']:.0f}"
        off = f"{points['median_points']:.1f} points (worst {points['worst_points']:.1f})"
        cells = {"what": GOODPUT, "rows": count, "cases": count, "as shipped": off}
        rows.append([cells.get(name, "-") for name in HEAD])
        records.append({"what": GOODPUT, **points})
    if as_json:
        print_json(records)
    else:
        show_rows(f"evidence: {folder}", HEAD, rows, markdown=markdown)


def _cells(line: EvidenceLine) -> list[str]:
    errors = (line.left_out, line.three_numbers, line.gpu_left_out, line.one_step, line.in_sample)
    share_cells = ("-" if math.isnan(share) else f"{share:.0%}" for share in line.held)
    return [line.what, str(line.rows), str(line.cases), *map(_error, errors), *share_cells]


def _error(error: Error | None) -> str:
    return "-" if error is None else f"{100 * error[0]:.1f} % ({100 * error[1]:.0f})"


CASES_HEAD = ("case", "published", "predicted", "p5 to p95", "error")


@click.command("campaign")
@table_argument
@click.option("--summary", is_flag=True, help="Print only how many cases there are, and their median and worst error.")
@markdown_option
@json_option
def campaign_cases(table: Path, summary: bool, as_json: bool, markdown: bool) -> None:
    """Goodput and spares of published trainings: TABLE.csv in the columns of run_reliability.csv."""
    from tests.evidence import cases

    with working(f"playing the cases of {table}"):
        checked = cases.validate(table)
    overall = cases.in_points(checked)
    if as_json:
        print_json({"overall": overall, "cases": [asdict(figure) for figure in checked]})
        return
    template = "{n_cases:.0f} goodputs, {n_claims:.0f} of them bounds that are no error while they hold: "
    template += "median error {median_points:.1f} points, worst {worst_points:.1f}"
    if summary:
        click.echo(template.format(**overall))
        return
    rows = [_case_cells(figure) for figure in checked]
    show_rows(f"published trainings: {table}", CASES_HEAD, rows, markdown=markdown)
    click.echo("\n" + template.format(**overall))
    for figure in checked if not markdown else ():
        click.echo(
            f"{'not predicted' if math.isnan(figure.predicted) else 'assumed of'} {figure.name}: {figure.assumed}"
        )


def _case_cells(figure: CheckedFigure) -> list[str]:
    def text(value: float) -> str:
        return f"{value:.1%}" if figure.unit == "fraction" else f"{value:,.3g} {figure.unit}"

    sign = {"claim >=": "at least ", "claim <=": "at most "}.get(figure.status, "")
    if math.isnan(figure.predicted):
        return [figure.name, sign + text(figure.published), "not predicted", "", ""]
    error = f"{100 * figure.error:+.1f} points" if figure.unit == "fraction" else f"{figure.error:+.2g} {figure.unit}"
    spread = f"{text(figure.p5)} to {text(figure.p95)}" if figure.p95 > figure.p5 else "closed form"
    predicted = f"at most {text(figure.predicted)}" if figure.bound else text(figure.predicted)
    return [figure.name, sign + text(figure.published), predicted, spread, error]
