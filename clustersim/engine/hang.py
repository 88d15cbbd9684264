"""A run that cannot go on: what every rank had called by then, who waits for whom, and when each watchdog would say so.

Two modules: the nouns here, and :mod:`clustersim.engine.standstill`, which derives them from a run that went well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from clustersim.core.errors import few
from clustersim.core.units import Seconds, format_bytes, format_long, format_time

SHOWN = 8
"""Ranks named in a line."""


class Watchdogs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[watchdog]``: after how long the timers of a job end it where it hangs; defaults are PyTorch 2.13's.

    Parameters
    ----------
    c10d_timeout : ``init_process_group(timeout=)``, of each collective from its call on; 10 min of NCCL, 30 min of
        other backends when absent. monitor_interval : of torchrun, how often it looks at its processes; 0.1 s when
        absent.
    ib_timeout, ib_retries : ``NCCL_IB_TIMEOUT`` and ``NCCL_IB_RETRY_CNT``: a NIC gives a message up after 4.096 us
        times 2 to the power of the one, as often as the other (NCCL's documentation of both).
    """

    c10d_timeout: Seconds | None = None
    monitor_interval: Seconds | None = None
    ib_timeout: int = 20
    ib_retries: int = 7

    def __post_init__(self) -> None:
        if not (0 <= self.ib_timeout <= 31 and 1 <= self.ib_retries <= 7):
            raise ValueError("ib_timeout is from 0 to 31, and ib_retries from 1 to 7")

    def timeout(self, backend: str) -> float:
        """Seconds that a collective may take."""
        if self.c10d_timeout is not None:
            return float(self.c10d_timeout)
        return 600.0 if backend == "nccl" else 1800.0

    @property
    def interval(self) -> float:
        """Seconds between two looks of a launcher at its processes."""
        return 0.1 if self.monitor_interval is None else float(self.monitor_interval)

    @property
    def ib_gives_up(self) -> float:
        """Seconds after which a NIC reports that its peer is gone."""
        return 4.096e-6 * float(2**self.ib_timeout) * self.ib_retries


class RankCall(msgspec.Struct, frozen=True):
    """A communication as one rank called it.

    Parameters
    ----------
    op : its place in the Timeline. seq : its number among the rank's calls of this communicator, from 1.
    kind, nbytes, dtype : as in :mod:`clustersim.core.program`. communicator, group : its name, and its ranks in order.
    created : float [s], when the rank called it. started, ended : float [s]; None for never.
    name : of the op. step : the training step. peer : of a send or a receive, the other rank; else -1.
    """

    op: int
    seq: int
    kind: str
    nbytes: float
    dtype: str
    communicator: str
    group: tuple[int, ...]
    created: float
    started: float | None
    ended: float | None
    name: str = ""
    step: int = 0
    peer: int = -1

    @property
    def state(self) -> str:
        """In Flight Recorder's words."""
        if self.ended is not None:
            return "completed"
        return "started" if self.started is not None else "scheduled"

    def __str__(self) -> str:
        return f"{self.kind} {self.seq} of {format_bytes(self.nbytes)} {self.dtype} ({self.name}, step {self.step})"


class RankWait(msgspec.Struct, frozen=True):
    """What a rank waits in, and for whom: those that have not started it; nobody where all have."""

    rank: int
    call: RankCall
    waits_for: tuple[int, ...]


class WatchdogAlarm(msgspec.Struct, frozen=True):
    """When a watchdog speaks; None for never. ``who`` : the rank or node it is of. ``why`` : in words."""

    watchdog: str
    who: str
    at: float | None
    why: str


class Hang(msgspec.Struct, frozen=True):
    """A run that hangs.

    Parameters
    ----------
    kind, place : what went wrong and where, as of ``[[incident]]``. at : float [s], when.
    ranks : who caused it; none of a link. silent : ranks of which nobody hears any more.
    calls : rank -> its communications, in the order it called them. waits : of each rank that waits, in what.
    alarms : of every watchdog. timeout : float [s] of a collective.
    steps : how many steps all ranks ended. ended : float [s], when the last of these ended. world_size : ranks.
    """

    kind: str
    place: str
    at: float
    ranks: tuple[int, ...]
    silent: tuple[int, ...]
    calls: Mapping[int, tuple[RankCall, ...]]
    waits: tuple[RankWait, ...]
    alarms: tuple[WatchdogAlarm, ...]
    timeout: float
    steps: int
    ended: float
    world_size: int

    @property
    def detected(self) -> float | None:
        """Seconds of the run at which the first watchdog speaks; None for never."""
        times = [alarm.at for alarm in self.alarms if alarm.at is not None]
        return min(times, default=None)

    @property
    def lost(self) -> float | None:
        """Seconds from the end of the last whole step to the first alarm: of every GPU; None without an alarm."""
        return None if self.detected is None else self.detected - self.ended

    def lines(self) -> list[str]:
        """In words, the answer first."""
        lines = [f"the run hangs at {format_time(self.at)}: {self.kind} of {self.place}"]
        steps_ended = f"{self.steps} whole step(s) ended by {format_time(self.ended)}"
        if self.lost is None:
            lines.append(f"{steps_ended}; no watchdog would ever speak")
        else:
            gpus = f"{format_long(self.lost)} on each of {self.world_size:,} ranks are lost"
            lines.append(f"{steps_ended}; the first alarm is at {format_time(self.detected or 0.0)}: {gpus}")
        return [*lines, *_told_waits(self.waits), *_told_alarms(self.alarms)]


def _told_waits(waits: Sequence[RankWait]) -> list[str]:
    """A line for each call that ranks wait in."""
    together: dict[tuple[int, tuple[int, ...], str], list[RankWait]] = {}
    for wait in waits:
        together.setdefault((wait.call.op, wait.waits_for, wait.call.state), []).append(wait)
    lines = []
    for same in together.values():
        ranks = few([wait.rank for wait in same], SHOWN)
        whom = f"for rank(s) {few(same[0].waits_for, SHOWN)}" if same[0].waits_for else "though all have started it"
        if same[0].call.started is None:
            whom = "which they have called, and their streams have not come to"
        lines.append(f"rank(s) {ranks} wait in {same[0].call} {whom}")
    return lines


def _told_alarms(alarms: Sequence[WatchdogAlarm]) -> list[str]:
    """A line for what several watchdogs say alike."""
    alike: dict[tuple[str, float | None, str], list[str]] = {}
    for alarm in alarms:
        alike.setdefault((alarm.watchdog, alarm.at, alarm.why), []).append(alarm.who)
    lines = []
    for (watchdog, at, why), who in alike.items():
        when = "never" if at is None else f"at {format_time(at)}"
        lines.append(f"{watchdog} of {few(who, SHOWN)}: {when}, {why}")
    return lines
