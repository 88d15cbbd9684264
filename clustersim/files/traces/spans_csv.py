"""Timeline -> CSV: one line a span, in seconds and bytes, for spreadsheets, pandas and SQL."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clustersim.core.timeline import Timeline
from clustersim.files import slices

COLUMNS = (
    "rank",
    "node",
    "stream",
    "name",
    "kind",
    "phase",
    "bound",
    "step",
    "ready_s",
    "start_s",
    "end_s",
    "bytes",
    "flops",
    "algorithm",
    "protocol",
    "n_channels",
    "lower_bound_s",
)
"""``ready_s`` to ``start_s`` is a collective's wait for its peers."""
_DETAILS = ("algorithm", "protocol", "n_channels", "lower_bound")


def write_csv(timeline: Timeline, path: str | Path, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """Write spans, gzipped if the name ends in ``.gz``; returns the ranks written.

    Times keep their full precision. Raises :class:`TraceError` for a rank that does not exist.
    """
    path = Path(path)
    chosen = slices.ranks_to_write(timeline, ranks)
    spans = timeline.spans(chosen)
    node = slices.nodes(timeline)
    op_cells = [
        (
            *(op.stream, _cell(op.name), op.kind, op.phase, op.bound, op.step, op.nbytes, op.flops),
            *(op.detail.get(key, "") for key in _DETAILS),
        )
        for op in timeline.ops
    ]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    columns = (np.asarray(spans[name]).tolist() for name in ("rank", "op", "ready", "start", "end"))
    for rank, i, ready, start, end in zip(*columns, strict=True):
        cells = op_cells[i]
        writer.writerow((rank, int(node[rank]), *cells[:6], ready, start, end, *cells[6:]))
    slices.replace_file(path, out.getvalue().encode())
    return chosen


def _cell(name: str) -> str:
    """A name that no spreadsheet takes for a formula."""
    return f"'{name}" if name[:1] in "=+-@\t\r" and name else name
