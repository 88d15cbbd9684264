"""The routed experts of one layer on one GPU, forward: routing and permutation, two grouped products, the weighted sum.

::

    t = starts start / f + products + passes routed hidden 2 bytes / (stream BW)

``products`` are those of :mod:`~clustersim.model.seconds.kernel_law.products` with an expert a member of the group,
their arithmetic at ``share`` of a plain product's rate: groups have their own schedule, and rows that are not next to
each other. Kernels that are tuned to the shape keep nearly all of it, others half. Experts hold equally many tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.products import ProductLaw, Shapes, norm, product_parts
from clustersim.model.seconds.kernel_law.sheet import Sheet


@dataclass(frozen=True)
class ExpertLaw:
    """``starts`` : of kernels. ``share`` : of a plain product's rate. ``passes`` : over the routed tokens, of
    permuting, activating and summing."""

    starts: float
    share: float
    passes: float


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


def expert_seconds(law: ExpertLaw, products: ProductLaw, sheet: Sheet, layer: Experts) -> Floats:
    """Seconds of the experts of one layer, forward, in a burst."""
    active = np.minimum(layer.experts, layer.routed)
    rows = layer.routed / active
    up = Shapes(rows, layer.inner * (1 + layer.gated), layer.hidden, active, layer.operand)
    down = Shapes(rows, layer.hidden, layer.inner, active, layer.operand)
    grouped = np.zeros_like(rows)
    for shapes in (up, down):
        compute, memory = product_parts(products, sheet, shapes)
        grouped = grouped + norm(products.norm, compute / law.share, memory)
    nbytes = 2.0 * law.passes * layer.routed * layer.hidden
    total: Floats = law.starts * products.start / sheet.clock + grouped + nbytes / (products.stream * sheet.bandwidth)
    return total
