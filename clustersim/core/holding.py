"""What a strategy makes one rank keep in device memory, moment by moment, beside activations and their like."""

from __future__ import annotations

import msgspec
import numpy as np

from clustersim.core.arrays import Floats


class Holding(msgspec.Struct, frozen=True, eq=False):
    """Bytes of one rank over the moments of a step: forward of each layer, backward of each in reverse, the optimizer.

    Parameters
    ----------
    parameters : float [bytes], held all the time: whole, or this rank's shard.
    updated : float, elements that this rank's GPU updates; their masters and states are here, 0 if on the host.
    masters : float [bytes], fp32 copies of 16-bit parameters. state_bytes : int, of one element of a moment.
    gradients : (2 L + 1,) float [bytes], complete gradients, whole or this rank's shard.
    gathered : (2 L + 1,) float [bytes], parameters borrowed from other ranks.
    buffers : (2 L + 1,) float [bytes], gradients on their way to a reduction, and buckets.
    fresh : which of the two, ``"gradients"`` or ``"buffers"``, counts a layer's gradients as soon as its backward runs,
        though they come one by one; empty where they are there all the time.
    away : float, elements whose optimizer states are on the host. away_bytes : float, of parameters, gradients and
        masters that are there.
    """

    parameters: float
    updated: float
    masters: float
    state_bytes: int
    gradients: Floats
    gathered: Floats
    buffers: Floats
    fresh: str = ""
    away: float = 0.0
    away_bytes: float = 0.0


def moments(names: list[str]) -> tuple[str, ...]:
    """Names of the moments of a model with these layers.

    >>> moments(["a", "b"])
    ('fwd a', 'fwd b', 'bwd b', 'bwd a', 'optimizer')
    """
    return (*(f"fwd {name}" for name in names), *(f"bwd {name}" for name in reversed(names)), "optimizer")


def piling_up(by_layer: Floats) -> Floats:
    """What backward leaves behind: nothing in forward, then each layer's bytes from its backward on."""
    n = len(by_layer)
    gradients = np.zeros(2 * n + 1)
    gradients[n : 2 * n] = np.cumsum(by_layer[::-1])
    gradients[2 * n] = by_layer.sum()
    return gradients


def always(nbytes: float, n_layers: int) -> Floats:
    """The same bytes at every moment."""
    return np.full(2 * n_layers + 1, float(nbytes))


def everything(elements: Floats, size: int, *, masters: bool = False, frozen: float = 0.0) -> Holding:
    """Of a rank with the whole model: (layers,) ``elements`` of ``size`` bytes each, whose gradients backward piles up,
    since zero_grad frees them. ``masters`` : 16-bit ones have fp32 copies. ``frozen`` : bytes of what is not
    trained."""
    n = float(elements.sum())
    nothing = always(0.0, len(elements))
    copied = masters and size < 4
    return Holding(
        size * n + frozen,
        n,
        4.0 * n if copied else 0.0,
        4 if copied else size,
        piling_up(size * elements),
        nothing,
        nothing,
        "gradients",
    )
