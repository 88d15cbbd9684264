"""Steps whose gradient communication begins late: the network is idle beside backward, and busy after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.columns import did
from clustersim.explain.dimensions import dimension
from clustersim.explain.pieces import Pieces

_REDUCES = frozenset({"all_reduce", "reduce_scatter", "reduce", "send"})
GRADIENTS = frozenset({"DP", "point to point"})
"""Dimensions over which gradients go, and are put into buckets; a reduce_scatter of TP or EP is of activations."""


def reduces(op: OpInfo) -> bool:
    """Whether an op carries gradients of data-parallel ranks, or a worker's to its server."""
    return op.kind in _REDUCES and dimension(op) in GRADIENTS


@dataclass(frozen=True)
class LateStart:
    """One step's late start.

    Parameters
    ----------
    idle : float [s], from the end of the first backward op to the first gradient transfer, transfers in between left
        out. Of several micro-batches the one counts in which that transfer is: those before only add up (``no_sync``).
        op : that transfer. rank : whose times these are. begin, end : float [s], the idle stretch.
    backward : float [s], from the first backward op's begin to the last one's end.
    """

    idle: float
    op: int
    rank: int
    begin: float
    end: float
    backward: float


def late_starts(timeline: Timeline, cut: Pieces) -> dict[int, LateStart]:
    """Per step of the window: how long the network could have carried gradients but had none.

    Times are those of the first rank that runs backward ops.
    """
    ops = timeline.ops
    rank = int(np.argmax(did(timeline, np.array([op.phase == "backward" for op in ops], dtype=bool))))
    spans = timeline.spans([rank])
    inside = (spans["end"] > cut.begin) & (spans["ready"] < cut.end)
    op_of = spans["op"]
    step = np.array([op.step for op in ops], dtype=np.int64)[op_of]
    backward, forward = (
        np.array([op.phase == p for op in ops], dtype=bool)[op_of] & inside for p in ("backward", "forward")
    )
    updates = np.array([op.phase == "optimizer" for op in ops], dtype=bool)[op_of] & inside
    talks = np.array([op.kind != "compute" for op in ops], dtype=bool)[op_of] & inside
    carries = np.array([reduces(op) for op in ops], dtype=bool)[op_of] & talks
    starts = {}
    for s in np.unique(step[inside]).tolist():
        back = np.flatnonzero(backward & (step == s))
        sent = np.flatnonzero(carries & (step == s))
        if not len(back):
            continue
        sent = sent[spans["ready"][sent] >= spans["start"][back[0]]]
        if not len(sent):
            continue
        first = int(sent[np.argmin(spans["ready"][sent])])
        if (updates & (step == s) & (spans["end"] <= spans["ready"][first])).any():
            continue  # what is sent behind the update is no gradient, and could not have been sent beside backward
        ahead = np.flatnonzero(forward & (step == s) & (spans["start"] < spans["ready"][first]))
        if len(ahead):
            back = back[spans["start"][back] >= spans["start"][ahead[-1]]]
        if not len(back):
            continue
        begin = float(spans["end"][back[0]])
        end = float(spans["ready"][first])
        busy = _covered(spans["start"][talks], spans["end"][talks], begin, end)
        length = float(spans["end"][back[-1]] - spans["start"][back[0]])
        starts[s] = LateStart(max(0.0, end - begin - busy), int(op_of[first]), rank, begin, end, length)
    return starts


def _covered(start: Floats, end: Floats, begin: float, stop: float) -> float:
    """Seconds of [begin, stop] in which at least one of these intervals is open."""
    order = np.argsort(start, kind="stable")
    total = 0.0
    reached = begin
    for low, high in zip(start[order].tolist(), end[order].tolist(), strict=True):
        low = max(low, reached)
        high = min(high, stop)
        if high > low:
            total += high - low
        reached = max(reached, high)
    return total
