"""Profiler traces: joined over ranks, transfer apart from skew, sizes as NCCL counts them, one error for a bad file."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import scenario
from clustersim.core.errors import TraceError
from clustersim.core.timeline import OpInfo, Timeline
from clustersim.explain.metrics import steady_window
from clustersim.explain.stalls import causes
from clustersim.files import traces
from clustersim.files.chrome_trace import write_chrome_trace
from clustersim.files.traces import files
from clustersim.files.traces.digest import of_run

GLOO = Path(__file__).parent / "data" / "traces" / "gloo_2_ranks"


def kernel(ts: float, dur: float, seq: int, rank: int = 0, **args: Any) -> dict[str, Any]:
    """An NCCL kernel as PyTorch 2.5 and newer record it."""
    said = {
        "stream": 20,
        "correlation": seq,
        "Collective name": "allreduce",
        "In msg nelems": 1000,
        "Out msg nelems": 1000,
        "Group size": 2,
        "dtype": "Float",
        "Process Group Name": "0",
        "Process Group Ranks": "[0, 1]",
        "Seq": seq,
    }
    return {
        "ph": "X",
        "cat": "kernel",
        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
        "pid": rank,
        "tid": 20,
        "ts": ts,
        "dur": dur,
        "args": said | args,
    }


def gemm(ts: float, dur: float, launched: float, correlation: int) -> list[dict[str, Any]]:
    """A kernel of the model and the call that launched it."""
    args = {"stream": 7, "correlation": correlation}
    return [
        {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": ts, "dur": dur, "args": args},
        {
            "ph": "X",
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "pid": 1,
            "tid": 1,
            "ts": launched,
            "dur": 1.0,
            "args": {"correlation": correlation},
        },
    ]


def save(path: Path, events: list[dict[str, Any]], rank: int = 0, world: int = 2, **more: Any) -> Path:
    said = {"schemaVersion": 1, "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": world}, **more}
    path.write_text(json.dumps(said | {"traceEvents": events}))
    return path


def collectives(run: Timeline) -> list[OpInfo]:
    return [op for op in run.ops if op.kind != "compute"]


# ---- what a joined collective says ----------------------------------------------------------------------------------


def test_transfer_is_the_shortest_duration_and_skew_the_rest(tmp_path):
    a = save(tmp_path / "a.json", [kernel(100, 900, 1, 0)], 0)
    b = save(tmp_path / "b.json", [kernel(800, 200, 1, 1)], 1)
    run = traces.read([b, a])
    (op,) = collectives(run)
    assert (op.kind, op.nbytes) == ("all_reduce", 4000)
    assert op.detail["transfer_s"] == pytest.approx(200e-6)
    assert op.detail["skew_s"] == pytest.approx(700e-6)
    spans = run.spans()
    np.testing.assert_allclose(spans["ready"], [0, 700e-6], atol=1e-12)
    np.testing.assert_allclose(spans["start"], [700e-6, 700e-6], atol=1e-12)
    np.testing.assert_allclose(spans["end"], [900e-6, 900e-6], atol=1e-12)


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "kind", "nbytes"),
    [
        ("_allgather_base", 500, 1000, "all_gather", 4000),
        ("_reduce_scatter_base", 1000, 500, "reduce_scatter", 4000),
        ("all_to_all", 1000, 1000, "all_to_all", 4000),
        ("broadcast", 1000, 1000, "broadcast", 4000),
    ],
)
def test_sizes_are_of_the_full_tensor(tmp_path, name, inputs, outputs, kind, nbytes):
    args = {"Collective name": name, "In msg nelems": inputs, "Out msg nelems": outputs}
    for rank in (0, 1):
        save(tmp_path / f"{rank}.json", [kernel(0, 10, 1, rank, **args)], rank)
    (op,) = collectives(traces.read(tmp_path))
    assert (op.kind, op.nbytes) == (kind, nbytes)


def test_collectives_are_joined_by_sequence_not_by_order(tmp_path):
    save(tmp_path / "a.json", [kernel(0, 50, 1, 0), kernel(100, 30, 2, 0)], 0)
    save(tmp_path / "b.json", [kernel(100, 20, 2, 1), kernel(10, 40, 1, 1)], 1)
    assert [op.detail["transfer_s"] for op in collectives(traces.read(tmp_path))] == pytest.approx([40e-6, 20e-6])


def test_groups_of_one_name_with_other_members_stay_apart(tmp_path):
    for rank in range(4):
        ranks = [0, 1] if rank < 2 else [2, 3]
        save(tmp_path / f"{rank}.json", [kernel(0, 10 + rank, 1, rank, **{"Process Group Ranks": str(ranks)})], rank, 4)
    first, second = collectives(traces.read(tmp_path))
    assert sorted([first.detail["transfer_s"], second.detail["transfer_s"]]) == pytest.approx([10e-6, 12e-6])


def test_clocks_that_disagree_are_aligned_by_the_ends_of_collectives(tmp_path):
    save(tmp_path / "a.json", [kernel(100, 900, 1, 0), kernel(2000, 500, 2, 0)], 0)
    ahead = 5_000_000
    save(tmp_path / "b.json", [kernel(800 + ahead, 200, 1, 1), kernel(2100 + ahead, 400, 2, 1)], 1)
    run = traces.read(tmp_path)
    assert run.stats["clock_offset_s"] == pytest.approx(5.0)
    assert [op.detail["skew_s"] for op in collectives(run)] == pytest.approx([700e-6, 100e-6])
    assert "clocks" in " ".join(of_run(run).hints)


def test_ranks_of_one_machine_keep_its_clock(tmp_path):
    save(tmp_path / "a.json", [kernel(100, 900, 1, 0)], 0, host_name="m")
    save(tmp_path / "b.json", [kernel(800, 300, 1, 1)], 1, host_name="m")  # left 100 us later, and truly so
    assert "clock_offset_s" not in traces.read(tmp_path).stats


def test_files_with_other_bases_of_time_agree(tmp_path):
    save(tmp_path / "a.json", [kernel(100, 900, 1, 0)], 0, baseTimeNanoseconds=10**18)
    save(tmp_path / "b.json", [kernel(300, 200, 1, 1)], 1, baseTimeNanoseconds=10**18 + 500_000)
    (op,) = collectives(traces.read(tmp_path))
    assert op.detail["skew_s"] == pytest.approx(700e-6)


def test_a_missing_rank_leaves_the_transfer_time_unknown(tmp_path):
    path = save(tmp_path / "a.json", [kernel(100, 900, 1, 0)], 0)
    said = of_run(traces.read(path))
    assert said.collectives[0].waiting_included
    assert "1 of 2 ranks" in said.hints[0]


def test_a_kernel_without_name_and_size_keeps_its_time_and_is_counted(tmp_path):
    event = kernel(0, 10, 1)
    del event["args"]["Collective name"]
    path = save(tmp_path / "a.json", [event, *gemm(0, 5, 0, 9)], 0, 1)
    digest = of_run(traces.read(path))
    assert list(digest.skipped.values()) == [1]
    assert "neither size nor group is told" in next(iter(digest.skipped))
    (row,) = digest.collectives
    assert (row.kind, row.nbytes, row.waiting_included, row.busbw) == ("all_reduce", 0, True, None)
    assert digest.communication_share[0] > 0


def test_a_kernel_that_names_no_collective_is_in_no_figure_and_said(tmp_path):
    """RCCL's one kernel for all of them."""
    event = kernel(0, 10, 1) | {"name": "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)"}
    del event["args"]["Collective name"]
    digest = of_run(traces.read(save(tmp_path / "a.json", [event, *gemm(0, 5, 0, 9)], 0, 1)))
    assert digest.skipped == {"a collective's kernel without its name and size: its time is in no figure": 1}


@pytest.mark.parametrize(("launched", "share"), [(99.0, 0.8), (10.0, 0.0)])
def test_idling_for_a_late_launch_is_told_from_idling_for_another_stream(tmp_path, launched, share):
    # Busy 0-10 and 100-110; the second launch call came right before its kernel, or long before.
    path = save(tmp_path / "a.json", [*gemm(0, 10, -5, 1), *gemm(100, 10, launched, 2)], 0, 1)
    found = of_run(traces.read(path)).waiting_for_launch_share
    assert found == pytest.approx(90 / 110 if share else 0.0)


def test_waiting_for_launches_is_a_share_of_the_steps_that_all_shares_are_of(tmp_path):
    """Three steps: a slow first one that waits for a launch all the time, and two that wait for a tenth of it."""
    steps = [(-10.0, 909.0), (899.0, 200.0), (1099.0, 201.0)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 1, "tid": 1, "ts": ts, "dur": dur}
        for n, (ts, dur) in enumerate(steps)
    ]
    events += gemm(0, 10, -5, 1) + gemm(890, 110, 889, 2)  # 880 us of a late launch
    events += gemm(1000, 90, 900, 3) + gemm(1099, 1, 1098, 4)
    events += gemm(1100, 90, 1099, 5) + gemm(1199, 1, 1198, 6)
    digest = of_run(traces.read(save(tmp_path / "a.json", events, 0, 1)))
    assert digest.window_s == pytest.approx(200e-6)
    assert digest.waiting_for_launch_share == pytest.approx(18 / 200)


def test_a_process_without_a_gpu_among_gpus_is_in_no_mean_and_said(tmp_path):
    """A loader's profile in the folder: its busy host was counted as a busy GPU."""
    save(tmp_path / "rank0.json", [*gemm(0, 50, -5, 1), *gemm(50, 10, 40, 2), *gemm(90, 10, 80, 3)], 0, 2)
    alone = of_run(traces.read(tmp_path / "rank0.json"))
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::index", "pid": 1, "tid": 1, "ts": 0.0, "dur": 10.0}
    save(tmp_path / "rank1.json", [operator], 1, 2)
    both = of_run(traces.read(tmp_path))
    assert both.ranks_measured == 1
    assert both.compute_share == alone.compute_share == pytest.approx([0.7])
    (left_out,) = both.skipped
    assert left_out.endswith("rank1.json: a process without a GPU among GPUs: in no figure")


def test_what_the_program_writes_it_reads_back(tmp_path):
    ops = (
        OpInfo("fwd", "compute", "compute"),
        OpInfo(
            "all_reduce",
            "all_reduce",
            "comm",
            nbytes=4000.0,
            detail={"group_size": 2, "dtype": "fp32", "communicator": "world"},
        ),
    )
    rows = np.array([[0, 1, 0, 1], [0, 0, 1, 1], [0, 0, 1e-3, 2e-3], [0, 0, 2e-3, 2e-3], [1e-3, 2e-3, 3e-3, 3e-3]])
    order = np.array([0, 0, 1, 1])
    run = Timeline(2, ops, (np.array([0]), np.array([1])), order, np.array([0, 1, 0, 1]), rows[2], rows[3], rows[4])
    path = tmp_path / "t.json.gz"
    traces.write(run, path)
    (op,) = collectives(traces.read(path))
    assert (op.kind, op.nbytes) == ("all_reduce", 4000)
    assert op.detail["transfer_s"] == pytest.approx(1e-3)


# ---- a real run on Gloo ---------------------------------------------------------------------------------------------


def test_a_real_gloo_run_of_two_ranks_is_joined_whole():
    run = traces.read(GLOO)
    kinds = [op.kind for op in collectives(run)]
    # Gloo runs reduce_scatter as an all_reduce, and its trace says so.
    assert {k: kinds.count(k) for k in sorted(set(kinds))} == {
        "all_gather": 2,
        "all_reduce": 6,
        "all_to_all": 2,
        "barrier": 2,
        "broadcast": 2,
        "recv": 2,
        "send": 2,
    }
    assert {op.nbytes for op in collectives(run) if op.kind == "all_reduce"} == {4000.0, 20000.0, 8000.0}
    assert {op.nbytes for op in collectives(run) if op.kind == "all_gather"} == {8000.0}
    for op in collectives(run):
        assert op.detail["whole"]
        assert 0 < op.detail["transfer_s"] < 0.1
    assert all(0 < share < 0.2 for share in of_run(run).compute_share)


# ---- published traces -----------------------------------------------------------------------------------------------


def test_eight_v100_of_a_recommendation_model_wait_for_each_other_and_for_launches(shared):
    said = of_run(traces.read(shared / "measurements" / "traces" / "dlrm_8xv100_kineto"))
    assert (said.ranks_measured, said.world_size) == (8, 8)
    assert not said.skipped
    kinds = [(row.kind, row.count) for row in said.collectives]
    assert sum(n for kind, n in kinds if kind == "all_to_all") == 5
    assert sum(n for kind, n in kinds if kind == "all_reduce") == 3
    assert min(row.skew_s for row in said.collectives) == pytest.approx(125e-6, abs=1e-6)
    assert max(row.skew_max_s for row in said.collectives) == pytest.approx(7624e-6, abs=1e-6)
    assert max(row.transfer_s for row in said.collectives) < 100e-6
    assert 0.05 < min(said.compute_share) < max(said.compute_share) < 0.10
    assert said.waiting_for_launch_share > 0.4
    assert any("launch-bound" in hint for hint in said.hints)
    # Lesson 15 prints these.
    shares = [getattr(said, name) for name in ("compute_share", "communication_share", "peer_wait_share")]
    told = [(0.053, 0.064), (0.011, 0.011), (0.078, 0.565)]
    assert [(round(min(share), 3), round(max(share), 3)) for share in shares] == told
    assert round(said.waiting_for_launch_share, 2) == 0.47


def test_transfers_of_a_traced_all_reduce_are_last_start_to_last_end(shared):
    run = traces.read(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    for i, op in enumerate(run.ops):
        if op.kind == "all_reduce":
            rows = run.row_op == i
            span = run.row_end[rows].max() - run.row_ready[rows].max()
            assert span == pytest.approx(op.detail["transfer_s"], abs=10e-6)


def test_one_rank_of_two_with_six_steps(shared):
    run = traces.read(shared / "measurements" / "traces" / "dlrm_v100_kineto")
    assert sorted({op.step for op in collectives(run)}) == [1009, 1010, 1011, 1012, 1013, 1014]
    large = {op.nbytes for op in collectives(run) if op.kind == "all_reduce" and op.nbytes}  # one has no size
    assert {round(n / 1e6, 1) for n in large} == {181.2, 17.7, 1.1}
    assert {round(op.nbytes / 1e6) for op in collectives(run) if op.nbytes > 2.5e8} == {285, 290}


# The peak of this process alone: getrusage would count what its parent held before the fork.
READ = """
import pathlib, re, sys
from clustersim.files import traces
run = traces.read(sys.argv[1])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())
print(len(run.row_op), int(peak.group(1)) * 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of one process is read as Linux tells it")
def test_a_trace_of_150_MB_takes_500_MiB(shared, tmp_path):
    source = shared / "measurements" / "traces" / "dlrm_v100_kineto" / "rank1.json.gz"
    text = gzip.decompress(source.read_bytes())
    begin = text.index(b"[", text.index(b'"traceEvents"')) + 1
    end = text.rindex(b"]", 0, text.rindex(b"}"))
    path = tmp_path / "big.json"
    path.write_bytes(text[:begin] + b",".join([text[begin:end]] * 5) + text[end:])
    assert path.stat().st_size > 150e6
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    rows, peak = map(int, done.stdout.split())
    assert rows == 5 * len(traces.read(source).row_op)
    assert peak < 500 * 2**20


# ---- bad input ------------------------------------------------------------------------------------------------------


def write_gz(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p.write_bytes(gzip.compress((GLOO / "rank0.json.gz").read_bytes() * 2)[:-50]), "cut off"),
        (lambda p: p.write_text('{"schemaVersion": 1, "traceEvents": [{"ph": "X", "na'), "damaged or cut off"),
        (
            lambda p: p.write_text(
                '{"traceEvents": [{"ph": "X", "name": "tab", "ts": 1, "dur": 2, "pid": 1, "tid": 1}]}'
            ),
            "without PyTorch operators",
        ),
        (lambda p: p.write_text('{"traceEvents": 5}'), "not a PyTorch profiler trace"),
        (lambda p: p.write_text("hello"), "no format that is known by its content"),
        (lambda p: p.write_text(""), "empty"),
        (lambda p: p.write_bytes(bytes(range(256)) * 40), "no format that is known by its content"),
    ],
)
def test_what_is_no_trace_is_one_clear_error(tmp_path, make, message):
    path = tmp_path / "t.json"
    make(path)
    with pytest.raises(TraceError, match=message) as error:
        traces.read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gigantic_file_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LARGEST", 2**20)
    path = tmp_path / "t.json.gz"
    write_gz(path, b'{"schemaVersion": 1, "traceEvents": [' + b" " * 2**22 + b"]}")
    assert path.stat().st_size < 2**20
    with pytest.raises(TraceError, match="record fewer steps"):
        traces.read(path)


def test_two_files_of_one_rank_or_of_two_runs_are_refused(tmp_path):
    a = save(tmp_path / "a.json", [kernel(0, 10, 1)], 0)
    b = save(tmp_path / "b.json", [kernel(0, 10, 1)], 0)
    with pytest.raises(TraceError, match="rank 0 again"):
        traces.read([a, b])
    c = save(tmp_path / "c.json", [kernel(0, 10, 1)], 1, 4)
    with pytest.raises(TraceError, match="not of one run"):
        traces.read([a, c])


def test_a_folder_that_is_missing_or_empty_is_said(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        traces.read(tmp_path / "none")
    with pytest.raises(TraceError, match="empty folder"):
        traces.read(tmp_path)


def test_the_report_of_a_folder_of_traces_is_written_there_and_read_over(tmp_path):
    save(tmp_path / "a.json", [kernel(0, 10, 1)], 0)
    (tmp_path / "report.html").write_text("<!doctype html>")
    assert len(traces.read(tmp_path).ops) == 1
    with pytest.raises(TraceError, match="no format that is known"):
        traces.read(tmp_path / "report.html")


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_command_explains_a_trace(clustersim, options):
    done = clustersim("trace", GLOO, *options)
    assert done.returncode == 0, done.stderr
    assert "all_gather" in done.stdout
    assert clustersim("trace", GLOO / "none").returncode == 2


# ---- what the host does while its GPU has nothing to run ------------------------------------------------------------


def step_events(first_us: float, number: int, loader: str, optimizer: str) -> list[dict[str, Any]]:
    """A step of 100 ms whose GPU has nothing for 41 ms at its start and for 17 ms before its last kernel."""
    words = [(f"ProfilerStep#{number}", 0.0, 1e5), (loader, 100.0, 40_000.0), (optimizer, 82_000.0, 17_000.0)]
    notes = [
        {"ph": "X", "cat": "user_annotation", "name": name, "pid": 1, "tid": 1, "ts": first_us + ts, "dur": dur}
        for name, ts, dur in words
        if name
    ]
    kernels = [
        gemm(first_us + 41_000 + 1000 * k, 990, first_us + 40_990 + 1000 * k, 100 * number + k) for k in range(40)
    ]
    last = gemm(first_us + 99_205, 300, first_us + 99_200, 100 * number + 99)
    return notes + [event for pair in (*kernels, last) for event in pair]


@pytest.mark.parametrize("loader", ["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", "cudaMalloc", ""])
def test_a_gap_is_charged_to_what_the_host_was_in_and_a_step_is_as_long_as_it_was(tmp_path, loader):
    """A data loader's 40 ms and DeepSpeed's Adam on the CPU were "launch-bound: the host launches kernels more slowly
    than they run", and a step began with its first kernel: 89.6 of 100 ms."""
    steps = (step_events(1e5 * n, n, loader, "Optimizer.step#DeepSpeedCPUAdam.step") for n in range(4))
    run = traces.read(save(tmp_path / "t.json", [event for step in steps for event in step], world=1))
    assert steady_window(run).step_time == pytest.approx(0.1, rel=0.01)
    charged = causes(run)
    lost = {(charge.cause, charge.subject): charge.seconds / charged.steps for charge in charged.charges}
    assert lost["host", "Optimizer.step#DeepSpeedCPUAdam.step"] == pytest.approx(0.017, rel=0.05)
    if loader == "":
        # A window from one step's end has the gap before its first span; that step is seen from its begin on.
        assert lost["idle device", "nothing queued"] == pytest.approx(0.0431, rel=0.05)
    else:
        subject = "allocating memory" if loader == "cudaMalloc" else "data loader"
        assert lost["host", subject] == pytest.approx(0.04, rel=0.05)


def test_a_host_that_is_busy_beside_its_gpu_is_charged_nothing(tmp_path):
    """An annotation around kernels that run, or around gaps shorter than a launch-bound host leaves, is no work."""
    kernels = [event for k in range(50) for event in gemm(900.0 * k, 600, 900.0 * k - 5, k)]
    note = {"ph": "X", "cat": "user_annotation", "name": "my loop", "pid": 1, "tid": 1, "ts": 0.0, "dur": 45_000.0}
    run = traces.read(save(tmp_path / "t.json", [note, *kernels], world=1))
    assert {op.stream for op in run.ops} == {"compute"}


def test_the_trace_of_an_own_run_has_its_causes(tmp_path):
    """The CPU's optimizer of a run was missing when its trace was read again: "launch-bound"."""
    offload = "strategy.zero_optimization.offload_optimizer={device='cpu'}"
    result = scenario.load("zero2_llama3_8b_2x8_a100", scenario.parse_overrides([offload])).run()
    write_chrome_trace(result.timeline, tmp_path / "trace.json.gz", range(16))
    costs = []
    for run in (result.timeline, traces.read(tmp_path / "trace.json.gz")):
        charged = causes(run)
        costs += [c.seconds / charged.steps for c in charged.charges if c.subject == "optimizer on the CPU"]
    assert costs[1] == pytest.approx(costs[0], rel=0.02)


def test_what_is_launched_behind_the_last_step_is_in_no_figure_and_said(tmp_path):
    """An evaluation after the steps made the last of them as long as itself."""
    steps = [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": f"ProfilerStep#{n}",
            "pid": 1,
            "tid": 1,
            "ts": n * 1e3,
            "dur": 1e3,
        }
        for n in range(2, 6)
    ]
    kernels = [event for n in range(2, 6) for event in gemm(n * 1000 + 100, 800, n * 1000 + 50, n)]
    plain = of_run(traces.read(save(tmp_path / "a.json", [*steps, *kernels], 0, 1)))
    longer = of_run(traces.read(save(tmp_path / "b.json", [*steps, *kernels, *gemm(60000, 5000, 50000, 90)], 0, 1)))
    assert longer.window_s == pytest.approx(plain.window_s) == pytest.approx(3e-3)
    assert longer.compute_share == pytest.approx(plain.compute_share)
    assert list(longer.skipped) == ["what was launched behind the last step that is marked: it is in no figure"]


def test_a_collective_without_sizes_is_not_one_of_no_bytes(tmp_path):
    event = kernel(0, 10, 1)
    del event["args"]["In msg nelems"]
    del event["args"]["Out msg nelems"]
    (row,) = of_run(traces.read(save(tmp_path / "a.json", [event, *gemm(0, 5, 0, 9)], 0, 1))).collectives
    assert (row.kind, row.nbytes, row.waiting_included, row.busbw) == ("all_reduce", 0, True, None)


def test_an_all_gather_whose_output_is_not_told_has_its_ranks_inputs(tmp_path):
    event = kernel(0, 10, 1, **{"Collective name": "_allgather_base", "In msg nelems": 500})
    del event["args"]["Out msg nelems"]
    (op,) = collectives(traces.read(save(tmp_path / "a.json", [event], 0)))
    assert (op.kind, op.nbytes) == ("all_gather", 4000)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (b'"name": "gemm"', b'"name": "C:\\users\\gemm"'),
        (b'"name": "gemm"', b'"name": "ge\xffmm"'),
        (b'"seq": 1', b'"seq": 1, "occupancy": -nan'),
        (b'"seq": 1', b'"seq": 1, "est": Infinity'),
        (b"}]", b"}, ]"),
    ],
)
def test_what_viewers_open_and_json_has_not_is_read(tmp_path, right: bytes, wrong: bytes):
    """Cut names, paths of Windows and occupancies of nothing are in real profiles, and a whole one was refused."""
    events = [*gemm(0, 50, -5, 7), {**kernel(100, 20, 1), "args": {**kernel(100, 20, 1)["args"], "seq": 1}}]
    text = json.dumps({"traceEvents": events, "distributedInfo": {"rank": 0, "world_size": 2}}).encode()
    plain, slipped = tmp_path / "plain.json", tmp_path / "slipped.json"
    plain.write_bytes(text.replace(b'"name": "aten::mm"', b'"name": "gemm"'))
    slipped.write_bytes(plain.read_bytes().replace(right, wrong))
    assert slipped.read_bytes() != plain.read_bytes()
    whole = traces.read(plain)
    read = traces.read(slipped)
    assert [(op.kind, op.nbytes) for op in read.ops] == [(op.kind, op.nbytes) for op in whole.ops]
    assert read.per_op()["seconds"].tolist() == whole.per_op()["seconds"].tolist()
    assert of_run(read).skipped == of_run(whole).skipped


def test_a_small_profile_whose_gzip_is_cut_off_is_read_as_far_as_it_goes(tmp_path):
    (tmp_path / "t.json.gz").write_bytes((GLOO / "rank0.json.gz").read_bytes()[:4000])
    run = traces.read(tmp_path / "t.json.gz")
    assert any("cut off" in why for why in of_run(run).skipped)
