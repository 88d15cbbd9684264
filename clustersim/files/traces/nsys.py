"""Nsight Systems' export (``nsys export --type sqlite``, or ``parquetdir``) -> a measured Timeline.

A rank is a process that ran kernels, or each GPU of a process that drives several. NCCL annotates its calls with NVTX
ranges (``ncclAllReduce``) whose payload says the bytes; a kernel belongs to the range that its launch call lies in, on
the same thread. Inside a group (``ncclGroupStart``) the launch comes at the group's end: then the n-th call of a thread
is its n-th kernel. A kernel that belongs to none is kept as a time that holds the wait for peers.
What people marked themselves tells a kernel's step, phase and layer, by the ranges that its launch lies in.
NCCL's payload counts ``sendcount`` for all_gather and ``recvcount`` for reduce_scatter, so S is that times the ranks.
"""

from __future__ import annotations

import bisect
import json
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files.traces import files, parquet
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.joining import join
from clustersim.files.traces.nvtx_ranges import Ranges
from clustersim.files.traces.profiled import BEHIND, UNNAMED, UNSIZED, ProfiledWork, RankCollective, RankTrace, unsized
from clustersim.files.traces.samples import dtype_of, kind_of
from clustersim.files.traces.unread import shared_advice

_MAGIC = b"SQLite format 3\0"
_CALLS = {
    "ncclAllReduce": "all_reduce",
    "ncclAllGather": "all_gather",
    "ncclReduceScatter": "reduce_scatter",
    "ncclBroadcast": "broadcast",
    "ncclBcast": "broadcast",
    "ncclReduce": "reduce",
    "ncclSend": "send",
    "ncclRecv": "recv",
    "ncclAlltoAll": "all_to_all",
    "ncclAllToAll": "all_to_all",
}
_SIZE = "Message size [bytes]"
_COMM = "NCCL communicator ID"
_TYPES = "f16|f32|f64|bf16|u8|i8|u32|i32|u64|i64|f8e4m3|f8e5m2|half|float|double|u?int8_t|u?int32_t|u?int64_t"
_NAME = re.compile(rf"nccl(?:Dev)?Kernel_([A-Za-z]+)(?:_\w*?)?_({_TYPES})(?:_|$|\()")
_RANGE = {"start", "end", "text", "textId", "globalTid"}
_OF_GPU = ("globalPid", "start", "end", "correlationId", "deviceId", "streamId")
_TABLES = {
    "StringIds": ("id", "value"),
    "CUPTI_ACTIVITY_KIND_KERNEL": (*_OF_GPU, "shortName"),
    "CUPTI_ACTIVITY_KIND_MEMCPY": _OF_GPU,
    "CUPTI_ACTIVITY_KIND_MEMSET": _OF_GPU,
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": _OF_GPU,
    "CUPTI_ACTIVITY_KIND_RUNTIME": ("globalTid", "correlationId", "start"),
    "NVTX_EVENTS": ("start", "end", "text", "textId", "globalTid", "jsonText", "jsonTextId"),
}
"""Tables of an export that are read, and their columns."""
_PROCESS = ~0xFFFFFF
"""A globalTid without its thread is its globalPid (Nsight Systems' documentation of serialised ids)."""

Call = tuple[int, int, str, dict[str, Any]]


def sniff(head: Head) -> Likeness:
    """Whether this is an SQLite file; of Parquet, its table may be another's."""
    if head.data.startswith(parquet.MAGIC):
        return Likeness.AMONG
    return likeness(named=False, shaped=head.data.startswith(_MAGIC))


def read(paths: Sequence[Path]) -> Timeline:
    """The run of these exports; each file, or folder of Parquet, holds the ranks of one machine.

    Raises :class:`TraceError`.
    """
    tables: defaultdict[Path, list[Path]] = defaultdict(list)
    for path in paths:
        is_parquet = files.head(path, len(parquet.MAGIC)) == parquet.MAGIC
        tables[path.parent if is_parquet else path].append(path)
    traces: list[RankTrace] = []
    for export, members in tables.items():
        try:
            with closing(_base(export, members)) as base:
                traces += _Export(base, export).ranks()
        except (
            sqlite3.Error,
            TypeError,
            ValueError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as error:  # a cell of another type
            raise TraceError(f"{export}: not a whole Nsight Systems export: {error}") from None
    return join(traces, ", ".join(map(str, tables)))


def _base(export: Path, members: Sequence[Path]) -> sqlite3.Connection:
    """The database of an export: the file itself, or the tables that matter of a folder of Parquet, which are named as
    those of SQLite are. Raises :class:`TraceError`."""
    if members == [export]:
        return sqlite3.connect(f"file:{export}?mode=ro&immutable=1", uri=True)
    base = sqlite3.connect(":memory:")
    for path in members:
        if path.stem not in _TABLES:
            continue
        columns = parquet.columns(path, _TABLES[path.stem])
        if not columns:
            raise TraceError(f"{path}: has no column {_TABLES[path.stem][0]}: no table of Nsight Systems")
        base.execute(f"create table {path.stem} ({', '.join(map(_quoted, columns))})")
        marks = ", ".join("?" * len(columns))
        rows = zip(*(map(_signed, values) for values in columns.values()), strict=True)
        base.executemany(f"insert into {path.stem} values ({marks})", rows)
    return base


def _quoted(name: str) -> str:
    return f'"{name}"'


def _signed(value: Any) -> Any:
    """A cell as SQLite holds it: numbers of 64 bits have a sign there."""
    return value - 2**64 if isinstance(value, int) and value >= 2**63 else value


GRAPH = "CUDA graph"
WHOLE_GRAPH = (
    "a CUDA graph recorded as one: it counts as computing, its collectives too; `nsys profile --cuda-graph-trace=node` "
    "tells its kernels"
)
_NAMELESS = {
    "CUPTI_ACTIVITY_KIND_MEMCPY": "Memcpy",
    "CUPTI_ACTIVITY_KIND_MEMSET": "Memset",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": GRAPH,
}
"""Tables of what a GPU runs besides kernels, and how each row of one is called."""


class _Export:
    """The tables of one export that matter here. All times in them are nanoseconds of one clock."""

    def __init__(self, base: sqlite3.Connection, path: Path) -> None:
        self.base = base
        self.path = path
        tables = {name for (name,) in base.execute("select name from sqlite_master where type = 'table'")}
        if any(name.startswith("rocpd_") for name in tables):
            raise TraceError(f"{path}: is rocprofv3's database, which is not read; {shared_advice('rocprof')}")
        for needed in ("CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"):
            if needed not in tables:
                raise TraceError(
                    f"{path}: no table {needed}: not an Nsight Systems export with CUDA traced (-t cuda,nvtx)"
                )
        self.tables = tables
        self.words: dict[int, str] = dict(base.execute("select id, value from StringIds"))
        # None of a table that is not there.
        self._noted = {row[1] for row in base.execute("pragma table_info(NVTX_EVENTS)")}

    def ranks(self) -> list[RankTrace]:
        """One trace per process that used a GPU."""
        launches = self._launches()
        marked = self._marked()
        calls, members = self._calls()
        kernels_of = _by_gpu(list(self._kernels()))
        if not kernels_of:
            raise TraceError(f"{self.path}: no kernel was recorded")
        world = max((n for _, n in members.values()), default=len(kernels_of))
        processes = Counter(process for process, _ in kernels_of)
        # Of a process that drives several GPUs, its communicators' last number is of any of them.
        member_ranks = {process: rank for process, (rank, _) in members.items() if processes[process] == 1}
        traces = []
        for order, (process, device) in enumerate(
            sorted(kernels_of, key=lambda gpu: (member_ranks.get(gpu[0], gpu[1]), gpu))
        ):
            rank = member_ranks.get(process, order)
            alone = "" if processes[process] == 1 else f", GPU {device}"
            source = f"{self.path} (process {process >> 24 & 0xFFFFFF}{alone})"
            trace = RankTrace(rank, max(world, len(kernels_of)), source, host=self.path.name)
            rows = kernels_of[process, device]
            self._fill(trace, rows, launches, calls, marked.get(process, Ranges(())))
            traces.append(trace)
        return traces

    def _kernels(self) -> Iterator[tuple[Any, ...]]:
        """(process, start, end, correlation, name, device, stream)."""
        yield from self.base.execute(
            "select globalPid, start, end, correlationId, shortName, deviceId, streamId from CUPTI_ACTIVITY_KIND_KERNEL"
        )
        for table, name in _NAMELESS.items():
            if table in self.tables:
                yield from self.base.execute(
                    f"select globalPid, start, end, correlationId, '{name}', deviceId, streamId from {table}"
                )

    def _launches(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(process, correlation) -> (launch call's time, thread)."""
        if "CUPTI_ACTIVITY_KIND_RUNTIME" not in self.tables:
            return {}
        rows = self.base.execute("select globalTid, correlationId, start from CUPTI_ACTIVITY_KIND_RUNTIME")
        return {(tid & _PROCESS, correlation): (start, tid) for tid, correlation, start in rows}

    def _marked(self) -> dict[int, Ranges]:
        """What people marked themselves, by process."""
        ranges: defaultdict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
        if self._noted >= _RANGE:
            for start, end, text, number, tid in self.base.execute(
                "select start, end, text, textId, globalTid from NVTX_EVENTS where end is not null"
            ):
                ranges[tid & _PROCESS].append((start, end, text or self.words.get(number, ""), tid))
        return {process: Ranges(rows) for process, rows in ranges.items()}

    def _calls(self) -> tuple[dict[int, list[Call]], dict[int, tuple[int, int]]]:
        """NCCL's calls by thread, in order; and process -> (rank, ranks) of its largest communicator."""
        calls: defaultdict[int, list[Call]] = defaultdict(list)
        members: dict[int, tuple[int, int]] = {}
        payloads = [column for column in ("jsonText", "jsonTextId") if column in self._noted]
        if not payloads or not self._noted >= _RANGE:
            return calls, members
        told = f"coalesce({', '.join(payloads)}, null)"  # the number of a text, in exports that hold each once
        rows = self.base.execute(
            f"select start, end, coalesce(text, ''), textId, globalTid, {told} from NVTX_EVENTS "
            f"where {told} is not null"
        )
        for start, end, text, number, tid, payload in rows:
            name = text or self.words.get(number, "")
            try:
                payload_fields = json.loads(payload if isinstance(payload, str) else self.words.get(payload, ""))
            except ValueError:
                continue
            if name in _CALLS and _SIZE in payload_fields:
                calls[tid].append((start, end if end is not None else start, name, payload_fields))
            elif name.startswith("ncclCommInit") and {"Rank", "No. of ranks"} <= payload_fields.keys():
                rank_and_world = (int(payload_fields["Rank"]), int(payload_fields["No. of ranks"]))
                members[tid & _PROCESS] = max(
                    members.get(tid & _PROCESS, rank_and_world), rank_and_world, key=lambda m: m[1]
                )
        for thread in calls.values():
            thread.sort(key=lambda call: call[0])
        return calls, members

    def _fill(
        self, trace: RankTrace, rows: list[tuple[Any, ...]], launches: Any, calls: dict[int, list[Call]], marked: Ranges
    ) -> None:
        nccl: list[tuple[tuple[Any, ...], str]] = []
        for row in rows:
            process, start, end, correlation, word, _, stream = row
            name = word if isinstance(word, str) else self.words.get(word, "?")
            if name.startswith("nccl"):
                nccl.append((row, name))
                continue
            if name == GRAPH:
                trace.skipped[WHOLE_GRAPH] += 1
            called, thread = launches.get((process, correlation), (float("nan"), 0))
            at = called if called == called else start
            _, phase, unit = marked.at(at, thread)
            step = marked.step(at, thread)
            times = start * 1e-9, end * 1e-9, called * 1e-9
            if step is None:
                trace.skipped[BEHIND] += 1
            else:
                trace.work.append(ProfiledWork(name, f"stream {stream}", *times, step, phase=phase, unit=unit))
        nccl.sort(key=lambda pair: pair[0][1])
        thread_ids = [tid for tid in sorted(calls) if nccl and tid & _PROCESS == nccl[0][0][0]]
        order = [call for tid in thread_ids for call in calls[tid]]
        for i, (row, name) in enumerate(nccl):
            call = _enclosing(calls, launches.get((row[0], row[3])))
            if call is None and len(thread_ids) == 1 and len(order) == len(nccl):
                call = order[i]
            step = marked.step(call[0] if call is not None else launches.get((row[0], row[3]), (row[1], 0))[0], 0)
            if step is None:
                trace.skipped[BEHIND] += 1
            elif call is None:
                self._unsized(trace, row, name, step)
            else:
                trace.seen.append(replace(_seen(call, row, name, trace.world), step=step))

    def _unsized(self, trace: RankTrace, row: tuple[Any, ...], name: str, step: int) -> None:
        """Take an NCCL kernel whose call no range with a size holds."""
        seen = unsized(name, row[1] * 1e-9, row[2] * 1e-9, step, trace.rank, trace.world)
        trace.skipped[UNSIZED if seen is not None else UNNAMED] += 1
        if seen is not None:
            trace.seen.append(seen)


MINOR = 0.05
"""A GPU on which a process runs less than this share of what it runs on its busiest is not one that it drives: a
context, or a copy, on another's."""


def _by_gpu(rows: Sequence[tuple[Any, ...]]) -> dict[tuple[int, int], list[tuple[Any, ...]]]:
    """Kernels and copies by process and the GPU that it drives, each of the GPUs where it drives several."""
    busy: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for process, start, end, *_, device, _ in rows:
        busy[process][device] += max(end - start, 1)
    driven = {
        process: [device for device, time in times.items() if time >= MINOR * max(times.values())]
        for process, times in busy.items()
    }
    by_gpu: defaultdict[tuple[int, int], list[tuple[Any, ...]]] = defaultdict(list)
    for row in rows:
        devices = driven[row[0]]
        by_gpu[row[0], row[5] if row[5] in devices else devices[0]].append(row)
    return by_gpu


def _enclosing(calls: dict[int, list[Call]], launch: tuple[int, int] | None) -> Call | None:
    if launch is None:
        return None
    thread = calls.get(launch[1], [])
    position = bisect.bisect_right(thread, launch[0], key=lambda call: call[0]) - 1
    return thread[position] if position >= 0 and thread[position][1] >= launch[0] else None


def _seen(call: Call, row: tuple[Any, ...], name: str, world: int) -> RankCollective:
    kind = _CALLS[call[2]]
    payload_fields = call[3]
    match = _NAME.match(name)
    dtype = dtype_of(match.group(2).removesuffix("_t")) if match else None
    nbytes = float(payload_fields[_SIZE]) * (world if kind in {"all_gather", "reduce_scatter", "all_to_all"} else 1)
    return RankCollective(
        kind_of(kind) or kind,
        row[1] * 1e-9,
        row[2] * 1e-9,
        nbytes,
        str(payload_fields.get(_COMM, "")),
        2 if kind in {"send", "recv"} else world,
        (),
        None,
        dtype or "",
        0,
        name,
    )
