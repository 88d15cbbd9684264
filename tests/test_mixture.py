"""What a mixture of experts costs: dispatch, combine, imbalance, host and data parallelism add up to the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

import clustersim
from clustersim import scenario
from clustersim.explain.mixture import WORDS, MixtureSeconds, mixture
from clustersim.explain.waterfall import WORDS as WATERFALL


def played(parallel: dict[str, Any], nodes: int = 2) -> MixtureSeconds | None:
    table = {
        "cluster": {"topology": "hgx-h100", "nodes": nodes},
        "model": {"name": "qwen3-30b-a3b", "seq_len": 4096, "dtype": "bf16", "implementation": "fused"},
        "parallel": {"microbatches": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True, **parallel},
        "strategy": {"kind": "ddp", "param_dtype": "bf16", "micro_batch_size": 1},
        "run": {"steps": 1, "jitter": 0.0, "optimizer": "adamw"},
    }
    return mixture(scenario.from_table(table, "mixture.toml").run().timeline)


ONE_NODE = {"cluster.nodes": 1, "parallel.global_batch_size": 16}
BALANCED = {"ep": 16, "dispatcher": "alltoall", "routing": {"kind": "balanced"}}


@pytest.mark.parametrize(
    "parallel",
    [
        BALANCED,
        {"ep": 8, "pp": 2, "dispatcher": "flex", "flex_backend": "deepep", "routing": {"kind": "uniform"}},
        {"ep": 16, "dispatcher": "alltoall", "routing": {"kind": "skewed", "skew": 3.0}},
    ],
    ids=["balanced", "pipeline", "skewed"],
)
def test_the_parts_add_up_to_the_step(parallel: dict[str, Any]) -> None:
    cost = played(parallel)
    assert cost is not None
    assert set(cost.parts) <= set(WORDS)
    assert math.fsum(cost.parts.values()) == pytest.approx(cost.step, rel=1e-9)
    assert cost.parts["dispatch"] > 0
    assert cost.parts["combine"] > 0
    assert cost.parts.get("others", 0.0) >= -1e-9


def test_skewed_routing_costs_imbalance_apart_from_bytes() -> None:
    balanced, skewed = (played(BALANCED | {"routing": routing}) for routing in ({"kind": "balanced"}, SKEWED))
    assert balanced is not None
    assert skewed is not None
    assert balanced.parts.get("imbalance", 0.0) < 0.02 * balanced.step
    assert skewed.parts["imbalance"] > 0.05 * skewed.step
    assert skewed.step > balanced.step


SKEWED = {"kind": "skewed", "skew": 6.0}


def test_a_dense_model_has_no_experts_to_pay_for() -> None:
    table = {
        "cluster": {"topology": "hgx-h100", "nodes": 1},
        "model": {"name": "llama-3-8b", "seq_len": 2048, "dtype": "bf16"},
        "parallel": {"tp": 8},
        "strategy": {"kind": "ddp", "micro_batch_size": 1},
        "run": {"steps": 1},
    }
    assert mixture(scenario.from_table(table, "dense.toml").run().timeline) is None


def test_the_host_of_a_mixture_is_named_as_the_two_lines_of_the_waterfall_that_it_is_the_sum_of():
    run = clustersim.load("ep8_mixtral_8x7b_8x8_h100", ONE_NODE).run()
    said = run.explain()
    lost = said.waterfall[0].lost
    assert said.mixture.parts["host"] == pytest.approx(lost["host"] + lost["launch"])
    assert WATERFALL["launch"] == "launch of kernels"
    assert WORDS["host"] == f"{WATERFALL['host']} and {WATERFALL['launch']}"
    assert f"{WORDS['host']} {said.mixture.parts['host'] / said.mixture.step:.1%}" in str(said.mixture)
    assert ", host " not in str(said.mixture).replace(WORDS["host"], "")


def test_skewed_routing_is_the_cause_and_no_gpu_is_called_slow():
    routing = {"kind": "skewed", "skew": 3}
    run = clustersim.load("ep8_mixtral_8x7b_8x8_h100", {**ONE_NODE, "parallel.routing": routing}).run()
    said = run.explain()
    assert said.stalls["cause"][0] == "uneven experts"
    assert "because routing is skewed: ranks wait for those whose experts get the most tokens" in said.verdict
    assert said.causes[0].startswith("Routing is skewed: some experts get more tokens than others, and ranks wait for")
    assert " experts', which takes it " in said.causes[0]
    everything = " ".join(said.causes + said.warnings)
    assert "several kinds" not in everything
    assert " is slow" not in everything
    assert "times the median of its peers', by the tokens that its experts get" in said.warnings[0]


def test_a_slow_gpu_of_a_mixture_is_still_called_slow():
    changes = {**ONE_NODE, "cluster.slow": [{"ranks": [3], "speed": 0.7}]}
    said = clustersim.load("ep8_mixtral_8x7b_8x8_h100", changes).run().explain()
    assert (said.stalls["cause"][0], said.stalls["subject"][0]) == ("slow rank", "rank 3")
    assert "uneven experts" not in said.stalls["cause"].tolist()
    assert not any("experts get" in text for text in (said.verdict, *said.causes, *said.warnings))


def test_run_and_the_page_of_a_run_say_what_experts_cost(clustersim, tmp_path) -> None:
    edits = [f"--set={key}={value}" for key, value in {**ONE_NODE, "run.steps": 1}.items()]
    few = "--set=model.options={layers = 4}"
    page = tmp_path / "page.html"
    done = clustersim("run", "ep8_mixtral_8x7b_8x8_h100", *edits, few, "--report", page)
    assert done.returncode == 0, done.stderr
    assert "what experts cost: compute" in " ".join(done.stdout.split())
    text = page.read_text()
    assert "What experts cost" in text
    assert "<td>dispatch</td>" in text
