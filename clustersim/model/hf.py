"""Hugging Face ``config.json`` -> Model, with each family's own defaults (transformers' configuration classes).

A new ``model_type`` is one reader function and one row of :data:`READERS`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Model
from clustersim.core.texts import Table, is_folder, json_table, text_of
from clustersim.model.base import Patches, TransformerShape
from clustersim.model.config import Config
from clustersim.model.hf_experts import (
    deepseek_experts,
    full_every,
    gpt_oss_experts,
    latent_attention,
    mixtral_experts,
    qwen_experts,
)
from clustersim.model.names import described, same_family
from clustersim.model.transformer import build, execution
from clustersim.model.vision import seeing

# Llama 3.1 allows 131,072 positions, but nobody means that when they do not say a sequence length.
DEFAULT_SEQ_LEN = 8192


def _gpt2(c: Config) -> TransformerShape:
    width = c.need("n_embd", "the width of the model")
    heads = c.need("n_head", "the number of attention heads")
    positions = c.number("n_positions", 1024, "the longest sequence")
    return TransformerShape(
        name=c.where,
        family="gpt2",
        d_model=width,
        heads=heads,
        kv_heads=heads,
        seq_len=positions,
        layers=c.need("n_layer", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=c.number("n_inner", 4 * width, "the width of the MLP"),
        vocab=c.need("vocab_size", "the number of tokens"),
        n_positions=positions,
        activation=c.activation("activation_function", "gelu_new"),
        tied=c.flag("tie_word_embeddings", True),
        attn_dropout=c.rate("attn_pdrop", 0.1),
        hidden_dropout=c.rate("resid_pdrop", 0.1),
    )


def _opt(c: Config) -> TransformerShape:
    width = c.need("hidden_size", "the width of the model")
    heads = c.need("num_attention_heads", "the number of attention heads")
    positions = c.number("max_position_embeddings", 2048, "the longest sequence")
    embed = c.number("word_embed_proj_dim", width, "the width of the embedding")
    bias = c.flag("enable_bias", True)
    pre_norm = c.flag("do_layer_norm_before", True)
    return TransformerShape(
        name=c.where,
        family="opt",
        d_model=width,
        heads=heads,
        kv_heads=heads,
        seq_len=positions,
        layers=c.need("num_hidden_layers", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=c.need("ffn_dim", "the width of the MLP"),
        vocab=c.need("vocab_size", "the number of tokens"),
        n_positions=positions + 2,  # OPT's position ids start at 2
        activation=c.activation("activation_function", "relu"),
        tied=c.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm_bias=c.flag("layer_norm_elementwise_affine", True),
        embed_dim=embed if embed != width else 0,
        post_norm=not pre_norm,
        final_norm=pre_norm and not c.flag("_remove_final_layer_norm", False),
        attn_dropout=c.rate("attention_dropout", 0.0),
        hidden_dropout=c.rate("dropout", 0.1),
    )


def _bert(c: Config) -> TransformerShape:
    width = c.need("hidden_size", "the width of the model")
    heads = c.need("num_attention_heads", "the number of attention heads")
    positions = c.need("max_position_embeddings", "the rows of the position table")
    roberta = c.data.get("model_type") in {"roberta", "xlm-roberta"}
    return TransformerShape(
        name=c.where,
        family="bert",
        d_model=width,
        heads=heads,
        kv_heads=heads,
        seq_len=positions - 2 if roberta else positions,  # RoBERTa's position ids start after the padding id
        layers=c.need("num_hidden_layers", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=c.need("intermediate_size", "the width of the MLP"),
        vocab=c.need("vocab_size", "the number of tokens"),
        n_positions=positions,
        activation=c.activation("hidden_act", "gelu"),
        causal=False,
        token_types=c.number("type_vocab_size", 1 if roberta else 2, "the number of segments"),
        post_norm=True,
        final_norm=False,
        embedding_norm=True,
        attn_dropout=c.rate("attention_probs_dropout_prob", 0.1),
        hidden_dropout=c.rate("hidden_dropout_prob", 0.1),
        head="pooler",
    )


def _llama(c: Config) -> TransformerShape:
    width = c.need("hidden_size", "the width of the model")
    heads = c.need("num_attention_heads", "the number of attention heads")
    kind = str(c.data.get("model_type"))
    bias = c.flag("attention_bias", kind in {"qwen2", "gpt_oss"})
    longest = c.number("max_position_embeddings", 4096, "the longest sequence")
    window = c.data.get("sliding_window") if c.data.get("use_sliding_window", kind in {"mistral", "mixtral"}) else None
    return TransformerShape(
        name=c.where,
        family="llama",
        d_model=width,
        heads=heads,
        seq_len=min(longest, DEFAULT_SEQ_LEN),
        kv_heads=c.number("num_key_value_heads", 8 if kind in {"mistral", "mixtral"} else heads, "key-value heads"),
        layers=c.need("num_hidden_layers", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=c.need("intermediate_size", "the width of the MLP"),
        vocab=c.need("vocab_size", "the number of tokens"),
        activation=c.activation("hidden_act", "silu"),
        norm="rmsnorm",
        positions="rotary",
        tied=c.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        out_bias=bias and kind != "qwen2",
        mlp_bias=c.flag("mlp_bias", False),
        norm_bias=False,
        qk_norm=kind in {"qwen3", "qwen3_moe"},
        window=window if isinstance(window, int) else 0,
        attn_dropout=c.rate("attention_dropout", 0.0),
    )


def _mixtral(c: Config) -> TransformerShape:
    return dataclasses.replace(_llama(c), family="mixtral", experts=mixtral_experts(c))


def _qwen_moe(c: Config) -> TransformerShape:
    bias = c.flag("qkv_bias", True) if c.data.get("model_type") == "qwen2_moe" else c.flag("attention_bias", False)
    return dataclasses.replace(_llama(c), family="qwen_moe", experts=qwen_experts(c), qkv_bias=bias)


def _deepseek(c: Config) -> TransformerShape:
    latent = latent_attention(c)
    return dataclasses.replace(
        _llama(c), family="deepseek", experts=deepseek_experts(c), latent=latent, head_dim=latent.nope + latent.rope
    )


def _gpt_oss(c: Config) -> TransformerShape:
    return dataclasses.replace(
        _llama(c),
        family="gpt_oss",
        experts=gpt_oss_experts(c),
        sinks=True,
        full_every=full_every(c),
        window=c.number("sliding_window", 128, "the tokens of a window"),
    )


def _mpt(c: Config) -> TransformerShape:
    width = c.need("d_model", "the width of the model")
    heads = c.need("n_heads", "the number of attention heads")
    attn = Config(f"{c.where}: attn_config", c.data.get("attn_config") or {})
    ffn = c.data.get("ffn_config") or {}
    ratio = c.data.get("expansion_ratio", ffn.get("expansion_ratio", 4))
    longest = c.need("max_seq_len", "the longest sequence")
    alibi = attn.flag("alibi", False)
    positions = "alibi" if alibi else "learned" if c.flag("learned_pos_emb", True) else "none"
    bias = not c.flag("no_bias", False)
    default_kv = 1 if attn.text("attn_type", "multihead_attention") == "multiquery_attention" else heads
    return TransformerShape(
        name=c.where,
        family="mpt",
        d_model=width,
        heads=heads,
        seq_len=longest,
        kv_heads=attn.number("kv_n_heads", default_kv, "key-value heads"),
        layers=c.need("n_layers", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=int(ratio * width),
        vocab=c.need("vocab_size", "the number of tokens"),
        n_positions=longest if positions == "learned" else 0,
        positions=positions,
        tied=c.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm_bias=bias,
        attn_dropout=attn.rate("attn_pdrop", 0.0),
        hidden_dropout=c.rate("resid_pdrop", 0.0),
    )


def _vit(c: Config) -> TransformerShape:
    width = c.need("hidden_size", "the width of the model")
    heads = c.need("num_attention_heads", "the number of attention heads")
    named = c.data.get("id2label")
    bias = c.flag("qkv_bias", True)
    shape = TransformerShape(
        name=c.where,
        family="vit_hf",
        d_model=width,
        heads=heads,
        kv_heads=heads,
        seq_len=1,
        layers=c.need("num_hidden_layers", "the number of blocks"),
        head_dim=c.head_dim(width, heads),
        d_ff=c.need("intermediate_size", "the width of the MLP"),
        vocab=len(named) if isinstance(named, dict) and named else c.number("num_labels", 2, "the number of classes"),
        activation=c.activation("hidden_act", "gelu"),
        qkv_bias=bias,
        attn_dropout=c.rate("attention_probs_dropout_prob", 0.0),
        hidden_dropout=c.rate("hidden_dropout_prob", 0.0),
    )
    patches = Patches(
        c.number("image_size", 224, "pixels of a side"),
        c.number("patch_size", 16, "pixels of a patch's side"),
        c.number("num_channels", 3, "colours of a pixel"),
    )
    return seeing(shape, patches)


READERS: dict[str, Callable[[Config], TransformerShape]] = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bert": _bert,
    "roberta": _bert,
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "smollm3": _llama,
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt_oss": _gpt_oss,
    "mpt": _mpt,
    "vit": _vit,
}


def from_hf(
    config: Table | str | Path,
    *,
    seq_len: int | None = None,
    attention: str | None = None,
    implementation: str | None = None,
    name: str = "",
    **overrides: Any,
) -> Model:
    """A Model from an unchanged Hugging Face config.json.

    Parameters
    ----------
    config : the parsed file, or a path to it (or to its folder).
    seq_len : tokens per sample; the config's longest sequence, at most 8,192, by default.
    attention, implementation : how kernels run, see :class:`~clustersim.model.base.TransformerShape`.
    name : what to call it; ``_name_or_path``, the file's folder or its ``model_type`` by default.
    overrides : any other field of Shape, such as ``head="pretraining"`` for BERT (``"pooler"`` by default, the bare
        BertModel) or ``layers=2``.

    Raises :class:`ModelError` naming the file, the key and what it is for when one is missing or no number; an unknown
    ``model_type`` gives the nearest known one.
    """
    shape, notes = shape_from_hf(config, seq_len=seq_len, name=name)
    attention, implementation = execution(attention, implementation)
    changes = {"attention": attention, "implementation": implementation} | overrides
    fields = {f.name for f in dataclasses.fields(TransformerShape)}
    for key in changes:
        if key not in fields:
            raise ModelError(f"{shape.name}: unknown model option {key!r}; {nearest(key, fields)}")
    return build(dataclasses.replace(shape, **changes), notes)


def shape_from_hf(
    config: Table | str | Path, *, seq_len: int | None = None, name: str = ""
) -> tuple[TransformerShape, tuple[str, ...]]:
    """The shape a config describes, and notes of what was assumed; raises as :func:`from_hf`."""
    where, data = (name or "config", config) if isinstance(config, dict) else _read(Path(config))
    kind = data.get("model_type")
    if not isinstance(kind, str):
        raise ModelError(f"{where}: missing 'model_type', which says whose tensors these are; {nearest('', READERS)}")
    if kind not in READERS:
        why = described(kind, model_type=True)
        if kind in {"t5", "bart"}:
            why = "an encoder-decoder; `clustersim list models` has those that are known by name"
        raise ModelError(
            f"{where}: model_type {kind!r} is {why}"
            if why
            else f"{where}: unknown model_type {kind!r}; {same_family(str(kind), READERS)}"
        )
    shape = READERS[kind](Config(where, data))
    notes: tuple[str, ...] = ()
    if shape.patches:
        if seq_len not in {None, shape.seq_len}:
            raise ModelError(
                f"{where}: an image of {shape.patches.image} pixels has {shape.seq_len} tokens, "
                f"not {seq_len}: give that seq_len, or change 'image_size' in the config"
            )
    elif seq_len is not None:
        if shape.positions == "learned" and shape.family == "mpt" and seq_len > shape.n_positions:
            raise ModelError(f"{where}: seq_len {seq_len} exceeds max_seq_len {shape.n_positions}")
        shape = dataclasses.replace(shape, seq_len=seq_len)
    else:
        notes = (f"seq_len {shape.seq_len}: the config's longest, at most {DEFAULT_SEQ_LEN}",)
    label = name or str(data.get("_name_or_path") or "") or (where if where != "config" else str(kind))
    return dataclasses.replace(shape, name=label), notes


def _read(path: Path) -> tuple[str, Table]:
    file = path / "config.json" if is_folder(path) else path
    return str(file), json_table(text_of(file, ModelError), str(file), ModelError)
