"""What a split layer sends, and beside what."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from partitions import (
    LLAMA,
    configs,
    exchanges,
    kernels,
    layers,
    replace_config,
    small,
)

from clustersim.model import model, transformer
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition import Exchange, partition
from clustersim.training.partition.tensor import PARTED


@given(parallel=configs.filter(lambda parallel: parallel.sequence_parallel))
def test_sequence_parallelism_moves_five_quarters_of_the_bytes(parallel: ParallelConfig) -> None:
    plain = replace_config(parallel, sequence_parallel=False, tp_overlap="none")
    moved = []
    for config in (plain, replace_config(parallel, tp_overlap="none")):
        block = next(layer for layer in layers(partition(small(kv_heads=8), config)) if layer.kind == "block")
        found = [x for x in exchanges(block.forward) + exchanges(block.backward) if x.dims == ("tp",)]
        moved.append(sum(x.elements * (2 if x.kind == "all_reduce" else 1) for x in found))
    assert moved[1] == 1.25 * moved[0]


@pytest.mark.parametrize("overlap", ["userbuffers", "async_tp"])
def test_pieces_of_an_exchange_move_what_the_whole_one_does_on_a_ring(overlap: str) -> None:
    t = 4
    sent = {}
    for how in ("none", overlap):
        split = partition(LLAMA, ParallelConfig(tp=t, sequence_parallel=True, tp_overlap=how))
        block = split.stages[0].layers[1]
        found = exchanges(block.forward) + exchanges(block.backward)
        sent[how] = sum(x.elements * (1 if x.kind in {"ring", "copies"} else (t - 1) / t) for x in found)
    assert sent[overlap] == sent["none"]


def test_asynchronous_tp_cuts_a_reduce_scatter_behind_one_product_and_not_behind_a_sum_of_several() -> None:
    """torch/_inductor/fx_passes/micro_pipeline_tp.py: q, k and v, and gate and up, leave a sum; one qkv does not."""
    for whole, left in ((LLAMA, 2), (model("gpt2"), 0)):
        block = (
            partition(whole, ParallelConfig(tp=4, sequence_parallel=True, tp_overlap="async_tp")).stages[0].layers[1]
        )
        assert [x.kind for x in exchanges(block.forward)] == ["copies"] * 12
        kinds = [x.kind for x in exchanges(block.backward) if x.part == "I"]
        assert (kinds.count("reduce_scatter"), kinds.count("copies")) == (left, 12 - 3 * left)


@pytest.mark.parametrize(("overlap", "staged"), [("async_tp", 4), ("userbuffers", 0), ("none", 0)])
def test_symmetric_memory_holds_a_copy_of_the_own_piece(overlap: str, staged: int) -> None:
    block = partition(LLAMA, ParallelConfig(tp=4, sequence_parallel=True, tp_overlap=overlap)).stages[0].layers[1]
    names = [k.name for items in (block.forward, block.backward) for part in "FI" for k in kernels(items, part)]
    assert names.count("staged") == staged


def test_transformer_engines_pieces_are_of_one_product_of_an_input_and_dtensors_of_each() -> None:
    """linear_qkv and linear_fc1 hold q, k, v and gate, up: sliced along the rows, each slice is a product of all."""
    count = {}
    for overlap in ("userbuffers", "async_tp"):
        config = ParallelConfig(tp=4, sequence_parallel=True, tp_overlap=overlap)
        block = partition(LLAMA, config).stages[0].layers[1]
        found = [k for k in kernels(block.forward, "F") if k.kind == "gemm" and k.name in {"q", "k", "v", "gate", "up"}]
        count[overlap] = len(found), sum(k.n * k.m for k in found), sum(k.flops for k in found)
    (fused, elements, flops), (apart, *same) = count["userbuffers"], count["async_tp"]
    assert (fused, apart) == (2 * 4, 5 * 4)  # qkv, fc1; q, k, v, gate, up: four slices of each
    assert [elements, flops] == same


@pytest.mark.parametrize(("framework", "copies"), [("megatron", 0), ("torchtitan", 10)])
def test_dtensor_copies_what_it_gathers_and_what_it_scatters_along_the_sequence(framework: str, copies: int) -> None:
    """torch/distributed/_functional_collectives.py: chunk and cat where the dimension is not the first."""
    config = ParallelConfig(framework=framework, tp=4, sequence_parallel=True)
    block = partition(LLAMA, config).stages[0].layers[1]
    found = exchanges(block.forward) + exchanges(block.backward)
    names = [k.name for items in (block.forward, block.backward) for part in "FI" for k in kernels(items, part)]
    assert sum(name in {"joined", PARTED} for name in names) == (copies and len(found))


@pytest.mark.parametrize("overlap", ["none", "async_tp"])
def test_float8_tensor_parallelism_gathers_8_bits_in_blocks_and_sums_16(overlap: str) -> None:
    config = ParallelConfig(framework="torchtitan", tp=4, sequence_parallel=True, tp_overlap=overlap, float8_tp=True)
    block, head = (partition(LLAMA, config).stages[0].layers[i] for i in (1, -1))
    found = exchanges(block.forward) + exchanges(block.backward)
    gathers = {x.name for x in found if "input gradient" not in x.name and ("input" in x.name or "gradient" in x.name)}
    assert {x.name for x in found if x.dtype == "fp8"} == gathers
    assert all(x.dtype != "fp8" for x in exchanges(head.forward) + exchanges(head.backward))


def test_operators_kept_by_selective_checkpointing_are_not_taken_apart_again() -> None:
    config = ParallelConfig(framework="torchtitan", tp=4, sequence_parallel=True)
    block = partition(LLAMA, config, Recompute("selective_op")).stages[0].layers[1]
    assert PARTED not in [k.name for k in kernels(block.backward, "R")]


def test_the_backward_all_reduce_runs_beside_the_weight_gradient_of_the_same_linear() -> None:
    beside = partition(LLAMA, ParallelConfig(tp=2)).stages[0].layers[1].backward
    for i, item in enumerate(beside):
        if isinstance(item, Exchange):
            assert item.kind == "all_reduce"
            assert (beside[i + 1].part, beside[i + 1].needs) == ("W", ())
            assert (beside[i + 2].part, beside[i + 2].needs) == ("I", (i,))
    blocking = partition(LLAMA, ParallelConfig(tp=2, tp_grad_overlap=False)).stages[0].layers[1].backward
    for i, item in enumerate(blocking):
        if isinstance(item, Exchange):
            assert (blocking[i + 1].part, blocking[i + 1].needs) == ("I", (i,))


def test_the_input_is_gathered_again_beside_its_gradient_and_reduced_beside_the_weights() -> None:
    items = partition(LLAMA, ParallelConfig(tp=2, sequence_parallel=True)).stages[0].layers[1].backward
    again = [i for i, item in enumerate(items) if isinstance(item, Exchange) and item.part == "W"]
    assert len(again) == 2
    for i in again:
        kinds = [(getattr(item, "kind", "work"), item.part) for item in items[i : i + 4]]
        assert kinds == [("all_gather", "W"), ("work", "I"), ("reduce_scatter", "I"), ("work", "W")]
        assert i not in items[i + 1].needs
        assert items[i + 3].needs == (i,)


def test_partitioned_messages_are_a_share_that_the_receiver_gathers() -> None:
    whole = small()
    split = partition(whole, ParallelConfig(tp=4, pp=2, pipeline_partitioned=True))
    plain = partition(whole, ParallelConfig(tp=4, pp=2))
    first, second = (stage.chunks[0] for stage in split.stages)
    assert first.message * 4 == plain.stages[0].chunks[0].message == 256 * 512
    assert (second.layers[0].forward[0].kind, second.layers[0].forward[0].elements) == ("all_gather", 256 * 512)
    assert (first.layers[-1].backward[0].kind, first.layers[-1].backward[0].part) == ("all_gather", "I")


def test_consecutive_chunks_cost_what_the_last_rank_computes() -> None:
    whole = small()
    attention = next(kernel for kernel in whole.layers[1].kernels if kernel.kind == "attention")
    for comm in ("p2p", "all_gather"):
        config = ParallelConfig(cp=4, cp_comm_type=comm, cp_load_balancer="none")
        block = partition(whole, config).stages[0].layers[1]
        found = sum(k.flops for k in kernels(block.forward, "F") if k.kind == "attention")
        assert found == pytest.approx(attention.flops * (4**2 - 3**2) / 4**2)


@pytest.mark.parametrize("cp", [2, 4])
def test_pytorchs_context_parallelism_gathers_beside_its_first_step_and_sums_in_fp32(cp: int) -> None:
    whole = small(kv_heads=2)
    attention = next(kernel for kernel in whole.layers[1].kernels if kernel.kind == "attention")
    config = ParallelConfig(framework="torchtitan", cp=cp, cp_comm_type="all_gather")
    block = partition(whole, config).stages[0].layers[1]
    forward = exchanges(block.forward)
    backward = exchanges(block.backward)
    heads = 2.0 * 256 / cp * attention.heads * attention.head_dim  # keys and values, copied out to every query head
    assert [(x.kind, x.elements) for x in forward] == [("all_gather", cp * heads)]
    assert [(x.kind, x.elements, x.dtype) for x in backward[1:]] == [("ring", heads, "fp32")] * cp
    for items, part, flops in ((block.forward, "F", "flops"), (block.backward, "I", "backward_flops")):
        steps = [k for k in kernels(items, part) if k.kind == "attention"]
        assert len(steps) == cp
        assert sum(getattr(k, flops) for k in steps) == pytest.approx(getattr(attention, flops) / cp)
    first = next(i for i, item in enumerate(block.forward) if item is forward[0])
    ahead = next(item for item in block.forward[first + 1 :] if "attention" in item.name)
    assert first not in ahead.needs


def test_uneven_heads_of_an_all_to_all_take_as_long_as_the_rank_with_most() -> None:
    whole = transformer(2, 640, 10, 128, 1000)
    attention = next(kernel for kernel in whole.layers[1].kernels if kernel.kind == "attention")
    config = ParallelConfig(framework="deepspeed", cp=4, cp_comm_type="a2a")
    block = partition(whole, config).stages[0].layers[1]
    found = next(k for k in kernels(block.forward, "F") if k.kind == "attention")
    assert (found.heads, found.flops) == (3, attention.flops * 3 / 10)


def test_torchtitan_keeps_the_gathered_input_that_megatron_gathers_again() -> None:
    blocks = {}
    for framework in ("megatron", "torchtitan"):
        config = ParallelConfig(tp=4, sequence_parallel=True, framework=framework)
        blocks[framework] = partition(LLAMA, config).stages[0].layers[1]
    kinds = {name: Counter(x.kind for x in exchanges((*b.forward, *b.backward))) for name, b in blocks.items()}
    assert kinds["megatron"] == {"all_gather": 6, "reduce_scatter": 4}
    assert kinds["torchtitan"] == {"all_gather": 4, "reduce_scatter": 4}
    tensor = LLAMA.seq_len * LLAMA.hidden
    more = blocks["torchtitan"].kept_for_weights - blocks["megatron"].kept_for_weights
    assert more == 2 * (tensor - tensor / 4)


def test_a_ring_sends_on_what_has_come() -> None:
    config = ParallelConfig(tp=4, cp=4, sequence_parallel=True, tp_overlap="userbuffers")
    block = partition(LLAMA, config).stages[0].layers[1]
    for items in (block.forward, block.backward):
        rings = [
            (i, item) for i, item in enumerate(items) if isinstance(item, Exchange) and item.kind in {"ring", "copies"}
        ]
        assert len(rings) in {3 * 2 + 3, 3 * 2 + 4}
        for (before, one), (_, other) in pairwise(rings):
            if one.name.rsplit(" ", 3)[0] == other.name.rsplit(" ", 3)[0]:
                assert before in other.needs
