"""The robust choice: of the fastest option's rivals the one whose worst regret over what is uncertain is least.

Three numbers of a machine are known to a range only: what its network gives, what its links inside a node give, and how
fast its kernels run. Each is taken low and high, at the ends of what nine in ten published measurements lay within
(:mod:`clustersim.core.ranges`), all of them at once in every combination (*corners*), and the rivals' steps are run
again there, as first runs have them. With a campaign the rate of failures is a fourth number. An option's *regret* at a
corner is how much longer it trains than the rival that is best there (Savage, JASA 46, 1951).

A measurement is worth by how much it lowers the worst regret: who knows on which side a number is may choose there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.ranges import of_collective, of_step
from clustersim.core.topology import Topology
from clustersim.studies.plan.options import PlanOption, ScaledRuns, SearchResult
from clustersim.studies.plan.rounds import Runner
from clustersim.studies.plan.rows import MeasurementWorth, Regret, RobustChoice, UncertainSpan
from clustersim.studies.plan.seen import KnownCandidates

RIVALS = 6
"""Options that are compared at most."""
ALIKE = 1e-3
"""Steps that differ by less are taken for one option's."""
LARGE = float(1 << 30)
"""Bytes of the collectives whose range is the links'."""
FAILURES = 2.0
"""Failures are at most so many times as often or as rare: two clusters of one owner differ by 2.8 (6.50 and 2.34 a
thousand node-days, Kokolis et al., arXiv:2410.21680), and Llama 3's (3.79, arXiv:2407.21783) lies between them."""
FAILING = "failures"
Goodput = Callable[[int, float], float | None]
"""(number of an option, how often failures come) -> share of the time that makes new steps; None where that never
ends."""


@dataclass(frozen=True)
class UncertainNumber:
    """A number that is known to a range.

    Parameters
    ----------
    name : as :func:`clustersim.studies.what_if.rerun.rerun_with` knows it, or :data:`FAILING`. low, high : what it may
        be multiplied by. words : for people. measure : how to know it better.
    """

    name: str
    low: float
    high: float
    words: str
    measure: str

    def side(self, factor: float) -> str:
        """One end in words."""
        return f"{self.words} at {factor:.2f} times what is predicted"


def uncertain(topology: Topology) -> list[UncertainNumber]:
    """What is known of a machine to a range only; what it has not is left out."""
    links = of_collective(topology, LARGE).p90
    kernels = of_step("single").p90
    fit = f"; clustersim calibrate DIR --topology {topology.name} --out measured.toml"
    capture = "clustersim.calibrate.capture --out DIR --parts collectives"
    known = {
        "network": ("the network", links, f"torchrun --nnodes 2 --nproc-per-node 8 -m {capture}{fit}"),
        "inside": ("links inside a node", links, f"torchrun --nproc-per-node 8 -m {capture}{fit}"),
        "kernels": ("kernels", kernels, f"clustersim capture --parts compute --out DIR{fit}"),
    }
    if len(topology.node_types) == 1:
        known.pop("network")
    # Nine in ten times lay within prediction (1 +- p90): rates are their inverse.
    return [
        UncertainNumber(name, 1.0 / (1.0 + p90), 1.0 / (1.0 - p90), words, measure)
        for name, (words, p90, measure) in known.items()
    ]


def at_corners(found: SearchResult, seen: KnownCandidates, runner: Runner) -> tuple[ScaledRuns, ...]:
    """Steps of the fastest option and its rivals, first as they are, then at every corner; nothing without a rival."""
    rivals = list(itertools.islice(_rivals(found, seen), RIVALS))
    if len(rivals) < 2:
        return ()
    chosen = [one.candidate for one in rivals]
    numbers = uncertain(seen.sieve.machines[seen.sieve.place(chosen[0])][0])
    ends = itertools.product(*((one.low, one.high) for one in numbers))
    every: list[dict[str, float]] = [{}]
    every += [dict(zip((one.name for one in numbers), corner, strict=True)) for corner in ends]
    turned = [(factors, runner.run(chosen, rough=True, factors=factors)) for factors in every]
    return tuple(
        ScaledRuns(factors, {number: row.result.step_time_s for number, row in rows.items() if row.result is not None})
        for factors, rows in turned
    )


def _rivals(found: SearchResult, seen: KnownCandidates) -> Iterator[PlanOption]:
    """Options on as many nodes of the fastest one's machine that keep the limits, fastest first; of those that take as
    long one."""
    if not found.front:
        return
    fastest = found.front[0]
    yield fastest
    place = seen.sieve.place(fastest.candidate)
    others = (one for one in found.options if one.rate and one is not fastest)
    near = (one for one in others if seen.sieve.place(one.candidate) == place and seen.keeps(one))
    taken = [fastest.rate]
    for one in sorted(near, key=lambda one: (-one.rate, one.candidate.number)):
        if all(abs(one.rate / rate - 1.0) > ALIKE for rate in taken):
            taken.append(one.rate)
            yield one


def robustness(found: SearchResult, goodput: Goodput | None = None) -> RobustChoice | None:
    """What is robust; None where nothing was run again. ``goodput`` : with a campaign."""
    if not found.turned:
        return None
    ran = [found.options[number] for number in found.turned[0].seconds]
    ran = [one for one in ran if all(one.candidate.number in at.seconds for at in found.turned)]
    options = sorted(ran, key=lambda one: (one.candidate.number != found.front[0].candidate.number, -one.rate))
    first = options[0].candidate
    numbers = uncertain(found.topologies[first.machine.label, first.nodes])
    corners, times = _times(found, options)
    if goodput is not None and any(goodput(one.candidate.number, FAILURES) for one in options):
        numbers.append(
            UncertainNumber(
                FAILING,
                1 / FAILURES,
                FAILURES,
                "failures",
                "count your own stops per node-day and write them as [[campaign.failures]]",
            )
        )
        corners, times = _with_failures(corners, times, options, goodput)
    regrets = times / times.min(axis=0) - 1.0
    worst = regrets.max(axis=1)
    best = int(np.argmin(worst))  # of equal ones the fastest
    titles = [found.title(one) for one in options]
    turned = [[f"{one.words} x {corner[one.name]:.2f}" for one in numbers if one.name in corner] for corner in corners]
    said = [", ".join(words) or "as predicted" for words in turned]
    where = [said[int(column)] for column in regrets.argmax(axis=1)]
    worths = [_worth(one, corners, regrets, titles, worst[best]) for one in numbers]
    return RobustChoice(
        _verdict(titles, worst, best, numbers, worths),
        [UncertainSpan(one.words, one.low, one.high) for one in numbers],
        [dict(corner) for corner in corners],
        [
            Regret(titles[i], one.rate, float(worst[i]), where[i], regrets[i].tolist(), i == best)
            for i, one in enumerate(options)
        ],
        sorted(worths, key=lambda one: -one.worth),
    )


def _times(found: SearchResult, options: Sequence[PlanOption]) -> tuple[list[Mapping[str, float]], Floats]:
    """Corners, and (options, corners) s a sample: the known step, by what its first run says the corner does to it."""
    known = np.array([[1.0 / one.rate] for one in options])
    rough = np.array([[at.seconds[one.candidate.number] for at in found.turned] for one in options])
    return [at.factors for at in found.turned], known * rough / rough[:, :1]


def _with_failures(
    corners: Sequence[Mapping[str, float]], times: Floats, options: Sequence[PlanOption], goodput: Goodput
) -> tuple[list[Mapping[str, float]], Floats]:
    """Every corner with failures as they are said where nothing is turned, and rare and often where something is."""
    grown: list[Mapping[str, float]] = []
    columns = []
    for corner, column in zip(corners, times.T, strict=True):
        for rate in (1 / FAILURES, FAILURES) if corner else (1.0,):
            good = [goodput(one.candidate.number, rate) for one in options]
            columns.append(np.array([t / g if g else np.inf for t, g in zip(column, good, strict=True)]))
            grown.append({**corner, FAILING: rate} if corner else corner)
    return grown, np.array(columns).T


def _worth(
    one: UncertainNumber, corners: Sequence[Mapping[str, float]], regrets: Floats, titles: Sequence[str], now: float
) -> MeasurementWorth:
    """By how much the worst regret falls for who knows on which side a number is, and what is chosen there."""
    left = 0.0
    choice = {}
    for end in (one.low, one.high):
        there = np.array([corner.get(one.name) == end for corner in corners])
        worst = regrets[:, there].max(axis=1)
        best = int(np.argmin(worst))
        left, choice[f"{end:.2f}"] = max(left, float(worst[best])), titles[best]
    return MeasurementWorth(one.words, max(0.0, now - left), choice, one.measure)


def _verdict(
    titles: Sequence[str],
    worst: Floats,
    best: int,
    numbers: Sequence[UncertainNumber],
    worths: Sequence[MeasurementWorth],
) -> str:
    ranges = ", ".join(f"{one.words} x {one.low:.2f} to {one.high:.2f}" for one in numbers)
    at_worst = f"at most {worst[best]:.1%} longer than" if worst[best] >= ALIKE / 2 else "nowhere longer than"
    said = f"{at_worst} the best of {len(titles)} ({ranges})"
    if best == 0:
        first = f"The fastest is also the robust choice: it trains {said}."
    else:
        first = (
            f"The robust choice is {titles[best]}: it trains {said}; the fastest as predicted, "
            f"{titles[0]}, {worst[0]:.1%}."
        )
    most = max(worths, key=lambda one: one.worth)
    if most.worth < ALIKE:
        return f"{first} No single measurement would change that."
    (low, a), (high, b) = most.choice.items()
    return (
        f"{first} Measuring {most.name} is worth most, {most.worth:.1%}: at x {low} take {a}, at x {high} {b}. "
        f"To measure: {most.command}"
    )
