"""PyTorch's Flight Recorder: each rank's last collectives, from which a hang is explained: who is missing where.

A dump is a pickle of plain values (``torch.distributed``'s ``TORCH_FR_DUMP_TEMP_FILE``, a file per rank whose name ends
in the rank) or the same as JSON. Pickles are read without running anything they name. Schema 2.x of
torch/csrc/distributed/c10d/FlightRecorder; what the calls mean is told in :mod:`clustersim.files.traces.hangs`.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table, short
from clustersim.files.traces import files
from clustersim.files.traces.hangs import explained
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.recorded_calls import Call, Dump, Message
from clustersim.files.traces.told import HangReport

LARGEST = 256 * 2**20
"""Largest dump read [bytes]; a ring of 20,000 calls with stacks is a tenth of it."""
_LIBRARY = re.compile(
    r"(?:^|/)(?:site-packages|dist-packages)/|(?:^|/)torch/(?:_|autograd|cuda|distributed|fx|func|nn|optim|utils)"
    r"|(?:^|/)multiprocessing/|^<"
)
"""Files whose frames are no line of the job's own code."""
_PROGRESS = ("enqueued", "started", "completed")
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")
UNTOLD = ("gloo", "mpi")
"""Backends of which the recorder does not see when a call starts: all that did not end are "scheduled"."""


def sniff(head: Head) -> Likeness:
    """Whether this is a dump: a pickle, which no other format is, or JSON whose entries are calls of collectives."""
    if re.match(rb"\x80[\x02-\x05]", head.data):
        keys = (b"pg_config", b"pg_status", b"collective_seq_id")
        return likeness(named=True, shaped=any(word in head.data for word in keys))
    named = not head.members.keys().isdisjoint(("pg_config", "pg_status", "entries"))
    return likeness(named=named, shaped=named and head.lists("entries", "profiling_name", "process_group"))


def read(paths: Sequence[Path]) -> HangReport:
    """Why the ranks of these dumps wait. Raises :class:`TraceError` for a file that is no whole dump."""
    skipped: Counter[str] = Counter()
    dumps: dict[int, Dump] = {}
    starts: set[bool | None] = set()
    for path in paths:
        table = _load(path)
        rank = _rank(path, table)
        if rank in dumps:
            raise TraceError(f"{path}: rank {rank} again; give one dump per rank")
        dumps[rank] = _dump(table, skipped)
        starts.add(_saw_starts(table))
    if False in starts and True not in starts:
        dumps = {rank: _starts_untold(dump) for rank, dump in dumps.items()}
    return explained(", ".join(map(str, paths)), dumps, skipped)


def _rank(path: Path, table: Table) -> int:
    """By ``rank_3`` in the file's name or the number at its end, else as the dump says.

    Raises :class:`TraceError` for none of them.
    """
    if match := re.search(r"rank[_.-]?(\d{1,9})(?!\d)", path.name):
        return int(match[1])
    if match := re.search(r"(\d{1,9})(?:\.\w+)*$", path.name):
        return int(match[1])
    if isinstance(table.get("rank"), int):
        return int(table["rank"])
    raise TraceError(f"{path}: the name of a Flight Recorder dump ends in its rank, such as trace_3")


class _PlainUnpickler(pickle.Unpickler):
    """Plain values only: a dump that names a class or a function is refused, and nothing of it runs."""

    def find_class(self, module: str, name: str) -> Any:
        """Refuse every class and function."""
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _load(path: Path) -> Table:
    data = files.whole(path)
    if len(data) > LARGEST:
        raise TraceError(f"{path}: more than {LARGEST // 2**20} MiB is no Flight Recorder dump")
    try:
        dump = json.loads(data) if data.lstrip()[:1] == b"{" else _PlainUnpickler(io.BytesIO(data)).load()
        version = str(dump.get("version", "2."))
        contents = dict(dump) if "entries" in dump or "pg_status" in dump else {}
    except Exception as error:  # an unpickler raises whatever the bytes lead it to
        raise TraceError(f"{path}: not a whole Flight Recorder dump: {short(str(error))[:120]}") from None
    if not version.startswith("2.") or not contents:
        raise TraceError(
            f"{path}: a Flight Recorder dump of schema {short(version)[:20]!r}; this reads 2.x with its entries"
        )
    return contents


def _dump(table: Table, skipped: Counter[str]) -> Dump:
    listed = table.get("entries") or []
    entries = listed if isinstance(listed, list) else []
    whole_of = _coalesced(entries)
    closers = set(whole_of.values())
    calls: list[Call] = []
    messages: list[Message] = []
    parts: defaultdict[int, list[Call]] = defaultdict(list)
    forgot = False
    for i, entry in enumerate(entries):
        try:
            forgot = forgot or (i == 0 and int(entry.get("record_id") or 0) > 0)
            call = _call(entry)
            whole = whole_of.get(i)
            if whole is not None:
                closing = _call(entries[whole])
                call = replace(call, done=closing.done, started=closing.started)
            if entry.get("is_p2p"):
                if match := _MESSAGE.search(call.name):
                    messages.append(Message(call, match[1], int(match[3])))
                elif i not in closers:
                    skipped["several sends and receives as one, whose own lines are not there"] += 1
            elif whole is not None:
                parts[whole].append(call)
            else:
                calls.append(_together(parts[i], call) if i in parts else call)
        except (KeyError, TypeError, ValueError, OverflowError, IndexError, AttributeError):
            skipped["a call whose fields are not Flight Recorder's"] += 1
    if not calls and not messages:
        calls = list(_by_status(table))
    return Dump(tuple(calls), tuple(messages), dict(_members(table.get("pg_config"))), forgot)


def _saw_starts(table: Table) -> bool | None:
    """Whether the recorder saw calls of this rank start; None where the dump does not tell.

    It does with TORCH_NCCL_ENABLE_TIMING alone (torch/csrc/distributed/c10d/FlightRecorderDetail.hpp); else all calls
    that did not end are "scheduled", those that ended have no time at which they began, and the group's last call that
    started stays -1.
    """
    listed, status = table.get("entries"), table.get("pg_status")
    whole = [entry for entry in listed if isinstance(entry, dict)] if isinstance(listed, list) else []
    groups = [last for last in status.values() if isinstance(last, dict)] if isinstance(status, dict) else []
    if any(entry.get("time_discovered_started_ns") or entry.get("state") == "started" for entry in whole):
        return True
    if any(last.get("last_started_collective", -1) != -1 for last in groups):
        return True
    return False if any(entry.get("time_discovered_completed_ns") for entry in whole) else None


def _starts_untold(dump: Dump) -> Dump:
    """The dump of a job whose starts were not recorded."""
    calls = (replace(call, started=None) if call.started is False else call for call in dump.calls)
    ends = (
        replace(end, call=replace(end.call, started=None)) if end.call.started is False else end
        for end in dump.messages
    )
    return replace(dump, calls=tuple(calls), messages=tuple(ends))


def _coalesced(entries: list[Any]) -> dict[int, int]:
    """Of each call within a group of NCCL's (``batch_isend_irecv``, ``_coalescing_manager``), the entry that closes it.

    Such calls share one sequence number, stay "scheduled" for good, and have their sizes; what closes them ends in
    "coalesced" and has their state. Pipelines send so, and a job that ended well has thousands of them.
    """
    unclosed: defaultdict[tuple[str, bool, str], list[int]] = defaultdict(list)
    whole_of: dict[int, int] = {}
    for i, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        message = bool(entry.get("is_p2p"))
        seq = entry.get("p2p_seq_id" if message else "collective_seq_id", entry.get("seq_id"))
        key = str(entry.get("process_group")), message, str(seq)
        if str(entry.get("profiling_name")).endswith("coalesced"):
            whole_of |= dict.fromkeys(unclosed.pop(key, ()), i)
        elif entry.get("state") == "scheduled" and not entry.get("retired"):
            unclosed[key].append(i)
    return whole_of


def _together(parts: list[Call], closing: Call) -> Call:
    """The collectives of one group as one call: sizes and types are theirs, progress is of what closes them."""
    names = list(dict.fromkeys(part.name for part in parts))
    return replace(
        closing,
        name=" and ".join([names[0], *(name.rpartition(":")[2] for name in names[1:])]),
        sizes=", ".join(part.sizes for part in parts),
        dtype=", ".join(dict.fromkeys(part.dtype for part in parts)),
        inputs=sum(part.inputs for part in parts),
        outputs=sum(part.outputs for part in parts),
    )


def _by_status(table: Table) -> Iterator[Call]:
    """Of a dump without entries, the last collective of each group, by the group's place among the rank's own."""
    config = table.get("pg_config")
    status = table.get("pg_status")
    names = list(config) if isinstance(config, dict) else []
    for number, last in status.items() if isinstance(status, dict) else ():
        try:
            enqueued, started, completed = (int(last[f"last_{word}_collective"]) for word in _PROGRESS)
            name = str(names[int(number)]) if int(number) < len(names) else str(number)
            about = config[name].get("desc", "") if isinstance(config, dict) and name in config else ""
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            continue
        if enqueued > 0:
            done = completed >= enqueued
            yield Call(f"{name} {about}".strip(), enqueued, "", "", "", done, "", done or started >= enqueued)


def _call(entry: Table) -> Call:
    group, about = entry["process_group"]
    frames = [frame for frame in entry.get("frames") or [] if not _LIBRARY.search(str(frame.get("filename")))]
    where = f"{Path(str(frames[0]['filename'])).name}:{frames[0]['line']}" if frames else ""
    name = str(entry["profiling_name"])
    done = entry["state"] == "completed" or bool(entry.get("retired"))
    told = name.split(":")[0] not in UNTOLD
    started = done or entry["state"] == "started" or bool(entry.get("time_discovered_started_ns"))
    return Call(
        group=f"{group} {about}".strip(),
        seq=int(entry["collective_seq_id"] if "collective_seq_id" in entry else entry["seq_id"]),
        name=name,
        sizes=str(entry["input_sizes"]),
        dtype=str((entry.get("input_dtypes") or [""])[0]),
        done=done,
        where=where,
        started=started if told or started else None,
        inputs=_elements(entry["input_sizes"]),
        outputs=_elements(entry.get("output_sizes") or []),
        created=int(entry.get("time_created_ns") or 0) * 1e-9,
        timeout=float(entry.get("timeout_ms") or 0) * 1e-3,
    )


def _elements(sizes: Any) -> int:
    """Elements of several tensors."""
    return sum(prod(int(length) for length in shape) for shape in sizes)


def _members(config: Any) -> Iterator[tuple[str, frozenset[int]]]:
    """Ranks of each process group, by its name."""
    for name, about in config.items() if isinstance(config, dict) else ():
        ranks = re.findall(r"\d+", str(about.get("ranks", ""))) if isinstance(about, dict) else []
        if ranks:
            yield str(name), frozenset(int(rank) for rank in ranks[:100_000])
