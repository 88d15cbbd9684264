"""Layer x device -> seconds: a roofline with achieved efficiencies.

A kernel takes the larger of its arithmetic and its memory traffic plus a floor; a layer takes its kernels' time or the
host's time to launch them. Levels are a device's published measurements (best matmul, STREAM) times the few global
constants of :class:`~clustersim.model.seconds.base.ComputeConstants`; how products, attention and experts fall short of
them follows the kernel law (:mod:`~clustersim.model.seconds.kernel_law`). Nothing is fitted per GPU, model or case."""

from __future__ import annotations

from typing import TYPE_CHECKING

from clustersim.core.lookup import looked_up

if TYPE_CHECKING:
    from clustersim.model.seconds.base import CONSTANTS, ComputeConstants, Execution, setting
    from clustersim.model.seconds.gemm import gemm_time
    from clustersim.model.seconds.optimizer import optimizer_time
    from clustersim.model.seconds.step import step_cost

__all__ = [
    "CONSTANTS",
    "ComputeConstants",
    "Execution",
    "gemm_time",
    "optimizer_time",
    "setting",
    "step_cost",
]

__getattr__ = looked_up(
    __name__,
    {
        "base": "CONSTANTS ComputeConstants Execution setting",
        "gemm": "gemm_time",
        "optimizer": "optimizer_time",
        "step": "step_cost",
    },
)
