"""Chunked scans of linear attention (gated DeltaNet, Kimi delta attention).

::

    t = starts start / f + (traffic^p + products^p)^(1/p) + chain s / 64 / f * max(1, batch heads / SMs)^0.5

Traffic is inputs, outputs and the states between chunks; products are of chunks of 64 tokens; the state passes from
chunk to chunk, one after the other, whatever else is parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.products import norm
from clustersim.model.seconds.kernel_law.sheet import LEGACY_RATE, Sheet

CHUNK = 64.0
"""Tokens of a chunk, in flash-linear-attention."""


@dataclass(frozen=True)
class ScanLaw:
    """The constants of one family of kernels.

    Parameters
    ----------
    start : [clocks], of all its kernels. passes : times inputs and outputs move. states : times the states between
        chunks do. share : of :data:`LEGACY_RATE` that its products reach. chain : [clocks] a chunk.
    norm : p. stream : as elsewhere.
    """

    start: float
    passes: float
    states: float
    share: float
    chain: float
    norm: float
    stream: float


@dataclass(frozen=True)
class Scan:
    """Columns of one length, or numbers: sequences, tokens of each, heads and their widths."""

    batch: Floats
    seq: Floats
    key_heads: Floats
    key_width: Floats
    value_heads: Floats
    value_width: Floats


def scan_seconds(law: ScanLaw, sheet: Sheet, scan: Scan) -> Floats:
    """Seconds of one scan, forward, in a burst."""
    tokens = scan.batch * scan.seq
    channels = 2 * scan.key_heads * scan.key_width + 2 * scan.value_heads * scan.value_width
    state = scan.value_heads * scan.key_width * scan.value_width
    nbytes = 2.0 * tokens * (law.passes * channels + law.states * state / CHUNK)
    traffic = nbytes / (law.stream * sheet.bandwidth)
    inside = CHUNK * (scan.key_width + scan.value_width)
    flops = tokens * scan.value_heads * (2.0 * inside + 4.0 * scan.key_width * scan.value_width)
    products = flops / (law.share * LEGACY_RATE * sheet.sms * sheet.clock)
    crowd = np.sqrt(np.maximum(1.0, scan.batch * scan.value_heads / sheet.sms))
    chain = law.chain * scan.seq / CHUNK / sheet.clock * crowd
    total: Floats = law.start / sheet.clock + norm(law.norm, traffic, products) + chain
    return total
