"""Samples that are packed from documents: what attention costs where tokens attend inside their own document only."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import msgspec
from msgspec import Meta

from clustersim.core.errors import ModelError
from clustersim.core.model import Kernel, Model

Tokens = Annotated[float, Meta(gt=0, le=1e9)]


class Packing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[model.packing]``: a sample is filled with documents, and attention keeps to each of them (flash attention with
    the lengths of sequences, as TRL's, axolotl's and Megatron's packing has it).

    Parameters
    ----------
    mean : tokens of a document. std : their standard deviation over documents.
    """

    mean: Tokens
    std: Annotated[float, Meta(ge=0, le=1e9)] = 0.0

    @property
    def length(self) -> float:
        """Tokens of the document that a token is in, in the mean over tokens: the mean square over the mean."""
        return (self.mean**2 + self.std**2) / self.mean


def with_packing(model: Model, packing: Packing) -> Model:
    """The model whose attention sees documents: pairs of tokens go with the mean square of their lengths, no more than
    a whole sample has. Raises :class:`ModelError` for attention that writes its scores, which knows no documents."""
    known: dict[tuple[Kernel, ...], tuple[Kernel, ...]] = {}
    if not any(kernel.kind == "attention" for layer in model.layers for kernel in layer.kernels):
        raise ModelError(f"{model.name}: packing needs fused attention; written scores are of the whole sample")
    layers = []
    for layer in model.layers:
        if layer.kernels not in known:
            known[layer.kernels] = tuple(_packed(kernel, packing) for kernel in layer.kernels)
        layers.append(replace(layer, kernels=known[layer.kernels]))
    return replace(model, layers=tuple(layers))


def _packed(kernel: Kernel, packing: Packing) -> Kernel:
    if kernel.kind != "attention" or packing.length >= kernel.seq:
        return kernel
    # Of the square, or of its causal half, and of what a window leaves of it.
    pairs = float(kernel.seq) * packing.length / (2.0 if kernel.causal else 1.0)
    whole = float(kernel.seq) ** 2 / (2.0 if kernel.causal else 1.0)
    of_whole = kernel.flops / (2.0 * kernel.heads * kernel.head_dim * 2.0)
    share = min(1.0, pairs / min(whole, max(of_whole, 1.0)))
    return replace(
        kernel,
        flops=kernel.flops * share,
        backward_flops=kernel.backward_flops * share,
        document=min(float(kernel.seq), packing.length),
    )
