"""Nsight Systems' reports as CSV (``nsys stats --report cuda_gpu_trace --format csv``, and cuda_gpu_kern_sum).

A trace has a line per kernel and copy: when, how long, on which device and stream. A device is a rank. It says neither
what launched a kernel nor how many bytes NCCL's kernels move, nor among whom: those are kept as times that hold the
wait for peers. A summary has a line per kernel: how often and how long, of all devices together. What ``nsys stats``
prints around its tables is passed over (docs.nvidia.com/nsight-systems, "Available Stats Reports").
"""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
from clustersim.files.traces.profiled import ProfiledWork, RankCollective, RankTrace
from clustersim.files.traces.samples import kind_of
from clustersim.files.traces.told import KernelSum, KernelSums

_UNITS = {"": 1.0, "s": 1.0, "sec": 1.0, "ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6, "ns": 1e-9, "nsec": 1e-9}
_TIME = re.compile(r"(Start|Duration|Total Time|Avg|Average|Min|Minimum|Max|Maximum) ?\((\w+)\)")
_SHORT = {"Average": "Avg", "Minimum": "Min", "Maximum": "Max"}
_TRACE = {"Start", "Duration", "Device", "Strm", "Name"}
_SUM = {"Total Time", "Instances", "Name"}
_DEVICE = re.compile(r"^(.*?)\s*\((\d{1,6})\)$")
_NCCL = re.compile(r"(?:void )?(?:nccl|rccl)\w*?_([A-Za-z]+?)(?:_|\(|$)")
_UNTOLD = (
    "sizes and groups of NCCL's kernels, which a CSV does not tell: what is transferring holds the wait for peers "
    "(`nsys export --type sqlite` of a profile with -t cuda,nvtx tells them)"
)
_CUT = "a line that is cut off"
SHOWN = 20
"""Kernels that a summary lists."""
_READ = "of `nsys stats --format csv`, cuda_gpu_trace and cuda_gpu_kern_sum are read"


@dataclass(frozen=True)
class _Table:
    """A table of a report: the names of its columns without units, seconds in one unit of each, its rows, and the lines
    that have fewer cells."""

    names: list[str]
    units: dict[str, float]
    rows: list[tuple[int, list[str]]]
    cut: list[int]


def sniff(head: Head) -> Likeness:
    """Whether a line is the header of one of Nsight's tables; of another report, as what its lines around say."""
    names = [set(_columns(line)[0]) for line in head.text.splitlines() if "Name" in line]
    shaped = any(each >= _TRACE or each >= _SUM for each in names)
    return likeness(named=any({"Time (%)", "Total Time"} <= each for each in names), shaped=shaped)


def read(paths: Sequence[Path]) -> Timeline | KernelSums:
    """The run of these traces, or what summaries say. Raises :class:`TraceError` for other reports."""
    tables = {path: list(_tables(path)) for path in paths}
    traced = {path: [t for t in each if set(t.names) >= _TRACE] for path, each in tables.items()}
    if not any(traced.values()):
        return _summed(tables)
    bare = next((path for path, each in traced.items() if not each), None)
    if bare is not None:
        raise TraceError(f"{bare}: has no cuda_gpu_trace, which {paths[0]} has; read them one at a time")
    return _timeline(traced)


# ---- tables ----------------------------------------------------------------------------------------------------------


def _columns(line: str) -> tuple[list[str], dict[str, float]]:
    """Names of columns without their unit of time, and the seconds in it."""
    try:
        cells = next(csv.reader([line]), [])
    except csv.Error:
        return [], {}
    names = []
    units = {}
    for cell in cells:
        match = _TIME.fullmatch(cell.strip())
        name = _SHORT.get(match[1], match[1]) if match else cell.strip()
        if match:
            units[name] = _UNITS.get(match[2], 0.0)
        names.append(name)
    return names, units


def _tables(path: Path) -> Iterator[_Table]:
    """The tables of a file that are read, each up to the first line that has other columns."""
    table: _Table | None = None
    for number, cells in enumerate(csv_rows(files.log(path), str(path), TraceError), start=1):
        names, units = _columns(_line(cells)) if "Name" in cells else ([], {})
        if set(names) >= _TRACE or set(names) >= _SUM:
            if table is not None:
                yield table
            unknown = next((name for name, unit in units.items() if not unit), None)
            if unknown is not None:
                raise TraceError(f"{path}:{number}: the column {unknown!r} has no unit of time that is known")
            table = _Table(names, units, [], [])
        elif table is not None and len(cells) == len(table.names):
            table.rows.append((number, cells))
        elif table is not None and len(cells) > 1:
            table.cut.append(number)
        elif table is not None:
            yield table
            table = None
    if table is not None:
        yield table


def _line(cells: Sequence[str]) -> str:
    return ",".join(f'"{cell}"' if "," in cell else cell for cell in cells)


def _seconds(table: _Table, row: dict[str, str], name: str, where: str) -> float:
    try:
        number = float(row[name])
    except ValueError:
        number = float("nan")
    if not (isfinite(number) and 0 <= number < MOST):
        raise TraceError(f"{where}: {name} is {short(row[name])!r}, not a time >= 0")
    return number * table.units.get(name, 1.0)


# ---- a trace ---------------------------------------------------------------------------------------------------------


def _timeline(traced: dict[Path, list[_Table]]) -> Timeline:
    """Devices as ranks, in the order of the files and of the devices in each."""
    of_device: defaultdict[tuple[int, int], RankTrace] = defaultdict(lambda: RankTrace(0, 0, ""))
    for order, (path, tables) in enumerate(traced.items()):
        for table in tables:
            for number, cells in table.rows:
                row = dict(zip(table.names, cells, strict=True))
                where = f"{path}:{number}"
                match = _DEVICE.match(row["Device"])
                trace = of_device[order, int(match[2]) if match else 0]
                trace.source, trace.host, trace.device = str(path), str(path), match[1] if match else row["Device"]
                start = _seconds(table, row, "Start", where)
                _take(trace, row, start, start + _seconds(table, row, "Duration", where))
    if not of_device:
        raise TraceError(f"{next(iter(traced))}: cuda_gpu_trace has a header and no lines: no kernel was recorded")
    traces = [trace for _, trace in sorted(of_device.items(), key=lambda pair: pair[0])]
    for rank, trace in enumerate(traces):
        trace.rank, trace.world = rank, len(traces)
        trace.seen = [_of_group(seen, rank, len(traces)) for seen in trace.seen]
        if trace.seen:
            trace.skipped[_UNTOLD] += 1
        if len(traced) > 1:
            trace.skipped["the clock of a report: each file counts from its own start"] += 1
    if cut := sum(len(table.cut) for tables in traced.values() for table in tables):
        traces[0].skipped[_CUT] = cut
    return join(traces, ", ".join(map(str, traced)))


def _take(trace: RankTrace, row: dict[str, str], start: float, end: float) -> None:
    name = row["Name"]
    match = _NCCL.match(name)
    kind = (kind_of(match[1]) or kind_of(_snake(match[1]))) if match else None
    if kind is None:
        word = "Memcpy" if "memcpy" in name else "Memset" if "memset" in name else name
        trace.work.append(ProfiledWork(word, f"stream {row['Strm']}", start, end, float("nan"), 0))
    else:
        trace.seen.append(RankCollective(kind, start, end, 0.0, "", 0, kernel=name))


def _snake(word: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower()


def _of_group(seen: RankCollective, rank: int, world: int) -> RankCollective:
    """In a group that no other rank is known to be in: kernels of ranks are not matched by guess."""
    size = max(world, 2)
    group = f"of rank {rank}"
    return RankCollective(seen.kind, seen.start, seen.end, 0.0, group, size, (rank,), kernel=seen.kernel)


# ---- a summary -------------------------------------------------------------------------------------------------------


def _summed(tables: dict[Path, list[_Table]]) -> KernelSums:
    sums: dict[str, KernelSum] = {}
    for path, each in tables.items():
        for table in each:
            for number, cells in table.rows:
                row = dict(zip(table.names, cells, strict=True))
                where = f"{path}:{number}"
                if not row["Instances"].isdecimal() or len(row["Instances"]) > 15:
                    raise TraceError(f"{where}: Instances is {short(row['Instances'])!r}, not a whole number")
                before = sums.get(row["Name"], KernelSum(row["Name"], 0, 0.0))
                total = before.total_s + _seconds(table, row, "Total Time", where)
                sums[row["Name"]] = KernelSum(row["Name"], before.count + int(row["Instances"]), total)
    if not sums:
        raise TraceError(f"{next(iter(tables))}: no kernel in a table that is known; {_READ}")
    kernels = sorted(sums.values(), key=lambda kernel: -kernel.total_s)
    cut = sum(len(table.cut) for each in tables.values() for table in each)
    return KernelSums(", ".join(map(str, tables)), list(_lines(kernels)), kernels, {_CUT: cut} if cut else {})


def _lines(kernels: Sequence[KernelSum]) -> Iterator[str]:
    whole = sum(kernel.total_s for kernel in kernels)
    nccl = sum(kernel.total_s for kernel in kernels if _NCCL.match(kernel.name))
    yield (
        f"kernels run for {format_time(whole)} in all, of every device and stream together; NCCL's for "
        f"{nccl / whole if whole else 0.0:.1%} of that, the wait for peers included"
    )
    for kernel in kernels[:SHOWN]:
        share = kernel.total_s / whole if whole else 0.0
        mean = format_time(kernel.total_s / kernel.count) if kernel.count else "-"
        yield f"  {share:6.1%} {kernel.count:>8d} x {mean:>10s}  {short(kernel.name)}"
    if len(kernels) > SHOWN:
        yield f"... and {len(kernels) - SHOWN} more kernels"
    yield "when each ran, and so what waits, a summary does not say: `nsys stats --report cuda_gpu_trace` does"
