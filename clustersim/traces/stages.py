"""What PyTorch's pipeline runtime writes into a profile: ``PP:1F0`` is stage 1's forward of micro-batch 0.

Every action of a schedule is annotated with its word (torch/distributed/pipelining/schedules.py:
``_get_profiler_function_name``). ``F B I W`` compute; ``SEND_F RECV_F SEND_B RECV_B`` only post a message, which is
waited for inside the action that needs it. So an action lasts from its first to its last operator, and not as long as
its annotation. A rank with several stages of the schedule has several chunks of one stage here.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass

from clustersim.label import Label

_NOTE = re.compile(r"^PP:(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)$")
NAMES = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "backward"}


@dataclass(frozen=True)
class Doing:
    """An action of a schedule: the place of its rank in the pipeline, what ops of it belong to, and ``boundary``, of a
    message the lower of the two stages that it is between, as the schedule counts them."""

    stage: int
    label: Label
    boundary: int = -1

    @property
    def name(self) -> str:
        """In words."""
        return f"{NAMES[self.label.action]} {self.label.microbatch}"


class Schedule:
    """The actions of one rank. ``notes`` : (name, start, end) of every annotation of its profile, of whatever kind."""

    def __init__(self, notes: Iterable[tuple[str, float, float]]) -> None:
        words = sorted((start, end, name) for name, start, end in notes if name.startswith("PP:"))
        found = [(start, end, _NOTE.match(name)) for start, end, name in words]
        stages = sorted({int(match.group(1)) for _, _, match in found if match})
        self._since = [start for start, _, _ in found]
        self._until = [end for _, end, _ in found]
        self._doing = [_doing(match, stages) if match else None for _, _, match in found]

    def at(self, ts: float) -> Doing | None:
        """What the rank is doing at a time; None for nothing of its schedule."""
        i = bisect.bisect_right(self._since, ts) - 1
        return self._doing[i] if i >= 0 and ts <= self._until[i] else None


def _doing(match: re.Match[str], stages: list[int]) -> Doing:
    """``stages`` : those of the rank. The first says which place it has, in a loop as in a V."""
    stage, word, microbatch = int(match.group(1)), match.group(2), int(match.group(3))
    label = Label(action=word[-1], microbatch=microbatch, chunk=stages.index(stage))
    if word in NAMES:
        return Doing(stages[0], label)
    label = Label(action=label.action, microbatch=microbatch, chunk=label.chunk, dim="pp")
    return Doing(stages[0], label, stage - (word in ("RECV_F", "SEND_B")))
