"""What one rank's profile saw, in whatever format it was written."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from clustersim.timeline import Timeline
from clustersim.traces.execution_trace import Operator
from clustersim.traces.stages import Doing


@dataclass(frozen=True)
class Seen:
    """A collective as one rank saw it: ``start``, ``end`` [s] of its kernel, ``nbytes`` NCCL's S.

    ``group`` is the communicator's name, ``members`` its ranks (empty: not said), ``size`` how many they are.
    ``doing`` is the action of a pipeline that posted it, ``purpose`` what the program calls the group (``"mesh_dp"``).
    ``told`` is what an execution trace says of it.
    """

    kind: str
    start: float
    end: float
    nbytes: float
    group: str
    size: int
    members: tuple[int, ...] = ()
    seq: int | None = None
    dtype: str = ""
    step: int = 0
    kernel: str = ""
    doing: Doing | None = None
    purpose: str = ""
    told: Operator | None = None


class Work(NamedTuple):
    """What a rank ran that is no collective, on the stream that the profiler names: times [s], ``call`` its launch's or
    nan; ``doing`` the action of a pipeline that it is the whole of; ``told`` as of :class:`Seen`;
    ``phase`` and ``unit`` (a layer) as far as somebody marked them."""

    name: str
    stream: str
    start: float
    end: float
    call: float
    step: int
    doing: Doing | None = None
    told: Operator | None = None
    phase: str = ""
    unit: str = ""


@dataclass
class RankTrace:
    """One rank's profile; ``work`` is what its streams ran that is no collective."""

    rank: int
    world: int
    source: str
    seen: list[Seen] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    host: str = ""
    device: str = ""
    base: int = 0
    backend: str = ""

    def ends(self) -> tuple[float, float]:
        """First start and last end [s]."""
        times = [(s.start, s.end) for s in self.seen] + [(w.start, w.end) for w in self.work]
        return min(t[0] for t in times), max(t[1] for t in times)


BACKEND = "backend: "
"""Of the entry of a Timeline's ``stats`` that names the library its collectives went through."""


def backend_of(timeline: Timeline) -> str | None:
    """``"gloo"`` or ``"nccl"``, as the trace says; None where it does not."""
    said = [name.removeprefix(BACKEND) for name in timeline.stats if name.startswith(BACKEND)]
    if not said:
        return None
    return "gloo" if "gloo" in said[0] and "ccl" not in said[0] else "nccl"
