"""Studies over a split model: scaling, a larger batch, sweeps of degrees, other ways to split."""

from __future__ import annotations

import pytest

from clustersim import scenario
from clustersim.studies import sweep as sweeps
from clustersim.studies.sensitivity.scaling import curve
from clustersim.studies.sweep.table import read
from clustersim.studies.what_if.comparison import compare
from clustersim.studies.what_if.rerun import rerun_step

PIPELINE = "1f1b_gpt2_xl_1x8_a100"
SMALL = {"model.name": "gpt2", "run.steps": 2, "parallel.pp": 4, "parallel.microbatches": 8}
BATCH = {"model.name": "gpt2", "run.steps": 2, "parallel.pp": 4, "parallel.global_batch_size": 32}


@pytest.mark.parametrize("said", [SMALL, BATCH])
def test_strong_scaling_keeps_the_samples_of_a_step_and_weak_scaling_those_of_a_rank(said):
    loaded = scenario.load(PIPELINE, said)
    strong = curve(loaded, [1, 2], "strong")
    weak = curve(loaded, [1, 2], "weak")
    assert [(one.batch, one.passes) for one in strong] == [(32, 8), (32, 4)]
    assert [(one.batch, one.passes) for one in weak] == [(32, 8), (64, 8)]


def test_micro_batches_that_do_not_divide_over_nodes_are_one_line():
    (point,) = curve(scenario.load(PIPELINE, SMALL), [16], "strong")
    assert point.error == "microbatches = 8 of 1 node does not divide over 16 nodes"


def test_a_larger_batch_is_the_same_number_of_larger_micro_batches_however_they_are_said():
    steps = [rerun_step(scenario.load(PIPELINE, said).prepare(), "batch", 2) for said in (SMALL, BATCH)]
    assert steps[0] == steps[1]


def test_buckets_of_the_strategy_are_no_knob_of_a_split_model():
    assert rerun_step(scenario.load(PIPELINE, SMALL).prepare(), "bucket size", 1.0) is None


def test_who_sets_the_batch_means_it_instead_of_the_files_micro_batches():
    config = scenario.load(PIPELINE, {"parallel.global_batch_size": 32}).prepare().scenario.config
    assert config.gradient_accumulation_steps == 16


def test_a_sweep_over_stages_has_a_row_for_each_and_says_which_cannot_be(tmp_path):
    fixed = {name: value for name, value in BATCH.items() if name != "parallel.pp"}
    table = {"base": PIPELINE, "set": fixed, "axes": [{"key": "parallel.pp", "values": [1, 2, 8]}]}
    sweeps.sweep(sweeps.from_table(table, "sweep.toml"), tmp_path, jobs=1)
    rows = read(tmp_path)
    assert (rows["samples_per_s"] * rows["step_time_s"])[:2] == pytest.approx([32, 32])
    assert "pp = 8: 12 layers do not divide over 8 ranks; use 6 or 12" in str(rows["error"][2])


def test_ways_to_split_one_model_are_rows_of_the_same_samples():
    rows = {row.variant: row for row in compare(PIPELINE, SMALL)}
    assert {"as written", "schedule gpipe", "schedule interleaved_1f1b", "schedule zb_h1", "tp 1 x pp 2 x dp 4"} <= set(
        rows
    )
    for row in rows.values():
        assert row.reason or row.samples_per_s * row.step_time_s == pytest.approx(32)
    own = scenario.load(PIPELINE, SMALL).run()
    assert rows["as written"].step_time_s == own.summary["step_time_s"]
    assert rows["schedule zb_h1"].step_time_s < rows["as written"].step_time_s <= rows["schedule gpipe"].step_time_s
    assert rows["schedule gpipe"].peak_memory_bytes > rows["as written"].peak_memory_bytes


def test_the_table_of_ways_to_split_fits_100_columns(clustersim):
    changes = [f"--set={name}={value}" for name, value in SMALL.items()]
    done = clustersim("compare-strategies", PIPELINE, *changes, columns=100)
    assert done.returncode == 0, done.stderr
    table = [line for line in done.stdout.splitlines() if line.startswith(("│", "┏", "┃"))]
    assert max(map(len, table)) <= 100
    assert "ways to split 1f1b_gpt2_xl_1x8_a100" in done.stdout
    assert any("bubble" in line for line in table)  # what a pipeline loses most by
