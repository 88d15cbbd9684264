"""What waits for what in a run: its ops as a graph that can be played again.

The Timeline says which op waits for which (:attr:`OpInfo.after`, streams, and who meets whom) and how long each took.
Ops that meet are one node; what hidden communication cost a kernel is told apart from the kernel's own time. Ops that
nothing but the next waits for can be one node, too (:mod:`clustersim.explain.op_chains`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.errors import TraceError
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import after_of, each_kind, kind_of, kinds, of_each, takes_sms
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import Timeline
from clustersim.explain.columns import RankSubset, did
from clustersim.explain.graph_nodes import GraphNode, GraphNodes
from clustersim.explain.op_chains import chains
from clustersim.explain.pace import MOST_SPANS, classes

_NO_TIME = np.zeros(0)


@dataclass(eq=False)
class RunGraph:
    """A run's graph: nodes in an order in which they can be played, and what each op waits for on its own rank.

    Parameters
    ----------
    ranks : (r,) int, who is in it: all, or of too many :func:`clustersim.explain.pace.classes`' choice. Those left
        out hold nobody up, so that the replay ends no later than one of all.
    needs : per op, indices of ops. nodes : see :class:`GraphNode`. settled : one pass over the nodes is enough.
    size : per op, how many of the ranks are of its role: its columns are of those alone, for nobody else can wait for
        it but in a meeting.
    seconds : per compute op (size,) float [s], without what hidden communication cost it; nan where it did not run.
        lost : the same for that cost.
    """

    timeline: Timeline
    ranks: Ints
    needs: list[tuple[int, ...]]
    nodes: list[GraphNode]
    settled: bool
    size: list[int]
    seconds: dict[int, Floats]
    lost: dict[int, Floats]

    @cached_property
    def did(self) -> dict[int, Bools]:
        """Per op that not all ranks of its role do, (size,) bool: who does it."""
        masks: dict[int, Bools] = {}
        for node in self.nodes:
            if node.talks is not None:  # a chain, which everybody does
                continue
            if node.computes:
                masks[node.ops[0]] = ~np.isnan(self.seconds[node.ops[0]])
                continue
            for slot, op in enumerate(node.ops):
                masks[op] = np.zeros(self.size[op], dtype=np.bool_)
                if node.met.n_ops:
                    masks[op][node.met.rank[node.met.of_op[slot]]] = True
        return {op: mask for op, mask in masks.items() if not len(mask) or not mask.all()}


def graph(
    timeline: Timeline,
    ranks: Ints | None = None,
    needs: list[tuple[int, ...]] | None = None,
    apart: Mapping[int, Collection[int]] | None = None,
) -> RunGraph:
    """The graph of a simulated run; ``ranks``, ascending, are who is in it.

    needs : :func:`needs_of` it, where they are known. apart : what some ops may wait for instead: chains of the others
        are a node each. None for a node an op.

    Raises :class:`TraceError` for a measured one: its order of things is not known.
    """
    if timeline.source != "simulated":
        raise TraceError("only a simulated run can be replayed: a measured one does not say what waits for what")
    if ranks is None:
        few = int(timeline.per_op()["ranks"].sum()) <= MOST_SPANS
        ranks = np.arange(timeline.world_size) if few else classes(timeline).ranks
    subsets = _of_roles(timeline, ranks)
    needs = needs_of(timeline) if needs is None else needs
    root_of = _joined(timeline)
    members: dict[int, list[int]] = {}
    for i, root in enumerate(root_of):
        members.setdefault(root, []).append(i)
    took, lost, whole = _durations(timeline, subsets)
    sizes = {name: len(subset.ranks) for name, subset in subsets.items()}
    size = of_each(timeline.ops, lambda op: sizes[op.role], np.int64)
    nodes_of = GraphNodes(subsets, took)
    chained: dict[int, list[int]] = {}
    if apart is not None:
        alone = np.bincount(root_of, minlength=len(root_of))[root_of] == 1
        straight, needs = chains(needs, apart, nodes_of.sorts(alone & whole), timeline.op_steps, size)
        chained = {ops[0]: ops for ops in straight}
    for head, ops in chained.items():
        for op in ops[1:]:
            del members[op]
            root_of[op] = head
    order, settled = _ordered(members, root_of, needs)
    nodes = [nodes_of.chain(chained[key]) if key in chained else nodes_of.node(tuple(members[key])) for key in order]
    seconds = {i: took[i] for i, op in each_kind(timeline.ops) if op.kind == "compute"}
    return RunGraph(timeline, ranks, needs, nodes, settled, size.tolist(), seconds, lost)


def _of_roles(timeline: Timeline, ranks: Ints) -> dict[str, RankSubset]:
    """Of each role those of its ranks that are in the graph."""
    names = list(dict.fromkeys(op.role for op in kinds(timeline.ops)))
    number = of_each(timeline.ops, lambda op: names.index(op.role), np.int64)
    return {name: RankSubset(timeline, ranks[did(timeline, number == k)[ranks]]) for k, name in enumerate(names)}


def _durations(timeline: Timeline, subsets: Mapping[str, RankSubset]) -> tuple[list[Floats], dict[int, Floats], Bools]:
    """Per op (size,) float [s], how long it took each rank of its role: a collective from its start, and a kernel, its
    time in a server's queue included, without what hidden communication cost it; nan where it did not run. That cost,
    of those that have one. And (n_ops,) bool, whether all of the role did it."""
    ops = timeline.ops
    role_of = of_each(ops, lambda op: list(subsets).index(op.role), np.int64)
    computes = of_each(ops, lambda op: op.kind == "compute", np.bool_)
    took: list[Floats] = [np.zeros(0)] * len(ops)
    lost: dict[int, Floats] = {}
    whole = np.zeros(len(ops), dtype=np.bool_)
    for number, subset in enumerate(subsets.values()):
        own = np.flatnonzero(role_of == number)
        row_of = np.full(len(ops), -1)
        row_of[own] = np.arange(len(own))
        table = np.full((len(own), len(subset.ranks)), np.nan)
        for sheet in timeline.sheets(subset.ranks, of_ops=row_of >= 0):
            since = np.where(computes[sheet.op], sheet.ready, sheet.start)
            table[row_of[sheet.op][:, None], subset.place[sheet.ranks]] = (sheet.end - since).T
        costs = lost_beside(subset, dict.fromkeys(own[computes[own]].tolist(), _NO_TIME), own.tolist())
        if costs:
            paid = row_of[list(costs)]
            table[paid] = np.maximum(table[paid] - np.stack(list(costs.values())), 0.0)
            lost |= costs
        whole[own] = ~np.isnan(table).any(axis=1)
        for i, column in zip(own.tolist(), table, strict=True):
            took[i] = column
    return took, lost, whole


def needs_of(timeline: Timeline) -> list[tuple[int, ...]]:
    """What each op waits for on its own rank: ``after``, and the op before it on its stream, unless that is a queue."""
    served = queues(timeline)
    infos = kinds(timeline.ops)
    streams = [(op.role, op.stream) for op in infos]
    after_others = [bool(op.after) for op in infos]
    last: dict[tuple[str, str], int] = {}
    needs: list[tuple[int, ...]] = []
    for i, kind in enumerate(kind_of(timeline.ops).tolist()):
        key = streams[kind]
        before = (last[key],) if key in last and key not in served else ()
        needs.append(tuple(sorted({*after_of(timeline.ops, i), *before})) if after_others[kind] else before)
        last[key] = i
    return needs


@kept_with_first(maxsize=None)
def queues(timeline: Timeline) -> set[tuple[str, str]]:
    """Streams whose work is done in order of arrival: compute that was ready before it could start."""
    _, op, _, ready, start, _ = timeline._rows()
    computes = of_each(timeline.ops, lambda op: op.kind == "compute", bool)
    late = set(np.unique(op[computes[op] & (start > ready)]).tolist())
    # What began when it was ready has one column for both.
    waited = (block for block in timeline.blocks if computes[block.op] and block.columns[1] is not block.columns[0])
    late.update(block.op for block in waited if np.any(block.start > block.ready))
    return {(timeline.ops[i].role, timeline.ops[i].stream) for i in late}


def _joined(timeline: Timeline) -> list[int]:
    """Per op the first op of its node."""
    parent = list(range(len(timeline.ops)))

    def root(i: int) -> int:
        """The first op of the node; ways to it become shorter."""
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    meeting = [op.detail.get("meets", ()) for op in kinds(timeline.ops)]
    for i, kind in enumerate(kind_of(timeline.ops).tolist()):
        for met_op in meeting[kind]:
            a = root(i)
            b = root(int(met_op))
            parent[max(a, b)] = min(a, b)
    return [root(i) for i in range(len(timeline.ops))]


def _ordered(members: dict[int, list[int]], root_of: list[int], needs: list[tuple[int, ...]]) -> tuple[list[int], bool]:
    """Nodes in an order that respects what they need, and whether there is one (else the rest follows by index)."""
    before = {key: {root_of[n] for i in ops for n in needs[i]} for key, ops in members.items()}
    sorter = TopologicalSorter({key: needed - {key} for key, needed in before.items()})
    order = list[int]()
    with suppress(CycleError):  # what no circle holds up is in order even so
        sorter.prepare()
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    left = sorted(members.keys() - set(order))
    # A node that needs itself (a rank sends what it has just received in the same node) takes a pass per hop.
    return order + left, not left and all(key not in needed for key, needed in before.items())


def lost_beside(
    subset: RankSubset, seconds: dict[int, Floats], among: Iterable[int] | None = None
) -> dict[int, Floats]:
    """Per compute op and rank, what hidden collectives cost it [s]: the engine's own rule, read off the Timeline.

    A collective, of the ops ``among`` (None: of all), costs the rank's next compute op ``overlap_slowdown`` times the
    time both were busy; a hop that another one's kernel makes costs nothing.
    """
    slowdown = subset.timeline.stats.get("overlap_slowdown", 0.0)
    if not slowdown:
        return {}
    ops = subset.timeline.ops
    on_main = of_each(ops, lambda op: op.stream == COMPUTE_STREAM, np.bool_)
    talking = of_each(ops, takes_sms, np.bool_)
    main = [i for i in seconds if on_main[i]]
    talks = [i for i in (range(len(ops)) if among is None else among) if talking[i]]
    began, over = _matrix(subset, main)
    started, ended = _matrix(subset, talks)
    lost = np.zeros_like(began)
    for rank in range(len(subset.ranks)):
        kernels = np.flatnonzero(~np.isnan(began[:, rank]))
        kernels = kernels[np.argsort(began[kernels, rank], kind="stable")]
        ran = np.flatnonzero(~np.isnan(started[:, rank]))
        if not len(kernels) or not len(ran):
            continue
        low = began[kernels, rank]
        high = over[kernels, rank]
        end = ended[ran, rank]
        beside = _busy(low, high, end) - _busy(low, high, started[ran, rank])
        payer = np.searchsorted(low, end * (1 - 1e-12), side="left")
        paid = payer < len(kernels)
        np.add.at(lost[:, rank], kernels[payer[paid]], slowdown * beside[paid])
    return {i: lost[k] for k, i in enumerate(main)}


def _matrix(subset: RankSubset, ops: list[int]) -> tuple[Floats, Floats]:
    """(len(ops), r) float [s], start and end of each op on each rank; nan where it did not run."""
    start, end = (np.full((len(ops), len(subset.ranks)), np.nan) for _ in range(2))
    row_of = np.full(len(subset.timeline.ops), -1)
    row_of[ops] = np.arange(len(ops))
    for sheet in subset.timeline.sheets(subset.ranks, of_ops=row_of >= 0):
        cells = row_of[sheet.op][:, None], subset.place[sheet.ranks]
        start[cells], end[cells] = sheet.start.T, sheet.end.T
    return start, end


def _busy(low: Floats, high: Floats, moments: Floats) -> Floats:
    """Seconds of disjoint sorted intervals before each moment."""
    before = np.concatenate([[0.0], np.cumsum(high - low)])
    position = np.searchsorted(low, moments, side="right")
    last = np.maximum(position - 1, 0)
    inside = np.where(position > 0, np.minimum(moments, high[last]) - low[last], 0.0)
    busy: Floats = before[last] + inside
    return busy
