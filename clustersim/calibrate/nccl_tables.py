"""Tables of measured collectives as they are found: nccl-tests' own columns, or those of a database of kernels.

A database of kernels names systems instead of machines and has no case; its rows become those of nccl-tests, so that
whatever reads one reads the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from clustersim.calibrate.score import read_table
from clustersim.core.texts import Table

COLUMNS = ("case_id", "topology", "nodes", "ranks", "collective", "size_bytes", "time_us")
KERNEL_COLUMNS = ("system", "what", "kind", "dtype", "ranks", "bytes", "time_us", "library_version")

TOPOLOGIES: Mapping[str, str] = {
    "a100_sxm": "hgx-a100",
    "h100_sxm": "hgx-h100",
    "h200_sxm": "hgx-h200",
    "b200_sxm": "hgx-b200",
    "gb200": "gb200-nvl72",
    "l40s": "pcie-l40s",
}
"""Systems of a database of kernels, and the shipped machines that they are; of others rows are skipped."""

COLLECTOR = "https://github.com/ai-dynamo/aiconfigurator"
"""Whose database has these columns."""


def measured_rows(paths: Sequence[str | Path]) -> list[Table]:
    """Rows of tables of collectives, in the columns of nccl-tests. Raises :class:`TraceError` as ``read_table``."""
    return [row for path in paths for row in _rows(path)]


def _rows(path: str | Path) -> Iterator[Table]:
    rows = read_table(path, COLUMNS, instead=KERNEL_COLUMNS)
    of_kernels = bool(rows) and all(name in rows[0] for name in KERNEL_COLUMNS)
    if not of_kernels:
        yield from rows
        return
    for row in rows:
        if row["what"] == "nccl":
            yield _of_kernels(row)


def _of_kernels(row: Table) -> Table:
    """A row of a database of kernels. They are made by ``nccl-tests -t RANKS`` on one node (its collector's text)."""
    system, kind, ranks, dtype = row["system"], row["kind"], row["ranks"], row["dtype"]
    return {
        "case_id": f"{system}_{ranks}_{kind}_{dtype}",
        "topology": TOPOLOGIES.get(system, ""),
        "nodes": "1",
        "ranks": ranks,
        "nccl_version": row["library_version"],
        "env": "",
        "collective": kind,
        "dtype": {"fp16": "half"}.get(dtype, dtype),
        "size_bytes": row["bytes"],
        "time_us": row["time_us"],
        "source": f"{COLLECTOR}/{system}",
        "notes": f"{ranks} threads 1 process",
    }
