"""Reports of GPU profilers as CSV: Nsight Systems' (``nsys stats --report cuda_gpu_trace --format csv``, and
cuda_gpu_kern_sum, as columns of a page too) and those of rocprof (``kernel_trace.csv``, ``kernel_stats.csv``); and
TraceLens' sums of a trace's kernels (``kernel_summary.csv``).

A trace has a line per kernel: when, how long, on which device and stream. A device is a rank. It says neither what
launched a kernel nor how many bytes NCCL's kernels move, nor among whom: those are kept as times that hold the wait for
peers. A summary has a line per kernel: how often and how long, of all devices together. What ``nsys stats`` prints
around its tables is passed over (docs.nvidia.com/nsight-systems, "Available Stats Reports"; rocprofiler-sdk, "Using
rocprofv3").
"""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path

from clustersim.core.errors import TraceError
from clustersim.core.texts import csv_rows, short
from clustersim.core.timeline import Timeline
from clustersim.core.units import format_time
from clustersim.files.traces import files
from clustersim.files.traces.csv_table import MOST
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.joining import join
from clustersim.files.traces.profiled import (
    LIBRARY_KERNEL,
    UNNAMED,
    UNSIZED,
    ProfiledWork,
    RankTrace,
    unsized,
)
from clustersim.files.traces.told import KernelSum, KernelSums

_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9, "nsec": 1e-9}
_TIME = re.compile(r"(Start|Duration|Total Time) ?\((\w+)\)")
_OF_OTHERS = {
    "Start_Timestamp": ("Start", "ns"),
    "End_Timestamp": ("End", "ns"),
    "TotalDurationNs": ("Total Time", "ns"),
    "Kernel_Name": ("Name", ""),
    "Agent_Id": ("Device", ""),
    "Queue_Id": ("Strm", ""),
    "Calls": ("Instances", ""),
    "GPU_ID": ("Device", ""),
    "Queue_ID": ("Strm", ""),
    "KernelName": ("Name", ""),
    "BeginNs": ("Start", "ns"),
    "EndNs": ("End", "ns"),
    "gpu-id": ("Device", ""),
    "queue-id": ("Strm", ""),
    "Kernel name": ("Name", ""),
    **{f"Kernel duration ({micro}s)_sum": ("Total Time", "us") for micro in "\u00b5\u03bcu"},
    **{f"Kernel duration ({micro}s)_count": ("Instances", "") for micro in "\u00b5\u03bcu"},
}
"""What others call the columns that are read, and their units of time: rocprofv3, rocprofv2 and rocprof, TraceLens."""
_TIMES = ("Start", "End", "Duration", "Total Time")
_RULE = re.compile(r"^[ \t]*-{2,}(?:[ \t]+-{2,})+[ \t]*$")
"""A line below the names of columns, as nsys stats prints them on a page."""
_AMOUNT = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_TRACES = ({"Start", "Duration", "Device", "Strm", "Name"}, {"Start", "End", "Device", "Strm", "Name"})
_SUM = {"Total Time", "Instances", "Name"}
_DEVICE = re.compile(r"^(.*?)\s*(?:\((\d{1,6})\)|\b(\d{1,6}))$")
_CUT = "a line that is cut off"
SHOWN = 20
"""Kernels that a summary lists."""
_DOMAINS = re.compile(
    r"(?:KERNEL_DISPATCH|MEMORY_COPY|MEMORY_ALLOCATION|SCRATCH_MEMORY|MARKER\w*|(?:HIP|HSA|RCCL|ROCDECODE|ROCJPEG)\w*_API)$"
)
"""Rows of rocprofv3's domain_stats.csv."""
_DISPATCH = ("Device", "Process_Id", "Dispatch_Id")
"""Columns that tell one run of a kernel from another in a table of counters, which has a row for each counter of it."""
_CALLS = re.compile(r"(?:hip[A-Z]|hsa_|roctx|cu[A-Z]|cuda[A-Z])\w*$|__hip")
"""Names of calls: rocprofv3 counts them under the same columns as kernels."""
_READ = "of `nsys stats --format csv`, cuda_gpu_trace and cuda_gpu_kern_sum are read"


@dataclass(frozen=True)
class _Table:
    """A table of a report: the names of its columns as Nsight has them and without units, seconds in one unit of each,
    its rows, and the lines that have fewer cells."""

    names: list[str]
    units: dict[str, float]
    rows: list[tuple[int, list[str]]] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    @property
    def is_trace(self) -> bool:
        """Whether it has a row for each kernel rather than one for each name."""
        return _is_trace(self.names)


def _is_trace(names: Sequence[str]) -> bool:
    return any(set(names) >= needed for needed in _TRACES)


def _is_sum(names: Sequence[str]) -> bool:
    return set(names) >= _SUM


def sniff(head: Head) -> Likeness:
    """Whether a line is the header of one of these tables; or of another one of Nsight's."""
    headers = [_columns(line)[0] for line in head.text.splitlines() if "Name" in line or "Kernel name" in line]
    shaped = any(_is_trace(names) or _is_sum(names) for names in headers)
    return likeness(named=any({"Time (%)", "Total Time"} <= set(names) for names in headers), shaped=shaped)


def read(paths: Sequence[Path]) -> Timeline | KernelSums:
    """The run of these traces, or what summaries say. Raises :class:`TraceError` for other reports."""
    tables = {path: list(_tables(path)) for path in paths}
    traced = {path: [table for table in of_file if table.is_trace] for path, of_file in tables.items()}
    if not any(traced.values()):
        return _summed(tables)
    bare = next((path for path, of_file in traced.items() if not of_file), None)
    if bare is not None:
        raise TraceError(f"{bare}: has no line per kernel, which {paths[0]} has; read them one at a time")
    return _timeline(traced)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _columns(line: str) -> tuple[list[str], dict[str, float]]:
    """Names of columns without their unit of time, and the seconds in it."""
    try:
        named = _named(next(csv.reader([line]), []))
    except csv.Error:
        return [], {}
    return named if len(named[0]) > 1 else _named(_apart(line))


def _apart(line: str, most: int = 0) -> list[str]:
    """Cells of a page, which two blanks part, at most so many."""
    return re.split(r"[ \t]{2,}", line.strip(), maxsplit=max(most - 1, 0))


def _as_csv(text: str) -> str:
    """A text whose tables of columns on a page are CSV, line by line; where none is it stays as it is."""
    lines = text.splitlines()
    if not any(map(_RULE.match, lines)):
        return text
    made = io.StringIO()
    write = csv.writer(made, lineterminator="\n").writerow
    columns = 0
    for before, line in zip(["", *lines], lines, strict=False):
        if _RULE.match(line):
            names = _apart(before)
            columns = len(names)
            write(names)
        elif columns and line.strip():
            cells = _apart(line, columns)
            write([cell.replace(",", "") if _AMOUNT.fullmatch(cell) else cell for cell in cells])
        else:
            columns = 0
            made.write("\n" if _is_page_head(line) else f"{line}\n")
    return made.getvalue()


def _is_page_head(line: str) -> bool:
    """Whether a line has the names of columns on a page, which come again with the line below them."""
    return "," not in line and "Name" in line and len(_apart(line)) > 1


def _named(cells: Sequence[str]) -> tuple[list[str], dict[str, float]]:
    names = []
    units = {}
    for cell in cells:
        match = _TIME.fullmatch(cell.strip())
        name, unit = (match[1], match[2]) if match else _OF_OTHERS.get(cell.strip(), (cell.strip(), ""))
        if unit:
            units[name] = _UNITS.get(unit, 0.0)
        names.append(name)
    return names, units


def _tables(path: Path) -> Iterator[_Table]:
    """The tables of a file that are read, each up to the first line that is none of it."""
    table: _Table | None = None
    for number, cells in enumerate(csv_rows(_as_csv(files.log(path)), str(path), TraceError), start=1):
        names, units = _named(cells)
        if _is_trace(names) or _is_sum(names):
            if table is not None:
                yield table
            unknown = next((name for name in names if name in _TIMES and not units.get(name)), None)
            if unknown is not None:
                raise TraceError(f"{path}:{number}: the column {unknown!r} has no unit of time that is known")
            table = _Table(names, units)
        elif table is not None and len(cells) == len(table.names):
            table.rows.append((number, cells))
        elif table is not None and len(cells) > 1:
            table.cut.append(number)
        elif table is not None:
            yield table
            table = None
    if table is not None:
        yield table


def _seconds(table: _Table, row: dict[str, str], name: str, line_name: str) -> float:
    try:
        number = float(row[name])
    except ValueError:
        number = float("nan")
    seconds = number * table.units.get(name, 1.0)
    if not (isfinite(number) and 0 <= seconds < MOST):
        raise TraceError(f"{line_name}: {name} is {short(row[name])!r}, not a time >= 0")
    return seconds


# ---- a trace ---------------------------------------------------------------------------------------------------------


def _timeline(traced: dict[Path, list[_Table]]) -> Timeline:
    """Devices as ranks, in the order of the files and of the devices in each."""
    lines: defaultdict[tuple[int, int], list[tuple[dict[str, str], float, float]]] = defaultdict(list)
    for order, (path, tables) in enumerate(traced.items()):
        for table in tables:
            counted: set[tuple[str, ...]] = set()
            for number, cells in table.rows:
                row = dict(zip(table.names, cells, strict=True))
                if _again(row, counted):
                    continue
                match = _DEVICE.match(row["Device"])
                times = _times(table, row, f"{path}:{number}")
                lines[order, int(match[2] or match[3]) if match else 0].append((row, *times))
    paths = list(traced)
    if not lines:
        raise TraceError(f"{paths[0]}: a header and no lines: no kernel was recorded")
    traces = []
    for rank, (order, device) in enumerate(sorted(lines)):
        trace = RankTrace(rank, len(lines), str(paths[order]), host=str(paths[order]))
        for row, start, end in lines[order, device]:
            _take(trace, row, start, end)
        if len(paths) > 1:
            trace.skipped["the clock of a report: each file counts from its own start"] += 1
        traces.append(trace)
    if cut := sum(len(table.cut) for tables in traced.values() for table in tables):
        traces[0].skipped[_CUT] = cut
    return join(traces, ", ".join(map(str, paths)))


def _again(row: dict[str, str], counted: set[tuple[str, ...]]) -> bool:
    """Whether a row is another counter's of a kernel that a row before it is of; the kernel is then counted."""
    if "Counter_Name" not in row or "Dispatch_Id" not in row:
        return False
    key = tuple(row.get(name, "") for name in _DISPATCH)
    seen = key in counted
    counted.add(key)
    return seen


def _times(table: _Table, row: dict[str, str], line_name: str) -> tuple[float, float]:
    start = _seconds(table, row, "Start", line_name)
    if "Duration" in table.names:
        return start, start + _seconds(table, row, "Duration", line_name)
    end = _seconds(table, row, "End", line_name)
    if end < start:
        raise TraceError(f"{line_name}: End is {short(row['End'])!r}, before Start, {short(row['Start'])!r}")
    return start, end


def _take(trace: RankTrace, row: dict[str, str], start: float, end: float) -> None:
    name = row["Name"]
    match = _DEVICE.match(row["Device"])
    trace.device = match[1] if match and match[2] else ""
    seen = unsized(name, start, end, 0, trace.rank, trace.world)
    if seen is None and LIBRARY_KERNEL.match(name):
        trace.skipped[UNNAMED] += 1  # RCCL's, of which all collectives have one
    elif seen is None:
        word = "Memcpy" if "memcpy" in name else "Memset" if "memset" in name else name
        trace.work.append(ProfiledWork(word, f"stream {row['Strm']}", start, end, float("nan"), 0))
    else:
        trace.skipped[UNSIZED] += 1
        trace.seen.append(seen)


# ---- a summary -------------------------------------------------------------------------------------------------------


def _summed(tables: dict[Path, list[_Table]]) -> KernelSums:
    sums: dict[str, KernelSum] = {}
    for path, of_file in tables.items():
        for table in of_file:
            for number, cells in table.rows:
                row = dict(zip(table.names, cells, strict=True))
                line_name = f"{path}:{number}"
                if not row["Instances"].isdecimal() or len(row["Instances"]) > 15:
                    raise TraceError(f"{line_name}: Instances is {short(row['Instances'])!r}, not a whole number")
                before = sums.get(row["Name"], KernelSum(row["Name"], 0, 0.0))
                total = before.total_s + _seconds(table, row, "Total Time", line_name)
                sums[row["Name"]] = KernelSum(row["Name"], before.count + int(row["Instances"]), total)
    if not sums:
        raise TraceError(f"{next(iter(tables))}: no kernel in a table that is known; {_READ}")
    if all(map(_DOMAINS.match, sums)):
        raise TraceError(
            f"{next(iter(tables))}: is of whole domains of rocprofv3, not of kernels; give kernel_stats.csv"
        )
    if all(map(_CALLS.match, sums)):
        raise TraceError(f"{next(iter(tables))}: is of calls of HIP, HSA or CUDA, not of kernels")
    kernels = sorted(sums.values(), key=lambda kernel: -kernel.total_s)
    cut = sum(len(table.cut) for of_file in tables.values() for table in of_file)
    return KernelSums(", ".join(map(str, tables)), list(_lines(kernels)), kernels, {_CUT: cut} if cut else {})


def _lines(kernels: Sequence[KernelSum]) -> Iterator[str]:
    total = sum(kernel.total_s for kernel in kernels)
    nccl = sum(kernel.total_s for kernel in kernels if LIBRARY_KERNEL.match(kernel.name))
    yield (
        f"kernels run for {format_time(total)} in all, of every device and stream together; NCCL's for "
        f"{nccl / total if total else 0.0:.1%} of that, the wait for peers included"
    )
    for kernel in kernels[:SHOWN]:
        share = kernel.total_s / total if total else 0.0
        mean = format_time(kernel.total_s / kernel.count) if kernel.count else "-"
        yield f"  {share:6.1%} {kernel.count:>8d} x {mean:>10s}  {short(kernel.name)}"
    if len(kernels) > SHOWN:
        yield f"... and {len(kernels) - SHOWN} more kernels"
    yield "when each ran, and so what waits, a summary does not say: a trace does (cuda_gpu_trace, kernel_trace.csv)"
