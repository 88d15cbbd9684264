"""Bandwidth-bound kernels: bytes over the share of STREAM bandwidth that elementwise code reaches."""

from __future__ import annotations

from clustersim.core.device import Device
from clustersim.core.model import AUTOCAST, FULL, HALF, Kernel
from clustersim.model.seconds.base import ComputeConstants, Setting

# torch.autocast runs these in fp32 (layer norms, softmax, losses), or they promote to it (the residual stream).
AUTOCAST_FP32 = frozenset({"norm", "layernorm", "rmsnorm", "softmax", "entropy", "residual"})


# Kernels over attention scores: long rows of contiguous elements, near the bandwidth in any dtype.
_STREAMING = frozenset({"scale", "mask", "softmax", "dropout"})


def traffic_rate(setting: Setting, element_bytes: int, *, streaming: bool = False) -> float:
    """Bytes per second of elementwise kernels on elements of a size."""
    constants, device = setting.constants, setting.device
    if setting.images:
        return _image_rate(setting, element_bytes)
    if setting.compiled:
        return device.stream_rate() * constants.memory_compiled
    return eager_rate(device, constants, 4 if streaming else element_bytes)


def _image_rate(setting: Setting, element_bytes: int) -> float:
    """Bytes per second of norms and activations of images.

    Eager kernels compute on 16-bit elements in fp32: the memory's time, and the fp32 units' for what they do of each
    byte, one after the other. Cards since Ampere's GA102 have twice the units for each SM, and less memory.
    """
    constants, device = setting.constants, setting.device
    memory = device.stream_rate()
    if element_bytes >= 4 or setting.compiled:
        return memory * constants.memory_images
    units = device.peak["fp32"] * (0.5 if device.fp32_matrices else 1.0)
    return 1.0 / (1.0 / memory + constants.image_flops / units)


def eager_rate(device: Device, constants: ComputeConstants, element_bytes: int) -> float:
    """Bytes per second of PyTorch's own elementwise kernels on elements of a size.

    In 16 bits an SM has as many casts, random numbers and reductions to do for half the bytes: a GPU whose memory has
    little for each SM hides less of that behind it, and reaches more of its memory's rate.
    """
    memory = device.stream_rate()
    if element_bytes >= 4:
        return memory * constants.memory_fp32
    moved = constants.half_a_clock * element_bytes * device.sms * device.clock
    return memory * constants.memory_half * max(1.0, constants.half_gain / (1.0 + memory / moved))


def memory_time(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> float:
    """Seconds of a bandwidth-bound kernel, without the kernel floor.

    Where the kernel does not tell its types, norms, softmax, losses and the residual stream move fp32 elements under
    autocast. Generated code casts in registers: it reads the 16 bits that a product wrote, and writes the gradient that
    the next one reads.
    """
    wide = setting.autocast and setting.half and moves_fp32(kernel.name)
    if setting.compiled and _after_product(kernel.name):
        wide = False
    element_bytes = 4 if wide else setting.element_bytes
    told = None if setting.compiled else kernel.backward_element if backward else kernel.element
    moved = element_bytes if told is None else told[_types(setting)]
    nbytes = (kernel.backward_nbytes if backward else kernel.nbytes) * batch * moved
    return nbytes / traffic_rate(setting, element_bytes, streaming=kernel.name in _STREAMING)


def _types(setting: Setting) -> int:
    """The place of a setting's types in :data:`~clustersim.core.model.ByteSizes`."""
    if not setting.half:
        return FULL
    return AUTOCAST if setting.autocast else HALF


def _after_product(name: str) -> bool:
    """Whether an op reads what a product wrote and its gradient goes to that product: softmax and losses."""
    return any(word in {"softmax", "entropy"} for word in name.replace("_", " ").split())


def moves_fp32(name: str) -> bool:
    """Whether autocast moves fp32 through an op of this name; cuDNN's batch norm takes 16 bits, statistics apart."""
    return "batch_norm" not in name and any(word in AUTOCAST_FP32 for word in name.replace("_", " ").split())
