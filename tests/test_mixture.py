"""What a mixture of experts costs: dispatch, combine, imbalance, host and data parallelism add up to the step."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustersim import scenario
from clustersim.explain.mixture import WORDS, MixtureSeconds, mixture


def played(parallel: dict[str, Any], nodes: int = 2) -> MixtureSeconds | None:
    table = {
        "cluster": {"topology": "hgx-h100", "nodes": nodes},
        "model": {"name": "qwen3-30b-a3b", "seq_len": 4096, "dtype": "bf16", "implementation": "fused"},
        "parallel": {"microbatches": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True, **parallel},
        "strategy": {"kind": "ddp", "param_dtype": "bf16", "micro_batch_size": 1},
        "run": {"steps": 1, "jitter": 0.0, "optimizer": "adamw"},
    }
    return mixture(scenario.from_table(table, "mixture.toml").run().timeline)


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
