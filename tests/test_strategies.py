"""Strategies against closed forms, then a contract suite over the registry."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from player import play, toy_cost, toy_model

from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.model import Tensor
from clustersim.core.program import Collective, Compute, seconds
from clustersim.model import from_hf
from clustersim.testing import check_strategy
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.buckets import ready_order
from clustersim.training.strategies.ddp import MIB, DDPConfig, buckets, build
from clustersim.training.strategies.single import SingleConfig
from clustersim.training.strategies.single import build as build_single

QUARTER = MIB // 4  # fp32 elements of one MiB


def mesh(n: int) -> Mesh:
    return Mesh(np.arange(n), n)


def names(program) -> list[str]:
    return [op.name for op in program.roles[0].ops]


def seconds_per_byte(rate: float):
    return lambda op: op.nbytes / rate


# --- buckets -----------------------------------------------------------------------------------------------------

SIZES = st.lists(st.lists(st.integers(1, 12 * QUARTER), max_size=5), min_size=1, max_size=8).filter(lambda x: any(x))


@given(
    sizes=SIZES,
    cap=st.none() | st.floats(0.1, 40),
    unused=st.booleans(),
    static=st.booleans(),
    dtype=st.sampled_from(["fp32", "bf16"]),
    iteration=st.integers(1, 3),
    tied=st.booleans(),
)
def test_buckets_hold_every_parameter_once_and_close_at_their_limit(sizes, cap, unused, static, dtype, iteration, tied):
    model = toy_model([s or [7] for s in sizes], tied=tied)
    config = DDPConfig(bucket_cap_mb=cap, find_unused_parameters=unused, static_graph=static, param_dtype=dtype)
    layout = buckets(model, config, iteration)
    parameters = {t.name: t.numel for layer in model.layers for t in layer.tensors if not t.tied_to}
    held = [name for bucket in layout for name in bucket.names]
    assert sorted(held) == sorted(parameters)
    element = 4 if dtype == "fp32" else 2
    assert sum(b.nbytes for b in layout) == model.parameters * element
    if config.rebuilds and iteration == 1:
        assert len(layout) == 1
        return
    filled = layout if config.rebuilds else layout[::-1]
    for i, bucket in enumerate(filled[:-1]):
        limit = config.limits[0] if i == 0 else config.limits[1]
        last = parameters[bucket.names[-1]] * element
        assert bucket.nbytes >= limit > bucket.nbytes - last


def test_rebuilt_buckets_follow_reverse_registration_and_start_with_one_mebibyte():
    model = toy_model([[30 * QUARTER, QUARTER], [10 * QUARTER, 20 * QUARTER], [QUARTER // 2, QUARTER // 2]])
    layout = buckets(model, DDPConfig(), 2)
    assert [b.names for b in layout] == [("l2.t1", "l2.t0"), ("l1.t1", "l1.t0"), ("l0.t1", "l0.t0")]
    assert [b.nbytes / MIB for b in layout] == [1, 30, 31]


def test_an_explicit_cap_also_limits_the_first_bucket():
    model = toy_model([[QUARTER] * 8])
    assert [len(b.names) for b in buckets(model, DDPConfig(), 2)] == [1, 7]
    assert [len(b.names) for b in buckets(model, DDPConfig(bucket_cap_mb=25), 2)] == [8]
    assert [len(b.names) for b in buckets(model, DDPConfig(bucket_cap_mb=3), 2)] == [3, 3, 2]
    assert [len(b.names) for b in buckets(model, DDPConfig(bucket_cap_mb=3, first_bucket_bytes=MIB), 2)] == [1, 3, 3, 1]


def test_with_find_unused_parameters_the_small_bucket_is_launched_last():
    model = toy_model([[QUARTER] * 4])
    layout = buckets(model, DDPConfig(find_unused_parameters=True), 1)
    assert [b.names for b in layout] == [("l0.t1", "l0.t2", "l0.t3"), ("l0.t0",)]
    assert layout == buckets(model, DDPConfig(find_unused_parameters=True), 9)
    assert len(buckets(model, DDPConfig(find_unused_parameters=True, static_graph=True), 1)) == 1


def test_a_tied_tensor_is_ready_only_in_the_earliest_layer_that_uses_it():
    assert [[t.name for t in tensors] for tensors in ready_order(toy_model([[3], [4], [5]], tied=True))] == [
        ["l0.t0"],
        ["l1.t0"],
        ["l2.t0"],
    ]


def test_opts_projection_out_is_ready_first_and_alone_in_its_bucket():
    """Sizes are those that torch 2.13's own DDP rebuilds (``rebuilt_bucket_sizes``) for transformers' class."""
    config = {
        "model_type": "opt",
        "vocab_size": 500,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "ffn_dim": 4096,
        "num_attention_heads": 16,
        "max_position_embeddings": 2048,
        "word_embed_proj_dim": 512,
        "do_layer_norm_before": False,
    }
    layout = buckets(from_hf(config, seq_len=8), DDPConfig(), 2)
    assert [b.nbytes for b in layout] == [2097152, 33583104, 33591296, 29396992, 15716352]
    assert layout[0].names == ("model.decoder.project_out.weight",)


MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("cap", "sizes"),
    [
        (None, [2048000, 29362176, 58720256, 32002048, 58720256, 4689920]),
        (10, [31410176, 58720256, 32002048, 58720256, 4689920]),
    ],
)
def test_experts_of_transformers_5_fill_buckets_with_two_tensors_a_block(cap, sizes):
    """Sizes are those that torch 2.13's own DDP rebuilds for transformers 5's class. There a norm's gradient is ready
    behind its MLP's: two norms of 2 KiB are a bucket later."""
    model = from_hf(MIXTRAL, seq_len=8, experts_joined=True)
    layout = buckets(model, DDPConfig(bucket_cap_mb=cap), 2)
    assert [b.nbytes for b in layout] == pytest.approx(sizes, abs=4096)
    apart = from_hf(MIXTRAL, seq_len=8)
    assert apart.parameters == model.parameters
    assert len(buckets(apart, DDPConfig(bucket_cap_mb=cap), 2)) == (8 if cap is None else 17)


# --- DDP's schedule ----------------------------------------------------------------------------------------------


def test_the_first_iteration_overlaps_nothing_and_later_ones_hide_all_but_the_last_bucket():
    model = toy_model([[8 * QUARTER]] * 4)
    cost = toy_cost(model, per_tensor=0.0, optimizer=0.0)
    config = DDPConfig(bucket_cap_mb=8, gradient_as_bucket_view=True)
    timeline = play(build(model, cost, mesh(2), config, 2, 0), seconds_per_byte(8 * MIB / 1e-3))
    ends = [max(timeline.row_end[[timeline.ops[o].step == s for o in timeline.row_op]]) for s in (0, 1)]
    compute = 4 * 1e-3 + 4 * 2e-3
    assert ends[0] == pytest.approx(compute + 4e-3)  # 32 MiB at 8 MiB per ms, all exposed
    assert ends[1] - ends[0] == pytest.approx(compute + 1e-3)  # one 8 MiB bucket is left when backward ends


def test_copies_into_and_out_of_buckets_cost_per_tensor_and_per_byte():
    model = toy_model([[QUARTER, QUARTER]] * 2)
    cost = toy_cost(model, grad_copy_bandwidth=4e9, per_tensor=1e-4)
    ends = {}
    for view in (False, True):
        config = DDPConfig(gradient_as_bucket_view=view)
        ends[view] = play(build(model, cost, mesh(1), config, 1, 0), seconds_per_byte(1e9)).makespan
    # in and out: a read and a write each of 4 MiB, and four tensors copied one by one
    assert ends[False] - ends[True] == pytest.approx(2 * 4 * 1e-4 + 4 * 4 * MIB / 4e9)


def test_a_block_of_several_buckets_launches_the_first_before_its_backward_ends():
    model = toy_model([[30 * QUARTER, 10 * QUARTER]])
    config = DDPConfig(first_bucket_bytes=MIB, gradient_as_bucket_view=True)
    program = build(model, toy_cost(model), mesh(2), config, 2, 0)
    ops = [op for op in program.roles[0].ops if op.step == 1]
    backward = [op.duration for op in ops if op.phase == "backward"]
    assert backward == pytest.approx([2e-3 * 10 / 40, 2e-3 * 30 / 40])
    assert [op.name for op in ops] == [
        "fwd l0",
        "bwd l0",
        "all_reduce bucket 0",
        "bwd l0",
        "all_reduce bucket 1",
        "optimizer",
    ]


def test_buckets_are_launched_in_order_even_when_a_later_one_is_full_first():
    # The last layer's tensor is also used by the first layer, so the bucket that is to go first is full last.
    plain = toy_model([[8 * QUARTER]] * 3)
    user = replace(plain.layers[0], tensors=(*plain.layers[0].tensors, Tensor("user", 8 * QUARTER, tied_to="l2.t0")))
    model = replace(plain, layers=(user, *plain.layers[1:]))
    config = DDPConfig(find_unused_parameters=True, bucket_cap_mb=8, gradient_as_bucket_view=True)
    assert names(build(model, toy_cost(model), mesh(2), config, 1, 0))[3:] == [
        "bwd l2",
        "bwd l1",
        "bwd l0",
        "all_reduce bucket 0",
        "all_reduce bucket 1",
        "bwd l0",
        "all_reduce bucket 2",
        "all_reduce unused-parameter bitmap",
        "optimizer",
    ]


def test_finding_unused_parameters_reduces_one_int32_per_tensor():
    model = toy_model([[QUARTER]] * 3)
    for static, expected in ((False, [12.0]), (True, [])):
        config = DDPConfig(find_unused_parameters=True, static_graph=static)
        ops = build(model, toy_cost(model), mesh(2), config, 1, 0).roles[0].ops
        assert [op.nbytes for op in ops if isinstance(op, Collective) and op.dtype == "int32"] == expected


def test_buffers_are_broadcast_before_the_first_forward_of_a_step_only():
    model = toy_model([[QUARTER]] * 2, buffers=100)
    program = build(model, toy_cost(model), mesh(4), DDPConfig(gradient_accumulation_steps=3), 2, 0)
    ops = program.roles[0].ops
    sent = [i for i, op in enumerate(ops) if op.name == "broadcast buffers"]
    assert len(sent) == 2
    assert all(ops[i].nbytes == 800.0 and sent[k] in ops[sent[k] + 1].after for k, i in enumerate(sent))
    assert ops[sent[1]].after == (sent[1] - 1,)
    assert "broadcast buffers" not in names(
        build(model, toy_cost(model), mesh(4), DDPConfig(broadcast_buffers=False), 2, 0)
    )


def test_no_sync_reduces_once_per_step():
    model = toy_model([[QUARTER]] * 3)
    program = build(model, toy_cost(model), mesh(4), DDPConfig(gradient_accumulation_steps=4), 3, 0)
    ops = program.roles[0].ops
    for step in range(3):
        mine = [op for op in ops if op.step == step]
        assert sum(op.nbytes for op in mine if isinstance(op, Collective)) == model.parameters * 4
        assert sum(op.phase == "forward" for op in mine) == 4 * 3
        assert sum(op.duration for op in mine if op.phase == "backward") == pytest.approx(4 * 3 * 2e-3)


def test_a_compression_hook_halves_the_bytes_and_pays_for_casts():
    model = toy_model([[QUARTER]] * 3)
    plain = build(model, toy_cost(model), mesh(4), DDPConfig(), 1, 0)
    hooked = build(model, toy_cost(model), mesh(4), DDPConfig(comm_hook="fp16_compress"), 1, 0)
    sent = [[op for op in p.roles[0].ops if isinstance(op, Collective)] for p in (plain, hooked)]
    assert sum(op.nbytes for op in sent[1]) == sum(op.nbytes for op in sent[0]) / 2
    assert {op.dtype for op in sent[1]} == {"fp16"}
    assert any(n.startswith("uncast") for n in names(hooked))
    same = build(model, toy_cost(model), mesh(4), DDPConfig(comm_hook="bf16_compress", param_dtype="bf16"), 1, 0)
    assert not any(n.startswith("uncast") for n in names(same))


def test_the_optimizer_starts_after_the_last_all_reduce():
    model = toy_model([[8 * QUARTER]] * 3)
    for config in (
        DDPConfig(),
        DDPConfig(gradient_as_bucket_view=True),
        DDPConfig(comm_hook="fp16_compress"),
        DDPConfig(find_unused_parameters=True, gradient_as_bucket_view=True),
    ):
        timeline = play(build(model, toy_cost(model), mesh(2), config, 2, 0), lambda op: 0.1)
        for step in (0, 1):
            rows = [
                (timeline.ops[o], s, e)
                for o, s, e in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
                if timeline.ops[o].step == step
            ]
            optimizer = next(s for op, s, _ in rows if op.phase == "optimizer")
            assert optimizer >= max(e for op, _, e in rows if op.phase != "optimizer")


def test_gradient_accumulation_on_one_gpu_repeats_the_passes_and_adds_gradients():
    model = toy_model([[QUARTER]] * 2)
    cost = toy_cost(model, grad_copy_bandwidth=1e9)
    one, three = (
        play(build_single(model, cost, mesh(1), SingleConfig(gradient_accumulation_steps=a), 1, 0), float).makespan
        for a in (1, 3)
    )
    assert one == pytest.approx(2 * 3e-3 + 5e-4)
    assert three - one == pytest.approx(2 * (2 * 3e-3 + 3 * 2 * MIB / 1e9))


# --- jitter ------------------------------------------------------------------------------------------------------


def test_jitter_keeps_the_mean_and_makes_a_synchronous_step_wait_for_the_slowest():
    model = toy_model([[QUARTER]])
    steady, shaky = (toy_cost(model, jitter=j) for j in (0.0, 0.02))
    n = 256
    steps = 40
    program = build(model, shaky, mesh(n), DDPConfig(), steps, 7)
    role = program.roles[0]
    forward = np.array([seconds(role, op) for op in role.ops if op.phase == "forward"])
    assert forward.shape == (steps, n)
    assert forward.mean() == pytest.approx(1e-3, rel=1e-3)
    assert forward.std() == pytest.approx(2e-5, rel=0.05)
    assert forward.max(axis=1).mean() == pytest.approx(1e-3 * (1 + 0.02 * np.sqrt(2 * np.log(n))), rel=0.02)
    still = build(model, steady, mesh(n), DDPConfig(), 1, 7).roles[0]
    assert isinstance(seconds(still, still.ops[0]), float)


def test_the_same_seed_gives_the_same_program_and_another_seed_another():
    model = toy_model([[QUARTER]])
    runs = [build(model, toy_cost(model, jitter=0.1), mesh(4), DDPConfig(), 2, seed) for seed in (1, 1, 2)]
    first, again, other = (
        np.array([seconds(r.roles[0], op) for op in r.roles[0].ops if isinstance(op, Compute)]) for r in runs
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


# --- contract of every strategy ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STRATEGIES)
def test_a_strategy_computes_every_layer_once_per_micro_batch_and_its_program_can_be_played(kind):
    check_strategy(STRATEGIES[kind])


def test_single_refuses_a_mesh_of_several_ranks():
    model = toy_model([[5]])
    with pytest.raises(ProgramError, match="uses one GPU, but the mesh has 8 ranks"):
        build_single(model, toy_cost(model), mesh(8), SingleConfig(), 1, 0)
