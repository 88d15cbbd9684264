"""Who gets how much of a shared link: weighted max-min fairness as a pure function of arrays.

Flow ``i`` moves payload at rate ``r_i`` and takes ``w_il * r_i`` of link ``l``. Rates are *max-min fair*: nobody can
get more without someone slower, or as slow, getting less (Bertsekas & Gallager, Data Networks, section 6.5.2). Water is
poured into all flows at one level; a flow stops rising when one of its links is full or it reaches its own ceiling.

The level at which a link would fill only rises while other flows freeze, so a link whose flows could not be held
lower anywhere else is final at once. All such links freeze in the same round: independent parts of the network cost
one round together, not one each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.engine.flows import CEILING, Equals
from clustersim.engine.loads import INSTANT

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

TIE = 1e-12
"""Two levels this close, relatively, are one level."""

SMALL = 64
"""Entries (class x slot) that plain Python fills sooner than numpy."""

SHORT = 8
"""Slots of a class that plain Python books sooner than numpy."""


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
        frozen, keep = stops[flows], rising[flows]
        left -= np.bincount(links[frozen], weights=(weights * share[flows])[frozen], minlength=len(left))
        np.maximum(left, 0.0, out=left)
        flows, links, weights = flows[keep], links[keep], weights[keep]
    return rates


def level(some: Sequence[Equals], usage: Floats, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    """Max-min fair rates of these classes in what ``usage`` (of each slot) leaves, and what holds each of them."""
    if len(some) == 1:
        return _level_one(some[0], usage, rng)
    if sum(len(one.slot_list) for one in some) <= SMALL:
        return _level_few(some, usage)
    return _level_many(some, usage, rng)


def _level_one(one: Equals, usage: Floats, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    """A class by itself: its ceiling, or what the slot with the least room leaves each of its flows."""
    share = np.maximum(1.0 - usage[one.slots], 0.0) / (one.weights * one.n)
    least: float = share.min(initial=np.inf)
    if one.ceiling <= least * (1 + INSTANT):
        return [min(one.ceiling, least)], [CEILING]
    return [least], [int(one.slots[rng.choice(np.flatnonzero(share <= least * (1 + 1e-10)))])]


def _level_few(some: Sequence[Equals], usage: Floats) -> tuple[list[float], list[int]]:
    """Water-filling (:mod:`clustersim.engine.fairshare`) in plain Python."""
    rates, held = [0.0] * len(some), [CEILING] * len(some)
    left: dict[int, float] = {}
    rising = list(range(len(some)))
    while rising:
        weight: dict[int, float] = {}
        for i in rising:
            one = some[i]
            n = one.n
            for s, w in one.pairs:
                weight[s] = weight.get(s, 0.0) + w * n
        if not left:
            left = {s: max(1.0 - usage.item(s), 0.0) for s in weight}
        at, water = CEILING, np.inf
        for s, total in weight.items():
            if left[s] < water * total:
                at, water = s, left[s] / total
        lowest = min([some[i].ceiling for i in rising])
        if lowest <= water:
            at, water = CEILING, lowest
            stops = [i for i in rising if some[i].ceiling <= lowest]
        else:
            stops = [i for i in rising if at in some[i].users]
        for i in stops:
            rates[i], held[i] = water, at
        if len(stops) == len(rising):
            break
        for i in stops:
            for s, w in some[i].pairs:
                left[s] = max(left[s] - w * some[i].n * water, 0.0)
        rising = [i for i in rising if i not in stops]
    return rates, held


def _level_many(some: Sequence[Equals], usage: Floats, rng: np.random.Generator) -> tuple[list[float], list[int]]:
    ptr = np.cumsum([0, *(len(one.slot_list) for one in some)])
    slots = np.concatenate([one.slots for one in some])
    number = np.zeros(len(usage), dtype=np.int64)
    number[slots] = 1
    used = np.flatnonzero(number)
    number[used] = np.arange(len(used))
    slots = number[slots]
    weights = np.concatenate([one.weights * one.n for one in some])
    room = np.maximum(1.0 - usage[used], 0.0)
    ceilings = np.array([one.ceiling for one in some])
    rates = max_min(ptr, slots, weights, room, ceilings)
    owner = np.repeat(np.arange(len(some)), np.diff(ptr))
    carried = np.bincount(slots, weights * rates[owner], len(used))
    fastest = np.zeros(len(used))
    np.maximum.at(fastest, slots, rates[owner])
    full = (carried[slots] >= room[slots] - 1e-10) & (rates[owner] >= fastest[slots] * (1 - 1e-10))
    held = np.full(len(some), CEILING)
    # Any full slot holds. They are spread, so that few look for another when one goes.
    holds = rng.permutation(np.flatnonzero(full))
    held[owner[holds]] = used[slots[holds]]
    held[rates >= ceilings * (1 - INSTANT)] = CEILING
    return rates.tolist(), held.tolist()
