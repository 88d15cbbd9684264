"""Transfers of one kind and size among several groups of ranks: whose take longer in every step, step for step alike.

A link that is slow from the start makes no step longer than another, and a transfer that all ranks take part in slow
for all of them. Where groups do the same beside each other (the replicas of each tensor-parallel rank, the
tensor-parallel ranks of each machine), those that meet over the slow link take longer than the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from clustersim.core.errors import few
from clustersim.core.timeline import Timeline
from clustersim.studies.diagnosis.suspects import (
    ALMOST_NEVER,
    NOTHING,
    SELDOM,
    SURE,
    UNLIKELY,
    Finding,
    Site,
    Suspect,
    finding,
)

LEAST_LONGER = 0.15
"""Share by which a group's transfers take longer than the same ones of other groups before it is told."""
MOST_STRUCK = 0.5
"""Of the groups that do the same, at most this share is slow: else the others would be quick."""
SHOWN = 6
OVER_A_NIC = frozenset({"slow_link", "lost_nic", "far_nic", "wrong_rail"})
"""Kinds in which the transfers over one NIC take longer than over others."""

Members: TypeAlias = tuple[int, ...]
Like: TypeAlias = tuple[object, ...]
"""What transfers have in common that are compared: kind, bytes, ranks, and machines that these are on."""


@dataclass(frozen=True)
class SlowGroups:
    """Groups whose transfers take longer, the slowest first. longer : share, of the slowest. quick : ranks of groups
    that do the same as fast as most. inside : each slow group is on one machine."""

    groups: tuple[Members, ...]
    longer: float
    quick: frozenset[int]
    inside: bool

    @property
    def ranks(self) -> frozenset[int]:
        """Of all slow groups."""
        return frozenset(rank for members in self.groups for rank in members)


def slow_groups(run: Timeline, site: Site) -> SlowGroups | None:
    """Groups whose transfers take longer than the same ones of others in the median over all steps, or None."""
    worst: SlowGroups | None = None
    for like, seconds in _by_group(run, site).items():
        medians = {members: float(np.median(took)) for members, took in seconds.items()}
        if len(medians) < 2:
            continue
        usual = float(np.median(sorted(medians.values())[: max(1, (len(medians) + 1) // 2)]))
        struck = [members for members, took in medians.items() if took > (1 + LEAST_LONGER) * usual]
        always = [members for members in struck if min(seconds[members]) > usual]
        if not always or len(struck) > MOST_STRUCK * len(medians):
            continue
        order = tuple(sorted(always, key=lambda members: -medians[members]))
        longer = medians[order[0]] / usual - 1
        if worst is None or longer > worst.longer:
            quick = frozenset(rank for members in medians.keys() - set(struck) for rank in members)
            worst = SlowGroups(order, longer, quick, like[-1] == 1)
    return worst


def _by_group(run: Timeline, site: Site) -> dict[Like, dict[Members, list[float]]]:
    """Seconds of every transfer that all its ranks were seen in, of groups that may be compared."""
    spans = run.spans()
    seen: defaultdict[int, set[int]] = defaultdict(set)
    for op, rank in zip(spans["op"].tolist(), spans["rank"].tolist(), strict=True):
        seen[op].add(rank)
    seconds: defaultdict[Like, defaultdict[Members, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, op in enumerate(run.ops):
        if op.kind in ("compute", "send", "recv") or "transfer_s" not in op.detail:
            continue
        members = tuple(sorted(seen[number]))
        if len(members) < 2:
            continue
        machines = len({site.hosts.get(rank, "") for rank in members})
        seconds[op.kind, op.nbytes, len(members), machines][members].append(float(op.detail["transfer_s"]))
    return {like: dict(of_group) for like, of_group in seconds.items()}


def of_groups(slow: SlowGroups, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What it says that some groups' transfers take longer: a NIC or a cable that others do not go over; or, of groups
    on one machine, what is between its GPUs."""
    words = "; ".join(few(list(members), SHOWN) for members in slow.groups[:2])
    text = f"profiles: transfers among ranks {words} take {slow.longer:.0%} longer than the same among others"
    text += ", in every step"
    ports = _ports(slow, site)
    hosts = {site.hosts.get(rank) for rank in slow.ranks}
    if slow.inside:
        text += ": what is between the GPUs of one machine (NVLink, PCIe) is slow"
    else:
        text += ": a NIC or a cable of theirs; counters of the NICs tell which"

    def likely(suspect: Suspect) -> float:
        """P(these groups take longer | suspect)."""
        if suspect.kind == NOTHING:
            return ALMOST_NEVER
        if suspect.kind == "slow_host":
            return (SURE if slow.inside else SELDOM) if suspect.host in hosts else ALMOST_NEVER
        if suspect.kind in OVER_A_NIC and not slow.inside:
            return SURE if suspect.port is None or suspect.port in ports else UNLIKELY
        return SELDOM if suspect.kind == "flapping_link" and not slow.inside else UNLIKELY

    yield finding("profiles", text, suspects, likely)


def _ports(slow: SlowGroups, site: Site) -> frozenset[str]:
    """NICs of the slow groups' ranks: those of their positions where a machine has one for each GPU, else all."""
    chosen: set[str] = set()
    for host in {site.hosts[rank] for rank in slow.ranks if rank in site.hosts}:
        own = sorted(port for port in site.ports if port.partition("/")[0] == host)
        ranks = sorted(site.of_host(host))
        places = [ranks.index(rank) for rank in ranks if rank in slow.ranks]
        chosen |= {own[place] for place in places} if len(own) == len(ranks) else set(own)
    return frozenset(chosen)
