"""Tables of measured collectives: ``nccl_tests.csv``, a sweep with times in nanoseconds, TraceLens' summaries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clustersim.core.errors import TraceError
from clustersim.core.program import DTYPE_BYTES
from clustersim.core.texts import csv_rows
from clustersim.files.traces import files
from clustersim.files.traces.csv_table import header
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, kind_of, told_launch

Row = dict[str, str]


def sniff(head: Head) -> Likeness:
    """Whether the first line is the header of a table known here."""
    return likeness(named=False, shaped=_dialect(header(head.data)) is not None)


def _dialect(header: list[str]) -> Callable[[Row, SampleSieve, str, Path], None] | None:
    names = set(header)
    if names >= {"collective", "size_bytes", "time_us", "ranks"}:
        return _nccl_tests_row
    if names >= {"collective", "size", "type", "inplace", "time", "busbw"}:
        return _rccl_tests_row
    if names >= {"size(B)", "count", "type", "time(ns)"}:
        return _sweep_row
    if names >= {"Collective name", "dtype", "In msg nelems", "Group size", "comm_latency_mean"}:
        return _tracelens_row
    return None


def read(path: Path) -> Samples:
    """The rows of a table. Raises :class:`TraceError` for a header that is not known."""
    text = files.text(path)
    names = header(text[: files.HEAD].encode())
    take = _dialect(names)
    if take is None:
        raise TraceError(f"{path}: the header {names[:6]} is of no table known here")
    lines = csv_rows(text, str(path), TraceError)
    # A sweep has two columns called time(ns): the second is in place.
    names = [f"{name}{'' if name not in names[:i] else ' in place'}" for i, name in enumerate(names)]
    sieve = SampleSieve()
    next(lines)
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(names):
            sieve.skip("a row whose number of fields differs from the header's")
            continue
        try:
            take(dict(zip(names, cells, strict=True)), sieve, f"{path}:{number}", path)
        except (ValueError, KeyError, ZeroDivisionError) as error:
            sieve.skip(f"a field that is no number ({error})")
    return sieve.done(str(path))


def _nccl_tests_row(row: Row, sieve: SampleSieve, source: str, path: Path) -> None:
    """A row of ``nccl_tests.csv``: nccl-tests' columns, and what the machine was."""
    kind = kind_of(row["collective"])
    dtype = dtype_of(row.get("dtype") or "float")
    if kind is None or dtype is None:
        return sieve.skip("a collective or element type that is not known")
    sample = Sample(
        kind=kind,
        nbytes=float(row["size_bytes"]),
        seconds=float(row["time_us"]) * 1e-6,
        ranks=int(row["ranks"]),
        dtype=dtype,
        nodes=int(row.get("nodes") or 0),
        seconds_in_place=float(row.get("time_us_inplace") or "nan") * 1e-6,
        version=row.get("nccl_version", ""),
        env=row.get("env", ""),
        device=row.get("gpu", ""),
        platform=row.get("platform", ""),
        launch=row.get("launch") or told_launch(row.get("notes", ""), row.get("env", "")),
        topology=row.get("topology", ""),
        skew=float(row.get("skew_us") or "nan") * 1e-6,
        source=row.get("source") or source,
        case=row.get("case_id") or f"{path} {kind}",
    )
    return sieve.add(sample, float(row.get("busbw_GBps") or "nan") * 1e9)


def _rccl_tests_row(row: Row, sieve: SampleSieve, source: str, path: Path) -> None:
    """A row of ``rccl-tests -Z csv``: once out of place and once in place, of which the first is taken."""
    kind = kind_of(row["collective"])
    dtype = dtype_of(row["type"])
    if kind is None or dtype is None:
        return sieve.skip("a collective or element type that is not known")
    if row.get("#wrong", "0") not in ("0", "N/A", ""):
        return sieve.skip("a row whose results came out wrong")
    if row["inplace"] not in ("0", "false"):
        return None
    ranks = int(row.get("ranks") or 1) * int(row.get("gpusPerRank") or row.get("gpus") or 1)
    sample = Sample(
        kind=kind,
        nbytes=float(row["size"]),
        seconds=float(row["time"]) * 1e-6,
        ranks=ranks,
        dtype=dtype,
        nodes=int(row.get("nodes") or 0),
        redop=row.get("redop", "").replace("none", ""),
        source=source,
        case=f"{path} {kind}",
    )
    return sieve.add(sample, float(row["busbw"]) * 1e9)


def _sweep_row(row: Row, sieve: SampleSieve, source: str, path: Path) -> None:
    """A row with times in nanoseconds and no rank column: all_reduce's bus factor 2 (n-1)/n says how many ranks."""
    size = float(row["size(B)"])
    seconds = float(row["time(ns)"]) * 1e-9
    busbw = float(row["busbw(GB/s)"]) * 1e9
    factor = busbw * seconds / size
    dtype = dtype_of(row["type"])
    if not 0.9 < factor < 2 or dtype is None:
        return sieve.skip("a bus factor that is not all_reduce's, so the number of ranks is unknown")
    sample = Sample(
        kind="all_reduce",
        nbytes=size,
        seconds=seconds,
        ranks=round(2 / (2 - factor)),
        dtype=dtype,
        redop="sum",
        seconds_in_place=float(row["time(ns) in place"]) * 1e-9 if "time(ns) in place" in row else float("nan"),
        source=source,
        case=str(path),
    )
    return sieve.add(sample, busbw)


def _tracelens_row(row: Row, sieve: SampleSieve, source: str, path: Path) -> None:
    """A row of TraceLens' implicit-sync summary: the transfer without waiting, and how far starts lie apart."""
    kind = kind_of(row["Collective name"])
    dtype = dtype_of(row["dtype"])
    if kind is None or dtype is None:
        return sieve.skip("a collective or element type that is not known")
    ranks = int(row["Group size"])
    nbytes = float(row["In msg nelems"]) * DTYPE_BYTES[dtype] * (ranks if kind == "all_gather" else 1)
    sample = Sample(
        kind=kind,
        nbytes=nbytes,
        seconds=float(row["comm_latency_mean"]) * 1e-6,
        ranks=ranks,
        dtype=dtype,
        skew=float(row.get("skew in start time_mean") or "nan") * 1e-6,
        count=int(float(row.get("count") or 0)),
        source=source,
        case=str(path),
    )
    return sieve.add(sample)  # its "GB/s" are of 2^30 bytes, so they are not compared
