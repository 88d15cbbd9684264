"""Why NCCL runs what it runs: every algorithm and protocol it could take, its own estimate, ours, and why each lost."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from clustersim.collectives.base import Group, Request
from clustersim.collectives.nccl.pins import pinned_algorithms, pinned_protocols
from clustersim.collectives.nccl.tuner import candidates, rated
from clustersim.collectives.nccl.view import NcclRequest
from clustersim.collectives.nccl_backend import TUNED, choice, foreign, plan, protocols_asked
from clustersim.collectives.paths import placement
from clustersim.core.errors import ProgramError
from clustersim.core.transports import transport
from clustersim.core.units import format_time


class Alternative(msgspec.Struct, frozen=True):
    """One way to do a collective.

    Parameters
    ----------
    algorithm, protocol : of NCCL. tuner_us : NCCL's own estimate, by which it chooses; None where it makes none.
    ours_us : the time predicted for it; None where it cannot run. verdict : ``"chosen"``, or why it is not.
    """

    algorithm: str
    protocol: str
    tuner_us: float | None
    ours_us: float | None
    verdict: str


def why(request: Request, group: Group) -> tuple[Alternative, ...]:
    """Every pair of NCCL's tables for a request, in its order; of grouped sends and receives the one way there is.

    Raises :class:`ProgramError` as the plan of the request does.
    """
    library = group.topology.collective_library
    if request.kind not in TUNED:
        only = f"chosen: {library} has no algorithms to choose from for it"
        return (Alternative("direct", "Simple", None, _ours(request, group), only),)
    if foreign(request):
        asked_for = f"chosen: asked for, and none of {library}'s own"
        return (Alternative(str(request.algorithm), "Simple", None, _ours(request, group), asked_for),)
    chosen = choice(request, group)
    system = placement(group).system
    wanted = NcclRequest(request.dtype, request.redop, group.nccl_version)
    # As choice() asks: a protocol list, its vendor's too, that names LL128 takes it even where NCCL holds it unsafe.
    protocols = protocols_asked(request, group)
    wanted = replace(wanted, force_ll128="LL128" in (pinned_protocols(protocols, request.kind) or ()))
    every = candidates(request.kind, request.nbytes, system, wanted)
    times = {(tried.algorithm, tried.protocol): tried.time_s for tried in every}
    best = times[chosen.algorithm, chosen.protocol]
    alternatives = []
    for rating in rated(request.kind, system, wanted):
        pair = rating.algorithm, rating.protocol
        tuner = times.get(pair)
        if pair == (chosen.algorithm, chosen.protocol):
            verdict = "chosen"
        elif tuner is None:
            verdict = f"not possible: {rating.why}"
        else:
            verdict = _left_out(request, group, *pair) or _slower(tuner, best, library)
        pinned = replace(request, algorithm=pair[0], protocol=pair[1])
        ours = None if tuner is None else _ours(pinned, group)
        alternatives.append(Alternative(*pair, None if tuner is None else tuner * 1e6, ours, verdict))
    return tuple(alternatives)


def _left_out(request: Request, group: Group, algorithm: str, protocol: str) -> str:
    """Which setting leaves a pair out; empty where none does."""
    algorithms = pinned_algorithms(request.algorithm, request.kind)
    protocols = pinned_protocols(request.protocol, request.kind)
    if algorithms and algorithm not in algorithms:
        return f"left out by the algorithm asked for ({request.algorithm})"
    if protocols and protocol not in protocols:
        return f"left out by the protocol asked for ({request.protocol})"
    where = placement(group)
    if not protocols and where.islands > 1 and protocol not in transport(where.net).protocols:
        return f"left out by the vendor of {transport(where.net).title}"
    return ""


def _slower(tuner: float, best: float, library: str) -> str:
    if tuner <= best:
        return f"no slower than what is chosen by {library}'s estimate ({format_time(tuner)}), and later in its table"
    return f"slower by {library}'s estimate, {format_time(tuner)} against {format_time(best)}"


def _ours(request: Request, group: Group) -> float | None:
    """Microseconds as predicted; None for a pair that cannot be pinned."""
    try:
        return plan(request, group).time(group.topology.link_bandwidth) * 1e6
    except ProgramError:
        return None
