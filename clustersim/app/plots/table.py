"""A table for a notebook: rows of plain values, drawn by the browser, read aloud by a screen reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, TypeAlias

import numpy as np

from clustersim.core.errors import ProgramError

Format = Callable[[Any], str]
Cell: TypeAlias = str | int | float | np.generic | None


@dataclass(frozen=True)
class PlotTable:
    """Rows that a notebook shows as a table and a terminal as text.

    Parameters
    ----------
    rows : (n,) of column -> value. formats : column -> how a value is written,
    :func:`clustersim.core.units.format_time`. caption : what the table shows.
    """

    rows: Sequence[Mapping[str, Cell]]
    formats: Mapping[str, Format] = field(default_factory=dict)
    caption: str = ""

    @property
    def columns(self) -> list[str]:
        """Names, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row))

    def cells(self) -> list[list[str]]:
        """Every value as text; empty where a row has none."""
        return [[_text(row.get(name), self.formats.get(name)) for name in self.columns] for row in self.rows]

    def _repr_html_(self) -> str:
        text_columns = {
            name for row in self.rows for name, value in row.items() if isinstance(value, str | bool | np.bool_)
        }
        sides = ["left" if name in text_columns else "right" for name in self.columns]
        head = _row("th", self.columns, sides)
        body = "".join(_row("td", cells, sides) for cells in self.cells())
        caption = f"<caption>{escape(self.caption)}</caption>" if self.caption else ""
        return f'<table style="font-size:1em">{caption}<thead>{head}</thead><tbody>{body}</tbody></table>'

    def __repr__(self) -> str:
        """Columns lined up with spaces."""
        lines = [self.columns, *self.cells()]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        return "\n".join([self.caption, *text] if self.caption else text)


def table(
    rows: Sequence[Mapping[str, Cell]], formats: Mapping[str, Format] | None = None, caption: str = ""
) -> PlotTable:
    """Rows as a table. Raises :class:`ProgramError` for no rows, and for a format of a column that is not there.

    >>> from clustersim.core.units import format_time
    >>> table([{"strategy": "ddp", "step": 0.157}, {"strategy": "fsdp", "step": 0.167}], {"step": format_time})
    strategy  step
    ddp       157 ms
    fsdp      167 ms
    """
    built = PlotTable(list(rows), dict(formats or {}), caption)
    if not built.columns:
        raise ProgramError("nothing to show: the table has no rows")
    for name in built.formats:
        if name not in built.columns:
            raise ProgramError(f"no column {name!r} to format; the table has {', '.join(built.columns)}")
    return built


def _row(tag: str, cells: Sequence[str], sides: Sequence[str]) -> str:
    cell_tags = (
        f'<{tag} style="text-align:{side}">{escape(cell)}</{tag}>' for cell, side in zip(cells, sides, strict=True)
    )
    return f"<tr>{''.join(cell_tags)}</tr>"


def _text(value: Cell, how: Format | None) -> str:
    if value is None:
        return ""
    if how is not None:
        return how(value)
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, float | np.floating):
        return f"{value:,.4g}"
    return f"{value:,}" if isinstance(value, int | np.integer) else str(value)
