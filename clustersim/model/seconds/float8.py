"""What linear layers in 8 bits pay besides their products: casts that no neighbouring kernel takes in.

A cast is a kernel that streams, by the kernel law (:mod:`clustersim.model.seconds.kernel_law.casts`) at the device's
rate of a copy, whether code is generated or not.

With one scale a tensor (``tensorwise``; Transformer Engine's delayed and current scaling alike), or of blocks
(``blockwise``, ``mxfp8``, ``nvfp4``; Transformer Engine's recipes of these names), one kernel casts an operand once,
into both layouts that products run over: inputs forward, gradients of outputs backward. Where there is a scale of the
tensor, NVFP4's too, a kernel looks for its largest value before; delayed scaling, which need not, has steps 1 to 3 %
faster than that. Weights are cast by a step's first micro-batch alone, and left out.

With one scale a row (torchao's ``rowwise``) each operand is read for its rows' largest values and cast, once along each
dimension that a product runs over, so that input and output gradient are cast twice; and backward's products, which
accumulate exactly, are tensorwise ones whose result a further kernel scales (pytorch/ao #1325, #2184). Bytes an
element: 2 read for the maximum, 2 read and 1 written for the cast, 4 for the rescaling. Rows that lie in one piece are
read once: a block of threads that looked for a row's maximum finds the row in its cache, of a few KiB; of what it
looked through across rows nothing is left. Of torchao's four linears on H100 (pytorch/ao #2185) these explain forward
and backward to 2 to 10 %.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from clustersim.core.device import Device
from clustersim.core.model import Kernel
from clustersim.model.seconds.attention import half_of
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.kernel_law import kernel_laws, sheet_of
from clustersim.model.seconds.kernel_law.casts import stream_seconds
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES, Sheet

CAST_ALONG = 3.0
CAST_ACROSS = 5.0
RESCALE = 4.0
HALF_READ = 2.0
"""Bytes of an element in 16 bits."""
MXFP8_SHARE = 0.8
"""Of a copy's rate, what Transformer Engine's cast to MXFP8 keeps that scales blocks along both dimensions at once:
8,192 x 8,192 elements of 16 bits in 52 us on B200, where one along rows alone takes 35 (ROCm/TransformerEngine pull
request 598, its baseline of the CUDA kernel). ROCm's own keeps as much, by the same table: 57 us on MI355X. The kernel
of 2026-09 is not told apart."""
MXFP8_PRODUCT = 0.95
"""Of a tensorwise product's rate, what one with MXFP8's scales keeps. The kernels ahead of it are in that, which bring
the scales of both operands into the order that tensor cores read (Transformer Engine common/swizzle/swizzle.cu). Twelve
products of a 5B model's layer take 7.16 ms in MXFP8 on B300, and 6.81 with one scale a tensor, all operands cast before
(Transformer Engine docs/examples/gemm_profiling/gemm_profiling.rst). On MI355X products of 69 shapes with their casts
and their weights' are so 2 to 4 % slower than Primus-Turbo's means, 1,797 TFLOP/s forward and 1,978 backward (pull
request 274)."""
ROWWISE_FORWARD = 0.9
"""Of a tensorwise product's rate, what the rowwise kernel of forward keeps: most shapes 0.9 to 1, a few half
(pytorch/pytorch #147971)."""


def forward_share(setting: Setting) -> float:
    """Of the rate of products in :attr:`Setting.dtype`, what forward's kernel reaches."""
    return ROWWISE_FORWARD if setting.rowwise else 1.0


def product_share(setting: Setting) -> float:
    """Of the rate of products in :attr:`Setting.dtype`, what the scales of blocks leave."""
    return MXFP8_PRODUCT if setting.blocks == "mxfp8" else 1.0


def gradient_setting(setting: Setting) -> Setting:
    """The setting of a weight gradient's product: ``rowwise_with_gw_hp`` leaves it in bf16."""
    return setting.with_dtype("bf16") if setting.rowwise and setting.float8_recipe.endswith("gw_hp") else setting


def cast_seconds(setting: Setting, kernel: Kernel, batch: float, part: str) -> float:
    """Seconds of the casts of one part of a linear (see :func:`clustersim.model.seconds.kernels.spent`) on so many
    samples.

    Linears that share an input (it is kept for one of them only) share its casts, as compiled code does.
    """
    if not setting.in_8_bits or kernel.kind != "gemm" or kernel.batch:
        return 0.0
    moved = _by_row if setting.rowwise else _at_once
    nbytes, casts = moved(setting, kernel, kernel.m * kernel.repeat * batch, part)
    if not nbytes:
        return 0.0
    if setting.expert_streams and kernel.cut.startswith("expert"):
        casts *= kernel.repeat
    law = kernel_laws().stream
    sheet = _copying(setting.device)
    slowed = MXFP8_SHARE if setting.float8_recipe == "mxfp8" else 1.0
    each = stream_seconds(law, sheet, np.asarray(nbytes / casts / slowed))
    return casts * float(each)


def padding_seconds(setting: Setting, kernel: Kernel, batch: float, part: str) -> float:
    """Seconds of the copies that bring rows of experts to multiples of 16 or 32, and back.

    Transformer Engine pytorch/module/{fp8_padding,fp8_unpadding}.py, around the products of Megatron-LM's TEGroupedMLP
    (core/transformer/moe/experts.py): inputs ahead of the first product and outputs behind the last are read and
    written, and so are their gradients.
    """
    pads = setting.pads_experts and setting.in_8_bits and kernel.kind == "gemm" and kernel.cut.startswith("expert")
    if not pads or part == "W":
        return 0.0
    width = kernel.n if kernel.cut == "expert_row" else kernel.k if kernel.first_reader else 0
    return 2.0 * HALF_READ * kernel.m * kernel.repeat * batch * width / setting.device.stream_rate()


def _by_row(setting: Setting, kernel: Kernel, rows: float, part: str) -> tuple[float, int]:
    """Bytes of casts with one scale a row, and how many kernels move them: one a tensor, and one to rescale."""
    given = rows * kernel.k
    weights = float(kernel.n * kernel.k * kernel.repeat)
    outputs = rows * kernel.n
    read = given if kernel.first_reader else 0.0
    in_bf16 = setting.float8_recipe == "rowwise_with_gw_hp"
    forward = CAST_ALONG * (read + weights)
    inputs = CAST_ALONG * outputs + CAST_ACROSS * weights + RESCALE * given
    gradients = 0.0 if in_bf16 else CAST_ACROSS * (read + outputs) + RESCALE * weights
    ahead = (forward, 1 + bool(read))
    of_inputs = (inputs, 3)
    of_weights = (gradients, 0 if in_bf16 else 2 + bool(read))
    both = (inputs + gradients, of_inputs[1] + of_weights[1])
    return {"F": ahead, "R": ahead, "I": of_inputs, "W": of_weights, "B": both}[part]


def _at_once(setting: Setting, kernel: Kernel, rows: float, part: str) -> tuple[float, int]:
    """The same of casts into both layouts at once, and of the kernel that looks for the largest value before."""
    arithmetic = setting.blocks or "fp8"
    scaled = arithmetic in {"fp8", "nvfp4"}
    each = HALF_READ + 2.0 * OPERAND_BYTES[arithmetic] + HALF_READ * scaled
    if part == "W" or (part in {"F", "R"} and not kernel.first_reader):
        return 0.0, 0
    return each * rows * (kernel.k if part in {"F", "R"} else kernel.n), 1 + scaled


@lru_cache(maxsize=64)
def _copying(device: Device) -> Sheet:
    """The device whose copies run at its own rate: STREAM stands for the law's share of the bandwidth."""
    sheet = sheet_of(device, half_of(device))
    return replace(sheet, bandwidth=np.asarray(device.stream_rate() / kernel_laws().stream.stream))
