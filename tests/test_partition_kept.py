"""What a layer keeps for backward, and what backward computes again."""

from __future__ import annotations

import pytest
from hypothesis import given
from partitions import (
    amounts,
    configs,
    exchanges,
    flops,
    kernels,
    layers,
    recomputes,
    replace_config,
    small,
)

from clustersim.model import catalog, model, transformer
from clustersim.training import memory as of_memory
from clustersim.training.parallel import ParallelConfig, Recompute
from clustersim.training.partition import partition
from clustersim.training.partition.base import Work
from clustersim.training.partition.kept import with_linears_in_8_bits


def memory(model, **training):
    return of_memory.memory(model, of_memory.Training(**training))


@given(parallel=configs, recompute=recomputes)
def test_recomputation_trades_what_is_kept_for_what_is_brought_back(
    parallel: ParallelConfig, recompute: Recompute
) -> None:
    plain = layers(partition(small(), parallel))
    for before, after in zip(plain, layers(partition(small(), parallel, recompute)), strict=True):
        assert exchanges(after.forward) == exchanges(before.forward)
        assert flops(after.forward) == pytest.approx(flops(before.forward), rel=1e-12)
        whole = before.kept + before.kept_for_weights
        kept = after.kept + after.kept_for_weights
        assert kept <= whole
        if after.repeated:
            assert kept < whole
            assert kept + after.repeated >= whole * (1 - 1e-12)
        assert amounts(kernels(after.backward, "W")) == amounts(kernels(before.backward, "W"))
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


def described(name: str) -> bool:
    """Whether a shipped model's blocks are described kernel by kernel."""
    kinds = {kernel.name for kernel in model(name).layers[1].kernels}
    return "norm_1" in kinds and model(name).family not in {"transformer-xl", "seq2seq"}


@pytest.mark.parametrize("name", [name for name in catalog() if described(name)])
def test_what_kernels_keep_is_what_the_block_keeps(name: str) -> None:
    for implementation in ("eager", "flash", "fused"):
        for attention in ("eager", "flash"):
            whole = model(name, implementation=implementation, attention=attention)
            block = whole.layers[1]
            assert sum(kernel.saved for kernel in block.kernels) == block.activation_bytes
            # As PyTorch runs it: others have one kernel where GPT-2's GELU is a formula.
            part = partition(whole, ParallelConfig(framework="torchtitan")).stages[0].layers[1]
            assert part.kept + part.kept_for_weights == block.activation_bytes


def test_delayed_weight_gradients_hold_what_the_zero_bubble_paper_says() -> None:
    # Per token of a GPT block with fused attention F leaves 34 h bytes, and I leaves 32 h, which W frees
    # (arXiv:2401.10241 s4: 34 h, -2 h, -32 h). Dropout's masks are 2 h of the 34 h, and this model has none.
    whole = transformer(2, 512, 8, 128, 1000, implementation="fused")
    block = partition(whole, ParallelConfig()).stages[0].layers[1]
    h = 512 * 128
    assert 2 * (block.kept + block.kept_for_weights) == 32 * h
    assert 2 * (block.kept_for_weights + block.stashed) == 32 * h


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_the_ends_of_the_pipeline_keep_what_the_formulas_say(sequence_parallel: bool) -> None:
    # Korthikanti et al., arXiv:2205.05198 s4.3: the embedding's dropout mask sbh, the final norm's input and the head's
    # 2 sbh each, all of them 1/t with sequence parallelism; fp32 logits 4 s b V / t.
    t = 2
    tokens = 1024
    h = 768
    whole = model("gpt2")
    split = partition(whole, ParallelConfig(tp=t, pp=2, sequence_parallel=sequence_parallel))
    first = split.stages[0].layers[0]
    head = split.stages[1].layers[-1]
    share = tokens * h / (t if sequence_parallel else 1)
    assert 2 * (first.kept + first.kept_for_weights) == share
    assert (2 * head.kept, 2 * head.kept_for_weights) == (2 * share, 2 * share)
    assert 4 * head.fp32_kept == 4 * tokens * 50432 / t


@given(parallel=configs.filter(lambda parallel: parallel.tp == 1), recompute=recomputes)
def test_context_parallelism_divides_what_is_kept(parallel: ParallelConfig, recompute: Recompute) -> None:
    whole = layers(partition(small(), replace_config(parallel, cp=1), recompute))
    for one, part in zip(whole, layers(partition(small(), parallel, recompute)), strict=True):
        for name in ("kept", "kept_for_weights", "repeated", "working", "fp32_kept", "stashed"):
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
    body = [
        layer
        for layer in layers(partition(whole, ParallelConfig(framework="torchtitan"), recompute))
        if layer.kind != "head"
    ]
    kept = sum(layer.kept + layer.kept_for_weights for layer in body)
    before = counted.course.moments.index("fwd head") - 1
    assert 2 * kept == counted.course.parts["activations"][before]


def test_up_projections_computed_again_leave_attention_without_its_queries_keys_and_values():
    """DeepSeek-V3: 128 heads of 192 for queries and keys, of 128 for values; latent vectors stay."""
    deepseek = model("deepseek-v3", seq_len=4096)
    plain = partition(deepseek, ParallelConfig(pp=61)).stages[30].layers[0]
    again = partition(deepseek, ParallelConfig(pp=61), Recompute("selective", modules=("mla_up_proj",))).stages[30]
    (layer,) = again.layers
    dropped = 4096 * 128 * (192 + 192 + 128)
    assert layer.repeated == pytest.approx(dropped)
    assert plain.kept - layer.kept == pytest.approx(dropped, rel=0.05)


def test_activations_in_8_bits_are_those_of_products_and_gates() -> None:
    """Of a block with experts: their inputs, but not attention's output, and nothing that experts put out."""
    made = model("deepseek-v2-lite", seq_len=1024, layers=3, implementation="fused")
    plain, narrow = (
        partition(
            made,
            ParallelConfig(framework="torchtitan", ep=8, etp=1, dispatcher="alltoall", float8_activations=short),
        )
        .stages[0]
        .layers[3]
        for short in (False, True)
    )
    was = {k.name: k.saved for w in plain.forward if isinstance(w, Work) for k in w.kernels}
    now = {k.name: k.saved for w in narrow.forward if isinstance(w, Work) for k in w.kernels}
    eighth = (1 + 4 / 128) / 2
    for name in ("expert_gate", "expert_down", "expert_activation", "shared_activation", "shared_down"):
        assert 0 < now[name] == pytest.approx(was[name] * eighth)
    assert [now[name] for name in ("out", "norm_1", "norm_2")] == [was[name] for name in ("out", "norm_1", "norm_2")]
    assert was["combine"] > now["combine"] == 0
    assert narrow.stashed == pytest.approx(plain.stashed * eighth)


def test_what_predicts_a_further_token_keeps_its_block_in_8_bits_and_what_its_logits_read_in_16() -> None:
    made = model("deepseek-v3", seq_len=1024, layers=4, mtp=1, implementation="fused")
    saved = []
    for short in (False, True):
        parallel = ParallelConfig(ep=8, etp=1, dispatcher="alltoall", float8_activations=short)
        (layer,) = (x for x in partition(made, parallel).stages[0].layers if x.kind == "mtp")
        saved.append({k.name: k.saved for w in layer.forward if isinstance(w, Work) for k in w.kernels})
    was, now = saved
    for name in ("join", "expert_gate"):
        assert 0 < now[name] == pytest.approx(was[name] * (1 + 4 / 128) / 2)
    assert now["logits"] == was["logits"] > 0


def test_backward_holds_gradients_of_the_tensors_on_both_sides_of_a_kernel() -> None:
    """At the gate of an MLP: its output's, those of the two products that it reads, and that of the residual stream,
    while the last product's input is given back."""
    tokens, h, ffn = 256, 512, 1024
    most = tokens * (3 * ffn + h - ffn)
    assert partition(small(), ParallelConfig()).stages[0].layers[1].working == most
    halves = ParallelConfig(tp=2, sequence_parallel=True)
    assert partition(small(), halves).stages[0].layers[1].working == most / 2
    # Behind a checkpoint all of it is beside what is brought back.
    assert partition(small(), ParallelConfig(), Recompute("full")).stages[0].layers[1].working == most


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_megatrons_loss_is_one_fp32_copy_of_the_logits_whatever_divides_them(dtype: str) -> None:
    # core/tensor_parallel/cross_entropy.py: exponentials, softmax and gradient in place of the logits in fp32.
    whole = model("gpt2", implementation="megatron")
    logits = 1024 * 50257
    for parallel in (ParallelConfig(pp=2), ParallelConfig(tp=2, pp=2)):
        head = partition(whole, parallel).stages[1].layers[-1]
        assert head.fp32_kept * parallel.tp == pytest.approx(logits, rel=0.01)
    alone = memory(whole, micro_batch_size=1, dtype=dtype, param_dtype="bf16")
    assert alone.logits == 6 * logits  # and the gradient in 16 bits beside it
    eager = memory(model("gpt2", implementation="eager"), micro_batch_size=1, dtype=dtype, param_dtype="bf16")
    assert eager.logits == 12 * logits


@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
@pytest.mark.parametrize("divided", [{"cp": 4}, {"pp": 2}])
def test_a_compiled_loss_of_whole_logits_keeps_them_and_their_gradient_whatever_divides_the_rest(
    framework: str, divided: dict[str, int]
) -> None:
    """4 bytes a logit in 16 bits, as of a model that is not split, where 12 were counted."""
    whole = small(implementation="fused")
    parallel = ParallelConfig(**divided, framework=framework)
    head = layers(partition(whole, parallel))[-1]
    alone = memory(whole, micro_batch_size=1, dtype="bf16", param_dtype="bf16", compiled=True)
    assert 4 * head.fp32_kept + 2 * head.fused_loss_kept == alone.logits / parallel.cp == 4 * 256 * 1000 / parallel.cp


@pytest.mark.parametrize("comm", ["p2p", "all_gather", "a2a", "a2a+p2p"])
@pytest.mark.parametrize("framework", ["megatron", "torchtitan"])
def test_a_policy_that_keeps_the_output_of_attention_sends_no_keys_and_values_again(comm: str, framework: str) -> None:
    """What exchanges them is inside the operator; heads that are swapped for tokens are swapped around it."""
    levels = {"hierarchical_context_parallel_sizes": (2, 2)} if comm == "a2a+p2p" else {}
    parallel = ParallelConfig(cp=4, cp_comm_type=comm, framework=framework, **levels)
    block = layers(partition(small(), parallel, Recompute("selective_op")))[1]
    again = [item for item in exchanges(block.backward) if item.part == "R"]
    assert {item.kind for item in again} == ({"all_to_all"} if "a2a" in comm else set())
    assert not any(kernel.name == "merged" for kernel in kernels(block.backward, "R"))


def test_nobody_keeps_what_experts_put_out_in_megatron_whose_rows_are_weighted_before() -> None:
    made = model("qwen3-30b-a3b", seq_len=1024, layers=2, implementation="fused")
    kept = []
    for framework in ("megatron", "torchtitan"):
        layer = partition(made, ParallelConfig(framework=framework, ep=8, etp=1, dispatcher="alltoall")).stages[0]
        kernels = (k for w in layer.layers[1].forward if isinstance(w, Work) for k in w.kernels)
        kept.append(sum(k.saved for k in kernels if k.name == "combine"))
    assert kept == [0.0, 1024 * 8 * 2048]


@pytest.mark.parametrize(("recipe", "nbytes"), [("tensorwise", 1.0), ("mxfp8", 1 + 1 / 32), ("nvfp4", 0.5 + 1 / 16)])
def test_linears_of_transformer_engine_keep_their_inputs_as_narrow_as_they_read_them(recipe, nbytes) -> None:
    """Of attention's output a second, narrow copy; of norms, router, head and activations what they were."""
    made = model("qwen3-30b-a3b", seq_len=1024, layers=2, implementation="fused")
    narrow = with_linears_in_8_bits(made, recipe)
    for old, new in zip(made.layers, narrow.layers, strict=True):
        was, now = ({k.name: k.saved for k in layer.kernels if k.saved} for layer in (old, new))
        narrowed = {"q": nbytes / 2, "expert_gate": nbytes / 2, "expert_down": nbytes / 2, "out": 1 + nbytes / 2}
        if old.kind != "block":
            narrowed = {}
        assert now == pytest.approx({name: size * narrowed.get(name, 1.0) for name, size in was.items()})
    assert narrow.layers[1].kernels is narrow.layers[2].kernels
