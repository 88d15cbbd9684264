"""Tables with a row a step, CSV or JSON: which column is a step's time, in which unit, and what is in doubt is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.told import TrainingLog


def read(path: Path, text: str) -> TrainingLog:
    path.write_text(text)
    told = traces.read(path)
    assert isinstance(told, TrainingLog)
    return told


def table(names: str, *rows: tuple[float | str, ...]) -> str:
    return "\n".join([names, *(",".join(map(str, row)) for row in rows)]) + "\n"


def json_lines(rows: list[dict[str, object]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


STEPS = range(1, 9)
WALL = 1_750_000_000.25
TABLES = {
    "milliseconds by name": (table("step,step_time_ms,loss", *((i, 250, 2) for i in STEPS)), 0.25),
    "seconds by name": (table("iteration,iteration_time (s)", *((i, 0.25) for i in STEPS)), 0.25),
    "a chart of Weights & Biases": (
        table(
            '"Step","run - train/step_time_s","run - train/step_time_s__MIN","run - train/step_time_s__MAX"',
            *((f'"{i}"', '"0.25"', '"0.2"', '"0.3"') for i in STEPS),
        ),
        0.25,
    ),
    "a history of Weights & Biases": (
        table(",_step,_runtime,_timestamp,loss", *((i, i, 9 + 0.25 * i, WALL + 0.25 * i, 2) for i in STEPS)),
        0.25,
    ),
    "its number of steps rather than of calls": (
        json_lines([{"_step": i, "_timestamp": WALL + 2.5 * i, "train/global_step": 10 * i} for i in STEPS]),
        0.25,
    ),
    "a scalar of TensorBoard": (
        table("Wall time,Step,Value", *((WALL + 2.5 * i, 10 * i, 3.1) for i in STEPS)),
        0.25,
    ),
    "the same as JSON": (json.dumps([[WALL + 2.5 * i, 10 * i, 3.1] for i in STEPS]), 0.25),
    "Lightning's throughput": (
        table("device/mfu,epoch,step,time", *((0.4, 0, 10 * i, 2.5 * i) for i in STEPS)),
        0.25,
    ),
    "LitGPT's passes": (
        table("iter,iter_time,loss,step,time", *((8 * i, 0.0625, 3, 2 * i, 0.5 * i) for i in STEPS)),
        0.25,
    ),
    "MaxText": (json_lines([{"perf/step_time_seconds": 0.25, "step": float(i)} for i in STEPS]), 0.25),
    "detectron2": (json_lines([{"data_time": 0.01, "iteration": 20 * i, "time": 0.25} for i in STEPS]), 0.25),
    "clocks of ISO": (
        table("step,timestamp", *((i, f"2026-01-10T10:00:{i:02d}.500") for i in STEPS)),
        1.0,
    ),
    "milliseconds since 1970": (table("step,timestamp", *((i, 1e3 * (WALL + i)) for i in STEPS)), 1.0),
    "prime-rl's": (table("_step,step,time/step", *((9 * i, i, 0.25) for i in STEPS)), 0.25),
    "verl's": (table("training/global_step,timing_s/gen,timing_s/step", *((i, 0.1, 0.25) for i in STEPS)), 0.25),
    "steps a second": (table("step,steps_per_second", *((i, 4) for i in STEPS)), 0.25),
    "a unit that the clocks tell": (
        table("step,step_time,_timestamp", *((i, 250, WALL + 0.25 * i) for i in STEPS)),
        0.25,
    ),
}


@pytest.mark.parametrize("which", TABLES)
def test_a_steps_time_is_told(tmp_path: Path, which: str):
    text, seconds = TABLES[which]
    told = read(tmp_path / "metrics", text)
    assert told.step_time_s == pytest.approx(seconds, rel=1e-3)
    listed = read(tmp_path / "metrics", "\ufeff" + text if text[0] not in "[{" else text)
    assert listed.step_time_s == told.step_time_s


def test_a_chart_named_for_its_scalar_has_it(tmp_path: Path):
    text = table("Wall time,Step,Value", *((WALL + 30 * i, 10 * i, 2.9) for i in STEPS))
    told = read(tmp_path / "run-a-tag-loss.csv", text)
    assert told.step_time_s == pytest.approx(3.0)
    told = read(tmp_path / "run-a-tag-step_time_s.csv", text)
    assert told.step_time_s == pytest.approx(2.9)


def test_a_time_without_a_unit_is_said_or_asked_for(tmp_path: Path):
    told = read(tmp_path / "a", table("step,step_time", *((i, 0.25) for i in STEPS)))
    assert any("names no unit: taken as seconds" in line for line in told.lines)
    with pytest.raises(TraceError, match="names no unit: seconds or milliseconds; name it step_time_s or step_time_ms"):
        read(tmp_path / "b", table("step,step_time", *((i, 250) for i in STEPS)))


def test_a_time_that_hardly_grows_is_asked_for(tmp_path: Path):
    falls = read(tmp_path / "a", table("step,time", *((i, 0.25 + 0.01 * (i % 2)) for i in STEPS)))
    assert falls.step_time_s == pytest.approx(0.25, rel=0.05)
    with pytest.raises(TraceError, match="a step's time, or the time since the run began"):
        read(tmp_path / "b", table("step,time", *((i, 0.25 + 0.001 * i) for i in STEPS)))


def test_times_that_contradict_the_clocks_are_said(tmp_path: Path):
    told = read(tmp_path / "a", table("step,step_time_s,_runtime", *((i, 0.25, i) for i in STEPS)))
    assert told.step_time_s == 0.25
    assert any("'_runtime' a step takes 1 s" in line for line in told.lines)


def test_two_runs_in_one_chart_are_refused(tmp_path: Path):
    text = table('"Step","a - step_time_s","b - step_time_s"', (1, 2, 3), (2, 2, 3))
    with pytest.raises(TraceError, match="columns of several runs; keep those of one"):
        read(tmp_path / "a", text)


def test_losses_alone_say_what_to_log(tmp_path: Path):
    text = table("epoch,step,train_loss", *((0, i, 2) for i in STEPS))
    with pytest.raises(TraceError, match=r"no column .* is a time \(it has epoch, step, train_loss"):
        read(tmp_path / "a", text)


def test_rates_alone_are_told_without_a_step(tmp_path: Path):
    told = read(tmp_path / "a", table('"Relative Time (Process)","a - tokens_per_sec"', (1, 8000), (2, 8100)))
    assert told.step_time_s is None
    assert told.rates == {"tokens_per_sec": 8050}


def test_rows_that_are_left_out_are_counted_but_the_one_that_is_being_written(tmp_path: Path) -> None:
    """They once went in silence, whatever their number."""
    rows = [(i, 0.25) for i in STEPS]
    whole = table("step,step_time_s", *rows)
    other = table("step,step_time_s", *rows[:2], (9,), *rows[2:4], (9, 0.25, 3), *rows[4:])
    assert read(tmp_path / "whole.csv", whole).skipped == {}
    assert read(tmp_path / "going.csv", whole + "9").skipped == {}
    assert read(tmp_path / "again.csv", whole + "\n" + whole).skipped == {}
    assert read(tmp_path / "other.csv", other).skipped == {"a row of another length than the header": 2}
    lines = json_lines([{"step": i, "step_time_s": 0.25} for i in STEPS])
    assert read(tmp_path / "going.jsonl", lines + '{"step": 9, "st').skipped == {}
    broken = read(tmp_path / "broken.jsonl", lines + '{"step": 9, "st\nwarning: slow\n\n' + lines)
    assert (broken.skipped, broken.steps) == ({"a line that is no JSON object": 2}, 16)
    scalars = json.dumps([*([WALL + i, i, 3.1] for i in STEPS), [1, 2], 3])
    assert read(tmp_path / "scalars.json", scalars).skipped == {"an element of the list that is no row": 2}


def state(rows: list[dict[str, object]]) -> str:
    return json.dumps({"best_metric": None, "global_step": 8, "log_history": rows, "max_steps": 8}, indent=2)


def test_a_state_of_the_trainer_with_the_time_of_steps_is_read(tmp_path: Path):
    rows: list[dict[str, object]] = [{"loss": 0.1, "step": i, "step_time": 75.0 + i % 2} for i in STEPS]
    told = read(tmp_path / "trainer_state.json", state(rows))
    assert (told.framework, told.steps, told.step_time_s) == ("Hugging Face Trainer", 8, 75.0)


def test_epochs_of_a_table_are_no_steps(tmp_path: Path):
    text = table("step,epoch,_timestamp", *((i, i - 1, WALL + 60 * i) for i in STEPS))
    with pytest.raises(TraceError, match="'step' grows as 'epoch' does, and an epoch is no step"):
        read(tmp_path / "a", text)


def test_an_evaluations_steps_a_second_are_no_training(tmp_path: Path):
    told = read(tmp_path / "a", table("step,run - eval/steps_per_second", *((i, 4) for i in STEPS)))
    assert (told.step_time_s, told.rates) == (None, {"eval/steps_per_second": 4.0})


def in_parquet(text: str) -> bytes:
    """A table of CSV in Parquet, with a column that is no number."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names, *rows = (line.split(",") for line in text.splitlines())
    columns = {name: [float(row[i]) for row in rows] for i, name in enumerate(names)}
    out = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns | {"words": [["a"]] * len(rows)}), out)
    return out.getvalue().to_pybytes()


def test_a_history_in_parquet_is_read_as_one_in_csv(tmp_path: Path):
    text = TABLES["a history of Weights & Biases"][0]
    (tmp_path / "history.parquet").write_bytes(in_parquet(text))
    told = traces.read(tmp_path / "history.parquet")
    assert isinstance(told, TrainingLog)
    assert told.lines == read(tmp_path / "history.csv", text).lines
    data = (tmp_path / "history.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    with pytest.raises(TraceError, match="not a whole Parquet file"):
        traces.read(tmp_path / "cut.parquet")
