"""Files of predictions of the frozen tables, by this tool or any other: ``table, case_id, size_bytes, predicted_s``.

A row of a frozen table is named by its table, its ``case_id`` and, of a collective, its ``size_bytes``; a prediction is
the seconds of the collective, or of the optimizer step. ``p50`` and ``p90``, where a tool states ranges, are relative
half-widths: it says that half, and nine in ten, of measurements lie within ``predicted_s * (1 +- width)``.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from clustersim.calibrate.nccl_tables import measured_rows
from clustersim.calibrate.score import Row, Score, predicted, read_table
from clustersim.calibrate.validate_nccl import validate_rows as validate_collectives
from clustersim.core.errors import ClusterSimError, nearest
from clustersim.core.outputs import fresh
from clustersim.core.texts import Table, shown
from tests.evidence import validate_steps

MEASUREMENTS = Path(__file__).resolve().parents[1] / "data" / "measurements"
FROZEN = MEASUREMENTS.parent / "predictions.csv.gz"
"""Our own predictions of every row that we can predict, as of the last deliberate change."""
REWRITE = "python -m tests.evidence predict tests/data/predictions.csv.gz"
"""What writes them anew."""
NEEDED = ("table", "case_id", "size_bytes", "predicted_s")
COLUMNS = (*NEEDED, "p50", "p90")

Key = tuple[str, str, str]
"""Table, case, size; the size is empty where a case is one row."""


class Prediction(msgspec.Struct, frozen=True):
    """Seconds, and the half-widths of ranges around them where they are stated."""

    seconds: float
    p50: float | None = None
    p90: float | None = None


Predictions = dict[Key, Prediction]


def _validate_steps(rows: list[Table]) -> Score:
    return validate_steps.validate_rows(rows)


TABLES: Mapping[str, Callable[[list[Table]], Score]] = {
    "nccl_tests": validate_collectives,
    "nccl_one_node": validate_collectives,
    "training_steps": _validate_steps,
    "training_steps_hybrid": _validate_steps,
}
"""The frozen tables that hold times, and what predicts their rows."""


def is_collective(table: str) -> bool:
    """Whether a table is of collectives, whose rows have sizes."""
    return table.startswith("nccl")


@cache
def frozen_rows(table: str) -> Mapping[Key, Table]:
    """The rows of a frozen table by what names them."""
    path = MEASUREMENTS / f"{table}.csv.gz"
    rows = measured_rows([path]) if is_collective(table) else read_table(path, validate_steps.COLUMNS)
    return {key_of(table, row): row for row in rows}


def key_of(table: str, row: Table) -> Key:
    """What names a row; a size is written without a point."""
    return table, str(row["case_id"]), str(int(float(row["size_bytes"]))) if is_collective(table) else ""


# ------------------------------------------------------------------------------------------------------- our own


def own_predictions(keys: Iterable[Key] | None = None) -> Predictions:
    """What we predict of some rows (None: of all), without those that we skip."""
    wanted = None if keys is None else set(keys)
    own: Predictions = {}
    for table, validate in TABLES.items():
        rows = [row for key, row in frozen_rows(table).items() if wanted is None or key in wanted]
        own |= _of_rows(table, validate(rows).rows) if rows else {}
    return own


def _of_rows(table: str, rows: Iterable[Row]) -> Predictions:
    return {
        key_of(table, row.cells): Prediction(row.predicted, row.p50 or None, row.p90 or None) for row in predicted(rows)
    }


def check_name(path: Path) -> None:
    """Raise :class:`ClusterSimError` for what is no name of a CSV file: predictions take minutes, and come after."""
    if not path.name.endswith((".csv", ".csv.gz")):
        raise ClusterSimError(f"{path}: predictions are a .csv or a .csv.gz")
    if not path.parent.is_dir():
        raise ClusterSimError(f"{path}: there is no folder {path.parent}")


def write_predictions(path: Path, predictions: Predictions) -> None:
    """A CSV file, packed where its name ends in ``.gz``; the same predictions are the same bytes."""
    check_name(path)
    text = io.StringIO(newline="")
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow(COLUMNS)
    for key, prediction in predictions.items():
        widths = ("" if width is None else f"{width:.3g}" for width in (prediction.p50, prediction.p90))
        lines.writerow((*key, f"{prediction.seconds:.5g}", *widths))
    packed = text.getvalue().encode()
    with fresh(path) as temporary:
        temporary.write_bytes(gzip.compress(packed, mtime=0) if path.name.endswith(".gz") else packed)


# --------------------------------------------------------------------------------------------------------- anybody's


def read_predictions(path: Path) -> Predictions:
    """Predictions by row. Raises a clustersim error that names file, line and column of the first that is wrong."""
    predictions: Predictions = {}
    for line, row in enumerate(read_table(path, NEEDED), start=2):
        where = f"{path}: line {line}"
        key = _known_key(row, where)
        if key in predictions:
            raise ClusterSimError(f"{where}: predicts {' '.join(filter(None, key))} a second time")
        widths = [_number(row, name, where) if row.get(name, "").strip() else None for name in ("p50", "p90")]
        half, most = widths
        if (half is None) != (most is None):
            raise ClusterSimError(f"{where}: has one of p50 and p90; give both, or leave both empty")
        if half is not None and most is not None and half > most:
            raise ClusterSimError(
                f"{where}: p50 is {half:g} and p90 is {most:g}; nine in ten need no less than half do"
            )
        predictions[key] = Prediction(_number(row, "predicted_s", where), half, most)
    if not predictions:
        raise ClusterSimError(f"{path}: holds no prediction; one a line, under {','.join(NEEDED)}")
    return predictions


def _known_key(row: Table, where: str) -> Key:
    table, case, size = (row[name].strip() for name in NEEDED[:3])
    if table not in TABLES:
        raise ClusterSimError(f"{where}: table is {shown(table)}; {nearest(table, TABLES)}")
    rows = frozen_rows(table)
    try:
        key = (table, case, f"{float(size):.0f}" if size else "")
    except ValueError:
        raise ClusterSimError(f"{where}: size_bytes is {shown(size)}, not a number of bytes") from None
    if key in rows:
        return key
    sizes = [size for _, name, size in rows if name == case]
    if not sizes:
        close = nearest(case, {name for _, name, _ in rows})
        hint = close if close.startswith("did") else f"its cases begin as {next(iter(rows))[1]!r} does"
        raise ClusterSimError(f"{where}: case_id is {shown(case)}, which {table} does not have; {hint}")
    wanted = f"one of {', '.join(sizes)}" if sizes[0] else "nothing: a case of this table is one row"
    raise ClusterSimError(f"{where}: size_bytes is {shown(size)}; of {case} it is {wanted}")


def _number(row: Table, column: str, where: str) -> float:
    try:
        value = float(row[column])
    except ValueError:
        raise ClusterSimError(f"{where}: {column} is {shown(row[column])}, not a number") from None
    if not math.isfinite(value) or value <= 0:
        raise ClusterSimError(f"{where}: {column} is {shown(row[column])}, not above zero")
    return value


# ------------------------------------------------------------------------------------------------- old against new


class MovedPrediction(msgspec.Struct, frozen=True):
    """A row whose prediction is not what it was; ``change`` is relative to the old one, NaN of what only one has."""

    table: str
    case_id: str
    size_bytes: str
    old_s: float | None
    new_s: float | None
    change: float


NOTABLE = 0.02
"""Change of a prediction below which it has not moved."""


def moved(old: Predictions, new: Predictions, over: float = NOTABLE) -> list[MovedPrediction]:
    """Rows whose prediction changed by more than ``over``, the most first, after those that only one file has."""
    rows = []
    for key in {**old, **new}:
        before, after = (which[key].seconds if key in which else None for which in (old, new))
        change = math.nan if before is None or after is None else after / before - 1.0
        if not abs(change) <= over:
            rows.append(MovedPrediction(*key, before, after, change))
    return sorted(rows, key=lambda row: -math.inf if math.isnan(row.change) else -abs(row.change))


def sample(keys: Sequence[Key], of_each: Mapping[str, int]) -> list[Key]:
    """Every n-th row of some tables: ``of_each`` has the n. The same rows each time."""
    by_table = {table: [key for key in keys if key[0] == table] for table in of_each}
    return [key for table, step in of_each.items() for key in by_table[table][::step]]
