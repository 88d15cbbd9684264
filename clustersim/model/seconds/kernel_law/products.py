"""Matrix products, single and grouped, from Ampere to Blackwell.

::

    t       = start / f + (compute^p + memory^p)^(1/p)
    compute = min over tiles (tm, tn) and split-k s of
              waves (2 tm tn (k / s) load / (F eta) + edge) / f / power   + [s > 1] 8 s m n / (reduce BW)
              [rescaled] per step of k: + 2 tm tn / 128 / 128 / f
    eta     = exp(level) (1 + F / 8192)^-thin
    load    = (1 + (feed (F / 4096)^growth 128 (1/tm + 1/tn))^q)^(1/q)
    edge    = store tm tn / 128^2 + [block] block_round
    waves   = whole ceil(x) + (1 - whole) max(1, x),  x = tiles s / SMs
    power   = (1 + FLOPs / (P settle))^-(fall (P / TDP)^steep)
    memory  = (reads + again + writes) / (stream BW)

F: FLOP a clock and SM in the dtype; eta: of them, what the pipeline keeps, the less the more they are, in all dtypes
alike (1,024 on an RTX in 16 bits, 32,768 on Blackwell in 4); f: clock; P: peak; BW: bandwidth of the
memory. Operands stream from the L2 while the tensor cores work on the last ones (``load``: the q-norm of both). Partial
sums of split products are written and read in fp32. A burst of large products meets the power limit, the sooner the
more FLOP/s a watt the sheet promises. Constants are one set for all GPUs, and one level a generation and dtype.
A tile that is done is written through the SM before the next has its place (``store``).
Kernels of Hopper and of Blackwell's data-centre parts are persistent: their rounds overlap, and what is left of the
last is shared out (``whole``). Before and beside them each tile is a thread block of its own (``block_whole``,
``block_round``). Kernels that go through tiles line by line, as CUTLASS's do unless told otherwise, read the operand
along the line again for each round (``again``, :func:`rereads`); cuBLAS and DeepGEMM go through squares, and do not.
In fp8 blockwise each 128 of k end in a product with their scales and a sum, in fp32, for each element; kernels that are
not persistent do it on the warps that issue the products (``rescaled``), at an SM's 128 fp32 operations a clock.
``tests/kernel_fit.py`` fits the constants.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.sheet import BLOCK, Sheet

TILES = np.array(
    [
        (256, 256),
        (256, 192),
        (192, 256),
        (256, 128),
        (128, 256),
        (192, 128),
        (128, 192),
        (128, 128),
        (256, 64),
        (64, 256),
        (128, 64),
        (64, 128),
        (64, 64),
        (64, 32),
        (32, 64),
        (32, 32),
    ],
    dtype=float,
)
"""Output tiles (rows, columns) of CUTLASS kernels."""
SPLITS = np.array([1, 2, 3, 4, 6, 8, 12, 16], dtype=float)
"""Into how many parts kernels divide k."""
LEAST_K = 128.0
"""The least part of k that a split leaves."""

KNEE = 8192.0
"""FLOP a clock and SM (Blackwell's in 16 bits) from which tensor cores outrun what an SM can bring them."""
TILE = 128.0
"""Rows and columns of the tile that costs of feeding, of writing and of reading again are told by."""
FP32_A_CLOCK = 128.0
"""Multiply-adds in fp32 a clock and SM since Ampere's GA10x (CUDA programming guide, arithmetic throughput)."""
KEPT = 0.5
"""Share of the L2 that holds one operand: the other passes through it too. A round number; 0.4 to 0.8 where fitted."""


@dataclass(frozen=True)
class Tilings:
    """Tiles of ``rows`` x ``columns`` and into how many parts they have k ``split``; the last axis has one each."""

    rows: Floats
    columns: Floats
    split: Floats


EVERY = Tilings(np.repeat(TILES[:, 0], len(SPLITS)), np.repeat(TILES[:, 1], len(SPLITS)), np.tile(SPLITS, len(TILES)))
"""All of :data:`TILES`, each with all of :data:`SPLITS`."""


@dataclass(frozen=True)
class ProductLaw:
    """The constants of the formula above.

    Parameters
    ----------
    start : [clocks], of a kernel. store : [clocks], to write a tile of 128 x 128. norm, load_norm : p and q. level,
    thin : of eta. feed, growth : of ``load``. whole, reduce, stream : as above. settle : [s]; fall, steep : of
    ``power``. block_whole : as whole, and block_round : [clocks] of each round, where each tile is a thread block.
    """

    start: float
    store: float
    norm: float
    load_norm: float
    level: float
    thin: float
    feed: float
    growth: float
    whole: float
    block_whole: float
    block_round: float
    reduce: float
    stream: float
    settle: float
    fall: float
    steep: float


@dataclass(frozen=True)
class Shapes:
    """Products (m x k)(k x n), ``count`` of each in one launch; columns of one length, or numbers.

    ``operand`` : bytes of an element that is read. ``written`` : of one that is written. ``lines`` : 1 where the kernel
    goes through its tiles line by line, 0 where by squares.
    """

    m: Floats
    n: Floats
    k: Floats
    count: Floats
    operand: float
    written: float = 2.0
    lines: Floats | float = 0.0

    @property
    def flops(self) -> Floats:
        """FLOPs of each row."""
        return 2.0 * self.count * self.m * self.n * self.k


def product_seconds(law: ProductLaw, sheet: Sheet, shapes: Shapes, tilings: Tilings = EVERY) -> Floats:
    """Seconds of isolated products in a burst, one number a row, by the best of ``tilings``."""
    parts = product_parts(law, sheet, shapes, tilings)
    return law.start / sheet.clock + norm(law.norm, *parts)


def product_parts(law: ProductLaw, sheet: Sheet, shapes: Shapes, tilings: Tilings = EVERY) -> tuple[Floats, Floats]:
    """Seconds of the arithmetic and of the memory traffic of products, without the start of the kernel."""
    reads = shapes.operand * (shapes.m * shapes.k + shapes.k * shapes.n) + shapes.lines * rereads(sheet, shapes)
    writes = shapes.written * shapes.m * shapes.n
    memory = shapes.count * (reads + writes) / (law.stream * sheet.bandwidth)
    compute = arithmetic(tile_costs(law, sheet, tilings), shapes)
    return compute / power(law, sheet, shapes.flops), memory


def rereads(sheet: Sheet, shapes: Shapes) -> Floats:
    """Bytes of operands that a product reads again where tiles of 128 x 128 follow each other along its shorter side.

    A round spans that side, or as much of it as there are SMs, and reads all of its rows but those that the L2 kept.
    """
    short = np.ceil(np.minimum(shapes.m, shapes.n) / TILE)
    rounds = np.ceil(shapes.m / TILE) * np.ceil(shapes.n / TILE) / sheet.sms
    spanned = np.minimum(short, sheet.sms) + np.maximum(1.0, sheet.sms / short)
    row = shapes.k * shapes.operand
    kept = np.minimum(1.0, KEPT * sheet.l2 / (row * np.minimum(shapes.m, shapes.n)))
    again: Floats = np.maximum(0.0, rounds * spanned * TILE - shapes.m - shapes.n) * row * (1.0 - kept)
    return again


@dataclass(frozen=True)
class TileCosts:
    """What tiles and splits cost on a GPU; the last axis is tiles x splits.

    Parameters
    ----------
    per_k : seconds of a round of tiles for each step along k. per_round : seconds besides. per_sum : seconds for each
        element of a result, of partial sums. sms, whole : how many tiles a round has, and how whole it is. tilings :
        whose costs these are.
    """

    per_k: Floats
    per_round: Floats
    per_sum: Floats
    sms: Floats
    whole: Floats
    tilings: Tilings


def tile_costs(law: ProductLaw, sheet: Sheet, tilings: Tilings = EVERY) -> TileCosts:
    """Costs of every tile and split at full clocks."""
    flop, clock, bandwidth = (_column(value) for value in (sheet.flop_a_clock, sheet.clock, sheet.bandwidth))
    edges = TILE * (1.0 / tilings.rows + 1.0 / tilings.columns)
    feed = law.feed * (flop / 4096.0) ** law.growth * edges
    load = norm(law.load_norm, np.ones_like(feed), feed)
    eta = np.exp(law.level + _column(sheet.level)) * (1.0 + flop / KNEE) ** -law.thin
    elements = tilings.rows * tilings.columns
    rescales = _column(sheet.rescaled) * 2.0 / (BLOCK * FP32_A_CLOCK)
    per_k = elements * (2.0 * load / (flop * eta) + rescales) / (tilings.split * clock)
    sums = np.where(tilings.split > 1, 8.0 * tilings.split, 0.0) / (law.reduce * bandwidth)
    persistent = _column(sheet.persistent)
    whole = persistent * law.whole + (1.0 - persistent) * law.block_whole
    stored = law.store * elements / TILE**2
    per_round = (stored + (1.0 - persistent) * law.block_round) / clock
    return TileCosts(per_k, per_round, sums, _column(sheet.sms), whole, tilings)


def arithmetic(costs: TileCosts, shapes: Shapes) -> Floats:
    """Seconds of the arithmetic of products by the best tile and split."""
    best: Floats = by_tiling(costs, shapes).min(axis=-1)
    return best


def by_tiling(costs: TileCosts, shapes: Shapes) -> Floats:
    """Seconds of the arithmetic by each tile and split, infinite where k is too short for it."""
    m, n, k, count = (_column(value) for value in (shapes.m, shapes.n, shapes.k, shapes.count))
    rows, columns, split = costs.tilings.rows, costs.tilings.columns, costs.tilings.split
    tiles = count * np.ceil(m / rows) * np.ceil(n / columns) * split / costs.sms
    waves = costs.whole * np.ceil(tiles) + (1.0 - costs.whole) * np.maximum(1.0, tiles)
    seconds = waves * (costs.per_k * k + costs.per_round) + costs.per_sum * (count * m * n)
    possible: Floats = np.where((split == 1) | (k >= LEAST_K * split), seconds, np.inf)
    return possible


def power(law: ProductLaw, sheet: Sheet, flops: Floats) -> Floats:
    """What the power limit leaves of the clocks in a burst of so many FLOPs."""
    fall = law.fall * sheet.density**law.steep
    left: Floats = (1.0 + flops / (sheet.peak * law.settle)) ** -fall
    return left


def norm(p: Floats | float, *terms: Floats) -> Floats:
    """``(a^p + b^p ...)^(1/p)``: terms that overlap, wholly where p is large, not at all where it is 1."""
    total: Floats = sum(term**p for term in terms) ** (1.0 / p)
    return total


def _column(value: Floats) -> npt.NDArray[np.float64]:
    return np.asarray(value, dtype=float)[..., None]
