"""GPU profilers' reports as CSV: kernels by device and stream, or how long each took in all."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces.told import KernelSums

HEADER = (
    "Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,BlkY,BlkZ,Reg/Trd,StcSMem (MB),DymSMem (MB),Bytes (MB),"
    "Throughput (MBps),SrcMemKd,DstMemKd,Device,Ctx,Strm,Name\n"
)
ALL_REDUCE = '"ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)"'
SUMS = (
    "Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name\n"
    "75.0,3000000,3,1000000.0,1000000.0,900000,1100000,1000.0,gemm\n"
    f"25.0,1000000,2,500000.0,500000.0,400000,600000,1000.0,{ALL_REDUCE}\n"
)


def line(start: int, lasts: int, name: str, device: int = 0, stream: int = 7) -> str:
    return f"{start},{lasts},1,1,1,1,64,1,1,24,0.000,0.000,,,,,NVIDIA A100-SXM4-80GB ({device}),1,{stream},{name}\n"


TRACE = (
    HEADER
    + "".join(line(1000 * i, 600, "gemm", device) for i in range(4) for device in (0, 1))
    + "".join(line(1500, 400 + 100 * device, ALL_REDUCE, device, 20) for device in (0, 1))
    + line(5000, 100, "[CUDA memcpy Host-to-Device]")
)


ROCPROF = (
    '"Kind","Agent_Id","Queue_Id","Dispatch_Id","Kernel_Name","Correlation_Id","Start_Timestamp","End_Timestamp"\n'
    '"KERNEL_DISPATCH","Agent 4",1,1,"Cijk_Ailk_Bljk",1,1000,1800\n'
    '"KERNEL_DISPATCH","Agent 5",1,2,"Cijk_Ailk_Bljk",2,2000,2500\n'
)
ROCPROF_SUMS = '"Name","Calls","TotalDurationNs","AverageNs","Percentage"\n"Cijk",4,4000,1000.0,80\n'


def read(path: Path, text: str) -> Timeline | KernelSums:
    path.write_text(text)
    answer = traces.read(path)
    assert isinstance(answer, Timeline | KernelSums)
    return answer


@pytest.mark.parametrize(
    ("head", "factor"),
    [
        (HEADER, 1e-9),
        (HEADER.replace("(ns)", "(us)"), 1e-6),
        (HEADER.replace(" (ns)", "(nsec)"), 1e-9),
    ],
)
def test_a_device_is_a_rank_and_times_are_in_the_unit_of_their_columns(tmp_path: Path, head: str, factor: float):
    run = read(tmp_path / "t.csv", TRACE.replace(HEADER, head))
    assert isinstance(run, Timeline)
    spans = run.spans()
    assert run.world_size == 2
    assert float(spans["end"].max() - spans["start"].min()) == pytest.approx(5100 * factor)
    names = {op.name: op.stream for op in run.ops}
    assert names["gemm"] == "compute"
    assert "Memcpy" in names


def test_nccls_kernels_are_collectives_whose_size_is_not_told(tmp_path: Path):
    run = read(tmp_path / "t.csv", TRACE)
    assert isinstance(run, Timeline)
    collectives = [op for op in run.ops if op.kind != "compute"]
    assert [(op.kind, op.nbytes) for op in collectives] == [("all_reduce", 0.0)] * 2
    assert all("transfer_s" not in op.detail for op in collectives)
    assert any("holds their wait for peers" in reason for reason in run.stats)
    done = CliRunner().invoke(cli, ["replay", str(tmp_path / "t.csv"), "--topology", "dgx-1v"])
    assert done.exit_code == 0
    assert "its size is not known" in done.output


def test_what_nsys_stats_prints_around_its_tables_is_passed_over(tmp_path: Path):
    around = "Generating SQLite file r.sqlite from r.nsys-rep\nProcessing [r.sqlite] with [cuda_gpu_trace.py]... \n\n"
    run = read(tmp_path / "t.csv", around + TRACE + "\n" + around + SUMS)
    assert isinstance(run, Timeline)
    assert run.world_size == 2


def test_a_summary_says_what_kernels_took_in_all(tmp_path: Path):
    sums = read(tmp_path / "t.csv", SUMS)
    assert isinstance(sums, KernelSums)
    assert [(kernel.count, kernel.total_s) for kernel in sums.kernels] == [(3, 3e-3), (2, 1e-3)]
    assert "NCCL's for 25.0%" in sums.lines[0]


def test_rocprofs_tables_are_read_as_nsights_are(tmp_path: Path):
    run = read(tmp_path / "t.csv", ROCPROF)
    assert isinstance(run, Timeline)
    assert run.world_size == 2
    assert sorted((run.row_end - run.row_start).tolist()) == pytest.approx([500e-9, 800e-9])
    sums = read(tmp_path / "t.csv", ROCPROF_SUMS)
    assert isinstance(sums, KernelSums)
    assert [(kernel.count, kernel.total_s) for kernel in sums.kernels] == [(4, pytest.approx(4e-6))]


@pytest.mark.parametrize("micro", ["\u00b5", "\u03bc", "u"])
def test_tracelens_sums_of_kernels_are_read_by_name(tmp_path: Path, micro: str):
    """A kernel has a line for each operator and stream that it ran for."""
    sums = read(
        tmp_path / "kernel_summary.csv",
        f"Parent cpu_op,Kernel name,Kernel stream,Kernel duration ({micro}s)_sum,Kernel duration ({micro}s)_count\n"
        "aten::mm,Cijk,3,5000.0,37\n"
        "hipGraphLaunch,norm,3,400.0,72\n"
        "hipGraphLaunch,norm,5,600.0,72\n",
    )
    assert isinstance(sums, KernelSums)
    assert [(kernel.name, kernel.count) for kernel in sums.kernels] == [("Cijk", 37), ("norm", 144)]
    assert [kernel.total_s for kernel in sums.kernels] == pytest.approx([5e-3, 1e-3])


@pytest.mark.parametrize(
    "head",
    [
        "KernelName,gpu-id,queue-id,BeginNs,EndNs,DurationNs",
        "Kernel_Name,GPU_ID,Queue_ID,Start_Timestamp,End_Timestamp,Other",
    ],
)
def test_tables_of_earlier_rocprofs_are_read_as_well(tmp_path: Path, head: str):
    run = read(tmp_path / "t.csv", f'{head}\n"Cijk",0,0,1000,1800,800\n"Cijk",1,0,2000,2500,500\n')
    assert isinstance(run, Timeline)
    assert run.world_size == 2
    assert sorted((run.row_end - run.row_start).tolist()) == pytest.approx([500e-9, 800e-9])


def test_rccls_one_kernel_for_all_collectives_is_no_compute(tmp_path: Path):
    """It counted as compute that hides the transfer."""
    generic = ROCPROF.replace('Cijk_Ailk_Bljk",2', 'ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)",2')
    run = read(tmp_path / "t.csv", generic.replace("Agent 5", "Agent 4"))
    assert isinstance(run, Timeline)
    assert (run.row_end - run.row_start).tolist() == pytest.approx([800e-9])
    assert run.stats["skipped: a collective's kernel without its name and size: its time is in no figure"] == 1


PAGE = """
 ** CUDA GPU Kernel Summary (cuda_gpu_kern_sum):

 Time (%)  Total Time (ns)  Instances  Avg (ns)  Med (ns)  Min (ns)  Max (ns)  StdDev (ns)  Name
 --------  ---------------  ---------  --------  --------  --------  --------  -----------  ----
     75.0        3,000,000          3  1000.0    1000.0    900       1100      10.0         gemm
     25.0          1000000          2  500.0     500.0     400       600       10.0         ncclKernel_AllReduce(a, b)

Processing [r.sqlite] with [cuda_api_sum.py]...

 Time (%)  Total Time (ns)  Num Calls  Name
 --------  ---------------  ---------  ----------------
    100.0          5000000          5  cudaLaunchKernel
"""


def test_a_summary_as_nsys_prints_it_on_a_page_is_the_same(tmp_path: Path):
    sums = read(tmp_path / "t.txt", PAGE)
    assert isinstance(sums, KernelSums)
    assert [(kernel.name, kernel.count, kernel.total_s) for kernel in sums.kernels] == [
        ("gemm", 3, 3e-3),
        ("ncclKernel_AllReduce(a, b)", 2, 1e-3),
    ]
    assert "NCCL's for 25.0%" in sums.lines[0]


def test_a_line_that_is_cut_off_is_told(tmp_path: Path):
    run = read(tmp_path / "t.csv", TRACE[:-60])
    assert isinstance(run, Timeline)
    assert run.stats["skipped: a line that is cut off"] == 1
    sums = read(tmp_path / "t.csv", "\n".join(SUMS.splitlines()[:2]) + "\n25.0,10")
    assert isinstance(sums, KernelSums)
    assert sums.skipped == {"a line that is cut off": 1}


def test_files_of_one_run_each_count_from_their_own_start(tmp_path: Path):
    for rank in (0, 1):
        (tmp_path / f"{rank}.csv").write_text(HEADER + line(100 * rank, 50, "gemm"))
    run = traces.read(tmp_path)
    assert isinstance(run, Timeline)
    assert run.world_size == 2
    assert any("from its own start" in reason for reason in run.stats)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (HEADER, "no kernel was recorded"),
        (ROCPROF.replace("2500", "20"), "t.csv:3: End is '20', before Start, '2000'"),
        (TRACE.replace("1500,400", "soon,400"), r"t.csv:10: Start is 'soon', not a time >= 0"),
        (TRACE.replace("(ns)", "(weeks)"), "t.csv:1: the column 'Start' has no unit of time"),
        (SUMS.replace("Total Time (ns)", "Total Time"), "t.csv:1: the column 'Total Time' has no unit of time"),
        (SUMS.replace("3000000,3", "3000000,x"), "t.csv:2: Instances is 'x', not a whole number"),
        (ROCPROF_SUMS.replace("Cijk", "hipLaunchKernel"), "is of calls of HIP, HSA"),
        (SUMS.replace("Instances", "Num Calls"), "cuda_gpu_trace and cuda_gpu_kern_sum are read"),
    ],
)
def test_what_is_wrong_in_a_report_is_one_error(tmp_path: Path, text: str, said: str):
    with pytest.raises(TraceError, match=said):
        read(tmp_path / "t.csv", text)


def test_a_kernel_with_several_counters_is_one_kernel(tmp_path: Path):
    """rocprofv3 --pmc writes a row for each counter of a kernel: its runs were counted as often."""
    head, *rows = ROCPROF.splitlines()
    counted = [f'{row},"{name}",1' for row in rows for name in ("SQ_WAVES", "GRBM_COUNT")]
    run = read(tmp_path / "c.csv", "\n".join([f'{head},"Counter_Name","Counter_Value"', *counted]) + "\n")
    plain = read(tmp_path / "p.csv", ROCPROF)
    assert isinstance(run, Timeline)
    assert isinstance(plain, Timeline)
    assert len(run.spans()["start"]) == len(plain.spans()["start"]) == 2


def test_sums_of_whole_domains_are_no_kernels(tmp_path: Path):
    sums = ROCPROF_SUMS.replace("Cijk", "KERNEL_DISPATCH") + '"HIP_RUNTIME_API",100,4000,40.0,20\n'
    with pytest.raises(TraceError, match="whole domains of rocprofv3"):
        read(tmp_path / "d.csv", sums)
