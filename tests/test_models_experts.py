"""Mixtures of experts and latent attention: published counts, Megatron-LM's FLOPs, kernels that do not multiply."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from kernel_times import kernel_time

from clustersim.core.device import device
from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Model
from clustersim.model import from_hf, model
from clustersim.model.families import by_type
from clustersim.model.names import names
from clustersim.model.seconds import Execution, setting, step_cost
from clustersim.model.seconds.kernels import spent
from tests.evidence.generic import from_row

# `sum(p.numel() for p in model.parameters())` of the published checkpoints; DeepSeek-V3 without its MTP module.
PUBLISHED = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gpt-oss-120b": 116_829_156_672,
    "gpt-oss-20b": 20_914_757_184,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen2-57b-a14b": 57_408_658_944,
    "nemotron-3-nano-30b-a3b": 31_577_937_344,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    assert model(name).parameters == PUBLISHED[name]


def test_the_mtp_module_of_v3_adds_its_block_and_shares_embedding_and_head() -> None:
    with_mtp = model("deepseek-v3", mtp=1)
    without = model("deepseek-v3")
    h = 7168
    block = with_mtp.layers[-3].parameters
    assert with_mtp.layers[-2].kind == "mtp"
    assert with_mtp.parameters - without.parameters == block + 2 * h * h + 3 * h


def test_a_family_without_mtp_says_so() -> None:
    with pytest.raises(ModelError, match="mtp = 1, but mixtral has no multi-token prediction"):
        model("mixtral-8x7b", mtp=1)


def as_megatron_counts(made: Model) -> float:
    """``num_floating_point_operations`` of Megatron-LM: three forwards, the router not counted."""
    return sum(3 * k.flops for layer in made.layers for k in layer.kernels if k.name != "router")


# Rows flops_* of the model-parallel examples: NVIDIA/Megatron-LM@d98e8a64 megatron/training/training.py, executed.
@pytest.mark.parametrize(("name", "flops"), [("mixtral-8x7b", 326477644038144), ("deepseek-v3", 1023230173249536)])
def test_flops_are_exactly_megatrons(name: str, flops: int) -> None:
    assert as_megatron_counts(model(name, seq_len=4096)) == flops


@pytest.mark.parametrize("name", PUBLISHED)
def test_many_experts_are_not_many_kernels(name: str) -> None:
    assert max(len(layer.kernels) for layer in model(name).layers) <= 30


def test_blocks_with_equal_kernels_share_them() -> None:
    bodies = {id(layer.kernels) for layer in model("deepseek-v3").layers if layer.kind == "block"}
    assert len(bodies) == 2  # dense ones and those with experts


def test_every_second_block_of_gpt_oss_has_a_window() -> None:
    first, second, third = (
        next(k.flops for k in layer.kernels if k.kind == "attention")
        for layer in model("gpt-oss-20b", seq_len=4096).layers[1:4]
    )
    assert first == third
    assert second / first == pytest.approx(4096**2 / 2 / (128 * 4096 - 128**2 / 2))


def test_layer_types_decide_the_windows() -> None:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    config = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 3,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "layer_types": types,
        "num_local_experts": 8,
    }
    flops = [next(k.flops for k in b.kernels if k.kind == "attention") for b in from_hf(config).layers[1:4]]
    assert flops[0] == flops[1] < flops[2]
    mixed = from_hf(config | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]})
    flops = [next(k.flops for k in b.kernels if k.kind == "attention") for b in mixed.layers[1:4]]
    assert flops[0] > flops[1] == flops[2]
    with pytest.raises(ModelError, match="'layer_types' has 2 words for 3 blocks"):
        from_hf(config | {"layer_types": types[:2]})
    with pytest.raises(ModelError, match="'layer_types' has 'local'; it must be of 'full_attention'"):
        from_hf(config | {"layer_types": ["local"] * 3})


def test_latent_attention_computes_whole_heads() -> None:
    made = model("deepseek-v3", seq_len=1024)
    kernels = {k.name: k for k in made.layers[1].kernels}
    assert kernels["attention"].flops == 1024**2 * 128 * (192 + 128)
    assert kernels["q_up"].flops == 2 * 1024 * 1536 * 128 * 192
    assert kernels["kv_down"].flops == 2 * 1024 * 7168 * 576
    assert kernels["out"].k == 128 * 128


def test_queries_of_v2_lite_are_projected_directly() -> None:
    names = [k.name for k in model("deepseek-v2-lite").layers[1].kernels]
    assert "q" in names
    assert "q_down" not in names


def test_eager_latent_attention_does_the_products_of_its_scores() -> None:
    made = model("deepseek-v2-lite", seq_len=256, attention="eager")
    products = {k.name: k.flops for k in made.layers[1].kernels if k.batch}
    assert products == {"scores": 2 * 16 * 256**2 * 192, "context": 2 * 16 * 256**2 * 128}


def test_a_loop_over_experts_takes_as_long_as_its_products_apart() -> None:
    gpu = device("H100-SXM5-80GB")
    one = Kernel("up", "gemm", m=512, n=4096, k=2048, flops=1.0, backward_flops=2.0)
    loop = replace(one, repeat=8, flops=8.0, backward_flops=16.0, launches=8, backward_launches=16)
    for backward in (False, True):
        alone, _ = kernel_time(one, gpu, 2, "bf16", backward=backward)
        assert kernel_time(loop, gpu, 2, "bf16", backward=backward)[0] == pytest.approx(8 * alone)


def test_one_launch_for_all_experts_fills_the_last_wave() -> None:
    gpu = device("H100-SXM5-80GB")
    loop = Kernel("up", "gemm", m=64, n=768, k=2048, flops=1.0, repeat=128, launches=128, backward_launches=256)
    grouped = replace(loop, launches=1, backward_launches=2)
    apart, together = (kernel_time(k, gpu, 1, "bf16")[0] for k in (loop, grouped))
    peak = 2.0 * 64 * 768 * 2048 * 128 / gpu.peak["bf16"]
    assert peak < together < apart / 4


def test_grouped_products_launch_fewer_kernels() -> None:
    loop, grouped = (model("qwen3-30b-a3b", experts_implementation=how) for how in ("eager", "grouped_mm"))
    assert loop.flops_per_sample() == grouped.flops_per_sample()
    gpu = device("H100-SXM5-80GB")
    costs = [step_cost(made, gpu, 1) for made in (loop, grouped)]
    assert costs[0].forward_launch is not None
    assert costs[1].forward_launch is not None
    assert costs[1].forward_launch.sum() < costs[0].forward_launch.sum() / 4


def test_a_type_that_a_family_reads_is_not_said_to_be_described_by_nobody() -> None:
    both = names()["types"].keys() & by_type().keys()
    assert not both, f"described in data/families, so take them out of [types] of data/names.toml: {sorted(both)}"


@pytest.mark.parametrize(
    "kind",
    [kind for kind, what in names()["types"].items() if re.search(r"a mixture of experts( beside .*)?$", what)],
)
def test_a_mixture_nobody_described_is_named_as_one(kind: str) -> None:
    with pytest.raises(ModelError, match=r"is an? .*, a mixture of experts.*not described") as raised:
        from_hf({"model_type": kind})
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "Llama4-Scout",
        "llama-4-maverick",
        "grok-1",
        "qwen3-next-80b",
        "DeepSeek-V4",
        "GLM-5.9",
    ],
)
def test_a_name_of_such_a_mixture_is_never_taken_for_a_dense_model(name: str) -> None:
    for read in (model, lambda word: from_row({"model": word, "seq_len": "128"})):
        with pytest.raises(ModelError, match="is not described") as raised:
            read(name)
        assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("gemma2-9x", "a Gemma 2,"),
        ("zamba-7b", "a state space model"),
        ("lstm", "a recurrent network"),
        ("pegasus-large", "an encoder-decoder"),
        ("deit-base", "a vision transformer"),
        ("cohere-35b", "parallel blocks"),
    ],
)
def test_what_nobody_described_is_named_as_what_it_is(name: str, what: str) -> None:
    for read in (model, lambda word: from_hf({"model_type": word})):
        with pytest.raises(ModelError, match=f"is .*{what}.*not described") as raised:
            read(name)
        assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bert-large", "bert-large-cased"), ("lama2-13b", "llama2-13b"), ("gtp2", "gpt2"), ("foo", "")],
)
def test_only_a_model_of_the_same_family_is_ever_meant(name: str, meant: str) -> None:
    with pytest.raises(ModelError) as raised:
        model(name)
    assert (f"did you mean '{meant}'" in str(raised.value)) == bool(meant)


ROWS = {
    "DeepSeek-V3": "deepseek-v3",
    "GPT-OSS-120B": "gpt-oss-120b",
    "Mixtral-8x22B": "mixtral-8x22b",
    "Qwen3-30B-A3B": "qwen3-30b-a3b",
    "DeepSeek-V2-Lite": "deepseek-v2-lite",
    "DeepSeek-V2": "deepseek-v2",
    "Qwen2-57B-A14B": "qwen2-57b-a14b",
    "Qwen3-235B-A22B": "qwen3-235b-a22b",
}


@pytest.mark.parametrize(("name", "known"), ROWS.items())
def test_names_are_read_as_tables_write_them(name: str, known: str) -> None:
    assert from_row({"model": name, "seq_len": "4096"}).parameters == model(known).parameters


BAD = [
    ({"mlp_only_layers": [2]}, "'mlp_only_layers' = \\[2\\] must be numbers of blocks, from 0 to 1"),
    ({"num_experts_per_tok": 200}, "200 of 128 experts per token"),
    ({"num_experts": 0}, "'num_experts' = 0 must be a whole number above zero"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_wrong_config_is_one_clear_error(change: dict[str, object], message: str) -> None:
    config = {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_experts": 128,
        "moe_intermediate_size": 32,
    }
    with pytest.raises(ModelError, match=message):
        from_hf(config | change)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_the_host_does_takes_its_launches_alone(dtype: str) -> None:
    gpu = device("H100-SXM5-80GB")
    waits = Kernel("read_counts", "host", launches=3, backward_launches=0)
    assert kernel_time(waits, gpu, 8, dtype)[0] == pytest.approx(3 * gpu.launch.value)
    assert kernel_time(waits, gpu, 8, dtype, backward=True)[0] == 0.0


def test_a_graph_of_the_whole_step_clamps_inside_the_product_of_all_experts() -> None:
    clamp = Kernel("expert_clamp", "memory", nbytes=8e8, backward_nbytes=15e8, launches=3, backward_launches=7)
    apart = setting(device("GB200"), Execution("bf16"))
    assert sum(spent(apart, clamp, 1, "F")[:2]) > 0
    graphed = replace(apart, hosted=False)
    assert spent(graphed, clamp, 1, "F")[:2] == (0.0, 0.0)
    assert sum(spent(replace(graphed, expert_streams=4), clamp, 1, "F")[:2]) > 0  # experts of a capacity are apart


def test_megatrons_bias_of_the_last_product_is_added_expert_by_expert() -> None:
    made = {
        how: model("gpt-oss-120b", seq_len=128, implementation=how, experts_implementation="grouped_mm")
        for how in ("eager", "fused")
    }
    bias = {how: next(k for x in one.layers for k in x.kernels if k.name == "expert_bias") for how, one in made.items()}
    rows = 128 * 4
    width = 2880
    experts = 128
    assert bias["fused"].nbytes == 14 * rows * width  # fp32 in between: 28 bytes a 16-bit element
    assert bias["fused"].launches == 2 * experts + 2
    assert bias["fused"].backward_launches > bias["eager"].backward_launches


def test_sizes_of_experts_are_changed_by_a_table() -> None:
    shape = {"layers": 2, "d_model": 6144, "heads": 48, "kv_heads": 8, "vocab": 131072}
    wide = model("mixtral-8x22b", experts={"width": 32768}, **shape)
    narrow = model("mixtral-8x22b", **shape)
    assert wide.parameters - narrow.parameters == 2 * 8 * 3 * 6144 * (32768 - 16384)


@pytest.mark.parametrize(
    ("name", "experts", "words"),
    [
        ("mixtral-8x7b", {"cout": 3}, "unknown size 'experts.cout'; did you mean 'count'"),
        ("mixtral-8x7b", {"count": 0}, "sizes must be above zero"),
        ("mixtral-8x7b", {"count": "x"}, "Expected `int`"),
        ("llama3-8b", {"count": 3}, "the model has none"),
    ],
)
def test_sizes_of_experts_that_are_none_are_refused(name: str, experts: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        model(name, experts=experts)
