"""GPipe: all forwards, then all backwards (Huang et al., arXiv 1811.06965; PyTorch's ScheduleGPipe).

Stage r starts when the first micro-batch reaches it and ends when the last gradient has left it: everybody idles for
one forward and one backward of each *other* stage, the triangle at each end of the picture:

    bubble = (p-1)(F+B), which is (p-1)/m of the computing time.

Memory is the price: no backward starts before the last forward has ended, so every stage holds all m micro-batches.
GPipe is therefore run with full recomputation. On one stage it is gradient accumulation with all graphs kept.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Action, Orders, PassCosts, Schedule


def gpipe(p: int, chunks: int, m: int) -> Orders:
    """F0 .. F(m-1) B0 .. B(m-1) on every rank."""
    order = tuple((Action(kind, k),) for kind in "FB" for k in range(m))
    return (order,) * p


def fill_and_drain(p: int, chunks: int, m: int, cost: PassCosts) -> float:
    """(p-1)(F+B): p-1 forwards until the last rank has work, p-1 backwards after it has none.

    The cost is of one chunk, so that v chunks a rank divide the bubble by v. Fewer micro-batches than ranks leave a
    gap of p-m in each further round as well.
    """
    gaps = (p - 1) + (chunks - 1) * max(0, p - m)
    return gaps * (cost.forward + cost.backward)


GPIPE = Schedule("gpipe", gpipe, bubble=fill_and_drain, peak=lambda rank, p, chunks, m: m)
