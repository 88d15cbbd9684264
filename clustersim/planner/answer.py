"""A search's answer in plain values: the front, the alternatives, what was assumed, and what is too close to call."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

from clustersim import ranges
from clustersim.outputs import Picture, draw_all, json_text, output_folder, together
from clustersim.planner.campaigns import goodput
from clustersim.planner.candidates import base
from clustersim.planner.options import Option, Searched, title
from clustersim.planner.robust import robustness
from clustersim.planner.spec import EXACT, PlanFile
from clustersim.planner.verdict import left_over, too_close, verdict
from clustersim.planner.why import alternatives, rule_told, what_limits, why_lost, why_on_front, why_tempting
from clustersim.scenario.reading import Table, override
from clustersim.texts import Plain

Pair = tuple[int, int]
STATES = {
    "simulated": "simulated",
    "memory": "do not fit",
    "limits": "break a limit",
    "bound": "cannot win by their bounds",
    "rough": "cannot win by a rough run",
    "left": "not simulated",
    "error": "cannot be run",
}


def told(plan: PlanFile, found: Searched, path: str | Path = "plan.toml") -> Plain:
    """The whole answer. ``path`` : the plan's file, where relative names in it start.

    Returns a dict: ``verdict``, the answer in a sentence; ``unit`` ("tokens" or "samples"); ``front``, ``tempting`` and
    ``alternatives``, rows as of :func:`row` with ``why``, on the front also the whole ``scenario`` and the plan's
    ``path``; ``warnings``; ``counts`` by what became of options; ``combined``, how many combinations there were;
    ``assumptions``, sentences; ``options``, with ``state`` and ``reason``: every one, of a large space those that came
    to be simulated; ``landscape``, of a split model rows of ``tp``, ``pp`` and ``step_s`` on the fastest one's machine;
    ``robust``, of a robust search, as of :func:`clustersim.planner.robust.robustness`.
    """
    unit = "tokens" if found.tokens else "samples"
    front = [_whole(plan, found, one, path) | {"why": why_on_front(one, found)} for one in found.front]

    @cache
    def lasting(number: int, rate: float) -> float | None:
        return goodput(_whole(plan, found, found.options[number], path), plan, rate)

    robust = robustness(found, None if plan.campaign is None else lasting)
    others = [row(one, found) | {"why": why_lost(one, found)} for one in alternatives(found)]
    tempting = [row(one, found) | {"why": why_tempting(one, found)} for one in found.tempting]
    states = Counter(one.state for one in found.options)
    return {
        "title": plan.title,
        "verdict": verdict(plan, found),
        "unit": unit,
        "front": front,
        "tempting": tempting,
        "alternatives": others,
        "warnings": [*too_close(found), *filter(None, (left_over(found), rule_told(found)))],
        "counts": {words: states[state] for state, words in STATES.items()},
        "combined": found.combined,
        "assumptions": list(assumptions(plan, found)),
        "options": [
            row(one, found) | {"state": one.state, "reason": found.reason(one)}
            for one in found.options
            if len(found.options) <= EXACT or one.state in {"simulated", "rough"}
        ],
        "landscape": list(landscape(found)),
    } | ({"robust": robust} if robust else {})


def _whole(plan: PlanFile, found: Searched, one: Option, path: str | Path) -> Plain:
    """An option's figures with its scenario."""
    per_step = round(one.rate * float(one.result["step_time_s"])) if found.tokens else None
    return row(one, found) | {"scenario": _tables(plan, one), "path": str(path), "tokens_per_step": per_step}


def row(option: Option, found: Searched) -> Plain:
    """One option's figures: ``option``, its name without what all worth having share, and ``in_full``; ``rate``
    [tokens/s or samples/s], ``error`` (relative, of its kind of strategy), ``usd_per_1e9`` and ``kwh_per_1e9`` (None
    where not known), ``days`` and ``usd`` for the plan's tokens."""
    usd, kwh = option.costs.get("usd_per_sample"), option.costs.get("kwh_per_sample")
    return {
        "option": found.title(option),
        "in_full": title(option.candidate),
        "family": option.candidate.form.family,
        "machine": option.candidate.machine.label,
        "nodes": option.candidate.nodes,
        "gpus": option.candidate.gpus,
        "batch": option.candidate.batch,
        "kind": option.candidate.kind,
        "degrees": option.candidate.degrees,
        "limited_by": what_limits(option),
        "stage_bytes": list(option.bound.held) if option.bound else [],
        "rate": option.rate or None,
        "step_s": float(option.result["step_time_s"]) if option.result else None,
        "error": option.error,
        "usd_per_1e9": None if usd is None else usd * 1e9,
        "kwh_per_1e9": None if kwh is None else kwh * 1e9,
        "days": option.days,
        "usd": option.usd,
    }


def landscape(found: Searched) -> Iterator[Plain]:
    """The shortest step of each tp and pp on the fastest option's machine: ``step_s`` [s], None where none fits;
    ``sure``, that it was simulated; ``best``."""
    if not found.split or not found.front:
        return
    chosen = found.front[0].candidate
    known, least = defaultdict[Pair, list[float]](list), defaultdict[Pair, list[float]](list)
    for one in found.options:
        mine = one.candidate
        if (mine.machine, mine.nodes) != (chosen.machine, chosen.nodes) or one.state in {"error", "limits"}:
            continue
        pair = mine.degrees["tp"], mine.degrees["pp"]
        if one.result:
            known[pair].append(float(one.result["step_time_s"]) / mine.batch)
        else:
            least[pair].append(one.bound.step_s / mine.batch if one.bound else math.inf)
    own = chosen.degrees["tp"], chosen.degrees["pp"]
    for pair in sorted({*known, *least}):
        # One that was run is the shortest of its degrees unless another's bound is below it.
        step, bound = min(known[pair], default=math.inf), min(least[pair], default=math.inf)
        sure = step <= bound or pair == own
        shown = (step if sure else bound) * chosen.batch
        fits = math.isfinite(shown)
        yield {"tp": pair[0], "pp": pair[1], "step_s": shown if fits else None, "sure": sure, "best": pair == own}


def _tables(plan: PlanFile, option: Option) -> Table:
    """An option as the tables of a scenario."""
    return override(base(plan), option.candidate.changes)


def assumptions(plan: PlanFile, found: Searched) -> Iterator[str]:
    """What the figures rest on, a sentence each."""
    for machine, known in zip(plan.machines, found.rates, strict=True):
        price = "no price" if known.usd_per_gpu_hour is None else f"{known.usd_per_gpu_hour:g} USD per GPU-hour"
        source = known.sources.get("price", "give usd_per_gpu_hour; until then it is not compared in cost")
        yield f"{machine.label}: {price} ({source})"
        p, sources = known.power, known.sources
        yield (
            f"{machine.label}: {known.limit_w:g} W a GPU, of it {p.compute:.0%} in kernels, {p.communication:.0%} "
            f"while only communicating, {p.idle:.0%} idle; {p.rest_of_machine:.0%} more for the machine; the "
            f"building draws {p.pue:g} x ({sources['compute']}; {sources['rest_of_machine']}; the others are assumed)"
        )
    if found.split:
        yield (
            "a split model's options are first sketched, taken to be within 5% of the whole run; what more than that "
            "is beaten is not run again; those whose whole run is too long are run folded, one replica for all; of "
            "options closer than their error the one with the best worst case is named"
        )
    uncounted = "the input pipeline, failures and checkpoints are" if plan.campaign is None else "the input pipeline is"
    yield f"{ranges.within()}; {uncounted} not counted"


def write(said: Plain, out: str | Path, pictures: Mapping[str, Picture] | None = None) -> None:
    """``plan.json`` in the plan's folder, and pictures beside it, all or none.

    Raises :class:`ClusterSimError` where they cannot be written.
    """
    with output_folder(Path(out)) as folder, together(folder) as path_of:
        path_of("plan.json").write_bytes(json_text(said))
        draw_all(pictures or {}, path_of)
