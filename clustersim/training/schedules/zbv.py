"""ZBV by search, as its authors' zbv.py does it (Qi et al., arXiv 2401.10241, section 6).

Rank r holds stage r and stage 2p-1-r (chunks 0 and 1); what that buys is told in
:mod:`clustersim.training.schedules.zbv_torch`, whose steps are counted for F = I = W. Here the same shape is found for
any durations, greedily, in 2m rounds: an I on every rank, then an F on every rank, and before each of them as many W as
fit into the wait for its input, or as free the memory it needs. Of each rank's two chunks the one whose input comes up
the V, from the rank behind, has precedence: it is nearer to its end.

A W that is longer than the gap is run only if the rank is the idlest one otherwise. Who that is, is known after the
attempt, so it is repeated with the idle times of the one before as long as that makes it better.

    bubble = (p-1)F of one chunk for F = I = W; never more than 2p chunk passes held until W.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from clustersim.core.errors import ScenarioError
from clustersim.training.schedules import greedy
from clustersim.training.schedules.base import UNIT, Orders, Schedule
from clustersim.training.schedules.greedy import COSTS, LIMIT, TRANSFER, GreedyRank, Rules
from clustersim.training.schedules.zero_bubble import late_starts


class ZBVSearch(greedy.GreedySearch):
    """One attempt. ``excused[r]``: rank r's idle time in the attempt before."""

    def __init__(self, m: int, rules: Rules, excused: Sequence[float], fill: dict[str, bool]) -> None:
        super().__init__(len(excused), m, rules)
        self.fill = fill
        self.excused = [max(excused) - idle for idle in excused]

    def worth(self, rank: int, kind: str, chunk: int, gap: float) -> bool:
        """Only if the gap would make us the idlest."""
        fills = (kind, chunk) == ("I", 0) or self.fill[kind]
        return fills and gap > max(self.most_idle, self.excused[rank]) - self.ranks[rank].idle

    def has_input(self, rank: int, kind: str, chunk: int) -> bool:
        """Whether the next pass of this kind has its input scheduled."""
        feeder = self.feeder(rank, kind, chunk)
        return feeder is None or feeder.count(kind, chunk) > self.ranks[rank].count(kind, chunk)


def _down_and_up(search: ZBVSearch) -> None:
    """Walk the first micro-batch through the V; while it is below, the ranks above run more F0 as far as they fit."""
    for rank in range(search.p):
        search.run(rank, "F", 0)
    for rank in range(search.p - 1, -1, -1):
        me = search.ranks[rank]
        arrival = search.arrival(rank, "F", 1)
        while (
            arrival is not None
            and me.held + 2 + 2 * rank <= search.limit
            and me.clock + search.costs.forward <= arrival
            and me.count("F", 0) < search.m
        ):
            for above in range(rank + 1):
                search.run(above, "F", 0)
        search.run(rank, "F", 1)


def _level(search: ZBVSearch) -> None:
    """Further F, chunk by chunk in turn, until each rank has run as many as the one before it, and more of chunk 1."""
    chunk = 0
    for rank in range(1, search.p):
        me = search.ranks[rank]
        before = search.ranks[rank - 1]

        def behind(me: GreedyRank = me, before: GreedyRank = before) -> bool:
            """Whether this rank has run fewer F than the one before it, or no more of chunk 1."""
            fewer = me.count("F", 0) + me.count("F", 1) < before.count("F", 0) + before.count("F", 1)
            return fewer or me.count("F", 1) <= before.count("F", 1) < search.m

        while behind():
            for below in range(search.p - 1, rank - 1, -1):
                if search.ranks[below].count("F", chunk) < search.m:
                    search.run(below, "F", chunk)
            chunk = 1 - chunk


def _gradients(search: ZBVSearch) -> None:
    """One I on every rank: I0 where the rank behind has sent for it, else I1."""
    upward: list[int] = []
    downward: list[int] = []
    for rank, me in enumerate(search.ranks):
        late = me.count("I", 0) < me.count("I", 1)
        comes = search.has_input(rank, "I", 0) or me.count("I", 1) == search.m
        (upward if late and comes else downward).append(rank)
    for rank, chunk in [(rank, 0) for rank in reversed(upward)] + [(rank, 1) for rank in downward]:
        search.fill_wait(rank, "I", chunk)
        search.run(rank, "I", chunk)


def _forwards(search: ZBVSearch) -> None:
    """One F on every rank that can: F1 where the rank behind has sent for it, else F0 where the rank before has."""
    for rank, me in enumerate(search.ranks):
        if me.count("F", 1) >= search.m:
            continue
        if me.count("F", 1) < me.count("F", 0) and search.has_input(rank, "F", 1):
            chunk = 1
        elif me.count("F", 0) < search.m and search.has_input(rank, "F", 0):
            chunk = 0
        else:
            continue
        search.make_room(rank)
        search.fill_wait(rank, "F", chunk)
        search.run(rank, "F", chunk)


def _attempt(search: ZBVSearch) -> ZBVSearch:
    _down_and_up(search)
    _level(search)
    for _ in range(2 * search.m):
        _gradients(search)
        _forwards(search)
    for rank in range(search.p):
        search.all_weights(rank)
    return search


def zbv(p: int, chunks: int, m: int, **options: Any) -> Orders:
    """The best of four attempts (W that are longer than the gap: before I1 or not, before F or not), each repeated."""
    rules = greedy.rules(2 * p, options)
    searches = list[ZBVSearch]()
    if rules.limit < 2 * p:
        raise ScenarioError(
            f"zbv on {p} pipeline ranks holds {2 * p} chunk passes, which max_in_flight = {rules.limit} does not "
            f"allow; use {2 * p}, or schedule = 'v_half' or 'v_min' (at $.parallel.max_in_flight)"
        )
    for before_gradient, before_forward in product((True, False), repeat=2):
        fill = {"I": before_gradient, "F": before_forward}
        best = _attempt(ZBVSearch(m, rules, [-1.0] * p, fill))
        while best.most_idle > 0:
            again = _attempt(ZBVSearch(m, rules, [rank.idle for rank in best.ranks], fill))
            if again.most_idle >= best.most_idle:
                break
            best = again
        searches.append(best)
        if best.most_idle == 0:
            break
    return min(searches, key=lambda search: search.most_idle).orders()


def _peak(rank: int, p: int, chunks: int, m: int, **options: Any) -> int | None:
    rules = greedy.rules(2 * p, options)
    return min(rules.limit, 2 * m) if rules.costs == UNIT else None


ZBV = Schedule(
    "zbv",
    zbv,
    placement="v",
    chunks=2,
    splits_backward=True,
    options=(LIMIT, COSTS, TRANSFER),
    bubble=late_starts,
    peak=_peak,
)
