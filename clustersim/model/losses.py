"""A head that never has all logits at once: Liger's fused linear cross-entropy, Cut Cross-Entropy, and plain chunks.

Liger (arXiv:2410.10989; liger_kernel/ops/fused_linear_cross_entropy.py) takes the tokens in chunks, so many that a
chunk's logits are about as large as the input of the head, and makes the gradients with the logits: forward has all
three products, backward none. Cut Cross-Entropy (arXiv:2411.09009) keeps a number a token and computes the logits once
more in backward, in the kernel that makes their gradient; the blocks that it may skip there are not skipped here.
Plain chunks are torchtitan's ``ChunkedLossWrapper`` (torchtitan/components/loss.py): the head, the loss and their
backward of an eighth of the tokens after another, with the model's own kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from clustersim.core.errors import ModelError
from clustersim.core.model import ByteSizes, Kernel, Layer, Model
from clustersim.model.kernels import HALVES

NOTHING = (0.0, 0.0, 0.0)


def with_loss(model: Model, loss: str, batch: int) -> Model:
    """The model with its logits and their loss computed as ``loss`` says, ``"liger"`` or ``"cut"``, in micro-batches of
    ``batch`` samples. Raises :class:`ModelError` for one that ends in no words."""
    changed = 0
    layers = []
    for layer in model.layers:
        kernels = {kernel.name: kernel for kernel in layer.kernels}
        if layer.kind == "head" and {"logits", "cross_entropy"} <= kernels.keys():
            layer = _with_loss(layer, LOSSES[loss](kernels["logits"], kernels["cross_entropy"], batch))
            changed += 1
        layers.append(layer)
    if not changed:
        raise ModelError(f"{model.name}: loss = {loss!r} is of a head that predicts words, which it has not")
    return replace(model, layers=tuple(layers))


def _with_loss(layer: Layer, made: Mapping[str, Kernel]) -> Layer:
    kernels = tuple(made.get(kernel.name, kernel) for kernel in layer.kernels)
    return replace(layer, kernels=kernels, activation_bytes=sum(kernel.saved for kernel in kernels))


def _liger(logits: Kernel, loss: Kernel, batch: int) -> dict[str, Kernel]:
    """Chunks of tokens, a power of two, as many as the vocabulary is wider than the input. What is kept is the gradient
    of the input; the weights' is there from forward on."""
    rows = logits.flops / (2.0 * logits.n * logits.k)
    most = -(-logits.n // logits.k)
    chunk = 1 << max(0, (-(-round(rows * batch) // most) - 1).bit_length())
    count = -(-round(rows * batch) // chunk)
    at_once = rows / count * logits.n
    kept = rows * logits.k
    return {
        "logits": replace(
            logits,
            m=max(1, round(rows / count)),
            repeat=count,
            launches=max(2, count),
            backward_launches=count * len(logits.halves),
            saved=kept,
            kept=(2.0 * kept, 2.0 * kept, 4.0 * kept),
            working=(2.0 * at_once, 2.0 * at_once, 4.0 * at_once),
        ),
        "cross_entropy": replace(
            loss,
            nbytes=3.0 * rows * logits.n,
            backward_nbytes=0.0,
            element=HALVES,
            launches=count,
            backward_launches=0,
            saved=0.0,
            kept=NOTHING,
            working=NOTHING,
        ),
    }


def _cut(logits: Kernel, loss: Kernel, batch: int) -> dict[str, Kernel]:
    """Logits in registers: a number a token is written, and backward has one product more."""
    rows = logits.flops / (2.0 * logits.n * logits.k)
    kept = rows * logits.k
    return {
        "logits": replace(
            logits,
            backward_flops=logits.backward_flops + logits.flops,
            halves=f"R{logits.halves}",
            saved=kept,
            kept=(2.0 * kept, 2.0 * kept, 4.0 * kept),
            working=(2.0 * kept, 2.0 * kept, 4.0 * kept),
        ),
        "cross_entropy": replace(
            loss,
            nbytes=2.0 * rows,
            backward_nbytes=2.0 * rows,
            launches=1,
            backward_launches=1,
            saved=0.0,
            kept=NOTHING,
            working=NOTHING,
        ),
    }


CHUNKS = 8
"""Of torchtitan, and of those who took it over."""


def _chunked(logits: Kernel, loss: Kernel, batch: int) -> dict[str, Kernel]:
    """An eighth of the tokens at a time. What is kept is the gradient of the input; the weights'
    is there from forward on."""
    rows = logits.flops / (2.0 * logits.n * logits.k)
    count = max(1, min(CHUNKS, round(rows * batch)))
    kept = rows * logits.k

    def at_once(kernel: Kernel) -> ByteSizes:
        """Bytes that a kernel takes for one piece of the tokens, by type."""
        first, second, third = ((kernel.kept_bytes(types) + kernel.working[types]) / count for types in range(3))
        return first, second, third

    return {
        "logits": replace(
            logits,
            m=max(1, round(logits.m / count)),
            repeat=count,
            launches=count * logits.launches,
            backward_launches=count * logits.backward_launches,
            saved=kept,
            kept=(2.0 * kept, 2.0 * kept, 4.0 * kept),
            working=at_once(logits),
        ),
        "cross_entropy": replace(
            loss,
            launches=count * loss.launches,
            backward_launches=count * loss.backward_launches,
            saved=0.0,
            kept=NOTHING,
            working=at_once(loss),
        ),
    }


LOSSES: Mapping[str, Callable[[Kernel, Kernel, int], dict[str, Kernel]]] = {
    "liger": _liger,
    "cut": _cut,
    "chunked": _chunked,
}
"""Ways to have no logits, by name."""
