"""Transformer-XL (Dai et al., arXiv:1901.02860) for WikiText-103: memory, relative positions, adaptive softmax.

Sizes are those of NVIDIA DeepLearningExamples' ``wt103_base`` and ``wt103_large``. That script's default, without
``--adaptive``, is a plain softmax over all 267,735 words, which then is most of the arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.tensor_parts import affine

VOCAB = 267_735
CUTOFFS = (19_997, 39_997, 199_997)
# Share of WikiText-103's tokens in each tail of the adaptive softmax: Zipf's law, steeper (1.76) beyond rank 10,000 so
# that the last rank occurs three times in 103 million tokens, the corpus's threshold. An estimate.
TAIL_SHARES = (0.030, 0.031, 0.0025)
# Queries with two biases, the shift of relative scores (pad, copy), sum and scale, mask, softmax.
_SCORES = K.Passes(4 + 3 + 2 + 2, 4 + 3 + 2 + 3, 6, 6, saved=1)


@dataclass(frozen=True)
class TransformerXLSize:
    """Layers, widths, and the ratio of each softmax tail's embedding width to the next (``div_val``)."""

    layers: int
    d_model: int
    heads: int
    d_ff: int
    seq_len: int
    memory: int
    div_val: int
    attn_dropout: bool


TRANSFORMER_XL = {
    "transformer-xl-base": TransformerXLSize(16, 512, 8, 2048, 192, 192, 1, attn_dropout=False),
    "transformer-xl-large": TransformerXLSize(18, 1024, 16, 4096, 384, 384, 4, attn_dropout=True),
}


_LOSS = K.Passes(4, 7, 4, 6)
"""Of a part of the adaptive softmax: log-softmax in the logits' type, of rows that are picked and put back."""


def transformer_xl(name: str, seq_len: int | None = None, *, adaptive: bool = True) -> Model:
    """Transformer-XL by a name of :data:`TRANSFORMER_XL`; a sample is one segment of ``seq_len`` tokens that attends to
    a memory as long.

    ``adaptive`` : adaptive embedding and softmax (``--adaptive``, and ``--div_val`` as the size has it); otherwise one
    full table and one softmax over the whole vocabulary.

    >>> transformer_xl("transformer-xl-base").parameters
    191950298
    """
    size = TRANSFORMER_XL[name] if adaptive else replace(TRANSFORMER_XL[name], div_val=1)
    cutoffs = CUTOFFS if adaptive else ()
    tokens = seq_len or size.seq_len
    if tokens < 1:
        raise ModelError(f"{name}: seq_len = {seq_len} must be above zero")
    boundary = float(tokens * size.d_model)
    body = _block_kernels(size, tokens)
    saved = _kept(size, tokens)
    blocks = [
        Layer(f"layers.{i}", "block", _block_tensors(size, i), body, activation_bytes=saved, boundary_bytes=boundary)
        for i in range(size.layers)
    ]
    gather = (K.memory("gather", boundary, K.Passes(4, 6, 4, 12)), K.memory("dropout", boundary, K.DROPOUT))
    logits = tokens * (CUTOFFS[0] + 3.0 if adaptive else float(VOCAB))
    head = _head(size, tokens, cutoffs)
    layers = (
        Layer("embedding", "embedding", _embedding_tensors(size), gather, activation_bytes=0.25 * boundary),
        *blocks,
        Layer("head", "head", _head_tensors(size, cutoffs), head, activation_bytes=2 * logits, boundary_bytes=boundary),
    )
    softmax = "adaptive softmax: shares of its tails estimated by Zipf's law" if adaptive else "softmax over all words"
    notes = (f"memory of {size.memory} tokens", softmax)
    return Model(
        name,
        "transformer-xl",
        layers,
        seq_len=tokens,
        n_blocks=size.layers,
        hidden=size.d_model,
        heads=size.heads,
        vocab=VOCAB,
        notes=notes,
    )


def _clusters(size: TransformerXLSize, cutoffs: tuple[int, ...] = CUTOFFS) -> list[tuple[int, int]]:
    """Words and embedding width of the softmax head and its tails."""
    edges = (0, *cutoffs, VOCAB)
    return [(b - a, size.d_model // size.div_val**i) for i, (a, b) in enumerate(pairwise(edges))]


def _embedding_tensors(size: TransformerXLSize) -> tuple[Tensor, ...]:
    h = size.d_model
    biases = (Tensor("r_w_bias", h), Tensor("r_r_bias", h))
    if size.div_val == 1:
        return (*biases, Tensor("word_emb.emb_layers.0.weight", VOCAB * h, width=h))
    clusters = _clusters(size)
    projections = tuple(
        Tensor(f"word_emb.emb_projs.{i}", h * width, width=width) for i, (_, width) in enumerate(clusters)
    )
    tables = (
        Tensor(f"word_emb.emb_layers.{i}.weight", n * width, width=width) for i, (n, width) in enumerate(clusters)
    )
    return (*biases, *tables, *projections)


def _block_tensors(size: TransformerXLSize, i: int) -> tuple[Tensor, ...]:
    h = size.d_model
    p = f"layers.{i}"
    return (
        Tensor(f"{p}.dec_attn.qkv_net.weight", 3 * h * h, width=h),
        Tensor(f"{p}.dec_attn.o_net.weight", h * h, width=h),
        *affine(f"{p}.dec_attn.layer_norm", 1, h),
        Tensor(f"{p}.dec_attn.r_net.weight", h * h, width=h),
        *affine(f"{p}.pos_ff.CoreNet.0", h, size.d_ff),
        *affine(f"{p}.pos_ff.CoreNet.3", size.d_ff, h),
        *affine(f"{p}.pos_ff.layer_norm", 1, h),
    )


def _head_tensors(size: TransformerXLSize, cutoffs: tuple[int, ...]) -> tuple[Tensor, ...]:
    h = size.d_model
    tails = len(cutoffs)
    tensors = [Tensor("crit.cluster_weight", tails * h, width=h), Tensor("crit.cluster_bias", tails)] if tails else []
    # Output tables are the embedding's; only the biases and, with narrower tails, the head's projection are new.
    clusters = _clusters(size) if size.div_val > 1 else [(VOCAB, h)]
    for i, (cluster_size, width) in enumerate(clusters):
        tied = f"word_emb.emb_layers.{i}.weight"
        tensors += [
            Tensor(f"crit.out_layers.{i}.weight", cluster_size * width, tied_to=tied, width=width),
            Tensor(f"crit.out_layers.{i}.bias", cluster_size),
        ]
    if size.div_val > 1:
        tensors.append(Tensor("crit.out_projs.0", h * h, width=h))
    return tuple(tensors)


def _block_kernels(size: TransformerXLSize, tokens: int) -> tuple[Kernel, ...]:
    # r_net projects the relative positions once a batch, which is nothing per sample.
    h = size.d_model
    span = tokens + size.memory
    hd = size.d_model // size.heads
    elements = float(tokens * h)
    square = float(size.heads * tokens * span)
    drop = (K.memory("dropout", square, K.DROPOUT),) if size.attn_dropout else ()
    norm = K.NORM["layernorm", False]
    return (
        K.memory("memory_cat", float(span * h), K.Passes(2, 2)),
        K.linear("qkv", span, h, 3 * h),
        # einsum copies keys and values out of the joint projection; backward copies gradients back into it.
        K.memory("head_copies", float(span * h), K.Passes(4, 8, 2, 4)),
        K.memory("context_copy", elements, K.Passes(2, 2)),
        K.memory("query_biases", elements, K.Passes(4, 4, 2, 2)),
        K.batched("content_scores", size.heads, tokens, span, hd),
        K.batched("position_scores", size.heads, tokens, span, hd),
        K.memory("softmax", square, _SCORES),
        *drop,
        K.batched("context", size.heads, tokens, hd, span),
        K.linear("out", tokens, h, h),
        K.memory("attention_dropout", elements, K.DROPOUT),
        K.memory("attention_residual", elements, K.Passes(3, 3)),
        K.memory("norm_1", elements, norm),
        K.linear("up", tokens, h, size.d_ff),
        K.memory("activation", float(tokens * size.d_ff), K.ACTIVATION["relu"]),
        K.memory("mlp_dropout", float(tokens * (size.d_ff + h)), K.Passes(2.25, 2.25, 2, 2)),
        K.linear("down", tokens, size.d_ff, h),
        K.memory("mlp_residual", elements, K.Passes(3, 3)),
        K.memory("norm_2", elements, norm),
        Kernel(
            "bias_gradients", "memory", backward_nbytes=float(tokens * (size.d_ff + h)), launches=0, backward_launches=2
        ),
    )


def _kept(size: TransformerXLSize, tokens: int) -> float:
    """Elements a block keeps: as a dense block's, with keys and values of the memory, plus the scores."""
    h = float(size.d_model)
    span = float(tokens + size.memory)
    square = size.heads * tokens * span * (3.25 if size.attn_dropout else 2.0)
    return tokens * (2 * h + h + h + h + 2.25 * size.d_ff + 0.5 * h) + span * 3 * h + square


def _head(size: TransformerXLSize, tokens: int, cutoffs: tuple[int, ...]) -> tuple[Kernel, ...]:
    clusters = _clusters(size, cutoffs)
    kernels: list[Kernel] = [K.memory("dropout", float(tokens * size.d_model), K.DROPOUT)]
    for i, ((cluster_size, width), share) in enumerate(zip(clusters, (1.0, *TAIL_SHARES), strict=False)):
        rows = tokens * share
        columns = cluster_size + (len(cutoffs) if i == 0 else 0)
        if size.div_val > 1:
            kernels.append(K.linear(f"projection_{i}", max(1, round(rows)), size.d_model, width, rows))
        kernels.append(K.linear(f"logits_{i}", max(1, round(rows)), width, columns, rows))
        kernels.append(K.memory(f"cross_entropy_{i}", rows * columns, _LOSS))
    return tuple(kernels)
