"""TensorBoard's event files tell step times: by a scalar that is one, by parts, or by the wall times of steps."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.told import TrainingLog


def varint(value: int) -> bytes:
    out = b""
    while value >= 0x80:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def piece(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall: float, step: int, scalars: dict[str, float]) -> bytes:
    values = b"".join(
        piece(1, piece(1, tag.encode()) + b"\x15" + struct.pack("<f", value)) for tag, value in scalars.items()
    )
    return b"\x09" + struct.pack("<d", wall) + b"\x10" + varint(step) + piece(5, values)


def record(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + bytes(4) + data + bytes(4)


FIRST = record(b"\x09" + struct.pack("<d", 1e9) + piece(3, b"brain.Event:2"))


def written(path: Path, rows: list[dict[str, float]], apart: float = 2.0) -> Path:
    records = [record(event(1e9 + apart * 10 * i, 10 * i, row)) for i, row in enumerate(rows)]
    path.write_bytes(FIRST + b"".join(records))
    return path


def told(path: Path) -> TrainingLog:
    read = traces.read(path)
    assert isinstance(read, TrainingLog)
    return read


@pytest.mark.parametrize("tag", ["iteration-time", "time_metrics/end_to_end(s)", "train/step_time"])
def test_a_scalar_that_is_a_step_time_is_taken(tmp_path: Path, tag: str):
    rows = [{"loss": 3.0, tag: seconds, "throughput": 400.0} for seconds in (9.0, 1.25, 1.5, 1.25)]
    read = told(written(tmp_path / "events.out.tfevents.1", rows))
    assert (read.step_time_s, read.steps, read.rates) == (1.25, 4, {"throughput": 400.0})


def test_deepspeeds_parts_are_told(tmp_path: Path):
    base = "Train/Samples/elapsed_time_ms_"
    rows = [{f"{base}forward": 100.0, f"{base}backward": 200.0, f"{base}step": 10.0}] * 3
    read = told(written(tmp_path / "events", rows))
    assert {part.name: part.most_s for part in read.parts} == pytest.approx(
        {"forward": 0.1, "backward": 0.2, "step": 0.01}
    )


def test_without_a_time_wall_times_tell_it(tmp_path: Path):
    read = told(written(tmp_path / "events", [{"loss": 1.0}] * 5, apart=0.5))
    assert read.step_time_s == pytest.approx(0.5)
    assert any("'wall time': all that lies between two rows" in line for line in read.lines)
    assert any("if they are of epochs, so is the time" in line for line in read.lines)


def test_a_file_that_is_cut_off_is_read_as_far_as_it_is_whole(tmp_path: Path):
    path = written(tmp_path / "events", [{"iteration-time": 1.5}] * 4)
    path.write_bytes(path.read_bytes()[:-7])
    read = told(path)
    assert (read.steps, read.skipped) == (3, {"a record that is cut off": 1})


def test_a_file_without_times_or_of_damaged_events_is_one_error(tmp_path: Path):
    with pytest.raises(TraceError, match="no scalar of these event files"):
        traces.read(written(tmp_path / "events", [{"loss": 1.0}]))
    (tmp_path / "bad").write_bytes(FIRST + record(b"\xff\xff\xff"))
    with pytest.raises(TraceError, match="not an Event"):
        traces.read(tmp_path / "bad")


def test_deepspeeds_numbers_are_samples_and_its_parts_a_step(tmp_path: Path):
    base = "Train/Samples/elapsed_time_ms_"
    row = {"Train/Samples/train_loss": 1.0, f"{base}forward": 100.0, f"{base}backward": 200.0}
    row |= {f"{base}backward_inner": 150.0, f"{base}step": 10.0}
    assert told(written(tmp_path / "parts", [row] * 5, apart=0.01)).step_time_s == pytest.approx(0.31)
    bare = told(written(tmp_path / "bare", [{"Train/Samples/train_loss": 1.0}] * 5, apart=0.01))
    assert bare.step_time_s is None
    assert bare.rates == pytest.approx({"samples/s": 100.0})
    both = [{"lm loss vs samples": 1.0}] * 9 + [{"lm loss": 1.0}] * 5
    assert told(written(tmp_path / "axes", both, apart=0.5)).step_time_s == pytest.approx(0.5)


@pytest.mark.parametrize(("kind", "form", "field"), [(1, "<f", 4), (1, "<f", 5), (2, "<d", 4), (2, "<d", 6)])
def test_a_scalar_that_is_written_as_a_tensor_is_read(tmp_path: Path, kind: int, form: str, field: int):
    records = []
    for step, seconds in enumerate((9.0, 1.25, 1.5, 1.25)):
        tensor = b"\x08" + varint(kind) + piece(2, b"") + piece(field, struct.pack(form, seconds))
        value = piece(1, piece(1, b"step_time") + piece(8, tensor))
        records.append(record(b"\x09" + struct.pack("<d", 1e9) + b"\x10" + varint(step) + piece(5, value)))
    path = tmp_path / "events"
    path.write_bytes(FIRST + b"".join(records))
    assert told(path).step_time_s == 1.25


def test_a_time_without_a_unit_is_in_that_of_the_wall_times(tmp_path: Path):
    read = told(written(tmp_path / "events", [{"step_time": 500.0}] * 6, apart=0.5))
    assert read.step_time_s == pytest.approx(0.5)


def test_what_is_timed_in_evaluation_is_no_step(tmp_path: Path):
    read = told(written(tmp_path / "events", [{"val/step_time": 0.25, "train/step_time": 2.0}] * 6))
    assert read.step_time_s == 2.0


@pytest.mark.parametrize("tag", ["epoch_loss", "time/epoch_time", "validation/epoch_accuracy"])
def test_epochs_are_no_steps(tmp_path: Path, tag: str):
    """A time between two of Keras' was once told as a step's."""
    with pytest.raises(TraceError, match="an epoch is no step"):
        traces.read(written(tmp_path / "events", [{tag: 1.0}] * 6))
    read = told(written(tmp_path / "rate", [{tag: 1.0, "epoch_steps_per_second": 5.0}] * 6))
    assert read.step_time_s == pytest.approx(0.2)


def test_numbers_that_grow_as_the_epoch_does_are_no_steps(tmp_path: Path):
    rows = [{"loss": 1.0, "epoch": 10.0 * i + 1} for i in range(6)]
    with pytest.raises(TraceError, match="grows as 'epoch' does"):
        traces.read(written(tmp_path / "events", rows))
