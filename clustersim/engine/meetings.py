"""Who meets whom: the transfers of a Program, and the ops of each role that take part in them.

A *meeting* is a collective of one group, or a send with its recv. Ranks arrive at a meeting when their op could begin;
it starts when the last one is there. Meetings whose members come from the same ops are kept together as the columns of
one :class:`Site`, so that an op on sixteen thousand ranks stays one object.

Matching follows NCCL: the k-th collective a rank issues on a communicator meets the k-th its peers issue, and they must
be the same collective. A send meets the recv with its tag that its peer uses for the k-th time on that pair.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from clustersim.collectives.base import Request
from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, Program, Recv, Role, Send
from clustersim.engine.inside import stretch_plans
from clustersim.engine.pairs import OpKey, Pairs, pairs
from clustersim.engine.planning import GroupPlans, PlanBook
from clustersim.engine.sites import Site, SiteSide
from clustersim.engine.stretches import Stretch, StretchTemplate

Meet: TypeAlias = Collective | Send | Recv
"""Ops that need others."""


class _MeetingCall(msgspec.Struct, frozen=True, eq=False):
    """One op's use of one meeting that spans ops: which positions of its role come."""

    key: OpKey
    op: Collective
    ranks: Ints
    positions: Ints


class _SiteDraft(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A site without plan and numbers."""

    ops: tuple[OpKey, ...]
    ranks: Ints
    op: Meet
    columns: list[Ints]
    apart: bool = False


def sites(program: Program, book: PlanBook) -> tuple[Site, ...]:
    """Every meeting of a Program, with its plan.

    Raises
    ------
    ProgramError : where members issue a communicator's collectives in different orders, or send and recv disagree.
    """
    drafts: list[_SiteDraft] = []
    calls: dict[object, list[_MeetingCall]] = {}
    for r, role in enumerate(program.roles):
        uses: dict[object, int] = defaultdict(int)
        places = _RolePlaces(role, program.world_size)
        for i, op in enumerate(role.ops):
            if isinstance(op, Collective):
                inside, across = places.split(op.groups)
                if len(inside):
                    drafts.append(_SiteDraft(((r, i),), inside, op, [places.meeting_of(inside)]))
                for ranks in across:
                    name = op.communicator, tuple(sorted(ranks.tolist()))
                    call = _MeetingCall((r, i), op, ranks, np.flatnonzero(np.isin(role.ranks, ranks)))
                    calls.setdefault((name, uses[name]), []).append(call)
                    uses[name] += 1
    paired = [_paired(pair, program.roles) for pair in pairs(program)]
    return _numbered(drafts + _joined(calls, program.roles) + paired, book)


class _RolePlaces:
    """Where global ranks are in one role, remembered per groups array since ops share them."""

    def __init__(self, role: Role, world_size: int) -> None:
        self.at = np.full(world_size, -1, dtype=np.int64)
        self.at[role.ranks] = np.arange(len(role.ranks))
        self.n = len(role.ranks)
        self._splits: dict[int, tuple[Ints, Ints, Ints]] = {}
        self._members: dict[int, tuple[Ints, Ints]] = {}

    def split(self, groups: Ints) -> tuple[Ints, Ints]:
        """Rows of ``groups`` wholly inside the role, and those partly inside."""
        if id(groups) not in self._splits:
            present = (self.at[groups] >= 0).sum(axis=1)
            complete = present == groups.shape[1]
            inside = groups if complete.all() else groups[complete]
            self._splits[id(groups)] = groups, inside, groups[(present > 0) & ~complete]
        return self._splits[id(groups)][1:]

    def meeting_of(self, groups: Ints) -> Ints:
        """(n_ranks,) row of ``groups`` each rank of the role is in; -1 for none."""
        if id(groups) not in self._members:
            column = np.full(self.n, -1, dtype=np.int64)
            column[self.at[groups]] = np.arange(len(groups))[:, None]
            self._members[id(groups)] = groups, column
        return self._members[id(groups)][1]


def _paired(met: Pairs, roles: tuple[Role, ...]) -> _SiteDraft:
    """Sends and recvs of one op as a site: the other side is one op, or an op for each meeting."""
    apart = len(met.others) > 1
    columns = [_places(len(roles[met.key[0]].ranks), met.positions)]
    if apart:
        columns += list(np.arange(len(met.others))[:, None])
    elif met.others:
        columns.append(_places(len(roles[met.others[0][0]].ranks), met.other_positions))
    return _SiteDraft((met.key, *met.others), met.ranks, met.op, columns, apart)


def _places(n: int, positions: Ints) -> Ints:
    """Of each of a role's ``n`` ranks its meeting, of those at which ``positions`` meet, in order; -1 for none."""
    if n == len(positions) == 1:
        return _ONLY
    column = np.full(n, -1, dtype=np.int64)
    column[positions] = np.arange(len(positions))
    return column


def _joined(calls: dict[object, list[_MeetingCall]], roles: tuple[Role, ...]) -> list[_SiteDraft]:
    """Calls that meet, gathered by the ops taking part."""
    together: dict[tuple[OpKey, ...], list[list[_MeetingCall]]] = {}
    for meeting in calls.values():
        for call in meeting[1:]:
            _must_agree(roles, meeting[0], call)
        together.setdefault(tuple(call.key for call in meeting), []).append(meeting)
    drafts = []
    for ops, meetings in together.items():
        columns = []
        for side, (role, _) in enumerate(ops):
            column = np.full(len(roles[role].ranks), -1, dtype=np.int64)
            for g, meeting in enumerate(meetings):
                column[meeting[side].positions] = g
            columns.append(column)
        ranks = np.array([meeting[0].ranks for meeting in meetings], dtype=np.int64)
        drafts.append(_SiteDraft(ops, ranks, meetings[0][0].op, columns))
    return drafts


def _must_agree(roles: tuple[Role, ...], first: _MeetingCall, second: _MeetingCall) -> None:
    if _terms(first) == _terms(second):
        return
    who = [
        f"rank {roles[c.key[0]].ranks[c.positions[0]]} (role {roles[c.key[0]].name!r}, op {c.key[1]} {c.op.name!r})"
        f" calls {_words(c)}"
        for c in (first, second)
    ]
    rule = f"all members of communicator {first.op.communicator!r} must issue the same collectives in the same order"
    raise ProgramError(f"{who[0]} where {who[1]}; {rule}")


def _terms(call: _MeetingCall) -> tuple[object, ...]:
    op = call.op
    return op.kind, op.nbytes, op.dtype, op.root, call.ranks.tolist()


def _words(call: _MeetingCall) -> str:
    op = call.op
    members = ", ".join(map(str, call.ranks[:4].tolist())) + (", ..." if len(call.ranks) > 4 else "")
    return f"{op.kind} of {op.nbytes:.0f} bytes {op.dtype}, root {op.root}, on ranks {members}"


def _terms_of(op: Meet, book: PlanBook) -> tuple[Any, ...]:
    """What an op asks for: its communicator, where its ranks stand for others, and the fields of a :class:`Request`."""
    if isinstance(op, Collective):
        name = op.communicator if book.groups.whole else ""
        asked_for = op.kind, op.nbytes, op.dtype, op.redop, op.root, op.algorithm, op.protocol, op.matrix, op.kernel
        return name, *asked_for
    return "", "send", op.nbytes


_ONLY = np.zeros(1, dtype=np.int64)
"""The one rank of its role."""


def _numbered(drafts: list[_SiteDraft], book: PlanBook) -> tuple[Site, ...]:
    """Sites in order of their first op, so that ids of meetings follow (role, op, group)."""
    members: dict[tuple[int, int], tuple[Any, ...]] = {}
    sites = []
    first = 0
    same = _EqualArrays()
    drafts = sorted(drafts, key=lambda d: d.ops)
    ranks = [same.of(draft.ranks) for draft in drafts]
    for draft, who, plans in zip(drafts, ranks, _planned(drafts, ranks, book), strict=True):
        sides = []
        for k, (key, column) in enumerate(zip(draft.ops, draft.columns, strict=True)):
            if draft.apart and k:
                sides.append(SiteSide(key, column, True, _ONLY, _ONLY, True))
                continue
            column = same.of(column)
            shape = id(column), len(who)
            if shape not in members:
                members[shape] = _members(column, len(who))
            sides.append(SiteSide(key, column, *members[shape]))
        sites.append(Site(first, tuple(sides), who, plans, draft.apart))
        first += len(who)
    return tuple(sites)


def _planned(drafts: list[_SiteDraft], ranks: list[Ints], book: PlanBook) -> list[GroupPlans]:
    """The plans of each draft. What is asked alike is planned together, so that the stages of a pipeline are."""
    # Ops share their groups, so asking by the array itself saves reading it for each of them.
    asked = [_asked(draft.op, who, book) for draft, who in zip(drafts, ranks, strict=True)]
    inner = _InnerTerms(book)
    requests: dict[tuple[Any, ...], dict[int, Ints]] = defaultdict(dict)
    for draft, asks, who in zip(drafts, asked, ranks, strict=True):
        for each in inner.of(draft.op, who) if isinstance(draft.op, Stretch) else (asks,):
            requests[each][id(who)] = who
    plans_of: dict[tuple[tuple[Any, ...], int], GroupPlans] = {}
    for asks, rank_sets in requests.items():
        plans = book.plans(Request(*asks[1:-1]), np.concatenate(list(rank_sets.values())), asks[0])
        ends = np.cumsum([0, *map(len, rank_sets.values())]).tolist()
        plans_of.update(
            ((asks, name), plans.part(slice(*bounds))) for name, bounds in zip(rank_sets, pairwise(ends), strict=True)
        )
    for draft, asks, who in zip(drafts, asked, ranks, strict=True):
        if isinstance(draft.op, Stretch) and (asks, id(who)) not in plans_of:
            each_plans = [plans_of[each, id(who)] for each in inner.of(draft.op, who)]
            plans_of[asks, id(who)] = stretch_plans(inner.template(draft.op), each_plans, draft.columns[0])
    return [plans_of[asks, id(who)] for asks, who in zip(asked, ranks, strict=True)]


def _asked(op: Meet, who: Ints, book: PlanBook) -> tuple[Any, ...]:
    """What an op asks for, with the size of its groups; of a stretch its template."""
    return (id(op.template),) if isinstance(op, Stretch) else (*_terms_of(op, book), who.shape[1])


class _InnerTerms:
    """What the collectives of stretches ask for, by template."""

    def __init__(self, book: PlanBook) -> None:
        self._book = book
        self._known: dict[tuple[int, int], list[tuple[Any, ...]]] = {}

    def template(self, op: Stretch) -> StretchTemplate:
        """Of a stretch."""
        return cast(StretchTemplate, op.template)

    def of(self, op: Stretch, who: Ints) -> list[tuple[Any, ...]]:
        """Of each collective of a stretch, in order."""
        key = id(op.template), who.shape[1]
        if key not in self._known:
            inner = (each for each in self.template(op).ops if isinstance(each, Collective))
            self._known[key] = [_asked(each, who, self._book) for each in inner]
        return self._known[key]


class _EqualArrays:
    """Equal arrays as one, so that they are told by what they are and looked at once."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], bytes], Ints] = {}
        self._held: dict[int, tuple[Ints, Ints]] = {}

    def of(self, array: Ints) -> Ints:
        """The array, or the equal one that came first."""
        if id(array) not in self._held:
            self._held[id(array)] = array, self._known.setdefault((array.shape, array.tobytes()), array)
        return self._held[id(array)][1]


def _members(column: Ints, n: int) -> tuple[Any, ...]:
    """Of a side's column of ``n`` meetings: what :class:`SiteSide` has besides, in its order."""
    order = np.argsort(column, kind="stable")
    ptr = np.searchsorted(column[order], np.arange(n + 1))
    count = np.diff(ptr)
    per_meeting = int(count[0]) if n and (count == count[0]).all() else 0
    everyone = bool(column.min() >= 0)
    straight = bool(np.array_equal(order, np.arange(len(order))))
    pieces: dict[int, Ints | slice | int] = {}
    gathers = everyone and per_meeting > 1
    leaders = order[ptr[:-1]] if gathers else order[:0]
    return everyone, order, ptr, False, per_meeting, straight, pieces, gathers, leaders
