"""Tables that only a split model has: where a step goes at each stage, and what each dimension of the mesh costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from clustersim.cli.common import number_table

if TYPE_CHECKING:
    from clustersim.analysis.where import Where
    from clustersim.arrays import Columns
    from clustersim.cli.fitting import Terminal


def print_where(console: Terminal, rows: Sequence[Where]) -> None:
    """A row per stage, shares of the step; groups first, then the bubble's parts that are there at all."""
    from clustersim.analysis.where import BUBBLES, WORDS

    if len(rows) < 2:
        return
    groups = [key for key in WORDS if max(row.groups[key] for row in rows) >= LEAST * rows[0].step]
    parts = [name for name in BUBBLES if max(row.bubble.get(name, 0.0) for row in rows) >= LEAST * rows[0].step]
    cells = []
    for row in (*rows[1:], rows[0]):
        values = *(row.groups[key] for key in groups), *(row.bubble.get(name, 0.0) for name in parts)
        cells.append(["all" if row.stage < 0 else str(row.stage), *(f"{100 * v / row.step:.1f}" for v in values)])
    title = "where a step goes, % of it; the bubble's parts to the right"
    console.print(number_table(title, ("stage", *(WORDS[key] for key in groups), *parts), cells))


LEAST = 5e-4
"""Shares of a step below this are no column."""


def print_dimensions(console: Terminal, whole: Where, moved: Columns) -> None:
    """A row per dimension: what its transfers cost, and what they move."""
    from clustersim.units import format_bytes, format_time

    names = [str(name) for name in moved["dimension"]]
    if not names:
        return
    kinds = [name for name in moved if name.startswith("link_")]
    heads = ("over", "exposed transfer", "waiting for a peer", "sent")
    links = (f"on {kind.removeprefix('link_')} links" for kind in kinds)
    cells = []
    for i, name in enumerate(names):
        times = (format_time(found.get(name, 0.0)) for found in (whole.exposed, whole.waiting))
        cells.append([name, *times, *(format_bytes(moved[column][i]) for column in ("sent_per_gpu", *kinds))])
    title = "by dimension of the mesh, per GPU and step; links: all of a kind"
    console.print(number_table(title, (*heads, *links), cells))
