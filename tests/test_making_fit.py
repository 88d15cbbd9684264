"""A step that does not fit names what of its recipe would make room, and by how much; bounds hold when it is tried."""

from __future__ import annotations

import re

import pytest

from clustersim import load
from clustersim.core.units import parse_bytes

WHOLE_OF_70B = {
    "run.steps": 1,
    "cluster.nodes": 8,
    "parallel.tp": 8,
    "parallel.pp": 4,
    "parallel.vpp": None,
    "parallel.sequence_parallel": False,
    "parallel.use_distributed_optimizer": False,
    "parallel.overlap_param_gather": False,
    "parallel.global_batch_size": 32,
}


def advice(result) -> str:
    return next((note for note in result.notes if note.startswith("to make room for ")), "")


def test_a_step_that_fits_is_told_nothing():
    assert not advice(load("ddp_resnet50_1x8_v100", {"run.steps": 1}).run())


def test_a_whole_model_that_does_not_fit_is_told_to_shard_or_to_recompute():
    changes = {"run.steps": 1, "strategy.micro_batch_size": 16}
    run = load("ddp_gpt2_xl_2x8_a100", changes).run()
    text = advice(run)
    assert "strategy.micro_batch_size = 8 frees up to " in text
    assert "model.activation_checkpointing = 'full' frees up to " in text
    assert "strategy.kind = 'fsdp' over 16 ranks frees up to " in text


@pytest.mark.parametrize(
    ("field", "value"), [("strategy.micro_batch_size", 8), ("model.activation_checkpointing", "full")]
)
def test_a_change_frees_no_more_than_is_told(field, value):
    changes = {"run.steps": 1, "strategy.micro_batch_size": 16}
    before = load("ddp_gpt2_xl_2x8_a100", changes).run()
    after = load("ddp_gpt2_xl_2x8_a100", changes | {field: value}).run()
    relief = before.memory.allocated - after.memory.allocated
    held = before.memory.at_peak()
    bound = held["activations"] + held["logits"]
    assert 0.25 * bound < relief <= (0.5 if value == 8 else 1.0) * bound * 1.02


def test_sharding_and_splitting_free_no_more_than_is_told():
    run = load("tp8_pp4_llama3_70b_32x8_h100", WHOLE_OF_70B).run()
    told = re.findall(r"([a-z_.]+) = (\S+)(?: over \d+ ranks)? frees up to ([0-9.]+ GiB)", advice(run))
    assert {field for field, *_ in told} == {
        "model.activation_checkpointing",
        "parallel.sequence_parallel",
        "parallel.use_distributed_optimizer",
        "parallel.pp",
    }
    for field, value, at_most in told:
        plain = {"true": True, "'full'": "full", "8": 8}[value]
        after = load("tp8_pp4_llama3_70b_32x8_h100", WHOLE_OF_70B | {field: plain}).prepare().memory
        freed = run.memory.allocated - after.allocated
        bound = parse_bytes(at_most)
        assert 0.5 * bound < freed <= 1.01 * bound, field
