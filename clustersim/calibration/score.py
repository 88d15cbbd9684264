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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from clustersim.errors import ClusterSimError, TraceError, nearest
from clustersim.ranges import Range
from clustersim.texts import plain_file

Row = dict[str, Any]
MOST_BYTES = 1 << 28
"""Of a table, unpacked."""


def read_table(path: str | Path, required: Sequence[str]) -> list[dict[str, str]]:
    """Rows of a CSV file (a ``.gz`` is unpacked) as dicts of text.

    Raises :class:`TraceError` naming the file and the first missing column.
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
            for name in required:
                if name not in columns:
                    raise TraceError(
                        f"{path}: no column {name!r} in the header; {nearest(name, columns or ['(empty)'])}"
                    )
            return [_whole(row, path, i) for i, row in enumerate(reader, start=2)]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: cannot be read as a CSV table: {error}") from None


def _whole(row: dict[str, Any], path: str | Path, line: int) -> dict[str, str]:
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


Predict = Callable[[dict[str, str]], tuple[float, float]]


def evaluate(rows: Iterable[dict[str, str]], predict: Predict, workers: int = 1) -> list[Row]:
    """Each row with ``measured``, ``predicted`` and ``rel_error`` (signed), or ``skipped`` with the reason.

    ``predict`` returns (measured, predicted) in one unit, and raises ValueError or a clustersim error for a row it
    cannot do. ``workers`` : processes; with more than one, ``predict`` is a module's function.
    """
    if workers == 1:
        return [_evaluated(row, predict) for row in rows]
    from concurrent.futures import ProcessPoolExecutor
    from functools import partial
    from multiprocessing import get_context

    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        rows = list(rows)
        # Neighbours in a table are alike, and predictions may share work.
        chunk = -(-len(rows) // (4 * workers))
        return list(pool.map(partial(_evaluated, predict=predict), rows, chunksize=chunk))


def _evaluated(row: dict[str, str], predict: Predict) -> Row:
    try:
        measured, predicted = predict(row)
    except (ValueError, ClusterSimError) as error:
        return {**row, "skipped": str(error)}
    except Exception as error:  # a bug must not cost the other rows their prediction, nor go unseen
        return {**row, "skipped": f"internal error: {type(error).__name__}: {error}"}
    return {**row, "measured": measured, "predicted": predicted, "rel_error": predicted / measured - 1.0}


def with_ranges(rows: Iterable[Row], known: Callable[[Row], Range]) -> list[Row]:
    """Predicted rows with ``p50`` and ``p90``, relative half-widths of the ranges around them; see
    :mod:`clustersim.ranges`."""
    found = []
    for row in rows:
        if "skipped" not in row:
            around = known(row)
            row = {**row, "p50": around.p50, "p90": around.p90}
        found.append(row)
    return found


T = TypeVar("T")
K = TypeVar("K")


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by what they have in common, in the order in which it first appears."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def predicted(rows: Iterable[Row]) -> list[Row]:
    """Rows that were not skipped."""
    return [row for row in rows if "skipped" not in row]


def statistics(rows: Iterable[Row]) -> dict[str, Any]:
    """``n_rows, n_cases, n_skipped`` and, over cases, the median and 90th percentile of |relative error| and the
    median of the signed one; None where no row was predicted. Of rows with ranges, what :func:`covered` says too."""
    rows = list(rows)
    cases = grouped(predicted(rows), lambda row: row.get("config_group") or row["case_id"])
    errors = {case: [row["rel_error"] for row in some] for case, some in cases.items()}
    stats: dict[str, Any] = {
        "n_rows": len(rows),
        "n_cases": len(errors),
        "n_skipped": sum("skipped" in row for row in rows),
        "median_abs_rel_error": None,
        "p90_abs_rel_error": None,
        "median_rel_error": None,
    }
    if errors:
        absolute = np.array([np.median(np.abs(e)) for e in errors.values()])
        stats["median_abs_rel_error"] = float(np.median(absolute))
        stats["p90_abs_rel_error"] = float(np.percentile(absolute, 90))
        stats["median_rel_error"] = float(np.median([np.median(e) for e in errors.values()]))
    return stats | covered(rows)


def covered(rows: Iterable[Row]) -> dict[str, float]:
    """``held_p50``, ``held_p90``: of rows with ranges, the share of measurements that lie within; empty without."""
    judged = [row for row in rows if "p50" in row]
    off = np.array([abs(row["measured"] / row["predicted"] - 1.0) for row in judged])
    if not judged:
        return {}
    return {f"held_{name}": float(np.mean(off <= [row[name] for row in judged])) for name in ("p50", "p90")}


def score(rows: Sequence[Row], by: Mapping[str, Callable[[Row], str]]) -> dict[str, Any]:
    """The result of a validation: ``{"overall": statistics, "by": {dimension: {value: statistics}}, "rows": rows}``."""
    parts = {
        dimension: {value: statistics(some) for value, some in sorted(grouped(rows, key).items())}
        for dimension, key in by.items()
    }
    return {"overall": statistics(rows), "by": parts, "rows": list(rows)}
