"""``python -m tests.evidence score``, ``predict`` and ``moved``: files of predictions, by this tool or any other."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import click
from msgspec import UNSET, UnsetType, to_builtins

from clustersim.app.cli.common import PATH, json_option, print_json, working
from clustersim.app.cli.tables import number_table, stdout
from clustersim.app.cli.validate import markdown_option, percent
from tests.evidence.rows_shown import show_rows

if TYPE_CHECKING:
    from clustersim.calibrate.score import Statistics
    from tests.evidence.order import OrderSummary
    from tests.evidence.predictions import MovedPrediction
    from tests.evidence.scored_predictions import ScoredPart

HEAD = (
    "what",
    "predicted",
    "of",
    "cases",
    "median |error|",
    "p90 |error|",
    "median error",
    "in p50",
    "in p90",
    "ours, same rows",
)
ORDER = ("order of", "sets", "rows", "best found", "Spearman", "the pick loses", "p90")


@click.command()
@click.argument("predictions", type=PATH)
@markdown_option
@json_option
def score(predictions: Path, as_json: bool, markdown: bool) -> None:
    """Score PREDICTIONS.csv, by any tool, of the frozen tables in tests/data/measurements.

    Columns: table, case_id, size_bytes (empty for steps), predicted_s, and p50 and p90 where ranges are stated.
    `predict` writes ours in the same format. Errors are over cases; p50 and p90 say how many measurements lay within.
    """
    from tests.evidence.scored_predictions import score_file

    with working(f"scoring {predictions}"):
        result = score_file(predictions)
    if as_json:
        print_json(to_builtins(result))
        return
    show_rows(f"predictions: {predictions}", HEAD, map(_part_cells, result.parts), markdown=markdown)
    if result.order:
        click.echo()
        show_rows(
            "the order of what is compared",
            ORDER,
            (_order_cells(*row) for row in result.order.items()),
            markdown=markdown,
        )
    for row, reason in () if markdown else result.unscored.items():
        click.echo(f"not scored: {row}: {reason}")


def _part_cells(part: ScoredPart) -> list[str]:
    errors = part.errors
    predicted = errors.n_rows - errors.n_skipped
    shares = (percent(errors.median_abs_rel_error), percent(errors.p90_abs_rel_error), percent(errors.median_rel_error))
    within = (_share(errors.held_p50), _share(errors.held_p90))
    return [part.what, str(predicted), str(part.n_frozen), str(errors.n_cases), *shares, *within, _short(part.ours)]


def _share(value: float | UnsetType) -> str:
    return "-" if value is UNSET else f"{value:.0%}"


def _short(errors: Statistics) -> str:
    if errors.median_abs_rel_error is None:
        return "-"
    return f"{percent(errors.median_abs_rel_error)} ({percent(errors.p90_abs_rel_error)})"


def _order_cells(source: str, summary: OrderSummary) -> list[str]:
    rank = "-" if math.isnan(summary.spearman) else f"{summary.spearman:.2f}"
    lost = (percent(summary.lost), percent(summary.lost_p90))
    return [source, str(summary.n_sets), str(summary.n_rows), percent(summary.best_found), rank, *lost]


@click.command()
@click.argument("out", type=PATH)
@click.option("--table", "tables", multiple=True, metavar="TABLE", help="Only rows of this table; may be repeated.")
def predict(out: Path, tables: tuple[str, ...]) -> None:
    """Write our own predictions of the frozen tables to OUT.csv or OUT.csv.gz; of all tables it takes minutes."""
    from clustersim.core.errors import ClusterSimError, nearest
    from tests.evidence import predictions as kind

    for name in tables:
        if name not in kind.TABLES:
            raise ClusterSimError(f"--table {name}: no such table; {nearest(name, kind.TABLES)}")
    kind.check_name(out)
    with working(f"predicting {', '.join(tables or kind.TABLES)}"):
        own = kind.own_predictions(key for table in tables or kind.TABLES for key in kind.frozen_rows(table))
        kind.write_predictions(out, own)
    click.echo(f"wrote {len(own)} predictions to {out}", err=True)


MOVED = ("row", "old s", "new s", "change")


@click.command()
@click.argument("old", type=PATH)
@click.argument("new", type=PATH)
@click.option("--over", type=click.FloatRange(min=0), default=2.0, metavar="PERCENT", help="A change that is listed.")
@click.option("--most", type=click.IntRange(min=1), default=40, help="How many rows are listed.")
@click.option("--check", is_flag=True, help="Leave with exit code 1 where a prediction moved.")
@click.pass_context
def moved(ctx: click.Context, old: Path, new: Path, over: float, most: int, check: bool) -> None:
    """Which predictions of OLD.csv moved in NEW.csv, whether they got better or worse."""
    from tests.evidence import predictions as kind

    before, after = kind.read_predictions(old), kind.read_predictions(new)
    rows = kind.moved(before, after, over / 100)
    n_rows = len({**before, **after})
    if rows:
        stdout().print(number_table(f"moved by more than {over:g} %", MOVED, map(_moved_cells, rows[:most])))
    rest = f"; {len(rows) - most} more are not listed (--most)" if len(rows) > most else ""
    click.echo(f"{len(rows)} of {n_rows} predictions moved by more than {over:g} %{rest}")
    ctx.exit(1 if check and rows else 0)


def _moved_cells(row: MovedPrediction) -> list[str]:
    seconds = ("-" if time is None else f"{time:.4g}" for time in (row.old_s, row.new_s))
    change = "only in one" if math.isnan(row.change) else f"{row.change:+.1%}"
    return [f"{row.table} {row.case_id} {row.size_bytes}".strip(), *seconds, change]
