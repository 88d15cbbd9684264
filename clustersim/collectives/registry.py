"""All algorithms by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from clustersim.collectives.base import Algorithm, Channel, Group, Request
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
from clustersim.core.errors import ProgramError, nearest
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


def _checked(row: Algorithm) -> Algorithm:
    """The row, whose functions refuse a kind that it does not do."""

    def checked(function: _Asked[Answer]) -> _Asked[Answer]:
        """The function, which refuses other kinds."""

        def ask(request: Request, group: Group, channels: tuple[Channel, ...]) -> Answer:
            """Refuse, or ask the function."""
            if request.kind not in row.kinds:
                raise ProgramError(_refusal(row, request.kind))
            return function(request, group, channels)

        return ask

    def sends(kind: str, n: int, n_islands: int) -> tuple[float, float]:
        """Refuse, or ask the row."""
        if kind not in row.kinds:
            raise ProgramError(_refusal(row, kind))
        return row.sends(kind, n, n_islands)

    schedule = row.schedule and checked(row.schedule)
    waves = row.waves and checked(row.waves)
    return replace(row, traffic=checked(row.traffic), sends=sends, schedule=schedule, waves=waves)


ALGORITHMS = RowTable("clustersim.algorithms", "algorithm", Algorithm, _ROWS, checked=_checked)


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises :class:`ProgramError` with the nearest name."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ProgramError(f"no algorithm {name!r}; {nearest(name, ALGORITHMS)}") from None
