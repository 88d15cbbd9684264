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
from clustersim.core.ranges import of_collective
from clustersim.core.topology import Topology
from clustersim.scenario.result.trust import trust_in
from clustersim.studies.plan.options import PlanOption, ScaledRuns, SearchResult, dtype_of
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
        be multiplied by. words : for people. measure : how to know it better. outside : why the machine's own numbers
        do not tell it, where it has some.
    """

    name: str
    low: float
    high: float
    words: str
    measure: str
    outside: str = ""

    def side(self, factor: float) -> str:
        """One end in words."""
        return f"{self.words} at {factor:.2f} times what is predicted"


HOW_OFTEN = UncertainNumber(
    FAILING,
    1 / FAILURES,
    FAILURES,
    "failures",
    "count your own stops per node-day and write them as [[campaign.failures]]",
)


def uncertain(topology: Topology, dtype: str) -> list[UncertainNumber]:
    """What is known of a machine to a range only; what it has not is left out. Kernels in ``dtype`` are known less well
    on a GPU of a generation without published steps, and on one whose file leaves something open."""
    network = of_collective(topology, LARGE)
    inside = of_collective(topology, LARGE, 1)
    kernels = max(trust_in("single", node.gpu, dtype).p90 for node in topology.node_types)
    fit = f"; clustersim calibrate DIR --topology {topology.name} --out measured.toml"
    capture = "clustersim.calibrate.capture --out DIR --parts collectives"
    of_network = f"torchrun --nnodes 2 --nproc-per-node 8 -m {capture}{fit}"
    of_links = f"torchrun --nproc-per-node 8 -m {capture}{fit}"
    of_kernels = f"clustersim capture --parts compute --out DIR{fit}"
    numbers = [
        _of_times("network", network.p90, "the network", of_network, network.outside),
        _of_times("inside", inside.p90, "links inside a node", of_links, inside.outside),
        _of_times("kernels", kernels, "kernels", of_kernels),
    ]
    return numbers if len(topology.node_types) > 1 else numbers[1:]


def _of_times(name: str, p90: float, words: str, measure: str, outside: str = "") -> UncertainNumber:
    """A rate of which nine in ten times lay within prediction (1 +- ``p90``): rates are their inverse."""
    return UncertainNumber(name, 1.0 / (1.0 + p90), 1.0 / (1.0 - p90), words, measure, outside)


def at_corners(searched: SearchResult, seen: KnownCandidates, runner: Runner) -> tuple[ScaledRuns, ...]:
    """Steps of the fastest option and its rivals, first as they are, then at every corner; nothing without a rival."""
    rivals = list(itertools.islice(_rivals(searched, seen), RIVALS))
    if len(rivals) < 2:
        return ()
    chosen = [rival.candidate for rival in rivals]
    numbers = uncertain(seen.sieve.machines[seen.sieve.place(chosen[0])][0], dtype_of(rivals[0], seen.dtype))
    ends = itertools.product(*((number.low, number.high) for number in numbers))
    every: list[dict[str, float]] = [{}]
    every += [dict(zip((number.name for number in numbers), corner, strict=True)) for corner in ends]
    turned = [(factors, runner.run(chosen, rough=True, factors=factors)) for factors in every]
    return tuple(
        ScaledRuns(factors, {number: row.result.step_time_s for number, row in rows.items() if row.result is not None})
        for factors, rows in turned
    )


def _rivals(searched: SearchResult, seen: KnownCandidates) -> Iterator[PlanOption]:
    """Options on as many nodes of the fastest one's machine that keep the limits, fastest first; of those that take as
    long one. None that may run out of memory where the fastest has room: what dies is not robust."""
    if not searched.front:
        return
    fastest = searched.front[0]
    yield fastest
    place = seen.sieve.place(fastest.candidate)
    rivals = (option for option in searched.options if option.rate and option is not fastest)
    roomy = (option for option in rivals if option.has_room or not fastest.has_room)
    near = (option for option in roomy if seen.sieve.place(option.candidate) == place and seen.keeps(option))
    taken = [fastest.rate]
    for option in sorted(near, key=lambda option: (-option.rate, option.candidate.number)):
        if all(abs(option.rate / rate - 1.0) > ALIKE for rate in taken):
            taken.append(option.rate)
            yield option


def robustness(searched: SearchResult, goodput: Goodput | None = None) -> RobustChoice | None:
    """What is robust; None where nothing was run again. ``goodput`` : with a campaign."""
    if not searched.turned:
        return None
    ran = [searched.options[number] for number in searched.turned[0].seconds]
    ran = [option for option in ran if all(option.candidate.number in scaled.seconds for scaled in searched.turned)]
    options = sorted(
        ran, key=lambda option: (option.candidate.number != searched.front[0].candidate.number, -option.rate)
    )
    first = options[0].candidate
    numbers = uncertain(searched.topologies[first.machine.label, first.nodes], dtype_of(options[0], searched.dtype))
    corners, times = _times(searched, options)
    if goodput is not None and any(goodput(option.candidate.number, FAILURES) for option in options):
        numbers.append(HOW_OFTEN)
        corners, times = _with_failures(corners, times, options, goodput)
    regrets = times / times.min(axis=0) - 1.0
    worst = regrets.max(axis=1)
    best = int(np.argmin(worst))  # of equal ones the fastest
    titles = [searched.title(option) for option in options]
    turned = [
        [f"{number.words} x {corner[number.name]:.2f}" for number in numbers if number.name in corner]
        for corner in corners
    ]
    corner_names = [", ".join(corner_words) or "as predicted" for corner_words in turned]
    worst_corner = [corner_names[int(column)] for column in regrets.argmax(axis=1)]
    worths = [_worth(number, corners, regrets, titles, worst[best]) for number in numbers]
    return RobustChoice(
        _verdict(titles, worst, best, numbers, worths) + _errors_apart(options[0], options[best]),
        [UncertainSpan(number.words, number.low, number.high) for number in numbers],
        [dict(corner) for corner in corners],
        [
            Regret(titles[i], option.rate, float(worst[i]), worst_corner[i], regrets[i].tolist(), i == best)
            for i, option in enumerate(options)
        ],
        sorted(worths, key=lambda measure: -measure.worth),
    )


def _times(searched: SearchResult, options: Sequence[PlanOption]) -> tuple[list[Mapping[str, float]], Floats]:
    """Corners, and (options, corners) s a sample: the known step, by what its first run says the corner does to it."""
    predicted = np.array([[1.0 / option.rate] for option in options])
    rough = np.array([[scaled.seconds[option.candidate.number] for scaled in searched.turned] for option in options])
    return [scaled.factors for scaled in searched.turned], predicted * rough / rough[:, :1]


def _with_failures(
    corners: Sequence[Mapping[str, float]], times: Floats, options: Sequence[PlanOption], goodput: Goodput
) -> tuple[list[Mapping[str, float]], Floats]:
    """Every corner with failures as they are said where nothing is turned, and rare and often where something is."""
    grown: list[Mapping[str, float]] = []
    columns = []
    for corner, column in zip(corners, times.T, strict=True):
        for rate in (1 / FAILURES, FAILURES) if corner else (1.0,):
            good = [goodput(option.candidate.number, rate) for option in options]
            columns.append(np.array([t / g if g else np.inf for t, g in zip(column, good, strict=True)]))
            grown.append({**corner, FAILING: rate} if corner else corner)
    return grown, np.array(columns).T


def _worth(
    number: UncertainNumber, corners: Sequence[Mapping[str, float]], regrets: Floats, titles: Sequence[str], now: float
) -> MeasurementWorth:
    """By how much the worst regret falls for who knows on which side a number is, and what is chosen there."""
    left = 0.0
    choice = {}
    for end in (number.low, number.high):
        at_end = np.array([corner.get(number.name) == end for corner in corners])
        worst = regrets[:, at_end].max(axis=1)
        best = int(np.argmin(worst))
        left, choice[f"{end:.2f}"] = max(left, float(worst[best])), titles[best]
    return MeasurementWorth(number.words, max(0.0, now - left), choice, number.measure)


def _span_text(number: UncertainNumber) -> str:
    because = f" since {number.outside}" if number.outside else ""
    return f"{number.words} x {number.low:.2f} to {number.high:.2f}{because}"


def _verdict(
    titles: Sequence[str],
    worst: Floats,
    best: int,
    numbers: Sequence[UncertainNumber],
    worths: Sequence[MeasurementWorth],
) -> str:
    ranges = ", ".join(_span_text(number) for number in numbers)
    at_worst = f"at most {worst[best]:.1%} longer than" if worst[best] >= ALIKE / 2 else "nowhere longer than"
    sentence = f"{at_worst} the best of {len(titles)} ({ranges})"
    if best == 0:
        first = f"The fastest is also the robust choice: it trains {sentence}."
    else:
        first = (
            f"The robust choice is {titles[best]}: it trains {sentence}; the fastest as predicted, "
            f"{titles[0]}, {worst[0]:.1%}."
        )
    most = max(worths, key=lambda worth: worth.worth)
    if most.worth < ALIKE:
        return f"{first} No single one of these numbers, measured, would change that."
    (low, a), (high, b) = most.choice.items()
    return (
        f"{first} Measuring {most.name} is worth most, {most.worth:.1%}: at x {low} take {a}, at x {high} {b}. "
        f"To measure: {most.command}"
    )


def _errors_apart(fastest: PlanOption, robust: PlanOption) -> str:
    """That the robust choice is of a kind whose steps are predicted less well than the fastest's, which is not among
    what is turned; empty where it is not."""
    if robust.error <= fastest.error:
        return ""
    return (
        f" That {robust.kind} steps are known to +-{robust.error:.0%} and {fastest.kind} steps to "
        f"+-{fastest.error:.0%} is not among these numbers: time a step of the robust choice before it is taken."
    )
