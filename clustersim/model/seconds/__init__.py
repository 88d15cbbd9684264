"""Layer x device -> seconds: a roofline with achieved efficiencies.

A kernel takes the larger of its arithmetic and its memory traffic plus a floor; a layer takes its kernels' time or the
host's time to launch them. Rates are a device's published measurements (best matmul, STREAM, flash attention) times the
few global constants of :class:`~clustersim.model.seconds.base.ComputeConstants`; nothing is fitted per GPU, model or
case."""

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
