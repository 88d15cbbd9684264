"""``validate steps``, ``validate memory`` and ``room``: published training steps, their times, peaks and room."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
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
from tests.evidence.rows_shown import show_rows

if TYPE_CHECKING:
    from tests.evidence.order import OrderSummary
    from tests.evidence.room import ToldRoom


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


@click.command()
@markdown_option
def room(*, markdown: bool) -> None:
    """Published runs, which had room in memory, and those that ran out: how likely each is told to."""
    from tests.evidence import room as kind

    with working("adding up the memory of published runs"):
        runs = list(kind.ran())
        failed = list(kind.ran_out())
    groups = {"all that ran": runs}
    for run in sorted(runs, key=lambda run: run.publisher):
        if any(other.feared for other in runs if other.publisher == run.publisher):
            groups.setdefault(run.publisher, []).append(run)
    groups["all that ran out"] = failed
    rows = ((name, *_room_cells(group)) for name, group in groups.items())
    show_rows("memory of published runs", ROOM, rows, markdown=markdown)


ROOM = ("publisher", "runs", "told 0 to 25 %", "25 to 50 %", "50 to 99 %", "that they do not fit")


def _room_cells(runs: list[ToldRoom]) -> Iterator[str]:
    """How many runs, and how many of them are told each likelihood of running out."""
    yield str(len(runs))
    for least, most in pairwise((0.0, 0.25, 0.5, 1.0, 2.0)):
        yield str(sum(least <= run.runs_out < most for run in runs))


ORDER = ("source", "sets", "rows", "best found", "Spearman", "the pick loses", "median", "p90")


def _order_cells(source: str, n: OrderSummary) -> list[str]:
    rank = "-" if math.isnan(n.spearman) else f"{n.spearman:.2f}"
    lost = map(percent, (n.lost, n.lost_p50, n.lost_p90))
    return [source, str(n.n_sets), str(n.n_rows), percent(n.best_found), rank, *lost]
