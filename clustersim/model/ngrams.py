"""Features of n-grams that some blocks add to every stream of their residual: Qwen4-Exp's per-layer embedding
(``modeling_qwen4_exp.py`` in Hugging Face's transformers).

Heads hash the last tokens to rows of a table, each with a number of rows of its own: the next primes, so that no two
heads collide alike. A row's projections are a key for each stream, which gates, and one value; what is gated goes
through a short convolution.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from math import ceil, isqrt

from clustersim.core.model import Tensor
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape
from clustersim.model.mixers import short_convolution
from clustersim.model.sizes import Ngrams
from clustersim.model.tensor_parts import Tensors, linear

_LOOKED_UP = K.operators("s:s", "s:s s", 1, 5)
_HASHED = K.Passes(160, 0, 40, 0)
"""Of 64-bit ids: shifts that stop at a document's end, products, exclusive ors and remainders."""
_GATED = K.operators("hh:h h: :h", "h: h:h h: h:h h:h", 12, 16)
"""Keys with queries summed to one gate a stream, and what it scales; the gate's own operators move next to nothing."""


@lru_cache(maxsize=64)
def rows(sizes: Ngrams) -> int:
    """Rows of a block's table, all heads together."""
    heads = sizes.all_heads
    ahead = sizes.place * heads
    used = sum(islice(_primes(sizes.base), ahead, ahead + heads))
    return ceil(used / sizes.divisor) * sizes.divisor


def _primes(least: int) -> Iterator[int]:
    number = max(2, least)
    while True:
        if all(number % divisor for divisor in range(2, isqrt(number) + 1)):
            yield number
        number += 1


def ngram_tensors(s: TransformerShape, name: str) -> Tensors:
    """Of one block; none where it has no features of n-grams."""
    x = s.ngrams
    if x is None:
        return ()
    wide = s.d_model * s.streams
    each = x.width // x.all_heads
    return (
        Tensor(f"{name}.ple_embedding.ngram_embedding.weight", rows(x) * each, cut="column", width=each),
        *linear(f"{name}.key_proj", x.width, wide),
        *linear(f"{name}.value_proj", x.width, s.d_model),
        *(tensor for norm in ("key", "query", "conv") for tensor in linear(f"{name}.norm_{norm}", 1, wide)),
        *linear(f"{name}.conv1d", x.conv, wide),
    )


def ngram_kernels(s: TransformerShape) -> K.Kernels:
    """From the tokens to the sum with every stream."""
    x = s.ngrams
    if x is None:
        return ()
    t = s.seq_len
    wide = s.d_model * s.streams
    elements = float(t * wide)
    return (
        K.memory("ngram_ids", float(t * x.all_heads), _HASHED),
        K.memory("gather", float(t * x.width), _LOOKED_UP),
        K.linear("ngram_keys", t, x.width, wide),
        K.norm(s, "norm_ngram_keys", elements),
        K.sharing_input(K.linear("ngram_values", t, x.width, s.d_model)),
        K.norm(s, "norm_ngram_queries", elements),
        K.memory("ngram_gate", elements, _GATED, saved=2),
        K.norm(s, "norm_ngram_conv", elements),
        short_convolution(t, wide, x.conv),
        K.memory("ngram_sum", elements, K.operators("hh:h sh:s", "s:s", 2, 1)),
    )
