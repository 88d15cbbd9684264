"""What PyTorch's watchdog of NCCL writes before it ends a job: which collective of which rank did not end in time.

Lines of ProcessGroupNCCL of 2.1 to 2.13: the work that timed out (``WorkNCCL(SeqNum=4, OpType=ALLREDUCE, ...)``), what
the rank had last enqueued and completed, and from which rank a signal to dump came. Who is behind follows as it does
from Flight Recorder's dumps, though of fewer facts. The block in which torchrun says which process ended first is read
from the same log.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from clustersim.core.errors import TraceError
from clustersim.files.traces import files
from clustersim.files.traces.hangs import explained
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.recorded_calls import Call, Dump
from clustersim.files.traces.told import HangReport, ProcessExit

_WORK = re.compile(
    r"(?:PG (?:ID )?(?P<pg>\d+)[^\]]*?(?:\((?P<about>[^)]*)\))? )?Rank (?P<rank>\d{1,9})\][^\n]*?"
    r"(?:Work\w*)\(SeqNum=(?P<seq>\d{1,18}), OpType=(?P<name>\w+)(?P<rest>[^)]*)\)?"
)
_NUMEL = re.compile(r"Numel(In|Out)=(\d{1,18})")
_TIMEOUT = re.compile(r"Timeout\(ms\)=(\d{1,15})")
_PROGRESS = re.compile(
    r"(?:PG (?:ID )?(?P<pg>\d+)[^\]]*?(?:\((?P<about>[^)]*)\))? )?Rank (?P<rank>\d{1,9})\][^\n]*?"
    r"last enqueued (?:NCCL )?work: (?P<enqueued>-?\d{1,18}), last completed (?:NCCL )?work: (?P<completed>-?\d{1,18})"
)
_SIGNAL = re.compile(r"Rank (\d{1,9})\][^\n]*?(?:dump signal|signal)[^\n]*? from(?: global)? rank (\d{1,9})")
_STUCK = re.compile(r"Rank (\d{1,9})\][^\n]*?(?:watchdog|monitor)[^\n]*?(?:got stuck|stuck) for (\d+) seconds", re.I)
_KNOWN = re.compile(
    r"Watchdog caught collective operation timeout|last enqueued (?:NCCL )?work: -?\d|OpType=\w+, .*Timeout\(ms\)="
    r"|Root Cause \(first observed failure\):"
)
_EXIT = re.compile(
    r"^ *host {6}: (?P<host>\S{1,200})\n *rank {6}: (?P<rank>\d{1,9}) \(local_rank: \d+\)\n"
    r" *exitcode {2}: (?P<code>-?\d{1,9})\b",
    re.M,
)
MESSAGES = ("send", "recv", "coalesced")
"""Calls of which these lines do not say to whom: they are compared with no other rank's."""
_FIRST = "Root Cause (first observed failure):"


@dataclass(frozen=True)
class _Place:
    rank: int
    group: str


def sniff(head: Head) -> Likeness:
    """Whether a log has the watchdog's lines."""
    return Likeness.AMONG if _KNOWN.search(head.text) else likeness(named="Watchdog caught" in head.text, shaped=False)


def read(paths: Sequence[Path]) -> HangReport:
    """Why the ranks of these logs wait. Raises :class:`TraceError` for logs without a line of the watchdog."""
    calls: dict[_Place, Call] = {}
    completed: dict[_Place, int] = {}
    notes: dict[str, None] = {}
    told_to_dump: set[int] = set()
    texts = [files.log(path) for path in paths]
    exits = [ended for text in texts for ended in _exits(text)]
    for line in (line for text in texts for line in text.splitlines()):
        if (match := _WORK.search(line)) and "imeout" in line:
            place = _Place(int(match["rank"]), _group(match))
            call = _call(match, line, place.group)
            before = calls.get(place)
            if before is None or not before.name or call.seq < before.seq:  # the first that did not end holds up others
                calls[place] = call
        if match := _PROGRESS.search(line):
            place = _Place(int(match["rank"]), _group(match))
            completed[place] = int(match["completed"])
            enqueued = int(match["enqueued"])
            done = int(match["completed"]) >= enqueued
            calls.setdefault(place, Call(place.group, enqueued, "", "", "", done, ""))
        if match := _SIGNAL.search(line):
            told_to_dump.add(int(match[1]))
            notes[f"rank {match[2]} timed out first: it told rank {match[1]} to dump"] = None
        if match := _STUCK.search(line):
            notes[f"rank {match[1]}: its watchdog itself was stuck for {match[2]} s: a call of CUDA or NCCL"] = None
    if not (calls or exits or told_to_dump):
        raise TraceError(f"{paths[0]}: no line of PyTorch's watchdog (a collective's timeout, last enqueued work)")
    for ended in exits:
        first = ", the first of its machine" if ended.first else ""
        notes[f"rank {ended.rank} on {ended.host} ended with exit code {ended.code}{first}"] = None
    dumps = {rank: Dump(tuple(_recorded(rank, calls, completed))) for rank in sorted({p.rank for p in calls})}
    hang = explained(", ".join(map(str, paths)), dumps, Counter())
    lines = [*(hang.lines if calls else []), *notes]
    return HangReport(
        hang.source, lines, hang.ranks, hang.faults, told_to_dump=sorted(told_to_dump - set(dumps)), exits=exits
    )


def _exits(text: str) -> Iterator[ProcessExit]:
    """Processes whose end torchrun tells at the end of a job (torch/distributed/elastic/multiprocessing/errors)."""
    _, rooted, first = text.partition(_FIRST)
    for part, is_first in ((text.partition(_FIRST)[0], False), (first, True)) if rooted else ():
        for match in _EXIT.finditer(part):
            yield ProcessExit(int(match["rank"]), match["host"], int(match["code"]), is_first)


def _group(match: re.Match[str]) -> str:
    """As Flight Recorder calls it; a log that does not say is of the default group."""
    return f"{match['pg'] or '0'} {match['about'] or ('default_pg' if (match['pg'] or '0') == '0' else '')}".strip()


def _call(match: re.Match[str], line: str, group: str) -> Call:
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


def _recorded(rank: int, calls: dict[_Place, Call], completed: dict[_Place, int]) -> Iterator[Call]:
    """What a rank called, by the group; what it had completed before is told by number alone."""
    for place, call in calls.items():
        if place.rank != rank or call.kind in MESSAGES:
            continue
        ended = completed.get(place, 0)
        if 0 < ended < call.seq:
            yield replace(call, seq=ended, name="", done=True)
        yield call
