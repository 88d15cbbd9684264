"""ZeRO: the paper's table, the collectives DeepSpeed really issues, its coordinator, and its own block of knobs."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from player import play, toy_cost, toy_model

from clustersim.cluster import files as fabrics
from clustersim.core import limits
from clustersim.core.errors import ProgramError, ScenarioError
from clustersim.core.memory_rates import REMOTE_SHARE, THREAD_RATE
from clustersim.core.mesh import Mesh
from clustersim.core.model import Layer, Model, Tensor
from clustersim.core.program import Collective, Compute
from clustersim.engine import simulate
from clustersim.scenario import load
from clustersim.scenario.run import running
from clustersim.training import memory as of_memory
from clustersim.training.strategies import ddp
from clustersim.training.strategies.zero import build, holding
from clustersim.training.strategies.zero3 import modules, persistent, visits
from clustersim.training.strategies.zero_config import ZeroConfig, ZeroOptimization


def memory(model, **training):
    return of_memory.memory(model, of_memory.Training(**training))


N = 1_000_000


def config(stage: int, *, accumulation: int = 1, param_dtype: str = "fp16", **block) -> ZeroConfig:
    table = {
        "kind": "zero",
        "param_dtype": param_dtype,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage, **block},
    }
    return msgspec.convert(table, ZeroConfig)


def model(layers: int = 6) -> Model:
    return toy_model([[N]] * layers)


def mesh(n: int = 8, per_node: int = 4) -> Mesh:
    return Mesh(np.arange(n), per_node)


def program(knobs: ZeroConfig, made: Model | None = None, steps: int = 2, ranks: Mesh | None = None, **costs):
    made = made or model()
    return build(made, toy_cost(made, **costs), ranks or mesh(), knobs, steps, 0)


def ops(played, kind: str, step: int = 1):
    return [op for op in played.roles[0].ops if isinstance(op, Collective) and op.kind == kind and op.step == step]


def large(found):
    """Without the flags of one number."""
    return [op for op in found if op.nbytes > 4]


# --- the table of the paper --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "gigabytes"), [(1, 31.4), (2, 16.6), (3, 1.9)])
def test_model_states_of_7_5_billion_parameters_on_64_gpus_are_the_papers(stage, gigabytes):
    layers = tuple(Layer(f"l{i}", "block", (Tensor(f"l{i}.w", 75_000_000),), ()) for i in range(100))
    made = Model("7.5b", "test", layers)
    held = holding(made, mesh(64, 8), config(stage))
    use = memory(made, micro_batch_size=1, dtype="fp16", param_dtype="fp16", holding=held)
    assert use.model_states / 1e9 == pytest.approx(gigabytes, abs=0.05)
    whole = memory(made, micro_batch_size=1, dtype="fp16", param_dtype="fp16", master_weights=True)
    assert whole.model_states == 120e9


@pytest.mark.parametrize("ranks", [1, 8, 512])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_model_states_follow_the_papers_formulas(stage, ranks):
    made = model()
    use = memory(
        made, micro_batch_size=1, dtype="bf16", param_dtype="bf16", holding=holding(made, mesh(ranks, 1), config(stage))
    )
    shared, whole = {1: (12, 4), 2: (14, 2), 3: (16, 0)}[stage]
    assert use.model_states == pytest.approx(made.parameters * (whole + shared / ranks))


def sent(knobs: ZeroConfig, made: Model) -> float:
    """Bytes a GPU sends in a steady step, by what the engine's links carried."""
    from clustersim.explain.metrics import summary

    topology = fabrics.load("hgx-a100", nodes=2)
    ranks = fabrics.mesh(topology)
    timeline = simulate(build(made, toy_cost(made), ranks, knobs, 3, 0), topology, ranks)
    return summary(timeline, replace(made, seq_len=1), samples_per_step=1)["bytes_sent_per_gpu"]


def test_volumes_are_one_one_and_one_and_a_half_times_ddps_and_what_deepspeed_sends_is_half_more():
    """ZeRO paper, section 7: against an all_reduce of 2 Psi elements."""
    made = toy_model([[8 * N]] * 4)
    all_reduce = 2 * 15 / 16 * 2 * made.parameters
    classic = {"use_multi_rank_bucket_allreduce": False}
    assert sent(config(1, **classic), made) == pytest.approx(all_reduce, rel=0.001)
    assert sent(config(2, **classic), made) == pytest.approx(all_reduce, rel=0.001)
    no_reuse = {"stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    assert sent(config(3, **no_reuse), made) == pytest.approx(1.5 * all_reduce, rel=0.01)
    assert sent(config(1), made) == pytest.approx(1.5 * all_reduce, rel=0.01)
    assert sent(config(2), made) == pytest.approx(1.5 * all_reduce, rel=0.01)


# --- stages 1 and 2 ----------------------------------------------------------------------------------------------


def test_a_bucket_is_sent_before_the_gradient_that_would_overflow_it():
    played = program(config(2, reduce_bucket_size=2.5e6))
    assert [op.nbytes for op in large(ops(played, "all_reduce"))] == [2 * 2 * N] * 3
    alone = program(config(2, reduce_bucket_size=1e5))
    assert [op.nbytes for op in large(ops(alone, "all_reduce"))] == [2 * N] * 6


def test_the_default_bucket_of_a_small_model_is_one_all_reduce_after_backward():
    for stage in (1, 2):
        played = program(config(stage, overlap_comm=True))
        (reduced,) = large(ops(played, "all_reduce"))
        assert reduced.nbytes == 2 * 6 * N
        filled = played.roles[0].ops[reduced.after[0]]
        last = next(i for i, op in enumerate(played.roles[0].ops) if op.name == "bwd l0" and op.step == 1)
        assert filled.name == "fill bucket 0"
        assert reduced.after[0] > last


def test_stage_two_reduces_every_micro_step_and_stage_one_at_the_boundary():
    counts = {stage: len(large(ops(program(config(stage, accumulation=3)), "all_reduce"))) for stage in (1, 2)}
    assert counts == {1: 1, 2: 3}


def test_without_overlap_backward_waits_for_each_bucket_and_with_it_only_for_the_last_but_one():
    def step(**block) -> float:
        played = program(config(2, reduce_bucket_size=N, **block), grad_copy_bandwidth=1e30, optimizer=0.0)
        timeline = play(played, lambda op: 1e-3 if op.nbytes > 4 and op.kind == "all_reduce" else 0.0)
        return timeline.makespan / 2

    assert step() == pytest.approx(6 * 3e-3 + 6e-3)
    # A bucket goes when the next gradient is there: two are left when backward ends.
    assert step(overlap_comm=True) == pytest.approx(6 * 3e-3 + 2e-3)


def test_parameters_are_gathered_after_the_step_in_calls_of_the_bucket_size_before_the_next_forward():
    played = program(config(1, allgather_bucket_size=2e6))
    gathers = ops(played, "all_gather", 0)
    assert [op.nbytes for op in gathers] == [2 * 2 * N] * 3
    role = played.roles[0].ops
    (first,) = [op for op in role if op.name == "fwd l0" and op.step == 1]
    assert role[first.after[0]] is gathers[-1]


@pytest.mark.parametrize("passes", [1, 3])
def test_reducing_to_owners_sends_every_part_to_the_rank_that_updates_it(passes):
    """In every pass of a step: the second pass' parts once all went to rank 0."""
    knobs = config(2, accumulation=passes, reduce_bucket_size=2e6, use_multi_rank_bucket_allreduce=False)
    played = program(knobs)
    by_owner: dict[int, float] = {}
    for op in ops(played, "reduce"):
        by_owner[op.root] = by_owner.get(op.root, 0.0) + op.nbytes
    assert by_owner == {owner: pytest.approx(passes * 2 * 6 * N / 8) for owner in range(8)}


def test_fp16_checks_for_overflow_and_bf16_does_not():
    half = [op.name for op in ops(program(config(2)), "all_reduce")]
    brain = [op.name for op in ops(program(config(2, param_dtype="bf16")), "all_reduce")]
    assert "all_reduce overflow" in half
    assert "all_reduce overflow" not in brain
    assert "all_reduce gradient norm" in brain


ADAM = 28.0 * 6 * N
"""Bytes that a fused Adam reads and writes of the model's parameters."""
PINNED = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def away(stage: int = 2, **knobs: object) -> ZeroConfig:
    """The optimizer on the host."""
    return msgspec.structs.replace(config(stage, **PINNED), **knobs)


def test_an_offloaded_optimizer_runs_at_the_speed_of_dram_after_its_gradients_came_over():
    knobs = away(dram_bandwidth="100 GB/s")
    played = program(knobs, host_bandwidth=50e9, host_copy_rates=(20e9, 40e9), optimizer_traffic=ADAM)
    role = played.roles[0].ops
    (adam,) = [op for op in role if op.phase == "optimizer" and op.step == 1]
    assert adam.stream == "host"
    # Gradients are unscaled (8 bytes), Adam runs (28), and parameters are cast to 16 bits (6).
    assert adam.duration == pytest.approx(6 * N / 8 * (8 + 28 + 6) * 4 / 100e9)
    (home,) = [op for op in role if op.name == "d2h bucket 0" and op.step == 1]
    assert home.duration == pytest.approx(4 * 6 * N / 8 / 20e9)  # in fp32
    (back,) = [op for op in role if op.name == "h2d parameters" and op.step == 1]
    assert back.duration == pytest.approx(2 * 6 * N / 8 / 40e9)


@pytest.mark.parametrize(
    ("per_node", "knobs", "node_rate"),
    [
        (1, {}, 40e9),  # one socket
        (2, {"bind_cores": True}, 80e9),  # two
        (4, {"bind_cores": True}, 80e9),
        (4, {}, 4 * REMOTE_SHARE * THREAD_RATE),  # a thread each, of whose memory some is the other socket's
        (4, {"host_threads": 2}, 8 * REMOTE_SHARE * THREAD_RATE),
        (4, {"host_threads": 8}, 80e9),
    ],
)
def test_a_rank_has_what_its_threads_read_of_its_share_of_the_sockets(per_node, knobs, node_rate):
    ranks = Mesh(np.arange(per_node), per_node)
    cost = {"host_bandwidth": 40e9, "host_copy_rates": (20e9, 40e9), "optimizer_traffic": ADAM}
    played = program(away(**knobs), ranks=ranks, **cost)
    (adam,) = [op for op in played.roles[0].ops if op.phase == "optimizer" and op.step == 1]
    assert adam.duration == pytest.approx(6 * N * (8 + 28 + 6) / node_rate)


@pytest.mark.parametrize(
    ("overlaps", "pinned", "waits"), [(False, True, True), (True, True, False), (True, False, True)]
)
def test_backward_waits_for_copies_on_its_stream_and_for_those_that_the_host_waits_for(overlaps, pinned, waits):
    offload = {"device": "cpu", "pin_memory": pinned}
    knobs = config(2, offload_optimizer=offload, reduce_bucket_size=N, overlap_comm=overlaps)
    role = program(knobs, host_copy_rates=(1e9, 1e9), optimizer_traffic=ADAM).roles[0].ops
    first = next(i for i, op in enumerate(role) if op.name == "d2h bucket 0")
    later = [op for op in role[first:] if op.name.startswith("bwd")]
    assert any(first in op.after for op in later) == waits


def test_stage_3_casts_into_memory_that_nobody_locks():
    slow = THREAD_RATE * REMOTE_SHARE / 2
    for stage, dtype, rate in ((2, "bf16", 40e9), (3, "bf16", slow), (3, "fp32", 40e9)):
        knobs = away(stage, param_dtype=dtype)
        role = program(knobs, host_copy_rates=(20e9, 40e9), optimizer_traffic=ADAM).roles[0].ops
        (back,) = [op for op in role if op.name == "h2d parameters" and op.step == 1]
        assert back.nbytes / back.duration == pytest.approx(rate)


@pytest.mark.parametrize(
    ("stage", "passes", "home", "back"),
    [
        (1, 1, 4, 2),
        (1, 4, 4, 2 + 2),  # gradients pile up on the GPU, and what the host has is added once
        (2, 1, 4, 2),
        (2, 4, 3 * 2 + 4, 3 * 2 + 2),
        (3, 1, 2 + 4, 2 + 2),
        (3, 4, 4 * 2 + 4, 4 * 2 + 2),
    ],
)
def test_bytes_over_pcie_are_those_of_deepspeeds_own_copies(stage, passes, home, back):
    """Bytes of each element that a rank owns, in a step. stage_1_and_2.py of 02aa38c3, ``copy_grads_in_partition``:
    16 bits each way for each micro-step but the last, which sends 32 bits; stage3.py of 007cca6a,
    ``partition_grads``: 16 bits each way for every micro-step, and 32 bits besides. 16-bit parameters come back."""
    knobs = config(stage, offload_optimizer={"device": "cpu"}, reduce_bucket_size=2e6)
    knobs = msgspec.structs.replace(knobs, gradient_accumulation_steps=passes)
    made = linears(bias=N) if stage == 3 else model()
    played = program(knobs, made, host_bandwidth=50e9, host_copy_rates=(20e9, 40e9))
    copies = [op for op in played.roles[0].ops if isinstance(op, Compute) and op.phase == "memcpy" and op.step == 1]
    own = made.parameters / 8
    assert sum(op.nbytes for op in copies if op.stream == "d2h") == pytest.approx(home * own)
    assert sum(op.nbytes for op in copies if op.stream != "d2h") == pytest.approx(back * own)


# --- stage 3 -----------------------------------------------------------------------------------------------------


def block(**knobs) -> ZeroOptimization:
    return msgspec.convert({"stage": 3, **knobs}, ZeroOptimization)


def linears(names=("a", "b"), layers: int = 4, bias: int = 10) -> Model:
    """Layers of two linear modules with small biases."""
    made = []
    for i in range(layers):
        tensors = [Tensor(f"l{i}.{n}.{part}", size) for n in names for part, size in (("weight", N), ("bias", bias))]
        made.append(replace(model().layers[0], name=f"l{i}", tensors=tuple(tensors)))
    return Model("linears", "toy", tuple(made))


def test_modules_are_what_registers_tensors_and_small_tensors_persist():
    found = modules(linears(), block())
    assert [m.name for m in found[:3]] == ["l0.a", "l0.b", "l1.a"]
    assert [m.numel for m in found] == [N] * 8
    assert sum(m.share for m in found) == pytest.approx(4)
    assert persistent(linears(), block()) == 80
    assert sum(t.numel for m in found for t in m.gradients) == linears().parameters


def test_without_prefetch_and_reuse_every_use_gathers():
    found = modules(linears(), block())
    plan = visits(found, block(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=0))
    assert all(visit.fetch and not visit.prefetch and visit.live == N for visit in plan)
    assert [visit.module for visit in plan] == [*range(8), *reversed(range(8))]


def test_the_first_pass_only_records():
    found = modules(linears(), block())
    assert all(visit.fetch and not visit.prefetch for visit in visits(found, block(), recorded=False))


def test_prefetching_fills_its_bucket_and_what_it_gathered_is_not_fetched_again():
    found = modules(linears(), block())
    plan = visits(found, block(stage3_prefetch_bucket_size=1.5e6, stage3_max_reuse_distance=0))
    assert plan[0].fetch
    assert plan[0].prefetch == (1, 2)
    assert not any(visit.fetch for visit in plan[1:8])
    gathered = sum(visit.fetch + len(visit.prefetch) for visit in plan)
    assert gathered == 16


def test_checkpointed_layers_are_visited_once_more_and_what_is_kept_is_not_gathered_again():
    made = modules(linears(layers=2), block())
    plan = visits(made, block(), recorded=False, recomputed=[1])
    assert [visit.module for visit in plan] == [0, 1, 2, 3, 2, 3, 3, 2, 1, 0]
    assert all(visit.fetch for visit in plan)
    near = visits(made, block(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=1.5e6), recomputed=[1])
    assert [visit.fetch for visit in near] == [True] * 4 + [False] * 3 + [True] * 3


@pytest.mark.parametrize(("version", "overlaps"), [("0.5.10", False), ("0.6.0", True), (None, True)])
def test_before_its_release_0_6_nothing_is_computed_beside_a_gather(version, overlaps):
    made = linears()
    small = config(3, stage3_max_reuse_distance=0, stage3_prefetch_bucket_size=1e6)
    knobs = msgspec.structs.replace(small, version=version)
    timeline = play(program(knobs, made), lambda op: 1e-3)
    spans = [
        (timeline.ops[op], start, end)
        for op, start, end in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
        if timeline.ops[op].step == 1
    ]
    kernels = [(start, end) for op, start, end in spans if op.kind == "compute"]
    gathers = [(start, end) for op, start, end in spans if op.kind == "all_gather"]
    beside = [(g, k) for g in gathers for k in kernels if g[0] < k[1] - 1e-9 and k[0] < g[1] - 1e-9]
    assert bool(beside) == overlaps
    held = [holding(made, mesh(), msgspec.structs.replace(knobs, version=v)).gathered.max() for v in (version, "0.5.0")]
    assert (held[0] > held[1]) == overlaps


def test_a_version_is_a_release():
    with pytest.raises(msgspec.ValidationError, match=r"version"):
        msgspec.convert({"kind": "zero", "version": "newest"}, ZeroConfig)


def test_what_is_needed_soon_again_is_kept_and_live_parameters_bound_prefetching():
    found = modules(linears(), block())
    kept = visits(found, block(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=1e9))
    assert [visit.fetch for visit in kept] == [True] * 8 + [False] * 8
    some = visits(found, block(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=3e6))
    assert sum(visit.fetch for visit in some) == 8 + 6
    bounded = visits(found, block(stage3_max_live_parameters=2e6, stage3_max_reuse_distance=0))
    assert max(visit.live for visit in bounded) <= 2e6 + N


@pytest.mark.parametrize("distance", [0, 1, N, 3 * N, 7 * N + 1, 1e9])
def test_a_module_is_kept_where_what_others_gather_until_its_next_use_is_less_than_the_distance(distance):
    """As the coordinator reads its record, use by use."""
    found = modules(linears(), block())
    plan = visits(found, block(stage3_prefetch_bucket_size=0, stage3_max_reuse_distance=distance), recomputed=[1, 3])
    order = [visit.module for visit in plan]
    kept = set()
    for k, visit in enumerate(plan):
        assert visit.fetch == (visit.module not in kept)
        rest = order[k + 1 :]
        until = rest.index(visit.module) if visit.module in rest else None
        near = until is not None and sum(found[m].numel for m in rest[:until]) < distance
        kept = kept | {visit.module} if near else kept - {visit.module}


def test_the_record_of_a_mixture_of_many_experts_is_read_in_seconds():
    """A look at the rest of the record at every use took minutes: 94 layers of 128 experts have 36,000 modules."""
    many = modules(linears(tuple(f"expert{k}" for k in range(300)), layers=80), block())
    start = time.process_time()
    visits(many, block(), recomputed=range(80))
    assert time.process_time() - start < 5


def test_stage_three_gathers_before_use_and_reduces_buckets_beside_backward():
    made = linears()
    played = program(config(3, reduce_bucket_size=2.1e6, stage3_max_reuse_distance=0), made)
    reduced = ops(played, "reduce_scatter")
    assert sum(op.nbytes for op in reduced) == 2 * made.parameters
    assert len(reduced) == 4
    gathers = [op for op in ops(played, "all_gather") if "persistent" not in op.name]
    assert sum(op.nbytes for op in gathers) == 2 * 2 * 8 * N
    (small,) = [op for op in ops(played, "all_gather", 0) if "persistent" in op.name]
    assert small.nbytes == 2 * 80
    timeline = play(played, lambda op: op.nbytes / 1e9)
    assert timeline.makespan >= 2 * 4 * 3e-3


def test_a_second_copy_inside_nodes_serves_backward():
    made = linears()
    played = program(config(3, zero_hpz_partition_size=4, stage3_max_reuse_distance=0), made)
    near = [op for op in ops(played, "all_gather") if op.groups.shape == (2, 4)]
    assert sum(op.nbytes for op in near) == 2 * 8 * N
    with pytest.raises(ProgramError, match=r"groups of 3.*zero_hpz_partition_size"):
        program(config(3, zero_hpz_partition_size=3))


def test_quantised_weights_halve_the_gathers_and_quantised_gradients_go_in_two_hops():
    made = linears()
    plain = program(config(3), made)
    small = program(config(3, zero_quantized_weights=True, zero_quantized_gradients=True), made)
    gathered = [sum(op.nbytes for op in ops(p, "all_gather") if "persistent" not in op.name) for p in (plain, small)]
    assert gathered[1] == gathered[0] / 2
    assert not ops(small, "reduce_scatter")
    inside, outside = ops(small, "all_to_all")
    assert (inside.groups.shape, outside.groups.shape) == ((2, 4), (4, 2))
    assert inside.nbytes == made.parameters / 2
    assert outside.nbytes == inside.nbytes / 4


def test_offloaded_parameters_come_over_pcie_before_they_are_gathered():
    knobs = config(3, offload_param={"device": "cpu"}, offload_optimizer={"device": "cpu"})
    played = program(knobs, linears())
    role = played.roles[0].ops
    gathers = [op for op in ops(played, "all_gather") if "persistent" not in op.name]
    assert gathers
    assert all(role[op.after[-1]].name.startswith("h2d") for op in gathers)
    held = holding(linears(), mesh(), knobs)
    assert held.parameters == held.updated == 0


def test_one_rank_communicates_nothing():
    for stage in (1, 2, 3):
        played = program(config(stage), ranks=mesh(1, 1))
        assert all(isinstance(op, Compute) for op in played.roles[0].ops), stage


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("overlap", [None, True, False])
def test_every_stage_takes_at_least_its_compute_and_updates_after_all_gradients(stage, accumulation, overlap):
    made = linears()
    played = program(config(stage, accumulation=accumulation, overlap_comm=overlap), made, grad_copy_bandwidth=1e11)
    timeline = play(played, lambda op: 1e-4 + op.nbytes / 50e9)
    assert timeline.makespan >= 2 * accumulation * 4 * 3e-3
    rows = [
        (timeline.ops[op], start, end)
        for op, start, end in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True)
        if timeline.ops[op].step == 1
    ]
    update = min(start for op, start, _ in rows if op.phase == "optimizer")
    assert update >= max(end for op, _, end in rows if "bucket" in op.name) - 1e-12


def test_overlap_saves_time_on_a_machine():
    made = toy_model([[40 * N]] * 8)
    topology = fabrics.load("hgx-a100", nodes=2)
    ranks = fabrics.mesh(topology)
    spans = []
    for overlap in (False, True):
        knobs = config(2, overlap_comm=overlap, reduce_bucket_size=8e7)
        spans.append(simulate(build(made, toy_cost(made), ranks, knobs, 2, 0), topology, ranks).makespan)
    assert spans[1] < spans[0]


# --- DeepSpeed's own block ---------------------------------------------------------------------------------------

DEEPSPEED = """{"stage": 3, "contiguous_gradients": true,
"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
"stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 1e7,
"sub_group_size": 1e9, "offload_optimizer": {"device": "cpu", "pin_memory": true},
"offload_param": {"device": "cpu", "buffer_count": 5, "buffer_size": 1e8, "max_in_cpu": 1e9},
"stage3_gather_16bit_weights_on_model_save": true, "overlap_comm": true, "zero_hpz_partition_size": 4}"""


def test_the_block_of_deepspeeds_documentation_is_read_unchanged():
    knobs = config(**json.loads(DEEPSPEED))
    assert knobs.offloads_parameters
    assert program(knobs).notes


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"stage": 3, "reduce_bucket_size": "auto"},
            r"'auto' is filled in by Hugging Face's Trainer.*hidden_size squared",
        ),
        ({"stage": 2, "overlap_comm": "auto"}, "overlap_comm = 'auto'"),
        ({"stage": 2, "overlap_comm": "maybe"}, "overlap_comm = 'maybe'.*true or false"),
        ({"stage": 0}, "stage 0 is plain data parallelism: use kind = 'ddp'"),
        ({"stage": 4}, "Invalid enum value 4"),
        ({"stage": 2, "reduce_bucket": 5}, "unknown field `reduce_bucket`"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "'nvme' is not played"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}, r"offload_optimizer.ratio = 0\.3"),
        ({"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload = true"),
        ({"stage": 2, "reduce_bucket_size": -1}, "reduce_bucket_size"),
        ({"stage": 2, "reduce_bucket_size": 0}, "write how many elements"),
    ],
)
def test_what_cannot_be_played_is_one_clear_error(table, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        config(**table)


@pytest.mark.parametrize(("stage", "pinned", "said"), [(2, True, 0), (2, False, 1), (3, True, 0), (3, False, 1)])
def test_memory_that_is_not_pinned_is_played_as_pinned_and_that_is_said(stage, pinned, said):
    away = {"device": "cpu", "pin_memory": pinned}
    notes = config(stage, offload_optimizer=away).notes
    assert sum("pin_memory" in note for note in notes) == said
    assert config(2, offload_optimizer={**away, "ratio": 0.3}).offloads_optimizer  # which stage 3 alone reads


def test_a_scenario_names_file_field_and_nearest_key():
    from clustersim.core.errors import ScenarioError

    with pytest.raises(ScenarioError, match=r"unknown field 'reduce_bucket_sise'.*reduce_bucket_size"):
        load("zero2_llama3_8b_2x8_a100", {"strategy.zero_optimization.reduce_bucket_sise": 5})
    with pytest.raises(ScenarioError, match=r"'auto' is filled in"):
        load("zero2_llama3_8b_2x8_a100", {"strategy.zero_optimization.reduce_bucket_size": "auto"})


def test_ddps_all_reduce_is_the_yardstick_of_the_paper():
    made = toy_model([[8 * N]] * 4)
    topology = fabrics.load("hgx-a100", nodes=2)
    ranks = fabrics.mesh(topology)
    played = ddp.build(made, toy_cost(made), ranks, ddp.DDPConfig(param_dtype="fp16"), 1, 0)
    reduced = [op for op in played.roles[0].ops if isinstance(op, Collective)]
    assert sum(op.nbytes for op in reduced) == 2 * made.parameters


def test_what_is_gathered_a_third_time_is_said_with_how_often_and_makes_up_the_bytes():
    """A count by hand, three times the parameters, gave 115.2 GiB a GPU where 117.6 were sent, and nothing said why."""
    block = {"stage": 3, "overlap_comm": True, "reduce_bucket_size": 500_000_000}
    changes = {
        "cluster.nodes": 1,
        "model.name": "mistral-small-24b",
        "model.activation_checkpointing": "full",
        "strategy": {"kind": "zero", "param_dtype": "bf16", "micro_batch_size": 1, "zero_optimization": block},
    }
    run = load("zero3_llama3_8b_2x8_a100", changes).run()
    (said,) = [note for note in run.prepared.notes if "a third time" in note]
    times = float(re.search(r"gathers ([\d.]+) times", said)[1])
    assert "160 modules" in said  # four of attention in each of 40 blocks
    each = 2 * run.prepared.model.parameters * 7 / 8
    assert run.summary["bytes_sent_per_gpu"] == pytest.approx((times + 1) * each, rel=2e-3)
    assert times > 2.05
    plain = load("zero3_llama3_8b_2x8_a100").prepare()
    assert not [note for note in plain.notes if "a third time" in note]


@pytest.mark.parametrize("checkpointing", ["none", "full"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_least_ops_of_a_pass_are_no_more_than_are_laid(stage, checkpointing):
    base = load(
        "zero3_llama3_8b_2x8_a100",
        {
            "run.steps": 2,
            "strategy.gradient_accumulation_steps": 1,
            "model.activation_checkpointing": checkpointing,
            "strategy.zero_optimization.stage": stage,
        },
    )
    ready = base.prepare()
    least = base.strategy.least_ops(ready.model, ready.cost, ready.mesh, base.config)
    laid = sum(len(role.ops) for role in ready.program.roles) / 2
    assert least <= laid
    assert least >= 0.5 * laid or stage < 3


def test_experts_gathered_one_by_one_are_refused_before_they_are_written_out(monkeypatch):
    """Each expert is sub-modules of its own: of a mixture a pass has some thousands of gathers, of which layers tell
    nothing."""
    mixture = load(
        "zero3_llama3_8b_2x8_a100",
        {
            "model.name": "mixtral-8x7b",
            "strategy.zero_optimization.stage3_param_persistence_threshold": 0,
            "run.steps": 50,
        },
    )
    monkeypatch.setattr(limits, "free_memory", lambda: 2.0**28)
    monkeypatch.setattr(running, "_program", lambda *parts: pytest.fail("ops are written out"))
    with pytest.raises(ScenarioError, match=r"of [\d,]+ kernels and collectives each, 256 MiB are free; use fewer"):
        mixture.prepare()


@pytest.mark.parametrize(("pinned", "said"), [(True, 0), (False, 1)])
def test_parameters_alone_away_are_told_to_be_in_pageable_memory(pinned, said):
    notes = config(3, offload_param={"device": "cpu", "pin_memory": pinned}).notes
    assert sum("pin_memory" in note for note in notes) == said
    assert sum("streams of their own" in note for note in notes) == 1


@pytest.mark.parametrize(
    ("field", "value", "usual"),
    [
        ("stage3_module_granularity_threshold", 1000, 0),
        ("stage3_use_all_reduce_for_fetch_params", True, False),
        ("stage3_allgather_sequential", True, False),
        ("stage3_model_persistence_threshold", 1e6, None),
        ("memory_efficient_linear", False, True),
        ("round_robin_gradients", True, False),
        ("zero_quantized_nontrainable_weights", True, False),
        ("zeropp_loco_param", {"err_beta": 0.8}, None),
    ],
)
def test_a_field_that_is_not_played_is_told_in_the_notes_of_a_run(field, value, usual):
    for stage in (2, 3):
        notes = program(config(stage, **{field: value})).notes
        assert sum(note.startswith(f"zero: {field} is not played: ") for note in notes) == 1
    assert not any("not played" in note for note in program(config(3, **{field: usual})).notes)


def test_the_stage_one_of_old_is_refused():
    with pytest.raises(msgspec.ValidationError, match="legacy_stage1 = true is the stage 1 of DeepSpeed before"):
        config(1, legacy_stage1=True)
    assert config(1, legacy_stage1=False).notes == ()


def test_pieces_of_an_update_are_told_where_deepspeed_makes_several():
    made = linears()
    part = made.trained // 8
    for size, said in ((part, 0), (part - 1, 1), (0, 1)):
        notes = program(config(3, sub_group_size=size), made).notes
        assert sum("sub_group_size" in note for note in notes) == said
    assert not any("sub_group_size" in note for note in program(config(2, sub_group_size=0), made).notes)
