"""Nodes of a run's graph: one op, ops that meet, or a chain of ops; and who meets whom in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.op_infos import kind_of, kinds
from clustersim.explain.columns import RankSubset
from clustersim.explain.op_chains import ALONE, COMPUTES


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
    """Ops that meet, one op alone, or a chain.

    ops : indices in :attr:`Timeline.ops`. met : who meets whom. seconds : (m,) float [s], from start to end of each
        meeting. computes : whether it is one compute op.
    talks : of a chain (c,) bool, which of its ops are collectives: each has the meetings ``met``, and ``seconds`` is
        (t, m) of all t of them. None of what is no chain.
    """

    ops: tuple[int, ...]
    met: MeetingTable = _NOBODY
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    computes: bool = False
    talks: Bools | None = None

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ops that wait for others than those of the node."""
        return self.ops if self.talks is None else self.ops[:1]

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ops that others may wait for."""
        return self.ops if self.talks is None else self.ops[-1:]


class GraphNodes:
    """Makes nodes of a graph. Most ops of a step have the groups of others: their meetings are kept.

    took : per op (size,) float [s], nan where it did not run.
    """

    def __init__(self, subsets: Mapping[str, RankSubset], took: Sequence[Floats]) -> None:
        self._subsets, self._took = subsets, took
        self._ops = next(iter(subsets.values())).timeline.ops if subsets else ()
        self._infos, self._kind_of = kinds(self._ops), kind_of(self._ops)
        self._known: dict[object, MeetingTable] = {}
        self._of_sort: list[MeetingTable] = [_NOBODY]
        self._sorts = np.zeros(0, dtype=np.int64)

    def sorts(self, whole: Bools) -> Ints:
        """(n_ops,) int, what each op is for a chain; ``whole`` : (n_ops,) bool, whether it meets no other op and all
        of its role do it."""
        number_of: dict[object, int] = {}
        sort_of = np.full(len(self._infos), ALONE)
        kinds_there, places = np.unique(self._kind_of[whole], return_index=True)
        for kind, op in zip(kinds_there.tolist(), np.flatnonzero(whole)[places].tolist(), strict=True):
            info = self._infos[kind]
            groups = info.detail.get("groups")
            if info.kind == "compute":
                sort_of[kind] = COMPUTES
            elif groups is not None and info.kind not in {"send", "recv"}:
                table = self._table((op,))
                key = info.role, table.rank.tobytes(), table.first.tobytes()
                if len(table.rank) == len(self._took[op]):
                    number = sort_of[kind] = number_of.setdefault(key, len(self._of_sort))
                    self._of_sort += [table] if number == len(self._of_sort) else []
        self._sorts = np.where(whole, sort_of[self._kind_of], ALONE)
        return self._sorts

    def chain(self, ops: list[int]) -> GraphNode:
        """Ops one after another, whose collectives have the same meetings."""
        sorts = self._sorts[ops]
        met = self._of_sort[sorts.max()]
        talks = sorts != COMPUTES
        first = met.rank[met.first]
        seconds = [self._took[op][first] for op, talk in zip(ops, talks.tolist(), strict=True) if talk]
        return GraphNode(tuple(ops), met, np.array(seconds).reshape(len(seconds), len(first)), talks=talks)

    def node(self, ops: tuple[int, ...]) -> GraphNode:
        """Ops that meet, or one alone."""
        if self._infos[self._kind_of[ops[0]]].kind == "compute":
            return GraphNode(ops, computes=True)
        table = self._table(ops)
        columns = [self._took[op] for op in ops]
        return GraphNode(ops, table, np.concatenate(columns)[table.place[table.first]])

    def _table(self, ops: tuple[int, ...]) -> MeetingTable:
        infos = [self._infos[self._kind_of[op]] for op in ops]
        columns = [self._took[op] for op in ops]
        groups = [info.detail.get("groups") for info in infos]
        alike = (
            (info.kind, info.role, id(group), np.isnan(c).tobytes())
            for info, group, c in zip(infos, groups, columns, strict=True)
        )
        key = ops if any(group is None for group in groups) else tuple(alike)
        if key not in self._known:
            self._known[key] = _meetings([self._subsets[info.role] for info in infos], ops, columns)
        return self._known[key]


def _meetings(subsets: list[RankSubset], ops: tuple[int, ...], columns: list[Floats]) -> MeetingTable:
    """Told apart by their groups; without groups, by when they started. ``columns`` : nan where an op did not run."""
    parts: list[tuple[Ints, Ints, Ints]] = []
    numbers: dict[bytes, int] = {}
    for slot, (op, seconds, subset) in enumerate(zip(ops, columns, subsets, strict=True)):
        info = kinds(subset.timeline.ops)[kind_of(subset.timeline.ops)[op]]
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
