"""Timeline -> Chrome JSON in the shape of PyTorch's profiler (Kineto): opens in Perfetto beside real profiles.

A process is a node, a thread a stream of one GPU. Perfetto (https://ui.perfetto.dev) colours a slice by its name and
refuses overlapping slices on one thread, so names begin with what the op is, and time is rounded to whole nanoseconds
before durations are taken. What a rank spends waiting for its peers is a slice of its own, ``wait <collective>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files.traces import base

Event: TypeAlias = dict[str, Any]
"""Of the Chrome trace format: its phase ``ph``, its track, its time [us] and whatever its phase wants beside."""
_ARROW = {"send": "message", "recv": "message"}
"""What arrows are called; both ends alike."""


def write_chrome_trace(
    timeline: Timeline,
    path: str | Path,
    ranks: Sequence[int] | None = None,
    memory: Mapping[str, float] | None = None,
) -> tuple[int, ...]:
    """Write Chrome JSON, gzipped if the name ends in ``.gz``; returns the ranks written.

    ranks : which to write; None is all, or the leading nodes under 400,000 slices; the file's entry ``clustersim``
        says which.
    memory : bytes one GPU holds while an op of that name runs; a counter of the first rank written.

    Raises :class:`TraceError` for another suffix or a rank that does not exist.
    """
    path = Path(path)
    if not path.name.endswith((".json", ".json.gz")):
        raise TraceError(f"{path}: a Chrome trace is named .json or .json.gz, not {path.suffix or 'nothing'!r}")
    chosen = base.ranks_to_write(timeline, ranks)
    document = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": chosen[0], "world_size": timeline.world_size},
        "clustersim": {"source": timeline.source, "ranks": list(chosen)},
        "traceEvents": [
            *_metadata(timeline, chosen),
            *_steps(timeline, chosen),
            *_slices(timeline, chosen),
            *_counters(timeline, chosen[0], memory),
        ],
    }
    base.replace_file(path, msgspec.json.encode(document))
    return chosen


def write_hta_trace(timeline: Timeline, path: str | Path, ranks: Sequence[int] | None = None) -> tuple[int, ...]:
    """The same with kernels named as Holistic Trace Analysis tells them apart; it wants a file per rank.

    HTA calls communication what is named ``nccl...Kernel`` (hta/utils/utils.py), and links kernels to launches by their
    ``correlation``; -1 is none.
    """
    names = (op.name if op.kind == "compute" else f"ncclDevKernel_{op.name}" for op in timeline.ops)
    ops = tuple(msgspec.structs.replace(op, name=name) for op, name in zip(timeline.ops, names, strict=True))
    return write_chrome_trace(replace(timeline, ops=ops), path, ranks)


def _metadata(timeline: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    """Names and order of the tracks."""
    threads = list(base.threads(timeline, ranks).values())
    for pid in sorted({pid for pid, _, _ in threads}):
        yield from _track("process", pid, 0, f"node{pid - 1}")
    for pid, tid, name in threads:
        yield from _track("thread", pid, tid, name)


def _steps(timeline: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    pid, tid = base.step_track(timeline, ranks)
    yield from _track("thread", pid, tid, base.STEPS)
    for name, begin, end in base.step_slices(timeline, ranks):
        yield {"ph": "X", "pid": pid, "tid": tid, **_span(name, "user_annotation", begin, end)}


def _track(track: str, pid: int, tid: int, name: str) -> Iterator[Event]:
    """Its name and its place."""
    yield {"ph": "M", "name": f"{track}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{track}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid or pid}}


def _slices(timeline: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    """Complete events (``X``) by rank, then by time; a wait comes right before what it waited for."""
    threads = base.threads(timeline, ranks)
    args_of = base.said_of(timeline)
    leaving, reaching = base.flows(timeline, ranks)
    for rank, i, ready, start, end in base.nanoseconds(timeline, ranks):
        op = timeline.ops[i]
        pid, tid, _ = threads[rank, op.stream]
        track_fields = {"ph": "X", "pid": pid, "tid": tid}
        if start > ready and op.kind != "compute":
            yield (
                track_fields
                | _span(f"wait {op.name}", "wait", ready, start)
                | {"args": {"rank": rank, "step": op.step}}
            )
        category = "user_annotation" if op.bound == "host" else "kernel"
        yield (
            track_fields
            | _span(op.name, category, start, end)
            | {"args": args_of[i] | {"rank": rank, "correlation": -1}}
        )
        arrow = track_fields | {"name": _ARROW.get(op.kind, "last to arrive"), "cat": "message"}
        for number in leaving.get((rank, i), ()):
            yield arrow | {"ph": "s", "id": number, "ts": start / 1e3}
        for number in reaching.get((rank, i), ()):  # inside the receive: an end on its edge may bind to its neighbour
            yield arrow | {"ph": "f", "bp": "e", "id": number, "ts": max(start, end - 1) / 1e3}


def _span(name: str, category: str, start: int, end: int) -> Event:
    return {"name": name, "cat": category, "ts": start / 1e3, "dur": (end - start) / 1e3}


def _counters(timeline: Timeline, rank: int, memory: Mapping[str, float] | None) -> Iterator[Event]:
    """Counter events (``C``): GB/s on the busiest links, in a process after the nodes, and one GPU's memory."""
    pid = int(base.nodes(timeline).max()) + 2
    for i, (name, ns, rate) in enumerate(base.link_rates(timeline.links)):
        if not i:
            yield from _track("process", pid, 0, "busiest links")
        yield {"ph": "C", "pid": pid, "name": name, "ts": ns / 1e3, "args": {"GB/s": rate}}
    node = int(base.nodes(timeline)[rank]) + 1
    for name, ns, held_bytes in base.memory_levels(timeline, rank, memory):
        yield {"ph": "C", "pid": node, "name": name, "ts": ns / 1e3, "args": {"GiB": held_bytes}}
