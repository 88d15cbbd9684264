"""Bandwidth-bound kernels: bytes over the share of STREAM bandwidth that elementwise code reaches."""

from __future__ import annotations

from clustersim.compute.base import AUTOCAST_FP32, Setting
from clustersim.model import Kernel


def traffic_rate(setting: Setting, element_bytes: int) -> float:
    """Bytes per second of elementwise kernels on elements of a size."""
    constants = setting.constants
    if setting.compiled:
        share = constants.memory_compiled
    else:
        share = constants.memory_fp32 if element_bytes >= 4 else constants.memory_half
    return setting.device.stream_rate() * share


def memory_time(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> float:
    """Seconds of a bandwidth-bound kernel, without the kernel floor.

    Under autocast norms, softmax, losses and the residual stream move fp32 elements.
    """
    wide = setting.autocast and setting.half and any(part in f"{kernel.name}_" for part in AUTOCAST_FP32)
    element_bytes = 4 if wide else setting.element_bytes
    nbytes = (kernel.backward_nbytes if backward else kernel.nbytes) * batch * element_bytes
    return nbytes / traffic_rate(setting, element_bytes)
