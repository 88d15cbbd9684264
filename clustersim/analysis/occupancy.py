"""What every rank's streams do, in seconds: computing, transferring, waiting for a peer, and how much of it is exposed.

Time in which any of some spans is open is the length of their union: from the first begin to the last end, less the
gaps; and a gap opens where a span begins, in order of begins, after the latest end of those before it. That is a
running maximum over a table of ranks x spans. What is open beside something else follows from unions too: transfers
that run while nothing computes are what they add to its union.

Most spans begin where another ends, and then they share a :class:`~clustersim.blocks.Column`: a chain of them
is one interval, on whatever many ranks, and nobody looks at the moments in between.
"""

from __future__ import annotations

from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt

from clustersim.analysis.columns import OpColumns
from clustersim.blocks import Block, Column
from clustersim.program import COMPUTE_STREAM
from clustersim.sheets import Part, Sheet, stacked
from clustersim.timeline import Timeline

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]

STATES = ("compute_s", "communication_s", "peer_wait_s", "exposed_communication_s", "exposed_transfer_s")
"""What is told of a rank; as in :func:`clustersim.analysis.metrics.summary`."""

AT_ONCE = 2**19
"""Intervals in a table."""

UNIONS = (("compute", "start"), ("talk", "start"), ("talk", "ready"), ("both", "start"), ("both", "ready"))
"""Whose spans, and where those that communicate begin: their length is all that is asked for."""


def is_compute(run: Timeline) -> Bools:
    """(n_ops,) whether an op keeps the compute stream busy. A measured run may name its streams otherwise: then any
    compute op does."""
    compute = np.array([op.kind == "compute" for op in run.ops], dtype=bool)
    usual = np.array([op.stream == COMPUTE_STREAM for op in run.ops], dtype=bool)
    return compute & usual if usual.any() else compute


def occupancy(run: Timeline, ranks: Ints, begin: float = -np.inf, end: float = np.inf) -> dict[str, Floats]:
    """Seconds each of ``ranks`` (ascending) spends in each of :data:`STATES` between two times [s]."""
    computing, talking = is_compute(run), np.array([op.kind != "compute" for op in run.ops], dtype=bool)
    of = {"compute": computing, "talk": talking, "both": computing | talking}
    chosen = {whose: mask.tolist() for whose, mask in of.items()}
    waits: dict[str, list[bool] | None] = {"start": None, "ready": talking.tolist()}
    length = np.zeros((len(UNIONS), len(ranks)))
    chains: dict[tuple[int, int], tuple[list[Column], list[Column]]] = {}
    for part in run.shelf.parts(ranks, AT_ONCE):
        at = np.searchsorted(ranks, part.ranks)
        for u, (whose, since) in enumerate(UNIONS):
            for _, blocks in part.held:
                if (id(blocks), u) not in chains:
                    chains[id(blocks), u] = _chains(blocks, chosen[whose], waits[since])
            tables = [_rows(part, of[whose], talking, since)] if part.rows is not None else []
            for places, blocks in part.held:
                if (columns := chains[id(blocks), u])[0]:
                    tables.append((stacked(columns[0], places), stacked(columns[1], places)))
            if tables:
                left, right = (np.concatenate(c, axis=1) if len(c) > 1 else c[0] for c in zip(*tables, strict=True))
                length[u, at] = covered(_inside(left, begin, end), _inside(right, begin, end))
    compute, transfer, active, beside, around = length
    return {
        "compute_s": compute,
        "communication_s": transfer,
        "peer_wait_s": np.maximum(active - transfer, 0.0),
        "exposed_communication_s": np.maximum(around - compute, 0.0),
        "exposed_transfer_s": np.maximum(beside - compute, 0.0),
    }


def _chains(blocks: list[Block], chosen: list[bool], waiting: list[bool] | None) -> tuple[list[Column], list[Column]]:
    """Columns of begins and of ends of some blocks, those that follow each other without a gap as one; the ops
    ``waiting`` begin when they are ready."""
    begins: list[Column] = []
    ends: list[Column] = []
    last: dict[int, int] = {}
    for block in blocks:
        op = block.op
        if chosen[op]:
            begin, end = block.columns[0 if waiting and waiting[op] else 1], block.columns[2]
            at = last.pop(id(begin), -1)
            if at < 0:
                at = len(ends)
                begins.append(begin)
                ends.append(end)
            else:
                ends[at] = end
            last[id(end)] = at
    return begins, ends


def _rows(part: Part, chosen: Bools, talking: Bools, since: str) -> tuple[Floats, Floats]:
    rows = cast(Sheet, part.rows)
    mine = chosen[rows.op]
    begin = np.where(talking[rows.op], rows.ready, rows.start) if since == "ready" else rows.start
    return begin[:, mine], rows.end[:, mine]


def _inside(column: Floats, begin: float, end: float) -> Floats:
    if not column.size or (column.min() >= begin and column.max() <= end):
        return column
    return np.clip(column, begin, end)


def seconds_of_ops(run: Timeline, world: int, begin: float, end: float) -> Floats:
    """(n_ops,) float [s]: time between ``begin`` and ``end`` from each op's start to its end, summed over the first
    ``world`` ranks."""
    ops = run.per_op()
    outside = (ops["start"] < begin) | (ops["end"] > end)
    seconds = np.where((ops["start"] >= end) | (ops["end"] <= begin), 0.0, ops["seconds"])
    some = run.ranks_per_op(world)
    partly = (seconds > 0) & (outside | (some < ops["ranks"]))
    columns = OpColumns(run) if partly.any() else None
    for op in np.flatnonzero(partly).tolist():
        spans = cast(OpColumns, columns).of(op)
        took = np.clip(spans.end, begin, end) - np.clip(spans.start, begin, end)
        seconds[op] = float(took[spans.ranks < world].sum())
    return seconds


def covered(begin: Floats, end: Floats) -> Floats:
    """(k,) length of the union of the intervals in each row of ``begin`` and ``end``, (k, m) [s]."""
    if begin.shape[1] == 0:
        return np.zeros(len(begin))
    if (begin[:, 1:] < begin[:, :-1]).any():
        order = np.argsort(begin, axis=1, kind="stable")  # ops are about in order: little is left to sort
        begin, end = np.take_along_axis(begin, order, axis=1), np.take_along_axis(end, order, axis=1)
    latest = np.maximum.accumulate(end, axis=1)
    gaps = np.maximum(begin[:, 1:] - latest[:, :-1], 0.0).sum(axis=1)
    length: Floats = latest[:, -1] - begin[:, 0] - gaps
    return length
