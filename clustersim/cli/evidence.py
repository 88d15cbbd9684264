"""``clustersim validate all``: everything there is a table of, on one page."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clustersim.cli.common import PATH, json_option, markdown_table, number_table, print_json, stdout, working
from clustersim.cli.validate import markdown_option

if TYPE_CHECKING:
    from clustersim.calibration.evidence import Error, Line

HEAD = (
    "what", "rows", "cases", "as shipped", "machine left out", "three numbers known", "in the 50 % range",
    "in the 90 % range",
)  # fmt: skip


@click.command("all")
@click.argument("folder", type=PATH)
@markdown_option
@json_option
def evidence(folder: Path, as_json: bool, markdown: bool) -> None:
    """Every table of FOLDER: errors as shipped, of machines left out, with three numbers known, and ranges.

    Tables are named nccl_tests, training_steps, training_steps_hybrid and run_reliability (.csv or .csv.gz). Errors
    are the median and the 90th percentile over cases, of goodput in points the median and the worst; ranges are made
    without the machine or publisher that they are tried on.
    """
    from dataclasses import asdict

    from clustersim.calibration import evidence as kind

    with working(f"predicting {folder}") as told:
        lines = kind.evidence(folder, told)
        points = _goodput(folder)
    rows = [*map(_cells, lines), *([_row_of(points)] if points else [])]
    if as_json:
        print_json([*map(asdict, lines), *([{"what": GOODPUT, **points}] if points else [])])
    elif markdown:
        click.echo("\n".join(markdown_table(HEAD, rows)))
    else:
        stdout().print(number_table(f"evidence: {folder}", HEAD, rows))


GOODPUT = "goodput of whole trainings"


def _goodput(folder: Path) -> dict[str, float] | None:
    """How far published goodputs are off, as ``clustersim validate campaign`` has it."""
    from clustersim.calibration.evidence import table_of
    from clustersim.campaign import cases

    table = table_of(folder, "run_reliability")
    return cases.in_points(cases.validate(table)) if table else None


def _row_of(points: dict[str, float]) -> list[str]:
    count = f"{points['n_cases']:.0f}"
    off = f"{points['median_points']:.1f} points (worst {points['worst_points']:.1f})"
    return [GOODPUT, count, count, off, *["-"] * 4]


def _cells(line: Line) -> list[str]:
    errors = (line.in_sample, line.left_out, line.three_numbers)
    held = ("-" if math.isnan(share) else f"{share:.0%}" for share in line.held)
    return [line.what, str(line.rows), str(line.cases), *map(_error, errors), *held]


def _error(error: Error | None) -> str:
    return "-" if error is None else f"{100 * error[0]:.1f} % ({100 * error[1]:.0f})"
