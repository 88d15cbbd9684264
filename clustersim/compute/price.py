"""What runs of kernels cost: seconds, FLOPs, what bounds them, and the host's time to launch them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from clustersim.compute.base import Setting
from clustersim.compute.kernels import flops, launches, time_in
from clustersim.model import Kernel


@dataclass(frozen=True)
class Pass:
    """Kernels run back to back on one device.

    Parameters
    ----------
    seconds : float [s]. flops : executed, of one micro-batch. bound : one of :data:`clustersim.program.BOUNDS`.
    launch : float [s], the host's time to launch them.
    """

    seconds: float
    flops: float
    bound: str
    launch: float


def price(
    where: Setting, runs: Iterable[tuple[Iterable[Kernel], str]], batch: int, *, dense: bool, more: float = 0.0
) -> Pass:
    """What runs of kernels cost: their time, or the host's time to launch them if that is longer.

    Parameters
    ----------
    runs : kernels, and which part of each runs (see :func:`clustersim.compute.kernels.time_in`); ``R`` is a repeated F.
    batch : samples. dense : whether their products run in fp8 where the setting says so: fp8 is for the linear layers
        of blocks; embedding, head and products of activations stay in bf16.
    more : float [s] of memory-bound work besides them (autocast's copies).
    """
    outside = where.with_dtype("bf16") if where.dtype == "fp8" else where
    busy, host, executed = 0.0, 0.0, 0.0
    shares: defaultdict[str, float] = defaultdict(float)
    for kernels, part in runs:
        for kernel in kernels:
            linear = dense and kernel.kind == "gemm" and not kernel.batch
            seconds, bound = time_in(where if linear else outside, kernel, batch, part)
            busy += seconds
            shares[bound] += seconds
            host += launches(kernel, part) * where.device.launch.value
            executed += flops(kernel, part) * batch
    if more:
        busy += more
        shares["memory"] += more
    if host > busy:
        return Pass(host, executed, "launch", host)
    return Pass(busy, executed, max(shares, key=lambda bound: shares[bound]) if shares else "compute", host)


def cast_time(where: Setting, parameters: int) -> float:
    """Autocast's copy of fp32 weights to 16 bits, and of their gradients back: 6 bytes a parameter each [s]."""
    return 6.0 * parameters / where.device.stream_rate() if where.autocast else 0.0
