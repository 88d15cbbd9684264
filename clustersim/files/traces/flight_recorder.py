"""PyTorch's Flight Recorder: each rank's last collectives, from which a hang is explained: who is missing where.

A dump is a pickle of plain values (``torch.distributed``'s ``TORCH_FR_DUMP_TEMP_FILE``, a file per rank whose name ends
in the rank) or the same as JSON. Pickles are read without running anything they name. Of a process group, each rank's
``collective_seq_id`` counts what it called: who has not called what others have is missing, and who called something
else there does not match. Schema 2.x of torch/csrc/distributed/c10d/FlightRecorder.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clustersim.core.errors import TraceError, few
from clustersim.core.texts import Table, short
from clustersim.files.traces import files
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.told import CollectiveFault, HangReport

LARGEST = 256 * 2**20
"""Largest dump read [bytes]; a ring of 20,000 calls with stacks is a tenth of it."""
SHOWN = 8
"""Ranks named in a line."""


@dataclass(frozen=True)
class RecordedCall:
    """A collective as a rank called it: ``seq`` counts within its group, ``sizes`` of inputs in elements."""

    group: str
    seq: int
    name: str
    sizes: str
    dtype: str
    done: bool
    where: str


def sniff(head: Head) -> Likeness:
    """Whether this is a dump: a pickle, which no other format is, or JSON whose entries are calls of collectives."""
    if re.match(rb"\x80[\x02-\x05]", head.data):
        known = (b"pg_config", b"pg_status", b"collective_seq_id")
        return likeness(named=True, shaped=any(word in head.data for word in known))
    named = not head.members.keys().isdisjoint(("pg_config", "pg_status", "entries"))
    return likeness(named=named, shaped=named and head.lists("entries", "profiling_name", "process_group"))


def read(paths: Sequence[Path]) -> HangReport:
    """Why the ranks of these dumps wait. Raises :class:`TraceError` for a file that is no whole dump."""
    skipped: Counter[str] = Counter()
    calls: dict[int, list[RecordedCall]] = {}
    members: dict[str, set[int]] = {}
    for path in paths:
        found = re.search(r"(\d{1,9})(?:\.\w+)?$", path.name)
        if found is None:
            raise TraceError(f"{path}: the name of a Flight Recorder dump ends in its rank, such as trace_3")
        if int(found[1]) in calls:
            raise TraceError(f"{path}: rank {int(found[1])} again; give one dump per rank")
        dump = _load(path)
        calls[int(found[1])] = list(_calls(dump, skipped))
        _members(dump.get("pg_config"), members)
    faults = list(_faults(calls, members))
    lines = [fault.text for fault in faults] or ["no rank is behind: every group's ranks called the same collectives"]
    lines += [f"rank {r}: {len(mine)} calls recorded, last {_said(mine[-1])}" for r, mine in calls.items() if mine]
    return HangReport(", ".join(map(str, paths)), lines, sorted(calls), faults, skipped)


class _PlainUnpickler(pickle.Unpickler):
    """Plain values only: a dump that names a class or a function is refused, and nothing of it runs."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _load(path: Path) -> Table:
    data = files.whole(path)
    if len(data) > LARGEST:
        raise TraceError(f"{path}: more than {LARGEST // 2**20} MiB is no Flight Recorder dump")
    try:
        dump = json.loads(data) if data.lstrip()[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
        version = str(dump.get("version", "2."))
        told = dict(dump) if "entries" in dump else {}
    except Exception as error:  # an unpickler raises whatever the bytes lead it to
        raise TraceError(f"{path}: not a whole Flight Recorder dump: {short(str(error))[:120]}") from None
    if not version.startswith("2.") or not told:
        raise TraceError(
            f"{path}: a Flight Recorder dump of schema {short(version)[:20]!r}; this reads 2.x with entries"
        )
    return told


def _calls(dump: Table, skipped: Counter[str]) -> Iterator[RecordedCall]:
    for entry in dump.get("entries") or []:
        try:
            if entry["is_p2p"]:
                skipped["a send or receive, which no group counts"] += 1
                continue
            group, about = entry["process_group"]
            frames = [f for f in entry.get("frames") or [] if "torch/" not in str(f.get("filename"))]
            where = f"{Path(str(frames[0]['filename'])).name}:{frames[0]['line']}" if frames else ""
            done = entry["state"] == "completed" or bool(entry["retired"])
            yield RecordedCall(
                f"{group} {about}".strip(),
                int(entry["collective_seq_id"]),
                str(entry["profiling_name"]),
                str(entry["input_sizes"]),
                str((entry["input_dtypes"] or [""])[0]),
                done,
                where,
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            skipped["a call whose fields are not Flight Recorder's"] += 1


def _members(config: Any, members: dict[str, set[int]]) -> None:
    for name, about in config.items() if isinstance(config, dict) else ():
        ranks = re.findall(r"\d+", str(about.get("ranks", ""))) if isinstance(about, dict) else []
        if ranks:
            members[str(name)] = {int(rank) for rank in ranks[:100_000]}


def _faults(calls: Mapping[int, list[RecordedCall]], members: Mapping[str, set[int]]) -> Iterator[CollectiveFault]:
    """Of each group, the first collective that not all have called, or that differs between its ranks."""
    by_group: defaultdict[str, defaultdict[int, dict[int, RecordedCall]]] = defaultdict(lambda: defaultdict(dict))
    for rank, mine in calls.items():
        for call in mine:
            by_group[call.group][call.seq][rank] = call
    for group, at in by_group.items():
        name = group.split(" ")[0]
        everybody = members.get(name) or (set(calls) if name == "0" else {r for by in at.values() for r in by})
        # A ring forgets its oldest calls: a rank is only missing from what is newer than its last one.
        last = {rank: max((c.seq for c in calls[rank] if c.group == group), default=0) for rank in calls}
        for seq in sorted(at):
            here = at[seq]
            called = sorted(here)
            gone = sorted(rank for rank in everybody if rank in calls and last[rank] < seq)
            unseen = sorted(everybody - set(calls))
            kinds = {(call.name, call.sizes if "all_reduce" in call.name else "", call.dtype) for call in here.values()}
            if not gone and len(kinds) == 1:
                continue
            first = here[called[0]]
            text = f"group {group!r}, collective {seq}, {_said(first)}: " + (
                f"ranks {few(gone, SHOWN)} never called it; {few(called, SHOWN)} wait"
                if gone
                else "ranks differ: " + "; ".join(f"rank {r}: {_said(here[r])}" for r in _different(here))
            )
            text += f"; no dump of ranks {few(unseen, SHOWN)}" if unseen else ""
            yield CollectiveFault(group, seq, first.name, gone, called, unseen, text)
            break


def _different(here: Mapping[int, RecordedCall]) -> list[int]:
    ways: dict[tuple[str, str, str], int] = {}
    for rank, call in sorted(here.items()):
        ways.setdefault((call.name, call.sizes, call.dtype), rank)
    return list(ways.values())


def _said(call: RecordedCall) -> str:
    return short(f"{call.name} of {call.sizes} {call.dtype}" + (f" ({call.where})" if call.where else ""))
