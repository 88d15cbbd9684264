"""Matrix products: waves of output tiles over the SMs, at the device's measured rate.

``time = min over tiles of waves * 2 tm tn (k + k0) / (rate per SM * tile efficiency)``, never less than the bytes over
the bandwidth, plus the kernel floor. A tile's efficiency is ``1 / (1 + c / h)`` with ``h = tm tn / (tm + tn)``, its
arithmetic intensity; both that and k0 are taken relative to a large GEMM, which runs at the measured rate.
"""

from __future__ import annotations

import math

from clustersim.core.device import Device
from clustersim.core.program import DTYPE_BYTES
from clustersim.model.seconds.base import HALF, Setting

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
"""Output tiles (rows, columns) of cuBLAS and CUTLASS kernels."""
_LARGE_K = 4096.0
_LARGE_H = 256 * 192 / (256 + 192)


def gemm_time(device: Device, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Seconds of ``batch`` isolated products (m x k)(k x n) at the device's best clocks, kernel floor included.

    Parameters
    ----------
    m, n, k : rows, columns, inner dimension of each. dtype : of the operands.
    """
    parts = gemm_parts(Setting(device, dtype), device.matmul_rate(dtype), m, n, k, batch)
    return max(parts) + device.kernel_floor.value


def gemm_parts(where: Setting, rate: float, m: float, n: float, k: float, batch: float) -> tuple[float, float]:
    """Seconds the arithmetic and the memory traffic of a product take, without the kernel floor.

    ``rate`` is what a large GEMM reaches [FLOP/s].
    """
    device = where.device
    dtype = where.dtype
    constants = where.constants
    # fp8 products are written in 16 bits.
    nbytes = batch * (DTYPE_BYTES[dtype] * (m * k + k * n) + max(2, DTYPE_BYTES[dtype]) * m * n)
    memory = nbytes / (device.memory_bandwidth * constants.gemm_memory)
    half = device.runs_as(dtype) in HALF
    k0, c = (constants.half_k0, constants.half_c) if half else (constants.fp32_k0, constants.fp32_c)
    rate_per_sm = rate / device.sms * (1 + k0 / _LARGE_K)
    best = math.inf
    for tm, tn in TILES:
        tiles = batch * math.ceil(m / tm) * math.ceil(n / tn)
        h = tm * tn / (tm + tn)
        efficiency = (1 + c / _LARGE_H) / (1 + c / h)
        best = min(best, _waves(tiles / device.sms, half) * tm * tn / efficiency)
    return best * 2 * (k + k0) / rate_per_sm, memory


def _waves(full: float, half: bool) -> float:
    """Rounds of tiles. Whole in half precision; in fp32 several small tiles share an SM, so only the first is whole."""
    return math.ceil(full) if half else (full**4 + 1) ** 0.25


def linear_parts(setting: Setting, m: float, n: float, k: float, batch: float = 1) -> tuple[float, float]:
    """:func:`gemm_parts` at the rate and dtype of a training step."""
    return gemm_parts(setting, setting.matmul_rate(), m, n, k, batch)
