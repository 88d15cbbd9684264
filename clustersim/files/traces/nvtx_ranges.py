"""NVTX ranges that people mark themselves: the step, phase and layer of what is launched in them."""

from __future__ import annotations

import bisect
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_STEP = re.compile(r"(?:step|iteration|iter|batch)[\s_:#=-]*(\d{1,9})\b", re.I)
_PHASES = {
    "forward": re.compile(r"forward|\bfwd|_fwd", re.I),
    "backward": re.compile(r"backward|\bbwd|_bwd", re.I),
    "optimizer": re.compile(r"optimi[sz]er|optim_?step", re.I),
}
_NOT_OURS = re.compile(r"nccl|aten::|autograd::|cub::|thrust::|c10d::", re.I)
"""Ranges of libraries, not of a person's model."""


class RangeContext(NamedTuple):
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
            thread_rows = self._of[thread]
            above = len(thread_rows) - 1
            while above >= 0 and thread_rows[above][1] < end:
                above = thread_rows[above][3]
            thread_rows.append((start, end, name, above))
        self._family, self._steps = self._numbered()
        self._starts = [start for start, _ in self._steps]
        self._last = max((end for _, end, name, _ in self._all() if self._step_of(name) >= 0), default=math.inf)

    def _all(self) -> Iterator[tuple[int, int, str, int]]:
        return (row for thread_rows in self._of.values() for row in thread_rows)

    def _numbered(self) -> tuple[str, list[tuple[int, int]]]:
        """The words that number the steps, and (start, number) of each: of several, such as ``batch 3`` inside of
        ``iteration 5``, those that are counted on and whose ranges last longest together."""
        lasting: Counter[str] = Counter()
        numbers: defaultdict[str, dict[int, int]] = defaultdict(dict)
        for start, end, name, _ in self._all():
            if match := _STEP.search(name):
                word = name[: match.start(1)]
                lasting[word] += end - start
                numbers[word].setdefault(int(match[1]), start)
        counted = [word for word in lasting if len(numbers[word]) > 1] or list(lasting)
        family = max(counted, key=lambda word: lasting[word], default="")
        return family, sorted((start, number) for number, start in numbers[family].items())

    def _step_of(self, name: str) -> int:
        """The number of a step's range; -1 for another range."""
        match = _STEP.search(name)
        return int(match[1]) if match and name[: match.start(1)] == self._family else -1

    def step(self, time: float, thread: int) -> int | None:
        """The step of what is launched at a time: between two steps the one before; 0 before the first and where none
        is marked; None behind the last."""
        inside = self.at(time, thread).step
        if inside >= 0 or not self._steps:
            return max(inside, 0)
        if time > self._last:
            return None
        position = bisect.bisect_right(self._starts, time) - 1
        return self._steps[position][1] if position >= 0 else 0

    def at(self, time: float, thread: int) -> RangeContext:
        """What is done at a time on a thread, whose step and phase another thread may tell: autograd has its own."""
        doing = self._told(time, thread)
        for other_thread in self._of:
            if doing.step >= 0 and doing.phase:
                break
            other_doing = self._told(time, other_thread)
            doing = RangeContext(max(doing.step, other_doing.step), doing.phase or other_doing.phase, doing.unit)
        return doing if doing.phase or doing.step >= 0 else RangeContext()

    def _told(self, time: float, thread: int) -> RangeContext:
        thread_rows = self._of.get(thread, [])
        step = -1
        phase = ""
        unit = ""
        position = bisect.bisect_right(thread_rows, time, key=lambda row: row[0]) - 1
        while position >= 0:
            _, end, name, above = thread_rows[position]
            if end >= time:
                numbered = _STEP.search(name)
                named = next((word for word, pattern in _PHASES.items() if pattern.search(name)), "")
                if not (unit or numbered or named or phase or step >= 0):
                    unit = name
                step = self._step_of(name) if step < 0 else step
                phase = phase or named
            position = above
        return RangeContext(step, phase, unit)
