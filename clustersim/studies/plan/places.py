"""The best option of every machine and size that a plan names, or why there is none."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.spec import PlanFile
from clustersim.studies.plan.untried import OFFLOAD
from clustersim.studies.plan.why import beats, fate_rank

Site = tuple[str, int]
"""A machine's label and its nodes."""


def best_of_places(plan: PlanFile, found: SearchResult) -> Iterator[tuple[Site, PlanOption | None, str]]:
    """Every machine with every number of nodes, in the file's order: its best option, and why that is or is not worth
    having; without an option, why none is possible."""
    options_at: defaultdict[Site, list[PlanOption]] = defaultdict(list)
    for option in found.options:
        options_at[option.candidate.machine.label, option.candidate.nodes].append(option)
    for site, gpus in found.gpus.items():
        options = options_at[site]
        best = max(options, key=_merit, default=None)
        if best is not None and best.rate:
            yield site, best, _why(best, options, found)
        elif best is None:
            yield site, None, _impossible(plan, gpus)
        else:
            first = min(options, key=fate_rank)
            counts = Counter(option.state for option in options)
            none_fits = set(counts) == {"memory"}
            most = "none fits" if none_fits else "none can be taken"
            offload = f"; not tried: {OFFLOAD}" if none_fits and not found.offloads else ""
            least = "the least has " if none_fits else ""
            yield site, None, f"{most}; {least}{first.candidate.label(found.common)}: {found.reason(first)}{offload}"


def _merit(option: PlanOption) -> tuple[bool, bool, bool, float]:
    """Options that keep the limits before others, run whole before roughly, with room in memory before those that may
    run out, then by speed."""
    return option.counts, option.state == "simulated", option.has_room, option.rate


def _why(best: PlanOption, options: list[PlanOption], found: SearchResult) -> str:
    if best.on_front:
        return "worth having"
    if not best.counts:
        return "roughly run alone" if best.state == "rough" else found.reason(best)
    runs = sum(option.state == "simulated" for option in options)
    by = beats(best, found)
    than = "anything" if best.priced else "speed, GPUs and energy, and of cost nothing is known here"
    ahead = any(x > y for x, y in zip(by.objectives, best.objectives, strict=True))
    counted = ", errors counted" if ahead else ""
    return f"the best of {runs:,} run here; {found.title(by)} is no worse in {than}{counted}"


def _impossible(plan: PlanFile, gpus: int) -> str:
    limit = plan.limits.gpus
    if limit is not None and gpus > limit:
        return f"{gpus:,} GPUs are more than the {limit:,} of limits.gpus"
    return f"no micro-batch and number of passes makes {plan.batch.samples} samples on {gpus:,} GPUs"
