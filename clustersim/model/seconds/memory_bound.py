"""Bandwidth-bound kernels: bytes over the share of STREAM bandwidth that elementwise code reaches, beside what a
last-level cache still has of the kernel before."""

from __future__ import annotations

from clustersim.core.device import Device
from clustersim.core.model import AUTOCAST, FULL, HALF, Kernel
from clustersim.model.seconds.base import ComputeConstants, Setting

# torch.autocast runs these in fp32 (layer norms, softmax, losses), or they promote to it (the residual stream).
AUTOCAST_FP32 = frozenset({"norm", "layernorm", "rmsnorm", "softmax", "entropy", "residual"})


# Kernels over attention scores: long rows of contiguous elements, near the bandwidth in any dtype.
_STREAMING = frozenset({"scale", "mask", "softmax", "dropout"})


CACHE_A_CLOCK = 18.0
"""Bytes that an SM reads and writes in the last-level cache in a clock. Casts on an RTX PRO 6000 that fit there reach
8.9 TB/s beyond their launch, and 1.5 TB/s, the memory's rate, as soon as they do not (aiconfigurator's tables of casts,
whose calls repeat on the same tensors); an H100's reach 7.3."""
CACHE_HALVED = frozenset({"sm80", "sm90"})
"""Generations of two caches, each of which keeps what its own SMs read, so that half of all counts: an H100's casts
lose their gain between 20 and 32 MiB of its 50."""
CACHED = 0.5
"""Of what an elementwise kernel moves, what the cache spares the memory: the kernel before it wrote what it reads, but
what it writes goes to memory."""
SPILLED = 1.25
"""Of the cache, how much a kernel moves that finds nothing of it any more: an RTX PRO 6000's casts fall between 96 and
160 MiB of 128."""


def _memory_rate(device: Device, footprint: float) -> float:
    """Bytes per second of memory and cache together, for a kernel that moves ``footprint`` [bytes] in all; of memory
    alone where that is 0. What AMD's caches spare nobody measured."""
    memory = device.stream_rate()
    if device.amd or not footprint:
        return memory
    cache = device.l2 * (0.5 if device.arch in CACHE_HALVED else 1.0)
    kept = min(1.0, max(0.0, (SPILLED - footprint / cache) / (SPILLED - 1.0)))
    return max(memory, min(memory / (1.0 - CACHED * kept), CACHE_A_CLOCK * device.sms * device.clock))


def traffic_rate(setting: Setting, element_bytes: int, *, streaming: bool = False, footprint: float = 0.0) -> float:
    """Bytes per second of elementwise kernels on elements of a size, each of which moves ``footprint`` [bytes]; 0 where
    the cache has nothing of it."""
    constants, device = setting.constants, setting.device
    if setting.images:
        return _image_rate(setting, element_bytes, footprint)
    if setting.compiled:
        return _memory_rate(device, footprint) * constants.memory_compiled
    return eager_rate(device, constants, 4 if streaming else element_bytes, footprint)


def _image_rate(setting: Setting, element_bytes: int, footprint: float) -> float:
    """Bytes per second of norms and activations of images.

    Eager kernels compute on 16-bit elements in fp32: the memory's time, and the fp32 units' for what they do of each
    byte, one after the other. Cards since Ampere's GA102 have twice the units for each SM, and less memory.
    """
    constants, device = setting.constants, setting.device
    memory = _memory_rate(device, footprint)
    if element_bytes >= 4 or setting.compiled:
        return memory * constants.memory_images
    units = device.peak["fp32"] * (0.5 if device.fp32_matrices else 1.0)
    return 1.0 / (1.0 / memory + constants.image_flops / units)


def eager_rate(device: Device, constants: ComputeConstants, element_bytes: int, footprint: float = 0.0) -> float:
    """Bytes per second of PyTorch's own elementwise kernels on elements of a size.

    An SM has casts, random numbers and reductions to do for each element, twice as many a byte in 16 bits: a GPU whose
    memory has few bytes for each SM hides more of that behind them, and reaches more of its memory's rate.
    """
    memory = _memory_rate(device, footprint)
    moved = constants.half_a_clock * element_bytes * device.sms * device.clock
    usual = constants.memory_fp32 if element_bytes >= 4 else constants.memory_half
    return memory * max(usual, constants.memory_half * constants.half_gain / (1.0 + memory / moved))


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
    footprint = nbytes / max(1, kernel.backward_launches if backward else kernel.launches)
    return nbytes / traffic_rate(setting, element_bytes, streaming=kernel.name in _STREAMING, footprint=footprint)


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
