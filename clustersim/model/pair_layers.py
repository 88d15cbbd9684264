"""Layers of an encoder and a decoder, by what :mod:`.encoder_decoders` reads of a config.

Kernels are those of dense blocks (:mod:`.transformer_model`), of the decoder's with attention to what the encoder made
(:mod:`.seq2seq`). Names of tensors are those of transformers' classes; they stand where they run, so that BART's norm
of the embedding is in front of its blocks, behind which its class registers it.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustersim.core.model import Kernel, Layer, Tensor
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.conv_layers import BIAS, Feature, convolution
from clustersim.model.kept import with_bytes
from clustersim.model.seq2seq import cross_kernels
from clustersim.model.tensor_parts import Tensors, affine
from clustersim.model.transformer_model import GATHER, block_kernels


class Style(msgspec.Struct, frozen=True):
    """How a class lays out norms and positions.

    Parameters
    ----------
    post_norm : norms stand behind a block's halves, not in front. embedding_norm, final_norm : one behind the
        embedding, and one behind the last block. positions : ``learned``; ``sines``, a table of them that is not
        trained; ``none`` that is one; or ``relative`` (T5). offset : rows of the table that are no position.
    sound : the encoder reads spectrograms by two convolutions (Whisper), and keys have no bias.
    logits_bias : a constant is added to logits. every_bias : every block has relative positions of its own (UMT5).
    scaled : what logits are made of is scaled where they have the embedding's weights (T5).
    """

    post_norm: bool = False
    embedding_norm: bool = False
    final_norm: bool = True
    positions: str = "learned"
    offset: int = 0
    sound: bool = False
    logits_bias: bool = True
    every_bias: bool = False
    scaled: bool = True

    @property
    def relative(self) -> bool:
        """Whether it is T5's kin, whose fields and names are others."""
        return self.positions == "relative"


class Pair(msgspec.Struct, frozen=True):
    """An encoder and a decoder.

    Parameters
    ----------
    style : of both. encoder, decoder : their shapes, blocks of each in ``layers``. tied : logits have the embedding's
        weights. mels : of a spectrogram. buckets : of relative positions. inner_dropout : behind an MLP's activation.
    """

    style: Style
    encoder: TransformerShape
    decoder: TransformerShape
    tied: bool
    mels: int = 0
    buckets: int = 0
    inner_dropout: bool = False


def pair_layers(pair: Pair) -> tuple[Layer, ...]:
    """In forward order."""
    blocks = {"encoder": pair.encoder, "decoder": pair.decoder}
    whole: list[Layer] = []
    for part, s in blocks.items():
        whole.append(_embedding(pair, part, s))
        whole += [_block(pair, part, i) for i in range(s.layers)]
    return (*whole, _head(pair))


def _embedding(pair: Pair, part: str, s: TransformerShape) -> Layer:
    """Tokens, or frames of sound, with their positions; in front of the decoder's, the encoder's last norm."""
    style = pair.style
    ahead = "" if style.relative else "model."
    width = float(s.seq_len * s.d_model)
    tensors: Tensors = ()
    kernels: list[Kernel] = []
    if part == "decoder":
        tensors, kernels = _last_norm(pair, "encoder")
    if style.sound and part == "encoder":
        tensors += (
            *affine("model.encoder.conv1", 3 * pair.mels, s.d_model),
            *affine("model.encoder.conv2", 3 * s.d_model, s.d_model),
        )
        kernels += _sound(pair, s)
    else:
        if style.sound or part == "encoder":
            name = "model.decoder.embed_tokens.weight" if style.sound else f"{ahead}shared.weight"
            tensors += (Tensor(name, s.vocab * s.d_model, cut="vocab", width=s.d_model),)
        kernels.append(K.memory("gather", width, GATHER, cut="row"))
    if s.n_positions:
        frozen = style.positions == "sines" or (style.sound and part == "encoder")
        table = Tensor(
            f"model.{part}.embed_positions.weight", s.n_positions * s.d_model, width=s.d_model, frozen=frozen
        )
        tensors += (table,)
    if not style.sound and not style.relative:
        kernels.append(K.memory("scale", width, K.Passes(2, 2)))
    if not style.relative:
        kernels.append(K.memory("sum", width, K.operators("ss:s", "s:", 2, 2)))
    if style.embedding_norm:
        tensors += affine(f"model.{part}.layernorm_embedding", 1, s.d_model)
        kernels.append(K.norm(s, "norm", saved=1))
    if s.hidden_dropout:
        kernels.append(K.memory("dropout", width, K.DROPOUT, saved=K.MASK))
    made = with_bytes(s, tuple(kernels))
    boundary = 2.0 * pair.mels * s.seq_len if style.sound and part == "encoder" else 0.0
    return Layer(
        f"{part}.embedding", "embedding", tensors, made, activation_bytes=K.kept(made), boundary_bytes=boundary
    )


def _sound(pair: Pair, s: TransformerShape) -> list[Kernel]:
    """Two convolutions over frames, of which the second leaves every other one, each with a GELU."""
    frames = 2 * s.seq_len
    x = Feature(pair.mels, 1, frames, image=True)
    listed: list[Kernel] = []
    for number, length in ((1, frames), (2, s.seq_len)):
        y = Feature(s.d_model, 1, length)
        conv = convolution(x, y, (1, 3), 1)
        listed += [replace(conv, name=f"conv{number}", saved=float(x.size)), K.memory("bias", float(y.size), BIAS)]
        listed.append(K.memory("gelu", float(y.size), K.ACTIVATION["gelu"], saved=1))
        x = y
    return listed


def _block(pair: Pair, part: str, i: int) -> Layer:
    """One of the encoder's blocks, or of the decoder's with attention to what the encoder made."""
    s = pair.encoder if part == "encoder" else pair.decoder
    source = pair.encoder if part == "decoder" else None
    kernels = list(dropped_inside(s, block_kernels(s)) if pair.inner_dropout else block_kernels(s))
    if pair.style.relative:
        square = float(s.heads) * s.seq_len**2
        kernels.append(K.memory("position_bias", square, K.Passes(3, 1, 1, 1), cut="heads"))
    if source:
        kernels += _kept_across(s, cross_kernels(s, source))
        biases = [*K.bias_gradients(s, [s.width], [s.d_model]), *K.bias_gradients(source, [2 * s.width], [])]
        sums = K.input_gradient_sums(source, 2)
        backward = [*(biases if s.qkv_bias else ()), *sums]
        kernels += [replace(kernel, name=f"cross_{kernel.name}") for kernel in backward]
    tensors = _relative_tensors(pair, part, i, s) if pair.style.relative else _plain_tensors(pair, part, i, s)
    boundary = float(s.seq_len * s.d_model)
    whole = tuple(kernels)
    return Layer(f"{part}.{i}", "block", tensors, whole, activation_bytes=K.kept(whole), boundary_bytes=boundary)


def dropped_inside(s: TransformerShape, kernels: K.Kernels) -> K.Kernels:
    """A block's kernels with a dropout behind its MLP's activation."""
    place = next(number for number, kernel in enumerate(kernels) if kernel.name == "activation") + 1
    dropout = K.memory("activation_dropout", float(s.seq_len * s.d_ff), K.DROPOUT, cut="heads", saved=K.MASK)
    return (*kernels[:place], *with_bytes(s, (dropout,)), *kernels[place:])


def _kept_across(s: TransformerShape, kernels: K.Kernels) -> list[Kernel]:
    """Kernels with what they keep in each type; those of a matrix of scores say it themselves, whose keys are not the
    target's own."""
    return [
        kernel if kernel.name in {"scores", "softmax", "context"} else with_bytes(s, (kernel,))[0] for kernel in kernels
    ]


def _plain_tensors(pair: Pair, part: str, i: int, s: TransformerShape) -> Tensors:
    name = f"model.{part}.layers.{i}"
    h = s.d_model
    listed: list[Tensor] = []
    for attention in ("self_attn", "encoder_attn") if part == "decoder" else ("self_attn",):
        for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
            bias = projection != "k_proj" or not pair.style.sound
            listed += affine(f"{name}.{attention}.{projection}", h, h, bias=bias)
        listed += affine(f"{name}.{attention}_layer_norm", 1, h)
    listed += [*affine(f"{name}.fc1", h, s.d_ff), *affine(f"{name}.fc2", s.d_ff, h)]
    return (*listed, *affine(f"{name}.final_layer_norm", 1, h))


def _relative_tensors(pair: Pair, part: str, i: int, s: TransformerShape) -> Tensors:
    name = f"{part}.block.{i}.layer"
    h = s.d_model
    listed: list[Tensor] = []
    halves = ("SelfAttention", "EncDecAttention") if part == "decoder" else ("SelfAttention",)
    for number, attention in enumerate(halves):
        here = f"{name}.{number}"
        for projection in ("q", "k", "v"):
            listed += affine(f"{here}.{attention}.{projection}", h, s.width, bias=False)
        listed += affine(f"{here}.{attention}.o", s.width, h, bias=False)
        if not number and (i == 0 or pair.style.every_bias):
            table = f"{here}.{attention}.relative_attention_bias.weight"
            listed.append(Tensor(table, pair.buckets * s.heads, width=s.heads))
        listed += affine(f"{here}.layer_norm", 1, h, bias=False)
    here = f"{name}.{len(halves)}"
    for up in ("wi_0", "wi_1") if s.gated else ("wi",):
        listed += affine(f"{here}.DenseReluDense.{up}", h, s.d_ff, bias=False)
    listed += affine(f"{here}.DenseReluDense.wo", s.d_ff, h, bias=False)
    return (*listed, *affine(f"{here}.layer_norm", 1, h, bias=False))


def _last_norm(pair: Pair, part: str) -> tuple[Tensors, list[Kernel]]:
    """Behind the last block of a part: its norm, and T5's dropout."""
    if not pair.style.final_norm:
        return (), []
    s = pair.encoder if part == "encoder" else pair.decoder
    relative = pair.style.relative
    name = f"{part}.final_layer_norm" if relative else f"model.{part}.layer_norm"
    kernels = [K.norm(s, "norm_last", saved=1)]
    if relative and s.hidden_dropout:
        kernels.append(K.memory("last_dropout", float(s.seq_len * s.d_model), K.DROPOUT, saved=K.MASK))
    return affine(name, 1, s.d_model, bias=s.norm_bias), kernels


def _head(pair: Pair) -> Layer:
    """Logits of the target's tokens and their loss."""
    s = pair.decoder
    tokens = s.seq_len
    tensors, kernels = _last_norm(pair, "decoder")
    if pair.style.relative and pair.style.scaled and pair.tied:
        kernels.append(K.memory("scale", float(tokens * s.d_model), K.Passes(2, 2)))
    kernels.append(K.linear("logits", tokens, s.d_model, s.vocab))
    if pair.style.logits_bias:
        kernels.append(K.memory("logits_bias", float(tokens * s.vocab), K.operators("h:h", "", 1, 0), cut="vocab"))
    kernels.append(K.cross_entropy(s, tokens))
    shared = "shared.weight" if pair.style.relative else "model.shared.weight"
    shared = "model.decoder.embed_tokens.weight" if pair.style.sound else shared
    name = "proj_out.weight" if pair.style.sound else "lm_head.weight"
    tied = shared if pair.tied else ""
    tensors += (Tensor(name, s.vocab * s.d_model, tied_to=tied, cut="vocab", width=s.d_model),)
    made = with_bytes(s, tuple(kernels))
    boundary = float(tokens * s.d_model)
    return Layer("head", "head", tensors, made, activation_bytes=K.kept(made), boundary_bytes=boundary)
