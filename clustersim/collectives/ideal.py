"""The ``ideal`` backend: the textbook's alpha-beta model on this machine's graph.

Line rates, hop latencies of the links, nothing for launches or protocols. What an algorithm takes here is what chunk
replay of its schedule takes on an idle network: the bytes of the narrowest link, plus the hops and pipeline fill that
:attr:`~clustersim.collectives.base.Algorithm.fill` works out.
"""

from __future__ import annotations

import math

from clustersim.collectives.base import Algorithm, Channel, Group, Plan, Request, Traffic, bus_factor
from clustersim.collectives.bounds import lower_bound
from clustersim.collectives.channels import channels, natural_channels
from clustersim.collectives.loads import edge_costs, link_loads
from clustersim.collectives.registry import algorithm
from clustersim.collectives.ring import RING
from clustersim.collectives.round_times import by_members
from clustersim.core.arrays import Floats, Ints


def plan(request: Request, group: Group, n_channels: int | None = None) -> Plan:
    """The Plan of one collective by the textbook: a ring over all rails, unless pinned.

    ``n_channels`` None takes as many as use every rail. Raises :class:`ProgramError` for a pin that cannot do the kind.
    """
    chosen = algorithm(request.algorithm or ("ring" if request.kind in RING.kinds else "direct"))
    count = natural_channels(group) if n_channels is None else n_channels
    laid = channels(group, count, chosen.layout)
    links, weights, ceiling, latency = textbook(request, group, chosen, laid)
    return Plan(
        kind=request.kind,
        algorithm=chosen.name,
        protocol="Simple",
        n_channels=count,
        nbytes=request.nbytes,
        latency=latency,
        links=links,
        weights=weights,
        ceiling=ceiling,
        lower_bound=lower_bound(request, group),
        bus_factor=bus_factor(request.kind, group.size),
        channels=laid,
    )


def textbook(
    request: Request, group: Group, chosen: Algorithm, laid: tuple[Channel, ...]
) -> tuple[Ints, Floats, float, float]:
    """(links, weights, payload rate [bytes/s], latency [s]) of an algorithm over channels, at the line rates."""
    traffic = chosen.traffic(request, group, laid)
    links, weights = link_loads(traffic, group)
    costs = edge_costs(traffic, group, request.nbytes, links, weights)
    pace = float((weights / group.topology.link_bandwidth[links]).max(initial=0.0))
    ceiling = math.inf
    latency = 0.0
    if len(traffic.round) and chosen.fill is None:
        ceiling, latency = by_members(traffic, group, request.nbytes, costs.hop)
    elif len(traffic.round):
        ceiling, latency = _by_rounds(traffic, group, costs.hop)
    else:
        latency = traffic.steps * float(costs.hop.max(initial=0.0))
    if chosen.fill is not None:
        latency = chosen.fill(request, group, laid, costs)
    return links, weights, min(ceiling, math.inf if pace == 0 else 1.0 / pace), latency


def _by_rounds(traffic: Traffic, group: Group, hop: Floats) -> tuple[float, float]:
    """Payload rate [bytes/s] and latency [s] of rounds that everybody ends before anybody begins the next."""
    seconds_per_byte = 0.0
    latency = 0.0
    for chosen in traffic.rounds:
        links, weights = link_loads(traffic.only(chosen), group)
        seconds_per_byte += float((weights / group.topology.link_bandwidth[links]).max(initial=0.0))
        latency += float(hop[chosen].max())
    return (1.0 / seconds_per_byte if seconds_per_byte else math.inf), latency
