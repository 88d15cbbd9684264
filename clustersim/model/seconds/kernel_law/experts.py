"""The routed experts of one layer on one GPU, forward: routing and permutation, two grouped products, the weighted sum.

::

    t      = starts start / f + products + moved (1 / (stream BW) + crawl / (SMs f))
    moved  = 2 bytes routed (passes hidden + inners inner (1 + gated))
    share' = share (1 + F / 8192)^(products' thin - thin)

``products`` are those of :mod:`~clustersim.model.seconds.kernel_law.products` with an expert a member of the group,
their arithmetic at ``share'`` of a plain product's rate, their traffic beside it to the ``overlap``-norm: groups have
their own schedule, and rows that are not next to each other. Kernels that are tuned to the shape keep nearly
all of it, others half. What permutes, activates and sums rows moves them through the SMs, a byte in ``crawl`` clocks:
the faster a GPU's memory, the less of it these kernels use. Experts hold equally many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.products import EVERY, KNEE, ProductLaw, Shapes, Tilings, norm, product_parts
from clustersim.model.seconds.kernel_law.sheet import Sheet


@dataclass(frozen=True)
class ExpertLaw:
    """The constants of the formula above.

    Parameters
    ----------
    starts : of kernels. share : of a plain product's rate, where an SM does few FLOPs a clock. thin : how much less of
        it the more an SM does, in place of a plain product's. passes : over the routed tokens, to write them expert by
        expert and to read them for their sum. inners : over what the first product writes, to read it and to write the
        half that the second takes. crawl : [clocks] of an SM for each byte of those. overlap : p
        of a product's arithmetic and traffic.
    """

    starts: float
    share: float
    thin: float
    passes: float
    inners: float
    crawl: float
    overlap: float


@dataclass(frozen=True)
class Experts:
    """Experts of one rank; columns of one length, or numbers.

    Parameters
    ----------
    routed : tokens that reach this rank's experts, one counted for each of its choices. experts : on this rank.
    hidden, inner : widths of the model and of one expert on this rank. gated : 1 where an expert has three matrices.
    operand : bytes of an element that a product reads.
    """

    routed: Floats
    experts: Floats
    hidden: Floats
    inner: Floats
    gated: Floats
    operand: float


def expert_seconds(
    law: ExpertLaw, products: ProductLaw, sheet: Sheet, layer: Experts, tilings: Sequence[Tilings] = (EVERY, EVERY)
) -> Floats:
    """Seconds of the experts of one layer, forward, in a burst; ``products`` : the law of all arithmetics together;
    ``tilings`` : of which each of both products has the best."""
    share = grouped_share(law, products, sheet)
    grouped = np.zeros_like(layer.routed)
    for shapes, tiles in zip(grouped_products(layer), tilings, strict=True):
        compute, memory = product_parts(products, sheet, shapes, tiles)
        grouped = grouped + norm(law.overlap, compute / share, memory)
    moved = law.passes * layer.hidden + law.inners * layer.inner * (1 + layer.gated)
    nbytes = 2.0 * layer.routed * moved
    byte_seconds = 1.0 / (products.stream * sheet.bandwidth) + law.crawl / (sheet.sms * sheet.clock)
    total: Floats = law.starts * products.start / sheet.clock + grouped + nbytes * byte_seconds
    return total


def grouped_share(law: ExpertLaw, products: ProductLaw, sheet: Sheet) -> Floats:
    """``share'`` of the formula above."""
    share: Floats = law.share * (1.0 + sheet.flop_a_clock / KNEE) ** (products.thin - law.thin)
    return share


def grouped_products(layer: Experts) -> tuple[Shapes, Shapes]:
    """What the experts multiply: up, an expert's one or two matrices at once, and down."""
    active = np.minimum(layer.experts, layer.routed)
    rows = layer.routed / active
    up = Shapes(rows, layer.inner * (1 + layer.gated), layer.hidden, active, layer.operand)
    return up, Shapes(rows, layer.hidden, layer.inner, active, layer.operand)
