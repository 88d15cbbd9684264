"""``clustersim claims``: what the textbooks say, beside what runs come to."""

from __future__ import annotations

import dataclasses
import sys

import click

from clustersim.app.cli.common import json_option, print_json, working
from clustersim.app.cli.tables import number_table, stdout


@click.command(short_help="Check the textbooks' formulas against runs.")
@json_option
def claims(as_json: bool) -> None:
    """Run shipped scenarios and compare them with the formulas of textbooks and papers: bytes a GPU sends,
    what a parameter server's links carry, what ZeRO keeps. Exit code 1 if a claim does not hold."""
    from tests.evidence.claims import claims as made
    from tests.evidence.claims import told

    with working("playing shipped scenarios") as progress:
        rows = made(progress)
    if as_json:
        print_json({"claims": [dataclasses.asdict(row) | {"holds": row.holds} for row in rows]})
    else:
        cells = ((row.what, row.formula, *told(row), "yes" if row.holds else "NO") for row in rows)
        title = "claims: N ranks, Z bytes of gradients, Psi parameters"
        stdout().print(number_table(title, ("claim", "formula", "says", "run", "holds"), cells, words=2))
    sys.exit(0 if all(row.holds for row in rows) else 1)
