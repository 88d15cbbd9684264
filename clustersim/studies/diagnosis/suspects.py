"""The nouns of a diagnosis: a suspect, what a file says of suspects, and what they come to together.

A finding says how likely what was seen would be, were each suspect to blame. Suspects begin alike, kind by kind, and
what several findings say is multiplied (Bayes' rule with findings taken as independent): the share of a suspect in the
sum of all is the confidence in it, but for one part in a hundred that is left for what is no kind of suspect. The
likelihoods are judgements in a few words, not fitted numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from clustersim.scenario.file.incident_table import KINDS

NOTHING = "nothing"
"""The suspect that nothing is wrong."""
SURE = 1.0
PARTLY = 0.3
SELDOM = 0.1
UNLIKELY = 0.02
ALMOST_NEVER = 0.001
"""How likely it is that a file says what it says."""
ANOTHER = 0.01
"""Share that is left for causes that are none of the kinds."""
LEAST = 1e-12
"""No finding rules a suspect out: a file may be of another job."""


HANGING = frozenset(name for name, kind in KINDS.items() if kind.does == "hangs")
SLOWING = frozenset(name for name, kind in KINDS.items() if kind.does == "slows")
STARTING = frozenset(name for name, kind in KINDS.items() if kind.does == "start")
"""Kinds that hang a run, slow it from a moment on, or are there from its start."""
RANK_SLOW = frozenset({"slow_gpu", "hot_gpu", "ecc_stall"})
"""Kinds whose kernels take longer on one rank."""
NAMES_ON_CPU = {"slow_gpu": "slow_cpu"}
"""Kinds that have another name where no GPU is."""
NAMES_OF_MORE_WORK = {"slow_gpu": "more_work"}
"""Kinds that have another name where the rank is given more to do, which no GPU or CPU is to blame for."""
LATE = frozenset({"slow_data", "garbage_collection"})
"""Kinds in which a rank's GPU stands still before a step."""
LINKS_SLOW = frozenset({"slow_link", "flapping_link", "congestion"})
"""Kinds in which transfers take longer from a moment on."""


class Suspect(msgspec.Struct, frozen=True):
    """A cause at a place: one of the kinds of ``[[incident]]``, and the ``rank``, ``host`` (a machine's name) or
    ``port`` (``"node0/mlx5_0"``) where it strikes; None where that is not known."""

    kind: str
    rank: int | None = None
    host: str | None = None
    port: str | None = None

    @property
    def place(self) -> str:
        """In words."""
        if self.rank is not None:
            return f"rank {self.rank}"
        if self.host is not None:
            return f"machine {self.host}"
        if self.port is not None:
            return f"port {self.port}"
        if self.kind in KINDS and KINDS[self.kind].widely:
            return "the whole job" if not KINDS[self.kind].where else "links between switches"
        return "a place that no file names"

    def __str__(self) -> str:
        return suspect_words(self.kind, self.place)


def suspect_words(kind: str, place: str, *, on_cpu: bool = False, beside: bool = False, more_work: bool = False) -> str:
    """A suspect in words; where no GPU is, what makes a rank slow is its CPU. beside : whether something slows the
    whole job besides, so that nothing *else* may be wrong. more_work : whether the rank has more to do than others."""
    if kind == NOTHING:
        return "nothing else is wrong" if beside else "nothing is wrong"
    names = NAMES_OF_MORE_WORK if more_work else NAMES_ON_CPU if on_cpu else {}
    name = names.get(kind, kind)
    return f"{name} of {place}"


@dataclass(frozen=True)
class Site:
    """What all files together say of the job: how many ranks (0: none says), rank -> machine, ports of NICs, and
    machines whose ranks no file tells."""

    ranks: int = 0
    hosts: Mapping[int, str] = field(default_factory=dict)
    ports: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()

    def of_host(self, host: str | None) -> frozenset[int]:
        """The ranks of a machine."""
        return frozenset(rank for rank, name in self.hosts.items() if name == host)

    def suspects(self) -> list[Suspect]:
        """Every cause at every place."""
        hosts = list(dict.fromkeys((*self.hosts.values(), *self.machines)))
        everyone = [Suspect(NOTHING)]
        for name, kind in KINDS.items():
            if kind.widely:
                everyone.append(Suspect(name))
            elif kind.where == "rank":
                everyone += [Suspect(name, rank=rank) for rank in range(self.ranks)] or [Suspect(name)]
            elif kind.where == "node":
                everyone += [Suspect(name, host=host) for host in hosts] or [Suspect(name)]
            else:
                everyone += [Suspect(name, port=port) for port in self.ports] or [Suspect(name)]
        return everyone


class Finding(msgspec.Struct, frozen=True):
    """What files say: in words, whose ``source`` it is (a name of :data:`clustersim.studies.diagnosis.answer.SOURCES`),
    and how likely it is for each suspect."""

    source: str
    text: str
    likelihood: Mapping[Suspect, float]


def finding(source: str, text: str, suspects: Iterable[Suspect], likely: Callable[[Suspect], float]) -> Finding:
    """A finding by a rule."""
    return Finding(source, text, {suspect: max(LEAST, likely(suspect)) for suspect in suspects})


def by_kind(kinds: Mapping[str, float], rest: float) -> Callable[[Suspect], float]:
    """A rule that looks at the cause alone."""
    return lambda suspect: kinds.get(suspect.kind, rest)


def hangs(suspect: Suspect) -> bool:
    """Whether its kind stops a run."""
    return suspect.kind in HANGING


def ranked(suspects: Sequence[Suspect], findings: Sequence[Finding]) -> list[tuple[Suspect, float]]:
    """Suspects with their share of the whole, the likeliest first; ties in the order of suspects."""
    of_kind: dict[str, int] = {}
    for suspect in suspects:
        of_kind[suspect.kind] = of_kind.get(suspect.kind, 0) + 1
    weights = []
    for suspect in suspects:
        weight = 1.0 / of_kind[suspect.kind]
        for finding in findings:
            weight *= finding.likelihood[suspect]
        weights.append(weight)
    total = sum(weights) / (1.0 - ANOTHER)
    shares = [weight / total for weight in weights]
    order = sorted(range(len(suspects)), key=lambda i: -shares[i])
    return [(suspects[i], shares[i]) for i in order]
