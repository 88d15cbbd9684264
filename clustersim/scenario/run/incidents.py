"""What ``[[incident]]`` does to a run that goes on: ops of a rank take longer for a time, links have less left.

Links change as those of ``[[cluster.changes]]`` do, while collectives are planned as if they did not. A rank's ops are
longer where they start within the incident's time; which ones those are, a play of the run up to each such moment says.
A host that stands still every so many steps is an op of its own ahead of each step, which takes no time elsewhere.
What comes before a moment cannot depend on what comes after it, so the last play agrees with all before it: the answer
is exact, to the op that is under way at the moment, which stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.cluster import files as fabrics
from clustersim.core.arrays import Bools, Floats, Ints
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.core.program import GPU_BOUNDS, Compute, Op, Program, Role
from clustersim.core.timeline import Timeline
from clustersim.core.topology import Topology
from clustersim.core.units import format_time
from clustersim.engine.flows.loads import VaryingLinks
from clustersim.scenario import Scenario
from clustersim.scenario.file.incident_table import KINDS, Incident

DOWN = 0.001
"""Share of its rate that a link has while it is down, as in ``[[cluster.changes]]``: the engine has no link without."""

STAIRS = 6
"""Spells in which a GPU that gets hotter is slower and slower."""
PAUSE = "host stands still"
"""The op of a host's pause ahead of a step."""

Play = Callable[[Program], Timeline]


def links_struck(incident: Incident, topology: Topology) -> tuple[int, ...]:
    """The links of an incident. Raises :class:`TopologyError` where it names none."""
    return tuple(fabrics.links_of(topology, str(incident.link)))


def varying_of(scenario: Scenario, topology: Topology) -> tuple[VaryingLinks, ...]:
    """Links that change while the run goes on, by ``[[cluster.changes]]`` and by ``[[incident]]``."""
    varying = []
    for i, change in enumerate(scenario.file.cluster.changes):
        if change.timed and change.factor is not None:
            with scenario.at(f"$.cluster.changes[{i}]"):
                links = fabrics.links_of(topology, change.match)
            end = math.inf if change.until is None else float(change.until)
            varying.append(
                VaryingLinks(tuple(links), change.factor, float(change.since or 0.0), end, float(change.every or 0.0))
            )
    return (*varying, *varying_links(scenario, topology))


def varying_links(scenario: Scenario, topology: Topology) -> Iterator[VaryingLinks]:
    """Links that incidents change while the run goes on. Raises :class:`ScenarioError` for one that does not exist."""
    for i, incident in enumerate(scenario.file.incident):
        if incident.link is None or KINDS[incident.kind].does == "start":
            continue
        with scenario.at(f"$.incident[{i}].link"):
            links = links_struck(incident, topology)
        if incident.hangs:
            continue
        left = DOWN if incident.left is None else incident.left
        if incident.every is not None and incident.lasts is not None:
            yield VaryingLinks(links, left, incident.since, incident.since + incident.lasts, float(incident.every))
        else:
            yield VaryingLinks(links, left, incident.since, incident.until)


def with_incidents(scenario: Scenario, program: Program, topology: Topology, mesh: Mesh, play: Play) -> Program:
    """The Program with what incidents make of its ranks' ops.

    ``play`` : simulates a Program of this scenario, with the links that incidents change.

    Raises :class:`ScenarioError` for a rank or node that does not exist, or a time outside the run.
    """
    incidents = scenario.file.incident
    if any(incident.interval is not None for incident in incidents):
        program = _with_pauses(program)
    strikes: list[_Strike] = []
    for i, incident in enumerate(incidents):
        who = _ranks(i, incident, topology, mesh)
        strikes += [_Strike(incident, spell, who, program) for spell in _spells(incident)]
        if incident.kind == "slow_data" and not any(part.any() for part in strikes[-1].touched):
            wrong = f"no rank of {scenario.strategy.name} loads a batch of its own in this Program"
            raise ScenarioError(f"{wrong} (at $.incident[{i}].kind)")
    for moment in _moments(strikes):
        timeline = play(_longer(program, strikes))
        _within(incidents, moment, timeline.makespan)
        for strike in strikes:
            strike.turn(moment, program, timeline)
    return _longer(program, strikes)


def _spells(incident: Incident) -> list[_Spell]:
    """When an incident strikes how hard: what gets slower little by little, as a stair."""
    if incident.kind != "hot_gpu" or incident.lasts is None or incident.slowdown is None:
        return [_Spell(incident.since, incident.until, incident.slowdown or 1.0)]
    begins = [incident.since + float(incident.lasts) * i / STAIRS for i in range(STAIRS)]
    slower = [1.0 + (incident.slowdown - 1.0) * (i + 1) / STAIRS for i in range(STAIRS)]
    return list(map(_Spell, begins, [*begins[1:], math.inf], slower))


def _with_pauses(program: Program) -> Program:
    """The Program with an op ahead of each step in which a host can stand still; it takes no time by itself."""
    roles = []
    for role in program.roles:
        ops: list[Op] = []
        place: list[int] = []
        steps: set[int] = set()
        for op in role.ops:
            if op.step not in steps and isinstance(op, Compute):
                steps.add(op.step)
                ops.append(Compute(PAUSE, 0.0, op.stream, phase="other", bound="host", step=op.step, paced=False))
            place.append(len(ops))
            ops.append(msgspec.structs.replace(op, after=tuple(place[i] for i in op.after)))
        roles.append(replace(role, ops=tuple(ops)))
    return replace(program, roles=tuple(roles))


def _ranks(i: int, incident: Incident, topology: Topology, mesh: Mesh) -> Ints:
    """The ranks that an incident strikes; none of a link."""
    workers = mesh.workers
    if incident.rank is not None:
        if incident.rank >= workers:
            wrong = f"no rank {incident.rank}: the run has ranks 0..{workers - 1}"
            raise ScenarioError(f"{wrong} (at $.incident[{i}].rank)")
        return np.array([incident.rank])
    if incident.node is not None:
        if incident.node >= mesh.n_nodes:
            wrong = f"no node {incident.node}: the run has nodes 0..{mesh.n_nodes - 1}"
            raise ScenarioError(f"{wrong} (at $.incident[{i}].node)")
        nodes = topology.vertex_node[mesh.gpus[:workers]]
        return np.flatnonzero(nodes == np.unique(nodes)[incident.node]).astype(np.int64)
    if incident.kind == "blocking_checkpoint":
        return np.arange(workers)
    return np.zeros(0, dtype=np.int64)


def _moments(strikes: Sequence[_Strike]) -> list[float]:
    """When incidents begin and end, ascending, without what begins with the run, never ends, or hangs it."""
    ends = (moment for strike in strikes if not strike.incident.hangs for moment in strike.spell[:2])
    return sorted({moment for moment in ends if 0 < moment < math.inf})


def _within(incidents: Sequence[Incident], moment: float, makespan: float) -> None:
    """Raise :class:`ScenarioError` where an incident begins at a moment that the run does not reach."""
    for i, incident in enumerate(incidents):
        if incident.since == moment and moment >= makespan:
            wrong = f"{format_time(moment)} is outside the run, which is over after {format_time(makespan)}"
            raise ScenarioError(f"{wrong}; run.steps makes it longer (at $.incident[{i}].at)")


class _Spell(NamedTuple):
    """From when to when [s] an incident strikes, and how many times as long kernels take then."""

    since: float
    until: float
    slowdown: float


class _Strike:
    """A spell of an incident, and which ops of which rank it has its hand on: per role (ops, ranks) bool."""

    def __init__(self, incident: Incident, spell: _Spell, ranks: Ints, program: Program) -> None:
        self.incident = incident
        self.spell = spell
        self.touched = [self._may(role, ranks) for role in program.roles]
        self.active = [np.zeros_like(part) for part in self.touched]
        if spell.since == 0 and not incident.hangs:
            starts = [np.repeat(np.arange(float(len(part)))[:, None], part.shape[1], 1) for part in self.touched]
            self._begin(program, starts, 0.0)

    def _may(self, role: Role, ranks: Ints) -> Bools:
        """Ops that the incident makes longer, whenever they start."""
        kind = self.incident.kind
        ops = np.array([_is_struck(op, kind) for op in role.ops], dtype=np.bool_)
        touched: Bools = ops[:, None] & np.isin(role.ranks, ranks)[None, :]
        return touched

    def turn(self, moment: float, program: Program, timeline: Timeline) -> None:
        """At a moment, begin or end with the ops that have not started by then."""
        if self.incident.hangs or moment not in (self.spell.since, self.spell.until):
            return
        starts = self._starts(program, timeline)
        if moment == self.spell.since:
            self._begin(program, starts, moment)
            return
        for active, started in zip(self.active, starts, strict=True):
            active &= started < moment

    def _starts(self, program: Program, timeline: Timeline) -> list[Floats]:
        """When each op of a rank that may be struck starts [s]; others never."""
        starts: list[Floats] = []
        offset = 0
        for role, touched in zip(program.roles, self.touched, strict=True):
            started = np.full(touched.shape, -math.inf)
            for column in np.flatnonzero(touched.any(axis=0)).tolist():
                spans = timeline.spans([int(role.ranks[column])])
                own = (spans["op"] >= offset) & (spans["op"] < offset + len(role.ops))
                started[spans["op"][own] - offset, column] = spans["start"][own]
            starts.append(started)
            offset += len(role.ops)
        return starts

    def _begin(self, program: Program, starts: Sequence[Floats], moment: float) -> None:
        """Strike what starts from a moment on; of a stall the first kernel alone, of pauses those of every so many
        steps, counted from the first step that no rank has begun."""
        later = [touched & (started >= moment) for touched, started in zip(self.touched, starts, strict=True)]
        if self.incident.kind == "ecc_stall":
            for n, part in enumerate(later):
                if part.any():
                    self.active[n].flat[np.where(part, starts[n], math.inf).argmin()] = True
            return
        self.active = later
        if self.incident.interval is not None:
            steps = [np.array([op.step for op in role.ops]) for role in program.roles]
            firsts = [step[column.argmax()] for step, part in zip(steps, later, strict=True) for column in part.T]
            first = max(firsts, default=0)
            due = [(step >= first) & ((step - first) % self.incident.interval == 0) for step in steps]
            self.active = [part & rows[:, None] for part, rows in zip(later, due, strict=True)]


def _is_struck(op: Op, kind: str) -> bool:
    if not isinstance(op, Compute):
        return False
    if kind in ("slow_gpu", "hot_gpu", "ecc_stall"):
        return op.bound in GPU_BOUNDS
    if kind in ("garbage_collection", "blocking_checkpoint"):
        return op.name == PAUSE
    if kind == "slow_host":
        return op.paced
    return kind == "slow_data" and op.phase == "input"


def _longer(program: Program, strikes: Sequence[_Strike]) -> Program:
    """The Program with the ops longer that strikes have their hands on."""
    roles = list(program.roles)
    for n, role in enumerate(roles):
        ops = list(role.ops)
        for strike in strikes:
            active = strike.active[n]
            for i in np.flatnonzero(active.any(axis=1)).tolist():
                ops[i] = _struck(ops[i], strike, active[i])
        roles[n] = replace(role, ops=tuple(ops))
    return replace(program, roles=tuple(roles)) if any(part.any() for s in strikes for part in s.active) else program


def _struck(op: Op, strike: _Strike, ranks: Bools) -> Op:
    duration = np.broadcast_to(np.asarray(getattr(op, "duration", 0.0), dtype=np.float64), ranks.shape)
    longer = duration * strike.spell.slowdown + float(strike.incident.pause or 0.0)
    return msgspec.structs.replace(op, duration=np.where(ranks, longer, duration))
