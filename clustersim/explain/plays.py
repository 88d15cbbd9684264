"""Actions of a pipeline played again: what each waits for, and how long stages idle by the schedule alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TypeAlias

import msgspec
import numpy as np

from clustersim.explain.intervals import BusyTime

Path: TypeAlias = tuple[tuple[int, int], ...]
"""(stage, chunk) that a micro-batch goes through, in order."""
Edges: TypeAlias = tuple[float, float, float, float]

BACK = ("B", "I")
"""Actions that hand a gradient to the stage before."""


class TimedAction(msgspec.Struct, frozen=True, gc=False):
    """One action of one rank; times in seconds."""

    rank: int
    stage: int
    action: str
    microbatch: int
    chunk: int
    start: float
    end: float


def paths(replica: Sequence[TimedAction]) -> dict[int, Path]:
    """Micro-batch -> the stages and chunks it goes through, in the order in which its forwards began."""
    visited: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for a in sorted(replica, key=lambda a: (a.start, a.end)):
        if a.action == "F":
            visited[a.microbatch].append((a.stage, a.chunk))
    return {micro: tuple(places) for micro, places in visited.items()}


def before(a: TimedAction, path: Path) -> tuple[str, int, int] | None:
    """What an action waits for at another place: F or B (of a gradient, an I too), stage, chunk; None for nothing."""
    place = _around(a, path)[0]
    return None if place is None else ("F" if a.action == "F" else "B", *place)


def neighbours(a: TimedAction, path: Path) -> tuple[int, int]:
    """The stages that an action gets its input from and hands its output to; -1 for none, and for its own."""
    source, target = (-1 if place is None or place[0] == a.stage else place[0] for place in _around(a, path))
    return source, target


def _around(a: TimedAction, path: Path) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """Places before and after an action on its micro-batch's way."""
    if a.action not in ("F", *BACK) or (a.stage, a.chunk) not in path:
        return None, None
    position = path.index((a.stage, a.chunk))
    up = path[position - 1] if position else None
    down = path[position + 1] if position + 1 < len(path) else None
    return (up, down) if a.action == "F" else (down, up)


def played(replica: Sequence[TimedAction], seconds: Callable[[TimedAction], float]) -> list[TimedAction]:
    """The same order with other durations and free transfers, every rank as early as it can, from 0."""
    ways = paths(replica)
    timed = []
    free: defaultdict[int, float] = defaultdict(float)
    done: dict[tuple[object, ...], float] = {}
    for a in replica:
        needs = before(a, ways.get(a.microbatch, ()))
        start = max(free[a.rank], done.get((a.microbatch, *needs), 0.0) if needs else 0.0)
        end = start + seconds(a)
        free[a.rank] = end
        done[a.microbatch, "B" if a.action in BACK else a.action, a.stage, a.chunk] = end
        timed.append(TimedAction(a.rank, a.stage, a.action, a.microbatch, a.chunk, start, end))
    return timed


def medians(replica: Sequence[TimedAction]) -> dict[tuple[int, int, str], float]:
    """Median seconds by stage, chunk and action; two that a rank runs at once share the time they have in common."""
    took: defaultdict[tuple[int, int, str], list[float]] = defaultdict(list)
    last: dict[int, TimedAction] = {}
    for a in replica:
        took[a.stage, a.chunk, a.action].append(a.end - a.start)
        if a.rank in last:
            b = last[a.rank]
            shared = max(0.0, min(a.end, b.end) - a.start) / 2
            took[a.stage, a.chunk, a.action][-1] -= shared
            took[b.stage, b.chunk, b.action][-1 - ((a.chunk, a.action) == (b.chunk, b.action))] -= shared
        last[a.rank] = a
    return {key: median(values) for key, values in took.items()}


def pass_medians(replica: Sequence[TimedAction]) -> dict[str, float]:
    """Seconds by action: the median over stages and chunks of what it takes there."""
    return _over_stages(medians(replica))


def _over_stages(own: dict[tuple[int, int, str], float]) -> dict[str, float]:
    kinds = {action for *_, action in own}
    return {k: median(v for (*_, action), v in own.items() if action == k) for k in kinds}


def edges(replica: Sequence[TimedAction]) -> dict[int, Edges]:
    """Stage -> when the replica's first action began, the stage's first backward began, its last forward ended, and
    the replica's last action ended [s]: fill, gaps and drain are between them."""
    first = min(a.start for a in replica)
    last = max(a.end for a in replica)
    turning = {}
    for stage in {a.stage for a in replica}:
        stage_actions = [a for a in replica if a.stage == stage]
        turn = min((a.start for a in stage_actions if a.action in BACK), default=stage_actions[0].start)
        turning[stage] = (
            first,
            turn,
            max(turn, max((a.end for a in stage_actions if a.action == "F"), default=turn)),
            last,
        )
    return turning


def busy_times(replica: Sequence[TimedAction]) -> dict[int, float]:
    """Stage -> seconds in which it runs an action: the first of what :func:`idle_times` says of it."""
    first = min(a.start for a in replica)
    last = max(a.end for a in replica)
    return {stage: busy.within(first, last) for stage, busy in _busy(replica).items()}


def _busy(replica: Sequence[TimedAction]) -> dict[int, BusyTime]:
    """Stage -> when it runs an action."""
    spans: defaultdict[int, list[tuple[float, float]]] = defaultdict(list)
    for a in replica:
        spans[a.stage].append((a.start, a.end))
    return {stage: BusyTime(*np.array(stage_spans).T) for stage, stage_spans in spans.items()}


def idle_times(replica: Sequence[TimedAction]) -> dict[int, tuple[float, float, float, float]]:
    """Stage -> busy, and idle until its first backward, after its last forward ended, and between."""
    idle = {}
    busy = _busy(replica)
    for stage, ends in edges(replica).items():
        within = busy[stage].within
        fill, gaps, drain = (b - a - within(a, b) for a, b in pairwise(ends))
        idle[stage] = within(ends[0], ends[-1]), fill, drain, gaps
    return idle


@dataclass(frozen=True)
class IdealIdle:
    """What a stage's idle time would be with free transfers [s].

    fill, drain, gaps : with equal stages, each action as long as the median stage's. uneven : how much longer it
        idles in all where each stage takes its own medians.
    """

    fill: float
    drain: float
    gaps: float
    uneven: float


def expected(replica: Sequence[TimedAction]) -> dict[int, IdealIdle]:
    """Stage -> what its schedule and its neighbours' work make it idle; see :mod:`clustersim.explain.pipeline`."""
    own = medians(replica)
    equal = _over_stages(own)
    ideal = idle_times(played(replica, lambda a: equal[a.action]))
    apart = idle_times(played(replica, lambda a: own[a.stage, a.chunk, a.action]))
    return {
        stage: IdealIdle(fill, drain, gaps, sum(apart[stage][1:]) - fill - drain - gaps)
        for stage, (_, fill, drain, gaps) in ideal.items()
    }
