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
TABLE = "give a CSV with the columns collective,size_bytes,time_us,ranks (in microseconds; more: nodes, dtype)"
"""What times of collectives are read of, whoever took them."""
_OF_GPUS = (
    "it has no steps and no collectives: `clustersim diagnose` reads pages of dcgm-exporter, and logs and profiles of "
    "the job"
)
_OF_A_LINK = (
    "what a link or a GPU reaches alone is a field of the machine: `clustersim describe --keys topology` names it, and "
    "`clustersim check` says what of a machine is assumed"
)
_NSYS = "record with `nsys profile` and give `nsys stats --report cuda_gpu_trace --format csv` of it"
ROCPROF = "give the table of kernels that `rocprofv3 --kernel-trace --output-format csv` writes, kernel_trace.csv"
"""What to record in place of what rocprofv3 writes otherwise."""
KINDS = (
    UnreadKind("rocprofv3's JSON", re.compile(rb"\"rocprofiler-sdk-tool\""), ROCPROF),
    UnreadKind(
        "a table of calls, copies or agents of rocprofv3",
        re.compile(
            rb"^\"?Domain\"?,\"?Function\"?,\"?Process_Id\"?,|^\"?Kind\"?,\"?Direction\"?,|^\"?Node_Id\"?,\"?Logical_Node_Id",
            re.MULTILINE,
        ),
        ROCPROF,
    ),
    UnreadKind("rocprof's JSON", re.compile(rb"\"BeginNs\"\s*:.{0,200}\"dev-id\"", re.DOTALL), "give its results.csv"),
    UnreadKind(
        "a table of rocprof without times",
        re.compile(rb"^\"?Index\"?,\"?KernelName\"?,(?!.*BeginNs)", re.MULTILINE),
        "record with `rocprof --timestamp on`, or " + ROCPROF,
    ),
    UnreadKind(
        "another report of nsys stats",
        re.compile(rb"^\"?API Start \(\w+\)\"?,|Queue Start \(\w+\)", re.MULTILINE),
        "of its reports cuda_gpu_trace and cuda_gpu_kern_sum are read: " + _NSYS,
    ),
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
    UnreadKind(
        "TraceLens' table of durations by rank (nccl_summary_long)",
        re.compile(rb"^rank,Process Group Name,[^\n]*\bdur_mean\b", re.MULTILINE),
        "they hold the wait for peers: give its nccl_summary_implicit_sync.csv, or the profiles themselves",
    ),
    UnreadKind(
        "what torchfrtrace found in Flight Recorder dumps",
        re.compile(
            rb"^Collective (?:sequence number: )?\d+ (?:at entry \d+ )?errors|^collective state: \w+", re.MULTILINE
        ),
        "give the dumps themselves, all of one folder: who did not call what is told of them",
    ),
    UnreadKind(
        "an answer of NCCL's RAS (ncclras)",
        re.compile(rb"^Job summary\r?\n=+.*^Communicators\.\.\.", re.MULTILINE | re.DOTALL),
        "it counts ranks and has no times: give the log of PyTorch's watchdog, Flight Recorder dumps, or the log with "
        "NCCL_DEBUG=INFO",
    ),
    UnreadKind(
        "a dump of NCCL's example profiler plugin",
        re.compile(rb"\"cat\": ?\"(?:GROUP|COLL|P2P|PROXY)(?:_API)?\", ?\"ph\": ?\"[be]\""),
        "it ends a collective where it was enqueued: load NCCL's inspector plugin in its place, or " + _KINETO,
    ),
    UnreadKind("a report of nvprof", re.compile(rb"NVPROF is profiling|\"?Type\"?,\"?Time\(%\)\"?,"), _NSYS),
    UnreadKind(
        "a profile of JAX or XLA",
        re.compile(rb"\"hlo_(?:op|module)\"|/device:(?:GPU|TPU):\d"),
        "its kernels name no collective's size: " + _NSYS + ", or NCCL's inspector",
    ),
    UnreadKind(
        "a table of the OSU micro-benchmarks",
        re.compile(rb"(?:^|[>\]:)\s])[ \t]*# OSU \S+ \w", re.MULTILINE),
        "it says neither how many ranks there are nor on how many nodes: " + TABLE,
    ),
    UnreadKind(
        "a report of perftest (ib_write_bw and its kin)",
        re.compile(rb"(?:RDMA_Write|RDMA_Read|Send|Atomic\w*) (?:Post List )?(?:Bidirectional )?(?:BW|Latency) Test"),
        _OF_A_LINK,
    ),
    UnreadKind("a report of nvbandwidth", re.compile(rb"nvbandwidth Version|\"nvbandwidth\" ?:"), _OF_A_LINK),
    UnreadKind(
        "a table of MSCCL++'s tests",
        re.compile(rb"Time\(us\)\s*\|\s*AlgBW|^# +size +count +time +algbw +busbw +#wrong", re.MULTILINE),
        TABLE,
    ),
    UnreadKind(
        "a report of gpu-burn or of Linpack",
        re.compile(rb"Gflop/s\)\s+errors:|HPLinpack|HPL-MxP|HPL-NVIDIA"),
        _OF_A_LINK,
    ),
    UnreadKind(
        "a log of counters of GPUs (nvidia-smi, dcgmi, rocm-smi)",
        re.compile(
            rb"^#Entity +\w|^# gpu +(?:pwr|sm|fb|mclk|rxpci)\b|\butilization\.gpu\b|\bclocks\.(?:current\.)?(?:sm|gr)\b"
            rb"|^device,.*GPU use \(%\)",
            re.MULTILINE,
        ),
        _OF_GPUS,
    ),
    UnreadKind(
        "the state of a checkpoint of Hugging Face's Trainer",
        re.compile(rb"\"log_history\" ?: ?\["),
        "it has losses without times until training ends: give the log, whose progress bar and last line have them, "
        "or all_results.json",
    ),
    UnreadKind(
        "a metrics report of torch_xla",
        re.compile(rb"^Metric: (?:CompileTime|ExecuteTime|TransferToDeviceTime)", re.MULTILINE),
        "a step may be several of its executions: give the log of steps, or a table with step and step_time_s",
    ),
    UnreadKind(
        "a table of epochs",
        re.compile(rb"^epoch,(?!.*\bstep)", re.MULTILINE),
        "an epoch is no step: give a table with step and step_time_s, or the log",
    ),
    UnreadKind(
        "a log of MLPerf's (MLLOG)",
        re.compile(rb":::MLLOG \{"),
        "its times are of events, of which nothing says how many steps lie between: give the framework's own log",
    ),
    UnreadKind(
        "a profile of Ascend NPUs",
        re.compile(rb"Ascend Hardware|\"Task Type\": ?\"AI_|\bAI_CORE\b"),
        "only GPUs' and CPUs' traces are read",
    ),
    UnreadKind(  # the least special: JAX writes such packets too
        "a file of protobuf packets, as Perfetto's traces are (rocprofv3's .pftrace)",
        re.compile(rb"\A\n(?=.{0,60}[\x00-\x08\x0e-\x1f])", re.DOTALL),
        "of ROCm " + ROCPROF + "; of PyTorch " + _KINETO,
    ),
)


def advice(head: Head) -> str:
    """What a file is that is not read, and what is; empty where nothing is known of it."""
    for kind in KINDS:
        if kind.mark.search(head.data):
            return f"{kind.what}, which is not read; {kind.instead}"
    return ""
