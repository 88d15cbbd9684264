"""A run or a machine -> how long its collectives take, as NCCL's own tools write it: the inspector plugin's JSON lines,
and the table of nccl-tests.

What :mod:`clustersim.files.traces.json_lines` and ``nccl_tests_log`` read. The inspector's thread wakes at an interval
and writes of each communicator the last collective that has ended (NCCL's ``plugins/profiler/inspector``): a rank's
time is from its own arrival on, so that of the ranks of one collective the shortest is the transfer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from clustersim.collectives.base import bus_factor
from clustersim.core.timeline import Timeline
from clustersim.files import slices

_COLLS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
    "reduce": "Reduce",
}
DUMPS = 6
"""How often a thread wakes in a step."""


def write_inspected(
    timeline: Timeline, folder: Path, ranks: Sequence[int], hosts: Sequence[str], interval: float, origin: float
) -> list[Path]:
    """Write ``inspector_rank_N.log`` of each of these ranks; returns the files.

    Parameters
    ----------
    hosts : name of each rank's machine. interval : from one dump to the next [s]. origin : when the run began [s since
        1970].

    Raises :class:`TraceError` where one cannot be written.
    """
    paths = []
    for rank in ranks:
        lines = [msgspec.json.encode(record) for record in _records(timeline, rank, hosts, interval, origin)]
        path = folder / f"inspector_rank_{rank}.log"
        slices.replace_file(path, b"\n".join([*lines, b""]))
        paths.append(path)
    return [path for path in paths if path.stat().st_size]


def _records(
    timeline: Timeline, rank: int, hosts: Sequence[str], interval: float, origin: float
) -> Iterator[dict[str, object]]:
    """What a rank writes: at each wake the last collective that has ended, where it is another than before."""
    spans = timeline.spans([rank])
    order = np.argsort(spans["end"], kind="stable")
    counted: list[tuple[float, int, float, int]] = []
    number = 0
    for i in order.tolist():
        op = int(spans["op"][i])
        if timeline.ops[op].kind in _COLLS:
            number += 1
            counted.append((float(spans["end"][i]), op, float(spans["end"][i] - spans["ready"][i]), number))
    at = 0
    written = 0
    for wake in np.arange(interval, timeline.makespan + interval, interval).tolist():
        while at < len(counted) and counted[at][0] <= wake:
            at += 1
        if at > written:
            written = at
            ended, op, took, serial = counted[at - 1]
            about = {"rank": rank, "host": hosts[rank], "micros": round((origin + ended) * 1e6), "serial": serial}
            yield _record(timeline, op, took, about, hosts)


def _record(
    timeline: Timeline, op: int, took: float, about: dict[str, object], hosts: Sequence[str]
) -> dict[str, object]:
    info = timeline.ops[op]
    table = np.atleast_2d(np.asarray(info.detail["groups"]))
    row = int(np.flatnonzero((table == about["rank"]).any(axis=1))[0])
    members = table[row].tolist()
    own = info.nbytes / (len(members) if info.kind in ("all_gather", "reduce_scatter") else 1)
    rate = info.nbytes / took / 1e9 if took else 0.0
    return {
        "header": {
            "id": f"0x{0x7F8C496AE9F0 + 4096 * row + members[0]:x}",
            "rank": about["rank"],
            "n_ranks": len(members),
            "nnodes": len({hosts[member] for member in members}),
        },
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "hostname": about["host"],
            "pid": 4000 + int(str(about["rank"])),
            "dump_timestamp_us": about["micros"],
        },
        "coll_perf": {
            "coll": _COLLS[info.kind],
            "coll_sn": about["serial"],
            "coll_msg_size_bytes": int(own),
            "coll_exec_time_us": round(took * 1e6, 1),
            "coll_timing_source": "kernel_gpu",
            "coll_algobw_gbs": round(rate, 6),
            "coll_busbw_gbs": round(rate * bus_factor(info.kind, len(members)), 6),
        },
    }


def nccl_tests_lines(kind: str, hosts: Sequence[str], device: str, times: Iterable[tuple[int, float]]) -> Iterator[str]:
    """What ``all_reduce_perf`` prints, a process a GPU.

    kind : of the collective. hosts : name of each rank's machine. device : the GPU. times : bytes and seconds of each
    row.
    """
    rows = list(times)
    sizes = [size for size, _ in rows]
    yield "# nccl-tests version 2.17.6 nccl-headers=22705 nccl-library=22705"
    yield f"# Collective test starting: {kind}_perf"
    yield (
        f"# nThread 1 nGpus 1 minBytes {min(sizes)} maxBytes {max(sizes)} step: 8(factor) warmup iters: 5 iters: 20 "
        "agg iters: 1 validation: 1 graph: 0"
    )
    yield "#"
    yield "# Using devices"
    seen: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        local = seen[host] = seen.get(host, -1) + 1
        place = f"on {host:>10s} device {local:2d} [0x{7 + local:02x}] {device}"
        yield f"#  Rank {rank:2d} Group  0 Pid {5000 + rank:6d} {place}"
    yield "#"
    yield f"#{'out-of-place':>66s}{'in-place':>36s}"
    timed = "     time   algbw   busbw  #wrong"
    yield f"#       size         count      type   redop    root{timed}{timed}"
    rates = f"{'(GB/s)':>8s}{'(GB/s)':>8s}"
    yield f"#{'(B)':>11s}{'(elements)':>14s}{'(us)':>33s}{rates}{'(us)':>17s}{rates}"
    for size, seconds in rows:
        rate = size / seconds / 1e9
        bus = rate * bus_factor(kind, len(hosts))
        cells = f"{seconds * 1e6:8.1f} {rate:7.2f} {bus:7.2f}       0"
        yield f"{size:12d} {size // 4:13d}     float     sum      -1 {cells} {cells}"
    yield "# Out of bounds values : 0 OK"
