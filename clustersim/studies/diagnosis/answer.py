"""All files that a job left -> one ranked answer: who is to blame, how sure that is, and what to look at next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.texts import Plain, data_table
from clustersim.core.timeline import WITHOUT_GPU, Timeline
from clustersim.files import traces
from clustersim.files.traces import Samples, files
from clustersim.files.traces.joining import AMD
from clustersim.files.traces.told import Cabling, Cause, HangReport, KernelSums, LinkCounters, NcclLog, TrainingLog
from clustersim.scenario.file.incident_table import KINDS
from clustersim.studies.diagnosis import benchmark_findings, hang_findings, log_findings, profile_findings
from clustersim.studies.diagnosis.suspects import (
    HANGING,
    LINKS_SLOW,
    NAMES_OF_MORE_WORK,
    NOTHING,
    RANK_SLOW,
    SLOWING,
    STARTING,
    Finding,
    Site,
    Suspect,
    ranked,
    suspect_words,
)

CONFIDENT = 0.8
"""Share of all likelihood from which an answer is called confident."""
LISTED = 5
"""Suspects in an answer."""
Read: TypeAlias = Timeline | Samples | NcclLog | HangReport | TrainingLog | LinkCounters | Cabling | KernelSums
ReadFile: TypeAlias = tuple[str, Read]
"""A format's name, and what its reader says of files of it."""
ALONE = ("step_timers", "nccl_tests", "nccl_tests_json")
"""Formats whose files are read one by one."""

NEXT = {kind: row.look_at for kind, row in KINDS.items()} | {
    NOTHING: "nothing here; a fault may be in what no file was given of"
}
"""What to look at next."""
NEXT_ON_CPU = {kind: row.look_at_on_cpu for kind, row in KINDS.items() if row.look_at_on_cpu}
"""The same where no GPU is."""
NEXT_ON_AMD = {kind: row.look_at_on_amd for kind, row in KINDS.items() if row.look_at_on_amd}
"""The same of AMD's GPUs."""
NEXT_OF_MORE_WORK = "how many samples and tokens it has beside others: the sampler, lengths, padding; share them evenly"
"""The same of a rank that has more to do."""
OF_GPUS = frozenset({"hot_gpu", "ecc_stall", "gdr_off", "stuck_kernel"})
"""Causes that only a job on GPUs can have; a slow rank is there for either."""

SOURCES: Mapping[str, str] = data_table("diagnosis")
"""Every kind of evidence, in words."""
TELLS: Mapping[str, frozenset[str]] = {
    "dumps": HANGING,
    "watchdog": HANGING - {"other_type"},
    "launcher": frozenset({"dead_rank"}),
    "profiles": SLOWING,
    "inspector": SLOWING,
    "steps": SLOWING,
    "nccl": frozenset({"dead_link", "lost_nic", "far_nic", "gdr_off"}),
    "counters": frozenset({"dead_link", *LINKS_SLOW}),
    "gpus": RANK_SLOW,
    "cabling": frozenset({"wrong_rail", "other_rack"}),
    "tests": STARTING | LINKS_SLOW,
}
"""Kinds of evidence -> causes that it tells from others."""
OF_NCCL = frozenset({"inspector", "nccl", "tests"})
"""Kinds of evidence that only a job over NCCL or RCCL has."""


class RankedSuspect(msgspec.Struct, frozen=True):
    """A suspect, its share of all likelihood, and what to look at next.

    on_cpu : whether the job's ranks have no GPU. beside : whether something slows the whole job besides. more_work :
    whether the rank is given more to do than others.
    """

    kind: str
    place: str
    rank: int | None
    host: str | None
    port: str | None
    confidence: float
    look_at: str
    on_cpu: bool = False
    beside: bool = False
    more_work: bool = False

    @property
    def words(self) -> str:
        """The cause and the place."""
        return suspect_words(self.kind, self.place, on_cpu=self.on_cpu, beside=self.beside, more_work=self.more_work)


class Diagnosis(msgspec.Struct, frozen=True):
    """One ranked answer.

    suspects : the likeliest first. findings : what each file said, in words. sources : kinds of evidence that were
    given. decides : what would tell the first two apart. ranks : of the job; 0 where no file says. whole_job : what
    NCCL's log or profiles show to slow all of it, such as TCP sockets: certain, at no place, and so no suspect.
    """

    suspects: list[RankedSuspect]
    findings: list[str]
    sources: list[str]
    decides: str
    ranks: int
    whole_job: list[Cause] = []

    @property
    def confident(self) -> bool:
        """Whether the first suspect is far before all others."""
        return self.suspects[0].confidence >= CONFIDENT

    def to_dict(self) -> Plain:
        """Plain values, with the verdict first."""
        return {"verdict": self.verdict, "confident": self.confident, **msgspec.to_builtins(self)}

    @property
    def whole_first(self) -> bool:
        """Whether what slows the whole job is the answer: it is certain, and no place is, or costs less; nor does the
        job hang."""
        first = self.suspects[0]
        costs_most = any(cause.costs_most for cause in self.whole_job)
        of_place = self.confident and first.kind != NOTHING and not costs_most
        return bool(self.whole_job) and not (of_place or first.kind in HANGING)

    @property
    def verdict(self) -> str:
        """The answer in one sentence."""
        first = self.suspects[0]
        share = f"{first.confidence:.0%}"
        of_place = f"{first.words} ({share} sure)" if self.confident else f"not sure: {first.words} ({share})"
        if not self.whole_job:
            return of_place
        whole = f"the whole job is slower than it need be: {'; '.join(cause.text for cause in self.whole_job)}"
        return "; beside that, ".join((whole, of_place) if self.whole_first else (of_place, whole))

    def lines(self) -> Iterator[str]:
        """In words, the answer first."""
        yield f"diagnosis: {self.verdict}"
        if self.whole_first:  # as `trace` tells it: what is known of the reason, which may be nothing
            yield f"why: {'; '.join(cause.why for cause in self.whole_job)}"
        else:
            yield f"look at: {self.suspects[0].look_at}"
        for suspect in self.suspects[1:]:
            yield f"else {suspect.confidence:6.1%}  {suspect.words}"
        if self.decides:
            yield f"to decide: {self.decides}"
        yield from (f"- {text}" for text in self.findings)


def diagnose(paths: Iterable[str | Path]) -> Diagnosis:
    """Who is to blame, by all files given: dumps, profiles and logs of one job, in any mixture, and folders of them.

    Raises :class:`TraceError` for a file that is none of them.
    """
    return judged(read_files(files.files_of(list(paths)), {}))


def judged(read: Sequence[ReadFile]) -> Diagnosis:
    """Who is to blame, by what files say. Raises :class:`TraceError` where none of them says anything of a fault."""
    site = _site(read)
    on_cpu = _without_gpus(read)
    suspects = [suspect for suspect in site.suspects() if not (on_cpu and suspect.kind in OF_GPUS)]
    findings = [finding for kind, answer in read for finding in _findings(kind, answer, suspects, site)]
    tables = [answer for _, answer in read if isinstance(answer, Samples)]
    findings += benchmark_findings.of_tests(tables, suspects)
    if not findings:
        sources = "; ".join(SOURCES.values())
        raise TraceError(f"none of these files says anything of a fault; what does: {sources}")
    logs = [answer for _, answer in read if isinstance(answer, NcclLog)]
    whole_job = list(dict.fromkeys(cause for log in logs for cause in log_findings.of_whole_job(log)))
    whole_job += [cause for _, run in read if isinstance(run, Timeline) for cause in profile_findings.of_whole_job(run)]
    given = [name for name in SOURCES if any(finding.source == name for finding in findings)]
    job = _job(read, on_cpu, beside=bool(whole_job))
    told = [_told(suspect, share, job) for suspect, share in ranked(suspects, findings)[:LISTED]]
    return Diagnosis(
        suspects=told,
        findings=[finding.text for finding in findings],
        sources=given,
        decides=_decides(told[0], told[1], [*given, *_not_to_be_had(read)]),
        ranks=site.ranks,
        whole_job=whole_job,
    )


@dataclass(frozen=True)
class _Job:
    """What of a job says how its suspects are told: on which processors it ran (``on_cpu``, ``on_amd``), whether
    something slows all of it (``beside``), and which ranks have more to do than others (``more_work``)."""

    on_cpu: bool
    on_amd: bool
    beside: bool
    more_work: frozenset[int]


def _job(read: Sequence[ReadFile], on_cpu: bool, *, beside: bool) -> _Job:
    profiles = [answer for _, answer in read if isinstance(answer, Timeline)]
    on_amd = any(name.startswith(AMD) for profile in profiles for name in profile.stats)
    more = (rank for profile in profiles for rank in profile_findings.more_work(profile))
    return _Job(on_cpu, on_amd, beside, frozenset(more))


def _told(suspect: Suspect, share: float, job: _Job) -> RankedSuspect:
    places = (suspect.place, suspect.rank, suspect.host, suspect.port)
    more_work = suspect.kind in NAMES_OF_MORE_WORK and suspect.rank in job.more_work
    following = NEXT | (NEXT_ON_CPU if job.on_cpu else {}) | (NEXT_ON_AMD if job.on_amd else {})
    look_at = NEXT_OF_MORE_WORK if more_work else following[suspect.kind]
    return RankedSuspect(suspect.kind, *places, round(share, 4), look_at, job.on_cpu, job.beside, more_work)


def _without_gpus(read: Sequence[ReadFile]) -> bool:
    """Whether the profiles are of ranks without a GPU, and no other file has one."""
    counted = [bool(answer.gpus) for _, answer in read if isinstance(answer, LinkCounters)]
    profiles = [answer.stats for _, answer in read if isinstance(answer, Timeline)]
    alone = [stats.get(WITHOUT_GPU, 0.0) >= stats.get("ranks_measured", 1.0) for stats in profiles]
    return bool(alone) and all(alone) and not any(counted)


def read_files(
    paths: Sequence[Path],
    formats: Mapping[Path, str],
    known: dict[tuple[Path, ...], Read] | None = None,
) -> list[ReadFile]:
    """What files say, those of one format together, as their readers join them; of :data:`ALONE` one by one.

    known : what sets of files say that were read before; gets what is read now.
    """
    by_format: defaultdict[str, list[Path]] = defaultdict(list)
    for path in paths:
        by_format[formats.get(path) or traces.sniff(path).name].append(path)
    answers = {} if known is None else known
    read: list[ReadFile] = []
    for name, same in by_format.items():
        for group in [(path,) for path in same] if name in ALONE else [tuple(same)]:
            if group not in answers:
                answers[group] = traces.read(group, format=name)
            read.append((name, answers[group]))
    return read


def _site(read: Sequence[ReadFile]) -> Site:
    """How many ranks there are and where, from all that files say."""
    ranks = 0
    hosts: dict[int, str] = {}
    ports: dict[str, None] = {}
    machines: dict[str, None] = {}
    for _, answer in read:
        if isinstance(answer, NcclLog):
            ranks = max(ranks, answer.ranks)
            hosts |= answer.hosts
            ports |= dict.fromkeys(cause.place for cause in answer.causes if "/" in cause.place)
            ports |= {f"{host}/{device}": None for host, devices in answer.nics.items() for device in devices}
        elif isinstance(answer, HangReport):
            named = [rank for f in answer.faults for rank in (*f.missing, *f.waiting, *f.no_dump, *f.look_at)]
            exits = {ended.rank: ended.host for ended in answer.exits}
            ranks = max([ranks, *(1 + rank for rank in (*named, *answer.ranks, *answer.told_to_dump, *exits))])
            hosts = exits | hosts
        elif isinstance(answer, Timeline):
            ranks = max(ranks, answer.world_size)
        elif isinstance(answer, LinkCounters):
            ports |= dict.fromkeys(port.name for port in answer.ports)
            machines |= dict.fromkeys(gpu.host for gpu in answer.gpus)
        elif isinstance(answer, Cabling):
            ports |= dict.fromkeys(answer.switches)
    ports = _every_port(ports)
    if not hosts:
        hosts = _machines(read)
    machines |= dict.fromkeys(port.partition("/")[0] for port in ports)
    return Site(ranks, dict(sorted(hosts.items())), tuple(ports), tuple(machines))


def _every_port(ports: Mapping[str, None]) -> dict[str, None]:
    """With the ports that a machine lacks and others have: one may be lost."""
    hosts = dict.fromkeys(port.partition("/")[0] for port in ports)
    devices = dict.fromkeys(port.partition("/")[2] for port in ports)
    return {f"{host}/{device}": None for host in hosts for device in devices} if ports else {}


def _machines(read: Sequence[tuple[str, Read]]) -> dict[int, str]:
    """Machines by number, of the ranks that profiles are of, where no file names them."""
    for _, answer in read:
        if isinstance(answer, Timeline) and answer.rank_node is not None:
            measured = sorted({int(rank) for rank in answer.spans()["rank"]})
            return {rank: f"node{int(answer.rank_node[rank])}" for rank in measured}
    return {}


def _findings(kind: str, answer: Read, suspects: Sequence[Suspect], site: Site) -> Iterator[Finding]:
    """What files of a kind say; tables of benchmarks say something together."""
    if isinstance(answer, HangReport):
        of_hang = hang_findings.of_dumps if kind == "flight_recorder" else hang_findings.of_watchdog
        yield from of_hang(answer, suspects, site)
    elif isinstance(answer, Timeline):
        yield from profile_findings.of_profiles(answer, suspects, site)
    elif isinstance(answer, TrainingLog):
        yield from log_findings.of_steps(answer, suspects)
    elif isinstance(answer, NcclLog):
        yield from log_findings.of_nccl(answer, suspects)
    elif isinstance(answer, LinkCounters):
        yield from log_findings.of_counters(answer, suspects)
        yield from log_findings.of_gpus(answer, suspects, site)
    elif isinstance(answer, Cabling):
        yield from log_findings.of_cabling(answer, suspects)
    elif kind == "json_lines" and not isinstance(answer, KernelSums):
        yield from benchmark_findings.of_inspector(answer, suspects, site)


def _not_to_be_had(read: Sequence[ReadFile]) -> frozenset[str]:
    """Kinds of evidence that the job cannot give: NCCL's own of one whose profiles name another library, as Gloo."""
    named = {traces.backend_of(answer) for _, answer in read if isinstance(answer, Timeline)} - {None}
    absent = frozenset() if not named or "nccl" in named else OF_NCCL
    return absent | {"gpus"} if _without_gpus(read) else absent


def _decides(first: RankedSuspect, second: RankedSuspect, given: Sequence[str]) -> str:
    """What evidence would tell two suspects apart; nothing where the first is far before the second.

    given : kinds of evidence that are there, or cannot be.
    """
    if first.confidence >= CONFIDENT:
        return ""
    pair = f"{first.words} or {second.words}"
    absent = sorted((name for name in SOURCES if name not in given), key=lambda name: len(TELLS[name]))
    telling = [SOURCES[name] for name in absent if (first.kind in TELLS[name]) != (second.kind in TELLS[name])]
    both = [SOURCES[name] for name in absent if {first.kind, second.kind} <= TELLS[name]]
    if telling or both:
        return f"{pair}: {'; '.join((telling + both)[:2])}"
    if first.kind == second.kind:
        return f"{pair}: dumps, profiles or py-spy of {first.place} and {second.place}"
    return f"{pair}: {first.look_at}"
