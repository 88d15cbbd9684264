"""Fused attention, forward: matrix products and exponentials that share an SM.

::

    t       = start / f + compute * waves / x + memory
    compute = (products^p + exps^p)^(1/p) (1 + ramp tile / 128 / s)
    products = FLOPs / (P eta d / (d + narrow)),   exps = weight * scores / (E SMs f)
    waves   = whole ceil(x) + (1 - whole) max(1, x),  x = batch heads ceil(s / tile) / SMs

A score costs one exponential, of which an SM does E = 16 a clock on every generation but Blackwell Ultra's 32, beside 4
d FLOPs, of which each generation does twice as many as the last: on Blackwell (and in 8 bits on Hopper) both take the
same time. A tile is of 128 queries, from Blackwell on of 256. ``ramp`` is of causal masks (tiles on the diagonal are
half empty) or of none. ``memory`` is q, k, v and the output once.
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


@dataclass(frozen=True)
class AttentionLaw:
    """The constants of the formula above.

    Parameters
    ----------
    start : [clocks]. norm : p. level : log of eta. narrow : [elements of a head]. weight : of an exponential.
    ramp_causal, ramp_full : [tokens]. whole : as above. stream : share of the bandwidth. cache : how many times over k
        and v move where they are written to a cache as well.
    """

    start: float
    norm: float
    level: float
    narrow: float
    weight: float
    ramp_causal: float
    ramp_full: float
    whole: float
    stream: float
    cache: float


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


def attention_seconds(law: AttentionLaw, sheet: Sheet, heads: Heads, extra: Floats | float = 0.0) -> Floats:
    """Seconds of isolated fused attention, forward. ``extra`` : bytes that a framework moves besides, a query."""
    compute, memory = attention_parts(law, sheet, heads, extra)
    total: Floats = law.start / sheet.clock + compute + memory
    return total


def attention_parts(
    law: AttentionLaw, sheet: Sheet, heads: Heads, extra: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """Seconds of the arithmetic and of the memory traffic, without the start of the kernel."""
    mean = (heads.width + heads.value_width) / 2
    eta = np.exp(law.level + sheet.level) * mean / (mean + law.narrow)
    products = heads.flops / (sheet.peak * eta)
    exps = law.weight * heads.scores / (sheet.exps * sheet.sms * sheet.clock)
    tile = TILE * np.where(sheet.half_peak / (sheet.sms * sheet.clock) > FULL, 2.0, 1.0)
    ramp = 1.0 + np.where(heads.causal, law.ramp_causal, law.ramp_full) * (tile / TILE) / heads.seq
    tiles = heads.batch * heads.heads * np.ceil(heads.seq / tile) / sheet.sms
    waves = law.whole * np.ceil(tiles) + (1.0 - law.whole) * np.maximum(1.0, tiles)
    compute: Floats = norm(law.norm, products, exps) * ramp * waves / tiles
    kept = heads.kv_heads * np.where(heads.causal, law.cache, 1.0)
    rows = heads.batch * heads.seq
    nbytes = 2.0 * rows * (heads.heads + kept) * (heads.width + heads.value_width) + rows * extra
    return compute, nbytes / (law.stream * sheet.bandwidth)
