"""What Megatron-LM does around the activation of routed experts: the weight of each row, and GPT-OSS's clamps."""

from __future__ import annotations

from dataclasses import replace

from clustersim.core.model import Kernel
from clustersim.model.seconds.kernels import CLAMP

OFFSET = "await_offset"
"""The copy of a number to the device behind the clamps, for which PyTorch's ``torch.tensor`` lets the host wait."""


def weighted_activation(inside: dict[str, Kernel]) -> Kernel:
    """The activation of experts, which weights each token's row by its probability.

    Backward sums over a row for the weight's gradient, in a kernel of its own that reads again what the activation's
    backward reads: a row's sum has half as many elements as the gradient of gate and up, so that PyTorch's compiler
    makes two kernels (Megatron-LM core/fusions/fused_bias_swiglu.py, ``weighted_swiglu_back``).
    """
    kernel = inside["expert_activation"]
    widths = 2 if "expert_gate" in inside else 1
    read_again = (widths + 1) * _elements(inside)
    return replace(
        kernel,
        backward_nbytes=kernel.backward_nbytes + read_again,
        backward_launches=kernel.backward_launches + 1,
    )


def _elements(inside: dict[str, Kernel]) -> float:
    """Elements of the activation's output, which the product behind it reads."""
    down = inside["expert_down"]
    return down.flops / (2.0 * down.n)


def clamped(inside: dict[str, Kernel]) -> dict[str, Kernel]:
    """Kernels of experts whose gate and up are clamped ahead of their activation, by kernels of their own.

    Megatron-LM core/fusions/fused_bias_geglu.py, ``weighted_bias_quick_geglu_impl``: both halves are clamped and joined
    again, 16 bytes for each 16-bit element of the activation's output. Backward of a clamp writes masks and selects by
    them, 8 bytes of the gate and 14 of the other, and joins both halves' gradients, 8 more.
    """
    elements = _elements(inside)
    clamp = Kernel(
        CLAMP,
        "memory",
        nbytes=8.0 * elements,
        backward_nbytes=15.0 * elements,
        launches=3,
        backward_launches=7,
        cut="expert",
        saved=inside["expert_activation"].saved,
    )
    ordered: dict[str, Kernel] = {}
    for name, kernel in inside.items():
        if name == "expert_activation":
            ordered[CLAMP] = clamp
        ordered[name] = kernel
    return ordered
