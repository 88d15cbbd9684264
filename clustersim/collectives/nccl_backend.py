"""The ``nccl`` backend: algorithm and protocol as NCCL's tuner chooses, time from measured constants and link loads.

The byte term is not a table: the algorithm's traffic over its channels is routed onto links, each edge enlarged by
what its protocol and path achieve (:mod:`clustersim.core.costs`), and the narrowest link sets the rate. So a
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

from clustersim.collectives import ideal
from clustersim.collectives import nccl_terms as terms
from clustersim.collectives.base import Channel, Group, Plan, Request, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.costs import costs_of
from clustersim.collectives.expert_kernels import one_sided
from clustersim.collectives.grouped_sends import channels_law, direct_shares, p2p_device, p2p_law
from clustersim.collectives.nccl.constants import ALGORITHMS as TUNED_ALGORITHMS
from clustersim.collectives.nccl.constants import PROTOCOLS
from clustersim.collectives.nccl.search import search_channels
from clustersim.collectives.nccl.tuner import channels_used, choose
from clustersim.collectives.nccl.view import NcclRequest
from clustersim.collectives.paths import EDGE_CLASSES, PathLoads, loads_of, placement, shares_of
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.staged import host_memory_rate
from clustersim.core.arrays import Floats, Ints
from clustersim.core.byte_matrix import ByteMatrix
from clustersim.core.costs import CommunicationCosts
from clustersim.core.memo import kept_with_topology
from clustersim.core.transports import transport

TUNED = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"})
"""Kinds NCCL's tuner chooses for; the rest are grouped sends and receives."""


class NcclPick(NamedTuple):
    """What NCCL picks, and for what, whatever the size; ``one_sided`` : a library's kernel makes it instead, which
    copies a member's own part beside the others'."""

    kind: str
    root: int
    matrix: ByteMatrix | None
    algorithm: str
    protocol: str
    n_channels: int
    one_sided: bool = False

    def loads(self, group: Group) -> PathLoads:
        """Bytes on links per byte of S."""
        request = Request(self.kind, 1.0, root=self.root, matrix=self.matrix)
        return loads_of(request, group, self.algorithm, self.n_channels)


class NcclChoice(msgspec.Struct, frozen=True, eq=False, dict=True):
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
    def picked(self) -> NcclPick:
        """Equal for choices of a group that differ in size alone."""
        request = self.request
        plan_key = (self.algorithm, self.protocol, self.n_channels, one_sided(request.kernel))
        return NcclPick(request.kind, request.root, request.matrix, *plan_key)

    @cached_property
    def loads(self) -> PathLoads:
        """Bytes on links per byte of S."""
        return self.picked.loads(self.group)

    @cached_property
    def paces(self) -> Floats:
        """(k, 5) seconds per byte of S at line rate by edge class, of every link that differs."""
        bandwidth = self.group.topology.link_bandwidth[self.loads.links]
        paces: Floats = np.unique((self.loads.by_class / bandwidth).T, axis=0)
        return paces


def plan(
    request: Request, group: Group, n_channels: int | None = None, costs: CommunicationCosts | None = None
) -> Plan:
    """The Plan of one collective under NCCL; ``costs`` None takes those of the group's machine.

    Raises ProgramError for a pin that cannot do it.
    """
    costs = costs or costs_of(group)
    if foreign(request):
        return _foreign_plan(request, group, n_channels, costs)
    chosen = choice(request, group, n_channels)
    group_load = _way(group, chosen.picked, costs)
    wire = request.nbytes / group_load.rate
    total = _law(chosen, group_load.hops, costs)(wire)
    moving, ceiling, host = wire, group_load.ceiling, 0.0
    if request.kind not in TUNED:
        moving = channels_law(request, group, costs)(wire)
        ceiling = min(ceiling, request.nbytes / moving) if moving > wire else ceiling
        host = max(total - p2p_device(request, group, costs)(wire), 0.0)
    return Plan(
        kind=request.kind,
        algorithm=chosen.algorithm,
        protocol=chosen.protocol,
        n_channels=chosen.n_channels,
        nbytes=request.nbytes,
        latency=total - moving,
        links=group_load.links,
        weights=group_load.weights,
        ceiling=ceiling,
        lower_bound=lower_bound(request, group),
        bus_factor=bus_factor(request.kind, group.size),
        host=host,
        channels=group_load.channels,
    )


def choice(request: Request, group: Group, n_channels: int | None = None) -> NcclChoice:
    """What NCCL picks. Raises ProgramError for a pin that cannot do it."""
    if request.kind not in TUNED:
        return NcclChoice(request, group, "direct", "Simple", 1)
    system = placement(group).system
    tuned = choose(
        request.kind,
        request.nbytes,
        system,
        NcclRequest(request.dtype, request.redop, group.nccl_version),
        algorithm=request.algorithm,
        protocol=protocols_asked(request, group),
    )
    count = n_channels or search_channels(tuned.algorithm, system)
    blocks = channels_used(tuned, request.nbytes, system, request.kind)
    return NcclChoice(request, group, tuned.algorithm, tuned.protocol, count, blocks)


def protocols_asked(request: Request, group: Group) -> str | None:
    """Protocols that NCCL is let use, as NCCL_PROTO has them: those asked for, or its transport's vendor's.

    None leaves the choice to NCCL; naming all three is not the same, since a named LL128 is used where it is unsafe.
    """
    where = placement(group)
    allowed = transport(where.net).protocols
    restricted = where.islands > 1 and allowed != PROTOCOLS
    return request.protocol or (",".join(allowed) if restricted else None)


def seconds(chosen: NcclChoice, costs: CommunicationCosts) -> float:
    """What ``plan(...).time`` says on an idle network, without making the Plan: for fits, which ask very often."""
    pace, hops = _pace_and_hops(chosen, costs)
    return _law(chosen, hops, costs)(chosen.request.nbytes * pace)


def seconds_of(choices: Iterable[NcclChoice], costs: CommunicationCosts) -> Iterator[float]:
    """:func:`seconds` of many: what does not depend on the size is worked out once for rows that differ in it alone."""
    pace_of: dict[tuple[Group, NcclPick], tuple[float, float]] = {}
    for chosen in choices:
        key = chosen.group, chosen.picked
        if key not in pace_of:
            pace_of[key] = _pace_and_hops(chosen, costs)
        pace, hops = pace_of[key]
        yield _law(chosen, hops, costs)(chosen.request.nbytes * pace)


def _pace_and_hops(chosen: NcclChoice, costs: CommunicationCosts) -> tuple[float, float]:
    """Seconds per byte of S on the narrowest link, and seconds of the hops."""
    shares, ceiling, hops = _limits(chosen.group, chosen.picked, chosen.loads, costs)
    pace = float((chosen.paces / shares).sum(axis=1).max(initial=0.0))
    pace *= _start_and_end(chosen.group, chosen.picked, chosen.loads, costs)
    return max(pace, 1.0 / ceiling), hops


def _start_and_end(group: Group, picked: NcclPick, loads: PathLoads, costs: CommunicationCosts) -> float:
    """How many times longer than its bytes on the links what is picked takes inside one NVLink domain."""
    return 1.0 if picked.one_sided else terms.start_and_end(picked.kind, picked.algorithm, loads, group, costs)


def _limits(group: Group, picked: NcclPick, loads: PathLoads, costs: CommunicationCosts) -> tuple[Floats, float, float]:
    """(5,) share of the line rate by edge class, bytes/s of kernels and hosts' memory, and seconds of the hops."""
    kind = picked.kind
    algorithm = picked.algorithm
    protocol = picked.protocol
    memory = _memory_rate(group, picked)
    if kind not in TUNED:
        return direct_shares(kind, group, costs), memory, 0.0
    ceiling = min(memory, terms.kernel_ceiling(kind, group, algorithm, protocol, costs))
    hops = terms.hop_time(kind, algorithm, protocol, loads, group, costs)
    return shares_of(algorithm, protocol, group, costs), ceiling, hops


@kept_with_topology(maxsize=1024)
def _memory_rate(group: Group, picked: NcclPick) -> float:
    """Payload bytes/s of the hosts' memory, on which no constant of the time model has a say."""
    loads = picked.loads(group)
    return host_memory_rate(loads.links, loads.by_class[EDGE_CLASSES.index("to_nic")], group)


class _GroupLoad(msgspec.Struct, frozen=True, eq=False):
    """What does not depend on the bytes: links crossed, load on each per payload byte, payload bytes/s of an idle
    machine (and of its ``ceiling`` alone), seconds of ``hops``, and the ``channels`` the links belong to."""

    links: Ints
    weights: Floats
    ceiling: float
    rate: float
    hops: float
    channels: tuple[Channel, ...]


@kept_with_topology(maxsize=1024)
def _way(group: Group, picked: NcclPick, costs: CommunicationCosts) -> _GroupLoad:
    loads = picked.loads(group)
    shares, ceiling, hops = _limits(group, picked, loads, costs)
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    used = weights > 0
    links = loads.links[used]
    weights = weights[used]
    if len(links):
        alone = float(np.min(group.topology.link_bandwidth[links] / weights))
        longer = _start_and_end(group, picked, loads, costs)
        ceiling = min(ceiling, alone / longer) if longer > 1.0 else ceiling
        rate = min(ceiling, alone)
    else:
        rate = ceiling
    return _GroupLoad(links, weights, ceiling, rate, hops, loads.channels)


def _law(chosen: NcclChoice, hops: float, costs: CommunicationCosts) -> Callable[[float], float]:
    """Seconds of the collective, given those its bytes take on the narrowest link."""
    request = chosen.request
    group = chosen.group
    if request.kind not in TUNED:
        return p2p_law(request, group, costs)
    base = terms.kernel_start(request.kind, group, costs)
    floor = terms.host_floor(request.kind, group, costs, chosen.blocks)
    hops *= terms.busy_steps(request.kind, chosen.algorithm, chosen.protocol, request.nbytes, group, costs)
    p = terms.blend(request.kind, chosen.algorithm, chosen.protocol, chosen.loads, group, costs)
    hops *= terms.slowest(chosen.algorithm, chosen.protocol, chosen.blocks, group, costs)
    messages = 0.0
    where = placement(group)
    if transport(where.net).eager < math.inf and where.islands > 1:
        part = request.nbytes / chosen.blocks
        base += terms.rendezvous(chosen.algorithm, chosen.protocol, part, group, costs)
        if request.kind in terms.RINGS:
            way = chosen.algorithm, chosen.protocol
            messages = terms.message_time(*way, part, chosen.blocks, chosen.loads, group, costs)

    def seconds(wire: float) -> float:
        """The seconds, given those on the narrowest link."""
        device = max(base + hops + wire + terms.fill(p, hops, wire, costs), messages)
        return terms.floored(device, floor, costs)

    return seconds


def foreign(request: Request) -> bool:
    """Whether a pin names an algorithm that is not NCCL's, to be played as if written on NCCL's sends and receives."""
    name = request.algorithm
    if name is None or name in TUNED_ALGORITHMS or (name == "direct" and request.kind not in TUNED):
        return False
    return name in ALGORITHMS and request.kind in ALGORITHMS[name].kinds


def _foreign_plan(request: Request, group: Group, n_channels: int | None, costs: CommunicationCosts) -> Plan:
    """The textbook's plan at the Simple protocol's shares and hops."""
    textbook = ideal.plan(request, group, n_channels)
    loads = loads_of(request, group, textbook.algorithm, textbook.n_channels)
    shares = shares_of(textbook.algorithm, "Simple", group, costs)
    weights: Floats = (loads.by_class / shares[:, None]).sum(axis=0)
    slowdown = float(weights.sum() / loads.by_class.sum()) if loads.by_class.any() else 1.0
    ceiling = textbook.ceiling / slowdown
    wire = request.nbytes / ceiling
    hops = terms.hop_time(request.kind, textbook.algorithm, "Simple", loads, group, costs)
    base = terms.kernel_start(request.kind, group, costs)
    total = terms.floored(base + hops + wire, terms.host_floor(request.kind, group, costs), costs)
    return replace(
        textbook, latency=total - wire, links=loads.links, weights=weights, ceiling=ceiling, protocol="Simple"
    )
