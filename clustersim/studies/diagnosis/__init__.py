"""Which rank, machine or port makes a job slow or hang, and by what: one ranked answer over all files that a job left.

>>> from clustersim.scenario.file.incident_table import KINDS
>>> sorted(kind for kind in KINDS if kind.startswith("slow"))
['slow_data', 'slow_gpu', 'slow_host', 'slow_link']
"""

from __future__ import annotations

from clustersim.studies.diagnosis.answer import Diagnosis, diagnose
from clustersim.studies.diagnosis.suspects import Finding, Site, Suspect

__all__ = ["Diagnosis", "Finding", "Site", "Suspect", "diagnose"]
