"""ZBV by counting, as PyTorch's ScheduleZBVZeroBubble does it (Qi et al., arXiv 2401.10241, section 6).

The stages lie on the ranks as a V: rank r holds stage r and stage 2p-1-r, so the last stage is on rank 0, whose first
gradient is there as soon as the V has been walked once. For F = I = W the steps below leave no idle time within a
rank's own span and hold 2p chunk passes, which are p stages' worth: 1F1B's memory without 1F1B's bubble. Rank r still
starts r forwards late:

    bubble = (p-1)F of one chunk (that start); peak 2p chunk passes on every rank.

====  ==========================================  =====================================================================
step  times                                       what
====  ==========================================  =====================================================================
1     2(p-r)-1                                    F0
2     r                                           F1 F0
3     p-r                                         F1 I1 W1
4     until all forwards are done                 F0 I0 W0 F1 I1 W1, the steady state
5     r                                           I0 I1
6     p-r                                         I0 W0
7     as many as are left                         W1, then W0
====  ==========================================  =====================================================================

Fewer than 2p-1 micro-batches are counted as 2p-1, and the passes of those that do not exist are left out.
"""

from __future__ import annotations

from clustersim.training.schedules.base import Action, Order, Orders, Schedule
from clustersim.training.schedules.zero_bubble import late_starts


def zbv_torch(p: int, chunks: int, m: int) -> Orders:
    """The seven steps of each rank."""
    return tuple(_order(rank, p, m) for rank in range(p))


def _order(rank: int, p: int, m: int) -> Order:
    actions: list[Action] = []
    count = {(kind, chunk): 0 for kind in "FIW" for chunk in (0, 1)}

    def run(words: str, times: int = 1) -> None:
        """Append words such as ``F0``, all of them so many times."""
        for word in words.split() * times:
            place = word[0], int(word[1])
            actions.append(Action(place[0], count[place], place[1]))
            count[place] += 1

    many = max(2 * p - 1, m)
    run("F0", 2 * (p - rank) - 1)
    run("F1 F0", rank)
    run("F1 I1 W1", p - rank)
    while count["F", 1] < many:
        run("F0" if count["F", 0] < many else "")
        run("I0 W0 F1 I1 W1")
    run("I0 I1", rank)
    run("I0 W0", p - rank)
    run("W1", many - count["W", 1])
    run("W0", many - count["W", 0])
    return tuple((action,) for action in actions if action.microbatch < m)


ZBV_TORCH = Schedule(
    "zbv_torch",
    zbv_torch,
    placement="v",
    chunks=2,
    splits_backward=True,
    aliases=("ZBVZeroBubble",),
    bubble=lambda p, chunks, m, cost: late_starts(p, chunks, m, cost) if m >= 2 * p - 1 else None,
    peak=lambda rank, p, chunks, m: 2 * p if m >= 2 * p - 1 else None,
)
