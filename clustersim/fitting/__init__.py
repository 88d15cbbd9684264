"""What a few measured collectives say of a machine: its constants, given what is known of its kind."""

from __future__ import annotations

from clustersim.fitting.bayes import Posterior, posterior
from clustersim.fitting.machine import FewNumbers, few_numbers
from clustersim.fitting.measured import Informed, informed, load
from clustersim.fitting.priors import priors

__all__ = [
    "FewNumbers", "Informed", "Posterior", "few_numbers", "informed", "load", "posterior", "priors",
]  # fmt: skip
