"""Which experts tokens visit: rows every expert-parallel position sends and receives, from a model of the router.

Kinds are those of :class:`clustersim.training.parallel.Routing`. ``balanced``: all alike, ``round_robin`` too.
``uniform``: tokens draw k of E experts at random; one draw by its seed, with the mean, variances and covariances of
drawing without replacement. ``skewed``: the popularity of experts falls as a power of their rank (Zipf), steep enough
that the busiest has ``skew`` times the mean; which are popular is drawn. ``histogram``: as often as was measured. The
last two are expectations.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.byte_matrix import ByteMatrix, byte_matrix
from clustersim.core.errors import ScenarioError
from clustersim.core.texts import csv_rows, text_of
from clustersim.training.parallel import Routing

ROUNDED = 1e-6
"""Rows that are rounding, not a part of a row."""
MOST_TOKENS = 1e18
"""Of an expert in a histogram."""
STEEPEST = 64.0
"""Exponent of a popularity that no router exceeds: one expert gets all it can."""


class ExpertRouter(msgspec.Struct, frozen=True):
    """What decides who gets how much.

    Parameters
    ----------
    routing : the kind. experts, per_token : E and k. ep : positions, each with E/ep consecutive experts.
    tokens : of one position and one sample. capacity : most rows an expert takes of one position; 0 for all (dropless).
    padded : experts' inputs are padded to the capacity, so that all positions get the same. drops : what is beyond the
        capacity is left out; otherwise the capacity grows to the largest load.
    histogram : relative loads of the experts, for the kind of that name.
    """

    routing: Routing
    experts: int
    per_token: int
    ep: int
    tokens: float
    capacity: int = 0
    padded: bool = False
    drops: bool = True
    histogram: tuple[float, ...] = ()


class RoutedTokens(msgspec.Struct, frozen=True):
    """What expert-parallel positions send and receive.

    Parameters
    ----------
    rows : a position sends per sample, in the mean (and so receives); of all its tokens together.
    load : (ep,) rows each position receives, over the mean; empty where all are alike.
    matrix : rows of pairs, over ``rows``; None where all are alike. in_turn : a token's experts are next to each other.
    """

    rows: float
    load: tuple[float, ...] = ()
    matrix: ByteMatrix | None = None
    in_turn: bool = False

    @property
    def returning(self) -> ByteMatrix | None:
        """The matrix of the way back."""
        return None if self.matrix is None else byte_matrix(self.matrix.array.T.tolist())

    @property
    def imbalance(self) -> float:
        """Rows of the busiest position over the mean."""
        return max(self.load, default=1.0)


@lru_cache(maxsize=256)
def routed(router: ExpertRouter) -> RoutedTokens:
    """Rows sent and received, by the model of the router.

    Raises
    ------
    ScenarioError : for a skew that no k of E experts reach, or a histogram of another number of experts.
    """
    if router.padded and router.drops:
        return RoutedTokens(float(router.capacity * router.experts))
    wanted = _by_expert(router)
    if router.padded:
        return RoutedTokens(float(max(router.capacity, math.ceil(wanted.max() - ROUNDED)) * router.experts))
    if router.capacity and router.drops:
        wanted = np.minimum(wanted, router.capacity)
    pairs = wanted.reshape(router.ep, router.ep, -1).sum(axis=2)
    rows = float(pairs.sum()) / router.ep
    if router.ep == 1 or np.allclose(pairs, pairs.mean(), rtol=1e-12, atol=0.0):
        return RoutedTokens(rows, in_turn=router.routing.kind == "round_robin")
    return RoutedTokens(rows, tuple((pairs.sum(axis=0) / rows).tolist()), byte_matrix((pairs / rows).tolist()))


def _by_expert(router: ExpertRouter) -> Floats:
    """(ep, E) rows of each position for each expert."""
    kind = router.routing.kind
    e = router.experts
    mean = router.tokens * router.per_token / e
    if kind == "uniform" and router.per_token < e:
        return _drawn(router, mean)
    shares = np.ones(e)
    if kind == "skewed":
        rng = np.random.default_rng(router.routing.seed)
        shares = rng.permutation(popularity(e, router.per_token, router.routing.skew))
    elif kind == "histogram":
        if len(router.histogram) != e:
            raise ScenarioError(
                f"the histogram has {len(router.histogram)} experts and the model {e} (at $.parallel.routing.file)"
            )
        if np.count_nonzero(router.histogram) < router.per_token:
            raise ScenarioError(
                f"a layer of the histogram has tokens for {np.count_nonzero(router.histogram)} experts, and each token "
                f"visits {router.per_token} different ones (at $.parallel.routing.file)"
            )
        shares = _visited(np.array(router.histogram), router.per_token)
    return mean * np.tile(shares, (router.ep, 1))


def _drawn(router: ExpertRouter, mean: float) -> Floats:
    """One draw of what tokens that choose k of E without replacement ask for.

    A multinomial draw of all choices has the same mean; its deviations times ``sqrt((E-k)/(E-1))`` have the variances
    and covariances of choices of which no token makes one twice.
    """
    e = router.experts
    k = router.per_token
    rng = np.random.default_rng(router.routing.seed)
    counts = rng.multinomial(max(1, round(router.tokens * k)), np.full(e, 1.0 / e), size=router.ep)
    loads: Floats = np.maximum(0.0, mean + (counts - counts.mean(axis=1, keepdims=True)) * math.sqrt((e - k) / (e - 1)))
    return loads


def popularity(experts: int, per_token: int, skew: float) -> Floats:
    """(E,) expected loads over their mean, most popular first: a power of the rank, the first one ``skew``.

    Raises :class:`ScenarioError` above E/k, where every token visits the busiest expert.

    >>> popularity(8, 2, 1.0).tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    most = experts / per_token
    if not 1.0 <= skew <= most:
        raise ScenarioError(
            f"skew = {skew:g} must be from 1 to {most:g}, where every token visits the busiest of {experts} experts "
            "(at $.parallel.routing.skew)"
        )
    low = 0.0
    high = STEEPEST
    ranks = np.arange(1, experts + 1, dtype=np.float64)
    for _ in range(80):
        middle = (low + high) / 2
        if _visited(ranks**-middle, per_token)[0] < skew:
            low = middle
        else:
            high = middle
    return _visited(ranks ** -((low + high) / 2), per_token)


def _visited(weights: Floats, per_token: int) -> Floats:
    """Loads over their mean in proportion to weights, none above one visit by every token."""
    e = len(weights)
    loads = weights * e / weights.sum()
    most = e / per_token
    for _ in range(e):
        over = loads >= most
        if over.sum() >= per_token or not (loads > most * (1 + 1e-12)).any():
            break
        rest = e - most * over.sum()
        loads = np.where(over, most, loads * rest / loads[~over].sum())
    visited: Floats = np.minimum(loads, most)
    return visited


def read_histogram(path: Path) -> tuple[tuple[float, ...], ...]:
    """Tokens per expert of every layer: a CSV with a row per layer and a number per expert, without a header.

    Raises
    ------
    ScenarioError : naming file and row, for what is no number, negative, or another count than the row above.
    """
    histograms: list[tuple[float, ...]] = []
    for number, row in enumerate(csv_rows(text_of(path, ScenarioError), str(path), ScenarioError), start=1):
        try:
            counts = tuple(float(cell) for cell in row)
        except ValueError as error:
            raise ScenarioError(f"{path}, line {number}: {error}; write tokens per expert") from error
        if not all(0 <= c <= MOST_TOKENS for c in counts) or sum(counts) <= 0:
            raise ScenarioError(
                f"{path}, line {number}: tokens per expert must be numbers from 0 to {MOST_TOKENS:g}, some above 0"
            )
        if histograms and len(counts) != len(histograms[0]):
            raise ScenarioError(f"{path}, line {number}: {len(counts)} experts, and {len(histograms[0])} in line 1")
        histograms.append(counts)
    if not histograms:
        raise ScenarioError(f"{path} is empty; write a row of tokens per expert for each layer")
    return tuple(histograms)


def capacity(tokens: float, experts: int, per_token: int, factor: float, least: int = 0) -> int:
    """Rows an expert takes of one rank: ``ceil(T k / E * factor)`` (Megatron-LM moe_utils.py ``get_capacity``).

    >>> capacity(4096, 256, 8, 1.0)
    128
    """
    return max(least, math.ceil(tokens * per_token / experts * factor - ROUNDED))


def distinct(parts: int, experts: int, per_token: int) -> float:
    """Parts of all experts (ranks, nodes) that a token's k choices fall into, expected for uniform choices.

    ``parts (1 - C(E - E/parts, k) / C(E, k))``: one minus the chance that no choice falls into a part.

    >>> round(distinct(64, 256, 8), 4), round(distinct(8, 256, 8), 4)
    (7.6758, 5.2947)
    """
    rest = experts - experts // parts
    return parts * (1.0 - math.comb(rest, per_token) / math.comb(experts, per_token))


def in_turn(parts: int, experts: int, per_token: int) -> float:
    """Parts of all experts that a token's k choices fall into where every token takes the k experts behind those of the
    token before it, in the mean over tokens.

    >>> in_turn(8, 128, 8), in_turn(64, 256, 8), in_turn(8, 60, 8)
    (1.0, 2.0, 2.0)
    """
    of_part = experts // parts
    starts = range(0, math.lcm(experts, per_token), per_token)
    visited = [len({(start + i) % experts // of_part for i in range(per_token)}) for start in starts]
    return sum(visited) / len(visited)
