"""Transformers from a shape: embedding, blocks, head.

``transformer(layers, d_model, heads, seq_len, vocab)`` is the generic description, as measurement tables give it;
:func:`build` turns any :class:`~clustersim.model.base.TransformerShape` into a :class:`~clustersim.core.model.Model`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypedDict, Unpack

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Kernel, Layer, Model
from clustersim.model import attention_kernels, naming, streams
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.compressed import compressor_kernels, projected_out
from clustersim.model.experts import expert_kernels
from clustersim.model.families import families
from clustersim.model.kept import with_bytes
from clustersim.model.layer_inputs import made_inputs, told_kernels
from clustersim.model.mixers import LINEAR
from clustersim.model.ngrams import ngram_kernels
from clustersim.model.shape_checks import checked
from clustersim.model.towers import renamed, tower_layers
from clustersim.model.vision import class_kernels, patch_kernels

GATHER = K.operators("s:s", "s:s s", 1, 5)
"""Rows of the embedding; backward sorts the ids, then adds each row's gradient into the table."""


class TransformerOptions(TypedDict, total=False):
    """What else may be said of a transformer.

    Parameters
    ----------
    kv_heads : key-value heads, ``heads`` by default. d_ff : MLP width, ``4 d_model`` by default.
    activation, norm : such as ``"gelu"`` or ``"swiglu"``, and ``"layernorm"`` or ``"rmsnorm"``.
    positions : ``"learned"`` (``seq_len`` rows), ``"rotary"``, ``"alibi"`` or ``"none"``.
    tied : the output projection shares the embedding. bias : linears and LayerNorms have one.
    attention, implementation : see :class:`~clustersim.model.base.TransformerShape`; flash, op by op, by default.
    style : whose tensor names, a row of ``data/families``; ``"llama"`` for gated MLPs, else ``"gpt2"``.
    """

    kv_heads: int
    d_ff: int
    activation: str
    norm: str
    positions: str
    tied: bool
    bias: bool
    causal: bool
    attention: str | None
    implementation: str | None
    style: str
    name: str


def transformer(
    layers: int,
    d_model: int,
    heads: int,
    seq_len: int,
    vocab: int,
    **options: Unpack[TransformerOptions],
) -> Model:
    """A transformer by its dimensions; ``options`` as :class:`TransformerOptions` has them.

    >>> transformer(12, 768, 12, 1024, 50257).parameters
    124439808
    """
    activation = options.get("activation", "gelu")
    norm = options.get("norm", "layernorm")
    positions = options.get("positions", "learned")
    bias = options.get("bias", True)
    if heads < 1 or d_model % max(heads, 1):
        raise ModelError(f"{heads} heads do not divide d_model {d_model} evenly")
    attention, implementation = execution(options.get("attention"), options.get("implementation"))
    shape = TransformerShape(
        name=options.get("name") or f"transformer-{layers}x{d_model}",
        family=options.get("style") or ("llama" if activation in {"swiglu", "geglu"} else "gpt2"),
        layers=layers,
        d_model=d_model,
        heads=heads,
        kv_heads=options.get("kv_heads", heads),
        head_dim=d_model // heads,
        d_ff=options.get("d_ff", 4 * d_model),
        vocab=vocab,
        seq_len=seq_len,
        n_positions=seq_len if positions == "learned" else 0,
        activation=activation,
        norm=norm,
        positions=positions,
        tied=options.get("tied", True),
        causal=options.get("causal", True),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        norm_bias=bias and norm == "layernorm",
        attention=attention,
        implementation=implementation,
    )
    return build(shape)


def execution(attention: str | None, implementation: str | None) -> tuple[str, str]:
    """The pair with its defaults: eager attention comes with eager ops and the reverse; flash otherwise."""
    if implementation is None:
        implementation = "eager" if attention == "eager" else "flash"
    if attention is None:
        attention = "eager" if implementation == "eager" else "flash"
    return attention, implementation


def build(shape: TransformerShape, notes: tuple[str, ...] = ()) -> Model:
    """Layers of a transformer in forward order.

    Raises :class:`ModelError` when the shape is inconsistent (:func:`~clustersim.model.base.checked`) or its family is
    unknown.
    """
    s = checked(shape)
    if s.family not in families():
        raise ModelError(f"{s.name}: unknown style {s.family!r}; {nearest(s.family, families())}")
    return _built(s, notes)


@lru_cache(maxsize=32)
def _built(s: TransformerShape, notes: tuple[str, ...]) -> Model:
    layers = (_embedding_layer(s), *_blocks(s), *_mtp(s), _head_layer(s))
    if s.tower:
        layers = (*tower_layers(s, s.tower, block_kernels), *(renamed(s.tower, layer) for layer in layers))
    return Model(
        s.name,
        s.family,
        layers,
        seq_len=s.seq_len,
        n_blocks=s.layers,
        hidden=s.d_model,
        heads=s.heads,
        vocab=0 if s.patches else s.vocab,
        notes=notes,
        kv_heads=s.kv_heads,
        head_dim=s.head_dim,
        sample="image" if s.patches else "sequence",
    )


def _boundary(s: TransformerShape) -> float:
    """Elements per sample that one layer hands to the next."""
    return float(s.seq_len * s.d_model * max(s.streams, 1))


def _embedding_layer(s: TransformerShape) -> Layer:
    boundary = float(s.seq_len * s.d_model)
    return Layer(
        "embedding",
        "embedding",
        naming.embedding(s),
        _embedding_kernels(s),
        activation_bytes=(0.5 if s.hidden_dropout else 0.0) * boundary + (boundary if s.embedding_norm else 0.0),
        boundary_bytes=float(s.patches.channels * s.patches.image**2) if s.patches else 0.0,
    )


def _blocks(s: TransformerShape) -> list[Layer]:
    """Blocks in order; those of one shape have the same kernels."""
    shapes = [s.of_block(i) for i in range(s.layers)]
    body = {variant: block_kernels(variant) for variant in dict.fromkeys(shapes)}
    kernels = [body[shape] for shape in shapes]
    if naming.has(s, "norm_later"):
        kernels[0] = tuple(kernel for kernel in kernels[0] if kernel.name != "norm_1")
    return [
        Layer(
            f"layers.{i}",
            "block",
            naming.block(shape, i),
            kernels[i],
            activation_bytes=K.kept(kernels[i]),
            boundary_bytes=_boundary(s),
            heads=shape.heads if shape.heads != s.heads else 0,
            kv_heads=shape.kv_heads if shape.kv_heads != s.kv_heads else 0,
        )
        for i, shape in enumerate(shapes)
    ]


def _head_layer(s: TransformerShape) -> Layer:
    kernels = _head_kernels(s, _head_positions(s))
    return Layer(
        "head",
        "head",
        naming.head(s),
        kernels,
        activation_bytes=K.kept(kernels),
        boundary_bytes=_boundary(s),
    )


def _mtp(s: TransformerShape) -> tuple[Layer, ...]:
    """Blocks that predict further tokens: norms of what the trunk and the next token's embedding say, their projection
    to one width, a block, and the main head once more (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""
    if not s.mtp:
        return ()
    if not families()[s.family].mtp:
        raise ModelError(f"{s.name}: mtp = {s.mtp}, but {s.family} has no multi-token prediction; use mtp = 0")
    t = s.seq_len
    h = s.d_model
    block_shape = s.of_block(s.layers)
    kernels = (
        K.memory("gather", float(t * s.embedding_width), GATHER),
        K.norm(s, "embedding_norm"),
        K.norm(s, "hidden_norm"),
        K.linear("join", t, 2 * h, h),
        *block_kernels(block_shape),
        *_head_kernels(s, t),
    )
    kernels = (*with_bytes(s, kernels[:4]), *kernels[4:])
    saved = K.kept(kernels)
    return tuple(
        Layer(f"mtp.{i}", "mtp", naming.mtp(s, i), kernels, activation_bytes=saved, boundary_bytes=float(t * h))
        for i in range(s.mtp)
    )


def _head_positions(s: TransformerShape) -> int:
    if s.head in {"mlm", "pretraining"} and s.head_positions:
        return min(s.head_positions, s.seq_len)
    return 1 if s.head in {"pooler", "classes"} else s.seq_len


def _embedding_kernels(s: TransformerShape) -> tuple[Kernel, ...]:
    if s.patches:
        return patch_kernels(s, s.patches)
    width = s.embedding_width
    elements = float(s.seq_len * s.d_model)
    kernels = [K.memory("gather", float(s.seq_len * width), GATHER, cut="row")]
    narrow = naming.has_in_embedding(s, "norm_narrow")  # what is summed and normed, ahead of the projection (ELECTRA)
    if narrow:
        elements = float(s.seq_len * width)
    elif s.embed_dim:
        kernels.append(K.linear("project_in", s.seq_len, width, s.d_model))
    kernels += made_inputs(s, GATHER)
    sums = (s.positions == "learned") + (s.token_types > 0)
    if sums:
        kernels.append(K.memory("sum", elements, K.operators("ss:s", "s:", 2, 2), times=sums))
    if s.embedding_norm:
        kernels.append(K.norm(s, "norm", elements, saved=1))
    if s.hidden_dropout:
        kernels.append(K.memory("dropout", elements, K.DROPOUT, saved=K.MASK))
    if narrow and s.embed_dim:
        kernels.append(K.linear("project_in", s.seq_len, width, s.d_model))
    return with_bytes(s, (*kernels, *streams.spread(s)))


def block_kernels(s: TransformerShape) -> tuple[Kernel, ...]:
    """Forward kernels of one block in order, norms where the shape has them."""
    mixer = _mixer_kernels(s)
    mlp = _mlp_kernels(s) if s.experts or s.d_ff else ()
    return with_bytes(s, (*ngram_kernels(s), *_in_order(s, mixer, mlp), *told_kernels(s), *_backward_sums(s)))


def _in_order(s: TransformerShape, mixer: K.Kernels, mlp: K.Kernels) -> K.Kernels:
    """A block's halves between their norms and residual sums."""
    places = "post" if s.post_norm else s.norm_places
    # Behind a half, a norm is read by the next one's products.
    reads = (_products_of(mixer), _products_of(mlp))
    if places.startswith("parallel"):
        norms = ("norm_1", "norm_2") if places == "parallel_two" else ("norm_1",)
        sums = (*K.residual(s, "attention_residual"), *K.residual(s, "mlp_residual"))
        return (*(K.norm(s, name) for name in norms), *mixer, *mlp, *sums)
    listed: list[Kernel] = []
    for number, name, half in ((1, "attention", mixer), (2, "mlp", mlp)):
        if not half:
            continue
        readers = reads[number % 2 if places == "post" else number - 1]
        if s.streams:
            listed += streams.gathered(s)
            listed += [] if s.streams_rank else [K.norm(s, f"norm_{number}", readers=readers)]
            listed += [*half, *streams.returned(s, name)]
            continue
        norm = K.norm(s, f"norm_{number}", readers=0 if places == "after" else readers)
        residual = K.residual(s, f"{name}_residual")
        if places == "post":
            listed += [*half, *residual, norm]
        elif places == "after":
            listed += [*half, norm, *residual]
        elif places == "both" or (places == "behind_experts" and s.experts and name == "mlp"):
            listed += [norm, *half, K.norm(s, f"norm_behind_{number}"), *residual]
        else:
            gated = s.norm_gate and (name == "attention" or s.experts)
            scaled = (K.layer_scale(s, name),) if naming.has(s, "layer_scale") else ()
            listed += [norm, *(K.norm_gate(s, number) if gated else ()), *half, *scaled, *residual]
    return tuple(listed)


def _products_of(half: K.Kernels) -> int:
    """Products that read the input of a block's half: those ahead of the first that keeps another input."""
    products = [kernel for kernel in half if kernel.kind == "gemm" and not kernel.batch and kernel.repeat == 1]
    return sum(1 for i, kernel in enumerate(products) if not i or (not kernel.saved and kernel.k == products[0].k))


def _mixer_kernels(s: TransformerShape) -> K.Kernels:
    """What mixes tokens, from the block's normed input to its output; side by side where the block has two."""
    listed: list[Kernel] = []
    for kind, made in LINEAR.items():
        if kind in s.mixing:
            listed += made(s)
    if s.attends:
        listed += _attention_kernels(s)
    return tuple(listed)


def _attention_kernels(s: TransformerShape) -> K.Kernels:
    t = s.seq_len
    h = s.d_model
    queries = s.width * (2 if s.attn_gate else 1)
    if s.latent:
        projections = list(attention_kernels.latent_projections(s, s.latent))
    elif s.q_rank:
        projections = list(attention_kernels.low_rank_projections(s))
    elif _splits_qkv(s):
        made = {"k": s.key_elements, "v": s.value_elements if s.kv_from == "own" else 0}
        own = (K.sharing_input(K.linear(name, t, h, width)) for name, width in made.items() if width)
        projections = [K.linear("q", t, h, queries), *own]
    else:
        projections = [K.linear("qkv", t, h, queries + 2 * s.kv_width)]
        if not s.fuses:
            # The gradients of queries, keys and values are joined again.
            joined = float(t) * (queries + 2 * s.kv_width)
            projections.append(K.memory("qkv_split", joined, K.Passes(0, 2, 0, 1), cut="heads"))
    if s.indexer:
        projections += attention_kernels.indexer_kernels(s, s.indexer)
    projections += compressor_kernels(s)
    gate = attention_kernels.output_gate(s)
    return (*projections, *attention_kernels.attention(s), *gate, *projected_out(s))


def _backward_sums(s: TransformerShape) -> K.Kernels:
    """Sums of backward alone: of biases, and of the gradients of what several linears read."""
    h = s.d_model
    dense = bool(s.d_ff) and not s.experts
    dense_bias = s.mlp_bias and dense
    wide = s.width * (2 if s.attn_gate else 1) + s.key_elements + (s.value_elements if s.kv_from == "own" else 0)
    biases = [wide] * (s.qkv_bias and s.attends) + [s.d_ff] * ((1 + s.gated) * dense_bias)
    row_biases = [h] * ((s.out_bias and s.attends) + dense_bias)
    apart = {"own": 2, "keys": 1, "earlier": 0}[s.kv_from] if _splits_qkv(s) else 0
    attention = (1 if s.latent else apart) + bool(s.output_gate) if s.attends else 0
    mlp = 1 if s.gated and (s.experts or dense) and not naming.has(s, "gate_up") else 0
    return (*K.bias_gradients(s, biases, row_biases), *K.input_gradient_sums(s, attention + mlp))


def _splits_qkv(s: TransformerShape) -> bool:
    """Whether queries, keys and values are products apart."""
    return not naming.has(s, "qkv")


def _mlp_kernels(s: TransformerShape) -> tuple[Kernel, ...]:
    if s.experts:
        return expert_kernels(s, s.experts)
    t = s.seq_len
    h = s.d_model
    up = K.linear("up", t, h, s.d_ff)
    gate = (K.linear("gate", t, h, s.d_ff),) if s.gated else ()
    return (
        *gate,
        K.sharing_input(up) if s.gated else up,
        K.mlp_activation(s, "activation", float(t) * s.d_ff),
        K.linear("down", t, s.d_ff, h),
    )


def _head_kernels(s: TransformerShape, positions: int) -> tuple[Kernel, ...]:
    if s.head == "classes":
        return class_kernels(s)
    h = s.d_model
    kernels: list[Kernel] = []
    if s.head != "none" and s.head != "lm" and s.final_norm and not s.post_norm:
        kernels.append(K.norm(s, "norm", saved=1))
    if s.head in {"pooler", "pretraining"}:
        kernels += [K.linear("pooler", 1, h, h), K.memory("tanh", float(h), K.Passes(2, 3))]
    if s.head in {"mlm", "pretraining"}:
        elements = float(positions * h)
        kernels += [
            K.linear("transform", positions, h, h),
            K.memory("transform_activation", elements, K.ACTIVATION["gelu"]),
            K.norm(s, "transform_norm", elements),
        ]
    elif s.head in {"lm", "none"} and not s.post_norm:
        if s.streams:
            weighted = s.streams_rank or naming.has_in_head(s, "streams_head")
            kernels += streams.gathered(s, last=True) if weighted else streams.averaged(s)
        kernels += [K.norm(s, "norm", saved=1, readers=1)] if s.final_norm else []
    if s.head == "lm" and s.embed_dim:
        kernels.append(K.linear("project_out", s.seq_len, h, s.embed_dim))
    if s.head in {"lm", "mlm", "pretraining"}:
        kernels += [K.linear("logits", positions, s.embedding_width, s.vocab), K.cross_entropy(s, positions)]
    if s.head == "qa":
        kernels += [K.linear("qa_outputs", s.seq_len, h, 2)]
    return with_bytes(s, kernels)
