"""The ``gloo`` backend: collectives of CPU processes over TCP, as PyTorch's ProcessGroupGloo runs them.

Gloo chooses by kind alone: a ring in 1 MiB segments for all_reduce, a ring of half blocks for all_gather, a binomial
tree for broadcast, a ring and a gather for reduce, direct sends for the rest (facebookincubator/gloo:
gloo/{allreduce,allgather,broadcast,alltoall}.cc). reduce_scatter is an all_reduce of a copy (pytorch:
ProcessGroupGloo.cpp). Ranks talk in rank order over the one network interface Gloo binds to; ranks of a node talk over
loopback. Tensors on a GPU are staged through host memory, before and after. How long that takes the hosts is
:mod:`clustersim.collectives.gloo_law`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from clustersim import routing
from clustersim.collectives import gloo_law
from clustersim.collectives.base import Channel, Group, Plan, Request, Traffic, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.build import everyone, traffic_of
from clustersim.collectives.costs import gloo_costs_of
from clustersim.collectives.direct import DIRECT
from clustersim.collectives.gloo_law import Work
from clustersim.collectives.loads import link_loads
from clustersim.collectives.ring import RING
from clustersim.costs import GlooCosts
from clustersim.errors import ProgramError
from clustersim.topology import CPU, PATH_CLASSES

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


def plan(request: Request, group: Group, n_channels: int | None = None, costs: GlooCosts | None = None) -> Plan:
    """The Plan of one collective under Gloo; ``n_channels`` is not Gloo's to have and must be None or 1.

    ``costs``: None takes those of the group's machine.
    Raises :class:`ProgramError` for a pin that is not what Gloo would run.
    """
    if n_channels not in (None, 1):
        raise ProgramError(f"Gloo has one channel, not {n_channels}")
    costs = costs or gloo_costs_of(group)
    hosts = dataclasses.replace(group, gpus=_hosts(group))
    algorithm, traffic = _choice(request, hosts)
    if request.algorithm not in (None, algorithm):
        raise ProgramError(f"Gloo runs {request.kind!r} as {algorithm!r}, not {request.algorithm!r}")
    wire_load, rounds = _on_links(traffic, hosts)
    asked = _work(request, hosts, rounds)
    stage_load, stage, copies = _staging(request, group, hosts)
    load = wire_load + stage_load
    links = np.flatnonzero(load > 0)
    seconds_per_byte = gloo_law.wire(asked, costs) + stage
    total = gloo_law.seconds(asked, costs) + stage * request.nbytes + copies * costs.copy
    return Plan(
        kind=request.kind,
        algorithm=algorithm,
        protocol="TCP",
        n_channels=1,
        nbytes=request.nbytes,
        latency=total - seconds_per_byte * request.nbytes,
        links=links,
        weights=load[links],
        ceiling=1.0 / seconds_per_byte if seconds_per_byte else math.inf,
        # Ranks of one CPU have no link between them, so no link bounds them.
        lower_bound=lower_bound(request, group) if len(np.unique(group.gpus)) == group.size else 0.0,
        bus_factor=bus_factor(request.kind, group.size),
    )


# ---- what Gloo chooses ----------------------------------------------------------------------------------------------


def _choice(request: Request, hosts: Group) -> tuple[str, Traffic]:
    """The algorithm, and who sends how much to whom."""
    n = hosts.size
    if request.kind in {"all_reduce", "reduce_scatter"}:
        return "ring", RING.traffic(dataclasses.replace(request, kind="all_reduce"), hosts, _rank_ring(n))
    if request.kind == "all_gather":
        return "ring", RING.traffic(request, hosts, _rank_ring(n))
    if request.kind == "reduce":
        return "ring", _reduce(request, hosts)
    if request.kind == "broadcast":
        return "binomial", _binomial(request, hosts)
    return "direct", DIRECT.traffic(request, hosts, ())


def _rank_ring(n: int) -> tuple[Channel, ...]:
    """Gloo's ring: every rank sends to the rank below, over the one interface."""
    return (Channel(0, np.arange(n - 1, -1, -1, dtype=np.int64), 1.0, nic=0),)


def _reduce(request: Request, hosts: Group) -> Traffic:
    """A reduce-scatter round the ring, then every block to the root."""
    ring = RING.traffic(dataclasses.replace(request, kind="reduce_scatter"), hosts, _rank_ring(hosts.size))
    others = np.delete(everyone(hosts), request.root)
    root = np.full(len(others), request.root, dtype=np.int64)
    parts: list[tuple[Ints, Ints, Floats | float, Ints | int]] = [
        (ring.src, ring.dst, ring.fraction, ring.rail),
        (others, root, 1.0 / hosts.size, 0),
    ]
    return traffic_of(parts, ring.steps + 1, ring.net_steps + 1, rounds=[0, 1])


def _binomial(request: Request, hosts: Group) -> Traffic:
    """Round k: the 2^k ranks that have it send to those 2^k further on, counted from the root."""
    n, parts = hosts.size, []
    for k in range((n - 1).bit_length()):
        src = np.arange(min(1 << k, n - (1 << k)), dtype=np.int64)
        parts.append(((src + request.root) % n, (src + (1 << k) + request.root) % n, 1.0, 0))
    crossing = sum(bool((hosts.nodes[src] != hosts.nodes[dst]).any()) for src, dst, _, _ in parts)
    return traffic_of(parts, len(parts), crossing, rounds=range(len(parts)))


# ---- the host path --------------------------------------------------------------------------------------------------


def _hosts(group: Group) -> Ints:
    """(n,) the CPU each member's process runs on: the nearest to its GPU; a member that is a CPU stays."""
    topology, router = group.topology, routing.router(group.topology)
    cpus: dict[int, list[int]] = {}
    for vertex, kind in enumerate(topology.vertex_kinds):
        if kind == CPU:
            cpus.setdefault(int(topology.vertex_node[vertex]), []).append(vertex)
    found = []
    for gpu, node in zip(group.gpus.tolist(), group.nodes.tolist(), strict=True):
        if topology.vertex_kinds[gpu] == CPU:
            found.append(gpu)
        elif node in cpus:
            found.append(min(cpus[node], key=lambda cpu: (PATH_CLASSES.index(router.path_class(gpu, cpu)), cpu)))
        else:
            raise ProgramError(
                f"{topology.name}: Gloo runs on CPUs, and {topology.vertex_names[gpu]} has none beside it"
            )
    return np.array(found, dtype=np.int64)


def work(request: Request, group: Group) -> Work:
    """What a collective asks of the hosts of its ranks; Gloo's own part, without copies between GPU and host."""
    hosts = dataclasses.replace(group, gpus=_hosts(group))
    _, traffic = _choice(request, hosts)
    return _work(request, hosts, _on_links(traffic, hosts)[1])


def _work(request: Request, hosts: Group, rounds: tuple[tuple[float, float], ...]) -> Work:
    n, size, kind = hosts.size, request.nbytes, request.kind
    busy = max(1.0, float(np.max(_ranks_per_core(hosts))))
    chain, total = gloo_law.chain_and_total(kind, n, size)
    touched = gloo_law.touched(kind, n) * size * (1.0 if kind in gloo_law.ROOTED else busy)
    fresh = kind in gloo_law.SCRATCH and size >= gloo_law.MAPPED
    return Work(
        kind=kind,
        nbytes=size,
        calls=busy,
        messages=max(chain, total / n * float(np.max(_ranks_per_core(hosts)))),
        rounds=rounds,
        touched=touched,
        scratch=size * (1.0 if kind in gloo_law.ROOTED else busy) if fresh else 0.0,
        footprint=gloo_law.footprint(kind, n, hosts.ranks_per_node) * size,
    )


def _ranks_per_core(hosts: Group) -> Floats:
    """(n,) members on each member's node, over the node's cores; 0 where the machine does not say how many it has."""
    _, node, count = np.unique(hosts.nodes, return_inverse=True, return_counts=True)
    cores = np.array([hosts.topology.node_types[number].cores for number in hosts.nodes.tolist()], dtype=np.float64)
    shared: Floats = np.divide(count[node], cores, out=np.zeros(hosts.size), where=cores > 0)
    return shared


def _on_links(traffic: Traffic, hosts: Group) -> tuple[Floats, tuple[tuple[float, float], ...]]:
    """(L,) load per byte of S of every link, and the rounds of :class:`~clustersim.collectives.gloo_law.Work`."""
    load, found = np.zeros(hosts.topology.n_links), []
    per_core = _ranks_per_core(hosts)
    rounds = traffic.round if len(traffic.round) else np.zeros(len(traffic.src), dtype=np.int64)
    _, node, count = np.unique(hosts.nodes, return_inverse=True, return_counts=True)
    for number in np.unique(rounds).tolist():
        mine = rounds == number
        part = dataclasses.replace(
            traffic,
            src=traffic.src[mine],
            dst=traffic.dst[mine],
            fraction=traffic.fraction[mine],
            rail=traffic.rail[mine],
        )
        links, weights = link_loads(part, hosts)
        load[links] += weights
        # What a process sends and what it receives pass the same thread; threads share the cores of their node.
        sockets = sum(np.bincount(end, part.fraction, minlength=hosts.size) for end in (part.src, part.dst))
        on_cores = np.bincount(node, sockets)[node] / count[node] * per_core
        slowest = float((weights / hosts.topology.link_bandwidth[links]).max(initial=0.0))
        found.append((slowest, float(np.max(np.maximum(sockets, on_cores)))))
    return load, tuple(found)


def _staging(request: Request, group: Group, hosts: Group) -> tuple[Floats, float, int]:
    """Copies between GPU and host: (L,) load per byte of S, seconds per byte, and how many follow one another."""
    n, root = group.size, request.root
    own, whole = 1.0 / n, np.ones(n)
    at_root, elsewhere = np.zeros(n), np.ones(n)
    at_root[root], elsewhere[root] = 1.0, 0.0
    down, up = {
        "all_gather": (own * whole, whole),
        "reduce_scatter": (whole, own * whole),
        "broadcast": (at_root, elsewhere),
        "reduce": (whole, at_root),
        "scatter": (at_root, own * elsewhere),
        "gather": (own * elsewhere, at_root),
        "barrier": (0.0 * whole, 0.0 * whole),
    }.get(request.kind, (whole, whole))
    load, seconds, copies = np.zeros(group.topology.n_links), 0.0, 0
    router = routing.router(group.topology)
    for src, dst, fraction in ((group.gpus, hosts.gpus, down), (hosts.gpus, group.gpus, up)):
        away = (src != dst) & (fraction > 0)
        if away.any():
            links, weights = router.loads(src[away], dst[away], fraction[away])
            load[links] += weights
            seconds += float((weights / group.topology.link_bandwidth[links]).max(initial=0.0))
            copies += 1
    return load, seconds, copies
