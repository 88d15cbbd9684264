"""A split model adds up to the whole one, and its lists can be played."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clustersim.errors import ModelError, ScenarioError
from clustersim.memory import memory
from clustersim.model import Kernel, Model
from clustersim.models import catalog, model, transformer
from clustersim.parallel import ParallelConfig, Recompute
from clustersim.partition import Exchange, Item, LocalLayer, Partition, Work, partition
from clustersim.partition.listing import has_weights
from clustersim.partition.stages import uniform, weighted
from clustersim.partition.tensor import PARTED

LLAMA = model("llama3.2-1b", seq_len=4096, implementation="fused")
OVERLAPS = ("none", "bulk", "userbuffers", "async_tp")


def small(**changes: object) -> Model:
    """Grouped queries, a gated MLP, rotary positions: every rule at once."""
    sizes = {"layers": 4, "d_model": 512, "heads": 16, "seq_len": 256, "vocab": 1000, "kv_heads": 4, "d_ff": 1024}
    options = {"activation": "swiglu", "norm": "rmsnorm", "positions": "rotary", "tied": False, "bias": False}
    return transformer(**(sizes | options | changes))


def layers(split: Partition) -> list[LocalLayer]:
    return [layer for stage in split.stages for layer in stage.layers]


def kernels(items: tuple[Item, ...], part: str) -> list[Kernel]:
    return [kernel for item in items if isinstance(item, Work) and item.part == part for kernel in item.kernels]


def exchanges(items: tuple[Item, ...]) -> list[Exchange]:
    return [item for item in items if isinstance(item, Exchange)]


def flops(items: tuple[Item, ...], part: str = "F") -> float:
    return sum(kernel.flops for kernel in kernels(items, part))


degrees = st.sampled_from([1, 2, 4, 8])
configs = st.builds(
    lambda tp, cp, pp, vpp, sp, overlap, comm: ParallelConfig(
        tp=tp, cp=cp, pp=pp, vpp=vpp if pp == 2 else 1, sequence_parallel=sp and tp > 1,
        tp_overlap=overlap if sp and tp > 1 else "none", cp_comm_type=comm if tp * cp <= 4 else "p2p",
    ),
    degrees, st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.booleans(),
    st.sampled_from(OVERLAPS), st.sampled_from(["p2p", "all_gather", "a2a"]),
)  # fmt: skip
recomputes = st.sampled_from(
    [
        Recompute(),
        Recompute("full"),
        Recompute("full", num_layers=2),
        Recompute("full", "block", 1),
        Recompute("selective", modules=("core_attn",)),
        Recompute("selective", modules=("mlp", "layernorm")),
        Recompute("selective_op"),
    ]
)


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
        assert _amounts(gradients) == pytest.approx(_amounts(ahead), rel=1e-12)
        products = [kernel for kernel in ahead if has_weights(kernel)]
        assert _amounts(weights) == pytest.approx(_amounts(products), rel=1e-12)


def _amounts(found: list[Kernel]) -> dict[str, float]:
    """Backward traffic and FLOPs by kernel; pieces of one add up, and copies around exchanges are not the model's."""
    total: Counter[str] = Counter()
    for kernel in found:
        if kernel.name in {"joined", PARTED, "partial sums"}:
            continue
        total[kernel.name] += kernel.backward_flops + kernel.backward_nbytes
    return dict(total)


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


@given(parallel=configs, recompute=recomputes)
def test_recomputation_trades_what_is_kept_for_what_is_brought_back(
    parallel: ParallelConfig, recompute: Recompute
) -> None:
    plain = layers(partition(small(), parallel))
    for before, after in zip(plain, layers(partition(small(), parallel, recompute)), strict=True):
        assert exchanges(after.forward) == exchanges(before.forward)
        assert flops(after.forward) == pytest.approx(flops(before.forward), rel=1e-12)
        whole, kept = before.kept + before.kept_for_weights, after.kept + after.kept_for_weights
        assert kept <= whole
        if after.repeated:
            assert kept < whole
            assert kept + after.repeated >= whole * (1 - 1e-12)
        assert _amounts(kernels(after.backward, "W")) == _amounts(kernels(before.backward, "W"))
        again = flops(after.backward, "R")
        assert again == 0 or recompute.granularity != "none"


@given(parallel=configs)
def test_full_recomputation_repeats_forward_with_its_exchanges(parallel: ParallelConfig) -> None:
    for layer in layers(partition(small(), parallel, Recompute("full"))):
        if layer.kind != "block":
            assert not [item for item in layer.backward if item.part == "R"]
            continue
        again = [item for item in layer.backward if item.part == "R"]
        assert flops(layer.backward, "R") == pytest.approx(flops(layer.forward))
        assert [(x.kind, x.dims, x.elements) for x in exchanges(tuple(again))] == [
            (x.kind, x.dims, x.elements) for x in exchanges(layer.forward)
        ]


def test_units_of_several_layers_are_repeated_by_their_last_one() -> None:
    split = partition(small(layers=6), ParallelConfig(), Recompute("full", "uniform", 4))
    blocks = [layer for layer in layers(split) if layer.kind == "block"]
    one = flops(blocks[0].forward)
    assert [flops(block.backward, "R") / one for block in blocks] == [0, 0, 0, 4, 0, 2]
    assert [bool(block.kept) for block in blocks] == [True, False, False, False, True, False]
    each = blocks[0].repeated
    assert [block.repeated / each for block in blocks] == [1, 2, 3, 4, 1, 2]


def test_block_recomputes_the_first_layers_of_every_stage() -> None:
    split = partition(small(layers=8), ParallelConfig(pp=2, vpp=2), Recompute("full", "block", 1))
    for stage in split.stages:
        for chunk in stage.chunks:
            blocks = [layer for layer in chunk.layers if layer.kind == "block"]
            assert [bool(layer.repeated) for layer in blocks] == [True, False]


@pytest.mark.parametrize("name", catalog())
def test_undivided_it_is_one_stage_with_the_same_kernels_and_tensors_and_no_exchange(name: str) -> None:
    whole = model(name)
    split = partition(whole, ParallelConfig())
    assert [layer.name for layer in layers(split)] == [layer.name for layer in whole.layers]
    assert len(split.stages) == len(split.stages[0].chunks) == 1
    assert split.tied == split.stages[0].chunks[0].message == 0
    for layer, part in zip(whole.layers, layers(split), strict=True):
        assert not exchanges(part.forward) + exchanges(part.backward)
        assert tuple(kernels(part.forward, "F")) == layer.kernels
        assert tuple(kernels(part.backward, "I")) == layer.kernels[::-1]
        assert {*part.tensors, *part.expert_tensors} == {*layer.tensors}
        assert len(part.tensors) + len(part.expert_tensors) == len(layer.tensors)


def described(name: str) -> bool:
    """Whether a shipped model's blocks are described kernel by kernel."""
    kinds = {kernel.name for kernel in model(name).layers[1].kernels}
    return "norm_1" in kinds and not model(name).family.startswith("transformer-xl")


@pytest.mark.parametrize("name", [name for name in catalog() if described(name)])
def test_what_kernels_keep_is_what_the_block_keeps(name: str) -> None:
    for implementation in ("eager", "flash", "fused"):
        for attention in ("eager", "flash"):
            whole = model(name, implementation=implementation, attention=attention)
            block = whole.layers[1]
            assert sum(kernel.saved for kernel in block.kernels) == block.activation_bytes
            part = partition(whole, ParallelConfig()).stages[0].layers[1]
            assert part.kept + part.kept_for_weights == block.activation_bytes


@given(parallel=configs.filter(lambda parallel: parallel.sequence_parallel))
def test_sequence_parallelism_moves_five_quarters_of_the_bytes(parallel: ParallelConfig) -> None:
    plain = replace_config(parallel, sequence_parallel=False, tp_overlap="none")
    moved = []
    for config in (plain, replace_config(parallel, tp_overlap="none")):
        block = next(layer for layer in layers(partition(small(kv_heads=8), config)) if layer.kind == "block")
        found = [x for x in exchanges(block.forward) + exchanges(block.backward) if x.dims == ("tp",)]
        moved.append(sum(x.elements * (2 if x.kind == "all_reduce" else 1) for x in found))
    assert moved[1] == 1.25 * moved[0]


def replace_config(parallel: ParallelConfig, **changes: object) -> ParallelConfig:
    fields = {name: getattr(parallel, name) for name in parallel.__struct_fields__}
    return ParallelConfig(**(fields | changes))


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


@pytest.mark.parametrize(("framework", "copies"), [("megatron", 0), ("torchtitan", 10)])
def test_dtensor_copies_what_it_gathers_and_what_it_scatters_along_the_sequence(framework: str, copies: int) -> None:
    """torch/distributed/_functional_collectives.py: chunk and cat where the dimension is not the first."""
    config = ParallelConfig(framework=framework, tp=4, sequence_parallel=True)
    block = partition(LLAMA, config).stages[0].layers[1]
    found = exchanges(block.forward) + exchanges(block.backward)
    names = [k.name for items in (block.forward, block.backward) for part in "FI" for k in kernels(items, part)]
    assert sum(name in {"joined", PARTED} for name in names) == (copies and len(found))


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


@given(
    stages=st.integers(1, 12), layers=st.integers(12, 130), first=st.integers(0, 1), last=st.integers(0, 1)
)  # fmt: skip
def test_uneven_splits_add_up_and_differ_by_one(stages: int, layers: int, first: int, last: int) -> None:
    assert sum(uniform(layers, stages)) == sum(weighted(layers, stages, first, last)) == layers
    counts = weighted(layers, stages, first, last)
    counts[0] += first
    counts[-1] += last
    assert max(counts) - min(counts) <= 1


def test_first_and_last_ranks_may_have_layers_of_their_own() -> None:
    def blocks(**settings: object) -> list[list[int]]:
        split = partition(small(layers=14), ParallelConfig(**settings))
        return [
            [sum(layer.kind == "block" for layer in chunk.layers) for chunk in stage.chunks] for stage in split.stages
        ]

    ends = {"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": 4}
    assert blocks(pp=4, **ends) == [[2], [4], [4], [4]]
    assert blocks(pp=4, vpp=2, **ends) == [[1, 1], [2, 2], [2, 2], [2, 2]]
    account = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    assert blocks(pp=4, **account) == [[3], [4], [4], [3]]
    assert blocks(pp=4, vpp=2, **account) == [[1, 2], [2, 2], [2, 2], [2, 1]]
    assert blocks(pp=4, layout=(2, 5, 5, 2)) == [[2], [5], [5], [2]]


def test_placements_give_ranks_their_stages() -> None:
    whole = small(layers=8, tied=True)
    v = partition(whole, ParallelConfig(pp=2, vpp=2), placement="v")
    assert [[chunk.stage for chunk in stage.chunks] for stage in v.stages] == [[0, 3], [1, 2]]
    # Embedding and head are on one rank, which shares the table.
    assert v.tied == 0
    assert sum(stage.parameters for stage in v.stages) == whole.parameters
    both = partition(whole, ParallelConfig(pp=2), placement="both")
    assert [[chunk.stage for chunk in stage.chunks] for stage in both.stages] == [[0, 1], [1, 0]]
    assert sum(stage.parameters for stage in both.stages) == 2 * whole.parameters


def test_models_without_blocks_are_split_by_layers() -> None:
    whole = model("resnet50")
    split = partition(whole, ParallelConfig(pp=2, layout=(40, 33)))
    assert [len(stage.layers) for stage in split.stages] == [40, 33]
    assert split.stages[0].chunks[0].message == whole.layers[40].boundary_bytes
    assert sum(stage.parameters for stage in split.stages) == whole.parameters


def test_norms_whose_rank_sees_a_part_of_the_tokens_are_summed_over_ranks() -> None:
    whole = small()
    parts = [layers(partition(whole, ParallelConfig(tp=2, sequence_parallel=sp))) for sp in (False, True)]
    assert sum(part.replicated for part in parts[0]) == 0
    assert sum(part.replicated for part in parts[1]) == 512 * (2 * 4 + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 3}, "tp = 3 does not divide"),
        ({"pp": 3}, "pp = 3: 4 layers do not divide over 3 ranks"),
        ({"pp": 2, "layout": (1, 2)}, "layout has 2 stages of 3 layers together"),
        ({"pp": 2, "layout": "Et|tL"}, "layout has 2 stages with 1 E, 2 t"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_field(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ScenarioError, match=message):
        partition(small(), ParallelConfig(**settings))


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ScenarioError, match="resnet50 has nothing that tensor parallelism cuts"):
        partition(model("resnet50"), ParallelConfig(tp=2))
    with pytest.raises(ModelError, match="cp = 2 needs fused attention"):
        partition(small(attention="eager"), ParallelConfig(cp=2))
    with pytest.raises(ScenarioError, match="gives every rank 2 chunks"):
        partition(small(), ParallelConfig(pp=2), placement="v")


def test_consecutive_chunks_cost_what_the_last_rank_computes() -> None:
    whole = small()
    attention = next(kernel for kernel in whole.layers[1].kernels if kernel.kind == "attention")
    for comm in ("p2p", "all_gather"):
        config = ParallelConfig(cp=4, cp_comm_type=comm, cp_load_balancer="none")
        block = partition(whole, config).stages[0].layers[1]
        found = sum(k.flops for k in kernels(block.forward, "F") if k.kind == "attention")
        assert found == pytest.approx(attention.flops * (4**2 - 3**2) / 4**2)


def test_delayed_weight_gradients_hold_what_the_zero_bubble_paper_says() -> None:
    # Per token of a GPT block with fused attention F leaves 34 h bytes, and I leaves 32 h, which W frees
    # (arXiv:2401.10241 s4: 34 h, -2 h, -32 h). Dropout's masks are 2 h of the 34 h, and this model has none.
    whole = transformer(2, 512, 8, 128, 1000, implementation="fused")
    block = partition(whole, ParallelConfig()).stages[0].layers[1]
    h = 512 * 128
    assert 2 * (block.kept + block.kept_for_weights) == 32 * h
    assert 2 * (block.kept_for_weights + block.stashed) == 32 * h


def test_equal_layers_share_their_items() -> None:
    split = partition(model("llama3-8b"), ParallelConfig(tp=2, pp=2))
    assert len({id(layer.forward) for layer in layers(split)}) == 3


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ends_of_the_pipeline_keep_what_the_formulas_say(sequence_parallel: bool) -> None:
    # Korthikanti et al., arXiv:2205.05198 s4.3: the embedding's dropout mask sbh, the final norm's input and the head's
    # 2 sbh each, all of them 1/t with sequence parallelism; fp32 logits 4 s b V / t.
    t, tokens, h = 2, 1024, 768
    whole = model("gpt2")
    split = partition(whole, ParallelConfig(tp=t, pp=2, sequence_parallel=sequence_parallel))
    first, head = split.stages[0].layers[0], split.stages[1].layers[-1]
    share = tokens * h / (t if sequence_parallel else 1)
    assert 2 * (first.kept + first.kept_for_weights) == share
    assert (2 * head.kept, 2 * head.kept_for_weights) == (2 * share, 2 * share)
    assert 4 * head.fp32_kept == 4 * tokens * 50432 / t


@given(parallel=configs.filter(lambda parallel: parallel.tp == 1), recompute=recomputes)
def test_context_parallelism_divides_what_is_kept(parallel: ParallelConfig, recompute: Recompute) -> None:
    whole = layers(partition(small(), replace_config(parallel, cp=1), recompute))
    for one, part in zip(whole, layers(partition(small(), parallel, recompute)), strict=True):
        for name in ("kept", "kept_for_weights", "repeated", "fp32_kept", "stashed"):
            assert getattr(part, name) * parallel.cp == pytest.approx(getattr(one, name), rel=1e-12)


@pytest.mark.parametrize(
    ("policy", "recompute"),
    [("none", Recompute()), ("full", Recompute("full")), ("selective", Recompute("selective_op"))],
)
@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "opt-1.3b"])
def test_undivided_it_keeps_what_the_memory_model_counts(name: str, policy: str, recompute: Recompute) -> None:
    whole = model(name)
    options = {"micro_batch_size": 1, "dtype": "bf16", "param_dtype": "bf16", "activation_checkpointing": policy}
    counted = memory(whole, **options)
    body = [layer for layer in layers(partition(whole, ParallelConfig(), recompute)) if layer.kind != "head"]
    kept = sum(layer.kept + layer.kept_for_weights for layer in body)
    assert 2 * (kept + max(layer.repeated for layer in body)) == counted.activations


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


def test_up_projections_computed_again_leave_attention_without_its_queries_keys_and_values():
    """DeepSeek-V3: 128 heads of 192 for queries and keys, of 128 for values; latent vectors stay."""
    deepseek = model("deepseek-v3", seq_len=4096)
    plain = partition(deepseek, ParallelConfig(pp=61)).stages[30].layers[0]
    again = partition(deepseek, ParallelConfig(pp=61), Recompute("selective", modules=("mla_up_proj",))).stages[30]
    (layer,) = again.layers
    dropped = 4096 * 128 * (192 + 192 + 128)
    assert layer.repeated == pytest.approx(dropped)
    assert plain.kept - layer.kept == pytest.approx(dropped, rel=0.05)
