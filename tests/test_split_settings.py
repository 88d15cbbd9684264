"""Settings of [parallel] that move work, messages or memory about: each does what its framework's code says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clustersim import scenario
from clustersim.core.errors import ClusterSimError
from clustersim.core.program import Collective, Compute
from clustersim.model import model
from clustersim.scenario.run.split_step import beyond
from clustersim.training.parallel import ParallelConfig
from clustersim.training.partition import Exchange, Work, partition
from clustersim.training.schedules import schedule

PIPELINE = "interleaved_gpt2_xl_1x8_a100"
SMALL = {
    "model.name": "gpt2",
    "model.seq_len": 128,
    "parallel.pp": 4,
    "parallel.vpp": 3,
    "parallel.microbatches": 8,
    "parallel.global_batch_size": None,
    "parallel.overlap_grad_reduce": True,
    "run.steps": 1,
}
PARTIAL = "parallel.num_microbatches_with_partial_activation_checkpoints"


def prepared(**changes: Any) -> Any:
    said = SMALL | {f"parallel.{name}": value for name, value in changes.items()}
    return scenario.load(PIPELINE, {name: value for name, value in said.items() if value is not None}).prepare()


def passes_until_reduced(ops: Any) -> Iterator[tuple[int, int]]:
    """(backward passes begun behind the last one of a chunk, all that are begun at the end) of every reduction."""
    seen: list[tuple[int, int]] = []
    for op in ops:
        if isinstance(op, Compute) and op.label and op.label.action in {"B", "W", "I"}:
            one = (op.label.microbatch, op.label.chunk)
            seen += [one] * (one not in seen)
        if isinstance(op, Collective) and op.name.split()[1] == "gradients":
            chunk = int(op.name.split()[-1].split(".")[0])
            last = max(i for i, (_, of) in enumerate(seen) if of == chunk)
            yield len(seen) - 1 - last, last


def test_stages_reduce_a_chunk_as_many_backward_passes_later_as_they_are_far_down() -> None:
    for rank, role in enumerate(prepared().program.roles):
        found = list(passes_until_reduced(role.ops))
        # Chunks are complete at passes 7 + 8 c of 24; what is left at the end of the step is reduced there.
        assert {waited for waited, last in found} == {min(rank, 23 - last) for _, last in found}
        assert len({last for _, last in found}) == 3


def test_without_alignment_a_bucket_is_reduced_in_the_pass_that_completes_it() -> None:
    for role in prepared(align_grad_reduce=False).program.roles:
        assert {waited for waited, _ in passes_until_reduced(role.ops)} == {0}


@pytest.mark.parametrize(("count", "made"), [(1, 1), (4, 2), (8, 2), (9, 4)])
def test_buckets_of_the_first_chunk_may_be_given_by_their_number(count: int, made: int) -> None:
    """Three blocks of 7.09 million parameters and an embedding of 39.4: a bucket ends with the layer that fills it."""
    ops = prepared(vpp=1, ddp_num_buckets=count).program.roles[0].ops
    assert sum(isinstance(op, Collective) and "gradients 0." in op.name for op in ops) == made


def test_what_is_sent_is_kept_unless_it_is_deallocated() -> None:
    """2 s b h a micro-batch in flight (Korthikanti et al., appendix B), of every stage that sends any."""
    kept, freed = (prepared(vpp=1, deallocate_pipeline_outputs=frees).split for frees in (False, True))
    batch = scenario.load(PIPELINE).config.micro_batch_size
    size = 2 * 128 * 768
    more = [one.activations - other.activations for one, other in zip(kept.memory, freed.memory, strict=True)]
    assert more == [batch * size * min(8, 4 - rank) * (rank < 3) for rank in range(4)]


def test_of_every_window_in_flight_the_first_micro_batches_recompute_some_layers_and_the_others_all() -> None:
    orders = schedule("1f1b").order(4, 1, 8)
    for rank, order in enumerate(orders):
        window = 4 - rank
        assert beyond(order, 2) == {(i, 0) for i in range(8) if i % window >= 2}
        assert beyond(order, window) == frozenset()
        assert len(beyond(order, 0)) == 8


def repeated(program: Any) -> list[int]:
    """Forwards of blocks that each stage repeats."""
    return [
        sum(isinstance(op, Compute) and bool(op.label) and op.label.action == "R" for op in role.ops)
        for role in program.roles
    ]


def test_partial_checkpoints_lie_between_none_and_all_in_work_and_in_memory() -> None:
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    none = prepared(vpp=1)
    every = prepared(vpp=1, **full)
    assert (repeated(none.program), repeated(every.program)) == ([0] * 4, [24] * 4)
    for count in range(5):
        some = scenario.load(PIPELINE, SMALL | {"parallel.vpp": 1, PARTIAL: count}).prepare()
        expected = [3 * sum(i % (4 - rank) >= count for i in range(8)) for rank in range(4)]
        assert repeated(some.program) == expected
        stages = zip(none.split.memory, some.split.memory, every.split.memory, strict=True)
        for rank, (most, use, least) in enumerate(stages):
            assert least.activations <= use.activations <= most.activations
            if count == 0:
                assert use.activations == least.activations
            if count >= 4 - rank:
                assert use.activations == most.activations


def test_a_step_takes_longer_the_more_micro_batches_recompute_all_layers() -> None:
    changes = SMALL | {"parallel.vpp": 1, PARTIAL: 1, "cluster.nodes": 2}
    loaded = scenario.load(PIPELINE, changes)
    assert loaded.run().timeline.makespan > scenario.load(PIPELINE, changes | {PARTIAL: 4}).run().timeline.makespan


def exchanges(items: Any, kind: str = "all_to_all") -> list[tuple[int, Exchange]]:
    return [(i, item) for i, item in enumerate(items) if isinstance(item, Exchange) and item.kind == kind]


def test_ulysses_waits_for_the_gradients_of_values_first_and_for_the_others_where_they_are_used() -> None:
    def backward(name: str, overlap: bool) -> Any:
        config = ParallelConfig(cp=2, cp_comm_type="a2a", framework="deepspeed", sp_overlap_comm=overlap)
        return partition(model(name, seq_len=1024), config).stages[0].layers[1].backward

    items = backward("llama3-8b", True)
    values, keys, queries = (i for i, item in exchanges(items) if "output" not in item.name)
    waits = {
        kernel.name: item.needs
        for item in items[queries:]
        if isinstance(item, Work)
        for kernel in item.kernels
        if item.part == "I"
    }
    assert (waits["v"], waits["k"], waits["q"]) == ((values,), (keys, queries), (keys, queries))
    plain = backward("llama3-8b", False)
    assert sum(item.elements for _, item in exchanges(items)) == sum(item.elements for _, item in exchanges(plain))
    kernels = [
        sorted(k.name for item in list_ if isinstance(item, Work) for k in item.kernels) for list_ in (items, plain)
    ]
    assert kernels[0] == kernels[1]
    assert backward("gpt2", True) == backward("gpt2", False)


def test_one_product_for_queries_keys_and_values_has_nothing_to_overlap_and_the_run_says_so() -> None:
    config = ParallelConfig(cp=2, cp_comm_type="a2a", framework="deepspeed", sp_overlap_comm=True)
    assert any(note.startswith("sp_overlap_comm changes nothing") for note in partition(model("gpt2"), config).notes)
    assert not partition(model("llama3-8b", seq_len=1024), config).notes


def test_delayed_weight_gradients_leave_the_way_home_free() -> None:
    def backward(delayed: bool) -> Any:
        config = ParallelConfig(ep=8, etp=1, dispatcher="alltoall", ep_overlap=True, delay_wgrad_compute=delayed)
        return partition(model("mixtral-8x7b"), config).stages[0].layers[1].backward

    early = backward(False)
    late = backward(True)
    home = max(i for i, _ in exchanges(late))

    def at(items: Any, part: str, name: str) -> int:
        return next(i for i, x in enumerate(items) if isinstance(x, Work) and x.part == part and name in x.name)

    assert at(late, "I", "experts") < home < at(late, "W", "experts")
    assert at(early, "W", "experts") < max(i for i, _ in exchanges(early))
    assert late[-1].part == "W"
    assert "attention" in late[-1].name
    whole = [
        sorted((x.part, k.name) for x in items if isinstance(x, Work) for k in x.kernels) for items in (early, late)
    ]
    assert whole[0] == whole[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute = true needs ep_overlap = true, which is false"),
        ({"sp_overlap_comm": True}, "sp_overlap_comm = true overlaps what only cp > 1 sends; cp is 1"),
        ({"sp_overlap_comm": True, "pp": 4, "vpp": 2, "cp": 2}, "needs cp_comm_type = 'a2a'; it is 'p2p'"),
        (
            {PARTIAL: 2, "schedule": "gpipe", "vpp": 1},
            "in flight of schedule '1f1b' or 'interleaved_1f1b', not 'gpipe'",
        ),
        ({PARTIAL: 2, "recompute_granularity": "selective"}, "needs recompute_granularity = 'full', or none"),
    ],
)
def test_what_a_setting_needs_is_said_in_one_line(changes: dict[str, Any], said: str) -> None:
    said_by_name = {name if "." in name else f"parallel.{name}": value for name, value in changes.items()}
    with pytest.raises(ClusterSimError) as raised:
        scenario.load(PIPELINE, said_by_name).prepare()
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_fsdp_gathers_and_reduces_spread_experts_apart_among_those_who_hold_the_same() -> None:
    """torchtitan: experts are sharded over dp_shard * cp * tp / ep = 8 ranks, everything else over 64."""
    changes = {
        "model.options": {"layers": 2},
        "run.steps": 2,
        "parallel": {"framework": "torchtitan", "ep": 8, "microbatches": 1},
        "strategy": {"kind": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32"},
    }
    made = scenario.load("ep8_mixtral_8x7b_8x8_h100", changes).prepare()
    stage = made.split.partition.stages[0]
    ops = [op for op in made.program.roles[0].ops if isinstance(op, Collective) and op.step == 1 and op.label is None]
    ops = [op for op in ops if op.kind in {"all_gather", "reduce_scatter"}]
    dense = [tensor for layer in stage.layers for tensor in layer.tensors if not tensor.tied_to]
    padded = sum(-(-tensor.rows // 64) * 64 * tensor.width for tensor in dense)  # the router has 8 rows
    for experts, ranks, held in ((True, 8, stage.expert_parameters), (False, 64, padded)):
        mine = [op for op in ops if op.name.endswith("experts") == experts]
        assert {op.groups.shape[1] for op in mine} == {ranks}
        assert {op.communicator for op in mine} == {"edp" if experts else "world"}
        moved = {kind: sum(op.nbytes for op in mine if op.kind == kind) for kind in ("all_gather", "reduce_scatter")}
        assert moved["reduce_scatter"] == pytest.approx(4.0 * held, rel=1e-5)
        # Backward gathers again what forward has freed: all but the root.
        assert 2.0 * held < moved["all_gather"] <= 4.0 * held * (1 + 1e-5)
    at_peak = made.memory.at_peak()
    assert at_peak["optimizer_states"] == pytest.approx(8.0 * (stage.parameters / 64 + stage.expert_parameters / 8))
    assert scenario.load("ep8_mixtral_8x7b_8x8_h100", changes).run().summary["step_time_s"] > 0


def test_megatron_refuses_micro_batches_that_leave_a_rest_below_pp_and_without_a_framework_the_run_says_it() -> None:
    uneven = {"microbatches": 10}
    notes = prepared(**uneven).notes
    assert any("10 micro-batches on pp = 4" in note and "PyTorch's rounds" in note for note in notes)
    with pytest.raises(ClusterSimError, match=r"needs a multiple of pp, such as 8.*parallel.microbatches"):
        prepared(**uneven, framework="megatron")
    assert not any("rounds" in note for note in prepared(microbatches=8, framework="megatron").notes)


def test_megatrons_parameters_have_the_type_of_the_products_unless_it_is_said() -> None:
    table = {
        "cluster": {"topology": "hgx-a100", "nodes": 1},
        "model": {"name": "gpt2", "seq_len": 128, "dtype": "bf16"},
        "parallel": {"tp": 2, "framework": "megatron"},
        "strategy": {"kind": "ddp"},
    }
    half = scenario.from_table(table)
    wide = scenario.from_table(table, changes={"strategy.param_dtype": "fp32"})
    assert half.config.param_dtype == "bf16"
    assert any("fp32 copies in the optimizer" in note for note in half.prepare().notes)
    assert not any("fp32 copies in the optimizer" in note for note in wide.prepare().notes)
    use = half.prepare().memory
    assert use.gradients == 2 * use.parameters  # kept in fp32
    assert use.master_weights == 2 * use.parameters
    narrow = scenario.from_table(table, changes={"parallel.grad_reduce_in_fp32": False}).prepare()
    assert narrow.memory.gradients == narrow.memory.parameters
    sent = [op for role in narrow.program.roles for op in role.ops if isinstance(op, Collective)]
    assert max(sent, key=lambda op: op.nbytes).dtype == "bf16"


def test_gradients_of_experts_have_buckets_as_large_as_dense_ones() -> None:
    """Megatron-Core gives both buffers the same bucket_size: the first layers' wait for none of the last."""
    changes = {"model.options": {"layers": 4}, "cluster.nodes": 2, "run.steps": 1}
    made = scenario.load("ep8_mixtral_8x7b_8x8_h100", changes)
    ops = made.prepare().program.roles[0].ops
    names = {op.name for op in ops if isinstance(op, Collective) and "scatter expert" in op.name}
    assert made.file.parallel.overlap_grad_reduce
    assert len(names) > 1
