"""The end of a step that all data-parallel hooks share, in its true order (facts: MODEL_PARALLEL.md 2.7)."""

from __future__ import annotations

from typing import NamedTuple

from clustersim.builder.laying import Here
from clustersim.label import Label
from clustersim.partition.base import Stage
from clustersim.program import DTYPE_BYTES, Collective
from clustersim.strategies.base import OpList

EVERYBODY = ("tp", "cp", "dp", "pp")


class Moved(NamedTuple):
    """What a collective moves: its kind; the name of the tensor, its bytes and their type."""

    kind: str
    name: str
    nbytes: float
    dtype: str


def collective(here: Here, ops: OpList, moved: Moved, dims: tuple[str, ...], after: tuple[int, ...]) -> tuple[int, ...]:
    """A collective over mesh dimensions on their own stream; nothing, and no wait, where a group has one rank."""
    groups = here.groups(dims)
    if groups.shape[1] == 1:
        return after
    kind, name, nbytes, dtype = moved
    dim, step, label = "-".join(dims), ops.step, Label(name, dim="-".join(dims))
    op = Collective(f"{kind} {name}", kind, nbytes, groups, dim, after, dtype, communicator=dim, step=step, label=label)
    return (ops.add(op),)


def shared_gradients(
    here: Here, ops: OpList, stage: Stage, tied: int, dtype: str, after: tuple[int, ...]
) -> tuple[int, ...]:
    """Gradients that several model-parallel ranks hold parts of, summed when their own reduction is done.

    Over tp, those of norms and routers under sequence parallelism, all together; between first and last stage, those of
    ``tied`` elements of a shared embedding table.
    """
    size = DTYPE_BYTES[dtype]
    replicated = sum(layer.replicated for layer in stage.layers)
    if replicated:
        summed = Moved("all_reduce", "replicated gradients", float(replicated * size), dtype)
        after = collective(here, ops, summed, ("tp",), after)
    if tied:
        summed = Moved("all_reduce", "tied embeddings", float(tied * size), dtype)
        after = collective(here, ops, summed, ("embd",), after)
    return after


def clip(here: Here, ops: OpList, nbytes: float, after: tuple[int, ...], *, barrier: bool = True) -> tuple[int, ...]:
    """clip_grad_norm_: the norm of this rank's gradients, one number over *all* ranks, and the factor applied.

    The all_reduce is a barrier: no stage updates before the slowest has its gradients; without, a stage goes on by
    its own norm. ``nbytes`` : of the gradients.
    """
    rate = here.cost.where.device.stream_rate()
    normed = ops.compute("gradient norm", nbytes / rate, "gradient", after=after, nbytes=nbytes)
    if not barrier:
        ops.kernel = normed
        return (normed,)
    met = collective(here, ops, Moved("all_reduce", "gradient norm", 4.0, "fp32"), EVERYBODY, (normed,))
    ops.kernel = ops.compute("clip gradients", 2 * nbytes / rate, "gradient", after=met, nbytes=2 * nbytes)
    return (ops.kernel,)
