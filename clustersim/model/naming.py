"""Parameter tensors of transformers: how large each part of a family's row is, how tensor parallelism cuts it, and
whether the shape has it (a plain MLP has no gate, a dense block no experts)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache

from clustersim.core.errors import ModelError
from clustersim.core.model import Tensor
from clustersim.model import streams
from clustersim.model.base import Latent, Patches, TransformerShape
from clustersim.model.compressed import compressor_part, output_parts
from clustersim.model.expert_naming import expert_parts
from clustersim.model.families import families
from clustersim.model.lightning_naming import lightning_parts
from clustersim.model.ngrams import ngram_tensors
from clustersim.model.sizes import Indexer
from clustersim.model.tensor_parts import Part, Tensors, affine, gpt2_part, linear, linear_part, tensor_part


def embedding(s: TransformerShape) -> Tensors:
    """Of what stands before the blocks."""
    return _made(s, families()[s.family].embedding)


def block(s: TransformerShape, i: int) -> Tensors:
    """Of block ``i``, whose shape is ``s``."""
    family = families()[s.family]
    rows = family.attention + family.block
    if i == 0:
        rows = tuple(row for row in rows if not row.startswith("norm_later "))
    rows = tuple(row.replace("{half}", str(i % 2)) for row in rows)
    return _made(s, rows, _block_name(family.block_name, i) + ".")


def _block_name(name: str, i: int) -> str:
    """What stands before the names of block ``i``; ``{pair}`` is its number where two blocks are one layer."""
    return name.format(i, pair=i // 2)


def head(s: TransformerShape) -> Tensors:
    """Of the head with its final norm."""
    return _made(s, families()[s.family].head)


def mtp(s: TransformerShape, i: int) -> Tensors:
    """Of the i-th module that predicts further tokens, as the checkpoint numbers it after the last block; embedding and
    head are the trunk's."""
    family = families()[s.family]
    number = s.layers + i
    block_place = family.mtp.index("block")
    ahead = _block_name(family.block_name, number) + "."
    first, last = (_made(s, rows, ahead) for rows in (family.mtp[:block_place], family.mtp[block_place + 1 :]))
    return (*first, *block(s.of_block(number), number), *last)


@lru_cache(maxsize=256)
def _block_parts(family: str) -> frozenset[str]:
    row = families()[family]
    return frozenset(line.split()[0] for line in row.attention + row.block)


def has(s: TransformerShape, part: str) -> bool:
    """Whether the family's blocks list a part (``qkv`` for one projection of all three)."""
    return part in _block_parts(s.family)


def has_in_head(s: TransformerShape, part: str) -> bool:
    """Whether the family's head lists a part."""
    return any(line.split()[0] == part for line in families()[s.family].head)


def has_in_embedding(s: TransformerShape, part: str) -> bool:
    """Whether what stands before the family's blocks lists a part."""
    return any(line.split()[0] == part for line in families()[s.family].embedding)


def _made(s: TransformerShape, rows: Iterable[str], ahead: str = "") -> Tensors:
    """Tensors of ``rows``. Raises :class:`ModelError` where two have one name: no module registers a tensor twice, and
    its parameters would count twice."""
    parts = _parts(s)
    tensors = tuple(tensor for part, name in map(str.split, rows) for tensor in parts[part](ahead + name))
    names = Counter(tensor.name for tensor in tensors)
    if len(names) < len(tensors):
        repeated = next(name for name, times in names.items() if times > 1)
        raise ModelError(
            f"family {s.family!r} lists the tensor {repeated!r} twice; a row without an attention of its own has "
            "that of the row it is like"
        )
    return tensors


@lru_cache(maxsize=64)
def _parts(s: TransformerShape) -> dict[str, Part]:
    parts = _outside(s) | _of_block(s) | _of_attention(s) | expert_parts(s, s.experts)
    return parts | _of_delta(s) | _of_space(s) | lightning_parts(s)


def _outside(s: TransformerShape) -> dict[str, Part]:
    """Of embeddings and heads."""
    h = s.d_model
    narrow = s.embedding_width
    masked = s.head in {"mlm", "pretraining"}
    embedding_name = families()[s.family].embedding[0].removeprefix("words ")
    tied_to = embedding_name if s.tied else ""
    return {
        "words": tensor_part(s.vocab * narrow, "vocab", width=narrow),
        "positions": tensor_part(s.n_positions * h, there=s.positions == "learned", width=h),
        "segments": tensor_part(s.token_types * h, there=s.token_types > 0, width=h),
        "positions_narrow": tensor_part(s.n_positions * narrow, width=narrow),
        "segments_narrow": tensor_part(s.token_types * narrow, there=s.token_types > 0, width=narrow),
        "norm_narrow": linear_part(1, narrow, bias=s.norm_bias),
        "project_in_bias": linear_part(s.embed_dim, h, bias=True, there=s.embed_dim > 0),
        "project_in": linear_part(s.embed_dim, h, there=s.embed_dim > 0),
        "project_out": linear_part(h, s.embed_dim, there=s.embed_dim > 0),
        "embedding_norm": linear_part(1, h, bias=s.norm_bias),
        "final_norm": linear_part(1, h, bias=s.norm_bias, there=s.final_norm and s.norm_weight),
        "final_affine": linear_part(1, h, bias=True, there=s.final_norm),
        "logits": tensor_part(s.vocab * narrow, "vocab", there=s.head == "lm", tied_to=tied_to, width=narrow),
        "logits_bias": tensor_part(s.vocab, "vocab", there=s.head == "lm" and s.head_bias),
        "pooler": linear_part(h, h, bias=True, there=s.head in {"pooler", "pretraining"}),
        "masked_bias": tensor_part(s.vocab, "vocab", there=masked),
        "masked_transform": linear_part(h, h, bias=True, there=masked),
        "head_transform": linear_part(h, h, there=masked),
        "masked_norm": linear_part(1, h, bias=s.norm_bias, there=masked),
        "masked_logits": tensor_part(s.vocab * h, "vocab", there=masked, tied_to=embedding_name, width=h),
        "next_sentence": linear_part(h, 2, bias=True, there=s.head == "pretraining"),
        "answers": linear_part(h, 2, bias=True, there=s.head == "qa"),
        **_of_images(s),
        "pooling": lambda name: _pooling(name, s) if s.pooling else (),
        "classes": linear_part(h, s.vocab, "whole", bias=True),
        "words_again": tensor_part(s.vocab * h, "vocab", tied_to=embedding_name, width=h),
        "logits_again": tensor_part(s.vocab * h, "vocab", tied_to="lm_head.weight", width=h),
        "join": linear_part(2 * h, h),
        "relative_table": tensor_part(s.buckets * s.heads, there=s.buckets > 0, width=s.heads),
        "contacts": linear_part(s.layers * s.heads, 1, bias=True),
    }


def _of_images(s: TransformerShape) -> dict[str, Part]:
    """Of what makes tokens of an image's patches."""
    h = s.d_model
    p = s.patches or Patches(0, 0, tokens=0)
    return {
        "token": tensor_part(p.tokens * h, there=p.tokens > 0, width=p.tokens * h),
        "first_token": tensor_part(h, width=h),
        "further_tokens": tensor_part((p.tokens - 1) * h, there=p.tokens > 1, width=h),
        "mask_token": tensor_part(h, width=h),
        "places": tensor_part(s.n_positions * h, there=p.side > 0, width=s.n_positions * h),
        "places_but_registers": tensor_part((p.grid + 1) * h if p.side else 0, there=p.side > 0, width=h),
        "patches": linear_part(p.channels * p.side**2 * p.depth, h, "whole", bias=True, there=p.side > 0),
        "patches_plain": linear_part(p.channels * p.side**2 * p.depth, h, "whole", there=p.side > 0),
        "pixel_norm": linear_part(1, p.channels * p.side**2 * p.depth, bias=s.norm_bias, there=p.side > 0),
    }


def _pooling(name: str, s: TransformerShape) -> Tensors:
    """SigLIP's head: attention of one learned query to all patches, a norm and an MLP."""
    h = s.d_model
    return (
        Tensor(f"{name}.probe", h, width=h),
        *affine(f"{name}.attention.in_proj", h, 3 * h),
        *affine(f"{name}.attention.out_proj", h, h),
        *affine(f"{name}.layernorm", 1, h),
        *affine(f"{name}.mlp.fc1", h, s.d_ff),
        *affine(f"{name}.mlp.fc2", s.d_ff, h),
    )


def _of_block(s: TransformerShape) -> dict[str, Part]:
    h = s.d_model
    attends = s.attends
    dense = s.d_ff > 0 and not s.experts
    queries = s.width * (2 if s.attn_gate else 1)
    return {
        "norm": linear_part(1, h, bias=s.norm_bias, there=s.norm_weight),
        "norm_gate": _norm_gate(s, there=s.norm_gate > 0),
        "norm_gate_of_experts": _norm_gate(s, there=s.norm_gate > 0 and s.experts is not None),
        "norm_of_gate": linear_part(1, h, bias=s.norm_bias, there=s.experts is not None),
        "norm_of_dense": linear_part(1, h, bias=s.norm_bias, there=s.experts is None),
        "norm_later": linear_part(1, h, bias=s.norm_bias),
        "norm_2": linear_part(1, h, bias=s.norm_bias, there=not s.norm_places.startswith("parallel")),
        "two_norm": linear_part(1, h, bias=s.norm_bias, there=s.norm_places == "parallel_two"),
        "not_two_norm": linear_part(1, h, bias=s.norm_bias, there=s.norm_places != "parallel_two"),
        "norm_ahead": linear_part(1, h, bias=s.norm_bias, there=s.norm_places != "after"),
        "norm_behind": linear_part(1, h, bias=s.norm_bias, there=s.norm_places in {"both", "after"}),
        "layer_scale": tensor_part(h),
        "streams": _streams(s, {"fn": streams.weights(s), "base": streams.weights(s), "scale": 3 if s.sinkhorn else 2}),
        "streams_low_rank": _streams_low_rank(s),
        "streams_low_rank_head": _streams_low_rank(s, last=True),
        "ngrams": lambda name: ngram_tensors(s, name),
        "streams_head": _streams(s, {"hc_fn": s.streams, "hc_base": s.streams, "hc_scale": 1}),
        "qkv": gpt2_part(s, h, queries + 2 * s.kv_width, "column", bias=s.qkv_bias, there=attends),
        "q": linear_part(h, queries, "column", bias=s.qkv_bias, there=attends),
        "kv": linear_part(h, s.kv_width, "column", bias=s.qkv_bias, there=attends),
        "k": linear_part(h, s.kv_width, "column", bias=s.qkv_bias, there=attends and s.kv_from != "earlier"),
        "v": linear_part(h, s.kv_heads * s.value_dim, "column", bias=s.qkv_bias, there=attends and s.kv_from == "own"),
        "mixer_norm": linear_part(1, h, bias=s.norm_bias, there="none" not in s.mixing),
        "mlp_norm": linear_part(1, h, bias=s.norm_bias, there=s.d_ff > 0 or s.experts is not None),
        "k_plain": linear_part(h, s.kv_width, "column", there=attends),
        "out": gpt2_part(s, s.width, h, "row", bias=s.out_bias, there=attends),
        "gate": gpt2_part(s, h, s.d_ff, "column", bias=s.mlp_bias, there=s.gated and dense),
        "up": gpt2_part(s, h, s.d_ff, "column", bias=s.mlp_bias, there=dense),
        "gate_up": linear_part(h, 2 * s.d_ff, "column", bias=s.mlp_bias, there=dense),
        "down": gpt2_part(s, s.d_ff, h, "row", bias=s.mlp_bias, there=dense),
        "down_biased": linear_part(s.d_ff, h, "row", bias=True, there=dense),
        "scalar": tensor_part(1, there=dense),
    }


def _norm_gate(s: TransformerShape, *, there: bool) -> Part:
    """An MLP of low rank behind a norm."""
    sizes = {"fc1": (s.d_model, s.norm_gate), "fc2": (s.norm_gate, s.d_model)}
    return lambda name: tuple(t for part, size in sizes.items() for t in linear(f"{name}.{part}", *size) if there)


def _streams(s: TransformerShape, rows: dict[str, int]) -> Part:
    """What makes weights of a token's streams: a product, what is added to it, and what it is scaled by."""
    wide = s.d_model * s.streams
    product = next(iter(rows))
    sizes = {name: count * wide if name == product else count for name, count in rows.items()}
    return lambda name: tuple(
        Tensor(f"{name}.{part}", numel, cut="sequence", width=wide if part == product else 1)
        for part, numel in sizes.items()
    )


def _streams_low_rank(s: TransformerShape, *, last: bool = False) -> Part:
    """What makes a weight of each element of a token's streams, and, but for the ``last``, those of a half's output."""
    wide = s.d_model * s.streams
    rank = s.streams_rank
    sizes = {"hc_norm": (1, wide), "input_mix_weight_down": (wide, rank), "input_mix_weight_up": (rank, wide)}
    sizes |= {} if last else {"block_inject_weight": (wide, s.streams)}
    return lambda name: tuple(tensor for part, size in sizes.items() for tensor in linear(f"{name}.{part}", *size))


def _of_attention(s: TransformerShape) -> dict[str, Part]:
    """Of attention that may be latent."""
    h = s.d_model
    attends = s.attends
    a = s.latent or Latent(0, 0, 0, 0, 0)
    plain = attends and s.latent is None
    latent = attends and s.latent is not None
    rank = a.q_rank if latent else s.q_rank
    low = attends and rank > 0
    normed = s.qk_norm and plain
    wide = s.qk_norm_of in {"width", "heads"}
    each = s.qk_norm_of in {"head", "values"}
    return {
        "sinks": tensor_part(s.heads, "column", there=s.sinks and attends),
        **_of_inputs(s),
        "qk_norm": tensor_part(s.head_dim, "sequence", there=normed and each),
        "k_norm": tensor_part(s.head_dim, "sequence", there=normed and each and s.kv_from != "earlier"),
        "qk_norm_affine": linear_part(1, s.head_dim, bias=True, there=normed),
        "q_wide_norm": tensor_part(s.width, "column", there=normed and wide),
        "k_wide_norm": tensor_part(s.kv_width, "column", there=normed and wide),
        "q_each_norm": _each_norm(s.heads, s.head_dim, there=normed),
        "k_each_norm": _each_norm(s.kv_heads, s.head_dim, there=normed),
        "q_down": linear_part(h, rank, bias=s.qkv_bias, there=low),
        "q_norm": tensor_part(rank, "sequence", there=low),
        "q_up": linear_part(rank, s.width, "column", there=low),
        "q_gate_up": linear_part(2 * rank, s.width + s.heads * s.value_dim, "column", there=low),
        "q_whole": linear_part(h, s.width, "column", bias=s.qkv_bias and plain, there=attends and not low),
        "kv_whole": linear_part(h, s.kv_width, "column", bias=s.qkv_bias, there=plain),
        "kv_down": linear_part(h, a.kv_rank + a.rope, bias=s.qkv_bias, there=latent),
        "kv_norm": tensor_part(a.kv_rank, "sequence", there=latent),
        "kv_up": linear_part(a.kv_rank, s.heads * (a.nope + a.value), "column", there=latent),
        "output_gate": linear_part(
            h,
            s.heads * (s.value_dim if s.output_gate == "element" else 1),
            "column",
            there=attends and bool(s.output_gate),
        ),
        "values_out": linear_part(s.heads * s.value_dim, h, "row", bias=s.out_bias, there=attends),
        **_of_indexer(s),
        "compressor": compressor_part(s, s.head_dim),
        **output_parts(s),
    }


def _of_indexer(s: TransformerShape) -> dict[str, Part]:
    """Of what chooses the keys that a query attends to."""
    h = s.d_model
    latent = s.latent if s.attends else None
    x = s.indexer or Indexer(0, 0, 0)
    index = s.attends and s.indexer is not None
    seen = (latent.q_rank if latent else s.q_rank) or h
    return {
        "index_q": linear_part(seen, x.heads * x.dim, there=index),
        "index_k": linear_part(h, x.dim, there=index),
        "index_qk": linear_part(seen, (x.heads + 1) * x.dim, there=index),
        "index_k_norm": linear_part(1, x.dim, bias=True, there=index),
        "index_norm": tensor_part(x.dim, there=index),
        "index_weights": linear_part(h, x.heads, there=index and (latent is not None or s.compressor is not None)),
        "index_pool_bias": tensor_part(x.pool * x.dim, there=index and x.pool > 0, width=x.dim),
        "index_pool_gate": tensor_part(h * x.dim, there=index and x.pool > 0, width=h),
        "index_compressor": compressor_part(s, x.dim) if index else lambda _: (),
    }


def _of_inputs(s: TransformerShape) -> dict[str, Part]:
    """What blocks are told of their token: tables of all blocks, and what one block does with its own."""
    there = s.inputs is not None
    width = s.inputs.width if s.inputs else 0
    rows = s.inputs.vocab if s.inputs else 0
    every = s.layers * width
    return {
        "inputs_table": tensor_part(rows * every, there=there, width=every),
        "inputs_projection": linear_part(s.d_model, every, there=there),
        "inputs_norm": linear_part(1, width, bias=s.norm_bias, there=there),
        "input_gate": linear_part(s.d_model, width, there=there),
        "input_projection": linear_part(width, s.d_model, there=there),
        "input_norm": linear_part(1, s.d_model, bias=s.norm_bias, there=there),
    }


def _each_norm(heads: int, dim: int, *, there: bool) -> Part:
    """A norm of its own for each head (StableLM)."""
    return lambda name: tuple(Tensor(f"{name}.{i}.weight", dim) for i in range(heads)) if there else ()


def _of_delta(s: TransformerShape) -> dict[str, Part]:
    """Of the gated delta rule, with one gate a head or (``kda``) one a channel."""
    d = s.delta
    h = s.d_model
    parts = ("dt", "log", "conv", "in", "gates", "qkv", "z", "one", "norm", "out")
    channel = ("q", "v", "dt", "down", "up", "out_up")
    if d is None or not s.mixing & {"delta", "kda"}:
        return {f"delta_{part}": lambda _: () for part in parts} | {f"kda_{part}": lambda _: () for part in channel}
    keys = d.key_width
    values = d.value_width
    heads = d.value_heads
    return {
        "delta_dt": tensor_part(heads, "column"),
        "delta_log": tensor_part(heads, "column"),
        "delta_conv": tensor_part((2 * keys + values) * d.conv, "column", width=d.conv),
        "delta_in": linear_part(h, 2 * keys + 2 * values, "column"),
        "delta_gates": linear_part(h, 2 * heads, "column"),
        "delta_qkv": linear_part(h, 2 * keys + values, "column"),
        "delta_z": linear_part(h, values, "column"),
        "delta_one": linear_part(h, heads, "column"),
        "delta_norm": tensor_part(d.value_dim, "sequence"),
        "delta_out": linear_part(values, h, "row"),
        "kda_q": linear_part(h, keys, "column"),
        "kda_v": linear_part(h, values, "column"),
        "kda_dt": tensor_part(keys, "column"),
        "kda_down": linear_part(h, d.value_dim),
        "kda_up": linear_part(d.value_dim, keys, "column"),
        "kda_out_up": linear_part(d.value_dim, values, "column"),
    }


def _of_space(s: TransformerShape) -> dict[str, Part]:
    """Of state spaces and short convolutions; those of the first Mamba begin with ``scan``, of the second with
    ``ssd``."""
    p = s.space
    h = s.d_model
    mixing = s.mixing
    first = ("log", "d", "conv", "in", "x", "step", "out", "step_norm", "state_norm")
    second = ("dt", "log", "d", "conv", "in", "norm", "out")
    absent = [*(f"scan_{part}" for part in first), *(f"ssd_{part}" for part in second)]
    absent += ["gap_in", "gap_conv", "gap_out"]
    parts: dict[str, Part] = {part: lambda _: () for part in absent}
    if p is None:
        return parts
    if "mamba" in mixing:
        parts |= {
            "scan_log": tensor_part(p.inner * p.state, "column", width=p.state),
            "scan_d": tensor_part(p.inner, "column"),
            "scan_conv": linear_part(p.conv, p.inner, "column", bias=p.conv_bias),
            "scan_in": linear_part(h, 2 * p.inner, "column", bias=p.bias),
            "scan_x": linear_part(p.inner, p.rank + 2 * p.state, "row"),
            "scan_step": linear_part(p.rank, p.inner, "column", bias=True),
            "scan_out": linear_part(p.inner, h, "row", bias=p.out_bias),
            "scan_step_norm": tensor_part(p.rank, there=p.inner_norms),
            "scan_state_norm": tensor_part(p.state, there=p.inner_norms),
        }
    if "mamba2" in mixing:
        parts |= {
            "ssd_dt": tensor_part(p.heads, "column"),
            "ssd_log": tensor_part(p.heads, "column"),
            "ssd_d": tensor_part(p.heads, "column"),
            "ssd_conv": linear_part(p.conv, p.conv_width, "column", bias=p.conv_bias),
            "ssd_in": linear_part(h, p.inner + p.conv_width + p.heads, "column", bias=p.bias),
            "ssd_norm": tensor_part(p.inner, "column", there=p.gated_norm),
            "ssd_out": linear_part(p.inner, h, "row", bias=p.out_bias),
        }
    if "conv" in mixing:
        parts |= {
            "gap_in": linear_part(h, 3 * h, "column", bias=p.bias),
            "gap_conv": linear_part(p.conv, h, "column", bias=p.bias),
            "gap_out": linear_part(h, h, "row", bias=p.bias),
        }
    return parts
