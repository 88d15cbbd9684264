"""Chunk fidelity: a schedule's transfers on their links, one by one; and whole columns of them where that is the same.

Every transfer is a flow of its own over the route between two GPUs; it may start when the transfers it names have
*arrived* (drained, plus the route's latency) and the one before it on its lane has *drained*. What the backend reaches
of each link, its ceiling and its latency are those of its plan (:mod:`clustersim.engine.pacing`).

By columns one collective that has the network to itself plays millions of transfers in a second.
Where no two lanes can hold each other up (:func:`apart`), every transfer runs at its lane's full rate, so its times
follow from those before it: it starts when what it sends on has arrived and the transfer before it on its lane has
drained. A schedule told as waves (:mod:`clustersim.collectives.waves`) is then a recurrence over whole columns of
lanes, which needs no event and keeps nothing: :func:`last` plays it to the end, and the stretches of each transfer are
worked out again when somebody asks for them (:class:`LateLinks`), since the same recurrence gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from clustersim.cluster import routes as routing
from clustersim.collectives.base import Group, Plan, Request, TransferSchedule
from clustersim.collectives.channels import channels
from clustersim.collectives.registry import ALGORITHMS
from clustersim.collectives.waves import Wave, Waves
from clustersim.core.arrays import Floats, Ints
from clustersim.core.errors import ProgramError
from clustersim.core.timeline import LinkUse, Timeline
from clustersim.core.topology import route_latency
from clustersim.engine import need
from clustersim.engine.flows.fairshare import TIE
from clustersim.engine.flows.loads import Loads
from clustersim.engine.pacing import Pacing, ceilings


class ChunkSteps(msgspec.Struct, frozen=True, eq=False):
    """A schedule on its links, ready to play.

    Parameters
    ----------
    nbytes, latency : (T,) float [bytes], [s]. load : (T,) int, id in :class:`Loads`. ceiling : (T,) float [bytes/s].
    begin : float [s], before the first of them.
    n_needs : (T,) int, transfers each waits for, its lane's predecessor included.
    next_ptr, next : CSR, who waits for a transfer's arrival. lane_next : (T,) who waits for it to drain; -1 for none.
    """

    nbytes: Floats
    latency: Floats
    load: Ints
    n_needs: Ints
    next_ptr: Ints
    next: Ints
    lane_next: Ints
    ceiling: Floats
    begin: float


@dataclass(frozen=True, eq=False)
class WavePlay:
    """A schedule in waves on its links, from the moment ``begin`` [s], ``delay`` [s] after its meeting.

    Parameters
    ----------
    waves : the schedule. load : (L,) int, of each lane, id in :class:`Loads`. latency, seconds : (L,) float [s], of its
        route, and that a transfer on it takes. rate : (L,) float [bytes/s].
    """

    waves: Waves
    load: Ints
    latency: Floats
    seconds: Floats
    rate: Floats
    begin: float = 0.0
    delay: float = 0.0

    def times(self) -> Iterator[tuple[Wave, Floats, Floats]]:
        """Each wave, when its transfers start and when they have drained [s]."""
        arrival = np.full(self.waves.n_slots, self.begin)
        free = np.full(len(self.load), self.begin)
        for wave in self.waves.each():
            lane = wave.lane
            start = np.maximum(arrival[wave.takes], free[lane])
            end = free[lane] = start + self.seconds[lane]
            came = end + self.latency[lane]
            arrival[wave.puts] = np.maximum(arrival[wave.puts], came) if wave.adds else came
            yield wave, start, end


def lay(waves: Waves, nbytes: float, group: Group, loads: Loads, pace: Pacing) -> WavePlay | None:
    """Put waves of a tensor of ``nbytes`` on the links between the group's GPUs; None where lanes may meet."""
    ends = np.stack([group.gpus[waves.src], group.gpus[waves.dst], waves.rail], axis=1)
    load, latency = routes(ends, group, loads, pace, relay=False)
    if not apart(load, loads):
        return None
    rate = np.array(loads.alone)[load] / pace.held
    return WavePlay(waves, load, latency, nbytes * waves.fraction / rate, rate, delay=pace.begin)


def last(played: WavePlay) -> float:
    """When the last transfer has arrived [s]."""
    latest = np.full(len(played.load), played.begin)
    for wave, _, end in played.times():
        latest[wave.lane] = end  # a lane is first in, first out
    return float((latest + played.latency).max())


def routes(ends: Ints, group: Group, loads: Loads, pace: Pacing, *, relay: bool) -> tuple[Ints, Floats]:
    """Load and latency [s] of each way: ``ends`` (k, 3) are the GPU it leaves, the GPU it reaches, and the rail."""
    if not len(ends):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    router = routing.router(group.topology, relay)
    ways, route_of = np.unique(ends, axis=0, return_inverse=True)
    ptr, links, weights = router.loads_of_each(*ways.T)
    weights = weights * pace.stretch[links]
    parts = zip(np.split(links, ptr[1:-1]), np.split(weights, ptr[1:-1]), strict=True)
    load = np.array([loads.add(*part) for part in parts], dtype=np.int64)
    latency = np.array(
        [route_latency(group.topology, router.route(src, dst, 0, rail)) for src, dst, rail in ways.tolist()]
    )
    return load[route_of.reshape(-1)], pace.hop * latency[route_of.reshape(-1)]


def apart(lanes: Ints, loads: Loads) -> bool:
    """Whether lanes of these loads can all run as fast as each alone; a lane carries one transfer at a time."""
    ptr, links, weights = loads.csr(lanes)
    rate = np.repeat(np.array(loads.alone)[lanes], np.diff(ptr))
    used = np.bincount(links, weights=weights * rate, minlength=loads.topology.n_links)
    return bool(np.all(np.isfinite(rate))) and bool(np.all(used <= loads.topology.link_bandwidth * (1 + TIE)))


def schedule_of(request: Request, group: Group, plan: Plan) -> TransferSchedule:
    """The schedule a plan's algorithm follows. Raises :class:`ProgramError` where it would not fit in memory."""
    if group.size == 1 or request.kind == "send":
        return _one_send(group.size - 1)
    chosen = ALGORITHMS.get(plan.algorithm)
    if chosen is None or chosen.schedule is None:
        names = ", ".join(sorted(a.name for a in ALGORITHMS.values() if a.schedule and request.kind in a.kinds))
        raise ProgramError(
            f"algorithm {plan.algorithm!r} has no schedule to replay transfer by transfer; use fidelity 'flow', "
            f"or for {request.kind} one of: {names}"
        )
    laid = plan.channels or channels(group, plan.n_channels, chosen.layout)
    traffic = chosen.traffic(request, group, laid)
    # Every edge of the traffic sends about once per step: near enough to refuse before building a billion of them.
    must_fit(len(traffic.src) * traffic.steps)
    return chosen.schedule(request, group, laid)


def must_fit(transfers: int) -> None:
    """Raise :class:`ProgramError` where so many would not fit in memory."""
    purpose = f"at chunk fidelity, for {transfers:,} transfers one by one"
    need.check(need.replay(transfers), purpose, "use fidelity 'flow', fewer ranks or fewer channels")


def _one_send(n: int) -> TransferSchedule:
    """``n`` transfers, 0 or 1, of everything from member 0 to member 1."""
    sources = np.zeros(n, dtype=np.int64)
    targets = np.ones(n, dtype=np.int64)
    none = np.zeros(0, dtype=np.int64)
    ptr = np.zeros(n + 1, dtype=np.int64)
    return TransferSchedule(sources, targets, sources, n, sources.astype(bool), ptr, none, sources - 1, np.ones(n))


def steps(schedule: TransferSchedule, nbytes: float, group: Group, loads: Loads, pace: Pacing) -> ChunkSteps:
    """Put a schedule of a tensor of ``nbytes`` on the links between the group's GPUs."""
    n = len(schedule.src)
    ends = np.stack([group.gpus[schedule.src], group.gpus[schedule.dst], schedule.rail], axis=1)
    _, first, lane_of = np.unique(schedule.lane, return_index=True, return_inverse=True)
    lanes = len(schedule.lane) > 0 and bool(np.all(ends[first][lane_of] == ends))  # each between two ends, by one rail
    if not lanes:
        _, first, lane_of = np.unique(ends, axis=0, return_index=True, return_inverse=True)
        lane_of = lane_of.reshape(-1)
    load, latency = routes(ends[first], group, loads, pace, relay=schedule.relay)
    size = nbytes * schedule.chunk_fraction[schedule.chunk]
    waiting = np.repeat(np.arange(n), np.diff(schedule.after_ptr))
    order = np.argsort(schedule.after, kind="stable")
    lane_next = _lane_next(schedule.lane, n)
    return ChunkSteps(
        nbytes=size,
        latency=latency[lane_of],
        load=load[lane_of],
        n_needs=np.diff(schedule.after_ptr) + np.bincount(lane_next[lane_next >= 0], minlength=n),
        next_ptr=np.searchsorted(schedule.after[order], np.arange(n + 1)),
        next=waiting[order],
        lane_next=lane_next,
        ceiling=ceilings(lane_of, schedule.round, size, load[lane_of], loads, pace.held),
        begin=pace.begin,
    )


def _lane_next(lane: Ints, n: int) -> Ints:
    """For every transfer the next one on its lane; -1 for the last, and where there are no lanes."""
    follows = np.full(n, -1, dtype=np.int64)
    if len(lane):
        order = np.argsort(lane, kind="stable")
        same = lane[order[:-1]] == lane[order[1:]]
        follows[order[:-1][same]] = order[1:][same]
    return follows


_MADE = ("segment_transfer", "segment_start", "segment_end", "segment_rate", "transfer_op", "transfer_load")


class LateLinks(LinkUse):
    """The LinkUse of a collective played by columns: its transfers are listed when somebody asks for them."""

    @classmethod
    def of(cls, use: LinkUse, played: WavePlay, op: int) -> LateLinks:
        """The same with the transfers of ``played``, all of them of the op in row ``op`` of the Timeline."""
        late = cls(**{field.name: getattr(use, field.name) for field in fields(use)})
        attributes = vars(late)
        for name in _MADE:
            del attributes[name]
        attributes["_played"], attributes["_op"] = played, op
        return late

    def __getattr__(self, name: str) -> Any:
        if name not in _MADE or "_played" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        vars(self).update(zip(_MADE, _listed(vars(self)["_played"], vars(self)["_op"]), strict=True))
        return vars(self)[name]


def _listed(played: WavePlay, op: int) -> tuple[npt.NDArray[Any], ...]:
    """The six columns of a LinkUse, by transfer."""
    n = played.waves.n_transfers
    purpose = f"to list {n:,} transfers one by one"
    need.check(need.replay(n), purpose, "read the figures of fewer ranks, or use fidelity 'flow'")
    start = np.empty(n)
    end = np.empty(n)
    lane = np.empty(n, dtype=np.int64)
    lanes = np.arange(len(played.load))
    for wave, began, ended in played.times():
        start[wave.transfer], end[wave.transfer], lane[wave.transfer] = began, ended, lanes[wave.lane]
    which = np.flatnonzero(end > start)
    load = played.load[lane]
    rate = played.rate[lane[which]]
    return which, start[which], end[which], rate, np.full(n, op, dtype=np.int64), load


def complete(timeline: Timeline, played: WavePlay | None) -> Timeline:
    """The Timeline of a run whose only meeting was played by columns; any other as it is."""
    if played is None or timeline.links is None:
        return timeline
    n = float(played.waves.n_transfers)
    stats = {**timeline.stats, "transfers": n, "flows": n if played.seconds.any() else 0.0}
    op = next(i for i, info in enumerate(timeline.ops) if info.detail.get("n_groups"))
    return replace(timeline, links=LateLinks.of(timeline.links, played, op), stats=stats)
