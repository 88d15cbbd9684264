"""What waits for what in a run: its ops as a graph that can be played again.

The Timeline says which op waits for which (:attr:`OpInfo.after`, streams, and who meets whom) and how long each took.
Ops that meet are one node; what hidden communication cost a kernel is told apart from the kernel's own time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.errors import TraceError
from clustersim.core.memo import kept_with_first
from clustersim.core.op_infos import each_kind, kinds, of_each, takes_sms
from clustersim.core.program import COMPUTE_STREAM
from clustersim.core.timeline import Timeline
from clustersim.explain.columns import RankSubset, did
from clustersim.explain.pace import MOST_SPANS, classes


@dataclass(eq=False)
class MeetingTable:
    """Who comes to which meeting from which op.

    op, rank, meeting : (e,) int, ``op`` its position in the node, ``rank`` its number among those of the op's role;
        sorted by meeting. first : (m,) int, where each meeting begins in them. n_ops : of the node.
    place : (e,) int, where each is in the columns of the node's ops, put one after another.
    """

    op: Ints
    rank: Ints
    place: Ints
    meeting: Ints
    first: Ints
    n_ops: int

    @cached_property
    def of_op(self) -> list[Ints]:
        """Per op, which of those who come are its own."""
        return [np.flatnonzero(self.op == slot) for slot in range(self.n_ops)]


_NOTHING = np.zeros(0, dtype=np.int64)
_NOBODY = MeetingTable(_NOTHING, _NOTHING, _NOTHING, _NOTHING, _NOTHING, 0)


@dataclass(frozen=True, eq=False)
class GraphNode:
    """Ops that meet, or one op alone.

    ops : indices in :attr:`Timeline.ops`. met : who meets whom. seconds : (m,) float [s], from start to end of each
        meeting. computes : whether it is one compute op.
    """

    ops: tuple[int, ...]
    met: MeetingTable = _NOBODY
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    computes: bool = False


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
        did = {i: ~np.isnan(column) for i, column in self.seconds.items()}
        for node in self.nodes:
            for op, positions in zip(node.ops, node.met.of_op, strict=False):
                did[op] = np.zeros(self.size[op], dtype=np.bool_)
                did[op][node.met.rank[positions]] = True
        nobody = {op: np.zeros(size, dtype=np.bool_) for op, size in enumerate(self.size) if op not in did}
        return nobody | {op: mask for op, mask in did.items() if not len(mask) or not mask.all()}


def graph(timeline: Timeline, ranks: Ints | None = None) -> RunGraph:
    """The graph of a simulated run; ``ranks``, ascending, are who is in it.

    Raises :class:`TraceError` for a measured one: its order of things is not known.
    """
    if timeline.source != "simulated":
        raise TraceError("only a simulated run can be replayed: a measured one does not say what waits for what")
    if ranks is None:
        few = int(timeline.per_op()["ranks"].sum()) <= MOST_SPANS
        ranks = np.arange(timeline.world_size) if few else classes(timeline).ranks
    subsets = _of_roles(timeline, ranks)
    needs = _needs(timeline)
    root_of = _joined(timeline)
    members: dict[int, list[int]] = {}
    for i in range(len(timeline.ops)):
        members.setdefault(root_of[i], []).append(i)
    order, settled = _ordered(members, root_of, needs)
    known_tables: dict[object, MeetingTable] = {}
    nodes = [_node(subsets, tuple(members[key]), known_tables) for key in order]
    seconds = {i: subsets[op.role].column(i, "ready") for i, op in each_kind(timeline.ops) if op.kind == "compute"}
    lost: dict[int, Floats] = {}
    for role, subset in subsets.items():
        own_ops = [i for i, op in each_kind(timeline.ops) if op.role == role]
        lost |= lost_beside(subset, {i: seconds[i] for i in own_ops if i in seconds}, own_ops)
    for i, cost in lost.items():
        seconds[i] = np.maximum(seconds[i] - cost, 0.0)
    size: list[int] = of_each(timeline.ops, lambda op: len(subsets[op.role].ranks), np.int64).tolist()
    return RunGraph(timeline, ranks, needs, nodes, settled, size, seconds, lost)


def _of_roles(timeline: Timeline, ranks: Ints) -> dict[str, RankSubset]:
    """Of each role those of its ranks that are in the graph."""
    names = list(dict.fromkeys(op.role for op in kinds(timeline.ops)))
    number = of_each(timeline.ops, lambda op: names.index(op.role), np.int64)
    return {name: RankSubset(timeline, ranks[did(timeline, number == k)[ranks]]) for k, name in enumerate(names)}


def _needs(timeline: Timeline) -> list[tuple[int, ...]]:
    """What each op waits for on its own rank: ``after``, and the op before it on its stream, unless that is a queue."""
    last: dict[tuple[str, str], int] = {}
    served = queues(timeline)
    needs = []
    for i, op in enumerate(timeline.ops):
        key = (op.role, op.stream)
        before = (last[key],) if key in last and key not in served else ()
        needs.append(tuple(sorted({*op.after, *before})))
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

    for i, op in each_kind(timeline.ops):
        for met_op in op.detail.get("meets", ()):
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


def _node(subsets: dict[str, RankSubset], ops: tuple[int, ...], known_tables: dict[object, MeetingTable]) -> GraphNode:
    """Ops that meet. Most ops of a step have the groups of others: ``known_tables`` are their meetings."""
    all_ops = next(iter(subsets.values())).timeline.ops
    infos = [all_ops[op] for op in ops]
    if infos[0].kind == "compute":
        return GraphNode(ops, computes=True)
    columns = [subsets[info.role].column(op, "start") for op, info in zip(ops, infos, strict=True)]
    groups = [info.detail.get("groups") for info in infos]
    alike = (
        (info.kind, info.role, id(group), np.isnan(c).tobytes())
        for info, group, c in zip(infos, groups, columns, strict=True)
    )
    key = ops if any(group is None for group in groups) else tuple(alike)
    if key not in known_tables:
        known_tables[key] = _meetings([subsets[info.role] for info in infos], ops, columns)
    table = known_tables[key]
    return GraphNode(ops, table, np.concatenate(columns)[table.place[table.first]])


def _meetings(subsets: list[RankSubset], ops: tuple[int, ...], columns: list[Floats]) -> MeetingTable:
    """Told apart by their groups; without groups, by when they started. ``columns`` : nan where an op did not run."""
    parts: list[tuple[Ints, Ints, Ints]] = []
    numbers: dict[bytes, int] = {}
    for slot, (op, seconds, subset) in enumerate(zip(ops, columns, subsets, strict=True)):
        info = subset.timeline.ops[op]
        groups = info.detail.get("groups")
        if groups is None:
            places, spans = subset.times(op)
            starts, number = np.unique(spans.start, return_inverse=True)
            meeting_numbers = [numbers.setdefault(b"%r" % s, len(numbers)) for s in starts.tolist()]
            meeting_of = np.array(meeting_numbers, dtype=np.int64)[number]
        else:
            table = np.asarray(groups, dtype=np.int64)
            side = {"send": slice(0, 1), "recv": slice(1, 2)}.get(info.kind, slice(None))
            ids = np.array([numbers.setdefault(g.tobytes(), len(numbers)) for g in table], dtype=np.int64)
            members = table[:, side]
            places = subset.place[members.ravel()]
            meeting_of = np.repeat(ids, members.shape[1])
        ran = (places >= 0) & ~np.isnan(seconds[places])
        parts.append((np.full(int(ran.sum()), slot, dtype=np.int64), places[ran], meeting_of[ran]))
    slot_of, rank, meeting = (np.concatenate(c) for c in zip(*parts, strict=True))
    order = np.argsort(meeting, kind="stable")
    _, first, dense = np.unique(meeting[order], return_index=True, return_inverse=True)
    before = np.cumsum([0, *(len(column) for column in columns)])
    place = before[slot_of[order]] + rank[order]
    return MeetingTable(slot_of[order], rank[order], place, dense, first, len(ops))


def lost_beside(
    subset: RankSubset, seconds: dict[int, Floats], among: Iterable[int] | None = None
) -> dict[int, Floats]:
    """Per compute op and rank, what hidden collectives cost it [s]: the engine's own rule, read off the Timeline.

    A collective, of the ops ``among`` (None: of all), costs the rank's next compute op ``overlap_slowdown`` times the
    time both were busy; a hop that another one's kernel makes costs nothing.
    """
    slowdown = subset.timeline.stats.get("overlap_slowdown", 0.0)
    ops = subset.timeline.ops
    if not slowdown:
        return {}
    main = [i for i in seconds if ops[i].stream == COMPUTE_STREAM]
    candidates = range(len(ops)) if among is None else among
    talks = [i for i in candidates if takes_sms(ops[i])]
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
    for k, i in enumerate(ops):
        places, spans = subset.times(i)
        start[k, places], end[k, places] = spans.start, spans.end
    return start, end


def _busy(low: Floats, high: Floats, moments: Floats) -> Floats:
    """Seconds of disjoint sorted intervals before each moment."""
    before = np.concatenate([[0.0], np.cumsum(high - low)])
    position = np.searchsorted(low, moments, side="right")
    last = np.maximum(position - 1, 0)
    inside = np.where(position > 0, np.minimum(moments, high[last]) - low[last], 0.0)
    busy: Floats = before[last] + inside
    return busy
