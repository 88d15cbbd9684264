"""The optimizer step: bytes moved per parameter over the bandwidth."""

from __future__ import annotations

import math

from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.model import Model
from clustersim.model.seconds.base import Setting

# Tensors read or written per parameter by one fused kernel, then by the chain of foreach kernels. Adam fused reads and
# writes parameter, first and second moment, and reads the gradient (7); its foreach chain is lerp, mul, addcmul, sqrt,
# two divisions, add and addcdiv (18), and weight decay on top (torch/optim/{sgd,adam,adamw}.py).
PASSES = {"sgd": (3, 3), "sgd_momentum": (5, 11), "adam": (7, 18), "adamw": (7, 20), "lamb": (12, 26)}
"""Optimizers by name: (fused, foreach) passes over the parameters."""
STATES = {"sgd": 0, "sgd_momentum": 1, "adam": 2, "adamw": 2, "lamb": 2}
"""Tensors of the parameters' size an optimizer keeps."""
IMPLEMENTATIONS = ("fused", "foreach", "for-loop")

_OPS = {"sgd": 1, "sgd_momentum": 4, "adam": 9, "adamw": 10, "lamb": 14}
# A multi-tensor kernel takes some 50 tensors, or 320 blocks of 64 Ki elements.
_TENSORS_PER_LAUNCH = 50.0
_ELEMENTS_PER_LAUNCH = 320 * 65536.0


def check(optimizer: str | None, implementation: str) -> None:
    """Raise :class:`ScenarioError` for an unknown optimizer or implementation."""
    if optimizer is not None and optimizer not in PASSES:
        raise ScenarioError(f"unknown optimizer {optimizer!r} (at $.run.optimizer); {nearest(optimizer, PASSES)}")
    if implementation not in IMPLEMENTATIONS:
        raise ScenarioError(
            f"unknown optimizer_impl {implementation!r} (at $.run.optimizer_impl); "
            f"{nearest(implementation, IMPLEMENTATIONS)}"
        )


def fused_traffic(model: Model, optimizer: str | None, *, element_bytes: int = 4) -> float:
    """Bytes a fused step reads and writes for all parameters that are trained; 0 for None."""
    return float(PASSES[optimizer][0] * element_bytes * model.trained) if optimizer else 0.0


def optimizer_time(
    setting: Setting,
    parameters: float,
    tensors: int,
    optimizer: str | None,
    implementation: str,
    element_bytes: int = 4,
) -> float:
    """Seconds of the optimizer step over the parameters of one rank.

    Parameters
    ----------
    parameters, tensors : elements, and in how many tensors. implementation : one of :data:`IMPLEMENTATIONS`.
    optimizer : a key of :data:`PASSES`, or None for no step. element_bytes : of parameters, gradients and states.
    """
    check(optimizer, implementation)
    if optimizer is None:
        return 0.0
    seconds = passes_of(optimizer, implementation) * element_bytes * parameters / setting.device.stream_rate()
    floor = optimizer_floor(setting, parameters, tensors, optimizer, implementation)
    return max(seconds, floor) if implementation == "for-loop" else seconds + floor


def tensors_of(model: Model) -> int:
    """Parameter tensors of a model that are trained, tied ones once."""
    return sum(not tensor.tied_to and not tensor.frozen for layer in model.layers for tensor in layer.tensors)


def passes_of(optimizer: str, implementation: str) -> int:
    """Tensors of the parameters' size that a step reads or writes."""
    return PASSES[optimizer][0 if implementation == "fused" else 1]


def optimizer_floor(
    where: Setting, parameters: float, tensors: int, optimizer: str | None, implementation: str
) -> float:
    """Seconds that the launches of the optimizer step take, however little each of them has to do."""
    if optimizer is None:
        return 0.0
    launches = launches_of(where.device, optimizer, implementation, tensors, parameters)
    cost = where.device.launch if implementation == "for-loop" else where.device.kernel_floor
    return launches * cost.value


def launches_of(device: Device, optimizer: str, implementation: str, tensors: int, parameters: float) -> int:
    """Calls of a step over this many tensors; on a CPU a multi-tensor call takes one tensor after the other."""
    ops = 1 if implementation == "fused" else _OPS[optimizer]
    if implementation == "for-loop" or device.arch == "cpu":
        return tensors * ops
    return ops * math.ceil(max(tensors / _TENSORS_PER_LAUNCH, parameters / _ELEMENTS_PER_LAUNCH))
