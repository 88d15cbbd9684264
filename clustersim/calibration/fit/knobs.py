"""What a fit may turn: constants, with a prior belief of how far each may lie from its default."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from clustersim.arrays import Floats, Ints


@dataclass(frozen=True)
class Knob:
    """A constant that a fit may move.

    Parameters
    ----------
    name : its flat name. default : its value in SI units, above 0.
    spread : standard deviation of ln(value / default) before any measurement is seen.
    most : what it cannot exceed, 1 for a share.
    """

    name: str
    default: float
    spread: float
    most: float = math.inf

    def at(self, z: float) -> float:
        """The constant, ``z`` standard deviations of its prior away from its default."""
        return min(self.default * math.exp(self.spread * z), self.most)


class TimeModel(Protocol):
    """A time model with the rows of a measurement in hand: all that a fit needs to know of it."""

    @property
    def part(self) -> str:
        """``"nccl"``, ``"gloo"`` or ``"mpi"``, as in :class:`clustersim.calibrated.Calibration`."""

    @property
    def measured(self) -> Floats:
        """(n,) seconds."""

    @property
    def series(self) -> Sequence[str]:
        """(n,) what each row is one of: rows of one series are wrong together."""

    @property
    def knobs(self) -> tuple[Knob, ...]:
        """Constants that may matter on these machines."""

    def predict(self, values: Mapping[str, float], rows: Ints | None = None) -> Floats:
        """(n,) seconds with these constants instead of their defaults; only of some rows where ``rows`` says which."""
