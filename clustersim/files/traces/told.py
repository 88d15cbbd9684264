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


class NcclLog(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """What NCCL says of itself.

    source : where it is from. lines : for people, the answer first. ranks, nodes : 0 where it does not say.
    channels : by sort. set : what the environment pins. transports : how many channels go by each.
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


class CollectiveFault(msgspec.Struct, frozen=True):
    """The first collective of a group that not all ranks have called, or that differs between them, in ``text``."""

    group: str
    seq: int
    name: str
    missing: list[int]
    waiting: list[int]
    no_dump: list[int]
    text: str


class HangReport(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Why the ``ranks`` whose dumps are here wait; ``lines`` : for people, the answer first. ``skipped`` : what was
    left out, reason -> how many."""

    source: str
    lines: list[str]
    ranks: list[int]
    faults: list[CollectiveFault]
    skipped: Mapping[str, int] = {}


Told: TypeAlias = NcclLog | HangReport
"""What a log tells."""
