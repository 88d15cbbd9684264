"""What people's NVTX ranges say of a kernel: its step, its phase and its layer, by the ranges its launch lies in."""

from __future__ import annotations

import bisect
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

_STEP = re.compile(r"(?:step|iteration|iter|batch)[\s_:#=-]*(\d{1,9})\b", re.I)
_PHASES = {"forward": re.compile(r"forward|\bfwd|_fwd", re.I), "backward": re.compile(r"backward|\bbwd|_bwd", re.I),
           "optimizer": re.compile(r"optimi[sz]er|optim_?step", re.I)}  # fmt: skip
_NOT_OURS = re.compile(r"nccl|aten::|autograd::|cub::|thrust::|c10d::", re.I)
"""Ranges of libraries, not of a person's model."""


class Doing(NamedTuple):
    """``phase`` empty and ``step`` -1 for nothing that is known; ``unit`` the innermost range, within its phase or its
    step, that names neither."""

    step: int = -1
    phase: str = ""
    unit: str = ""


class Ranges:
    """Ranges of one process. ``rows`` : (start, end, name, thread), times in one unit."""

    def __init__(self, rows: Iterable[tuple[int, int, str, int]]) -> None:
        self._of: defaultdict[int, list[tuple[int, int, str, int]]] = defaultdict(list)
        ours = (row for row in rows if not _NOT_OURS.match(row[2]))
        for start, end, name, thread in sorted(ours, key=lambda row: (row[0], -row[1], row[2])):
            mine = self._of[thread]
            above = len(mine) - 1
            while above >= 0 and mine[above][1] < end:
                above = mine[above][3]
            mine.append((start, end, name, above))

    def at(self, time: float, thread: int) -> Doing:
        """What is done at a time on a thread, whose step and phase another thread may tell: autograd has its own."""
        found = self._told(time, thread)
        for other in self._of:
            if found.step >= 0 and found.phase:
                break
            told = self._told(time, other)
            found = Doing(max(found.step, told.step), found.phase or told.phase, found.unit)
        return found if found.phase or found.step >= 0 else Doing()

    def _told(self, time: float, thread: int) -> Doing:
        mine, step, phase, unit = self._of.get(thread, []), -1, "", ""
        at = bisect.bisect_right(mine, time, key=lambda row: row[0]) - 1
        while at >= 0:
            _, end, name, above = mine[at]
            if end >= time:
                numbered = _STEP.search(name)
                named = next((word for word, pattern in _PHASES.items() if pattern.search(name)), "")
                if not (unit or numbered or named or phase or step >= 0):
                    unit = name
                step = int(numbered[1]) if numbered and step < 0 else step
                phase = phase or named
            at = above
        return Doing(step, phase, unit)
