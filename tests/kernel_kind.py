"""What a kind of measured kernel is made of: its rows, its law, and which constants are free."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from kernel_rows import Kernels

Floats = npt.NDArray[np.float64]
Guess = Callable[[Mapping[str, float], Mapping[str, float]], Floats]
Classes = Mapping[str, npt.NDArray[np.bool_]]


@dataclass(frozen=True)
class Kind:
    """One kind of kernel.

    Parameters
    ----------
    name : of the kind. section : of the data file. read : its rows. seconds : rows -> (constants, levels) -> seconds.
    classes : rows -> label -> which. start : constants to begin from. free : name -> (least, most) of those to fit.
    base : another kind whose constants it begins from. own : of those, the ones it has otherwise. shipped : constants
    that the data file has. level : the key of its levels there; "" without any but its base's.
    """

    name: str
    section: str
    read: Callable[[], Kernels]
    seconds: Callable[[Kernels], Guess]
    classes: Callable[[Kernels], Classes]
    start: Mapping[str, float]
    free: Mapping[str, tuple[float, float]]
    shipped: frozenset[str]
    base: str = ""
    own: Mapping[str, float] = field(default_factory=dict)
    level: str = ""
