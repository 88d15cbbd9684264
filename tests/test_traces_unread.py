"""Files of profilers that are not read are named, with what to give instead; nothing in a pickle is run."""

from __future__ import annotations

import os
import pickle
import sqlite3
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.files import traces

JAX = (
    '{"displayTimeUnit":"ns","traceEvents":[{"ph":"M","pid":1,"name":"process_name","args":{"name":"/device:GPU:0"}},'
    '{"ph":"X","pid":1,"tid":1,"ts":10.0,"dur":5.0,"name":"fusion_3","args":{"hlo_op":"fusion.3"}}]}'
)
ASCEND = '[{"ph":"M","name":"process_name","pid":1,"args":{"name":"Ascend Hardware"}}]'
NVPROF = '==1== NVPROF is profiling process 1, command: python a.py\n"Type","Time(%)","Time","Calls"\n'
TABLE = "----  ----\n    Name    Self CPU %      Self CPU   CPU total %     CPU total  # of Calls\n----  ----\n"
UNREAD = {
    "memory": (pickle.dumps({"segments": [], "device_traces": [[]]}), "snapshot of PyTorch's memory.*export_chrome"),
    "table": (TABLE.encode(), "table of torch.profiler's key_averages.*export_chrome_trace"),
    "nvprof": (NVPROF.encode(), "report of nvprof.*nsys profile"),
    "jax": (JAX.encode(), "profile of JAX or XLA.*nsys"),
    "xplane": (b"\x0a\x40\x08\x01\x12\x0b/device:GPU:0 (NVIDIA)".ljust(120, b"\0"), "profile of JAX or XLA"),
    "OSU": (
        b"# OSU MPI-CUDA Allreduce Latency Test v7.4\n# Size  Avg Latency(us)\n4 18.3\n",
        "OSU.*how many ranks.*CSV",
    ),
    "perftest": (b" RDMA_Write BW Test\n #bytes #iterations BW peak[Gb/sec]\n", "perftest.*describe --keys topology"),
    "nvbandwidth": (b'{"nvbandwidth": {"testcases": []}}', "report of nvbandwidth.*describe --keys topology"),
    "MSCCL++": (b"|  Size   | Time(us)| AlgBW(GB/s) | Correctness|\n", "MSCCL.*give a CSV"),
    "Linpack": (b"HPLinpack 2.1  --  High-Performance Linpack\n", "Linpack, which is not read"),
    "nvidia-smi": (
        b"timestamp, index, utilization.gpu [%], clocks.sm [MHz]\n1, 0, 98 %, 1755 MHz\n",
        "counters of GPUs",
    ),
    "dmon": (b"# gpu    pwr  gtemp  mtemp     sm\n# Idx      W      C\n    0    650   60\n", "counters.*dcgm-exporter"),
    "a checkpoint's state": (b'{"global_step": 2, "log_history": [{"loss": 2.0, "step": 1}]}', "without times.*bar"),
    "torch_xla": (b"Metric: CompileTime\n  TotalSamples: 4\n", "metrics report of torch_xla.*step_time_s"),
    "timm's epochs": (b"epoch,train_loss,eval_loss\n0,6.9,6.8\n", "an epoch is no step"),
    "MLPerf": (b':::MLLOG {"namespace": "", "time_ms": 1750000000000}\n', "MLLOG.*the framework's own log"),
    "OSU behind a prefix": (b"[1,0]<stdout>:# OSU MPI Allreduce Latency Test v7.4\n", "OSU.*CSV"),
    "rocprofv3's JSON": (b'{"rocprofiler-sdk-tool": [{"metadata": {}}]}', "rocprofv3's JSON.*kernel_trace.csv"),
    "rocprofv3's calls": (
        b'"Domain","Function","Process_Id","Thread_Id","Correlation_Id","Start_Timestamp","End_Timestamp"\n',
        "calls, copies or agents of rocprofv3.*kernel_trace.csv",
    ),
    "rocprof without times": (b'"Index","KernelName","gpu-id","queue-id"\n0,"gemm",2,0\n', "rocprof --timestamp on"),
    "rocprof's JSON": (
        b'{"traceEvents":[{},{"ts":"1","ph":"X","name":"k","dur":"2","args":{"BeginNs":"1","dev-id":"4"}}]}',
        "rocprof's JSON.*results.csv",
    ),
    "nsys stats as JSON": (b'[{"Start (ns)":100,"Duration (ns)":50,"Device":"H100 (0)","Name":"gemm"}]', "csv"),
    "nsys jsonlines": (b'{"id":1,"value":"gemm"}\n{"CudaEvent":{"startNs":"100"}}\n', "type sqlite"),
    "nsys arrow": (b"ARROW1\0\0" + bytes(90), "type sqlite"),
    "nsys cuda_kern_exec_trace": (b"API Start (ns),API Dur (ns),Queue Start (ns)\n1,2,3\n", "another report of nsys"),
    "TraceLens by rank": (
        b"rank,Process Group Name,Collective name,dtype,In msg nelems,dur_sum,dur_mean\n0,0,allreduce,Float,4,1,1\n",
        "nccl_summary_long.*nccl_summary_implicit_sync.csv",
    ),
    "NCCL's example plugin": (
        b'[\n{"name": "Group", "cat": "GROUP", "ph": "b", "id": 0, "pid": 1, "tid": 1, "ts": 20.4},\n'
        b'{"name": "Group", "cat": "GROUP", "ph": "e", "id": 0, "pid": 1, "tid": 1, "ts": 20.6},\n{}]\n',
        "example profiler plugin.*inspector plugin",
    ),
    "torchfrtrace": (
        b"Collective 39 at entry 38 errors\ngroup info: 0:default_pg\ncollective: nccl:all_reduce\n"
        b"collective state: scheduled\n",
        "torchfrtrace found.*give the dumps themselves",
    ),
    "RAS": (
        b"NCCL version 2.26.2 compiled with CUDA 12.4\n\nJob summary\n===========\n\n  Nodes\n     32\n\n"
        b"Communicators... (0.01s)\n=============\n",
        "NCCL's RAS.*watchdog",
    ),
    "ascend": (ASCEND.encode(), "profile of Ascend NPUs"),
}


def test_rocprofs_database_is_no_export_of_nsight(tmp_path: Path):
    path = tmp_path / "results.db"
    with sqlite3.connect(path) as base:
        base.execute("create table rocpd_kernel_dispatch_0 (id int, start int, end int)")
    base.close()
    with pytest.raises(TraceError, match=r"rocprofv3.s database.*kernel_trace.csv"):
        traces.read(path)


@pytest.mark.parametrize("kind", UNREAD)
def test_what_is_not_read_is_named_with_what_is(tmp_path: Path, kind: str):
    data, words = UNREAD[kind]
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=words):
        traces.read(path)


class Harmful:
    """A pickle of it would make a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_a_snapshots_pickle_is_not_run(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(pickle.dumps({"segments": Harmful(tmp_path / "made"), "device_traces": [[]]}))
    with pytest.raises(TraceError):
        traces.read(path)
    assert not (tmp_path / "made").exists()
