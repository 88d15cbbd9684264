"""Profiles of other devices than NVIDIA's, and execution traces with lists of lists of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_traces_kineto import collectives, save

from clustersim.app.cli import cli
from clustersim.core.program import COMPUTE_STREAM
from clustersim.files import traces
from clustersim.files.traces import execution_trace
from clustersim.files.traces.execution_trace import _TraceTensors

ROCM = "AMD Instinct MI300X"
XPU = "Intel(R) Data Center GPU Max 1550"


def launched(cat: str, call: str, name: str, at: float, number: int, **args: Any) -> list[dict[str, Any]]:
    """A kernel and the call that launched it."""
    said = {"stream": 3, "correlation": number, "External id": number} | args
    return [
        {"ph": "X", "cat": cat, "name": call, "pid": 1, "tid": 1, "ts": at, "dur": 2.0,
         "args": {"correlation": number, "External id": number}},
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 3, "ts": at + 50, "dur": 100.0, "args": said},
    ]  # fmt: skip


def annotated(at: float, name: str) -> dict[str, Any]:
    args = {"Input Dims": [[1000, 1000]], "Input type": ["float"]}
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": at - 1,
        "dur": 9.0,
        "args": args,
    }


@pytest.mark.parametrize(
    ("device", "cat", "call", "gemm", "note", "kernel"),
    [
        (ROCM, "cuda_runtime", "hipExtModuleLaunchKernel", "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32", "nccl:all_reduce",
         "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"),
        (ROCM, "hip_runtime", "hipLaunchKernel", "Cijk_Alik_Bljk_BBS_BH", "rccl:all_reduce",
         "void rcclGenericKernel<1, false>(ncclDevKernelArgsStorage<4096ul>)"),
        (ROCM, "cuda_runtime", "hipLaunchKernel", "Cijk_Alik_Bljk_BBS_BH", "nccl:all_reduce",
         "ncclDevKernelDebug_Generic(ncclDevKernelArgsStorage<4096ul>)"),
        (ROCM, "cuda_runtime", "hipLaunchKernel", "void at::native::elementwise", "nccl:all_reduce",
         "mscclKernel_Sum_half_Simple_false(ncclDevComm*)"),
        (XPU, "xpu_runtime", "urEnqueueKernelLaunch", "gemm_kernel", "xccl:all_reduce",
         "oneccl_allreduce_kernel<float>"),
        (XPU, "xpu_driver", "zeCommandListAppendLaunchKernel", "gemm_kernel", "xccl:all_reduce",
         "void ccl::v1::allreduce_large<half>"),
    ],
)  # fmt: skip
def test_kernels_of_other_devices_are_work_and_their_collectives_collectives(
    tmp_path: Path, device: str, cat: str, call: str, gemm: str, note: str, kernel: str
):
    events = [
        *launched(cat, call, gemm, 100.0, 1),
        annotated(400.0, note),
        *launched(cat, call, kernel, 400.0, 2),
    ]
    path = save(tmp_path / "rank0.json", events, world=1, deviceProperties=[{"id": 0, "name": device}])
    run = traces.read(path)
    (collective,) = collectives(run)
    assert (collective.kind, collective.nbytes) == ("all_reduce", 4e6)
    (work,) = [op for op in run.ops if op.kind == "compute"]
    assert (work.name, work.stream) == (gemm, COMPUTE_STREAM)
    assert run.stats[f"device: {device}"] == 1.0


@pytest.mark.parametrize("name", ["__amd_rocclr_copyBuffer.kd", "CopyHostToDevice", "Memcpy HtoD (Pinned -> Device)",
                                  "FillBuffer", "Memset (Device)"])  # fmt: skip
def test_copies_of_other_devices_are_copies(tmp_path: Path, name: str):
    path = save(tmp_path / "rank0.json", launched("cuda_runtime", "hipMemcpyAsync", name, 100.0, 1), world=1)
    (op,) = traces.read(path).ops
    assert op.phase == "memcpy"


TENSOR = [[5, 7, 0, 6, 4, "cuda:0"], [6, 8, 0, 6, 4, "cuda:0"], [9, 10, 0, 6, 4, "cuda:0"]]


@pytest.mark.parametrize(
    ("kind", "value", "shape"),
    [
        ("GenericList[Tensor(float),Tensor(float),Tensor(float)]", TENSOR, [[2, 3]] * 3),
        ("GenericList[Tensor(float)]", TENSOR, [[2, 3]] * 3),
        ("GenericList[GenericList[Tensor(float),Tensor(float)],GenericList[Tensor(float)]]",
         [TENSOR[:2], TENSOR[2:]], [[[2, 3]] * 2, [[2, 3]]]),
        ("GenericList[GenericList[Tensor(float),Tensor(float)],GenericList[Tensor(float),Int]]",
         [TENSOR[:2], [TENSOR[2], 4]], [[[2, 3]] * 2, [[2, 3], []]]),
        ("Tuple[Tensor(float),GenericList[GenericList[Tensor(float)]],Tensor(float)]",
         [TENSOR[0], [[TENSOR[1]]], TENSOR[2]], [[2, 3], [[[2, 3]]], [2, 3]]),
    ],
)  # fmt: skip
def test_tensors_in_lists_of_lists_are_all_found(kind: str, value: Any, shape: Any):
    found = list(execution_trace._tensors(_TraceTensors([value], [shape], [kind])))
    assert found == [(7, (2, 3), "fp32"), (8, (2, 3), "fp32"), (10, (2, 3), "fp32")]


@pytest.mark.parametrize("kind", ["GenericList[Int,Int]", "Int", "GenericList[]", "None", "String"])
def test_what_holds_no_tensor_has_none(kind: str):
    assert list(execution_trace._tensors(_TraceTensors([[1, 2]], [[[], []]], [kind]))) == []


@pytest.mark.parametrize(
    ("told", "note", "library"),
    [
        ("xccl", "nccl:all_reduce", "xccl"),
        ("", "xccl:all_reduce", "xccl"),
        ("cpu:gloo,xpu:xccl", "gloo:all_reduce", "xccl"),
        ("cpu:gloo,cuda:nccl", "nccl:all_reduce", "nccl"),
        ("", "rccl:all_reduce", "nccl"),
        ("hccl", "hccl:all_reduce", "hccl"),
        ("gloo", "gloo:all_reduce", "gloo"),
    ],
)
def test_the_library_of_the_collectives_is_the_one_that_the_trace_names(
    tmp_path: Path, told: str, note: str, library: str
):
    events = [*launched("xpu_runtime", "urEnqueueKernelLaunch", "gemm_kernel", 100.0, 1), annotated(400.0, note)]
    path = save(tmp_path / "rank0.json", events, world=1, deviceProperties=[{"id": 0, "name": XPU}])
    data = json.loads(path.read_text())
    data["distributedInfo"]["backend"] = told
    path.write_text(json.dumps(data))
    assert traces.backend_of(traces.read(path)) == library
    played = CliRunner().invoke(cli, ["replay", str(path), "--topology", "hgx-h100"])
    refused = f"went through {library}, which is not played" in str(played.exception)
    assert refused == (played.exit_code != 0) == (library in ("xccl", "hccl"))
    assert CliRunner().invoke(cli, ["replay", str(path), "--topology", "hgx-h100", "--backend", "nccl"]).exit_code == 0
