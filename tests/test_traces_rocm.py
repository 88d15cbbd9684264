"""Profiles of ROCm: RCCL's kernels have no args and one name for all; what they are stands in the host's calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_traces_kineto import collectives, gemm, save

from clustersim.files import traces
from clustersim.files.traces.digest import of_run

GENERIC = "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"
MSCCL = "mscclKernel_Sum_hip_bfloat16_Simple_false(ncclDevComm*, mscclAlgo*, mscclWork*)"
CALL = 2
"""External id of the host's call."""


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": args}


def record(rank: int, **more: Any) -> dict[str, Any]:
    """The host's call, as PyTorch 2.4 and newer record it."""
    args: dict[str, Any] = {
        "External id": CALL,
        "Collective name": "allreduce",
        "dtype": "BFloat16",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 2,
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1]",
        "Rank": rank,
        "Seq": 7,
    }
    return event("cpu_op", "record_param_comms", 60, 40, **(args | more))


def launched(rank: int, name: str = GENERIC, runtime: str = "cuda_runtime", **args: Any) -> list[dict[str, Any]]:
    """A kernel of RCCL that begins 100 us later on rank 1, and its launch inside the call."""
    begin = 200.0 + 100 * rank
    return [
        *gemm(100, 50, 20, 1),
        event(runtime, "hipLaunchKernel", 70, 8, correlation=9),
        event("kernel", name, begin, 1000 - begin, tid=7, stream=7, correlation=9, kind="Dispatch Kernel", **args),
    ]


def of_two(folder: Path, calls: dict[str, Any], **kernel: Any) -> Path:
    for rank in (0, 1):
        save(folder / f"{rank}.json", [record(rank, **calls), *launched(rank, **kernel)], rank)
    return folder


@pytest.mark.parametrize("name", [GENERIC, MSCCL])
@pytest.mark.parametrize("runtime", ["cuda_runtime", "hip_runtime"])
@pytest.mark.parametrize("args", [{"External id": CALL}, {}])
def test_a_kernel_without_args_is_led_back_to_the_hosts_call(tmp_path, name, runtime, args):
    run = traces.read(of_two(tmp_path, {}, name=name, runtime=runtime, **args))
    (op,) = collectives(run)
    assert (op.kind, op.nbytes) == ("all_reduce", 2000)
    assert op.detail["transfer_s"] == pytest.approx(700e-6)
    assert op.detail["skew_s"] == pytest.approx(100e-6)
    assert not of_run(run).skipped


@pytest.mark.parametrize(
    ("calls", "kind", "nbytes"),
    [
        ({"dtype": "Float8_e4m3fnuz"}, "all_reduce", 1000),
        ({"Collective name": "_allgather_base", "In msg nelems": 500}, "all_gather", 2000),
        ({"Collective name": "_reduce_scatter_base", "Out msg nelems": 500}, "reduce_scatter", 2000),
    ],
)
def test_sizes_are_the_calls(tmp_path, calls, kind, nbytes):
    (op,) = collectives(traces.read(of_two(tmp_path, calls)))
    assert (op.kind, op.nbytes) == (kind, nbytes)


def test_a_launch_outside_of_every_call_is_none_of_theirs(tmp_path):
    events = [record(0), *launched(0)]
    late = [row | {"ts": 300.0} if row["name"] == "hipLaunchKernel" else row for row in events]
    digest = of_run(traces.read(save(tmp_path / "0.json", late, 0)))
    assert not digest.collectives
    assert list(digest.skipped.values()) == [1]


def test_an_annotation_without_shapes_tells_what_the_kernel_is_and_its_time_stays(tmp_path):
    """``record_shapes=False`` on ROCm before PyTorch 2.4: the kernel's time was in no figure."""
    events = [event("user_annotation", "nccl:all_reduce", 60, 40), *launched(0)]
    digest = of_run(traces.read(save(tmp_path / "0.json", events, 0)))
    (row,) = digest.collectives
    assert (row.kind, row.nbytes, row.waiting_included) == ("all_reduce", 0, True)
    assert digest.communication_share[0] > 0
    assert "neither size nor group" in next(iter(digest.skipped))
