"""Kernels that only move data: casts, convolutions along a sequence, copies.

::

    t = start / f + bytes / (stream BW)

One kernel that streams runs near STREAM however it came to be; what a chain of eager kernels costs is its bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from clustersim.core.arrays import Floats
from clustersim.model.seconds.kernel_law.sheet import Sheet


@dataclass(frozen=True)
class StreamLaw:
    """``start`` : [clocks], of a kernel. ``stream`` : share of the nominal bandwidth."""

    start: float
    stream: float


def stream_seconds(law: StreamLaw, sheet: Sheet, nbytes: Floats) -> Floats:
    """Seconds of one kernel that reads and writes so many bytes together."""
    total: Floats = law.start / sheet.clock + nbytes / (law.stream * sheet.bandwidth)
    return total
