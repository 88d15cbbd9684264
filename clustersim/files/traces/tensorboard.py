"""TensorBoard's event files: the step times that frameworks write there as scalars.

A file is a sequence of records (length, its checksum, an Event, its checksum); an Event has a wall time, a step and a
Summary of values by tag (tensorflow/core/util/event.proto, framework/summary.proto). They are a table of steps, whose
columns are the tags and the wall time (:mod:`step_tables`): Megatron-LM writes ``iteration-time`` [s], torchtitan
``time_metrics/end_to_end(s)``; where no tag is a time, a step's is the wall time between two. Keras numbers
``epoch_loss`` and its kin by epochs, which are no steps. DeepSpeed (``runtime/engine.py``) numbers its events by
samples: of a step it tells the milliseconds of ``Train/Samples/elapsed_time_ms_forward``, ``backward`` and ``step``,
and where it tells none, how long a sample is.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from msgspec.structs import replace

from clustersim.core.errors import TraceError
from clustersim.files.traces import files, step_columns, step_tables, step_timers
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.step_columns import TIME, StepColumns
from clustersim.files.traces.told import TrainingLog
from clustersim.files.varints import varint

Fields: TypeAlias = Iterator[tuple[int, bytes | int]]
Scalar: TypeAlias = tuple[int, float, float]
"""Its step, wall time [s] and value."""
_MARK = b"brain.Event:"
_PART = re.compile(r"elapsed_time_ms_(\w+)$")
_WHOLE = ("forward", "backward", "step")
"""DeepSpeed's parts that make a step; others are parts of these."""
_BY_SAMPLES = re.compile(r"^Train/Samples/| vs samples$")
"""Tags whose numbers count samples: DeepSpeed's, Megatron-LM's second axis."""
_BY_EPOCHS = re.compile(r"(?:^|/)epoch_|(?:^|[/_])epoch[-_]?(?:time|duration)", re.I)
"""Tags whose numbers count epochs: Keras', and an epoch's time."""
_EPOCH_RATE = "epoch_steps_per_second"
"""Keras' steps a second, a mean over an epoch."""


def sniff(head: Head) -> Likeness:
    """Whether the first record is an Event that says the format's version."""
    data = head.data
    if len(data) < 16:
        return Likeness.NONE
    size = int.from_bytes(data[:8], "little")
    return likeness(named=False, shaped=size < 1024 and _MARK in data[12 : 12 + size])


def read(paths: Sequence[Path]) -> TrainingLog:
    """The step times of these files. Raises :class:`TraceError` for a damaged file, and where none tells a time."""
    scalars: defaultdict[str, list[Scalar]] = defaultdict(list)
    cut = 0
    for path in paths:
        cut += _scalars(path, files.whole(path), scalars)
    source = ", ".join(map(str, paths))
    told = _of_samples(source, scalars) or step_tables.told_of(source, _columns(paths[0], scalars))
    return replace(told, skipped={"a record that is cut off": cut} if cut else {})


def _columns(path: Path, scalars: Mapping[str, Sequence[Scalar]]) -> StepColumns:
    """Scalars as a table of steps: a row for each value of the tag that is a time, else of the tag that has most, with
    what the other tags have at its step. Raises :class:`TraceError` where no tag by steps has two, or two are times."""
    by_step = {
        tag: values for tag, values in scalars.items() if not (_BY_SAMPLES.search(tag) or _BY_EPOCHS.search(tag))
    }
    timed = next((tag for tag in by_step if TIME.match(step_columns.plain_name(tag))), "")
    axis = timed or max(by_step, key=lambda tag: len(by_step[tag]), default="")
    rows: list[dict[str, float]] = [{_EPOCH_RATE: value} for _, _, value in scalars.get(_EPOCH_RATE, ())]
    if timed or len(by_step.get(axis, ())) > 1:
        beside = {tag: {step: value for step, _, value in values} for tag, values in by_step.items() if tag != axis}
        rows = [
            {"step": step, "wall time": wall, axis: value}
            | {tag: at_step[step] for tag, at_step in beside.items() if step in at_step}
            for step, wall, value in by_step[axis]
        ]
    if not rows:
        raise TraceError(
            f"{path}: no scalar of these event files is a time, and none is there for two steps (an epoch is no step)"
        )
    return dataclasses.replace(step_columns.as_columns(path, rows), whose="TensorBoard")


def _of_samples(source: str, scalars: Mapping[str, Sequence[Scalar]]) -> TrainingLog | None:
    """What DeepSpeed says, which numbers its events by samples; None where tags by steps say more."""
    collected = step_timers.Collected(framework="TensorBoard")
    for tag, values in scalars.items():
        if match := _PART.search(tag):
            collected.parts[match[1]] = [(value * 1e-3, value * 1e-3) for *_, value in values]
    if not collected.parts and not all(map(_BY_SAMPLES.search, scalars)):
        return None
    steps = _summed(scalars)
    a_sample = [] if steps else _apart(scalars)
    if a_sample:
        collected.rates["samples/s"] = [1 / seconds for seconds in a_sample]
    return step_timers.told_of(source, collected, steps) if collected.parts or a_sample else None


def _summed(scalars: Mapping[str, Sequence[Scalar]]) -> list[tuple[int, float]]:
    """Steps of which DeepSpeed tells every part, and their seconds."""
    by_step: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for tag, values in scalars.items():
        match = _PART.search(tag)
        if match is None or match[1] not in _WHOLE:
            continue
        for number, _, value in values:
            by_step[number][match[1]] = value * 1e-3
    return [(n, sum(parts.values())) for n, parts in sorted(by_step.items()) if len(parts) == len(_WHOLE)]


def _apart(scalars: Mapping[str, Sequence[Scalar]]) -> list[float]:
    """Seconds a sample, by the wall times of the tag that has most."""
    values = max(scalars.values(), key=len, default=[])
    return [
        (late - early) / (new - old)
        for (old, early, _), (new, late, _) in pairwise(values)
        if new > old and late > early
    ]


def _scalars(path: Path, data: bytes | bytearray, scalars: dict[str, list[Scalar]]) -> int:
    """Take the scalars of a file; returns how many records are cut off at its end. Raises :class:`TraceError`."""
    offset = 0
    while offset < len(data):
        size = int.from_bytes(data[offset : offset + 8], "little")
        if offset + 12 + size > len(data):
            return 1
        try:
            _event(bytes(data[offset + 12 : offset + 12 + size]), scalars)
        except (ValueError, struct.error, TypeError, UnicodeDecodeError):
            raise TraceError(f"{path}: byte {offset:,}: not an Event of TensorBoard") from None
        offset += 16 + size
    return 0


def _event(data: bytes, scalars: dict[str, list[Scalar]]) -> None:
    wall = 0.0
    step = 0
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            (wall,) = struct.unpack("<d", value)
        elif number == 2 and isinstance(value, int):
            step = value
        elif number == 5 and isinstance(value, bytes):
            for _, field_value in _fields(value):
                if isinstance(field_value, bytes):
                    _value(field_value, step, wall, scalars)


def _value(data: bytes, step: int, wall: float, scalars: dict[str, list[Scalar]]) -> None:
    tag = ""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            tag = value.decode()
        elif number == 2 and isinstance(value, bytes) and len(value) == 4:
            (scalar,) = struct.unpack("<f", value)
            scalars[tag].append((step, wall, scalar))
        elif number == 8 and isinstance(value, bytes):
            scalars[tag] += [(step, wall, scalar) for scalar in _tensor(value)]


def _tensor(data: bytes) -> list[float]:
    """The value of a tensor of one number, as TensorFlow 2 and PyTorch's ``new_style`` write a scalar; else nothing."""
    kind = 0
    content = b""
    for number, value in _fields(data):
        if number == 1 and isinstance(value, int):
            kind = value
        elif number in (4, 5, 6) and isinstance(value, bytes):
            content = value
    form = {(1, 4): "<f", (2, 8): "<d"}.get((kind, len(content)))
    return [float(struct.unpack(form, content)[0])] if form else []


def _fields(data: bytes) -> Fields:
    """Numbers and values of a protobuf message. Raises :class:`ValueError` where it is none."""
    offset = 0
    while offset < len(data):
        tag, offset = _number(data, offset)
        wire = tag & 7
        if wire == 0:
            value, offset = _number(data, offset)
            yield tag >> 3, value
            continue
        if wire == 2:
            size, offset = _number(data, offset)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError("wire type")
        if offset + size > len(data):
            raise ValueError("cut off")
        yield tag >> 3, data[offset : offset + size]
        offset += size


def _number(data: bytes, offset: int) -> tuple[int, int]:
    value, offset = varint(data, offset)
    if value < 0:
        raise ValueError("number")
    return value, offset
