"""What a config.json leaves out, misspells or adds: an error that names it, or transformers' default and a note."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustersim.core.errors import ModelError
from clustersim.model import families, from_hf, named_models
from clustersim.model.hf import shape_from_hf

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
QWEN3_MOE: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 32000,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
}


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_the_experts_of_qwen3_are_counted_under_either_name() -> None:
    later = without(QWEN3_MOE, "num_experts") | {"num_local_experts": 16}
    assert from_hf(later).layers == from_hf(QWEN3_MOE).layers


def test_a_size_that_only_a_float_holds_is_no_whole_number() -> None:
    """It was a traceback, of a power of it that is beyond any number."""
    assert from_hf(QWEN3_MOE | {"hidden_size": 512.0}).layers == from_hf(QWEN3_MOE).layers
    with pytest.raises(ModelError, match=r"'intermediate_size' = 3e\+167 must be a whole number above zero"):
        from_hf(QWEN3_MOE | {"intermediate_size": 3e167})


def test_two_numbers_under_two_names_of_one_field_are_no_choice_of_ours() -> None:
    twice = QWEN3_MOE | {"num_local_experts": 16}
    assert from_hf(twice).layers == from_hf(QWEN3_MOE).layers
    with pytest.raises(ModelError, match=r"'num_experts' = 16, 'num_local_experts' = 32: these are two names"):
        from_hf(twice | {"num_local_experts": 32})


def test_a_class_of_experts_alone_is_not_dense_for_a_null() -> None:
    config = without(QWEN3_MOE, "intermediate_size") | {
        "model_type": "qwen3_5_moe_text",
        "shared_expert_intermediate_size": 256,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "tie_word_embeddings": False,
    }
    assert from_hf(config).parameters > 0
    with pytest.raises(ModelError, match=r"'num_experts' = null, but qwen3_5_moe_text has no other MLP"):
        from_hf(config | {"num_experts": None})


def test_a_mixture_without_its_count_of_experts_is_no_dense_model() -> None:
    with pytest.raises(ModelError, match=r"missing 'n_routed_experts', the number of experts.*256"):
        from_hf(without(DEEPSEEK_V3, "n_routed_experts"))


def test_a_count_under_a_name_that_the_class_has_not_is_pointed_at() -> None:
    renamed = without(DEEPSEEK_V3, "n_routed_experts") | {"num_routed_experts": 256}
    with pytest.raises(ModelError, match=r"missing 'n_routed_experts'.*'num_routed_experts'"):
        from_hf(renamed)


def test_a_null_count_of_experts_is_a_dense_model() -> None:
    dense = from_hf(DEEPSEEK_V3 | {"n_routed_experts": None})
    assert all("router" not in {k.name for k in layer.kernels} for layer in dense.layers)


@pytest.mark.parametrize(("name", "default"), [("first_k_dense_replace", 3), ("n_shared_experts", 1)])
def test_what_transformers_has_by_default_counts_and_is_told(name: str, default: int) -> None:
    whole = from_hf(DEEPSEEK_V3)
    partial = from_hf(without(DEEPSEEK_V3, name))
    assert partial.parameters == whole.parameters
    assert any(f"{name} {default}" in note for note in partial.notes)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("head_dim", "head_dims"), ("num_key_value_heads", "num_kv_heads"), ("moe_intermediate_size", "moe_intermediate")],
)
def test_a_renamed_field_is_never_taken_for_a_missing_one(name: str, wrong: str) -> None:
    renamed = without(QWEN3_MOE, name) | {wrong: QWEN3_MOE[name]}
    with pytest.raises(ModelError, match=f"missing '{name}'.*{wrong}"):
        from_hf(renamed)


def test_a_field_that_changes_nothing_is_told() -> None:
    notes = from_hf(QWEN3_MOE | {"num_nextn_predict_layers": 2, "rope_theta": 1e6}).notes
    assert any("num_nextn_predict_layers 2" in note for note in notes)
    assert not any("rope_theta" in note for note in notes)


def test_a_gated_activation_stays_gated_whatever_its_kind() -> None:
    llama = {name: value for name, value in QWEN3_MOE.items() if "expert" not in name and "moe" not in name}
    sizes = {act: from_hf(llama | {"model_type": "llama", "hidden_act": act}).parameters for act in ("silu", "gelu")}
    assert sizes["silu"] == sizes["gelu"]


def test_a_period_is_a_number_or_the_letters_of_published_files() -> None:
    exaone: dict[str, Any] = {"model_type": "exaone4", "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000}
    exaone |= {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 64}
    numbered, lettered = (shape_from_hf(exaone | {"sliding_window_pattern": said})[0] for said in (3, "LLG"))
    assert lettered == numbered
    assert lettered.mixers == ("sliding", "sliding", "full")
    with pytest.raises(ModelError, match="'sliding_window_pattern' = 'LGX' must be a whole number"):
        from_hf(exaone | {"sliding_window_pattern": "LGX"})


HUNYUAN: dict[str, Any] = {
    "model_type": "hunyuan_v1_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 8,
    "moe_topk": 2,
    "vocab_size": 1000,
}


def test_a_number_for_each_block_is_one_number_where_all_are_alike() -> None:
    listed = {"moe_topk": [2] * 3, "moe_intermediate_size": [512] * 3, "num_shared_expert": [1] * 3}
    assert from_hf(HUNYUAN | listed).parameters == from_hf(HUNYUAN).parameters


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_topk", [2, 2, 4]),
        ("moe_topk", [2] * 4),
        ("moe_intermediate_size", [256] * 3),
        ("num_shared_expert", [2] * 3),
        ("use_cla", True),
    ],
)
def test_what_is_described_of_no_block_is_refused(name: str, value: list[int] | bool) -> None:
    with pytest.raises(ModelError, match=f"'{name}' = "):
        from_hf(HUNYUAN | {name: value})


CASE = Path(__file__).parent.parent.parent / "shared" / "cases" / "deepseek_no_expert_count" / "config.json"


@pytest.mark.shared
@pytest.mark.skipif(not CASE.exists(), reason="the case is in ../shared")
def test_the_published_case_is_refused() -> None:
    with pytest.raises(ModelError, match="num_routed_experts"):
        from_hf(json.loads(CASE.read_text()))


def test_an_unknown_type_is_told_what_would_read_it() -> None:
    with pytest.raises(ModelError, match=r"unknown model_type 'zzz'; \d+ types are read.*a row added to data/families"):
        from_hf({"model_type": "zzz"})


def test_blocks_that_predict_further_tokens_are_said_to_be_left_out():
    """A config of GLM 4.5 or DeepSeek-V3 counts them; transformers' classes have none, and nothing said so."""
    config = DEEPSEEK_V3 | {"num_nextn_predict_layers": 1}
    left_out = "blocks that predict further tokens are left out (num_nextn_predict_layers 1)"
    told = [note for note in from_hf(config).notes if note.startswith(left_out)]
    assert len(told) == 1
    assert told[0].endswith("mtp = 1 in model.options plays them")
    assert not any(note.startswith(left_out) for note in from_hf(config, mtp=1).notes)
    assert not any(note.startswith(left_out) for note in from_hf(config | {"num_nextn_predict_layers": 0}).notes)


SHIPPED = sorted((Path(named_models.__file__).parent.parent / "data" / "models").glob("*.json"))
UNSAID = {"_name_or_path", "hidden_act", "activation_function", "num_nextn_predict_layers"}
"""A name, an activation, whose class's own is every publisher's, and blocks that transformers' classes leave out."""
T5 = {
    "model_type": "t5",
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 2816,
    "num_layers": 24,
    "num_decoder_layers": 20,
    "num_heads": 16,
    "vocab_size": 32128,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "relative_attention_num_buckets": 16,
}
VIT = {
    "model_type": "vit",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 2,
    "image_size": 384,
    "patch_size": 32,
    "num_labels": 1000,
}


def fields_of(config: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of each field, those of inner tables too."""
    for name, value in config.items():
        yield (*above, name)
        if isinstance(value, dict) and name.endswith("config"):
            yield from fields_of(value, (*above, name))


@pytest.mark.parametrize("config", [*map(str, SHIPPED), "T5", "VIT"])
def test_a_field_that_is_left_out_is_asked_for_or_told_or_changes_nothing(config: str) -> None:
    fields = {"T5": T5, "VIT": VIT}.get(config) or json.loads(Path(config).read_text())
    whole = from_hf(fields, name="whole")
    for path in fields_of(fields):
        none_by_default = not families.fields_of(fields["model_type"]).fields.get(path[-1], "unknown")
        if UNSAID & set(path) or none_by_default:
            continue
        fewer = copy.deepcopy(fields)
        inner = fewer
        for name in path[:-1]:
            inner = inner[name]
        del inner[path[-1]]
        try:
            model = from_hf(fewer, name="whole")
        except ModelError:
            continue
        told = set(model.notes) - set(whole.notes)
        if replace(model, notes=()) != replace(whole, notes=()):
            assert any(path[-1] in note for note in told), f"{path} changes the model, and nothing says so"
