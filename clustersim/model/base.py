"""The shape of a transformer: what every builder and config reader agrees on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from clustersim.core.errors import ModelError, nearest
from clustersim.core.limits import MOST_EXPERTS, MOST_LAYERS, counted

ACTIVATIONS = ("gelu", "gelu_new", "relu", "swiglu", "geglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary", "alibi", "none")
ATTENTION = ("flash", "eager")
EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm")
IMPLEMENTATIONS = ("eager", "flash", "megatron", "fused")
HEADS = ("lm", "none", "pooler", "mlm", "pretraining", "qa", "classes")


class ExpertShape(msgspec.Struct, frozen=True):
    """A mixture of experts in place of a block's MLP; the experts' activation is the shape's.

    Parameters
    ----------
    count, per_token, width : routed experts, how many of them each token visits, and the width of one's hidden layer.
    shared : width of all shared experts together, which every token visits; 0 for none. shared_gate : a sigmoid of one
        more projection scales their output (Qwen2).
    dense_first : leading blocks that keep an MLP of ``d_ff``. every : of all blocks, each so many-th has experts.
    groups, group_limit : a token's experts are all in ``group_limit`` of so many groups (DeepSeek's limit on nodes); 0
        for no limit.
    bias : router and experts have biases (GPT-OSS). correction : one parameter per expert corrects its score
        (DeepSeek-V3's balancing without a loss).
    """

    count: int
    per_token: int
    width: int
    shared: int = 0
    shared_gate: bool = False
    dense_first: int = 0
    every: int = 1
    groups: int = 0
    group_limit: int = 0
    bias: bool = False
    correction: bool = False

    def are_in(self, block: int) -> bool:
        """Whether this block has experts."""
        return block >= self.dense_first and (block + 1) % self.every == 0


class Latent(msgspec.Struct, frozen=True):
    """Multi-head latent attention: queries, and keys with values, go through projections of low rank.

    DeepSeek-V2, arXiv:2405.04434, section 2.1. A head's queries and keys have ``nope + rope`` elements, of which the
    last ``rope`` are rotated; that part of the keys is one for all heads.

    Parameters
    ----------
    q_rank : of the queries; 0 where they are projected directly (V2-Lite). kv_rank : of keys and values.
    nope, rope, value : elements per head without rotation, with it, and of a value.
    """

    q_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


class Patches(msgspec.Struct, frozen=True):
    """What a vision transformer sees in place of words.

    Parameters
    ----------
    image, side : pixels of an image's and of a patch's side. channels : of a pixel. tokens : learned ones before those
        of the patches, of which the first says the class.
    """

    image: int
    side: int
    channels: int = 3
    tokens: int = 1

    @property
    def grid(self) -> int:
        """Patches of an image."""
        return (self.image // self.side) ** 2


@dataclass(frozen=True)
class TransformerShape:
    """A transformer's dimensions and the choices that decide its tensors and kernels.

    Parameters
    ----------
    name, family : the model's name, and whose tensor names it uses (a table of ``data/naming.toml``).
    layers, d_model, heads, kv_heads, head_dim, d_ff, vocab : dimensions; fewer ``kv_heads`` is grouped-query attention.
        ``vocab`` of an image's shape are its classes.
    seq_len : tokens per sample. n_positions : rows of a learned position table, 0 for none.
    activation, norm, positions : from :data:`ACTIVATIONS`, :data:`NORMS`, :data:`POSITIONS`.
    tied : the output projection shares the embedding's weights. causal : tokens attend only backwards.
    qkv_bias, out_bias, mlp_bias, norm_bias : which modules have a bias.
    embed_dim : width of the embedding where it differs from ``d_model`` (OPT-350m); 0 for ``d_model``.
    token_types : rows of BERT's segment table. post_norm : LayerNorm after each residual (BERT), and no final norm.
    final_norm : a norm before the head. embedding_norm : one after the embedding (BERT).
    attn_dropout, hidden_dropout : whether these launch dropout kernels.
    head : from :data:`HEADS`. head_positions : tokens per sample the head sees (gathered masked tokens), 0 for all.
    experts : a mixture of experts, None for dense MLPs. latent : multi-head latent attention, None for plain.
    patches : of an image, in place of words; None for text.
    mtp : extra blocks that predict further tokens (DeepSeek-V3's multi-token prediction).
    qk_norm : RMSNorm on each head's q and k. sinks : one learned score per head in the softmax (GPT-OSS).
    window : tokens of sliding-window attention, 0 for all. full_every : each so many-th block attends to all tokens
        nevertheless, 0 for none.
    attention : ``"flash"`` (one fused kernel) or ``"eager"`` (scores in memory).
    implementation : ``"eager"`` (Hugging Face, op by op), ``"flash"`` (op by op with fused attention and GELU) or
        ``"fused"`` (torch.compile or fused kernels: bias, activation, dropout, residual and norm merge).
        ``"megatron"`` is Megatron-LM before Transformer Engine: bias with GELU, bias with dropout and sum, and
        scale, mask and softmax in a kernel each; apart are norms, the dropout of scores, and a loss in fp32 op by op.
    fused_loss : softmax and cross-entropy are one kernel whatever the implementation (``cross_entropy_loss_fusion``).
    experts_implementation : ``"eager"`` (a loop over experts) or ``"grouped_mm"`` (one launch for all), as Hugging
        Face's option of that name.
    """

    name: str
    family: str
    layers: int
    d_model: int
    heads: int
    kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    seq_len: int
    n_positions: int = 0
    activation: str = "gelu"
    norm: str = "layernorm"
    positions: str = "learned"
    tied: bool = True
    causal: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    embed_dim: int = 0
    token_types: int = 0
    post_norm: bool = False
    final_norm: bool = True
    embedding_norm: bool = False
    attn_dropout: bool = False
    hidden_dropout: bool = False
    head: str = "lm"
    head_positions: int = 0
    experts: ExpertShape | None = None
    latent: Latent | None = None
    patches: Patches | None = None
    mtp: int = 0
    qk_norm: bool = False
    sinks: bool = False
    window: int = 0
    full_every: int = 0
    attention: str = "flash"
    implementation: str = "flash"
    fused_loss: bool = False
    experts_implementation: str = "eager"

    def __post_init__(self) -> None:
        counted(self.layers + self.mtp, MOST_LAYERS, f"{self.name}: layers", ModelError)
        experts = self.experts.count * self.layers if self.experts else 0
        counted(experts, MOST_EXPERTS, f"{self.name}: experts of all layers", ModelError)

    @property
    def fuses(self) -> bool:
        """Whether elementwise chains run as one kernel."""
        return self.implementation in {"fused", "megatron"}

    @property
    def width(self) -> int:
        """Elements of all query heads of one token; ``d_model`` unless the head size is free."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

    @property
    def value_dim(self) -> int:
        """Elements of one head's value, and of its output."""
        return self.latent.value if self.latent else self.head_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections."""
        return self.activation in {"swiglu", "geglu"}

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding table."""
        return self.embed_dim or self.d_model

    @property
    def attended_pairs(self) -> float:
        """Query-key pairs of one sequence and head that are computed by a kernel that skips masked blocks."""
        full = float(self.seq_len) ** 2
        if not self.causal:
            return full
        if 0 < self.window < self.seq_len:
            return float(self.window) * self.seq_len - float(self.window) ** 2 / 2
        return full / 2

    def of_block(self, block: int) -> TransformerShape:
        """The shape as one block has it: with experts or without, with the window or without."""
        experts = self.experts if self.experts and self.experts.are_in(block) else None
        whole = self.full_every and (block + 1) % self.full_every == 0
        return replace(self, experts=experts, window=0 if whole else self.window)


def checked(shape: TransformerShape) -> TransformerShape:
    """The shape itself.

    Raises :class:`ModelError` naming the field and its value, when a dimension is not positive, heads do not divide or
    a choice is unknown.
    """
    for field in ("layers", "d_model", "heads", "kv_heads", "head_dim", "d_ff", "vocab", "seq_len"):
        value = getattr(shape, field)
        if not isinstance(value, int) or value < 1:
            raise ModelError(f"{shape.name}: {field} = {value!r} must be a whole number above zero")
    if shape.heads % shape.kv_heads:
        raise ModelError(f"{shape.name}: {shape.heads} heads do not share {shape.kv_heads} key-value heads evenly")
    if shape.positions == "learned" and shape.n_positions < shape.seq_len:
        raise ModelError(
            f"{shape.name}: seq_len {shape.seq_len} exceeds the {shape.n_positions} learned positions; "
            f"use seq_len <= {shape.n_positions}"
        )
    if shape.experts and not 0 < shape.experts.per_token <= shape.experts.count:
        raise ModelError(f"{shape.name}: {shape.experts.per_token} of {shape.experts.count} experts per token")
    choices = {"activation": ACTIVATIONS, "norm": NORMS, "positions": POSITIONS, "attention": ATTENTION}
    choices |= {"implementation": IMPLEMENTATIONS, "experts_implementation": EXPERTS_IMPLEMENTATIONS, "head": HEADS}
    for field, known in choices.items():
        if getattr(shape, field) not in known:
            raise ModelError(
                f"{shape.name}: unknown {field} {getattr(shape, field)!r}; {nearest(str(getattr(shape, field)), known)}"
            )
    return shape
