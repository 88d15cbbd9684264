"""What an op can be beside: the kernels of a rank after the last one before the op, and before the first one behind it.

All kernels of a rank run one after another, so a collective runs beside none but those whose place among them is
between these two. Where there is none, nothing is ever owed for it (:mod:`clustersim.engine.bills`).
"""

from __future__ import annotations

from collections.abc import Sequence


def around(needs: Sequence[Sequence[int]], place: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of each op the place of the last kernel before it (-1 for none), and of the first that waits for it (as many as
    there are for none).

    Parameters
    ----------
    needs : of each op in a list the earlier ones that it waits for. place : of each its place among kernels; -1 for
        what is none.
    """
    above = [-1] * len(needs)
    below = [1 + max(place, default=-1)] * len(needs)
    for i, needed in enumerate(needs):
        for need in needed:
            above[i] = max(above[i], above[need], place[need])
    for i in range(len(needs) - 1, -1, -1):
        own = place[i] if place[i] >= 0 else below[i]
        for need in needs[i]:
            below[need] = min(below[need], own)
    return above, below
