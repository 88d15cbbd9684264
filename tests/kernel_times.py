"""What one kernel takes by itself, for tests of its price: its own work with its casts and launches."""

from __future__ import annotations

from clustersim.core.device import Device
from clustersim.core.model import Kernel
from clustersim.model.seconds import Execution, setting
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.float8 import cast_seconds
from clustersim.model.seconds.kernels import spent


def time_in(where: Setting, kernel: Kernel, batch: float, part: str) -> tuple[float, str]:
    """Seconds of one part (``F``, ``B``, ``I`` or ``W``), and what limits it: compute, memory or launch."""
    work, floor, bound = spent(where, kernel, batch, part)
    work += cast_seconds(where, kernel, batch, part)
    return work + floor, "launch" if floor > work else bound


def kernel_time(
    kernel: Kernel,
    gpu: Device,
    batch: float,
    dtype: str,
    *,
    backward: bool = False,
    attention_kernel: str | None = None,
) -> tuple[float, str]:
    """The same of forward or backward, on a GPU without autocast."""
    where = setting(gpu, Execution(dtype, dtype, attention_kernel))
    return time_in(where, kernel, batch, "B" if backward else "F")
