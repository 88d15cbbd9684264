"""How ranks differ from each other and from step to step, as data, and drawn.

A rank's pace is what multiplies its compute in a step: 1 is usual, 1.1 takes a tenth longer. Every source of variation
has a stream of random numbers of its own, so that taking one away leaves what the others draw as it was.

Sizes that were measured: ``gpu_cv`` 0.013 (five clusters, arXiv:2208.11035), ``slow_hosts`` 0.005 that are slower by
1.1 (MegaScale, arXiv:2402.15627), ``step_cv`` below 0.01 (BLOOM's log), ``day_swing`` 0.01 to 0.02 (Llama 3,
arXiv:2407.21783).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from clustersim.core.arrays import Floats, Ints
from clustersim.core.units import Seconds

Share = Annotated[float, Meta(ge=0, le=1)]
LEAST = 0.05
"""No normal law makes a rank faster than this share of its usual time."""


class Variation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[run.variation]``: how ranks differ, in place of ``run.jitter`` and of the device's own jitter.

    Parameters
    ----------
    step_cv : of a rank's compute from step to step, its standard deviation over its mean. step_law : of it:
        ``lognormal``, ``normal``, or ``exponential``: nothing below ``1 - step_cv``, and a tail above.
    draws : ``independent``, or ``usual``: every step has the usual spread over ranks (what ``run.jitter`` means).
    gpu_cv : of GPUs of one model, which keep their pace for good (normal).
    drift_cv, drift_steps : of a pace that wanders (garbage that piles up, heat), and after how many steps it has
        forgotten where it was.
    slow_hosts, slow_factor : share of hosts that are slow for good, and how many times longer they compute.
    day_swing : of all GPUs together over a day, from the fastest hour to the slowest.
    microbatch_cv : of the time of a replica's micro-batches, whose sequences differ in length (lognormal).
    pause, pause_every, pause_together : how long a rank stands still (Python's garbage collection), every how many
        steps on average, and whether all ranks do so in the same step.
    """

    step_cv: Share = 0.0
    step_law: Literal["lognormal", "normal", "exponential"] = "lognormal"
    draws: Literal["independent", "usual"] = "independent"
    gpu_cv: Share = 0.0
    drift_cv: Share = 0.0
    drift_steps: Annotated[float, Meta(ge=1, le=1e9)] = 1000.0
    slow_hosts: Share = 0.0
    slow_factor: Annotated[float, Meta(ge=1, le=100)] = 1.0
    day_swing: Share = 0.0
    microbatch_cv: Annotated[float, Meta(ge=0, le=10)] = 0.0
    pause: Seconds | None = None
    pause_every: Annotated[float, Meta(ge=1, le=1e9)] | None = None
    pause_together: bool = False

    def __post_init__(self) -> None:
        if (self.pause is None) != (self.pause_every is None):
            raise ValueError("write both of pause and pause_every: how long, and every how many steps")
        if self.draws == "usual" and self.step_law != "lognormal":
            raise ValueError('draws = "usual" is of the lognormal law')


@dataclass(frozen=True, eq=False)
class RankPlaces:
    """Of each rank: its ``host`` and its ``replica`` of the model, both (ranks,) from 0; ``microbatches`` of a step."""

    host: Ints
    replica: Ints
    microbatches: int = 1


@dataclass(frozen=True, eq=False)
class DrawnVariation:
    """What was drawn for some steps; None is no such variation.

    Parameters
    ----------
    pace : (steps, ranks). lengths : (steps, micro-batches, replicas), times of micro-batches over their mean.
    pauses : (steps, ranks) [s]. places : (steps, ranks) from 0 to 1, where in the step a pause is.
    """

    pace: Floats | None
    lengths: Floats | None
    pauses: Floats | None
    places: Floats | None


def usual(cv: float, steps: int, ranks: int, seed: int) -> Floats | None:
    """How much slower or faster each rank computes in each step: log-normal with mean 1 over ranks.

    Every step has the usual spread, the expected order statistics of ``ranks`` normal draws (Blom 1958), and which
    rank is where is drawn anew. With independent draws the slowest of a few ranks over a few steps is luck: on four
    V100s it moved a step by 2 %.

    Parameters
    ----------
    cv : relative standard deviation; 0 gives None, and every rank keeps the same time.

    Returns (steps, ranks) float. The slowest of n ranks, which is what a synchronous step waits for, is 1.42 cv
    above the mean at n = 8, and tends to sqrt(2 ln n) cv.
    """
    if not cv:
        return None
    sigma2 = np.log1p(cv**2)
    normal = NormalDist()
    draw = np.random.default_rng(seed)
    order = np.array([normal.inv_cdf((i - 0.375) / (ranks + 0.25)) for i in range(1, ranks + 1)])
    dealt = np.stack([draw.permutation(order) for _ in range(steps)])
    paces: Floats = np.exp(np.sqrt(sigma2) * dealt - sigma2 / 2)
    return paces


def drawn(
    v: Variation, steps: int, where: RankPlaces, seed: int, *, machine: int = 0, best: float = 0.0
) -> DrawnVariation:
    """Draw the steps of one machine: GPUs and hosts once, the rest anew in each step.

    Parameters
    ----------
    machine : others have other GPUs.
    best : share of the slowest hosts that others took the place of: so many more were drawn, rounded up, and the
        slowest left out.
    """
    streams = [np.random.default_rng([seed, machine, i]) for i in range(6)]
    ranks = len(where.host)
    parts = [
        usual(v.step_cv, steps, ranks, seed + machine) if v.draws == "usual" else _fresh(v, (steps, ranks), streams[0]),
        _for_good(v, where, streams[1], best),
        _drifting(v, steps, ranks, streams[2]),
        1.0 + v.day_swing / 2 * np.sin(2 * np.pi * streams[3].random((steps, 1))) if v.day_swing else None,
    ]
    present = [part for part in parts if part is not None]
    pace = np.broadcast_to(math.prod(present[1:], start=present[0]), (steps, ranks)) if present else None
    lengths = None
    if v.microbatch_cv:
        lengths = lognormal(v.microbatch_cv, (steps, where.microbatches, int(where.replica.max()) + 1), streams[4])
    return DrawnVariation(pace, lengths, *_pauses(v, steps, ranks, streams[5]))


def lognormal(cv: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    """Of mean 1."""
    sigma2 = math.log1p(cv * cv)
    factors: Floats = np.exp(math.sqrt(sigma2) * rng.standard_normal(shape) - sigma2 / 2)
    return factors


def _normal(cv: float, shape: tuple[int, ...], rng: np.random.Generator) -> Floats:
    factors: Floats = np.maximum(1.0 + cv * rng.standard_normal(shape), LEAST)
    return factors


def _fresh(v: Variation, shape: tuple[int, int], rng: np.random.Generator) -> Floats | None:
    """Each rank in each step, of mean 1 and this coefficient of variation whatever the law."""
    if not v.step_cv:
        return None
    if v.step_law == "lognormal":
        return lognormal(v.step_cv, shape, rng)
    if v.step_law == "normal":
        return _normal(v.step_cv, shape, rng)
    return 1.0 + v.step_cv * (rng.exponential(size=shape) - 1.0)


def _for_good(v: Variation, rank_places: RankPlaces, rng: np.random.Generator, best: float) -> Floats | None:
    """(ranks,) of GPUs and hosts; of those that were drawn, the hosts whose slowest GPU is slowest are left out."""
    if not v.gpu_cv and not (v.slow_hosts and v.slow_factor > 1):
        return None
    hosts = int(rank_places.host.max()) + 1
    per_host = np.bincount(rank_places.host, minlength=hosts).max()
    slow, gpus = rng.spawn(2)
    more = hosts + math.ceil(best * hosts)
    # Those that a smaller or larger number would have drawn, too, come first.
    of_host = np.where(slow.random(more) < v.slow_hosts, v.slow_factor, 1.0)[:, None]
    of_gpu = _normal(v.gpu_cv, (more, per_host), gpus) if v.gpu_cv else np.ones((more, per_host))
    paces = of_host * of_gpu
    best_hosts = np.sort(np.argsort(paces.max(axis=1), kind="stable")[:hosts])
    order = np.argsort(rank_places.host, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order)) - np.searchsorted(rank_places.host[order], rank_places.host[order])
    pace: Floats = paces[best_hosts][rank_places.host, place]
    return pace


def _drifting(v: Variation, steps: int, ranks: int, rng: np.random.Generator) -> Floats | None:
    """An Ornstein-Uhlenbeck walk of each rank about 1, which began long ago."""
    if not v.drift_cv:
        return None
    decay = math.exp(-1.0 / v.drift_steps)
    walk = rng.standard_normal((steps, ranks))
    for step in range(1, steps):
        walk[step] = decay * walk[step - 1] + math.sqrt(1.0 - decay * decay) * walk[step]
    factors: Floats = np.maximum(1.0 + v.drift_cv * walk, LEAST)
    return factors


def _pauses(v: Variation, steps: int, ranks: int, rng: np.random.Generator) -> tuple[Floats | None, Floats | None]:
    if not v.pause or v.pause_every is None:
        return None, None
    shape = (steps, 1) if v.pause_together else (steps, ranks)
    pauses = float(v.pause) * (rng.random(shape) < 1.0 / v.pause_every)
    return np.broadcast_to(pauses, (steps, ranks)), np.broadcast_to(rng.random(shape), (steps, ranks))
