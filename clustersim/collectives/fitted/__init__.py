"""What a few measured collectives say of a machine: its constants, given what is known of its kind."""

from __future__ import annotations

from clustersim.collectives.fitted.machine import few_numbers
from clustersim.collectives.fitted.measured import NumberKeptApart, informed, load
from clustersim.collectives.fitted.priors import priors

__all__ = [
    "NumberKeptApart",
    "few_numbers",
    "informed",
    "load",
    "priors",
]
