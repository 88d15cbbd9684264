"""What runs of kernels cost: seconds, FLOPs, what bounds them, and the host's time to launch them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import msgspec

from clustersim.core.mix import Mix, total
from clustersim.core.model import Kernel, Tensor
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.calls import adapter_calls
from clustersim.model.seconds.conv import unfilled
from clustersim.model.seconds.float8 import cast_seconds, padding_seconds
from clustersim.model.seconds.kernels import flops, launches, spent


class Pass(msgspec.Struct, frozen=True):
    """Kernels run back to back on one device.

    Parameters
    ----------
    seconds : float [s]. flops : executed, of one micro-batch. bound : one of :data:`clustersim.core.program.BOUNDS`.
    launch : float [s], the host's time to launch them. mix : what ``seconds`` are spent on.
    """

    seconds: float
    flops: float
    bound: str
    launch: float
    mix: Mix


WIDE = frozenset({"router", "logits"})
"""Products that are never in 8 bits: scores of a router and of a vocabulary are none of a recipe's modules."""


def in_recipe(where: Setting, kind: str) -> bool:
    """Whether linears of a layer of this ``kind`` run in the setting's 8 or 4 bits: those of blocks, and the block and
    the projection of a module that predicts a further token, but in 4 bits (Megatron-LM core/transformer/
    multi_token_prediction.py, ``_proj_and_transformer_layer``; DeepSeek-V3's report keeps embedding and head alone)."""
    return kind == "block" or (kind == "mtp" and where.blocks != "nvfp4")


def price(
    where: Setting, runs: Iterable[tuple[Iterable[Kernel], str]], batch: int, *, dense: bool, more: float = 0.0
) -> Pass:
    """What runs of kernels cost: their time, or the host's time to launch them if that is longer.

    Parameters
    ----------
    runs : kernels, and which part of each runs (see :func:`clustersim.model.seconds.kernels.spent`); ``R`` is a
    repeated F. batch : samples. dense : whether their products run in fp8 where the setting says so
        (:func:`in_recipe`): embedding, head, routers and products of activations stay in bf16.
    more : float [s] of memory-bound work besides them (autocast's copies).
    """
    outside = where.with_dtype("bf16") if where.dtype == "fp8" else where
    busy = 0.0
    host = 0.0
    executed = 0.0
    shares: defaultdict[str, float] = defaultdict(float)
    mixes = [Mix()]
    for kernels, part in runs:
        for kernel in kernels:
            linear = dense and kernel.kind == "gemm" and not kernel.batch and kernel.name not in WIDE
            work, floor, bound = spent(where if linear else outside, kernel, batch, part)
            done = flops(kernel, part) * batch
            mix = _mixed(work, floor, done / where.peak, bound, part)
            mixes.append(_with_unfilled(mix, outside, kernel, batch, part) if kernel.kind == "conv" else mix)
            if casts := _around(where, kernel, batch, part) if linear else 0.0:
                mixes.append(_mixed(casts, 0.0, 0.0, "memory", part))
                shares["memory"] += casts
            busy += work + floor + casts
            shares["launch" if floor > work else bound] += work + floor
            host += launches(kernel, part) * where.device.launch.value * where.hosted
            if where.module_call and launches(kernel, part):
                host += where.module_call * adapter_calls(kernel)
            executed += done
    if more:
        busy += more
        shares["memory"] += more
    if host > busy:
        return Pass(host, executed, "launch", host, total([*mixes, Mix(memory=more, launch=host - busy)]))
    bound = max(shares, key=lambda bound: shares[bound]) if shares else "compute"
    return Pass(busy, executed, bound, host, total([*mixes, Mix(memory=more)]))


def _around(where: Setting, kernel: Kernel, batch: int, part: str) -> float:
    """Seconds [s] of what a linear in 8 bits has around its product: casts, and copies that pad its rows."""
    return cast_seconds(where, kernel, batch, part) + padding_seconds(where, kernel, batch, part)


def _mixed(work: float, floor: float, peak: float, bound: str, part: str) -> Mix:
    """What a part of a kernel spends its time on. Where an algorithm saves FLOPs (Winograd's), ``products`` is
    negative."""
    if part == "R":
        return Mix(again=work + floor)
    return Mix(peak, work - peak, launch=floor) if bound == "compute" else Mix(peak, memory=work - peak, launch=floor)


def _with_unfilled(mix: Mix, where: Setting, kernel: Kernel, batch: int, part: str) -> Mix:
    """The same of a convolution, with what more images would save by filling SMs apart."""
    working = mix.peak + mix.products
    if mix.memory or not working:  # limited by memory traffic, or repeated
        return mix
    idle = working * unfilled(where, kernel, batch, backward=part != "F")
    return msgspec.structs.replace(mix, products=mix.products - idle, unfilled=idle)


def unpack_time(where: Setting, packed: Collection[Tensor]) -> float:
    """Writing out quantised weights in 16 bits, ahead of each product that reads one [s]: a kernel a weight
    (bitsandbytes ``kDequantizeBlockwise``)."""
    nbytes = sum((tensor.element + 2.0) * tensor.numel for tensor in packed)
    return nbytes / where.device.stream_rate() + len(packed) * where.device.kernel_floor.value


def cast_time(where: Setting, parameters: int) -> float:
    """Autocast's copy of fp32 weights to 16 bits, and of their gradients back: 6 bytes a parameter each [s]."""
    return 6.0 * parameters / where.device.stream_rate() if where.autocast else 0.0
