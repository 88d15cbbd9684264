"""The critical path: the chain of ops, each begun the moment the one before it ended, that ends when the run does.

It is walked backwards on the Timeline alone. From an op that ran, the path goes to what let it start: the rank that
arrived last at its collective, or on its own rank the op that ended as it became ready (the one before it on its
stream, or one it waits for by ``after``). Nothing beside the path can shorten the run by being faster; what is on it
can save at most its own length. (Critical path method, Kelley and Walker 1959; for parallel programs Yang and Miller
1988.)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from clustersim.core.op_infos import after_of
from clustersim.core.timeline import Timeline
from clustersim.explain.chase import RankMeetings
from clustersim.explain.columns import RankSpan
from clustersim.explain.metrics import steady_window
from clustersim.explain.pieces import KERNELS, STATES, by_class, kernel_state
from clustersim.explain.transfers import OF_LINKS, TransferFacts, transfer_facts

PATH_KINDS = (*KERNELS, "latency", *OF_LINKS, "kernels", "transfer", "host", "idle", "queue")
"""What a piece of the path can be: a kernel's bound, optimizer, a transfer's limit, the host, an empty queue of the
device (measured runs), a queue at a server."""


class PathPiece(msgspec.Struct, frozen=True, gc=False):
    """A part of the path: an op (-1: nothing is queued) on a rank, from ``begin`` to ``end`` [s]; ``kind`` is one of
    :data:`PATH_KINDS`, ``link`` an id (-1: none)."""

    op: int
    rank: int
    begin: float
    end: float
    kind: str
    link: int = -1


class CriticalPath(msgspec.Struct, frozen=True):
    """The path in ``pieces``, in order of time; seconds per step by kind (:data:`PATH_KINDS`) and by link, largest
    first; and over how many steps it goes."""

    pieces: list[PathPiece]
    by_kind: dict[str, float]
    by_link: dict[str, float]
    steps: float

    @property
    def length_s(self) -> float:
        """Seconds of the whole path."""
        return float(sum(piece.end - piece.begin for piece in self.pieces))


def critical_path(timeline: Timeline) -> CriticalPath:
    """The path through the steady state."""
    window = steady_window(timeline)
    walk = _PathWalk(timeline, transfer_facts(timeline))
    steps = window.done
    path_pieces = [piece for piece in walk.back(window.begin, window.end) if piece.end > piece.begin][::-1]
    names = timeline.links.link_names if timeline.links is not None else ()
    by_kind = defaultdict[str, float](float)
    by_link = defaultdict[str, float](float)
    for piece in path_pieces:
        for kind, part in _kinds(walk.met, piece).items():
            by_kind[kind] += part * (piece.end - piece.begin) / steps
        if piece.link >= 0:
            by_link[names[piece.link]] += (piece.end - piece.begin) / steps
    of_kind, of_link = (dict(sorted(parts.items(), key=lambda item: -item[1])) for parts in (by_kind, by_link))
    return CriticalPath(path_pieces, of_kind, of_link, steps)


def _kinds(met: RankMeetings, piece: PathPiece) -> dict[str, float]:
    """What a piece counts as, in shares: kernels of one op each as what limits them."""
    if piece.op < 0 or met.info(piece.op).kind != "compute" or piece.kind == "queue":
        return {piece.kind: 1.0}
    return {STATES[state]: part for state, part in by_class(met.info(piece.op)).items()}


class _PathWalk:
    def __init__(self, timeline: Timeline, facts: dict[int, TransferFacts]) -> None:
        self.timeline, self.facts, self.met = timeline, facts, RankMeetings(timeline)

    def back(self, begin: float, end: float) -> Iterator[PathPiece]:
        """Pieces from ``end`` back to ``begin`` [s], latest first."""
        t = self.timeline
        columns = self.met.columns
        op, latest = self._last(end)
        for _ in range(len(t.ops) * 4 + 16):  # an op is passed at most once on each rank the path visits
            if op < 0:
                return
            spans = columns.of(op)
            rank = int(spans.ranks[latest])
            start = float(spans.start[latest])
            ready = float(spans.ready[latest])
            yield from _cut(self._pieces(op, rank, start, float(spans.end[latest])), begin)
            if start <= begin:
                return
            if self.met.info(op).kind != "compute":
                late, late_op = self.met.last_arriver(op, rank, 0.5 * (start + ready))
                if late >= 0:
                    rank = late
                    op = late_op
                    latest = self.met.place(op, rank, start)
                    ready = float(columns.of(op).ready[latest])
            elif start > ready:
                yield from _cut([PathPiece(op, rank, ready, start, "queue")], begin)
            if ready <= begin:
                return
            op, latest, gap = self._before(rank, ready, op, latest)
            if gap:
                yield from _cut([PathPiece(-1, rank, ready - gap, ready, "idle")], begin)

    def _last(self, end: float) -> tuple[int, int]:
        """The op, and which of its spans, that ended last but not after ``end`` [s]; -1 for none."""
        best = (-np.inf, -1, -1)
        limit = end * (1 + 1e-12)
        columns = self.met.columns
        last = self.timeline.per_op()["end"]
        # From the ops that ended last down: one that was over before the best of them is not looked at.
        for op in np.argsort(-last, kind="stable").tolist():
            if last[op] < best[0] or not np.isfinite(last[op]):
                break
            ends = np.where(columns.of(op).end <= limit, columns.of(op).end, -np.inf)
            latest = int(np.argmax(ends))
            if ends[latest] > best[0]:
                best = (float(ends[latest]), op, latest)
        return best[1], best[2]

    def _pieces(self, op: int, rank: int, start: float, end: float) -> list[PathPiece]:
        """One span, latest part first; a transfer's latency comes before its bytes."""
        info = self.met.info(op)
        if info.kind == "compute":
            return [PathPiece(op, rank, start, end, STATES[kernel_state(info)])]
        fact = self.facts.get(op)
        latency = 0.0 if fact is None or not np.isfinite(fact.latency) else min(fact.latency, end - start)
        limit = "transfer" if fact is None or fact.limit == "unknown" else fact.limit
        if fact is not None and limit == "latency":
            limit = "link" if fact.link >= 0 and fact.alone <= fact.ceiling else "kernels"
        link = fact.link if fact is not None and limit in OF_LINKS else -1
        return [
            PathPiece(op, rank, start + latency, end, limit, link),
            PathPiece(op, rank, start, start + latency, "latency"),
        ]

    def _before(self, rank: int, ready: float, op: int, place: int) -> tuple[int, int, float]:
        """The span on a rank that ended last, but not after ``ready`` [s], as (op, which), and how long before it; -1
        for none. It is another span than the one given, and began before that was ready."""
        limit = ready * (1 + 1e-12) + 1e-15
        own_ready = self.met.columns.of(op).ready.item(place)
        back = 0.0
        while True:  # most often something ended just then; else look further and further back
            near = self.met.columns.ended(rank, (ready - back) * (1 - 1e-12), limit)
            fits = [span for span in near if span.start <= own_ready and not (span.op == op and span.at == place)]
            if fits:
                break
            if back > ready:
                return -1, -1, 0.0
            back = max(8 * back, 1e-6 * max(ready, 1e-30))
        latest = max(span.end for span in fits)
        # Of ops that end together the one that began last: an op that took no time is passed through.
        together = [span for span in near if span.end >= latest * (1 - 1e-12)]
        together.sort(key=lambda span: (span.end, span.start, span.op))
        chosen = set(fits)
        last = max(k for k, span in enumerate(together) if span in chosen)
        span = self._needed(together[: last + 1], op, place)
        gap = ready - span.end
        return span.op, span.at, gap if gap > 1e-12 * max(ready, 1.0) else 0.0

    def _needed(self, together: Sequence[RankSpan], op: int, place: int) -> RankSpan:
        """Of spans that end together, one that the given one really waits for, if any is known, else the last."""
        stream = self.met.info(op).stream
        after = after_of(self.timeline.ops, op)
        for span in reversed(together):
            if (span.op, span.at) == (op, place):
                continue
            if span.op in after or self.met.info(span.op).stream == stream:
                return span
        return together[-1]


def _cut(pieces: list[PathPiece], begin: float) -> Iterator[PathPiece]:
    for piece in pieces:
        if piece.end > begin:
            yield PathPiece(piece.op, piece.rank, max(piece.begin, begin), piece.end, piece.kind, piece.link)
