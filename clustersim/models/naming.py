"""Parameter tensors of transformers, named and ordered as ``named_parameters()`` prints them.

DDP cuts its first buckets from this order, so it follows the classes' ``__init__`` (Hugging Face transformers, and
llm-foundry for MPT), not the order of execution. One row of :data:`FAMILIES` per class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from clustersim.model import Tensor
from clustersim.models.base import Experts, Shape
from clustersim.models.naming_experts import (
    deepseek_moe,
    deepseek_mtp,
    dense_mlp,
    gpt_oss_moe,
    latent_attention,
    mixtral_moe,
    qwen_moe,
)
from clustersim.models.naming_vision import VISION

Tensors = tuple[Tensor, ...]


class Family(msgspec.Struct, frozen=True):
    """Tensor lists of one family: the embedding, block ``i``, the head with its final norm, and (DeepSeek) the i-th
    module that predicts further tokens."""

    embedding: Callable[[Shape], Tensors]
    block: Callable[[Shape, int], Tensors]
    head: Callable[[Shape], Tensors]
    mtp: Callable[[Shape, int], Tensors] | None = None


def _linear(name: str, n_in: int, n_out: int, bias: bool) -> Tensors:
    """A linear that every tensor-parallel rank has whole."""
    weight = Tensor(f"{name}.weight", n_in * n_out, cut="sequence")
    return (weight, Tensor(f"{name}.bias", n_out, cut="sequence")) if bias else (weight,)


def _column(name: str, n_in: int, n_out: int, bias: bool) -> Tensors:
    """A linear whose outputs tensor parallelism divides."""
    return tuple(replace(tensor, cut="column") for tensor in _linear(name, n_in, n_out, bias))


def _row(name: str, n_in: int, n_out: int, bias: bool) -> Tensors:
    """A linear whose inputs tensor parallelism divides; the bias is added to the reduced sum, whole."""
    weight, *rest = _linear(name, n_in, n_out, bias)
    return (replace(weight, cut="row"), *rest)


def _norm(name: str, s: Shape, width: int = 0) -> Tensors:
    size = width or s.d_model
    weight = Tensor(f"{name}.weight", size, cut="sequence")
    return (weight, Tensor(f"{name}.bias", size, cut="sequence")) if s.norm_bias else (weight,)


def _lm_head(name: str, embedding: str, s: Shape) -> Tensors:
    if s.head != "lm":
        return ()
    return (Tensor(name, s.vocab * s.embedding_width, tied_to=embedding if s.tied else "", cut="vocab"),)


def _learned(name: str, s: Shape) -> Tensors:
    return (Tensor(name, s.n_positions * s.d_model),) if s.positions == "learned" else ()


def _mlp(s: Shape, up: str, down: str, gate: str) -> Tensors:
    gates = _column(gate, s.d_model, s.d_ff, s.mlp_bias) if s.gated else ()
    return (
        *gates,
        *_column(up, s.d_model, s.d_ff, s.mlp_bias),
        *_row(down, s.d_ff, s.d_model, s.mlp_bias),
    )


# GPT-2: transformer.wte, wpe, h.N, ln_f; Conv1D keeps weights transposed, which changes no size.
def _gpt2_embedding(s: Shape) -> Tensors:
    return (Tensor("transformer.wte.weight", s.vocab * s.d_model, cut="vocab"), *_learned("transformer.wpe.weight", s))


def _gpt2_block(s: Shape, i: int) -> Tensors:
    p = f"transformer.h.{i}"
    return (
        *_norm(f"{p}.ln_1", s),
        *_column(f"{p}.attn.c_attn", s.d_model, s.width + 2 * s.kv_width, s.qkv_bias),
        *_row(f"{p}.attn.c_proj", s.width, s.d_model, s.out_bias),
        *_norm(f"{p}.ln_2", s),
        *_mlp(s, f"{p}.mlp.c_fc", f"{p}.mlp.c_proj", f"{p}.mlp.c_gate"),
    )


def _gpt2_head(s: Shape) -> Tensors:
    return (*_norm("transformer.ln_f", s), *_lm_head("lm_head.weight", "transformer.wte.weight", s))


def _mpt_block(s: Shape, i: int) -> Tensors:
    p = f"transformer.blocks.{i}"
    return (
        *_norm(f"{p}.norm_1", s),
        *_column(f"{p}.attn.Wqkv", s.d_model, s.width + 2 * s.kv_width, s.qkv_bias),
        *_row(f"{p}.attn.out_proj", s.width, s.d_model, s.out_bias),
        *_norm(f"{p}.norm_2", s),
        *_mlp(s, f"{p}.ffn.up_proj", f"{p}.ffn.down_proj", f"{p}.ffn.gate_proj"),
    )


def _mpt_head(s: Shape) -> Tensors:
    return (*_norm("transformer.norm_f", s), *_lm_head("lm_head.weight", "transformer.wte.weight", s))


def _llama_embedding(s: Shape) -> Tensors:
    table = Tensor("model.embed_tokens.weight", s.vocab * s.d_model, cut="vocab")
    return (table, *_learned("model.embed_positions.weight", s))


def _llama_attention(s: Shape, p: str) -> Tensors:
    qk_norms = tuple(Tensor(f"{p}.{name}.weight", s.head_dim, cut="sequence") for name in ("q_norm", "k_norm"))
    return (
        *_column(f"{p}.q_proj", s.d_model, s.width, s.qkv_bias),
        *_column(f"{p}.k_proj", s.d_model, s.kv_width, s.qkv_bias),
        *_column(f"{p}.v_proj", s.d_model, s.kv_width, s.qkv_bias),
        *_row(f"{p}.o_proj", s.width, s.d_model, s.out_bias),
        *(qk_norms if s.qk_norm else ()),
    )


def _llama_block(s: Shape, i: int) -> Tensors:
    p = f"model.layers.{i}"
    return (
        *_llama_attention(s, f"{p}.self_attn"),
        *_mlp(s, f"{p}.mlp.up_proj", f"{p}.mlp.down_proj", f"{p}.mlp.gate_proj"),
        *_norm(f"{p}.input_layernorm", s),
        *_norm(f"{p}.post_attention_layernorm", s),
    )


def _expert_block(moe: Callable[[Shape, Experts, str], Tensors]) -> Callable[[Shape, int], Tensors]:
    """Blocks of a Llama with experts named by ``moe``; with latent attention or a dense MLP where the shape says so."""

    def block(s: Shape, i: int) -> Tensors:
        p = f"model.layers.{i}"
        sinks = (Tensor(f"{p}.self_attn.sinks", s.heads, cut="column"),) if s.sinks else ()
        plain = sinks + _llama_attention(s, f"{p}.self_attn")
        return (
            *(latent_attention(s, s.latent, f"{p}.self_attn") if s.latent else plain),
            *(moe(s, s.experts, p) if s.experts else dense_mlp(s, p)),
            *_norm(f"{p}.input_layernorm", s),
            *_norm(f"{p}.post_attention_layernorm", s),
        )

    return block


_deepseek_block = _expert_block(deepseek_moe)


def _deepseek_mtp(s: Shape, i: int) -> Tensors:
    number = s.layers + i
    return deepseek_mtp(s, i, _deepseek_block(s.of_block(number), number))


def _llama_head(s: Shape) -> Tensors:
    return (*_norm("model.norm", s), *_lm_head("lm_head.weight", "model.embed_tokens.weight", s))


# OPT projects in and out of a narrower embedding in its 350m size only, and that size has no final norm.
def _opt_embedding(s: Shape) -> Tensors:
    p = "model.decoder"
    project: Tensors = ()
    if s.embed_dim:
        project = (
            *_linear(f"{p}.project_out", s.d_model, s.embed_dim, False),
            *_linear(f"{p}.project_in", s.embed_dim, s.d_model, False),
        )
    return (
        Tensor(f"{p}.embed_tokens.weight", s.vocab * s.embedding_width, cut="vocab"),
        *_learned(f"{p}.embed_positions.weight", s),
        *project,
    )


def _opt_block(s: Shape, i: int) -> Tensors:
    p = f"model.decoder.layers.{i}"
    return (
        *_column(f"{p}.self_attn.k_proj", s.d_model, s.kv_width, s.qkv_bias),
        *_column(f"{p}.self_attn.v_proj", s.d_model, s.kv_width, s.qkv_bias),
        *_column(f"{p}.self_attn.q_proj", s.d_model, s.width, s.qkv_bias),
        *_row(f"{p}.self_attn.out_proj", s.width, s.d_model, s.out_bias),
        *_norm(f"{p}.self_attn_layer_norm", s),
        *_column(f"{p}.fc1", s.d_model, s.d_ff, s.mlp_bias),
        *_row(f"{p}.fc2", s.d_ff, s.d_model, s.mlp_bias),
        *_norm(f"{p}.final_layer_norm", s),
    )


def _opt_head(s: Shape) -> Tensors:
    # Transformers registers the final norm before the layers; here it sits where it runs, with the head.
    norm = _norm("model.decoder.final_layer_norm", s) if s.final_norm else ()
    return (*norm, *_lm_head("lm_head.weight", "model.decoder.embed_tokens.weight", s))


def _bert_embedding(s: Shape) -> Tensors:
    p = "bert.embeddings"
    types = (Tensor(f"{p}.token_type_embeddings.weight", s.token_types * s.d_model),) if s.token_types else ()
    return (
        Tensor(f"{p}.word_embeddings.weight", s.vocab * s.d_model, cut="vocab"),
        *_learned(f"{p}.position_embeddings.weight", s),
        *types,
        *_norm(f"{p}.LayerNorm", s),
    )


def _bert_block(s: Shape, i: int) -> Tensors:
    p = f"bert.encoder.layer.{i}"
    return (
        *_column(f"{p}.attention.self.query", s.d_model, s.width, s.qkv_bias),
        *_column(f"{p}.attention.self.key", s.d_model, s.kv_width, s.qkv_bias),
        *_column(f"{p}.attention.self.value", s.d_model, s.kv_width, s.qkv_bias),
        *_row(f"{p}.attention.output.dense", s.width, s.d_model, s.out_bias),
        *_norm(f"{p}.attention.output.LayerNorm", s),
        *_column(f"{p}.intermediate.dense", s.d_model, s.d_ff, s.mlp_bias),
        *_row(f"{p}.output.dense", s.d_ff, s.d_model, s.mlp_bias),
        *_norm(f"{p}.output.LayerNorm", s),
    )


def _bert_head(s: Shape) -> Tensors:
    tensors: Tensors = ()
    if s.head in {"pooler", "pretraining"}:
        tensors += _linear("bert.pooler.dense", s.d_model, s.d_model, True)
    if s.head in {"mlm", "pretraining"}:
        p = "cls.predictions"
        tensors += (
            Tensor(f"{p}.bias", s.vocab, cut="vocab"),
            *_linear(f"{p}.transform.dense", s.d_model, s.d_model, True),
            *_norm(f"{p}.transform.LayerNorm", s),
            Tensor(
                f"{p}.decoder.weight",
                s.vocab * s.d_model,
                tied_to="bert.embeddings.word_embeddings.weight",
                cut="vocab",
            ),
        )
    if s.head == "pretraining":
        tensors += _linear("cls.seq_relationship", s.d_model, 2, True)
    if s.head == "qa":
        tensors += _linear("qa_outputs", s.d_model, 2, True)
    return tensors


FAMILIES: dict[str, Family] = {
    "gpt2": Family(_gpt2_embedding, _gpt2_block, _gpt2_head),
    "mpt": Family(_gpt2_embedding, _mpt_block, _mpt_head),
    "llama": Family(_llama_embedding, _llama_block, _llama_head),
    "mixtral": Family(_llama_embedding, _expert_block(mixtral_moe), _llama_head),
    "deepseek": Family(_llama_embedding, _deepseek_block, _llama_head, _deepseek_mtp),
    "qwen_moe": Family(_llama_embedding, _expert_block(qwen_moe), _llama_head),
    "gpt_oss": Family(_llama_embedding, _expert_block(gpt_oss_moe), _llama_head),
    "opt": Family(_opt_embedding, _opt_block, _opt_head),
    "bert": Family(_bert_embedding, _bert_block, _bert_head),
    **{name: Family(style.embedding, style.block, style.head) for name, style in VISION.items()},
}
