"""The end of a step that all data-parallel hooks share, in its true order (facts: MODEL_PARALLEL.md 2.7)."""

from __future__ import annotations

from clustersim.builder.laying import Here
from clustersim.label import Label
from clustersim.partition.base import Stage
from clustersim.program import DTYPE_BYTES, Collective
from clustersim.strategies.base import OpList

EVERYBODY = ("tp", "cp", "dp", "pp")


def collective(
    here: Here,
    ops: OpList,
    kind: str,
    name: str,
    nbytes: float,
    dims: tuple[str, ...],
    after: tuple[int, ...],
    dtype: str,
) -> tuple[int, ...]:
    """A collective over mesh dimensions on their own stream; nothing, and no wait, where a group has one rank."""
    groups = here.groups(dims)
    if groups.shape[1] == 1:
        return after
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
        nbytes = float(replicated * size)
        after = collective(here, ops, "all_reduce", "replicated gradients", nbytes, ("tp",), after, dtype)
    if tied:
        after = collective(here, ops, "all_reduce", "tied embeddings", float(tied * size), ("embd",), after, dtype)
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
    met = collective(here, ops, "all_reduce", "gradient norm", 4.0, EVERYBODY, (normed,), "fp32")
    ops.kernel = ops.compute("clip gradients", 2 * nbytes / rate, "gradient", after=met, nbytes=2 * nbytes)
    return (ops.kernel,)
