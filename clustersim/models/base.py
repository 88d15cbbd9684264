"""The shape of a transformer: what every builder and config reader agrees on."""

from __future__ import annotations

from dataclasses import dataclass

from clustersim.errors import ModelError, nearest

ACTIVATIONS = ("gelu", "gelu_new", "relu", "swiglu", "geglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary", "alibi", "none")
ATTENTION = ("flash", "eager")
IMPLEMENTATIONS = ("eager", "flash", "fused")
HEADS = ("lm", "none", "pooler", "mlm", "pretraining", "qa")


@dataclass(frozen=True)
class Shape:
    """A transformer's dimensions and the choices that decide its tensors and kernels.

    Parameters
    ----------
    name, family : the model's name, and whose tensor names it uses (a key of ``naming.FAMILIES``).
    layers, d_model, heads, kv_heads, head_dim, d_ff, vocab : dimensions; fewer ``kv_heads`` is grouped-query attention.
    seq_len : tokens per sample. n_positions : rows of a learned position table, 0 for none.
    activation, norm, positions : from :data:`ACTIVATIONS`, :data:`NORMS`, :data:`POSITIONS`.
    tied : the output projection shares the embedding's weights. causal : tokens attend only backwards.
    qkv_bias, out_bias, mlp_bias, norm_bias : which modules have a bias.
    embed_dim : width of the embedding where it differs from ``d_model`` (OPT-350m); 0 for ``d_model``.
    token_types : rows of BERT's segment table. post_norm : LayerNorm after each residual (BERT), and no final norm.
    final_norm : a norm before the head. embedding_norm : one after the embedding (BERT).
    attn_dropout, hidden_dropout : whether these launch dropout kernels.
    head : from :data:`HEADS`. head_positions : tokens per sample the head sees (gathered masked tokens), 0 for all.
    experts, experts_per_token : of a mixture of experts, 0 for a dense MLP. qk_norm : RMSNorm on each head's q and k.
    window : tokens of sliding-window attention, 0 for all.
    attention : ``"flash"`` (one fused kernel) or ``"eager"`` (scores in memory).
    implementation : ``"eager"`` (Hugging Face, op by op), ``"flash"`` (op by op with fused attention and GELU) or
        ``"fused"`` (torch.compile or fused kernels: bias, activation, dropout, residual and norm merge).
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
    experts: int = 0
    experts_per_token: int = 0
    qk_norm: bool = False
    window: int = 0
    attention: str = "flash"
    implementation: str = "flash"

    @property
    def width(self) -> int:
        """Elements of all query heads of one token; ``d_model`` unless the head size is free."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

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


def checked(shape: Shape) -> Shape:
    """The shape itself.

    Raises
    ------
    ModelError
        Naming the field and its value, when a dimension is not positive, heads do not divide or a choice is unknown.
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
    if shape.experts and not 0 < shape.experts_per_token <= shape.experts:
        raise ModelError(f"{shape.name}: {shape.experts_per_token} of {shape.experts} experts per token")
    choices = {"activation": ACTIVATIONS, "norm": NORMS, "positions": POSITIONS, "attention": ATTENTION}
    for field, known in (choices | {"implementation": IMPLEMENTATIONS, "head": HEADS}).items():
        if getattr(shape, field) not in known:
            raise ModelError(
                f"{shape.name}: unknown {field} {getattr(shape, field)!r}; {nearest(str(getattr(shape, field)), known)}"
            )
    return shape
