"""What a few measured collectives say of a machine: its constants, given what is known of its kind."""

from __future__ import annotations

from clustersim.collectives.fitted.bayes import Posterior, posterior
from clustersim.collectives.fitted.machine import FewNumbers, few_numbers
from clustersim.collectives.fitted.measured import MeasuredMachine, NumberKeptApart, informed, load
from clustersim.collectives.fitted.priors import priors

__all__ = [
    "FewNumbers",
    "MeasuredMachine",
    "NumberKeptApart",
    "Posterior",
    "few_numbers",
    "informed",
    "load",
    "posterior",
    "priors",
]
