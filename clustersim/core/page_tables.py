"""What a tool printed in columns, as a table of a page: Markdown, a grid of reStructuredText, a sheet (CSV)."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable

Rows = list[list[str]]
_GRID = 3
"""A table with more rules of ``+---+`` has one below each row, whose cells may take several lines."""
_MOST = 10_000
"""Lines of a table."""


def with_tables(text: str, head: re.Pattern[str], printed: Callable[[Rows], Iterable[str]]) -> str:
    """A text in which those tables that ``printed`` gives lines for are these lines; the same text without any.

    head : what the line of a table's names holds. printed : the lines of a table's rows, the first of which is that
    line; none where it is another table.

    >>> with_tables("| a | b |\\n|---|---|\\n| **1** | 2 |\\n", re.compile("a"), lambda rows: map(" ".join, rows))
    'a b\\n1 2\\n'
    """
    if head.search(text) is None:
        return text
    lines = text.splitlines()
    out: list[str] = []
    i = 0
    replaced = False
    while i < len(lines):
        mark = _mark_of(lines[i]) if head.search(lines[i]) else ""
        rows, end = _rows(lines, i, mark) if mark else ([], i)
        told = list(printed(rows)) if len(rows) > 1 else []
        if told:
            out += told
            i = end
            replaced = True
        else:
            out.append(lines[i])
            i += 1
    return "\n".join(out) + "\n" if replaced else text


def _mark_of(line: str) -> str:
    """What parts the cells of a line; empty where nothing does."""
    return next((mark for mark in "|;," if line.count(mark) > 1), "")


def _rows(lines: list[str], start: int, mark: str) -> tuple[Rows, int]:
    """The cells of a table by row, and where it ends."""
    end = start
    while end < min(len(lines), start + _MOST) and (mark in lines[end] or _is_rule(lines[end])):
        end += 1
    block = lines[start:end]
    if mark != "|":
        try:
            return [[cell.strip() for cell in row] for row in csv.reader(block, delimiter=mark)], end
        except csv.Error:
            return [], end
    grid = sum(line.lstrip().startswith("+") and _is_rule(line) for line in block) >= _GRID
    filled = [line.strip() for line in block if not _is_rule(line)]
    left = all(line.startswith("|") for line in filled)
    right = all(line.endswith("|") for line in filled)
    rows: Rows = []
    fresh = True
    for line in block:
        if _is_rule(line):
            fresh = True
            continue
        parts = line.strip().split("|")[left : -1 if right else None]
        cells = [part.strip().strip("*`").strip() for part in parts]
        if grid and not fresh and len(cells) == len(rows[-1]):
            rows[-1] = [f"{above} {cell}".strip() for above, cell in zip(rows[-1], cells, strict=True)]
        else:
            rows.append(cells)
        fresh = False
    return rows, end


def _is_rule(line: str) -> bool:
    """Whether a line is what a table draws between rows."""
    return ("|" in line or "+" in line) and ("-" in line or "=" in line) and set(line.strip()) <= set("|+-=: \t")
