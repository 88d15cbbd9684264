"""Two runs side by side: where they differ, worst first. Simulated and measured runs compare alike.

Ops are matched within a step: first by name and how-manieth of that name; of what is left, transfers by kind and order
(a simulated ``all_reduce bucket 3`` and a profiler's third all_reduce of a step), then by the sort of name alone. What
still has no partner is in one run only. Times are per step and per rank that trains, so steps, ranks and warm-up may
differ.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from clustersim.core.arrays import Bools, Columns, Floats, Ints
from clustersim.core.errors import few
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.explain.bounds import left_out
from clustersim.explain.metrics import has_steps, steady_window
from clustersim.explain.per_step import per_step
from clustersim.explain.pieces import workers
from clustersim.explain.transfers import sort_of


@dataclass(frozen=True)
class _OpWork:
    """One op of a step: seconds from start to end, seconds waited before, per rank and step; bytes."""

    name: str
    kind: str
    place: int
    seconds: float
    wait: float
    nbytes: float


class RunDifference(msgspec.Struct, frozen=True):
    """Where two runs differ.

    Parameters
    ----------
    ops : columns with a row per matched or lone op, the largest difference first: ``name_a``, ``name_b`` (empty where a
        run has no such op), ``kind``, ``seconds_a``, ``seconds_b``, ``wait_a``, ``wait_b`` [s per step and rank],
        ``difference_s`` (b less a, waits included), ``nbytes_a``, ``nbytes_b``.
    states : columns ``state``, ``seconds_a``, ``seconds_b``, ``difference_s`` [s per step, mean over ranks].
    step_a, step_b : [s]. text : the sentences. has_steps : whether any of both has steps; a run without them counts
        from its first span to its last as one.
    """

    ops: Columns
    states: Columns
    step_a: float
    step_b: float
    text: list[str]
    has_steps: bool


_OPS = (
    "name_a",
    "name_b",
    "kind",
    "seconds_a",
    "seconds_b",
    "wait_a",
    "wait_b",
    "difference_s",
    "nbytes_a",
    "nbytes_b",
)


def compare(a: Timeline, b: Timeline) -> RunDifference:
    """Where two runs differ."""
    pairs = _matched(_works(a), _works(b))
    nothing = _OpWork("", "", 0, 0.0, 0.0, 0.0)
    rows = [_row(work_a or nothing, work_b or nothing) for work_a, work_b in pairs]
    ops = {name: np.array([row[k] for row in rows]) for k, name in enumerate(_OPS)}
    order = np.argsort(-np.abs(ops["difference_s"]), kind="stable")
    ops = {name: column[order] for name, column in ops.items()}
    states = _states(a, b)
    before, after = (steady_window(run).step_time for run in (a, b))
    without = [name for name, run in (("A", a), ("B", b)) if not has_steps(run)]
    has_any = len(without) < 2
    lost = [f"{name}: {text}" for name, run in (("A", a), ("B", b)) for text in left_out(run)]
    text = [*_ranks_compared(a, b), *lost, *_text(states, before, after, a_step=" a step" if has_any else "")]
    if has_any:
        text += [f"{name} has no steps: from its first span to its last counts as one" for name in without]
    return RunDifference(ops, states, before, after, text, has_any)


def _ranks_compared(a: Timeline, b: Timeline) -> Iterator[str]:
    """What is compared where traces are of some ranks only: of different ones, maybe no two runs but one."""
    seen = [set(workers(run).tolist()) for run in (a, b)]
    partly = [
        run.source != "simulated" and len(ranks) < run.world_size for run, ranks in zip((a, b), seen, strict=True)
    ]
    if not any(partly):
        return
    named = [
        f"{name} has {_ranks_named(sorted(ranks), run)}" for name, ranks, run in zip("AB", seen, (a, b), strict=True)
    ]
    if all(partly) and not seen[0] & seen[1] and a.world_size == b.world_size:
        yield (
            f"{named[0]}, {named[1]}: if both are of one job, ranks of the same steps are compared, not runs, and one "
            "works while the other waits for it; `clustersim explain` of both together tells who waits for whom"
        )
    elif seen[0] != seen[1]:
        yield f"{named[0]}, {named[1]}: other ranks may have other work"


def _ranks_named(ranks: list[int], run: Timeline) -> str:
    """Which ranks of how many a run has.

    ranks : ascending.
    """
    if len(ranks) == run.world_size:
        return f"all {run.world_size:,} ranks"
    return f"rank{'' if len(ranks) == 1 else 's'} {few(ranks, 4)} of {run.world_size:,}"


def _works(run: Timeline) -> list[_OpWork]:
    """What the ranks that train did in a step of the steady state, in the order it began."""
    window = steady_window(run)
    train = workers(run)
    trains = np.zeros(run.world_size, dtype=bool)
    trains[train] = True
    per_rank = 1.0 / (max(len(train), 1) * window.done)
    seconds, wait, first = _sums(run, trains)
    seconds = seconds * per_rank
    wait = wait * per_rank
    steady = set(window.steps.tolist())
    began: dict[int, float] = {}
    for i, op in enumerate(run.ops):
        began[op.step] = min(began.get(op.step, np.inf), float(first[i]))
    merged: dict[tuple[str, str, int], list[Any]] = {}
    uses: defaultdict[tuple[int, str, str], int] = defaultdict(int)
    for i, op in enumerate(run.ops):
        if op.step not in steady or not np.isfinite(first[i]) or not (seconds[i] or wait[i]):
            continue
        use = uses[op.step, op.name, op.role]
        uses[op.step, op.name, op.role] += 1
        entry = merged.setdefault((op.name, op.role, use), [op, 0.0, 0.0, np.inf, use])
        entry[1] += float(seconds[i])
        entry[2] += float(wait[i]) if op.kind != "compute" else 0.0
        entry[3] = min(entry[3], float(first[i]) - began[op.step])
    ordered = sorted(merged.values(), key=lambda entry: entry[3])
    return [_OpWork(op.name, op.kind, use, seconds, wait, op.nbytes) for op, seconds, wait, _, use in ordered]


def _sums(run: Timeline, trains: Bools) -> tuple[Floats, Floats, Floats]:
    """Per op over some ranks: seconds from start to end, seconds from ready to start, and the first start by any."""
    sets, op, set_of, ready, start, end = run._rows()
    n = len(run.ops)
    count = np.array([trains[s].sum() for s in sets], dtype=np.float64)[set_of]
    seconds = np.bincount(op, weights=(end - start) * count, minlength=n).astype(np.float64)
    wait = np.bincount(op, weights=(start - ready) * count, minlength=n).astype(np.float64)
    first = np.full(n, np.inf)
    np.minimum.at(first, op, start)
    for block in run.blocks:
        training = trains[block.ranks]
        seconds[block.op] += float(np.where(training, block.end - block.start, 0.0).sum())
        wait[block.op] += float(np.where(training, block.start - block.ready, 0.0).sum())
        first[block.op] = min(first[block.op], float(block.start.min()))
    return seconds, wait, first


_KEYS: tuple[Callable[[_OpWork], object], ...] = (
    lambda work: (work.name, work.place),
    lambda work: None if work.kind == "compute" else work.kind,
    lambda work: (work.kind, sort_of(work.name)),
)
"""What partners have in common, tried one after another; None has no partner."""


def _matched(works_a: list[_OpWork], works_b: list[_OpWork]) -> list[tuple[_OpWork | None, _OpWork | None]]:
    """Pairs by each of :data:`_KEYS`, in order of time; the rest alone."""
    pairs: list[tuple[_OpWork | None, _OpWork | None]] = []
    left = works_a
    right = works_b
    for key in _KEYS:
        waiting: defaultdict[object, list[_OpWork]] = defaultdict(list)
        for work in right:
            waiting[key(work)].append(work)
        rest = []
        for work in left:
            name = key(work)
            if name is not None and waiting.get(name):
                pairs.append((work, waiting[name].pop(0)))
            else:
                rest.append(work)
        taken = {id(work_b) for _, work_b in pairs}
        left = rest
        right = [work for work in right if id(work) not in taken]
    return pairs + [(work, None) for work in left] + [(None, work) for work in right]


def _row(a: _OpWork, b: _OpWork) -> tuple[str, str, str, float, float, float, float, float, float, float]:
    difference = b.seconds + b.wait - a.seconds - a.wait
    times = a.seconds, b.seconds, a.wait, b.wait, difference
    return a.name, b.name, a.kind or b.kind, *times, a.nbytes, b.nbytes


def _states(a: Timeline, b: Timeline) -> Columns:
    before = per_step(a)
    after = per_step(b)
    names = list(before | after)
    seconds = [np.array([states.get(name, 0.0) for name in names]) for states in (before, after)]
    columns = np.array(names), *seconds, seconds[1] - seconds[0]
    return dict(zip(("state", "seconds_a", "seconds_b", "difference_s"), columns, strict=True))


def _text(states: Columns, before: float, after: float, a_step: str) -> list[str]:
    if before <= 0:
        return []
    if abs(after - before) <= 1e-9 * before:
        return [f"both take {format_time(before)}{a_step or WINDOW}"]
    word = "longer" if after > before else "shorter"
    what = "a step takes" if a_step else f"the window{WINDOW} takes"
    lines = [f"{what} {format_time(before)} in A and {format_time(after)} in B, {abs(after / before - 1):.1%} {word}"]
    for i in np.argsort(-np.abs(states["difference_s"]), kind="stable").tolist():
        change = float(states["difference_s"][i])
        if abs(change) > 1e-3 * before:
            time_a, time_b = (format_time(float(states[f"seconds_{side}"][i])) for side in "ab")
            lines.append(f"{states['state'][i]}: {_signed(change)}{a_step} ({time_a} to {time_b})")
    return lines


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + format_time(abs(seconds))


def sentences(difference: RunDifference, top: int = 10) -> list[str]:
    """The ops that differ most, in words."""
    ops = difference.ops
    per = "a step and rank" if difference.has_steps else "a rank"
    lines = []
    for rows in _like(ops)[:top]:
        change = float(ops["difference_s"][rows].sum())
        name_a = str(ops["name_a"][rows[0]])
        name_b = str(ops["name_b"][rows[0]])
        n = len(rows)
        many = f"{n} ops like " if n > 1 else ""
        if not name_a or not name_b:
            run_name = "A" if name_a else "B"
            took = format_time(abs(change))
            lines.append(f"{many}{(name_a or name_b)!r} {'are' if n > 1 else 'is'} only in {run_name}: {took} {per}")
            continue
        name = repr(name_a) if name_a == name_b else f"{name_a!r} (A), {name_b!r} (B)"
        waits = float((ops["wait_b"] - ops["wait_a"])[rows].sum())
        tail = f", of which waiting for peers {_signed(waits)}" if abs(waits) > 0.01 * abs(change) else ""
        ends = (float((ops[f"seconds_{side}"] + ops[f"wait_{side}"])[rows].sum()) for side in "ab")
        before, after = map(format_time, ends)
        lines.append(f"{many}{name}: {_signed(change)} {per} ({before} to {after}){tail}")
    return lines


WINDOW = " from first span to last"
"""What a run without steps is measured over."""

ROUNDING = 1e-9
"""Differences below this share of all ops' time are no differences."""


def _like(ops: Columns) -> list[Ints]:
    """Rows that differ the same way and are of one sort, as layers of one block are; what differs most first."""
    groups: defaultdict[object, list[int]] = defaultdict(list)
    for i, change in enumerate(ops["difference_s"].tolist()):
        if change:
            sort_a, sort_b = (sort_of(str(ops[name][i])) for name in ("name_a", "name_b"))
            groups[sort_a, sort_b, str(ops["kind"][i]), change > 0].append(i)
    row_sets = [np.array(rows, dtype=np.int64) for rows in groups.values()]
    least = ROUNDING * float(np.abs(ops["seconds_a"]).sum() + np.abs(ops["seconds_b"]).sum())
    row_sets = [rows for rows in row_sets if abs(float(ops["difference_s"][rows].sum())) > least]
    return sorted(row_sets, key=lambda rows: -abs(float(ops["difference_s"][rows].sum())))
