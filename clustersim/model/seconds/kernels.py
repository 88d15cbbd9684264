"""One kernel of a model, forward or backward, in seconds: dispatch by kind, and what bounds it."""

from __future__ import annotations

import math
from dataclasses import replace

from clustersim.core.errors import ModelError, nearest
from clustersim.core.model import Kernel
from clustersim.model.seconds import attention, gemm
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.conv import conv_parts
from clustersim.model.seconds.float8 import forward_share, gradient_setting, product_share
from clustersim.model.seconds.memory_bound import memory_time, traffic_rate
from clustersim.model.seconds.scan import scan_parts

KINDS = ("gemm", "conv", "attention", "scan", "memory", "recurrent", "host")

CLAMP = "expert_clamp"
"""Clamps of what experts' first products make, ahead of their activation."""

# Passes over the score matrix of unfused attention besides its GEMMs: scale, mask, softmax, dropout.
_EAGER_PASSES = 9.0
FLASH_KERNELS = frozenset({"fa1", "triton", "fa2", "fa3", "fa4"})
"""Kernels that have no room for a mask and run in 16 bits alone."""


def spent(where: Setting, kernel: Kernel, batch: float, part: str) -> tuple[float, float, str]:
    """Seconds of a part's own work (casts of 8-bit operands apart) and of its launches, and what limits the work:
    ``"compute"`` or ``"memory"``.

    ``part`` : ``F`` forward, ``B`` backward, ``I`` or ``W`` the half of backward that makes input or weight gradients:
    everything but products with weights has an I half only.

    Raises :class:`ModelError` for an unknown kind.
    """
    if kernel.kind not in KINDS:
        raise ModelError(f"kernel {kernel.name!r} has unknown kind {kernel.kind!r}; {nearest(kernel.kind, KINDS)}")
    if kernel.kind == "host" and not where.hosted:
        return 0.0, 0.0, "memory"  # a graph of the whole step has no host that reads anything
    if kernel.name == CLAMP and not where.hosted and not where.expert_streams:
        return 0.0, 0.0, "memory"  # the one kernel of all experts that such a graph has clamps what it multiplied
    compute, memory = parts(where, kernel, batch, part)
    # The device stands still while the host does something it waits for.
    launch_floor = where.device.launch if kernel.kind == "host" else where.device.kernel_floor
    return (
        max(compute, memory),
        launches(kernel, part) * _one_by_one(where, kernel) * launch_floor.value,
        "compute" if compute >= memory else "memory",
    )


def _one_by_one(where: Setting, kernel: Kernel) -> int:
    """Kernels of a launch that follow each other on a stream: one, or a grouped product's share of the experts. Gate
    and up are one product there."""
    if not where.expert_streams or not grouped(kernel):
        return 1
    return math.ceil(kernel.repeat / where.expert_streams) if kernel.first_reader else 0


def grouped(kernel: Kernel) -> bool:
    """Whether a kernel is the product of all experts of a rank in one call."""
    return weighted(kernel) and kernel.launches == 1 and kernel.cut.startswith("expert")


def weighted(kernel: Kernel) -> bool:
    """Whether a kernel is a product with weights, whose backward has two halves that can be apart."""
    return kernel.kind == "gemm" and not kernel.batch and kernel.backward_flops >= 1.5 * kernel.flops


def launches(kernel: Kernel, part: str) -> int:
    """GPU kernels launched for one part of a kernel."""
    if part in {"F", "R"}:
        return kernel.launches
    if part == "W":
        return kernel.backward_launches // 2 if weighted(kernel) else 0
    return kernel.backward_launches - launches(kernel, "W") if part == "I" else kernel.backward_launches


def flops(kernel: Kernel, part: str) -> float:
    """FLOPs per sample that one part of a kernel executes."""
    if part in {"F", "R"}:
        return kernel.flops
    half = kernel.backward_flops / 2 if weighted(kernel) else 0.0
    return {"B": kernel.backward_flops, "I": kernel.backward_flops - half, "W": half}[part]


def parts(where: Setting, kernel: Kernel, batch: float, part: str) -> tuple[float, float]:
    """Seconds of arithmetic and of memory traffic of a kernel, without the kernel floor."""
    where = _setting_of(where, kernel)
    backward = part not in {"F", "R"}
    if kernel.kind == "host" or (part == "W" and not weighted(kernel)) or (backward and not kernel.halves):
        return 0.0, 0.0
    if kernel.kind == "memory":
        return 0.0, memory_time(where, kernel, batch, backward=backward)
    if kernel.kind == "attention":
        if where.attention_kernel == "eager":
            return _unfused(where, kernel, batch, backward=backward)
        return attention.attention_parts(where, kernel, batch, backward=backward)
    if kernel.kind == "scan":
        return scan_parts(where, kernel, batch, backward=backward)
    if kernel.kind == "conv":
        return conv_parts(where, kernel, batch, backward=backward)
    if kernel.kind == "recurrent":
        return _recurrent(where, kernel, batch, backward=backward)
    return _linear(where, kernel, batch, part)


def _setting_of(setting: Setting, kernel: Kernel) -> Setting:
    """How one kernel runs: in fp32 among others of 16 bits, or by the kernel that takes what FlashAttention does not.
    cuDNN's takes masks and heads of two widths, too."""
    setting = setting.with_dtype("fp32") if kernel.fp32 else setting
    if (
        (kernel.flash and not kernel.fp32)
        or kernel.kind != "attention"
        or setting.attention_kernel not in FLASH_KERNELS
    ):
        return setting
    kernels = setting.device.attention
    return replace(setting, attention_kernel="efficient" if "efficient" in kernels else "eager")


def _recurrent(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """Products of a recurrent state, one step after the other; the gradient of their weights is one product in the end,
    as cuDNN has it."""
    rows = kernel.m * batch
    n = float(kernel.n)
    k = float(kernel.k)
    steps = kernel.repeat
    compute, memory = gemm.linear_parts(setting, rows, k if backward else n, n if backward else k)
    step = steps * max(compute, memory)
    if not backward:
        return step, steps * memory
    weights = gemm.linear_parts(setting, k, n, rows * steps)
    return step + max(weights), steps * memory + weights[1]


def _linear(setting: Setting, kernel: Kernel, batch: float, part: str) -> tuple[float, float]:
    """A dense layer (rows grow with the batch) or a batch of products of two activations (the count grows).

    Repeated products run one after the other, or, where one launch does them all, share the SMs tile by tile: a grouped
    kernel, as CUTLASS and torch's ``_grouped_mm`` have it.
    """
    share = product_share(setting)
    rows, count = (kernel.m, kernel.batch * batch) if kernel.batch else (kernel.m * batch, 1.0)
    if kernel.repeat > 1:
        if kernel.launches > 1:
            if kernel.cut == "vocab" and part != "F":  # each chunk of tokens adds to one gradient
                setting = replace(setting, summed_bytes=setting.element_bytes)
            product = _linear(setting, replace(kernel, repeat=1), batch, part)
            return kernel.repeat * product[0], kernel.repeat * product[1]
        count *= kernel.repeat
    m = float(rows)
    n = float(kernel.n)
    k = float(kernel.k)
    together = gemm.grouped_parts if kernel.repeat > 1 else gemm.linear_parts
    parts_of = gemm.unaligned_parts if _unaligned(setting, kernel) else together
    if part in {"F", "R"}:
        compute, memory = parts_of(setting, m, n, k, count)
        rate = product_share(setting) * forward_share(setting)
        return compute / rate + _odd(setting, kernel, compute / rate, count, (m, n, k)), memory
    # Gradient of the second operand (weights), then of the first (inputs), which the first layer does not need.
    of_weights = "W" in kernel.halves and (part != "I" or not weighted(kernel))
    sizes = [(k, n, m)] if of_weights else []
    both = [parts_of(gradient_setting(setting), k, n, m, count)] if of_weights else []
    if kernel.halves.endswith("I") or (part != "W" and kernel.backward_flops >= 1.5 * kernel.flops):
        sizes.append((m, k, n))
        both.append(parts_of(setting, m, k, n, count))
    if "R" in kernel.halves and part != "W":
        sizes.append((m, n, k))
        both.append(parts_of(setting, m, n, k, count))
    seconds = [
        max(compute / share + _odd(setting, kernel, compute / share, count, size), memory)
        for (compute, memory), size in zip(both, sizes, strict=True)
    ]
    if setting.summed_bytes and of_weights and weighted(kernel) and part != "I":
        seconds[0] = _summed(setting, seconds[0], count * k * n)
    return sum(seconds), max(memory for _, memory in both)


def _summed(setting: Setting, product: float, weights: float) -> float:
    """Seconds of a product of so many elements that is added to what memory holds."""
    traffic = 2.0 * setting.summed_bytes * weights / setting.device.stream_rate()
    return max(product, traffic) + setting.constants.sum_exposed * min(product, traffic)


def _odd(setting: Setting, kernel: Kernel, compute: float, count: float, size: tuple[float, float, float]) -> float:
    """Seconds that rows of an odd length add to so many products of (rows, columns, inner) elements, 0 where they are
    even.

    Operands and their gradients are laid out with n or k innermost, and tensor cores load 16 bytes at a time where rows
    begin at multiples of them. Compiled code pads where it is faster (``torch._inductor.config.shape_padding``, on
    since PyTorch 2.1; pull request 101915): an operand with an odd side is copied to where there is room, and the
    product's own padding is a view.
    """
    if not setting.half or not (kernel.n % 2 or kernel.k % 2):
        return 0.0
    slower = compute * (1.0 / setting.constants.misaligned - 1.0)
    if not setting.compiled:
        return slower
    rows, columns, inner = size
    copied = sum(one * other for one, other in ((rows, inner), (inner, columns)) if one % 2 or other % 2)
    element = setting.element_bytes
    return min(slower, 2.0 * count * copied * element / traffic_rate(setting, element))


def _unaligned(setting: Setting, kernel: Kernel) -> bool:
    """Whether no tensor core can load a batched product of activations: matrices that do not begin at multiples of 16
    bytes (heads of 150 or 450 elements) get a kernel of the fp32 units ("Tensor Core Usage" in the cuBLAS
    documentation)."""
    even = not (kernel.n % 2 or kernel.k % 2)
    return setting.half and bool(kernel.batch) and even and bool(kernel.n % 8 or kernel.k % 8)


def _unfused(setting: Setting, kernel: Kernel, batch: float, *, backward: bool) -> tuple[float, float]:
    """A fused attention kernel run as the unfused ops it replaces: the full square, written to memory."""
    scores = Kernel(
        "scores",
        "gemm",
        m=kernel.seq,
        n=kernel.seq,
        k=kernel.head_dim,
        batch=kernel.heads,
        flops=1.0,
        backward_flops=2.0,
    )
    context = Kernel(
        "context",
        "gemm",
        m=kernel.seq,
        n=kernel.head_dim,
        k=kernel.seq,
        batch=kernel.heads,
        flops=1.0,
        backward_flops=2.0,
    )
    products = [_linear(setting, product, batch, "B" if backward else "F") for product in (scores, context)]
    square = float(kernel.heads) * kernel.seq**2 * _EAGER_PASSES
    softmax = Kernel("softmax", "memory", nbytes=square, backward_nbytes=square)
    elementwise = memory_time(setting, softmax, batch, backward=backward)
    compute = sum(compute for compute, _ in products)
    return (0.0, elementwise + compute) if elementwise > compute else (elementwise + compute, 0.0)
