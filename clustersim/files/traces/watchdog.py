"""What PyTorch's watchdog of NCCL writes before it ends a job: which collective of which rank did not end in time.

Lines of ProcessGroupNCCL of 1.8 to 2.13: the work that timed out (``WorkNCCL(SeqNum=4, OpType=ALLREDUCE, ...)``), what
the rank had last enqueued and completed, and from which rank a signal to dump came. Who is behind follows as it does
from Flight Recorder's dumps, though of fewer facts. The block in which torchrun says which process ended first is read
from the same log.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clustersim.core.errors import TraceError
from clustersim.files.traces import prefixes
from clustersim.files.traces.hangs import explained
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.recorded_calls import Call, Dump
from clustersim.files.traces.told import HangReport, ProcessExit

_WORK = re.compile(
    r"(?:PG (?:ID )?(?P<pg>\d+)[^\]]*?(?:\((?P<about>[^)]*)\))? )?Rank (?P<rank>\d{1,9})\][^\n]*?"
    r"(?:Work\w*)\((?:SeqNum=(?P<seq>\d{1,18}), )?OpType=(?P<name>\w+)(?P<rest>(?:[^()]|\(ms\))*)\)?"
)
_WRAPPED = re.compile(r"(Work\w{0,20}\((?:[^()\n]|\(ms\)){0,300})\n((?:[^()\n]|\(ms\)){0,300}\) ran for)")
"""A work that a terminal or an editor has cut in two."""
_BROKEN = re.compile(r"(operation timeout:|Timeout\(ms\)=\d{1,15}\))[ \t]*\n[ \t]*(?=Work\w{0,20}\(|ran for )")
"""Where a line is cut before or behind its work."""
_NUMEL = re.compile(r"Numel(In|Out)=(\d{1,18})")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,15})")
_PROGRESS = re.compile(
    r"(?:PG (?:ID )?(?P<pg>\d+)[^\]]*?(?:\((?P<about>[^)]*)\))? )?Rank (?P<rank>\d{1,9})\][^\n]*?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
_AT = re.compile(r"detected by watchdog at work(?: sequence id)?: (\d{1,18})")
_SIGNAL = re.compile(r"Rank (\d{1,9})\][^\n]*?(?:dump signal|signal)[^\n]*? from(?: global)? rank (\d{1,9})")
_STUCK = re.compile(
    r"[Rr]ank ?(\d{1,9})\][^\n]*?(?:watchdog|monitor)[^\n]*?(?:got stuck|stuck) for (\d+) seconds", re.I
)
_KNOWN = re.compile(
    r"Watchdog caught collective operation timeout|last enqueued (?:NCCL )?work: -?\d|OpType=\w+, .*Timeout\(ms\)="
    r"|Root Cause \(first observed failure\):|watchdog got stuck for \d+ seconds without making progress"
)
_FIELD = r" {1,4}(?:host {6}|rank {6}|exitcode {2}): "
"""How the fields of torchrun's block begin."""
_EXIT = re.compile(
    r"^ *host {6}: (?P<host>\S{1,200})\n *rank {6}: (?P<rank>\d{1,9}) \(local_rank: \d+\)\n"
    r" *exitcode {2}: (?P<code>-?\d{1,9})\b",
    re.M,
)
MESSAGES = ("send", "recv", "coalesced")
"""Calls of which these lines do not say to whom: they are compared with no other rank's."""
_DEFAULT = "0 default_pg"
_UNTOLD = "not named in the log:"
"""How a group is called that no line names, in a log of several."""
_FIRST = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class _Place:
    rank: int
    group: str


@dataclass(frozen=True)
class _Progress:
    """How far a rank is in a group: the numbers of its calls, ``at`` that of the one that timed out, 0 untold."""

    enqueued: int
    completed: int
    at: int = 0

    def pending(self, seq: int) -> bool:
        """Whether a call of this number may be one that has not ended."""
        return self.completed < seq <= self.enqueued


def sniff(head: Head) -> Likeness:
    """Whether a log has the watchdog's lines."""
    return Likeness.AMONG if _KNOWN.search(head.text) else likeness(named="Watchdog caught" in head.text, shaped=False)


def read(paths: Sequence[Path]) -> HangReport:
    """Why the ranks of these logs wait. Raises :class:`TraceError` for logs without a line of the watchdog."""
    calls: dict[_Place, Call] = {}
    progress: dict[_Place, _Progress] = {}
    unnumbered: dict[str, None] = {}
    notes: dict[str, None] = {}
    told_to_dump: set[int] = set()
    texts = [_BROKEN.sub(r"\1 ", _WRAPPED.sub(r"\1\2", _plain(path))) for path in paths]
    exits = [ended for text in texts for ended in _exits(text)]
    for line in (line for text in texts for line in text.splitlines()):
        if (match := _WORK.search(line)) and "imeout" in line and match["seq"] is None:
            unnumbered[f"rank {match['rank']}: nccl:{match['name'].lower()} did not end in time"] = None
        elif match and "imeout" in line:
            place = _Place(int(match["rank"]), _group(match) if match["pg"] else "")
            call = _call(match, place.group)
            before = calls.get(place)
            if before is None or call.seq < before.seq:  # the first that did not end holds up others
                calls[place] = call
        if match := _PROGRESS.search(line):
            at = _AT.search(line)
            counts = _Progress(int(match["enqueued"]), int(match["completed"]), int(at[1]) if at else 0)
            progress[_Place(int(match["rank"]), _group(match))] = counts
        if match := _SIGNAL.search(line):
            told_to_dump.add(int(match[1]))
            notes[f"rank {match[2]} timed out first: it told rank {match[1]} to dump"] = None
        if match := _STUCK.search(line):
            notes[f"rank {match[1]}: its watchdog itself was stuck for {match[2]} s: a call of CUDA or NCCL"] = None
    calls = _with_groups(calls, progress)
    for place, counts in progress.items():
        calls.setdefault(place, _unnamed(place.group, counts))
    if not (calls or exits or unnumbered or notes):
        raise TraceError(f"{paths[0]}: no line of PyTorch's watchdog (a collective's timeout, last enqueued work)")
    if unnumbered:
        notes |= unnumbered
        notes["this release of PyTorch does not number its calls: who is behind cannot be told from them"] = None
    notes |= dict.fromkeys(map(_exit_note, exits))
    dumps = {rank: Dump(tuple(_recorded(rank, calls, progress))) for rank in sorted({p.rank for p in calls})}
    hang = explained(", ".join(map(str, paths)), dumps, Counter())
    lines = [*(hang.lines if calls else []), *notes]
    return HangReport(
        hang.source, lines, hang.ranks, hang.faults, told_to_dump=sorted(told_to_dump - set(dumps)), exits=exits
    )


def _plain(path: Path) -> str:
    """A log without what launchers and collectors put before the fields of torchrun's block."""
    return "\n".join(line.rstrip() for line in prefixes.lines(path, _FIELD))


def _exit_note(ended: ProcessExit) -> str:
    first = ", the first of its machine" if ended.first else ""
    return f"rank {ended.rank} on {ended.host} ended with exit code {ended.code}{first}"


def _exits(text: str) -> Iterator[ProcessExit]:
    """Processes whose end torchrun tells at the end of a job (torch/distributed/elastic/multiprocessing/errors)."""
    _, rooted, first = text.partition(_FIRST)
    for part, is_first in ((text.partition(_FIRST)[0], False), (first, True)) if rooted else ():
        for match in _EXIT.finditer(part):
            yield ProcessExit(int(match["rank"]), match["host"], int(match["code"]), is_first)


def _group(match: re.Match[str]) -> str:
    """As Flight Recorder calls it; a log that does not say is of the default group."""
    if (match["pg"] or "0") == "0" and not match["about"]:
        return _DEFAULT
    return f"{match['pg'] or '0'} {match['about'] or ''}".strip()


def _with_groups(calls: Mapping[_Place, Call], progress: Mapping[_Place, _Progress]) -> dict[_Place, Call]:
    """Calls of lines that name no group, in the group whose numbers on that rank hold them, else in that of another
    rank's same call. What no line tells is of the default group in a log that names no other; else of a group of its
    own, in which nobody is missing."""
    found = {place: _groups_of(place.rank, call.seq, progress) for place, call in calls.items() if not place.group}
    likely: dict[tuple[int, str], set[str]] = defaultdict(set)
    for place, groups in found.items():
        likely[calls[place].seq, calls[place].name].update(groups if len(groups) == 1 else ())
    grouped = {place: call for place, call in calls.items() if place.group}
    named = {place.group for place in [*grouped, *progress]} - {_DEFAULT}
    for place, groups in found.items():
        call = calls[place]
        groups = groups or likely[call.seq, call.name]
        untold = f"{_UNTOLD} {call.seq} {call.kind}" if named else _DEFAULT
        group = next(iter(groups)) if len(groups) == 1 else untold
        grouped.setdefault(_Place(place.rank, group), replace(call, group=group))
    return grouped


def _groups_of(rank: int, seq: int, progress: Mapping[_Place, _Progress]) -> set[str]:
    own = {place.group: counts for place, counts in progress.items() if place.rank == rank}
    exact = {group for group, counts in own.items() if counts.at == seq}
    return exact or {group for group, counts in own.items() if counts.pending(seq)}


def _unnamed(group: str, counts: _Progress) -> Call:
    """The first call of a rank that has not ended, or the last one where all have."""
    if counts.completed >= counts.enqueued:
        return Call(group, counts.enqueued, "", "", "", True, "")
    return Call(group, counts.at if counts.pending(counts.at) else max(counts.completed, 0) + 1, "", "", "", False, "")


def _call(match: re.Match[str], group: str) -> Call:
    numbers = dict(_NUMEL.findall(match["rest"]))
    timeout = _TIMEOUT.search(match["rest"])
    sizes = ", ".join(f"{count} {way.lower()}" for way, count in numbers.items())
    return Call(
        group=group,
        seq=int(match["seq"]),
        name=f"nccl:{match['name'].lower()}",
        sizes=f"elements: {sizes}" if sizes else "unknown size",
        dtype="",
        done=False,
        where="",
        inputs=int(numbers.get("In", 0)),
        outputs=int(numbers.get("Out", 0)),
        timeout=float(timeout[1]) * 1e-3 if timeout else 0.0,
    )


def _recorded(rank: int, calls: Mapping[_Place, Call], progress: Mapping[_Place, _Progress]) -> Iterator[Call]:
    """What a rank called, by the group; what it had completed before is told by number alone."""
    for place, call in calls.items():
        if place.rank != rank or call.kind in MESSAGES:
            continue
        ended = progress[place].completed if place in progress else 0
        if 0 < ended < call.seq:
            yield replace(call, seq=ended, name="", done=True)
        yield call
