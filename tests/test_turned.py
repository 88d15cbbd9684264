"""Choices of a split model made otherwise: real runs, of parts that the run has, and no others."""

from __future__ import annotations

import pytest
from pipeline_runs import simulated

from clustersim.scenario import load
from clustersim.studies.what_if.rerun import step_time
from clustersim.studies.what_if.turned import balanced, choices, short, turned

SMALL = {"model.name": "gpt2", "parallel.pp": 4, "cluster.gpus_per_node": 4, "parallel.microbatches": 8}


@pytest.fixture(scope="module")
def run():
    return load("1f1b_gpt2_xl_1x8_a100", SMALL).run()


def test_only_parts_that_a_run_has_are_asked_about(run):
    said = " ".join(choice.what for choice in choices(run.prepared, run.timeline))
    assert "micro-batches" in said
    assert "sequence_parallel" not in said
    assert "overlap_grad_reduce" not in said
    whole = load("ddp_resnet50_1x8_v100").run()
    assert list(choices(whole.prepared, whole.timeline)) == []
    assert turned(whole.prepared, whole.timeline) == []


def test_what_a_choice_saves_is_what_the_changed_scenario_takes(run):
    found = turned(run.prepared, run.timeline)
    assert [one.saving for one in found] == sorted((one.saving for one in found), reverse=True)
    twice = next(one for one in found if one.choice.what == "16 micro-batches instead of 8")
    step = step_time(load("1f1b_gpt2_xl_1x8_a100", SMALL | {"parallel.microbatches": 16}).run().timeline)
    assert twice.step_s == step
    assert twice.saving == pytest.approx(1 - step / 2 / step_time(run.timeline))
    assert twice.saving > 0.05
    assert twice.text == f"16 micro-batches instead of 8: {twice.saving:.1%} less time per sample (run again)"
    assert short(run.timeline)


def test_a_layout_moves_layers_away_from_the_stage_with_the_head(run):
    counts = balanced(run.timeline)
    assert sum(counts) == 12
    assert counts[-1] < 3
    found = {one.choice.what: one.saving for one in turned(run.prepared, run.timeline)}
    assert found[f"layers of the stages {', '.join(map(str, counts))} (layout)"] > 0.05


def test_even_stages_have_no_better_layout():
    assert balanced(simulated([1.0] * 3, [2.0] * 3, 4)) is None
