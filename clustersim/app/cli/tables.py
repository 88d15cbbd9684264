"""What commands print on stdout: tables of texts, for a terminal or as Markdown."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from clustersim.app.cli.fitting import Terminal

WIDTH = 100
"""Columns of what is no terminal and does not say."""


def stdout() -> Terminal:
    """A rich console on stdout, whose tables fit it; of :data:`WIDTH` columns when stdout is a file."""
    from clustersim.app.cli.fitting import Terminal

    return Terminal(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH, highlight=False)


def markdown_table(headings: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1) -> Iterator[str]:
    """The lines of a Markdown table whose first ``words`` columns are words and whose others are numbers."""
    titles = list(headings)
    yield _markdown_row(titles)
    yield "|---" * words + "|--:" * (len(titles) - words) + "|"
    yield from map(_markdown_row, rows)


def _markdown_row(cells: Iterable[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def number_table(
    title: str, headings: Iterable[str], rows: Iterable[Iterable[str]], words: int = 1, **options: Any
) -> Table:
    """A table of texts for a terminal, whose first ``words`` columns are words and whose others are numbers."""
    return rich_table(title, ((name, i >= words) for i, name in enumerate(headings)), rows, **options)


def rich_table(title: str, head: Iterable[tuple[str, bool]], rows: Iterable[Iterable[str]], **options: Any) -> Table:
    """A table of texts for a terminal; ``head`` has each column's heading, and whether it holds numbers."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", **options)
    for name, numeric in head:
        table.add_column(escape(name), justify="right" if numeric else "left")
    for row in rows:
        table.add_row(*map(escape, row))
    return table
