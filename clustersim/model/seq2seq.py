"""The Transformer of "Attention Is All You Need", and a decoder's attention to an encoder.

Kernels are those of a dense block, of an encoder's with full attention and of a decoder's with causal attention, and
cross-attention between them, whose keys and values are of the encoder's output. Names and order of tensors are
fairseq's (Vaswani et al., arXiv:1706.03762; DeepLearningExamples PyTorch/Translation/Transformer trains its big size on
WMT14 en-de). T5, BART and their kin have a config.json: :mod:`.encoder_decoders`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.model import kernels as K
from clustersim.model.attention_kernels import fused_attention
from clustersim.model.base import TransformerShape
from clustersim.model.tensor_parts import Tensors, affine
from clustersim.model.transformer_model import block_kernels


@dataclass(frozen=True)
class Seq2SeqSize:
    """One size of an encoder-decoder.

    Parameters
    ----------
    layers : of the encoder, and as many of the decoder. d_head : of an attention head. vocab : rows of the table that
        both embeddings and the output share. source, target : usual tokens of a sample.
    """

    layers: int
    d_model: int
    heads: int
    d_head: int
    d_ff: int
    vocab: int
    source: int
    target: int


SEQ2SEQ = {
    # A batch is cut by tokens, so that a sample's length hardly matters.
    "transformer-big": Seq2SeqSize(6, 1024, 16, 64, 4096, 33_712, 32, 32),
}


def seq2seq(name: str, seq_len: int | None = None, *, implementation: str = "eager") -> Model:
    """An encoder-decoder by a name of :data:`SEQ2SEQ`; a sample is a source and a target.

    ``seq_len`` : tokens of the source, and of the target; the usual ones by default.

    >>> seq2seq("transformer-big").parameters
    210878464
    """
    size = SEQ2SEQ[name] if seq_len is None else replace(SEQ2SEQ[name], source=seq_len, target=seq_len)
    encoder = _shape(name, size, size.source, False, implementation)
    decoder = _shape(name, size, size.target, True, implementation)
    shared = "shared.weight"
    layers = [
        _embedding(
            "encoder", size, encoder, (Tensor(shared, size.vocab * size.d_model, cut="vocab", width=size.d_model),)
        )
    ]
    layers += [_block(f"encoder.{i}", size, encoder, None) for i in range(size.layers)]
    layers.append(_embedding("decoder", size, decoder, ()))
    layers += [_block(f"decoder.{i}", size, decoder, encoder) for i in range(size.layers)]
    layers.append(_head(size, decoder, shared))
    return Model(
        name,
        "seq2seq",
        tuple(layers),
        seq_len=size.target,
        n_blocks=2 * size.layers,
        hidden=size.d_model,
        heads=size.heads,
        vocab=size.vocab,
        notes=(f"{size.source} tokens to {size.target}",),
        kv_heads=size.heads,
        head_dim=size.d_head,
    )


def _shape(name: str, size: Seq2SeqSize, tokens: int, causal: bool, implementation: str) -> TransformerShape:
    return TransformerShape(
        name,
        "bert",
        size.layers,
        size.d_model,
        size.heads,
        size.heads,
        size.d_head,
        size.d_ff,
        size.vocab,
        tokens,
        activation="relu",
        norm="layernorm",
        positions="none",
        causal=causal,
        post_norm=True,
        attn_dropout=True,
        hidden_dropout=True,
        attention="eager",
        implementation=implementation,
    )


def _embedding(part: str, size: Seq2SeqSize, s: TransformerShape, table: Tensors) -> Layer:
    """Tokens looked up in the shared table, and sinusoids added."""
    width = float(s.seq_len * s.d_model)
    kernels = [
        K.memory("gather", width, K.Passes(2, 3, 1, 5), cut="row"),
        K.memory("sum", width, K.Passes(5, 2, 2, 1)),
        K.memory("dropout", width, K.DROPOUT, saved=K.MASK),
    ]
    return Layer(f"{part}.embedding", "embedding", table, tuple(kernels), activation_bytes=K.kept(kernels))


def _block(name: str, size: Seq2SeqSize, s: TransformerShape, source: TransformerShape | None) -> Layer:
    """A block of the encoder, or of the decoder with attention to what the encoder made of ``source``."""
    kernels = block_kernels(s)
    tensors = _attention(f"{name}.self_attn", size)
    tensors += _norm(f"{name}.self_attn_layer_norm", size)
    if source is not None:
        kernels += cross_kernels(s, source)
        tensors += _attention(f"{name}.encoder_attn", size) + _norm(f"{name}.encoder_attn_layer_norm", size)
    for linear, n_in, n_out in (("fc1", s.d_model, s.d_ff), ("fc2", s.d_ff, s.d_model)):
        tensors += affine(f"{name}.{linear}", n_in, n_out)
    tensors += _norm(f"{name}.final_layer_norm", size)
    boundary = float(s.seq_len * s.d_model)
    return Layer(name, "block", tensors, kernels, activation_bytes=K.kept(kernels), boundary_bytes=boundary)


def cross_kernels(s: TransformerShape, source: TransformerShape) -> tuple[Kernel, ...]:
    """Attention of the target to the source: as self-attention, with keys and values of the other length."""
    t = s.seq_len
    u = source.seq_len
    h = s.d_model
    keys = K.linear("k", u, h, s.width)
    return (
        K.linear("q", t, h, s.width),
        keys,
        K.sharing_input(K.linear("v", u, h, s.width)),
        *(_fused(s, u) if s.attention == "flash" else _in_memory(s, u)),
        K.linear("out", t, s.width, h),
        *K.residual(s, "cross_residual"),
        K.norm(s, "norm_3"),
    )


def _in_memory(s: TransformerShape, u: int) -> tuple[Kernel, ...]:
    """Of ``u`` keys, with the matrix of scores."""
    t = s.seq_len
    square = float(s.heads) * t * u
    kept = (2 + K.MASK if s.attn_dropout else 1.0) * square
    softmax = replace(K.memory("softmax", square, K.SCORES["bert"]["softmax"], cut="heads"), saved=kept)
    return (
        K.memory("head_copies", float((2 * t + 2 * u) * s.width), K.Passes(2, 2), cut="heads"),
        K.batched("scores", s.heads, t, u, s.head_dim),
        softmax,
        *((K.memory("dropout", square, K.DROPOUT, cut="heads"),) if s.attn_dropout else ()),
        K.batched("context", s.heads, t, s.head_dim, u),
    )


def _fused(s: TransformerShape, u: int) -> tuple[Kernel, ...]:
    """Of ``u`` keys in one kernel, whose ``seq`` is the mean length of a square of as much work."""
    flops = 4.0 * s.seq_len * u * s.width
    qkvo = 2.0 * (s.seq_len + u) * s.width
    saved = float((s.seq_len + 2 * u) * s.width)
    return (fused_attention(s, flops, qkvo, saved, max(1, round((s.seq_len * u) ** 0.5)), causal=False),)


def _head(size: Seq2SeqSize, decoder: TransformerShape, shared: str) -> Layer:
    """Logits from the shared table."""
    kernels = [
        K.linear("logits", decoder.seq_len, size.d_model, size.vocab),
        K.cross_entropy(decoder, decoder.seq_len),
    ]
    tensors = (Tensor("lm_head.weight", size.vocab * size.d_model, tied_to=shared, cut="vocab", width=size.d_model),)
    saved = decoder.seq_len * (size.d_model + 2.0 * size.vocab)
    return Layer(
        "head",
        "head",
        tensors,
        tuple(kernels),
        activation_bytes=saved,
        boundary_bytes=float(decoder.seq_len * size.d_model),
    )


def _attention(name: str, size: Seq2SeqSize) -> Tensors:
    width = size.heads * size.d_head
    h = size.d_model
    inner = [t for projection in ("k_proj", "v_proj", "q_proj") for t in affine(f"{name}.{projection}", h, width)]
    return (*inner, *affine(f"{name}.out_proj", width, h))


def _norm(name: str, size: Seq2SeqSize) -> Tensors:
    return affine(name, 1, size.d_model)
