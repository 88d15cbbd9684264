"""What profiles of some or all ranks say of a run that is slow.

Three things are looked at step by step: how long a rank's kernels take, beside those of the machine whose ranks are
quickest; how long a rank's GPU stands still before it begins a step, beside the others; and how long the same
transfer takes, beside the quickest steps. All are durations on one rank, so that clocks do not matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import few
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.scenario.incident_table import KINDS
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    NOTHING,
    PARTLY,
    SELDOM,
    SURE,
    UNLIKELY,
    Finding,
    Site,
    Suspect,
    finding,
)

LEAST_SLOWER = 0.03
"""Share by which a rank's kernels take longer before it is told."""
NOISES = 4.0
"""The same in standard deviations of what ranks and steps differ by anyway."""
LEAST_LATE = 0.01
"""Share of a step's kernels by which a rank begins it later than others before it is told."""
LEAST_TRANSFER = 0.06
"""Share by which the transfers of a step take longer."""
ALL_ALIKE = 0.5
"""A link that is slow makes at least this share of the transfers slower of those that a step makes; one that flaps, a
few of them, by much."""
SLOW = tuple(name for name, kind in KINDS.items() if not kind.hangs)
SHOWN = 6


StepTransfers: TypeAlias = list[list[tuple[tuple[object, ...], float]]]


@dataclass(frozen=True, eq=False)
class ProfiledSteps:
    """Of the measured ``ranks``, (steps, ranks): seconds that kernels keep a GPU ``busy``, and that it stands ``idle``
    before it begins a step. transfers : per step, what each collective is and its seconds; ``whole`` : those
    of all its ranks, else with waiting for ranks that were not measured in it."""

    ranks: Ints
    busy: Floats
    idle: Floats
    transfers: StepTransfers
    whole: bool


def of_profiles(run: Timeline, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What profiles say; the first step is left out where there are others."""
    steps = _steps(run)
    if len(steps.busy) < 2:
        return
    slow = _slow_ranks(steps, site)
    late = _late_ranks(steps)
    if late:
        worst = max(late.values())
        text = f"profiles: the GPU of rank(s) {few(late, SHOWN)} stands still {format_time(worst)} before a step"
        yield finding("profiles", text, suspects, lambda s: _blamed(s, "slow_data", frozenset(late)))
    elif slow:
        yield _of_slow(slow, steps, suspects, site)
    else:
        yield _of_transfers(steps, suspects, site)


def _blamed(suspect: Suspect, kind: str, ranks: frozenset[int]) -> float:
    return SURE / len(ranks) if suspect.kind == kind and suspect.rank in ranks else ALMOST_NEVER


def _steps(run: Timeline) -> ProfiledSteps:
    spans = run.spans()
    ranks, place = np.unique(spans["rank"], return_inverse=True)
    step = np.array([op.step for op in run.ops])[spans["op"]]
    numbers = np.unique(step)
    numbers = numbers[1:] if len(numbers) > 2 else numbers
    work = np.array([op.kind == "compute" and op.stream == COMPUTE_STREAM for op in run.ops])[spans["op"]]
    busy = np.zeros((len(numbers), len(ranks)))
    idle = np.zeros_like(busy)
    for i, number in enumerate(numbers.tolist()):
        for j in range(len(ranks)):
            own = work & (place == j)
            here = own & (step == number)
            before = own & (step < number)
            busy[i, j] = (spans["end"] - spans["start"])[here].sum()
            begun = spans["ready"][(place == j) & (step == number)]  # a gather of parameters may come first
            if begun.size and before.any():
                idle[i, j] = begun.min() - spans["end"][before].max()
    transfers: StepTransfers = [[] for _ in numbers]
    index = {int(number): i for i, number in enumerate(numbers.tolist())}
    collectives = [op for op in run.ops if op.kind not in ("compute", "send", "recv")]
    for op in collectives:
        if op.step in index and "transfer_s" in op.detail:
            transfers[index[op.step]].append(((op.kind, op.nbytes), float(op.detail["transfer_s"])))
    whole = bool(collectives) and all("transfer_s" in op.detail for op in collectives)
    if not whole:
        _bounds(run, spans, index, transfers)
    return ProfiledSteps(ranks, busy, idle, transfers, whole)


def _bounds(run: Timeline, spans: dict[str, Any], index: dict[int, int], transfers: StepTransfers) -> None:
    """Of collectives that not all ranks were seen in, the shortest that a rank saw, waiting included."""
    length = spans["end"] - spans["ready"]
    shortest = np.full(len(run.ops), np.inf)
    np.minimum.at(shortest, spans["op"], length)
    for number, op in enumerate(run.ops):
        if op.kind not in ("compute", "send", "recv") and op.step in index and "transfer_s" not in op.detail:
            transfers[index[op.step]].append(((op.kind, op.nbytes), float(shortest[number])))


def _slow_ranks(steps: ProfiledSteps, site: Site) -> dict[int, float]:
    """Ranks whose kernels take longer than those of the quickest machine -> by which share, in their slowest steps."""
    machine = np.array([_machine_of(site, int(rank)) for rank in steps.ranks])
    medians = [np.median(steps.busy[:, machine == name], axis=1) for name in np.unique(machine)]
    usual = np.min(medians, axis=0)
    ratio = np.log(steps.busy / usual[:, None])
    noise = 1.4826 * float(np.median(np.abs(ratio - np.median(ratio))))
    top = np.sort(ratio, axis=0)[-2:].mean(axis=0)
    limit = max(np.log1p(LEAST_SLOWER), NOISES * noise)
    return {int(rank): float(np.expm1(by)) for rank, by in zip(steps.ranks, top, strict=True) if by > limit}


def _machine_of(site: Site, rank: int) -> str:
    """The machine of a rank; one for all that no file places."""
    return site.hosts.get(rank, "")


def _late_ranks(steps: ProfiledSteps) -> dict[int, float]:
    """Ranks whose GPU stands still before a step, and others' do not -> seconds, at most."""
    if len(steps.ranks) < 2:
        return {}
    excess = steps.idle - np.median(steps.idle, axis=1)[:, None]
    limit = LEAST_LATE * float(np.median(steps.busy))
    worst = excess.max(axis=0)
    return {int(rank): float(by) for rank, by in zip(steps.ranks, worst, strict=True) if by > limit}


def _of_slow(slow: dict[int, float], steps: ProfiledSteps, suspects: Sequence[Suspect], site: Site) -> Finding:
    """Some ranks' kernels take longer: one GPU's, or all of one machine."""
    measured = frozenset(int(rank) for rank in steps.ranks)
    struck = frozenset(slow)
    by = max(slow.values())
    text = f"profiles: kernels of rank(s) {few(sorted(slow), SHOWN)} take up to {by:.0%} longer than others'"

    def likely(suspect: Suspect) -> float:
        if suspect.kind == "slow_gpu":
            return SURE / len(struck) ** 2 if suspect.rank in struck else ALMOST_NEVER
        if suspect.kind == "slow_host":
            here = site.of_host(suspect.host)
            seen = here & measured
            if struck != seen:
                return UNLIKELY if seen and seen <= struck else ALMOST_NEVER
            return SURE if len(seen) > 1 else PARTLY if here - seen else ALMOST_NEVER
        return ALMOST_NEVER if suspect.kind == NOTHING or suspect.port is None else UNLIKELY

    return finding("profiles", text, suspects, likely)


def _of_transfers(steps: ProfiledSteps, suspects: Sequence[Suspect], site: Site) -> Finding:
    """No measured rank is slow: do transfers take longer than in other steps?"""
    ratio, alike = _transfer_ratio(steps)
    measured = frozenset(int(rank) for rank in steps.ranks)
    hidden = frozenset(range(site.ranks)) - measured
    if ratio < 1 + LEAST_TRANSFER:
        text = "profiles: no rank's kernels, batches or transfers take longer than others'"
        rest = {NOTHING: SURE} | dict.fromkeys(
            ("slow_gpu", "slow_host", "slow_data", "slow_link", "flapping_link"), SELDOM
        )
        return finding("profiles", text, suspects, lambda s: rest.get(s.kind, PARTLY))
    shape = "all alike" if alike else "a few by much"
    waiting = "" if steps.whole else ", or ranks without a profile are late"
    text = f"profiles: transfers take up to {ratio - 1:.0%} longer than in the quickest steps, {shape}{waiting}"

    def likely(suspect: Suspect) -> float:
        if suspect.kind == "slow_link":
            return SURE if alike else SELDOM
        if suspect.kind == "flapping_link":
            return SELDOM if alike else SURE
        if steps.whole or not hidden:
            return SELDOM if suspect.kind == NOTHING else UNLIKELY
        if suspect.kind in ("slow_gpu", "slow_data"):
            return PARTLY if suspect.rank in hidden else ALMOST_NEVER
        if suspect.kind == "slow_host":
            return PARTLY if site.of_host(suspect.host) <= hidden else ALMOST_NEVER
        return UNLIKELY

    return finding("profiles", text, suspects, likely)


def _transfer_ratio(steps: ProfiledSteps) -> tuple[float, bool]:
    """How much longer the transfers of the slowest step take than those of the quickest ones, of one kind and size
    each; and whether most of them do."""
    known = {key: _usual(steps, key) for seconds in steps.transfers for key, _ in seconds}
    sums = []
    shares = []
    for seconds in steps.transfers:
        usual = sum(known[key] for key, _ in seconds)
        sums.append(sum(took for _, took in seconds) / usual if usual else 1.0)
        longer = [took > (1 + LEAST_TRANSFER) * known[key] for key, took in seconds]
        shares.append(float(np.mean(longer)) if longer else 0.0)
    worst = int(np.argmax(sums)) if sums else 0
    return (sums[worst], shares[worst] > ALL_ALIKE) if sums else (1.0, True)


def _usual(steps: ProfiledSteps, key: tuple[object, ...]) -> float:
    """Seconds that a transfer of a kind and size takes in the quickest third of the steps, in the median."""
    by_step = ([took for other, took in seconds if other == key] for seconds in steps.transfers)
    medians = sorted(float(np.median(seconds)) for seconds in by_step if seconds)
    return float(np.median(medians[: max(1, len(medians) // 3)]))
