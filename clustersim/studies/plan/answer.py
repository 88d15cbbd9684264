"""A search's answer: the front, the alternatives, what was assumed, and what is too close to call."""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET, structs

from clustersim.core import ranges
from clustersim.scenario.file.reading import Table, override
from clustersim.studies.plan.campaigns import goodput
from clustersim.studies.plan.candidates import RUN, base
from clustersim.studies.plan.options import PlanOption, SearchResult, dtype_of, title
from clustersim.studies.plan.places import best_of_places
from clustersim.studies.plan.robust import robustness
from clustersim.studies.plan.rows import ChosenRow, Degrees, FateRow, PlaceRow, PlanAnswer, ReasonedRow
from clustersim.studies.plan.spec import EXACT, PlanFile
from clustersim.studies.plan.verdict import cannot_be_run, left_over, too_close, verdict
from clustersim.studies.plan.why import (
    alternatives,
    fit_of,
    rule_told,
    what_limits,
    why_lost,
    why_on_front,
    why_tempting,
)

Pair = tuple[int, int]
OptionRow = TypeVar("OptionRow", ChosenRow, ReasonedRow)
STATES = {
    "simulated": "simulated",
    "memory": "do not fit",
    "limits": "break a limit",
    "bound": "cannot win by their bounds",
    "rough": "cannot win by a rough run",
    "left": "not simulated",
    "error": "cannot be run",
}


def told(plan: PlanFile, searched: SearchResult, path: str | Path = "plan.toml") -> PlanAnswer:
    """The whole answer. ``path`` : the plan's file, where relative names in it start."""

    @cache
    def lasting(number: int, rate: float) -> float | None:
        """Goodput of an option at a rate of failures; None where it has none."""
        return goodput(_chosen(plan, searched, searched.options[number], path), plan, rate)

    robust = robustness(searched, None if plan.campaign is None else lasting)
    states = Counter(option.state for option in searched.options)
    return PlanAnswer(
        title=plan.title,
        verdict=verdict(plan, searched),
        unit="tokens" if searched.tokens else "samples",
        front=[_chosen(plan, searched, option, path) for option in searched.front],
        tempting=[
            _reasoned(plan, searched, option, why_tempting(option, searched), path) for option in searched.tempting
        ],
        alternatives=[
            _reasoned(plan, searched, option, why_lost(option, searched), path) for option in alternatives(searched)
        ],
        warnings=[
            *too_close(searched),
            *filter(None, (cannot_be_run(searched), left_over(searched), rule_told(searched))),
        ],
        counts={label: states[state] for state, label in STATES.items()},
        combined=searched.combined,
        assumptions=list(assumptions(plan, searched)),
        options=[
            FateRow(**_row(option, searched), state=option.state, reason=searched.reason(option))
            for option in searched.options
            if len(searched.options) <= EXACT or option.state in {"simulated", "rough"}
        ],
        landscape=list(landscape(searched)),
        robust=UNSET if robust is None else robust,
        places=list(_places(plan, searched, path)),
        untried=list(searched.untried),
    )


def kept(answer: PlanAnswer, out: Path) -> PlanAnswer:
    """The answer as the folder ``out`` keeps it: where plans are read is told from there, so that an option is found
    from anywhere."""

    def moved(row: OptionRow) -> OptionRow:
        """A row whose path starts in ``out``; one without a path as it is."""
        if not row.path:
            return row
        path = row.path if Path(row.path).is_absolute() else os.path.relpath(row.path, out)
        return structs.replace(row, path=path)

    places = [row if row.best is None else structs.replace(row, best=moved(row.best)) for row in answer.places]
    front = [moved(row) for row in answer.front]
    tempting, rivals = ([moved(row) for row in rows] for rows in (answer.tempting, answer.alternatives))
    return structs.replace(answer, front=front, tempting=tempting, alternatives=rivals, places=places)


def _places(plan: PlanFile, found: SearchResult, path: str | Path) -> Iterator[PlaceRow]:
    """The best option of each machine and size."""
    prices = {machine.label: known for machine, known in zip(plan.machines, found.rates, strict=True)}
    for (label, nodes), best, why in best_of_places(plan, found):
        yield PlaceRow(
            machine=label,
            nodes=nodes,
            gpus=found.gpus[label, nodes],
            usd_per_gpu_hour=prices[label].usd_per_gpu_hour,
            source=prices[label].sources.get("price", ""),
            best=None if best is None else _chosen(plan, found, best, path),
            why=why,
        )


def _chosen(plan: PlanFile, searched: SearchResult, option: PlanOption, path: str | Path) -> ChosenRow:
    """An option's figures with its scenario."""
    return ChosenRow(
        **_row(option, searched),
        scenario=override(base(plan), option.candidate.changes),
        path=str(path),
        tokens_per_step=round(option.rate * option.step_s) if searched.tokens else None,
        why=why_on_front(option, searched) if option.on_front else "",
    )


def _reasoned(plan: PlanFile, searched: SearchResult, option: PlanOption, why: str, path: str | Path) -> ReasonedRow:
    """An option beside the front; of one that was run with its scenario, so that it can be run again."""
    return ReasonedRow(
        **_row(option, searched),
        why=why,
        scenario=override(base(plan), option.candidate.changes) if option.rate else UNSET,
        path=str(path) if option.rate else "",
    )


def _row(option: PlanOption, searched: SearchResult) -> Table:
    """The fields of :class:`~clustersim.studies.plan.rows.PlanRow`."""
    candidate = option.candidate
    spent = option.costs
    dtype = dtype_of(option, searched.dtype)
    return {
        "option": searched.title(option),
        "in_full": title(candidate),
        "family": candidate.form.family,
        "machine": candidate.machine.label,
        "nodes": candidate.nodes,
        "gpus": candidate.gpus,
        "batch": candidate.batch,
        "kind": option.kind,
        "degrees": candidate.form.degrees,
        "limited_by": what_limits(option),
        "stage_bytes": list(option.bound.held) if option.bound else [],
        "rate": option.rate or None,
        "step_s": option.result.step_time_s if option.result else None,
        "error": option.error,
        "usd_per_1e9": None if spent is None or spent.usd_per_sample is None else spent.usd_per_sample * 1e9,
        "kwh_per_1e9": None if spent is None else spent.kwh_per_sample * 1e9,
        "days": option.days,
        "usd": option.usd,
        "dtype": dtype,
        "fit": fit_of(option),
        "has_room": option.has_room,
        "mfu": _mfu(option, searched, dtype),
    }


def _mfu(option: PlanOption, found: SearchResult, dtype: str) -> float | None:
    """As of a run; of one that was run folded, of its rate and its GPU's dense peak. None on several kinds of GPU."""
    if option.result is None:
        return None
    if option.result.mfu is not None:
        return option.result.mfu
    candidate = option.candidate
    topology = found.topologies[candidate.machine.label, candidate.nodes]
    gpus = {kind.device: kind.gpu for kind in topology.node_types}
    if len(gpus) > 1 or not found.flops:
        return None
    (gpu,) = gpus.values()
    return found.flops * candidate.batch / option.step_s / candidate.gpus / gpu.peak[gpu.runs_as(dtype)]


def landscape(searched: SearchResult) -> Iterator[Degrees]:
    """Each tp and pp on the fastest option's machine: of what has room in memory, where anything of a degree has."""
    if not searched.split or not searched.front:
        return
    first = searched.front[0]
    chosen = first.candidate
    known_steps = defaultdict[Pair, list[tuple[bool, float]]](list)
    least = defaultdict[Pair, list[tuple[bool, float]]](list)
    for option in searched.options:
        candidate = option.candidate
        if (candidate.machine, candidate.nodes) != (chosen.machine, chosen.nodes) or option.state in {
            "error",
            "limits",
        }:
            continue
        pair = candidate.form.degrees["tp"], candidate.form.degrees["pp"]
        if option.result:
            known_steps[pair].append((not option.has_room, option.step_s / candidate.batch))
        else:
            tight = bool(option.bound and option.bound.tight)
            least[pair].append((tight, option.bound.step_s / candidate.batch if option.bound else math.inf))
    own = chosen.form.degrees["tp"], chosen.form.degrees["pp"]
    for pair in sorted({*known_steps, *least}):
        # One that was run is the shortest of its degrees unless another's bound is below it.
        tight, step = min(known_steps[pair], default=(True, math.inf))
        bound = min((bound for full, bound in least[pair] if full <= tight), default=math.inf)
        sure = step <= bound or pair == own
        shown = first.step_s if pair == own else (step if sure else bound) * chosen.batch
        fits = math.isfinite(shown)
        yield Degrees(*pair, shown if fits else None, sure, pair == own)


def _estimated(searched: SearchResult, dtypes: Sequence[str]) -> Iterator[str]:
    """What products reach on a GPU where that is no measurement of its own."""
    mentioned = set()
    for (label, _), topology in searched.topologies.items():
        for kind in topology.node_types:
            for dtype in sorted({kind.gpu.runs_as(dtype) for dtype in dtypes}):
                figure = kind.gpu.matmul[dtype]
                if figure.estimated and (label, kind.device, dtype) not in mentioned:
                    mentioned.add((label, kind.device, dtype))
                    wider = ", so that its +- is wider by what that may be off" if figure.unseen else ""
                    yield (
                        f"{label}: products in {dtype} at {figure.value:.0%} of a {kind.gpu.name}'s peak is no "
                        f"measurement of it ({figure.source}){wider}: matmul.{dtype} of a GPU file says yours"
                    )


NO_JITTER = "options are played without jitter, every GPU at its usual pace: `jitter` in the plan's [run] plays it"
"""Of a plan that says nothing of jitter; a scenario's own default has some."""


def assumptions(plan: PlanFile, searched: SearchResult) -> Iterator[str]:
    """What the figures rest on, a sentence each."""
    for machine, rate in zip(plan.machines, searched.rates, strict=True):
        price = "no price" if rate.usd_per_gpu_hour is None else f"{rate.usd_per_gpu_hour:g} USD per GPU-hour"
        source = rate.sources.get("price", "give usd_per_gpu_hour; until then it is not compared in cost")
        yield f"{machine.label}: {price} ({source})"
        p = rate.power
        sources = rate.sources
        yield (
            f"{machine.label}: {rate.limit_w:g} W a GPU, of it {p.compute:.0%} in kernels, {p.communication:.0%} "
            f"while only communicating, {p.idle:.0%} idle; {p.rest_of_machine:.0%} more for the machine; the "
            f"building draws {p.pue:g} x ({sources['compute']}; {sources['rest_of_machine']}; the others are assumed)"
        )
    if searched.split:
        yield (
            "a split model's options are first sketched, taken to be within 5% of the whole run; what more than that "
            "is beaten is not run again; those whose whole run is too long are run folded, one replica for all; of "
            "options closer than their error the one with the best worst case is named"
        )
    recipes = (option.candidate.form.recipe for option in searched.options if option.counts)
    dtypes = sorted({str(recipe.get("dtype", searched.dtype)) for recipe in recipes})
    yield from _estimated(searched, dtypes)
    if len(dtypes) > 1:
        yield (
            f"MFU is over the dense peak of what an option computes in ({', '.join(dtypes)}): it compares options of "
            "one such type, tokens/s compares all"
        )
    uncounted = "the input pipeline, failures and checkpoints are" if plan.campaign is None else "the input pipeline is"
    paced = "" if {**RUN, **plan.run}["jitter"] else f"; {NO_JITTER}"
    yield f"{ranges.within()}; {uncounted} not counted{paced}"
