"""What a backend's plan makes of the transfers of a schedule: their rates, and what passes before the first.

A schedule says who sends what after what; a plan says what its library reaches of each link, which ceiling its kernels
or hosts set, and what it takes beyond the bytes. Both fidelities take these from the plan, so that they differ in what
transfers do to each other alone. A link's byte takes as much of the link as in the plan; a ceiling holds back every
transfer alike; and what the plan's latency is beyond the hops and the pipeline's fill that the transfers go through
themselves passes before the first of them.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from clustersim.cluster import routes as routing
from clustersim.collectives.base import Algorithm, Channel, Group, Plan, Request
from clustersim.collectives.channels import channels
from clustersim.collectives.ideal import textbook
from clustersim.collectives.registry import ALGORITHMS
from clustersim.core.arrays import Floats, Ints
from clustersim.core.topology import route_latency
from clustersim.engine.flows.loads import Loads

SAME = 1e-9
"""Rates this near, as a part of each other, are one."""


class Pacing(msgspec.Struct, frozen=True, eq=False):
    """How the transfers of one collective go on its group's links.

    Parameters
    ----------
    stretch : (L,) float, bytes of each link's capacity that a byte crossing it takes. held : float >= 1, how many times
        as long as the links let them transfers take. begin : float [s] before the first transfer. hop : float, share of
        the links' latency that a hop takes; 1 but where a library is measured to need less.
    """

    stretch: Floats
    held: float = 1.0
    begin: float = 0.0
    hop: float = 1.0


class Paid(msgspec.Struct, frozen=True, eq=False):
    """A plan as its group pays for it: ``links`` (k,) and ``weights`` (k,), ``rate`` [bytes/s] alone, and ``latency``
    [s] without the part of the host that a program's launches hide."""

    links: Ints
    weights: Floats
    rate: float
    latency: float


def pacing(request: Request, group: Group, plan: Plan, paid: Paid) -> Pacing:
    """How the transfers of a plan go."""
    topology = group.topology
    stretch = np.ones(topology.n_links)
    if group.size == 1:
        return Pacing(stretch)
    if request.kind == "send":
        return _send(group, paid)
    chosen = ALGORITHMS[plan.algorithm]
    laid = plan.channels or channels(group, plan.n_channels, chosen.layout)
    book = _Book(request, group, chosen, laid)
    links, weights, line, fill = book.at(stretch)
    load = np.zeros(topology.n_links)
    load[links] = weights
    both = load[paid.links] > 0
    crossed = paid.links[both]
    stretch[crossed] = paid.weights[both] / load[crossed]
    plain = bool(np.all(np.abs(stretch - 1.0) < SAME))
    if not plain:
        _, _, line, fill = book.at(stretch)
    slowdown = line / paid.rate if np.isfinite(line) and request.nbytes > 0 else 1.0
    if abs(slowdown - 1.0) < SAME:
        slowdown = 1.0
    else:
        _, _, _, fill = book.at(stretch * slowdown)
    if slowdown < 1.0:  # the library's mean over links is less than the narrowest's
        stretch = stretch * slowdown
        slowdown = 1.0
    return _begun(book, Pacing(stretch, slowdown), fill, paid.latency)


def _send(group: Group, paid: Paid) -> Pacing:
    """One transfer over the route between its two ends, as fast as the plan's way (which may be through hosts)."""
    topology = group.topology
    ways = routing.router(group.topology)
    src, dst = group.gpus[:2].tolist()
    links, line = ways.loads(np.array([src]), np.array([dst]), np.ones(1))
    weights = np.zeros(topology.n_links)
    weights[paid.links] = paid.weights
    stretch = np.ones(topology.n_links)
    stretch[links] = np.where(weights[links] > 0, weights[links] / line, 1.0)
    slowdown = float((topology.link_bandwidth[links] / (line * stretch[links])).min(initial=np.inf)) / paid.rate
    if abs(slowdown - 1.0) < SAME or not np.isfinite(slowdown):
        slowdown = 1.0
    if slowdown < 1.0:
        stretch = stretch * slowdown
        slowdown = 1.0
    hops = route_latency(topology, ways.route(src, dst, 0, -1))
    if paid.latency >= hops:
        return Pacing(stretch, slowdown, begin=paid.latency - hops)
    return Pacing(stretch, slowdown, hop=paid.latency / hops)


def _begun(book: _Book, pacing: Pacing, fill: float, latency: float) -> Pacing:
    """With what passes before the first transfer, or the hops that are left where the plan has less than theirs."""
    if latency >= fill:
        begin = latency - fill
        return msgspec.structs.replace(pacing, begin=begin if begin > SAME * fill else 0.0)
    if fill - latency <= SAME * fill:
        return pacing
    _, _, _, bytes_alone = book.at(pacing.stretch * pacing.held, hops=0.0)
    hop = (latency - bytes_alone) / (fill - bytes_alone) if fill > bytes_alone else 0.0
    return msgspec.structs.replace(pacing, hop=max(hop, 0.0))


class _Book(msgspec.Struct, frozen=True, eq=False):
    """The textbook's law of an algorithm, on links of other rates."""

    request: Request
    group: Group
    chosen: Algorithm
    laid: tuple[Channel, ...]

    def at(self, stretch: Floats, hops: float = 1.0) -> tuple[Ints, Floats, float, float]:
        """As :func:`~clustersim.collectives.ideal.textbook`, links slower by ``stretch``, hops of a part of theirs."""
        topology = self.group.topology
        group = self.group
        if hops != 1.0 or not np.all(stretch == 1.0):
            slower = replace(
                topology, link_bandwidth=topology.link_bandwidth / stretch, link_latency=topology.link_latency * hops
            )
            group = replace(group, topology=slower)
        return textbook(self.request, group, self.chosen, self.laid)


def ceilings(lane: Ints, rounds: Ints, nbytes: Floats, load: Ints, loads: Loads, held: float) -> Floats:
    """(T,) bytes/s above which no transfer goes, so that all take ``held`` times as long as on their links alone.

    A lane's rate is what it reaches in its round, sharing links with the round's other lanes by their bytes.
    """
    if held <= 1.0:
        return np.full(len(nbytes), np.inf)
    rounds = rounds if len(rounds) else np.zeros(len(nbytes), dtype=np.int64)
    keys, first, spot_of = np.unique(np.stack([rounds, lane], axis=1), axis=0, return_index=True, return_inverse=True)
    spot_of = spot_of.reshape(-1)
    moved = np.bincount(spot_of, weights=nbytes)
    ptr, links, weights = loads.csr(load[first])
    key = np.repeat(np.arange(len(first)), np.diff(ptr))
    _, spot = np.unique(np.stack([keys[key, 0], links], axis=1), axis=0, return_inverse=True)
    spot = spot.reshape(-1)
    seconds = np.bincount(spot, weights=moved[key] * weights / loads.topology.link_bandwidth[links])
    busy = np.zeros(len(first))
    np.maximum.at(busy, key, seconds[spot])
    rate: Floats = np.divide(moved, busy * held, out=np.full(len(first), np.inf), where=busy > 0)
    return rate[spot_of]
