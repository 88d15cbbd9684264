"""Chunked scans in a step: the kernel law's shape at the level of the device's sustained products.

A pass forward takes what :mod:`clustersim.model.seconds.kernel_law.scans` says of an isolated one, its traffic at the
rate of a copy; backward as much more as it has more FLOPs. Warps issue their own products in these kernels on every
generation, so that one law is of all devices, those before Ampere and AMD's too.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np

from clustersim.core.device import Device
from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Kernel
from clustersim.model.seconds.attention import half_of
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.gemm import sustained_level
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.products import norm
from clustersim.model.seconds.kernel_law.scans import Scan, scan_arithmetic, scan_bytes
from clustersim.model.seconds.kernel_law.sheet import Sheet

FAMILIES: Mapping[str, str] = {"gated_delta_rule": "gdn", "kimi_delta_rule": "kda", "chunk_scan": "mamba2"}
"""Name of a kernel -> its law: flash-linear-attention's Triton kernels, and mamba_ssm's."""
SHARED_SCORES = frozenset({"mamba2"})
"""Laws of kernels that work out one set of scores for all heads of a group."""


def scan_parts(where: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """Seconds of arithmetic and of memory traffic of a scan, without the kernel floor; the longer of the two has in it
    what nothing hides.

    Raises :class:`ModelError` for a kernel that is none of :data:`FAMILIES`.
    """
    if kernel.name not in FAMILIES:
        raise ModelError(f"scan {kernel.name!r} follows no law; {nearest(kernel.name, FAMILIES)}")
    family = FAMILIES[kernel.name]
    device = where.device
    laws = kernel_laws()
    law = laws.scans[family]
    scan = scan_of(kernel, batch, shared=family in SHARED_SCORES)
    half = where.with_dtype(half_of(device))
    # In 32 bits the same arithmetic is done by other units, on elements of twice the size.
    slower = max(1.0, device.peak[device.runs_as(half.dtype)] / device.peak[device.runs_as(where.dtype)])
    level = sustained_level(half) * slower
    again = kernel.backward_flops / kernel.flops if backward else 1.0
    products, chain = (float(part) * level * again for part in scan_arithmetic(law, _sheet(device), scan))
    copied = laws.stream.stream / law.stream * where.element_bytes / 2.0
    memory = float(scan_bytes(law, scan)) * copied * again / device.stream_rate()
    both = float(norm(law.norm, np.asarray(memory), np.asarray(products))) + chain
    return (both, memory) if products + chain >= memory else (products + chain, both)


def scan_of(kernel: Kernel, batch: float, *, shared: bool) -> Scan:
    """What the law knows a kernel by: as many sequences as its inputs and outputs say. ``shared`` : heads of a group
    have their scores in common."""
    keys = max(1.0, kernel.heads / kernel.groups)
    channels = 2.0 * (keys * kernel.k + kernel.heads * kernel.n)
    sequences = kernel.nbytes * batch / (channels * kernel.seq)
    scored = keys if shared else kernel.heads
    numbers = (sequences, kernel.seq, keys, kernel.k, kernel.heads, kernel.n, scored, kernel.m)
    return Scan(*(np.asarray(float(number)) for number in numbers))


@lru_cache(maxsize=64)
def _sheet(device: Device) -> Sheet:
    return sheet_of(device, half_of(device))
