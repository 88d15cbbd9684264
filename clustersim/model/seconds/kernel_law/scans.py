"""Chunked scans of linear attention (gated DeltaNet, Kimi delta attention) and of state spaces (Mamba-2).

::

    t        = start / f + (traffic^p + products^p)^(1/p) + chain s / chunk / f * max(1, batch heads / SMs)^0.5
    products = FLOPs / min(share L SMs f, P)

Traffic is inputs, outputs and the states between chunks; products are those of chunks, at a share of what warps issue
(``L``) and never above the peak; the state passes from chunk to chunk, one after the other, whatever else is parallel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.products import norm
from clustersim.model.seconds.kernel_law.sheet import LEGACY_RATE, Sheet


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
    """Columns of one length, or numbers: sequences, tokens of each, heads and their widths.

    Parameters
    ----------
    key_heads, key_width : of queries and keys; of a state space its groups, and its state. scored : heads that have
        scores of their own: all of the values' where each weighs or corrects its keys, else those of the keys.
    chunk : tokens that are one dense block.
    """

    batch: Floats
    seq: Floats
    key_heads: Floats
    key_width: Floats
    value_heads: Floats
    value_width: Floats
    scored: Floats
    chunk: Floats


def scan_seconds(law: ScanLaw, sheet: Sheet, scan: Scan) -> Floats:
    """Seconds of one scan, forward, in a burst."""
    products, chain = scan_arithmetic(law, sheet, scan)
    traffic = scan_bytes(law, scan) / (law.stream * sheet.bandwidth)
    total: Floats = law.start / sheet.clock + norm(law.norm, traffic, products) + chain
    return total


def scan_bytes(law: ScanLaw, scan: Scan) -> Floats:
    """Bytes that a scan moves in 16 bits."""
    channels = 2 * scan.key_heads * scan.key_width + 2 * scan.value_heads * scan.value_width
    states = scan.value_heads * scan.key_width * scan.value_width / scan.chunk
    nbytes: Floats = 2.0 * scan.batch * scan.seq * (law.passes * channels + law.states * states)
    return nbytes


def scan_arithmetic(law: ScanLaw, sheet: Sheet, scan: Scan) -> tuple[Floats, Floats]:
    """Seconds of the products inside chunks, and of what chunks wait for one another."""
    inside = scan.chunk * (scan.scored * scan.key_width + scan.value_heads * scan.value_width)
    handed = scan.value_heads * scan.key_width * scan.value_width
    flops = scan.batch * scan.seq * (2.0 * inside + 4.0 * handed)
    products = flops / np.minimum(law.share * LEGACY_RATE * sheet.sms * sheet.clock, sheet.half_peak)
    crowd = np.sqrt(np.maximum(1.0, scan.batch * scan.value_heads / sheet.sms))
    return products, law.chain * scan.seq / scan.chunk / sheet.clock * crowd
