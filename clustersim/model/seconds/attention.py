"""Fused attention in a step: by the kernel law, or, where that has nothing, by the charts of flash kernels.

Since Ampere a pass takes what :mod:`clustersim.model.seconds.kernel_law.attention` says of an isolated one, at the
level of the device's sustained products (:func:`attention_level`). The law is that of kernels that steps run: cuDNN
from 9.18 on, which containers of 2026 have, and FlashAttention 2 to 4 (tests/data/nvidia_attention.csv: GB200, GB300
and H200 by NVIDIA, B200, GB300 and H100 by FlashAttention's authors). cuDNN 9.10 of 2025 was a quarter slower on B200
at 4,096 tokens, and a tenth at 16,384. FlashAttention 4 takes cuDNN's time, which it does to 7 % from 4,096 tokens on
(pull request 2605 of Dao-AILab/flash-attention, heads of 64 on a GB300; of 1,024 tokens a quarter longer).

FlashAttention 1 and 2, Triton's and the memory-efficient kernel have each warp issue its own products, and gain nothing
from later tensor cores, nor do they meet a power limit of 700 W: FlashAttention-2's charts, forward and backward, are
met to 8 % on H100 and to 13 % on A100 (0 and 9 % in the median with heads of 64).

A window, or a document of a packed sample, is to the kernel a shorter sequence. Values are as wide as keys: with heads
of 192 and values of 128 the exponentials are a sixth too few.

Before Ampere and on AMD's the rate is ``E = Emax s / (s + s0)`` as charted for forward and backward together, where
forward runs at 1.2 E and backward, with 2.5 times the arithmetic, at 0.94 E. AMD's own kernels on MI300X have 1.17 and
0.945 (medians of 60 shapes, tests/data/amd_attention.csv); AOTriton's backward is twice as slow beside its forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple
from functools import lru_cache

import numpy as np

from clustersim.core.device import Device, FlashRate
from clustersim.core.model import Kernel
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.gemm import sustained_level
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.attention import Heads
from clustersim.model.seconds.kernel_law.attention import attention_parts as law_parts
from clustersim.model.seconds.kernel_law.sheet import Sheet, legacy

WARP_ISSUED = frozenset({"fa1", "triton", "fa2", "efficient"})
"""Kernels whose warps issue their own products."""
HELD = 0.9
"""Of what the power limit makes of products, what it makes of kernels that do not fill tensor cores: nothing on an H100
of 700 W, whose products take 1.11 times a burst's and whose charts of FlashAttention-2 are met without; but boards of
350 to 500 W, whose products take 1.3 to 1.6 times a burst's, hold them as well."""
FIRST = frozenset({"fa1", "triton"})
"""Of those, the first generation, whose rate with heads of 64 is that with heads of :data:`WIDE` (MPT-125M and -350M
beside larger MPT)."""
WIDE = 128.0


def attention_parts(where: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """Seconds of arithmetic and of memory traffic of a fused attention kernel, without the kernel floor; by the law the
    longer of the two has the other in it, which nothing hides."""
    nbytes = (kernel.backward_nbytes if backward else kernel.nbytes) * batch * where.element_bytes
    memory = nbytes / where.device.stream_rate()
    table = where.device.attention[where.attention_kernel]
    if table:
        length = kernel.document or kernel.seq
        rate = _charted_rate(where, table, kernel.head_dim, length, causal=kernel.causal, backward=backward)
        return (kernel.backward_flops if backward else kernel.flops) * batch / rate, memory
    share = _share(where)
    laws = kernel_laws()
    compute = _by_law(where, kernel, batch, backward=backward) / share
    # A burst of attention streams faster than casts do, for which STREAM stands in a step.
    memory *= laws.stream.stream / laws.attention["bf16"].stream / share
    return (compute + memory, memory) if compute >= memory else (compute, compute + memory)


def heads_of(kernel: Kernel, batch: float, narrowest: float = 0.0) -> Heads:
    """What the law knows a kernel by: as many sequences as its FLOPs say, each as long as a token can see.

    Of each query at least ``2 heads width`` bytes move for ``4 keys heads width`` FLOPs: a kernel of fewer keys than
    its sequence has is of a window. ``narrowest`` : elements of a head, below which its FLOPs take no longer.
    """
    pairs = 0.5 if kernel.causal else 1.0
    length = kernel.document or float(kernel.seq)
    if kernel.nbytes:
        length = min(length, kernel.flops / kernel.nbytes / pairs)
    width = max(float(kernel.head_dim), narrowest)
    each = 4.0 * pairs * kernel.heads * length**2 * width
    numbers = (kernel.flops * batch / each, length, kernel.heads, kernel.heads, width, width, kernel.causal)
    return Heads(*(np.asarray(float(number)) for number in numbers))


def _by_law(where: Setting, kernel: Kernel, batch: float, *, backward: bool) -> float:
    flops = (kernel.backward_flops if backward else kernel.flops) * batch
    if not flops:
        return 0.0
    device = where.device
    heads = heads_of(kernel, batch, WIDE * (where.attention_kernel in FIRST))
    law, levels = ("backward", "attention_backward") if backward else ("bf16", "attention")
    sheet = _sheet(device, levels, issued=where.attention_kernel in WARP_ISSUED)
    compute = float(law_parts(kernel_laws().attention[law], sheet, heads, backward=backward)[0])
    told = float(heads.backward_flops if backward else heads.flops)
    half = where.with_dtype(half_of(device))
    # In 32 bits the same arithmetic is done by other units.
    slower = device.peak[device.runs_as(half.dtype)] / device.peak[device.runs_as(where.dtype)]
    return compute * flops / told * attention_level(half) * max(1.0, slower)


def attention_level(where: Setting) -> float:
    """How much longer fused attention takes in a step than in a burst: what the power limit makes of large products
    (:func:`~clustersim.model.seconds.gemm.sustained_level`), and less of it where a kernel's own instructions hold its
    products below the tensor cores' rate (:data:`HELD`)."""
    level = sustained_level(where)
    if where.attention_kernel in WARP_ISSUED:
        rate = _sheet(where.device, "attention", issued=True).peak
        if rate < where.device.peak[half_of(where.device)]:
            return max(1.0, HELD * level)
    return level


def _share(where: Setting) -> float:
    if where.attention_kernel in FIRST:
        return where.constants.first_flash
    return where.constants.efficient if where.attention_kernel == "efficient" else 1.0


def half_of(device: Device) -> str:
    """The 16-bit type that a device has."""
    return "bf16" if "bf16" in device.peak else "fp16"


@lru_cache(maxsize=128)
def _sheet(device: Device, levels: str, *, issued: bool) -> Sheet:
    sheet = sheet_of(device, half_of(device), kernel_laws().level(levels, device.arch))
    return legacy(sheet) if issued else sheet


def _charted_rate(
    where: Setting, table: Mapping[int, FlashRate], head_dim: int, seq: float, *, causal: bool, backward: bool
) -> float:
    """FLOP/s of a pass at sequence length ``seq``, counting half of the square for a causal mask; head sizes between
    the charted ones are interpolated."""
    charted = _interpolate(table, head_dim)
    rate = charted.rate * seq / (seq + (charted.s0_causal if causal else charted.s0_full))
    if not where.half:
        # The charts are of 16-bit kernels; the memory-efficient kernel does the same arithmetic at the fp32 rate.
        device = where.device
        rate *= device.peak[device.runs_as(where.dtype)] / device.peak.get("fp16", device.peak["fp32"])
    if not backward:
        return rate * where.constants.chart_forward
    own = where.attention_kernel == "aotriton"
    return rate * (where.constants.aotriton_backward if own else where.constants.chart_backward)


def _interpolate(table: Mapping[int, FlashRate], head_dim: int) -> FlashRate:
    dims = sorted(table)
    if head_dim <= dims[0]:
        # Kernels pad a smaller head to the smallest they have.
        low = table[dims[0]]
        return FlashRate(low.rate * head_dim / dims[0], low.s0_causal, low.s0_full)
    if head_dim >= dims[-1]:
        return table[dims[-1]]
    above = next(dim for dim in dims if dim >= head_dim)
    below = max(dim for dim in dims if dim < head_dim)
    w = (head_dim - below) / (above - below)
    both = zip(astuple(table[below]), astuple(table[above]), strict=True)
    return FlashRate(*(low * (1 - w) + high * w for low, high in both))
