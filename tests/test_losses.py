"""Losses that never have all logits, and attention of packed documents: closed forms, and where they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clustersim.core.errors import ClusterSimError
from clustersim.core.model import Model
from clustersim.model import model
from clustersim.model.losses import LOSSES, with_loss
from clustersim.model.packing import Packing, with_packing
from clustersim.scenario import load
from clustersim.training.memory import Training, memory

LLAMA = model("llama3-8b", seq_len=4096)
RUN = Training(micro_batch_size=2, dtype="bf16", param_dtype="bf16")


def kernel(made: Model, layer: int, name: str) -> Any:
    return next(kernel for kernel in made.layers[layer].kernels if kernel.name == name)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_multiplied_stays_and_logits_go(loss: str) -> None:
    made = with_loss(LLAMA, loss, 2)
    assert made.flops_per_sample() == pytest.approx(LLAMA.flops_per_sample())
    before = memory(LLAMA, RUN)
    after = memory(made, RUN)
    assert before.logits == 12 * 2 * 4096 * 128_256
    assert after.logits == before.logits * {"chunked": 1 / 8}.get(loss, 0)
    assert after.allocated < before.allocated


def test_ligers_chunks_are_as_many_as_the_vocabulary_is_wider() -> None:
    logits = kernel(with_loss(LLAMA, "liger", 2), -1, "logits")
    assert (logits.repeat, logits.m * 2) == (32, 256)  # of 8,192 tokens, ceil(128,256 / 4,096) = 32 chunks
    assert logits.working[0] == 2 * 4096 / 32 * 128_256
    odd = kernel(with_loss(LLAMA, "liger", 3), -1, "logits")
    assert odd.repeat == 24  # 12,288 tokens in chunks of 512


def test_chunks_hold_an_eighth_of_the_logits_and_take_the_same_products() -> None:
    made = with_loss(LLAMA, "chunked", 2)
    logits, plain = kernel(made, -1, "logits"), kernel(LLAMA, -1, "logits")
    assert (logits.repeat, logits.m * 8, logits.launches) == (8, plain.m, 8 * plain.launches)
    assert (logits.flops, logits.backward_flops) == (plain.flops, plain.backward_flops)
    assert logits.saved == 4096 * 4096  # the gradient of the input, a token and its width


def test_cut_cross_entropy_computes_the_logits_twice() -> None:
    cost = {loss: load("single_gpt2_1x1_a100", {"model.loss": loss}).prepare().cost for loss in ("cut", "liger")}
    plain = load("single_gpt2_1x1_a100").prepare().cost
    product = 2.0 * 4 * 1024 * 50257 * 768
    assert cost["cut"].backward_flops[-1] - plain.backward_flops[-1] == pytest.approx(product)
    assert cost["liger"].backward_flops[-1] == pytest.approx(plain.backward_flops[-1])


def test_a_frozen_head_makes_no_weight_gradient_in_chunks() -> None:
    scenario = load("lora_qwen_7b_1x1_a100", {"model.loss": "liger", "model.seq_len": 8192})
    logits = kernel(scenario.prepare().model, -1, "logits")
    assert (logits.halves, logits.backward_launches) == ("I", logits.repeat)
    eager = load("lora_qwen_7b_1x1_a100", {"model.seq_len": 8192}).prepare().memory
    assert scenario.prepare().memory.allocated < eager.allocated - 6 * 8192 * 151_936


@pytest.mark.parametrize("length", [256, 1024, 4096])
def test_documents_of_one_length_cost_what_samples_of_it_cost(length: int) -> None:
    packed = kernel(with_packing(LLAMA, Packing(mean=length)), 1, "attention")
    alone = kernel(model("llama3-8b", seq_len=length), 1, "attention")
    assert packed.flops == pytest.approx(alone.flops * 4096 / length)
    assert packed.backward_flops == pytest.approx(alone.backward_flops * 4096 / length)
    assert packed.saved == pytest.approx(alone.saved * 4096 / length)
    assert (packed.document or packed.seq) == length


def test_attention_goes_with_the_mean_square() -> None:
    spread = Packing(mean=512, std=512)
    assert spread.length == 1024
    assert with_packing(LLAMA, spread).layers[1].kernels == with_packing(LLAMA, Packing(mean=1024)).layers[1].kernels


def test_a_window_within_documents_changes_nothing() -> None:
    windowed = model("mistral-7b-v0.1", seq_len=16_384)
    packed = with_packing(windowed, Packing(mean=12_000))
    whole = kernel(windowed, 1, "attention")
    assert kernel(packed, 1, "attention") == replace(whole, document=12_000.0)
    assert kernel(with_packing(windowed, Packing(mean=1000)), 1, "attention").flops < whole.flops


@pytest.mark.parametrize(
    ("scenario", "changes", "message"),
    [
        ("tp8_pp4_llama3_70b_32x8_h100", {"model.loss": "liger"}, "is not played where [parallel] splits the model"),
        (
            "single_gpt2_1x1_a100",
            {"model.packing.mean": 10, "model.attention": "eager"},
            "packing needs fused attention",
        ),
        ("single_gpt2_1x1_a100", {"model.packing.mean": 0}, "expected"),
        ("ddp_resnet50_1x8_v100", {"model.loss": "cut"}, "is of a head that predicts words"),
        ("tp8_cp16_pp16_llama3_405b_2048x8_h100", {"model.packing.mean": 500}, "packing is not played with cp = 16"),
    ],
)
def test_what_is_not_played_is_refused(scenario: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ClusterSimError) as error:
        load(scenario, changes).prepare()
    assert message in str(error.value)
