"""When backward makes each gradient, and how gradients are packed, as torch's reducer does both."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from clustersim.core.memo import kept_with_first
from clustersim.core.model import Model, Tensor
from clustersim.training.strategies.walk import LayerPart


class DDPBucket(msgspec.Struct, frozen=True):
    """Gradients that are all-reduced together: tensor names and ``nbytes`` [bytes] as stored, before any comm hook."""

    names: tuple[str, ...]
    numel: int
    nbytes: int


@kept_with_first(maxsize=1)
def ready_order(model: Model) -> tuple[tuple[Tensor, ...], ...]:
    """Trained tensors whose gradient becomes final in each layer's backward, in that order; indexed by layer.

    Within a layer that is the reverse of registration. A tensor used by several layers (tied embeddings) is final only
    in the earliest of them, since backward reaches that one last.
    """
    home = {t.name: i for i, layer in enumerate(model.layers) for t in layer.tensors if not t.tied_to}
    for i, layer in enumerate(model.layers):
        for tensor in layer.tensors:
            if tensor.tied_to in home:
                home[tensor.tied_to] = min(home[tensor.tied_to], i)
    final: list[list[Tensor]] = [[] for _ in model.layers]
    for layer in reversed(model.layers):
        for tensor in reversed(layer.tensors):
            if not tensor.tied_to and not tensor.frozen:
                final[home[tensor.name]].append(tensor)
    return tuple(tuple(tensors) for tensors in final)


def assign(tensors: Iterable[Tensor], element: int, first: int, cap: int) -> list[DDPBucket]:
    """Fill buckets in the given order; one closes when it reaches its limit (compute_bucket_assignment_by_size)."""
    filled: list[DDPBucket] = []
    names: list[str] = []
    numel = 0
    for tensor in tensors:
        names.append(tensor.name)
        numel += tensor.numel
        if numel * element >= (cap if filled else first):
            filled.append(DDPBucket(tuple(names), numel, numel * element))
            names = []
            numel = 0
    if names:
        filled.append(DDPBucket(tuple(names), numel, numel * element))
    return filled


def cut(
    tensors: Sequence[Tensor], closes: Callable[[Tensor], bool], ready: Callable[[Tensor], None]
) -> Iterator[LayerPart]:
    """A layer's backward, cut where a gradient ``closes`` a bucket; ``ready`` is told of each of its gradients.

    Inside a layer a gradient is taken to be there when as large a share of the layer's time has passed as of its
    parameters (a GEMM's work grows with its weight), so that a block of several buckets sends its first ones early.
    """
    total = sum(tensor.numel for tensor in tensors)
    begun = done = 0
    for tensor in tensors:
        done += tensor.numel
        if closes(tensor):
            yield LayerPart((done - begun) / total)
            begun = done
        ready(tensor)
    if begun < total or not total:
        yield LayerPart((total - begun) / total if total else 1.0)
