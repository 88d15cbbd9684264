"""What kernels keep for backward where a framework's are not those of the model's own code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from clustersim.core.memo import kept_with_first
from clustersim.core.model import Kernel, Model
from clustersim.training.partition.dispatch import FLOAT8_ROW
from clustersim.training.partition.nodes import has_weights, scaled

LINEAR_BYTES = {"tensorwise": 1.0, "blockwise": FLOAT8_ROW, "mxfp8": FLOAT8_ROW, "nvfp4": 0.5 + 1.0 / 16.0}
"""Bytes of an element that Transformer Engine's linears keep of their input, with its scales: one a tensor, four bytes
for 128 elements, or a byte for every 32 or 16 (pytorch/module/linear.py, ``saved_inputmat``, of which backward needs
the columns alone)."""


def kept_by(model: Model, framework: str) -> Model:
    """The model with what a framework's own kernels keep.

    Megatron-LM's bias_gelu keeps its input alone (core/fusions/fused_bias_gelu.py), also where Hugging Face's code has
    the formula; op by op it stays what it is. Nobody keeps what experts put out, since rows are weighted where they are
    activated (core/transformer/moe/experts.py, ``weighted_bias_swiglu``). torchtitan has the model's own code.
    """
    return model if framework == "torchtitan" else _kept_by(model, framework)


@kept_with_first(maxsize=4)
def _kept_by(model: Model, framework: str) -> Model:
    return _with_kernels(model, _in_megatron if framework == "megatron" else _one_gelu)


@kept_with_first(maxsize=4)
def with_linears_in_8_bits(model: Model, recipe: str) -> Model:
    """The model whose blocks' linears keep their inputs in 8 bits or less, as Transformer Engine's do.

    ``recipe`` : a row of :data:`LINEAR_BYTES`. Attention keeps its own output in 16 bits, and the output projection a
    second one; router and head are none of its layers, and activations keep their input as it is.
    """
    part = LINEAR_BYTES[recipe] / 2.0

    def narrowed(kernel: Kernel) -> Kernel:
        """A product that keeps its input so."""
        if not has_weights(kernel) or kernel.name in {"router", "logits"}:
            return kernel
        return scaled(kernel, part + (kernel.name == "out"), ("saved",))

    return _with_kernels(model, narrowed, kinds=("block", "mtp"))


def kept_in_8_bits(kernel: Kernel) -> Kernel:
    """A product's or an activation's input, kept in 8 bits with its scales (``float8_activations``).

    Attention needs its own output, which is the output projection's input, in 16.
    """
    if kernel.name == "combine":
        return replace(kernel, saved=0.0)
    product = has_weights(kernel) and kernel.name not in {"router", "out", "logits"}
    if not product and not kernel.name.endswith("activation"):
        return kernel
    return scaled(kernel, FLOAT8_ROW / 2.0, ("saved",))


def _with_kernels(model: Model, changed: Callable[[Kernel], Kernel], kinds: tuple[str, ...] = ()) -> Model:
    """The model with changed kernels in layers of these ``kinds``, of all where there are none; layers that share one
    tuple of kernels keep sharing one."""
    apart = {id(layer.kernels): layer.kernels for layer in model.layers if not kinds or layer.kind in kinds}
    known = {key: tuple(map(changed, kernels)) for key, kernels in apart.items()}
    layers = (replace(layer, kernels=known.get(id(layer.kernels), layer.kernels)) for layer in model.layers)
    return replace(model, layers=tuple(layers))


def _in_megatron(kernel: Kernel) -> Kernel:
    return replace(kernel, saved=0.0) if kernel.name == "combine" and kernel.saved else _one_gelu(kernel)


def _one_gelu(kernel: Kernel) -> Kernel:
    """One that is priced as one pass in and out, and keeps four tensors of that size, keeps one."""
    formula = kernel.name == "activation" and kernel.saved == 2 * kernel.nbytes > 0
    return replace(kernel, saved=kernel.nbytes / 2) if formula else kernel
