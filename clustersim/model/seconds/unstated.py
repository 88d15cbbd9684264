"""What figures that nobody stated of a GPU may cost: a block of a model, with each as high and as low as it may be."""

from __future__ import annotations

import math
from dataclasses import replace
from types import MappingProxyType

import msgspec

from clustersim.core.device import DTYPES, Assumed, Device, SourcedFigure, unseen_width
from clustersim.core.model import Kernel
from clustersim.model.seconds.base import Execution, setting
from clustersim.model.seconds.price import price

TOKENS = 4096
WIDTH = 4096
HEAD_DIM = 128


class Doubt(msgspec.Struct, frozen=True):
    """An assumed figure, and by how much (relative) a block takes longer or shorter within its spread."""

    assumed: Assumed
    slower: float
    faster: float

    @property
    def half_width(self) -> float:
        """The larger of both."""
        return max(abs(self.slower), abs(self.faster))


def doubts(gpu: Device, dtype: str = "") -> tuple[Doubt, ...]:
    """Each assumed figure of a GPU and what it costs, in ``dtype`` (bf16, or what the GPU has)."""
    chosen = dtype or next(name for name in ("bf16", "fp16", "fp32") if name in gpu.peak)
    entries = (*gpu.assumed, *_unseen(gpu, gpu.runs_as(chosen)))
    if not entries:
        return ()
    usual = _block_seconds(gpu, chosen)
    return tuple(
        Doubt(
            entry,
            _block_seconds(_moved(gpu, entry, 1.0 - entry.spread), chosen) / usual - 1.0,
            _block_seconds(_moved(gpu, entry, 1.0 + entry.spread), chosen) / usual - 1.0,
        )
        for entry in entries
    )


def _unseen(gpu: Device, dtype: str) -> tuple[Assumed, ...]:
    """The share of its peak that products in ``dtype`` reach, where nobody measured it on the GPU's generation."""
    figure = gpu.matmul[dtype]
    if not figure.unseen:
        return ()
    return (Assumed(f"matmul.{dtype}", f"{figure.value:.0%} of the peak, {figure.source}", dtype, unseen_width(dtype)),)


def half_width(gpu: Device, dtype: str = "") -> float:
    """Relative half-width, nine in ten, that assumed figures add to the time of a step: each is off by itself."""
    return math.sqrt(sum(doubt.half_width**2 for doubt in doubts(gpu, dtype)))


def _moved(gpu: Device, entry: Assumed, factor: float) -> Device:
    """The GPU with one figure multiplied."""
    if entry.moves == "memory":
        return replace(gpu, stream=_times(gpu.stream, factor))
    if entry.moves == "rate":
        return replace(gpu, matmul=MappingProxyType({d: _times(figure, factor) for d, figure in gpu.matmul.items()}))
    if entry.moves in gpu.matmul:
        own = {entry.moves: _times(gpu.matmul[entry.moves], factor)}
        return replace(gpu, matmul=MappingProxyType({**gpu.matmul, **own}))
    if entry.moves == "sms":
        return replace(gpu, sms=max(1, round(gpu.sms * factor)))
    if entry.moves == "clock":
        return replace(gpu, clock=gpu.clock * factor)
    if entry.moves == "l2":
        return replace(gpu, l2=gpu.l2 * factor)
    if entry.moves == "tdp_w":
        return replace(gpu, tdp=gpu.tdp * factor)
    if entry.moves in DTYPES:
        return gpu  # a type that the GPU has no units for
    raise AssertionError(f"nothing moves {entry.moves!r}, which {entry.field} does")


def _times(figure: SourcedFigure, factor: float) -> SourcedFigure:
    return replace(figure, value=figure.value * factor)


def _block_seconds(gpu: Device, dtype: str) -> float:
    """Forward and backward of a transformer block of 4,096 wide on a sample of 4,096 tokens."""
    where = setting(gpu, Execution(dtype=dtype, param_dtype=dtype if dtype != "tf32" else "fp32"))
    kernels = (
        _linear(3 * WIDTH, WIDTH),
        _linear(WIDTH, WIDTH),
        _linear(4 * WIDTH, WIDTH),
        _linear(WIDTH, 4 * WIDTH),
        _attention(),
        Kernel("norm", "memory", nbytes=40.0 * TOKENS * WIDTH, backward_nbytes=80.0 * TOKENS * WIDTH),
    )
    return price(where, ((kernels, "F"), (kernels, "B")), 1, dense=True).seconds


def _linear(n: int, k: int) -> Kernel:
    flops = 2.0 * TOKENS * n * k
    return Kernel("linear", "gemm", m=TOKENS, n=n, k=k, flops=flops, backward_flops=2.0 * flops)


def _attention() -> Kernel:
    """Fused causal attention of as many heads as the block is wide."""
    flops = 2.0 * TOKENS * TOKENS * WIDTH
    nbytes = 4.0 * TOKENS * WIDTH
    return Kernel(
        "attention",
        "attention",
        heads=WIDTH // HEAD_DIM,
        head_dim=HEAD_DIM,
        seq=TOKENS,
        causal=True,
        flops=flops,
        backward_flops=2.5 * flops,
        nbytes=nbytes,
        backward_nbytes=2.0 * nbytes,
    )
