"""``clustersim validate campaign``: published trainings played from their public inputs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.cli.common import json_option, markdown_table, number_table, print_json, stdout, working
from clustersim.cli.validate import markdown_option, table_argument

if TYPE_CHECKING:
    from clustersim.campaign.cases import Checked

HEAD = ("case", "published", "predicted", "p5 to p95", "error")


@click.command("campaign")
@table_argument
@click.option("--summary", is_flag=True, help="Print only how many cases there are, and their median and worst error.")
@markdown_option
@json_option
def campaign_cases(table: Path, summary: bool, as_json: bool, markdown: bool) -> None:
    """Goodput and spares of published trainings: TABLE.csv in the columns of run_reliability.csv."""
    from dataclasses import asdict

    from clustersim.campaign import cases

    with working(f"playing the cases of {table}"):
        checked = cases.validate(table)
    overall = cases.in_points(checked)
    if as_json:
        print_json({"overall": overall, "cases": [asdict(one) for one in checked]})
        return
    words = "{n_cases:.0f} goodputs, {n_claims:.0f} of them bounds that are no error while they hold: "
    words += "median error {median_points:.1f} points, worst {worst_points:.1f}"
    if summary:
        click.echo(words.format(**overall))
        return
    rows = [_cells(one) for one in checked]
    if markdown:
        click.echo("\n".join(markdown_table(HEAD, rows)))
    else:
        stdout().print(number_table(f"published trainings: {table}", HEAD, rows))
    click.echo("\n" + words.format(**overall))
    for one in checked if not markdown else ():
        click.echo(f"{'not predicted' if math.isnan(one.predicted) else 'assumed of'} {one.name}: {one.assumed}")


def _cells(one: Checked) -> list[str]:
    def text(value: float) -> str:
        return f"{value:.1%}" if one.unit == "fraction" else f"{value:,.3g} {one.unit}"

    sign = {"claim >=": "at least ", "claim <=": "at most "}.get(one.status, "")
    if math.isnan(one.predicted):
        return [one.name, sign + text(one.published), "not predicted", "", ""]
    error = f"{100 * one.error:+.1f} points" if one.unit == "fraction" else f"{one.error:+.2g} {one.unit}"
    spread = f"{text(one.p5)} to {text(one.p95)}" if one.p95 > one.p5 else "closed form"
    predicted = f"at most {text(one.predicted)}" if one.bound else text(one.predicted)
    return [one.name, sign + text(one.published), predicted, spread, error]
