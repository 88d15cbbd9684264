"""Simulated time, as SimPy's environment with moments given as absolute times; and servers, first come, first served.

SimPy counts delays from now, and ``now + (t - now)`` need not be ``t`` in floating point. Things that happen at one
instant must *be* at one instant here, or a network would be solved once per rounding error.

A :class:`~clustersim.program.Serve` op that is ready is parked until the clock has reached its ready time: only then is
it certain that nobody came before it. From there on nothing can overtake it, so its start and end are known at once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import simpy
from simpy.events import NORMAL, Event, EventPriority

from clustersim.engine.order import Task

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


Served: TypeAlias = tuple[Task, int, float, float]
"""A task, the position of the rank in its role, and when it starts and ends there [s]."""


class Queues:
    """One queue per rank and stream that holds Serve ops.

    Parameters
    ----------
    clock : tells when somebody's turn to queue up has come. on_served : called with what was served, in order.
    """

    def __init__(self, clock: Clock, on_served: Callable[[list[Served]], None]) -> None:
        self.clock, self.on_served = clock, on_served
        self._coming: list[tuple[float, tuple[int, int], int, Task]] = []
        self._free: dict[tuple[int, str, int], float] = {}
        self._calls: set[float] = set()

    def arrive(self, task: Task, who: npt.NDArray[np.int64] | slice) -> None:
        """These ranks' ops are ready at their ready times, now or later."""
        positions = np.arange(task.n)[who].tolist()
        times = np.broadcast_to(np.asarray(task.ready), (task.n,))[who].tolist()
        for position, ready in zip(positions, times, strict=True):
            heappush(self._coming, (ready, task.key, position, task))
            if ready not in self._calls:
                self._calls.add(ready)
                # After every transfer that ends at the same instant, so that ties go by place in the list.
                self.clock.call(ready, self._due, ready, priority=RELEASE)

    def _due(self, moment: float) -> None:
        self._calls.discard(moment)
        served: list[Served] = []
        while self._coming and self._coming[0][0] <= self.clock.now:
            ready, key, position, task = heappop(self._coming)
            queue = (key[0], task.op.stream, position)
            start = max(ready, self._free.get(queue, 0.0))
            seconds = task.seconds
            self._free[queue] = start + float(seconds if isinstance(seconds, float) else seconds[position])
            served.append((task, position, start, self._free[queue]))
        self.on_served(served)
