"""What one rank's profile saw, in whatever format it was written."""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from clustersim.core.label import Label
from clustersim.core.timeline import Timeline
from clustersim.explain.bounds import UNCOUNTED
from clustersim.files.traces.execution_trace import Operator
from clustersim.files.traces.samples import kind_of


@dataclass(frozen=True)
class RankCollective:
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
    doing: ScheduledAction | None = None
    purpose: str = ""
    told: Operator | None = None


class ProfiledWork(NamedTuple):
    """What a rank ran that is no collective, on the stream that the profiler names: times [s], ``call`` its launch's or
    nan; ``doing`` the action of a pipeline that it is the whole of; ``told`` as of :class:`RankCollective`;
    ``phase`` and ``unit`` (a layer) as far as somebody marked them."""

    name: str
    stream: str
    start: float
    end: float
    call: float
    step: int
    doing: ScheduledAction | None = None
    told: Operator | None = None
    phase: str = ""
    unit: str = ""


NCCL_KERNEL = re.compile(r"(?:void )?(?:nccl|rccl)\w*?_([A-Za-z]+?)(?:_|\(|$)")
"""The collective that a kernel of NCCL is named for."""
LIBRARY_KERNEL = re.compile(
    r"^(?:void )?(?:\w+::)*(?:(nccl(?:Dev)?Kernel(?:Debug)?_\w+)|nccl\w*Kernel|mscclp*Kernel|rccl|oneccl_|hccl|"
    r"ccl(?:_|::))"
)
"""Kernels of NCCL, RCCL, MSCCL, oneCCL and HCCL, as profilers name them."""
COMMUNICATORS = "nccl|gloo|rccl|ucc|xccl|hccl"
"""Libraries whose calls PyTorch annotates, ``nccl:all_reduce``: alternatives of a pattern."""
BEHIND = "what was launched behind the last step that is marked: it is in no figure"
UNNAMED = f"a collective's kernel without its name and size: {UNCOUNTED}"
UNSHAPED = "a collective without shapes"
"""How the reason begins for which an annotation is left out that is a collective itself."""
UNSIZED = (
    "NCCL's kernels of which neither size nor group is told: they are kept as measured, and what is transferring holds "
    "their wait for peers"
)


def unsized(
    kernel: str, start: float, end: float, step: int, rank: int, world: int, *, called: str = ""
) -> RankCollective | None:
    """A collective of which its kernel's name, or what the host ``called``, alone is known, in a group that no other
    rank is known to be in: kernels of ranks are not matched by guess. None where neither tells a collective."""
    match = NCCL_KERNEL.match(kernel)
    kind = (kind_of(match[1]) if match else None) or kind_of(called)
    if kind is None:
        return None
    group = f"of rank {rank}"
    return RankCollective(kind, start, end, 0.0, group, max(world, 2), (rank,), step=step, kernel=kernel)


@dataclass
class RankTrace:
    """One rank's profile; ``work`` is what its streams ran that is no collective, ``product_flops`` those of its
    matrix products in all steps, 0 where no shapes are told."""

    rank: int
    world: int
    source: str
    seen: list[RankCollective] = field(default_factory=list)
    work: list[ProfiledWork] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    host: str = ""
    device: str = ""
    base: int = 0
    backend: str = ""
    on_cpu: bool = False
    product_flops: float = 0.0

    @property
    def begin(self) -> float:
        """The first start [s]."""
        return min([record.start for record in self.seen] + [record.start for record in self.work])


PRODUCT_FLOPS = "FLOPs of products of rank "
"""How the entry of a Timeline's ``stats`` begins that has those of a rank's matrix products, of all steps."""
BACKEND = "backend: "
"""Of the entry of a Timeline's ``stats`` that names the library its collectives went through."""


_AS_NCCL = ("nccl", "rccl")
_UNNAMED = ("", "undefined", "custom")
"""What torch.distributed says of a process group whose library has no name of its own."""


def backend_of(timeline: Timeline) -> str | None:
    """The library that the trace says its GPUs' collectives went through: ``"nccl"``, RCCL's name too, ``"gloo"`` or
    another's, such as ``"xccl"``, Intel's; None where it does not.

    A process may have one of each kind of device (``"cpu:gloo,cuda:nccl"``): then the one that is not the CPU's.
    """
    told = next((name.removeprefix(BACKEND) for name in timeline.stats if name.startswith(BACKEND)), "")
    libraries = [part.rpartition(":")[2].strip().lower() for part in told.split(",")]
    named = [library for library in libraries if library not in _UNNAMED]
    found = next((library for library in named if library != "gloo"), named[0] if named else None)
    return "nccl" if found in _AS_NCCL else found


_NOTE = re.compile(r"^PP:(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)$")
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True)
class ScheduledAction:
    """An action of a schedule: the place of its rank in the pipeline, what ops of it belong to, and ``boundary``, of a
    message the lower of the two stages that it is between, as the schedule counts them."""

    stage: int
    label: Label
    boundary: int = -1

    @property
    def name(self) -> str:
        """In words."""
        return f"{NAMES[self.label.action]} {self.label.microbatch}"


class AnnotatedSchedule:
    """The actions of one rank, as PyTorch's pipeline runtime annotates them: ``PP:1F0`` is stage 1's forward of
    micro-batch 0 (torch/distributed/pipelining/schedules.py: ``_get_profiler_function_name``).

    ``F B I W`` compute; ``SEND_F RECV_F SEND_B RECV_B`` only post a message, which is waited for inside the action that
    needs it. So an action lasts from its first to its last operator, and not as long as its annotation. A rank with
    several stages of the schedule has several chunks of one stage here.

    ``notes`` : (name, start, end) of every annotation of its profile, of whatever kind.
    """

    def __init__(self, notes: Iterable[tuple[str, float, float]]) -> None:
        schedule_notes = sorted((start, end, name) for name, start, end in notes if name.startswith("PP:"))
        matches = [(start, end, _NOTE.match(name)) for start, end, name in schedule_notes]
        stages = sorted({int(match.group(1)) for _, _, match in matches if match})
        self._since = [start for start, _, _ in matches]
        self._until = [end for _, end, _ in matches]
        self._doing = [_doing(match, stages) if match else None for _, _, match in matches]

    def at(self, ts: float) -> ScheduledAction | None:
        """What the rank is doing at a time; None for nothing of its schedule."""
        i = bisect.bisect_right(self._since, ts) - 1
        return self._doing[i] if i >= 0 and ts <= self._until[i] else None


def _doing(match: re.Match[str], stages: list[int]) -> ScheduledAction:
    """``stages`` : those of the rank. The first says which place it has, in a loop as in a V."""
    stage = int(match.group(1))
    word = match.group(2)
    microbatch = int(match.group(3))
    label = Label(action=word[-1], microbatch=microbatch, chunk=stages.index(stage))
    if word in NAMES:
        return ScheduledAction(stages[0], label)
    label = Label(action=label.action, microbatch=microbatch, chunk=label.chunk, dim="pp")
    return ScheduledAction(stages[0], label, stage - (word in ("RECV_F", "SEND_B")))
