"""Rows of steps as loggers keep them, read as columns of numbers: CSV, JSON a line, a JSON list, Parquet, and the
history in a state of Hugging Face's Trainer."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeAlias

from clustersim.core.errors import TraceError
from clustersim.core.texts import csv_rows, short
from clustersim.files.traces import files, parquet

STEPS = (
    "trainer/global_step",
    "train/global_step",
    "global_step",
    "num_updates",
    "step",
    "train_step",
    "iteration",
    "iter",
    "_step",
)
"""Names of columns that number steps, the surest first; Weights & Biases' ``_step`` counts calls of its log."""
TIME = re.compile(
    r"^timing_(?P<before>s)/step$|^time/step$"
    r"|^(?:(?:train|training|perf|performance|timing|time_metrics|metrics|throughput|runtime)[/._])*(?:train_)?"
    r"(?:(?:(?:step|iteration|iter|batch)[-_ ]?time|time[-_ ]per[-_ ](?:step|iteration|iter)|end_to_end"
    r"|elapsed_time_per_iteration|train_step_timing|sec_per_step|(?:step|iteration)[-_ ]duration)"
    r"(?:(?:[-_ ]?\(?(?P<unit>ms|us|s|sec|secs|seconds|milliseconds)\)?)|[-_ ]in[-_ ](?P<in>ms|s))?)$",
    re.I,
)
"""Names of columns that are a step's time, and the unit that they say."""
SINCE = (
    *("_timestamp", "timestamp", "wall time", "wall_time", "walltime", "_runtime", "runtime", "elapsed", "elapsed_s"),
    *("time_elapsed", "elapsed_seconds", "relative time (process)", "relative time (wall)", "time/elapsed", "time"),
)
"""Columns of clocks [s], since 1970 or the run's begin."""
_OF_BOUNDS = ("__min", "__max")
"""How Weights & Biases names a chart's band."""
OTHER_LENGTH = "a row of another length than the header"
NO_ROW = "an element of the list that is no row"
NO_OBJECT = "a line that is no JSON object"
Row: TypeAlias = Mapping[str, Any]
"""What a row has by the columns' names."""


@dataclass
class StepColumns:
    """Columns of a file by their names in small letters, without the run's name: a number or a clock a row, else None.

    whose : the logger or framework that wrote them. notes : what to say of them. skipped : rows left out, reason -> how
    many. history : whether they are of a state of Hugging Face's Trainer, whose times (TRL's ``step_time``) are in
    seconds.
    """

    path: Path
    rows: list[dict[str, float | None]]
    names: list[str]
    whose: str = "a table of steps"
    notes: list[str] = field(default_factory=list)
    skipped: Mapping[str, int] = field(default_factory=dict)
    history: bool = False

    def series(self, name: str) -> list[float | None]:
        """A column; None where a row has it not."""
        return [row.get(name) for row in self.rows]


def is_table(names: set[str]) -> bool:
    """Whether a table with columns of these names has a row a step."""
    axes = {"wall time", "relative time (process)", "relative time (wall)"}
    return not names.isdisjoint({*STEPS, *axes}) or any(map(TIME.match, names))


def read_columns(path: Path) -> StepColumns:
    """The columns of a file. Raises :class:`TraceError` for what is no table, and for one of several runs."""
    if files.head(path, len(parquet.MAGIC)) == parquet.MAGIC:
        by_name = parquet.columns(path)
        return as_columns(path, [dict(zip(by_name, row, strict=True)) for row in zip(*by_name.values(), strict=True)])
    text = files.log(path).lstrip()
    if (history := _history(text)) is not None:
        return replace(as_columns(path, history), history=True, whose="Hugging Face Trainer")
    skipped: Counter[str] = Counter()
    of_sort = _rows_of_json if text[:1] in ("{", "[") else _rows_of_csv
    columns = as_columns(path, list(of_sort(path, text, skipped)))
    return replace(columns, skipped=dict(skipped))


def as_columns(path: Path, rows: Sequence[Row]) -> StepColumns:
    """Rows by name as columns. Raises :class:`TraceError` where there is none, and where they are of several runs."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    by_metric: dict[str, list[str]] = {}
    for name in names:
        by_metric.setdefault(plain_name(name), []).append(name)
    for plain, several in by_metric.items():
        if len(several) > 1 and (is_table({plain}) or plain in SINCE):
            listed = " and ".join(repr(short(name)) for name in several[:2])
            raise TraceError(f"{path}: {listed} are columns of several runs; keep those of one")
    if not rows:
        raise TraceError(f"{path}: a table of steps without a row")
    numbers = [{plain_name(name): _number(value) for name, value in row.items()} for row in rows]
    kept = [name for name in by_metric if name and not name.endswith(_OF_BOUNDS)]
    return StepColumns(path, numbers, [name for name in kept if any(row.get(name) is not None for row in numbers)])


def _history(text: str) -> list[Row] | None:
    """What a state of Hugging Face's Trainer logged; None for another file."""
    if text[:1] != "{" or '"log_history"' not in text:
        return None
    try:
        state = json.loads(text)
    except (ValueError, RecursionError):
        return None
    logged = state.get("log_history") if isinstance(state, dict) else None
    return [row for row in logged if isinstance(row, dict)] if isinstance(logged, list) else None


def _rows_of_csv(path: Path, text: str, skipped: Counter[str]) -> Iterator[Row]:
    """Rows as long as the header; ``skipped`` counts others but the last, which a run that goes on is writing."""
    lines = csv_rows(text, str(path), TraceError)
    names = next(lines, [])
    is_cut = False
    for cells in lines:
        if is_cut:
            skipped[OTHER_LENGTH] += 1
        is_cut = bool(cells) and len(cells) != len(names)
        if cells and not is_cut:  # a header may come again
            yield dict(zip(names, cells, strict=True))


def _rows_of_json(path: Path, text: str, skipped: Counter[str]) -> Iterator[Row]:
    """Objects of a list, or one a line; ``skipped`` counts what is none, but the last line of a run that goes on."""
    if text[:1] == "[":
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}: not a JSON list of rows: {short(str(error))}") from None
        for row in table:
            if isinstance(row, dict):
                yield row
            elif isinstance(row, list) and len(row) == 3:
                yield dict(zip(("Wall time", "Step", "Value"), row, strict=True))
            else:
                skipped[NO_ROW] += 1
        return
    lines = [line for line in text.splitlines() if line.strip()]
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line) if line.startswith("{") else None
        except (ValueError, RecursionError):
            row = None
        if isinstance(row, dict):
            yield row
        elif number < len(lines):
            skipped[NO_OBJECT] += 1


def plain_name(name: str) -> str:
    """A column's name in small letters, without a run's name before (``"my-run - train/step_time"``)."""
    return name.rpartition(" - ")[2].strip().lower()


def _number(value: object) -> float | None:
    """A cell as a number, a clock as seconds since 1970; None for any other."""
    if isinstance(value, datetime):
        return value.timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return _clock(str(value))
    return number if math.isfinite(number) and abs(number) < 1e15 else None


def _clock(word: str) -> float | None:
    if not re.match(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d", word):
        return None
    try:
        return datetime.fromisoformat(word.strip()).timestamp()
    except (ValueError, OverflowError):
        return None
