"""Whom each action of a measured pipeline waits for, who waits for it, and which collectives ran beside each other."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import NamedTuple

from clustersim.core.program import COLLECTIVES
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


def side_by_side(measured: Timeline, spans: dict[int, list[MeasuredSpan]], just: float) -> None:
    """Give collectives of one communicator that ran at the same time streams of their own, where one stream of them
    would never end.

    Gloo's process group has several threads, which begin its collectives in whatever order each rank's come to: ranks
    with the order that they happened to have would wait for each other. Those left on one stream are one behind the
    other on every rank, within ``just`` seconds.
    """
    together: defaultdict[str, dict[int, dict[int, MeasuredSpan]]] = defaultdict(dict)
    for rank, rank_spans in spans.items():
        for span in rank_spans:
            if measured.ops[span.op].kind in COLLECTIVES:
                together[span.stream].setdefault(span.op, {})[rank] = span
    lane_of: dict[int, str] = {}
    for stream, meetings in together.items():
        if not _in_one_order(meetings):
            lane_of |= {op: f"{stream} beside {lane}" for op, lane in _lanes(meetings, just).items() if lane}
    for rank, rank_spans in spans.items():
        spans[rank] = [replace(s, stream=lane_of.get(s.op, s.stream)) for s in rank_spans]


def _in_one_order(meetings: dict[int, dict[int, MeasuredSpan]]) -> bool:
    """Whether some order of the collectives is that of every rank."""
    begun: defaultdict[int, list[tuple[float, float, int]]] = defaultdict(list)
    for op, by_rank in meetings.items():
        for rank, span in by_rank.items():
            begun[rank].append((span.begin, span.end, op))
    graph: TopologicalSorter[int] = TopologicalSorter()
    for times in begun.values():
        for before, after in pairwise(sorted(times)):
            graph.add(after[-1], before[-1])
    try:
        graph.prepare()
    except CycleError:
        return False
    return True


def _lanes(meetings: dict[int, dict[int, MeasuredSpan]], just: float) -> dict[int, int]:
    """Each collective's stream: the first on which all before it had ended on every rank."""
    lanes: list[dict[int, MeasuredSpan]] = []
    lane_of = {}
    for op, by_rank in sorted(meetings.items(), key=lambda item: min(span.begin for span in item[1].values())):
        for last in lanes:
            before = ((last[r], span) for r, span in by_rank.items() if r in last)
            if all(a.end <= b.begin + just and a.begin < b.begin for a, b in before):
                break
        else:
            last = {}
            lanes.append(last)
        last |= by_rank
        lane_of[op] = next(i for i, lane in enumerate(lanes) if lane is last)
    return lane_of
