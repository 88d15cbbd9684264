"""A hang, derived from the same run when nothing went wrong: what can still end, and what cannot.

The engine plays runs that end. Of one that does not, everything up to the standstill is the healthy run: an op that
needs nothing that is stuck ends as it did there, and one that needs something stuck, on its own rank or on another
member of its group, never ends. So a hang follows exactly from the healthy Timeline and from what its Program says an
op needs: the op before it on its stream, those of ``after``, and of a communication the other members. One thing is
left out: a transfer that still ends shares its links with the stuck ones as it did when they moved.

A host calls what its GPU will do ahead of it, up to the end of the step, where it reads the loss. A call counts as made
when, in the healthy run, what it needs is there; calls of one rank come in the order of its list.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.errors import ProgramError
from clustersim.core.program import Collective, Compute, Op, Program, Recv, Role, Send, Serve
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.engine.hang import RankCall, RankWait

Place = tuple[int, int]
"""An op of the Timeline on a rank: (rank, op)."""


class Times(NamedTuple):
    """Of one op on one rank, in the healthy run [s]; ``called`` : when what it needs was there."""

    called: float
    ready: float
    start: float
    end: float


class Stuck(NamedTuple):
    """What never happens: ops that are ``stuck`` by themselves; of ranks, the first op that they ``never_call``; ranks
    that are ``gone``."""

    stuck: frozenset[Place] = frozenset()
    never_call: Mapping[int, int] = {}
    gone: frozenset[int] = frozenset()


class HealthyRun:
    """A Program that was played, op by op and rank by rank.

    Raises :class:`ProgramError` for a Program whose order the run decides (servers), of which no hang can be derived.
    """

    def __init__(self, program: Program, timeline: Timeline) -> None:
        self.ops: list[Op] = [op for role in program.roles for op in role.ops]
        if any(isinstance(op, Serve) for op in self.ops):
            raise ProgramError("a hang is derived for ranks whose ops have an order; servers decide theirs in the run")
        self.timeline = timeline
        self.lists: dict[int, range] = {}
        self.role_of: dict[int, Role] = {}
        offset = 0
        for role in program.roles:
            for rank in role.ranks.tolist():
                self.lists[rank] = range(offset, offset + len(role.ops))
                self.role_of[rank] = role
            offset += len(role.ops)
        self.offset = {rank: ops.start for rank, ops in self.lists.items()}
        self.before = self._stream_order(program)
        self._rows: dict[int, tuple[object, dict[int, tuple[int, ...]]]] = {}
        self.times = self._times()
        self.meeting, self.members = self._meetings()

    def _stream_order(self, program: Program) -> list[int]:
        """Of each op, the one before it on its stream; -1 for none."""
        before: list[int] = []
        for role in program.roles:
            last: dict[str, int] = {}
            start = len(before)
            for i, op in enumerate(role.ops):
                before.append(last.get(op.stream, -1))
                last[op.stream] = start + i
        return before

    def needs(self, rank: int, op: int) -> list[int]:
        """Ops of the same rank that must have ended."""
        after = [self.offset[rank] + i for i in self.ops[op].after]
        return [*after, self.before[op]] if self.before[op] >= 0 else after

    def _times(self) -> dict[Place, Times]:
        spans = self.timeline.spans()
        columns = (spans[name].tolist() for name in ("rank", "op", "ready", "start", "end"))
        raw = {(rank, op): (ready, start, end) for rank, op, ready, start, end in zip(*columns, strict=True)}
        times: dict[Place, Times] = {}
        for rank, ops in self.lists.items():
            called = 0.0
            for op in ops:
                if (rank, op) not in raw:
                    continue
                after = (self.offset[rank] + i for i in self.ops[op].after)
                called = max([called, *(raw[rank, i][2] for i in after if (rank, i) in raw)])
                times[rank, op] = Times(min(called, raw[rank, op][0]), *raw[rank, op])
        return times

    def _meetings(self) -> tuple[dict[Place, int], list[list[Place]]]:
        """Of each communication on each rank its meeting, and who is in each."""
        number: dict[tuple[int, tuple[int, ...]], int] = {}
        meeting: dict[Place, int] = {}
        members: list[list[Place]] = []
        infos = self.timeline.ops
        for rank, ops in self.lists.items():
            for op in ops:
                groups = infos[op].detail.get("groups")
                if infos[op].kind == "compute" or groups is None or (rank, op) not in self.times:
                    continue
                row = self.group_of(groups, rank)
                key = min(op, *infos[op].detail.get("meets", (op,))), row
                index = number.setdefault(key, len(members))
                if index == len(members):
                    members.append([])
                members[index].append((rank, op))
                meeting[rank, op] = index
        return meeting, members

    def group_of(self, groups: object, rank: int) -> tuple[int, ...]:
        """The group of a rank, in order; ops share their tables of groups, so each is looked at once."""
        entry = self._rows.get(id(groups))
        if entry is None:
            table = np.atleast_2d(np.asarray(groups)).tolist()
            rows = {int(member): tuple(int(mate) for mate in row) for row in table for member in row}
            entry = self._rows[id(groups)] = (groups, rows)  # held, so that no other takes its id
        return entry[1][rank]

    def blocked(self, fault: Stuck) -> set[Place]:
        """Everything that never ends: what is stuck, what is never called, and what needs any of it."""
        never = {(rank, op) for rank, first in fault.never_call.items() for op in self.lists[rank] if op >= first}
        blocked = set(fault.stuck) | {place for place in never if place in self.times}
        order = sorted(self.times, key=lambda place: (self.times[place].start, place[1]))
        grown = -1
        while grown != len(blocked):
            grown = len(blocked)
            for rank, op in order:
                if (rank, op) not in blocked and self._needs_blocked(rank, op, blocked):
                    blocked.add((rank, op))
                if (rank, op) in blocked and (rank, op) in self.meeting:
                    blocked.update(self.members[self.meeting[rank, op]])
        return blocked

    def _needs_blocked(self, rank: int, op: int, blocked: set[Place]) -> bool:
        return any((rank, needed) in blocked for needed in self.needs(rank, op))

    def calls(self, rank: int, blocked: set[Place], fault: Stuck) -> Iterator[RankCall]:
        """The communications that a rank has called, up to the end of the step in which it stands."""
        standing = [op for op in self.lists[rank] if (rank, op) in blocked]
        step = self.ops[standing[0]].step if standing else max((op.step for op in self.ops), default=0)
        last = fault.never_call.get(rank, self.lists[rank].stop)
        count: defaultdict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
        for op in self.lists[rank]:
            if op >= last or self.ops[op].step > step or (rank, op) not in self.meeting:
                continue
            info = self.timeline.ops[op]
            group = self.group_of(info.detail["groups"], rank)
            communicator = _communicator(self.ops[op])
            count[communicator, group] += 1
            yield self._call(rank, op, count[communicator, group], group, communicator, blocked)

    def _call(
        self, rank: int, op: int, seq: int, group: tuple[int, ...], communicator: str, blocked: set[Place]
    ) -> RankCall:
        own = self.ops[op]
        times = self.times[rank, op]
        stands = (rank, op) in blocked
        started = None if self._needs_blocked(rank, op, blocked) else times.ready
        is_message = isinstance(own, Send | Recv)
        return RankCall(
            op=op,
            seq=seq,
            kind=self.timeline.ops[op].kind,
            nbytes=self.timeline.ops[op].nbytes,
            dtype=str(self.timeline.ops[op].detail.get("dtype", "fp32")),
            communicator=communicator,
            group=group,
            created=times.called,
            started=started,
            ended=None if stands else times.end,
            name=own.name,
            step=own.step,
            peer=next((mate for mate in group if mate != rank), -1) if is_message else -1,
        )

    def wait(self, rank: int, calls: tuple[RankCall, ...], blocked: set[Place], fault: Stuck) -> RankWait | None:
        """In what a rank waits, and for whom; None where all that it called has ended."""
        pending = [call for call in calls if call.ended is None]
        call = next((c for c in pending if c.started is not None), pending[0] if pending else None)
        if call is None:
            return None
        places = [place for place in self.members[self.meeting[rank, call.op]] if place[0] != rank]
        late = [peer for peer, op in places if self._is_absent(peer, op, blocked, fault)]
        return RankWait(rank, call, tuple(sorted(late)))

    def _is_absent(self, rank: int, op: int, blocked: set[Place], fault: Stuck) -> bool:
        """Whether a rank has not started, or is not there any more."""
        never = rank in fault.never_call and op >= fault.never_call[rank]
        return never or rank in fault.gone or self._needs_blocked(rank, op, blocked)

    def steps(self, blocked: set[Place]) -> tuple[int, float]:
        """How many steps all ranks have ended, and when [s] the last of these ended."""
        first_stuck = min((self.ops[op].step for _, op in blocked), default=0)
        ends = [times.end for (_, op), times in self.times.items() if self.ops[op].step < first_stuck]
        return first_stuck, max(ends, default=0.0)

    def first_call(
        self, rank: int, moment: float, kinds: tuple[type[Op], ...] = (Collective, Send, Recv), opens_step: bool = False
    ) -> int | None:
        """The first communication of some kinds that a rank calls at this moment or later, where it ``opens_step`` the
        first one of its step; None for none."""
        step = -1
        for op in self.lists[rank]:
            if (rank, op) not in self.meeting or not isinstance(self.ops[op], kinds):
                continue
            opens = self.ops[op].step != step
            step = self.ops[op].step
            if self.times[rank, op].called >= moment and (opens or not opens_step):
                return op
        return None

    def first_kernel(self, rank: int, moment: float) -> int | None:
        """The kernel that a rank's GPU runs at a moment, or the next one; None for none."""
        kernels = [
            (self.times[rank, op].start, op)
            for op in self.lists[rank]
            if isinstance(self.ops[op], Compute) and self.timeline.ops[op].bound != "host" and (rank, op) in self.times
        ]
        return next((op for _, op in sorted(kernels) if self.times[rank, op].end > moment), None)

    def under_way(self, rank: int, moment: float) -> frozenset[Place]:
        """Everything of a rank that has not ended by a moment."""
        return frozenset(
            (rank, op) for op in self.lists[rank] if (rank, op) in self.times and self._late(rank, op, moment)
        )

    def _late(self, rank: int, op: int, moment: float) -> bool:
        return self.times[rank, op].end > moment

    def crossing(self, links: tuple[int, ...], moment: float, topology: Topology, node_of: Ints) -> frozenset[Place]:
        """Communications that cross one of these links and have not ended by a moment. Of an op of several groups,
        those with a rank on a machine that the link touches and one elsewhere."""
        use = self.timeline.links
        if use is None:
            return frozenset()
        wanted = set(links)
        loads = {i for i, (crossed, _) in enumerate(use.loads) if not wanted.isdisjoint(crossed.tolist())}
        struck = np.isin(use.transfer_load, list(loads)) & (use.payload > 0)
        ops = set(use.transfer_op[struck].tolist())
        ends = np.concatenate([topology.link_src[list(links)], topology.link_dst[list(links)]])
        nodes = {int(node) for node in topology.vertex_node[ends] if node >= 0}
        places: set[Place] = set()
        for place, at_meeting in self.meeting.items():
            members = self.members[at_meeting]
            homes = {int(node_of[rank]) for rank, _ in members}
            touched = len(homes) > 1 and (not nodes or bool(homes & nodes))
            one_node = len(homes) == 1 and homes <= nodes
            if any(op in ops for _, op in members) and (touched or one_node) and self._late(*place, moment):
                places.add(place)
        return frozenset(places)


def _communicator(op: Op) -> str:
    return op.communicator if isinstance(op, Collective) else op.stream
