"""Tables that fit a terminal: words are broken, headings too, but never a figure; what is too wide goes below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

LONGEST_WORD = 24
"""Letters of a word that is not broken."""


class Terminal(Console):
    """A console that prints tables no wider than itself."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich does; of a table that is too wide, several with its first column each."""
        for item in objects:
            if isinstance(item, Table):
                for part in fitted(item, self.width):
                    super().print(part, **options)
        rest = [item for item in objects if not isinstance(item, Table)]
        if rest or not objects:
            super().print(*rest, **options)

    def say(self, *lines: str, style: str | None = None) -> None:
        """Lines as they are: brackets are no markup, and a long one is broken by whoever shows it."""
        for line in lines:
            self.print(line, markup=False, soft_wrap=True, style=style)


def fitted(table: Table, width: int) -> Iterator[Table]:
    """The table, or its columns in several that each fit ``width`` letters; the first column is in all of them."""
    need = [_need(column) for column in table.columns]
    parts: list[list[int]] = [[]]
    for i in range(1, len(need)):
        if parts[-1] and _wide(need, [0, *parts[-1], i]) > width:
            parts.append([])
        parts[-1].append(i)
    for k, part in enumerate(parts):
        yield _of(table, [0, *part], _widths(table, [0, *part], need, width), table.title if not k else None)


def _wide(need: Sequence[int], columns: Sequence[int]) -> int:
    """Letters of a table of these columns, with its frame."""
    return sum(need[i] + 3 for i in columns) + 1


def _need(column: Column) -> int:
    """Letters that a column needs at least: its longest figure, or word, or line where it must not be broken; and its
    heading's longest word."""
    texts = [_plain(cell) for cell in column._cells]
    all_words = [word for text in (_plain(column.header), *texts) for word in text.split()]
    least = max((min(len(word), LONGEST_WORD) for word in all_words), default=1)
    unbroken = column.justify == "right" or column.no_wrap
    return max([least, *map(len, texts)]) if unbroken else least


def _plain(cell: object) -> str:
    if isinstance(cell, Text):
        return cell.plain
    return Text.from_markup(cell).plain if isinstance(cell, str) else ""


def _longest_line(cell: object) -> int:
    return max(map(len, _plain(cell).split("\n")))


def _widths(table: Table, columns: Sequence[int], need: Sequence[int], width: int) -> list[int]:
    """Letters of each of these columns: what it needs, and what room is left goes to the one whose cells would take
    most lines, letter by letter."""
    wanted_widths = [need[i] for i in columns]
    most = [max(map(_longest_line, (table.columns[i].header, *table.columns[i]._cells))) for i in columns]
    for _ in range(max(0, width - _wide(need, columns))):
        tallest = max(range(len(wanted_widths)), key=lambda index: most[index] / max(1, wanted_widths[index]))
        if wanted_widths[tallest] >= most[tallest]:
            break
        wanted_widths[tallest] += 1
    return wanted_widths


def _of(table: Table, columns: Sequence[int], widths: Sequence[int], title: Any) -> Table:
    """Some columns of a table, of these widths."""
    part = copy(table)
    part.title, part.columns = title, []
    for index, (i, wide) in enumerate(zip(columns, widths, strict=True)):
        column = copy(table.columns[i])
        column._index, column.width, column.overflow = index, wide, "fold"
        part.columns.append(column)
    return part
