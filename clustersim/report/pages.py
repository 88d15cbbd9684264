"""What pages are made of: a study's of sections of words, pictures and one table each; a run's of named parts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from clustersim import plots
from clustersim.report.figures import Chart, markup

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from clustersim.planner.of_sweep import Scored
    from clustersim.planner.rows import Row

Said = Mapping[str, Any]
MOST_ROWS = 2000
"""Rows of a table in a page; a browser is slow with more."""


class Grid(msgspec.Struct, frozen=True):
    """A table. head : (name, whether its cells are numbers). best : numbers of the rows that stand out.
    folded : what opens it, where it is closed at first."""

    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    folded: str = ""


class Section(msgspec.Struct, frozen=True):
    """A part of the page. items : (what in bold, text)."""

    id: str
    heading: str
    words: Sequence[str] = ()
    svgs: Sequence[Markup] = ()
    items: Sequence[tuple[str, str]] = ()
    grid: Grid | None = None


class Page(msgspec.Struct, frozen=True):
    """A whole page. figures : (name, value)."""

    title: str
    verdict: str
    sections: Sequence[Section]
    figures: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()


class States(msgspec.Struct, frozen=True):
    """Where the time went: a row (colour, state, share, mean, spread over ranks) each; and what was hidden."""

    svg: Markup
    rows: list[tuple[str, str, str, str, str]]
    hidden: str
    hidden_share: str


class Falls(msgspec.Struct, frozen=True):
    """From peak to MFU; of a pipeline, its stages and a row (word, cells) for each loss."""

    svg: Markup
    heads: list[str]
    rows: list[tuple[str, list[str]]]


class Stall(msgspec.Struct, frozen=True):
    """What something cost."""

    cause: str
    cost: str
    share: str
    text: str


class Spots(msgspec.Struct, frozen=True):
    """The busiest links, a row (name, rate, use, peak, alike, users) each."""

    rows: list[tuple[str, str, str, str, str, str]]
    svgs: list[Markup]


class Path(msgspec.Struct, frozen=True):
    """The critical path by kind and by link (name, seconds, share), and its longest of ``n`` pieces (name, kind, rank,
    seconds)."""

    kinds: list[tuple[str, str, str]]
    links: list[tuple[str, str, str]]
    pieces: list[tuple[str, str, str, str]]
    n: int


class Held(msgspec.Struct, frozen=True):
    """What fills memory, a row (part, bytes) each."""

    svg: Markup
    rows: list[tuple[str, str]]
    message: str


class Content(msgspec.Struct, frozen=True):
    """Everything the template prints, all of it plain text but for markup."""

    title: str
    headline: tuple[str, str]
    verdict: str
    figures: list[tuple[str, str]]
    breakdown: States
    waterfall: Falls | None
    ranks: str
    drawn: str
    split: list[Chart]
    gantts: list[Chart]
    legend: list[tuple[str, str, str]]
    stalls: list[Stall]
    hotspots: Spots | None
    path: Path
    otherwise: list[str]
    warnings: list[str]
    memory: Held | None
    inputs: list[tuple[str, str]]
    notes: list[str]
    run: list[tuple[str, str]]
    palette: dict[str, str]


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


def drawn(figure: Figure | None, name: str) -> list[Markup]:
    """A figure as markup; nothing for nothing."""
    return [markup(figure, name)] if figure else []
