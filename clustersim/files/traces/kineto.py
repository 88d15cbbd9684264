"""PyTorch profiler (Kineto) traces, a file per rank -> a measured Timeline.

Newer profilers write a collective's name, sizes, group and sequence into the kernel's ``args``; older ones only
annotate the launching thread (``nccl:all_reduce`` with ``Input Dims``), and the kernel is led back to it through its
launch call's correlation id. On CPU the annotation (``gloo:all_reduce``) is the collective itself. With execution
traces of the same processes beside them, operators have FLOPs and bytes, and wait for what they read.

Only the fields needed are decoded: events come as typed structs whose ``args`` stay raw until an event needs them.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from clustersim.core.errors import TraceError
from clustersim.core.program import DATA_LOADER, DTYPE_BYTES, HOST_STREAM
from clustersim.core.timeline import Timeline
from clustersim.explain.bounds import UNCOUNTED
from clustersim.files.traces import execution_trace, files
from clustersim.files.traces.call_records import RECORDED, CallRecords
from clustersim.files.traces.execution_trace import Operator
from clustersim.files.traces.heads import Head, Likeness, growing, likeness
from clustersim.files.traces.host_work import LONG, HostCall, host_work, short_name
from clustersim.files.traces.joining import join
from clustersim.files.traces.kineto_json import (
    KERNEL_ARGS,
    NOTE_ARGS,
    PRODUCTS,
    KernelArgs,
    KinetoEvent,
    KinetoFile,
    KinetoInfo,
    by_rank,
    decoded,
    groups_of,
    input_bytes,
    product_flops,
    ranks_named,
)
from clustersim.files.traces.profiled import (
    BEHIND,
    COMMUNICATORS,
    LIBRARY_KERNEL,
    UNNAMED,
    UNSHAPED,
    UNSIZED,
    AnnotatedSchedule,
    ProfiledWork,
    RankCollective,
    RankTrace,
    unsized,
)
from clustersim.files.traces.samples import dtype_of, kind_of

_COMMS = re.compile(rf"^({COMMUNICATORS}):(\w+)$")
_RUNTIMES = (
    "cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver", "xpu_runtime", "xpu_driver", "mtia_runtime",
    "privateuse1_runtime", "privateuse1_driver", "Runtime",
)  # fmt: skip
"""Categories of calls that launch work on a device."""
_LIST = re.compile(rb"\s*\[\s*\{(?=[^{}]{0,2000}\"ph\"\s*:)(?=[^{}]{0,2000}\"name\"\s*:)")
"""A list of events alone, which Chrome's trace format allows."""
_STEP = re.compile(r"^ProfilerStep#(\d+)$")
_CPU_OP = "aten::"
_OPERATOR = ("cpu_op", "Operator")
"""Categories of operators: of PyTorch before 1.11 the second, its steps' too."""


def sniff(head: Head) -> Likeness:
    """Whether this is a profiler's trace, whose events have phases, or an execution trace, which is read with one."""
    named = not head.members.keys().isdisjoint(("traceEvents", "deviceProperties", "schemaVersion"))
    return max(execution_trace.sniff(head), likeness(named=named, shaped=_has_events(head)))


def _has_events(head: Head) -> bool:
    return head.lists("traceEvents", "ph") or _LIST.match(head.data) is not None


def _is_recorded(path: Path) -> bool:
    """Whether a file is an execution trace and no profile."""
    for head in growing(path):
        if _has_events(head):
            return False
        if execution_trace.sniff(head) is Likeness.SHAPED:
            return True
    return bool(execution_trace.sniff(head))


def read(paths: Sequence[Path]) -> Timeline:
    """The run of these ranks' traces. Raises :class:`TraceError` where one is no whole profile."""
    recorded = {path: execution_trace.read(path) for path in paths if _is_recorded(path)}
    profiles = [path for path in paths if path not in recorded]
    if not profiles:
        raise TraceError(f"{paths[0]}: an execution trace has no times; add the Kineto trace of the same steps")
    by_process = _by_process(recorded)
    traces = [trace for path in profiles for trace in _read_one(path, len(profiles), by_process)]
    if by_process:
        unused = ", ".join(str(path) for path, (pid, _) in recorded.items() if pid in by_process)
        raise TraceError(f"{unused}: of a process that none of the Kineto traces is of")
    first = traces[0].base
    # Each file's times are relative to its own base.
    return join([_shifted(trace, (trace.base - first) * 1e-9) for trace in traces], ", ".join(map(str, paths)))


def _shifted(trace: RankTrace, by: float) -> RankTrace:
    if by:
        trace.work = [w._replace(start=w.start + by, end=w.end + by, call=w.call + by) for w in trace.work]
        trace.seen = [dataclasses.replace(seen, start=seen.start + by, end=seen.end + by) for seen in trace.seen]
    return trace


Recorded = dict[int, dict[int, Operator]]
"""Operators by process, then by their number in it."""


def _by_process(recorded: Mapping[Path, tuple[int, dict[int, Operator]]]) -> Recorded:
    first: dict[int, Path] = {}
    for path, (pid, _) in recorded.items():
        if first.setdefault(pid, path) != path:
            raise TraceError(f"{path}: of process {pid}, as {first[pid]} is; read the machines one at a time")
    return dict(recorded.values())


def _read_one(path: Path, n: int, recorded: Recorded) -> list[RankTrace]:
    """The ranks of one file: one, except in a trace that this program wrote."""
    try:
        data, cut = files.as_far(path)
        file, mended = decoded(data)
        traces = _ranks(path, file, n, recorded)
    except msgspec.ValidationError as error:
        raise TraceError(f"{path}: not a PyTorch profiler trace: {error}") from None
    # What events have for args is read with the events.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: the JSON is damaged or cut off: {error}") from None
    if not any(trace.seen or trace.work for trace in traces):
        unread = "; ".join(f"{count} x {why}" for trace in traces for why, count in trace.skipped.items())
        what = f"nothing that is told from ({unread})" if unread else "another tool's, or an empty step"
        raise TraceError(f"{path}: a trace without PyTorch operators or GPU kernels: {what}")
    if cut or mended:
        _cut_off(path, file, traces)
    return traces


def _cut_off(path: Path, file: KinetoFile, traces: Sequence[RankTrace]) -> None:
    """Say that what comes behind is missing. Raises :class:`TraceError` where that is every kernel of a GPU."""
    launched = any(event.cat in _RUNTIMES for event in file.events)
    for trace in traces:
        if trace.on_cpu and (launched or file.devices):
            raise TraceError(f"{path}: is cut off before the kernels of its GPU; copy it again, or record it anew")
        trace.skipped["the end of a file that is cut off: figures are of the events before it"] += 1


def _ranks(path: Path, file: KinetoFile, n: int, recorded: Recorded) -> list[RankTrace]:
    info = file.info or KinetoInfo()
    if info.rank is None and n > 1:
        raise TraceError(f"{path}: does not say its rank (no distributedInfo), so it cannot be joined with others")
    world = info.world_size or 1
    device = file.devices[0].name if file.devices else ""
    parts = by_rank(file.events) if file.clustersim else {info.rank or 0: file.events}
    traces = []
    for rank, events in parts.items():
        trace = RankTrace(
            rank, world, str(path), host=file.host_name, device=device, base=file.base, backend=info.backend
        )
        process = next((event.pid for event in events if event.pid in recorded and event.cat == "cpu_op"), -1)
        _KinetoReader(trace, groups_of(info), recorded.pop(int(process), {})).take(events)
        traces.append(trace)
    return traces


class _KinetoReader:
    """One pass over a file's events."""

    def __init__(self, trace: RankTrace, groups: dict[str, tuple[int, ...]], recorded: dict[int, Operator]) -> None:
        self.trace = trace
        self.groups = groups
        self.recorded = recorded
        self.told: dict[int, Operator] = {}
        self.steps: list[tuple[float, int]] = []
        self.until = -math.inf  # the last step's end
        self.notes: defaultdict[int | str, list[KinetoEvent]] = defaultdict(list)
        self.records = CallRecords()
        self.launches: dict[int, tuple[float, int | str]] = {}
        self.kernels: list[KinetoEvent] = []
        self.operators: list[KinetoEvent] = []
        self.calls: list[HostCall] = []
        self.schedule = AnnotatedSchedule(())

    def take(self, events: list[KinetoEvent]) -> None:
        """Sort events by what they are, then make the rank's collectives and work of them."""
        # Microseconds since 1970 leave a float a quarter of a microsecond: count from the file's own first event.
        origin = math.floor(min((event.ts for event in events if event.ph == "X"), default=0.0))
        self.trace.base += origin * 1000
        for event in events:
            if event.ph == "X" and event.dur >= 0:
                event.ts -= origin
                self._sort(event)
            elif event.ph == "X":
                self.trace.skipped["an event that ends before it begins"] += 1
        self.steps.sort()
        self.schedule = AnnotatedSchedule((e.name, e.ts, e.ts + e.dur) for e in events if e.cat == "user_annotation")
        for notes in self.notes.values():
            notes.sort(key=lambda e: e.ts)
        for event in self.operators:
            if event.name in PRODUCTS:
                self.trace.product_flops += product_flops(event.name, NOTE_ARGS.decode(event.args))
        if self.kernels:
            for event in self.kernels:
                self._kernel(event)
            self._beside_kernels()
            self._on_host(self.calls)
        else:
            self.trace.on_cpu = True
            self._on_cpu()

    def _sort(self, event: KinetoEvent) -> None:
        cat = event.cat
        if cat in _RUNTIMES:
            if "aunch" in event.name or "emcpy" in event.name or "emset" in event.name:
                self.launches[KERNEL_ARGS.decode(event.args).correlation] = (event.ts, event.tid)
            elif "ynchronize" not in event.name:
                self._call(event)
        elif cat in ("kernel", "gpu_memcpy", "gpu_memset", "Kernel", "Memcpy", "Memset"):
            self.kernels.append(event)
        elif cat == "user_annotation" or cat in _OPERATOR:
            if self.recorded:
                call = KERNEL_ARGS.decode(event.args)
                if recorded := self.recorded.get(call.function):
                    self.told[call.external] = recorded
            if match := _COMMS.match(event.name):
                self.trace.backend = self.trace.backend or match[1]
                self.notes[event.tid].append(event)
            elif match := _STEP.match(event.name):
                self.steps.append((event.ts, int(match.group(1))))
                self.until = max(self.until, event.ts + event.dur)
            else:
                self._call(event)
                if cat in _OPERATOR and event.name.startswith(_CPU_OP):
                    self.operators.append(event)
                elif event.name == RECORDED:
                    self.records.add(event)

    def _step(self, ts: float) -> int:
        position = bisect.bisect_right(self.steps, (ts, math.inf)) - 1
        return self.steps[position][1] if position >= 0 else 0

    def _kernel(self, event: KinetoEvent) -> None:
        try:
            args = KERNEL_ARGS.decode(event.args)
        except msgspec.ValidationError as error:
            self.trace.skipped[f"a kernel whose args are not Kineto's ({error})"] += 1
            return
        called, tid = self.launches.get(args.correlation, (math.nan, ""))
        if args.step is None and called > self.until > -math.inf:
            self.trace.skipped[BEHIND] += 1
            return
        step = args.step if args.step is not None else self._step(called if called == called else event.ts)
        start = event.ts * 1e-6
        end = (event.ts + event.dur) * 1e-6
        if args.collective is None and not LIBRARY_KERNEL.match(event.name):
            operator = self.told.get(args.external)
            stream = f"stream {args.stream}"
            self.trace.work.append(ProfiledWork(event.name, stream, start, end, called * 1e-6, step, None, operator))
            return
        told = args if args.collective is not None else self.records.of(args.external, tid, called)
        note = self._note(tid, called)
        seen = self._told(told, start, end, step) if told is not None else None
        if seen is None and note is not None:
            seen = self._annotated(note, start, end, step)
        unknown = self._unsized(event.name, start, end, step, told, note) if seen is None else None
        if unknown is not None:
            self.trace.skipped[UNSIZED] += 1
            self.trace.seen.append(unknown)
        elif seen is None:
            self.trace.skipped[UNNAMED] += 1
        else:
            short = match.group(1) if (match := LIBRARY_KERNEL.match(event.name)) and match.group(1) else ""
            self.trace.seen.append(dataclasses.replace(seen, kernel=short, told=self.told.get(args.external)))

    def _unsized(
        self, kernel: str, start: float, end: float, step: int, told: KernelArgs | None, note: KinetoEvent | None
    ) -> RankCollective | None:
        """What is known by name alone: its kernel's, the call's or the annotation's."""
        called = told.collective if told is not None else None
        if called is None and note is not None and (match := _COMMS.match(note.name)):
            called = match[2]
        return unsized(kernel, start, end, step, self.trace.rank, self.trace.world, called=called or "")

    def _told(self, args: KernelArgs, start: float, end: float, step: int) -> RankCollective | None:
        kind = kind_of(args.collective or "")
        dtype = dtype_of(args.dtype)
        if kind is None or dtype is None:
            return None
        group = str(args.group)
        members = ranks_named(args.ranks) or self.groups.get(group, ())
        size = args.size or len(members) or self.trace.world
        if len(members) not in (0, size):
            members = ()  # the profiler cuts long lists off
        gathered = args.inputs * size if kind == "all_gather" else args.inputs
        elements = args.outputs if kind == "all_gather" and args.outputs >= 0 else gathered
        if elements < 0 and kind != "barrier":
            return None  # sizes are not told, which an empty message's are
        nbytes = float(max(elements, 0) * DTYPE_BYTES[dtype])
        return RankCollective(
            kind, start, end, nbytes, group, size, members, args.seq, dtype, step, purpose=args.purpose
        )

    def _note(self, tid: int | str, ts: float) -> KinetoEvent | None:
        """The annotation of the thread that a launch call lies in."""
        notes = self.notes.get(tid, [])
        position = bisect.bisect_right(notes, ts, key=lambda e: e.ts) - 1
        return notes[position] if position >= 0 and notes[position].ts + notes[position].dur >= ts else None

    def _annotated(self, note: KinetoEvent, start: float, end: float, step: int) -> RankCollective | None:
        """From the annotation's input shapes: all that older profilers, and Gloo's, write."""
        match = _COMMS.match(note.name)
        kind = kind_of(match[2]) if match else None
        args = NOTE_ARGS.decode(note.args)
        nbytes, dtype = input_bytes(args)
        if kind is None or (nbytes is None and kind != "barrier"):
            return None
        world = self.trace.world
        full = (nbytes or 0.0) * (world if kind == "all_gather" else 1)
        return RankCollective(
            kind, start, end, full, "", 2 if kind in {"send", "recv"} else world, (), None, dtype, step
        )

    def _beside_kernels(self) -> None:
        """Gloo's calls, which launch no kernel: collectives where the GPUs have none of their own, else said."""
        gloo = [note for notes in self.notes.values() for note in notes if note.name.startswith("gloo:")]
        if self.trace.seen and gloo:
            self.trace.skipped["a call of Gloo, beside the collectives of the GPUs"] += len(gloo)
        elif gloo:
            self._noted(gloo)

    def _call(self, event: KinetoEvent) -> None:
        if event.dur * 1e-6 >= LONG and (name := short_name(event.name)):
            step = KERNEL_ARGS.decode(event.args).step
            self.calls.append(HostCall(name, event.ts * 1e-6, (event.ts + event.dur) * 1e-6, step))

    def _on_host(self, calls: Sequence[HostCall]) -> None:
        """What of these calls the host did while the GPU had nothing: a part of the rank's work, on a stream of its
        own."""
        busy = [(work.start, work.end) for work in self.trace.work]
        busy += [(seen.start, seen.end) for seen in self.trace.seen]
        begin = self.steps[0][0] * 1e-6 if self.steps else math.inf
        for name, start, end, told in host_work(busy, calls, begin):
            step = self._step(round(start * 1e6, 3)) if told is None else told
            self.trace.work.append(ProfiledWork(name, HOST_STREAM, start, end, math.nan, step))

    def _noted(self, notes: Sequence[KinetoEvent]) -> None:
        """Annotations that are the collectives themselves."""
        for note in notes:
            start = note.ts * 1e-6
            end = (note.ts + note.dur) * 1e-6
            seen = self._annotated(note, start, end, self._step(note.ts))
            if seen is None:
                why = f"{UNSHAPED} ({note.name}; record_shapes=True writes them): {UNCOUNTED}"
                self.trace.skipped[why] += 1
            else:
                doing = self.schedule.at(note.ts)
                self.trace.seen.append(dataclasses.replace(seen, doing=doing, told=self._called(note)))

    def _on_cpu(self) -> None:
        """Without a GPU: annotations are collectives, the outermost ATen operators of each thread its work. What runs
        between operators is the rank's own, but for the data loader, which it waits for."""
        for notes in self.notes.values():
            self._noted(notes)
        until: dict[int | str, float] = {}
        for event in sorted(self.operators, key=lambda e: (e.ts, -e.dur)):
            if event.ts >= until.get(event.tid, -math.inf):
                until[event.tid] = event.ts + event.dur
                self._operator(event, event.ts * 1e-6, (event.ts + event.dur) * 1e-6)
        self._on_host([call for call in self.calls if call.name == DATA_LOADER])

    def _operator(self, event: KinetoEvent, start: float, end: float) -> None:
        """An outermost operator: work of its own, or a part of the action of a pipeline that it lies in."""
        work = self.trace.work
        doing = self.schedule.at(event.ts)
        step = self._step(event.ts)
        if doing is None or doing.boundary >= 0:
            operator = self._called(event)
            work.append(ProfiledWork(event.name, f"thread {event.tid}", start, end, math.nan, step, None, operator))
        elif work and work[-1].doing is doing:
            work[-1] = work[-1]._replace(end=end)
        else:
            work.append(ProfiledWork(doing.name, f"thread {event.tid}", start, end, math.nan, step, doing))

    def _called(self, event: KinetoEvent) -> Operator | None:
        return self.told.get(KERNEL_ARGS.decode(event.args).external) if self.told else None
