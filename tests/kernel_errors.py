"""How far fitted kernel laws are off: in sample, with a GPU left out, and with ten of its rows known."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from kernel_rows import Kernels

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Fitted:
    """Constants by name, levels by generation, what frameworks add by name."""

    constants: Mapping[str, float]
    levels: Mapping[str, float]


@dataclass(frozen=True)
class ClassError:
    """How far one class of kernels is off: the mean over GPUs of the median and of the 90th percentile of the error
    without its sign, and of each GPU the median without and with it."""

    median: float
    high: float
    systems: Mapping[str, tuple[float, float]]


Errors = Mapping[str, ClassError]
FEWEST = 10
"""Rows of a GPU that a class needs to say anything of it."""


def class_errors(rows: Kernels, predicted: Floats, classes: Mapping[str, npt.NDArray[np.bool_]]) -> Errors:
    """Of each class that has enough rows of some GPU, how far it is off."""
    wrong = predicted / rows.seconds - 1.0
    systems = rows.words("system")
    judged = {}
    for label, inside in classes.items():
        each = {}
        for name in sorted(set(systems[inside].tolist())):
            own = wrong[inside & (systems == name)]
            if len(own) >= FEWEST and np.isfinite(own).all():
                each[name] = (
                    float(np.median(np.abs(own))),
                    float(np.quantile(np.abs(own), 0.9)),
                    float(np.median(own)),
                )
        if each:
            median, high = (float(np.mean([value[i] for value in each.values()])) for i in (0, 1))
            judged[label] = ClassError(median, high, {name: (own[0], own[2]) for name, own in each.items()})
    return judged


OWN_ROWS = 10
"""Rows of a GPU that somebody measured himself."""
LEVEL = 0.1
"""A prior in a round number, not fitted: a GPU left out adds 4 to 14 %, in squares, to the kinds' errors in sample."""


def with_own_rows(rows: Kernels, predicted: Floats, classes: Mapping[str, npt.NDArray[np.bool_]]) -> Errors:
    """:func:`class_errors` where ten rows of each class and GPU are known: the factor that they make most likely, of a
    level that is 1 within :data:`LEVEL`, moves the others."""
    systems = rows.words("system")
    draws = np.array([zlib.crc32(",".join(row.values()).encode()[::-1]) for row in rows.rows])
    judged: dict[str, ClassError] = {}
    for label, inside in classes.items():
        moved = predicted.copy()
        rest = inside.copy()
        for name in set(systems[inside].tolist()):
            at = np.flatnonzero(inside & (systems == name))
            own = at[np.argsort(draws[at])][:OWN_ROWS]
            off = np.log(rows.seconds[own] / predicted[own])
            spread = 1.25 * np.std(off) / np.sqrt(len(own))  # of a median
            moved[at] *= np.exp(np.median(off) * LEVEL**2 / (LEVEL**2 + spread**2))
            rest[own] = False
        judged |= class_errors(rows, moved, {label: rest})
    return judged


@dataclass(frozen=True)
class Judged:
    """A kind's constants, how many rows they are of, and its errors in sample, with a GPU left out (empty where nobody
    asked), and with ten rows of that GPU known."""

    fitted: Fitted
    rows: int
    in_sample: Errors
    left_out: Errors
    own_rows: Errors


def lines(errors: Errors) -> list[str]:
    """A line a class, then each GPU's."""
    shown = []
    for label, off in errors.items():
        each = ", ".join(f"{name} {own[0]:.1%} ({own[1]:+.1%})" for name, own in off.systems.items())
        shown.append(f"    {label:22s} {off.median:6.1%} ({off.high:6.1%})   {each}")
    return shown
