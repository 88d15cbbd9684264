"""DualPipeV: DualPipe folded in a V (deepseek-ai/DualPipe, dualpipev.py; PyTorch's ScheduleDualPipeV).

Rank r holds chunk 0 = stage r and chunk 1 = stage 2p-1-r, so a micro-batch goes down the ranks and comes back up. In
the steady state a rank runs the forward of one chunk *beside* the backward of the other: two unrelated micro-batches,
each of which hides the other's expert all-to-all. Before and after, where there is nothing to pair, the backward is
split and W fills gaps. The steps are counted, no durations are looked at:

====  =================================  ==============================================================================
step  times                              what
====  =================================  ==============================================================================
1     2(p-1-r)                           F0
2     r+1                                F0 F1
3     p-1-r                              I1 W1 F1
4     m-2p+r+1                           (F0|B1) (F1|B0), the steady state; the last rank's first F0 B1 not as a pair
5     p-1-r                              B1 (F1|B0)
6     r+1                                B1 B0; from the middle on I1 I0, their W kept
7     p-1-r                              W I0
8     r+1                                W
====  =================================  ==============================================================================

    bubble = (p-1)(FB + B - 3W), FB being the time of a pair (V3, arXiv 2412.19437, Table 2, with 2p chunks for PP);
    peak 2p+1 chunk passes on every rank.
"""

from __future__ import annotations

import math
from collections import deque

from clustersim.training.schedules.base import Action, Order, Orders, PassCosts, Schedule, Slot


def dualpipev(p: int, chunks: int, m: int) -> Orders:
    """The eight steps of each rank."""
    return tuple(_order(rank, p, m) for rank in range(p))


class _RankWriter:
    """One rank's list; it knows each pass's next micro-batch, and which W are still to be done."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.following = {(kind, chunk): 0 for kind in "FB" for chunk in (0, 1)}
        self.kept: deque[Action] = deque()

    def next(self, kind: str, chunk: int) -> Action:
        """The pass of this kind on a chunk's next micro-batch."""
        counter = ("F" if kind == "F" else "B", chunk)
        self.following[counter] += 1
        action = Action(kind, self.following[counter] - 1, chunk)
        if kind == "I":
            self.kept.append(action._replace(kind="W"))
        return action

    def run(self, *passes: tuple[str, int]) -> None:
        """Append passes, a slot each."""
        self.slots += [(self.next(kind, chunk),) for kind, chunk in passes]

    def beside(self, forward: int) -> None:
        """F of one chunk beside B of the other."""
        self.slots.append((self.next("F", forward), self.next("B", 1 - forward)))

    def weight(self) -> None:
        """The oldest weight gradient that was kept."""
        self.slots.append((self.kept.popleft(),))


def _order(rank: int, p: int, m: int) -> Order:
    write = _RankWriter()
    behind = p - 1 - rank
    ahead = rank + 1
    write.run(*[("F", 0)] * (2 * behind))
    write.run(*[("F", 0), ("F", 1)] * ahead)
    for _ in range(behind):
        write.run(("I", 1))
        write.weight()
        write.run(("F", 1))
    for time in range(m - 2 * p + ahead):
        if time == 0 and behind == 0:
            write.run(("F", 0), ("B", 1))
        else:
            write.beside(0)
        write.beside(1)
    for _ in range(behind):
        write.run(("B", 1))
        write.beside(1)
    # Of the 2(r+1) backwards the second half is split; a middle that falls inside a B1 B0 splits only its B0.
    backwards = [chunk for _ in range(ahead) for chunk in (1, 0)]
    write.run(*(("I" if place >= ahead else "B", chunk) for place, chunk in enumerate(backwards)))
    for _ in range(behind):
        write.weight()
        write.run(("I", 0))
    for _ in range(ahead):
        write.weight()
    return tuple(write.slots)


def pair_bubble(p: int, chunks: int, m: int, cost: PassCosts) -> float | None:
    """(p-1)(FB + B - 3W) with FB = F + B. The steps are counted for F = I >= W; other durations leave other gaps."""
    if not math.isclose(cost.forward, cost.input_gradient) or cost.weight_gradient > cost.forward:
        return None
    return (p - 1) * (cost.forward + 2 * cost.backward - 3 * cost.weight_gradient)


DUALPIPEV = Schedule(
    "dualpipev",
    dualpipev,
    placement="v",
    chunks=2,
    splits_backward=True,
    microbatches=lambda p, m, options: m >= 2 * p,
    needs="at least 2 pp micro-batches, one for each of its stages",
    bubble=pair_bubble,
    peak=lambda rank, p, chunks, m: 2 * p + 1,
)
