"""What is known of NCCL's constants before any table is read, and how far machines differ from each other.

The documented values are in ``data/priors.toml``; published tables then move them a little
(:mod:`clustersim.calibrate.fit.learn`).
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from clustersim.core.texts import data_table

UNITS = {"": 1.0, "us": 1e-6, "GB/s": 1e9, "MiB": 2.0**20}
"""In which the file gives values."""


class Prior(msgspec.Struct, frozen=True, array_like=True):
    """A constant before any measurement.

    Parameters
    ----------
    number, unit : its value, in a key of :data:`UNITS`. spread : standard deviation of ln(constant) between machines.
    """

    number: float
    spread: float
    unit: str = ""

    @property
    def value(self) -> float:
        """In SI units."""
        return self.number * UNITS[self.unit]


class Factor(msgspec.Struct, frozen=True):
    """What one machine has more or less of than its kind, all at once.

    Parameters
    ----------
    heads : beginnings of the flat names it multiplies. spread : standard deviation of its logarithm between machines.
    common : all machines may have more of it than the documents say.
    """

    heads: tuple[str, ...]
    spread: float
    common: bool = False

    def moves(self, name: str) -> bool:
        """Whether it multiplies a constant."""
        return any(name == head or name.startswith((head + ".", head + "/")) for head in self.heads)


class Priors(msgspec.Struct, frozen=True):
    """Constants that measurements may move, by flat name, and factors, by what they are of."""

    constants: dict[str, Prior]
    factors: dict[str, Factor]


@lru_cache(maxsize=1)
def priors() -> Priors:
    """All of them."""
    return msgspec.convert(data_table("priors"), Priors)
