"""Steps whose gradient communication begins late: the network is idle beside backward, and busy after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from clustersim.core.arrays import Bools, Ints
from clustersim.core.op_infos import of_each
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.columns import did
from clustersim.explain.dimensions import dimension
from clustersim.explain.intervals import BusyTime
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
    rank = int(np.argmax(did(timeline, of_each(ops, lambda op: op.phase == "backward", bool))))
    spans = timeline.spans([rank])
    inside = (spans["end"] > cut.begin) & (spans["ready"] < cut.end)
    op_of = spans["op"]
    phase = of_each(ops, lambda op: op.phase, np.str_)[op_of]
    backward = (phase == "backward") & inside
    forward = (phase == "forward") & inside
    updates = (phase == "optimizer") & inside
    talks = of_each(ops, lambda op: op.kind != "compute", bool)[op_of] & inside
    carries = of_each(ops, reduces, bool)[op_of] & talks
    busy = BusyTime(spans["start"][talks], spans["end"][talks])
    starts = {}
    for s, own in _by_step(timeline.op_steps[op_of], inside):
        back = own[backward[own]]
        sent = own[carries[own]]
        if not len(back):
            continue
        sent = sent[spans["ready"][sent] >= spans["start"][back[0]]]
        if not len(sent):
            continue
        first = int(sent[np.argmin(spans["ready"][sent])])
        if (updates[own] & (spans["end"][own] <= spans["ready"][first])).any():
            continue  # what is sent behind the update is no gradient, and could not have been sent beside backward
        ahead = own[forward[own] & (spans["start"][own] < spans["ready"][first])]
        if len(ahead):
            back = back[spans["start"][back] >= spans["start"][ahead[-1]]]
        if not len(back):
            continue
        begin = float(spans["end"][back[0]])
        end = float(spans["ready"][first])
        length = float(spans["end"][back[-1]] - spans["start"][back[0]])
        idle = max(0.0, end - begin - busy.within(begin, end))
        starts[s] = LateStart(idle, int(op_of[first]), rank, begin, end, length)
    return starts


def _by_step(step: Ints, inside: Bools) -> Iterator[tuple[int, Ints]]:
    """Of spans inside the window: each step, and the places of its spans, ascending."""
    places = np.flatnonzero(inside)
    places = places[np.argsort(step[places], kind="stable")]
    steps, first = np.unique(step[places], return_index=True)
    for s, begin, end in zip(steps.tolist(), first.tolist(), [*first[1:].tolist(), len(places)], strict=False):
        yield s, places[begin:end]
