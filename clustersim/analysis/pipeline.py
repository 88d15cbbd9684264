"""Pipelines: what each stage does when, and why it idles. Reads labels and stages of ops, measured or simulated alike.

An *action* is what a rank does with one micro-batch and one of its chunks: F, B, I or W (:mod:`clustersim.label`),
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

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.errors import ProgramError
from clustersim.label import Label
from clustersim.timeline import Timeline, alike

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Path: TypeAlias = tuple[tuple[int, int], ...]
"""(stage, chunk) that a micro-batch goes through, in order."""

WARM = 1.25
"""A leading step longer than this many times the median is warm-up."""
PARTS = ("fill", "drain", "gaps", "imbalance", "other", "outside")
"""What a stage's idle time is made of."""
_BACK = ("B", "I")
"""Actions that hand a gradient to the stage before."""


@dataclass(frozen=True)
class Action:
    """One action of one rank; times in seconds."""

    rank: int
    stage: int
    action: str
    microbatch: int
    chunk: int
    start: float
    end: float


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


def stages(timeline: Timeline) -> tuple[Ints, ...]:
    """Ranks of each stage, ascending; empty where no op has a stage. The k-th of each are a replica of the model.

    Raises :class:`ProgramError` where stages hold different numbers of ranks.
    """
    at = np.array([op.stage for op in timeline.ops], dtype=np.int64)
    if not len(at) or at.max() < 0:
        return ()
    spans = timeline.spans()
    of_rank = np.full(timeline.world_size, -1, dtype=np.int64)
    np.maximum.at(of_rank, spans["rank"], at[spans["op"]])
    found = tuple(np.flatnonzero(of_rank == s) for s in range(int(at.max()) + 1))
    if len({len(ranks) for ranks in found}) > 1:
        raise ProgramError(f"stages hold different numbers of ranks: {', '.join(str(len(r)) for r in found)}")
    return found


def has_pipeline(timeline: Timeline) -> bool:
    """Whether the run has actions of more than one stage."""
    at = {op.stage for op in timeline.ops if op.stage >= 0 and op.label and op.label.action and op.kind == "compute"}
    return len(at) > 1


def windows(timeline: Timeline) -> dict[int, tuple[float, float]]:
    """(begin, end) [s] of each step: from the end of the one before, or its own beginning where that is earlier."""
    times, step = timeline.per_op(), np.array([op.step for op in timeline.ops], dtype=np.int64)
    found, before = {}, 0.0
    for s in dict.fromkeys(step[np.argsort(times["ready"], kind="stable")].tolist()):
        mine = (step == s) & (times["ranks"] > 0)
        if mine.any():
            found[s] = (min(before, float(times["ready"][mine].min())), float(times["end"][mine].max()))
            before = found[s][1]
    return found


def steady(timeline: Timeline) -> list[int]:
    """Steps without the warm-up: leading ones that took :data:`WARM` times the median or more."""
    took = {step: end - begin for step, (begin, end) in windows(timeline).items()}
    usual = float(np.median(list(took.values()))) if took else 0.0
    first = next((i for i, seconds in enumerate(took.values()) if seconds < WARM * usual), 0)
    return list(took)[first:]


def actions(timeline: Timeline, ranks: Sequence[int] | None = None) -> dict[int, list[Action]]:
    """Step -> the actions of these ranks (None: all), by start."""
    spans = timeline.spans(ranks)
    chosen = np.array([bool(o.label and o.label.action) and o.stage >= 0 and o.kind == "compute" for o in timeline.ops])
    inside = chosen[spans["op"]] if len(chosen) else np.zeros(0, dtype=bool)
    ends: dict[tuple[int, int, int, str, int, int], tuple[float, float]] = {}
    columns = (spans[name][inside].tolist() for name in ("rank", "op", "start", "end"))
    for rank, i, start, end in zip(*columns, strict=True):
        op, label = timeline.ops[i], timeline.ops[i].label or Label()
        key = op.step, rank, op.stage, label.action, label.microbatch, label.chunk
        low, high = ends.get(key, (start, end))
        ends[key] = min(low, start), max(high, end)
    _recomputation_joined(ends)
    found: defaultdict[int, list[Action]] = defaultdict(list)
    for (step, rank, stage, action, micro, chunk), (start, end) in ends.items():
        found[step].append(Action(rank, stage, action, micro, chunk, start, end))
    return {step: sorted(found[step], key=lambda a: (a.start, a.end, a.rank)) for step in sorted(found)}


def _recomputation_joined(ends: dict[tuple[int, int, int, str, int, int], tuple[float, float]]) -> None:
    """A forward that is repeated for a backward is a part of it."""
    for key in [key for key in ends if key[3] == "R"]:
        whole = next((k for k in ((*key[:3], letter, *key[4:]) for letter in _BACK) if k in ends), None)
        if whole is not None:
            (a, b), (c, d) = ends.pop(key), ends[whole]
            ends[whole] = min(a, c), max(b, d)


def paths(replica: Sequence[Action]) -> dict[int, Path]:
    """Micro-batch -> the stages and chunks it goes through, in the order in which its forwards began."""
    way: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for a in sorted(replica, key=lambda a: (a.start, a.end)):
        if a.action == "F":
            way[a.microbatch].append((a.stage, a.chunk))
    return {micro: tuple(places) for micro, places in way.items()}


def before(a: Action, way: Path) -> tuple[str, int, int] | None:
    """What an action waits for at another place: F or B (of a gradient, an I too), stage, chunk; None for nothing."""
    place = _around(a, way)[0]
    return None if place is None else ("F" if a.action == "F" else "B", *place)


def neighbours(a: Action, way: Path) -> tuple[int, int]:
    """The stages that an action gets its input from and hands its output to; -1 for none, and for its own."""
    source, target = (-1 if place is None or place[0] == a.stage else place[0] for place in _around(a, way))
    return source, target


def _around(a: Action, way: Path) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Places before and after an action on its micro-batch's way."""
    if a.action not in ("F", *_BACK) or (a.stage, a.chunk) not in way:
        return None, None
    at = way.index((a.stage, a.chunk))
    up, down = (way[at - 1] if at else None), (way[at + 1] if at + 1 < len(way) else None)
    return (up, down) if a.action == "F" else (down, up)


def played(replica: Sequence[Action], seconds: Callable[[Action], float]) -> list[Action]:
    """The same order with other durations and free transfers, every rank as early as it can, from 0."""
    ways, found = paths(replica), []
    free: defaultdict[int, float] = defaultdict(float)
    done: dict[tuple[object, ...], float] = {}
    for a in replica:
        needs = before(a, ways.get(a.microbatch, ()))
        start = max(free[a.rank], done.get((a.microbatch, *needs), 0.0) if needs else 0.0)
        end = start + seconds(a)
        free[a.rank] = end
        done[a.microbatch, "B" if a.action in _BACK else a.action, a.stage, a.chunk] = end
        found.append(Action(a.rank, a.stage, a.action, a.microbatch, a.chunk, start, end))
    return found


def stage_times(timeline: Timeline, steps: Sequence[int] | None = None) -> list[StageTime]:
    """Where the time of each stage goes, mean over some steps; None is the :func:`steady` ones.

    Raises :class:`ProgramError` for a run without stages or without those steps.
    """
    ranks = stages(timeline)
    chosen = steady(timeline) if steps is None else list(steps)
    classes, of_rank = alike(timeline)
    columns = np.stack([of_rank[r] for r in ranks], axis=1) if ranks else np.zeros((0, 0), dtype=np.int64)
    kinds, weights = np.unique(columns, axis=0, return_counts=True) if len(columns) else (columns, np.zeros(0))
    done = actions(timeline, classes.tolist()) if len(columns) else {}
    if not set(chosen) & set(done):
        raise ProgramError("no pipeline here: no op has a stage and is a forward or a backward of a micro-batch")
    told = []
    window = windows(timeline)
    for s in (s for s in chosen if s in done):
        for kind, weight in zip(kinds, weights.tolist(), strict=True):
            members = set(classes[kind].tolist())
            told.append((weight, _of_replica([a for a in done[s] if a.rank in members], window[s])))
    total = sum(weight for weight, _ in told)
    names = [f.name for f in fields(StageTime)][1:]
    return [
        StageTime(s, *(sum(w * getattr(r[s], name) for w, r in told) / total for name in names))
        for s in range(len(ranks))
    ]


def _of_replica(replica: list[Action], window: tuple[float, float]) -> list[StageTime]:
    """Each stage's times in one replica's step."""
    own = _medians(replica)
    kinds = {action for *_, action in own}
    equal = {k: float(np.median([v for (*_, action), v in own.items() if action == k])) for k in kinds}
    seen = _idle(replica)
    ideal = _idle(played(replica, lambda a: equal[a.action]))
    apart = _idle(played(replica, lambda a: own[a.stage, a.chunk, a.action]))
    length = window[1] - window[0]
    found = []
    for stage, (busy, *idle) in seen.items():
        fill, drain, gaps = (min(a, b) for a, b in zip(idle, ideal[stage][1:], strict=True))
        excess = sum(idle) - fill - drain - gaps
        uneven = min(excess, max(0.0, sum(apart[stage][1:]) - fill - drain - gaps))
        outside = length - busy - sum(idle)
        mine = [(action, took) for (at, _, action), took in own.items() if at == stage]
        forward = sum(took for action, took in mine if action == "F")
        backward = sum(took for action, took in mine if action != "F")
        rest = excess - uneven
        found.append(StageTime(stage, busy, fill, drain, gaps, uneven, rest, outside, forward, backward))
    return sorted(found, key=lambda row: row.stage)


def _medians(replica: Sequence[Action]) -> dict[tuple[int, int, str], float]:
    """Median seconds by stage, chunk and action; two that a rank runs at once share the time they have in common."""
    took: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
    last: dict[int, Action] = {}
    for a in replica:
        took[a.stage, a.chunk, a.action].append(a.end - a.start)
        if a.rank in last:
            b = last[a.rank]
            shared = max(0.0, min(a.end, b.end) - a.start) / 2
            took[a.stage, a.chunk, a.action][-1] -= shared
            took[b.stage, b.chunk, b.action][-1 - ((a.chunk, a.action) == (b.chunk, b.action))] -= shared
        last[a.rank] = a
    return {key: float(np.median(values)) for key, values in took.items()}


def _idle(replica: Sequence[Action]) -> dict[int, tuple[float, float, float, float]]:
    """Stage -> busy, and idle until its first backward, after its last forward ended, and between."""
    first, last = min(a.start for a in replica), max(a.end for a in replica)
    found = {}
    for stage in {a.stage for a in replica}:
        mine = [a for a in replica if a.stage == stage]
        spans = _union([(a.start, a.end) for a in mine])
        turn = min((a.start for a in mine if a.action in _BACK), default=mine[0].start)
        over = max(turn, max((a.end for a in mine if a.action == "F"), default=turn))
        edges = first, turn, over, last
        fill, gaps, drain = (b - a - _covered(spans, a, b) for a, b in pairwise(edges))
        found[stage] = _covered(spans, first, last), fill, drain, gaps
    return found


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Disjoint spans that cover the same times."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def _covered(spans: list[tuple[float, float]], begin: float, end: float) -> float:
    return sum(max(0.0, min(b, end) - max(a, begin)) for a, b in spans)
