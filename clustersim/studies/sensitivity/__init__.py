"""What a scenario depends on: hardware numbers a little better and worse, how slow a network may be, how it scales.

All of it is real runs of the scenario with something changed, none of it a bound.
"""

from __future__ import annotations

from clustersim.studies.sensitivity.answer import FILE, Study, StudyRequest, folder_for, study
from clustersim.studies.sensitivity.scaling import ScalingPoint, curve, last_worthwhile
from clustersim.studies.sensitivity.turned import KNOBS, BreakEven, Swing, break_even, tornado

__all__ = [
    "FILE",
    "KNOBS",
    "BreakEven",
    "ScalingPoint",
    "Study",
    "StudyRequest",
    "Swing",
    "break_even",
    "curve",
    "folder_for",
    "last_worthwhile",
    "study",
    "tornado",
]
