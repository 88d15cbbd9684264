"""Memory of a step: closed forms first, then what published batch sizes say."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.core.device import device, devices
from clustersim.core.errors import ScenarioError
from clustersim.core.holding import Holding, always
from clustersim.core.memory_states import UNLIKELY, likelihood
from clustersim.core.memory_use import CONTEXT_BYTES
from clustersim.core.mesh import Mesh
from clustersim.core.model import Layer, Model, Tensor
from clustersim.core.optimizers import OPTIMIZERS
from clustersim.core.paths import data_path
from clustersim.core.units import format_bytes
from clustersim.model import from_hf, transformer
from clustersim.model.kernels import saved_by_operator
from clustersim.model.seconds.base import CHECKPOINTING
from clustersim.training import memory as of_memory
from clustersim.training.strategies import STRATEGIES


def memory(model, **training):
    return of_memory.memory(model, of_memory.Training(**training))


def held(model, kind, **knobs):
    row = STRATEGIES[kind]
    return row.holding(model, Mesh(np.arange(8), 8), row.config(**knobs))


N = 1_000_000
BLOCK = Layer("b", "block", (Tensor("w", N),), (), activation_bytes=340.0, boundary_bytes=10.0)
TEN_BLOCKS = Model("ten", "test", (BLOCK,) * 10, seq_len=1)
BARE = Model("bare", "test", (Layer("w", "linear", (Tensor("w", N),), ()),))


def test_fp32_adam_holds_sixteen_bytes_a_parameter() -> None:
    use = memory(BARE, micro_batch_size=1, dtype="fp32", optimizer="adam", optimizer_impl="fused")
    assert use.allocated == 16 * N
    assert use.total == 16 * N + CONTEXT_BYTES


def test_mixed_precision_with_master_weights_holds_sixteen_bytes_a_parameter() -> None:
    use = memory(
        BARE, micro_batch_size=1, param_dtype="bf16", optimizer="adamw", optimizer_impl="fused", master_weights=True
    )
    assert use.allocated == 16 * N


def test_a_foreach_adam_step_peaks_one_parameter_list_higher_where_activations_are_small() -> None:
    fused = memory(BARE, micro_batch_size=1, dtype="fp32", optimizer="adam", optimizer_impl="fused")
    foreach = memory(BARE, micro_batch_size=1, dtype="fp32", optimizer="adam", optimizer_impl="foreach")
    assert foreach.allocated - fused.allocated == 4 * N


def test_a_compiled_loss_holds_logits_and_their_gradient_alone() -> None:
    head = Layer("head", "head", (), (), activation_bytes=100.0)
    eager, compiled = (
        memory(Model("m", "test", (head,)), micro_batch_size=3, dtype="bf16", param_dtype="bf16", compiled=compiled)
        for compiled in (False, True)
    )
    assert (eager.logits, compiled.logits) == (3 * 100 * 6, 3 * 100 * 2)


def test_memory_of_a_notebook_is_one_line() -> None:
    """A cell that ended in ``result.memory`` showed every moment and every array of a step."""
    use = memory(TEN_BLOCKS, micro_batch_size=1)
    assert len(repr(use)) < 100
    assert format_bytes(use.total) in repr(use)
    assert use.peak in repr(use)


def test_more_is_reserved_than_allocated_and_more_shown_than_reserved() -> None:
    use = memory(TEN_BLOCKS, micro_batch_size=3)
    assert use.allocated < use.reserved < use.shown - use.context


def test_ddp_buckets_double_the_gradients_and_views_save_them() -> None:
    single = memory(BARE, micro_batch_size=1, dtype="fp32")
    ddp = memory(BARE, micro_batch_size=1, dtype="fp32", holding=held(BARE, "ddp"))
    view = memory(BARE, micro_batch_size=1, dtype="fp32", holding=held(BARE, "ddp", gradient_as_bucket_view=True))
    assert ddp.allocated - single.allocated == 4 * N
    assert view.allocated == single.allocated


def test_full_checkpointing_keeps_block_inputs_and_one_whole_block() -> None:
    def kept(policy: str) -> float:
        use = memory(TEN_BLOCKS, micro_batch_size=3, dtype="bf16", param_dtype="bf16", activation_checkpointing=policy)
        return use.activations

    assert kept("none") == 3 * 10 * 340 * 2
    assert kept("full") == 3 * (10 * 10 + 340) * 2


def test_activations_follow_korthikanti_for_a_16_bit_block_with_dropout() -> None:
    config = {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_head": 16,
        "n_layer": 4,
        "n_positions": 512,
        "vocab_size": 1000,
        "activation_function": "gelu",
    }
    model = from_hf(config, attention="flash", implementation="flash")
    use = memory(model, micro_batch_size=2, dtype="fp16", param_dtype="fp16")
    per_block = 34 * 512 * 2 * 1024
    assert use.activations == pytest.approx(4 * per_block, rel=0.1)


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("optimizer", [None, *OPTIMIZERS])
@pytest.mark.parametrize("policy", CHECKPOINTING)
def test_every_part_is_a_size_and_the_total_never_exceeds_their_sum(
    strategy: str, optimizer: str | None, policy: str
) -> None:
    use = memory(
        TEN_BLOCKS,
        micro_batch_size=2,
        optimizer=optimizer,
        activation_checkpointing=policy,
        holding=held(TEN_BLOCKS, strategy),
    )
    assert all(value >= 0 for value in use.parts().values())
    assert use.total <= sum(use.parts().values())
    assert list(use.parts().values()) == sorted(use.parts().values(), reverse=True)


@given(st.integers(1, 64), st.sampled_from(["fp32", "bf16"]), st.sampled_from(CHECKPOINTING))
def test_a_larger_batch_never_needs_less(batch: int, dtype: str, policy: str) -> None:
    small = memory(TEN_BLOCKS, micro_batch_size=batch, dtype=dtype, activation_checkpointing=policy)
    large = memory(TEN_BLOCKS, micro_batch_size=batch + 1, dtype=dtype, activation_checkpointing=policy)
    assert large.allocated >= small.allocated
    assert large.parameters == small.parameters


def test_checkpointing_more_never_keeps_more() -> None:
    model = transformer(4, 512, 8, 256, 1000)
    none, selective, full = (
        memory(model, micro_batch_size=8, activation_checkpointing=policy).activations
        for policy in ("none", "selective", "full")
    )
    assert full < selective < none


def test_a_model_too_large_is_an_answer_that_says_by_how_much_and_what_holds_it() -> None:
    model = from_hf(data_path("data") / "models" / "llama3-8b.json", seq_len=8192)
    verdict = memory(model, micro_batch_size=1, holding=held(model, "ddp"), activation_checkpointing="full").fits(
        device("H100-SXM5-80GB")
    )
    assert not verdict.ok
    assert str(verdict).startswith("does not fit on H100-SXM5-80GB: ")
    assert "optimizer states 59.83 GiB" in str(verdict)
    assert -verdict.spare == verdict.use.total - device("H100").memory_bytes


def test_a_nearly_full_card_is_flagged() -> None:
    model = transformer(12, 768, 12, 1024, 50257)
    card = device("V100-SXM2-16GB")
    sizes = {b: memory(model, micro_batch_size=b, dtype="fp16").fits(card) for b in range(1, 20)}
    assert not sizes[1].pressed
    assert any(verdict.pressed and "above 70 % full" in str(verdict) for verdict in sizes.values())


def test_one_verdict_comes_from_one_range() -> None:
    model = transformer(12, 768, 12, 1024, 50257)
    card = device("V100-SXM2-16GB")
    found = [memory(model, micro_batch_size=b, dtype="fp16").fits(card) for b in range(1, 24)]
    states = [verdict.state for verdict in found]
    assert list(dict.fromkeys(states)) == ["fits", "may run out", "does not fit"]
    for verdict in found:
        least, most = verdict.use.needed_range
        assert least <= verdict.use.needed <= most
        # Of what may fit nothing is said to take more than there is.
        assert max(verdict.shown) <= card.memory_bytes or not verdict.possible
        assert max(verdict.reserved) <= card.memory_bytes - verdict.use.context or not verdict.possible
        assert re.match(rf"{verdict.state}( \(likelihood of running out \d+%\))? on V100-SXM2-16GB", str(verdict))
        assert ("likelihood" in str(verdict)) == (verdict.possible and most > card.memory_bytes)
        assert ("to spare" in str(verdict)) == (most <= card.memory_bytes)  # of what only may fit, the whole need
        assert (verdict.runs_out < UNLIKELY) == verdict.ok == (verdict.state == "fits")
        assert (verdict.use.total > card.memory_bytes) == (not verdict.possible) == (verdict.state == "does not fit")


def test_how_likely_it_is_to_run_out_goes_from_never_to_surely_through_half_at_the_middle() -> None:
    shares = [likelihood((60.0, 90.0), 70.0, room) for room in (95, 90, 80, 70, 65, 60, 50)]
    assert shares == [0.0, 0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_rank_alone_has_no_communicator() -> None:
    alone = replace(memory(BARE, micro_batch_size=1), communicates=False)
    assert alone.shown == alone.reserved + alone.context


@pytest.mark.parametrize(
    ("card", "batch", "dtype", "param_dtype"),
    [
        ("V100-SXM2-16GB", 8, "fp32", "fp32"),
        ("V100-SXM2-16GB", 16, "fp16", "fp16"),
        ("A100-PCIe-40GB", 28, "tf32", "fp32"),
        ("A100-SXM4-80GB", 64, "tf32", "fp32"),
        ("A100-SXM4-80GB", 112, "fp16", "fp16"),
    ],
)
def test_the_largest_batches_people_ran_fill_the_card(card: str, batch: int, dtype: str, param_dtype: str) -> None:
    """Lambda's benchmark chose BERT-large SQuAD batches to fill each GPU."""
    path = data_path("data") / "models" / "bert-large-uncased.json"
    model = from_hf(path, seq_len=384, attention="eager", implementation="eager", head="qa")
    half = param_dtype == "fp16"  # Apex keeps fp32 masters
    use = memory(
        model, micro_batch_size=batch, dtype=dtype, param_dtype=param_dtype, optimizer="adam", master_weights=half
    )
    assert 0.75 < use.fits(device(card)).share < 1.03


def test_unknown_choices_are_one_error_with_the_nearest_name() -> None:
    with pytest.raises(ScenarioError, match=r"unknown optimizer 'adm'.*did you mean 'adam'"):
        memory(BARE, micro_batch_size=1, optimizer="adm")
    with pytest.raises(ScenarioError, match="unknown activation_checkpointing 'ful'"):
        memory(BARE, micro_batch_size=1, activation_checkpointing="ful")
    with pytest.raises(ScenarioError, match="micro_batch_size 0"):
        memory(BARE, micro_batch_size=0)


def test_every_device_has_room_for_a_small_model() -> None:
    model = transformer(12, 768, 12, 512, 50257)
    for part in devices().values():
        assert memory(model, micro_batch_size=1, dtype="fp32").fits(part).possible, part.name


# Over a step


def test_activations_rise_through_forward_and_fall_through_backward_as_gradients_rise() -> None:
    course = memory(TEN_BLOCKS, micro_batch_size=3, dtype="fp32", optimizer="sgd", optimizer_impl="fused").course
    assert course.moments[0] == "fwd b"
    assert course.moments[-1] == "optimizer"
    assert len(course.moments) == 21
    kept = course.parts["activations"]
    gradients = course.parts["gradients"]
    assert (kept[:10] == 3 * 340.0 * 4 * np.arange(1, 11)).all()
    assert (kept[10:20] == kept[:10][::-1]).all()
    assert kept[20] == 0
    assert (gradients[:10] == 0).all()
    assert (gradients[10:20] == 4.0 * N * np.arange(1, 11)).all()


def test_the_peak_is_the_start_of_backward_with_large_activations_and_the_optimizer_without() -> None:
    small = memory(TEN_BLOCKS, micro_batch_size=1, dtype="fp32")
    large = memory(TEN_BLOCKS, micro_batch_size=10**6, dtype="fp32")
    assert small.peak == "optimizer"
    assert large.peak in {"fwd b", "bwd b"}
    assert large.allocated > small.allocated


@given(st.integers(1, 8), st.sampled_from(CHECKPOINTING), st.sampled_from(["single", "ddp"]))
def test_what_is_allocated_is_the_fullest_moment_of_all_parts(batch: int, policy: str, strategy: str) -> None:
    use = memory(
        TEN_BLOCKS, micro_batch_size=batch, activation_checkpointing=policy, holding=held(TEN_BLOCKS, strategy)
    )
    total = np.sum(list(use.course.parts.values()), axis=0)
    assert use.allocated == total.max()
    assert all((column >= 0).all() for column in use.course.parts.values())
    assert all(use.parts()[name] == column.max() for name, column in use.course.parts.items())


def test_a_holding_replaces_what_a_rank_would_keep_whole() -> None:
    n = len(TEN_BLOCKS.layers)
    shard = Holding(
        parameters=100.0,
        updated=25.0,
        masters=0.0,
        state_bytes=4,
        gradients=always(7.0, n),
        gathered=always(5.0, n),
        buffers=always(3.0, n),
    )
    use = memory(TEN_BLOCKS, micro_batch_size=1, dtype="fp32", holding=shard, optimizer_impl="fused")
    assert use.model_states == 100 + 7 + 2 * 4 * 25
    assert (use.gathered, use.buckets) == (5, 3)


def test_selective_checkpointing_keeps_every_second_product_and_none_of_the_experts() -> None:
    """torchtitan 0.3's policy, by hand: of q, k, v, out the first and third, attention's output; a router is computed
    again and not counted, grouped products of experts are not in the list, of a shared expert the gate and the down."""
    seq_len = 64
    config = {
        "model_type": "qwen2_moe",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
    }
    model = from_hf(config, seq_len=seq_len, experts_implementation="grouped_mm")
    block = next(layer for layer in model.layers if layer.kind == "block")
    kept = {block.kernels[i].name for i in saved_by_operator(block.kernels)}
    assert kept == {"q", "v", "attention", "shared_gate", "shared_down"}
    run = {"micro_batch_size": 3, "param_dtype": "bf16", "optimizer": None}
    training = of_memory.Training(activation_checkpointing="selective", **run)
    whole = of_memory.kept_by_layer(model, training)
    inputs = of_memory.kept_by_layer(model, of_memory.Training(activation_checkpointing="full", **run))
    elements = 256 + 64 + 256 + 384 + 256  # q, v, attention, gate, down
    assert max(whole - inputs) == 2 * 3 * seq_len * elements
