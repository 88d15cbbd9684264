"""Columns of numbers, by what they hold: the types of numpy arrays that cross a function's border."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Columns: TypeAlias = dict[str, npt.NDArray[Any]]
"""A table: columns by name, as long as each other. It goes straight into pandas or polars."""
