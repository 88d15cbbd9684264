"""What a few measured collectives say of a machine: its constants, given what is known of its kind."""

from __future__ import annotations

from clustersim.fitting.bayes import Posterior, posterior
from clustersim.fitting.machine import FewNumbers, few_numbers
from clustersim.fitting.measured import Informed, informed, load
from clustersim.fitting.priors import FACTORS, PRIORS, Prior

__all__ = [
    "FACTORS", "PRIORS", "FewNumbers", "Informed", "Posterior", "Prior", "few_numbers", "informed", "load",
    "posterior",
]  # fmt: skip
