"""Columns: a time of every rank of a role, as one number where all agree; and pieces: some of the ranks."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from clustersim.core.arrays import Floats, Ints

Column: TypeAlias = Floats | float
"""A time of every rank of a role; one number where all agree [s]."""

Piece: TypeAlias = Ints | slice | int | None
"""Some ranks of a role, by position: sorted positions, an even stretch of them, one, or None for all."""


def size(who: Ints | slice | int) -> int:
    """How many ranks."""
    if isinstance(who, slice):
        return len(range(who.start, who.stop, who.step))
    return 1 if isinstance(who, int) else len(who)


def positions(who: Piece, n: int) -> Ints:
    """The positions of a piece of ``n`` ranks."""
    if isinstance(who, np.ndarray):
        return who
    if isinstance(who, slice):
        return np.arange(who.start, who.stop, who.step)
    return np.arange(n) if who is None else np.array([who])


def at(column: Column, who: Piece) -> Column:
    """A column's times for these ranks."""
    return column if who is None or not isinstance(column, np.ndarray) else column[who]


def lowest(column: Column) -> float:
    """The least of a column: looked up, which takes a third of the time of a reduction of a short one."""
    return column.item(column.argmin()) if isinstance(column, np.ndarray) else column


def highest(column: Column) -> float:
    """The most of a column."""
    return column.item(column.argmax()) if isinstance(column, np.ndarray) else column


def item(column: Column, k: int) -> float:
    """The ``k``-th of a column."""
    return column.item(k) if isinstance(column, np.ndarray) else column


def later(one: Column, other: Column) -> Column:
    """The later of two columns; one of them itself where it is."""
    if isinstance(one, float):
        if isinstance(other, float):
            return one if one >= other else other
        one, other = other, one
    if isinstance(other, float):
        if other <= 0.0 or other <= lowest(one):
            return one
        return other if other >= highest(one) else np.maximum(one, other)
    if one is other:
        return one
    ahead = np.count_nonzero(one >= other)
    if ahead == len(one):
        return one
    return np.maximum(one, other) if ahead else other


def stacked(columns: list[Column]) -> Column:
    """Columns as rows; one alone as it is."""
    if len(columns) == 1:
        return columns[0]
    if not any(isinstance(column, np.ndarray) for column in columns):
        return np.array(columns)[:, None]
    return np.stack(np.broadcast_arrays(*columns))


def replaced(counts: Column, who: Piece, count: Column, n: int) -> Column:
    """The numbers with those of these ranks replaced."""
    if who is None:
        return count
    if not isinstance(counts, np.ndarray):
        counts = np.full(n, counts)
    counts[who] = count
    return counts


def one_number(column: Column) -> Column:
    """The one number of a column that has the same everywhere, or else the column."""
    if not isinstance(column, np.ndarray) or not len(column):
        return column
    return column[0].item() if column[0] == column[-1] and (column == column[0]).all() else column
