"""A run's row times in few bytes, bit for bit.

Most times repeat: a row is ready the moment an earlier row ended, and starts when it is ready. So the ends are kept as
they are, and of the other times only which end they equal, as the distance in rows, which hardly changes along an op.
Distances and sets fall into runs, which zlib squeezes; the ends of ranks that jitter are noise, which nothing does.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]

NO_ROW = np.iinfo(np.int32).min
"""The time equals no row's end and is kept itself."""


def packed(ready: Array, start: Array, end: Array) -> dict[str, Array]:
    """Columns of float [s] as arrays that compress well; :func:`unpacked` gives the same bits back."""
    arrays = {"row_end": _shuffled(end)}
    known, first = np.unique(end.view(np.int64), return_index=True)
    for name, column, same in (("ready", ready, None), ("start", start, ready)):
        bits = column.view(np.int64)
        at = np.minimum(np.searchsorted(known, bits), max(len(known) - 1, 0))
        found = known[at] == bits if len(known) else np.zeros(0, dtype=bool)
        distance = np.where(found, first[at] - np.arange(len(bits)), NO_ROW) if len(bits) else bits
        arrays[f"row_{name}_back"] = distance.astype(np.int32)
        if same is not None:  # as ready as can be: distance 0, which no row has to its own end unless it took no time
            equal = bits == same.view(np.int64)
            arrays[f"row_{name}_same"] = np.packbits(equal)
            arrays[f"row_{name}_back"][equal] = 0
            found = found | equal
        arrays[f"row_{name}_own"] = column[~found]
    return arrays


def unpacked(arrays: dict[str, Array]) -> tuple[Array, Array, Array]:
    """Ready, start and end of every row, from what :func:`packed` made."""
    end = _unshuffled(arrays["row_end"])
    ready = _followed(arrays, "ready", end)
    start = _followed(arrays, "start", end)
    equal = np.unpackbits(arrays["row_start_same"], count=len(end)).astype(bool)
    start[equal] = ready[equal]
    return ready, start, end


def _followed(arrays: dict[str, Array], name: str, end: Array) -> Array:
    back = arrays[f"row_{name}_back"].astype(np.int64)
    own = back == NO_ROW
    column: Array = end[np.where(own, 0, np.arange(len(back)) + back)] if len(end) else np.zeros(0)
    column[own] = arrays[f"row_{name}_own"]
    return column


def _shuffled(column: Array) -> Array:
    """(8, n) bytes: first bytes first, since signs and exponents repeat where the rest does not."""
    return np.ascontiguousarray(column.view(np.uint8).reshape(-1, 8).T)


def _unshuffled(rows: Array) -> Array:
    return np.ascontiguousarray(rows.T).reshape(-1).view(np.float64).copy()
