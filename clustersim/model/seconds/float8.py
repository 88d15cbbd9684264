"""What linear layers in 8 bits pay besides their products: casts that no neighbouring kernel takes in.

With one scale a tensor (``tensorwise``; Transformer Engine's delayed and current scaling alike) what casts cost is in
:attr:`~clustersim.model.seconds.base.ComputeConstants.fp8_linear`. With one scale a row (torchao's ``rowwise``) each
operand is read for its rows' largest values and cast, once along each dimension that a product runs over, so that input
and output gradient are cast twice; and backward's products, which accumulate exactly, are tensorwise ones whose result
a further kernel scales (pytorch/ao #1325, #2184). Bytes an element: 2 read for the maximum, 2 read and 1 written for
the cast, 4 for the rescaling. Rows that lie in one piece are read once: a block of threads that looked for a row's
maximum finds the row in its cache, of a few KiB; of what it looked through across rows nothing is left. Of torchao's
four linears on H100 (pytorch/ao #2185) these explain forward and backward
to 4 to 10 %.

With scales of blocks (``blockwise``, ``mxfp8``, ``nvfp4``; Transformer Engine's recipes of these names) one kernel
casts an operand once, into both layouts that products run over, at the rate of a copy: inputs forward, gradients of
outputs backward. NVFP4's looks for the tensor's largest value before. Weights are cast by a step's first micro-batch
alone, and left out.
"""

from __future__ import annotations

from clustersim.core.model import Kernel
from clustersim.model.seconds.base import Setting
from clustersim.model.seconds.kernel_law.sheet import OPERAND_BYTES
from clustersim.model.seconds.memory_bound import traffic_rate

CAST_ALONG = 3.0
CAST_ACROSS = 5.0
RESCALE = 4.0
HALF_READ = 2.0
"""Bytes of an element in 16 bits."""
ROWWISE_FORWARD = 0.9
"""Of a tensorwise product's rate, what the rowwise kernel of forward keeps: most shapes 0.9 to 1, a few half
(pytorch/pytorch #147971)."""


def forward_share(setting: Setting) -> float:
    """Of the rate of products in :attr:`Setting.dtype`, what forward's kernel reaches."""
    return ROWWISE_FORWARD if setting.rowwise else 1.0


def gradient_setting(setting: Setting) -> Setting:
    """The setting of a weight gradient's product: ``rowwise_with_gw_hp`` leaves it in bf16."""
    return setting.with_dtype("bf16") if setting.rowwise and setting.float8_recipe.endswith("gw_hp") else setting


def cast_seconds(setting: Setting, kernel: Kernel, batch: float, part: str) -> float:
    """Seconds of the casts of one part of a linear (see :func:`clustersim.model.seconds.kernels.spent`) on so many
    samples.

    Linears that share an input (it is kept for one of them only) share its casts, as compiled code does.
    """
    if not (setting.rowwise or setting.blocks) or kernel.kind != "gemm" or kernel.batch:
        return 0.0
    rows = kernel.m * kernel.repeat * batch
    if setting.blocks:
        return _blocks_cast(setting, kernel, rows, part)
    given = rows * kernel.k
    weights = float(kernel.n * kernel.k * kernel.repeat)
    outputs = rows * kernel.n
    read = given if kernel.saved else 0.0
    in_bf16 = setting.float8_recipe == "rowwise_with_gw_hp"
    inputs = CAST_ALONG * outputs + CAST_ACROSS * weights + RESCALE * given
    gradients = 0.0 if in_bf16 else CAST_ACROSS * (read + outputs) + RESCALE * weights
    forward = CAST_ALONG * (read + weights)
    nbytes = {"F": forward, "R": forward, "I": inputs, "W": gradients, "B": inputs + gradients}[part]
    return nbytes / traffic_rate(setting, setting.element_bytes)


def _blocks_cast(setting: Setting, kernel: Kernel, rows: float, part: str) -> float:
    each = HALF_READ + 2.0 * OPERAND_BYTES[setting.blocks] + HALF_READ * (setting.blocks == "nvfp4")
    forward = each * rows * kernel.k if kernel.saved else 0.0
    backward = each * rows * kernel.n
    nbytes = {"F": forward, "R": forward, "I": backward, "W": 0.0, "B": backward}[part]
    return nbytes / setting.device.stream_rate()
