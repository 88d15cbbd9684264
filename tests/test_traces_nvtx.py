"""What people mark with NVTX: steps, phases and layers of an Nsight Systems export's kernels."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces.digest import of_run
from clustersim.files.traces.nvtx_ranges import RangeContext, Ranges
from clustersim.studies.replay.replay_scale import rate_of

MAIN = 1 << 24 | 5
AUTOGRAD = 1 << 24 | 6
"""globalTids of one process."""


def export(path: Path, ranges: list[tuple[int, int, str, int]], launched: list[tuple[int, int, str]]) -> Path:
    """An export with NVTX ranges (start, end, text, thread), and kernels (launch, thread, name) 10 ns after."""
    names = {name: i for i, name in enumerate(dict.fromkeys([*(n for *_, n in launched), *(r[2] for r in ranges)]), 1)}
    with sqlite3.connect(path) as base:
        base.execute("create table StringIds (id, value)")
        base.executemany("insert into StringIds values (?, ?)", [(i, name) for name, i in names.items()])
        base.execute(
            "create table CUPTI_ACTIVITY_KIND_KERNEL "
            "(globalPid, start, end, correlationId, shortName, deviceId, streamId)"
        )
        base.execute("create table CUPTI_ACTIVITY_KIND_RUNTIME (globalTid, correlationId, start)")
        base.execute("create table NVTX_EVENTS (start, end, eventType, text, textId, globalTid, jsonText)")
        for i, (at, tid, name) in enumerate(launched):
            base.execute("insert into CUPTI_ACTIVITY_KIND_RUNTIME values (?, ?, ?)", (tid, i, at))
            base.execute(
                "insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?, ?, 0, 7)",
                (1 << 24, at + 10, at + 15, i, names[name]),
            )
        for i, (start, end, name, tid) in enumerate(ranges):  # text, or the number of it
            said = (None, names[name]) if i % 2 else (name, None)
            base.execute("insert into NVTX_EVENTS values (?, ?, 59, ?, ?, ?, ?)", (start, end, *said, tid, None))
    base.close()
    return path


RANGES = [
    (0, 900, "training", MAIN),
    (100, 300, "step 7", MAIN),
    (110, 150, "forward pass", MAIN),
    (115, 130, "layers.0", MAIN),
    (116, 120, "attention", MAIN),
    (121, 125, "aten::mm", MAIN),
    (160, 250, "loss.backward()", MAIN),
    (260, 290, "optimizer.step", MAIN),
    (170, 180, "layers.1", AUTOGRAD),
    (310, 400, "step 8", MAIN),
]
EXPECTED = [
    (50, MAIN, (-1, "", "")),
    (105, MAIN, (7, "", "")),
    (112, MAIN, (7, "forward", "")),
    (117, MAIN, (7, "forward", "attention")),
    (122, MAIN, (7, "forward", "layers.0")),
    (175, AUTOGRAD, (7, "backward", "layers.1")),
    (200, AUTOGRAD, (7, "backward", "")),
    (270, MAIN, (7, "optimizer", "")),
    (305, MAIN, (-1, "", "")),
    (350, MAIN, (8, "", "")),
]


@pytest.mark.parametrize(("at", "thread", "doing"), EXPECTED)
def test_a_launch_is_in_the_innermost_phase_and_layer_of_its_thread_and_in_the_step_of_any(at, thread, doing):
    assert Ranges(RANGES).at(at, thread) == RangeContext(*doing)


def test_an_export_has_the_steps_phases_and_layers_that_people_marked(tmp_path):
    launched = [(at, thread, f"k{i}") for i, (at, thread, _) in enumerate(EXPECTED)]
    run = traces.read(export(tmp_path / "p.sqlite", RANGES, launched))
    found = {op.name: (op.step, op.phase, op.label.unit if op.label else "") for op in run.ops}
    wanted = {f"k{i}": (max(step, 0), phase or "other", unit) for i, (*_, (step, phase, unit)) in enumerate(EXPECTED)}
    wanted["k8"] = (7, "other", "")  # between two steps it is of the one before
    assert found == wanted


def test_kernels_of_a_marked_phase_are_still_told_apart_by_name(tmp_path):
    launched = [(112, MAIN, "vectorized_elementwise_kernel"), (113, MAIN, "ampere_fp16_s16816gemm_128x64")]
    run = traces.read(export(tmp_path / "p.sqlite", RANGES, launched))
    assert [rate_of(op) for op in run.ops] == ["", "fp16"]


def test_ranges_that_were_never_closed_and_a_column_that_is_missing_say_nothing(tmp_path):
    path = export(tmp_path / "p.sqlite", [(0, None, "step 3", MAIN)], [(10, MAIN, "k")])
    assert [op.step for op in traces.read(path).ops] == [0]
    with sqlite3.connect(path) as base:
        base.execute("drop table NVTX_EVENTS")
        base.execute("create table NVTX_EVENTS (start, end, text)")
    base.close()
    assert [op.phase for op in traces.read(path).ops] == ["other"]


def test_a_published_trace_has_the_phases_that_its_author_marked(shared: Path):
    run = traces.read(shared / "measurements" / "traces" / "ddp_2xrtx3090_nsys")
    spent = dict.fromkeys(("forward", "backward"), 0.0)
    for op, seconds in zip(run.ops, run.per_op()["seconds"].tolist(), strict=True):
        spent |= {op.phase: spent[op.phase] + seconds} if op.phase in spent else {}
    assert spent["backward"] > 2 * spent["forward"] > 0
    assert "attention sublayer" in {op.label.unit for op in run.ops if op.label}
    assert json.dumps(sorted({op.step for op in run.ops})) == "[0]"


def several(path: Path, kernels: list[tuple[int, int, int, int, str]]) -> Path:
    """An export of kernels (process, GPU, start, end [ms], name) without a range."""
    names = {name: i for i, name in enumerate(dict.fromkeys(name for *_, name in kernels), 1)}
    with sqlite3.connect(path) as base:
        base.execute("create table StringIds (id, value)")
        base.executemany("insert into StringIds values (?, ?)", [(i, name) for name, i in names.items()])
        base.execute(
            "create table CUPTI_ACTIVITY_KIND_KERNEL "
            "(globalPid, start, end, correlationId, shortName, deviceId, streamId)"
        )
        base.executemany(
            "insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?, ?, ?, ?)",
            [
                (process << 24, start * 10**6, end * 10**6, i, names[name], device, 20 if "nccl" in name else 7)
                for i, (process, device, start, end, name) in enumerate(kernels)
            ],
        )
    base.close()
    return path


NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"


def test_nccls_kernels_without_a_range_are_kept_as_measured(tmp_path: Path):
    kernels = [(1 + gpu, gpu, *row) for gpu in range(2) for row in [(0, 10, "gemm"), (10, 14, NCCL), (14, 20, "gemm")]]
    run = traces.read(several(tmp_path / "p.sqlite", kernels))
    assert run.world_size == 2
    kept = [op for op in run.ops if op.kind == "all_reduce"]
    assert len(kept) == 2
    told = " ".join(str(key) for key in run.stats)
    assert "neither size nor group is told" in told


@pytest.mark.parametrize("gpus", [2, 8])
def test_each_gpu_of_one_process_is_a_rank(tmp_path: Path, gpus: int):
    kernels = [(1, gpu, 10 * i, 10 * i + 9, "gemm") for gpu in range(gpus) for i in range(3)]
    assert traces.read(several(tmp_path / "p.sqlite", kernels)).world_size == gpus


def test_a_context_on_another_gpu_is_no_rank(tmp_path: Path):
    kernels = [(1, 0, 10 * i, 10 * i + 9, "gemm") for i in range(3)] + [(2, 0, 0, 1, "fill")]
    kernels += [(2, 1, 10 * i, 10 * i + 9, "gemm") for i in range(3)]
    assert traces.read(several(tmp_path / "p.sqlite", kernels)).world_size == 2


def test_a_cuda_graph_that_is_recorded_as_one_is_work_and_said(tmp_path: Path):
    """nsys records graphs so by default: the GPU seemed to idle while they ran."""
    path = several(tmp_path / "g.sqlite", [(1, 0, 0, 10, "gemm"), (1, 0, 30, 40, "gemm")])
    with sqlite3.connect(path) as base:
        base.execute(
            "create table CUPTI_ACTIVITY_KIND_GRAPH_TRACE "
            "(start, end, deviceId, contextId, streamId, correlationId, globalPid, graphId, graphExecId)"
        )
        base.execute(
            "insert into CUPTI_ACTIVITY_KIND_GRAPH_TRACE values (?, ?, 0, 1, 7, 99, ?, 1, 2)",
            (10 * 10**6, 30 * 10**6, 1 << 24),
        )
    base.close()
    digest = of_run(traces.read(path))
    assert digest.compute_share == pytest.approx([1.0])
    assert [count for why, count in digest.skipped.items() if "CUDA graph recorded as one" in why] == [1]


STEPS = [(number * 1000, number * 1000 + 990, f"iteration {number}", MAIN) for number in (5, 6, 7)]


def test_what_is_launched_behind_the_last_step_is_in_no_figure_and_said(tmp_path: Path):
    """It was of step 0, which then ended behind all others: the window had a length below zero."""
    launched = [(number * 1000 + 10, MAIN, "gemm") for number in (5, 6, 7)]
    run = traces.read(export(tmp_path / "p.sqlite", STEPS, launched))
    longer = traces.read(export(tmp_path / "q.sqlite", STEPS, [*launched, (9000, MAIN, "evaluation")]))
    assert {op.step for op in longer.ops} == {op.step for op in run.ops} == {5, 6, 7}
    digest = of_run(longer)
    assert digest.window_s == pytest.approx(of_run(run).window_s)
    assert list(digest.skipped) == ["what was launched behind the last step that is marked: it is in no figure"]


def test_micro_batches_that_are_numbered_in_every_step_are_no_steps(tmp_path: Path):
    """Each number was a step that went on through all the others."""
    inside = [(start + 100 * i, start + 100 * i + 90, f"batch {i}", MAIN) for start, *_ in STEPS for i in range(4)]
    launched = [(start + 1, MAIN, "gemm") for start, *_ in inside]
    run = traces.read(export(tmp_path / "p.sqlite", [*STEPS, *inside], launched))
    assert sorted({op.step for op in run.ops}) == [5, 6, 7]


def test_a_range_around_all_steps_that_has_a_number_is_none_of_them(tmp_path: Path):
    run = traces.read(
        export(
            tmp_path / "p.sqlite",
            [(0, 9000, "from step 5", MAIN), *STEPS],
            [(number * 1000 + 10, MAIN, "gemm") for number in (5, 6, 7)],
        )
    )
    assert sorted({op.step for op in run.ops}) == [5, 6, 7]


def as_parquet(path: Path, folder: Path) -> Path:
    """The tables of an export of SQLite as ``nsys export --type parquetdir`` writes them."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder.mkdir()
    with closing(sqlite3.connect(path)) as base:
        for (table,) in base.execute("select name from sqlite_master where type = 'table'").fetchall():
            rows = base.execute(f"select * from {table}")
            names = [about[0] for about in rows.description]
            columns = zip(*rows.fetchall(), strict=True)
            named = dict(zip(names, map(list, columns), strict=False))
            parquet.write_table(pyarrow.table(named), folder / f"{table}.parquet")
    return folder


def test_an_export_in_parquet_is_read_as_one_in_sqlite(tmp_path: Path):
    launched = [(at, thread, f"k{i}") for i, (at, thread, _) in enumerate(EXPECTED)]
    path = export(tmp_path / "p.sqlite", RANGES, launched)
    run = traces.read(path)
    same = traces.read(as_parquet(path, tmp_path / "report"))
    assert isinstance(run, Timeline)
    assert isinstance(same, Timeline)
    assert len(run.ops) == len(launched)
    assert [(op.name, op.step, op.phase) for op in same.ops] == [(op.name, op.step, op.phase) for op in run.ops]
    assert same.per_op()["seconds"].tolist() == run.per_op()["seconds"].tolist()
    (tmp_path / "report" / "StringIds.parquet").unlink()
    with pytest.raises(TraceError, match="no table StringIds"):
        traces.read(tmp_path / "report", "nsys")


def test_a_payload_that_is_held_once_is_read(tmp_path: Path):
    """Newer exports number the text of NCCL's payloads, too."""
    payload = json.dumps({"Message size [bytes]": 4096, "NCCL communicator ID": 7})
    kernel = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    path = export(tmp_path / "p.sqlite", [(90, 120, "ncclAllReduce", MAIN)], [(100, MAIN, kernel)])
    with closing(sqlite3.connect(path)) as base, base:
        base.execute("insert into StringIds values (99, ?)", (payload,))
        base.execute("alter table NVTX_EVENTS add column jsonTextId")
        base.execute("update NVTX_EVENTS set jsonTextId = 99")
    run = traces.read(path)
    assert isinstance(run, Timeline)
    assert [(op.kind, op.nbytes) for op in run.ops] == [("all_reduce", 4096.0)]
