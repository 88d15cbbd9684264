"""Who gets how much of a shared link: weighted max-min fairness as a pure function of arrays.

Flow ``i`` moves payload at rate ``r_i`` and takes ``w_il * r_i`` of link ``l``. Rates are *max-min fair*: nobody can
get more without someone slower, or as slow, getting less (Bertsekas & Gallager, Data Networks, section 6.5.2). Water is
poured into all flows at one level; a flow stops rising when one of its links is full or it reaches its own ceiling.

The level at which a link would fill only rises while other flows freeze, so a link whose flows could not be held
lower anywhere else is final at once. All such links freeze in the same round: independent parts of the network cost
one round together, not one each.
"""

from __future__ import annotations

from itertools import chain

import numpy as np

from clustersim.core.arrays import Floats, Ints

TIE = 1e-12
"""Two levels this close, relatively, are one level."""

SMALL = 48
"""Entries (class x slot) that plain Python fills sooner than numpy."""


def max_min(ptr: Ints, links: Ints, weights: Floats, capacities: Floats, ceilings: Floats) -> Floats:
    """Weighted max-min fair rates.

    Parameters
    ----------
    ptr : (F+1,) int, CSR: flow ``i`` crosses ``links[ptr[i]:ptr[i+1]]``, no link twice in one flow.
    links : (E,) int, link ids below ``len(capacities)``.
    weights : (E,) float, bytes of the link one payload byte takes; above 0.
    capacities : (L,) float [bytes/s]. ceilings : (F,) float [bytes/s] of payload, may be inf.

    Returns
    -------
    (F,) float [bytes/s]: payload rates; inf for a flow without links and ceiling.

    Two flows on one link get half each, unless one cannot use its half:

    >>> one_link = np.array([0, 1, 2]), np.array([0, 0]), np.ones(2), np.array([10.0])
    >>> max_min(*one_link, np.array([np.inf, np.inf])).tolist()
    [5.0, 5.0]
    >>> max_min(*one_link, np.array([2.0, np.inf])).tolist()
    [2.0, 8.0]
    """
    rates = ceilings.astype(np.float64, copy=True)
    left = capacities.astype(np.float64, copy=True)
    flows = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    rising = np.diff(ptr) > 0
    while len(flows):
        total = np.bincount(links, weights=weights, minlength=len(left))
        level = np.divide(left, total, out=np.full(len(left), np.inf), where=total > 0)
        share = ceilings.copy()
        np.minimum.at(share, flows, level[links])
        least = np.full(len(left), np.inf)
        np.minimum.at(least, links, share[flows])
        full = least >= level * (1 - TIE)
        stops = share >= ceilings
        stops[flows[full[links]]] = True
        stops &= rising
        rates[stops] = share[stops]
        rising &= ~stops
        frozen = stops[flows]
        keep = rising[flows]
        left -= np.bincount(links[frozen], weights=(weights * share[flows])[frozen], minlength=len(left))
        np.maximum(left, 0.0, out=left)
        flows = flows[keep]
        links = links[keep]
        weights = weights[keep]
    return rates


def level(flows: list[tuple[float, list[tuple[int, float]]]], taken: Floats) -> list[float]:
    """Max-min fair rates in what ``taken`` leaves of each slot.

    ``flows`` : of each class the ceiling of a flow, and of the slots it crosses what all of its flows take [s/byte].
    """
    if len(flows) == 1:
        ceiling, entries = flows[0]
        return [min([ceiling, *[max(1.0 - taken.item(s), 0.0) / w for s, w in entries]])]
    counts = [len(entries) for _, entries in flows]
    if sum(counts) <= SMALL:
        return _level_few(flows, taken)
    slots, takes = zip(*chain.from_iterable([entries for _, entries in flows]), strict=True)
    ceilings = np.array([ceiling for ceiling, _ in flows])
    return fill(np.cumsum([0, *counts]), np.array(slots), np.array(takes), ceilings, taken)


def fill(ptr: Ints, slots: Ints, takes: Floats, ceilings: Floats, taken: Floats) -> list[float]:
    """:func:`level` of classes as columns: class ``i`` takes ``takes[ptr[i]:ptr[i+1]]`` of these ``slots``."""
    number = np.zeros(len(taken), dtype=np.int64)
    number[slots] = 1
    used = np.flatnonzero(number)
    number[used] = np.arange(len(used))
    room = np.maximum(1.0 - taken[used], 0.0)
    return max_min(ptr, number[slots], takes, room, ceilings).tolist()  # type: ignore[no-any-return]


def _level_few(flows: list[tuple[float, list[tuple[int, float]]]], taken: Floats) -> list[float]:
    """Water-filling (:mod:`clustersim.engine.flows.fairshare`) in plain Python: after each level only the slots of who
    stopped there are added up again."""
    rates = [ceiling for ceiling, _ in flows]
    left: dict[int, float] = {}
    users: dict[int, list[tuple[int, float]]] = {}
    total: dict[int, float] = {}
    for i, (_, entries) in enumerate(flows):
        for s, w in entries:
            if s in users:
                users[s].append((i, w))
                total[s] += w
            else:
                users[s] = [(i, w)]
                total[s] = w
                left[s] = max(1.0 - taken.item(s), 0.0)
    rising = [True] * len(flows)
    by_ceiling = sorted(range(len(flows)), key=rates.__getitem__, reverse=True)
    while by_ceiling:
        if not rising[by_ceiling[-1]]:
            by_ceiling.pop()
            continue
        tightest = -1
        water = flows[by_ceiling[-1]][0]
        for s, weight in total.items():
            if left[s] < water * weight:
                tightest = s
                water = left[s] / weight
        fresh: set[int] = set()
        for i in [i for i, _ in users[tightest]] if tightest >= 0 else [i for i in by_ceiling if flows[i][0] <= water]:
            if not rising[i]:
                continue
            rising[i] = False
            rates[i] = water
            for s, w in flows[i][1]:
                fresh.add(s)
                rest = left[s] - w * water
                left[s] = rest if rest > 0.0 else 0.0
        for s in fresh:
            users[s] = still = [use for use in users[s] if rising[use[0]]]
            weight = 0.0
            for _, w in still:
                weight += w
            total[s] = weight
    return rates
