"""What logs of steps, NCCL's own log and counters of NICs say of a fault."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from clustersim.core.errors import few
from clustersim.core.units import format_time
from clustersim.files.traces.link_counters import ACTIVE, slow_ports
from clustersim.files.traces.told import LinkCounters, LoggedPart, NcclLog, TrainingLog
from clustersim.studies.diagnosis.hang_findings import hangs
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    NOTHING,
    PARTLY,
    SELDOM,
    SURE,
    UNLIKELY,
    Finding,
    Suspect,
    by_kind,
    finding,
)

SLOWER = 0.03
"""Share by which steps are longer than they were, from which something has changed."""
WIDER = 0.06
"""The same of how far the slowest rank's forward pass is behind the fastest's, beyond what it usually is."""
LATE_BATCH = 1e-3
"""Seconds that a batch comes later on one rank than on another before it is told."""
LINKS = ("slow_link", "flapping_link")
COMPUTE = ("slow_gpu", "slow_host")
SHOWN = 6


def of_steps(log: TrainingLog, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What a framework's log says: whether steps got longer, and which part of them."""
    times = [seconds for _, seconds in log.times[1:]] or [seconds for _, seconds in log.times]
    if len(times) < 2:
        return
    usual = median(sorted(times)[: max(1, len(times) // 3)])
    worst = max(times)
    longer = worst / usual - 1
    slow = longer > SLOWER
    change = f"a step took {format_time(worst)}, {longer:.0%} longer than the quickest ones"
    if not slow:
        text = f"steps: none is much longer than {format_time(usual)}"
        yield finding("steps", text, suspects, lambda s: SURE if s.kind == NOTHING or hangs(s) else SELDOM)
        return
    parts = {part.name: part for part in log.parts}
    batches = parts.get("batch-generator")
    forward = parts.get("forward-compute")
    late = 0.0 if batches is None else max((most - least for least, most in batches.course), default=0.0)
    if batches is not None and late > max(LATE_BATCH, 0.1 * (worst - usual)):
        text = f"steps: {change}; a batch comes {format_time(late)} later on one rank than on another"
        yield finding("steps", text, suspects, by_kind({"slow_data": SURE}, UNLIKELY))
    elif forward is not None and (wider := _wider(forward)) > WIDER:
        text = f"steps: {change}; the slowest forward is {wider:.0%} farther behind the fastest than before"
        yield finding("steps", text, suspects, by_kind(dict.fromkeys(COMPUTE, SURE), UNLIKELY))
    elif forward is not None:
        text = f"steps: {change}; neither batches nor forward passes are"
        weights = dict.fromkeys(LINKS, SURE) | dict.fromkeys(COMPUTE, SELDOM) | {NOTHING: SELDOM}
        yield finding("steps", text, suspects, by_kind(weights, UNLIKELY))
    else:
        weights = dict.fromkeys((*LINKS, *COMPUTE, "slow_data"), SURE) | {NOTHING: SELDOM}
        yield finding("steps", f"steps: {change}", suspects, by_kind(weights, SELDOM))


def _wider(part: LoggedPart) -> float:
    """How much farther the slowest rank falls behind than it does at best."""
    ratios = sorted(most / least for least, most in part.course if least > 0)
    return ratios[-1] / ratios[0] - 1 if len(ratios) > 1 else 0.0


def of_nccl(log: NcclLog, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What NCCL warns of: a port that went down, a peer that does not answer; or nothing."""
    down = [cause.place for cause in log.causes if cause.kind == "port_down"]
    lost = any(cause.kind == "peer_lost" for cause in log.causes)
    if down:
        text = f"NCCL: port {few(down, SHOWN)} went down"

        def likely(suspect: Suspect) -> float:
            if suspect.kind == "dead_link" and suspect.port in (*down, None):
                return SURE / len(down)
            return UNLIKELY / len(down) if suspect.kind == "flapping_link" and suspect.port in down else ALMOST_NEVER

        yield finding("nccl", text, suspects, likely)
    elif lost:
        weights = {"dead_link": SURE, "dead_rank": SELDOM, "flapping_link": UNLIKELY}
        yield finding("nccl", "NCCL: NICs gave up sending", suspects, by_kind(weights, ALMOST_NEVER))
    else:
        text = "NCCL: no port went down and no peer was lost"
        yield finding("nccl", text, suspects, by_kind({"dead_link": UNLIKELY}, SURE))


def of_counters(log: LinkCounters, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What counters of NICs say: who is down, slow, or went down and came back."""
    down = {port.name for port in log.ports if port.state != ACTIVE}
    slow = {port.name for port in slow_ports(log.ports)}
    downs = {port.name: port.downs for port in log.ports if port.downs and port.name not in down}
    most = max(downs.values(), default=0)
    words = [
        *([f"{few(sorted(down), SHOWN)} is down"] if down else []),
        *([f"{few(sorted(slow), SHOWN)} has trained lower than the others"] if slow else []),
        *([f"links of {few(sorted(downs), SHOWN)} went down up to {most} time(s)"] if downs else []),
    ]
    text = f"counters: {'; '.join(words) or 'all ports are up, at one rate, and none went down'}"

    # Beside another cause an odd port is a coincidence, and that it is this one of all of them, too.
    by_chance = UNLIKELY if down or slow else SELDOM if most > 1 else PARTLY if most else 0.0
    beside = by_chance / len(log.ports) if by_chance else SURE

    def likely(suspect: Suspect) -> float:
        if suspect.kind == "dead_link":
            return SURE if suspect.port in down else ALMOST_NEVER
        if suspect.kind == "slow_link":
            return SURE if suspect.port in slow else UNLIKELY
        if suspect.kind == "flapping_link":
            return downs[suspect.port] / most if suspect.port in downs else UNLIKELY
        return beside

    yield finding("counters", text, suspects, likely)
