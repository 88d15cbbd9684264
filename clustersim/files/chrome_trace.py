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

from clustersim.core.arrays import Ints
from clustersim.core.errors import TraceError
from clustersim.core.op_infos import kind_of, kinds
from clustersim.core.timeline import Timeline
from clustersim.files import slices

Event: TypeAlias = dict[str, Any]
"""Of the Chrome trace format: its phase ``ph``, its track, its time [us] and whatever its phase wants beside."""
AT_ONCE = 2**14
"""Spans that are turned into text together."""
_DURATION, _ARGS_OF, _LAST = b',"dur":', b',"args":{"rank":', b',"correlation":-1}}'
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
    chosen = slices.ranks_to_write(timeline, ranks)
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "distributedInfo": {"backend": "nccl", "rank": chosen[0], "world_size": timeline.world_size},
        "clustersim": {"source": timeline.source, "ranks": list(chosen)},
        "traceEvents": [],
    }
    slices.write_pieces(path, _document(msgspec.json.encode(head), _pieces(timeline, chosen, memory)))
    return chosen


def _document(head: bytes, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """JSON whose last entry is a list, with ``pieces`` of entries in it."""
    yield head.removesuffix(b"]}")
    comma = b""
    for piece in pieces:
        if piece:
            yield comma + piece
            comma = b","
    yield b"]}"


def _pieces(timeline: Timeline, ranks: Sequence[int], memory: Mapping[str, float] | None) -> Iterator[bytes]:
    """All events as JSON, some thousands at once."""
    yield _listed([*_metadata(timeline, ranks), *_steps(timeline, ranks)])
    yield from _slices(timeline, ranks)
    yield _listed(list(_counters(timeline, ranks[0], memory)))


def _listed(values: list[Any]) -> bytes:
    """The entries of a list as JSON, without its brackets."""
    return msgspec.json.encode(values)[1:-1]


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
    threads = list(slices.threads(timeline, ranks).values())
    for pid in sorted({pid for pid, _, _ in threads}):
        yield from _track("process", pid, 0, f"node{pid - 1}")
    for pid, tid, name in threads:
        yield from _track("thread", pid, tid, name)


def _steps(timeline: Timeline, ranks: Sequence[int]) -> Iterator[Event]:
    pid, tid = slices.step_track(timeline, ranks)
    yield from _track("thread", pid, tid, slices.STEPS)
    for name, begin, end in slices.step_slices(timeline, ranks):
        times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
        yield {"ph": "X", "pid": pid, "tid": tid, "name": name, "cat": "user_annotation", **times}


def _track(track: str, pid: int, tid: int, name: str) -> Iterator[Event]:
    """Its name and its place."""
    yield {"ph": "M", "name": f"{track}_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": f"{track}_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid or pid}}


def _slices(timeline: Timeline, ranks: Sequence[int]) -> Iterator[bytes]:
    """Complete events (``X``) by rank, then by time; a wait comes right before what it waited for."""
    columns = slices.rounded(timeline, ranks)
    texts = _SliceTexts(timeline, ranks)
    for first in range(0, len(columns[0]), AT_ONCE):
        yield b",".join(texts.of(*(column[first : first + AT_ONCE] for column in columns)))


class _SliceTexts:
    """Slices as JSON: the words of an op and of a track are encoded once, and numbers by columns."""

    def __init__(self, timeline: Timeline, ranks: Sequence[int]) -> None:
        self._world_size = timeline.world_size
        self._numbers = slices.stream_numbers(timeline)
        self._tracks = {
            key: msgspec.json.encode({"ph": "X", "pid": pid, "tid": tid})[:-1]
            for key, (pid, tid, _) in slices.threads(timeline, ranks).items()
        }
        self._threads = slices.threads(timeline, ranks)
        self._leaving, self._reaching = slices.flows(timeline, ranks)
        self._joined = self._leaving.keys() | self._reaching.keys()
        self._kinds = kinds(timeline.ops)
        self._kind_of = kind_of(timeline.ops)
        self._words: dict[int, tuple[str, bool, bytes, bytes, bytes, bytes]] = {}

    def of(self, rank: Ints, op: Ints, ready: Ints, start: Ints, end: Ints) -> list[bytes]:
        """Events of some spans [ns]."""
        events = []
        times = (_decimals(column) for column in (ready, start - ready, start, end - start))
        kind = self._kind_of[op].tolist()
        rows = zip(rank.tolist(), op.tolist(), kind, (start > ready).tolist(), *times, strict=True)
        for k, (of_rank, i, of_kind, late, since, waited, began, took) in enumerate(rows):
            stream, waits, wait_words, wait_args, words, args = self._words.get(of_kind) or self._of_kind(of_kind)
            track = self._tracks[of_rank, stream]
            number = b"%d" % of_rank
            if late and waits:
                events.append(b"".join((track, wait_words, since, _DURATION, waited, _ARGS_OF, number, wait_args)))
            events.append(b"".join((track, words, began, _DURATION, took, args, number, _LAST)))
            if waits and (of_rank, i) in self._joined:
                events += self._arrows((of_rank, i), start.item(k), end.item(k))
        return events

    def _of_kind(self, number: int) -> tuple[str, bool, bytes, bytes, bytes, bytes]:
        """The stream of an op of a kind, whether its waits are slices, and the texts of a wait and of its own slice: up
        to the time, and around the rank."""
        op = self._kinds[number]
        said = slices.args_of(op, self._numbers[op.stream], self._world_size)
        plain = {name: value for name, value in said.items() if name not in {"rank", "correlation"}}
        category = "user_annotation" if op.bound == "host" else "kernel"
        texts = self._words[number] = (
            op.stream,
            op.kind != "compute",
            _words(f"wait {op.name}", "wait"),
            b',"step":%d}}' % op.step,
            _words(op.name, category),
            b',"args":' + msgspec.json.encode(plain)[:-1] + b',"rank":',
        )
        return texts

    def _arrows(self, place: slices.Place, start: int, end: int) -> Iterator[bytes]:
        """Arrows that leave a span, and that reach it."""
        op = self._kinds[self._kind_of.item(place[1])]
        pid, tid, _ = self._threads[place[0], op.stream]
        words = {"pid": pid, "tid": tid, "name": _ARROW.get(op.kind, "last to arrive"), "cat": "message"}
        for number in self._leaving.get(place, ()):
            yield msgspec.json.encode({"ph": "s"} | words | {"id": number, "ts": start / 1e3})
        for number in self._reaching.get(place, ()):
            inside = max(start, end - 1)  # inside the receive: an end on its edge may bind to its neighbour
            yield msgspec.json.encode({"ph": "f"} | words | {"bp": "e", "id": number, "ts": inside / 1e3})


def _words(name: str, category: str) -> bytes:
    """Of a slice, all from its track to its time."""
    return b"," + msgspec.json.encode({"name": name, "cat": category})[1:-1] + b',"ts":'


def _decimals(nanoseconds: Ints) -> list[bytes]:
    """Microseconds as JSON has them."""
    return msgspec.json.encode((nanoseconds / 1e3).tolist())[1:-1].split(b",") if len(nanoseconds) else []


def _counters(timeline: Timeline, rank: int, memory: Mapping[str, float] | None) -> Iterator[Event]:
    """Counter events (``C``): GB/s on the busiest links, in a process after the nodes, and one GPU's memory."""
    pid = int(slices.nodes(timeline).max()) + 2
    for i, (name, ns, rate) in enumerate(slices.link_rates(timeline.links)):
        if not i:
            yield from _track("process", pid, 0, "busiest links")
        yield {"ph": "C", "pid": pid, "name": name, "ts": ns / 1e3, "args": {"GB/s": rate}}
    node = int(slices.nodes(timeline)[rank]) + 1
    for name, ns, held_bytes in slices.memory_levels(timeline, rank, memory):
        yield {"ph": "C", "pid": node, "name": name, "ts": ns / 1e3, "args": {"GiB": held_bytes}}
