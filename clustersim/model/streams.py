"""Kernels of hyper-connections (Zhu et al., arXiv:2409.19606): a residual of several streams, of which each half of a
block reads one sum, weighted for each token, and to each of which it adds its output, weighted as well.

In Hy4 nothing mixes the streams with each other; in DeepSeek-V4 and GLM-5.3 a doubly stochastic matrix does
(arXiv:2512.24880), which iterations of Sinkhorn and Knopp make of weights of its own, one division of rows or columns
after the other. Weights are made of all streams in fp32, outside autocast, as Hugging Face's code is written, which
launches each operator. Fused, streams are read once for the weights, once for their sum, and once with the half's
output (as that paper fuses them, section 4.3.1). All is bandwidth-bound: a token's product has two columns a stream.
"""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel
from clustersim.model import kernels as K
from clustersim.model.base import TransformerShape

_SMALL = (10, 16)
"""Launches of what makes gates of a product, forward and backward: split, scaled, shifted, squashed; it moves nothing
to speak of."""


_DIVIDED = ("w: w:w w:w", "w:w w:w w:w ww:w w: :w ww:w")
"""Rows or columns of each token's matrix divided by their sums: a sum, what keeps it above zero, the quotient; backward
of the quotient (its divisor's as well, summed), of the sum, and their sum."""


def weights(s: TransformerShape) -> int:
    """Weights of a half, for each token: of its input, of its output, and of what mixes the streams."""
    return (2 + s.streams) * s.streams if s.sinkhorn else 2 * s.streams


def averaged(s: TransformerShape) -> K.Kernels:
    """The mean of all streams, which a head reads that has no weights of its own (GLM-5.3)."""
    share = 1.0 / s.streams
    return (K.memory("streams_mean", elements(s), K.operators(f"s: {share}*:s", f"{share}*s:s :s", 1, 2)),)


def divisions(s: TransformerShape) -> int:
    """How often rows or columns are divided by their sums; the last ones are columns."""
    return 2 * s.sinkhorn - 1


def elements(s: TransformerShape) -> float:
    """Of all streams of a sample."""
    return float(s.seq_len * s.d_model * s.streams)


def spread(s: TransformerShape) -> K.Kernels:
    """The embedding in every stream."""
    if not s.streams:
        return ()
    share = 1.0 / s.streams
    return (K.memory("streams_spread", elements(s), K.operators(f"{share}*s: :s", f"s: {share}*:s", 1, 1)),)


_ELEMENTWISE = ("h:h hh:h h:", ":h hh:h hh:h hh:h hh:h")
"""A sigmoid, what it scales, and the mean of all streams; backward of each, and sums of the norm's gradients."""


def _weighted_elements(s: TransformerShape, *, last: bool) -> K.Kernels:
    """The input of a half by a weight for each element of all streams, from a product of low rank behind a norm; with
    the weights of its output, which the ``last`` does not need (Qwen4-Exp)."""
    t = s.seq_len
    wide = s.d_model * s.streams
    every = elements(s)
    injected = (
        K.sharing_input(K.linear("streams_inject", t, wide, s.streams)),
        K.memory("inject_activation", float(t * s.streams), K.Passes(6, 6, 3, 3), saved=1),
    )
    return (
        K.norm(s, "norm_streams", every),
        K.linear("streams_down", t, wide, s.streams_rank),
        K.memory("rank_activation", float(t * s.streams_rank), K.Passes(4, 5, 2, 2), saved=1),
        K.linear("streams_up", t, s.streams_rank, wide),
        K.memory("streams_gates", every, K.operators(*_ELEMENTWISE, 3, 6), saved=1),
        *(() if last else injected),
    )


def gathered(s: TransformerShape, *, last: bool = False) -> K.Kernels:
    """The weights of a half (of the head, which is the ``last``, those of its input alone), and its input."""
    if s.streams_rank:
        return _weighted_elements(s, last=last)
    share = 1.0 / s.streams
    every = elements(s)
    flops = 2.0 * every * (s.streams if last else weights(s))
    if s.fuses:
        product = K.Passes(1, 3, 1, 2)
        summed = K.Passes(1 + share, 3 + share, 1, 1)
    else:
        # Cast, product, and the norm's mean square; backward of product, of the norm (as RMSNorm's), of both together.
        # Where streams are mixed, the norm scales what the product reads.
        behind = "w: :w " + ":w w:w w:w ww:w " + "ww:w w~s"
        scaled = (" w:w", " ww:w w:w ww:w") if s.sinkhorn else ("", "")
        product = K.operators("s~w w: w:w w:" + scaled[0], behind + scaled[1], 6 + _SMALL[0], 12 + _SMALL[1])
        # Gradients of streams meet: of their weights, of their sum, and where a half follows of what stays of them.
        sums = "ss:s" if last else "ss:s ss:s"
        back = f"{share}*s~w s:w {share}*w: w: {share}*w: :w w~s {sums}"
        summed = K.operators(f"s:w w: {share}*:w {share}*w~s", back, 3, 6)
    return (
        replace(K.memory("streams_weights", every, product, saved=1), flops=flops, backward_flops=2 * flops),
        *(() if last else mixing(s)),
        K.memory("streams_in", every, summed, saved=0 if s.fuses else 1),
    )


def mixing(s: TransformerShape) -> K.Kernels:
    """The matrix that mixes a token's streams: a softmax, and divisions of columns and rows in turn."""
    if not s.sinkhorn:
        return ()
    times = divisions(s)
    passes = K.Passes(3, 3, 1, 1)
    if not s.fuses:
        ahead, back = (
            "w:w w:w w:w w:w" + times * f" {_DIVIDED[0]}",
            "ww:w w:w w:w" + times * f" {_DIVIDED[1]}",
        )
        passes = K.operators(ahead, back, 4 + 3 * times, 6 + 7 * times)
    return (K.memory("streams_matrix", float(s.seq_len * s.streams**2), passes, saved=0 if s.fuses else 1),)


def returned(s: TransformerShape, half: str) -> K.Kernels:
    """A half's output, weighted for each stream, and the sum with what it was."""
    share = 1.0 / s.streams
    passes = K.Passes(2 + share, 2 + 2 * share, 1, 2)
    flops = 2.0 * elements(s) * s.streams if s.sinkhorn else 0.0
    if s.streams_rank and not s.fuses:
        passes = K.operators(f"{share}*h: :h hs:s", f"s:s s: {share}*:s s:s s:", 2, 5)
    elif s.sinkhorn and not s.fuses:
        # The output's product with its weights, the streams' with their matrix, and the sum; backward of each.
        ahead = f"{share}*s: :s s:s ss:s"
        back = f"{share}*s: s:s s: s:s {share}*:s s: s: s:s"
        passes = K.operators(ahead, back, 5, 9)
    elif not s.fuses:
        ahead = f"{share}*h~w s~w {share}*w: :w ww:w w~s"
        back = f"s~w w~s w:w {share}*w: w: w:w w: {share}*:w {share}*w~h"
        passes = K.operators(ahead, back, 5, 8)
    kernel = K.memory(f"streams_out_{half}", elements(s), passes, saved=share)
    return (replace(kernel, flops=flops, backward_flops=2 * flops),)


def is_of_streams(kernel: Kernel) -> bool:
    """Whether it is one of these."""
    return kernel.name.startswith("streams_")
