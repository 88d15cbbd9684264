"""DeepSpeed's comms logger: the summary table of ``dist.log_summary()``, and the line of each op when verbose.

The message size printed is the rank's own tensor (deepspeed/utils/comms_logging.py: calc_bw_log multiplies it by the
world size for all_gather and reduce_scatter), rounded to two decimals of a binary prefix. The world size is not
printed; it follows from busbw / tput where those say enough.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeAlias

from clustersim.core.errors import TraceError
from clustersim.files.traces import prefixes
from clustersim.files.traces.heads import Head, Likeness, likeness
from clustersim.files.traces.samples import Sample, Samples, SampleSieve, kind_of

_SIZE = {"B": 1.0, "KB": 2.0**10, "MB": 2.0**20, "GB": 2.0**30, "TB": 2.0**40}
_NUMBER = r"\d+\.?\d*(?![\d.])"
_LINE = re.compile(
    rf"comm op:\s*(?P<op>[\w ]+?)\s*\|\s*time \(ms\):\s*(?P<ms>{_NUMBER})\s*\|\s*msg size:\s*(?P<size>{_NUMBER})\s*"
    rf"(?P<unit>[KMGT]?B)\s*\|\s*algbw \(Gbps\):\s*(?P<algbw>{_NUMBER})\s*\|\s*busbw \(Gbps\):\s*(?P<busbw>{_NUMBER})"
)
_ROW = re.compile(rf"^\s+(?P<size>{_NUMBER})\s*(?P<unit>[KMGT]?B)\s+(?P<count>\d+)(?P<numbers>(?:\s+{_NUMBER}){{2,8}})")
_COLUMN = re.compile(
    r"Total Latency\(ms\)|Avg Latency\(ms\)|tput_avg \(Gbps\)|busbw_avg \(Gbps\)|"
    r"(?:Total|Avg) (?:comm lat|straggler)\(ms\)"
)
_COLUMNS = ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
"""Of the table; of one with stragglers there are more, and a second table has no bandwidths."""
_WANTED = r"\s{2,}[\d.]+\s*[KMGT]?B\s+\d|Comm\. Op|[A-Za-z_]\w*\s*$"
_HEADER = re.compile(r"Comm\. Op\s+Message Size\s+Count")
_PER_RANK = {"all_gather", "reduce_scatter"}
CommsRow: TypeAlias = Mapping[str, str]
"""Words of a line, by the names that :data:`_LINE` has for them; ``count`` of a table alone."""


def sniff(head: Head) -> Likeness:
    """Whether this is a log with DeepSpeed's comms in it."""
    named = "comm op:" in head.text or "Comm. Op" in head.text
    if named and (_LINE.search(head.text) or _HEADER.search(head.text)):
        return Likeness.AMONG
    return likeness(named=named, shaped=False)


def read(path: Path) -> Samples:
    """The comms of a log. Raises :class:`TraceError` for one without any."""
    matches: list[tuple[str, CommsRow, int]] = []
    op = ""
    inside = False
    columns: Sequence[str] = _COLUMNS
    for number, line in enumerate(prefixes.lines(path, _WANTED), start=1):
        if match := _LINE.search(line):
            matches.append((match.group("op"), match.groupdict(), number))
        elif "Comm. Op" in line:
            inside = True
            columns = _COLUMN.findall(line) or _COLUMNS
        elif inside and (matched := _ROW.match(line)):
            row = _of_table(matched, columns)
            matches += [(op, row, number)] if row else []
        elif inside and re.fullmatch(r"\w+", line.strip()):
            op = line.strip()
    if not matches:
        raise TraceError(f"{path}: no line and no table of DeepSpeed's comms logger; set comms_logger.enabled, verbose")
    # The table sums up the lines before it: with both, the lines would count twice.
    rows = [match for match in matches if "count" in match[1]] or matches
    sieve = SampleSieve()
    world = _world(rows)
    for name, row, number in rows:
        _keep(name, row, world, sieve, f"{path}:{number}", str(path))
    notes = () if world else (f"{path}: the world size is not printed and does not follow from the bandwidths",)
    return sieve.done(str(path), notes)


def _of_table(matched: re.Match[str], columns: Sequence[str]) -> CommsRow | None:
    """A row of a table with these columns; None where it has no bandwidths, as the second one of stragglers, whose rows
    are those of the first."""
    numbers = dict(zip(columns, matched["numbers"].split(), strict=False))
    names = {"ms": "Avg Latency(ms)", "algbw": "tput_avg (Gbps)", "busbw": "busbw_avg (Gbps)"}
    if not numbers.keys() >= set(names.values()):
        return None
    return {"size": matched["size"], "unit": matched["unit"], "count": matched["count"]} | {
        name: numbers[column] for name, column in names.items()
    }


SHARED = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all"}
"""Kinds whose two bandwidths differ by (N - 1) / N, so that they tell N."""


def _world(rows: Sequence[tuple[str, CommsRow, int]]) -> int:
    """Ranks, from busbw / tput = (n-1)/n (all_reduce too: its tput is doubled); 0 where no row says enough."""
    rank_counts = []
    for name, row, _ in rows:
        algbw = float(row["algbw"])
        busbw = float(row["busbw"])
        if kind_of(name) in SHARED and math.inf > algbw > busbw > 0.5:
            rank_counts.append(algbw / (algbw - busbw))
    return round(median(rank_counts)) if rank_counts else 0


def _keep(name: str, row: CommsRow, world: int, sieve: SampleSieve, source: str, case: str) -> None:
    kind = kind_of(name)
    if kind is None:
        return sieve.skip(f"an op that is not known ({name or 'without a name'})")
    if kind == "recv":
        return sieve.skip("a recv, which its send already counts")
    if kind in _PER_RANK and not world:
        return sieve.skip("an all_gather or reduce_scatter of an unknown number of ranks")
    size = float(row["size"]) * _SIZE[row["unit"]] * (world if kind in _PER_RANK else 1)
    count = int(row.get("count", 1))
    ranks = 2 if kind == "send" else world
    return sieve.add(
        Sample(kind, size, float(row["ms"]) * 1e-3, ranks, count=count, dtype="", source=source, case=case)
    )
