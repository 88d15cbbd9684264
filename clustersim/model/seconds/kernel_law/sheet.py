"""A GPU as its spec sheet tells it: what every law of this package takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.device import Device

OPERAND_BYTES: Mapping[str, float] = {
    "fp32": 4.0,
    "tf32": 4.0,
    "fp16": 2.0,
    "bf16": 2.0,
    "fp8": 1.0,
    "fp8_block": 1.0 + 4 / 128,
    "mxfp8": 1.0 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
"""Arithmetic -> bytes of an operand's element, its scales included: one fp32 for 128 elements (fp8 blockwise), one byte
for 32 (the OCP microscaling formats) or for 16 (NVFP4)."""

BLOCK = 128.0
"""Elements of k that one scale of fp8 blockwise is of."""

UNITS: Mapping[str, str] = {"fp8_block": "fp8", "mxfp8": "fp8", "nvfp4": "fp4"}
"""Arithmetic -> the dtype of the device's peak, where they differ."""


@dataclass(frozen=True)
class Sheet:
    """What a law needs of a GPU; each field is one number, or a column with a GPU a row.

    Parameters
    ----------
    sms : streaming multiprocessors, or compute units. clock : [1/s], at which the peaks hold.
    peak : dense rate of the arithmetic in question [FLOP/s]. half_peak : the same in 16 bits [FLOP/s].
    bandwidth : of the memory, nominal [bytes/s]. tdp : [W]. level : what the generation adds to the logarithm of a
        law's rate; 0 where nobody measured it. persistent : 1 where kernels of products keep their SM from tile to
        tile, 0 where each tile is a thread block of its own (:data:`PERSISTENT`). exps : exponentials a clock of one
        SM. lanes : multiply-adds in 32 bits a clock of one SM. l2 : bytes of its last-level cache. rescaled : 1 where
        warps that issue products scale their partial sums too, each :data:`BLOCK` of k; 0 where others do, or nobody.
    """

    sms: Floats
    clock: Floats
    peak: Floats
    half_peak: Floats
    bandwidth: Floats
    tdp: Floats
    level: Floats
    persistent: Floats
    exps: Floats
    lanes: Floats
    l2: Floats
    rescaled: Floats

    @property
    def flop_a_clock(self) -> Floats:
        """FLOP a clock of one SM."""
        return self.peak / (self.sms * self.clock)

    @property
    def density(self) -> Floats:
        """TFLOP/s in 16 bits for each watt: how soon large products meet the power limit."""
        return self.half_peak / self.tdp / 1e12


def sheet_of(device: Device, arithmetic: str, level: float = 0.0) -> Sheet:
    """The sheet of a device for one of :data:`OPERAND_BYTES`; the units are those it :meth:`runs_as`."""
    units = device.runs_as(UNITS.get(arithmetic, arithmetic))
    half = device.peak.get("bf16") or device.peak.get("fp16") or device.peak["fp32"]
    numbers = (
        device.sms,
        device.clock,
        device.peak[units],
        half,
        device.memory_bandwidth,
        device.tdp,
        level,
        1.0 if device.arch in PERSISTENT else 0.0,
        EXPS_A_CLOCK.get(device.arch, USUAL_EXPS),
        device.peak["fp32"] / 2.0 / (device.sms * device.clock),
        device.l2,
        1.0 if arithmetic == "fp8_block" and _scales_beside(device.arch) else 0.0,
    )
    return Sheet(*(np.asarray(float(number)) for number in numbers))


def _scales_beside(arch: str) -> bool:
    """Whether an NVIDIA GPU's warps scale sums between the products that they issue; of AMD's nobody measured it."""
    return arch.startswith("sm") and arch not in PERSISTENT


def legacy(sheet: Sheet) -> Sheet:
    """The sheet as kernels see it that have each warp issue its own products."""
    share = np.where(sheet.persistent > 0, LEGACY_SHARE, 1.0)
    most = np.minimum(LEGACY_RATE * sheet.sms * sheet.clock, share * sheet.half_peak)
    rates = {"peak": np.minimum(sheet.peak, most), "half_peak": np.minimum(sheet.half_peak, most)}
    return replace(sheet, **rates, persistent=np.zeros_like(sheet.persistent))


LEGACY_RATE = 2048.0
"""FLOP a clock and SM of a warp's own products in 16 bits (Ampere's instructions): kernels of small tiles, and
FlashAttention 1 and 2, run these on every generation, and gain nothing from later tensor cores."""
LEGACY_SHARE = 0.629
"""Of the peak, what a warp's own products reach at most on tensor cores made for wgmma: 62.9 % on H800 (Luo et al.,
arXiv:2402.13499). It is the less on an H20, whose tensor cores are held below those of Ampere."""
PERSISTENT = frozenset({"sm90", "sm100", "sm103"})
"""Generations whose products are fed by the tensor memory accelerator into wgmma or tcgen05 instructions: their kernels
work on one tile while they write the last one, and share out what is left of a round."""
USUAL_EXPS = 16.0
"""Exponentials a clock of one SM: the throughput table of the CUDA programming guide, compute capability 7 to 12."""
EXPS_A_CLOCK: Mapping[str, float] = {"sm103": 32.0}
"""Architecture -> the same where it is another: Blackwell Ultra has twice as many ("Making Softmax More Efficient with
NVIDIA Blackwell Ultra", developer.nvidia.com)."""
