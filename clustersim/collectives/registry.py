"""All algorithms by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from clustersim.collectives.base import Algorithm
from clustersim.collectives.direct import DIRECT
from clustersim.collectives.exchanges import EXCHANGES
from clustersim.collectives.halving_doubling import HALVING_DOUBLING
from clustersim.collectives.hierarchical import HIERARCHICAL
from clustersim.collectives.naive import RING_UNSPLIT, SEQUENTIAL
from clustersim.collectives.nvls import NVLS, NVLS_TREE
from clustersim.collectives.pat import PAT
from clustersim.collectives.ring import RING
from clustersim.collectives.tree import TREE
from clustersim.collectives.trees import TREES
from clustersim.errors import ProgramError, nearest

_ROWS = (
    RING,
    TREE,
    HALVING_DOUBLING,
    DIRECT,
    HIERARCHICAL,
    NVLS,
    NVLS_TREE,
    PAT,
    SEQUENTIAL,
    RING_UNSPLIT,
    *EXCHANGES,
    *TREES,
)

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({row.name: row for row in _ROWS})


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises :class:`ProgramError` with the nearest name."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ProgramError(f"no algorithm {name!r}; {nearest(name, ALGORITHMS)}") from None
