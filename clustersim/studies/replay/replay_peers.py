"""Whom each action of a measured pipeline waits for, and who waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from clustersim.core.timeline import Timeline
from clustersim.explain import pipeline, plays


@dataclass(frozen=True)
class MeasuredSpan:
    """One op of one rank: ``op`` its row in the measured ops, ``begin`` its own arrival, ``end`` [s]."""

    op: int
    stream: str
    begin: float
    end: float


class Peers(NamedTuple):
    """Ranks that an action of a pipeline waits for, and that wait for it; -1 for none."""

    source: int = -1
    target: int = -1


def peers_of(measured: Timeline, spans: dict[int, list[MeasuredSpan]]) -> dict[tuple[int, int], Peers]:
    """(rank, op) of an action -> whom it waits for, and who waits for it."""
    ranks = pipeline.stages(measured)
    replica_of = {r: k for column in ranks for k, r in enumerate(column.tolist())}
    op_of: dict[tuple[object, ...], int] = {}
    for rank, rank_spans in spans.items():
        for span in rank_spans:
            info = measured.ops[span.op]
            if info.label and info.kind == "compute":
                op_of[rank, info.step, info.label.action, info.label.microbatch, info.label.chunk] = span.op
    op_peers: dict[tuple[int, int], Peers] = {}
    for step, done in pipeline.actions(measured).items():
        for k in range(len(ranks[0])):
            done_here = [a for a in done if replica_of[a.rank] == k]
            ways = plays.paths(done_here)
            for a in done_here:
                peers = (int(ranks[s][k]) if s >= 0 else -1 for s in plays.neighbours(a, ways.get(a.microbatch, ())))
                op_peers[a.rank, op_of[a.rank, step, a.action, a.microbatch, a.chunk]] = Peers(*peers)
    return op_peers
