"""Files that people have of profilers and are not read: what each is, and what to record or export instead."""

from __future__ import annotations

import re
from typing import NamedTuple

from clustersim.files.traces.heads import Head


class UnreadKind(NamedTuple):
    """What a file is, by what its head has, and what is read instead."""

    what: str
    mark: re.Pattern[bytes]
    instead: str


_KINETO = "give the trace that prof.export_chrome_trace or tensorboard_trace_handler writes"
_NSYS = "record with `nsys profile` and give `nsys stats --report cuda_gpu_trace --format csv` of it"
KINDS = (
    UnreadKind(
        "a snapshot of PyTorch's memory (torch.cuda.memory._dump_snapshot)",
        re.compile(rb"^\x80.*device_traces", re.DOTALL),
        "it has no times of kernels or collectives: " + _KINETO + "; `clustersim memory` says what fills a GPU",
    ),
    UnreadKind(
        "a table of torch.profiler's key_averages()",
        re.compile(rb"Self CPU %\s+Self CPU\s+CPU total"),
        "sums do not say when an operator ran: " + _KINETO,
    ),
    UnreadKind("a report of nvprof", re.compile(rb"NVPROF is profiling|\"?Type\"?,\"?Time\(%\)\"?,"), _NSYS),
    UnreadKind(
        "a profile of JAX or XLA",
        re.compile(rb"\"hlo_(?:op|module)\"|/device:(?:GPU|TPU):\d"),
        "its kernels name no collective's size: " + _NSYS + ", or NCCL's inspector",
    ),
    UnreadKind(
        "a profile of Ascend NPUs",
        re.compile(rb"Ascend Hardware|\"Task Type\": ?\"AI_|\bAI_CORE\b"),
        "only GPUs' and CPUs' traces are read",
    ),
)


def advice(head: Head) -> str:
    """What a file is that is not read, and what is; empty where nothing is known of it."""
    for kind in KINDS:
        if kind.mark.search(head.data):
            return f"{kind.what}, which is not read; {kind.instead}"
    return ""
