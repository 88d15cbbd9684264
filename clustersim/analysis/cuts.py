"""Where spans begin and end, as sorted keys: a rank's place times a scale, and a moment within it."""

from __future__ import annotations

import numpy as np

from clustersim.arrays import Bools, Columns, Floats, Ints


def cuts(spans: Columns, n: int, length: float, scale: float) -> tuple[Floats, Ints, Ints, Ints]:
    """Where any span of a rank begins or ends, as sorted and unique keys, the window's edges among them; and which
    of them each span's ready, start and end are."""
    base, offset = np.arange(n) * scale, spans["owner"] * scale
    marks = np.concatenate([base, base + length, *(spans[name] + offset for name in ("ready", "start", "end"))])
    order = np.argsort(marks, kind="stable")  # a few sorted runs: far from random
    ordered = marks[order]
    new = np.concatenate([[True], ordered[1:] != ordered[:-1]])
    place = np.empty(len(marks), dtype=np.int64)
    place[order] = np.cumsum(new) - 1
    ready, start, end = place[2 * n :].reshape(3, -1)
    return ordered[new], ready, start, end


def seen(spans: Columns, n: int, scale: float, left: Floats, owner: Ints) -> Bools:
    """Whether a piece lies between its rank's first and last span."""
    first, last = np.full(n, np.inf), np.full(n, -np.inf)
    np.minimum.at(first, spans["owner"], spans["ready"] + spans["owner"] * scale)
    np.maximum.at(last, spans["owner"], spans["end"] + spans["owner"] * scale)
    found: Bools = (left >= first[owner]) & (left < last[owner])
    return found


def stretches(left: Ints, right: Ints) -> tuple[Ints, Ints]:
    """The numbers from each ``left`` up to its ``right``, one after another, and how many there are of each."""
    each = np.maximum(right - left, 0)
    numbers: Ints = np.repeat(left - (np.cumsum(each) - each), each) + np.arange(int(each.sum()))
    return numbers, each
