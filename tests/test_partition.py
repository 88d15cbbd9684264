"""A split model adds up to the whole one, and its lists can be played."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from partitions import (
    amounts,
    configs,
    exchanges,
    flops,
    kernels,
    layers,
    recomputes,
    small,
)

from clustersim.core.model import Model
from clustersim.model import catalog, from_hf, model
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition import Exchange, LocalLayer, Work, partition
from clustersim.training.partition.nodes import has_weights


@given(parallel=configs, tied=st.booleans())
def test_parameters_of_all_ranks_are_the_models_with_padding_copies_and_replicas_counted(
    parallel: ParallelConfig, tied: bool
) -> None:
    whole = small(tied=tied)
    split = partition(whole, parallel)
    held = {tensor.name: tensor for layer in whole.layers for tensor in layer.tensors}
    ranks = parallel.tp
    total = 0
    for layer in layers(split):
        for tensor in layer.tensors:
            if tensor.tied_to:
                continue
            divided = tensor.cut not in {"whole", "sequence"}
            everywhere = tensor.numel * (ranks if divided else 1)
            padding = everywhere - held[tensor.name].numel
            assert padding == (24 * 512 if tensor.cut == "vocab" and ranks in {1, 2, 4, 8} and ranks > 1 else 0) or (
                tensor.cut == "vocab" and everywhere % (128 * ranks * 512) == 0 and padding >= 0
            )
            total += everywhere - padding
    copies = held["lm_head.weight"].numel if tied and len(split.stages) > 1 else 0
    assert total == whole.parameters + copies
    assert split.tied * ranks == (copies and -(-1000 // (128 * ranks)) * 128 * ranks * 512 if ranks > 1 else copies)


@given(parallel=configs)
def test_forward_flops_of_all_ranks_are_the_models_but_for_a_padded_vocabulary(parallel: ParallelConfig) -> None:
    whole = small()
    split = partition(whole, parallel)
    ranks = parallel.tp * parallel.cp
    for layer, parts in zip(whole.layers, sorted(layers(split), key=lambda part: _order(whole, part)), strict=True):
        expected = sum(kernel.flops for kernel in layer.kernels)
        if layer.kind == "head" and parallel.tp > 1:
            expected *= -(-1000 // (128 * parallel.tp)) * 128 * parallel.tp / 1000
        assert flops(parts.forward) * ranks == pytest.approx(expected, rel=1e-12)


def _order(whole: Model, layer: LocalLayer) -> int:
    return [other.name for other in whole.layers].index(layer.name)


@given(parallel=configs, recompute=recomputes)
def test_backward_has_every_kernel_of_forward_once_and_every_product_with_weights_twice(
    parallel: ParallelConfig, recompute: Recompute
) -> None:
    for layer in layers(partition(small(), parallel, recompute)):
        ahead = [k for k in kernels(layer.forward, "F") if k.launches or k.nbytes]
        gradients = [k for k in kernels(layer.backward, "I") if k.launches or k.nbytes]
        weights = kernels(layer.backward, "W")
        assert amounts(gradients) == pytest.approx(amounts(ahead), rel=1e-12)
        products = [kernel for kernel in ahead if has_weights(kernel)]
        assert amounts(weights) == pytest.approx(amounts(products), rel=1e-12)


@given(parallel=configs, recompute=recomputes)
def test_needs_name_earlier_items_and_weight_gradients_wait_for_no_other_ones(
    parallel: ParallelConfig, recompute: Recompute
) -> None:
    for layer in layers(partition(small(), parallel, recompute)):
        for items in (layer.forward, layer.backward):
            for i, item in enumerate(items):
                assert all(need < i for need in item.needs)
                if isinstance(item, Work):
                    assert all(isinstance(items[need], Exchange) for need in item.needs)
                if item.part != "W":
                    assert all(items[need].part != "W" for need in item.needs)
        assert {item.part for item in layer.forward} <= {"F"}
        parts = [item.part for item in layer.backward]
        assert set(parts) <= {"R", "I", "W"}


@pytest.mark.parametrize("name", catalog())
def test_undivided_it_is_one_stage_with_the_same_kernels_and_tensors_and_no_exchange(name: str) -> None:
    whole = model(name)
    # Megatron-LM's own GELU keeps less than the formula of Hugging Face's code; torchtitan runs the model's own.
    split = partition(whole, ParallelConfig(framework="torchtitan"))
    assert [layer.name for layer in layers(split)] == [layer.name for layer in whole.layers]
    assert len(split.stages) == len(split.stages[0].chunks) == 1
    assert split.tied == split.stages[0].chunks[0].message == 0
    for layer, part in zip(whole.layers, layers(split), strict=True):
        assert not exchanges(part.forward) + exchanges(part.backward)
        assert tuple(kernels(part.forward, "F")) == layer.kernels
        assert tuple(kernels(part.backward, "I")) == layer.kernels[::-1]
        assert {*part.tensors, *part.expert_tensors} == {*layer.tensors}
        assert len(part.tensors) + len(part.expert_tensors) == len(layer.tensors)


def test_norms_whose_rank_sees_a_part_of_the_tokens_are_summed_over_ranks() -> None:
    whole = small()
    parts = [layers(partition(whole, ParallelConfig(tp=2, sequence_parallel=sp))) for sp in (False, True)]
    assert sum(part.replicated for part in parts[0]) == 0
    assert sum(part.replicated for part in parts[1]) == 512 * (2 * 4 + 1)


def test_equal_layers_share_their_items() -> None:
    split = partition(model("llama3-8b"), ParallelConfig(tp=2, pp=2))
    assert len({id(layer.forward) for layer in layers(split)}) == 3


GEMMA_4 = {
    "model_type": "gemma4_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 32,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "attention_k_eq_v": True,
    "global_head_dim": 64,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size": 1024,
    "sliding_window": 16,
}
"""Blocks of 8 key-value heads, and of 2 that are wider."""


def test_a_block_is_cut_by_its_own_key_value_heads() -> None:
    whole = from_hf(GEMMA_4, seq_len=64, implementation="fused")
    assert [layer.kv_heads for layer in whole.layers if layer.kind == "block"] == [0, 2, 2]
    split = partition(whole, ParallelConfig(tp=4))
    blocks = [layer for layer in layers(split) if layer.kind == "block"]
    # Four ranks have two heads each of eight; of two, each rank gathers what its heads need.
    gathered = [any(x.name.endswith("heads") for x in exchanges(block.forward)) for block in blocks]
    assert gathered == [False, True, True]
    for layer, part in zip([x for x in whole.layers if x.kind == "block"], blocks, strict=True):
        assert flops(part.forward) * 4 == pytest.approx(sum(k.flops for k in layer.kernels), rel=1e-12)
    kept = [next(k for k in kernels(block.forward, "F") if k.name == "attention") for block in blocks]
    # 4 query heads and 2 keys with values of 32 elements; 4 and 1 of 64.
    assert [kernel.saved for kernel in kept[:2]] == [64 * 32 * (4 + 2 * 2), 64 * 64 * (4 + 2 * 1)]
