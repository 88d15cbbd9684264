"""What profiles of some or all ranks say of a run that is slow.

Three things are looked at step by step: how long a rank's kernels take, beside those of the machine whose ranks are
quickest; how long a rank's GPU stands still before it begins a step, beside the others; and how long the same
transfer takes, beside the quickest steps. All are durations on one rank, so that clocks do not matter. Where a profile
names the data loader, what stands still for it is told apart; what all ranks wait for it slows the whole job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Columns, Floats, Ints
from clustersim.core.errors import few
from clustersim.core.program import COMPUTE_STREAM, DATA_LOADER
from clustersim.core.timeline import WITHOUT_GPU, Timeline
from clustersim.core.units import format_time
from clustersim.explain.metrics import steady_window
from clustersim.explain.pace import PAIR
from clustersim.files.traces.profiled import PRODUCT_FLOPS
from clustersim.files.traces.told import Cause
from clustersim.studies.diagnosis import courses
from clustersim.studies.diagnosis.courses import AGAIN, ONCE, course_of
from clustersim.studies.diagnosis.slow_groups import of_groups, slow_groups
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    LATE,
    LINKS_SLOW,
    NAMES_OF_MORE_WORK,
    NOTHING,
    PARTLY,
    RANK_SLOW,
    SELDOM,
    SLOWING,
    STARTING,
    SURE,
    UNLIKELY,
    Finding,
    Site,
    Suspect,
    by_kind,
    finding,
)

LEAST_SLOWER = 0.03
"""Share by which a rank's kernels take longer before it is told."""
NOISES = 4.0
"""The same in standard deviations of what ranks and steps differ by anyway."""
LEAST_LATE = 0.01
"""Share of a step's kernels by which a rank begins it later than others before it is told."""
NEAR = 0.25
"""Share of the worst that others must have to be told beside it: on a busy machine all are late by a little."""
LEAST_LOADING = 0.05
"""Share of a step that all ranks wait for their data loaders before it is told."""
LEAST_TRANSFER = 0.06
"""Share by which the transfers of a step take longer."""
ALL_ALIKE = 0.5
"""A link that is slow makes at least this share of the transfers slower of those that a step makes; one that flaps, a
few of them, by much."""
SHOWN = 6


StepTransfers: TypeAlias = list[list[tuple[tuple[object, ...], float]]]


@dataclass(frozen=True, eq=False)
class ProfiledSteps:
    """Of the measured ``ranks``, (steps, ranks): seconds that kernels keep a GPU ``busy``, that it stands ``idle``
    before it begins a step, and that it waits for a data loader which its profile names (``loading``). transfers : per
    step, what each collective is and its seconds; ``whole`` : those of all its ranks, else with waiting for ranks that
    were not measured in it. on_cpu : there is no GPU. more_work : ranks with more to do than others -> how many
    times as much."""

    ranks: Ints
    busy: Floats
    idle: Floats
    loading: Floats
    transfers: StepTransfers
    whole: bool
    on_cpu: bool = False
    more_work: Mapping[int, float] = field(default_factory=dict)


def of_profiles(run: Timeline, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What profiles say; the first step is left out where there are others."""
    steps = _steps(run)
    if len(steps.busy) < 2:
        return
    slow = _slow_ranks(steps, site)
    late = _late_ranks(steps)
    stalls = _common_stalls(steps)
    lateness = max((float(np.clip(by, 0.0, None).sum()) for by in late.values()), default=0.0)
    stalled = 0.0 if stalls is None else float(np.clip(stalls, 0.0, None).sum())
    loading = _loading_together(steps) * len(steps.busy) if late and _for_loader(late, steps) else 0.0
    if late and lateness > max(_behind(slow, steps), stalled, loading):
        yield _of_late(late, steps, suspects)
    elif stalls is not None:
        course = course_of(stalls.tolist(), max(_late_limit(steps), NEAR * float(stalls.max())))
        who = "ranks" if steps.on_cpu else "GPUs"
        text = f"profiles: all {who} stand still {format_time(float(stalls.max()))} before a step, {course}"
        yield finding("profiles", text, suspects, by_kind({"blocking_checkpoint": SURE}, UNLIKELY))
    elif slow:
        yield _of_slow(slow, steps, suspects, site)
    elif (groups := slow_groups(run, site)) is not None:
        yield from of_groups(groups, suspects, site)
    else:
        yield _of_transfers(steps, suspects, site)


def _of_late(late: dict[int, Floats], steps: ProfiledSteps, suspects: Sequence[Suspect]) -> Finding:
    """The GPUs of some ranks stand still before steps, of others not: a batch, where it is so in every step."""
    worst = max(float(by.max()) for by in late.values())
    limit = max(_late_limit(steps), NEAR * worst)
    courses_of = {rank: course_of(by.tolist(), limit) for rank, by in late.items()}
    first = next(iter(courses_of.values()))
    culprit = f"rank(s) {few(late, SHOWN)}" if steps.on_cpu else f"the GPU of rank(s) {few(late, SHOWN)}"
    doing = "waits for its data loader" if _for_loader(late, steps) else "stands still"
    text = f"profiles: {culprit} {doing} {format_time(worst)} before a step, {first}"
    batches = {"slow_data": SURE}
    again = {"garbage_collection": SURE, "slow_data": UNLIKELY}
    stays = {"slow_data": SURE, "garbage_collection": UNLIKELY}

    def likely(suspect: Suspect) -> float:
        """P(these ranks start late | suspect)."""
        if suspect.rank not in late:
            return ALMOST_NEVER
        weights = again if courses_of[suspect.rank] in (ONCE, AGAIN) else stays
        weights = batches if _for_loader([suspect.rank], steps) else weights
        return weights.get(suspect.kind, ALMOST_NEVER) / len(late)

    return finding("profiles", text, suspects, likely)


def _for_loader(late: Collection[int], steps: ProfiledSteps) -> bool:
    """Whether these ranks stand still before steps for the data loader, by most of the time."""
    columns = np.isin(steps.ranks, list(late))
    return bool(2 * steps.loading[:, columns].sum() > steps.idle[:, columns].sum() > 0)


def of_whole_job(run: Timeline) -> list[Cause]:
    """That all ranks wait for their data loaders, which is at no one's place."""
    steps = _steps(run)
    if not len(steps.busy):
        return []
    together = _loading_together(steps)
    step_s = steady_window(run).step_time
    if together <= LEAST_LOADING * step_s:
        return []
    who = "every rank waits" if len(steps.ranks) > 1 else "the rank waits"
    text = f"{who} {format_time(together)} of a step of {format_time(step_s)} for its data loader"
    why = "a batch takes longer to load than to train on: more workers (num_workers), cheaper samples, a faster disk"
    unlike = float(np.ptp(steps.busy, axis=1).mean())
    return [Cause("slow_data", text, why, costs_most=together > unlike)]


def _loading_together(steps: ProfiledSteps) -> float:
    """Seconds of a step that all ranks wait for their data loaders, in the mean: one with workers is late every few
    steps."""
    return float(steps.loading.min(axis=1).mean())


def _behind(slow: dict[int, Floats], steps: ProfiledSteps) -> float:
    """Seconds by which kernels take longer on the slowest rank, all steps together."""
    most = max((float(np.clip(by, 0.0, None).sum()) for by in slow.values()), default=0.0)
    return most * float(np.median(steps.busy.min(axis=1)))


def _late_limit(steps: ProfiledSteps) -> float:
    """Seconds that a GPU stands still before a step from which it is told: what is less than a rank's kernels differ
    by from step to step anyway makes no job slow."""
    noise = float(np.median(np.log(np.maximum(steps.busy, 1e-9)).std(axis=0, ddof=1)))
    return max(LEAST_LATE, noise) * float(np.median(steps.busy))


def _common_stalls(steps: ProfiledSteps) -> Floats | None:
    """By how much longer all GPUs stand still before each step than before the quickest [s]; None for not at all."""
    together: Floats = np.clip(steps.idle - steps.loading, 0.0, None).min(axis=1)
    excess = together - np.median(np.sort(together)[: max(1, len(together) // 2)])
    return excess if excess.max() > 2 * _late_limit(steps) else None


def _steps(run: Timeline) -> ProfiledSteps:
    spans = run.spans()
    ranks, place = np.unique(spans["rank"], return_inverse=True)
    step = np.array([op.step for op in run.ops])[spans["op"]]
    numbers = np.unique(step)
    numbers = numbers[1:] if len(numbers) > 2 else numbers
    work = np.array([op.kind == "compute" and op.stream == COMPUTE_STREAM for op in run.ops])[spans["op"]]
    loader = np.array([op.name == DATA_LOADER for op in run.ops])[spans["op"]]
    gather = np.array([op.kind == "all_gather" for op in run.ops])[spans["op"]]
    busy = np.zeros((len(numbers), len(ranks)))
    idle = np.zeros_like(busy)
    loading = np.zeros_like(busy)
    for i, number in enumerate(numbers.tolist()):
        for j in range(len(ranks)):
            in_step = (place == j) & (step == number)
            before = (place == j) & ~loader & (step < number)  # what waits in the last collective does not idle
            busy[i, j] = (spans["end"] - spans["start"])[work & in_step].sum()
            loading[i, j] = (spans["end"] - spans["start"])[loader & in_step].sum()
            begun = spans["ready"][in_step & ~loader]  # a gather of parameters may come first
            if begun.size and before.any():
                idle[i, j] = begun.min() - spans["end"][before].max()
                if (before & gather & (spans["end"] > begun.min())).any():
                    idle[i, j] = 0.0  # how long parameters are on their way still says nothing of how a step begins
    transfers: StepTransfers = [[] for _ in numbers]
    index = {int(number): i for i, number in enumerate(numbers.tolist())}
    collectives = [op for op in run.ops if op.kind not in ("compute", "send", "recv")]
    for op in collectives:
        if op.step in index and "transfer_s" in op.detail:
            transfers[index[op.step]].append(((op.kind, op.nbytes), float(op.detail["transfer_s"])))
    all_timed = bool(collectives) and all("transfer_s" in op.detail for op in collectives)
    if not all_timed:
        _bounds(run, spans, index, transfers)
    on_cpu = bool(run.stats.get(WITHOUT_GPU))
    return ProfiledSteps(ranks, busy, idle, loading, transfers, all_timed, on_cpu, more_work(run))


def more_work(run: Timeline) -> dict[int, float]:
    """Ranks whose matrix products have more FLOPs than those of the rank with the fewest -> how many times as many;
    none where no shapes are told, or most ranks have more: stages and experts differ, and nothing is wrong."""
    flops = {
        int(name.removeprefix(PRODUCT_FLOPS)): value
        for name, value in run.stats.items()
        if name.startswith(PRODUCT_FLOPS)
    }
    least = min(flops.values(), default=0.0)
    more = {rank: value / least for rank, value in flops.items() if value > (1 + LEAST_SLOWER) * least}
    return more if 2 * len(more) <= len(flops) else {}


def _bounds(run: Timeline, spans: Columns, index: dict[int, int], transfers: StepTransfers) -> None:
    """Of collectives that not all ranks were seen in, the shortest that a rank saw, waiting included."""
    length = spans["end"] - spans["ready"]
    shortest = np.full(len(run.ops), np.inf)
    np.minimum.at(shortest, spans["op"], length)
    for number, op in enumerate(run.ops):
        if op.kind not in ("compute", "send", "recv") and op.step in index and "transfer_s" not in op.detail:
            transfers[index[op.step]].append(((op.kind, op.nbytes), float(shortest[number])))


def _slow_ranks(steps: ProfiledSteps, site: Site) -> dict[int, Floats]:
    """Ranks whose kernels take longer than those of the quickest machine -> by which share, in every step."""
    # Ranks that no file places are of one machine.
    machine = np.array([site.hosts.get(int(rank), "") for rank in steps.ranks])
    medians = [np.median(steps.busy[:, machine == name], axis=1) for name in np.unique(machine)]
    usual = np.min(medians, axis=0)
    two = len(steps.ranks) == PAIR  # whose median is half of what they differ by, and no noise of steps
    ratio = np.log(steps.busy / (steps.busy.min(axis=1) if two else usual)[:, None])
    noise = 1.4826 * float(np.median(np.abs(ratio - np.median(ratio, axis=0 if two else None))))
    top = np.sort(ratio, axis=0)[-2:].mean(axis=0)
    limit = max(np.log1p(LEAST_SLOWER), NOISES * noise)
    struck = np.flatnonzero((top > limit) | (ratio.max(axis=0) > 2 * limit))
    return {int(steps.ranks[i]): np.expm1(ratio[:, i]) for i in struck}


def _late_ranks(steps: ProfiledSteps) -> dict[int, Floats]:
    """Ranks whose GPU stands still before a step, and others' do not -> seconds, in every step."""
    if len(steps.ranks) < 2:
        return {}
    two = len(steps.ranks) == PAIR  # whose median is half of what they differ by
    usual = steps.idle.min(axis=1) if two else np.median(steps.idle, axis=1)
    excess = steps.idle - usual[:, None]
    struck = np.flatnonzero(excess.max(axis=0) > max(_late_limit(steps), NEAR * float(excess.max())))
    if 2 * len(struck) > len(steps.ranks):
        return {}  # most are late now and then, and so none more than the others
    return {int(steps.ranks[i]): excess[:, i] for i in struck}


def _of_slow(slow: dict[int, Floats], steps: ProfiledSteps, suspects: Sequence[Suspect], site: Site) -> Finding:
    """Some ranks' kernels take longer: one GPU's, or all of one machine."""
    measured = frozenset(int(rank) for rank in steps.ranks)
    struck = frozenset(slow)
    worst = max(slow, key=lambda rank: float(slow[rank].max()))
    by = float(slow[worst].max())
    course = course_of(slow[worst].tolist(), max(LEAST_SLOWER, 0.25 * by))
    work = "operators" if steps.on_cpu else "kernels"
    text = f"profiles: {work} of rank(s) {few(sorted(slow), SHOWN)} take up to {by:.0%} longer than others', {course}"
    given_more = struck & steps.more_work.keys()
    if given_more:
        most = max(steps.more_work[rank] for rank in given_more)
        who = few(sorted(given_more), SHOWN)
        text += f"; the matrix products of rank(s) {who} have up to {most:.2f} times the FLOPs of others'"

    def likely(suspect: Suspect) -> float:
        """P(these ranks' kernels take longer | suspect)."""
        if suspect.kind in RANK_SLOW:
            of_work = SURE if suspect.kind in NAMES_OF_MORE_WORK else UNLIKELY
            weight = of_work if suspect.rank in given_more else courses.likely(course, suspect.kind)
            return weight / len(struck) ** 2 if suspect.rank in struck else ALMOST_NEVER
        if suspect.kind == "slow_host":
            of_host = site.of_host(suspect.host)
            seen = of_host & measured
            if struck != seen:
                return UNLIKELY if seen and seen <= struck else ALMOST_NEVER
            lasting = courses.likely(course, suspect.kind)
            return lasting if len(seen) > 1 else PARTLY * lasting if of_host - seen else ALMOST_NEVER
        return ALMOST_NEVER if suspect.kind == NOTHING or suspect.port is None else UNLIKELY

    return finding("profiles", text, suspects, likely)


def _of_transfers(steps: ProfiledSteps, suspects: Sequence[Suspect], site: Site) -> Finding:
    """No measured rank is slow: do transfers take longer than in other steps?"""
    ratio, alike = _transfer_ratio(steps)
    shared = not alike and _as_of_a_shared_nic(steps)
    measured = frozenset(int(rank) for rank in steps.ranks)
    hidden = frozenset(range(site.ranks)) - measured
    if ratio < 1 + LEAST_TRANSFER:
        text = (
            "profiles: no rank's kernels, batches or transfers take longer than others'; a link that all of them wait "
            "for, slow from the start, does not show in profiles alone: counters of the NICs, or nccl-tests, tell"
        )
        rest = dict.fromkeys((NOTHING, *STARTING), SURE) | dict.fromkeys(SLOWING, SELDOM)
        rest |= {"blocking_checkpoint": UNLIKELY, "slow_link": PARTLY}
        return finding("profiles", text, suspects, lambda s: rest.get(s.kind, UNLIKELY))
    shape = "all alike" if alike else "a few by much"
    waiting = "" if steps.whole else ", or ranks without a profile are late"
    text = f"profiles: transfers take up to {ratio - 1:.0%} longer than in the quickest steps, {shape}{waiting}"

    certain = SURE if steps.whole or not hidden else PARTLY
    inside = len(set(site.hosts.values())) == 1 and len(site.hosts) >= site.ranks
    text += ", in one machine, whose ranks meet over no NIC" if inside else ""
    text += f", {SHARED_OR_FLAPPING}" if shared and not inside else ""

    def likely(suspect: Suspect) -> float:
        """P(these transfers | suspect)."""
        if inside and suspect.kind in LINKS_SLOW:
            return UNLIKELY
        if shared and suspect.kind in ("flapping_link", *SHARING):
            return PARTLY
        if suspect.kind in ("slow_link", "congestion"):
            return certain if alike else SELDOM
        if suspect.kind == "flapping_link":
            return SELDOM if alike else certain
        if steps.whole or not hidden:
            return SELDOM if suspect.kind == NOTHING else UNLIKELY
        if suspect.kind in RANK_SLOW | LATE:
            return PARTLY if suspect.rank in hidden else ALMOST_NEVER
        if suspect.kind == "slow_host":
            return PARTLY if site.of_host(suspect.host) <= hidden else ALMOST_NEVER
        return UNLIKELY

    return finding("profiles", text, suspects, likely)


SHARING = ("lost_nic", "wrong_rail")
"""Kinds in which groups that had a NIC each meet on one: who is there at the same time takes longer."""
MOST_SHARED = 3.0
"""Two groups on one NIC take up to twice as long as alone; a transfer that takes more than this many times its usual
time stood still."""
SHARED_OR_FLAPPING = (
    "the same in every step, as of groups that share a NIC (one lost, or cabled wrongly) and of a link that flaps many "
    "times a step: profiles do not tell these apart, NCCL's logs and the NICs' counters do"
)


def _as_of_a_shared_nic(steps: ProfiledSteps) -> bool:
    """Whether some transfers of every step take longer, and none so long that it must have stood still: what meets on
    a NIC meets in each step, and a link that flaps from time to time leaves steps alone."""
    usual_s = {key: _usual(steps, key) for seconds in steps.transfers for key, _ in seconds}
    longest = [
        max((took / usual_s[key] for key, took in seconds if usual_s[key]), default=1.0) for seconds in steps.transfers
    ]
    return bool(longest) and min(longest) > 1 + LEAST_TRANSFER and max(longest) < MOST_SHARED


def _transfer_ratio(steps: ProfiledSteps) -> tuple[float, bool]:
    """How much longer the transfers of the slowest step take than those of the quickest ones, of one kind and size
    each; and whether most of them do."""
    usual_s = {key: _usual(steps, key) for seconds in steps.transfers for key, _ in seconds}
    sums = []
    shares = []
    for seconds in steps.transfers:
        usual = sum(usual_s[key] for key, _ in seconds)
        sums.append(sum(took for _, took in seconds) / usual if usual else 1.0)
        longer = [took > (1 + LEAST_TRANSFER) * usual_s[key] for key, took in seconds]
        shares.append(float(np.mean(longer)) if longer else 0.0)
    worst = int(np.argmax(sums)) if sums else 0
    return (sums[worst], shares[worst] > ALL_ALIKE) if sums else (1.0, True)


def _usual(steps: ProfiledSteps, key: tuple[object, ...]) -> float:
    """Seconds that a transfer of a kind and size takes in the quickest third of the steps, in the median."""
    by_step = ([took for name, took in seconds if name == key] for seconds in steps.transfers)
    medians = sorted(float(np.median(seconds)) for seconds in by_step if seconds)
    return float(np.median(medians[: max(1, len(medians) // 3)]))
