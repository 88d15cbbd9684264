"""Where a step of a split model went, in sentences: who waits for whom and why, and what the schedule itself costs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from clustersim.core.errors import ScenarioError
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import each_kind, microbatches
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain import pipeline
from clustersim.explain.plays import pass_medians, paths
from clustersim.explain.where import WORDS, StageSeconds
from clustersim.training.schedules import SCHEDULES
from clustersim.training.schedules.base import UNIT, PassCosts, Schedule

LITTLE = 0.005
"""Shares of a step below this are told together, as the rest."""
HEAVY = 0.5
"""A unit that costs this many layers more or less than one is worth its name."""

ALIKE = 1.2
"""Layers whose costs differ by less than this factor are alike, and so a measure for what is none."""

_Pass: TypeAlias = tuple[str, int, int]
"""Action, micro-batch and chunk."""


@dataclass(frozen=True)
class StepLoss:
    """One way in which a step is longer than its compute: its share of the step, and why, after "because".

    ``key`` : what a remedy is told by: a part of the bubble (``schedule`` for what the schedule itself leaves idle), or
    ``exposed`` and a dimension; empty where none is known.
    """

    share: float
    why: str
    key: str = ""


@dataclass(frozen=True)
class LossRemedy:
    """What was tried against a loss (``key`` of :class:`StepLoss`), in words, and what share of the time per sample it
    saves. ``shrinks`` : what part of the time it works on it takes away, 1 where that is not known: a link twice as
    wide takes half, so that twice its saving is what links can give back. ``bounded`` : it saves no more, and was not
    run again.
    """

    key: str
    what: str
    saving: float
    shrinks: float = 1.0
    bounded: bool = False

    @property
    def most(self) -> float:
        """The share of the time per sample that can be had back."""
        return max(0.0, self.saving) / self.shrinks


def losses(timeline: Timeline, rows: Sequence[StageSeconds]) -> list[StepLoss]:
    """Every loss of a split model, the largest first. ``rows``: of :func:`clustersim.explain.where.where`."""
    row = rows[0]
    step_losses = list(_bubbles(timeline, rows))
    for dim, seconds in row.exposed.items():
        step_losses.append(
            StepLoss(seconds / row.step, f"nothing hides the transfers of {_over(dim)}", f"exposed {dim}")
        )
    for dim, seconds in row.waiting.items():
        uneven = ", whose experts' loads differ" if dim == "EP" else ""
        step_losses.append(StepLoss(seconds / row.step, f"ranks wait for a late peer of {_over(dim)}{uneven}"))
    return sorted(step_losses, key=lambda loss: -loss.share)


def bubble_sentence(timeline: Timeline, rows: Sequence[StageSeconds]) -> str:
    """The bubble, part by part, but for what a late host costs; empty for a run without one."""
    bubbles = sorted(_bubbles(timeline, rows), key=lambda loss: -loss.share)
    bubbles = [loss for loss in bubbles if loss.key != "host"]  # a cause of its own says more of it
    texts = [f"{loss.share:.1%} because {loss.why}" for loss in bubbles if loss.share >= LITTLE]
    whole = sum(loss.share for loss in bubbles)
    return f"Bubble, {whole:.1%} of a step in the mean over stages: {'; '.join(texts)}." if texts else ""


def shares(row: StageSeconds, compute: dict[str, float], host: float) -> str:
    """The step in its groups, each with its parts. ``compute``: shares of what the compute is bound by.

    ``host``: share of the state, in which loading input is, as everywhere beside the other states.
    """
    printed = {name: share for name, share in compute.items() if share >= LITTLE}
    texts = [f"{name} {share:.1%}" for name, share in printed.items()]
    groups = sorted((row.groups | {"other": host * row.step}).items(), key=lambda pair: -pair[1])
    for key, seconds in groups:
        if key == "compute" or seconds < LITTLE * row.step:
            continue
        parts = getattr(row, key) if key not in {"other", "unseen"} else {}
        printed[key] = seconds / row.step
        inside = ", ".join(_parts_told({n: s / row.step for n, s in parts.items()}, printed[key]))
        name = "host" if key == "other" else WORDS[key]
        texts.append(f"{name} {printed[key]:.1%}" + (f" ({inside})" if inside else ""))
    return f"{', '.join([*texts, *rest(printed.values())])}, of a {format_time(row.step)} step"


def rest(printed: Iterable[float], total: float = 1.0) -> list[str]:
    """What stands behind shares that are ``printed``, so that all add up to the ``total`` as they are printed; nothing
    where they do.

    >>> rest([0.5, 0.4]), rest([0.7, 0.2999]), rest([0.017], 0.0174)
    (['rest 10.0%'], [], [])
    """
    tenths = _tenths(total) - sum(map(_tenths, printed))
    return [f"rest {tenths / 1000:.1%}"] if tenths > 0 else []


def _tenths(share: float) -> int:
    """A share as it is printed, in tenths of a percent."""
    return round(1000 * share)


def _parts_told(shares: dict[str, float], total: float) -> list[str]:
    """Parts of a group worth a word, and what the others are together; none where none is."""
    printed = {name: share for name, share in shares.items() if share >= LITTLE}
    texts = [f"{name} {share:.1%}" for name, share in printed.items()]
    return texts + rest(printed.values(), total) if printed else []


def _over(dim: str) -> str:
    return "the step's end" if dim == "step end" else "data parallelism" if dim == "DP" else dim


def _bubbles(timeline: Timeline, rows: Sequence[StageSeconds]) -> Iterator[StepLoss]:
    row = rows[0]
    share = {name: seconds / row.step for name, seconds in row.bubble.items()}
    if share.get("imbalance", 0.0) > 0:
        yield StepLoss(share["imbalance"], waits_for(timeline, rows[1:]), "imbalance")
    itself = sum(share.get(name, 0.0) for name in ("fill", "drain", "gaps"))
    if itself > 0:
        yield StepLoss(itself, _of_schedule(timeline, rows), "schedule")
    if share.get("uneven", 0.0) > 0:
        yield StepLoss(share["uneven"], "single passes took longer than the others, or messages were on their way")
    if share.get("host", 0.0) > 0:
        yield StepLoss(share["host"], f"the other stages wait for the host of stage {_late_host(rows[1:])}", "host")
    if share.get("tail", 0.0) > 0:
        yield StepLoss(share["tail"], "stages that are done wait for the others' gradients and optimizer")


def _late_host(stages: Sequence[StageSeconds]) -> int:
    """The stage whose host takes longest."""
    return max(stages, key=lambda row: row.other).stage


def waits_for(timeline: Timeline, stages: Sequence[StageSeconds]) -> str:
    """Who waits for the slowest stage, and what that one has more."""
    busy = [row.step - row.unseen - sum(row.bubble.values()) for row in stages]
    if any("host" in row.bubble for row in stages):  # a late host, and peers that wait for it, make no pass longer
        busy = [row.forward + row.backward for row in pipeline.stage_times(timeline)]
    slow = int(np.argmax(busy))
    waiting_stages = [row.stage for row in stages if row.bubble.get("imbalance", 0.0) >= LITTLE * row.step]
    who = f"stage {waiting_stages[0]} waits" if len(waiting_stages) == 1 else "the other stages wait"
    return f"{who} for stage {slow}, {_what_is_slow(timeline, slow, busy)}"


def _what_is_slow(timeline: Timeline, slow: int, busy: Sequence[float]) -> str:
    """Why a stage takes longest: a unit that costs several layers, more layers, or slower passes."""
    cost = unit_costs(timeline)
    slow_costs = cost.get(slow, {})
    layers = [c for units in cost.values() for name, c in units.items() if _is_layer(name)]
    layer = float(np.median(layers or [0.0]))
    if layer > 0 and max(layers) < ALIKE * min(layers):
        heavy = max((name for name in slow_costs if not _is_layer(name)), key=lambda name: slow_costs[name], default="")
        if heavy and slow_costs[heavy] > HEAVY * layer:
            return f"whose {heavy} costs {slow_costs[heavy] / layer:.1f} layers"
        count = {stage: sum(map(_is_layer, units)) for stage, units in cost.items()}
        usual = Counter(n for stage, n in count.items() if stage != slow).most_common(1)[0][0]
        if count[slow] > usual:
            return f"which has {count[slow]} layers where others have {usual}"
    median_busy = float(np.median([seconds for stage, seconds in enumerate(busy) if stage != slow]))
    if median_busy <= 0:
        return "the slowest"
    longer = busy[slow] / median_busy
    return f"which is busy {longer:.2f} times as long as they are" if longer >= 1.005 else "which is hardly busier"


def _is_layer(name: str) -> bool:
    """Whether a unit is one of many alike, which have numbers."""
    return name.rpartition(".")[2].isdigit()


@kept_with_first(maxsize=None)
def unit_costs(timeline: Timeline) -> dict[int, dict[str, float]]:
    """Stage -> unit -> seconds of compute that one micro-batch takes there on one rank, all its passes together."""
    took: defaultdict[tuple[int, str, str], float] = defaultdict(float)
    times = timeline.per_op()
    microbatch = microbatches(timeline.ops).tolist()
    forwards = ((i, op) for i, op in each_kind(timeline.ops) if op.label and op.label.action == "F")
    passes = {(op.stage, op.step, microbatch[i]) for i, op in forwards}
    count = Counter(stage for stage, *_ in passes)
    all_seconds, all_ranks = times["seconds"].tolist(), times["ranks"].tolist()
    for i, op in each_kind(timeline.ops):
        seconds, ranks = all_seconds[i], all_ranks[i]
        if op.kind == "compute" and op.label is not None and op.label.action and op.label.unit and ranks:
            took[op.stage, op.label.unit, op.role] += seconds / ranks
    costs: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for (stage, unit, _), seconds in took.items():  # of several roles at one stage, the busiest
        if count[stage]:
            costs[stage][unit] = max(costs[stage].get(unit, 0.0), seconds / count[stage])
    return dict(costs)


def _of_schedule(timeline: Timeline, rows: Sequence[StageSeconds]) -> str:
    """What the schedule leaves idle, beside the formula where its order has one."""
    row = rows[0]
    busy = _passes_of_a_stage(timeline)
    seconds = sum(row.bubble.get(name, 0.0) for name in ("fill", "drain", "gaps"))
    parts = ", ".join(
        f"{name} {format_time(row.bubble[name])}"
        for name in ("fill", "drain", "gaps")
        if row.bubble.get(name, 0.0) >= LITTLE * seconds
    )
    share = f"{seconds / busy:.1%} of a stage's forwards and backwards alone"
    sentence = f"the schedule has to fill and drain the pipeline: {parts} in the mean over stages, {share}"
    formula = ideal_bubble(timeline)
    if formula is None:
        return sentence + _of_split_backward(timeline)
    p, v, m = formula
    chunks = f"({v} x {m})" if v > 1 else f"{m}"
    return f"{sentence}, and (p-1)/{'vm' if v > 1 else 'm'} = {p - 1}/{chunks} is {(p - 1) / (v * m):.1%}"


def _of_split_backward(timeline: Timeline) -> str:
    """Beside what a schedule that splits backward leaves idle, the formula of its paper; empty where none is stated.

    It is of passes that take alike (F = I = W), as papers state it: 3 passes of each chunk and micro-batch.
    """
    known = split_backward(timeline)
    if known is None:
        return ""
    row, p, v, m = known
    idle = row.bubble(p, v, m, UNIT) if row.bubble is not None else None
    if idle is None:
        return ""
    passes = f"(3 x {v} x {m})" if v > 1 else f"(3 x {m})"
    return f", where its formula has {idle:g}/{passes}, {idle / (3 * v * m):.1%}, if F, I and W take alike"


@kept_with_first(maxsize=None)
def split_backward(timeline: Timeline) -> tuple[Schedule, int, int, int] | None:
    """The schedule that splits backward whose order this run kept, searched for passes that take alike or as long as
    they do in this run: with its stages, the chunks of each and its micro-batches; None for any other."""
    ranks = [int(r[0]) for r in pipeline.stages(timeline)]
    done = pipeline.actions(timeline, ranks)
    last = done[max(done)]
    if "W" not in {a.action for a in last}:
        return None
    p, v, m = len(ranks), 1 + max(a.chunk for a in last), len({a.microbatch for a in last})
    seen = [[(a.action, a.microbatch, a.chunk) for a in last if a.rank == rank] for rank in ranks]
    took = pass_medians(pipeline.of_ranks(last, np.array(ranks)))
    costs = PassCosts(took.get("F", 0.0), took.get("I", 0.0), took["W"])
    for row in SCHEDULES.values():
        searched = any(option.name == "costs" for option in row.options)
        options: list[dict[str, PassCosts]] = [{}, {"costs": costs}] if searched else [{}]
        if row.splits_backward and any(_order_of(row, p, v, m, option) == seen for option in options):
            return row, p, v, m
    return None


def _order_of(row: Schedule, p: int, v: int, m: int, options: Mapping[str, PassCosts]) -> list[list[_Pass]] | None:
    """Each rank's actions, micro-batches and chunks; None where a schedule is not for so many."""
    try:
        orders = row.order(p, v, m, **options)
    except ScenarioError:
        return None
    return [[(a.kind, a.microbatch, a.chunk) for slot in order for a in slot] for order in orders]


def _passes_of_a_stage(timeline: Timeline) -> float:
    """Seconds of a step that a stage's forwards and backwards take, the median over stages.

    The m(F + B) that formulas divide a bubble by: the optimizer, the host and messages between stages are not of it.
    """
    return float(np.median(pipeline.busy_seconds(timeline)))


@kept_with_first(maxsize=None)
def ideal_bubble(timeline: Timeline) -> tuple[int, int, int] | None:
    """(p, v, m): stages, chunks of each and micro-batches, of a schedule whose bubble is (p-1)/(vm) of the work.

    None where backward is split, chunks do not go round in a loop, or a step has fewer micro-batches than stages and
    more than one chunk.
    """
    ranks = [int(r[0]) for r in pipeline.stages(timeline)]
    done = pipeline.actions(timeline, ranks)
    last = done[max(done)]
    p = len(ranks)
    m = len({a.microbatch for a in last})
    if {a.action for a in last} != {"F", "B"}:
        return None
    ways = {tuple(stage for stage, _ in path) for path in paths(last).values()}
    path = ways.pop()
    v = len(path) // p
    return (p, v, m) if not ways and path == tuple(range(p)) * v and (v == 1 or m >= p) else None
