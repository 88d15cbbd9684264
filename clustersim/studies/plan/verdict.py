"""The answer to a plan in one sentence, and what is too close to call in a few."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from clustersim.core.errors import few
from clustersim.core.memory_use import MAY_RUN_OUT, verdict_of
from clustersim.core.ranges import VAGUE, alike, of_step, off_by
from clustersim.core.units import format_bytes
from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.spec import PlanFile

MOST_NAMED = 3
"""Alternatives that are named; of more, their number is told."""


def verdict(plan: PlanFile, found: SearchResult) -> str:
    """Which option, and how many GPUs: the fastest, and what fewer GPUs would save."""
    if not found.front:
        words = {"memory": "do not fit in memory", "limits": "break a limit", "error": "cannot be run"}
        states = Counter(one.state if one.state != "simulated" else "limits" for one in found.options)
        fates = ", ".join(f"{states[state]:,} {said}" for state, said in words.items() if states[state])
        return f"Nothing works: of {len(found.options):,} options {fates}."
    unit = "token" if found.tokens else "sample"
    fastest = found.front[0]
    said = f"Take {_place(fastest, plan, found)}{_spend(fastest, unit)}{_cheapest(plan, found, unit)}."
    shared = ", ".join(one for one in fastest.candidate.knobs if one in found.common)
    common = f" Where nothing else is said: {shared}." if shared else ""
    left_out = f" Not tried, and usual: {'; '.join(found.untried)}." if found.untried else ""
    return said + _tempting(plan, found) + _tight(fastest) + common + left_out


def _tight(option: PlanOption) -> str:
    """That it fits by what it needs, and not with what allocator and libraries mostly take besides."""
    if option.result is None:
        return ""
    memory = option.result.memory
    if verdict_of(option.result.peak_memory_bytes, memory.shown_bytes, memory.device_bytes) != MAY_RUN_OUT:
        return ""
    needed = format_bytes(option.result.peak_memory_bytes)
    shown = option.result.memory.shown_bytes
    room = option.result.memory.device_bytes
    return (
        f" Its fullest GPU needs {needed}, and with the allocator's and NCCL's "
        f"own about {format_bytes(shown)} of {format_bytes(room)}: it may run out; more memory_margin is safer."
    )


def _cheapest(plan: PlanFile, found: SearchResult, unit: str) -> str:
    """That the fastest is the cheapest too, or which is; of those whose price is known."""
    fastest = found.front[0]
    cheapest = min(found.front, key=lambda one: one.robust[1])
    if not cheapest.priced:
        return f", {found.fastest}; without a price of its machine nothing is said of cost"
    others = [
        machine.label
        for machine, known in zip(plan.machines, found.rates, strict=True)
        if known.usd_per_gpu_hour is None
    ]
    among = f" among those with a price ({', '.join(others)} has none)" if others else ""
    if fastest is cheapest:
        return f": {found.fastest} and the cheapest per {unit}{among}"
    if not fastest.priced:
        saving = ""
    else:
        share = 1 - cheapest.objectives[1] / fastest.objectives[1]
        error = max(fastest.error, cheapest.error)
        doubt = "" if share > error else f", a saving smaller than predictions are off (+-{error:.0%})"
        saving = f", by {share:.1%}{doubt},"
    return (
        f", {found.fastest}; the cheapest per {unit}{among}{saving} is {_place(cheapest, plan, found, fastest)}, "
        f"{fastest.rate / cheapest.rate:.1f} times slower{_spend(cheapest, unit)}"
    )


def _tempting(plan: PlanFile, found: SearchResult) -> str:
    """That something looks faster than what is taken, and is not known well enough."""
    chosen = found.front[0]
    faster = [one for one in (*found.tempting, *found.front) if one.rate > chosen.rate]
    if not faster:
        return ""
    one = max(faster, key=lambda one: one.rate)
    return (
        f" {_place(one, plan, found, chosen)} looks {one.rate / chosen.rate - 1:.1%} faster, but is predicted to "
        f"+-{one.error:.0%} only: measure it before it is taken."
    )


def _place(option: PlanOption, plan: PlanFile, found: SearchResult, other: PlanOption | None = None) -> str:
    """An option in words; what it has in common with ``other`` is not said again."""
    one = option.candidate
    label = one.label(found.common)
    if other is not None and label == other.candidate.label(found.common):
        label = "the same strategy"
    machine = f" ({one.machine.label})" if len(plan.machines) > 1 else ""
    return f"{one.gpus:,} GPUs{machine} with {label}"


def _spend(option: PlanOption, unit: str) -> str:
    """Speed, and days and money for the plan's tokens, in parentheses."""
    said = [f"{option.rate:,.0f} {unit}s/s +-{option.error:.0%}"]
    if option.days is not None:
        said.append(f"{option.days:,.1f} days")
    if option.usd is not None:
        said.append(f"{option.usd / 1e6:,.2f} million USD" if option.usd >= 1e6 else f"{option.usd:,.0f} USD")
    return f" ({', '.join(said)})"


def too_close(found: SearchResult) -> Iterator[str]:
    """What the error of predictions leaves open: a sentence for each number of GPUs whose best is not alone, and one
    for each kind of strategy that is predicted too coarsely to be ranked."""
    best: dict[tuple[int, str, str], PlanOption] = {}
    for one in (one for one in found.options if one.counts):
        key = one.candidate.gpus, one.candidate.machine.label, one.candidate.form.family
        if key not in best or one.rate > best[key].rate:
            best[key] = one
    places: defaultdict[tuple[int, str], list[PlanOption]] = defaultdict(list)
    for (gpus, machine, _), one in best.items():
        places[gpus, machine].append(one)
    vague = {kind for one in best.values() if of_step(kind := one.candidate.kind).p50 > VAGUE}
    for (gpus, _), there in sorted(places.items()):
        first = max(there, key=lambda one: one.rate)
        kind = first.candidate.kind
        others = [one for one in there if one is not first and one.candidate.kind not in vague]
        near = [one for one in others if alike(one.candidate.kind, one.rate, kind, first.rate)]
        if near and kind not in vague:
            most = max(first.rate / one.rate - 1 for one in near)
            yield (
                f"on {gpus:,} GPUs {_named(near)} {'is' if len(near) == 1 else 'are'} within {most:.1%} of "
                f"{first.candidate.form.family}, less than predictions are off: choose by something else, or measure"
            )
    for kind in sorted(vague):
        yield f"{off_by(kind)}: a {kind} option that looks a little better or worse than another may not be"


def left_over(found: SearchResult) -> str:
    """How many options were not simulated, and what the best of them could have given; empty for none."""
    left = [one for one in found.options if one.state == "left" and one.bound]
    gains = []
    for one in left:
        mine = one.candidate
        there = [
            other
            for other in found.front
            if (other.candidate.machine, other.candidate.nodes) == (mine.machine, mine.nodes)
        ]
        if there and one.bound:
            best = max(there, key=lambda other: other.rate)
            step = best.step_s * mine.batch / best.candidate.batch
            gains.append((step / one.bound.step_s - 1, one))
    if not left:
        return ""
    said = f"{len(left):,} options were not simulated"
    if not gains:
        return f"{said}; none of them has a front option on as many GPUs to compare its bound with"
    gain, one = max(gains, key=lambda pair: pair[0])
    if gain <= 0:
        return f"{said}; by their bounds none is faster than the best on as many GPUs"
    return (
        f"{said}: by its bound the best of them, {one.candidate.label(found.common)} on "
        f"{one.candidate.gpus:,} GPUs, could be {gain:.0%} faster than the best that was, at most"
    )


def _named(options: list[PlanOption]) -> str:
    names = [one.candidate.form.family for one in sorted(options, key=lambda one: -one.rate)]
    if len(names) > MOST_NAMED:
        return few(names, MOST_NAMED)
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
