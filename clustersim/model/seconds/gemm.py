"""Matrix products inside a training step: the kernel law gives the shape over sizes, the device's rate the level.

On NVIDIA's since Ampere, in 16 and fewer bits, a product of 8,192 in each size runs at the device's sustained rate, and
any other by the kernel law relative to it (:mod:`clustersim.model.seconds.kernel_law.products`): tiles, waves, split-k,
and traffic that overlaps the arithmetic. A burst's power limit plays no part: the sustained rate was measured under it.

In fp32 and TF32, on Volta and Turing, and on AMD's: ``time = min over tiles of waves * 2 tm tn (k + k0) / (rate per SM
* tile efficiency)``, never less than the bytes over the bandwidth. A tile's efficiency is ``1 / (1 + c / h)`` with ``h
= tm tn / (tm + tn)``, its arithmetic intensity; both that and k0 are taken relative to a large GEMM, which runs at the
measured rate.

A kernel floor comes on top.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from clustersim.core.collective_kinds import DTYPE_BYTES
from clustersim.core.device import Device
from clustersim.model.seconds.base import HALF, Setting
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.constants import MEASURED_AS
from clustersim.model.seconds.kernel_law.experts import grouped_share
from clustersim.model.seconds.kernel_law.products import ProductLaw, Shapes, TileCosts, arithmetic, tile_costs
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES

TILES = ((256, 128), (128, 256), (128, 128), (256, 64), (64, 256), (128, 64), (64, 128), (64, 64), (64, 32), (32, 64))
"""Output tiles (rows, columns) of fp32 kernels."""
ONE_LAUNCH = 0.96
"""Of a plain product's rate, what CUTLASS's single kernel for the MXFP8 products of all experts keeps on the tensor
cores of sm100: 591 and 208 us for 16,384 rows of 8 experts, 5,120 x 8,192 and 7,168 x 2,048, scales in place, on a B200
whose plain products ran at 2,420 TFLOP/s just then (Dao-AILab/quack pull request 161)."""
KEPT = {"sm100": 0.82, "sm103": 0.853}
"""Of its rate in a burst by the kernel law, what a GPU of a generation keeps that can ask for more than its power limit
for as long as a step takes, at :data:`THROTTLED_WATTS`. sm100: the mean of four owners' B200s that multiply without a
pause: fused attention in 16 bits after 70 kernels in a row 0.853 (1,237 of 1,450 TFLOP/s, flashinfer-ai/flashinfer pull
request 2899), products of 1e11 to 1e12 FLOP in aiconfigurator's sustained tables 0.833, gpu-fryer at MIT 0.91, and
Megatron's products in SimuMax's tables 0.67. sm103 has no such measurement: as attention on that B200, which steps of
three publishers bear out."""
THROTTLED_CLOCK = 2250e12 / (148 * 8192)
THROTTLED_WATTS = 1000 / 148
"""B200's stated clock [1/s], and its watts for each SM."""
MORE_WATTS = {"sm100": 0.07, "sm103": 1.0 / 3.0}
"""Power of the watts for each SM beyond those with which the clock rises. sm100 is near its highest there: a GB200,
with a sixth more, is 1.031 and 1.045 times as fast as a B200 at 28 products without a pause, in bf16 and fp8
(aiconfigurator, TensorRT-LLM), of which 1.027 is its SMs."""
WORKSTATION = 120
"""Compute capability of the Blackwells whose tensor cores have no memory of their own, and other kernels."""
_LARGE_K = 4096.0
_LARGE_H = 256 * 192 / (256 + 192)
_SIZE = np.asarray(8192.0)
_LARGE = Shapes(_SIZE, _SIZE, _SIZE, np.asarray(1.0), operand=2.0)


def gemm_time(device: Device, dtype: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Seconds of ``batch`` isolated products (m x k)(k x n) at the device's best clocks, kernel floor included.

    Products that are launched and timed one by one, as tables and captures have them, follow the tiles of cuBLAS to 2
    to 7 %, the kernel law to 3 to 16 %: what a launch costs is in them. The law is of products in a busy stream.

    Parameters
    ----------
    m, n, k : rows, columns, inner dimension of each. dtype : of the operands.
    """
    parts = _by_tiles(Setting(device, dtype), device.matmul_rate(dtype), m, n, k, batch)
    return max(parts) + device.kernel_floor.value


def gemm_parts(setting: Setting, rate: float, m: float, n: float, k: float, batch: float) -> tuple[float, float]:
    """Seconds the arithmetic and the memory traffic of a product take, without the kernel floor; in 16 and fewer bits
    the longer of the two is lengthened by what the other does not hide.

    ``rate`` is what a large GEMM reaches [FLOP/s].
    """
    if setting.by_law:
        return _by_law(setting, rate, m, n, k, batch)
    return _by_tiles(setting, rate, m, n, k, batch)


def sustained_level(where: Setting) -> float:
    """How much longer kernels take in a step than the kernel law says of a burst: what a large product does."""
    return _burst_rate(where) / step_rate(where)


def step_rate(where: Setting) -> float:
    """Rate [FLOP/s] that large products keep inside a training step: :meth:`Setting.matmul_rate`, of which a Blackwell
    keeps no more than its power limit lets it keep of a burst (:data:`KEPT`).

    A B200 that multiplies without a pause falls from 1,965 to 1,580 MHz at its 1,000 W; its best measured rates are of
    shorter loops. Power grows with the clock's third power, voltage with it, so that a GPU of the generation with fewer
    watts for each SM keeps a lower clock; with more it gains by :data:`MORE_WATTS`.
    """
    rate = where.matmul_rate()
    device = where.device
    if not (where.by_law and device.arch in KEPT):
        return rate
    watts = device.tdp / device.sms / THROTTLED_WATTS
    clock = THROTTLED_CLOCK * math.pow(watts, MORE_WATTS[device.arch] if watts > 1.0 else 1.0 / 3.0)
    return min(rate, _burst_rate(where) * min(1.0, KEPT[device.arch] * clock / device.clock))


def _burst_rate(where: Setting) -> float:
    """Rate [FLOP/s] of a large product by the kernel law."""
    return _tiles_of(where.device, where.device.runs_as(where.dtype))[2]


def _by_law(where: Setting, rate: float, m: float, n: float, k: float, batch: float) -> tuple[float, float]:
    # Products with scales of blocks are to those of one scale a tensor as the law has it.
    runs_as = where.device.runs_as(where.dtype)
    arithmetic_of = where.blocks or runs_as
    law, _, large = _tiles_of(where.device, runs_as)
    compute = _arithmetic(where.device, arithmetic_of, (m, n, k, batch)) * large / rate
    return _beside(compute, _memory(where, m, n, k, batch), law.norm)


def _beside(compute: float, memory: float, p: float) -> tuple[float, float]:
    """Both, of which the longer is lengthened by what the other does not hide."""
    both = (compute**p + memory**p) ** (1.0 / p)
    return (both, memory) if compute >= memory else (compute, both)


def _memory(where: Setting, m: float, n: float, k: float, batch: float) -> float:
    operand = OPERAND_BYTES[where.blocks or where.dtype]
    return batch * (operand * (m * k + k * n) + 2.0 * m * n) / where.device.stream_rate()


def grouped_parts(where: Setting, m: float, n: float, k: float, count: float) -> tuple[float, float]:
    """:func:`gemm_parts` of products that share one launch, at the rate of a training step: by the law of experts
    (:mod:`clustersim.model.seconds.kernel_law.experts`), of which a step keeps its own share; or, where one kernel has
    all experts of MXFP8, nearly at that of plain products (:data:`ONE_LAUNCH`)."""
    if not where.by_law:
        compute, memory = linear_parts(where, m, n, k, count)
        return compute / (where.constants.grouped_amd if where.device.amd else 1.0), memory
    if where.blocks == "mxfp8" and not where.expert_streams and where.device.sm < WORKSTATION:
        compute, memory = linear_parts(where, m, n, k, count)
        return compute / ONE_LAUNCH, memory
    laws = kernel_laws()
    arithmetic_of = where.blocks or where.device.runs_as(where.dtype)
    law = laws.experts[MEASURED_AS.get(arithmetic_of, arithmetic_of)]
    share = grouped_share(law, laws.products["all"], sheet_of(where.device, arithmetic_of))
    burst = _arithmetic(where.device, arithmetic_of, (m, n, k, count), grouped=True) / float(share)
    compute = burst * sustained_level(where) / where.constants.grouped
    return _beside(compute, _memory(where, m, n, k, count), law.overlap)


@lru_cache(maxsize=64)
def _tiles_of(device: Device, dtype: str, *, grouped: bool = False) -> tuple[ProductLaw, TileCosts, float]:
    """Law and costs of tiles of a device, and the rate [FLOP/s] that they give a large product; ``grouped`` : by the
    law of all arithmetics together, which that of experts is on."""
    laws = kernel_laws()
    law = laws.products["all"] if grouped else laws.products.get(dtype, laws.products["bf16"])
    costs = tile_costs(law, sheet_of(device, dtype, laws.level("products" if grouped else dtype, device.arch)))
    return law, costs, float(_LARGE.flops / arithmetic(costs, _LARGE))


@lru_cache(maxsize=100_000)
def _arithmetic(
    device: Device, dtype: str, sizes: tuple[float, float, float, float], *, grouped: bool = False
) -> float:
    """Seconds of the arithmetic of products (m, n, k, how many) at the law's own level."""
    rows, columns, inner, count = (np.asarray(size, dtype=float) for size in sizes)
    shapes = Shapes(rows, columns, inner, count, operand=2.0)
    return float(arithmetic(_tiles_of(device, dtype, grouped=grouped)[1], shapes))


def _by_tiles(where: Setting, rate: float, m: float, n: float, k: float, batch: float) -> tuple[float, float]:
    device = where.device
    dtype = where.dtype
    constants = where.constants
    # Products of 8 bits are written in 16.
    nbytes = batch * (DTYPE_BYTES[dtype] * (m * k + k * n) + max(2, DTYPE_BYTES[dtype]) * m * n)
    memory = nbytes / (device.memory_bandwidth * constants.gemm_memory)
    half = device.runs_as(dtype) in HALF
    k0, c = (constants.half_k0, constants.half_c) if half else (constants.fp32_k0, constants.fp32_c)
    if half and device.amd:
        k0 = constants.amd_k0
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
    return gemm_parts(setting, step_rate(setting), m, n, k, batch)


def unaligned_parts(setting: Setting, m: float, n: float, k: float, batch: float = 1) -> tuple[float, float]:
    """:func:`gemm_parts` of products that tensor cores cannot load: 16-bit tiles on the fp32 units, whose kernels the
    law's generations left as they were.

    BLOOM's precursors with heads of 150 and of 144 elements agree on 0.085 of A100's tensor cores; this is 0.07 for
    large ones.
    """
    rate = min(step_rate(setting), setting.device.matmul_rate("fp32"))
    return _by_tiles(setting, rate, m, n, k, batch)
