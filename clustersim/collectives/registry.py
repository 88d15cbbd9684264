"""All algorithms by name. A new one is one file and one row; the contract suite picks it up."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from clustersim.collectives.base import Algorithm
from clustersim.collectives.ring import RING
from clustersim.collectives.tree import TREE
from clustersim.errors import ProgramError, nearest

ALGORITHMS: Mapping[str, Algorithm] = MappingProxyType({a.name: a for a in (RING, TREE)})


def algorithm(name: str) -> Algorithm:
    """The algorithm of this name. Raises :class:`ProgramError` with the nearest name."""
    try:
        return ALGORITHMS[name]
    except KeyError:
        raise ProgramError(f"no algorithm {name!r}; {nearest(name, ALGORITHMS)}") from None
