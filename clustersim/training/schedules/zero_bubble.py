"""ZB-H1 and ZB-2p: the backward in two, weight gradients where a rank would idle (Qi et al., arXiv 2401.10241).

The stage before waits only for I. W needs nobody and nobody needs it (before the optimizer), so it can fill gaps. How
many micro-batches may be held until their W says how well:

* ZB-H1 may hold p, as 1F1B does. W fills the drain: the bubble is (p-1)(F + I - W), a third of 1F1B's for F = I = W.
* ZB-2p may hold 2p, enough to have forwards to run until the first gradient arrives: no bubble in any rank's own span.
  But rank r starts rF late and ends as much late, so a step with a common start (an all-reduce of the gradient's norm
  before the optimizer) pays (p-1)F once. The authors therefore check the norm after the update, and undo it if needed.

The order is found by a greedy search, as the authors' ``zb.py`` does it, in rounds: one forward on each rank from the
first to the last (or none, see :func:`_wants`), one I on each rank from the last to the first, and before each of
them as many W as fit into the wait for its input, or as free the memory it needs. Eight :class:`SearchHabits` are
tried; the one with the shortest longest span of a rank is kept. The durations it searches with are options: with those
of a real model the order comes out different from the one for F = I = W.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

from clustersim.training.schedules import greedy
from clustersim.training.schedules.base import UNIT, Orders, PassCosts, Schedule
from clustersim.training.schedules.greedy import COSTS, LIMIT, TRANSFER, Rules
from clustersim.training.schedules.interleaved_zero_bubble import skew_less_weights


class SearchHabits(NamedTuple):
    """What the search does in a doubtful case; which is better depends on the durations, so all are tried.

    ``stop_early``: before the first gradient arrives, no forward that would end after it. ``gradient_first``: leave
    out a forward when the next rank will return a gradient before it would end. ``fill``: run a W that is longer than
    the gap.
    """

    stop_early: bool
    gradient_first: bool
    fill: bool


class ZeroBubbleSearch(greedy.GreedySearch):
    """One attempt, with its habits."""

    def __init__(self, p: int, m: int, rules: Rules, habits: SearchHabits) -> None:
        super().__init__(p, m, rules)
        self.habits = habits

    def worth(self, rank: int, kind: str, chunk: int, gap: float) -> bool:
        """Not (unless the habit is to fill) while this rank stays no idler than the idlest one."""
        return gap > 0 and (self.habits.fill or gap > self.most_idle - self.ranks[rank].idle)


def _fill_pipeline(search: ZeroBubbleSearch) -> None:
    """The first forward of every rank, the forwards that fit before its first gradient, and the first gradients."""
    ranks = search.ranks
    costs = search.costs
    for rank in range(len(ranks)):
        search.run(rank, "F")
    extra = [0] * len(ranks)
    gradient = ranks[-1].clock + costs.input_gradient
    for rank in range(len(ranks) - 2, -1, -1):
        clock = ranks[rank].clock
        arrival = gradient + search.transfer
        while extra[rank] + 1 < min(search.m, search.limit):
            if clock >= arrival or (search.habits.stop_early and clock + costs.forward > arrival):
                break
            clock += costs.forward
            extra[rank] += 1
        gradient = max(clock, arrival) + costs.input_gradient
    for rank in range(1, len(ranks)):
        # A rank cannot be as far ahead as the one that feeds it, or it would wait for its input.
        if 1 + extra[rank] < search.m:
            extra[rank] = min(extra[rank], max(0, extra[rank - 1] - 1))
    for rank, count in enumerate(extra):
        for _ in range(count):
            search.run(rank, "F")
    for rank in range(len(ranks) - 1, -1, -1):
        search.run(rank, "I")


def _wants(search: ZeroBubbleSearch, rank: int) -> bool:
    """Whether a rank should run another forward in this round."""
    me = search.ranks[rank]
    costs = search.costs
    if me.count("F") >= search.m:
        return False
    if not search.habits.gradient_first or rank + 1 == len(search.ranks):
        return True
    after = search.ranks[rank + 1]
    if me.count("F") < after.count("F") + 2:
        return True
    gradient = after.clock + costs.forward + costs.input_gradient + search.transfer
    if me.clock >= gradient:
        return False
    room = min(max(0, me.held + 1 - search.limit), len(me.pending))
    fits = me.clock + costs.forward + room * costs.weight_gradient <= gradient
    return fits or gradient - me.clock > search.most_idle - me.idle


def _round(search: ZeroBubbleSearch) -> None:
    """At most one forward on each rank, then one input gradient on each rank."""
    ranks = search.ranks
    wanted = [_wants(search, rank) for rank in range(len(ranks))]
    for rank in range(len(ranks) - 2, -1, -1):
        wanted[rank] = wanted[rank] and wanted[rank + 1]
    for rank in range(len(ranks)):
        if wanted[rank]:
            search.make_room(rank)
            search.fill_wait(rank, "F")
            search.run(rank, "F")
    for rank in range(len(ranks) - 1, -1, -1):
        search.fill_wait(rank, "I")
        if rank == 0 and ranks[0].count("F") == search.m:
            search.all_weights(0)
        search.run(rank, "I")


def _attempt(p: int, m: int, rules: Rules, habits: SearchHabits) -> tuple[float, Orders]:
    """The longest span of a rank, and the orders."""
    search = ZeroBubbleSearch(p, m, rules, habits)
    _fill_pipeline(search)
    for _ in range(m - 1):
        _round(search)
    for rank in range(p):
        search.all_weights(rank)
    span = max(rank.clock - rank.ends["F", 0][0] + rules.costs.forward for rank in search.ranks)
    return span, search.orders()


def _within(stages_held: int) -> tuple[Callable[..., Orders], Callable[..., int | None]]:
    """Rule and peak of the search that may hold this many times p."""

    def rule(p: int, chunks: int, m: int, **options: Any) -> Orders:
        """The best of the attempts with all habits; the first of equally good ones."""
        rules = greedy.rules(stages_held * p, options)
        attempts = [_attempt(p, m, rules, SearchHabits(*flags)) for flags in product((True, False), repeat=3)]
        return min(attempts, key=lambda attempt: attempt[0])[1]

    def peak(rank: int, p: int, chunks: int, m: int, **options: Any) -> int | None:
        """Micro-batches that a rank holds at most; None for measured costs, of which no formula is known."""
        rules = greedy.rules(stages_held * p, options)
        return min(m, rules.limit) if rules.costs == UNIT else None

    return rule, peak


def late_starts(p: int, chunks: int, m: int, cost: PassCosts) -> float | None:
    """(p-1)F: the last rank starts so much later than the first; stated for F = I = W and a pipeline that gets full."""
    return (p - 1) * cost.forward if m >= p and cost[:3] == (cost.forward,) * 3 else None


_H1, _2P = _within(1), _within(2)


ZB_H1 = Schedule(
    "zb_h1",
    _H1[0],
    splits_backward=True,
    aliases=("ZB1P", "ZB-1P"),
    options=(LIMIT, COSTS, TRANSFER),
    bubble=skew_less_weights,
    peak=_H1[1],
)
ZB_2P = Schedule(
    "zb_2p",
    _2P[0],
    splits_backward=True,
    aliases=("ZB2P", "ZB-H2"),
    options=(LIMIT, COSTS, TRANSFER),
    bubble=late_starts,
    peak=_2P[1],
)
