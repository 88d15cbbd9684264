"""Naive model parallelism: layers on several GPUs, one GPU at work (PyTorch's model-parallel tutorial).

With one micro-batch it is ``ModelParallelResNet50``: the whole batch goes through the GPUs one after the other,
forward and back, and a GPU computes for 1/p of the time. With m > 1 it is the tutorial's
``PipelineParallelResNet50``: the input is split, each split is launched on the first GPU while the one before is on
the second, the outputs are concatenated and one backward runs through all of them. Autograd runs the youngest node
that is ready first, so the splits come back in reverse order. Nothing but the order of the backwards differs from
GPipe:

    bubble = (p-1)(F+B); every stage holds all m splits.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Action, Orders, Schedule
from clustersim.training.schedules.gpipe import fill_and_drain


def naive(p: int, chunks: int, m: int) -> Orders:
    """F0 .. F(m-1) B(m-1) .. B0 on every rank; F0 B0 where the input is not split."""
    forward = tuple((Action("F", k),) for k in range(m))
    backward = tuple((Action("B", k),) for k in reversed(range(m)))
    return (forward + backward,) * p


NAIVE = Schedule(
    "naive",
    naive,
    aliases=("model_parallel", "ModelParallelResNet50", "PipelineParallelResNet50"),
    bubble=fill_and_drain,
    peak=lambda rank, p, chunks, m: m,
)
