"""What every rank's streams do, in seconds: computing, transferring, waiting for a peer, and how much of it is exposed.

Time in which any of some spans is open is the length of their union: from the first begin to the last end, less the
gaps; and a gap opens where a span begins, in order of begins, after the latest end of those before it. That is a
running maximum: of thousands of ranks span by span, of few over a table of ranks x spans. What is open beside something
else follows from unions too: transfers that run while nothing computes are what they add to its union.

Most spans begin where another ends, and then they share a :class:`~clustersim.core.blocks.Column`: a chain of them
is one interval, on whatever many ranks, and nobody looks at the moments in between.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.blocks import Column
from clustersim.core.op_infos import of_each
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.sheets import BlockColumns, ColumnGlance, Sheet
from clustersim.core.timeline import OpInfo, Timeline

STATES = (
    "compute_s",
    "communication_s",
    "peer_wait_s",
    "exposed_communication_s",
    "exposed_transfer_s",
    "host_s",
    "loads_s",
)
"""What is told of a rank: some kernel runs, or the host's work holds its stream; some transfer does; none does, but a
collective waits for a peer; no kernel runs while a collective does either; while one is moving; while the host works
and nothing else is open; and what of the first is the host's."""

Spans: TypeAlias = tuple[Ints, Ints]
"""When the same ops begin and end on some ranks: numbers of columns."""

AT_ONCE = 2**24
"""Intervals that are looked at together."""

SWEPT = 256
"""Ranks from which spans are looked at one by one on all of them, sooner than in a table; a part has no fewer, and a
table no more."""

UNIONS = (
    ("compute", "start"),
    ("talk", "start"),
    ("talk", "ready"),
    ("both", "start"),
    ("both", "ready"),
    ("all", "ready"),
    ("loads", "start"),
)
"""Whose spans, and where those that communicate begin: their length is all that is asked for."""


def on_host(op: OpInfo) -> bool:
    """Whether an op that computes is the host's own work, or a copy from or to it."""
    return op.bound == "host" or op.phase in {"memcpy", "input"}


def stays_on_device(op: OpInfo) -> bool:
    """Whether an op is a copy that never leaves the device."""
    return op.phase == "memcpy" and ("DtoD" in op.name or op.name.startswith("Memset"))


def holds_kernels(run: Timeline) -> Bools:
    """(n_ops,) whether an op is the host's and holds the compute stream, as loading a batch does."""
    holding: Bools = is_kernel(run) & of_each(run.ops, lambda op: on_host(op) and not stays_on_device(op), bool)
    return holding


def is_kernel(run: Timeline) -> Bools:
    """(n_ops,) whether an op computes on the device: on the compute stream whatever does, on any other all but the
    host's work."""
    return of_each(run.ops, lambda op: op.kind == "compute" and (op.stream == COMPUTE_STREAM or not on_host(op)), bool)


def whole_window(run: Timeline) -> float:
    """Seconds from the first span to the last, waiting for others and for a stream included."""
    return float(run.makespan - min(run.row_ready.min(), run.row_start.min()))


def occupancy(run: Timeline, ranks: Ints, begin: float = -np.inf, end: float = np.inf) -> dict[str, Floats]:
    """Seconds each of ``ranks`` (ascending) spends in each of :data:`STATES` between two times [s]."""
    computing = is_kernel(run)
    talking = of_each(run.ops, lambda op: op.kind != "compute", bool)
    op_sets = {"compute": computing, "talk": talking, "both": computing | talking}
    if not op_sets["both"].all():
        op_sets["all"] = np.ones(len(run.ops), dtype=bool)
    loading = holds_kernels(run)
    if loading.any():
        op_sets["loads"] = loading
    unions = [(u, whose, since) for u, (whose, since) in enumerate(UNIONS) if whose in op_sets]
    nobody = np.zeros(len(run.ops), dtype=bool)
    waits = {"start": nobody, "ready": talking}
    length = np.zeros((len(UNIONS), len(ranks)))
    chains: dict[BlockColumns, list[Spans]] = {}
    for part in run.shelf.parts(ranks, AT_ONCE, SWEPT):
        first = np.searchsorted(ranks, part.ranks)
        for _, blocks in part.held:
            if blocks not in chains:
                chains[blocks] = [
                    _chains(blocks, op_sets[whose], waits[since], begin, end) for _, whose, since in unions
                ]
        glances = [ColumnGlance(places, blocks) for places, blocks in part.held]
        held = [chains[blocks] for _, blocks in part.held]
        for k, (u, whose, since) in enumerate(unions):
            rows = None if part.rows is None else _rows(part.rows, op_sets[whose], talking, since)
            spans = [(glance, spans_of[k]) for glance, spans_of in zip(glances, held, strict=True)]
            length[u, first] = _union(len(first), rows, spans, begin, end)
    compute, transfer, active, beside, around, everything, loads = length
    return {
        "compute_s": compute,
        "communication_s": transfer,
        "peer_wait_s": np.maximum(active - transfer, 0.0),
        "exposed_communication_s": np.maximum(around - compute, 0.0),
        "exposed_transfer_s": np.maximum(beside - compute, 0.0),
        "host_s": np.maximum(everything - around, 0.0),
        "loads_s": loads,
    }


def _union(
    n: int,
    rows: tuple[Floats, Floats] | None,
    sheet_spans: list[tuple[ColumnGlance, Spans]],
    begin: float,
    end: float,
) -> Floats:
    """(n,) length of what some ranks' spans cover between two times [s], those of ``rows`` and those
    ``sheet_spans``."""
    if n >= SWEPT:
        swept = _swept(n, rows, sheet_spans, begin, end)
        if swept is not None:
            return swept
    return np.concatenate(
        [_tabled(slice(first, min(first + SWEPT, n)), rows, sheet_spans, begin, end) for first in range(0, n, SWEPT)]
    )


def _tabled(
    part: slice,
    rows: tuple[Floats, Floats] | None,
    sheet_spans: list[tuple[ColumnGlance, Spans]],
    begin: float,
    end: float,
) -> Floats:
    """The same for a part of the ranks, over a table of ranks x spans."""
    n = part.stop - part.start
    tables = []
    if rows is not None:
        tables.append(tuple(np.broadcast_to(c if len(c) == 1 else c[part], (n, c.shape[1])) for c in rows))
    for glance, spans in sheet_spans:
        if len(spans[0]):
            whole = n == len(glance.places)
            places = glance.places[part]
            tables.append(tuple(glance.stacked(c) if whole else glance.columns.stacked(c, places) for c in spans))
    if not tables:
        return np.zeros(n)
    left, right = (np.concatenate(c, axis=1) if len(c) > 1 else c[0] for c in zip(*tables, strict=True))
    return covered(_inside(left, begin, end), _inside(right, begin, end))


def _swept(
    n: int,
    rows: tuple[Floats, Floats] | None,
    sheet_spans: list[tuple[ColumnGlance, Spans]],
    begin: float,
    end: float,
) -> Floats | None:
    """The same, span by span over all ranks, without a table; None where ranks have too many of them in orders of
    their own. On thousands of ranks this takes a tenth of the time."""
    swept_spans = []
    if rows is not None:
        columns = (_inside(c, begin, end).T for c in rows)
        swept_spans = [(float(a.mean()), a, b) for a, b in zip(*columns, strict=True)]
    for glance, spans in sheet_spans:
        own = glance.columns.columns
        within = {c: _within(own[c], glance, begin, end) for c in np.unique(np.concatenate(spans)).tolist()}
        for i, k in zip(*(column.tolist() for column in spans), strict=True):
            swept_spans.append((own[i].mean, within[i], within[k]))
    swept_spans.sort(key=lambda span: span[0])
    inside = [(a, b) for _, a, b in swept_spans]
    if not inside:
        return np.zeros(n)
    length = _length_in_order(n, inside)
    return _length_in_order(n, inside) if length is None and _put_in_order(inside) else length


def _length_in_order(n: int, spans: list[tuple[Floats, Floats]]) -> Floats | None:
    """(n,) length of what spans cover; None where a rank has them in another order of begins."""
    first, latest = spans[0]
    latest = np.array(np.broadcast_to(latest, n))
    gaps = np.zeros(n)
    gap = np.empty(n)
    none = np.zeros(n)  # a column is compared with another in a quarter of the time of one number
    before = first
    for a, b in spans[1:]:
        late = a < before
        if late.item(late.argmax()):  # sooner than any() of a short one
            return None
        np.subtract(a, latest, out=gap)
        np.maximum(gap, none, out=gap)
        gaps += gap
        np.maximum(latest, b, out=latest)
        before = a
    length: Floats = latest - first - gaps
    return length


def _put_in_order(spans: list[tuple[Floats, Floats]]) -> bool:
    """Let every rank's spans be in order of begins: each is exchanged with the one before where a rank needs it."""
    left = 8 * len(spans)
    for k in range(1, len(spans)):
        while k and (late := spans[k][0] < spans[k - 1][0]).any():
            left -= 1
            if not left:
                return False
            (a, b), (c, d) = spans[k - 1], spans[k]
            spans[k - 1] = np.minimum(a, c), np.where(late, d, b)
            spans[k] = np.maximum(a, c), np.where(late, b, d)
            k -= 1
    return True


def _chains(columns: BlockColumns, chosen: Bools, waiting: Bools, since: float, until: float) -> Spans:
    """Begins and ends of the blocks of the ``chosen`` ops that were anywhere between two times [s], those that follow
    each other without a gap as one; the ops ``waiting`` begin when they are ready."""
    op = columns.op
    ready, start, end = columns.which
    begin = np.where(waiting[op], ready, start)
    inside = chosen[op] & (columns.high[end] > since) & (columns.low[begin] < until)
    begin = begin[inside]
    end = end[inside]
    # The k-th that ends with a column goes on as the k-th that begins with it, where that is a later op.
    by_begin = np.argsort(begin, kind="stable")
    by_end = np.argsort(end, kind="stable")
    begins = begin[by_begin]
    ends = end[by_end]
    place = np.searchsorted(ends, begins) + np.arange(len(begins)) - np.searchsorted(begins, begins)
    goes_on = place < np.searchsorted(ends, begins, side="right")
    later = by_begin[goes_on]
    earlier = by_end[place[goes_on]]
    in_order = earlier < later
    first = np.arange(len(begin))
    first[later[in_order]] = earlier[in_order]
    last = np.ones(len(begin), dtype=bool)
    last[earlier[in_order]] = False
    while not np.array_equal(first, further := first[first]):
        first = further
    ending = np.flatnonzero(last)
    ending = ending[np.argsort(first[ending], kind="stable")]
    return begin[first[ending]], end[ending]


def _rows(rows: Sheet, chosen: Bools, talking: Bools, since: str) -> tuple[Floats, Floats]:
    chosen_rows = chosen[rows.op]
    begin = np.where(talking[rows.op], rows.ready, rows.start) if since == "ready" else rows.start
    return begin[:, chosen_rows], rows.end[:, chosen_rows]


def _within(column: Column, glance: ColumnGlance, begin: float, end: float) -> Floats:
    """A column at some places, between two times [s]."""
    values = glance(column)
    return values if column.low >= begin and column.high <= end else np.clip(values, begin, end)


def _inside(column: Floats, begin: float, end: float) -> Floats:
    if not column.size or (column.min() >= begin and column.max() <= end):
        return column
    return np.clip(column, begin, end)


def seconds_of_ops(run: Timeline, world: int, begin: float, end: float) -> Floats:
    """(n_ops,) float [s]: time between ``begin`` and ``end`` from each op's start to its end, summed over the first
    ``world`` ranks."""
    sets, op, set_of, _, start, stop = run._rows()
    count = np.array([(ranks < world).sum() for ranks in sets], dtype=np.float64)
    took = (np.clip(stop, begin, end) - np.clip(start, begin, end)) * count[set_of]
    seconds = np.bincount(op, took, len(run.ops)).astype(np.float64)
    of_block = np.zeros(len(run.blocks))
    for blocks in run.shelf.columns:
        counted = blocks.ranks < world
        _, first, last = blocks.which
        outside = (blocks.high[last] <= begin) | (blocks.low[first] >= end)
        whole = (blocks.low[first] >= begin) & (blocks.high[last] <= end) & bool(counted.all())
        spent = np.where(outside, 0.0, len(blocks.ranks) * (blocks.mean[last] - blocks.mean[first]))
        for i in np.flatnonzero(~outside & ~whole).tolist():
            began = blocks.columns[first[i]].all
            over = blocks.columns[last[i]].all
            spent[i] = ((np.clip(over, begin, end) - np.clip(began, begin, end)) * counted).sum()
        of_block[blocks.place] = spent
    np.add.at(seconds, [block.op for block in run.blocks], of_block)
    return seconds


def covered(begin: Floats, end: Floats) -> Floats:
    """(k,) length of the union of the intervals in each row of ``begin`` and ``end``, (k, m) [s]."""
    if begin.shape[1] == 0:
        return np.zeros(len(begin))
    if (begin[:, 1:] < begin[:, :-1]).any():
        order = np.argsort(begin, axis=1, kind="stable")  # ops are about in order: little is left to sort
        begin = np.take_along_axis(begin, order, axis=1)
        end = np.take_along_axis(end, order, axis=1)
    latest = np.maximum.accumulate(end, axis=1)
    gaps = np.maximum(begin[:, 1:] - latest[:, :-1], 0.0).sum(axis=1)
    length: Floats = latest[:, -1] - begin[:, 0] - gaps
    return length
