"""``clustersim validate steps`` and ``validate memory``: published training steps, their times and their peaks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clustersim.app.cli.common import json_option, working
from clustersim.app.cli.tables import markdown_table, number_table, stdout
from clustersim.app.cli.validate import (
    TableKind,
    ValidationOptions,
    by_option,
    look,
    looked_at,
    markdown_option,
    percent,
    show,
    table_argument,
)

if TYPE_CHECKING:
    from tests.evidence.order import OrderSummary


@click.command()
@table_argument
@looked_at
@click.option(
    "--anchor", type=click.Choice(["single"]), help="Scale each prediction by the model's measured step on one GPU."
)
@click.option(
    "--order",
    "ordered",
    is_flag=True,
    help="Say also whether the configuration measured as fastest is predicted as fastest.",
)
def steps(table: Path, anchor: str | None, ordered: bool, **options: Any) -> None:
    """Training steps: TABLE.csv in the columns of training_steps.csv or of training_steps_hybrid.csv."""
    from tests.evidence import validate_steps as kind

    looks = ValidationOptions(**options)
    looks.check(kind.DIMENSIONS)
    with working(f"predicting {table}"):
        result = kind.validate_steps(table, anchor=anchor)
    if ordered:
        from tests.evidence import order

        result = order.ordered(result)
        cells = (_order_cells(*one) for one in result.order.items())
        if looks.markdown:
            click.echo("\n".join((*markdown_table(ORDER, cells), "")))
        elif not looks.as_json:
            stdout().print(number_table("the order of comparable configurations", ORDER, cells))
    look(result, f"training steps: {table}", TableKind("source", "strategy", kind.DIMENSIONS, kind.identity), looks)
    if not (looks.as_json or looks.markdown):
        stdout().say(*(f"not as the rows say: {note}" for note in result.notes or ()))


@click.command()
@table_argument
@by_option
@markdown_option
@json_option
def memory(table: Path, **options: Any) -> None:
    """Peak memory of training steps: TABLE.csv in the columns of training_steps.csv."""
    from tests.evidence.validate_steps import validate_memory

    with working(f"predicting {table}"):
        result = validate_memory(table)
    show(result, f"peak memory: {table}", ValidationOptions(**options))


ORDER = ("source", "sets", "rows", "best found", "Spearman", "the pick loses", "median", "p90")


def _order_cells(source: str, n: OrderSummary) -> list[str]:
    rank = "-" if math.isnan(n.spearman) else f"{n.spearman:.2f}"
    lost = map(percent, (n.lost, n.lost_p50, n.lost_p90))
    return [source, str(n.n_sets), str(n.n_rows), percent(n.best_found), rank, *lost]
