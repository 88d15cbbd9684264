"""A model on a device: what one rank's step costs, layer by layer."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from clustersim.core.device import Device
from clustersim.core.errors import ScenarioError
from clustersim.core.model import Kernel, Layer, Model, StepCost
from clustersim.core.optimizers import OPTIMIZERS, state_bytes
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.units import format_bytes
from clustersim.model.kernels import saved_by_operator
from clustersim.model.seconds.base import (
    CONSTANTS,
    ComputeConstants,
    Execution,
    Setting,
    check_checkpointing,
    setting,
)
from clustersim.model.seconds.host import host_level
from clustersim.model.seconds.kernels import launches
from clustersim.model.seconds.optimizer import (
    check,
    optimizer_floor,
    optimizer_time,
    orthogonalised,
    step_traffic,
    tensors_of,
)
from clustersim.model.seconds.price import Pass, cast_time, in_recipe, price, unpack_time

USUAL = Execution()


def step_cost(
    model: Model, device: Device, micro_batch_size: int, how: Execution = USUAL, constants: ComputeConstants = CONSTANTS
) -> StepCost:
    """What one rank's step costs on a device; ``micro_batch_size`` : samples of one forward and backward pass.

    The notes of the cost name estimated device figures. Raises ScenarioError for an unknown choice or a batch below
    one.
    """
    if micro_batch_size < 1:
        raise ScenarioError(
            f"micro_batch_size = {micro_batch_size} must be at least 1 (at $.strategy.micro_batch_size)"
        )
    check_checkpointing(how.activation_checkpointing)
    images = model.sample == "image" and not model.seq_len
    where = replace(setting(device, how, constants), images=images)
    if where.hosted and not where.compiled and how.layer_time is None:
        # PEFT's adapters are modules of eager PyTorch, which nobody has timed alone: the prior of its calls.
        where = replace(where, module_call=host_level("", None).call)
    return _cost(where, model, micro_batch_size, how)


def _cost(where: Setting, model: Model, batch: int, how: Execution) -> StepCost:
    constants = where.constants
    volta = 0 < where.device.sm < 80
    forward, backward = _passes(where, model, batch, how)
    element = DTYPE_BYTES[how.state_dtype or how.param_dtype]
    sizes = (model.trained, tensors_of(model))
    check(how.optimizer, how.optimizer_impl)
    updates = orthogonalised(where, model, how.optimizer)
    whole = sum(update.count * update.seconds for update in updates)
    return StepCost(
        forward=np.array([cost.seconds for cost in forward]),
        backward=np.array([cost.seconds for cost in backward]),
        forward_bound=tuple(cost.bound for cost in forward),
        backward_bound=tuple(cost.bound for cost in backward),
        forward_flops=np.array([cost.flops for cost in forward]),
        backward_flops=np.array([cost.flops for cost in backward]),
        optimizer=optimizer_time(where, *sizes, how.optimizer, how.optimizer_impl, element) + whole,
        optimizer_floor=optimizer_floor(where, *sizes, how.optimizer, how.optimizer_impl),
        grad_copy_bandwidth=where.device.stream_rate(),
        per_tensor=constants.per_tensor,
        step_overhead=constants.step_overhead,
        overlap_slowdown=constants.overlap_slowdown_volta if volta else constants.overlap_slowdown,
        jitter=constants.jitter_volta if volta else constants.jitter,
        notes=(*_notes(where), *_paged(model, how.optimizer, element)),
        recomputed=tuple(how.activation_checkpointing == "full" and layer.kind == "block" for layer in model.layers),
        forward_launch=np.array([cost.launch for cost in forward]),
        forward_mix=tuple(cost.mix for cost in forward),
        backward_mix=tuple(cost.mix for cost in backward),
        optimizer_traffic=step_traffic(model.trained, how.optimizer, "fused", element),
        optimizer_traffic_as_run=step_traffic(model.trained, how.optimizer, how.optimizer_impl, element),
        matrices=updates,
    )


def _notes(where: Setting) -> tuple[str, ...]:
    device = where.device
    runs_as = where.device.runs_as(where.dtype)
    swapped = f"{device.name} has no {where.dtype} units: GEMMs run as {runs_as}"
    return (*device.notes, *((swapped,) if runs_as != where.dtype else ()))


def _paged(model: Model, optimizer: str | None, element: int) -> tuple[str, ...]:
    """A note on states that are in no allocator."""
    if optimizer is None or not OPTIMIZERS[optimizer].paged:
        return ()
    size = format_bytes(state_bytes(model, optimizer, element))
    return (
        f"{optimizer}: {size} of states are in unified memory, not in the peak; where the GPU is full they move over "
        "PCIe, whose time is not played",
    )


def _passes(where: Setting, model: Model, batch: int, how: Execution) -> tuple[list[Pass], list[Pass]]:
    """Costs of forward and backward of every layer; layers with the same kernels are priced once."""
    known: dict[tuple[object, ...], tuple[Pass, Pass]] = {}
    costs = []
    for layer in model.layers:
        key = (layer.kind, layer.kernels, layer.parameters, layer.trained, layer.unpacked)
        if key not in known:
            known[key] = _layer(where, layer, batch, how)
        costs.append(known[key])
    return [forward for forward, _ in costs], [backward for _, backward in costs]


def _launched(where: Setting, layer: Layer, seconds: float) -> Setting:
    """The setting whose host takes so long to launch a layer's forward and backward."""
    count = sum(launches(kernel, part) for kernel in layer.kernels for part in "FB")
    launch = replace(where.device.launch, value=seconds / count) if count else where.device.launch
    return replace(where, device=replace(where.device, launch=launch))


def _layer(where: Setting, layer: Layer, batch: int, how: Execution) -> tuple[Pass, Pass]:
    kernels = layer.kernels
    dense = in_recipe(where, layer.kind)
    if layer.kind == "block" and how.layer_time is not None:
        where = _launched(where, layer, how.layer_time)
    cast = cast_time(where, layer.parameters) if layer.kind != "embedding" else 0.0
    uncast = cast_time(where, layer.trained) if layer.kind != "embedding" else 0.0
    unpacked = unpack_time(where, [t for t in layer.tensors if t.quantised])
    again = _again(kernels, how) if layer.kind == "block" else ()
    ahead = price(where, ((kernels, "F"),), batch, dense=dense, more=cast + unpacked)
    if not layer.has_backward:
        return ahead, price(where, (), batch, dense=dense)
    # Backward writes quantised weights out again for the gradients of inputs, and once more where forward is repeated.
    more = uncast + unpacked * (2.0 if again else 1.0)
    return ahead, price(where, ((kernels, "B"), (again, "R")), batch, dense=dense, more=more)


def _again(kernels: tuple[Kernel, ...], how: Execution) -> tuple[Kernel, ...]:
    """What backward repeats of a block."""
    if how.activation_checkpointing == "none":
        return ()
    if how.activation_checkpointing == "selective":
        return _selective(kernels)
    return _until_kept(kernels) if how.early_stop else kernels


def _until_kept(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """What is ahead of the last tensor that backward needs (torch/utils/checkpoint.py ``_StopRecomputationError``): of
    a product that is its input, so that it does not run itself; a norm's or a dropout's is there when it has run."""
    last = max((i for i, kernel in enumerate(kernels) if kernel.saved), default=len(kernels))
    return kernels[: last + (last < len(kernels) and kernels[last].kind != "gemm")]


def _selective(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """What torchtitan's per-op policy repeats."""
    kept = saved_by_operator(kernels)
    return tuple(kernel for i, kernel in enumerate(kernels) if i not in kept)
