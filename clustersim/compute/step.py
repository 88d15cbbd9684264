"""A model on a device: what one rank's step costs, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from clustersim.compute.base import CONSTANTS, HALF, Constants, Setting, setting
from clustersim.compute.optimizer import fused_traffic, optimizer_floor, optimizer_time
from clustersim.compute.price import Pass, cast_time, price
from clustersim.device import Device
from clustersim.errors import ScenarioError, nearest
from clustersim.model import Kernel, Layer, Model, StepCost
from clustersim.program import DTYPE_BYTES

CHECKPOINTING = ("none", "full", "selective")


@dataclass(frozen=True)
class Execution:
    """How a step is computed.

    Parameters
    ----------
    dtype : of GEMMs and convolutions: fp32 (TF32 off), tf32, fp16, bf16, fp8 (linear layers of blocks, bf16 elsewhere).
    param_dtype : what the model's parameters are in while it computes. fp32 with a 16-bit ``dtype`` is autocast: norms,
        softmax and losses move fp32, and weights are cast in every pass. The same 16-bit type is a converted model, or
        FSDP's mixed precision.
    attention_kernel : one of :data:`clustersim.compute.base.ATTENTION_KERNELS`; None takes what PyTorch
        would. It prices fused attention kernels; a model built with eager attention has none.
    activation_checkpointing : ``none``; ``full``, where backward repeats each block's forward; ``selective``, where it
        repeats all but fused attention and every second matrix product (torchtitan's per-op policy).
    optimizer : sgd, sgd_momentum, adam, adamw, lamb, or None. optimizer_impl : fused, foreach or for-loop.
    implementation : ``eager``, or ``compiled`` where elementwise kernels are generated.
    state_dtype : what the optimizer's parameters and states are in; ``param_dtype`` when None. FSDP and ZeRO compute in
        16 bits and update fp32 shards.
    float8_recipe : one of :data:`clustersim.compute.base.FLOAT8_RECIPES`, of dtype fp8.
    """

    dtype: str = "bf16"
    param_dtype: str = "fp32"
    attention_kernel: str | None = None
    activation_checkpointing: str = "none"
    optimizer: str | None = "adamw"
    optimizer_impl: str = "foreach"
    implementation: str = "eager"
    state_dtype: str | None = None
    float8_recipe: str = "tensorwise"


def setting_of(device: Device, how: Execution, constants: Constants = CONSTANTS) -> Setting:
    """Where and how the kernels of a step run. Raises ScenarioError as :func:`~clustersim.compute.base.setting`."""
    where = setting(
        device, how.dtype, attention_kernel=how.attention_kernel, implementation=how.implementation,
        float8_recipe=how.float8_recipe, constants=constants,
    )  # fmt: skip
    return replace(where, autocast=how.dtype in HALF and how.param_dtype == "fp32")


def step_cost(
    model: Model, device: Device, micro_batch_size: int, how: Execution = Execution(), constants: Constants = CONSTANTS
) -> StepCost:
    """What one rank's step costs on a device; ``micro_batch_size`` : samples of one forward and backward pass.

    The notes of the cost name estimated device figures. Raises ScenarioError for an unknown choice or a batch below
    one.
    """
    if micro_batch_size < 1:
        raise ScenarioError(
            f"micro_batch_size = {micro_batch_size} must be at least 1 (at $.strategy.micro_batch_size)"
        )
    if how.activation_checkpointing not in CHECKPOINTING:
        raise ScenarioError(
            f"unknown activation_checkpointing {how.activation_checkpointing!r}; "
            f"{nearest(how.activation_checkpointing, CHECKPOINTING)}"
        )
    images = model.sample == "image" and not model.seq_len
    return _cost(replace(setting_of(device, how, constants), images=images), model, micro_batch_size, how)


def _cost(where: Setting, model: Model, batch: int, how: Execution) -> StepCost:
    constants, volta = where.constants, 0 < where.device.sm < 80
    forward, backward = _passes(where, model, batch, how.activation_checkpointing)
    state_bytes = DTYPE_BYTES[how.state_dtype or how.param_dtype]
    return StepCost(
        forward=np.array([cost.seconds for cost in forward]),
        backward=np.array([cost.seconds for cost in backward]),
        forward_bound=tuple(cost.bound for cost in forward),
        backward_bound=tuple(cost.bound for cost in backward),
        forward_flops=np.array([cost.flops for cost in forward]),
        backward_flops=np.array([cost.flops for cost in backward]),
        optimizer=optimizer_time(where, model, how.optimizer, how.optimizer_impl, element_bytes=state_bytes),
        optimizer_floor=optimizer_floor(where, model, how.optimizer, how.optimizer_impl),
        grad_copy_bandwidth=where.device.stream_rate(),
        per_tensor=constants.per_tensor,
        step_overhead=constants.step_overhead,
        overlap_slowdown=constants.overlap_slowdown_volta if volta else constants.overlap_slowdown,
        jitter=constants.jitter_volta if volta else constants.jitter,
        notes=_notes(where),
        forward_launch=np.array([cost.launch for cost in forward]),
        backward_launch=np.array([cost.launch for cost in backward]),
        forward_mix=tuple(cost.mix for cost in forward),
        backward_mix=tuple(cost.mix for cost in backward),
        optimizer_traffic=fused_traffic(model, how.optimizer, element_bytes=state_bytes),
    )


def _notes(where: Setting) -> tuple[str, ...]:
    device, runs_as = where.device, where.device.runs_as(where.dtype)
    swapped = f"{device.name} has no {where.dtype} units: GEMMs run as {runs_as}"
    return (*device.notes, *((swapped,) if runs_as != where.dtype else ()))


def _passes(where: Setting, model: Model, batch: int, checkpointing: str) -> tuple[list[Pass], list[Pass]]:
    """Costs of forward and backward of every layer; layers with the same kernels are priced once."""
    known: dict[tuple[object, ...], tuple[Pass, Pass]] = {}
    costs = []
    for layer in model.layers:
        recompute = checkpointing if layer.kind == "block" else "none"
        key = (layer.kind, layer.kernels, layer.parameters, recompute)
        if key not in known:
            known[key] = _layer(where, layer, batch, recompute)
        costs.append(known[key])
    return [forward for forward, _ in costs], [backward for _, backward in costs]


def _layer(where: Setting, layer: Layer, batch: int, recompute: str) -> tuple[Pass, Pass]:
    kernels, dense = layer.kernels, layer.kind == "block"
    cast = cast_time(where, layer.parameters) if layer.kind != "embedding" else 0.0
    again = {"none": (), "full": kernels, "selective": _selective(kernels)}[recompute]
    ahead = price(where, ((kernels, "F"),), batch, dense=dense, more=cast)
    back = price(where, ((kernels, "B"), (again, "R")), batch, dense=dense, more=cast)
    return ahead, back


def _selective(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """What torchtitan's per-op policy repeats: everything but fused attention and every second matrix product.

    Of a loop over experts that is every second expert's.
    """
    products = [i for i, kernel in enumerate(kernels) if kernel.kind == "gemm" and kernel.repeat == 1]
    kept = set(products[::2]) | {i for i, kernel in enumerate(kernels) if kernel.kind == "attention"}
    rest = [kernel if kernel.repeat == 1 else kernel.halved() for i, kernel in enumerate(kernels) if i not in kept]
    return tuple(kernel for kernel in rest if kernel is not None)
