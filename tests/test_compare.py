"""Every strategy on one machine and model: the table, its reasons, and the shipped scenarios of data parallelism."""

from __future__ import annotations

import json

import pytest

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.studies.what_if.comparison import VARIANTS, compare
from clustersim.training.strategies import STRATEGIES

SMALL = {"run.steps": 2, "model.name": "alexnet", "cluster.gpus_per_node": 2}
FIGURES = ("step_time_s", "exposed_communication_s", "peak_memory_bytes", "bytes_sent_per_gpu", "fits")


@pytest.fixture(scope="module")
def rows():
    return compare("ddp_resnet50_1x8_v100", SMALL)


def test_every_strategy_has_a_row_and_every_variant_is_of_a_known_one(rows):
    assert {row.strategy for row in rows} == set(STRATEGIES)
    assert set(VARIANTS) <= set(STRATEGIES)
    assert len({(row.strategy, row.variant) for row in rows}) == len(rows)


def test_the_scenarios_own_strategy_is_a_row_with_the_figures_of_a_run(rows):
    (own,) = [row for row in rows if row.own]
    assert own.strategy == "ddp"
    result = scenario.load("ddp_resnet50_1x8_v100", SMALL).run()
    assert own.step_time_s == result.summary["step_time_s"]
    assert own.peak_memory_bytes == result.memory.total


def test_what_runs_has_all_figures_and_what_does_not_a_reason(rows):
    for row in rows:
        known = [getattr(row, name) is not None for name in FIGURES]
        assert all(known) or (not any(known) and row.reason), row
        assert row.reason or row.fits


def test_one_gpu_without_communication_is_the_fastest_step(rows):
    alone = next(row for row in rows if row.strategy == "single")
    assert alone.bytes_sent_per_gpu == alone.exposed_communication_s == 0
    # A server on a CPU takes the optimizer step off the GPU, which alone has to do it.
    assert all(row.step_time_s >= 0.9 * alone.step_time_s for row in rows if row.step_time_s)


def test_a_strategy_that_cannot_run_says_why_in_its_row():
    rows = compare("ddp_resnet50_1x8_v100", SMALL | {"cluster.topology": "hgx-a100", "cluster.nodes": 2})
    broken = next(row for row in rows if row.strategy == "data_parallel")
    assert broken.step_time_s is None
    assert broken.reason.startswith("torch.nn.DataParallel is one process on one node")
    assert sum(row.step_time_s is None for row in rows) == 1


def test_a_model_that_does_not_fit_is_a_row_that_says_so():
    changes = {"model.name": "gpt2-xl", "cluster.gpus_per_node": 2, "strategy.micro_batch_size": 1, "run.steps": 1}
    rows = compare("ddp_resnet50_1x8_v100", changes)
    own = next(row for row in rows if row.own)
    assert own.fits is False
    assert "does not fit" in own.reason


def test_a_scenario_that_cannot_be_read_is_one_error():
    with pytest.raises(ScenarioError, match="no scenario"):
        compare("ddp_resnet51")


def test_the_command_prints_a_table_or_json(clustersim):
    options = ["--set", "run.steps=1", "--set", "model.name=alexnet", "--set", "cluster.gpus_per_node=2"]
    done = clustersim("compare-strategies", "ddp_resnet50_1x8_v100", *options, "--json")
    assert done.returncode == 0
    table = json.loads(done.stdout)["rows"]
    assert {row["strategy"] for row in table} == set(STRATEGIES)
    text = clustersim("compare-strategies", "ddp_resnet50_1x8_v100", *options)
    assert text.returncode == 0
    assert all(kind in text.stdout for kind in STRATEGIES)


@pytest.mark.parametrize(("steps", "fewer"), [(4, True), (3, False)])
def test_a_row_of_fewer_steps_than_the_run_has_says_so(clustersim, steps, fewer):
    """The row of the scenario as written was 334.1 ms where its run said 333.9, without a word."""
    options = ["--set", f"run.steps={steps}", "--set", "model.name=alexnet", "--set", "cluster.gpus_per_node=2"]
    told = " ".join(clustersim("compare-strategies", "ddp_resnet50_1x8_v100", *options).stdout.split())
    assert ("3 steps are played of each, where `run` plays the scenario's 4" in told) == fewer
    (own,) = (
        row
        for row in json.loads(clustersim("compare-strategies", "ddp_resnet50_1x8_v100", *options, "--json").stdout)[
            "rows"
        ]
        if row["own"]
    )
    run = json.loads(clustersim("run", "ddp_resnet50_1x8_v100", *options, "--json").stdout)
    assert (own["step_time_s"] == run["step_time_s"]) != fewer


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ps_sync_cpu_1x8", "server at node0/cpu0"),
        ("ps_async_1x8", "staleness of reads"),
        ("dp_torch_1x8", "torch"),
        ("sgd_steps_1x8", "phase exchange gradients"),
    ],
)
def test_shipped_scenarios_of_each_kind_run(clustersim, name, said):
    done = clustersim("run", name, "--set", "cluster.gpus_per_node=2", "--set", "run.steps=3")
    assert done.returncode == 0, done.stderr
    assert said in done.stdout or name == "dp_torch_1x8"
    assert "step time" in done.stdout


def test_forms_of_the_same_kind_reduce_in_the_scenarios_dtype_and_others_are_named(clustersim, tmp_path):
    """FSDP reducing in bf16 stood beside the scenario's own in fp32, 25 % less sent, without a word."""
    path = tmp_path / "small.toml"
    path.write_text(
        """
        cluster = {topology = "dgx-1v", nodes = 1, gpus_per_node = 2}
        model = {name = "gpt2", seq_len = 128}
        strategy = {kind = "fsdp", param_dtype = "bf16", reduce_dtype = "fp32"}
        run = {steps = 2}
        """
    )
    done = clustersim("compare-strategies", str(path), "--json")
    assert done.returncode == 0, done.stderr
    rows = {(row["strategy"], row["variant"]): row for row in json.loads(done.stdout)["rows"]}
    assert rows["fsdp", "SHARD_GRAD_OP"]["gradients_in"] == rows["fsdp", "as written"]["gradients_in"] == "fp32"
    assert rows["zero", "stage 2"]["gradients_in"] == "bf16"
    told = " ".join(clustersim("compare-strategies", str(path)).stdout.split())
    assert "bf16 of zero stage 1, zero stage 2, zero stage 3: half the bytes" in told
