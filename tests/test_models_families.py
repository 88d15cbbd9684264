"""Rows of families against transformers' own classes on the meta device: parameters, names and order of tensors."""

from __future__ import annotations

import contextlib
import json
import random
import re
import zlib
from typing import Any
from unittest import mock

import pytest
from hf_fields import FILE, kinds_of_rows, plain, tables, without_torchvision

from clustersim.core.errors import ModelError
from clustersim.core.model import Model
from clustersim.model import from_hf
from clustersim.model.families import by_type, fields_of

torch = pytest.importorskip("torch", reason="the classes are built on torch's meta device")
without_torchvision()
transformers = pytest.importorskip("transformers", reason="the classes are transformers'")

CASES = 30
"""Random configs of each model type; all are read and built."""
QUICK = 10
"""Where slow tests are left out, one in so many is built."""

EARLIER = {"vit", "roberta", "xlm-roberta", "camembert", "bert", "mpt", "distilbert"}
"""Types whose tensors keep the names and order of transformers 4 (or llm-foundry): sizes are compared without them."""
EXPERTS_APART = {"mixtral", "qwen2_moe", "qwen3_moe", "mellum", "deepseek_v2", "deepseek_v3", "opt"}
EXPERTS_APART |= {"gemma4_text", "gemma4_unified_text", "jina_embeddings_v3"}
"""Types whose experts are listed one by one, as transformers 4 has them; and OPT, Gemma 4 and Jina's, whose final norm,
further table or pooler stands where it runs: names are compared without their order."""
UNBUILT = {"kimi_k2", "longcat_flash", "step3p5", "step3p7"}
"""Types that transformers has no class for, and whose fields are another's; and LongCat, whose class makes gates and
ups of experts that compute nothing: ``test_models_later.py`` compares it without them; and Step 3.5, which has a class
behind a tower alone."""
WITHOUT_CLASS = {"bailing_moe", "bailing_moe_v2", "kimi_k2", "mimo", "minimax_m3", "nemotron-nas", "step3_text"}
"""Types that transformers has no fields for: those of Ling and Step 3 are held in ``test_models_later.py``, Kimi K2 in
``test_models_published.py``, the others here, as the class that they are like or with published sizes."""
NO_HEAD_SIZE = {"hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"}
"""Types whose class fails without ``head_dim``, which it has not by default."""
OWN_HEADS = {"gemma4_text", "gemma4_unified_text", "mimo_v2_flash", "minimax_m3_vl_text"}
"""Types whose heads are drawn to go together."""
KEPT = {"esm", "mamba2", "nemotron", "internlm3", "dbrx", *OWN_HEADS}
"""Types none of whose fields is left out: the class fails without one, or has others by default."""
AS_ENCODER = {"electra", "ernie", "data2vec-text", "roberta-prelayernorm", "xlm-roberta-xl", "megatron-bert"}
AS_ENCODER |= {"mpnet", "nomic_bert", "gte", "jina_embeddings_v3"}
AS_ENCODER |= {"modernbert", "eurobert", "distilbert", "bert", "roberta", "xlm-roberta", "camembert"}
MASKED = {"esm"}
"""Encoders that are trained to fill in words, and compared so."""
BY_CLASS = {"mistral4": "Mistral4ForCausalLM"}
"""Decoders that transformers' Auto classes do not know, since they come with a tower in front."""


def built(kind: str) -> list[str]:
    """Types of the table that transformers builds."""
    return [] if kind in UNBUILT or not fields_of(kind).fields else [kind]


def test_a_type_that_transformers_has_no_class_of_is_held_otherwise() -> None:
    alone = {kind for kind in by_type() if not fields_of(kind).fields}
    assert alone == WITHOUT_CLASS, "hold the parameters of a type in a test, then name it in WITHOUT_CLASS"


PARTS = {
    "llama4_vision_model",
    "pixtral",
    "qwen2_vl_vision",
    "qwen2_5_vl_vision",
    "qwen3_vl_vision",
    "qwen3_vl_moe_vision",
    "qwen3_5_vision",
    "qwen3_5_moe_vision",
    "qwen4_exp_vision",
    "kimi_k25_vision",
    "gemma4_vision",
    "minimax_m3_vl_vision",
    "glm4v_vision",
    "glm4v_moe_vision",
    "glm5_next_text",
    "glm5_next_vision",
    "step3p5_vision",
    "internvl_vision",
    "idefics3_vision",
    "smolvlm_vision",
    "siglip2_vision_model",
    "gemma4_unified_vision",
}
"""Towers that are compared with a decoder behind them."""
PARTS |= {"glm4v_text", "glm4v_moe_text", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"}
CLASSES = {"vit", "deit", "vit_msn"}
"""Types that say what an image shows."""
IMAGES = {"clip_vision_model", "siglip_vision_model", "dinov2", "dinov2_with_registers", "dinov3_vit", *CLASSES}
"""Types that read images alone."""
SEEING = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "llama4": "llama4_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen4_exp": "qwen4_exp_text",
    "kimi_k25": "deepseek_v3",
    "mistral3": "mistral",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "glm4v": "glm4v_text",
    "glm46v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text",
    "glm5_next": "glm5_next_text",
    "internvl": "qwen3",
    "paligemma": "gemma2",
    "idefics3": "llama",
    "smolvlm": "llama",
    "lfm2_vl": "lfm2",
    "cohere2_vision": "cohere2",
    "gemma4_unified": "gemma4_unified_text",
}
"""Decoders with a tower in front, and the type of the decoder."""
KINDS = [kind for kind in sorted(by_type()) if built(kind) and kind not in PARTS and kind not in SEEING]


COMPRESSED = ("compressed_sparse_attention", "heavily_compressed_attention")
"""Words for blocks of DeepSeek-V4 that see compressed keys."""


def random_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """A small config of a type: every dimension of its class drawn anew, some optional fields left out."""
    fields = fields_of(kind).fields
    heads = rng.choice([2, 4, 8])
    kv = rng.choice([n for n in (1, 2, 4, 8) if heads % n == 0])
    dim = rng.choice([8, 16])
    layers = rng.randint(2, 6)
    width = heads * dim
    experts = rng.choice([4, 8])
    # Helium's projection out has the width of the model on both sides.
    free = "head_dim" in fields and kind not in {"mamba2", "cohere2", "helium"}
    if free and rng.random() < 0.5:
        dim *= 2
    drawn: dict[str, Any] = {
        "hidden_size": width,
        "n_embd": width,
        "d_model": width,
        "num_hidden_layers": layers,
        "n_layer": layers,
        "n_layers": layers,
        "num_attention_heads": heads,
        "n_head": heads,
        "n_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "intermediate_size": rng.choice([48, 96]),
        "ffn_dim": rng.choice([48, 96]),
        "n_inner": rng.choice([None, 80]),
        "intermediate_size_mlp": rng.choice([56, 112]),
        "vocab_size": rng.choice([96, 160]),
        "type_vocab_size": rng.choice([1, 2]),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": 64,
        "n_positions": 64,
        "max_seq_len": 64,
        "sliding_window": rng.choice([16, 32]),
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "moe_intermediate_size": rng.choice([24, 40]),
        "num_experts_per_tok": 2,
        "moe_topk": 2,
        "moe_k": 2,
        "num_local_experts": experts,
        "num_experts": experts,
        "n_routed_experts": experts,
        "moe_num_experts": experts,
        "n_shared_experts": rng.choice([1, 2]),
        "moe_num_shared_experts": rng.choice([1, 2]),
        "shared_expert_intermediate_size": rng.choice([32, 56]),
        "shared_intermediate_size": rng.choice([32, 56]),
        "moe_shared_expert_intermediate_size": rng.choice([32, 56]),
        "first_k_dense_replace": rng.randint(0, 2),
        "decoder_sparse_step": rng.choice([1, 2]),
        "interleave_moe_layer_step": rng.choice([1, 2]),
        "attention_chunk_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
        "q_lora_rank": rng.choice([24, 40]),
        "kv_lora_rank": rng.choice([16, 24]),
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": rng.choice([8, 24]),
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": rng.choice([2, 4]),
        "linear_key_head_dim": 8,
        "linear_value_head_dim": rng.choice([8, 16]),
        "linear_conv_kernel_dim": rng.choice([2, 4]),
        "state_size": 8,
        "ssm_state_size": 8,
        "mamba_d_state": 8,
        "conv_kernel": 4,
        "expand": 2,
        "n_groups": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "num_heads": 4,
        "chunk_size": 8,
        "image_size": rng.choice([56, 112]),
        "patch_size": 14,
        "num_channels": 3,
        "mlp_ratio": rng.choice([2, 4]),
        "word_embed_proj_dim": rng.choice([width, width // 2]),
        "do_layer_norm_before": True,
    }
    drawn |= {
        "mamba_n_heads": 4, "mamba_d_head": 2 * width // 4, "mamba_d_ssm": 2 * width, "mamba_n_groups": 1,
        "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": rng.choice(["auto", 6]), "mamba_chunk_size": 8,
        "attn_layer_period": rng.choice([2, 3]), "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": rng.choice([0, 1]), "attn_layer_indices": [1], "full_attn_idxs": [1],
        "block_multiple_of": 16, "conv_L_cache": 3, "num_dense_layers": 1, "linear_head_dim": 8, "linear_num_heads": 4,
        "ffn_hidden_size": rng.choice([None, 80]), "num_kv_heads": rng.choice([2, heads]), "local_attention": 16,
        "seq_length": 64, "block_size": 8, "rotary_dim": 8,
        "num_layers": layers, "attention_heads": heads, "dim": width, "hidden_dim": 48,
        "window_size": 16,
    }  # fmt: skip
    biases = [
        "conv_bias",
        "mamba_proj_bias",
        "mamba_conv_bias",
        "mamba_rms_norm",
        "bias",
        "norm_bias",
        "projectors_bias",
    ]
    biases += ["projectors_bias", "new_decoder_architecture", "parallel_attn", "multi_query", "alibi"]
    biases += ["attention_bias", "mlp_bias", "use_bias", "use_qkv_bias", "qk_layernorm", "use_qk_norm", "qkv_bias"]
    biases += ["attention_out_bias", "lm_head_bias", "use_conv_bias", "use_parallel_residual"]
    drawn |= {name: rng.random() < 0.5 for name in biases}
    if kind == "internlm3":
        drawn["mlp_bias"] = drawn["attention_bias"]
    if kind == "mamba2":
        drawn |= {"hidden_size": 32, "head_dim": 16}
    config = {name: value for name, value in drawn.items() if name in fields}
    if kind in {"lfm2", "lfm2_moe", "minimax", "granitemoehybrid", "kimi_linear"} and (
        rng.random() < 0.7 or kind == "lfm2_moe"
    ):
        other = "conv" if "lfm2" in kind else "linear_attention"
        config["layer_types"] = rng.choices([other, "full_attention"], k=layers)
    if kind == "nemotron_h":
        words = ["linear_attention", "moe", "full_attention", "mlp"]
        config["layers_block_type"] = words + rng.choices(words, k=rng.randint(0, 4))
        config["moe_latent_size"] = rng.choice([None, 24])
    if kind == "esm":
        config |= {"position_embedding_type": rng.choice(["absolute", "rotary"]), "mask_token_id": 3}
        config |= {"tie_word_embeddings": True}
    if kind == "electra":
        config["embedding_size"] = rng.choice([width, 24])
    if kind in {"dinov2_with_registers", "dinov3_vit"}:
        config["num_register_tokens"] = rng.choice([1, 4])
        config |= {"use_gated_mlp": rng.random() < 0.5} if kind == "dinov3_vit" else {}
        config["hidden_act"] = rng.choice(["gelu", "silu"]) if config.get("use_gated_mlp") else "gelu"
    if kind == "gpt_neo":
        config["attention_types"] = [[rng.choices(["global", "local"], k=layers), 1]]
    if kind == "flint":
        config["mlp_only_layers"] = rng.choice([None, [], [1], [0]])
    if kind == "dbrx":
        config |= {
            "n_heads": heads,
            "attn_config": {"kv_n_heads": kv, "rope_theta": 1e4, "clip_qkv": 8},
            "tie_word_embeddings": False,
        }
        table = {"ffn_hidden_size": 40, "moe_num_experts": experts, "moe_top_k": 2, "hidden_size": width}
        config["ffn_config"] = table
    if kind == "modernbert-decoder":
        config |= {"tie_word_embeddings": True, "local_attention": 16}
        words = ["full_attention", "sliding_attention"]
        config |= rng.choice([{}, {"layer_types": rng.choices(words, k=layers)}])
    if kind == "axk2":
        config |= {"gated_norm_rank": 12, "num_key_value_heads": heads}
        if rng.random() < 0.5:
            config |= {"n_group": None, "topk_group": None}
    if kind in {"axk1", "axk2"} and rng.random() < 0.5:
        config["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=layers)
    if kind == "lfm3":
        config |= {name: rng.random() < 0.5 for name in ("use_sandwich_norm", "use_attention_gate")}
    if kind == "olmo_hybrid":
        sizes = ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"]
        for name in sizes if rng.random() < 0.5 else []:
            del config[name]
    if kind in {"lara_mini", "lfm3", "olmo_hybrid", "flint"} and rng.random() < 0.7:
        other = {"lfm3": ["conv", "sliding_attention"], "flint": ["sliding_attention"]}.get(kind, ["linear_attention"])
        other += ["sliding_attention"] * (kind == "lara_mini")
        config["layer_types"] = [*other, "full_attention", *rng.choices([*other, "full_attention"], k=layers)][:layers]
    if kind == "bailing_hybrid":
        config |= {"layer_group_size": rng.choice([2, 3]), "short_conv_kernel_size": rng.choice([2, 4])}
    if kind == "cohere2_moe":
        words = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
        config |= {name: rng.choices(pair, k=layers) for name, pair in words.items()} if rng.random() < 0.5 else {}
        config |= {"prefix_dense_intermediate_size": 56, "num_shared_experts": rng.choice([0, 2])}
    if kind == "laguna":
        config |= {"gating": rng.choice([True, "per-head", "per-element"])}
        config |= {"num_attention_heads_per_layer": rng.choices([heads, 2 * heads], k=layers)}
    if kind == "hyperclovax":
        config["use_post_norm"] = rng.random() < 0.5
    if kind == "afmoe":
        config |= {"num_shared_experts": rng.choice([1, 2]), "global_attn_every_n_layers": rng.choice([2, 4])}
    if kind == "hy_v4":
        config |= {"hc_mult": rng.choice([1, 2, 4])}
        if rng.random() < 0.5:
            config["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=layers)
            config["indexer_types"] = ["full", *rng.choices(["full", "shared"], k=layers - 1)]
    if kind == "deepseek_v4":
        config |= {"hc_mult": rng.choice([2, 4]), "o_groups": rng.choice([1, 2]), "o_lora_rank": 24, "head_dim": 16}
        config |= {"n_shared_experts": 1, "num_key_value_heads": 1, "hc_sinkhorn_iters": rng.choice([1, 3])}
        config |= rng.choice([{}, {"compress_rates": {name: 2 + i for i, name in enumerate(COMPRESSED)}}])
        config |= rng.choice([{}, {"partial_rotary_factor": 0.5}, {"qk_rope_head_dim": 4}])
        words = [*COMPRESSED, "sliding_attention"]
        config |= rng.choice([{}, {"layer_types": rng.choices(words, k=layers)}])
        if "layer_types" not in config:
            config |= rng.choice([{}, {"compress_ratios": rng.choices([0, 4, 128], k=layers + 1)}])
    if kind == "glm5_next_text":
        config |= {"hc_mult": rng.choice([2, 4]), "hc_sinkhorn_iters": 3, "index_kpool": rng.choice([1, 2, 4])}
        config |= {"qk_rope_head_dim": 0, "num_key_value_heads": heads, "linear_num_heads": 4, "linear_head_dim": 8}
        words = ["linear_attention", "indexed_attention"]
        config |= rng.choice([{}, {"layer_types": rng.choices(words, k=layers)}])
        config |= rng.choice([{}, {"mlp_layer_types": rng.choices(["dense", "sparse"], k=layers)}])
        config["index_kpool_always_select_tail"] = rng.random() < 0.5
    if kind == "qwen4_exp_text":
        config |= {"hc_count": rng.choice([2, 3]), "hc_lowrank": 12, "indexer_n_heads": 2, "indexer_head_dim": 16}
        config |= {"indexer_kv_heads": 1, "indexer_budget": 8, "indexer_compress_ratio": rng.choice([1, 2, 4])}
        config |= {"ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 8, "heads_per_ngram": 2}
        config |= {
            "layer_types": ["linear_attention", *rng.choices(["linear_attention", "indexed_attention"], k=layers)]
        }
        config["layer_types"] = config["layer_types"][:layers]
        linear = [i + 1 for i, word in enumerate(config["layer_types"]) if word == "linear_attention"]
        config |= rng.choice([{}, {"ple_layer_ids": linear[:2], "ple_embed_dim": rng.choice([None, 48])}])
        config |= {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e4}}
    if kind == "glm_moe_dsa":
        config |= indexers_of_some(layers, rng)
    if kind == "gemma4_text":
        config |= gemma4_blocks(heads, layers, rng)
    if kind == "gemma4_unified_text":
        own = {"global_head_dim", "num_global_key_value_heads", *fields}
        config |= {name: value for name, value in gemma4_blocks(heads, layers, rng).items() if name in own}
    if kind.startswith("glm4v"):
        config.pop("head_dim", None)
    if kind == "minimax_m3_vl_text":
        words = {"layer_types": ["full_attention", "minimax_m3_sparse"], "mlp_layer_types": ["dense", "sparse"]}
        config |= {name: rng.choices(pair, k=layers) for name, pair in words.items()}
        config |= {"num_key_value_heads": kv, "index_n_heads": kv, "dense_intermediate_size": rng.choice([56, 112])}
    if kind == "mellum" and rng.random() < 0.7:
        words = {"layer_types": ["full_attention", "sliding_attention"], "mlp_layer_types": ["dense", "sparse"]}
        config |= {name: rng.choices(pair, k=layers) for name, pair in words.items()}
    if kind == "mimo_v2_flash":
        config |= {"num_key_value_heads": heads // 2, "num_attention_heads": heads}  # doubled where a window is
        if rng.random() < 0.5:
            config["layer_types"] = rng.choices(["full_attention", "sliding_attention"], k=layers)
            config["mlp_layer_types"] = rng.choices(["dense", "sparse"], k=layers)
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "sliding_window"):
        if rng.random() < 0.2 and name in config and kind not in KEPT:
            left_out = fields[name]
            if name == "num_key_value_heads" and left_out is not None and heads % left_out:
                continue
            if name != "head_dim" or (left_out is None and kind not in NO_HEAD_SIZE):
                del config[name]
    return config | {"model_type": kind}


def indexers_of_some(layers: int, rng: random.Random) -> dict[str, Any]:
    """Which blocks have an indexer, in one of the ways that the class reads."""
    listed = ["full", *rng.choices(["full", "shared"], k=layers - 1)]
    letters = "".join(word[0].upper() for word in listed)
    rarely = {"index_topk_freq": rng.choice([1, 3]), "index_skip_topk_offset": rng.choice([1, 2])}
    return rng.choice([{}, {"indexer_types": listed}, {"index_topk_pattern": letters}, rarely])


def gemma4_blocks(heads: int, layers: int, rng: random.Random) -> dict[str, Any]:
    """What the blocks of a Gemma 4 have."""
    shared = rng.choice([0, 0, layers - 2])
    kinds = ["sliding_attention", "full_attention"]
    config: dict[str, Any] = {
        "layer_types": [*kinds, *rng.choices(kinds, k=layers - 3), "full_attention"][:layers],
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([heads, heads // 2]),
        "global_head_dim": rng.choice([8, 16, 32]),
        "num_global_key_value_heads": rng.choice([None, 1, 2]),
        "attention_k_eq_v": rng.random() < 0.5,
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": rng.random() < 0.5,
        "hidden_size_per_layer_input": 8 if shared else rng.choice([0, 8]),  # the class fails with the first alone
        "vocab_size_per_layer_input": rng.choice([64, 160]),
        "use_bidirectional_attention": rng.choice([None, "vision", "all"]),
    }
    if rng.random() < 0.5:
        experts = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24, "use_double_wide_mlp": False}
        config |= {"enable_moe_block": True} | experts
    else:
        config |= {"enable_moe_block": False, "num_experts": None, "top_k_experts": None, "moe_intermediate_size": None}
    return config


def by_class(config: Any, **how: str) -> Any:
    """A model of a class of :data:`BY_CLASS`."""
    return getattr(transformers, BY_CLASS[config.model_type])._from_config(config, **how)


def undrawn(_: Any) -> None:
    """On the meta device a layer has no first values, which torch would draw all the same."""


def as_transformers(config: dict[str, Any]) -> list[tuple[str, int]]:
    """Name and elements of every parameter that transformers registers for a config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config["model_type"]
    made = CONFIG_MAPPING[kind](**{name: value for name, value in config.items() if name != "model_type"})
    auto = transformers.AutoModel if kind in AS_ENCODER | IMAGES else transformers.AutoModelForCausalLM
    if kind in MASKED:
        auto = transformers.AutoModelForMaskedLM
    if kind == "deit":
        made.architectures = ["DeiTForImageClassification"]
    if kind in CLASSES:
        auto = transformers.AutoModelForImageClassification
    if kind in SEEING:
        auto = transformers.AutoModelForImageTextToText
    build = by_class if kind in BY_CLASS else auto.from_config
    with torch.device("meta"), mock.patch.object(torch.nn.Linear, "reset_parameters", undrawn):
        whole = build(made)
    return [(name, tensor.numel()) for name, tensor in whole.named_parameters()]


def as_rows(model: Model) -> list[tuple[str, int]]:
    """The same of a Model: tied tensors are no parameters of their own, corrections of scores are buffers there."""
    tensors = (tensor for layer in model.layers for tensor in layer.tensors if not tensor.tied_to)
    return [(tensor.name, tensor.numel) for tensor in tensors if not _is_buffer(model.family, tensor.name)]


def _is_buffer(family: str, name: str) -> bool:
    return family == "deepseek" and name.endswith("e_score_correction_bias")


def joined(tensors: list[tuple[str, int]]) -> dict[str, int]:
    """Experts' projections summed to the two tensors that transformers 5 has, under its names."""
    whole: dict[str, int] = {}
    parts = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj"}
    parts |= {"down_proj": "down_proj", "w2": "down_proj"}
    for name, numel in tensors:
        expert = re.fullmatch(r"(.*experts)\.\d+\.(\w+)\.weight", name)
        label = f"{expert[1]}.{parts[expert[2]]}" if expert else name
        label = label.replace("block_sparse_moe", "mlp")
        whole[label] = whole.get(label, 0) + numel
    return whole


def compare(kind: str, every: int) -> None:
    """Hold random configs of a type against the class's own parameters."""
    rng = random.Random(zlib.crc32(kind.encode()))
    for case in range(CASES):
        config = random_config(kind, rng)
        made = from_hf(config)
        if case % every:
            continue
        theirs = as_transformers(config)
        ours = as_rows(made)
        if kind in EARLIER:
            assert sum(n for _, n in ours) == sum(n for _, n in theirs), config
        elif kind in EXPERTS_APART:
            assert joined(ours) == dict(theirs), config
        else:
            assert ours == theirs, config


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_are_those_that_transformers_registers(kind: str, pytestconfig: pytest.Config) -> None:
    compare(kind, QUICK if "not slow" in pytestconfig.option.markexpr else 1)


def counted_flops(config: dict[str, Any], tokens: int) -> int:
    """FLOPs of one forward of the class on one sequence, as torch counts them."""
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = config["model_type"]
    made = CONFIG_MAPPING[kind](**{name: value for name, value in config.items() if name != "model_type"})
    auto = transformers.AutoModel if kind in AS_ENCODER else transformers.AutoModelForCausalLM
    if kind in MASKED:
        auto = transformers.AutoModelForMaskedLM
    build = by_class if kind in BY_CLASS else auto.from_config
    whole = build(made, attn_implementation="eager", experts_implementation="eager")
    with FlopCounterMode(display=False) as counter:
        whole(input_ids=torch.ones(1, tokens, dtype=torch.long), use_cache=False)
    return int(counter.get_total_flops())


OTHERWISE = {
    "jamba", "bamba", "falcon_h1", "granitemoehybrid", "minimax", "kimi_linear", "lfm2", "lfm2_moe", "mamba",
    "falcon_mamba", "mamba2", "nemotron_h", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "llama4_text",
    "bailing_hybrid", "deepseek_v32", "glm_moe_dsa", "hy_v4", "lara_mini", "lfm3", "olmo_hybrid",
    "minimax_m3_vl_text", "deepseek_v4", "qwen4_exp_text", "axk2", *IMAGES,
}  # fmt: skip
"""Types that transformers computes in another way than their fused kernels: scans step by step, every expert for every
token, sparse attention as a mask; and vit, which reads no tokens."""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OTHERWISE])
def test_flops_are_those_that_torch_counts(kind: str) -> None:
    config = random_config(kind, random.Random(zlib.crc32(kind.encode()) + 1))
    if "kv_lora_rank" in config:
        config["num_key_value_heads"] = config["num_attention_heads"]  # the class fails otherwise
    kernels = [k for layer in from_hf(config, seq_len=48, attention="eager").layers for k in layer.kernels]
    # Megatron-LM counts the scaling of latent vectors, torch does not.
    ours = sum(k.flops for k in kernels if not k.name.endswith("latent_norm"))
    assert ours == counted_flops(config, 48)


def test_flops_of_experts_in_a_narrower_width_are_those_that_torch_counts() -> None:
    config = random_config("nemotron_h", random.Random(4)) | {"moe_latent_size": 24, "mlp_hidden_act": "relu2"}
    config["layers_block_type"] = ["moe", "full_attention", "mlp"]
    made = from_hf(config, seq_len=48, attention="eager")
    assert sum(k.flops for layer in made.layers for k in layer.kernels) == counted_flops(config, 48)


def test_flops_of_gated_norms_and_queries_with_their_gate_are_those_that_torch_counts() -> None:
    config = random_config("axk2", random.Random(4))
    kernels = [k for layer in from_hf(config, seq_len=48, attention="eager").layers for k in layer.kernels]
    ours = sum(k.flops for k in kernels if not k.name.endswith("latent_norm"))
    # Its indexer scores masked keys, too, and sums heads by a product.
    scores = [k for k in kernels if k.name == "index_scores"]
    masked = sum(2 * k.batch * k.m * k.n * (k.k + 1) - k.flops for k in scores)
    assert ours + masked == counted_flops(config, 48)


@pytest.mark.parametrize("kind", ["lfm3", "lara_mini"])
def test_flops_of_blocks_that_attend_are_those_that_torch_counts(kind: str) -> None:
    config = random_config(kind, random.Random(6)) | {"num_hidden_layers": 3, "sliding_window": 16}
    config["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    made = from_hf(config, seq_len=48, attention="eager")
    assert sum(k.flops for layer in made.layers for k in layer.kernels) == counted_flops(config, 48)


def block_kernels(kind: str, **fields: Any) -> list[list[str]]:
    """Names of the kernels of each block of a small config."""
    config = random_config(kind, random.Random(6)) | {"num_hidden_layers": 2, "sliding_window": 16} | fields
    made = from_hf(config, seq_len=48)
    return [[k.name for k in layer.kernels] for layer in made.layers if layer.kind == "block"]


@pytest.mark.parametrize("kind", ["exaone4", "cohere2", "kolibri1", "flint", "lara_mini"])
def test_blocks_without_a_window_do_not_rotate_where_the_class_says_so(kind: str) -> None:
    windowed, full = block_kernels(kind, layer_types=["sliding_attention", "full_attention"])
    assert "rotary" in windowed
    assert "rotary" not in full


@pytest.mark.parametrize("kind", ["modernbert", "modernbert-decoder"])
def test_the_first_block_of_modernbert_has_no_norm_in_front_of_its_attention(kind: str) -> None:
    first, second = block_kernels(kind)
    assert first == [name for name in second if name != "norm_1"]
    assert "norm_1" in second


def test_halves_that_are_scaled_have_a_kernel_for_it() -> None:
    made = from_hf(random_config("dinov2", random.Random(6)))
    names = [k.name for layer in made.layers if layer.kind == "block" for k in layer.kernels]
    assert names.count("attention_layer_scale") == names.count("mlp_layer_scale") == names.count("norm_1") > 0


def test_an_embedding_of_another_width_is_summed_and_normed_in_it() -> None:
    config = random_config("electra", random.Random(6)) | {"embedding_size": 24}
    made = from_hf(config, seq_len=16)
    kernels = made.layers[0].kernels
    assert kernels[-1].name == "project_in"
    norm = next(k for k in kernels if k.name == "norm")
    same = from_hf(config | {"embedding_size": config["hidden_size"]}, seq_len=16).layers[0].kernels
    assert norm.nbytes * config["hidden_size"] == next(k.nbytes for k in same if k.name == "norm") * 24
    assert not [k for k in same if k.name == "project_in"]


def test_relative_positions_are_added_to_scores_of_every_block() -> None:
    assert all(names.count("position_bias") == 1 for names in block_kernels("mpnet"))


def test_an_encoder_may_have_no_segments() -> None:
    config = random_config("gte", random.Random(6)) | {"type_vocab_size": 0}
    assert as_rows(from_hf(config)) == as_transformers(config)


def test_a_head_of_fewer_words_is_refused() -> None:
    with pytest.raises(ModelError, match="'output_vocab_size' = 40 changes a model's tensors"):
        from_hf(random_config("apertus1p5_text", random.Random(6)) | {"output_vocab_size": 40})


def test_an_encoder_with_norms_in_front_ends_in_one() -> None:
    head = from_hf(random_config("megatron-bert", random.Random(6)), seq_len=16).layers[-1].kernels
    assert [k.name for k in head][:2] == ["norm", "pooler"]


def test_a_norm_stands_behind_experts_and_not_behind_the_mlp_of_a_dense_block() -> None:
    dense, sparse = block_kernels("axk1", mlp_layer_types=["dense", "sparse"])
    assert "norm_behind_2" not in dense
    assert sparse[sparse.index("norm_behind_2") - 1 :][:3] == ["shared_sum", "norm_behind_2", "mlp_residual"]


def test_delta_rules_have_norms_in_front_and_attention_behind_it() -> None:
    linear, full = block_kernels("olmo_hybrid", layer_types=["linear_attention", "full_attention"])
    assert linear[:4] == ["norm_1", "q", "k", "v"]
    assert full[:3] == ["q", "k", "v"]
    assert full[full.index("out") + 1 :][:2] == ["norm_1", "attention_residual"]
    assert "rotary" in full
    rotation = {"rope_theta": None, "rope_type": "default"}
    words = ["full_attention", "linear_attention"]
    assert not any(
        "rotary" in names for names in block_kernels("olmo_hybrid", layer_types=words, rope_parameters=rotation)
    )


def test_flops_of_minimax_without_chosen_keys_are_those_that_torch_counts() -> None:
    config = random_config("minimax_m3_vl_text", random.Random(4))
    config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    made = from_hf(config, seq_len=48, attention="eager")
    assert sum(k.flops for layer in made.layers for k in layer.kernels) == counted_flops(config, 48)


def test_a_published_minimax_says_the_same_in_its_own_words() -> None:
    config = random_config("minimax_m3_vl_text", random.Random(4)) | {"index_block_size": 16, "index_topk_blocks": 2}
    sparse = [int(word != "full_attention") for word in config["layer_types"]]
    table = {
        "use_sparse_attention": True,
        "sparse_attention_freq": sparse,
        "sparse_num_index_heads": config["index_n_heads"],
        "sparse_index_dim": config["index_head_dim"],
        "sparse_block_size": 16,
        "sparse_topk_blocks": 2,
    }
    published = {name: value for name, value in config.items() if "index" not in name and "_types" not in name}
    published |= {"sparse_attention_config": table, "hidden_act": "swigluoai", "model_type": "minimax_m3"}
    published["moe_layer_freq"] = [int(word == "sparse") for word in config["mlp_layer_types"]]
    made = from_hf(published, seq_len=48)
    assert made.layers == from_hf(config, seq_len=48).layers
    pairs = 32 * 48 - 32**2 / 2
    seen = {k.flops for layer in made.layers for k in layer.kernels if k.name == "attention"}
    heads = 4.0 * config["num_attention_heads"] * config["head_dim"]
    assert seen <= {heads * pairs, heads * 48**2 / 2}
    for change, message in (
        ({"sparse_attention_config": table | {"use_sparse_attention": False}}, "leave the whole table out"),
        ({"sparse_attention_config": table | {"sparse_attention_freq": [1]}}, "must be 0 or 1 for each of"),
        ({"layer_types": ["full"]}, "'layer_types' must be 'full_attention' or 'minimax_m3_sparse' for each of"),
        ({"mlp_layer_types": ["moe"]}, "'mlp_layer_types' must be 'dense' or 'sparse' for each of"),
        ({"attention_output_gate": True}, "'attention_output_gate' = True is not described; only False is"),
        ({"n_shared_experts": 2}, "'n_shared_experts' = 2 is not described; only 1 is"),
    ):
        with pytest.raises(ModelError, match=message):
            from_hf(published | change)


def random_tower(kind: str, rng: random.Random) -> dict[str, Any]:
    """A small table of a tower, in the words of its class."""
    heads = rng.choice([2, 4])
    width = 16 * heads
    if kind == "qwen2_vl":
        return {"depth": 3, "embed_dim": width, "num_heads": heads, "hidden_size": 64, "mlp_ratio": 3, "patch_size": 14}
    if kind == "glm5_next":
        sizes = {"depth": 3, "hidden_size": width, "num_heads": heads, "out_hidden_size": 64, "intermediate_size": 48}
        return sizes | {"projection_intermediate_size": 80, "patch_size": 14, "attention_bias": rng.random() < 0.5}
    if kind.startswith("glm4"):
        sizes = {"depth": 3, "hidden_size": width, "num_heads": heads, "out_hidden_size": 64, "intermediate_size": 48}
        return sizes | {"patch_size": 14, "image_size": rng.choice([56, 112]), "attention_bias": rng.random() < 0.5}
    if kind.startswith("qwen"):
        sizes = {"depth": 3, "hidden_size": width, "num_heads": heads, "intermediate_size": 48, "out_hidden_size": 64}
        if kind.startswith(("qwen3", "qwen4")):
            stacked = {"deepstack_visual_indexes": [0, 2]} if kind.startswith("qwen3_vl") else {}
            return sizes | {"patch_size": 16, "num_position_embeddings": 144} | stacked
        return sizes | {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 112}
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_hidden_layers": 2, "num_channels": 3}
    sizes |= {"intermediate_size": 4 * width, "patch_size": 14}
    if kind == "kimi_k25":
        del sizes["num_channels"]
        return sizes | {"pos_emb_height": 8, "pos_emb_width": rng.choice([4, 8])}
    if kind == "gemma4":
        heads_of = {"num_key_value_heads": heads, "head_dim": rng.choice([8, 16]), "pooling_kernel_size": 3}
        return sizes | heads_of | {"patch_size": 16, "position_embedding_size": rng.choice([8, 64])}
    if kind == "minimax_m3_vl":
        return sizes | {"temporal_patch_size": 2, "spatial_merge_size": 2}
    if kind == "gemma4_unified":
        return {"mm_embed_dim": 48, "mm_posemb_size": 24, "patch_size": 16, "output_proj_dims": 48}
    if kind == "lfm2_vl":
        return sizes | {"patch_size": 16, "num_patches": 64, "vision_use_head": rng.random() < 0.5}
    sizes["image_size"] = rng.choice([56, 112])
    if kind == "internvl":
        sides = {"image_size": [112, 112], "patch_size": [14, 14]} if rng.random() < 0.5 else {}
        flags = {name: rng.random() < 0.5 for name in ("attention_bias", "use_qk_norm", "use_mean_pooling")}
        return sizes | sides | flags | {"norm_type": rng.choice(["layer_norm", "rms_norm"])}
    if kind == "llama4":
        sizes |= {"projector_input_dim": 32, "projector_output_dim": 24, "vision_output_dim": 24}
    return sizes


def seeing_config(kind: str, rng: random.Random) -> dict[str, Any]:
    """A small config of a decoder with a tower in front."""
    text = random_config(SEEING[kind], rng)
    top = {"tie_word_embeddings": rng.random() < 0.5} if rng.random() < 0.5 and kind != "llama4" else {}
    if kind != "llama4":
        text.pop("tie_word_embeddings", None)
    tower = random_tower(kind, rng)
    if kind == "kimi_k25":
        top["projection_hidden_size"] = tower["hidden_size"]  # the class multiplies no other
    if kind == "paligemma":
        top["projection_dim"] = text["hidden_size"]  # the class multiplies no other
    if kind == "lfm2_vl":
        top |= {"projector_hidden_size": 40, "downsample_factor": 2, "projector_use_layernorm": rng.random() < 0.5}
        top["projector_bias"] = rng.random() < 0.5
    if kind == "cohere2_vision":
        top |= {"alignment_intermediate_size": 48, "downsample_factor": 2}
    if kind.startswith("llava"):
        top["multimodal_projector_bias"] = rng.random() < 0.5
    return {"model_type": kind, "text_config": text, "vision_config": tower, **top}


@pytest.mark.parametrize("kind", SEEING)
def test_a_tower_stands_in_front_of_a_decoder_as_transformers_has_it(kind: str) -> None:
    rng = random.Random(zlib.crc32(kind.encode()))
    for _ in range(4):
        config = seeing_config(kind, rng)
        theirs, ours = as_transformers(config), as_rows(from_hf(config))
        apart = kind in {"qwen3_vl_moe", "kimi_k25", "gemma4", "gemma4_unified"} or kind.startswith(("glm", "llava_"))
        assert (joined(ours) == dict(theirs)) if apart else (ours == theirs), config


def test_a_block_without_an_indexer_attends_to_the_keys_that_an_earlier_one_chose() -> None:
    config = random_config("glm_moe_dsa", random.Random(1)) | {"num_hidden_layers": 3, "mlp_layer_types": ["dense"] * 3}
    made = from_hf(config | {"indexer_types": ["full", "shared", "full"]}, seq_len=48)
    blocks = [{k.name: k.flops for k in layer.kernels} for layer in made.layers if layer.kind == "block"]
    assert [any(name.startswith("index_") for name in kernels) for kernels in blocks] == [True, False, True]
    assert len({kernels["attention"] for kernels in blocks}) == 1
    for change in ({"indexer_types": ["shared"] * 3}, {"indexer_types": ["full"]}, {"index_topk_pattern": "FSX"}):
        with pytest.raises(ModelError, match=r"must be 'full' or 'shared' for each of 3 blocks, the first 'full'"):
            from_hf(config | {"indexer_types": None} | change)


@pytest.mark.parametrize("sides", [[2, 1], [0, 0], [2], ["2", "2"], [True, True]])
def test_patches_are_merged_by_one_number(sides: list[Any]) -> None:
    config = seeing_config("kimi_k25", random.Random(1))
    config["vision_config"]["merge_kernel_size"] = sides
    with pytest.raises(ModelError, match="'merge_kernel_size'"):
        from_hf(config)


def test_a_published_config_that_says_vt_is_the_same_tower() -> None:
    config = seeing_config("kimi_k25", random.Random(1))
    tower = config["vision_config"]
    own = {"hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size"}
    prefixes = {"pos_emb_height": "init_", "pos_emb_width": "init_", **dict.fromkeys(own, "vt_")}
    published = {prefixes.get(name, "") + name: value for name, value in tower.items()}
    assert as_rows(from_hf(config | {"vision_config": published})) == as_rows(from_hf(config))


def test_the_flat_config_of_before_transformers_5_is_the_same_decoder() -> None:
    config = seeing_config("qwen2_5_vl", random.Random(1))
    flat = {"vision_config": config["vision_config"], **config["text_config"], "model_type": "qwen2_5_vl"}
    assert from_hf(flat).layers == from_hf(config | {"tie_word_embeddings": False}).layers


def step_config(rng: random.Random) -> dict[str, Any]:
    """A small Step 3.5, in the words of its files or of its class."""
    layers = rng.randint(4, 6)
    config: dict[str, Any] = {
        "model_type": "step3p5",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "share_expert_dim": 40,
        "vocab_size": 96,
        "sliding_window": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    further = rng.choice([0, 2])
    if rng.random() < 0.7:
        words = rng.choices(["full_attention", "sliding_attention"], k=layers + further)
        config |= {"layer_types": words, "num_nextn_predict_layers": further}
    if rng.random() < 0.5:
        config["moe_layers_enum"] = ",".join(map(str, range(2, layers)))
    other = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 16}
    return config | rng.choice([{"attention_other_setting": other}, {"num_sliding_attention_heads": 8}, {}])


def test_step_reads_images_by_a_tower_that_ends_in_convolutions() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7

    rng = random.Random(1)
    for side, ratio in ((56, 2.0), (112, 35 / 6)):
        text = step_config(rng) | {"model_type": "step3p7"}
        tower = {"width": 48, "layers": 2, "heads": 4, "mlp_ratio": ratio, "image_size": side, "patch_size": 14}
        config: dict[str, Any] = {"text_config": text, "vision_config": tower, "projector_bias": rng.random() < 0.5}
        given = from_hf(config | {"model_type": "step3p7"})
        made = configuration_step3p7.Step3p7Config(**json.loads(json.dumps(config)))
        whole = modeling_step3p7.Step3p7ForConditionalGeneration._from_config(made, attn_implementation="eager")
        assert dict(as_rows(given)) == {name: tensor.numel() for name, tensor in whole.named_parameters()}
        layers = [layer for layer in given.layers if layer.name.startswith(("vision", "projector"))]
        with FlopCounterMode(display=False) as counter:
            whole.model.get_image_features(torch.ones(1, 3, side, side))
        assert sum(k.flops for layer in layers for k in layer.kernels) == counter.get_total_flops()


def test_step_is_the_decoder_that_transformers_has_behind_a_tower() -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.step3p7 import configuration_step3p7, modeling_step3p7

    rng = random.Random(1)
    for _ in range(12):
        config = step_config(rng)
        fields = {name: value for name, value in config.items() if name != "model_type"}
        made = configuration_step3p7.Step3p7TextConfig(**json.loads(json.dumps(fields)))
        decoder = modeling_step3p7.Step3p7TextModel._from_config(
            made, attn_implementation="eager", experts_implementation="eager"
        )
        theirs = [(f"model.{name}", tensor.numel()) for name, tensor in decoder.named_parameters()]
        for given in (config, json.loads(made.to_json_string())):
            ours = from_hf(given, seq_len=48, attention="eager")
            assert as_rows(ours)[:-1] == theirs, config
        with FlopCounterMode(display=False) as counter:
            decoder(input_ids=torch.ones(1, 48, dtype=torch.long), use_cache=False)
        counted = sum(k.flops for layer in ours.layers for k in layer.kernels if k.name != "logits")
        assert counted == counter.get_total_flops(), config
    for wrong, message in (
        (
            {"attention_other_setting": {"num_attention_groups": 4}},
            "'num_attention_groups' = 4 is not described; only 2",
        ),
        ({"layer_types": ["full_attention"]}, "'layer_types' must be 'full_attention' or 'sliding_attention' for each"),
        ({"mlp_layer_types": ["moe"]}, "'mlp_layer_types' must be 'dense' or 'sparse' for each of"),
    ):
        with pytest.raises(ModelError, match=message):
            from_hf(step_config(random.Random(1)) | wrong)


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_unified_text"])
def test_what_a_saved_config_says_of_single_blocks_is_read(kind: str) -> None:
    config = random_config(kind, random.Random(2)) | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    saved = {name: value for name, value in config.items() if "global" not in name}
    every = range(config["num_hidden_layers"])
    full = [i for i in every if config["layer_types"][i] == "full_attention" or i == every[-1]]
    said = {f"{i:02}": {"head_dim": config["global_head_dim"], "num_key_value_heads": 1} for i in full}
    assert from_hf(saved | {"per_layer_config": said}).layers == from_hf(config).layers
    for wrong in ({"99": {"head_dim": 8}}, {"0": {"intermediate_size": 8}}, {"first": {}}):
        with pytest.raises(
            ModelError, match=r"per_layer_config.\w+ = .* must be a table of head_dim and num_key_value"
        ):
            from_hf(saved | {"per_layer_config": wrong})
    with pytest.raises(ModelError, match="'per_layer_config' = a dict changes a model's tensors"):
        from_hf(random_config("llama", random.Random(2)) | {"per_layer_config": said})


def test_sides_that_a_tower_does_not_say_are_those_of_its_class() -> None:
    config = seeing_config("internvl", random.Random(5))
    config["vision_config"] |= {"image_size": None, "patch_size": None}
    assert "1 image of 448 x 448 pixels" in from_hf(config).notes[0]
    for wrong in ([14, 7], [0, 0], [14]):
        with pytest.raises(ModelError, match=r"'patch_size' = \[.*\] must be one whole number above zero, twice"):
            from_hf(config | {"vision_config": config["vision_config"] | {"patch_size": wrong}})


def test_lists_of_gpt_neo_name_each_block() -> None:
    config = random_config("gpt_neo", random.Random(5)) | {"num_layers": 4}
    made = from_hf(config | {"attention_types": [[["global", "local"], 2]]}, seq_len=48)
    pairs = [k.flops for layer in made.layers for k in layer.kernels if k.name == "attention"]
    assert pairs[0] == pairs[2] > pairs[1] == pairs[3]
    for wrong in ([[["global"], 10**30]], [[["near"], 4]], [["global"], 4], "global"):
        with pytest.raises(ModelError, match=r"'attention_types' = .* must be lists of 'global' and 'local' with how"):
            from_hf(config | {"attention_types": wrong})


def test_pixels_behind_the_last_whole_patch_of_a_towers_own_images_are_not_seen() -> None:
    config = seeing_config("llava_onevision", random.Random(1))
    config["vision_config"] |= {"image_size": 64, "patch_size": 14, "vision_use_head": False}
    made = from_hf(config)
    assert joined(as_rows(made)) == dict(as_transformers(config))
    with pytest.raises(ModelError, match="patches of 14 pixels do not cut an image of 80"):
        from_hf(seeing_config("qwen2_5_vl", random.Random(1)), image_size=80)


FLOPS_SEEN = ["glm4v", "internvl", "idefics3", "paligemma", "cohere2_vision"]
"""Models of which torch counts a tower and its projector."""


@pytest.mark.parametrize("kind", FLOPS_SEEN)
def test_flops_of_a_tower_are_those_that_torch_counts(kind: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = seeing_config(kind, random.Random(zlib.crc32(kind.encode()) + 3))
    if kind in {"paligemma", "cohere2_vision"}:
        config["vision_config"]["vision_use_head"] = False  # whose attention is counted as its keys alone
    parts = [layer for layer in from_hf(config).layers if layer.name.startswith(("vision", "projector"))]
    made = CONFIG_MAPPING[kind](**{name: value for name, value in config.items() if name != "model_type"})
    whole = transformers.AutoModelForImageTextToText.from_config(made, attn_implementation="eager")
    side = config["vision_config"].get("image_size", 0)
    pixels = torch.ones(1, 3, *(side if isinstance(side, list) else [side or 448] * 2))
    given: tuple[Any, ...] = (pixels,)
    if kind == "idefics3":
        given = (pixels[None],)
    if kind == "glm4v":
        given = (torch.zeros(32 * 32, 3 * 2 * 14 * 14), torch.tensor([[1, 32, 32]]))
    with FlopCounterMode(display=False) as counter:
        whole.model.get_image_features(*given)
    assert sum(k.flops for layer in parts for k in layer.kernels) == counter.get_total_flops()


def test_images_cost_what_their_number_and_size_ask_for() -> None:
    config = seeing_config("qwen2_5_vl", random.Random(1))
    once, twice = (from_hf(config, images=n) for n in (1, 2))
    seen = [sum(k.flops for x in m.layers if x.name.startswith("vision") for k in x.kernels) for m in (once, twice)]
    assert seen[1] == pytest.approx(2 * seen[0])
    assert once.parameters == twice.parameters
    large = from_hf(config, image_size=896)
    assert any("1 image of 896 x 896" in note for note in large.notes)
    with pytest.raises(ModelError, match="patches of 14 pixels do not cut an image of 450"):
        from_hf(config, image_size=450)


CHANGED = [
    "llama",
    "qwen3_moe",
    "deepseek_v3",
    "glm4_moe",
    "gemma3_text",
    "llama4_text",
    "qwen3_next",
    "mamba2",
    "jamba",
    "dots1",
    "lfm2_moe",
    "gemma4_text",
    "mimo_v2_flash",
    "minimax_m3_vl_text",
    "glm_moe_dsa",
]
"""Types whose fields are taken away and renamed, one by one."""


@pytest.mark.parametrize("kind", CHANGED)
def test_a_field_that_is_taken_away_is_named_or_has_the_default_of_the_class(kind: str) -> None:
    whole = random_config(kind, random.Random(11))
    size = sum(n for _, n in as_rows(from_hf(whole)))
    for field in whole:
        config = {name: value for name, value in whole.items() if name != field}
        if field == "model_type":
            continue
        try:
            made = from_hf(config)
        except ModelError as error:
            assert field in str(error)  # noqa: PT017
            continue
        parameters = sum(n for _, n in as_rows(made))
        assert parameters == size or any(field in note for note in made.notes), field
        if kind == "jamba" and field == "attn_layer_offset":
            continue  # the class refuses its own default where the period is shorter
        assert parameters == sum(n for _, n in as_transformers(config)), field


@pytest.mark.parametrize("kind", CHANGED)
def test_a_field_under_another_name_is_never_read_as_if_it_were_not_there(kind: str) -> None:
    whole = random_config(kind, random.Random(11))
    size = sum(n for _, n in as_rows(from_hf(whole)))
    for field in whole:
        if field == "model_type":
            continue
        config = {f"my_{name}" if name == field else name: value for name, value in whole.items()}
        try:
            made = from_hf(config)
        except ModelError as error:
            assert field in str(error)  # noqa: PT017
            continue
        same = sum(n for _, n in as_rows(made)) == size
        assert same or any(field in note for note in made.notes), field


WRONG: list[Any] = [None, "x", -1, 0, 2.5, True, [], {}, [1], 10**30]


@pytest.mark.parametrize(
    "kind",
    sorted(
        {
            *CHANGED,
            "gpt2",
            "opt",
            "mpt",
            "lfm2",
            "kimi_linear",
            "nemotron_h",
            "falcon",
            "nemotron-nas",
            "hy_v4",
            "gpt_neo",
            "deepseek_v4",
            "glm5_next_text",
            "qwen4_exp_text",
            "axk2",
            "dbrx",
        }
    ),
)
def test_a_value_of_any_kind_is_read_or_is_one_error(kind: str) -> None:
    whole = searched_config() if kind == "nemotron-nas" else random_config(kind, random.Random(11))
    for field in whole:
        for value in WRONG:
            if field != "model_type":
                with contextlib.suppress(ModelError):
                    from_hf(whole | {field: value})


def test_a_type_without_a_class_is_read_as_the_one_it_is_like() -> None:
    config = random_config("deepseek_v3", random.Random(5))
    assert from_hf(config | {"model_type": "kimi_k2"}).layers == from_hf(config).layers


def searched_config() -> dict[str, Any]:
    """A small Llama-Nemotron: each block has heads and an MLP of its own, or none."""
    halves = [(2, 1.0), (None, 5.25), (4, None), (1, 0.5)]
    blocks = [
        {
            "attention": {"n_heads_in_group": group, "no_op": group is None, "window_length": None},
            "ffn": {"ffn_mult": times, "no_op": times is None, "replace_with_linear": False},
        }
        for group, times in halves
    ]
    sizes = {"hidden_size": 384, "num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 96}
    empty = {"num_key_value_heads": None, "intermediate_size": None, "tie_word_embeddings": False}
    return {"model_type": "nemotron-nas", "block_configs": blocks, "hidden_act": "silu"} | sizes | empty


def test_blocks_that_a_search_found_are_llamas_blocks_of_those_sizes() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = searched_config()
    made = from_hf(config, seq_len=64)
    widths = {1.0: 256, 5.25: 1536, 0.5: 256}
    for layer, block in zip((x for x in made.layers if x.kind == "block"), config["block_configs"], strict=True):
        group, times = block["attention"]["n_heads_in_group"], block["ffn"]["ffn_mult"]
        sizes = {"num_key_value_heads": 4 // (group or 1), "intermediate_size": widths.get(times, 8)}
        with torch.device("meta"):
            llama = LlamaDecoderLayer(LlamaConfig(hidden_size=384, num_attention_heads=4, **sizes), 0)
        absent = ["self_attn", "input_layernorm"] if group is None else []
        absent += ["mlp", "post_attention_layernorm"] if times is None else []
        theirs = [(name, p.numel()) for name, p in llama.named_parameters() if not name.startswith(tuple(absent))]
        assert [(t.name.split(".", 3)[3], t.numel) for t in layer.tensors] == theirs
        assert ("attention" in {k.name for k in layer.kernels}) == (group is not None)


@pytest.mark.parametrize(
    ("half", "change", "message"),
    [
        (
            "attention",
            {"replace_with_linear": True},
            r"block_configs\[0\].attention: 'replace_with_linear' = True is not",
        ),
        ("attention", {"window_length": 64}, "'window_length' = 64 is not described; only null and false are"),
        ("attention", {"n_heads_in_group": 3}, "'n_heads_in_group' = 3 does not divide 4 heads"),
        ("ffn", {"ffn_mult": -1}, r"block_configs\[0\].ffn: 'ffn_mult' = -1 must be a number above zero"),
    ],
)
def test_what_a_searched_block_may_not_be_is_named(half: str, change: dict[str, Any], message: str) -> None:
    config = searched_config()
    config["block_configs"][0][half] |= change
    with pytest.raises(ModelError, match=message):
        from_hf(config)


def test_mimo_is_a_qwen2() -> None:
    config = random_config("qwen2", random.Random(5))
    assert from_hf(config | {"model_type": "mimo"}).layers == from_hf(config).layers


def test_a_part_that_is_not_described_is_no_part_that_is_not_there() -> None:
    config = seeing_config("gemma4", random.Random(1))
    assert from_hf(config | {"audio_config": None}).parameters == from_hf(config).parameters
    with pytest.raises(
        ModelError, match="'audio_config' is a part of gemma4 that is not described; null leaves it out"
    ):
        from_hf(config | {"audio_config": {"hidden_size": 64}})


def test_fields_are_those_of_the_installed_transformers() -> None:
    installed = tables(kinds_of_rows())
    written = json.loads(FILE.read_text())
    assert plain(installed) == written
