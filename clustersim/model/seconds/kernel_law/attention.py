"""Fused attention: matrix products and a softmax that share an SM.

::

    t        = start / f + compute * waves / x + memory
    compute  = (products^p + softmax^p)^(1/p) (1 + ramp tile / 128 / s)
    products = FLOPs / (P eta d / (d + narrow))
    softmax  = scores (weight / E + other / L) / (SMs f)
    waves    = whole ceil(x) + (1 - whole) max(1, x),  x = batch heads ceil(s / tile) / SMs

A score costs one exponential, of which an SM does E = 16 a clock on every generation but Blackwell Ultra's 32, and some
arithmetic in 32 bits (scale, maximum, sum, conversion), of which an SM does L = 64 or 128 a clock, beside 4 d FLOPs, of
which each generation does twice as many as the last: on Blackwell both take the same time. Kernels since Hopper have
one group of warps issue products while others do the softmax, and overlap them: the longer one counts the more (p =
``norm``). A warp that issues its own products has them one after the other but for its neighbours (``issued``). In
backward the five products of a score (three as wide as keys, two as values) wait for one another and for shared
memory, and each exponential is made once again (Dao, arXiv:2307.08691, algorithm 2): its law has constants of its own.

A tile is of 128 queries, from Blackwell on of 256. ``ramp`` is of causal masks (tiles on the diagonal are half empty)
or of none. ``memory`` is q, k, v and the output once; in backward they and their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.products import norm
from clustersim.model.seconds.kernel_law.sheet import Sheet

TILE = 128.0
"""Queries that one thread block works on, up to :data:`FULL`."""
FULL = 4096.0
"""FLOP a clock and SM in 16 bits (Hopper's) up to which a tile is so large: FlashAttention 2 and 3 have 128 queries in
one, FlashAttention 4 and cuDNN on Blackwell two tiles of 128 at once."""
FULLEST = 0.95
"""Of the peak, what products reach at most, whatever a level adds."""


@dataclass(frozen=True)
class AttentionLaw:
    """The constants of the formula above.

    Parameters
    ----------
    start : [clocks]. norm, issued : p. level : log of eta. narrow : [elements of a head]. weight : of an exponential.
    other : operations in 32 bits of a score. ramp_causal, ramp_full : [tokens]. whole : as above. stream : share of the
        bandwidth.
    """

    start: float
    norm: float
    issued: float
    level: float
    narrow: float
    weight: float
    other: float
    ramp_causal: float
    ramp_full: float
    whole: float
    stream: float


@dataclass(frozen=True)
class Heads:
    """Attention over sequences; columns of one length, or numbers.

    Parameters
    ----------
    batch, seq, heads, kv_heads : how many. width, value_width : of a head, in queries and keys, and in values.
    causal : whether the mask is.
    """

    batch: Floats
    seq: Floats
    heads: Floats
    kv_heads: Floats
    width: Floats
    value_width: Floats
    causal: Floats

    @property
    def scores(self) -> Floats:
        """Scores that are worked out: half of the square under a causal mask."""
        square: Floats = self.batch * self.heads * self.seq**2
        return square * np.where(self.causal, 0.5, 1.0)

    @property
    def flops(self) -> Floats:
        """FLOPs of both products."""
        return 2.0 * self.scores * (self.width + self.value_width)

    @property
    def backward_flops(self) -> Floats:
        """FLOPs of backward's five products."""
        return 2.0 * self.scores * (3.0 * self.width + 2.0 * self.value_width)


def attention_seconds(
    law: AttentionLaw, sheet: Sheet, heads: Heads, extra: Floats | float = 0.0, *, backward: bool = False
) -> Floats:
    """Seconds of isolated fused attention. ``extra`` : bytes that a framework moves besides, a query."""
    compute, memory = attention_parts(law, sheet, heads, extra, backward=backward)
    total: Floats = law.start / sheet.clock + compute + memory
    return total


def attention_parts(
    law: AttentionLaw, sheet: Sheet, heads: Heads, extra: Floats | float = 0.0, *, backward: bool = False
) -> tuple[Floats, Floats]:
    """Seconds of the arithmetic and of the memory traffic, without the start of the kernel."""
    mean = (heads.width + heads.value_width) / 2
    eta = np.minimum(np.exp(law.level + sheet.level), FULLEST) * mean / (mean + law.narrow)
    products = (heads.backward_flops if backward else heads.flops) / (sheet.peak * eta)
    score = law.weight / sheet.exps + law.other / sheet.lanes
    softmax = heads.scores * score / (sheet.sms * sheet.clock)
    tile = TILE * np.where(sheet.half_peak / (sheet.sms * sheet.clock) > FULL, 2.0, 1.0)
    ramp = 1.0 + np.where(heads.causal, law.ramp_causal, law.ramp_full) * (tile / TILE) / heads.seq
    tiles = heads.batch * heads.heads * np.ceil(heads.seq / tile) / sheet.sms
    waves = law.whole * np.ceil(tiles) + (1.0 - law.whole) * np.maximum(1.0, tiles)
    overlap = np.where(sheet.persistent > 0, law.norm, law.issued)
    compute: Floats = norm(overlap, products, softmax) * ramp * waves / tiles
    rows = heads.batch * heads.seq
    nbytes = 2.0 * rows * (heads.heads + heads.kv_heads) * (heads.width + heads.value_width)
    return compute, (nbytes * (2.0 if backward else 1.0) + rows * extra) / (law.stream * sheet.bandwidth)
