"""From an ``[[incident]]`` that hangs a run to the hang: which ops it sticks, and what each rank has called by then."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from msgspec.structs import replace

from clustersim.core.errors import ScenarioError
from clustersim.core.program import DTYPE_BYTES, Collective, Send
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.engine.hang import Hang, RankCall, RankWait, WatchdogAlarm, Watchdogs
from clustersim.engine.standstill import HealthyRun, Place, Stuck
from clustersim.scenario.file.incident_table import Incident
from clustersim.scenario.run.incidents import links_struck

if TYPE_CHECKING:
    from clustersim.scenario.run.running import Prepared

OTHER_KINDS = {"all_reduce": "broadcast", "all_gather": "all_reduce", "reduce_scatter": "all_reduce"}
"""What a rank calls by mistake instead of a collective; of any other kind, an all_reduce."""
OTHER_TYPES = {"fp32": "bf16", "bf16": "fp32", "fp16": "fp32"}
INSTEAD = ("other_group", "uneven_batches")
"""Kinds of which a rank calls something else instead of what it is to call, and waits in it."""
BARRIER_BYTES = 4.0
"""Of the tensor that a barrier of NCCL adds up."""
OTHER_SIZE = 0.5
"""Share of the tensor that a rank with another size has."""
SILENT = ("dead_rank", "stopped_rank")
"""Kinds after which the struck process itself writes nothing."""


def hang_of(prepared: Prepared, timeline: Timeline) -> Hang:
    """The hang that the scenario's incident makes of a run.

    Parameters
    ----------
    timeline : of the same Program without the incident that hangs, with all others.

    Raises :class:`ScenarioError` for a time at which nothing is left that could hang, naming the field, and
    :class:`ProgramError` for ranks whose ops have no order of their own.
    """
    i, incident = next((i, struck) for i, struck in enumerate(prepared.scenario.file.incident) if struck.hangs)
    with prepared.scenario.at(f"$.incident[{i}].kind"):
        healthy = HealthyRun(prepared.program, timeline)
    with prepared.scenario.at(f"$.incident[{i}].at"):
        if incident.since >= timeline.makespan:
            over = format_time(timeline.makespan)
            raise ScenarioError(f"{format_time(incident.since)} is outside the run, which is over after {over}")
        fault, wrong = _stuck(incident, healthy, prepared)
    blocked = healthy.blocked(fault)
    calls = {rank: tuple(healthy.calls(rank, blocked, fault)) for rank in healthy.lists}
    if wrong is not None and incident.rank is not None:
        calls[incident.rank] = tuple(_otherwise(incident.kind, calls[incident.rank], wrong))
    silent = _silent(incident, prepared)
    waiting = [healthy.wait(rank, calls[rank], blocked, fault) for rank in calls if rank not in silent]
    if incident.kind in INSTEAD and incident.rank is not None:
        instead = _instead(incident, healthy, fault, prepared)
        calls[incident.rank] = (*calls[incident.rank], instead)
        absent = tuple(rank for rank in instead.group if rank != incident.rank)
        waiting.append(RankWait(incident.rank, instead, absent))
    steps, ended = healthy.steps(blocked)
    watchdogs = prepared.scenario.file.watchdog
    timeout = watchdogs.timeout(prepared.backend)
    alarms = tuple(_alarms(incident, calls, silent, timeout, watchdogs, prepared))
    return Hang(
        kind=incident.kind,
        place=incident.place,
        at=incident.since,
        ranks=() if incident.rank is None else (incident.rank,),
        silent=tuple(sorted(silent)),
        calls={rank: () if rank in silent else issued for rank, issued in calls.items()},
        waits=tuple(wait for wait in waiting if wait is not None),
        alarms=alarms,
        timeout=timeout,
        steps=steps,
        ended=ended,
        world_size=len(calls),
    )


def _stuck(incident: Incident, healthy: HealthyRun, prepared: Prepared) -> tuple[Stuck, int | None]:
    """What an incident sticks; and the op that its rank calls otherwise than the others."""
    begins = incident.since
    rank = -1 if incident.rank is None else incident.rank
    if incident.link is not None:
        links = links_struck(incident, prepared.topology)
        node_of = prepared.topology.vertex_node[prepared.mesh.gpus]
        places = healthy.crossing(links, begins, prepared.topology, node_of)
        if not places:
            raise ScenarioError(f"no transfer crosses {incident.link} after {format_time(begins)}, so nothing hangs")
        return Stuck(stuck=places), None
    if incident.kind == "stuck_kernel":
        kernel = healthy.first_kernel(rank, begins)
        if kernel is None:
            raise ScenarioError(f"rank {rank} runs no kernel after {format_time(begins)}, so nothing hangs")
        return Stuck(stuck=frozenset({(rank, kernel)})), None
    if incident.kind == "stuck_message":
        sent = healthy.first_call(rank, begins, (Send,))
        if sent is None:
            raise ScenarioError(f"rank {rank} sends no message after {format_time(begins)}, so nothing hangs")
        return Stuck(stuck=frozenset(healthy.members[healthy.meeting[rank, sent]])), None
    call = healthy.first_call(rank, begins, (Collective,), opens_step=incident.kind == "uneven_batches")
    if call is None or len(healthy.members[healthy.meeting[rank, call]]) < 2:
        raise ScenarioError(
            f"rank {rank} calls no collective with others after {format_time(begins)}, so nothing hangs"
        )
    if incident.kind == "missing_call" or incident.kind in INSTEAD:
        return Stuck(never_call={rank: call}), None
    if incident.kind in SILENT:
        gone = frozenset({rank})
        return Stuck(stuck=healthy.under_way(rank, begins), never_call={rank: call}, gone=gone), None
    if incident.kind == "other_order":
        call = _first_unlike(healthy, rank, call)
    return Stuck(stuck=frozenset({(rank, call)})), call


def _instead(incident: Incident, healthy: HealthyRun, fault: Stuck, prepared: Prepared) -> RankCall:
    """What a rank calls instead of the first op that it never calls, and waits in.

    Raises :class:`ScenarioError` where the ranks of its machine are the group that it is to call it with.
    """
    ((rank, op),) = fault.never_call.items()
    call = next(call for call in healthy.calls(rank, {(rank, op)}, Stuck()) if call.op == op)
    call = replace(call, started=call.created, ended=None)
    if incident.kind == "uneven_batches":
        return replace(call, kind="barrier", nbytes=BARRIER_BYTES, dtype="fp32", name="barrier")
    nodes = prepared.topology.vertex_node[prepared.mesh.gpus]
    near = tuple(mate for mate in call.group if nodes[mate] == nodes[rank])
    if len(near) in (1, len(call.group)):
        raise ScenarioError(f"the ranks of the machine of rank {rank} are no other group than that of {call.name}")
    return replace(call, group=near, communicator="node", seq=1)


def _first_unlike(healthy: HealthyRun, rank: int, call: int) -> int:
    """The first collective from this one on that the next one of its communicator and step differs from.

    Raises :class:`ScenarioError` where all are alike, and their order cannot be told.
    """
    infos = healthy.timeline.ops
    of_rank: list[Place] = [(rank, op) for op in healthy.lists[rank] if op >= call and (rank, op) in healthy.meeting]
    for (_, first), (_, second) in pairwise(of_rank):
        a, b = infos[first], infos[second]
        same_place = a.step == b.step and a.stream == b.stream
        if same_place and (a.kind, a.nbytes, a.detail.get("dtype")) != (b.kind, b.nbytes, b.detail.get("dtype")):
            return first
    raise ScenarioError(f"all collectives of rank {rank} that follow are alike, so their order makes no difference")


def _otherwise(kind: str, calls: tuple[RankCall, ...], wrong: int) -> Iterator[RankCall]:
    """The calls of a rank that calls one of them, ``wrong``, otherwise than the others."""
    turn = next(i for i, call in enumerate(calls) if call.op == wrong)
    for i, call in enumerate(calls):
        if kind == "other_order" and i in (turn, turn + 1) and turn + 1 < len(calls):
            next_to = calls[2 * turn + 1 - i]
            yield replace(call, kind=next_to.kind, nbytes=next_to.nbytes, dtype=next_to.dtype, name=next_to.name)
        elif i != turn:
            yield call
        elif kind == "other_size":
            yield replace(call, nbytes=call.nbytes * OTHER_SIZE)
        elif kind == "other_type":
            wrong_type = OTHER_TYPES.get(call.dtype, "fp32")
            share = DTYPE_BYTES[wrong_type] / DTYPE_BYTES.get(call.dtype, 4)
            yield replace(call, dtype=wrong_type, nbytes=call.nbytes * share)
        else:
            yield replace(call, kind=OTHER_KINDS.get(call.kind, "all_reduce"))


def _silent(incident: Incident, prepared: Prepared) -> frozenset[int]:
    """Ranks that write nothing any more: a stopped process; of a dead one the whole machine, whose launcher ends it."""
    if incident.rank is None or incident.kind not in SILENT:
        return frozenset()
    if incident.kind == "stopped_rank":
        return frozenset({incident.rank})
    nodes = prepared.topology.vertex_node[prepared.mesh.gpus]
    return frozenset(rank for rank in range(len(nodes)) if nodes[rank] == nodes[incident.rank])


def _alarms(
    incident: Incident,
    calls: dict[int, tuple[RankCall, ...]],
    silent: frozenset[int],
    timeout: float,
    watchdogs: Watchdogs,
    prepared: Prepared,
) -> Iterator[WatchdogAlarm]:
    """When each watchdog speaks: c10d's of every rank, NCCL's heartbeat monitor, every machine's launcher."""
    fired: dict[int, float] = {}
    for rank, issued in sorted(calls.items()):
        pending = [call for call in issued if call.ended is None]
        if rank in silent or not pending:
            why = "its process writes nothing any more" if rank in silent else "all that it called has ended"
            yield WatchdogAlarm("c10d watchdog", f"rank {rank}", None, why)
            continue
        fired[rank] = min(call.created for call in pending) + timeout
        why = f"{format_time(timeout)} after it called {pending[0].kind} {pending[0].seq}"
        yield WatchdogAlarm("c10d watchdog", f"rank {rank}", fired[rank], why)
    monitor = "watchdog threads go on beating, or stand still with their process"
    yield WatchdogAlarm("NCCL heartbeat monitor", "every rank", None, monitor)
    if incident.link is not None:
        moment = incident.since + watchdogs.ib_gives_up
        yield WatchdogAlarm("NCCL's InfiniBand transport", incident.place, moment, "its NIC gives up sending again")
    nodes = prepared.topology.vertex_node[prepared.mesh.gpus].tolist()
    for node in sorted(set(nodes)):
        ends = [moment for rank, moment in fired.items() if nodes[rank] == node]
        if incident.kind == "dead_rank" and incident.rank is not None and nodes[incident.rank] == node:
            moment = incident.since + watchdogs.interval
            yield WatchdogAlarm("launcher", f"node {node}", moment, f"it sees that rank {incident.rank} ended")
        elif ends:
            moment = min(ends) + watchdogs.interval
            yield WatchdogAlarm(
                "launcher", f"node {node}", moment, "a process of it was ended by its watchdog, or later"
            )
