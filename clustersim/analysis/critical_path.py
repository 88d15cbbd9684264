"""The critical path: the chain of ops, each begun the moment the one before it ended, that ends when the run does.

It is walked backwards on the Timeline alone. From an op that ran, the path goes to what let it start: the rank that
arrived last at its collective, or on its own rank the op that ended as it became ready (the one before it on its
stream, or one it waits for by ``after``). Nothing beside the path can shorten the run by being faster; what is on it
can save at most its own length. (Critical path method, Kelley and Walker 1959; for parallel programs Yang and Miller
1988.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from clustersim.analysis.chase import Meetings
from clustersim.analysis.metrics import steady_window
from clustersim.analysis.pieces import STATES, kernel_state
from clustersim.analysis.transfers import Facts, transfer_facts
from clustersim.timeline import Timeline

Floats: TypeAlias = npt.NDArray[np.float64]

PATH_KINDS = (*STATES[:4], "latency", "link", "shared link", "kernels", "transfer", "host", "idle", "queue")
"""What a piece of the path can be: a kernel's bound, optimizer, a transfer's limit, the host, an empty queue of the
device (measured runs), a queue at a server."""


def critical_path(
    timeline: Timeline, *, begin: float | None = None, end: float | None = None, warmup_steps: int = 2
) -> dict[str, Any]:
    """The path through the steady state (or a window [s]), in order of time.

    Returns
    -------
    dict of columns, a row per piece: ``op``, ``name``, ``rank``, ``begin``, ``end`` [s], ``kind`` (one of
    :data:`PATH_KINDS`), ``link`` id (-1: none); and ``by_kind`` and ``by_link``: dicts of seconds per step, largest
    first; ``length_s`` float [s] of the whole path, ``steps`` int.
    """
    if begin is None and end is None:
        window = steady_window(timeline, warmup_steps)
        begin, end, steps = window.begin, window.end, len(window.steps)
    else:
        begin, end, steps = begin or 0.0, timeline.makespan if end is None else end, 1
    facts = transfer_facts(timeline)
    found = [piece for piece in _Walk(timeline, facts).back(begin, end) if piece.end > piece.begin][::-1]
    names = timeline.links.link_names if timeline.links is not None else ()
    by_kind: dict[str, float] = {}
    by_link: dict[str, float] = {}
    for piece in found:
        by_kind[piece.kind] = by_kind.get(piece.kind, 0.0) + (piece.end - piece.begin) / steps
        if piece.link >= 0:
            name = names[piece.link]
            by_link[name] = by_link.get(name, 0.0) + (piece.end - piece.begin) / steps
    columns: dict[str, Any] = {
        name: np.array([getattr(piece, name) for piece in found]) for name in ("op", "rank", "begin", "end", "kind")
    }
    return columns | {
        "link": np.array([piece.link for piece in found], dtype=np.int64),
        "name": np.array([timeline.ops[piece.op].name if piece.op >= 0 else "idle" for piece in found]),
        "by_kind": dict(sorted(by_kind.items(), key=lambda item: -item[1])),
        "by_link": dict(sorted(by_link.items(), key=lambda item: -item[1])),
        "length_s": float(sum(piece.end - piece.begin for piece in found)),
        "steps": steps,
    }


@dataclass(frozen=True)
class _Piece:
    op: int
    rank: int
    begin: float
    end: float
    kind: str
    link: int = -1


class _Walk:
    """One walk back through a timeline."""

    def __init__(self, timeline: Timeline, facts: dict[int, Facts]) -> None:
        self.timeline, self.facts, self.met = timeline, facts, Meetings(timeline)
        self._ends: dict[int, tuple[Floats, npt.NDArray[np.int64]]] = {}

    def back(self, begin: float, end: float) -> Iterator[_Piece]:
        """Pieces from ``end`` back to ``begin`` [s], latest first."""
        t = self.timeline
        rows = np.flatnonzero(t.row_end <= end * (1 + 1e-12))
        if not len(rows):
            return
        row = int(rows[np.argmax(t.row_end[rows])])
        rank = int(t.rank_sets[int(t.row_set[row])][0])
        for _ in range(len(t.ops) * 4 + 16):  # an op is passed at most once on each rank the path visits
            op, start, ready = int(t.row_op[row]), float(t.row_start[row]), float(t.row_ready[row])
            yield from _cut(self._pieces(op, rank, start, float(t.row_end[row])), begin)
            if start <= begin:
                return
            if t.ops[op].kind != "compute":
                late, late_op = self.met.last_arriver(op, rank, 0.5 * (start + ready))
                if late >= 0:
                    rank, op = late, late_op
                    row = self.met.row(op, rank, start)
                    ready = float(t.row_ready[row])
            elif start > ready:
                yield from _cut([_Piece(op, rank, ready, start, "queue")], begin)
            if ready <= begin:
                return
            row, gap = self._before(rank, ready, row)
            if gap:
                yield from _cut([_Piece(-1, rank, ready - gap, ready, "idle")], begin)
            if row < 0:
                return

    def _pieces(self, op: int, rank: int, start: float, end: float) -> list[_Piece]:
        """One span, latest part first; a transfer's latency comes before its bytes."""
        info = self.timeline.ops[op]
        if info.kind == "compute":
            return [_Piece(op, rank, start, end, STATES[kernel_state(info)])]
        fact = self.facts.get(op)
        latency = 0.0 if fact is None or not np.isfinite(fact.latency) else min(fact.latency, end - start)
        limit = "transfer" if fact is None or fact.limit == "unknown" else fact.limit
        if fact is not None and limit == "latency":
            limit = "link" if fact.link >= 0 and fact.alone <= fact.ceiling else "kernels"
        link = fact.link if fact is not None and limit in {"link", "shared link"} else -1
        return [
            _Piece(op, rank, start + latency, end, limit, link),
            _Piece(op, rank, start, start + latency, "latency"),
        ]

    def _before(self, rank: int, ready: float, row: int) -> tuple[int, float]:
        """The row on a rank that ended last, but not after ``ready`` [s], and how long before it; -1 for none."""
        if rank not in self._ends:
            t = self.timeline
            mine = np.array([np.any(s == rank) for s in t.rank_sets], dtype=bool)
            rows = np.flatnonzero(mine[t.row_set])
            # Of ops that end together the one that began last: an op that took no time is passed through.
            order = np.lexsort((t.row_op[rows], t.row_start[rows], t.row_end[rows]))
            self._ends[rank] = t.row_end[rows[order]], rows[order]
        ends, rows = self._ends[rank]
        at = int(np.searchsorted(ends, ready * (1 + 1e-12) + 1e-15, side="right")) - 1
        while at >= 0 and (rows[at] == row or self.timeline.row_start[rows[at]] > self.timeline.row_ready[row]):
            at -= 1
        if at < 0:
            return -1, 0.0
        at = self._needed(ends, rows, at, row)
        gap = ready - float(ends[at])
        return int(rows[at]), gap if gap > 1e-12 * max(ready, 1.0) else 0.0

    def _needed(self, ends: Floats, rows: npt.NDArray[np.int64], at: int, row: int) -> int:
        """Of the rows that end together with the one at ``at``, one that ``row`` really waits for, if any is known."""
        t = self.timeline
        info = t.ops[int(t.row_op[row])]
        first = int(np.searchsorted(ends, ends[at] * (1 - 1e-12), side="left"))
        for i in range(at, first - 1, -1):
            op = int(t.row_op[rows[i]])
            if rows[i] != row and (op in info.after or t.ops[op].stream == info.stream):
                return i
        return at


def _cut(pieces: list[_Piece], begin: float) -> Iterator[_Piece]:
    for piece in pieces:
        if piece.end > begin:
            yield _Piece(piece.op, piece.rank, max(piece.begin, begin), piece.end, piece.kind, piece.link)
