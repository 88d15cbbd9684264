"""1F1B: one forward, one backward (PipeDream-Flush, arXiv 2006.09503; the default of Megatron, PyTorch and DeepSpeed).

Stage r runs p-r-1 forwards to fill the stages behind it, then a forward and a backward in turn, then the backwards that
are left. Each backward comes as early as it can, so the bubble is GPipe's, (p-1)(F+B), but a stage holds only the
micro-batches that are between it and the last stage and back:

    peak of stage r = min(m, p-r) micro-batches.

The first stage holds p, whatever m is: p micro-batches of L/p layers are the activations of the whole model once.
That is why more pipeline stages do not make activations of the first one smaller.

On one stage this is gradient accumulation: F0 B0 F1 B1 ...
"""

from __future__ import annotations

from itertools import chain

from clustersim.training.schedules.base import Action, Order, Orders, Schedule
from clustersim.training.schedules.gpipe import fill_and_drain


def in_flight(rank: int, p: int, chunks: int, m: int) -> int:
    """Micro-batches between this stage's forward and its backward: as many as fit into the pipeline behind it."""
    return min(m, p - rank)


def one_f_one_b(p: int, chunks: int, m: int) -> Orders:
    """Of each rank: its warm-up, then F and B in turn, then the rest of B."""
    forwards, backwards = (tuple((Action(kind, k),) for k in range(m)) for kind in "FB")
    return tuple(in_turn(forwards, backwards, p - rank - 1) for rank in range(p))


def in_turn(forwards: Order, backwards: Order, warm: int) -> Order:
    """``warm`` forwards (or all there are), then a forward and a backward in turn, then the rest of the backwards."""
    steady = max(len(forwards) - warm, 0)
    pairs = zip(forwards[warm:], backwards[:steady], strict=True)
    return (*forwards[:warm], *chain.from_iterable(pairs), *backwards[steady:])


ONE_F_ONE_B = Schedule(
    "1f1b",
    one_f_one_b,
    aliases=("PipeDream-Flush", "TrainSchedule", "forward_backward_pipelining_without_interleaving"),
    bubble=fill_and_drain,
    peak=in_flight,
)
