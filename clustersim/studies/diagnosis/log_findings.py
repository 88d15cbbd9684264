"""What logs of steps, NCCL's own log, counters of NICs and GPUs and the list of cables say of a fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median

from clustersim.core.errors import few
from clustersim.core.units import format_time
from clustersim.files.traces.link_counters import ACTIVE, hot_gpus, slow_gpus, slow_ports
from clustersim.files.traces.told import Cabling, Cause, GpuCounters, LinkCounters, LoggedPart, NcclLog, TrainingLog
from clustersim.studies.diagnosis import courses
from clustersim.studies.diagnosis.courses import course_of
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    HANGING,
    LINKS_SLOW,
    NOTHING,
    PARTLY,
    RANK_SLOW,
    SELDOM,
    SLOWING,
    STARTING,
    SURE,
    UNLIKELY,
    Finding,
    Site,
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
SAVES = 0.01
"""Share of a run that goes to checkpoints before it is told."""
COMPUTE = (*RANK_SLOW, "slow_host")
FROM_THE_START = ("slow_link",)
"""Kinds that may have begun before the first step, and make all of them alike."""
RARELY = 0.05
"""How likely a port that flaps has gone down no more than once."""
SHOWN = 6


def of_steps(log: TrainingLog, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What a framework's log says: whether and when steps got longer, and which part of them."""
    times = [seconds for _, seconds in log.times[1:]] or [seconds for _, seconds in log.times]
    if len(times) < 2:
        return
    parts = {part.name: part for part in log.parts}
    saves = parts.get("save-checkpoint")
    saved = 0.0 if saves is None else sum(most for _, most in saves.course)
    if saves is not None and saved > SAVES * sum(times):
        text = f"steps: {saves.count} checkpoint(s) were saved, which took {format_time(saved)} together"
        yield finding("steps", text, suspects, by_kind({"blocking_checkpoint": SURE}, UNLIKELY))
        return
    usual = median(sorted(times)[: max(1, len(times) // 3)])
    worst = max(times)
    if worst < usual * (1 + SLOWER):
        text = f"steps: none is much longer than {format_time(usual)}"
        quiet = {NOTHING, *STARTING, *HANGING}
        rest = (
            dict.fromkeys(SLOWING, SELDOM) | dict.fromkeys(FROM_THE_START, PARTLY) | {"blocking_checkpoint": UNLIKELY}
        )
        yield finding("steps", text, suspects, lambda s: SURE if s.kind in quiet else rest[s.kind])
        return
    course = course_of([seconds / usual - 1 for seconds in times], max(SLOWER, 0.25 * (worst / usual - 1)))
    text, weights = _longer_part(parts, worst - usual)
    change = f"steps: one took {format_time(worst)}, {worst / usual - 1:.0%} longer than the quickest ones, {course}"

    def likely(suspect: Suspect) -> float:
        """P(this course of steps | suspect)."""
        if suspect.kind not in SLOWING:
            return SELDOM if suspect.kind == NOTHING else UNLIKELY
        return max(ALMOST_NEVER, weights.get(suspect.kind, UNLIKELY) * courses.likely(course, suspect.kind))

    yield finding("steps", f"{change}{text}", suspects, likely)


def _longer_part(parts: Mapping[str, LoggedPart], longer: float) -> tuple[str, Mapping[str, float]]:
    """Which part of a step is longer, in words, and how likely that is of each kind.

    longer : by how much a step is, at most [s].
    """
    batches = parts.get("batch-generator")
    forward = parts.get("forward-compute")
    late = 0.0 if batches is None else max((most - least for least, most in batches.course), default=0.0)
    everything = dict.fromkeys(SLOWING, SURE) | {"blocking_checkpoint": PARTLY}
    if forward is None:
        return "", everything
    if batches is not None and late > max(LATE_BATCH, 0.1 * longer):
        return f"; a batch comes {format_time(late)} later on one rank than on another", {"slow_data": SURE}
    if (wider := _wider(forward)) > WIDER:
        weights = dict.fromkeys(COMPUTE, SURE)
        return f"; the slowest forward is {wider:.0%} farther behind the fastest than before", weights
    weights = dict.fromkeys(LINKS_SLOW, SURE) | {"garbage_collection": SURE, "ecc_stall": PARTLY}
    return "; neither batches nor forward passes are", weights | dict.fromkeys(
        ("slow_gpu", "hot_gpu", "slow_host"), SELDOM
    )


def _wider(part: LoggedPart) -> float:
    """How much farther the slowest rank falls behind than it does at best."""
    ratios = sorted(most / least for least, most in part.course if least > 0)
    return ratios[-1] / ratios[0] - 1 if len(ratios) > 1 else 0.0


def of_nccl(log: NcclLog, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What NCCL warns of: a port that went down, a peer that does not answer, a NIC that is not there or is far, a
    machine without GPUDirect; or nothing."""
    down = [cause.place for cause in log.causes if cause.kind == "port_down"]
    lost = any(cause.kind == "peer_lost" for cause in log.causes)
    odd = {("gdr_off", cause.place) for cause in log.causes if cause.kind == "gdr_off" and cause.place}
    odd |= {("far_nic", cause.place) for cause in log.causes if cause.kind == "far_nic" and cause.place}
    log_ports = [f"{host}/{device}" for host, devices in log.nics.items() for device in devices]
    odd |= {("lost_nic", port) for port in _absent(log_ports)}
    if down:
        text = f"NCCL: port {few(down, SHOWN)} went down"

        def likely(suspect: Suspect) -> float:
            """P(these ports went down | suspect)."""
            if suspect.kind == "dead_link" and suspect.port in (*down, None):
                return SURE / len(down)
            return UNLIKELY / len(down) if suspect.kind == "flapping_link" and suspect.port in down else ALMOST_NEVER

        yield finding("nccl", text, suspects, likely)
    elif odd:
        links_told = ", ".join(f"{kind} of {place}" for kind, place in sorted(odd))

        def told(suspect: Suspect) -> float:
            """P(these warnings | suspect)."""
            place = suspect.host if suspect.kind == "gdr_off" else suspect.port
            return SURE if (suspect.kind, place) in odd else UNLIKELY / 10

        yield finding("nccl", f"NCCL: {links_told}", suspects, told)
    elif lost:
        weights = {"dead_link": SURE, "dead_rank": SELDOM, "flapping_link": UNLIKELY}
        yield finding("nccl", "NCCL: NICs gave up sending", suspects, by_kind(weights, ALMOST_NEVER))
    elif of_whole_job(log):
        causes_told = "; ".join(f"{cause.text} ({cause.why})" for cause in log.causes)
        # What slows the whole job is at no place; where it is the network's, no NIC can be told from another.
        of_network = {"sockets", "gdr_off"} & {cause.kind for cause in log.causes}
        kinds = ("dead_link",) if of_network else ("dead_link", "lost_nic", "far_nic", "gdr_off")
        likely_kinds = by_kind(dict.fromkeys(kinds, UNLIKELY), SURE)
        yield finding("nccl", f"NCCL, of the whole job and no one place: {causes_told}", suspects, likely_kinds)
    else:
        text = "NCCL: every NIC is there and reaches GPU memory, no port went down and no peer was lost"
        absent = dict.fromkeys(("dead_link", "lost_nic", "far_nic", "gdr_off"), UNLIKELY)
        yield finding("nccl", text, suspects, by_kind(absent, SURE))


def of_whole_job(log: NcclLog) -> list[Cause]:
    """What slows all of the job, at no place: TCP sockets, no GPUDirect, NVLS that is off, ..."""
    return [cause for cause in log.causes if not cause.place and cause.kind != "peer_lost"]


def of_counters(log: LinkCounters, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What counters of NICs say: who is down, slow, went down and came back, or waited for the network."""
    if not log.ports:
        return
    down = {port.name for port in log.ports if port.state != ACTIVE}
    slow = {port.name for port in slow_ports(log.ports)}
    downs = {port.name: port.downs for port in log.ports if port.downs and port.name not in down}
    most = max(downs.values(), default=0)
    waited = {port.name for port in log.ports if port.waited > 0}
    congested = bool(waited) and not slow
    absent = _absent(port.name for port in log.ports)
    ports_told = [
        *([f"{few(sorted(down), SHOWN)} is down"] if down else []),
        *([f"{few(sorted(slow), SHOWN)} has trained lower than the others"] if slow else []),
        *([f"links of {few(sorted(downs), SHOWN)} went down up to {most} time(s)"] if downs else []),
        *([f"{few(sorted(waited), SHOWN)} had to wait for the network"] if congested else []),
        *([f"{few(absent, SHOWN)} is not there"] if absent else []),
    ]
    text = f"counters: {'; '.join(ports_told) or 'all ports are up, at one rate, and none went down'}"

    # Beside another cause an odd port is a coincidence, and that it is this one of all of them, too.
    by_chance = UNLIKELY if down or slow or congested or absent else SELDOM if most > 1 else PARTLY if most else 0.0
    beside = by_chance / (1 if congested else len(log.ports)) if by_chance else SURE

    def likely(suspect: Suspect) -> float:
        """P(these counters of NICs | suspect)."""
        if suspect.kind == NOTHING and (down or slow or absent):
            return ALMOST_NEVER / len(log.ports)
        if suspect.kind == "dead_link":
            return SURE if suspect.port in down else ALMOST_NEVER
        if suspect.kind == "slow_link":
            return SURE if suspect.port in slow else UNLIKELY * beside
        if suspect.kind == "flapping_link":
            often = SURE if most > 1 else RARELY  # once is what many a port has been through
            return often * downs[suspect.port] / most if suspect.port in downs else UNLIKELY * beside
        if suspect.kind == "lost_nic":
            return SURE if suspect.port in absent else UNLIKELY * beside
        if suspect.kind == "congestion":
            return SURE if congested else SELDOM * beside
        return beside

    yield finding("counters", text, suspects, likely)


def _absent(names: Iterable[str]) -> list[str]:
    """Ports that most machines have, and one has not."""
    present = set(names)
    hosts = {name.partition("/")[0] for name in present}
    count = Counter(name.partition("/")[2] for name in present)
    usual = [device for device, times in count.items() if 2 * times >= len(hosts)]
    return sorted({f"{host}/{device}" for host in hosts for device in usual} - present)


def of_gpus(log: LinkCounters, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What counters of GPUs say: whose clock is low, who is hot, who has mended its memory."""
    if not log.gpus:
        return
    slow = _ranks(slow_gpus(log.gpus), site)
    hot = _ranks(hot_gpus(log.gpus), site)
    mended = _ranks([gpu for gpu in log.gpus if gpu.xid and gpu.remapped], site)
    gpus_told = [
        *([f"rank(s) {few(sorted(slow), SHOWN)} run at a lower clock"] if slow else []),
        *([f"rank(s) {few(sorted(hot), SHOWN)} are hot"] if hot else []),
        *([f"rank(s) {few(sorted(mended), SHOWN)} have mended their memory"] if mended else []),
    ]
    text = f"GPUs: {'; '.join(gpus_told) or 'all run alike'}"
    beside = UNLIKELY / len(log.gpus) if slow or mended else SURE

    def likely(suspect: Suspect) -> float:
        """P(these counters of GPUs | suspect)."""
        if suspect.kind == "slow_gpu":
            if suspect.rank in slow:
                return UNLIKELY if suspect.rank in hot else SURE
            return min(PARTLY, beside)
        if suspect.kind == "hot_gpu":
            return (SURE if suspect.rank in hot else UNLIKELY) if suspect.rank in slow else ALMOST_NEVER
        if suspect.kind == "ecc_stall":
            return SURE if suspect.rank in mended else ALMOST_NEVER
        return beside

    yield finding("gpus", text, suspects, likely)


def _ranks(gpus: Sequence[GpuCounters], site: Site) -> set[int]:
    """The ranks that drive these GPUs: of each machine in order."""
    ranks: set[int] = set()
    for gpu in gpus:
        own = sorted(site.of_host(gpu.host))
        ranks |= {own[gpu.gpu]} if gpu.gpu < len(own) else set()
    return ranks


def of_cabling(cabling: Cabling, suspects: Sequence[Suspect]) -> Iterator[Finding]:
    """What the list of cables says: a machine on switches of its own, or two NICs in each other's."""
    odd = set(cabling.odd)
    hosts = {nic.partition("/")[0] for nic in cabling.switches}
    machines = {host for host in hosts if odd >= {nic for nic in cabling.switches if nic.partition("/")[0] == host}}
    several = len({cabling.switches[nic] for nic in cabling.switches}) > 1
    text = f"cabling: {cabling.lines[0]}" if odd else "cabling: every NIC is on the switch of its number"
    swapped = sorted(odd) if not machines else []
    absent = _absent(cabling.switches)
    if absent:
        text += f"; {few(absent, SHOWN)} is on none"

    def likely(suspect: Suspect) -> float:
        """P(these cables | suspect)."""
        if suspect.kind == "other_rack":
            return SURE / len(machines) if suspect.host in machines and several else ALMOST_NEVER
        if suspect.kind == "wrong_rail":
            return SURE / (1 + swapped.index(suspect.port)) ** 3 if suspect.port in swapped else ALMOST_NEVER
        if suspect.kind == "lost_nic":
            return SURE if suspect.port in absent else UNLIKELY
        return UNLIKELY / len(hosts) if odd or absent else SURE

    yield finding("cabling", text, suspects, likely)
