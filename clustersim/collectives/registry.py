"""All algorithms by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from msgspec.structs import replace

from clustersim.collectives.base import Algorithm, Channel, Group, Request, Traffic
from clustersim.collectives.direct import DIRECT
from clustersim.collectives.exchanges import EXCHANGES
from clustersim.collectives.halving_doubling import HALVING_DOUBLING
from clustersim.collectives.hierarchical import HIERARCHICAL
from clustersim.collectives.naive import RING_UNSPLIT, SEQUENTIAL
from clustersim.collectives.nvls import NVLS, NVLS_TREE
from clustersim.collectives.pat import PAT
from clustersim.collectives.ring import RING
from clustersim.collectives.sharp import COLLNET_CHAIN, COLLNET_DIRECT
from clustersim.collectives.tree import TREE
from clustersim.collectives.trees import TREES
from clustersim.core.errors import ClusterSimError, ProgramError, nearest
from clustersim.core.row_table import RowTable

_ROWS = (
    RING,
    TREE,
    HALVING_DOUBLING,
    DIRECT,
    HIERARCHICAL,
    NVLS,
    NVLS_TREE,
    COLLNET_DIRECT,
    COLLNET_CHAIN,
    PAT,
    SEQUENTIAL,
    RING_UNSPLIT,
    *EXCHANGES,
    *TREES,
)

Answer = TypeVar("Answer")
_Asked = Callable[[Request, Group, tuple[Channel, ...]], Answer]


def _refusal(row: Algorithm, kind: str) -> str:
    return f"algorithm {row.name!r} does not do {kind!r}; it does {', '.join(sorted(row.kinds))}"


def _failed(row: Algorithm, kind: str, n: int, wrong: str) -> ProgramError:
    """That a row ended in a raw error, or in members that are not there."""
    return ProgramError(
        f"algorithm {row.name!r} fails at {kind} of {n} ranks: {wrong}; a size that it cannot do it must refuse with a "
        "ProgramError (clustersim.core.errors), and another algorithm must be asked for there"
    )


def _in_words(wrong: Exception) -> str:
    return f"{type(wrong).__name__}: {' '.join(str(wrong).split())}"


def _checked(row: Algorithm) -> Algorithm:
    """The row, whose functions refuse a kind that it does not do, and name it where they fail."""

    def checked(function: _Asked[Answer]) -> _Asked[Answer]:
        """The function, which refuses other kinds."""

        def ask(request: Request, group: Group, channels: tuple[Channel, ...]) -> Answer:
            """Refuse, or ask the function."""
            if request.kind not in row.kinds:
                raise ProgramError(_refusal(row, request.kind))
            try:
                return function(request, group, channels)
            except ClusterSimError:
                raise
            except Exception as wrong:
                raise _failed(row, request.kind, group.size, _in_words(wrong)) from wrong

        return ask

    def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
        """The row's, whose members are of the group: one below -1 would be counted from the group's end."""
        answer = checked(row.traffic)(request, group, channels)
        for ends in (answer.src, answer.dst):
            absent = [member for member in np.asarray(ends).tolist() if not -1 <= member < group.size]
            if absent:
                raise _failed(row, request.kind, group.size, f"its traffic names member {absent[0]}")
        return answer

    def sends(kind: str, n: int, n_islands: int) -> tuple[float, float]:
        """Refuse, or ask the row."""
        if kind not in row.kinds:
            raise ProgramError(_refusal(row, kind))
        try:
            return row.sends(kind, n, n_islands)
        except ClusterSimError:
            raise
        except Exception as wrong:
            raise _failed(row, kind, n, _in_words(wrong)) from wrong

    schedule = row.schedule and checked(row.schedule)
    waves = row.waves and checked(row.waves)
    return replace(row, traffic=traffic, sends=sends, schedule=schedule, waves=waves)


ALGORITHMS = RowTable("clustersim.algorithms", "algorithm", Algorithm, _ROWS, checked=_checked)


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises :class:`ProgramError` with the nearest name."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ProgramError(f"no algorithm {name!r}; {nearest(name, ALGORITHMS)}") from None
