"""How far a search is: by the seconds that its work has taken, and those that what is left is likely to take.

A search looks at every option, runs some of them first, and of these a few again as near to whole as they can be. A
whole run may take a hundred times as long as a look, so that options are no measure: each *stage* has a size in units
of its own work, and what a unit takes is learned from those that are over.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SCALE = 1000
"""Parts of all work that are told."""
LOOKS, FIRST_RUNS, LAST_RUNS = "looks", "first runs", "last runs"
LONG = {LOOKS: 0.05, FIRST_RUNS: 1.0, LAST_RUNS: 10.0}
"""Seconds of a unit of a stage of which none is over: rather too long, since what is told goes ahead and never back."""
TIMES = 10.0
"""How many times as long as one of the stage before such a unit takes, where that is more."""


@dataclass
class StageOfWork:
    """``size`` units, of which so many are ``over``; and the ``seconds`` these took."""

    size: float = 0.0
    over: float = 0.0
    seconds: float = 0.0

    @property
    def left(self) -> float:
        """Units that are left."""
        return max(self.size - self.over, 0.0)


@dataclass
class WorkLeft:
    """What is told of a search's progress; never less than before.

    tell : called with (done, all) in parts of :data:`SCALE`; None for nobody. clock : seconds.
    """

    tell: Callable[[int, int], None] | None
    clock: Callable[[], float] = time.monotonic
    stages: dict[str, StageOfWork] = field(init=False)
    _now: StageOfWork | None = None
    _since: float = 0.0
    _ends: float = 0.0
    _told: int = 0

    def __post_init__(self) -> None:
        self.stages = {name: StageOfWork() for name in LONG}

    def expect(self, name: str, size: float) -> None:
        """A stage that is to come has about so many units."""
        self.stages[name].size = size

    def begin(self, name: str, size: float) -> None:
        """A stage of so many units begins; what came before it is over."""
        for stage in self.stages.values():
            if stage is self.stages[name]:
                break
            stage.size = stage.over
        self._now = self.stages[name]
        self._now.size = size
        self._since = self.clock()
        self._ends = 0.0

    def running(self, left: float, ends: float) -> None:
        """Units that are ``left`` behind those that run now, which the next ``ends`` units are; others need no run."""
        if self._now is not None:
            self._ends = self._now.size - left
            self._set(self._ends - ends)

    def ended(self, units: float) -> None:
        """So many units that ran are over."""
        if self._now is not None:
            self._set(min(self._now.over + units, self._ends) if self._ends else self._now.over + units)

    def round_over(self) -> None:
        """All that ran are over, those among them that were known."""
        self._set(self._ends)

    @property
    def seconds_left(self) -> float:
        """What is left is likely to take [s]."""
        seconds = 0.0
        unit = 0.0
        for name, stage in self.stages.items():
            unit = stage.seconds / stage.over if stage.over > 0 else max(LONG[name], TIMES * unit)
            seconds += unit * stage.left
        return seconds

    def _set(self, over: float) -> None:
        stage = self._now
        if stage is None:
            return
        stage.over = max(over, stage.over)
        stage.seconds = self.clock() - self._since
        spent = sum(each.seconds for each in self.stages.values())
        left = self.seconds_left
        part = spent / (spent + left) if spent + left > 0 else 0.0
        self._told = max(self._told, min(int(SCALE * part), SCALE))
        if self.tell is not None:
            self.tell(self._told, SCALE)
