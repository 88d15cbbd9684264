"""What a chart of a Timeline has rows for: which ranks, which of their streams, and what each does when."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from clustersim.app.plots.intervals import minus
from clustersim.app.plots.style import palette
from clustersim.core.arrays import Bools, Columns, Floats
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import kinds, of_each
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import OpInfo, Timeline

"""As :meth:`clustersim.core.timeline.Timeline.spans` gives them."""

MAX_STREAMS = 6
"""Rows of a rank in a chart."""


def stream_rows(timeline: Timeline, spans: Columns, ranks: Iterable[int]) -> dict[int, list[tuple[str, str]]]:
    """(stream, label) of the rows of each rank: streams that do something, compute first, the busiest few of many."""
    streams = list(dict.fromkeys(op.stream for op in kinds(timeline.ops)))
    number = {name: i for i, name in enumerate(streams)}
    of_op = of_each(timeline.ops, lambda op: number[op.stream], np.int64)
    rows: dict[int, list[tuple[str, str]]] = {}
    for rank in ranks:
        on_rank = spans["rank"] == rank
        which = of_op[spans["op"][on_rank]]
        took = (spans["end"] - spans["start"])[on_rank]
        waits = (spans["end"] - spans["ready"])[on_rank]
        busy = np.bincount(which, weights=took, minlength=len(streams))
        seen = np.bincount(which, weights=waits, minlength=len(streams)) > 0
        order = _one_of_each_sort([streams[i] for i in np.argsort(-busy, kind="stable").tolist() if seen[i]])
        shown = sorted(order[:MAX_STREAMS], key=lambda name: (name != COMPUTE_STREAM, name))
        more = len(order) - len(shown)
        rows[rank] = [(name, name) for name in shown]
        if more:
            rows[rank][-1] = (shown[-1], f"{shown[-1]} (+{more} not shown)")
    return rows


def _one_of_each_sort(names: list[str]) -> list[str]:
    """The first of every sort (names alike but for numbers), then the second of every sort..., in the order given."""
    turn: dict[str, int] = {}
    seen: dict[str, int] = {}
    for name in names:
        sort = re.sub(r"\d+", "#", name)
        turn[name] = seen[sort] = seen.get(sort, -1) + 1
    return sorted(names, key=turn.__getitem__)


def who(rank: int, remarks: dict[int, str]) -> str:
    """A rank, and what is remarkable about it."""
    return f"rank {rank} ({remarks[rank]})" if remarks[rank] else f"rank {rank}"


def row_intervals(timeline: Timeline, spans: Columns, rank: int, stream: str) -> dict[str, tuple[Floats, Floats]]:
    """What one stream of a rank does: (starts, ends) [s] by phase, with ``stall`` for its waits."""
    on_rank = spans["rank"] == rank
    chosen = on_rank & on_stream(timeline, stream)[spans["op"]]
    start, end, ready, op = (spans[name][chosen] for name in ("start", "end", "ready", "op"))
    phases = phases_of(timeline)[op]
    intervals = {}
    for phase in dict.fromkeys(phases.tolist()):
        own = of_phase(timeline, phase)[op]
        intervals[phase] = start[own], end[own]
    talks = of_phase(timeline, "communication")[op]
    waits = ready[talks], start[talks]
    if stream == COMPUTE_STREAM:
        talking = of_each(timeline.ops, lambda op: op.kind != "compute", np.bool_)[spans["op"]] & on_rank
        exposed = minus((spans["ready"][talking], spans["end"][talking]), (start, end))
        waits = np.concatenate([waits[0], exposed[0]]), np.concatenate([waits[1], exposed[1]])
    return intervals | {"stall": waits}


@kept_with_first(maxsize=None)
def on_stream(timeline: Timeline, stream: str) -> Bools:
    """(n_ops,) bool: whether an op is on a stream."""
    return of_each(timeline.ops, lambda op: op.stream == stream, np.bool_)


@kept_with_first(maxsize=None)
def of_phase(timeline: Timeline, phase: str) -> Bools:
    """(n_ops,) bool: whether an op has a phase's colour."""
    return of_each(timeline.ops, lambda op: phase_of(op) == phase, np.bool_)


@kept_with_first(maxsize=None)
def phases_of(timeline: Timeline) -> npt.NDArray[np.str_]:
    """(n_ops,) str: :func:`phase_of` each op."""
    return of_each(timeline.ops, phase_of, np.str_)


def phase_of(op: OpInfo) -> str:
    """Whose colour an op has."""
    return "communication" if op.kind != "compute" else op.phase if op.phase in palette else "other"
