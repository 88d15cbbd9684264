"""Benchmarks and monitors that write a JSON object a line: NCCL's inspector plugin, rccl-tests ``-Z json``.

The inspector (``ext-profiler/inspector`` of NCCL, format 4) writes a line per rank and collective, whose size is what a
rank puts in or gets out: S/n of an all_gather and a reduce_scatter. Its time holds waiting for peers, so of the ranks
that wrote one collective the shortest counts, and the rest is skew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table
from clustersim.files.traces import prefixes
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, dtype_of, joined, kind_of

Inspected: TypeAlias = defaultdict[tuple[str, int, str], list[tuple[Sample, float]]]
"""Communicator, number and kind -> what each rank wrote of it, and its bus bandwidth."""
_WANTED = r"\{\""
LONGEST = 16 * 1024
"""Bytes of a first line that is looked at behind a prefix."""


def sniff(head: Head) -> Likeness:
    """Whether the first line is one of the inspector or of rccl-tests."""
    first = head.data[:LONGEST].lstrip().partition(b"\n")[0]
    if first and first[:1] != b"{":
        head = Head(prefixes.stripped(first.decode("utf-8", errors="replace"), _WANTED).encode())
    inspected = head.holds("coll_perf", "coll")
    benched = {"algBw", "busBw", "size", "time"} <= head.members.keys()
    named = benched or "coll_perf" in head.members
    return likeness(named=named, shaped=(inspected or benched) and head.is_row)


def read(paths: Sequence[Path]) -> Samples:
    """The collectives of these files. Raises :class:`TraceError` where none has a line that can be read."""
    sieves: list[Samples] = []
    seen: Inspected = defaultdict(list)
    monitor = SampleSieve()
    for path in paths:
        sieve = SampleSieve()
        for number, line in enumerate(prefixes.lines(path, _WANTED), start=1):
            if line.strip():
                _line(line, f"{path}:{number}", str(path), sieve, seen)
        sieves.append(sieve.done(str(path)))
    for rows in seen.values():
        row, busbw = min(rows, key=lambda pair: pair[0].seconds)
        times = [sample.seconds for sample, _ in rows]
        several = len(rows) > 1
        skew = max(times) - min(times) if several else math.nan
        monitor.add(replace(row, skew=skew, last=row.last if several else -1), busbw)
    samples = joined([*sieves, monitor.done(str(paths[0]))] if seen else sieves)
    if not samples.rows and not samples.skipped:
        raise TraceError(f"{paths[0]}: no line with a collective")
    return samples


def _line(line: str, source: str, path: str, sieve: SampleSieve, seen: Inspected) -> None:
    try:
        record: Table = msgspec.json.decode(line, type=Table)
        if "coll_perf" in record:
            row, busbw = _inspected(record, source, path)
            key = str(record["header"]["id"]), int(record["coll_perf"]["coll_sn"]), row.kind
            seen[key].append((row, busbw))
        elif str(record["#wrong"]) not in ("0", "N/A"):
            sieve.skip("a row whose results came out wrong")
        elif not record.get("inPlace"):
            sieve.add(*_benched(record, source, path))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        sieve.skip("a line that is cut off")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        sieve.skip(f"a line that is not a measured collective ({str(error)[:60]})")


def _kind(name: object) -> str:
    kind = kind_of(str(name))
    if kind is None:
        raise ValueError(f"no collective {str(name)[:20]}")
    return kind


def _inspected(record: Table, source: str, path: str) -> tuple[Sample, float]:
    head = record["header"]
    perf = record["coll_perf"]
    about = record.get("metadata") or {}
    kind = _kind(perf["coll"])
    ranks = int(head["n_ranks"])
    nbytes = float(perf["coll_msg_size_bytes"]) * (ranks if kind in ("all_gather", "reduce_scatter") else 1)
    version = str(about.get("inspector_output_format_version", ""))
    row = Sample(
        kind,
        nbytes,
        float(perf["coll_exec_time_us"]) * 1e-6,
        ranks,
        nodes=int(head.get("nnodes") or 0),
        last=int(head.get("rank", -1)),
        source=source,
        case=f"{path} {kind}",
        platform=f"inspector {version}".strip(),
    )
    return row, float(perf.get("coll_busbw_gbs", math.nan)) * 1e9


def _benched(record: Table, source: str, path: str) -> tuple[Sample, float]:
    kind = _kind(record["name"])
    dtype = dtype_of(str(record["type"])) or "fp32"
    ranks = int(record.get("ranks") or 1) * int(record.get("gpusPerRank") or record.get("gpus") or 1)
    row = Sample(
        kind,
        float(record["size"]),
        float(record["time"]) * 1e-6,
        ranks,
        dtype,
        redop=str(record.get("redop", "")).replace("none", ""),
        nodes=int(record.get("nodes") or 0),
        source=source,
        case=f"{path} {kind}",
    )
    return row, float(record["busBw"]) * 1e9
