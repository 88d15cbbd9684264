"""Fused attention: the rate of a flash kernel by head dimension and sequence length."""

from __future__ import annotations

from dataclasses import astuple

from clustersim.core.device import FlashRate
from clustersim.core.model import Kernel
from clustersim.model.seconds.base import Setting


def flash_rate(setting: Setting, head_dim: int, seq: float, *, causal: bool, backward: bool) -> float:
    """FLOP/s of a flash-attention pass at sequence length ``seq``, counting half of the square for a causal mask.

    ``E = Emax s / (s + s0)`` is the combined rate of the published charts; forward runs at 1.2 E and backward, with 2.5
    times the arithmetic, at 0.94 E. Head sizes between the charted ones are interpolated.
    """
    table = setting.device.attention[setting.attention_kernel]
    charted = _interpolate(dict(table), head_dim)
    s0 = charted.s0_causal if causal else charted.s0_full
    rate = charted.rate * seq / (seq + s0)
    if not setting.half:
        # The charts are of 16-bit kernels; the memory-efficient kernel does the same arithmetic at the fp32 rate.
        device = setting.device
        rate *= device.peak[device.runs_as(setting.dtype)] / device.peak.get("fp16", device.peak["fp32"])
    return rate * (setting.constants.flash_backward if backward else setting.constants.flash_forward)


def _interpolate(table: dict[int, FlashRate], head_dim: int) -> FlashRate:
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


def attention_parts(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """Seconds of arithmetic and of memory traffic of a fused attention kernel, without the kernel floor."""
    flops = (kernel.backward_flops if backward else kernel.flops) * batch
    nbytes = (kernel.backward_nbytes if backward else kernel.nbytes) * batch * setting.element_bytes
    length = kernel.document or kernel.seq
    rate = flash_rate(setting, kernel.head_dim, length, causal=kernel.causal, backward=backward)
    return flops / rate, nbytes / setting.device.stream_rate()
