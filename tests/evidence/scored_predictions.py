"""How far somebody's predictions of the frozen tables are off: the same medians, ranges and order for every tool."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from clustersim.calibrate.score import PredictedRow, Statistics, grouped, number, statistics
from clustersim.core.errors import ClusterSimError
from tests.evidence.evidence import PARTS
from tests.evidence.order import OrderSummary, by_source, orders, system_orders
from tests.evidence.predictions import (
    FROZEN,
    TABLES,
    Key,
    Predictions,
    frozen_rows,
    is_collective,
    read_predictions,
)
from tests.evidence.validate_steps import measured_seconds


class ScoredPart(msgspec.Struct, frozen=True):
    """One part of the frozen tables.

    Parameters
    ----------
    what : in words. n_frozen : its rows whose time is known. errors : of those that were predicted.
    ours : of our own predictions of the same rows, where we have any.
    """

    what: str
    n_frozen: int
    errors: Statistics
    ours: Statistics


class ScoredPredictions(msgspec.Struct, frozen=True):
    """The score of a file: by part of the tables, and by how rows are put in order.

    ``unscored`` : predicted rows whose time cannot be told from what they say, by name, and why.
    """

    parts: list[ScoredPart]
    order: dict[str, OrderSummary]
    unscored: dict[str, str]


Rows = Mapping[Key, PredictedRow]


def score_file(path: Path) -> ScoredPredictions:
    """Score a file of predictions. Raises a clustersim error for one that is not well written."""
    predictions = read_predictions(path)
    times, silent = _times({key[0] for key in predictions})
    theirs = _rows(predictions, times)
    own = read_predictions(FROZEN)
    ours = _rows({key: own[key] for key in theirs if key in own}, times)
    every = grouped(times, _part)
    by_part = grouped(theirs, _part)
    parts = [
        ScoredPart(name, len(every[name]), _errors(by_part[name], theirs), _errors(by_part[name], ours))
        for name in sorted(by_part)
    ]
    unscored = {" ".join(filter(None, key)): silent[key] for key in predictions if key in silent}
    return ScoredPredictions(parts, _order(theirs), unscored)


def _part(key: Key) -> str:
    return PARTS[key[0]](frozen_rows(key[0])[key])


def _times(tables: Iterable[str]) -> tuple[dict[Key, float], dict[Key, str]]:
    """Measured seconds of the rows of some tables; of those that do not tell it, why."""
    times: dict[Key, float] = {}
    silent: dict[Key, str] = {}
    for table in TABLES:
        for key, cells in frozen_rows(table).items() if table in tables else ():
            try:
                times[key] = number(cells, "time_us") * 1e-6 if is_collective(table) else measured_seconds(cells)
            except (ValueError, ClusterSimError) as error:
                silent[key] = str(error)
    return times, silent


def _rows(predictions: Predictions, times: Mapping[Key, float]) -> Rows:
    rows = {}
    for key, prediction in predictions.items():
        if key in times:
            cells = frozen_rows(key[0])[key]
            error = prediction.seconds / times[key] - 1.0
            widths = {"p50": prediction.p50, "p90": prediction.p90} if prediction.p50 and prediction.p90 else {}
            rows[key] = PredictedRow(cells, times[key], prediction.seconds, error, **widths)
    return rows


def _errors(keys: Iterable[Key], rows: Rows) -> Statistics:
    return statistics(rows[key] for key in keys if key in rows)


def _order(rows: Rows) -> dict[str, OrderSummary]:
    """Which machine is fastest, of collectives; which configuration is, of steps, by source."""
    collectives = system_orders(row for key, row in rows.items() if is_collective(key[0]))
    steps = orders(row for key, row in rows.items() if not is_collective(key[0]))
    summaries = by_source(collectives)
    summaries.pop("all", None)
    by_publisher = by_source(steps)
    return summaries | ({"steps": by_publisher.pop("all")} | by_publisher if by_publisher else {})
