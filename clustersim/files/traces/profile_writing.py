"""A Timeline -> PyTorch profiles (Kineto's JSON), a file per rank, as its profiler sees a rank: each host with its own
clock, a collective's kernel from the rank's own arrival to the end, waiting included.

``perfetto`` writes what a person looks at, all ranks in one file and waiting as a slice of its own; here is what a tool
would have measured, to be read back by :mod:`clustersim.files.traces.kineto`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from clustersim.core.texts import Plain
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.files import slices

_KERNELS = {"all_reduce": "AllReduce_Sum", "all_gather": "AllGather", "reduce_scatter": "ReduceScatter_Sum"}
_MOTIONS = {"ring": "RING", "tree": "TREE", "nvls": "NVLS"}


class TraceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """A complete event of Chrome's trace format, as PyTorch's profiler writes it; ``ts``, ``dur`` : [us]."""

    ph: str = "X"
    cat: str
    name: str
    pid: int = 0
    tid: int
    ts: float
    dur: float
    args: Plain

    @classmethod
    def between(
        cls, begin: int, end: int, name: str, category: str, thread: int, args: Plain | None = None
    ) -> TraceEvent:
        """Of what ran on a ``thread`` from ``begin`` to ``end`` [ns]."""
        return cls(cat=category, name=name, tid=thread, ts=begin / 1e3, dur=(end - begin) / 1e3, args=args or {})


def write_profiles(
    timeline: Timeline,
    folder: Path,
    ranks: Sequence[int],
    origin: float,
    hosts: Sequence[str],
    skew: Mapping[str, float],
) -> list[Path]:
    """Write ``profile_rank_N.json`` of each of these ranks; returns the files.

    Parameters
    ----------
    origin : when the run began [s since 1970]. hosts : name of each rank's machine. skew : host -> how far its clock is
        ahead [s].

    Raises :class:`TraceError` where one cannot be written.
    """
    about = slices.said_of(timeline)
    sequence = _sequences(timeline)
    paths = []
    for rank in ranks:
        host = hosts[rank]
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "GPU"}],
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": timeline.world_size},
            "displayTimeUnit": "ms",
            "baseTimeNanoseconds": round((origin + skew.get(host, 0.0)) * 1e9),
            "host_name": host,
            "traceEvents": [*_steps(timeline, rank), *_kernels(timeline, rank, about, sequence)],
        }
        path = folder / f"profile_rank_{rank}.json"
        slices.replace_file(path, msgspec.json.encode(document))
        paths.append(path)
    return paths


def _steps(timeline: Timeline, rank: int) -> Iterator[TraceEvent]:
    for name, begin, end in slices.step_slices(timeline, [rank]):
        yield TraceEvent.between(begin, end, name, "user_annotation", 1)


def _kernels(
    timeline: Timeline, rank: int, about: Sequence[Plain], sequence: Mapping[tuple[int, int], tuple[int, str]]
) -> Iterator[TraceEvent]:
    number = {name: i for i, name in enumerate(slices.streams(timeline))}
    for _, op, ready, start, end in slices.nanoseconds(timeline, [rank]):
        info = timeline.ops[op]
        if info.bound == "host":
            continue  # what the host waits for is no kernel: its GPU stands still meanwhile
        stream = 7 + number[info.stream]
        correlation = 1000 * op + 1
        args: Plain = {"stream": stream, "correlation": correlation, "External id": op + 1}
        if info.kind == "compute":
            yield TraceEvent.between(start, end, info.name, "kernel", stream, args)
            continue
        seq, members = sequence[rank, op]
        told = {k: v for k, v in about[op].items() if k[:1].isupper() or k == "dtype"}
        args |= told | {"Process Group Ranks": members, "Seq": seq}
        yield TraceEvent.between(ready, end, _kernel_name(info), "kernel", stream, args)


def _kernel_name(info: OpInfo) -> str:
    motion = _MOTIONS.get(str(info.detail.get("algorithm")), "RING")
    protocol = str(info.detail.get("protocol", "Simple")).upper()
    return f"ncclDevKernel_{_KERNELS.get(info.kind, 'SendRecv')}_{info.detail.get('dtype', 'f32')}_{motion}_{protocol}"


def _sequences(timeline: Timeline) -> dict[tuple[int, int], tuple[int, str]]:
    """Of each collective on each rank its number in its group, and the group as profilers write it."""
    count: defaultdict[tuple[str, str, int], int] = defaultdict(int)
    spans = timeline.spans()
    order = np.lexsort((spans["op"], spans["rank"]))
    sequence = {}
    for rank, op in zip(spans["rank"][order].tolist(), spans["op"][order].tolist(), strict=True):
        info = timeline.ops[op]
        groups = info.detail.get("groups")
        if info.kind == "compute" or groups is None:
            continue
        table = np.atleast_2d(np.asarray(groups))
        members = str([int(m) for m in table[np.flatnonzero((table == rank).any(axis=1))[0]]])
        key = (str(info.detail.get("communicator", info.stream)), members, rank)
        count[key] += 1
        sequence[rank, op] = (count[key], members)
    return sequence
