"""Sizes of a block's parts: experts, latent attention, linear attention, state spaces, patches of an image."""

from __future__ import annotations

import msgspec


class Experts(msgspec.Struct, frozen=True):
    """A mixture of experts in place of a block's MLP; the experts' activation is the shape's.

    Parameters
    ----------
    count, per_token, width : routed experts, how many of them each token visits, and the width of one's hidden layer.
    shared : width of all shared experts together, which every token visits; 0 for none. shared_gate : a sigmoid of one
        more projection scales their output (Qwen2).
    dense_first : leading blocks that keep an MLP of ``d_ff``. every : of all blocks, each so many-th has experts.
    groups, group_limit : a token's experts are all in ``group_limit`` of so many groups (DeepSeek's limit on nodes); 0
        for no limit.
    bias : router and experts have biases (GPT-OSS). clamped : gate and up are clamped ahead of the activation (its
        ``swiglu_limit``). correction : one parameter per expert corrects its score
        (DeepSeek-V3's balancing without a loss).
    latent : width that tokens are projected to on their way to the routed experts, and back from (Nemotron 3); 0 for
        the model's.
    norms : the router, the routed experts and what all tokens visit have norms of their own in front, and the latter
        two behind, too (Gemma 4). scales : the router scales what it reads and each expert by learned vectors.
    zero : further choices of the router that compute nothing (LongCat-Flash's zero experts), which ``per_token`` does
        not count.
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
    clamped: bool = False
    correction: bool = False
    latent: int = 0
    norms: bool = False
    scales: bool = False
    zero: int = 0

    def row(self, width: int) -> int:
        """Elements of a token as routed experts see it, in a model of this ``width``."""
        return self.latent or width

    def are_in(self, block: int) -> bool:
        """Whether this block has experts."""
        return block >= self.dense_first and (block + 1) % self.every == 0


KV_FROM = ("own", "keys", "earlier")
"""What keys and values of a block are made by: a projection each, one that is both (Gemma 4), or an earlier block."""


class Heads(msgspec.Struct, frozen=True):
    """Attention of a block, where not all blocks have the same.

    Parameters
    ----------
    heads, kv_heads, head_dim : as of a whole shape. value_size : elements of a head's value; 0 for ``head_dim``.
    kv_from : of :data:`KV_FROM`. sinks : one learned score per head in the softmax.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_size: int = 0
    kv_from: str = "own"
    sinks: bool = False


class LayerInputs(msgspec.Struct, frozen=True):
    """What each block is told of its token beside what it is handed (Gemma 4's small ones): a row of a table of its
    own, added to a projection of the embedding, gates a projection of the block's output.

    ``width`` : of one block. ``vocab`` : rows of the table, which all blocks' widths are columns of.
    """

    width: int
    vocab: int


class Ngrams(msgspec.Struct, frozen=True):
    """Features of n-grams that some blocks add to every stream of their residual (Qwen4-Exp's per-layer embedding).

    Parameters
    ----------
    blocks : which have them. width : elements of all heads together. heads : of n-grams of each length, from two
        tokens to ``longest``. base, divisor : a head's rows are the next prime from ``base`` on, those of all heads
        padded to a multiple of ``divisor``. conv : tokens that the short convolution sees. place : which of the blocks
        one is.
    """

    blocks: tuple[int, ...]
    width: int
    heads: int
    longest: int
    base: int
    divisor: int
    conv: int
    place: int = 0

    @property
    def all_heads(self) -> int:
        """Heads of n-grams of every length."""
        return (self.longest - 1) * self.heads

    def of_block(self, block: int) -> Ngrams | None:
        """As one block has them; None where it has none."""
        if block not in self.blocks:
            return None
        return msgspec.structs.replace(self, blocks=(), place=self.blocks.index(block))


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
        of the patches, of which the first says the class. depth : frames that one patch spans (Qwen's videos).
    """

    image: int
    side: int
    channels: int = 3
    tokens: int = 1
    depth: int = 1

    @property
    def grid(self) -> int:
        """Patches of an image."""
        return (self.image // self.side) ** 2


class Delta(msgspec.Struct, frozen=True):
    """A gated delta rule: linear attention whose state forgets and is corrected (Yang et al., arXiv:2412.06464).

    Parameters
    ----------
    key_heads, value_heads : heads of queries and keys, and of values; the latter are a multiple of the former.
    key_dim, value_dim : elements of a head. conv : tokens that the short convolution in front sees.
    chunk : tokens that are computed as one dense block (64 in flash-linear-attention and transformers).
    whole_gates : of Kimi's rule, forget and output gates are one product each (Ling 3), not two of low rank.
    apart : queries, keys, values and output gate are a product each (OLMo Hybrid), not one together.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv: int = 4
    chunk: int = 64
    whole_gates: bool = False
    apart: bool = False

    @property
    def key_width(self) -> int:
        """Elements of all heads' keys of one token."""
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Elements of all heads' values of one token."""
        return self.value_heads * self.value_dim


class StateSpace(msgspec.Struct, frozen=True):
    """A selective state space: Mamba (Gu and Dao, arXiv:2312.00752) or Mamba-2 (Dao and Gu, arXiv:2405.21060).

    Parameters
    ----------
    inner : channels. state : elements of a channel's state. conv : tokens that the short convolution sees.
    rank : of the step's projection, of the first Mamba. heads, groups : of the second: ``inner / heads`` channels share
        a step, and heads of a group share B and C. chunk : tokens that the second computes as one dense block.
    bias, out_bias, conv_bias : of the projections in and out, and of the convolution.
    gated_norm : the second norms its output with the gate. inner_norms : the first norms steps, B and C (Jamba).
    """

    inner: int
    state: int
    conv: int = 4
    rank: int = 0
    heads: int = 0
    groups: int = 1
    chunk: int = 256
    bias: bool = False
    out_bias: bool = False
    conv_bias: bool = True
    gated_norm: bool = True
    inner_norms: bool = False

    @property
    def conv_width(self) -> int:
        """Channels of Mamba-2's convolution: values, B and C."""
        return self.inner + 2 * self.groups * self.state


class Indexer(msgspec.Struct, frozen=True):
    """DeepSeek-V3.2's indexer: small heads score every earlier token, and attention sees the ``top`` best.

    ``heads``, ``dim`` : of the indexer. pool : tokens whose keys are scored as one, which a gate weights (GLM-5.3), or
    which are compressed (:class:`Compressor`); 0 for each on its own, without a gate.
    """

    heads: int
    dim: int
    top: int
    pool: int = 0


class Compressor(msgspec.Struct, frozen=True):
    """DeepSeek-V4's keys of several tokens as one, beside those of a window: a gate weights each element of them.

    Parameters
    ----------
    chosen : tokens of a key in blocks whose indexer chooses among them; as many before them count as well, by
        projections of their own. all : tokens of a key in blocks that attend to all of them.
    """

    chosen: int
    all: int


class LowRankOutput(msgspec.Struct, frozen=True):
    """A projection out of attention by way of a narrower one for each group of heads (DeepSeek-V4).

    ``groups`` : of heads. rank : elements that each becomes.
    """

    groups: int
    rank: int


class Bridge(msgspec.Struct, frozen=True):
    """One tensor between a tower and its decoder, and the product or norm that it is for.

    Parameters
    ----------
    kind : ``linear``, ``each_patch`` (one of every patch, ahead of their merging), ``raw`` (a matrix that is no
        module), ``norm``, ``plain`` (a norm without a weight) or ``vector`` (one learned token, set behind others).
    name : of the module or tensor.
    n_in, n_out : its widths; equal for a norm. bias : whether it has one. times : rows of it for each token that
        an image becomes.
    """

    kind: str
    name: str
    n_in: int
    n_out: int
    bias: bool = False
    times: int = 1
