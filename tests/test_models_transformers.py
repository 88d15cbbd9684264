"""Transformers: exact parameter counts, FLOPs against PaLM's formula, bytes against the op lists, clear errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim.core.errors import ModelError
from clustersim.core.model import Layer, Model
from clustersim.model import from_hf, transformer
from clustersim.model.families import by_type

CONFIGS = Path(__file__).parent / "data" / "hf_configs"

# As `sum(p.numel() for p in model.parameters())` prints for the published checkpoints.
PUBLISHED = {
    "gpt2": 124_439_808,
    "opt-350m": 331_196_416,
    "llama3-8b": 8_030_261_248,
    "mpt-7b": 6_649_286_656,
    "mixtral-8x7b": 46_702_792_704,
    "bert-large-uncased": 335_141_888,
    "mistral-7b-v0.1": 7_241_732_096,
}


def config(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((CONFIGS / f"{name}.json").read_text())
    return data


def block(model: Model) -> Layer:
    return next(layer for layer in model.layers if layer.kind == "block")


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_checkpoint(name: str) -> None:
    assert from_hf(CONFIGS / f"{name}.json").parameters == PUBLISHED[name]


def test_gpt2_registers_tensors_as_transformers_does() -> None:
    names = [t.name for layer in from_hf(config("gpt2")).layers for t in layer.tensors]
    assert names[:4] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.ln_1.bias",
    ]
    assert names[-3:] == ["transformer.ln_f.weight", "transformer.ln_f.bias", "lm_head.weight"]


def test_llama_registers_norms_after_the_mlp() -> None:
    names = [t.name.removeprefix("model.layers.0.") for t in block(from_hf(config("llama3-8b"))).tensors]
    assert names == [
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        *(f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")),
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
    ]


def test_a_tied_output_projection_counts_once_and_an_untied_one_twice() -> None:
    tied, untied = (transformer(2, 64, 2, 32, 1000, tied=t) for t in (True, False))
    assert tied.layers[-1].tensors[-1].tied_to == "transformer.wte.weight"
    assert untied.parameters - tied.parameters == 64 * 1000


@pytest.mark.parametrize("seq_len", [128, 1024])
@pytest.mark.parametrize("attention", ["flash", "eager"])
def test_model_flops_are_six_per_weight_and_the_attention_square(seq_len: int, attention: str) -> None:
    layers = 6
    width = 512
    vocab = 8000
    model = transformer(layers, width, 8, seq_len, vocab, attention=attention)
    weights = layers * 12 * width**2 + vocab * width
    palm = 6 * weights + 12 * layers * width * seq_len
    assert model.flops_per_sample() / seq_len == pytest.approx(palm, rel=1e-12)


def test_causal_flash_attention_executes_half_the_square_and_eager_all_of_it() -> None:
    flash = block(transformer(1, 512, 8, 256, 100, attention="flash", implementation="flash"))
    eager = block(transformer(1, 512, 8, 256, 100, attention="eager"))
    square = 4 * 256**2 * 512
    assert next(k.flops for k in flash.kernels if k.kind == "attention") == square / 2
    assert sum(k.flops for k in eager.kernels if k.name in {"scores", "context"}) == square


def test_a_sliding_window_attends_to_its_band_only() -> None:
    wide = block(from_hf(config("mistral-7b-v0.1"), seq_len=8192))
    flops = next(k.flops for k in wide.kernels if k.kind == "attention")
    assert flops == 4 * 4096 * (4096 * 8192 - 4096**2 / 2)


def test_flash_transformer_moves_36_bytes_forward_and_86_backward_in_bf16() -> None:
    """Of backward 12 join the gradients of queries, keys and values."""
    tokens = 2048
    width = 1024
    kernels = [k for k in block(transformer(1, width, 16, tokens, 100)).kernels if k.kind == "memory"]
    assert sum(2 * k.nbytes for k in kernels) == 36 * tokens * width
    assert sum(2 * k.backward_nbytes for k in kernels) == 86 * tokens * width


def test_eager_attention_makes_about_eight_passes_over_the_scores() -> None:
    model = from_hf(config("gpt2"), attention="eager")
    names = {"scale", "mask", "softmax", "dropout"}
    kernels = [k for k in block(model).kernels if k.name in names]
    square = 12 * 1024**2
    assert sum(k.nbytes for k in kernels) / square == pytest.approx(8.25)
    assert sum(k.backward_nbytes for k in kernels) / square == pytest.approx(9.25)


def test_activations_are_34_bytes_and_5_per_head_and_key_in_16_bits() -> None:
    model = from_hf(config("gpt2") | {"activation_function": "gelu"}, attention="eager")
    s = 1024
    h = 768
    a = 12
    assert 2 * block(model).activation_bytes == s * h * (34 + 5 * a * s / h)


def test_fused_moves_fewer_bytes_and_launches_fewer_kernels_than_eager() -> None:
    costs = {
        how: [
            sum(f(k) for k in block(from_hf(config("llama3-8b"), implementation=how, attention="flash")).kernels)
            for f in (lambda k: k.nbytes + k.backward_nbytes, lambda k: k.launches + k.backward_launches)
        ]
        for how in ("eager", "fused")
    }
    assert costs["fused"][0] < costs["eager"][0]
    assert costs["fused"][1] < costs["eager"][1]


def test_bert_heads_add_their_own_tensors() -> None:
    bare, pretraining = (from_hf(config("bert-large-uncased"), head=h) for h in ("none", "pretraining"))
    h = 1024
    vocab = 30522
    pooler = h * h + h
    transform = h * h + 3 * h
    relation = 2 * h + 2
    assert pretraining.parameters - bare.parameters == pooler + transform + vocab + relation


def test_gathered_masked_positions_shrink_the_head_only() -> None:
    every, some = (from_hf(config("bert-large-uncased"), head="mlm", head_positions=n) for n in (0, 80))
    assert some.layers[1:-1] == every.layers[1:-1]
    assert sum(k.flops for k in some.layers[-1].kernels) < sum(k.flops for k in every.layers[-1].kernels) / 6


def test_experts_do_the_flops_of_two_and_hold_the_weights_of_eight() -> None:
    mixtral = from_hf(config("mixtral-8x7b"), seq_len=512)
    mistral = from_hf(config("mistral-7b-v0.1"), seq_len=512)
    expert = 2 * 512 * 3 * 4096 * 14336
    router = 2 * 512 * 4096 * 8
    forward = [sum(k.flops for k in block(m).kernels) for m in (mixtral, mistral)]
    assert forward[0] - forward[1] == expert + router


REQUIRED = [
    ("gpt2", "n_embd"),
    ("gpt2", "n_layer"),
    ("gpt2", "n_head"),
    ("opt-350m", "ffn_dim"),
    ("opt-350m", "hidden_size"),
    ("llama3-8b", "intermediate_size"),
    ("llama3-8b", "num_hidden_layers"),
    ("mistral-7b-v0.1", "vocab_size"),
    ("mixtral-8x7b", "num_local_experts"),
    ("mpt-7b", "d_model"),
    ("mpt-7b", "max_seq_len"),
    ("bert-large-uncased", "num_attention_heads"),
]


@pytest.mark.parametrize(("name", "key"), REQUIRED)
def test_a_missing_key_is_named_with_its_file_and_purpose(name: str, key: str, tmp_path: Path) -> None:
    data = config(name)
    del data[key]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ModelError, match=rf"{path}: missing '{key}', the "):
        from_hf(path)


OPTIONAL = [
    ("llama3-8b", "num_key_value_heads"),
    ("gpt2", "n_inner"),
    ("llama3-8b", "head_dim"),
    ("gpt2", "n_positions"),
]


@pytest.mark.parametrize(("name", "key"), OPTIONAL)
def test_null_means_the_same_as_missing(name: str, key: str) -> None:
    data = config(name)
    data.pop(key, None)
    assert from_hf(data | {key: None}).layers == from_hf(data).layers


def test_key_value_heads_default_to_all_heads() -> None:
    data = config("llama3-8b")
    del data["num_key_value_heads"]
    assert from_hf(data).parameters - PUBLISHED["llama3-8b"] == 32 * 2 * 4096 * (4096 - 1024)


BAD = [
    ({"model_type": "lama"}, "unknown model_type 'lama'; did you mean 'llama'"),
    ({"model_type": None}, "missing 'model_type'"),
    ({"hidden_size": "4096"}, "'hidden_size' = '4096' must be a whole number"),
    ({"num_attention_heads": 33}, "33 attention heads do not divide a width of 4096"),
    ({"num_key_value_heads": 5}, "32 heads do not share 5 key-value heads"),
    ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' = 'no' must be true or false"),
    ({"hidden_act": "sillu"}, "unknown activation 'sillu'"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        from_hf(config("llama3-8b") | change)


@pytest.mark.parametrize("kind", ["deepseek_v5", "kimi_k4", "minimax_m4", "glm9", "nemotron-pruned"])
def test_another_version_or_variant_of_a_type_is_not_taken_for_a_slip(kind: str) -> None:
    """Its blocks are others: who writes the neighbour in its place has a wrong model without a word."""
    with pytest.raises(ModelError, match=f"unknown model_type '{kind}'; .* types are read") as raised:
        from_hf(config("llama3-8b") | {"model_type": kind})
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "field"),
    [("deepseek_ref", "compress_ratios"), ("kimi_k3", "routed_expert_hidden_size")],
)
def test_a_later_version_is_refused_by_what_it_has(kind: str, field: str) -> None:
    with pytest.raises(ModelError, match=f"model_type '{kind}' is a .*{field}.*which is not described"):
        from_hf(config("llama3-8b") | {"model_type": kind})


@pytest.mark.parametrize("field", ["moe_latent_size", "num_kv_shared_layers", "q_lora_rank", "hc_mult"])
def test_a_field_that_changes_tensors_and_that_the_type_does_not_read_is_refused(field: str) -> None:
    plain = config("llama3-8b")
    with pytest.raises(ModelError, match=f"'{field}' = 4 changes a model's tensors, but is not described of llama"):
        from_hf(plain | {field: 4})
    assert from_hf(plain | {field: None}).layers == from_hf(plain).layers


def test_a_misspelt_key_is_pointed_at() -> None:
    data = config("gpt2")
    data["n_emb"] = data.pop("n_embd")
    with pytest.raises(ModelError, match=r"missing 'n_embd'.*did you mean 'n_emb'"):
        from_hf(data)


def test_a_file_that_is_no_json_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        from_hf(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        from_hf(tmp_path / "other.json")


def test_a_sequence_longer_than_the_position_table_is_refused() -> None:
    with pytest.raises(ModelError, match="seq_len 2048 exceeds the 1024 learned positions"):
        from_hf(config("gpt2"), seq_len=2048)


def test_an_unknown_option_gets_the_nearest_name() -> None:
    with pytest.raises(ModelError, match="'atention'; did you mean 'attention'"):
        from_hf(config("gpt2"), atention="flash")
    with pytest.raises(ModelError, match="unknown attention 'flsh'; did you mean 'flash'"):
        from_hf(config("gpt2"), attention="flsh")


def test_every_reader_refuses_an_empty_config() -> None:
    for kind in by_type():
        with pytest.raises(ModelError, match="missing"):
            from_hf({"model_type": kind})


@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 6),
    heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([32, 64]),
    seq_len=st.integers(1, 600),
    activation=st.sampled_from(["gelu", "swiglu", "relu"]),
    attention=st.sampled_from(["flash", "eager"]),
    implementation=st.sampled_from(["eager", "flash", "fused"]),
)
def test_blocks_are_alike_and_costs_positive(
    layers: int, heads: int, head_dim: int, seq_len: int, activation: str, attention: str, implementation: str
) -> None:
    model = transformer(
        layers,
        heads * head_dim,
        heads,
        seq_len,
        1000,
        activation=activation,
        attention=attention,
        implementation=implementation,
    )
    blocks = [layer for layer in model.layers if layer.kind == "block"]
    assert len(blocks) == layers
    assert all(b.kernels == blocks[0].kernels and b.parameters == blocks[0].parameters for b in blocks)
    assert all(k.flops >= 0 and k.nbytes >= 0 and k.backward_nbytes >= 0 for k in blocks[0].kernels)
    assert model.parameters == sum(layer.parameters for layer in model.layers)
    assert any(kernel.flops + kernel.backward_flops > 0 for layer in model.layers for kernel in layer.kernels)


def test_opt_pays_for_the_gradient_of_its_clamp() -> None:
    scores = {"mask", "clamp", "softmax", "scale"}
    moved = {
        name: sum(
            k.backward_nbytes
            for k in block(from_hf(config(name), attention="eager", seq_len=256)).kernels
            if k.name in scores
        )
        / (16 * 256**2)
        for name in ("opt-350m", "bert-large-uncased")
    }
    assert moved == {"opt-350m": 13, "bert-large-uncased": 5}


def test_a_model_is_called_by_its_config_s_path_without_detours(tmp_path, monkeypatch):
    """A plan kept in one folder had d/../nem/config.json for its model's name."""
    (tmp_path / "d").mkdir()
    (tmp_path / "nem").mkdir()
    config = json.loads(next(CONFIGS.glob("*.json")).read_text(encoding="utf-8"))
    config.pop("_name_or_path", None)
    (tmp_path / "nem" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert from_hf("d/../nem/config.json").name == "nem/config.json"
