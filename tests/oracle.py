"""The engine's reference: a Program played in the plainest way, one op of one rank at a time.

Read this before ``clustersim/engine``: it says what a run *is*, the engine says how to get there fast. Every op of
every rank is a SimPy process that waits for events; nothing is computed ahead of the clock, nothing is kept in columns,
and whenever a flow begins or ends, the shares of all flows are worked out afresh.

The rules, all of them:

1. An op of a rank is *ready* when the op before it on its stream and the ops it names in ``after`` have ended there.
2. Compute starts when it is ready and takes its duration, times the rank's pace in that step.
3. Serve ops of one stream queue up instead: first ready, first served, those of one instant by their place in the list.
4. A collective, or a send with its recv, is a *meeting*. It starts when the last member is ready, lasts its plan's
   latency and then as long as its bytes take, and ends for all members at once. A rank without a part in it passes.
5. A flow takes ``weight`` bytes of each of its links per byte of payload. Rates are max-min fair: all rise together
   until a link is full or a flow has reached its ceiling.
6. A collective that ends has cost the rank ``overlap_slowdown`` times the seconds in which its compute stream ran
   beside it, unless it is a hop of another one's kernel. The rank pays with the first Compute op that it begins on that
   stream at or after this end.

Plans (latency, bytes, links, weights, ceiling) come from a planner, as in the engine: this is a reference of playing,
not of planning.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import numpy as np
import simpy
from simpy.events import EventPriority

from clustersim.collectives.base import Group, Plan, Request
from clustersim.core.errors import ProgramError, TopologyError
from clustersim.core.mesh import Mesh
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, Op, Program, Recv, Role, Send, Serve, seconds
from clustersim.core.topology import Topology

INSTANT = 1e-12
"""Ends this close, relative to the time since 0, are one instant; so are two rates one rate."""

SOLVE = EventPriority(2)
"""Shares are worked out after everything else that happens at an instant."""

RELEASE = EventPriority(3)
"""Compute that may have to pay, and Serve ops, wait until every transfer that ends at the instant has ended."""

Waiting = Generator[simpy.Event, object, None]
Piece = tuple[float, float, float]
"""Start [s], end [s] and rate [bytes/s] of payload."""
NOTHING = Plan("none", "none", "none", 0, 0.0, 0.0, np.array([], dtype=np.int64), np.array([]), math.inf)
"""What a group of one has to do."""


@dataclass(eq=False)
class Meeting:
    """Ranks that meet: ``op`` is the row, in ``Timeline.ops``, of the first op that comes here.

    missing : members still to come. start [s] : when the last one was there. over : happens when it ends.
    pieces : what moved when.
    """

    op: int
    request: Request
    ranks: tuple[int, ...]
    plan: Plan
    over: simpy.Event
    missing: int
    start: float = 0.0
    pieces: list[Piece] = field(default_factory=list)


@dataclass(eq=False)
class Flow:
    """Bytes on their way: ``left`` at the moment ``since``, moving at ``rate``, over at ``end`` if nothing changes."""

    meeting: Meeting
    links: dict[int, float]
    left: float
    since: float
    rate: float = 0.0
    end: float = math.inf


@dataclass(frozen=True, eq=False)
class Played:
    """What happened. ``spans[rank, row of Timeline.ops]`` is (ready, start, end) [s]."""

    spans: dict[tuple[int, int], tuple[float, float, float]]
    meetings: list[Meeting]


def play(
    program: Program,
    topology: Topology,
    mesh: Mesh,
    planner: Callable[[Request, Group], Plan],
) -> Played:
    """Play a Program to its end.

    Raises :class:`ProgramError` where members disagree or ranks wait for each other forever, :class:`TopologyError`
    where a plan needs a link without bandwidth.
    """
    program.check()
    env = simpy.Environment()
    run = _Run(env, program, Meetings(env, program, topology, mesh, planner), topology)
    env.run()
    stuck = [key for key, event in run.done.items() if not event.triggered]
    if stuck:
        raise ProgramError(f"the program never ends: {len(stuck)} ops of ranks still wait, first (rank, op) {stuck[0]}")
    return Played(run.spans, list(run.meetings.all.values()))


class Meetings:
    """Who meets whom: ``of[rank, row]`` is where a rank's op takes part.

    Ranks of one role meet in the op they share. Ranks of several roles meet in the k-th collective that each role
    issues on this communicator for these members. The k-th send of a tag from one rank to another meets the k-th recv.
    """

    def __init__(
        self,
        env: simpy.Environment,
        program: Program,
        topology: Topology,
        mesh: Mesh,
        planner: Callable[[Request, Group], Plan],
    ) -> None:
        self.env = env
        self.topology = topology
        self.mesh = mesh
        self.planner = planner
        self.all: dict[object, Meeting] = {}
        self.of: dict[tuple[int, int], Meeting] = {}
        self._plans: dict[tuple[Request, tuple[int, ...]], Plan] = {}
        row = 0
        for role in program.roles:
            uses: Counter[object] = Counter()
            for op in role.ops:
                if isinstance(op, Collective):
                    self._collective(role, op, row, uses)
                elif isinstance(op, Send | Recv):
                    self._pair(role, op, row, uses)
                row += 1

    def _collective(self, role: Role, op: Collective, row: int, uses: Counter[object]) -> None:
        terms = op.kind, op.nbytes, op.dtype, op.redop, op.root, op.algorithm, op.protocol, op.matrix
        request = Request(*terms)
        for group in op.groups.tolist():
            here = sorted(set(group) & set(role.ranks.tolist()))
            if not here:
                continue
            name: object = row, tuple(group)
            if len(here) < len(group):
                name = op.communicator, tuple(sorted(group))
                uses[name] += 1
                name = name, uses[name]
            self._meet(name, here, row, request, tuple(group))

    def _pair(self, role: Role, op: Send | Recv, row: int, uses: Counter[object]) -> None:
        for rank, peer in zip(role.ranks.tolist(), op.peer.tolist(), strict=True):
            if peer < 0:
                continue
            if peer == rank or peer >= self.mesh.world_size:
                raise ProgramError(f"rank {rank} names rank {peer} as its peer")
            ends = (rank, peer) if isinstance(op, Send) else (peer, rank)
            uses[type(op), op.tag, ends] += 1
            name = op.tag, ends, uses[type(op), op.tag, ends]
            self._meet(name, [rank], row, Request("send", op.nbytes), ends)

    def _meet(self, name: object, who: list[int], row: int, request: Request, ranks: tuple[int, ...]) -> None:
        """These ranks' op comes to the meeting of this name, which is made when first asked for."""
        if name not in self.all:
            plan = self._plan(request, ranks)
            self.all[name] = Meeting(row, request, ranks, plan, self.env.event(), len(ranks))
        meeting = self.all[name]
        if _terms(meeting.request, meeting.ranks) != _terms(request, ranks):
            raise ProgramError(f"ranks {who} call {request} on {ranks} where others call {meeting.request}")
        self.of.update({(rank, row): meeting for rank in who})

    def _plan(self, request: Request, ranks: tuple[int, ...]) -> Plan:
        if len(ranks) == 1:
            return NOTHING
        if (request, ranks) not in self._plans:
            group = Group(self.topology, self.mesh.gpus[np.array(ranks)])
            plan = self._plans[request, ranks] = self.planner(request, group)
            for link in links_of(plan):
                if not self.topology.link_bandwidth[link] > 0:
                    raise TopologyError(f"traffic is routed over {self.topology.link_name(link)}, without bandwidth")
        return self._plans[request, ranks]


def _terms(request: Request, ranks: tuple[int, ...]) -> tuple[object, ...]:
    """What all members of a meeting must agree on."""
    return request.kind, request.nbytes, request.dtype, request.root, ranks


def links_of(plan: Plan) -> dict[int, float]:
    """Bytes of each link that a byte of payload takes."""
    return {link: w for link, w in zip(plan.links.tolist(), plan.weights.tolist(), strict=True) if w > 0}


class _Run:
    """One run: a process per rank and op, and the network they share."""

    def __init__(self, env: simpy.Environment, program: Program, meetings: Meetings, topology: Topology) -> None:
        self.env = env
        self.meetings = meetings
        self.slowdown = program.overlap_slowdown
        self.network = Network(env, topology.link_bandwidth.tolist())
        self.spans: dict[tuple[int, int], tuple[float, float, float]] = {}
        self.done: dict[tuple[int, int], simpy.Event] = {}
        self.queues: dict[tuple[int, str], simpy.Resource] = {}
        self.kernels: dict[int, list[tuple[float, float]]] = {r: [] for r in range(program.world_size)}
        self.owed = dict.fromkeys(range(program.world_size), 0.0)
        first = 0
        for role in program.roles:
            for position, rank in enumerate(role.ranks.tolist()):
                for i in range(len(role.ops)):
                    self.done[rank, first + i] = self.env.process(self._op(role, position, rank, i, first))
            first += len(role.ops)

    def _op(self, role: Role, position: int, rank: int, i: int, first: int) -> Waiting:
        """The life of one op on one rank."""
        op = role.ops[i]
        row = first + i
        yield self.env.all_of([self.done[rank, first + need] for need in needs(role.ops, i)])
        ready = start = self.env.now
        meeting = self.meetings.of.get((rank, row))
        if isinstance(op, Compute):
            spent = float(np.broadcast_to(seconds(role, op), len(role.ranks))[position])
            if isinstance(op, Serve):
                queue = self.queues.setdefault((rank, op.stream), simpy.Resource(self.env))
                yield later(
                    self.env, EventPriority(RELEASE + i)
                )  # of those ready at one instant the earliest in the list
                with queue.request() as turn:
                    yield turn
                    start = self.env.now
                    yield self.env.timeout(spent)
            else:
                yield from self._kernel(op, rank, spent)
        elif meeting is None:
            return
        else:
            meeting.missing -= 1
            if not meeting.missing:
                meeting.start = self.env.now
                self.env.process(self._transfer(meeting))
            yield meeting.over
            start = meeting.start
            if isinstance(op, Collective) and not (op.kernel and op.kernel.within):
                self.owed[rank] += self.slowdown * self._beside(rank, start)
        self.spans[rank, row] = ready, start, self.env.now

    def _kernel(self, op: Compute, rank: int, spent: float) -> Waiting:
        """A kernel begins now; on the compute stream it pays what its rank owes."""
        if self.slowdown and op.stream == COMPUTE_STREAM:
            yield later(self.env, RELEASE)
            spent += self.owed[rank]
            self.owed[rank] = 0.0
            self.kernels[rank].append((self.env.now, self.env.now + spent))
        yield self.env.timeout(spent)

    def _beside(self, rank: int, start: float) -> float:
        """Seconds the rank's compute stream ran between ``start`` and now."""
        return sum(max(min(end, self.env.now) - max(begin, start), 0.0) for begin, end in self.kernels[rank])

    def _transfer(self, meeting: Meeting) -> Waiting:
        """All members are there: the latency, then the bytes."""
        plan = meeting.plan
        yield self.env.timeout(plan.latency - plan.host)
        if plan.nbytes > 0:
            self.network.begin(meeting)
        else:
            meeting.over.succeed()


def needs(ops: Sequence[Op], i: int) -> set[int]:
    """The ops an op waits for: those it names, and the one before it on its stream unless that is a queue."""
    before = [j for j in range(i) if ops[j].stream == ops[i].stream][-1:]
    return {*ops[i].after} | (set() if isinstance(ops[i], Serve) else {*before})


def later(env: simpy.Environment, priority: EventPriority) -> simpy.Event:
    """An event that happens at this instant, after all others of a smaller priority."""
    event = simpy.Event(env)
    event._ok, event._value = True, None  # as simpy.Timeout does: triggered from the start, processed later
    env.schedule(event, priority)
    return event


class Network:
    """Flows on links: at every instant at which one begins or ends, all rates are worked out afresh."""

    def __init__(self, env: simpy.Environment, bandwidth: list[float]) -> None:
        self.env = env
        self.bandwidth = bandwidth
        self.flows: list[Flow] = []
        self.changes = 0
        self._solving = False

    def begin(self, meeting: Meeting) -> None:
        """A flow begins now."""
        plan = meeting.plan
        self.flows.append(Flow(meeting, links_of(plan), plan.nbytes, self.env.now))
        self._changed()

    def _changed(self) -> None:
        if not self._solving:
            self._solving = True
            self.env.process(self._solve())

    def _solve(self) -> Waiting:
        """New rates, then wait for the next end; it counts only if nothing has changed by then."""
        yield later(self.env, SOLVE)
        self._solving = False
        now = self.env.now
        self.changes += 1
        asked = self.changes
        for flow, rate in zip(self.flows, fair_shares(self.flows, self.bandwidth), strict=True):
            if abs(rate - flow.rate) <= INSTANT * flow.rate:
                continue  # untouched, so that its end does not move by a rounding
            self._moved(flow)
            flow.rate, flow.since = rate, now
            flow.end = now + flow.left / rate
        if not self.flows:
            return
        yield self.env.timeout(min(flow.end for flow in self.flows) - now)
        if asked == self.changes:
            self._end()

    def _end(self) -> None:
        over = [flow for flow in self.flows if flow.end <= self.env.now * (1 + INSTANT)]
        self.flows = [flow for flow in self.flows if flow not in over]
        self._changed()
        for flow in over:
            self._moved(flow)
            flow.meeting.over.succeed()

    def _moved(self, flow: Flow) -> None:
        """Note what a flow moved until now at the rate it had."""
        if flow.rate and flow.since < self.env.now:
            flow.meeting.pieces.append((flow.since, self.env.now, flow.rate))
            flow.left = max(flow.left - flow.rate * (self.env.now - flow.since), 0.0)


def fair_shares(flows: Sequence[Flow], bandwidth: Sequence[float]) -> list[float]:
    """Max-min fair rates [bytes/s] by progressive filling (Bertsekas & Gallager, Data Networks, 6.5.2).

    All flows rise together. The next to stop are those with the lowest level at which a link of theirs would be full,
    or at which they have reached their ceiling; what they take is theirs, and the others rise on.
    """
    rates: dict[int, float] = {}
    while len(rates) < len(flows):
        taken: dict[int, float] = defaultdict(float)
        rising: dict[int, float] = defaultdict(float)
        for f, flow in enumerate(flows):
            for link, weight in flow.links.items():
                if f in rates:
                    taken[link] += weight * rates[f]
                else:
                    rising[link] += weight
        level = {
            f: min([flow.meeting.plan.ceiling, *(max(bandwidth[k] - taken[k], 0.0) / rising[k] for k in flow.links)])
            for f, flow in enumerate(flows)
            if f not in rates
        }
        lowest = min(level.values())
        rates.update({f: at for f, at in level.items() if at <= lowest * (1 + INSTANT)})
    return [rates[f] for f in range(len(flows))]
