"""Looped BFS: breadth first over the chunks (Lamy-Poirier, arXiv 2211.05953; PyTorch's ScheduleLoopedBFS).

The stages go round the ranks as in interleaved 1F1B, but a rank runs *all* micro-batches of a chunk before it turns
to the next chunk, and backwards the same way. The bubble is interleaved 1F1B's, (p-1)(F+B)/v. All v*m passes are
held, as GPipe holds m. What it buys: each chunk's weights are used for all micro-batches in a row, so with FSDP
around the pipeline they are gathered once and their gradients reduced once per step, behind the next chunk's
computing.

PyTorch runs the backwards of a chunk from the last micro-batch to the first, whose activations are the freshest.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Action, Orders, Schedule
from clustersim.training.schedules.gpipe import fill_and_drain


def looped_bfs(p: int, chunks: int, m: int) -> Orders:
    """All forwards chunk by chunk, then all backwards in the exact reverse."""
    forward = [Action("F", k, chunk) for chunk in range(chunks) for k in range(m)]
    backward = [Action("B", action.microbatch, action.chunk) for action in reversed(forward)]
    return (tuple((action,) for action in forward + backward),) * p


LOOPED_BFS = Schedule(
    "looped_bfs",
    looped_bfs,
    chunks=None,
    aliases=("breadth_first",),
    bubble=fill_and_drain,
    peak=lambda rank, p, chunks, m: chunks * m,
)
