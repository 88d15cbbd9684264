"""What a host did while its GPU had nothing to run, as a profile of both names it.

A GPU whose host launches kernels too slowly idles often and for microseconds. One that idles for longer waits for
something else: a data loader, an optimizer on the CPU, memory that is allocated anew. The profiler has the name of it,
where PyTorch or the user annotated it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from clustersim.core.program import DATA_LOADER
from clustersim.files.traces.profiled import COMMUNICATORS

LONG = 1e-3
"""Seconds that a GPU has nothing to run from which on its host is said to be busy with something else than launching: a
hundred launches take less."""

_LOADER = re.compile(r"^enumerate\(DataLoader\)#")
"""How torch.utils.data calls the wait for its next batch."""
_ALLOCATES = re.compile(r"^(?:cuda|hip)(?:Malloc|Free|HostAlloc|HostFree|HostRegister)|^cuMem(?:Alloc|Free|Create|Map)")
"""Calls that reserve memory or give it back, which wait for the device."""
_BROAD = re.compile(rf"^(?:ProfilerStep#|PP:|(?:{COMMUNICATORS}):)")
"""Annotations that say what a GPU does, or no more than that a step is under way."""


class HostCall(NamedTuple):
    """Something that a host did: its name, when it began and ended [s], and its step where the file says it."""

    name: str
    start: float
    end: float
    step: int | None = None


def short_name(name: str) -> str:
    """What an annotation or a call is told by; empty where it says nothing of a gap.

    >>> short_name("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"), short_name("ProfilerStep#3")
    ('data loader', '')
    """
    if _BROAD.match(name):
        return ""
    if _LOADER.match(name):
        return DATA_LOADER
    return "allocating memory" if _ALLOCATES.match(name) else name


def host_work(busy: Iterable[tuple[float, float]], calls: Sequence[HostCall], begin: float) -> list[HostCall]:
    """The parts of calls in which the GPU had nothing to run for :data:`LONG` and more, the innermost call's each.

    ``busy`` : (start, end) [s] of everything that the GPU ran. ``begin`` : of its first step [s], or inf.
    """
    parts: list[HostCall] = []
    ahead = deque(sorted(calls, key=lambda call: call.start))
    inside: list[HostCall] = []
    for free, stop in _gaps(busy, begin):
        while ahead and ahead[0].start < stop:
            inside.append(ahead.popleft())
        inside = [call for call in inside if call.end > free]
        edges = {free, stop, *(min(max(edge, free), stop) for call in inside for edge in (call.start, call.end))}
        for start, end in itertools.pairwise(sorted(edges)):
            covering = [call for call in inside if call.start <= start and call.end >= end]
            if covering:
                innermost = max(covering, key=lambda call: (call.start, -call.end))
                _append(parts, innermost._replace(start=start, end=end))
    return [part for part in parts if part.end - part.start >= LONG]


def _append(parts: list[HostCall], part: HostCall) -> None:
    """Behind the last, or as a longer last where it goes on."""
    if parts and parts[-1].end == part.start and parts[-1].name == part.name:
        part = part._replace(start=parts.pop().start)
    parts.append(part)


def _gaps(busy: Iterable[tuple[float, float]], begin: float) -> Iterator[tuple[float, float]]:
    """Where nothing ran for :data:`LONG`, from ``begin`` to the last that did."""
    free = begin
    for start, end in sorted(busy):
        if start - free >= LONG:
            yield free, start
        free = end if free == math.inf else max(free, end)
