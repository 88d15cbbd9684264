"""Families of 2025 and 2026 whose classes transformers has not, or has otherwise: against what their pages publish."""

from __future__ import annotations

from typing import Any

import pytest

from clustersim.core.errors import ModelError
from clustersim.model import from_hf

LING: dict[str, Any] = {
    "model_type": "bailing_moe_v2",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 20,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 256,
    "num_shared_experts": 1,
    "num_experts_per_tok": 8,
    "vocab_size": 157184,
    "first_k_dense_replace": 1,
    "n_group": 8,
    "topk_group": 4,
    "use_qk_norm": True,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
}
"""inclusionAI/Ling-mini-2.0."""
LING_1 = {
    "model_type": "bailing_moe",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_shared_experts": 2,
    "num_experts_per_tok": 6,
    "vocab_size": 126464,
    "norm_head": True,
    "hidden_act": "silu",
    "max_position_embeddings": 16384,
}
"""inclusionAI/Ling-lite."""
FLASH = {"hidden_size": 4096, "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 32}
TRILLION = {"hidden_size": 8192, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 80}
LONGCAT: dict[str, Any] = {
    "model_type": "longcat_flash",
    "hidden_size": 6144,
    "ffn_hidden_size": 12288,
    "num_layers": 28,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_topk": 12,
    "n_routed_experts": 512,
    "zero_expert_num": 256,
    "zero_expert_type": "identity",
    "expert_ffn_hidden_size": 2048,
    "vocab_size": 131072,
    "max_position_embeddings": 131072,
    "attention_method": "MLA",
}
"""meituan-longcat/LongCat-Flash-Chat."""
STEP: dict[str, Any] = {
    "model_type": "step3_text",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "num_attention_groups": 1,
    "num_hidden_layers": 61,
    "max_seq_len": 65536,
    "vocab_size": 128815,
    "moe_intermediate_size": 5120,
    "moe_num_experts": 48,
    "moe_top_k": 3,
    "share_expert_dim": 5120,
    "share_q_dim": 2048,
    "head_dim": 256,
    "norm_expert_weight": False,
    "moe_layers_enum": ",".join(map(str, range(4, 60))),
}
"""The text_config of stepfun-ai/step3."""
TRINITY = {
    "model_type": "afmoe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 32,
    "num_dense_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_shared_experts": 1,
    "vocab_size": 200192,
    "max_position_embeddings": 131072,
    "sliding_window": 2048,
    "hidden_act": "silu",
}
"""arcee-ai/Trinity-Mini."""
PUBLISHED = {
    "Ling-lite": (LING_1, 16.8e9),
    "Ling-mini-2.0": (LING, 16.26e9),
    "Ling-flash-2.0": (LING | FLASH | {"num_attention_heads": 32}, 103e9),
    "Ling-1T": (
        LING | TRILLION | {"num_attention_heads": 64, "num_key_value_heads": 8, "first_k_dense_replace": 4},
        1000e9,
    ),
    "LongCat-Flash": (LONGCAT, 560e9),
    "Step-3": (STEP, 316e9),
    "Trinity-Mini": (TRINITY, 26e9),
}
"""A config and the parameters that its page says."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_that_the_page_says(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert from_hf(config, seq_len=4096).parameters == pytest.approx(parameters, rel=0.006)


def _flops(config: dict[str, Any], *names: str) -> float:
    return sum(k.flops for layer in from_hf(config, seq_len=512).layers for k in layer.kernels if k.name in names)


def test_zero_experts_of_longcat_take_their_share_of_the_choices_and_compute_nothing() -> None:
    one_layer = LONGCAT | {"num_layers": 1}
    without = one_layer | {"zero_expert_num": 0, "moe_topk": 8}
    assert _flops(one_layer, "expert_up") == _flops(without, "expert_up") == 2 * 512 * 8 * 6144 * 2048
    assert _flops(one_layer, "router") == 2 * 512 * 6144 * 768
    assert len(from_hf(one_layer, seq_len=512).layers) == 2 + 2


def test_tensors_of_longcat_without_zero_experts_are_those_that_transformers_registers() -> None:
    pytest.importorskip("transformers")
    from test_models_families import as_rows, as_transformers, joined

    sizes = {"hidden_size": 64, "ffn_hidden_size": 48, "num_layers": 2, "num_attention_heads": 4, "vocab_size": 96}
    sizes |= {"q_lora_rank": 24, "kv_lora_rank": 16, "n_routed_experts": 4, "expert_ffn_hidden_size": 24, "moe_topk": 2}
    config = {name: value for name, value in LONGCAT.items() if name not in {"attention_method", "zero_expert_type"}}
    config |= sizes | {"zero_expert_num": 0, "pad_token_id": 0}
    ours = [tensor for tensor in as_rows(from_hf(config)) if "e_score_correction_bias" not in tensor[0]]
    assert joined(ours) == dict(as_transformers(config))


def test_queries_of_step_3_go_through_their_rank_and_keys_are_of_one_head() -> None:
    block = STEP | {"num_hidden_layers": 2, "moe_layers_enum": "1"}
    wide = 64 * 256
    assert _flops(block, "q_down") == 2 * 2 * 512 * 7168 * 2048
    assert _flops(block, "q_up") == 2 * 2 * 512 * 2048 * wide
    assert _flops(block, "k") == 2 * 2 * 512 * 7168 * 256
    listed = block | {"moe_layers_enum": [1]}
    assert from_hf(listed, seq_len=512).layers == from_hf(block, seq_len=512).layers


def test_a_gate_of_whole_heads_costs_less_than_one_of_each_element() -> None:
    laguna = {**TRINITY, "model_type": "laguna", "shared_expert_intermediate_size": 512, "num_hidden_layers": 2}
    laguna = {name: value for name, value in laguna.items() if name not in {"num_dense_layers", "num_shared_experts"}}
    head, element, none = (
        from_hf(laguna | {"gating": gating}, seq_len=512) for gating in ("per-head", "per-element", False)
    )
    assert head.parameters - none.parameters == 2 * 2048 * 32
    assert element.parameters - none.parameters == 2 * 2048 * 32 * 128
    moved = [sum(k.nbytes for la in m.layers for k in la.kernels) for m in (none, head, element)]
    assert moved == sorted(moved)
    assert len(set(moved)) == 3


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LING | {"multi_gate": True}, "'multi_gate' = True is not described; only False is"),
        (LING | {"moe_shared_expert_intermediate_size": 64}, "'moe_shared_expert_intermediate_size' = 64 is not"),
        (
            STEP | {"moe_layers_enum": "3,61"},
            "'moe_layers_enum' = '3,61' must name some of the 61 blocks",
        ),
        (STEP | {"moe_layers_enum": "a"}, "'moe_layers_enum' = 'a' must be numbers of blocks"),
        (LONGCAT | {"emb_neighbor_num": 4}, "an embedding of n-grams"),
        (LONGCAT | {"attention_method": "GQA"}, "'attention_method' = 'GQA' is not described; only 'MLA' is"),
        ({"model_type": "bailing_moe_linear"}, "is a Ring-linear 2.0"),
        ({"model_type": "bitnet"}, "rounded to three values"),
        (
            {"model_type": "step3_vl", "text_config": STEP},
            "its decoder alone is read, step3_text: write the table 'text_config' as a config.json of its own",
        ),
    ],
)
def test_what_is_not_described_is_refused_by_its_field(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError) as error:
        from_hf(config)
    assert message in str(error.value)


def test_ling_2_5_is_not_read_as_ling_3_which_has_the_same_type() -> None:
    sizes = {"hidden_size": 2560, "num_hidden_layers": 42, "num_attention_heads": 32, "intermediate_size": 6144}
    sizes |= {"moe_intermediate_size": 768, "num_experts": 512, "vocab_size": 157184, "num_experts_per_tok": 8}
    ling = {"model_type": "bailing_hybrid", **sizes}
    assert from_hf(ling, seq_len=4096).parameters == pytest.approx(124e9, rel=0.006)
    for told in ({"group_norm_size": 4}, {"architectures": ["BailingMoeV2_5ForCausalLM"]}):
        with pytest.raises(ModelError, match=r"is of Ling 2\.5, whose linear attention is Lightning"):
            from_hf(ling | told)
