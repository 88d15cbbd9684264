"""The shape of a transformer: what every builder and config reader agrees on."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from clustersim.core.errors import ModelError
from clustersim.core.limits import MOST_EXPERTS, MOST_LAYERS, counted
from clustersim.model.sizes import (
    Bridge,
    Compressor,
    Delta,
    Experts,
    Heads,
    Indexer,
    Latent,
    LayerInputs,
    LowRankOutput,
    Ngrams,
    Patches,
    StateSpace,
)

__all__ = [
    "Experts",
    "Latent",
    "Patches",
    "TransformerShape",
]

ACTIVATIONS = ("gelu", "gelu_new", "relu", "relu2", "silu", "quick_gelu", "xielu", "swiglu", "geglu")
GATED = ("swiglu", "geglu")
NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rotary", "alibi", "none")
ATTENTION = ("flash", "eager")
EXPERTS_IMPLEMENTATIONS = ("eager", "grouped_mm")
IMPLEMENTATIONS = ("eager", "flash", "liger", "megatron", "fused")
NORM_PLACES = ("before", "after", "both", "parallel", "parallel_two", "one", "after_attention", "behind_experts")
"""Where a block's norms stand: in front of attention and of the MLP; behind them, inside the residual (OLMo 2); both
(Gemma 2); one for attention and MLP side by side (Command R), or one for each (GPT-NeoX); or one in front of the only
half that the block has (Mamba). Where blocks differ: behind the halves of those that attend, in front of the others'
(OLMo Hybrid); in front of all, and behind experts, too (A.X K1)."""
MIXERS: tuple[str, ...] = ("full", "sliding", "chunked", "reused", "compressed", "compressed_chosen")
MIXERS += ("delta", "kda", "lightning", "mamba", "mamba2", "conv", "none")
"""How a block mixes tokens. Attention: to all earlier tokens, to a window of them, to those of the same chunk, or to
those that an earlier block's indexer chose (GLM-5.2); to a window and compressed keys, all or those that an indexer
chooses (DeepSeek-V4). Linear in the sequence's length: gated delta rule (Qwen3-Next)
and its kind with a gate per channel (Kimi Linear), lightning attention (MiniMax), state spaces of the first and second
Mamba, a short convolution (LFM2)."""
MLPS = ("dense", "experts", "none")
QK_NORMS = ("head", "heads", "width", "plain", "values")
"""A norm of queries and keys has one weight for all heads, a weight for each head, is over all heads together (OLMo 2),
or has no weight and is of blocks that rotate (Llama 4); or values have one, too, that has no weight (Gemma 4)."""
OUTPUT_GATES = ("", "element", "head")
"""What a gate of attention's output scales: nothing, each element (Trinity), or each head as a whole (Laguna)."""
HEADS = ("lm", "none", "pooler", "mlm", "pretraining", "qa", "classes")
COMPRESSED = frozenset(("compressed", "compressed_chosen"))
"""Kinds of attention that see compressed keys beside a window."""
LIMITED = COMPRESSED | {"sliding", "chunked", "reused"}
"""Kinds of attention to some of the tokens."""
ATTENDS = LIMITED | {"full"}


@dataclass(frozen=True)
class TransformerShape:
    """A transformer's dimensions and the choices that decide its tensors and kernels.

    Parameters
    ----------
    name, family : the model's name, and whose tensor names it uses (a row of ``data/families``).
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
    window : tokens of sliding-window attention, or of a chunk, 0 for all. full_every : each so many-th block attends to
        all tokens nevertheless, 0 for none.
    norm_places : from :data:`NORM_PLACES`; ``post_norm`` is BERT's way. qk_norm_of : from :data:`QK_NORMS`.
    norm_weight : norms have a weight (OLMo's have none). wide_norms : it multiplies in fp32, ahead of the cast back
        (Gemma's, OLMo 2's), where Llama's multiplies behind it. wide_rotation : queries and keys are rotated in fp32
        (OLMo's). rotates : which blocks rotate, repeated where there are more blocks; empty where all do.
    attn_gate : queries have a gate of their size, whose sigmoid scales the heads' outputs (Qwen3-Next).
    output_gate : so does a gate with a projection of its own, from :data:`OUTPUT_GATES`; in ``attn_gate`` of latent
        attention, gate and queries are one product of the queries' latent vector and of what its norm reads (A.X K2).
    norm_gate : rank of an MLP whose sigmoid scales what a norm in front of attention or experts gives (A.X K2); 0 for
        none.
    q_rank : queries of plain attention go through a projection of this rank and its norm (Step 3); 0 for one product.
    mixers, mlps : of each block, from :data:`MIXERS` and :data:`MLPS`, repeated where there are more blocks; two mixers
        side by side are joined by ``+`` (Falcon-H1). Empty where all blocks attend, and have experts where ``experts``
        says.
    widths : of each block's MLP, empty where all are ``d_ff``.
    heads_of : of each block, repeated where there are more blocks, attention that differs; empty where all have that of
        the shape. value_size : elements of a head's value; 0 for ``head_dim``. kv_from : what makes keys and values,
        of :data:`~clustersim.model.sizes.KV_FROM`.
    inputs : what each block is told of its token. streams : of the residual, by hyper-connections
        (:mod:`clustersim.model.streams`); 0 for the one that others have. sinkhorn : iterations that make the matrix by
        which streams are mixed doubly stochastic; 0 where nothing mixes them. streams_rank : of the product by which
        each element of all streams is weighted, behind a norm of its own; 0 where each stream has one weight a token.
    ngrams : features of n-grams that some blocks add to their streams.
    delta, space, indexer : sizes of the delta rule, of the state space, and of the sparse attention's indexer.
    compressor, low_output : sizes of compressed keys, and of a projection out by way of a narrower one. rotated :
        elements of a head that are rotated, and in its output back, as values are rotated with the keys that they are;
        0 for heads of which all elements count as rotated.
    buckets : rows of a table of relative positions, which all blocks add to their scores (MPNet); 0 for none.
    head_bias : the output projection has a bias. pooling : a tower ends in attention of one learned query.
    tower : what reads images in front of the decoder; images : of a sample.
    attention : ``"flash"`` (one fused kernel) or ``"eager"`` (scores in memory).
    implementation : ``"eager"`` (Hugging Face, op by op), ``"flash"`` (op by op with fused attention and GELU),
        ``"liger"`` (so, with Liger's kernels of norms, rotation and gated activations) or ``"fused"`` (torch.compile or
        fused kernels: bias, activation, dropout, residual and norm merge).
        ``"megatron"`` is Megatron-LM before Transformer Engine: bias with GELU, bias with dropout and sum, and
        scale, mask and softmax in a kernel each; apart are norms, the dropout of scores, and a loss in fp32 op by op.
    fused_loss : softmax and cross-entropy are one kernel whatever the implementation (``cross_entropy_loss_fusion``).
    fused_norms : so are a norm, and rotation (flash-attn's ``rms_norm`` and ``apply_rotary_emb``, which the
        code of Qwen and others calls).
    experts_implementation : ``"eager"`` (a loop over experts) or ``"grouped_mm"`` (one launch for all), as Hugging
        Face's option of that name.
    experts_joined : all experts' gates and ups are one tensor, and their downs, as transformers 5 makes them in every
        family; else Mixtral's, Qwen's and DeepSeek's experts have their own, as in transformers 4 and in checkpoints.
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
    experts: Experts | None = None
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
    fused_norms: bool = False
    experts_implementation: str = "eager"
    experts_joined: bool = False
    norm_places: str = "before"
    qk_norm_of: str = "head"
    norm_weight: bool = True
    norm_gate: int = 0
    wide_norms: bool = False
    wide_rotation: bool = False
    rotates: tuple[bool, ...] = ()
    attn_gate: bool = False
    output_gate: str = ""
    q_rank: int = 0
    mixers: tuple[str, ...] = ()
    mlps: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    heads_of: tuple[Heads, ...] = ()
    value_size: int = 0
    kv_from: str = "own"
    inputs: LayerInputs | None = None
    streams: int = 0
    sinkhorn: int = 0
    streams_rank: int = 0
    ngrams: Ngrams | None = None
    delta: Delta | None = None
    space: StateSpace | None = None
    indexer: Indexer | None = None
    compressor: Compressor | None = None
    low_output: LowRankOutput | None = None
    rotated: int = 0
    buckets: int = 0
    head_bias: bool = False
    pooling: bool = False
    tower: Tower | None = None
    images: int = 1

    def __post_init__(self) -> None:
        counted(self.layers + self.mtp, MOST_LAYERS, f"{self.name}: layers", ModelError)
        experts = self.experts.count * self.layers if self.experts else 0
        counted(experts, MOST_EXPERTS, f"{self.name}: experts of all layers", ModelError)

    @property
    def fuses(self) -> bool:
        """Whether elementwise chains run as one kernel."""
        return self.implementation in {"fused", "megatron"}

    @property
    def fuses_norms(self) -> bool:
        """Whether an RMSNorm is one kernel."""
        return self.fused_norms or self.implementation in {"fused", "liger"}

    @property
    def fuses_pairs(self) -> bool:
        """Whether a gate with what it scales is one kernel."""
        return self.fuses or self.implementation == "liger"

    @property
    def fuses_rotation(self) -> bool:
        """Whether rotation is one kernel."""
        return self.fuses_pairs or self.fused_norms

    @property
    def width(self) -> int:
        """Elements of all query heads of one token; ``d_model`` unless the head size is free."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Elements of all key (or value) heads of one token."""
        return self.kv_heads * self.head_dim

    @property
    def attentions(self) -> tuple[Heads, ...]:
        """Heads of its blocks, each kind once."""
        own = Heads(self.heads, self.kv_heads, self.head_dim, self.value_size, self.kv_from, self.sinks)
        return tuple(dict.fromkeys(self.heads_of)) or (own,)

    @property
    def value_dim(self) -> int:
        """Elements of one head's value, and of its output."""
        return self.latent.value if self.latent else self.value_size or self.head_dim

    @property
    def key_elements(self) -> int:
        """Elements of a token's keys that the block makes."""
        return 0 if self.kv_from == "earlier" else self.kv_width

    @property
    def value_elements(self) -> int:
        """Elements of a token's values that the block makes."""
        return 0 if self.kv_from == "earlier" else self.kv_heads * self.value_dim

    @property
    def gated(self) -> bool:
        """Whether the MLP multiplies two projections."""
        return self.activation in GATED

    @property
    def embedding_width(self) -> int:
        """Columns of the embedding table."""
        return self.embed_dim or self.d_model

    @property
    def mixing(self) -> frozenset[str]:
        """How this block mixes tokens; of a shape that is no block's, how its first does."""
        return frozenset(self.mixers[0].split("+")) if self.mixers else frozenset(("full",))

    @property
    def attends(self) -> bool:
        """Whether the block has attention."""
        return bool(self.mixing & ATTENDS)

    @property
    def compression(self) -> int:
        """Tokens of a compressed key of this block; 0 where it sees none."""
        if self.compressor is None or not self.mixing & COMPRESSED:
            return 0
        return self.compressor.all if "compressed" in self.mixing else self.compressor.chosen

    @property
    def compressed_keys(self) -> int:
        """Compressed keys of one sequence."""
        return self.seq_len // self.compression if self.compression else 0

    @property
    def keys(self) -> int:
        """Keys of one sequence, those of single tokens and compressed ones."""
        return self.seq_len + self.compressed_keys

    @property
    def compressed_pairs(self) -> float:
        """Pairs of a query and a compressed key, which is seen by tokens from its last one on; of an indexer's, the
        chosen ones alone."""
        seen = min(self.compressed_keys, self.indexer.top) if self.indexer else self.compressed_keys
        return seen * (self.seq_len + 1.0) - self.compression * seen * (seen + 1) / 2.0

    @property
    def attended_pairs(self) -> float:
        """Query-key pairs of one sequence and head that are computed by a kernel that skips masked blocks."""
        return self.token_pairs + self.compressed_pairs

    @property
    def token_pairs(self) -> float:
        """The same of keys of single tokens."""
        # The tokens of one image attend to each other.
        apart = self.patches.grid + self.patches.tokens if self.patches else self.seq_len
        full = float(self.seq_len) * apart
        window = float(self.window)
        limited = 0 < self.window < self.seq_len
        if limited and "chunked" in self.mixing:
            whole, rest = divmod(self.seq_len, self.window)
            return (whole * window**2 + float(rest) ** 2) / (2 if self.causal else 1)
        if not self.causal:
            # A bidirectional window reaches half of it to either side.
            return window * self.seq_len if limited else full
        if limited:
            return window * self.seq_len - window**2 / 2
        return full / 2

    def of_block(self, block: int) -> TransformerShape:
        """The shape as one block has it: with experts or without, with the window or without."""
        if self.mixers or self.heads_of or self.rotates:
            return self._described(block)
        experts = self.experts if self.experts and self.experts.are_in(block) else None
        full_attention = self.full_every and (block + 1) % self.full_every == 0
        return replace(self, experts=experts, window=0 if full_attention else self.window)

    def _described(self, block: int) -> TransformerShape:
        """As :meth:`of_block`, where the shape says of each block what it does, over and over again."""
        mixer = self.mixers[block % len(self.mixers)] if self.mixers else "full"
        mlp = self.mlps[block % len(self.mlps)] if self.mlps else ""
        if not mlp:
            mlp = "experts" if self.experts and self.experts.are_in(block) else "dense"
        wide = self.widths[min(block, len(self.widths) - 1)] if self.widths else self.d_ff
        words = frozenset(mixer.split("+"))
        rotates = self.rotates[block % len(self.rotates)] if self.rotates else True
        chooses = COMPRESSED - {"compressed"} if self.compressor else {"sliding"}
        own = msgspec.structs.asdict(self.heads_of[block % len(self.heads_of)]) if self.heads_of else {}
        places = self.norm_places
        if places == "after_attention":
            places = "after" if words & ATTENDS else "before"
        return replace(
            self,
            heads_of=(),
            norm_places=places,
            positions=self.positions if rotates else "none",
            qk_norm=self.qk_norm and (rotates or self.qk_norm_of != "plain"),
            rotates=(),
            **own,
            mixers=(mixer,),
            mlps=(mlp,),
            widths=(),
            d_ff=wide if mlp == "dense" else 0 if mlp == "none" else self.d_ff,
            experts=self.experts if mlp == "experts" else None,
            window=self.window if words & LIMITED else 0,
            indexer=self.indexer if words & chooses else None,
            ngrams=self.ngrams.of_block(block) if self.ngrams else None,
        )


@dataclass(frozen=True)
class Tower:
    """What reads images in front of a decoder.

    Parameters
    ----------
    shape : of the tower, for one image. bridges : between it and the decoder. tokens : of the decoder that an image
        becomes. names, text_names, head_names : what stands before the names of the tower's tensors, of the decoder's
        in place of ``model.``, and of its output projection.
    """

    shape: TransformerShape
    bridges: tuple[Bridge, ...]
    tokens: int
    names: str
    text_names: str
    head_names: str = ""
