"""Pipelines: what each stage does when, and why it idles. Reads labels and stages of ops, measured or simulated alike.

An *action* is what a rank does with one micro-batch and one of its chunks: F, B, I or W (:mod:`clustersim.core.label`),
from the first to the last of its kernels. A stage idles when none of its actions runs. Of a step's window

    window = busy + fill + drain + gaps + imbalance + other + outside

``fill``, ``drain`` and ``gaps`` are what the schedule itself must leave idle: the same order of actions, played with
free transfers and *equal stages*, where each action takes the median over stages of what it takes there. In that play
a rank idles ``fill`` until its first backward begins, ``drain`` after its last forward ended, and ``gaps`` between.
With p equal stages 1F1B has ``s F + (p-1-s) B`` and ``(p-1-s) F + s B`` at stage s, together ``(p-1)(F+B)``, as GPipe
has, and no gaps. No more counts than was seen there.

``imbalance`` is the further idle time of a play in which each stage takes its own median: waiting for a slower stage.
If the last of p stages is the slow one, the others wait ``m (F'+B' - F - B)`` over m micro-batches. ``other`` is what
is left between the first and the last action of the replica: actions that took unlike times, transfers, the host.
``outside`` is before the first and after the last: gradients, optimizer. Two actions that a rank runs at once
(DualPipe) are played one after the other, so that their parts are approximate.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import OpInfo, kinds, microbatches, of_each
from clustersim.core.timeline import Timeline, alike
from clustersim.core.units import format_time
from clustersim.explain.columns import did
from clustersim.explain.metrics import warm_up
from clustersim.explain.plays import BACK, TimedAction, busy_times, expected, idle_times, medians

_Name: TypeAlias = tuple[int, int, str, int, int]
"""Step, stage, action, micro-batch, chunk."""

PARTS = ("fill", "drain", "gaps", "imbalance", "other", "outside")
"""What a stage's idle time is made of."""


@dataclass(frozen=True)
class StageTime:
    """Seconds of a step at one stage, means over its ranks; see the module's formula.

    ``forward`` and ``backward`` are what one micro-batch takes there, all chunks together (medians).
    """

    stage: int
    busy: float
    fill: float
    drain: float
    gaps: float
    imbalance: float
    other: float
    outside: float
    forward: float
    backward: float

    @property
    def idle(self) -> float:
        """Everything that is not busy [s]."""
        return self.fill + self.drain + self.gaps + self.imbalance + self.other + self.outside

    @property
    def window(self) -> float:
        """The step [s]."""
        return self.busy + self.idle


@kept_with_first(maxsize=None)
def stages(timeline: Timeline) -> tuple[Ints, ...]:
    """Ranks of each stage, ascending; empty where no op has a stage. The k-th of each are a replica of the model.

    Raises :class:`ProgramError` where stages hold different numbers of ranks.
    """
    stage_of = of_each(timeline.ops, lambda op: op.stage, np.int64)
    if not len(stage_of) or stage_of.max() < 0:
        return ()
    of_rank = np.full(timeline.world_size, -1, dtype=np.int64)
    for s in np.unique(stage_of[stage_of >= 0]).tolist():
        of_rank[did(timeline, stage_of == s)] = s
    rank_sets = tuple(np.flatnonzero(of_rank == s) for s in range(int(stage_of.max()) + 1))
    if len({len(ranks) for ranks in rank_sets}) > 1:
        raise ProgramError(f"stages hold different numbers of ranks: {', '.join(str(len(r)) for r in rank_sets)}")
    return rank_sets


def replicas(timeline: Timeline) -> tuple[Ints, Ints]:
    """(replicas, stages) ranks of those replicas of the model that differ, and how many are alike."""
    ranks, (classes, of_rank) = stages(timeline), alike(timeline)
    if not ranks or not len(ranks[0]):
        return np.zeros((0, 0), dtype=np.int64), np.zeros(0, dtype=np.int64)
    kinds, count = np.unique(np.stack([of_rank[r] for r in ranks], axis=1), axis=0, return_counts=True)
    return classes[kinds], count


def has_pipeline(timeline: Timeline) -> bool:
    """Whether the run has actions of more than one stage."""
    stages = {
        op.stage
        for op in kinds(timeline.ops)
        if op.stage >= 0 and op.label and op.label.action and op.kind == "compute"
    }
    return len(stages) > 1


@kept_with_first(maxsize=None)
def windows(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """(begin, end) [s] of each step: from the end of the one before, or its own beginning where that is earlier."""
    times = timeline.per_op()
    step = timeline.op_steps
    windows = {}
    before = 0.0
    for s in dict.fromkeys(step[np.argsort(times["ready"], kind="stable")].tolist()):
        ran = (step == s) & (times["ranks"] > 0)
        if ran.any():
            windows[s] = (min(before, float(times["ready"][ran].min())), float(times["end"][ran].max()))
            before = windows[s][1]
    return windows


def steady(timeline: Timeline) -> list[int]:
    """Steps without the warm-up (:func:`clustersim.explain.metrics.warm_up`)."""
    took = periods(timeline)
    return list(took)[warm_up(list(took.values())) :]


def periods(timeline: Timeline) -> dict[int, float]:
    """What each step takes [s], as everywhere: from the end of the one before to its own, on the slowest rank. Ranks
    that begin a step while others end the last are in two of :func:`windows`, which add up to more than the run."""
    took = {}
    before = -math.inf
    for step, (begin, end) in windows(timeline).items():
        took[step] = end - max(before, begin)
        before = end
    return took


def actions(
    timeline: Timeline, ranks: Sequence[int] | None = None, steps: Sequence[int] | None = None
) -> dict[int, list[TimedAction]]:
    """Step -> the actions of these ranks (None: all), by start; of these steps (None: all)."""
    wanted = range(timeline.world_size) if ranks is None else sorted(set(ranks))
    of_steps = None if steps is None else tuple(sorted(set(steps)))
    return {step: list(done) for step, done in _actions(timeline, tuple(wanted), of_steps).items()}


@kept_with_first(maxsize=16)
def _actions(timeline: Timeline, ranks: tuple[int, ...], steps: tuple[int, ...] | None) -> dict[int, list[TimedAction]]:
    """Of these ranks, ascending: tables and pictures ask for the first replica's again and again."""
    wanted = np.array(ranks, dtype=np.int64)
    names, of_op = _named(timeline)
    kernels = of_op >= 0
    if steps is not None:
        kernels &= np.isin(timeline.op_steps, steps)
    timed: defaultdict[int, list[TimedAction]] = defaultdict(list)
    for sheet in timeline.sheets(wanted, of_ops=kernels):
        action_of = of_op[sheet.op]
        order = np.argsort(action_of, kind="stable")
        which, first = np.unique(action_of[order], return_index=True)
        if not len(which):
            continue
        begin = dict(zip(which.tolist(), np.minimum.reduceat(sheet.start[:, order], first, axis=1).T, strict=True))
        end = dict(zip(which.tolist(), np.maximum.reduceat(sheet.end[:, order], first, axis=1).T, strict=True))
        _recomputation_joined(names, begin, end)
        for name in begin:
            step, stage, action, micro, chunk = names[name]
            for rank, start, stop in zip(sheet.ranks.tolist(), begin[name].tolist(), end[name].tolist(), strict=True):
                timed[step].append(TimedAction(rank, stage, action, micro, chunk, start, stop))
    return {step: sorted(timed[step], key=lambda a: (a.start, a.end, a.rank)) for step in sorted(timed)}


@kept_with_first(maxsize=None)
def _named(timeline: Timeline) -> tuple[list[_Name], Ints]:
    """What actions there are, and which of them each op is a kernel of; -1 for none."""
    numbers: dict[tuple[int, int, str, int], int] = {}

    def number(op: OpInfo) -> int:
        """Of what an op is of, but for the micro-batch."""
        if op.kind != "compute" or op.stage < 0 or op.label is None or not op.label.action:
            return -1
        return numbers.setdefault((op.step, op.stage, op.label.action, op.label.chunk), len(numbers))

    of_op = of_each(timeline.ops, number, np.int64)
    named = np.flatnonzero(of_op >= 0)
    part, micro = of_op[named], microbatches(timeline.ops)[named]
    _, first, which = np.unique((micro + 1) * len(numbers) + part, return_index=True, return_inverse=True)
    order = np.argsort(first)  # as they come first
    of_op[named] = np.argsort(order)[which.reshape(-1)]
    parts = list(numbers)
    pairs = zip(part[first[order]].tolist(), micro[first[order]].tolist(), strict=True)
    return [(*parts[k][:3], microbatch, parts[k][3]) for k, microbatch in pairs], of_op


def _recomputation_joined(names: list[_Name], begin: dict[int, Floats], end: dict[int, Floats]) -> None:
    """A forward that is repeated for a backward is a part of it."""
    index_of = {names[i]: i for i in begin}
    for name in [name for name in index_of if name[2] == "R"]:
        partner = next(
            (index_of[n] for n in ((*name[:2], letter, *name[3:]) for letter in BACK) if n in index_of), None
        )
        if partner is not None:
            begin[partner] = np.minimum(begin[partner], begin.pop(index_of[name]))
            end[partner] = np.maximum(end[partner], end.pop(index_of[name]))


def of_ranks(done: list[TimedAction], ranks: Ints) -> list[TimedAction]:
    """Those of some ranks, in the same order."""
    members = set(ranks.tolist())
    return [action for action in done if action.rank in members]


def by_replica(done: list[TimedAction], replicas: Ints) -> list[list[TimedAction]]:
    """Those of each of some replicas, (replicas, stages) ranks, in the same order."""
    replicas_of: defaultdict[int, list[int]] = defaultdict(list)  # a rank may stand for others in several
    for k, members in enumerate(replicas.tolist()):
        for rank in members:
            replicas_of[rank].append(k)
    of_each_replica: list[list[TimedAction]] = [[] for _ in replicas]
    for action in done:
        for k in replicas_of.get(action.rank, ()):
            of_each_replica[k].append(action)
    return of_each_replica


def stage_times(timeline: Timeline, steps: Sequence[int] | None = None) -> list[StageTime]:
    """Where the time of each stage goes, mean over some steps; None is the :func:`steady` ones.

    Raises :class:`ProgramError` for a run without stages or without those steps.
    """
    window = windows(timeline)
    weighted = [(weight, _of_replica(done, window[s])) for weight, s, done in _weighted(timeline, steps)]
    total = sum(weight for weight, _ in weighted)
    names = [f.name for f in fields(StageTime)][1:]
    return [
        StageTime(s, *(sum(w * getattr(r[s], name) for w, r in weighted) / total for name in names))
        for s in range(len(weighted[0][1]))
    ]


@kept_with_first(maxsize=None)
def busy_seconds(timeline: Timeline) -> list[float]:
    """:attr:`StageTime.busy` of each stage, of the :func:`steady` steps; raises as :func:`stage_times`."""
    weighted = [(weight, busy_times(done)) for weight, _, done in _weighted(timeline, None)]
    total = sum(weight for weight, _ in weighted)
    return [sum(w * busy[s] for w, busy in weighted) / total for s in sorted(weighted[0][1])]


def _weighted(timeline: Timeline, steps: Sequence[int] | None) -> list[tuple[int, int, list[TimedAction]]]:
    """How many replicas one stands for, a step, and what it did there."""
    chosen = steady(timeline) if steps is None else list(steps)
    kinds, weights = replicas(timeline)
    done = actions(timeline, alike(timeline)[0].tolist()) if len(kinds) else {}
    if not set(chosen) & set(done):
        raise ProgramError("no pipeline here: no op has a stage and is a forward or a backward of a micro-batch")
    weighted = []
    for s in (s for s in chosen if s in done):
        weighted += [(weight, s, own) for weight, own in zip(weights.tolist(), by_replica(done[s], kinds), strict=True)]
    return weighted


def _of_replica(replica: list[TimedAction], window: tuple[float, float]) -> list[StageTime]:
    own = medians(replica)
    ideals = expected(replica)
    length = window[1] - window[0]
    rows = []
    for stage, (busy, *idle) in idle_times(replica).items():
        ideal = ideals[stage]
        fill, drain, gaps = (min(a, b) for a, b in zip(idle, (ideal.fill, ideal.drain, ideal.gaps), strict=True))
        excess = sum(idle) - fill - drain - gaps
        uneven = min(excess, max(0.0, ideal.uneven + ideal.fill + ideal.drain + ideal.gaps - fill - drain - gaps))
        outside = length - busy - sum(idle)
        stage_actions = [(action, took) for (action_stage, _, action), took in own.items() if action_stage == stage]
        forward = sum(took for action, took in stage_actions if action == "F")
        backward = sum(took for action, took in stage_actions if action != "F")
        rest = excess - uneven
        rows.append(StageTime(stage, busy, fill, drain, gaps, uneven, rest, outside, forward, backward))
    return sorted(rows, key=lambda row: row.stage)


SLOW = 1.05
"""A stage that takes this many times the others' median is named as slow."""
LITTLE = 0.01
"""Shares of a step below this are not told."""


def slowest(rows: Sequence[StageTime]) -> tuple[int, float, float]:
    """The stage with the most work, and how many times the others' median its forward and its backward take."""
    if len(rows) < 2:
        return (rows[0].stage, 1.0, 1.0) if rows else (-1, 1.0, 1.0)
    worst = max(rows, key=lambda row: row.forward + row.backward)
    rest_rows = [row for row in rows if row is not worst]
    forward, backward = (float(np.median([getattr(r, name) for r in rest_rows])) for name in ("forward", "backward"))
    return worst.stage, worst.forward / (forward or 1.0), worst.backward / (backward or 1.0)


def sentences(rows: Sequence[StageTime]) -> list[str]:
    """Why the stages idle, the largest cause first."""
    if not rows:
        return []
    stage, forward, backward = slowest(rows)
    worst = next(row for row in rows if row.stage == stage)
    rest_rows = [row for row in rows if row is not worst]
    mid = float(np.median([row.forward + row.backward for row in rest_rows])) if rest_rows else 0.0
    share = {
        name: float(np.mean([getattr(row, name) / row.window for row in rest_rows or rows]))
        for name in ("idle", *PARTS)
    }
    lines = [_slow(worst, mid, forward, backward, share)] if rest_rows else []
    bubble = share["fill"] + share["drain"] + share["gaps"]
    parts = [f"{name} {share[name]:.1%}" for name in ("fill", "drain", "gaps") if share[name] > LITTLE]
    lines.append(
        f"this schedule leaves {bubble:.1%} of a step idle with equal stages too ({', '.join(parts) or 'all small'}); "
        "more micro-batches make it a smaller share"
    )
    if share["other"] > LITTLE:
        lines.append(f"{share['other']:.1%} is uneven time of single actions, transfers and the host between actions")
    if share["outside"] > LITTLE:
        lines.append(f"{share['outside']:.1%} is before the first or after the last action: gradients, optimizer, host")
    return lines


def _slow(worst: StageTime, mid: float, forward: float, backward: float, share: dict[str, float]) -> str:
    work = worst.forward + worst.backward
    if mid <= 0 or work < SLOW * mid:
        return f"stages take the same time within {work / mid - 1 if mid > 0 else 0:.1%}: no stage waits for a slow one"
    return (
        f"stage {worst.stage} is the slowest: its forward and backward take {forward:.2f} and {backward:.2f} times the "
        f"others' ({format_time(work)} against {format_time(mid)} a micro-batch); the others idle {share['idle']:.1%} "
        f"of a step, {share['imbalance']:.1%} of a step only because they wait for stage {worst.stage}"
    )
