"""What pages are made of: a study's of sections of words, pictures and one table each; a run's of named parts."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from clustersim.app import plots
from clustersim.app.plots.drawing import alt_text, narrow
from clustersim.core.paths import data_path

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.figure import Figure

    from clustersim.studies.plan.of_sweep import ScoredScenario
    from clustersim.studies.plan.rows import PlanRow

MOST_ROWS = 2000
"""Rows of a table in a page; a browser is slow with more."""


class PageTable(msgspec.Struct, frozen=True):
    """A table. head : (name, whether its cells are numbers). best : numbers of the rows that stand out.
    folded : what opens it, where it is closed at first."""

    head: Sequence[tuple[str, bool]]
    rows: Sequence[Sequence[str]]
    best: frozenset[int] = frozenset()
    folded: str = ""


class PageSection(msgspec.Struct, frozen=True):
    """A part of the page. items : (what in bold, text). numbers : of items, where they have some; 0 of one without."""

    id: str
    heading: str
    words: Sequence[str] = ()
    svgs: Sequence[Markup] = ()
    items: Sequence[tuple[str, str]] = ()
    grid: PageTable | None = None
    numbers: Sequence[int] = ()


def kept(sections: Sequence[PageSection]) -> list[PageSection]:
    """Those that say more than their heading."""
    return [section for section in sections if section.svgs or section.items or (section.grid and section.grid.rows)]


class Page(msgspec.Struct, frozen=True):
    """A whole page. figures : (name, value)."""

    title: str
    verdict: str
    sections: Sequence[PageSection]
    figures: Sequence[tuple[str, str]] = ()
    warnings: Sequence[str] = ()


class PagePart(msgspec.Struct, frozen=True):
    """A part of a run's page: the cells of its table, its pictures, words (of the table, its heads), and a note."""

    rows: Sequence[Sequence[Any]]
    svgs: Sequence[Markup] = ()
    words: Sequence[str] = ()
    note: str = ""


def rendered(template: str, **values: object) -> str:
    """A template of ``data/`` with these values, every text of them escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(data_path("data")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_arrows,
    )
    environment.filters["coded"] = _coded
    return environment.get_template(template).render(values)


def _coded(text: str) -> Markup:
    """A sentence, escaped, with what stands between backticks set as code."""
    from markupsafe import Markup

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(str(_arrows(text)))))


def _arrows(value: object) -> object:
    """Names of links with an arrow that no line ends inside of, and a sign for both ways."""
    return value.replace("->", "→").replace("+-", "±") if type(value) is str else value


def number(value: float | None, form: str) -> str:
    """A figure as text; nothing for None."""
    return "" if value is None else format(value, form)


def front_grid(
    rows: Sequence[PlanRow | ScoredScenario], heading: str, unit: str, more: Mapping[str, tuple[str, str]] = {}
) -> PageTable:
    """Options that are worth having, a row each; ``more`` : further columns, each a field and how it is written."""
    columns = {
        "GPUs": ("gpus", ",.0f"),
        f"{unit}/s": ("rate", ",.0f"),
        "+-": ("error", ".0%"),
        f"USD/1e9 {unit}": ("usd_per_1e9", ",.0f"),
        f"kWh/1e9 {unit}": ("kwh_per_1e9", ",.0f"),
        **more,
    }
    cells = [[row.option, *(number(getattr(row, name), form) for name, form in columns.values())] for row in rows]
    return PageTable([(heading, False), *((name, True) for name in columns)], cells)


def speed_and_cost(
    rows: Sequence[PlanRow | ScoredScenario], best: Collection[str], tempting: Collection[str], unit: str
) -> Figure | None:
    """Cost over speed with errors; rows without a price are left out, and said. Where none has one, energy takes the
    place of cost. None without rows.

    ``best``, ``tempting`` : the options that are worth having, and that would be if their predictions held.
    """
    priced = [row for row in rows if row.usd_per_1e9 is not None]
    priced_rows, cost = (priced, "USD") if priced else (rows, "kWh")
    dots = [
        plots.FrontDot(
            row.family,
            f"{row.gpus:,}",
            row.rate or 0.0,
            (row.usd_per_1e9 if priced else row.kwh_per_1e9) or 0.0,
            row.option in best,
            row.error,
            row.option in tempting,
        )
        for row in priced_rows
    ]
    missing = sorted({row.machine for row in rows} - {row.machine for row in priced_rows})
    without = f"; {', '.join(missing)}: no price" if missing else "; no price is known" if not priced else ""
    cost_label = f"{cost} per 1e9 {unit}; numbers are GPUs, bars the error{without}"
    return plots.front(dots, x=f"{unit}/s", y=cost_label) if dots else None


def both(draw: Callable[[], Figure | None], name: str) -> list[Markup]:
    """A picture for a desk, and the same for a phone; nothing for nothing."""
    return each_twice(lambda: {name: figure} if (figure := draw()) else {}).get(name, [])


def each_twice(draw: Callable[[], Mapping[str, Figure]]) -> dict[str, list[Markup]]:
    """Pictures by name, each for a desk and for a phone."""
    wide = draw()
    with narrow():
        slim = draw()
    return {
        name: [paired({"desk": markup(wide[name], name), "phone": markup(slim[name], f"{name}-phone")})]
        for name in wide
    }


def paired(pictures: Mapping[str, str]) -> Markup:
    """Pictures by place, ``desk`` and ``phone``, of which a page shows the one that its window has room for."""
    return trusted("".join(f'<div class="{place}">{svg}</div>' for place, svg in pictures.items()))


class PageChart(msgspec.Struct, frozen=True):
    """A picture under a heading."""

    name: str
    svg: Markup


def trusted(svg: str) -> Markup:
    """Text that a template prints as it is: made by the SVG writers, which escape what they print."""
    from markupsafe import Markup

    return Markup(svg)


def markup(figure: Figure, name: str) -> Markup:
    """A figure as an ``<svg>`` element; ids begin with ``name``, so that figures of one page do not mix theirs up."""
    import matplotlib as mpl

    out = io.StringIO()
    # Text stays text: it can be searched and read aloud, and is smaller than outlines.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(?<=\.\d\d)\d+", "", path[0]), text)  # hundredths of a point
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{name}-", text)
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text).groups()  # type: ignore[union-attr]
    head = f'<svg role="img" aria-label="{escape(alt_text(figure))}" viewBox="0 0 {width} {height}" '
    head += 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
    return trusted(head + text[text.index(">") + 1 :].strip())
