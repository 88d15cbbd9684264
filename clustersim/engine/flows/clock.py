"""Simulated time, as SimPy's environment with moments given as absolute times.

SimPy counts delays from now, and ``now + (t - now)`` need not be ``t`` in floating point. Things that happen at one
instant must *be* at one instant here, or a network would be solved once per rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import simpy

NORMAL = 1
"""What happens at an instant, in SimPy's order of priorities."""

SOLVE = 2
"""Rates are solved once everything else that happens at an instant has happened."""

RELEASE = 3
"""Parked compute starts after every transfer that ends at the same instant has ended."""


class _ClockCall:
    """An event as SimPy's environment asks for one: all it does is to call a function."""

    __slots__ = ("args", "callbacks", "function")
    _ok = True

    def __init__(self, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.callbacks = _DO

    def do(self) -> None:
        """Call it."""
        self.function(*self.args)


_DO = (_ClockCall.do,)


class Clock:
    """SimPy's environment, given absolute times. Ties: time, then priority, then order of asking.

    SimPy is loaded with the first call: most runs share no link and ask for none, and to load it takes as long as a
    small run.

    now : [s]. n_events : calls so far.
    """

    def __init__(self) -> None:
        self._environment: simpy.Environment | None = None
        self._queue: list[Any] = []
        self._last: Callable[[], None] | None = None
        self.now = 0.0
        self.n_events = 0

    def peek(self) -> float:
        """When something happens next [s]; inf for never."""
        if self._last:
            return self.now
        return self._queue[0][0] if self._queue else np.inf

    def step(self) -> None:
        """Let it happen."""
        if self._environment is not None and (not self._last or self._goes_on()):
            self.now = self._queue[0][0]
            self._environment.step()
        if self._last and not self._goes_on():
            last = self._last
            self._last = None
            last()

    def _goes_on(self) -> bool:
        """Whether more happens at this instant, before rates are solved."""
        queue = self._queue
        return bool(queue) and queue[0][0] <= self.now and queue[0][1] <= SOLVE

    def last(self, function: Callable[[], None]) -> None:
        """Call it once everything else that happens at this instant has happened."""
        self._last = function

    def call(self, time: float, function: Callable[..., None], *args: Any, priority: int = NORMAL) -> None:
        """Call ``function(*args)`` exactly at ``time`` [s], not before now."""
        if self._environment is None:
            import simpy

            self._environment = simpy.Environment()
            self._queue = self._environment._queue
        self.n_events += 1
        when = time if time > self.now else self.now
        heappush(self._queue, (when, priority, self.n_events, _ClockCall(function, args)))
