"""What a scenario asks of its nodes' hosts: room in their memory, and copies between that and GPUs."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np

from clustersim.cluster.routes import router
from clustersim.collectives.host_copies import copy_rate, near_cpus
from clustersim.core.arrays import Ints
from clustersim.core.errors import ScenarioError
from clustersim.core.host_memory import HostMemory
from clustersim.core.memory_rates import host_bandwidth
from clustersim.core.mesh import Mesh
from clustersim.core.topology import CPU, Topology
from clustersim.scenario import Scenario


def host_memory(topology: Topology, mesh: Mesh, rank_bytes: float) -> HostMemory:
    """What the ranks of the node that has most of them keep on its host, each ``rank_bytes``, and the least that a
    node's host has; unknown where no file says that of a node, unless another's is too small already."""
    nodes = topology.vertex_node[mesh.gpus[: mesh.workers]]
    kept_bytes = rank_bytes * int(np.bincount(nodes[nodes >= 0]).max())
    rooms = [topology.node_types[node].host_memory for node in np.unique(nodes[nodes >= 0]).tolist()]
    stated_rooms = [room for room in rooms if room is not None]
    least = min(stated_rooms, default=None)
    is_known = len(stated_rooms) == len(rooms) or (least is not None and least < kept_bytes)
    return HostMemory(kept_bytes, least if is_known else None)


CopyRates: TypeAlias = tuple[float, float]
"""[bytes/s] of a rank's copies to its host, and from it."""


def copy_rates_of(scenario: Scenario, topology: Topology, mesh: Mesh) -> CopyRates:
    """:func:`host_copy_rates`; zeros where nothing is offloaded at the machine's own rate."""
    config = scenario.config
    own = config.offloads and getattr(config, "pcie_bandwidth", None) is None
    if not own and scenario.file.model.activation_offloading != math.inf:
        return 0.0, 0.0
    with scenario.at("$.cluster.topology"):
        return host_copy_rates(topology, mesh)


def host_copy_rates(topology: Topology, mesh: Mesh) -> CopyRates:
    """Of a rank's copies while all ranks of its node copy: of links, as
    :func:`~clustersim.collectives.host_copies.copy_rate` says, and of the memory behind them, which the GPUs of one CPU
    share. The slowest node's.

    Raises :class:`ScenarioError` for a machine whose file has no CPU that a GPU reaches.
    """
    ranks = mesh.gpus[: mesh.workers]
    if topology.vertex_kinds[ranks[0]] == CPU:
        rate = min(host_bandwidth(topology.node_types[node]) for node in topology.vertex_node[ranks].tolist())
        return rate / mesh.nproc_per_node, rate / mesh.nproc_per_node
    slowest = [np.inf, np.inf]
    for gpus in _unlike(topology, ranks):
        cpus = near_cpus(topology, gpus)
        if (cpus < 0).any():
            gpu = topology.vertex_names[gpus[int(np.argmin(cpus))]]
            raise ScenarioError(
                f"{topology.name}: no CPU that {gpu} reaches, so that nobody knows how fast it copies to its host; "
                "give the rate (strategy.pcie_bandwidth, or model.activation_offloading)"
            )
        memory = _memory_rate(topology, cpus)
        for i, to_host in enumerate((True, False)):
            slowest[i] = min(slowest[i], memory, copy_rate(topology, gpus, cpus, to_host=to_host))
    return slowest[0], slowest[1]


def _memory_rate(topology: Topology, cpus: Ints) -> float:
    """[bytes/s] of one of the GPUs whose CPUs these are, of the memory that most of them share."""
    rates = []
    for cpu, sharing in zip(*np.unique(cpus, return_counts=True), strict=True):
        rates.append(host_bandwidth(topology.node_types[topology.vertex_node[cpu]]) / int(sharing))
    return min(rates)


def _unlike(topology: Topology, ranks: Ints) -> list[Ints]:
    """The ranks' GPUs, of islands that are alike those of one that has most of them."""
    ways = router(topology)
    islands = ways.islands.of[ranks]
    by_build: dict[int, Ints] = {}
    for island in np.unique(islands).tolist():
        here = ranks[islands == island]
        build = int(ways.builds[island])
        if build not in by_build or len(here) > len(by_build[build]):
            by_build[build] = here
    return list(by_build.values())
