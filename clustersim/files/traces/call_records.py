"""Calls of collectives that PyTorch's profiler writes as operators, ``record_param_comms``, with their sizes.

Kineto copies their args into the kernels of CUDA; those of ROCm (and of CUDA before PyTorch 2.4) have none, and RCCL's
one kernel for all collectives is named for none. Such a kernel is led back to the call: both have one ``External id``,
or the kernel was launched while the call ran (torch/csrc/distributed/c10d/ParamCommsUtils.hpp).
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict

import msgspec

from clustersim.files.traces.kineto_json import KERNEL_ARGS, KernelArgs, KinetoEvent

RECORDED = "record_param_comms"
"""Name of the operator."""


class CallRecords:
    """The calls of one process, by their ``External id`` and by thread and time."""

    def __init__(self) -> None:
        self._by_id: dict[int, KernelArgs] = {}
        self._by_thread: defaultdict[int | str, list[tuple[float, float, KernelArgs]]] = defaultdict(list)
        self._sorted = True

    def add(self, event: KinetoEvent) -> None:
        """Keep a call whose args name a collective; others (``wait``, those of older releases) have no sizes."""
        try:
            args = KERNEL_ARGS.decode(event.args)
        except msgspec.ValidationError:
            return
        if args.collective is None:
            return
        if args.external >= 0:
            self._by_id[args.external] = args
        self._by_thread[event.tid].append((event.ts, event.ts + event.dur, args))
        self._sorted = False

    def of(self, external: int, thread: int | str, called: float) -> KernelArgs | None:
        """The call that a kernel is of. ``called`` : when its launch was called [us], or nan."""
        if external in self._by_id:
            return self._by_id[external]
        if math.isnan(called):
            return None
        if not self._sorted:
            for records in self._by_thread.values():
                records.sort(key=lambda record: record[0])
            self._sorted = True
        records = self._by_thread.get(thread, [])
        position = bisect.bisect_right(records, called, key=lambda record: record[0]) - 1
        begun = records[position] if position >= 0 else None
        return begun[2] if begun is not None and called <= begun[1] else None
