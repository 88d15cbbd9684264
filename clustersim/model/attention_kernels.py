"""The GPU kernels of attention between its projections, of latent attention with them, and an indexer's.

Bytes are counted as in :mod:`clustersim.model.kernels`; ``eager`` attention makes the matrix of scores, ``flash`` none.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.compressed import compressed
from clustersim.model.families import families
from clustersim.model.sizes import Indexer, Latent


def latent_projections(s: TransformerShape, a: Latent) -> K.Kernels:
    """Multi-head latent attention, from the block's normed input to whole queries, keys and values: projections of low
    rank, their norms, rotation. DeepSeek-V2, arXiv:2405.04434, section 2.1, as ``modeling_deepseek.py`` and
    Megatron-LM's ``multi_latent_attention.py`` train it: keys and values are projected up for every head, and attention
    runs on whole heads (nothing is absorbed).

    Down projections and their norms are whole on every tensor-parallel rank, on its own tokens under sequence
    parallelism; up projections are cut by heads (Megatron-LM's ``linear_q_down_proj`` is duplicated).
    """
    t = s.seq_len
    h = s.d_model
    if a.q_rank:
        queries = [
            K.linear("q_down", t, h, a.q_rank),
            _latent_norm(s, "q_latent_norm", a.q_rank),
            replace(K.linear("q_up", t, a.q_rank, s.width), cut="column"),
        ]
        if s.attn_gate:
            wide = s.width + s.heads * a.value
            queries[2:] = [
                K.memory("q_joined", float(t * 2 * a.q_rank), K.Passes(2, 2)),
                replace(K.linear("q_up", t, 2 * a.q_rank, wide), cut="column"),
            ]
    else:
        queries = [replace(K.linear("q", t, h, s.width), cut="column")]
    rotated = float(t * (s.heads + 1) * a.rope)
    rotary = replace(K.memory("rotary", rotated, K.ROTARY[s.implementation == "fused"]), cut="heads", n=a.rope, k=t)
    copied = float(t * s.width) * (1 if s.implementation == "fused" else 2)  # keys, op by op also queries, are joined
    return (
        *queries,
        K.sharing_input(K.linear("kv_down", t, h, a.kv_rank + a.rope)),
        _latent_norm(s, "kv_latent_norm", a.kv_rank),
        replace(K.linear("kv_up", t, a.kv_rank, s.heads * (a.nope + a.value)), cut="column"),
        # Its n is the width of the rotated keys that all heads share, its k the tokens.
        *((rotary,) if a.rope else ()),
        replace(K.memory("join_heads", copied, K.Passes(2, 2)), cut="heads"),
    )


def low_rank_projections(s: TransformerShape) -> K.Kernels:
    """Queries of plain attention through a projection of low rank, its norm, and one up to all heads; keys and values
    are projections of the block's input (Step 3's multi-matrix factorization attention, arXiv:2507.19427), or one
    that is both (DeepSeek-V4)."""
    t = s.seq_len
    h = s.d_model
    return (
        K.linear("q_down", t, h, s.q_rank),
        _latent_norm(s, "q_latent_norm", s.q_rank),
        replace(K.linear("q_up", t, s.q_rank, s.width), cut="column"),
        K.sharing_input(K.linear("k", t, h, s.key_elements)),
        *((K.sharing_input(K.linear("v", t, h, s.value_elements)),) if s.kv_from == "own" else ()),
    )


def output_gate(s: TransformerShape) -> K.Kernels:
    """What scales the heads' outputs by a gate; with its projection, where that is not part of the queries'."""
    if not (s.attn_gate or s.output_gate):
        return ()
    t = s.seq_len
    elements = float(t) * s.heads * s.value_dim
    if s.attn_gate:
        return (K.memory("attention_gate", elements, K.Passes(5, 9, 2, 3), cut="heads", saved=2),)
    each = s.output_gate == "element"
    projected = K.linear("gate_projection", t, s.d_model, s.heads * (s.value_dim if each else 1))
    # Of whole heads, the gate itself is small: forward reads and writes the output; backward makes its gradient (a
    # pass in, one out) and the gate's, the sum over the head of a product that is written and read again.
    passes = K.Passes(5, 9, 2, 3) if each else K.Passes(2, 6, 2, 4)
    scaled = K.memory("attention_gate", elements, passes, cut="heads", saved=2 if each else 1)
    return (replace(K.sharing_input(projected), cut="column"), scaled)


def _latent_norm(s: TransformerShape, name: str, width: int) -> Kernel:
    """A norm of the latent vector, whose scaling counts as a product (as Megatron-LM counts it among its FLOPs)."""
    flops = 2.0 * s.seq_len * width
    return replace(K.norm(s, name, float(s.seq_len * width)), flops=flops, backward_flops=2 * flops)


def indexer_kernels(s: TransformerShape, x: Indexer) -> list[Kernel]:
    """DeepSeek-V3.2's indexer: scores of small heads over all earlier tokens, their weighted sum, and the best of it.
    Of attention that is not latent (MiniMax-M3) its queries are projected from the block's input, and scores have no
    weights: each head chooses for the query heads that share a key.

    Keys of several tokens are one where ``pool`` says so, by a gate (GLM-5.3) or as the block's own are (DeepSeek-V4).

    Its projections are whole on every tensor-parallel rank, and no gradient of the model goes through it.
    """
    t = s.seq_len
    pairs = float(s.seq_len) ** 2 / 2 / max(1, x.pool)
    weighted = bool(s.latent or s.compressor)
    products = [K.linear("index_q", t, (s.latent.q_rank if s.latent else s.q_rank) or s.d_model, x.heads * x.dim)]
    pooled: K.Kernels = ()
    if s.compressor:
        pooled = tuple(map(_forward_alone, compressed(s, "index_compressed", x.dim)))
    else:
        products.append(K.linear("index_k", t, s.d_model, x.dim))
    if x.pool and not s.compressor:
        products += [K.linear("index_pool_gate", t, s.d_model, x.dim)] if s.latent else []
        pooled = (K.memory("index_pooled", float(t * x.dim), K.Passes(9, 0, 6, 0), cut="whole"),)
    if weighted:
        products.append(K.linear("index_weights", t, s.d_model, x.heads))
    scores = replace(
        _forward_alone(K.batched("index_scores", x.heads, t, max(1, t // max(1, x.pool)), x.dim)),
        flops=2.0 * pairs * x.heads * x.dim,
        nbytes=pairs + float(t) * x.heads * x.dim,
        cut="whole",
    )
    chosen = K.memory("index_top_k", pairs, K.Passes(3, 0, 3, 0), cut="whole")
    return [*(K.sharing_input(product) for product in products), *pooled, scores, chosen]


def _forward_alone(kernel: Kernel) -> Kernel:
    """A kernel that no gradient goes through."""
    return replace(kernel, backward_flops=0.0, backward_nbytes=0.0, backward_launches=0, saved=0.0)


def attention(s: TransformerShape) -> K.Kernels:
    """Everything between the q, k, v projections and the output projection."""
    kernels: list[Kernel] = []
    tokens = float(s.seq_len)
    if s.qk_norm:
        values = s.value_elements if s.qk_norm_of == "values" else 0
        kernels.append(replace(K.norm(s, "qk_norm", tokens * (s.width + s.key_elements + values)), cut="heads"))
    if s.rotated and (s.compressor or not s.fuses_rotation):
        kernels += _partly_rotated(s, s.width + s.key_elements, "rotary")
    elif s.positions == "rotary" and not s.latent:
        passes = K.WIDE_ROTARY if s.wide_rotation and not s.fuses_rotation else K.ROTARY[s.fuses_rotation]
        kernels.append(K.memory("rotary", tokens * (s.width + s.key_elements), passes, cut="heads"))
    if s.kv_heads < s.heads and not s.fuses and s.attention == "eager":
        # Keys and values are copied out to every query head, which fused attention takes as they are; backward sums
        # the copies.
        copied = float(s.keys) * (s.heads + s.kv_heads) * (s.head_dim + s.value_dim) / 2
        kernels.append(K.memory("repeat_kv", copied, K.Passes(2, 2, 2, 2), cut="heads"))
    if s.buckets:
        square = float(s.heads) * s.seq_len**2
        kernels.append(K.memory("position_bias", square, K.Passes(3, 1, 1, 1), cut="heads"))
    back = _partly_rotated(s, s.heads * s.value_dim, "rotary_back") if s.rotated and s.compressor else []
    return (*kernels, *(_flash(s) if s.attention == "flash" else _eager(s)), *back)


def _partly_rotated(s: TransformerShape, width: int, name: str) -> list[Kernel]:
    """Rotation of some elements of each head, and their join with the others: in fp32 of DeepSeek-V4."""
    elements = float(s.seq_len * width)
    share = min(1.0, s.rotated / s.head_dim)
    wide = bool(s.compressor) or s.wide_rotation
    passes = K.ROTARY[True] if s.fuses_rotation else K.WIDE_ROTARY if wide else K.ROTARY[False]
    join = K.Passes(2, 2) if s.compressor else K.rotary_join(share)
    return [
        K.memory(name, elements * share, passes, cut="heads"),
        K.memory(f"{name}_join", elements, join, cut="heads"),
    ]


def _flash(s: TransformerShape) -> K.Kernels:
    flops = 2.0 * s.attended_pairs * s.heads * (s.head_dim + s.value_dim)
    qkvo = float(s.seq_len * s.heads + s.keys * s.kv_heads) * (s.head_dim + s.value_dim)
    saved = float(s.seq_len) * (s.width + s.key_elements + s.value_elements)
    return (fused_attention(s, flops, qkvo, saved, s.seq_len, causal=s.causal),)


def fused_attention(s: TransformerShape, flops: float, moved: float, saved: float, seq: int, *, causal: bool) -> Kernel:
    """Attention in one kernel, whose backward has five products for forward's two.

    flops : of both products. moved : elements of queries, keys, values and the output. saved : elements that backward
    reads. seq : tokens of the square of scores.
    """
    return Kernel(
        "attention",
        "attention",
        flops=flops,
        backward_flops=2.5 * flops,
        nbytes=moved,
        backward_nbytes=2 * moved,
        heads=s.heads,
        head_dim=s.head_dim,
        seq=seq,
        causal=causal,
        launches=1,
        backward_launches=3,
        cut="heads",
        saved=saved,
    )


def _eager(s: TransformerShape) -> K.Kernels:
    t = s.seq_len
    square = float(s.heads) * s.seq_len * s.keys
    saved = float(t) * (s.width + s.key_elements + s.value_elements)
    # The softmax's output, and behind a dropout the dropped one with its mask (arXiv:2205.05198).
    square_kept = (2 + K.MASK if s.attn_dropout else 1.0) * square
    scores = replace(K.batched("scores", s.heads, t, s.keys, s.head_dim), saved=saved)
    context = K.batched("context", s.heads, t, s.value_dim, s.keys)
    if s.fuses:
        ops = [K.memory("softmax", square, K.Passes(2, 3), cut="heads")]
    else:
        ops = [
            K.memory(name, square, passes, cut="heads")
            for name, passes in K.SCORES[families()[s.family].scores].items()
            if name != "mask" or s.patches is None  # every patch of an image sees every other
        ]
    if s.implementation != "fused" and s.attn_dropout:
        ops.append(K.memory("dropout", square, K.DROPOUT, cut="heads"))
    ops = [replace(op, saved=square_kept) if op.name == "softmax" else op for op in ops]
    # Splitting and merging heads copies q, k, v and the output (torch.matmul needs them contiguous).
    copies = K.memory("head_copies", float(t * s.d_model), K.Passes(2, 2), times=4, cut="heads")
    return (copies, scores, *ops, context)
