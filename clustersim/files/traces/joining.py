"""What each rank's profile saw -> one measured Timeline: clocks aligned, collectives joined over ranks.

A collective's kernel lasts from its own rank's arrival to the end, waiting included. Over the ranks of one collective
the shortest duration is therefore the transfer (last start to last end, within microseconds), and the rest is skew
(AMD TraceLens' "implicit sync" collectives; checked on the 8-rank traces of param). Joined by group and sequence number
where the profiler wrote one, otherwise by group, kind and the how-manieth of its step.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from clustersim.core.arrays import Ints
from clustersim.core.errors import TraceError
from clustersim.core.label import Label
from clustersim.core.limits import MOST_RANKS, counted
from clustersim.core.op_infos import OpDetail
from clustersim.core.program import COMM_STREAM, COMPUTE_STREAM, HOST_STREAM
from clustersim.core.timeline import WITHOUT_GPU, OpInfo, Timeline
from clustersim.explain.last_rank import SAME_CLOCK
from clustersim.explain.metrics import steady_window
from clustersim.files.traces.messages import Key, messages
from clustersim.files.traces.profiled import BACKEND, PHASES, PRODUCT_FLOPS, ProfiledWork, RankCollective, RankTrace

HOST_BOUND = 20e-6
"""A kernel that starts this soon [s] after its launch call was waited for: the queue was empty."""

DEVICE = "device: "
"""Begins the name of a number in ``stats``: how many ranks ran on a device of that name."""
AMD = f"{DEVICE}AMD "
"""How that begins where ROCm names it, such as ``"AMD Instinct MI300X"``."""

SKIPPED = "skipped: "
"""Begins the name of a number in ``stats``: how many events a reader left out, for a reason."""

_COPY = re.compile(r"Mem(?:cpy|set)|Copy(?:Host|Device|Buffer)|FillBuffer|__amd_rocclr_(?:copy|fill)")
"""How CUDA, ROCm and SYCL call copies and fills of memory."""
_ONE_WAY = {"broadcast", "reduce", "scatter", "gather", "send", "recv"}
"""Kinds whose ranks may leave at different times: they say nothing of clocks."""


def skipped_of(run: Timeline) -> dict[str, int]:
    """How many events of a measured run's files are in no figure, by reason."""
    counts = run.stats.items()
    return {name.removeprefix(SKIPPED): int(count) for name, count in counts if name.startswith(SKIPPED)}


def join(traces: Sequence[RankTrace], source: str) -> Timeline:
    """The Timeline of some or all ranks of a run. Raises :class:`TraceError` where they are not of one run."""
    traces = sorted(traces, key=lambda t: t.rank)
    world = _world(traces)
    hosts_alone = [t for t in traces if _is_host_alone(t, traces)]
    traces = [t for t in traces if t not in hosts_alone]
    keyed = {t.rank: _keyed(t) for t in traces}
    offsets = _clock_offsets(traces, keyed)
    origin = min(t.begin - offsets[t.rank] for t in traces)
    build = _TimelineBuild(world)
    skipped: Counter[str] = Counter()
    skipped.update(f"{t.source}: a process without a GPU among GPUs: in no figure" for t in hosts_alone)
    for t in traces:
        skipped.update(t.skipped)
        _add_work(build, t, offsets[t.rank] + origin)
    zero = {r: o + origin for r, o in offsets.items()}
    _add_collectives(build, keyed, zero, skipped)
    for key, info, rank, *times in messages(traces, zero):
        build.row(build.op(key, info), rank, *times)
    _add_needs(build, traces)
    stats = {f"{SKIPPED}{reason}": float(n) for reason, n in sorted(skipped.items())}
    stats |= {"ranks_measured": float(len(traces))}
    stats |= {f"{DEVICE}{name}": float(n) for name, n in Counter(t.device for t in traces if t.device).items()}
    stats |= {f"{BACKEND}{trace.backend}": 1.0 for trace in traces[:1] if trace.backend}
    stats |= {f"{PRODUCT_FLOPS}{t.rank}": t.product_flops for t in traces if t.product_flops}
    if on_cpu := sum(trace.on_cpu for trace in traces):
        stats[WITHOUT_GPU] = float(on_cpu)
    largest = max(abs(o) for o in offsets.values())
    if largest > 0:
        stats["clock_offset_s"] = largest
    hosts = list(dict.fromkeys(t.host for t in traces))
    node = np.zeros(world, dtype=np.int64)
    for t in traces:
        node[t.rank] = hosts.index(t.host)
    run = build.timeline(source, stats, node)
    _add_late_launches(run, traces, zero)
    return run


def _is_host_alone(trace: RankTrace, traces: Sequence[RankTrace]) -> bool:
    """Whether a process ran on its host alone where others had GPUs, and took part in none of their collectives: a
    launcher or a loader of data, whose busy host is no busy GPU."""
    return trace.on_cpu and not trace.seen and any(not other.on_cpu and other.work for other in traces)


def _world(traces: Sequence[RankTrace]) -> int:
    worlds = {t.world: t for t in traces}
    if len(worlds) > 1:
        sources = "; ".join(f"{t.source}: world size {w}" for w, t in sorted(worlds.items())[:2])
        raise TraceError(f"these traces are not of one run: {sources}")
    world = next(iter(worlds))
    counted(world, MOST_RANKS, f"{traces[0].source}: ranks of the run", TraceError)
    ranks = Counter(t.rank for t in traces)
    for rank, times in ranks.items():
        rank_sources = [t.source for t in traces if t.rank == rank]
        if times > 1:
            raise TraceError(
                f"{rank_sources[1]}: rank {rank} again (also in {rank_sources[0]}); give one file per rank"
            )
        if not 0 <= rank < world:
            raise TraceError(f"{rank_sources[0]}: says it is rank {rank} of {world}")
    for t in traces:
        if not t.seen and not t.work:
            raise TraceError(f"{t.source}: no kernel and no operator: the profiler recorded nothing here")
    return world


def _keyed(trace: RankTrace) -> dict[Key, RankCollective]:
    """Each collective by what it is called on every rank of its group."""
    count: Counter[Key] = Counter()
    keyed: dict[Key, RankCollective] = {}
    for seen in sorted(trace.seen, key=lambda s: s.start):
        if seen.kind in {"send", "recv"}:
            key: Key = ("p2p", trace.rank, len(keyed))
        elif seen.seq is not None:
            key = (seen.group, seen.members, "seq", seen.seq, seen.kind)
        else:
            # Ranks of an all_to_all may send different amounts; elsewhere sizes tell apart what several threads mix.
            part: Key = (seen.group, seen.members, seen.kind, seen.step)
            part = (*part, None if seen.kind == "all_to_all" else seen.nbytes)
            key = (*part, count[part])
            count[part] += 1
        if key in keyed:
            key = (*key, "again", len(keyed))
        keyed[key] = seen
    return keyed


def _clock_offsets(traces: Sequence[RankTrace], keyed: dict[int, dict[Key, RankCollective]]) -> dict[int, float]:
    """How far each rank's clock is ahead of the first's [s], by the ends of the collectives both were in.

    Ranks that share nothing with the first are reached through others; one that shares nothing with anybody keeps its
    own clock.
    """
    offsets = {traces[0].rank: 0.0}
    host = {t.rank: t.host for t in traces}
    waiting = [t.rank for t in traces[1:]]
    while waiting:
        reached = []
        for rank in waiting:
            for offset in list(offsets):
                shared = [k for k in keyed[rank] if k in keyed[offset] and keyed[rank][k].kind not in _ONE_WAY]
                if host[rank] and host[rank] == host[offset]:  # one machine has one clock
                    offsets[rank] = offsets[offset]
                    reached.append(rank)
                    break
                if shared:
                    gaps = [keyed[rank][k].end - keyed[offset][k].end for k in shared]
                    gap = float(np.median(gaps))
                    offsets[rank] = offsets[offset] + (gap if abs(gap) > SAME_CLOCK else 0.0)
                    reached.append(rank)
                    break
        if not reached:
            offsets |= dict.fromkeys(waiting, 0.0)
            break
        waiting = [rank for rank in waiting if rank not in reached]
    return offsets


class _TimelineBuild:
    def __init__(self, world: int) -> None:
        self.world = world
        self.ops: list[OpInfo] = []
        self.number: dict[Key, int] = {}
        self.rows: list[tuple[int, int, float, float, float]] = []
        self.ranks: dict[int, int] = {}
        self.told: dict[int, int] = {}  # by the id of what an execution trace tells of: its op

    def op(self, key: Key, info: OpInfo) -> int:
        """Number of the op of this key; a new one is added."""
        if key not in self.number:
            self.number[key] = len(self.ops)
            self.ops.append(info)
        return self.number[key]

    def row(self, op: int, rank: int, ready: float, start: float, end: float) -> None:
        """Add one rank's span of an op [s]."""
        self.rows.append((op, self.ranks.setdefault(rank, len(self.ranks)), ready, start, end))

    def timeline(self, source: str, stats: dict[str, float], node: Ints) -> Timeline:
        """All rows as a Timeline."""
        columns = np.array(self.rows, dtype=np.float64).reshape(-1, 5)
        op, set_of, ready, start, end = columns.T
        sets = tuple(np.array([rank], dtype=np.int64) for rank in self.ranks)
        rows = op.astype(np.int64), set_of.astype(np.int64), ready, start, end
        return Timeline(self.world, tuple(self.ops), sets, *rows, source=source, rank_node=node, stats=stats)


def _usual_stream(trace: RankTrace) -> str:
    """The stream with most kernel time: the model's."""
    busy: defaultdict[str, float] = defaultdict(float)
    for work in trace.work:
        if work.stream != HOST_STREAM:
            busy[work.stream] += work.end - work.start
    return max(busy, key=lambda name: busy[name], default="")


def _add_work(build: _TimelineBuild, trace: RankTrace, zero: float) -> None:
    usual = _usual_stream(trace)
    again: Counter[Key] = Counter()
    longest_work = longest(trace)
    for work in trace.work:
        name, stream, start, end, _, step, doing, operator, marked, unit = work
        on = COMPUTE_STREAM if stream == usual else stream
        phase, bound = ("memcpy", "memory") if _COPY.match(name) else ("other", "compute")
        bound = "host" if stream == HOST_STREAM else bound
        info = OpInfo(name=name, kind="compute", stream=on, phase=phase, bound=bound, step=step)
        if (marked and phase == "other") or unit:  # a kernel, whose own name says what bounds it
            label = Label(unit) if unit else None
            info = msgspec.structs.replace(info, phase=marked or phase, label=label, detail={"kernel": True})
        if doing:
            info = msgspec.structs.replace(info, phase=PHASES[doing.label.action], label=doing.label, stage=doing.stage)
        key: Key = ("work", name, on, step, doing, marked, unit)
        if operator:
            flops, nbytes = (operator.flops, operator.nbytes) if work is longest_work[operator.order] else (0.0, 0.0)
            key = (*key, flops, nbytes)
            again[key] += 1
            key = (*key, again[key])
            info = msgspec.structs.replace(info, flops=flops, nbytes=nbytes, detail={"dtype": operator.dtype})
        number = build.op(key, info)
        build.told |= {id(work): number} if operator else {}
        build.row(number, trace.rank, start - zero, start - zero, end - zero)


def _add_needs(build: _TimelineBuild, traces: Sequence[RankTrace]) -> None:
    after: defaultdict[int, set[int]] = defaultdict(set)
    for needing, needed in (pair for t in traces for pair in needs(t)):
        if id(needing) in build.told and id(needed) in build.told:
            after[build.told[id(needing)]].add(build.told[id(needed)])
    for op, needed_ops in after.items():
        build.ops[op] = msgspec.structs.replace(build.ops[op], after=tuple(sorted(needed_ops)))


def _add_collectives(
    build: _TimelineBuild, keyed: dict[int, dict[Key, RankCollective]], zero: dict[int, float], skipped: Counter[str]
) -> None:
    together: defaultdict[Key, dict[int, RankCollective]] = defaultdict(dict)
    for rank, rank_seen in keyed.items():
        for key, seen in rank_seen.items():
            if seen.doing is None:
                together[key][rank] = seen
    for key in sorted(together, key=lambda k: min(s.start - zero[r] for r, s in together[k].items())):
        by_rank = together[key]
        any_one = next(iter(by_rank.values()))
        expected = [r for r in any_one.members or range(build.world) if r in keyed]
        complete = any_one.kind in {"send", "recv"} or (len(by_rank) == len(expected) and any_one.size <= len(by_rank))
        if any_one.kind not in {"send", "recv"} and len(by_rank) < len(expected) and len(expected) <= any_one.size:
            skipped["a collective not seen by all measured ranks of its group (kept, transfer time not known)"] += 1
        starts = [s.start - zero[r] for r, s in by_rank.items()]
        transfer = min(s.end - s.start for s in by_rank.values())
        nbytes = max(s.nbytes for s in by_rank.values())
        detail: OpDetail = {
            "group_size": any_one.size,
            "communicator": any_one.group,
            "dtype": any_one.dtype,
            "whole": complete,
        }
        if any_one.members:
            detail["members"] = any_one.members
        if any_one.purpose:
            detail["purpose"] = any_one.purpose
        if complete:
            detail |= {"transfer_s": transfer, "skew_s": max(starts) - min(starts)}
        name = f"{any_one.kind} {any_one.kernel}".strip()
        info = OpInfo(
            name, any_one.kind, COMM_STREAM, "communication", "communication", nbytes, step=any_one.step, detail=detail
        )
        number = build.op(("collective", key), info)
        for rank, seen in by_rank.items():
            build.told |= {id(seen): number} if seen.told else {}
            ready = seen.start - zero[rank]
            end = seen.end - zero[rank]
            build.row(number, rank, ready, max(ready, end - transfer) if complete else ready, end)


def _add_late_launches(run: Timeline, traces: Sequence[RankTrace], zero: Mapping[int, float]) -> None:
    """The share of the steady window, as all shares, in which a launch call came late; ``zero`` : by rank, when the run
    began by its own clock [s]."""
    window = steady_window(run)
    late = [_late_launches(t, window.begin + zero[t.rank], window.end + zero[t.rank]) for t in traces]
    known = [seconds for seconds in late if seconds is not None]
    if known and window.length:
        run.stats["waiting_for_launch_share"] = float(np.mean(known)) / window.length


def _late_launches(trace: RankTrace, begin: float, end: float) -> float | None:
    """Seconds between two times of a rank's own clock [s] in which the usual stream idled for a launch call that came
    late; None where nobody knows."""
    usual = _usual_stream(trace)
    spans = sorted((w.start, w.end, w.call) for w in trace.work if w.stream == usual and w.call == w.call)
    if len(spans) < 2 or spans[-1][1] <= spans[0][0]:
        return None
    late = 0.0
    free = spans[0][1]
    for start, stop, launch in spans[1:]:
        if start > free and start - launch < HOST_BOUND:
            late += max(0.0, min(start, end) - max(free, begin))
        free = max(free, stop)
    return late


LATE = 50e-6
"""Seconds by which clocks of a process and of its device may differ."""


def needs(trace: RankTrace) -> Iterator[tuple[ProfiledWork | RankCollective, ProfiledWork | RankCollective]]:
    """Who waits for whom: a collective for what each stream did last with its memory, and a stream, once, for a
    collective whose memory it touches. What had not ended by then was not waited for: numbers of memory are used again.
    """
    both: list[ProfiledWork | RankCollective] = [*trace.work, *trace.seen]
    items = [(item.told, i, item) for i, item in enumerate(both) if item.told]
    worked: defaultdict[int, dict[str, ProfiledWork]] = defaultdict(dict)
    met: dict[int, RankCollective] = {}
    known_ids: defaultdict[str, set[int]] = defaultdict(set)
    for operator, _, item in sorted(items, key=lambda item: (item[0].order, item[1])):
        needed: dict[object, ProfiledWork | RankCollective] = {}
        for storage in sorted(operator.storages):
            if isinstance(item, RankCollective):
                for stream, work in worked[storage].items():
                    needed[stream] = max(work, needed.get(stream, work), key=_order)
                met[storage] = item
            else:
                if storage in met and id(met[storage]) not in known_ids[item.stream]:
                    needed[id(met[storage])] = met[storage]
                worked[storage][item.stream] = item
        for producer in needed.values():
            if producer.end <= item.start + LATE:
                known_ids[item.stream if isinstance(item, ProfiledWork) else ""].add(id(producer))
                yield item, producer


def _order(item: ProfiledWork | RankCollective) -> int:
    return item.told.order if item.told else -1


def longest(trace: RankTrace) -> dict[int, ProfiledWork]:
    """The longest kernel of each operator, by its order: FLOPs and bytes are the operator's, not each kernel's."""
    longest_of: dict[int, ProfiledWork] = {}
    for work in trace.work:
        if work.told:
            longest_of[work.told.order] = max(
                longest_of.get(work.told.order, work), work, key=lambda w: w.end - w.start
            )
    return longest_of
