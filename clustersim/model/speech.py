"""Encoders of sound from a config.json, trained to transcribe it (CTC): wav2vec 2.0 and HuBERT.

Convolutions over the samples of a clip, one over what they give as its positions, and blocks of an encoder. Names of
tensors are those of transformers' ``ForCTC`` classes; a norm stands where it runs.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Kernel, Layer, Model, Tensor
from clustersim.core.texts import Table, data_table
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.config import Config
from clustersim.model.conv_layers import BIAS, Feature, convolution
from clustersim.model.families import fields_of
from clustersim.model.kept import with_bytes
from clustersim.model.pair_layers import dropped_inside
from clustersim.model.shape_checks import checked
from clustersim.model.tensor_parts import Tensors, affine
from clustersim.model.transformer_model import block_kernels, execution

SPEECH = ("hubert", "wav2vec2")
"""Each ``model_type`` that is read here, which is what stands before its tensors' names, too."""
OPTIONS = ("seq_len", "attention", "implementation")
"""What a scenario may say beside the config."""
GROUP_NORM = K.Passes(3, 5, 2, 3)
"""Moments, then the norm; backward reads input and gradient for their sums, and once more."""
_UNREAD = ("add_adapter", "adapter_attn_dim", "conv_pos_batch_norm", "use_weighted_layer_sum")
"""Fields that add what is not described."""


class Listener(msgspec.Struct, frozen=True):
    """What is read of a config.

    Parameters
    ----------
    kind : the ``model_type``. shape : of its blocks, whose ``seq_len`` are frames. samples : of a clip.
    windows, strides, channels : of each convolution over samples. bias : they have one. every_norm : a LayerNorm stands
        behind each, not a GroupNorm behind the first. place_window, place_groups : of the convolution for positions.
    masks : some frames are replaced by a learned one. feature_norm : what convolutions give is normed.
    inner_dropout, feature_dropout, last_dropout : behind an MLP's activation, ahead of the blocks, and of the head.
    """

    kind: str
    shape: TransformerShape
    samples: int
    windows: tuple[int, ...]
    strides: tuple[int, ...]
    channels: tuple[int, ...]
    bias: bool
    every_norm: bool
    place_window: int
    place_groups: int
    masks: bool
    feature_norm: bool
    inner_dropout: bool
    feature_dropout: bool
    last_dropout: bool


def speech_encoder(where: str, data: Table, options: Table) -> tuple[Model, Config]:
    """The model that a config describes, and its fields as they were read.

    ``options`` : of :data:`OPTIONS`; ``seq_len`` are samples of a clip, of which nothing is usual. Raises
    :class:`ModelError` naming file, field and value.
    """
    kind = str(data["model_type"])
    for option in options:
        if option not in OPTIONS:
            raise ModelError(f"{where}: {kind} takes no option {option!r}; {nearest(option, OPTIONS)}")
    c = Config(where, data, kind, fields_of(kind), tuple(data_table("inert_fields")["speech"]))
    listener = _listener(c, options)
    c.refuse_unread()
    s = listener.shape
    layers = (*_sound(listener), _embedding(listener), *(_block(listener, i) for i in range(s.layers)), _head(listener))
    dropped = ("blocks that layerdrop skips at random count as if none were",) if c.rate("layerdrop", 0.0) else ()
    model = Model(
        where,
        "speech",
        layers,
        seq_len=listener.samples,
        sample="clip",
        n_blocks=s.layers,
        hidden=s.d_model,
        heads=s.heads,
        vocab=s.vocab,
        notes=(f"clips of {listener.samples} samples, {s.seq_len} frames", *dropped),
        kv_heads=s.heads,
        head_dim=s.head_dim,
        splits=(),
    )
    return model, c


def _listener(c: Config, options: Table) -> Listener:
    for field in _UNREAD:
        if c.value(field) not in (None, False):
            raise ModelError(f"{c.where}: '{field}' = {c.data[field]!r} is not described; only null and false are")
    norm = c.text("feat_extract_norm", "group")
    if norm not in {"group", "layer"}:
        raise ModelError(f"{c.where}: 'feat_extract_norm' = {norm!r} must be 'group' or 'layer'")
    for field in ("feat_extract_activation", "hidden_act"):
        if c.text(field, "gelu") != "gelu":
            raise ModelError(f"{c.where}: '{field}' = {c.data[field]!r} is not described; only 'gelu' is")
    names = ("conv_kernel", "conv_stride", "conv_dim")
    windows, strides, channels = (_numbers(c, field) for field in names)
    if not len(windows) == len(strides) == len(channels):
        raise ModelError(f"{c.where}: 'conv_kernel', 'conv_stride' and 'conv_dim' must be lists of one length")
    samples = _samples(c, options)
    return Listener(
        kind=c.kind,
        shape=_shape(c, options, _frames(c, samples, windows, strides)),
        samples=samples,
        windows=windows,
        strides=strides,
        channels=channels,
        bias=c.flag("conv_bias", False),
        every_norm=norm == "layer",
        place_window=c.number("num_conv_pos_embeddings", 128, "frames that a position is made of"),
        place_groups=c.number("num_conv_pos_embedding_groups", 16, "groups of the convolution for positions"),
        masks=c.rate("mask_time_prob", 0.05) or c.rate("mask_feature_prob", 0.0),
        feature_norm=c.flag("feat_proj_layer_norm", True, quiet=True),
        inner_dropout=c.rate("activation_dropout", 0.1),
        feature_dropout=c.rate("feat_proj_dropout", 0.0),
        last_dropout=c.rate("final_dropout", 0.1),
    )


def _numbers(c: Config, field: str) -> tuple[int, ...]:
    """A list of whole numbers above zero."""
    numbers = c.listed(field, "a number for each convolution")
    if not numbers or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in numbers):
        raise ModelError(f"{c.where}: '{field}' = {numbers!r} must be a list of whole numbers above zero")
    return tuple(numbers)


def _samples(c: Config, options: Table) -> int:
    samples = options.get("seq_len")
    if samples is None:
        raise ModelError(
            f"{c.where}: no config of {c.kind} says how long a clip is; give seq_len, its samples: 16000 a second"
        )
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ModelError(f"{c.where}: seq_len = {samples!r} must be a whole number of samples above zero")
    return samples


def _frames(c: Config, samples: int, windows: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """What convolutions without padding leave of a clip."""
    frames = samples
    for window, stride in zip(windows, strides, strict=True):
        frames = (frames - window) // stride + 1
        if frames < 1:
            raise ModelError(f"{c.where}: seq_len = {samples} samples are fewer than the convolutions of {c.kind} see")
    return frames


def _shape(c: Config, options: Table, frames: int) -> TransformerShape:
    attention, implementation = execution(options.get("attention"), options.get("implementation"))
    width = c.need("hidden_size", "the width of the model")
    heads = c.need("num_attention_heads", "attention heads")
    if width % heads:
        raise ModelError(f"{c.where}: {heads} attention heads do not divide a width of {width} evenly")
    stable = c.flag("do_stable_layer_norm", False)
    return checked(
        TransformerShape(
            name=c.where,
            family="bert",
            layers=c.need("num_hidden_layers", "the number of blocks"),
            d_model=width,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            d_ff=c.need("intermediate_size", "the width of the MLP"),
            vocab=c.need("vocab_size", "the number of characters"),
            seq_len=frames,
            positions="none",
            tied=False,
            causal=False,
            post_norm=not stable,
            attn_dropout=c.rate("attention_dropout", 0.1),
            hidden_dropout=c.rate("hidden_dropout", 0.1),
            attention=attention,
            implementation=implementation,
        )
    )


def _sound(a: Listener) -> list[Layer]:
    """Convolutions over a clip's samples, each with a GELU."""
    x = Feature(1, 1, a.samples, image=True)
    layers = []
    for i, (window, stride, channels) in enumerate(zip(a.windows, a.strides, a.channels, strict=True)):
        y = Feature(channels, 1, (x.width - window) // stride + 1)
        name = f"{a.kind}.feature_extractor.conv_layers.{i}"
        tensors = affine(f"{name}.conv", x.channels * window, channels, bias=a.bias)
        conv = replace(convolution(x, y, (1, window), 1), saved=float(x.size))
        kernels = [conv, *((K.memory("bias", float(y.size), BIAS),) if a.bias else ())]
        if a.every_norm:
            kernels.append(K.memory("transposed", float(y.size), K.Passes(2, 2), times=2))
            kernels.append(K.norm(a.shape, "norm", float(y.size)))
        elif i == 0:
            kernels.append(K.memory("group_norm", float(y.size), GROUP_NORM, saved=1))
        if a.every_norm or i == 0:
            tensors += affine(f"{name}.layer_norm", 1, channels)
        kernels.append(K.memory("gelu", float(y.size), K.ACTIVATION["gelu"], saved=1))
        listed = tuple(kernels)
        layers.append(
            Layer(name, "conv", tensors, listed, activation_bytes=K.kept(listed), boundary_bytes=float(x.size))
        )
        x = y
    return layers


def _embedding(a: Listener) -> Layer:
    """From what the convolutions gave to the width of the blocks, and positions, which one more convolution makes."""
    s = a.shape
    last = a.channels[-1]
    width = float(s.seq_len * s.d_model)
    place = f"{a.kind}.encoder.pos_conv_embed.conv"
    tensors: Tensors = (Tensor(f"{a.kind}.masked_spec_embed", s.d_model),) if a.masks else ()
    kernels: list[Kernel] = []
    if a.feature_norm:
        tensors += affine(f"{a.kind}.feature_projection.layer_norm", 1, last)
        kernels.append(K.norm(s, "norm_features", float(s.seq_len * last)))
    tensors += affine(f"{a.kind}.feature_projection.projection", last, s.d_model)
    kernels.append(K.linear("features", s.seq_len, last, s.d_model))
    kernels += _dropout(s, "features_dropout", there=a.feature_dropout)
    kernels += [K.memory("masked", width, K.Passes(2, 3, 2, 3))] if a.masks else []
    # Weights are a length for each place in the window, and a direction.
    weights = s.d_model * s.d_model // a.place_groups * a.place_window
    tensors += (
        Tensor(f"{place}.bias", s.d_model),
        Tensor(f"{place}.parametrizations.weight.original0", a.place_window, width=a.place_window),
        Tensor(f"{place}.parametrizations.weight.original1", weights, width=weights // s.d_model),
    )
    x = Feature(s.d_model, 1, s.seq_len)
    y = Feature(s.d_model, 1, s.seq_len + (a.place_window % 2 == 0))  # padded by half a window on either side
    conv = replace(convolution(x, y, (1, a.place_window), a.place_groups), name="places", saved=float(x.size))
    kernels += [conv, K.memory("bias", float(y.size), BIAS), K.memory("gelu", width, K.ACTIVATION["gelu"], saved=1)]
    kernels.append(K.memory("sum", width, K.operators("ss:s", "s:", 2, 2)))
    if s.post_norm:
        tensors += affine(f"{a.kind}.encoder.layer_norm", 1, s.d_model)
        kernels.append(K.norm(s, "norm", saved=1))
    kernels += _dropout(s, "dropout", there=s.hidden_dropout)
    made = with_bytes(s, kernels)
    boundary = float(s.seq_len * last)
    return Layer("embedding", "embedding", tensors, made, activation_bytes=K.kept(made), boundary_bytes=boundary)


def _dropout(s: TransformerShape, name: str, *, there: bool) -> list[Kernel]:
    return [K.memory(name, float(s.seq_len * s.d_model), K.DROPOUT, saved=K.MASK)] if there else []


def _block(a: Listener, i: int) -> Layer:
    s = a.shape
    h = s.d_model
    name = f"{a.kind}.encoder.layers.{i}"
    kernels = dropped_inside(s, block_kernels(s)) if a.inner_dropout else block_kernels(s)
    tensors: Tensors = ()
    for projection in ("k_proj", "v_proj", "q_proj", "out_proj"):
        tensors += affine(f"{name}.attention.{projection}", h, h)
    tensors += affine(f"{name}.layer_norm", 1, h)
    tensors += affine(f"{name}.feed_forward.intermediate_dense", h, s.d_ff)
    tensors += affine(f"{name}.feed_forward.output_dense", s.d_ff, h)
    tensors += affine(f"{name}.final_layer_norm", 1, h)
    boundary = float(s.seq_len * h)
    return Layer(name, "block", tensors, kernels, activation_bytes=K.kept(kernels), boundary_bytes=boundary)


def _head(a: Listener) -> Layer:
    """The last norm, where it stands behind the blocks, characters of each frame, and their loss."""
    s = a.shape
    tensors: Tensors = ()
    kernels: list[Kernel] = []
    if not s.post_norm:
        tensors += affine(f"{a.kind}.encoder.layer_norm", 1, s.d_model)
        kernels.append(K.norm(s, "norm", saved=1))
    kernels += _dropout(s, "last_dropout", there=a.last_dropout)
    logits = float(s.seq_len * s.vocab)
    kernels.append(K.linear("characters", s.seq_len, s.d_model, s.vocab))
    # Log-softmax in fp32, and a walk over the frames, forward and back, in a kernel each.
    kernels.append(K.memory("ctc", logits, K.Passes(6, 6, 3, 3), saved=2))
    tensors += affine("lm_head", s.d_model, s.vocab)
    made = with_bytes(s, kernels)
    boundary = float(s.seq_len * s.d_model)
    return Layer("head", "head", tensors, made, activation_bytes=K.kept(made), boundary_bytes=boundary)
