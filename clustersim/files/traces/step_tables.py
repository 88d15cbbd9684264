"""Steps that a logger keeps as a table: a row a step, its columns by name.

CSV (Lightning's CSVLogger, Weights & Biases' export of a chart or of a history, TensorBoard's download of a scalar,
LitGPT's metrics.csv), JSON a line (MaxText, detectron2, MMEngine, torchtitan's kin, a loop of one's own), a JSON list
of either (TensorBoard's download has rows of wall time, step and value), Parquet (Weights & Biases' history), and the
state of Hugging Face's Trainer where TRL logs the time of its steps there.

A time of a step is a column whose name says so; else steps are as far apart as the rows' clocks: a time since 1970, or
since the run began. A name without a unit is taken as seconds where the clocks agree or nothing speaks against it, and
that is said.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median

from msgspec.structs import replace

from clustersim.core.errors import TraceError
from clustersim.core.texts import short
from clustersim.core.units import format_time
from clustersim.files.traces import parquet, step_timers
from clustersim.files.traces.csv_table import header
from clustersim.files.traces.heads import Head, Likeness
from clustersim.files.traces.step_columns import (
    SINCE,
    STEPS,
    TIME,
    StepColumns,
    is_table,
    plain_name,
    read_columns,
)
from clustersim.files.traces.told import TrainingLog

_PERIOD = ("time", "data_time")
"""Two columns of detectron2 and MMEngine: what a step takes, and what of it waits for data, means over a window."""
_RATE = re.compile(
    r"tflops|throughput|(?:^|[/_ ])tps$|mfu|(?:samples|tokens|steps|iterations)[-_ ]?(?:/|per)[-_ ]?s", re.I
)
_STEP_RATE = re.compile(
    r"^(?!.*(?:eval|valid|val[/_]|test))(?:.*[/_ ])?(?:steps?|iterations|it)(?:/s(?:ec)?|[-_ ]per[-_ ]sec(?:ond)?)$",
    re.I,
)
"""Steps of training a second; of an evaluation, they are none."""
BARE = "time"
"""A clock where it grows in every row, else what a step takes."""
SINCE_1970 = 1e9
"""Above this a clock counts seconds since 1970."""
MILLISECONDS = 1e11
"""Above this it counts milliseconds."""
_UNITS = {"ms": 1e-3, "milliseconds": 1e-3, "us": 1e-6}
_TENSORBOARD = re.compile(r"-tag-(.+?)(?: ?\(\d+\))?\.(?:csv|json)(?:\.gz)?$")
MOST_BARE = 60.0
"""Above this a number without a unit is as likely milliseconds as seconds."""
APART = 0.3
"""By how much a column's times may differ from the rows' clocks without a word."""
_ADVICE = (
    "a step's time is read from a column such as step_time_s, step_time_ms or steps_per_sec, or from the rows' own "
    "clock (_timestamp, _runtime, Wall time, time) beside the number of the step"
)


def sniff(head: Head) -> Likeness:
    """Whether the first line, or the first object of a list, names steps beside other numbers."""
    data = head.data.removeprefix(b"\xef\xbb\xbf").lstrip()
    if data.startswith(parquet.MAGIC) or head.lists("log_history", "step"):
        return Likeness.AMONG
    if data[:1] == b"{":
        names = set(map(plain_name, head.members)) if head.is_row else set()
    elif data[:1] == b"[":
        inner = Head(data[1:].lstrip())
        is_scalar = re.match(rb"\[\s*\[\s*\d{10}(?:\.\d+)?\s*,\s*\d+\s*,", data)
        names = {"wall time", "step"} if is_scalar else set(map(plain_name, inner.members))
    else:
        names = set(map(plain_name, header(data)))
    if len(names) < 2 or not is_table(names):
        return Likeness.NONE
    is_sure = data[:1] == b"{" and not names.isdisjoint(STEPS) and any(map(TIME.match, names))
    return Likeness.SHAPED if is_sure else Likeness.AMONG


def read(paths: Sequence[Path]) -> TrainingLog:
    """The steps of one table. Raises :class:`TraceError` for several, and where no column tells a step's time."""
    if len(paths) > 1:
        raise TraceError(f"{paths[1]}: a second table of steps; read them one at a time")
    columns = read_columns(paths[0])
    if columns.history and not any(map(TIME.match, columns.names)):
        raise TraceError(
            f"{paths[0]}: the state of a checkpoint of Hugging Face's Trainer, in which no step has a time"
        )
    return told_of(str(paths[0]), columns)


def told_of(source: str, columns: StepColumns) -> TrainingLog:
    """What columns say of steps. Raises :class:`TraceError` where none tells a step's time or a rate."""
    number = next((name for name in STEPS if name in columns.names), "")
    collected = step_timers.Collected(framework=_whose(columns))
    for name in columns.names:
        values = [value for value in columns.series(name) if value is not None]
        if _RATE.search(name) and values and not _STEP_RATE.search(name):
            collected.rates[name] += values
    steps = _steps(columns, number)
    if not steps and not collected.rates:
        shown = ", ".join(short(name) for name in columns.names[:8])
        raise TraceError(f"{source}: no column of this table of steps is a time (it has {shown}): {_ADVICE}")
    told = step_timers.told_of(source, collected, steps)
    return replace(told, lines=[*told.lines, *columns.notes], skipped={**told.skipped, **columns.skipped})


def _whose(columns: StepColumns) -> str:
    if {"_step", "_runtime"} <= set(columns.names) or any("relative time" in name for name in columns.names):
        return "Weights & Biases"
    return "TensorBoard" if {"wall time", "step", "value"} == set(columns.names) else columns.whose


def _steps(columns: StepColumns, number: str) -> list[tuple[int, float]]:
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
        if _count_epochs(columns, counted):
            raise TraceError(
                f"{columns.path}: {number!r} grows as 'epoch' does, and an epoch is no step: log a step's time, or "
                "number rows by steps"
            )
        columns.notes.append(f"by the rows' {clock_name!r}: all that lies between two rows is in it")
        if columns.whose == "TensorBoard":
            columns.notes.append(
                "numbers of scalars are taken as those of steps; if they are of epochs, so is the time"
            )
        if number == "_step":
            columns.notes.append("steps are numbered by _step, which counts calls of wandb.log: one a step was taken")
        return apart
    rate = next((name for name in columns.names if _STEP_RATE.search(name)), "")
    if rate:
        columns.notes.append(f"by column {rate!r}")
        rates = zip(counted, columns.series(rate), strict=True)
        return [(int(n), 1 / value) for n, value in rates if n is not None and value is not None and value > 0]
    return []


FEWEST = 3
"""Rows in which a number is that of the epoch by more than chance."""


def _count_epochs(columns: StepColumns, counted: Sequence[float | None]) -> bool:
    """Whether what numbers the rows is the epoch, or the next one."""
    both = zip(counted, columns.series("epoch"), strict=True)
    ahead = [n - epoch for n, epoch in both if n is not None and epoch is not None]
    return len(ahead) >= FEWEST and set(ahead) in ({0}, {1}, {-1})


def _timed(columns: StepColumns, has_clock: bool) -> tuple[str, str]:
    """The column that is a step's time, and the unit that its name says; empty where there is none."""
    for name in columns.names:
        if match := TIME.match(name):
            unit = (match["before"] or match["unit"] or match["in"] or "").lower()
            return name, unit or ("s" if name.startswith("sec_") or columns.history else "")
    if set(_PERIOD) <= set(columns.names):
        return _PERIOD[0], "s"
    tag = _TENSORBOARD.search(columns.path.name)
    if tag and "value" in columns.names and (match := TIME.match(plain_name(tag[1]))):
        return "value", (match["unit"] or match["in"] or "").lower()
    return (BARE, "") if BARE in columns.names and not has_clock else ("", "")


def _in_seconds(
    columns: StepColumns, name: str, unit: str, rows: list[tuple[int, float]], apart: list[tuple[int, float]]
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
    columns: StepColumns, steps: list[tuple[int, float]], counted: list[float | None]
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


def _by_clock(columns: StepColumns, number: str, counted: list[float | None]) -> tuple[str, list[tuple[int, float]]]:
    """The column of the rows' clock, and the seconds a step between rows; empty where steps have no number."""
    if not number or set(_PERIOD) <= set(columns.names):
        return "", []
    for name in (each for each in SINCE if each in columns.names):
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


def _is_clock(columns: StepColumns, marks: list[tuple[float, float]], grows: bool) -> bool:
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
    columns: StepColumns, steps: list[tuple[int, float]], apart: list[tuple[int, float]], clock_name: str
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
