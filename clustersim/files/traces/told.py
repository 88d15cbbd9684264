"""What a file says that is neither a run nor a benchmark: a hang's last collectives, NCCL's own choices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec


class LoggedChoice(msgspec.Struct, frozen=True):
    """What NCCL chose for a collective of so many bytes, and how often; ``channels`` 0: the log does not say."""

    kind: str
    nbytes: int
    algorithm: str
    protocol: str
    channels: int
    count: int


class SimulatedChoice(msgspec.Struct, frozen=True):
    """What this program chooses."""

    algorithm: str
    protocol: str
    channels: int


class ChoiceComparison(LoggedChoice, frozen=True):
    """NCCL's choice beside ours; the ``same`` where algorithm and protocol are."""

    ours: SimulatedChoice
    same: bool


class Cause(msgspec.Struct, frozen=True):
    """What an NCCL log shows to be slower than it need be, in ``text``, and ``why``.

    kind : sockets, p2p_off, net_inside, gdr_off, far_nic, plugin_failed, few_channels or nvls_off.
    """

    kind: str
    text: str
    why: str


class NcclLog(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """What NCCL says of itself.

    source : where it is from. lines : for people, the answer first. ranks, nodes : 0 where it does not say.
    channels : by sort. set : what the environment pins. transports : how many channels go by each.
    causes : what is slower than it need be; none where nothing is.
    skipped : what was left out, reason -> how many.
    """

    source: str
    lines: list[str]
    versions: list[str]
    ranks: int
    nodes: int
    channels: Mapping[str, int]
    set: Mapping[str, str]
    transports: Mapping[str, int]
    choices: list[LoggedChoice]
    skipped: Mapping[str, int] = {}
    causes: list[Cause] = []


class CollectiveFault(msgspec.Struct, frozen=True):
    """The first collective of a group that did not end on all its ranks, or that differs between them, in ``text``.

    missing : who never called it. waiting : who did, and has not ended it. no_dump : of whom nothing is known.
    cause : never_called, differs, not_started, none_started, not_ended, no_dump, stuck_together, or of a message
        no_peer. look_at : the ranks to look at; empty for all. where : the line of code that called it.
    advice : what to look at there.
    """

    group: str
    seq: int
    name: str
    missing: list[int]
    waiting: list[int]
    no_dump: list[int]
    text: str
    cause: str = "never_called"
    look_at: list[int] = []
    where: str = ""
    advice: str = ""


class HangReport(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Why the ``ranks`` whose dumps are here wait; ``lines`` : for people, the answer first. ``skipped`` : what was
    left out, reason -> how many."""

    source: str
    lines: list[str]
    ranks: list[int]
    faults: list[CollectiveFault]
    skipped: Mapping[str, int] = {}


class LoggedPart(msgspec.Struct, frozen=True):
    """A part of a step as a framework logs it: medians of the least and the most over ranks [s], and how often."""

    name: str
    least_s: float
    most_s: float
    count: int


class TrainingLog(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Step times that a framework logged.

    source : where it is from. lines : for people, the answer first. steps : how many times of steps are logged.
    step_time_s : float [s], their median without the first; None where the log has none.
    parts : of a step. rates : medians of what is logged of its speed, by name and unit.
    """

    source: str
    lines: list[str]
    framework: str
    steps: int
    step_time_s: float | None
    parts: list[LoggedPart]
    rates: Mapping[str, float]
    skipped: Mapping[str, int] = {}


Told: TypeAlias = NcclLog | HangReport | TrainingLog
"""What a log tells."""
