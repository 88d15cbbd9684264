"""Steps that a logger keeps as a table: a row a step, its columns by name.

CSV (Lightning's CSVLogger, Weights & Biases' export of a chart or of a history, TensorBoard's download of a scalar,
LitGPT's metrics.csv), JSON a line (MaxText, detectron2, MMEngine, torchtitan's kin, a loop of one's own), and a JSON
list of either (TensorBoard's download has rows of wall time, step and value).

A time of a step is a column whose name says so; else steps are as far apart as the rows' clocks: a time since 1970, or
since the run began. A name without a unit is taken as seconds where the clocks agree or nothing speaks against it, and
that is said.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

from msgspec.structs import replace

from clustersim.core.errors import TraceError
from clustersim.core.texts import csv_rows, short
from clustersim.core.units import format_time
from clustersim.files.traces import files, step_timers
from clustersim.files.traces.csv_table import header
from clustersim.files.traces.heads import Head, Likeness
from clustersim.files.traces.told import TrainingLog

Row: TypeAlias = Mapping[str, Any]
"""What a row has by the columns' names."""

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
_TIME = re.compile(
    r"^(?:(?:train|training|perf|performance|timing|time_metrics|metrics|throughput)[/._])*(?:train_)?"
    r"(?:(?:(?:step|iteration|iter)[-_ ]?time|time[-_ ]per[-_ ](?:step|iteration|iter)|end_to_end"
    r"|elapsed_time_per_iteration|train_step_timing|sec_per_step|(?:step|iteration)[-_ ]duration)"
    r"(?:(?:[-_ ]?\(?(?P<unit>ms|us|s|sec|secs|seconds|milliseconds)\)?)|[-_ ]in[-_ ](?P<in>ms|s))?)$",
    re.I,
)
_PERIOD = ("time", "data_time")
"""Two columns of detectron2 and MMEngine: what a step takes, and what of it waits for data, means over a window."""
_SINCE = (
    *("_timestamp", "timestamp", "wall time", "wall_time", "walltime", "_runtime", "runtime", "elapsed", "elapsed_s"),
    *("time_elapsed", "elapsed_seconds", "relative time (process)", "relative time (wall)", "time/elapsed", "time"),
)
"""Columns of clocks [s], since 1970 or the run's begin."""
_RATE = re.compile(
    r"tflops|throughput|(?:^|[/_ ])tps$|mfu|(?:samples|tokens|steps|iterations)[-_ ]?(?:/|per)[-_ ]?s", re.I
)
_STEP_RATE = re.compile(r"(?:^|[/_ ])(?:steps|iterations|it)(?:/s(?:ec)?|[-_ ]per[-_ ]sec(?:ond)?)$", re.I)
BARE = "time"
"""A clock where it grows in every row, else what a step takes."""
SINCE_1970 = 1e9
"""Above this a clock counts seconds since 1970."""
MILLISECONDS = 1e11
"""Above this it counts milliseconds."""
_OF_BOUNDS = ("__min", "__max")
"""How Weights & Biases names a chart's band."""
_UNITS = {"ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6}
_TENSORBOARD = re.compile(r"-tag-(.+?)(?: ?\(\d+\))?\.(?:csv|json)(?:\.gz)?$")
OTHER_LENGTH = "a row of another length than the header"
NO_ROW = "an element of the list that is no row"
NO_OBJECT = "a line that is no JSON object"
MOST_BARE = 60.0
"""Above this a number without a unit is as likely milliseconds as seconds."""
APART = 0.3
"""By how much a column's times may differ from the rows' clocks without a word."""
_ADVICE = (
    "a step's time is read from a column such as step_time_s, step_time_ms or steps_per_sec, or from the rows' own "
    "clock (_timestamp, _runtime, Wall time, time) beside the number of the step"
)


@dataclass
class _Columns:
    """Columns of a file by their names in small letters, without the run's name: a number or a clock a row, else
    None; ``notes`` : what to say of them. ``skipped`` : rows left out, reason -> how many."""

    path: Path
    rows: list[dict[str, float | None]]
    names: list[str]
    notes: list[str] = field(default_factory=list)
    skipped: Mapping[str, int] = field(default_factory=dict)

    def series(self, name: str) -> list[float | None]:
        """A column; None where a row has it not."""
        return [row.get(name) for row in self.rows]


def sniff(head: Head) -> Likeness:
    """Whether the first line, or the first object of a list, names steps beside other numbers."""
    data = head.data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if data[:1] == b"{":
        names = set(map(_plain, head.members)) if head.is_row else set()
    elif data[:1] == b"[":
        inner = Head(data[1:].lstrip())
        is_scalar = re.match(rb"\[\s*\[\s*\d{10}(?:\.\d+)?\s*,\s*\d+\s*,", data)
        names = {"wall time", "step"} if is_scalar else set(map(_plain, inner.members))
    else:
        names = set(map(_plain, header(data)))
    if len(names) < 2 or not _is_table(names):
        return Likeness.NONE
    is_sure = data[:1] == b"{" and not names.isdisjoint(STEPS) and any(map(_TIME.match, names))
    return Likeness.SHAPED if is_sure else Likeness.AMONG


def _is_table(names: set[str]) -> bool:
    axes = {"wall time", "relative time (process)", "relative time (wall)"}
    return not names.isdisjoint({*STEPS, *axes}) or any(map(_TIME.match, names))


def read(paths: Sequence[Path]) -> TrainingLog:
    """The steps of one table. Raises :class:`TraceError` for several, and where no column tells a step's time."""
    if len(paths) > 1:
        raise TraceError(f"{paths[1]}: a second table of steps; read them one at a time")
    columns = _columns(paths[0])
    number = next((name for name in STEPS if name in columns.names), "")
    collected = step_timers.Collected(framework=_whose(columns))
    for name in columns.names:
        values = [value for value in columns.series(name) if value is not None]
        if _RATE.search(name) and values and not _STEP_RATE.search(name):
            collected.rates[name] += values
    steps = _steps(columns, number)
    if not steps and not collected.rates:
        shown = ", ".join(short(name) for name in columns.names[:8])
        raise TraceError(f"{paths[0]}: no column of this table of steps is a time (it has {shown}): {_ADVICE}")
    told = step_timers.told_of(str(paths[0]), collected, steps)
    return replace(told, lines=[*told.lines, *columns.notes], skipped={**told.skipped, **columns.skipped})


def _whose(columns: _Columns) -> str:
    if {"_step", "_runtime"} <= set(columns.names) or any("relative time" in name for name in columns.names):
        return "Weights & Biases"
    return "TensorBoard" if {"wall time", "step", "value"} == set(columns.names) else "a table of steps"


def _steps(columns: _Columns, number: str) -> list[tuple[int, float]]:
    """Steps and their seconds: by a column that is a time, else by how far apart the rows' clocks are."""
    counted: list[float | None] = columns.series(number) if number else [float(i) for i in range(len(columns.rows))]
    clock_name, apart = _by_clock(columns, number, counted)
    timed, unit = _timed(columns, bool(apart))
    if timed:
        rows = [(n, s) for n, s in zip(counted, columns.series(timed), strict=True) if n is not None and s is not None]
        steps = _in_seconds(columns, timed, unit, [(int(n), s) for n, s in rows if s > 0], apart)
        is_mean = timed == BARE and set(_PERIOD) <= set(columns.names)
        window = ", a mean over some steps as detectron2 and MMEngine log" if is_mean else ""
        columns.notes.insert(0, f"by column {timed!r}{window}")
        if timed.startswith("iter") and number not in ("iter", "iteration", "") and "iter" in columns.names:
            steps = _of_passes(columns, steps, counted)
        _compare(columns, steps, apart, clock_name)
        return steps
    if apart:
        columns.notes.append(f"by the rows' {clock_name!r}: all that lies between two rows is in it")
        if number == "_step":
            columns.notes.append("steps are numbered by _step, which counts calls of wandb.log: one a step was taken")
        return apart
    rate = next((name for name in columns.names if _STEP_RATE.search(name)), "")
    if rate:
        columns.notes.append(f"by column {rate!r}")
        rates = zip(counted, columns.series(rate), strict=True)
        return [(int(n), 1 / value) for n, value in rates if n is not None and value is not None and value > 0]
    return []


def _timed(columns: _Columns, has_clock: bool) -> tuple[str, str]:
    """The column that is a step's time, and the unit that its name says; empty where there is none."""
    for name in columns.names:
        if match := _TIME.match(name):
            return name, (match["unit"] or match["in"] or "").lower() or ("s" if name.startswith("sec_") else "")
    if set(_PERIOD) <= set(columns.names):
        return _PERIOD[0], "s"
    tag = _TENSORBOARD.search(columns.path.name)
    if tag and "value" in columns.names and (match := _TIME.match(_plain(tag[1]))):
        return "value", (match["unit"] or match["in"] or "").lower()
    return (BARE, "") if BARE in columns.names and not has_clock else ("", "")


def _in_seconds(
    columns: _Columns, name: str, unit: str, rows: list[tuple[int, float]], apart: list[tuple[int, float]]
) -> list[tuple[int, float]]:
    """Times of a column in seconds. Raises :class:`TraceError` where its unit is in doubt."""
    if unit or not rows:
        return [(n, value * _UNITS.get(unit, 1.0)) for n, value in rows]
    middle = median(value for _, value in rows)
    if apart:
        clock = median(seconds for _, seconds in apart)
        unit = min(("s", "ms"), key=lambda word: abs(math.log(middle * _UNITS.get(word, 1.0) / clock)))
        columns.notes.append(f"{name!r} names no unit: {unit}, as the rows' clocks are apart")
    elif middle <= MOST_BARE:
        columns.notes.append(f"{name!r} names no unit: taken as seconds; name it {name}_ms where it is milliseconds")
    else:
        raise TraceError(
            f"{columns.path}: column {name!r} has {middle:g} in the middle and names no unit: seconds or "
            f"milliseconds; name it {name}_s or {name}_ms"
        )
    return [(n, value * _UNITS.get(unit, 1.0)) for n, value in rows]


def _of_passes(
    columns: _Columns, steps: list[tuple[int, float]], counted: list[float | None]
) -> list[tuple[int, float]]:
    """Times of passes as times of steps, by how both numbers grow (LitGPT's ``iter`` and ``step``)."""
    both = [(n, i) for n, i in zip(counted, columns.series("iter"), strict=True) if n is not None and i is not None]
    if len(both) < 2 or both[-1][0] <= both[0][0]:
        return steps
    passes = (both[-1][1] - both[0][1]) / (both[-1][0] - both[0][0])
    if passes <= 1:
        return steps
    columns.notes.append(f"a step has {passes:.3g} passes, by how 'iter' and the steps' number grow: so many times one")
    return [(n, seconds * passes) for n, seconds in steps]


def _by_clock(columns: _Columns, number: str, counted: list[float | None]) -> tuple[str, list[tuple[int, float]]]:
    """The column of the rows' clock, and the seconds a step between rows; empty where steps have no number."""
    if not number or set(_PERIOD) <= set(columns.names):
        return "", []
    for name in (each for each in _SINCE if each in columns.names):
        both = zip(counted, columns.series(name), strict=True)
        marks = [(n, at) for n, at in both if n is not None and at is not None]
        if marks and min(at for _, at in marks) > MILLISECONDS:
            marks = [(n, at * 1e-3) for n, at in marks]
        grown = [(old, new) for old, new in pairwise(marks) if new[0] > old[0]]
        apart = [(int(new), (late - early) / (new - old)) for (old, early), (new, late) in grown if late > early]
        if name == BARE and marks and not _is_clock(columns, marks, len(apart) == len(grown)):
            return "", []
        if apart:
            return name, apart
    return "", []


def _is_clock(columns: _Columns, marks: list[tuple[float, float]], grows: bool) -> bool:
    """Whether a column that is called time and no more is a clock: it grows in every row. Raises
    :class:`TraceError` where it grows so little that it may as well be a step's time."""
    least = min(at for _, at in marks)
    most = max(at for _, at in marks)
    if grows and len(marks) > 1 and least > 0 and most < 1.5 * least and least < SINCE_1970:
        raise TraceError(
            f"{columns.path}: column {BARE!r} grows from {least:g} to {most:g}: a step's time, or the time since the "
            "run began; name it step_time_s or elapsed_s"
        )
    return grows


def _compare(
    columns: _Columns, steps: list[tuple[int, float]], apart: list[tuple[int, float]], clock_name: str
) -> None:
    """Say where the rows' clocks and a column of times are far apart."""
    if not steps or not apart:
        return
    by_column = median(seconds for _, seconds in steps)
    by_clock = median(seconds for _, seconds in apart)
    if abs(by_clock / by_column - 1) > APART:
        columns.notes.append(
            f"by the rows' {clock_name!r} a step takes {format_time(by_clock)}: numbers of rows may not be those of "
            "steps, or more than steps lies between rows"
        )


# ---- a file ----------------------------------------------------------------------------------------------------------


def _columns(path: Path) -> _Columns:
    """The rows of a file by name. Raises :class:`TraceError` for what is no table, and for one of several runs."""
    text = files.log(path).lstrip()
    skipped: Counter[str] = Counter()
    of_sort = _rows_of_json if text[:1] in ("{", "[") else _rows_of_csv
    rows = list(of_sort(path, text, skipped))
    names = list(dict.fromkeys(name for row in rows for name in row))
    by_metric: dict[str, list[str]] = {}
    for name in names:
        by_metric.setdefault(_plain(name), []).append(name)
    for plain, several in by_metric.items():
        if len(several) > 1 and (_is_table({plain}) or plain in _SINCE):
            listed = " and ".join(repr(short(name)) for name in several[:2])
            raise TraceError(f"{path}: {listed} are columns of several runs; keep those of one")
    if not rows:
        raise TraceError(f"{path}: a table of steps without a row")
    numbers = [{_plain(name): _number(value) for name, value in row.items()} for row in rows]
    kept = [name for name in by_metric if name and not name.endswith(_OF_BOUNDS)]
    return _Columns(
        path,
        numbers,
        [name for name in kept if any(row.get(name) is not None for row in numbers)],
        skipped=dict(skipped),
    )


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


def _plain(name: str) -> str:
    """A column's name in small letters, without a run's name before (``"my-run - train/step_time"``)."""
    return name.rpartition(" - ")[2].strip().lower()


def _number(value: object) -> float | None:
    """A cell as a number, a clock as seconds since 1970; None for any other."""
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
