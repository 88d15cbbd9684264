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

from clustersim.engine.flows import Equals

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

TIE = 1e-12
"""Two levels this close, relatively, are one level."""

SMALL = 64
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
        frozen, keep = stops[flows], rising[flows]
        left -= np.bincount(links[frozen], weights=(weights * share[flows])[frozen], minlength=len(left))
        np.maximum(left, 0.0, out=left)
        flows, links, weights = flows[keep], links[keep], weights[keep]
    return rates


def level(some: Sequence[tuple[Equals, npt.NDArray[np.bool_]]], taken: Floats) -> list[float]:
    """Max-min fair rates of the flows of these classes, in what ``taken`` leaves of each slot. Of each class only some
    slots can hold anybody back: a mask."""
    ceilings = [one.ceiling for one, _ in some]
    slots = [one.slots[mask] for one, mask in some]
    weights = [one.weights[mask] * len(one.flows) for one, mask in some]
    if sum(map(len, slots)) <= SMALL:
        entries = [list(zip(s.tolist(), w.tolist(), strict=True)) for s, w in zip(slots, weights, strict=True)]
        return _level_few(entries, ceilings, taken)
    used, at = np.unique(np.concatenate(slots), return_inverse=True)
    ptr, room = np.cumsum([0, *map(len, slots)]), np.maximum(1.0 - taken[used], 0.0)
    return max_min(ptr, at, np.concatenate(weights), room, np.array(ceilings)).tolist()  # type: ignore[no-any-return]


def _level_few(some: list[list[tuple[int, float]]], ceilings: list[float], taken: Floats) -> list[float]:
    """Water-filling (:mod:`clustersim.engine.fairshare`) in plain Python: of each class what it takes of which slot."""
    rates = ceilings.copy()
    left = {s: max(1.0 - taken.item(s), 0.0) for entries in some for s, _ in entries}
    rising = list(range(len(some)))
    while rising:
        weight = dict.fromkeys(left, 0.0)
        for i in rising:
            for s, w in some[i]:
                weight[s] += w
        at, water = -1, min([ceilings[i] for i in rising])
        for s, total in weight.items():
            if left[s] < water * total:
                at, water = s, left[s] / total
        stops = [i for i in rising if (any(s == at for s, _ in some[i]) if at >= 0 else ceilings[i] <= water)]
        for i in stops:
            rates[i] = water
            for s, w in some[i]:
                left[s] = max(left[s] - w * water, 0.0)
        rising = [i for i in rising if i not in stops]
    return rates
