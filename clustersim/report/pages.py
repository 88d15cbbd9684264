"""What a page of a study is made of: sections of words, pictures and one table each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from clustersim.report.figures import markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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


def cost_of(row: Said, priced: bool) -> float:
    """USD, or GPU-hours where nobody knows a price, per 1e9 tokens or samples."""
    return float(row["usd_per_1e9"]) if priced else row["gpus"] / 3600 / row["rate"] * 1e9


def drawn(figure: Figure | None, name: str) -> list[Any]:
    """A figure as markup; nothing for nothing."""
    return [markup(figure, name)] if figure else []
