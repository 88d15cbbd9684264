"""Timeline -> Perfetto's own protobuf format (TrackEvent), with the optional ``perfetto`` package.

The same tracks and slices as :mod:`clustersim.files.chrome_trace`; Perfetto recommends this format over JSON, and
large files open faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clustersim.core.errors import TraceError, needs
from clustersim.core.timeline import Timeline
from clustersim.files import slices


def write_pftrace(
    timeline: Timeline,
    path: str | Path,
    ranks: Sequence[int] | None = None,
    memory: Mapping[str, float] | None = None,
) -> tuple[int, ...]:
    """Write a ``.pftrace``; parameters and result as of :func:`clustersim.files.chrome_trace.write_chrome_trace`.

    Raises :class:`TraceError` where the package is missing, or for a rank that does not exist.
    """
    try:
        from perfetto.trace_builder.proto_builder import TraceProtoBuilder
    except ImportError:
        raise TraceError(f"{needs(f'{path}: a .pftrace', 'perfetto')}; .json.gz needs none") from None
    chosen = slices.ranks_to_write(timeline, ranks)
    tracks = _Tracks(TraceProtoBuilder())
    threads = slices.threads(timeline, chosen)
    for pid, tid, name in threads.values():
        tracks.thread(pid, tid, name)
    step_pid, step_tid = slices.step_track(timeline, chosen)
    tracks.thread(step_pid, step_tid, slices.STEPS)
    for name, begin, end in slices.step_slices(timeline, chosen):
        tracks.slice(step_tid, name, "user_annotation", (begin, end), {})
    args_of = slices.said_of(timeline)
    leaving, reaching = slices.flows(timeline, chosen)
    for rank, i, ready, start, end in slices.nanoseconds(timeline, chosen):
        op = timeline.ops[i]
        _, tid, _ = threads[rank, op.stream]
        if start > ready and op.kind != "compute":
            tracks.slice(tid, f"wait {op.name}", "wait", (ready, start), {"rank": rank, "step": op.step})
        arrows = leaving.get((rank, i), []), reaching.get((rank, i), [])
        tracks.slice(tid, op.name, op.phase, (start, end), args_of[i] | {"rank": rank}, arrows)
    for name, ns, rate in slices.link_rates(timeline.links):
        tracks.counter(name, ns, rate, "GB/s")
    for name, ns, held_bytes in slices.memory_levels(timeline, chosen[0], memory):
        tracks.counter(name, ns, held_bytes, "GiB")
    slices.replace_file(Path(path), tracks.builder.serialize())
    return chosen


class _Tracks:
    """The packets of one file. Track ids: threads by tid; processes and counters count down from 2^62."""

    SEQUENCE = 1

    def __init__(self, builder: Any) -> None:
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

        self.builder = builder
        self.kinds = TrackEvent
        self.ids: dict[str | int, int] = {}

    def _group(self, key: str | int) -> tuple[int, bool]:
        """Track id of a process or counter, and whether it is new."""
        new = key not in self.ids
        return self.ids.setdefault(key, 2**62 - len(self.ids)), new

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Describe a stream's track under its node's, which is described with its first stream."""
        node, new = self._group(pid)
        if new:
            track = self.builder.add_packet().track_descriptor
            track.uuid, track.process.pid, track.process.process_name = node, pid, f"node{pid - 1}"
        track = self.builder.add_packet().track_descriptor
        track.uuid, track.parent_uuid = tid, node
        track.thread.pid, track.thread.tid, track.thread.thread_name = pid, tid, name

    def slice(
        self,
        tid: int,
        name: str,
        category: str,
        when: tuple[int, int],
        args: dict[str, Any],
        arrows: tuple[list[int], list[int]] = ([], []),
    ) -> None:
        """A slice from ``when[0]`` to ``when[1]`` [ns]; ``arrows`` leave it, and end at it."""
        begin = self._event(tid, when[0], self.kinds.TYPE_SLICE_BEGIN)
        begin.name = name
        begin.categories.append(category)
        begin.flow_ids.extend(arrows[0])
        begin.terminating_flow_ids.extend(arrows[1])
        for key, value in args.items():
            note = begin.debug_annotations.add()
            note.name = key
            field = {bool: "bool_value", int: "int_value", float: "double_value"}.get(type(value), "string_value")
            setattr(note, field, value if field != "string_value" else str(value))
        self._event(tid, when[1], self.kinds.TYPE_SLICE_END)

    def counter(self, name: str, ns: int, value: float, unit: str) -> None:
        """A counter's new value at a time [ns]."""
        track, new = self._group(name)
        if new:
            descriptor = self.builder.add_packet().track_descriptor
            descriptor.uuid, descriptor.name, descriptor.counter.unit_name = track, name, unit
        self._event(track, ns, self.kinds.TYPE_COUNTER).double_counter_value = value

    def _event(self, track: int, ns: int, kind: int) -> Any:
        packet = self.builder.add_packet()
        packet.timestamp, packet.trusted_packet_sequence_id = ns, self.SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet.track_event
