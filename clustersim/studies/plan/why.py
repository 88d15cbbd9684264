"""Why an option is on the front, and why the well-known alternatives are not."""

from __future__ import annotations

import math
import re

from clustersim.core.memory_states import verdict_of, worded
from clustersim.core.units import format_time
from clustersim.studies.plan.limits import SLACK
from clustersim.studies.plan.options import PlanOption, SearchResult, rule
from clustersim.studies.sweep.row import SweepFigures

FASTEST = "the fastest"
AS_FAST = "as fast"
EVEN = 0.005
"""Of rates that differ by less than this share neither is called slower: it would print as 0 %."""
FEWEST = "the fewest GPUs"
TOLD = 5e-4
"""Gains below this share print as nothing."""
NAMES = (FASTEST, "the cheapest per {unit}", FEWEST, "the least energy per {unit}")
"""Of the front's objectives, in order."""


def why_on_front(option: PlanOption, searched: SearchResult) -> str:
    """What it is best at, or between whom it is the best trade, errors counted."""
    unit = "token" if searched.tokens else "sample"
    front = searched.front
    best = _best_at(option, searched, unit)
    if not option.has_room:
        best += [*([] if best else _gains_of_risky(option, searched)), fit_of(option)]
    elif option is front[0] and best[:1] != [FASTEST]:
        best.insert(0, f"{searched.fastest} with room in memory")
    if best:
        if best[0] == FASTEST:
            best[0] = searched.fastest + of_those_run_whole(option, searched)
        return ", ".join(best) + (", errors counted" if _outrun(option, searched) else "")
    # Where a machine has no price, whoever has one is compared with whoever has one: nothing is known of the other's.
    faster = next(
        (
            other_option
            for other_option in front[front.index(option) - 1 :: -1]
            if other_option.priced or not option.priced
        ),
        None,
    )
    if faster is None:
        return "the fastest with a price"
    less = faster.candidate.gpus - option.candidate.gpus
    cheaper = 1 - option.robust[1] / faster.robust[1] if option.priced and faster.priced else 0.0
    saved = 1 - option.robust[3] / faster.robust[3]
    gains_texts = [
        f"{less:,} GPUs fewer" if less > 0 else "",
        f"{cheaper:.1%} cheaper per {unit}" if cheaper > 0 else "",
    ]
    gains_texts += [f"{saved:.1%} less energy per {unit}"] if not any(gains_texts) else []
    gains = " and ".join(part for part in gains_texts if part)
    ahead = faster.rate / option.rate - 1
    if ahead < 0:  # the order is of what an option reaches at the least
        return f"{gains} than the next surely faster; itself predicted {-ahead:.0%} above it, +-{option.error:.0%}"
    return f"{gains} than the next faster, which is {ahead:.1%} faster"


def _best_at(option: PlanOption, searched: SearchResult, unit: str) -> list[str]:
    """Names of the objectives at which no other option of the front is better."""
    one_size = len({rival.candidate.gpus for rival in searched.options if rival.counts}) == 1
    as_few = (rival for rival in searched.front if rival.candidate.gpus == option.candidate.gpus)
    slower = any(rival.has_room == option.has_room and rival.robust[0] < option.robust[0] for rival in as_few)
    return [
        name.format(unit=unit)
        for k, name in enumerate(NAMES)
        if not (name == FEWEST and (one_size or slower))  # which says nothing of it, and hides what it is better at
        and option.robust[k] == min(rival.robust[k] for rival in searched.front)
        and math.isfinite(option.robust[k])
    ]


def _gains_of_risky(option: PlanOption, searched: SearchResult) -> list[str]:
    """What an option of the front that may run out of memory has before the fastest one with room; nothing where none
    has room, and where all that it has is within what is told of figures."""
    fastest = searched.front[0]
    if not fastest.has_room:
        return []
    unit = "token" if searched.tokens else "sample"
    cheaper = 1 - option.objectives[1] / fastest.objectives[1] if option.priced and fastest.priced else 0.0
    gains = {
        "faster": option.rate / fastest.rate - 1,
        f"cheaper per {unit}": cheaper,
        f"less energy per {unit}": 1 - option.objectives[3] / fastest.objectives[3],
    }
    texts = [f"{gain:.1%} {word}" for word, gain in gains.items() if gain >= TOLD]
    return [f"{' and '.join(texts)} than the fastest with room"] if texts else []


def _outrun(option: PlanOption, searched: SearchResult) -> bool:
    """Whether a table shows something that looks better at what this one is best at, at the worse end of its range.

    What is the fastest with room in memory is compared with what has room.
    """
    of_all = [rival for rival in searched.options if rival.counts and rival.objectives]
    roomy = [rival for rival in of_all if rival.has_room]
    for k in range(len(NAMES)):
        best = min(rival.robust[k] for rival in searched.front)
        with_room = k == 0 and option is searched.front[0] and option.robust[0] != best
        if (option.robust[k] == best and math.isfinite(best)) or with_room:
            better = (rival.objectives[k] < option.objectives[k] for rival in (roomy if with_room else of_all))
            if any(better):
                return True
    return False


def of_those_run_whole(option: PlanOption, searched: SearchResult) -> str:
    """Words behind "the fastest" where something that was run roughly alone looks faster; else empty."""
    rough = (rival for rival in searched.options if rival.state == "rough")
    faster = any(rival.rate > option.rate * (1 + EVEN) for rival in rough)
    return " of what was run whole" if faster else ""


def pace(rate: float, rival_rate: float, doubt: str = "as predicted, but known less well") -> str:
    """How much slower an option is than another; of what is not, that it looks as fast, or faster, with a ``doubt``.

    >>> pace(90.0, 100.0), pace(100.0, 100.2), pace(101.0, 100.0)
    ('10% slower', 'as fast', '1% faster as predicted, but known less well')
    """
    slower = 1 - rate / rival_rate
    if abs(slower) < EVEN:
        return AS_FAST
    return f"{slower:.0%} slower" if slower > 0 else f"{-slower:.0%} faster {doubt}"


def fit_of(option: PlanOption) -> str:
    """Whether GPU and host have room, and how likely, of the one that has less; empty for what was not run whole or
    folded."""
    if option.result is not None and option.result.memory.host.lacks_room:
        return option.result.memory.host.in_words
    return fit_of_gpu(option)


def fit_of_gpu(option: PlanOption) -> str:
    """Whether its fullest GPU has room, and how likely; empty for what was not run whole or folded."""
    if option.result is None or not option.result.memory.device_bytes:
        return ""
    memory = option.result.memory
    state = verdict_of(option.result.peak_memory_bytes, memory.device_bytes, option.result.gpu_runs_out)
    return worded(state, memory.needed_range_bytes, memory.needed_bytes, memory.device_bytes)


def why_lost(option: PlanOption, searched: SearchResult) -> str:
    """Why an option that was looked at is not on the front: its limit, or who beats it and where its step goes; and
    that it may run out of memory, where it may."""
    why = _why_beaten(option, searched)
    return why if option.has_room else f"{why}; {fit_of(option)}"


def _why_beaten(option: PlanOption, searched: SearchResult) -> str:
    """Its limit, or who beats it and where its step goes."""
    if not option.counts:
        limits = what_limits(option) if searched.split else ""
        reason = searched.reason(option) or option.state
        if option.state == "rough" and searched.front:
            reason = _slower(option, searched)
        return f"{reason}; at the least {limits}" if limits else reason
    by = beats(option, searched)
    more = option.objectives[1] / by.objectives[1] - 1 if option.priced and by.priced else 0.0
    slower = pace(option.rate, by.rate) if option.candidate.gpus == by.candidate.gpus else ""
    dearer = f"{more:.0%} dearer per {'token' if searched.tokens else 'sample'}" if more >= 0.005 else ""
    how = " and ".join(part for part in (slower, dearer) if part) or "no better in anything"
    than = " as " if how == AS_FAST else " than "
    return f"{where_it_goes(option)}; {how}{than}{searched.title(by)}"


def _slower(option: PlanOption, searched: SearchResult) -> str:
    """Of one that was run roughly, how much slower it is than the fastest, on its own machine and nodes where the front
    has one; of one that has room in memory, than the fastest that has."""
    candidate = option.candidate
    place = candidate.machine, candidate.nodes
    front = [rival for rival in searched.front if rival.has_room >= option.has_room] or searched.front
    rivals = [rival for rival in front if (rival.candidate.machine, rival.candidate.nodes) == place]
    first = min(front, key=lambda rival: rival.robust)
    fastest = min(rivals, key=lambda rival: rival.robust) if rivals else first
    where_text = " with room" if len(front) < len(searched.front) else ""
    where_text += " there" if fastest is not first else ""
    if fastest.candidate.gpus != candidate.gpus:
        where_text += f" ({fastest.candidate.gpus:,} GPUs, and this has {candidate.gpus:,})"
    # Both are predicted equally well where their errors are the same: then only the rough run leaves it open.
    if option.rate > fastest.rate * (1 + EVEN) and option.error <= fastest.error:
        how = pace(option.rate, fastest.rate, "than")
        return f"{how} the fastest{where_text} by a rough run alone: not run whole, which may turn it round"
    how = pace(option.rate, fastest.rate)
    return f"{how} {'as' if how == AS_FAST else 'than'} the fastest{where_text}, roughly"


def beats(option: PlanOption, searched: SearchResult) -> PlanOption:
    """The fastest option of the front that is nowhere worse than this one, errors counted."""
    robust = option.robust
    nowhere_worse = (
        rival
        for rival in searched.front
        if rival.has_room >= option.has_room and all(x <= y for x, y in zip(rival.robust, robust, strict=True))
    )
    return max(nowhere_worse, key=lambda other_option: other_option.rate)


def why_tempting(option: PlanOption, searched: SearchResult) -> str:
    """What it promises, why that is not enough, and what to measure."""
    by = beats(option, searched)
    gains = {"faster": option.rate / by.rate - 1}
    if option.priced and by.priced:
        gains[f"cheaper per {'token' if searched.tokens else 'sample'}"] = 1 - option.objectives[1] / by.objectives[1]
    word, gain = max(gains.items(), key=lambda pair: pair[1])
    limit = option.step_s * option.rate / by.rate
    return (
        f"{gain:.1%} {word} than {searched.title(by)} if its prediction held, but {option.kind} steps are "
        f"known to +-{option.error:.0%} and {by.kind} steps to +-{by.error:.0%}: measure one; it is the "
        f"better one if its step takes less than {format_time(limit)}"
    )


def where_it_goes(option: PlanOption) -> str:
    """The largest part of a simulated step that is not the model's own work, in words, such as "31% of the step is
    exposed communication (busiest: nic -> leaf, 90% of its line rate)"."""
    result = option.result
    if result is None:
        return ""
    parts = ("exposed_communication", "bubble", "idle", "optimizer", "gradient")
    losses = {name: result.phase_shares.get(name, 0.0) for name in parts}
    losses["recomputation"] = _recomputed(result)
    name = max(losses, key=lambda key: losses[key])
    meaning = {
        "exposed_communication": "exposed communication",
        "bubble": "bubbles of the pipeline",
        "gradient": "copies of gradients and parameters",
        "recomputation": "recomputed activations",
    }.get(name, name)
    text = f"{losses[name]:.0%} of the step is {meaning}"
    if name == "exposed_communication" and result.hottest_links:
        busiest = result.hottest_links[0]
        text += f" (busiest: {sort_of_link(busiest.link)}, {busiest.utilisation:.0%} of {busiest.of})"
    return text


def _recomputed(result: SweepFigures) -> float:
    """Share of the step that executes FLOPs a second time: what HFU has over MFU, of the time in kernels."""
    mfu = result.mfu or 0.0
    hfu = result.hfu or 0.0
    if hfu <= mfu or not result.step_time_s:
        return 0.0
    return (hfu - mfu) / hfu * (result.compute_s / result.step_time_s)


def sort_of_link(name: str) -> str:
    """A link's name without machine and numbers.

    >>> sort_of_link("node17/nic0 -> leaf3")
    'nic -> leaf'
    """
    return re.sub(r"\d+", "", re.sub(r"node\d+/", "", name))


def what_limits(option: PlanOption) -> str:
    """Where the least its step can take goes, of a split model; where it goes, of another that was simulated.

    >>> from clustersim.studies.plan.limits import Bound
    >>> what_limits(PlanOption(None, bound=Bound(0.5, 0.97, 0.2, 0.3, 0.0, (1.0,))))
    '50% kernels, 30% bubble of the pipeline, 20% exchanges inside the model'
    """
    bound = option.bound
    if bound is None or not bound.held:
        return where_it_goes(option) if option.state == "simulated" else ""
    step_s = bound.step_s / SLACK
    parts = {
        "exchanges inside the model": bound.exposed_s / step_s,
        "bubble of the pipeline": bound.ramp_s / step_s,
        "data parallelism": bound.data_s / step_s,
    }
    parts = {"kernels": 1.0 - sum(parts.values())} | parts
    ranked = sorted(parts.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{share:.0%} {name}" for name, share in ranked if share >= 0.005)


def alternatives(searched: SearchResult) -> list[PlanOption]:
    """The best option of each strategy that is not on the front, cheapest first; simulated ones before others, and of
    these what has room in memory, wherever anything has. Beside a split model: of each other degree, on the same
    machine as the fastest, and of each strategy with its numbers on the others."""
    front_families: set[object] = {option.candidate.form.family for option in searched.front}
    for option in searched.front:
        candidate = option.candidate
        front_families.add(("sort", candidate.machine.label, candidate.nodes, candidate.form.sort))
    told = [option for option in searched.options if option.on_front or option.tempting]
    shown = {(_but_passes(option), has_room) for option in told for has_room in {False, option.has_room}}
    best: dict[object, PlanOption] = {}
    for option in searched.options:
        if (_but_passes(option), option.has_room) in shown:  # what has room is told beside what may run out of memory
            continue
        for key in _sorts(option, searched) if searched.split else [option.candidate.form.family]:
            if key not in front_families and (key not in best or _roomy_rank(option) < _roomy_rank(best[key])):
                best[key] = option
    told_once: dict[object, PlanOption] = {}
    for option in sorted(best.values(), key=_roomy_rank):
        told_once.setdefault(_but_passes(option), option)
    return sorted(told_once.values(), key=fate_rank)


def _but_passes(option: PlanOption) -> object:
    """An option without its micro-batch and passes: what differs from one that is told in these alone is not told."""
    candidate = option.candidate
    return candidate.machine.label, candidate.nodes, candidate.form.number, candidate.kept


def _roomy_rank(option: PlanOption) -> tuple[bool, bool, tuple[int, float, int]]:
    """As :func:`fate_rank`, with what may run out of memory behind what has room."""
    return option.result is None, not option.has_room, fate_rank(option)


def _sorts(option: PlanOption, searched: SearchResult) -> list[object]:
    """Degrees that an option has and the fastest has not, where both have the same machine."""
    if not searched.front:
        return [option.candidate.form.family] if option.state == "memory" else []
    chosen = searched.front[0].candidate
    candidate = option.candidate
    if (candidate.machine, candidate.nodes) != (chosen.machine, chosen.nodes):
        return [("sort", candidate.machine.label, candidate.nodes, candidate.form.sort)] if option.rate else []
    own = {**candidate.form.degrees, "sort": candidate.form.sort}
    chosen_values = {**chosen.form.degrees, "sort": chosen.form.sort}
    return [(name, value) for name, value in own.items() if value != chosen_values[name]]


def rule_told(searched: SearchResult) -> str:
    """What the simple rule costs beside the fastest, in a sentence; empty where it takes nothing or the same."""
    if not searched.front or not searched.split:
        return ""
    chosen = searched.front[0]
    alike = [option for option in searched.options if option.candidate.form.recipe == chosen.candidate.form.recipe]
    ruled = rule(alike).get((chosen.candidate.machine.label, chosen.candidate.nodes))
    if ruled is None or not ruled.rate or ruled.candidate.number == chosen.candidate.number:
        return ""
    lost = chosen.rate / ruled.rate - 1
    takes = f"the simple rule, TP 8 and then PP until it fits, takes {ruled.candidate.label(searched.common)}"
    return f"{takes}: its step is {lost:.1%} longer" if lost > 0 else f"{takes}, which is as fast"


def fate_rank(option: PlanOption) -> tuple[int, float, int]:
    """For the nearest to the front first: what it became, then its cost; of what does not fit, the memory it needs."""
    order = ("simulated", "rough", "bound", "left", "limits", "memory", "error")
    cost = option.objectives[1] if option.objectives else float("inf")
    if option.objectives and not option.priced:
        cost = option.objectives[0]
    elif option.bound and not option.objectives:
        cost = option.bound.step_s / option.candidate.batch
    if option.state == "memory":
        cost = option.needs
    return order.index(option.state), cost, option.candidate.number
