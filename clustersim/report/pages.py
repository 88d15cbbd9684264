"""What a page of a study is made of: sections of words, pictures and one table each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clustersim import plots
from clustersim.report.figures import markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from clustersim.planner.of_sweep import Scored
    from clustersim.planner.rows import Row

Said = Mapping[str, Any]
MOST_ROWS = 2000
"""Rows of a table in a page; a browser is slow with more."""


@dataclass(frozen=True)
class Grid:
    """A table. head : (name, whether its cells are numbers). best : numbers of the rows that stand out.
    folded : what opens it, where it is closed at first."""

    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    folded: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the page. items : (what in bold, text)."""

    id: str
    heading: str
    words: Sequence[str] = ()
    svgs: Sequence[Any] = ()
    items: Sequence[tuple[str, str]] = ()
    grid: Grid | None = None


@dataclass(frozen=True)
class Page:
    """A whole page. figures : (name, value)."""

    title: str
    verdict: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = field(default=())


def number(value: float | None, form: str) -> str:
    """A figure as text; nothing for None."""
    return "" if value is None else format(value, form)


def speed_and_cost(
    rows: Sequence[Row | Scored], best: Collection[str], tempting: Collection[str], unit: str
) -> Figure | None:
    """Cost over speed with errors; rows without a price are left out, and said. Where none has one, energy takes the
    place of cost. None without rows.

    ``best``, ``tempting`` : the options that are worth having, and that would be if their predictions held.
    """
    priced = [row for row in rows if row.usd_per_1e9 is not None]
    kept, cost = (priced, "USD") if priced else (rows, "kWh")
    dots = [
        plots.Dot(row.family, f"{row.gpus:,}", row.rate or 0.0,
                  (row.usd_per_1e9 if priced else row.kwh_per_1e9) or 0.0, row.option in best,
                  row.error, row.option in tempting)
        for row in kept
    ]  # fmt: skip
    missing = sorted({row.machine for row in rows} - {row.machine for row in kept})
    without = f"; {', '.join(missing)}: no price" if missing else "; no price is known" if not priced else ""
    what = f"{cost} per 1e9 {unit}; numbers are GPUs, bars the error{without}"
    return plots.front(dots, x=f"{unit}/s", y=what) if dots else None


def drawn(figure: Figure | None, name: str) -> list[Any]:
    """A figure as markup; nothing for nothing."""
    return [markup(figure, name)] if figure else []
