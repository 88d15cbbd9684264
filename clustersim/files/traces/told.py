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
    """What an NCCL log shows to be slower than it need be, or profiles do, in ``text``, and ``why``.

    kind : sockets, p2p_off, net_inside, gdr_off, far_nic, plugin_failed, few_channels, nvls_off, port_down
        or peer_lost; of profiles slow_data.
    place : of a port that is down or a NIC that is far, ``"node0/mlx5_0"``; of machines without GPUDirect, their names.
    costs_most : whether it is known to cost more than what ranks differ by.
    """

    kind: str
    text: str
    why: str
    place: str = ""
    costs_most: bool = False


class NcclLog(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """What NCCL says of itself.

    source : where it is from. lines : for people, the answer first. ranks, nodes : 0 where it does not say.
    channels : by sort. set : what the environment pins. transports : how many channels go by each.
    causes : what is slower than it need be; none where nothing is.
    hosts : rank -> machine, as far as lines say. nics : machine -> the NICs that NCCL uses there.
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
    hosts: Mapping[int, str] = {}
    nics: Mapping[str, list[str]] = {}


class CollectiveFault(msgspec.Struct, frozen=True):
    """The first collective of a group that did not end on all its ranks, or that differs between them, in ``text``.

    missing : who never called it. waiting : who did, and has not ended it. no_dump : of whom nothing is known.
    cause : never_called, differs, not_started, none_started, not_ended, no_dump, stuck_together, or of a message
        no_peer. look_at : the ranks to look at; empty for all. where : the line of code that called it.
    advice : what to look at there. differs_in : of calls that differ, ``kind``, ``size``, ``type``, ``order``,
        ``skipped`` or ``extra``.
    called : by the ranks to look at, where their calls differ. elsewhere : of ranks that are missing, whether they wait
        in another group whose other ranks never came.
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
    differs_in: str = ""
    called: str = ""
    elsewhere: bool = False


class ProcessExit(msgspec.Struct, frozen=True):
    """A process whose end torchrun tells: its rank, its machine, and its exit code, below 0 a signal's number; whether
    it was the ``first`` of its machine."""

    rank: int
    host: str
    code: int
    first: bool


class HangReport(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Why the ``ranks`` whose dumps are here wait; ``lines`` : for people, the answer first.

    told_to_dump : ranks whose log says that another one timed out first. exits : of processes, as torchrun tells them.
    skipped : what was left out, reason -> how many.
    """

    source: str
    lines: list[str]
    ranks: list[int]
    faults: list[CollectiveFault]
    skipped: Mapping[str, int] = {}
    told_to_dump: list[int] = []
    exits: list[ProcessExit] = []


class LoggedPart(msgspec.Struct, frozen=True):
    """A part of a step as a framework logs it: medians of the least and the most over ranks [s], and how often; and
    both [s] of every step in their ``course``."""

    name: str
    least_s: float
    most_s: float
    count: int
    course: list[tuple[float, float]] = []


class TrainingLog(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Step times that a framework logged.

    source : where it is from. lines : for people, the answer first. steps : how many times of steps are logged.
    step_time_s : float [s], their median without the first; None where the log has none.
    parts : of a step. rates : medians of what is logged of its speed, by name and unit.
    times : step number and seconds of each.
    """

    source: str
    lines: list[str]
    framework: str
    steps: int
    step_time_s: float | None
    parts: list[LoggedPart]
    rates: Mapping[str, float]
    skipped: Mapping[str, int] = {}
    times: list[tuple[int, float]] = []


class NicPort(msgspec.Struct, frozen=True):
    """A port of a NIC: its machine, ``device`` (mlx5_0) and number; ``state`` 4 is active; ``rate`` [bytes/s] as it has
    trained; how often its link went down (``downs``); bytes ``sent`` and ``received``; for how many ticks it ``waited``
    with something to send."""

    host: str
    device: str
    port: int
    state: int
    rate: float
    downs: int
    sent: float
    received: float
    waited: float = 0.0

    @property
    def name(self) -> str:
        """``"node0/mlx5_0"``."""
        return f"{self.host}/{self.device}"


class GpuCounters(msgspec.Struct, frozen=True):
    """A GPU of a machine: its number there, ``clock`` of its SMs [MHz], ``temperature`` [deg C], rows of memory that it
    ``remapped`` after an error, and the last ``xid`` its driver logged; 0 for none."""

    host: str
    gpu: int
    clock: float
    temperature: float
    remapped: int = 0
    xid: int = 0

    @property
    def name(self) -> str:
        """``"node0/gpu3"``."""
        return f"{self.host}/gpu{self.gpu}"


class LinkCounters(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """What ports of NICs count, and what GPUs tell; ``lines`` : for people, what is odd first. ``skipped`` : what was
    left out, reason -> how many."""

    source: str
    lines: list[str]
    ports: list[NicPort]
    skipped: Mapping[str, int] = {}
    gpus: list[GpuCounters] = []


class Cabling(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """Which switch each NIC's cable is in: ``"node0/mlx5_0"`` -> the switch; ``lines`` : for people, what is odd first;
    ``odd`` : NICs in another switch than those of the same number at other machines."""

    source: str
    lines: list[str]
    switches: Mapping[str, str]
    odd: list[str]
    skipped: Mapping[str, int] = {}


class KernelSum(msgspec.Struct, frozen=True):
    """A kernel by its ``name``: how often it ran, and for how long in all [s]."""

    name: str
    count: int
    total_s: float


class KernelSums(msgspec.Struct, frozen=True, tag_field="what", tag="told"):
    """How long the kernels of a run took, all devices together, the longest first; ``lines`` : for people. ``skipped``
    : what was left out, reason -> how many."""

    source: str
    lines: list[str]
    kernels: list[KernelSum]
    skipped: Mapping[str, int] = {}


Told: TypeAlias = NcclLog | HangReport | TrainingLog | LinkCounters | Cabling | KernelSums
"""What a log tells."""
