"""The ``gloo`` backend: collectives of CPU processes over TCP, as PyTorch's ProcessGroupGloo runs them.

Gloo chooses by kind alone: a ring in 1 MiB segments for all_reduce, a ring of half blocks for all_gather, a binomial
tree for broadcast, a ring and a gather for reduce, direct sends for the rest (facebookincubator/gloo:
gloo/{allreduce,allgather,broadcast,alltoall}.cc). reduce_scatter is an all_reduce of a copy (pytorch:
ProcessGroupGloo.cpp). Ranks talk in rank order over the one network interface Gloo binds to; ranks of a node talk over
loopback. Tensors on a GPU are staged through host memory, before and after. How long that takes the hosts is
:mod:`clustersim.collectives.host_law`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from clustersim.arrays import Floats, Ints
from clustersim.collectives import gloo_law
from clustersim.collectives.base import Channel, Group, Plan, Request, Traffic
from clustersim.collectives.build import everyone, traffic_of
from clustersim.collectives.costs import gloo_costs_of
from clustersim.collectives.direct import DIRECT
from clustersim.collectives.host_law import Leg, Work
from clustersim.collectives.host_path import Asked, host_plan, most_per_core, on_hosts, on_links
from clustersim.collectives.ring import RING
from clustersim.collectives.trees import BINOMIAL
from clustersim.costs import GlooCosts
from clustersim.errors import ProgramError


def plan(request: Request, group: Group, n_channels: int | None = None, costs: GlooCosts | None = None) -> Plan:
    """The Plan of one collective under Gloo; ``n_channels`` is not Gloo's to have and must be None or 1.

    ``costs``: None takes those of the group's machine.
    Raises :class:`ProgramError` for a pin that is not what Gloo would run.
    """
    if n_channels not in (None, 1):
        raise ProgramError(f"Gloo has one channel, not {n_channels}")
    costs = costs or gloo_costs_of(group)
    hosts = on_hosts(group, "Gloo")
    algorithm, traffic = _choice(request, hosts)
    if request.algorithm not in (None, algorithm):
        raise ProgramError(f"Gloo runs {request.kind!r} as {algorithm!r}, not {request.algorithm!r}")
    load, legs = on_links(traffic, hosts)
    return host_plan(
        request, group, hosts, Asked(algorithm, "TCP", load, _work(request, hosts, legs)), costs, staged=True
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
        tree = BINOMIAL.traffic(request, hosts, ())
        return "binomial", dataclasses.replace(tree, rail=0 * tree.rail)  # over the one interface
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


# ---- what it asks of the hosts --------------------------------------------------------------------------------------


def work(request: Request, group: Group) -> Work:
    """What a collective asks of the hosts of its ranks; Gloo's own part, without copies between GPU and host."""
    hosts = on_hosts(group, "Gloo")
    _, traffic = _choice(request, hosts)
    return _work(request, hosts, on_links(traffic, hosts)[1])


def _work(request: Request, hosts: Group, legs: tuple[Leg, ...]) -> Work:
    n, size, kind = hosts.size, request.nbytes, request.kind
    shared = most_per_core(hosts)
    busy = max(1.0, shared)
    chain, total = gloo_law.chain_and_total(kind, n, size)
    messages = max(chain, total / n * shared)
    touched = gloo_law.touched(kind, n) * size * (1.0 if kind in gloo_law.ROOTED else busy)
    fresh = kind in gloo_law.SCRATCH and size >= gloo_law.MAPPED
    return Work(
        kind=kind,
        nbytes=size,
        calls=busy,
        legs=(Leg(0.0, 0.0, messages), *legs),
        touched=touched,
        scratch=size * (1.0 if kind in gloo_law.ROOTED else busy) if fresh else 0.0,
        footprint=gloo_law.footprint(kind, n, hosts.ranks_per_node) * size,
    )
