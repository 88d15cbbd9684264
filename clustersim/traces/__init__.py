"""Files <-> Timeline, Samples or what a log tells. A format is a row: how to know it by content, read it, write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from clustersim.errors import TraceError, nearest
from clustersim.timeline import Timeline
from clustersim.traces import (
    captured,
    deepspeed,
    files,
    flight_recorder,
    json_lines,
    kineto,
    nccl_debug,
    nccl_tests_log,
    nsys,
    perfetto,
    pftrace,
    pipeline_csv,
    saved,
    spans_csv,
    tables,
)
from clustersim.traces.profiled import backend_of
from clustersim.traces.samples import Sample, Samples, joined
from clustersim.traces.told import Told

__all__ = ["FORMATS", "Format", "Sample", "Samples", "Told", "backend_of", "read", "sniff", "write"]


@dataclass(frozen=True)
class Format:
    """A trace format.

    Parameters
    ----------
    name : str. what : in words, for messages.
    suffixes : ends of names it is written to. write : ``(timeline, path, ranks) -> ranks written``; None: not written.
    takes_memory : ``write`` also takes ``memory``, bytes held while an op of that name runs, for a counter.
    sniff : whether the first bytes of a file (decompressed) are this format's.
    read : ``paths -> Timeline, Samples or Told``. None: not read.
    """

    name: str
    what: str
    suffixes: tuple[str, ...] = ()
    write: Callable[..., tuple[int, ...]] | None = None
    takes_memory: bool = False
    sniff: Callable[[bytes], bool] | None = None
    read: Callable[[Sequence[Path]], Timeline | Samples | Told] | None = None


def _each(read_one: Callable[[Path], Samples]) -> Callable[[Sequence[Path]], Samples]:
    return lambda paths: joined(map(read_one, paths))


_ROWS = (
    Format("hta", "Chrome JSON for HolisticTraceAnalysis", (".hta.json", ".hta.json.gz"), perfetto.write_hta_trace),
    Format("chrome", "Chrome JSON", (".json", ".json.gz"), perfetto.write_chrome_trace, takes_memory=True),
    Format("pftrace", "Perfetto protobuf", (".pftrace", ".perfetto-trace"), pftrace.write_pftrace, takes_memory=True),
    Format("csv", "CSV of spans", (".csv", ".csv.gz"), spans_csv.write_csv),
    Format("run", "saved run", sniff=saved.sniff, read=saved.read),
    Format("capture", "clustersim capture", sniff=captured.sniff, read=captured.read),
    Format("nsys", "Nsight Systems sqlite export", sniff=nsys.sniff, read=nsys.read),
    Format("nccl_tests_json", "nccl-tests -J", sniff=nccl_tests_log.sniff_json, read=_each(nccl_tests_log.read_json)),
    Format("flight_recorder", "Flight Recorder dump", sniff=flight_recorder.sniff, read=flight_recorder.read),
    Format("json_lines", "inspector or rccl-tests JSON lines", sniff=json_lines.sniff, read=json_lines.read),
    Format("kineto", "PyTorch profiler trace", sniff=kineto.sniff, read=kineto.read),
    Format("pipeline", "folder of ops.csv and steps.csv", sniff=pipeline_csv.sniff, read=pipeline_csv.read),
    Format("table", "CSV table of collectives", sniff=tables.sniff, read=_each(tables.read)),
    Format("nccl_tests", "nccl-tests log", sniff=nccl_tests_log.sniff, read=_each(nccl_tests_log.read)),
    Format("nccl_debug", "NCCL_DEBUG=INFO log", sniff=nccl_debug.sniff, read=nccl_debug.read),
    Format("deepspeed", "DeepSpeed comms log", sniff=deepspeed.sniff, read=_each(deepspeed.read)),
)

FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}
"""Every format by name; files are tried against the sniffers in this order."""


def write(
    timeline: Timeline,
    path: str | Path,
    ranks: Sequence[int] | None = None,
    memory: Mapping[str, float] | None = None,
) -> tuple[int, ...]:
    """Write a trace in the format its name ends with; returns the ranks written. Raises :class:`TraceError`.

    ``memory`` [bytes held while an op of that name runs] becomes a counter in formats that have counters.
    """
    for row in FORMATS.values():
        if row.write is not None and str(path).endswith(row.suffixes):
            more = {"memory": memory} if row.takes_memory else {}
            return row.write(timeline, path, ranks, **more)
    known = ", ".join(suffix for row in FORMATS.values() for suffix in row.suffixes)
    raise TraceError(f"{path}: no trace format has this ending; known: {known}")


def sniff(path: str | Path) -> Format:
    """The format of a file, by its content. Raises :class:`TraceError` where it is none that can be read."""
    head = files.head(Path(path))
    for row in FORMATS.values():
        if row.sniff is not None and row.sniff(head):
            return row
    known = ", ".join(row.what for row in FORMATS.values() if row.read)
    raise TraceError(f"{path}: no format that is known by its content; can be read: {known}")


def read(paths: str | Path | Sequence[str | Path], format: str | None = None) -> Timeline | Samples | Told:
    """What others measured: a profile becomes a Timeline, a benchmark's table Samples, another log Told.

    paths : a file, several files of one run (one per rank), or folders of them.
    format : a name in :data:`FORMATS`; None looks at the content.

    Raises :class:`TraceError` for a file that cannot be read, and for files of different formats.
    """
    found = files.files_of(paths)
    if format is not None and format not in FORMATS:
        raise TraceError(f"no trace format {format!r}; {nearest(format, FORMATS)}")
    rows = {path: FORMATS[format] if format is not None else sniff(path) for path in found}
    first = rows[found[0]]
    for path, row in rows.items():
        if row is not first:
            raise TraceError(f"{path} is a {row.what}, {found[0]} a {first.what}; read them one at a time")
    if first.read is None:
        raise TraceError(f"{found[0]}: the format {first.name!r} can only be written")
    try:
        return first.read(found)
    except ValueError as wrong:
        if "integer string conversion" not in str(wrong):  # Python's own limit, wherever a format has a number
            raise
        raise TraceError(f"{found[0]}: not a {first.what}: a whole number has thousands of digits") from None
