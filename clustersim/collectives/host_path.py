"""The host path that CPU libraries share: whose CPU, how many to a core, bytes on links, copies to and from a GPU."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives import host_law
from clustersim.collectives.base import Group, Plan, Request, Traffic, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.host_law import HostRound, HostWork
from clustersim.collectives.loads import link_loads
from clustersim.core.arrays import Floats
from clustersim.core.costs import GlooCosts, MpiCosts
from clustersim.core.errors import ProgramError
from clustersim.core.memo import kept_with_topology
from clustersim.core.topology import CPU, PATH_CLASSES


@dataclasses.dataclass(frozen=True)
class HostRequest:
    """What a library was asked to do, on the hosts: its algorithm and transport, link loads per byte of S, and work."""

    algorithm: str
    protocol: str
    load: Floats
    work: HostWork


def host_plan(
    request: Request, group: Group, hosts: Group, host_request: HostRequest, costs: GlooCosts | MpiCosts
) -> Plan:
    """The Plan of a collective of ``hosts``; tensors of a GPU are copied to its host before, and back after."""
    stage_load, stage, copies = _staging(request, group, hosts)
    load = host_request.load + stage_load
    links = np.flatnonzero(load > 0)
    seconds_per_byte = host_law.wire(host_request.work, costs) + stage
    total = host_law.seconds(host_request.work, costs) + stage * request.nbytes + copies * costs.copy
    return Plan(
        kind=request.kind,
        algorithm=host_request.algorithm,
        protocol=host_request.protocol,
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


def on_hosts(group: Group, library: str) -> Group:
    """The group of the CPUs each member's process runs on: the nearest to its GPU; a member that is a CPU stays."""
    topology = group.topology
    router = routing.router(group.topology)
    cpus: dict[int, list[int]] = {}
    for vertex in topology.cpus.tolist():
        cpus.setdefault(int(topology.vertex_node[vertex]), []).append(vertex)
    vertices = []
    for gpu, node in zip(group.gpus.tolist(), group.nodes.tolist(), strict=True):
        if topology.vertex_kinds[gpu] == CPU:
            vertices.append(gpu)
        elif node in cpus:
            vertices.append(min(cpus[node], key=lambda cpu: (PATH_CLASSES.index(router.path_class(gpu, cpu)), cpu)))
        else:
            raise ProgramError(
                f"{topology.name}: {library} runs on CPUs, and {topology.vertex_names[gpu]} has none beside it"
            )
    return dataclasses.replace(group, gpus=np.array(vertices, dtype=np.int64))


def ranks_per_core(hosts: Group) -> Floats:
    """(n,) members on each member's node, over the node's cores; 0 where the machine does not say how many it has."""
    _, node, count = np.unique(hosts.nodes, return_inverse=True, return_counts=True)
    cores = np.array([hosts.topology.node_types[number].cores for number in hosts.nodes.tolist()], dtype=np.float64)
    shared: Floats = np.divide(count[node], cores, out=np.zeros(hosts.size), where=cores > 0)
    return shared


@kept_with_topology(maxsize=64)
def most_per_core(hosts: Group) -> float:
    """Members to a core of the busiest node."""
    return float(np.max(ranks_per_core(hosts)))


def on_links(traffic: Traffic, hosts: Group) -> tuple[Floats, tuple[HostRound, ...]]:
    """(L,) load per byte of S of every link, and the rounds, without their messages."""
    load = np.zeros(hosts.topology.n_links)
    host_rounds = []
    per_core = ranks_per_core(hosts)
    _, node, count = np.unique(hosts.nodes, return_inverse=True, return_counts=True)
    for chosen in traffic.rounds:
        part = traffic.only(chosen)
        links, weights = link_loads(part, hosts)
        load[links] += weights
        # What a process sends and what it receives pass the same thread; threads share the cores of their node.
        sockets = sum(np.bincount(end, part.fraction, minlength=hosts.size) for end in (part.src, part.dst))
        on_cores = np.bincount(node, sockets)[node] / count[node] * per_core
        slowest = float((weights / hosts.topology.link_bandwidth[links]).max(initial=0.0))
        host_rounds.append(HostRound(slowest, float(np.max(np.maximum(sockets, on_cores)))))
    return load, tuple(host_rounds)


def _staging(request: Request, group: Group, hosts: Group) -> tuple[Floats, float, int]:
    """Copies between GPU and host: (L,) load per byte of S, seconds per byte, and how many follow one another."""
    n = group.size
    root = request.root
    own = 1.0 / n
    ones = np.ones(n)
    at_root = np.zeros(n)
    elsewhere = np.ones(n)
    at_root[root], elsewhere[root] = 1.0, 0.0
    down, up = {
        "all_gather": (own * ones, ones),
        "reduce_scatter": (ones, own * ones),
        "broadcast": (at_root, elsewhere),
        "reduce": (ones, at_root),
        "scatter": (at_root, own * elsewhere),
        "gather": (own * elsewhere, at_root),
        "barrier": (0.0 * ones, 0.0 * ones),
    }.get(request.kind, (ones, ones))
    load = np.zeros(group.topology.n_links)
    seconds = 0.0
    copies = 0
    router = routing.router(group.topology)
    for src, dst, fraction in ((group.gpus, hosts.gpus, down), (hosts.gpus, group.gpus, up)):
        away = (src != dst) & (fraction > 0)
        if away.any():
            links, weights = router.loads(src[away], dst[away], fraction[away])
            load[links] += weights
            seconds += float((weights / group.topology.link_bandwidth[links]).max(initial=0.0))
            copies += 1
    return load, seconds, copies
