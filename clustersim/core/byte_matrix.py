"""How unevenly an all-to-all's bytes are spread over pairs of members: one object per distinct matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import msgspec
import numpy as np

from clustersim.core.arrays import Floats
from clustersim.core.errors import ProgramError


class ByteMatrix(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Bytes between members of a group, per byte of the collective's size; made by :func:`byte_matrix` only.

    Equal ones are the same object, so that comparing and hashing them costs nothing.

    Parameters
    ----------
    rows : ``rows[i][j]`` is what member i holds for member j; the diagonal stays where it is. An even all-to-all, of
        which every member holds S, has 1/n everywhere.
    """

    rows: tuple[tuple[float, ...], ...]

    @property
    def n(self) -> int:
        """Members."""
        return len(self.rows)

    @cached_property
    def array(self) -> Floats:
        """(n, n) float, the rows."""
        return np.array(self.rows, dtype=np.float64)

    @cached_property
    def between(self) -> Floats:
        """(n, n) float, without what a member keeps."""
        between: Floats = self.array * (1.0 - np.eye(self.n))
        return between

    @cached_property
    def even(self) -> bool:
        """Whether it says no more than a size does."""
        return bool((self.array == 1.0 / self.n).all())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are the same object as what they were made from."""
        return byte_matrix, (self.rows,)


def byte_matrix(rows: Sequence[Sequence[float]]) -> ByteMatrix:
    """The matrix with these rows.

    Raises
    ------
    ProgramError : where it is not square, or an entry is negative or no number.

    >>> byte_matrix([[0, 1], [0, 0]]) is byte_matrix(((0.0, 1.0), (0.0, 0.0)))
    True
    """
    return _interned(tuple(tuple(map(float, row)) for row in rows))


@lru_cache(maxsize=4096)
def _interned(rows: tuple[tuple[float, ...], ...]) -> ByteMatrix:
    for i, row in enumerate(rows):
        if len(row) != len(rows):
            raise ProgramError(f"a byte matrix of {len(rows)} members has {len(row)} entries in row {i}")
        for value in row:
            if not (math.isfinite(value) and value >= 0):
                raise ProgramError(f"a byte matrix has the entry {value!r} in row {i}; entries are numbers >= 0")
    return ByteMatrix(rows)
