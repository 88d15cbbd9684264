"""FSDP: bytes and times in closed form, what waits for what, and what the documentation says about its knobs."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from player import play, toy_cost, toy_model

from clustersim.cluster import files as fabrics
from clustersim.core.errors import ProgramError
from clustersim.core.mesh import Mesh
from clustersim.core.program import DTYPE_BYTES, Collective, Compute
from clustersim.engine import simulate
from clustersim.training.strategies.fsdp import build
from clustersim.training.strategies.fsdp_config import FSDPConfig
from clustersim.training.strategies.fsdp_memory import holding

N = 1_000_000
EVERY = [
    {"version": 1},
    {"version": 1, "sharding_strategy": "SHARD_GRAD_OP"},
    {"version": 1, "sharding_strategy": "NO_SHARD"},
    {"version": 1, "sharding_strategy": "HYBRID_SHARD"},
    {"version": 1, "backward_prefetch": "BACKWARD_POST"},
    {"version": 1, "backward_prefetch": "None", "limit_all_gathers": False},
    {"version": 1, "forward_prefetch": True},
    {"version": 1, "alloc_retries": True, "checkpoint_outside": True},
    {},
    {"reshard_after_forward": False},
    {"reshard_after_forward": True},
    {"reshard_after_forward": 4},
    {"data_parallel_replicate_degree": 2},
    {"cpu_offload": True},
    {"clip_grad_norm": True, "blocks_per_unit": 2},
]


def model(blocks: int = 6, root: int = N):
    """Embedding and head of ``root`` parameters in all, and blocks of N each."""
    made = toy_model([[root], *[[N]] * blocks, [1]])
    layers = list(made.layers)
    layers[0], layers[-1] = replace(layers[0], kind="embedding"), replace(layers[-1], kind="head", tensors=())
    return replace(made, layers=tuple(layers))


def mesh(n: int = 8, per_node: int = 4) -> Mesh:
    return Mesh(np.arange(n), per_node)


def ops(program, kind: str, step: int | None = None):
    return [
        op
        for op in program.roles[0].ops
        if isinstance(op, Collective) and op.kind == kind and (step is None or op.step == step)
    ]


def run(seconds: float, cost=None, steps: int = 2, made=None, **knobs):
    """Spans by (step, name) where every collective takes the same time, and the time of the last step."""
    made = made or model()
    program = build(made, cost or toy_cost(made, optimizer=0.0), mesh(), FSDPConfig(**knobs), steps, 0)
    timeline = play(program, lambda op: seconds * op.nbytes / (4 * N))
    spans: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for op, start, end in zip(timeline.row_op, timeline.row_start, timeline.row_end, strict=True):
        info = timeline.ops[op]
        spans.setdefault((info.step, info.name), []).append((start, end))
    ends = [max(t for (s, _), found in spans.items() if s == step for _, t in found) for step in range(steps)]
    return spans, ends[-1] - (ends[-2] if steps > 1 else 0.0)


# --- bytes -------------------------------------------------------------------------------------------------------


def test_full_sharding_gathers_parameters_twice_and_reduces_gradients_once():
    made = model()
    config = FSDPConfig(param_dtype="bf16", reduce_dtype="fp32", reshard_after_forward=True)
    program = build(made, toy_cost(made), mesh(), config, 2, 0)
    assert sum(op.nbytes for op in ops(program, "all_gather", 1)) == 2 * 2 * made.parameters
    assert sum(op.nbytes for op in ops(program, "reduce_scatter", 1)) == 4 * made.parameters


def test_eight_bit_gathers_move_a_byte_an_element_of_all_but_the_root():
    made = model()
    config = FSDPConfig(param_dtype="bf16", reduce_dtype="fp32", float8_all_gather=True)
    program = build(made, toy_cost(made), mesh(), config, 2, 0)
    blocks = made.parameters - N
    assert sum(op.nbytes for op in ops(program, "all_gather", 1)) == 2 * blocks + 2 * N
    assert sum(op.nbytes for op in ops(program, "reduce_scatter", 1)) == 4 * made.parameters


def test_the_root_is_gathered_once_unless_asked_otherwise_and_grad_op_gathers_everything_once():
    made = model(root=5 * N)
    for knobs, gathered in (
        ({}, 2 * 6 + 5),
        ({"version": 1}, 2 * 6 + 5),
        ({"reshard_after_forward": True}, 2 * 11),
        ({"reshard_after_forward": False}, 11),
        ({"version": 1, "sharding_strategy": "SHARD_GRAD_OP"}, 11),
    ):
        program = build(made, toy_cost(made), mesh(), FSDPConfig(**knobs), 1, 0)
        assert sum(op.nbytes for op in ops(program, "all_gather")) == 4 * N * gathered, knobs


def test_flat_parameters_are_padded_to_the_group():
    made = toy_model([[5], [9]])
    program = build(made, toy_cost(made), mesh(), FSDPConfig(version=1), 1, 0)
    assert [op.nbytes for op in ops(program, "reduce_scatter")] == [4 * 16, 4 * 8]


def test_no_shard_all_reduces_every_unit_and_gathers_nothing():
    made = model()
    program = build(made, toy_cost(made), mesh(), FSDPConfig(version=1, sharding_strategy="NO_SHARD"), 1, 0)
    assert not ops(program, "all_gather")
    assert sum(op.nbytes for op in ops(program, "all_reduce")) == 4 * made.parameters
    assert ops(program, "all_reduce")[0].groups.shape == (1, 8)


def test_hybrid_sharding_shards_inside_nodes_and_all_reduces_the_shard_over_them():
    made = model()
    for knobs in ({"version": 1, "sharding_strategy": "HYBRID_SHARD"}, {"data_parallel_replicate_degree": 2}):
        program = build(made, toy_cost(made), mesh(), FSDPConfig(**knobs), 1, 0)
        reduced = ops(program, "reduce_scatter")[0]
        again = ops(program, "all_reduce")[0]
        assert reduced.groups.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert again.groups.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]
        assert again.nbytes == reduced.nbytes / 4
        assert again.stream != reduced.stream
        assert again.communicator != reduced.communicator


def test_resharding_to_fewer_ranks_gathers_backward_among_them():
    made = model()
    program = build(made, toy_cost(made), mesh(), FSDPConfig(reshard_after_forward=4), 1, 0)
    assert {op.groups.shape for op in ops(program, "all_gather")} == {(1, 8), (2, 4)}
    assert len([op for op in ops(program, "all_gather") if op.groups.shape == (2, 4)]) == 7


def test_accumulation_reduces_in_every_pass_or_once_under_no_sync():
    made = model()
    counts = {}
    for no_sync in (False, True):
        config = FSDPConfig(gradient_accumulation_steps=3, no_sync=no_sync)
        program = build(made, toy_cost(made), mesh(), config, 1, 0)
        counts[no_sync] = len(ops(program, "reduce_scatter"))
        assert len([op for op in ops(program, "all_gather") if op.name == "all_gather l2"]) == 6
    assert counts == {False: 21, True: 7}


# --- schedule ----------------------------------------------------------------------------------------------------


def test_with_fast_links_only_the_first_gather_and_the_last_reduction_are_exposed():
    made = model()
    cost = toy_cost(made, optimizer=0.0, grad_copy_bandwidth=1e30)
    _, step = run(1e-4, cost, version=1)
    assert step == pytest.approx(8 * 3e-3 + 1e-4 + 1e-4, rel=1e-6)


def test_version_one_lets_two_gathered_units_wait_for_compute():
    spans, _ = run(1e-6, version=1)
    for i in range(3, 7):
        gathered = spans[1, f"all_gather l{i}"][0]
        freed = spans[1, f"fwd l{i - 2}"][0]
        assert gathered[0] == pytest.approx(freed[1])
    unlimited, _ = run(1e-6, version=1, limit_all_gathers=False)
    assert unlimited[1, "all_gather l6"][0][1] < unlimited[1, "fwd l1"][0][1]


def test_on_a_full_card_no_gather_goes_out_beside_the_kernel_before_it():
    spans, _ = run(1e-3, version=1, limit_all_gathers=False, alloc_retries=True)
    for i in range(2, 7):
        assert spans[1, f"all_gather l{i}"][0][0] >= spans[1, f"fwd l{i - 1}"][0][1] - 1e-12


def test_units_inside_of_what_is_checkpointed_are_gathered_a_third_time():
    made = model()
    for forwards, gathers in ((2.0, 2), (3.0, 3)):  # forwards a backward is worth: with the third, one is repeated
        cost = toy_cost(made, optimizer=0.0)
        cost = replace(cost, forward_flops=np.ones(8), backward_flops=np.full(8, forwards))
        spans, step = run(1e-6, cost, version=1, checkpoint_outside=True)
        assert len(spans[1, "all_gather l3"]) == gathers
        assert ("bwd l3 again" in {name for _, name in spans}) == (gathers == 3)
        assert step == pytest.approx(run(1e-6, cost, version=1)[1], rel=1e-2)  # as long, where links are fast


def test_version_two_gathers_into_two_buffers_in_turn():
    spans, _ = run(1e-6)
    for i in range(3, 7):
        assert spans[1, f"all_gather l{i}"][0][0] == pytest.approx(spans[1, f"copy_out l{i - 2}"][0][1])


def test_version_two_starts_a_reduction_when_the_one_before_has_ended():
    spans, _ = run(2.5e-3)
    for i in range(1, 6):
        assert spans[1, f"copy_in l{i}"][0][0] >= spans[1, f"reduce_scatter l{i + 1}"][0][1] - 1e-12


def test_backward_pre_gathers_beside_the_current_unit_and_post_behind_it_but_before_its_reduction():
    pre, _ = run(1e-4, version=1)
    post, _ = run(1e-4, version=1, backward_prefetch="BACKWARD_POST")
    none, _ = run(1e-4, version=1, backward_prefetch="None")
    current = {name: found[1, "bwd l4"][0] for name, found in (("pre", pre), ("post", post), ("none", none))}
    assert pre[1, "all_gather l3"][1][1] < current["pre"][1]
    assert current["post"][1] <= post[1, "all_gather l3"][1][0] < post[1, "reduce_scatter l4"][0][0]
    assert none[1, "all_gather l3"][1][0] >= none[1, "reduce_scatter l4"][0][1] - 1e-12


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-5, 1e-2))
def test_prefetching_earlier_is_never_slower(seconds):
    steps = [run(seconds, version=1, backward_prefetch=p)[1] for p in ("BACKWARD_PRE", "BACKWARD_POST", "None")]
    assert steps[0] <= steps[1] + 1e-12
    assert steps[1] <= steps[2] + 1e-12


def test_prefetch_pays_most_where_communication_and_compute_are_alike():
    pre, post, none = (run(8e-4, version=1, backward_prefetch=p)[1] for p in ("BACKWARD_PRE", "BACKWARD_POST", "None"))
    assert pre < post < none


def test_a_launch_bound_forward_needs_forward_prefetch_to_overlap():
    made = model()
    launch = replace(toy_cost(made, optimizer=0.0), forward_bound=("launch",) * 8)
    _, plain = run(5e-4, launch, version=1)
    _, ahead = run(5e-4, launch, version=1, forward_prefetch=True)
    _, gpu_bound = run(5e-4, version=1)
    assert plain > ahead
    assert ahead == pytest.approx(gpu_bound, rel=1e-6)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("param_dtype", ["fp32", "bf16"])
def test_offload_fetches_before_every_gather_and_updates_on_the_host(version, param_dtype):
    """Both versions copy a shard to its GPU as it is kept, in fp32, and cast there: in bf16 half was copied."""
    made = model()
    config = FSDPConfig(
        version=version,
        param_dtype=param_dtype,
        cpu_offload=True,
        pcie_bandwidth="10 GB/s",
        dram_bandwidth="100 GB/s",
    )
    cost = toy_cost(made, optimizer_traffic_as_run=80.0 * made.parameters)
    program = build(made, cost, mesh(), config, 2, 0)
    role = program.roles[0].ops
    for op in ops(program, "all_gather"):
        fetched = role[op.after[0]]
        assert fetched.name.startswith("h2d")
        assert fetched.duration == op.nbytes * 4 / DTYPE_BYTES[param_dtype] / 8 / 10e9
    (adam,) = [op for op in role if op.phase == "optimizer" and op.step == 1]
    assert adam.duration == pytest.approx(made.parameters / 8 * 80 * 4 / 100e9)


def test_clipping_reads_and_writes_gradients_on_the_host_where_they_are():
    made = model()
    config = FSDPConfig(cpu_offload=True, clip_grad_norm=True, pcie_bandwidth="10 GB/s", dram_bandwidth="100 GB/s")
    role = build(made, toy_cost(made), mesh(), config, 1, 0).roles[0].ops
    clipped = next(op for op in role if op.name == "optimizer on the CPU")
    assert clipped.duration == pytest.approx(made.parameters / 8 * 12 * 4 / 100e9)
    assert not any(op.name == "clip gradients" for op in role)


@pytest.mark.parametrize("knobs", EVERY, ids=str)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_parameters_are_there_before_use_and_gradients_are_reduced_before_the_optimizer(knobs, accumulation):
    made = model()
    cost = toy_cost(made, optimizer=1e-4, grad_copy_bandwidth=1e10)
    spans, step = run(1e-3, cost, made=made, gradient_accumulation_steps=accumulation, **knobs)
    assert step >= accumulation * 8 * 3e-3
    if knobs.get("sharding_strategy") != "NO_SHARD":
        per_unit = knobs.get("blocks_per_unit", 1)
        for i in range(1, 7, per_unit):
            gathers = spans[1, f"all_gather l{i}"]
            uses = sorted(spans[1, f"fwd l{i}"] + spans[1, f"bwd l{i + per_unit - 1}"])
            keeps = len(gathers) == accumulation
            assert len(gathers) == (accumulation if keeps else 2 * accumulation)
            for gathered, used in zip(sorted(gathers), uses[:: 2 if keeps else 1], strict=True):
                assert gathered[1] <= used[0] + 1e-12
    updates = [found for (s, name), found in spans.items() if s == 1 and name.startswith("optimizer")]
    reduced = [
        t
        for (s, name), found in spans.items()
        if s == 1 and name.startswith(("reduce", "all_reduce"))
        for _, t in found
    ]
    assert min(start for start, _ in updates[0]) >= max(reduced) - 1e-12


def test_the_engine_plays_a_step_no_faster_than_compute_and_moves_each_byte_once():
    made = model()
    topology = fabrics.load("hgx-a100", nodes=2)
    ranks = fabrics.mesh(topology)
    cost = toy_cost(made, jitter=0.01, overlap_slowdown=0.2)
    program = build(made, cost, ranks, FSDPConfig(reshard_after_forward=True), 2, 0)
    timeline = simulate(program, topology, ranks)
    assert timeline.makespan > 2 * 8 * 3e-3
    assert sum(op.nbytes for op in ops(program, "all_gather")) == 2 * 2 * 4 * made.parameters


def test_ops_do_not_grow_with_the_world():
    made = model()
    counts = [len(build(made, toy_cost(made), mesh(n, 8), FSDPConfig(), 2, 0).roles[0].ops) for n in (8, 4096)]
    assert counts[0] == counts[1]


def test_one_rank_communicates_nothing():
    made = model()
    program = build(made, toy_cost(made), mesh(1, 1), FSDPConfig(clip_grad_norm=True), 2, 0)
    assert all(isinstance(op, Compute) for op in program.roles[0].ops)


# --- memory ------------------------------------------------------------------------------------------------------


def peak(**knobs) -> float:
    return float(holding(model(), mesh(), FSDPConfig(**knobs)).gathered.max())


def test_the_documentation_orders_prefetches_by_what_they_hold():
    """Of backward: "BACKWARD_PRE ... increases the peak memory usage", POST less, None no prefetched unit at all."""
    held = [
        holding(model(root=0), mesh(), FSDPConfig(version=1, backward_prefetch=p)).gathered[8:].max()
        for p in ("BACKWARD_PRE", "BACKWARD_POST", "None")
    ]
    assert held == [2 * 4 * N, 4 * N, 4 * N]


def test_bounding_gathers_bounds_memory():
    assert peak(version=1) < peak(version=1, forward_prefetch=True) < peak(version=1, limit_all_gathers=False)
    assert peak(version=1, limit_all_gathers=False) == 4 * 7 * N
    assert peak() < peak(reshard_after_forward=False)


def test_a_rank_keeps_its_share_of_everything():
    use = holding(model(), mesh(), FSDPConfig(param_dtype="bf16"))
    assert use.parameters == 4 * 7 * N / 8
    assert use.updated == 7 * N / 8
    assert use.gradients[-1] == 4 * 7 * N / 8
    assert use.gradients[0] == 0
    assert holding(model(), mesh(), FSDPConfig(cpu_offload=True)).parameters == 0


def test_no_sync_keeps_whole_gradients():
    plain = holding(model(), mesh(), FSDPConfig(gradient_accumulation_steps=2))
    piled = holding(model(), mesh(), FSDPConfig(gradient_accumulation_steps=2, no_sync=True))
    assert piled.gradients.max() - plain.gradients.max() == 4 * 7 * N


def test_unsharded_gradients_are_added_up_in_the_type_of_their_reduction():
    """By version 2; version 1 keeps them as they are computed."""
    for version, size in ((2, 4), (1, 2)):
        knobs = {"version": version, "param_dtype": "bf16", "reduce_dtype": "fp32", "gradient_accumulation_steps": 2}
        held = holding(model(), mesh(), FSDPConfig(no_sync=True, **knobs))
        assert held.gradients[0] == size * 7 * N


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"backward_prefetch": "BACKWARD_POST"}, "backward_prefetch belongs to version = 1"),
        ({"sharding_strategy": "FULL_SHARD"}, "version 2 writes reshard_after_forward"),
        ({"version": 1, "reshard_after_forward": True}, "write sharding_strategy"),
        ({"alloc_retries": True}, "alloc_retries belongs to version = 1"),
        ({"version": 1, "checkpoint_outside": True, "blocks_per_unit": 2}, "leave out blocks_per_unit"),
        ({"version": 1, "sharding_strategy": "FULL_SHARD", "data_parallel_replicate_degree": 2}, "HYBRID_SHARD"),
        ({"sharding_strategy": "FULL"}, "Invalid enum value"),
        ({"dram_bandwidth": "5 Gigs"}, "dram_bandwidth: cannot read '5 Gigs' as a bandwidth"),
    ],
)
def test_knobs_that_contradict_each_other_are_errors(knobs, message):
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert({"kind": "fsdp", **knobs}, FSDPConfig)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"data_parallel_replicate_degree": 3}, r"8 ranks do not divide into 3 .*data_parallel_replicate_degree"),
        ({"data_parallel_shard_degree": 4}, "leaves 2 replicas"),
        ({"data_parallel_shard_degree": 3, "data_parallel_replicate_degree": 2}, "not the 8 ranks"),
        ({"reshard_after_forward": 3}, r"8 sharding ranks do not divide by 3.*reshard_after_forward"),
    ],
)
def test_degrees_that_do_not_make_up_the_world_are_errors(knobs, message):
    made = model()
    with pytest.raises(ProgramError, match=message):
        build(made, toy_cost(made), mesh(), FSDPConfig(**knobs), 1, 0)
