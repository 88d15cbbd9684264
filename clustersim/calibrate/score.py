"""How far predictions are from measurements: by case first, then over cases.

Rows of one published table are not independent, so a case (one table) counts once: the median of its rows. Rows that
name a ``config_group`` (one model, machine and set of degrees) are one case by it. The figures quoted are the median
and the 90th percentile over cases.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from clustersim.core.errors import ClusterSimError, TraceError, nearest
from clustersim.core.main_guard import check_guarded
from clustersim.core.ranges import PredictionRange
from clustersim.core.texts import Table, plain_file

MOST_BYTES = 1 << 28
"""Of a table, unpacked."""


class SkippedRow(msgspec.Struct, frozen=True):
    """A measured row without a prediction: its ``cells`` by column, and the reason."""

    cells: Table
    skipped: str


class PredictedRow(msgspec.Struct, frozen=True):
    """A measured row and its prediction.

    Parameters
    ----------
    cells : what the table says, by column. measured, predicted : in one unit. rel_error : signed.
    p50, p90 : relative half-widths of the ranges around the prediction, see :mod:`clustersim.core.ranges`.
    """

    cells: Table
    measured: float
    predicted: float
    rel_error: float
    p50: float | UnsetType = UNSET
    p90: float | UnsetType = UNSET


Row = PredictedRow | SkippedRow
Dimension = Callable[[Row], str]
"""What the error is split by: the part that a row is in."""


class Statistics(msgspec.Struct, frozen=True):
    """How far some rows' predictions are off.

    Parameters
    ----------
    n_rows, n_cases, n_skipped : how many rows, predicted cases and rows without a prediction.
    median_abs_rel_error, p90_abs_rel_error, median_rel_error : over cases, None where no row was predicted.
    held_p50, held_p90 : of rows with ranges, the share of measurements that lie within.
    """

    n_rows: int
    n_cases: int
    n_skipped: int
    median_abs_rel_error: float | None = None
    p90_abs_rel_error: float | None = None
    median_rel_error: float | None = None
    held_p50: float | UnsetType = UNSET
    held_p90: float | UnsetType = UNSET


class Score(msgspec.Struct, frozen=True):
    """The result of a validation: ``by`` has the statistics of each part, by dimension; ``notes`` are sentences."""

    overall: Statistics
    by: dict[str, dict[str, Statistics]]
    rows: list[Row]
    notes: tuple[str, ...] | UnsetType = UNSET


def read_table(path: str | Path, required: Sequence[str], instead: Sequence[str] | None = None) -> list[dict[str, str]]:
    """Rows of a CSV file (a ``.gz`` is unpacked) as dicts of text.

    A header with all columns of ``instead`` will do as well. Raises :class:`TraceError` naming the file and the first
    missing column.
    """
    plain_file(Path(path), TraceError)
    try:
        with gzip.open(path) if str(path).endswith(".gz") else open(path, "rb") as packed:
            text = packed.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise TraceError(f"{path}: holds more than {MOST_BYTES >> 20} MiB, which no table of measurements does")
        with io.StringIO(text.decode("utf-8-sig"), newline="") as file:
            reader = csv.DictReader(file, strict=True)
            columns = list(reader.fieldnames or [])
            other_kind = instead is not None and all(name in columns for name in instead)
            for name in () if other_kind else required:
                if name not in columns:
                    raise TraceError(
                        f"{path}: no column {name!r} in the header; {nearest(name, columns or ['(empty)'])}"
                    )
            return [_whole(row, path, i) for i, row in enumerate(reader, start=2)]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read as a CSV table: {error}") from None


def _whole(row: Table, path: str | Path, line: int) -> dict[str, str]:
    if None in row or any(value is None for value in row.values()):
        raise TraceError(f"{path}: line {line}: the number of fields differs from the header's")
    return row


def number(row: Mapping[str, str], column: str) -> float:
    """A positive number of a row. Raises ValueError saying which column holds what."""
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"{column} is {text!r}, not a number") from None
    if not np.isfinite(value) or value <= 0:
        raise ValueError(f"{column} is {text!r}, not above zero")
    return value


def scored(cells: Table, measured: float, predicted: float) -> PredictedRow:
    """A row whose prediction is known."""
    return PredictedRow(cells, measured, predicted, predicted / measured - 1.0)


Predict = Callable[[Table], tuple[float, float]]


def evaluate(rows: Iterable[Table], predict: Predict, workers: int = 1) -> list[Row]:
    """Each row predicted, or skipped with the reason.

    ``predict`` returns (measured, predicted) in one unit, and raises ValueError or a clustersim error for a row it
    cannot do. ``workers`` : processes; with more than one, ``predict`` is a module's function.
    """
    if workers == 1:
        return [_evaluated(row, predict) for row in rows]
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context

    check_guarded("workers=1")
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = list(rows)
        # Neighbours in a table are alike, and predictions may share work.
        chunk = -(-len(rows) // (4 * workers))
        return list(pool.map(partial(_evaluated, predict=predict), rows, chunksize=chunk))


def _evaluated(row: Table, predict: Predict) -> Row:
    try:
        return scored(row, *predict(row))
    except (ValueError, ClusterSimError) as error:
        return SkippedRow(row, str(error))
    except Exception as error:  # a bug must not cost the other rows their prediction, nor go unseen
        return SkippedRow(row, f"internal error: {type(error).__name__}: {error}")


def with_ranges(rows: Iterable[Row], range_of: Callable[[Table], PredictionRange]) -> list[Row]:
    """The rows, the predicted ones with ``p50`` and ``p90``; ``range_of`` has the range of a row's cells."""
    return [row if isinstance(row, SkippedRow) else _ranged(row, range_of(row.cells)) for row in rows]


def _ranged(row: PredictedRow, around: PredictionRange) -> PredictedRow:
    return msgspec.structs.replace(row, p50=around.p50, p90=around.p90)


T = TypeVar("T")
K = TypeVar("K")


def reasons(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Why rows were skipped, and how many: the commonest first."""
    return Counter(row.skipped for row in rows if isinstance(row, SkippedRow)).most_common()


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they have in common, in the order in which it first appears."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def predicted(rows: Iterable[Row]) -> list[PredictedRow]:
    """Rows that were not skipped."""
    return [row for row in rows if isinstance(row, PredictedRow)]


def statistics(rows: Iterable[Row]) -> Statistics:
    """Of rows, how far they are off: the median row of each case, and the median and 90th percentile over cases."""
    rows = list(rows)
    done = predicted(rows)
    cases = grouped(done, lambda row: row.cells.get("config_group") or row.cells["case_id"])
    counts = len(rows), len(cases), len(rows) - len(done)
    if not cases:
        return Statistics(*counts)
    errors = [[row.rel_error for row in case] for case in cases.values()]
    absolute = np.array([np.median(np.abs(e)) for e in errors])
    return Statistics(
        *counts,
        float(np.median(absolute)),
        float(np.percentile(absolute, 90)),
        float(np.median([np.median(e) for e in errors])),
        *covered(done),
    )


def covered(rows: Iterable[PredictedRow]) -> tuple[float | UnsetType, float | UnsetType]:
    """Of rows with ranges, the share of measurements within p50 and within p90; unset without."""
    judged = [(abs(row.measured / row.predicted - 1.0), row.p50, row.p90) for row in rows if row.p50 is not UNSET]
    if not judged:
        return UNSET, UNSET
    off, *widths = np.array(judged).T
    return float(np.mean(off <= widths[0])), float(np.mean(off <= widths[1]))


def score(rows: Sequence[Row], by: Mapping[str, Dimension], notes: tuple[str, ...] | UnsetType = UNSET) -> Score:
    """The result of a validation, whose error is split by some dimensions."""
    parts = {
        dimension: {value: statistics(part_rows) for value, part_rows in sorted(grouped(rows, key).items())}
        for dimension, key in by.items()
    }
    return Score(statistics(rows), parts, list(rows), notes)
