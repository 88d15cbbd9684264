"""Activations on the host: who waits for copies, what stays on the GPU, and where it is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from player import play, toy_cost, toy_model

from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Compute
from clustersim.core.timeline import step_ends
from clustersim.scenario import load
from clustersim.training.strategies.single import SingleConfig, build

LAYERS = 8
FORWARD, BACKWARD = 1.0, 2.0


def step(copy: float, passes: int = 1) -> tuple[float, list[Compute]]:
    """Seconds of a step whose layers' copies take so long each way, and its ops."""
    model = toy_model([[10]] * LAYERS)
    cost = toy_cost(model, FORWARD, BACKWARD, optimizer=0.0, offloaded=np.full(LAYERS, copy), offload_rates=(1.0, 1.0))
    config = SingleConfig(gradient_accumulation_steps=passes)
    program = build(model, cost, Mesh(np.arange(1), 1), config, 1, 0)
    ops = [op for op in program.roles[0].ops if isinstance(op, Compute)]
    return float(step_ends(play(program, lambda op: 0.0))[0, 0]), ops


@pytest.mark.parametrize("copy", [0.1, 0.5, 1.0])
def test_copies_that_are_shorter_than_their_layers_are_hidden_but_the_last(copy: float) -> None:
    """The last layer's goes and comes back with nothing beside it."""
    seconds, _ = step(copy)
    assert seconds == pytest.approx(LAYERS * (FORWARD + BACKWARD) + 2 * copy)


def test_copies_that_are_longer_are_what_takes_the_time() -> None:
    seconds, ops = step(5.0)
    assert seconds == pytest.approx(FORWARD + 2 * LAYERS * 5.0 + BACKWARD)
    sent = [op for op in ops if op.phase == "memcpy"]
    assert len(sent) == 2 * LAYERS
    assert {op.stream for op in sent} == {"d2h", "h2d"}


def test_every_micro_batch_goes_and_comes_back() -> None:
    _, ops = step(0.5, passes=3)
    assert sum(op.nbytes for op in ops if op.phase == "memcpy") == 3 * 2 * LAYERS * 0.5


def test_two_layers_activations_are_there_at_once() -> None:
    changes = {"model.activation_checkpointing": "none", "model.seq_len": 1024}
    plain = load("lora_qwen_7b_1x1_a100", changes).prepare()
    away = load("lora_qwen_7b_1x1_a100", {**changes, "model.activation_offloading": "20 GB/s"}).prepare()
    block = plain.memory.course.parts["activations"][5] - plain.memory.course.parts["activations"][4]
    assert away.memory.course.parts["activations"][5] == pytest.approx(2 * block)
    assert away.memory.logits == plain.memory.logits
    assert away.cost.offloaded is not None
    assert away.cost.offloaded[5] == pytest.approx(block)


def test_copies_go_at_the_rate_of_the_machines_own_links_or_at_the_one_that_is_given() -> None:
    for text, rate in ((True, 0.88 * 31.5e9), ("10 GB/s", 10e9)):
        away = load("lora_qwen_7b_1x1_a100", {"model.activation_offloading": text}).prepare()
        assert away.cost.offload_rates == pytest.approx((rate, rate))


@pytest.mark.parametrize(
    ("scenario", "changes", "message"),
    [
        ("ps_async_1x8", {}, "is not played with strategy 'parameter_server'"),
        ("tp8_pp4_llama3_70b_32x8_h100", {}, "is not played where [parallel] splits the model"),
        ("single_gpt2_1x1_a100", {"model.activation_offloading": 20}, "20 is a bare number"),
        ("single_gpt2_1x1_a100", {"model.activation_offloading": False}, "leave it out where nothing is copied"),
    ],
)
def test_what_is_not_played_is_refused(scenario: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        load(scenario, {"model.activation_offloading": "20 GB/s", **changes}).prepare()
    assert message in str(error.value)
