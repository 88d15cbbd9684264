"""Fit the constants of a time model to measurements.

:func:`fit` is the front: a time model with its rows in hand (:class:`TimeModel`; :class:`NcclTimes` is NCCL's) goes in,
and what the rows say of each constant comes out: its value, a 95 % interval, or why they cannot tell it.
"""

from __future__ import annotations

from clustersim.calibrate.fit.nccl import MeasuredCollective, NcclTimes
from clustersim.calibrate.fit.solve import FitResult, Knob, fit

__all__ = ["FitResult", "Knob", "MeasuredCollective", "NcclTimes", "fit"]
