"""The ``nccl`` backend: algorithm and protocol as NCCL's tuner chooses, time from measured constants and link loads.

The byte term is not a table: the algorithm's traffic over its channels is routed onto links, each edge enlarged by
what its protocol and path achieve (:mod:`clustersim.costs`), and the narrowest link sets the rate. So a
slow NIC, a shared PCIe switch or an odd number of GPUs changes the answer without a special case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import msgspec
import numpy as np

from clustersim.arrays import Floats, Ints
from clustersim.byte_matrix import ByteMatrix
from clustersim.collectives import ideal, nccl
from clustersim.collectives.base import Channel, Group, Plan, Request, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of
from clustersim.collectives.nccl_sends import direct_shares, p2p_device, p2p_law
from clustersim.collectives.nccl_terms import (
    ROOTED,
    busy_steps,
    fill,
    floored,
    hop_time,
    host_floor,
    kernel_ceiling,
    rendezvous,
)
from clustersim.collectives.paths import PathLoads, loads_of, placement, shares_of
from clustersim.collectives.registry import ALGORITHMS
from clustersim.costs import Costs
from clustersim.memo import kept_with_topology
from clustersim.transports import transport

TUNED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})
"""Kinds NCCL's tuner chooses for; the rest are grouped sends and receives."""

_OWN = frozenset({"ring", "tree", "nvls", "nvls_tree", "pat"})


class Picked(NamedTuple):
    """What NCCL picked, without the request it was for."""

    algorithm: str
    protocol: str
    n_channels: int


class Choice(msgspec.Struct, frozen=True, eq=False, dict=True):
    """What NCCL picks for a request. No constant of the time model has a say in it, so one choice serves many.

    Parameters
    ----------
    algorithm, protocol, n_channels : picked. blocks : CUDA blocks of its kernel, fewer than channels for small sizes.
    """

    request: Request
    group: Group
    algorithm: str
    protocol: str
    n_channels: int
    blocks: int = 1

    @cached_property
    def alike(self) -> tuple[object, ...]:
        """Equal for choices that differ in size alone."""
        request = self.request
        return request.kind, request.root, request.matrix, self.group, self.algorithm, self.protocol, self.n_channels

    @cached_property
    def loads(self) -> PathLoads:
        """Bytes on links per byte of S."""
        return loads_of(self.request, self.group, self.algorithm, self.n_channels)

    @cached_property
    def paces(self) -> Floats:
        """(k, 4) seconds per byte of S at line rate by edge class, of every link that differs."""
        bandwidth = self.group.topology.link_bandwidth[self.loads.links]
        found: Floats = np.unique((self.loads.by_class / bandwidth).T, axis=0)
        return found


def plan(request: Request, group: Group, n_channels: int | None = None, costs: Costs | None = None) -> Plan:
    """The Plan of one collective under NCCL; ``costs`` None takes those of the group's machine.

    Raises ProgramError for a pin that cannot do it.
    """
    costs = costs or costs_of(group)
    if _foreign(request):
        return _foreign_plan(request, group, n_channels, costs)
    chosen = choice(request, group, n_channels)
    picked = Picked(chosen.algorithm, chosen.protocol, chosen.n_channels)
    if request.kind in TUNED:
        way = _tuned_way(group, request.kind, request.root, picked, costs)
    else:
        way = _direct_way(group, request.kind, request.root, request.matrix, costs)
    made = _plan(request, group, picked, way, _law(chosen, way.hops, costs))
    if request.kind in TUNED:
        return made
    wire = request.nbytes / way.rate
    alone = p2p_device(request, group, costs)(wire)
    return replace(made, host=max(made.latency + wire - alone, 0.0))


def choice(request: Request, group: Group, n_channels: int | None = None) -> Choice:
    """What NCCL picks. Raises ProgramError for a pin that cannot do it."""
    if request.kind not in TUNED:
        return Choice(request, group, "direct", "Simple", 1)
    where = placement(group)
    system, allowed = where.system, transport(where.net).protocols
    tuned = nccl.choose(
        request.kind,
        request.nbytes,
        system,
        nccl.Asked(request.dtype, request.redop, group.nccl_version),
        algorithm=request.algorithm,
        protocol=request.protocol or (",".join(allowed) if where.islands > 1 else None),
    )
    count = n_channels or nccl.search_channels(tuned.algorithm, system)
    blocks = nccl.channels_used(tuned, request.nbytes, system, request.kind)
    return Choice(request, group, tuned.algorithm, tuned.protocol, count, blocks)


def seconds(chosen: Choice, costs: Costs) -> float:
    """What ``plan(...).time`` says on an idle network, without making the Plan: for fits, which ask very often."""
    pace, hops = _pace_and_hops(chosen, costs)
    return _law(chosen, hops, costs)(chosen.request.nbytes * pace)


def seconds_of(choices: Iterable[Choice], costs: Costs) -> Iterator[float]:
    """:func:`seconds` of many: what does not depend on the size is worked out once for rows that differ in it alone."""
    known: dict[tuple[object, ...], tuple[float, float]] = {}
    for chosen in choices:
        if chosen.alike not in known:
            known[chosen.alike] = _pace_and_hops(chosen, costs)
        pace, hops = known[chosen.alike]
        yield _law(chosen, hops, costs)(chosen.request.nbytes * pace)


def _pace_and_hops(chosen: Choice, costs: Costs) -> tuple[float, float]:
    """Seconds per byte of S on the narrowest link, and seconds of the hops."""
    request, group = chosen.request, chosen.group
    shares, ceiling, hops = direct_shares(request.kind, group, costs), math.inf, 0.0
    if request.kind in TUNED:
        algorithm, protocol = chosen.algorithm, chosen.protocol
        shares = shares_of(algorithm, protocol, group, costs)
        ceiling = kernel_ceiling(request.kind, group, algorithm, protocol, costs)
        hops = hop_time(request.kind, algorithm, protocol, chosen.loads, group, costs)
    return max(float((chosen.paces / shares).sum(axis=1).max(initial=0.0)), 1.0 / ceiling), hops


class _Way(msgspec.Struct, frozen=True, eq=False):
    """What does not depend on the bytes: links crossed, load on each per payload byte, payload bytes/s of an idle
    machine (and of its ``ceiling`` alone), seconds of ``hops``, and the ``channels`` the links belong to."""

    links: Ints
    weights: Floats
    ceiling: float
    rate: float
    hops: float
    channels: tuple[Channel, ...]


def _way(group: Group, loads: PathLoads, weights: Floats, ceiling: float, hops: float = 0.0) -> _Way:
    used = weights > 0
    links, weights = loads.links[used], weights[used]
    rate = min(ceiling, float(np.min(group.topology.link_bandwidth[links] / weights)) if len(links) else math.inf)
    return _Way(links, weights, ceiling, rate, hops, loads.channels)


@kept_with_topology(maxsize=1024)
def _tuned_way(group: Group, kind: str, root: int, picked: Picked, costs: Costs) -> _Way:
    algorithm, protocol, count = picked
    loads = loads_of(Request(kind, 1.0, root=root), group, algorithm, count)
    shares = shares_of(algorithm, protocol, group, costs)
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    hops = hop_time(kind, algorithm, protocol, loads, group, costs)
    return _way(group, loads, weights, kernel_ceiling(kind, group, algorithm, protocol, costs), hops)


@kept_with_topology(maxsize=1024)
def _direct_way(group: Group, kind: str, root: int, matrix: ByteMatrix | None, costs: Costs) -> _Way:
    loads = loads_of(Request(kind, 1.0, root=root, matrix=matrix), group, "direct", 1)
    shares = direct_shares(kind, group, costs)
    return _way(group, loads, (loads.by_class / shares[:, None]).sum(axis=0), math.inf)


def _law(chosen: Choice, hops: float, costs: Costs) -> Callable[[float], float]:
    """Seconds of the collective, given those its bytes take on the narrowest link."""
    request, group = chosen.request, chosen.group
    if request.kind not in TUNED:
        return p2p_law(request, group, costs)
    base = costs.rooted_base if request.kind in ROOTED else costs.base
    if group.launch == "threads":
        base += costs.threads_base
    floor = host_floor(request.kind, group, costs, chosen.blocks)
    hops *= busy_steps(request.kind, chosen.algorithm, chosen.protocol, request.nbytes, group, costs)
    if transport(placement(group).net).eager < math.inf:
        base += rendezvous(
            chosen.algorithm, chosen.protocol, request.nbytes / chosen.blocks, chosen.loads, group, costs
        )

    def seconds(wire: float) -> float:
        return floored(base + hops + wire + fill(hops, wire, costs), floor, costs)

    return seconds


def _plan(
    request: Request,
    group: Group,
    picked: Picked,
    way: _Way,
    seconds: Callable[[float], float],
) -> Plan:
    """The Plan that takes ``seconds(wire)`` alone, where ``wire`` [s] is what the bytes take on the narrowest link."""
    wire = request.nbytes / way.rate
    return Plan(
        kind=request.kind,
        algorithm=picked.algorithm,
        protocol=picked.protocol,
        n_channels=picked.n_channels,
        nbytes=request.nbytes,
        latency=seconds(wire) - wire,
        links=way.links,
        weights=way.weights,
        ceiling=way.ceiling,
        lower_bound=lower_bound(request, group),
        bus_factor=bus_factor(request.kind, group.size),
        channels=way.channels,
    )


def _foreign(request: Request) -> bool:
    """Whether a pin names an algorithm that is not NCCL's, to be played as if written on NCCL's sends and receives."""
    name = request.algorithm
    if name is None or name in _OWN or (name == "direct" and request.kind not in TUNED):
        return False
    return name in ALGORITHMS and request.kind in ALGORITHMS[name].kinds


def _foreign_plan(request: Request, group: Group, n_channels: int | None, costs: Costs) -> Plan:
    """The textbook's plan at the Simple protocol's shares and hops."""
    textbook = ideal.plan(request, group, n_channels)
    loads = loads_of(request, group, textbook.algorithm, textbook.n_channels)
    shares = shares_of(textbook.algorithm, "Simple", group, costs)
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    slowdown = float(weights.sum() / loads.by_class.sum()) if loads.by_class.any() else 1.0
    ceiling = textbook.ceiling / slowdown
    wire = request.nbytes / ceiling
    hops = hop_time(request.kind, textbook.algorithm, "Simple", loads, group, costs)
    total = floored(costs.base + hops + wire, host_floor(request.kind, group, costs), costs)
    return replace(
        textbook, latency=total - wire, links=loads.links, weights=weights, ceiling=ceiling, protocol="Simple"
    )
