"""What transfers put on links, which may vary; links reduced to those that can hold somebody back; the check that none
did.

A *slot* is a link that can be the bottleneck of some flow. Two reductions, both exact, leave few of a hundred thousand
links: of links with the same users in the same proportions only the tightest counts; and a link whose users are among
another's, and which fills no sooner for any of them, is never full alone.

Weights are in units of the link: a flow of rate r takes ``w * r`` of a slot that has 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.errors import ProgramError, TopologyError
from clustersim.core.topology import Topology

ROOM = 1e-9
"""A slot may be asked for this much more than it has, relatively: rounding."""

INSTANT = 1e-12
"""Moments this close, relative to the time since 0, are one instant."""
MOST_EDGES = 30_000
"""Changes of rates that a run follows, some seconds of work: a link that flaps every microsecond is none."""


class VaryingLinks(msgspec.Struct, frozen=True):
    """Links that have ``factor`` of their rate, above 0 and at most 1, from ``begin`` to ``end`` [s], and again
    ``every`` so many seconds; at 0 only once."""

    links: tuple[int, ...]
    factor: float
    begin: float
    end: float
    every: float = 0.0

    def at(self, now: float) -> float:
        """The factor at a moment.

        >>> flap = VaryingLinks((0,), 0.5, begin=1.0, end=2.0, every=10.0)
        >>> [flap.at(t) for t in (0.0, 1.0, 1.5, 2.0, 11.0)]
        [1.0, 0.5, 0.5, 1.0, 0.5]
        """
        start = self._start(now)
        slack = self._slack(now)
        return self.factor if start <= now + slack and now + slack < start + self.end - self.begin else 1.0

    def edge(self, now: float) -> float:
        """When it changes next, after ``now`` [s]; infinite for never."""
        start = self._start(now)
        later = (start + self.every,) if self.every else ()
        return min(
            (t for t in (start, start + self.end - self.begin, *later) if t > now + self._slack(now)), default=math.inf
        )

    def _slack(self, now: float) -> float:
        """A moment this close to an edge is the edge."""
        return max(1e-9 * self.every, 1e-12 * now)

    def _start(self, now: float) -> float:
        """When the spell before this moment began, or the first one will."""
        if not self.every or now < self.begin:
            return self.begin
        return self.begin + self.every * math.floor((now - self.begin + self._slack(now)) / self.every)


def taken(varying: Sequence[VaryingLinks], slot_of: dict[int, int], n_slots: int, now: float) -> Floats:
    """(n_slots,) float: the part of each slot that is not there now; ``slot_of`` : by link."""
    left = np.ones(n_slots)
    for change in varying:
        factor = change.at(now)
        for link in change.links:
            left[slot_of[link]] *= factor
    gone: Floats = 1.0 - left
    return gone


class Loads:
    """Distinct loads: which links a payload byte crosses and how much of each it takes.

    ``alone[i]`` is the payload rate [bytes/s] of load ``i`` with its links to itself, ceilings aside; ``varying``
    links at their best.
    """

    def __init__(self, topology: Topology, varying: tuple[VaryingLinks, ...] = ()) -> None:
        self.topology = topology
        self.varying = varying
        self.pairs: list[tuple[Ints, Floats]] = []
        self.alone: list[float] = []
        self._known: dict[tuple[bytes, bytes], int] = {}

    def add(self, links: Ints, weights: Floats) -> int:
        """Id of a load; equal loads have one id. Links of weight 0 are left out.

        Raises ProgramError for a link twice in one load, TopologyError for a link without bandwidth.
        """
        return self.add_each(np.asarray(links, dtype=np.int64)[None], weights)[0]

    def add_each(self, links: Ints, weights: Floats) -> list[int]:
        """Ids of loads that differ in their links alone: ``links`` (n, k), ``weights`` (k,). Raises as :meth:`add`."""
        weights = np.asarray(weights, dtype=np.float64)
        if not (weights > 0).all():
            links = links[:, weights > 0]
            weights = weights[weights > 0]
        link_bytes = links.tobytes()
        width = links.itemsize * links.shape[1]
        amounts = weights.tobytes()
        keys = [(link_bytes[i * width : (i + 1) * width], amounts) for i in range(len(links))]
        fresh = {key: i for i, key in enumerate(keys) if key not in self._known}
        if fresh:
            new = links[list(fresh.values())]
            self.alone += self._rates(new, weights)
            self._known.update(zip(fresh, range(len(self.pairs), len(self.alone)), strict=True))
            self.pairs += [(row, weights) for row in new]
        return [self._known[key] for key in keys]

    def _rates(self, links: Ints, weights: Floats) -> list[float]:
        """Payload rate of loads (n, k) with their links to themselves."""
        capacity = self.topology.link_bandwidth[links]
        if links.size and not capacity.min() > 0:
            name = self.topology.link_name(int(links.flat[np.argmin(capacity)]))
            raise TopologyError(f"{self.topology.name}: traffic is routed over {name}, which has no bandwidth")
        # Links in order are told apart by their neighbours; sorting them would cost as much as routing them.
        if not (links[:, 1:] > links[:, :-1]).all() and (np.diff(np.sort(links, axis=1), axis=1) == 0).any():
            raise ProgramError("a plan names a link twice; its weights must be summed per link")
        with np.errstate(over="ignore"):  # of next to no bytes: as fast as anything
            rates: list[float] = (capacity / weights).min(axis=1, initial=np.inf).tolist()
        return rates

    @property
    def changing(self) -> Ints:
        """Links that vary, ascending."""
        return np.unique(np.array([link for change in self.varying for link in change.links], dtype=np.int64))

    def slots(self) -> Slots:
        """The slots of all loads; after those a row for each link that varies, which so has a slot of its own."""
        apart = [(link[None], np.ones(1)) for link in self.changing]
        return reduced([*self.pairs, *apart], self.topology.link_bandwidth)

    def crossing(self, loads: Ints) -> bool:
        """Whether any of these loads crosses a link that varies."""
        return any(np.isin(self.pairs[i][0], self.changing).any() for i in np.unique(loads).tolist())

    def csr(self, loads: Ints) -> tuple[Ints, Ints, Floats]:
        """The loads' links one after another: ``(ptr (n+1,), links (E,), weights (E,))``."""
        pairs = [self.pairs[i] for i in loads.tolist()]
        ptr = np.cumsum([0, *(len(links) for links, _ in pairs)], dtype=np.int64)
        if not pairs:
            return ptr, np.array([], dtype=np.int64), np.array([])
        return ptr, np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])


class Slots(msgspec.Struct, frozen=True, eq=False):
    """What each of some loads takes of which slot, one load after another.

    Parameters
    ----------
    n : int, slots. ptr : (loads + 1,) int. slot, weight : (E,) int and float [s/byte], of load ``i`` from ``ptr[i]``.
    """

    n: int
    ptr: Ints
    slot: Ints
    weight: Floats

    def entries(self, loads: Ints) -> tuple[Ints, Ints, Floats]:
        """The slots of some loads: ``(place in loads, slot, weight)`` of each entry."""
        which, position = _pairs(self.ptr[loads], self.ptr[loads + 1])
        return which, self.slot[position], self.weight[position]

    def only(self, chosen: Bools) -> Slots:
        """Without the others, under the same numbers; ``chosen`` : (n,) bool."""
        in_chosen = chosen[self.slot]
        ptr = np.concatenate([[0], np.cumsum(in_chosen)])[self.ptr]
        return Slots(self.n, ptr, self.slot[in_chosen], self.weight[in_chosen])


def reduced(pairs: Sequence[tuple[Ints, Floats]], bandwidth: Floats) -> Slots:
    """Slots of these loads, each ``(links, weights)``, on links of this bandwidth [bytes/s]."""
    ptr = np.cumsum([0, *(len(links) for links, _ in pairs)])
    if not ptr[-1]:
        return Slots(0, ptr, np.zeros(0, dtype=np.int64), np.zeros(0))
    links = np.concatenate([links for links, _ in pairs])
    weight = np.concatenate([weights for _, weights in pairs]) / bandwidth[links]
    weight = np.maximum(weight, 1e-290)  # next to no bytes: proportions are formed of them
    load = np.repeat(np.arange(len(pairs)), np.diff(ptr))
    order = np.lexsort((load, links))
    links = links[order]
    load = load[order]
    weight = weight[order]
    column = np.cumsum(np.r_[True, links[1:] != links[:-1]]) - 1
    chosen = _tightest(column, load, weight, len(pairs))
    chosen = _undominated(column, load, weight, chosen)
    slot = np.where(chosen, np.cumsum(chosen) - 1, -1)[column]
    in_chosen = slot >= 0
    slot = slot[in_chosen]
    load = load[in_chosen]
    weight = weight[in_chosen]
    order = np.lexsort((slot, load))
    ptr = np.searchsorted(load[order], np.arange(len(pairs) + 1))
    return Slots(int(chosen.sum()), ptr, slot[order], weight[order])


def _tightest(column: Ints, load: Ints, weight: Floats, n: int) -> Bools:
    """Of links (columns) with the same users in the same proportions, the one that fills first."""
    first = np.flatnonzero(np.r_[True, column[1:] != column[:-1]])
    share = (weight / weight[first][column]).view(np.uint64) + np.uint64(2**11)
    share >>= np.uint64(12)  # proportions are told apart by 40 bits
    mark = np.random.default_rng(1).integers(2**63, size=n, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed_marks = (share ^ (share >> np.uint64(17))) * mark[load] + mark[load] * mark[load]
    signature = np.add.reduceat(mixed_marks, first)
    order = np.lexsort((-weight[first], signature))
    chosen = np.zeros(len(first), dtype=np.bool_)
    chosen[order[np.r_[True, signature[order][1:] != signature[order][:-1]]]] = True
    return chosen


def _undominated(column: Ints, load: Ints, weight: Floats, chosen_columns: Bools) -> Bools:
    """Without links whose users all are another's, of which none takes a larger share of it."""
    in_chosen = chosen_columns[column]
    column = column[in_chosen]
    load = load[in_chosen]
    weight = weight[in_chosen]
    first = np.flatnonzero(np.r_[True, column[1:] != column[:-1]])
    size = np.diff(np.r_[first, len(column)])
    n = int(load.max()) + 1
    by = np.argsort(load, kind="stable")
    ptr = np.searchsorted(load[by], np.arange(n + 1))
    column_of = np.repeat(np.arange(len(first)), size)  # columns by number among those kept
    key = column_of * n + load  # ascending
    most = np.zeros(n, dtype=np.int64)
    np.maximum.at(most, load, size[column_of])
    # A link is compared with those that one of its users crosses: the user that crosses the fewest.
    crosses = np.diff(ptr)[load]
    least = np.minimum.reduceat(crosses, first)
    entries = np.flatnonzero(crosses == least[column_of])
    chosen = entries[np.r_[True, np.diff(column_of[entries]) > 0]]
    small = np.flatnonzero((size < most[load[chosen]]) & (least <= MOST_CROSSED))
    gone = np.zeros(len(first), dtype=np.bool_)
    for part in np.array_split(small, 1 + len(small) // AT_ONCE):
        first_of, second_of = _pairs(ptr[load[chosen[part]]], ptr[load[chosen[part]] + 1])
        first_of = part[first_of]
        second_of = column_of[by[second_of]]
        larger = size[second_of] > size[first_of]
        first_of = first_of[larger]
        second_of = second_of[larger]
        pair, entry = _pairs(first[first_of], first[first_of] + size[first_of])
        position = np.minimum(np.searchsorted(key, second_of[pair] * n + load[entry]), len(key) - 1)
        inside = (key[position] == second_of[pair] * n + load[entry]) & (
            weight[entry] <= weight[position] * (1 + INSTANT)
        )
        gone[first_of[np.bincount(pair[~inside], minlength=len(first_of)) == 0]] = True
    remaining = chosen_columns.copy()
    remaining[np.flatnonzero(chosen_columns)[gone]] = False
    return remaining


AT_ONCE = 4096
MOST_CROSSED = 1024
"""Links looked at together, and how many each is compared with at most: one left over costs time, never truth."""


def _pairs(begin: Ints, end: Ints) -> tuple[Ints, Ints]:
    """Every number of each range, with the place of its range."""
    count = end - begin
    which = np.repeat(np.arange(len(count)), count)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + begin[which]


def crowded(slot: Ints, begin: Floats, end: Floats, demands: Floats) -> Bools:
    """Which of some uses of slots met others there that together asked for more than the slot has.

    Parameters
    ----------
    slot : (E,) int. begin, end : (E,) [s], when a flow is there. demands : (E,) float, the part of the slot it asks
    for."""
    # Mostly the uses of a slot follow one another: then none is there with the next, and nothing is added up.
    order = np.lexsort((begin, slot))
    slot_order = slot[order]
    meets = (slot_order[1:] == slot_order[:-1]) & (end[order[:-1]] * (1 - INSTANT) > begin[order[1:]])
    shared = np.zeros(int(slot.max(initial=-1)) + 1, dtype=np.bool_)
    shared[slot_order[1:][meets]] = True
    in_shared = shared[slot]
    crowded_flows = np.zeros(len(slot), dtype=np.bool_)
    if in_shared.any():
        crowded_flows[in_shared] = _too_much(slot[in_shared], begin[in_shared], end[in_shared], demands[in_shared])
    return crowded_flows


def _too_much(slot: Ints, begin: Floats, end: Floats, demands: Floats) -> Bools:
    """:func:`crowded`, of uses that meet."""
    n = len(slot)
    time = np.concatenate([begin, end * (1 - INSTANT)])
    more = np.concatenate([demands, -demands])
    slots = np.concatenate([slot, slot])
    begins = np.repeat(np.array([1, 0], dtype=np.int8), n)
    order = np.lexsort((begins, time, slots))  # what ends at an instant is gone when the next begins
    slots = slots[order]
    total = np.cumsum(more[order])
    head = np.flatnonzero(np.r_[True, slots[1:] != slots[:-1]])
    before = np.repeat(np.r_[0.0, total[head[1:] - 1]], np.diff(np.r_[head, 2 * n]))
    hot = (total - before > 1 + ROOM) & (begins[order] == 1)
    place = np.empty(2 * n, dtype=np.int64)
    place[order] = np.arange(2 * n)
    count = np.cumsum(hot)
    too_much: Bools = (count[place[n:]] - count[place[:n]] > 0) | hot[place[:n]]
    return too_much
