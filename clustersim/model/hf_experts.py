"""What a config.json says of experts, latent attention and windows, with each family's own defaults."""

from __future__ import annotations

from clustersim.core.errors import ModelError
from clustersim.model.base import Experts, Latent
from clustersim.model.config import Config

_VISITS = "the experts each token visits"


def mixtral_experts(c: Config) -> Experts:
    """Mixtral: every block, no shared expert."""
    return Experts(
        count=c.need("num_local_experts", "the number of experts"),
        per_token=c.number("num_experts_per_tok", 2, _VISITS),
        width=c.need("intermediate_size", "the width of the MLP"),
    )


def qwen_experts(c: Config) -> Experts:
    """Qwen2-MoE (one gated shared expert) and Qwen3-MoE (none)."""
    second = c.data.get("model_type") == "qwen2_moe"
    if c.data.get("mlp_only_layers"):
        raise ModelError(f"{c.where}: 'mlp_only_layers' = {c.data['mlp_only_layers']!r} is not described; only [] is")
    count, visits, width = (60, 4, 1408) if second else (128, 8, 768)
    return Experts(
        count=c.number("num_experts", count, "the number of experts"),
        per_token=c.number("num_experts_per_tok", visits, _VISITS),
        width=c.number("moe_intermediate_size", width, "the width of an expert"),
        shared=c.number("shared_expert_intermediate_size", 5632, "the width of the shared expert") if second else 0,
        shared_gate=second,
        every=c.number("decoder_sparse_step", 1, "blocks from one with experts to the next"),
    )


def deepseek_experts(c: Config) -> Experts | None:
    """DeepSeek-V2 and V3: shared experts in one MLP, leading dense blocks; none where no experts are routed."""
    if c.data.get("n_routed_experts") is None:
        return None
    width = c.need("moe_intermediate_size", "the width of an expert")
    if c.data.get("moe_layer_freq", 1) != 1:
        raise ModelError(f"{c.where}: 'moe_layer_freq' = {c.data['moe_layer_freq']!r} is not described; only 1 is")
    return Experts(
        count=c.need("n_routed_experts", "the number of experts"),
        per_token=c.need("num_experts_per_tok", _VISITS),
        width=width,
        shared=width * c.whole("n_shared_experts", 0, "the number of shared experts"),
        dense_first=c.whole("first_k_dense_replace", 0, "the number of leading dense blocks"),
        groups=c.whole("n_group", 0, "the number of groups of experts"),
        group_limit=c.whole("topk_group", 0, "the groups each token's experts are in"),
        correction=c.text("topk_method", "noaux_tc" if c.data.get("model_type") == "deepseek_v3" else "greedy")
        == "noaux_tc",
    )


def latent_attention(c: Config) -> Latent:
    """DeepSeek's latent attention; a null ``q_lora_rank`` projects queries directly."""
    return Latent(
        q_rank=c.number("q_lora_rank", 0, "the rank of the queries") if "q_lora_rank" in c.data else 1536,
        kv_rank=c.number("kv_lora_rank", 512, "the rank of keys and values"),
        nope=c.number("qk_nope_head_dim", 128, "elements of a head that are not rotated"),
        rope=c.number("qk_rope_head_dim", 64, "elements of a head that are rotated"),
        value=c.number("v_head_dim", 128, "elements of a head's value"),
    )


def gpt_oss_experts(c: Config) -> Experts:
    """GPT-OSS: experts and router have biases."""
    return Experts(
        count=c.number("num_local_experts", 128, "the number of experts"),
        per_token=c.number("num_experts_per_tok", 4, _VISITS),
        width=c.number("intermediate_size", 2880, "the width of an expert"),
        bias=True,
    )


def full_every(c: Config) -> int:
    """Each how many-th block attends to all tokens, from ``layer_types``; every second where it is missing."""
    kinds = c.data.get("layer_types")
    if kinds is None:
        return 2
    full = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    every = full[0] + 1 if full else 0
    if full != [i for i in range(len(kinds)) if every and (i + 1) % every == 0]:
        raise ModelError(f"{c.where}: 'layer_types' must be full_attention in each so many-th block, not {kinds!r}")
    return every
