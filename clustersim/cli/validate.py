"""``clustersim validate``: predict every row of a table of measurements, and say how far off the predictions are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from clustersim.cli.common import json_option, print_json, stdout, working

table_argument = click.argument("table", type=click.Path(path_type=Path))


@click.group(short_help="Predict a table of measurements; print the error.")
def validate() -> None:
    """Predict every row of a table of measurements, and print the error by case, source, size and platform."""


@validate.command()
@table_argument
@json_option
def nccl(table: Path, as_json: bool) -> None:
    """nccl-tests results: TABLE.csv in the columns of nccl_tests.csv."""
    from clustersim.calibration.validate_nccl import validate_nccl

    with working(f"predicting {table}"):
        result = validate_nccl(table)
    _show(result, as_json, f"nccl-tests: {table}")


@validate.command()
@table_argument
@click.option("--anchor", type=click.Choice(["single"]), default=None, help="Scale by the model's measured 1-GPU time.")
@json_option
def steps(table: Path, anchor: str | None, as_json: bool) -> None:
    """Training steps: TABLE.csv in the columns of training_steps.csv."""
    from clustersim.calibration.validate_steps import validate_steps

    with working(f"predicting {table}"):
        result = validate_steps(table, anchor=anchor)
    _show(result, as_json, f"training steps: {table}")


def _show(result: dict[str, Any], as_json: bool, title: str) -> None:
    if as_json:
        print_json(result)
        return
    console = stdout()
    console.print(_table(title, {"": {"all": result["overall"]}, **result["by"]}))
    for reason, count in _reasons(result["rows"]):
        console.print(f"skipped {count}: {reason}", markup=False, soft_wrap=True)


def _table(title: str, groups: dict[str, dict[str, dict[str, Any]]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left")
    for heading in ("by", "", "rows", "cases", "skipped", "median |error|", "p90 |error|", "median error"):
        table.add_column(heading, justify="left" if heading in {"by", ""} else "right")
    for dimension, parts in groups.items():
        table.add_section()
        for i, (value, numbers) in enumerate(parts.items()):
            counts = (str(numbers[key]) for key in ("n_rows", "n_cases", "n_skipped"))
            errors = (
                _percent(numbers[key]) for key in ("median_abs_rel_error", "p90_abs_rel_error", "median_rel_error")
            )
            table.add_row("" if i else dimension.replace("_", " "), escape(_short(value)), *counts, *errors)
    return table


def _short(value: str) -> str:
    """The end of a long source tells it from its neighbours."""
    value = value.removeprefix("https://").removeprefix("github.com/")
    return (value if len(value) <= 64 else f"{value[:20]} ... {value[-39:]}") or "(empty)"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _reasons(rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for row in rows:
        if "skipped" in row:
            counts[row["skipped"]] = counts.get(row["skipped"], 0) + 1
    return sorted(counts.items(), key=lambda item: -item[1])
