"""The optimizer step: bytes moved per parameter over the bandwidth."""

from __future__ import annotations

import math

from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError, nearest
from clustersim.core.model import MatrixUpdates, Model
from clustersim.core.optimizers import OPTIMIZERS, matrices
from clustersim.model.seconds import gemm
from clustersim.model.seconds.base import Setting

IMPLEMENTATIONS = ("fused", "foreach", "for-loop")

# A multi-tensor kernel takes some 50 tensors, or 320 blocks of 64 Ki elements.
_TENSORS_PER_LAUNCH = 50.0
_ELEMENTS_PER_LAUNCH = 320 * 65536.0


def check(optimizer: str | None, implementation: str) -> None:
    """Raise :class:`ScenarioError` for an unknown optimizer or implementation."""
    if optimizer is not None and optimizer not in OPTIMIZERS:
        raise ScenarioError(f"unknown optimizer {optimizer!r} (at $.run.optimizer); {nearest(optimizer, OPTIMIZERS)}")
    if implementation not in IMPLEMENTATIONS:
        raise ScenarioError(
            f"unknown optimizer_impl {implementation!r} (at $.run.optimizer_impl); "
            f"{nearest(implementation, IMPLEMENTATIONS)}"
        )


def step_traffic(numel: float, optimizer: str | None, implementation: str, element_bytes: int) -> float:
    """Bytes a step reads and writes for so many elements; 0 for None."""
    return OPTIMIZERS[optimizer].element_traffic(implementation, element_bytes) * numel if optimizer else 0.0


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
    optimizer : a name of :data:`~clustersim.core.optimizers.OPTIMIZERS`, or None for no step. element_bytes : of
        parameters, gradients and plain states. Muon's iterations are :func:`orthogonalised`.
    """
    check(optimizer, implementation)
    if optimizer is None:
        return 0.0
    traffic = step_traffic(parameters, optimizer, implementation, element_bytes)
    seconds = traffic / setting.device.stream_rate()
    floor = optimizer_floor(setting, parameters, tensors, optimizer, implementation)
    return max(seconds, floor) if implementation == "for-loop" else seconds + floor


def tensors_of(model: Model) -> int:
    """Parameter tensors of a model that are trained, tied ones once."""
    return sum(not tensor.tied_to and not tensor.frozen for layer in model.layers for tensor in layer.tensors)


def passes_of(optimizer: str, implementation: str) -> int:
    """Tensors of the parameters' size that a step of a plain one reads or writes."""
    return OPTIMIZERS[optimizer].passes[0 if implementation == "fused" else 1]


def orthogonalised(where: Setting, model: Model, optimizer: str | None) -> tuple[MatrixUpdates, ...]:
    """What Muon's iterations take for each size of the model's matrices; nothing for others.

    With r the shorter side and c the longer, an iteration is X X^T (2 r^2 c), its square (2 r^3) and their product with
    X (2 r^2 c), in bf16 (torch/optim/_muon.py, ``_zeropower_via_newtonschulz``).
    """
    steps = OPTIMIZERS[optimizer].orthogonal if optimizer else 0
    bf16 = where.with_dtype("bf16")
    updates = []
    for (rows, columns), count in sorted(matrices(model).items() if steps else ()):
        r, c = sorted((float(rows), float(columns)))
        products = (gemm.linear_parts(bf16, *shape) for shape in ((r, r, c), (r, r, r), (r, c, r)))
        seconds = sum(max(parts) + where.device.kernel_floor.value for parts in products)
        updates.append(MatrixUpdates(count, rows * columns, steps * seconds))
    return tuple(updates)


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
    row = OPTIMIZERS[optimizer]
    ops = 1 if implementation == "fused" and not row.each_tensor else row.ops
    if implementation == "for-loop" or row.each_tensor or device.arch == "cpu":
        return tensors * ops
    return ops * math.ceil(max(tensors / _TENSORS_PER_LAUNCH, parameters / _ELEMENTS_PER_LAUNCH))
