"""The answer to a plan in one sentence, and what is too close to call in a few."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

from clustersim.core.device import NARROW
from clustersim.core.memory_states import running_out
from clustersim.core.ranges import VAGUE, alike, of_step, off_by
from clustersim.core.units import format_bytes
from clustersim.studies.plan.options import PlanOption, SearchResult, dtype_of
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.plan.untried import OFFLOAD
from clustersim.studies.plan.why import fit_of_gpu, of_those_run_whole, pace

LIKELY = 0.5
"""Likelihood of running out of memory above which nobody is told to take an option."""
MOST_NAMED = 3
"""Alternatives that are named; of more, their number is told."""


def verdict(plan: PlanFile, searched: SearchResult) -> str:
    """Which option, and how many GPUs: the fastest, and what fewer GPUs would save."""
    if not searched.front:
        state_words = {"memory": "do not fit in memory", "limits": "break a limit", "error": "cannot be run"}
        states = Counter(option.state if option.state != "simulated" else "limits" for option in searched.options)
        fates = ", ".join(
            f"{states[state]:,} {state_text}" for state, state_text in state_words.items() if states[state]
        )
        offload = "" if searched.offloads or not states["memory"] else f" Not tried: {OFFLOAD}."
        return f"Nothing works: of {len(searched.options):,} options {fates}.{offload}"
    unit = "token" if searched.tokens else "sample"
    chosen = searched.front[0]
    place = _place(chosen, plan, searched)
    take = "Take" if chosen.runs_out <= LIKELY else "Nothing that keeps the limits is likely to fit. To try is"
    sentence = f"{take} {place}{_spend(chosen, unit)}{_risk(chosen)}.{_why_taken(plan, searched, unit)}"
    shared = ", ".join(knob for knob in chosen.candidate.knobs if knob in searched.common)
    common = f" Where nothing else is said: {shared}." if shared else ""
    left_out = f" Not tried, and usual: {'; '.join(searched.untried)}." if searched.untried else ""
    left_out += f" Not tried, where memory is what limits: {OFFLOAD}." if _cramped(searched) else ""
    parts = (
        _lead(plan, searched, unit),
        _tempting(plan, searched),
        _of_narrow_numbers(plan, searched, unit),
        _tight(plan, searched, unit),
    )
    return sentence + "".join(parts) + common + left_out


def _risk(option: PlanOption) -> str:
    """That it may run out of memory, and how likely; empty where it has room."""
    return "" if option.has_room else f", which may run out of memory ({running_out(option.runs_out)})"


def _cramped(searched: SearchResult) -> bool:
    """Whether room in memory costs more than predictions are off, and nothing was tried that keeps less on the GPU."""
    chosen = searched.front[0]
    if searched.offloads or not chosen.has_room:
        return not searched.offloads and not chosen.has_room
    without_room = [option.rate for option in searched.front if not option.has_room]
    return max(without_room, default=0.0) > chosen.rate * (1 + chosen.error)


def _tight(plan: PlanFile, searched: SearchResult, unit: str) -> str:
    """That it fits by what it needs, and not surely with what is taken besides, on GPU or host; or that nobody knows
    what a host has."""
    chosen = searched.front[0]
    if chosen.result is None or not (chosen.runs_out or chosen.result.memory.host.uncertain):
        return ""
    memory = chosen.result.memory
    of_host = f" Its {memory.host.in_words}." if memory.host.uncertain else ""
    if not chosen.gpu_runs_out:
        return of_host
    needed = chosen.result.peak_memory_bytes
    safer = "" if chosen.has_room else _what_has_room(plan, searched, unit)
    return (
        f" Its fullest GPU needs {format_bytes(needed)}, and with the allocator's and NCCL's own about "
        f"{format_bytes(memory.needed_bytes)} of {format_bytes(memory.device_bytes)}: it {fit_of_gpu(chosen)}; more "
        f"memory_margin is safer{safer}.{of_host}"
    )


def _what_has_room(plan: PlanFile, searched: SearchResult, unit: str) -> str:
    """Where nothing that keeps the limits has room in memory: the fastest that was run and has, and its limit."""
    roomy = [option for option in searched.options if option.result is not None and option.has_room and option.rate]
    best = max(roomy, key=lambda option: option.rate, default=None)
    if best is None:
        return "; nothing that was run leaves more room"
    return f"; with room, {_place(best, plan, searched)}{_spend(best, unit)} {searched.reason(best)}"


def _lead(plan: PlanFile, searched: SearchResult, unit: str) -> str:
    """By how much it is ahead of the next best of another kind on as many GPUs, and whether that can be told."""
    chosen = searched.front[0]
    site = chosen.candidate.machine, chosen.candidate.nodes
    rivals = [
        option
        for option in searched.options
        if (option.candidate.machine, option.candidate.nodes) == site
        and option.candidate.form.family != chosen.candidate.form.family
        and (option.counts or option.state == "rough")
        and option.rate
        and not ((option.on_front or option.tempting) and option.rate > chosen.rate)  # which _tempting tells
    ]
    if not rivals:
        return ""
    rival = max(rivals, key=lambda option: (option.has_room, option.rate))
    roughly = ", run roughly" if rival.state == "rough" else ""
    ahead = chosen.rate / rival.rate - 1
    slower, faster = sorted((chosen, rival), key=lambda option: option.rate)
    overlap = faster.rate / (1 + faster.error) <= slower.rate * (1 + slower.error)
    apart = "their ranges overlap: measure both" if overlap else "their ranges do not overlap"
    named = f"{_place(rival, plan, searched)}{_spend(rival, unit)}{_risk(rival)}{roughly}"
    if ahead < 0:
        if any(_outdoes(option, rival) for option in (*searched.tempting, *searched.front)):
            return ""  # _tempting tells the better one of its kind
        return f" {named}, looks {-ahead / (1 + ahead):.1%} faster; {apart}."
    # The table may have a faster one that may run out: this is not the next of all.
    outrun = rival.has_room and any(option.rate > rival.rate for option in rivals)
    kind = f"another kind{' with room in memory' if outrun else ''}"
    return f" What is taken is {ahead:.1%} faster than the next best of {kind}, {named}; {apart}."


def _outdoes(option: PlanOption, rival: PlanOption) -> bool:
    """Whether an option is of a rival's kind on the same GPUs, no slower, and has room in memory where that has."""
    own, its = option.candidate, rival.candidate
    of_its_kind = (own.machine, own.nodes, own.form.family) == (its.machine, its.nodes, its.form.family)
    return of_its_kind and option.rate >= rival.rate and (option.has_room or not rival.has_room)


def _why_taken(plan: PlanFile, searched: SearchResult, unit: str) -> str:
    """That what is taken is the fastest, and of what; and the cheapest, or which is: of those whose price is known, and
    none that may run out of memory where the fastest has room."""
    fastest = searched.front[0]
    front = [option for option in searched.front if option.has_room or not fastest.has_room]
    cheapest = min(front, key=lambda option: option.robust[1])
    rivals = [option for option in (*front, *searched.tempting) if option.has_room or not fastest.has_room]
    outrun = any(option.rate > fastest.rate for option in rivals)
    of_what = [searched.of_what, "run whole" if of_those_run_whole(fastest, searched) else ""]
    roomy = " with room in memory" if len(front) < len(searched.front) else ""
    called = " and ".join(filter(None, of_what))
    called = f"the fastest{f' of what was {called}' if called else ''}{roomy}"
    if not cheapest.priced:
        return f" {_at_worst(outrun, f'it is {called}')}. Its machine has no price: nothing is said of cost."
    unpriced = [
        machine.label
        for machine, rate in zip(plan.machines, searched.rates, strict=True)
        if rate.usd_per_gpu_hour is None
    ]
    among = f" among those with a price ({', '.join(unpriced)} has none)" if unpriced else ""
    outdone = any(option.priced and option.objectives[1] < cheapest.objectives[1] for option in rivals)
    # What may run out stands on the front as "the cheapest" as well: without these words both claim one name.
    tighter = (option for option in searched.front if fastest.has_room and not option.has_room)
    hidden = any(option.objectives[1] < cheapest.objectives[1] for option in tighter)
    called_cheapest = f"the cheapest per {unit}{' of those with room' if hidden and not roomy else ''}{among}"
    if fastest is cheapest:
        return f" {_at_worst(outrun or outdone, f'it is {called}, and {called_cheapest}')}."
    named = f"{called_cheapest} is {_place(cheapest, plan, searched, fastest)}{_spend(cheapest, unit)}"
    saving = _saving(fastest, cheapest) if fastest.priced else ""
    beside = f"{saving}{_pace(fastest, cheapest)}"
    if outrun == outdone:
        return f" {_at_worst(outrun, f'it is {called}')}, and {named}: {beside}."
    return f" {_at_worst(outrun, f'it is {called}')}. {_at_worst(outdone, named)}: {beside}."


def _at_worst(outdone: bool, words: str) -> str:
    """The beginning of a sentence; of what others are ahead of as predicted (``outdone``), that it is so where every
    option is as bad as its range allows."""
    return f"Should each be as bad as its range allows, {words}" if outdone else words[0].upper() + words[1:]


def _saving(fastest: PlanOption, cheapest: PlanOption) -> str:
    """By how much an option is cheaper than another, as predicted; it may be dearer, if it is known better, and still
    be the cheapest where every option is as bad as its range allows."""
    share = 1 - cheapest.objectives[1] / fastest.objectives[1]
    error = max(fastest.error, cheapest.error)
    if share > error:
        return f"{share:.1%} cheaper, and "
    how = "cheaper" if share >= 0 else "dearer"
    return f"as predicted {abs(share):.1%} {how}, less than predictions are off (+-{error:.0%}), and "


def _pace(fastest: PlanOption, other: PlanOption) -> str:
    """How long an option takes beside the fastest one."""
    times = fastest.rate / other.rate
    return f"{times:.1f} times as long" if times >= 1.5 else pace(other.rate, fastest.rate)


def _tempting(plan: PlanFile, searched: SearchResult) -> str:
    """That something looks faster than what is taken, and is not known well enough, or may run out of memory."""
    unit = "token" if searched.tokens else "sample"
    chosen = searched.front[0]
    faster = [option for option in (*searched.tempting, *searched.front) if option.rate > chosen.rate]
    if not faster:
        return ""
    sentences = []
    for has_room in (True, False):
        option = max(
            (rival for rival in faster if rival.has_room == has_room), key=lambda rival: rival.rate, default=None
        )
        if option is None:
            continue
        spent = "" if has_room else _spend(option, unit)
        but = (
            f"is predicted to +-{option.error:.0%} only: measure it before it is taken"
            if has_room
            else f"may run out of memory ({running_out(option.runs_out)}): try it before it is taken"
        )
        looks = f"looks {option.rate / chosen.rate - 1:.1%} faster"
        sentences.append(f" {_place(option, plan, searched, chosen)}{spent} {looks}, but {but}.")
    return "".join(sentences)


def _of_narrow_numbers(plan: PlanFile, searched: SearchResult, unit: str) -> str:
    """Of what computes in 8 bits or fewer, that nothing is known of what that does to the loss, and what the fastest is
    that keeps 16; empty where what is taken does."""
    chosen = searched.front[0]
    dtype = dtype_of(chosen, searched.dtype)
    if dtype not in NARROW:
        return ""
    whole = [
        option
        for option in searched.options
        if option.counts and dtype_of(option, searched.dtype) not in NARROW and option.has_room >= chosen.has_room
    ]
    best = max(whole, key=lambda option: option.rate, default=None)
    other = "" if best is None else f"; the fastest found without is {_place(best, plan, searched)}{_spend(best, unit)}"
    return f" Whether the loss is as good in {dtype} is not predicted{other}."


def _place(option: PlanOption, plan: PlanFile, searched: SearchResult, rival: PlanOption | None = None) -> str:
    """An option in words; what it has in common with ``rival`` is not said again."""
    candidate = option.candidate
    label = candidate.label(searched.common)
    if rival is not None and label == rival.candidate.label(searched.common):
        label = "the same strategy"
    machine = f" ({candidate.machine.label})" if len(plan.machines) > 1 else ""
    return f"{candidate.gpus:,} GPUs{machine} with {label}"


def _spend(option: PlanOption, unit: str) -> str:
    """Speed, and days and money for the plan's tokens, in parentheses."""
    spendings = [f"{option.rate:,.0f} {unit}s/s +-{option.error:.0%}"]
    if option.days is not None:
        spendings.append(f"{option.days:,.1f} days")
    if option.usd is not None:
        spendings.append(f"{option.usd / 1e6:,.2f} million USD" if option.usd >= 1e6 else f"{option.usd:,.0f} USD")
    return f" ({', '.join(spendings)})"


def too_close(searched: SearchResult) -> Iterator[str]:
    """What the error of predictions leaves open: a sentence for each number of GPUs whose best is not alone, and one
    for each kind of strategy that is predicted too coarsely to be ranked."""
    best: dict[tuple[int, str, str], PlanOption] = {}
    for option in (option for option in searched.options if option.counts or option.state == "rough"):
        key = option.candidate.gpus, option.candidate.machine.label, option.candidate.form.family
        if key not in best or option.rate > best[key].rate:
            best[key] = option
    places: defaultdict[tuple[int, str], list[PlanOption]] = defaultdict(list)
    for (gpus, machine, _), option in best.items():
        places[gpus, machine].append(option)
    vague = {kind for option in best.values() if of_step(kind := option.kind).p50 > VAGUE}
    several = len({machine for _, machine in places}) > 1
    for (gpus, machine), at_place in sorted(places.items()):
        first = max(at_place, key=lambda option: option.rate)
        kind = first.kind
        rest = [option for option in at_place if option is not first and option.kind not in vague]
        near = [option for option in rest if alike(option.rate, first.rate, max(option.error, first.error))]
        if near and kind not in vague:
            most = max(first.rate / option.rate - 1 for option in near)
            place = f"{gpus:,} GPUs ({machine})" if several else f"{gpus:,} GPUs"
            yield (
                f"on {place} {_named(near)} {'is' if len(near) == 1 else 'are'} within {most:.1%} of "
                f"{first.candidate.form.family}, less than predictions are off: choose by something else, or measure"
            )
    for kind in sorted(vague):
        yield f"{off_by(kind)}: an option of theirs that looks a little better or worse than another may not be"


def cannot_be_run(searched: SearchResult) -> str:
    """Why options cannot be run: the commonest reasons, with counts; empty where all can.

    Reasons that differ in their numbers alone are one, told by the first.
    """
    failed = [searched.reason(option) for option in searched.options if option.state == "error"]
    if not failed:
        return ""
    alike_reasons: defaultdict[str, list[str]] = defaultdict(list)
    for reason in failed:
        alike_reasons[re.sub(r"\d+", "0", reason)].append(reason)
    ranked = sorted(alike_reasons.values(), key=len, reverse=True)
    listed = "; ".join(f"{len(same):,}: {same[0]}" for same in ranked[:MOST_NAMED])
    others = sum(map(len, ranked[MOST_NAMED:]))
    return f"{len(failed):,} options cannot be run, by reason {listed}{f'; {others:,} others' if others else ''}"


def left_over(searched: SearchResult) -> str:
    """How many options were not simulated, and what the best of them could have given; empty for none."""
    left = [option for option in searched.options if option.state == "left" and option.bound]
    gains = []
    for option in left:
        candidate = option.candidate
        at_place = [
            rival
            for rival in searched.front
            if (rival.candidate.machine, rival.candidate.nodes) == (candidate.machine, candidate.nodes)
        ]
        if at_place and option.bound:
            best = max(at_place, key=lambda rival: rival.rate)
            step = best.step_s * candidate.batch / best.candidate.batch
            gains.append((step / option.bound.step_s - 1, option))
    if not left:
        return ""
    sentence = f"{len(left):,} options were not simulated"
    if not gains:
        return f"{sentence}; none of them has a front option on as many GPUs to compare its bound with"
    gain, option = max(gains, key=lambda pair: pair[0])
    if gain <= 0:
        return f"{sentence}; by their bounds none is faster than the best on as many GPUs"
    return (
        f"{sentence}: by its bound the best of them, {option.candidate.label(searched.common)} on "
        f"{option.candidate.gpus:,} GPUs, could be {gain:.0%} faster than the best that was on as many, at most"
    )


def _named(options: list[PlanOption]) -> str:
    """Options by their kinds, the fastest first. A kind has commas of its own: semicolons divide them."""
    names = [option.candidate.form.family for option in sorted(options, key=lambda option: -option.rate)]
    named, rest = names[:MOST_NAMED], len(names) - MOST_NAMED
    last = f"{rest} more" if rest > 0 else named.pop()
    return f"{'; '.join(named)}; and {last}" if named else last
