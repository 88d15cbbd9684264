"""All algorithms by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


@contextmanager
def _answering(row: Algorithm, kind: str, n: int) -> Iterator[None]:
    """Refuse a kind that a row does not do, and name the row where what is asked of it within fails."""
    if kind not in row.kinds:
        raise ProgramError(_refusal(row, kind))
    try:
        yield
    except ClusterSimError:
        raise
    except Exception as wrong:
        words = f"{type(wrong).__name__}: {' '.join(str(wrong).split())}"
        raise _failed(row, kind, n, words) from wrong


def _checked(row: Algorithm) -> Algorithm:
    """The row, whose functions refuse a kind that it does not do, and name it where they fail."""

    def checked(function: _Asked[Answer]) -> _Asked[Answer]:
        """The function, which refuses other kinds."""

        def ask(request: Request, group: Group, channels: tuple[Channel, ...]) -> Answer:
            """Refuse, or ask the function."""
            with _answering(row, request.kind, group.size):
                return function(request, group, channels)

        return ask

    asked_traffic = checked(row.traffic)

    def traffic(request: Request, group: Group, channels: tuple[Channel, ...]) -> Traffic:
        """The row's, whose members are of the group: one below -1 would be counted from the group's end."""
        answer = asked_traffic(request, group, channels)
        for ends in (np.asarray(answer.src), np.asarray(answer.dst)):
            absent = ends[(ends < -1) | (ends >= group.size)]
            if absent.size:
                raise _failed(row, request.kind, group.size, f"its traffic names member {absent[0]}")
        return answer

    def sends(kind: str, n: int, n_islands: int) -> tuple[float, float]:
        """Refuse, or ask the row."""
        with _answering(row, kind, n):
            return row.sends(kind, n, n_islands)

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
