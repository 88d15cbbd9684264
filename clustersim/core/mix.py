"""What the seconds of a run of kernels are spent on, class by class: the finest that a plan knows below an op."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class Mix(msgspec.Struct, frozen=True, gc=False):
    """Seconds of a compute op at its rank's usual pace; they add up to it.

    Parameters
    ----------
    peak : FLOPs executed for the first time, at the device's dense peak in the run's dtype.
    products : what kernels limited by arithmetic (matrix products, convolutions, attention) take beyond that.
    memory : what kernels limited by memory traffic take beyond it.
    launch : the fixed cost of kernels, and the host where it launches them more slowly than they run.
    again : everything of a repeated forward (activation checkpointing).
    unfilled : of what kernels limited by arithmetic take beyond the peak, what each of twice as many samples would
        save, by SMs for which there are too few now.
    """

    peak: float = 0.0
    products: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    again: float = 0.0
    unfilled: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.peak + self.products + self.memory + self.launch + self.again + self.unfilled

    def times(self, share: float) -> Mix:
        """So many of it.

        >>> Mix(peak=2.0, memory=1.0).times(0.5)
        Mix(peak=1.0, products=0.0, memory=0.5, launch=0.0, again=0.0, unfilled=0.0)
        """
        if share == 1.0:
            return self
        return Mix(*(share * seconds for seconds in msgspec.structs.astuple(self)))


def total(mixes: Iterable[Mix]) -> Mix:
    """Several one behind the other.

    >>> total([Mix(peak=1.0), Mix(launch=2.0)]).seconds
    3.0
    """
    columns = zip(*map(msgspec.structs.astuple, mixes), strict=True)
    return Mix(*(sum(column) for column in columns))
