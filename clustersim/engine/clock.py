"""Simulated time: SimPy's environment, with moments given as absolute times.

SimPy counts delays from now, and ``now + (t - now)`` need not be ``t`` in floating point. Things that happen at one
instant must *be* at one instant here, or a network would be solved once per rounding error.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, Event, EventPriority

SOLVE = EventPriority(2)
"""Rates are solved once everything else that happens at an instant has happened."""

RELEASE = EventPriority(3)
"""Parked compute starts after every transfer that ends at the same instant has ended."""


class Clock(simpy.Environment):
    """SimPy's environment that also takes absolute times. Ties: time, then priority, then order of asking."""

    def __init__(self) -> None:
        super().__init__()
        self.n_events = 0

    def call(self, time: float, function: Callable[..., None], *args: Any, priority: EventPriority = NORMAL) -> Event:
        """Call ``function(*args)`` exactly at ``time`` [s], not before now; returns the SimPy event."""
        event = Event(self)
        event._ok, event._value = True, None  # as simpy.Timeout does: triggered from the start, processed later
        event.callbacks.append(lambda _: function(*args))
        heappush(self._queue, (max(time, self.now), priority, next(self._eid), event))
        self.n_events += 1
        return event

    def drop(self, event: Event) -> bool:
        """Take back a call if it is the next event; False, and nothing done, if it is not."""
        if not self._queue or self._queue[0][3] is not event:
            return False
        heappop(self._queue)
        return True
