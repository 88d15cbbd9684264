"""Who gets how much of a shared link: weighted max-min fairness as a pure function of arrays.

Flow ``i`` moves payload at rate ``r_i`` and takes ``w_il * r_i`` of link ``l``. Rates are *max-min fair*: nobody can
get more without someone slower, or as slow, getting less (Bertsekas & Gallager, Data Networks, section 6.5.2). Water is
poured into all flows at one level; a flow stops rising when one of its links is full or it reaches its own ceiling.

The level at which a link would fill only rises while other flows freeze, so a link whose flows could not be held
lower anywhere else is final at once. All such links freeze in the same round: independent parts of the network cost
one round together, not one each.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

TIE = 1e-12
"""Two levels this close, relatively, are one level."""

FAST_FROM = 20_000
"""Entries (flow x link) from which numba, where installed, repays its start."""


def max_min(
    ptr: Ints, links: Ints, weights: Floats, capacities: Floats, ceilings: Floats, *, solver: str = "auto"
) -> Floats:
    """Weighted max-min fair rates.

    Parameters
    ----------
    ptr : (F+1,) int, CSR: flow ``i`` crosses ``links[ptr[i]:ptr[i+1]]``, no link twice in one flow.
    links : (E,) int, link ids below ``len(capacities)``.
    weights : (E,) float, bytes of the link one payload byte takes; above 0.
    capacities : (L,) float [bytes/s]. ceilings : (F,) float [bytes/s] of payload, may be inf.
    solver : a key of :data:`SOLVERS`, or ``"auto"``: numba for big problems where it is installed, numpy otherwise.

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
    if solver == "auto":
        solver = "numba" if len(links) >= FAST_FROM and importlib.util.find_spec("numba") else "numpy"
    used, local = np.unique(links, return_inverse=True)
    return SOLVERS[solver](ptr, local.astype(np.int64), weights, capacities[used], ceilings)


def _numpy(ptr: Ints, links: Ints, weights: Floats, capacities: Floats, ceilings: Floats) -> Floats:
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


def _loops(ptr: Ints, links: Ints, weights: Floats, capacities: Floats, ceilings: Floats) -> Floats:
    """The same algorithm, loop by loop, for numba to compile; it also runs, slowly, as plain Python."""
    n_flows, n_links = len(ptr) - 1, len(capacities)
    rates, left, share = ceilings.copy(), capacities.copy(), ceilings.copy()
    rising = ptr[1:] > ptr[:-1]
    todo = int(rising.sum())
    while todo:
        total, least = np.zeros(n_links), np.full(n_links, np.inf)
        for i in range(n_flows):
            if rising[i]:
                for e in range(ptr[i], ptr[i + 1]):
                    total[links[e]] += weights[e]
        for i in range(n_flows):
            if rising[i]:
                share[i] = ceilings[i]
                for e in range(ptr[i], ptr[i + 1]):
                    share[i] = min(share[i], left[links[e]] / total[links[e]])
                for e in range(ptr[i], ptr[i + 1]):
                    least[links[e]] = min(least[links[e]], share[i])
        full = np.zeros(n_links, dtype=np.bool_)
        for k in range(n_links):
            full[k] = total[k] > 0 and least[k] >= left[k] / total[k] * (1 - TIE)
        for i in range(n_flows):
            if rising[i]:
                stops = share[i] >= ceilings[i]
                for e in range(ptr[i], ptr[i + 1]):
                    stops = stops or full[links[e]]
                if stops:
                    rates[i], rising[i] = share[i], False
                    todo -= 1
                    for e in range(ptr[i], ptr[i + 1]):
                        left[links[e]] = max(left[links[e]] - weights[e] * share[i], 0.0)
    return rates


@cache
def _compiled() -> Callable[..., Any]:
    import numba  # two seconds the first time; only large problems come here

    compiled: Callable[..., Any] = numba.njit(cache=True)(_loops)
    return compiled


def _numba(ptr: Ints, links: Ints, weights: Floats, capacities: Floats, ceilings: Floats) -> Floats:
    columns = np.ascontiguousarray(capacities, dtype=np.float64), np.ascontiguousarray(ceilings, dtype=np.float64)
    rates: Floats = _compiled()(np.ascontiguousarray(ptr), links, np.ascontiguousarray(weights), *columns)
    return rates


SOLVERS: dict[str, Callable[[Ints, Ints, Floats, Floats, Floats], Floats]] = {"numpy": _numpy, "numba": _numba}
"""The same answer twice: numpy everywhere, numba with the ``fast`` extra."""
