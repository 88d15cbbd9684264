"""What only a run with parameter servers shows: staleness, each worker's pace, the servers' load."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.mesh import Mesh
from clustersim.core.program import Program, Role, Send, Serve
from clustersim.core.timeline import LinkUse, Timeline, step_ends
from clustersim.core.topology import Topology
from clustersim.core.units import format_bytes


class ServerReport(msgspec.Struct, frozen=True):
    """A server: its rank and where it sits, the ``busy`` share of its own work, bytes in and out a step, and the share
    of line rate of the busiest link on the way to it and from it; shares of the whole run, where figures of a run are
    of its steady state."""

    rank: int
    vertex: str
    busy: float
    bytes_in: float
    bytes_out: float
    link_use_in: float
    link_use_out: float


class ServerFigures(msgspec.Struct, frozen=True):
    """Steps -> how many reads were that stale, their mean and largest; samples/s of each worker's GPU; the servers."""

    staleness: dict[int, int]
    staleness_mean: float
    staleness_max: int
    samples_per_s_by_worker: list[float]
    servers: list[ServerReport]

    def lines(self) -> Iterator[str]:
        """For people."""
        if any(self.staleness):  # some reads were behind
            reads = ", ".join(f"{count} at {steps}" for steps, count in self.staleness.items())
            yield f"staleness of reads [steps]: {reads}; {self.staleness_mean:.2f} on average"
        if rates := self.samples_per_s_by_worker:
            yield f"samples per second of one GPU, each at its own pace: {min(rates):,.1f} to {max(rates):,.1f}"
        for server in self.servers:
            moved = f"{format_bytes(server.bytes_in)} in and {format_bytes(server.bytes_out)} out a step"
            busiest = max(server.link_use_in, server.link_use_out)
            used = f"{server.busy:.0%} busy with them and the busiest link on the way used at {busiest:.0%}"
            yield f"server at {server.vertex}: {moved}, {used}, both over the whole run, its first step included"


def report(program: Program, timeline: Timeline, topology: Topology, mesh: Mesh, config: Any) -> ServerFigures:
    """Figures of a run."""
    seen = staleness(program, timeline)
    values, counts = np.unique(seen, return_counts=True)
    return ServerFigures(
        {int(v): int(n) for v, n in zip(values, counts, strict=True)},
        float(seen.mean()) if len(seen) else 0.0,
        int(seen.max(initial=0)),
        _throughput(timeline, mesh, config).tolist(),
        [_server(role, first, timeline, topology, mesh) for first, role in _serving(program)],
    )


def _serving(program: Program) -> Iterator[tuple[int, Role]]:
    """Roles that serve, behind the row of each one's first op in the timeline's ops: roles one after another."""
    first = 0
    for role in program.roles:
        if any(isinstance(op, Serve) for op in role.ops):
            yield first, role
        first += len(role.ops)


def what_and_whose(name: str) -> tuple[str, int] | None:
    """The layer and the worker an op's name speaks of.

    >>> what_and_whose("apply layers.3 worker 12")
    ('layers.3', 12)
    """
    match = re.match(r"\w+ (\S+) worker (\d+)", name)
    return (match.group(1), int(match.group(2))) if match else None


def staleness(program: Program, timeline: Timeline) -> Ints:
    """(reads,) int: of every read of a worker after its first step, how many steps the slowest worker's gradients were
    behind what a synchronous run would have read.

    A worker that begins step t has itself finished t steps. If at the moment a layer leaves the server the slowest
    worker has had c steps of it applied, the layer is ``max(0, t - c)`` stale (the clock of stale synchronous
    parallel); a read is as stale as its stalest layer.
    """
    # one rank does a server's op: its first start and last end are its own
    played = timeline.per_op()
    stale_reads = []
    for first, role in _serving(program):
        n_steps = 1 + max(op.step for op in role.ops)
        applied: dict[str, dict[int, Floats]] = {}  # layer -> worker -> when its gradient of each step was in
        reads: dict[tuple[int, int], list[tuple[str, float]]] = {}
        for i, op in enumerate(role.ops):
            layer_worker = what_and_whose(op.name) if isinstance(op, Serve | Send) else None
            if layer_worker is None or not played["ranks"][first + i]:
                continue
            layer, worker = layer_worker
            if isinstance(op, Serve):
                ends = applied.setdefault(layer, {}).setdefault(worker, np.full(n_steps, np.inf))
                ends[op.step] = played["end"][first + i]
            elif isinstance(op, Send) and op.step:
                reads.setdefault((worker, op.step), []).append((layer, float(played["start"][first + i])))
        # When each step of the slowest worker was in.
        last = {
            layer: np.maximum.accumulate(np.max(list(by_worker.values()), axis=0))
            for layer, by_worker in applied.items()
        }
        for (_, step), layers in reads.items():
            slowest = min(int(last[layer].searchsorted(moment, side="right")) for layer, moment in layers)
            stale_reads.append(max(0, step - slowest))
    return np.array(stale_reads, dtype=np.int64)


def _throughput(timeline: Timeline, mesh: Mesh, config: Any) -> Floats:
    """(workers' GPUs,) samples/s over each one's own steps, the first left out where there are several."""
    ended = step_ends(timeline)[:, : mesh.workers]
    begin = ended[0] if len(ended) > 1 else 0.0
    samples = config.rank_samples
    rate: Floats = samples * max(1, len(ended) - 1) / (ended[-1] - begin)
    return rate


def _server(role: Role, first: int, timeline: Timeline, topology: Topology, mesh: Mesh) -> ServerReport:
    played = timeline.per_op()
    makespan = timeline.makespan
    rows = [first + i for i, op in enumerate(role.ops) if isinstance(op, Serve)]
    busy = sum(float(played["seconds"][row]) for row in rows if played["ranks"][row])
    steps = 1 + max(op.step for op in role.ops)
    of_workers = [op for op in role.ops if " worker " in op.name]
    taken = sum(op.nbytes for op in of_workers if op.name.startswith("push "))
    given = sum(op.nbytes for op in of_workers if isinstance(op, Send) and op.name.startswith("pull "))
    vertex = int(mesh.gpus[role.ranks[0]])
    links = timeline.links
    use = (0.0, 0.0) if links is None else _links(links, topology, _meeting(timeline, first, role), makespan)
    name = topology.vertex_names[vertex]
    return ServerReport(int(role.ranks[0]), name, busy / makespan, taken / steps, given / steps, *use)


def _meeting(timeline: Timeline, first: int, role: Role) -> tuple[Ints, Ints]:
    """Ops by which a server takes and gives, those of its workers that meet its own among them."""
    ways: tuple[set[int], set[int]] = (set(), set())
    for row, op in enumerate(role.ops, first):
        if " worker " in op.name and not isinstance(op, Serve):
            ways[op.name.startswith("pull ")].update((row, *timeline.ops[row].detail.get("meets", ())))
    into, out = (np.array(sorted(rows), dtype=np.int64) for rows in ways)
    return into, out


def _links(use: LinkUse, topology: Topology, ways: tuple[Ints, Ints], seconds: float) -> tuple[float, float]:
    """Share of line rate of the busiest link on the way to a server and from it: its machine's NIC is one of them."""
    share = use.bytes_per_link() / (topology.link_bandwidth * seconds)
    busiest = []
    for ops in ways:
        loads = np.unique(use.transfer_load[np.isin(use.transfer_op, ops)])
        busiest.append(max((float(share[use.loads[i][0]].max(initial=0.0)) for i in loads.tolist()), default=0.0))
    return busiest[0], busiest[1]
