"""A run's order of things with other durations: what the ops would come to if each took a given time.

:func:`replayed` plays a run's graph (:mod:`clustersim.explain.graph`) forward with durations of one's choice, as a
longest path: no clock, no network, no choice of algorithms. With durations that no real run beats the outcome is a
bound: every op starts no later and takes no longer than in any such run, so the run ends no later (longest paths are
monotone in their weights).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Floats
from clustersim.explain.graph import RunGraph
from clustersim.explain.graph_nodes import GraphNode
from clustersim.explain.op_chains import ChainSeconds

Seconds: TypeAlias = Callable[[int], Floats]
"""Of an op, by its index."""


@dataclass(frozen=True)
class OtherNeeds:
    """What ops wait for in some of the replays that are played together: those from number ``since`` on.

    of : only of ops for which it differs from what they wait for in the others.
    """

    of: Mapping[int, tuple[int, ...]]
    since: int

    def put(self, usual: Floats, otherwise: Floats, replays: int) -> Floats:
        """(replays, r) float [s], ``usual`` in the first replays and ``otherwise`` in those that wait for other ops."""
        both = np.broadcast_to(usual, (replays, usual.shape[-1])).copy()
        both[self.since :] = np.broadcast_to(otherwise, both.shape)[self.since :]
        return both


MAX_PASSES = 1000
"""Chains inside one op list (rank i sends to i + 1 in the same op) settle a hop a pass."""


def replayed(
    run: RunGraph,
    compute: Seconds,
    transfers: Seconds,
    by_rank: dict[int, Floats] | None = None,
    early: tuple[OtherNeeds, int] | None = None,
    chained: Callable[[GraphNode], ChainSeconds] | None = None,
) -> Floats:
    """(..., n_ops) float [s]: when the last rank ends each op; -inf for ops nobody does, and those inside of a chain.

    compute : of a compute op (..., ranks of its role) float [s], nan where it does not run. transfers : of a node, by
        its first op, (..., m) float [s] of its meetings. Axes before the last are replays that are played together.
    by_rank : of the ops in it, when each rank of the role ends them is put there, (..., ranks of its role) float [s],
        -inf for ranks that do not do them. early : what the last of the replays wait for instead, and how many replays
        there are. chained : what a chain takes, of a graph that has some.
    """
    last: dict[int, Floats] = {}
    ends: dict[int, Floats] = {}
    over = _over(run, early) if run.settled else {}
    did_it = run.did
    for _ in range(1 if run.settled else MAX_PASSES):
        changed = False
        for number, node in enumerate(run.nodes):
            if node.talks is not None and chained is not None:
                played = _through(node, chained(node), _begin_of(node.ops[0], ends, run, early))
            else:
                played = _played(node, ends, run, compute, transfers, early)
            for op, end in played:
                changed = changed or op not in ends or not np.array_equal(ends[op], end)
                ends[op] = end
                did = did_it.get(op)  # a mask takes five times as long: most ops need none
                if by_rank is not None and op in by_rank:
                    by_rank[op] = end if did is None else np.where(did, end, -np.inf)
                last[op] = (
                    np.maximum.reduce(end, axis=-1) if did is None else end.max(axis=-1, where=did, initial=-np.inf)
                )
            for op in over.get(number, ()):
                del ends[op]
        if not changed:
            break
    inside = np.array(-np.inf)
    end_times: Floats = np.stack(np.broadcast_arrays(*(last.get(i, inside) for i in range(len(run.needs)))), axis=-1)
    return end_times


def _over(run: RunGraph, early: tuple[OtherNeeds, int] | None) -> dict[int, list[int]]:
    """Place of a node -> ops that nothing after it waits for: of long runs not every end can be kept."""
    last = {op: number for number, node in enumerate(run.nodes) for op in node.awaited}
    others = early[0].of if early is not None else {}
    for number, node in enumerate(run.nodes):
        for op in node.waiting:
            last.update((need, max(number, last[need])) for need in (*run.needs[op], *others.get(op, ())))
    over: dict[int, list[int]] = {}
    for op, number in last.items():
        over.setdefault(number, []).append(op)
    return over


def _begin(ends: dict[int, Floats], needs: tuple[int, ...], size: int) -> Floats:
    """When everything that an op waits for has ended [s], as far as it was played."""
    begin: Floats | None = None
    for need in needs:
        if need in ends:
            begin = ends[need] if begin is None else np.maximum(begin, ends[need])
    return np.zeros(size) if begin is None else begin


def _begin_of(op: int, ends: dict[int, Floats], run: RunGraph, early: tuple[OtherNeeds, int] | None) -> Floats:
    """When everything that an op waits for in each replay has ended [s]."""
    begin = _begin(ends, run.needs[op], run.size[op])
    if early is not None and op in early[0].of:
        return early[0].put(begin, _begin(ends, early[0].of[op], run.size[op]), early[1])
    return begin


def _through(node: GraphNode, took: ChainSeconds, begin: Floats) -> Iterator[tuple[int, Floats]]:
    """The last op of a chain, and (..., size) when it ends on each rank of its role."""
    come = begin + took.before
    if not len(node.seconds):
        yield node.ops[-1], come
        return
    over = np.maximum.reduceat(come[..., node.met.place], node.met.first, axis=-1) + took.inside
    ended = np.empty_like(come)
    ended[..., node.met.rank] = over[..., node.met.meeting]
    yield node.ops[-1], ended + took.behind


def _played(
    node: GraphNode,
    ends: dict[int, Floats],
    run: RunGraph,
    compute: Seconds,
    transfers: Seconds,
    early: tuple[OtherNeeds, int] | None,
) -> Iterator[tuple[int, Floats]]:
    """Each op of a node, and (..., size) when it ends on each rank of its role."""
    ready = [_begin_of(op, ends, run, early) for op in node.ops]
    if not len(node.seconds):
        for op, begin in zip(node.ops, ready, strict=True):
            yield op, begin + np.fmax(compute(op), 0.0) if node.computes else begin  # of nan, where it does not run, 0
        return
    met = node.met
    come = ready[0] if len(ready) == 1 else _side_by_side(ready)
    start = np.maximum.reduceat(come[..., met.place], met.first, axis=-1)
    end = start + transfers(node.ops[0])
    for op, begin, positions in zip(node.ops, ready, met.of_op, strict=True):
        ready_times = np.broadcast_to(begin, (*end.shape[:-1], run.size[op])).copy()
        ready_times[..., met.rank[positions]] = end[..., met.meeting[positions]]
        yield op, ready_times


def _side_by_side(columns: list[Floats]) -> Floats:
    """Columns of ops one after another; those that no replay has told apart yet are everybody's."""
    replays = np.broadcast_shapes(*(column.shape[:-1] for column in columns))
    return np.concatenate([np.broadcast_to(column, (*replays, column.shape[-1])) for column in columns], axis=-1)
