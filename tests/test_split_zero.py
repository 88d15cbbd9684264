"""DeepSpeed's ZeRO beside tensor and context parallelism: what is sent between replicas, and what a rank keeps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.program import Collective, Compute
from clustersim.training.builder.zero import layerwise, zero_states
from clustersim.training.strategies.zero import holding
from clustersim.training.strategies.zero_config import ZeroConfig

BASE = "fsdp_tp8_llama3_70b_32x8_h100"
LAYERS = 4


def prepared(stage, micro_batches=1, checkpointing="full", **block):
    zero = {"stage": stage, "overlap_comm": True, **block}
    changes = {
        "cluster.nodes": 2,
        "model.options": {"layers": LAYERS},
        "model.activation_checkpointing": checkpointing,
        "parallel": {"tp": 4, "sequence_parallel": True, "framework": "deepspeed"},
        "strategy": {
            "kind": "zero",
            "param_dtype": "bf16",
            "gradient_accumulation_steps": micro_batches,
            "zero_optimization": zero,
        },
        "run.steps": 2,
    }
    return scenario.load(BASE, changes).prepare()


def sent(made, kind):
    """(count, bytes) of one kind of collective over data parallelism, in the second step."""
    ops = [
        op
        for op in made.program.roles[0].ops
        if isinstance(op, Collective) and op.label is None and op.kind == kind and op.step == 1 and op.nbytes > 4
    ]
    assert all(op.groups.shape == (4, 4) for op in ops)
    return len(ops), sum(op.nbytes for op in ops)


def local(made):
    return made.split.partition.stages[0].parameters


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stage_2_reduces_a_ranks_part_after_every_micro_batch_and_gathers_it_once(micro_batches):
    made = prepared(2, micro_batches)
    assert sent(made, "all_reduce")[1] == micro_batches * 2.0 * local(made)
    assert sent(made, "all_gather")[1] == pytest.approx(2.0 * local(made))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_stage_3_gathers_a_ranks_part_twice_and_reduce_scatters_it_in_every_micro_batch(micro_batches, checkpointing):
    """Blocks a third time, where their forward is repeated."""
    made = prepared(3, micro_batches, checkpointing, stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0)
    blocks = sum(layer.parameters for layer in made.split.partition.stages[0].layers if layer.kind == "block")
    repeated = checkpointing == "full"
    gathers = 2 * (LAYERS + 2) + LAYERS * repeated
    elements = 2 * local(made) + blocks * repeated
    assert sent(made, "all_gather") == (micro_batches * gathers, micro_batches * 2.0 * elements)
    assert sent(made, "reduce_scatter")[1] == micro_batches * 2.0 * local(made)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_layers_kernels_are_those_of_the_split_model(stage):
    made = prepared(stage)
    plain = prepared(1)
    flops = [sum(op.flops for op in one.program.roles[0].ops if isinstance(op, Compute)) for one in (made, plain)]
    assert flops[0] == pytest.approx(flops[1], rel=1e-12)


def test_the_norm_is_one_number_over_all_ranks_and_norms_are_summed_over_tensor_parallel_ranks():
    ops = prepared(3).program.roles[0].ops
    norm = next(op for op in ops if op.name == "all_reduce gradient norm")
    assert norm.groups.shape == (1, 16)
    replicated = next(op for op in ops if op.name == "all_reduce replicated gradients")
    assert replicated.groups.shape == (4, 4)
    assert replicated.communicator == "tp"


def test_a_rank_keeps_its_share_of_its_part():
    """N = 4 replicas of a quarter: 2 + 14/N bytes of stage 2, 16/N of stage 3, besides what is gathered and buckets."""
    for stage, whole in ((2, 1.0), (3, 0.25)):
        made = prepared(stage)
        held = made.memory.at_peak()
        parameters = local(made)
        assert held["parameters"] == 2.0 * whole * parameters
        assert held["gradients"] == 0.5 * parameters
        assert held["master_weights"] == parameters
        assert held["optimizer_states"] == 2.0 * parameters
        assert held["buckets"] == 2.0 * min(parameters, 5e8) * (2 if stage == 2 else 1)


def test_a_step_of_either_stage_can_be_played_and_both_send_three_times_a_ranks_part():
    """All_reduce and all_gather: 3 units of a rank's part. Two all_gathers and a reduce_scatter: 3, less what stays."""
    moved = {}
    for stage in (2, 3):
        rows = prepared(stage, checkpointing="none", stage3_max_reuse_distance=0).run().volume_by_dimension
        moved[stage] = dict(zip(rows["dimension"], rows["sent_per_gpu"], strict=True))["DP"]
    part = 2.0 * local(prepared(2)) * 3 / 4
    assert moved[2] == pytest.approx(3 * part, rel=1e-3)
    assert moved[3] == pytest.approx(3 * part, rel=0.25)
    assert moved[3] <= moved[2]


def with_experts(stage, micro_batches=1, **block):
    changes = {
        "cluster.nodes": 2,
        "model.options": {"layers": 2},
        "parallel": {"ep": 8, "framework": "deepspeed", "microbatches": micro_batches},
        "strategy": {"kind": "zero", "param_dtype": "bf16", "zero_optimization": {"stage": stage, **block}},
        "run.steps": 2,
    }
    return scenario.load("ep8_mixtral_8x7b_8x8_h100", changes).prepare()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stage_2_reduces_experts_among_those_who_hold_the_same_after_every_micro_batch(micro_batches):
    made = with_experts(2, micro_batches)
    ops = [op for op in made.program.roles[0].ops if isinstance(op, Collective) and op.step == 1]
    experts = [op for op in ops if "expert" in op.name and op.communicator == "edp"]
    assert all(op.groups.shape == (8, 2) for op in experts)
    held = made.split.partition.stages[0].expert_parameters
    moved = {kind: sum(op.nbytes for op in experts if op.kind == kind) for kind in ("all_reduce", "all_gather")}
    assert moved == {"all_reduce": micro_batches * 2.0 * held, "all_gather": 2.0 * held}
    dense = sum(op.nbytes for op in ops if op.kind == "all_reduce" and "expert" not in op.name and op.nbytes > 4)
    assert dense == micro_batches * 2.0 * made.split.partition.stages[0].parameters
    assert made.memory.at_peak()["gradients"] == pytest.approx(
        2.0 * (made.split.partition.stages[0].parameters / 16 + held / 2)
    )
    assert made.run().summary["step_time_s"] > 0


@pytest.mark.parametrize(
    ("stage", "block", "said"),
    [
        (3, {}, "DeepSpeed refuses experts that are spread with ZeRO stage 3; use stage 0, 1 or 2, or ep = 1"),
        (2, {"contiguous_gradients": False}, "without contiguous_gradients = true"),
        (2, {"offload_optimizer": {"device": "cpu"}}, "offload_optimizer beside experts that are spread is not played"),
    ],
)
def test_what_deepspeed_refuses_beside_experts_is_refused_with_its_reason(stage, block, said):
    with pytest.raises(ScenarioError, match=said):
        with_experts(stage, **block)


def test_what_stage_3_gathers_is_its_releases_with_and_without_other_parallelism():
    """A release that does not prefetch holds less at once; small tensors that are never let go count either way."""
    stage = prepared(3).split.partition.stages[0]
    model = layerwise(stage)
    most = []
    for version in ("0.5.10", "0.6.0"):
        block = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1e9}
        config = msgspec.convert({"kind": "zero", "version": version, "zero_optimization": block}, ZeroConfig)
        alone = holding(model, Mesh(np.arange(4), 4), config).gathered.max()
        assert zero_states(stage, 4, 4, config, 8.0).gathered[0] * model.parameters == pytest.approx(alone)
        most.append(alone)
    assert most[0] < most[1]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_field_that_is_not_played_and_unpinned_copies_are_told_of_a_split_model(stage):
    away = {} if stage == 1 else {"offload_optimizer": {"device": "cpu"}}
    notes = prepared(stage, memory_efficient_linear=False, **away).notes
    assert sum(note.startswith("zero: memory_efficient_linear is not played: ") for note in notes) == 1
    assert sum("pin_memory" in note for note in notes) == len(away)
