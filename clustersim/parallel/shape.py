"""A model's sizes as plain numbers: what must divide by the degrees of parallelism."""

from __future__ import annotations

import msgspec


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of a transformer; 0 is "has none" (an image model has no vocabulary, a dense one no experts).

    Parameters
    ----------
    layers : blocks. seq_len : tokens of a sample. hidden, vocab : width, and tokens of the vocabulary before padding.
    heads, kv_heads, head_dim : query heads, key-value heads, and the width of each.
    ffn : width of the dense MLP. experts, top_k : experts of a layer, and how many of them each token visits.
    moe_ffn, shared_ffn : width of a routed expert, and of the shared experts together.
    causal : a query sees only earlier keys, so that halves of the sequence cost differently.
    """

    layers: int
    seq_len: int = 0
    hidden: int = 0
    vocab: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    experts: int = 0
    top_k: int = 0
    moe_ffn: int = 0
    shared_ffn: int = 0
    causal: bool = True


def padded_vocab(vocab: int, divisible_by: int, tp: int) -> int:
    """Rows of the embedding: the vocabulary, up to a multiple of ``divisible_by * tp`` (Megatron-LM
    training/tokenizer ``vocab_size_with_padding``).

    >>> padded_vocab(50257, 128, 8)
    51200
    """
    step = divisible_by * tp
    return -(-vocab // step) * step
