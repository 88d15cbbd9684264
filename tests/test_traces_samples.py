"""Benchmarks' output: nccl-tests of any version and its JSON, tables, DeepSpeed's logs, Nsight exports; bad rows."""

from __future__ import annotations

import json
import re
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from clustersim.core.errors import TraceError
from clustersim.core.texts import Table
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces import Samples, nccl_tests_run
from clustersim.files.traces.digest import of_run
from tests.tables import table_rows

RANKS = "".join(
    f"#  Rank {r:2d} Group  0 Pid {100 + r} on      node{r // 2} device  {r % 2} [0000:19:00] NVIDIA H100 80GB HBM3\n"
    for r in range(4)
)
NEW = f"""# nccl-tests version 2.17.6 nccl-headers=22809 nccl-library=22809
# Collective test starting: all_gather_perf
# nThread 1 nGpus 1 minBytes 8388608 maxBytes 33554432 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1
#
# Using devices
{RANKS}#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     8388608        524288     float    none      -1    100.0   83.89   62.91       0     99.0   84.73   63.55       0
    16777216       1048576     float    none      -1    180.0   93.21   69.91       0    179.0   93.73   70.30       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 66.4
"""
PER_ITERATION = NEW
for _old, _new in (
    ("#wrong", "#wrong    i_min    i_max    i_p99    i_cv%"),
    ("       0     99.0", "       0 98 105 104 1.2     99.0"),
    ("       0    179.0", "       0 178 190 189 0.9    179.0"),
    ("63.55       0", "63.55       0 98 105 104 1.2"),
    ("70.30       0", "70.30       0 178 190 189 0.9"),
):
    PER_ITERATION = PER_ITERATION.replace(_old, _new)
OLD = (
    """# nThread 1 nGpus 8 minBytes 8 maxBytes 134217728 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
"""
    + "".join(f"#   Rank  {r} Pid  15831 on   dgx01 device  {r} [0x06] Tesla V100-SXM2-16GB\n" for r in range(8))
    + """#
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
   134217728      33554432   float     sum   2000.0   67.11  117.44  2e-07   1990.0   67.45  118.03  2e-07
# Out of bounds values : 0 OK
"""
)


def read(path: Path, text: str) -> Samples:
    path.write_text(text)
    found = traces.read(path)
    assert isinstance(found, Samples)
    return found


# ---- nccl-tests -----------------------------------------------------------------------------------------------------


def test_a_new_log_says_everything_of_its_run(tmp_path):
    first, second = read(tmp_path / "log.anything", NEW).rows
    assert (first.kind, first.nbytes, first.ranks, first.nodes) == ("all_gather", 8388608, 4, 2)
    assert (first.seconds, first.seconds_in_place) == pytest.approx((100e-6, 99e-6))
    assert (first.version, first.launch, first.device) == ("2.28.9", "process_per_gpu", "NVIDIA H100 80GB HBM3")
    assert first.busbw == pytest.approx(62.91e9, rel=1e-3)
    assert second.source.endswith(":15")


def test_columns_are_found_by_the_header_not_by_position(tmp_path):
    plain = read(tmp_path / "a", NEW)
    wide = read(tmp_path / "b", PER_ITERATION)
    assert "i_cv%" in PER_ITERATION
    assert not wide.skipped
    assert [(r.seconds, r.seconds_in_place) for r in wide.rows] == [(r.seconds, r.seconds_in_place) for r in plain.rows]


def written_table(each: bool, stamped: bool, checked: bool) -> str:
    """The table as nccl-tests 2.18 to 2.20 print it (src/util.cu, writeResultHeader and writeBenchmarkLineBody)."""
    asked = f"{8388608:>12}  {524288:>12}  {'float':>8}  {'none':>6}  {-1:>6}"
    heads = f"# {'size':>10}  {'count':>12}  {'type':>8}  {'redop':>6}  {'root':>6}"
    units = f"# {'(B)':>10}  {'(elements)':>12}  {'':>8}  {'':>6}  {'':>6}"
    for time in ("100.00", "99.00"):
        heads += f"  {'time':>7}  {'algbw':>6}  {'busbw':>6}  {'#wrong':>6}"
        units += f"  {'(us)':>7}  {'(GB/s)':>6}  {'(GB/s)':>6}  {'':>6}"
        asked += f"  {time:>7}  {83.89:>6}  {62.91:>6}  {0 if checked else '  N/A':>6}"
        if each:
            heads += f"  {'i_min':>7}  {'i_max':>7}  {'i_p99':>7}  {'i_cv%':>7}"
            units += f"  {'(us)':>7}  {'(us)':>7}  {'(us)':>7}  {'(%)':>7}"
            asked += f"  {98.0:>7}  {105.0:>7}  {104.0:>7}  {1.2:>7}"
    if stamped:
        heads += f" {'timestamp':>19}"
        units += " %Y-%m-%d %H:%M:%S"
        asked += f"{'2026-01-02 03:04:05':>21}"
    above = NEW[: NEW.index("#                                                              out")]
    return f"{above}{heads}\n{units}\n{asked}\n# Out of bounds values : 0 OK\n"


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("stamped", [False, True])
@pytest.mark.parametrize("checked", [False, True])
def test_tables_of_nccl_tests_2_18_to_2_20_are_read(tmp_path, each, stamped, checked):
    (row,) = read(tmp_path / "log", written_table(each, stamped, checked)).rows
    assert (row.kind, row.nbytes, row.ranks, row.version) == ("all_gather", 8388608, 4, "2.28.9")
    assert (row.seconds, row.seconds_in_place) == pytest.approx((100e-6, 99e-6))


def test_a_log_of_times_in_place_alone_has_these(tmp_path):
    """Rows of N/A out of place were left out as times that are not above zero, with the times beside them."""
    out_of_place = re.compile(r"(float +none +-1) +\S+ +\S+ +\S+ +\S+")
    for blank in (" ", " N/A N/A N/A N/A"):
        alone = read(tmp_path / "log", out_of_place.sub(r"\1" + blank, NEW))
        assert not alone.skipped
        assert [row.seconds for row in alone.rows] == pytest.approx([99e-6, 179e-6])


def test_an_old_log_names_no_collective_and_is_known_by_its_bus_factor(tmp_path):
    (row,) = read(tmp_path / "log", OLD).rows
    assert (row.kind, row.ranks, row.launch, row.nodes) == ("all_reduce", 8, "single_process", 1)
    scatter = OLD.replace("117.44", "58.72").replace("118.03", "59.02")
    (row,) = read(tmp_path / "log", scatter).rows
    assert row.kind == "reduce_scatter"


def test_the_last_line_names_the_collective_of_the_table_above(tmp_path):
    first = NEW.replace("# Collective test starting: all_gather_perf\n", "")
    gathered = f"{first}# Collective test concluded: all_gather_perf\n"
    scattered = f"{first}# Collective test concluded: reduce_scatter_perf\n"
    rows = read(tmp_path / "log", gathered + scattered).rows
    assert [row.kind for row in rows] == ["all_gather", "all_gather", "reduce_scatter", "reduce_scatter"]


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>:", "0: ", "[node-0]: "])
def test_what_launchers_put_before_lines_is_taken_off(tmp_path, prefix):
    lines = "\n".join(prefix + line for line in NEW.splitlines())
    assert len(read(tmp_path / "log", lines)) == 2


def test_a_log_of_several_runs_keeps_them_apart(tmp_path):
    half = NEW.replace("all_gather_perf", "alltoall_perf").replace("".join(RANKS.splitlines(True)[2:]), "")
    found = read(tmp_path / "log", NEW + half)  # still with the bus factor of four ranks
    assert found.skipped == {"a bus bandwidth that is not size/time times nccl-tests' factor for its ranks": 2}
    found = read(tmp_path / "log", NEW + half.replace("62.91", "41.94").replace("69.91", "46.60"))
    assert [(row.kind, row.ranks) for row in found.rows] == [("all_gather", 4)] * 2 + [("all_to_all", 2)] * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("  62.91       0", "  162.9       0"), "not size/time times"),
        (("100.0   83.89   62.91       0", "  0.1   83886   62914       0"), "impossible bus bandwidth"),
        (("62.91       0", "62.91       3"), "found wrong"),
        (("float    none      -1    100.0", "flot    none      -1    100.0"), "element type that is not known"),
        (("62.91       0     99.0   84.73   63.55       0", "62.91"), "cut off"),
        (("-1    100.0", "-1    N/A"), "not above zero"),
    ],
)
def test_a_row_that_cannot_be_true_is_counted_with_its_reason(tmp_path, change, reason):
    assert change[0] in NEW
    found = read(tmp_path / "log", NEW.replace(*change, 1))
    assert len(found) == 1
    assert list(found.skipped.values()) == [1]
    assert reason in next(iter(found.skipped))


def test_a_log_that_ends_before_its_table_is_an_error_and_one_that_ends_inside_is_not(tmp_path):
    with pytest.raises(TraceError, match="no table of nccl-tests"):
        read(tmp_path / "log", NEW[: NEW.index("#       size")].replace("#                      ", "# "))
    assert len(read(tmp_path / "log", NEW[: NEW.index("  180.0")])) == 1


def test_the_json_report_says_the_same_as_the_log(tmp_path):
    def timed(us: float, alg: float, bus: float) -> dict[str, float]:
        return {"time": us, "alg_bw": alg, "bus_bw": bus, "nwrong": 0.0}

    devices = [
        {"rank": r, "group": 0, "pid": r, "hostname": f"node{r // 2}", "device_info": "NVIDIA H100 80GB HBM3"}
        for r in range(4)
    ]
    report = {
        "version": 2,
        "args": ["./build/all_gather_perf", "-b", "8M"],
        "env": ["NCCL_ALGO=RING", "HOME=/x"],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": [
            {
                "size": 8388608,
                "count": 524288,
                "type": "float",
                "redop": "none",
                "root": "    -1",
                "out_of_place": timed(100.0, 83.89, 62.91),
                "in_place": timed(99.0, 84.73, 63.55),
            }
        ],
    }
    (row,) = read(tmp_path / "r", json.dumps(report)).rows
    (first, _) = read(tmp_path / "log", NEW).rows
    assert row.env == "NCCL_ALGO=RING"
    for name in ("kind", "nbytes", "ranks", "nodes", "seconds", "version", "launch", "device", "dtype"):
        assert getattr(row, name) == getattr(first, name)
    with pytest.raises(TraceError, match="not a whole"):
        read(tmp_path / "r", json.dumps(report)[:-200])
    of_cpu = json.dumps(report).replace('"time"', '"cpu_time"')
    assert read(tmp_path / "r", of_cpu).skipped == {"a time of the CPU (-C), not of the collective": 1}


def written_report(processes: int, gpus: int, **config: int) -> Table:
    """What nccl-tests 2.18 to 2.20 write with ``-J`` (src/util.cu): keys in their order, truths as texts, what was not
    checked as null, and of each process its first rank alone."""
    ranks = processes * gpus * config.get("nthreads", 1)
    timed = {"time": 100.0, "alg_bw": 83.89, "bus_bw": 83.89 * 2 * (ranks - 1) / ranks, "nwrong": None}
    each = {"min_us": 98.0, "max_us": 105.0, "avg_us": 100.0, "p50_us": 100.0, "times_us": [98.0, 105.0]}
    devices = [
        {
            "rank": p * gpus,
            "group": 0,
            "pid": 100 + p,
            "hostname": f"node{p}",
            "device": 0,
            "device_hex": "0000:19:00",
            "device_info": "NVIDIA H100 80GB HBM3",
        }
        for p in range(processes)
    ]
    row = {"size": 8388608, "count": 2097152, "type": "float", "redop": "sum", "root": "    -1"}
    row |= {"out_of_place": timed, "out_of_place_per_iter": each, "in_place": timed, "in_place_per_iter": each}
    return {
        "version": 2,
        "start_time": "2026-01-02 03:04:05",
        "args": ["./build/all_reduce_perf", "-c", "0", "-I"],
        "env": ["MAKE=nvcc NCCL_ALGO=Tree", "NCCL_P2P_LEVEL=SYS", "NCCL_DEBUG=INFO"],
        "nccl_version": 22907,
        "config": {
            "nthreads": 1,
            "ngpus": gpus,
            "minimum_bytes": 8388608,
            "maximum_bytes": 8388608,
            "step_factor": 2,
            "validation": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "true",
            "parallel_init": "false",
            **config,
            "devices": devices,
        },
        "results": [row | {"actual_iterations": 20, "experiment_name": "AllReduce"}],
        "out_of_bounds": {"count": 0, "okay": "true"},
        "average_bus_bandwidth": {"bandwidth": 146.8, "okay": "unchecked"},
        "errors": [],
        "end_time": "2026-01-02 03:04:06",
    }


@pytest.mark.parametrize(
    ("processes", "gpus", "config", "expected"),
    [
        (1, 8, {}, (8, 1, "single_process")),
        (2, 8, {}, (16, 2, "single_process")),
        (1, 1, {"nthreads": 8}, (8, 1, "threads")),
        (8, 1, {}, (8, 8, "process_per_gpu")),
    ],
)
def test_a_report_of_processes_that_drive_several_gpus_has_all_their_ranks(tmp_path, processes, gpus, config, expected):
    """Eight GPUs of one process were read as one rank, which alone sends nothing."""
    (row,) = read(tmp_path / "r", json.dumps(written_report(processes, gpus, **config)).replace("/", "\\/")).rows
    assert (row.ranks, row.nodes, row.launch) == expected
    assert (row.kind, row.nbytes, row.version) == ("all_reduce", 8388608, "2.29.7")
    assert row.env == "NCCL_P2P_LEVEL=SYS"
    assert (row.seconds, row.seconds_in_place) == pytest.approx((100e-6, 100e-6))


@pytest.mark.parametrize(("code", "text"), [(22809, "2.28.9"), (21805, "2.18.5"), (2708, "2.7.8"), (2408, "2.4.8")])
def test_versions_follow_from_numbers_of_both_ages(code, text):
    assert nccl_tests_run.version_text(code) == text


# ---- tables ---------------------------------------------------------------------------------------------------------


def test_every_row_of_the_shared_table_is_a_sample(shared):
    table = shared / "measurements" / "nccl_tests.csv"
    rows = table_rows(table)
    found = traces.read(table)
    assert isinstance(found, Samples)
    assert (len(found), found.skipped) == (len(rows), {})
    assert {row.case for row in found.rows} == {row["case_id"] for row in rows}
    columns = found.columns()
    assert np.all(columns["busbw"][columns["nbytes"] > 0] < 2e12)


@pytest.mark.parametrize("gpus", [2, 3, 4, 8])
def test_a_sweep_says_its_ranks_by_its_bus_factor(shared, gpus):
    found = traces.read(shared / "measurements" / "traces" / "allreduce_sweep_a100" / f"gpus{gpus}.csv")
    assert isinstance(found, Samples)
    assert (len(found), found.skipped) == (1024, {})
    assert {row.ranks for row in found.rows} == {gpus}
    assert 195e9 < max(row.busbw for row in found.rows) < 240e9


def test_fsdp_of_llama_70b_on_eight_mi300x(shared):
    folder = shared / "measurements" / "traces" / "fsdp_llama70b_8xmi300x"
    found = traces.read(folder / "nccl_summary_implicit_sync.csv")
    assert isinstance(found, Samples)
    gather = max((r for r in found.rows if r.kind == "all_gather"), key=lambda r: r.count)
    scatter = max((r for r in found.rows if r.kind == "reduce_scatter"), key=lambda r: r.count)
    assert (gather.nbytes, gather.seconds) == pytest.approx((1632.03 * 2**20, 6.04e-3), rel=1e-3)
    assert (scatter.nbytes, scatter.seconds) == pytest.approx((3264.06 * 2**20, 11.66e-3), rel=1e-3)
    assert gather.skew == pytest.approx(11.78e-3, rel=1e-3)
    with pytest.raises(TraceError, match=r"nccl_summary_long.*which is not read.*give"):
        traces.read(folder / "nccl_summary_long.csv")  # durations of single ranks, waiting included


def test_rows_of_a_table_that_are_no_numbers_are_counted(tmp_path):
    text = "collective,dtype,size_bytes,time_us,ranks,busbw_GBps\n" + (
        "all_reduce,float,1048576,100,8,18.35\nall_reduce,float,many,100,8,\nnothing,float,8,1,8,\nall_reduce,float,8\n"
    )
    found = read(tmp_path / "t", text)
    assert len(found) == 1
    assert sum(found.skipped.values()) == 3


# ---- DeepSpeed ------------------------------------------------------------------------------------------------------

LINE = (
    "[2026-01-01 01:39:55,722] [INFO] [logging.py:69:log_dist] [Rank 0] rank=0 | comm op: {op} | time (ms): {ms} | "
    "msg size: {size} | algbw (Gbps): {alg} | busbw (Gbps): {bus} \n"
)


def test_deepspeed_lines_count_the_ranks_own_tensor(tmp_path):
    lines = LINE.format(op="all_gather_into_tensor", ms="10.00", size="100.0 MB", alg="671.09", bus="587.20")
    lines += LINE.format(op="all_reduce", ms="10.00", size="100.0 MB", alg="167.77", bus="146.80")
    gather, reduce = read(tmp_path / "log", lines).rows
    assert (gather.kind, gather.ranks, gather.nbytes) == ("all_gather", 8, 800 * 2**20)
    assert (reduce.kind, reduce.nbytes, reduce.seconds) == ("all_reduce", 100 * 2**20, pytest.approx(10e-3))


def test_a_bandwidth_of_four_hundred_digits_tells_no_world_size(tmp_path):
    line = LINE.format(op="all_reduce", ms="10.00", size="100.0 MB", alg="9" * 400, bus="146.80")
    good = LINE.format(op="all_reduce", ms="10.00", size="100.0 MB", alg="167.77", bus="146.80")
    assert [row.ranks for row in read(tmp_path / "log", line + good).rows] == [8, 8]


def test_the_deepspeed_summary_is_read_and_not_added_to_its_lines(tmp_path):
    heads = (
        "Comm. Op",
        "Message Size",
        "Count",
        "Total Latency(ms)",
        "Avg Latency(ms)",
        "tput_avg (Gbps)",
        "busbw_avg (Gbps)",
    )
    table = "".join(f"{word: <20}" for word in heads) + "\nall_reduce\n"
    table += " " * 20 + "".join(f"{word: <20}" for word in ("100.0 MB", 12, 120.0, 10.0, 167.77, 146.8)) + "\n"
    line = LINE.format(op="all_reduce", ms="10.00", size="100.0 MB", alg="167.77", bus="146.80")
    (row,) = read(tmp_path / "log", line * 12 + table).rows
    assert (row.count, row.ranks, row.seconds) == (12, 8, pytest.approx(10e-3))


# ---- Nsight Systems -------------------------------------------------------------------------------------------------


def test_ddp_on_two_rtx_3090_has_111_all_reduces_of_gradients(shared):
    run = traces.read(shared / "measurements" / "traces" / "ddp_2xrtx3090_nsys")
    assert isinstance(run, Timeline)
    assert run.world_size == 2
    gradients = [op for op in run.ops if op.kind == "all_reduce" and op.detail["dtype"] == "bf16"]
    assert len(gradients) == 111
    assert sum(op.kind == "broadcast" for op in run.ops) == 111
    assert {op.nbytes for op in gradients} >= {1179648.0, 4718592.0, 15360000.0}
    said = of_run(run)
    assert not said.skipped
    large = next(r for r in said.collectives if r.kind == "all_reduce" and r.nbytes == 4718592)
    assert 8e9 < large.busbw < 12e9


def test_an_sqlite_file_of_another_tool_is_one_clear_error(tmp_path):
    path = tmp_path / "x.db"
    with sqlite3.connect(path) as base:
        base.execute("create table people (name text)")
    base.close()
    with pytest.raises(TraceError, match="no table CUPTI_ACTIVITY_KIND_KERNEL"):
        traces.read(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(TraceError, match="not a whole"):
        traces.read(path)


def test_files_of_two_formats_are_not_mixed(tmp_path):
    (tmp_path / "a").write_text(NEW)
    (tmp_path / "b").write_text(LINE.format(op="all_reduce", ms="1", size="1.0 MB", alg="1", bus="1"))
    with pytest.raises(TraceError, match="read them one at a time"):
        traces.read(tmp_path)


BARE = """It stays at this:
     8388608       2097152     float     sum      -1    125.0   67.11  117.44      0    124.0   67.65  118.39      0
    16777216       4194304     float     sum      -1    180.0   93.21  163.11      0    181.0   92.69  162.21    N/A
"""
PLAIN = """
     8388608       2097152     float    none      -1    125.0   67.11   67.11      0    124.0   67.65   67.65      0
"""


def test_rows_without_their_header_have_thirteen_columns_in_one_order(tmp_path):
    for text in (BARE, "\n".join(f"[1,0]<stdout>:{line}" for line in BARE.splitlines()), BARE.replace(" N/A", "0e+00")):
        (tmp_path / "log").write_text(text)
        found = traces.read(tmp_path / "log")
        assert [(row.kind, row.ranks, row.nbytes, row.launch) for row in found.rows] == [
            ("all_reduce", 8, 8388608.0, ""),
            ("all_reduce", 8, 16777216.0, ""),
        ]
        assert [(row.seconds, row.seconds_in_place) for row in found.rows] == [
            pytest.approx((125e-6, 124e-6)),
            pytest.approx((180e-6, 181e-6)),
        ]
        assert any("no header above the rows" in note for note in found.notes)


def test_rows_without_their_header_that_do_not_tell_their_collective_are_asked_for_it(tmp_path):
    with pytest.raises(TraceError, match=r"log:2: .*write above them the command .* and its lines # Rank"):
        read(tmp_path / "log", PLAIN)
    found = read(tmp_path / "log", f"$ ./broadcast_perf -b 8M\n{PLAIN}")
    assert [(row.kind, row.ranks) for row in found.rows] == [("broadcast", 0)]
    assert any("nothing says how many ranks" in note for note in found.notes)


@pytest.mark.parametrize("change", [("125.0", "12.50"), ("float", ""), ("  0    124.0   67.65   67.65      0", "")])
def test_cells_that_may_be_of_other_columns_are_not_taken_for_these(tmp_path, change):
    (tmp_path / "log").write_text(f"all_gather_perf\n{PLAIN.replace(*change)}")
    with pytest.raises(TraceError, match="no table of nccl-tests"):
        traces.read(tmp_path / "log", format="nccl_tests")
