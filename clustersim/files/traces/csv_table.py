"""A CSV table as columns that are asked for by name, with one clear error for a column or a value that is not there."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import TraceError
from clustersim.core.texts import csv_rows
from clustersim.files.traces import files

MOST = 1e15
"""No number of a table is larger."""
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
"""Seconds of what a column's name ends with."""


@dataclass(frozen=True)
class CsvTable:
    """Columns of text, all of one length; ``path`` for messages."""

    path: Path
    columns: dict[str, list[str]]

    def has(self, *names: str) -> bool:
        """Whether it has one of these columns."""
        return any(name in self.columns for name in names)

    def timed(self, name: str) -> bool:
        """Whether it has this time, in some unit."""
        return self.has(*(f"{name}_{unit}" for unit in UNITS))

    def text(self, *names: str) -> list[str]:
        """The first of these columns that there is. Raises :class:`TraceError` where there is none."""
        column = next((name for name in names if name in self.columns), None)
        if column is None:
            raise TraceError(
                f"{self.path}: no column {' or '.join(map(repr, names))}; it has {', '.join(self.columns)}"
            )
        return self.columns[column]

    def whole(self, *names: str) -> Ints:
        """The same, as whole numbers. Raises :class:`TraceError`, with the line, for what is none."""
        return np.array([self._number(int, i, text, names) for i, text in enumerate(self.text(*names))], dtype=np.int64)

    def seconds(self, name: str) -> Floats:
        """A time whose column is named with its unit [s]. Raises :class:`TraceError`."""
        names = tuple(f"{name}_{unit}" for unit in UNITS)
        unit = next((unit for unit in UNITS if f"{name}_{unit}" in self.columns), "s")
        return np.array([self._number(float, i, text, names) for i, text in enumerate(self.text(*names))]) * UNITS[unit]

    def _number(self, kind: Callable[[str], float], i: int, text: str, names: tuple[str, ...]) -> float:
        try:
            number = kind(text)
            if abs(number) < MOST and (kind is int or number >= 0):
                return number
        except ValueError:
            pass
        name = next(name for name in names if name in self.columns)
        expected = "a whole number" if kind is int else "a time >= 0"
        raise TraceError(f"{self.path}:{i + 2}: {name} is {text!r}, not {expected}")


def header(head: bytes) -> list[str]:
    """The first line of a file as names of columns; none where it is no line of a table."""
    first = head.split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    try:
        return next(csv.reader([first]), [])
    except csv.Error:
        return []


def read_table(path: Path) -> CsvTable:
    """A CSV file, gzipped or not. Raises :class:`TraceError` for a line of another length, and for no lines."""
    lines = csv_rows(files.text(path), str(path), TraceError)
    names = [name.strip() for name in next(lines, [])]
    rows: list[list[str]] = []
    for number, cells in enumerate(lines, start=2):
        if not "".join(cells).strip():
            continue  # a line of blanks, as spreadsheets leave at the end
        rows.append(cells)
        if len(cells) != len(names):
            raise TraceError(f"{path}:{number}: {len(cells)} fields, but the header has {len(names)}")
    if not rows:
        raise TraceError(f"{path}: a header and no lines")
    return CsvTable(path, {name: [row[i] for row in rows] for i, name in enumerate(names)})
