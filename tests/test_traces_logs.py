"""Benchmarks' logs as launchers and versions print them: the same rows, whatever stands before, beside or above."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from test_traces_samples import LINE, NEW, OLD, RANKS

from clustersim.files import traces
from clustersim.files.traces import Samples, prefixes

STAMP = "2024-07-18T15:41:05.123456789Z"
PREFIXES = [
    "[2025-01-02 03:04:05.678901]     node0:   ",
    "[1,0]<stdout>:",
    "[1,0]<stdout>: ",
    "[prterun-host-4711@1,0]<stdout>: ",
    "Thu Jul 18 15:41:05 2024<stdout>:",
    "Thu Jul 18 15:41:05 2024[1,0]<stdout>:",
    "[1,mpirank:0,algo-1]<stdout>:",
    "0: ",
    " 0: ",
    "00: ",
    "0> ",
    "[0] ",
    "[default0]:",
    "[rank0]:",
    "[node-0]: ",
    "worker-0: ",
    "10.0.0.12: ",
    "gpu-a.cluster.local: ",
    f"{STAMP} ",
    f"{STAMP} stdout F ",
    "2024-07-18T15:41:05+02:00 stdout F ",
    "[pod/worker-0/nccl] ",
    f"[pod/worker-0/nccl] {STAMP} ",
    "worker-0 nccl ",
    "nccl-worker-1  | ",
    "(RayTrainWorker pid=123, ip=10.0.0.1) ",
    "Jul 18 15:41:05 ",
    "Jul 18 15:41:05 host-a job[4711]: ",
    "2024-07-18 15:41:05,123 ",
    "[2024-07-18 15:41:05] ",
    "15:41:05.123 ",
    "\x1b[36mworker-0  |\x1b[0m ",
    f"{STAMP} [1,0]<stdout>:",
    "worker-0: [1,0]<stdout>:",
    f"{STAMP} worker-0: 0: ",
    "INFO - ",
    "2024-07-18 15:41:05,123 - root - INFO - ",
    "| ",
    "I0718 15:41:05.123456 1234 main.cc:12] ",
    "2024-07-18 15:41:05<stdout>: ",
    "[1,0]<stdout>:[rank0]:",
    "[2024-07-18 15:41:05,123] [INFO] [runner.py:568:main] ",
    "nccl-worker-0.nccl.default.svc.cluster.local: ",
]


def read(path: Path, text: str) -> Samples:
    path.write_text(text)
    samples = traces.read(path)
    assert isinstance(samples, Samples)
    return samples


def facts(samples: Samples) -> list[tuple]:
    return [(row.kind, row.nbytes, row.seconds, row.ranks, row.nodes, row.version) for row in samples.rows]


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("text", [NEW, OLD])
def test_no_launchers_prefix_hides_a_row(tmp_path: Path, prefix: str, text: str):
    plain = read(tmp_path / "plain.log", text)
    told = read(tmp_path / "told.log", "".join(prefix + line for line in text.splitlines(keepends=True)))
    assert facts(told) == facts(plain)
    assert told.skipped == plain.skipped == {}


def test_lines_that_containerd_cut_are_joined(tmp_path: Path):
    cut = []
    for line in NEW.splitlines():
        half = len(line) // 2
        cut += [f"{STAMP} stdout P {line[:half]}", f"{STAMP} stdout F {line[half:]}"]
    assert facts(read(tmp_path / "a", "\n".join(cut))) == facts(read(tmp_path / "b", NEW))


@pytest.mark.parametrize("key", ["log", "message", "msg", "textPayload", "line"])
def test_lines_that_a_collector_wraps_in_json_are_unwrapped(tmp_path: Path, key: str):
    wrapped = [json.dumps({"timestamp": STAMP, key: line, "pod": "x"}) for line in NEW.splitlines()]
    assert facts(read(tmp_path / "a", "\n".join(wrapped))) == facts(read(tmp_path / "b", NEW))


def test_dockers_json_file_is_unwrapped(tmp_path: Path):
    wrapped = [json.dumps({"log": line, "stream": "stdout", "time": STAMP}) for line in NEW.splitlines(keepends=True)]
    assert facts(read(tmp_path / "a", "\n".join(wrapped))) == facts(read(tmp_path / "b", NEW))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_deepspeeds_lines_and_table_are_read_behind_prefixes(tmp_path: Path, prefix: str):
    line = LINE.format(op="all_reduce", ms="10.00", size="100.0 MB", alg="167.77", bus="146.80")
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
    for text, count in ((line, 1), (line + table, 12)):
        told = "".join(prefix + each for each in text.splitlines(keepends=True))
        (row,) = read(tmp_path / "log", told).rows
        assert (row.kind, row.ranks, row.count) == ("all_reduce", 8, count)


def test_a_time_of_the_cpu_is_no_collectives(tmp_path: Path):
    """As -C prints it: calls return long before what they started has ended."""
    log = read(tmp_path / "log", NEW.replace("time   algbw", "cputime   algbw"))
    assert not log.rows
    assert log.skipped == {"a time of the CPU (-C), not of the collective": len(read(tmp_path / "a", NEW).rows)}


def test_a_program_whose_collective_is_not_known_is_not_guessed(tmp_path: Path):
    log = read(tmp_path / "log", NEW.replace("all_gather_perf", "hypercube_perf"))
    assert (len(log.rows), list(log.skipped)) == (0, ["a collective that is not known (hypercube)"])


def comms(columns: dict[str, float]) -> str:
    """A table of DeepSpeed's of one row, with these columns behind its count."""
    heads = ("Comm. Op", "Message Size", "Count", *columns)
    words = ("64.0 MB", 10, *columns.values())
    return (
        "".join(f"{word: <20}" for word in heads)
        + "\nall_reduce\n"
        + " " * 20
        + "".join(f"{word: <20}" for word in words)
        + "\n"
    )


def test_deepspeeds_stragglers_are_no_latency_and_no_row(tmp_path: Path):
    """A second table was read as if its columns were the first's, and a third column as the mean."""
    plain = {"Total Latency(ms)": 40.0, "Avg Latency(ms)": 4.0, "tput_avg (Gbps)": 268.44, "busbw_avg (Gbps)": 234.88}
    second = {
        "Total comm lat(ms)": 30.0,
        "Total straggler(ms)": 10.0,
        "Avg comm lat(ms)": 3.0,
        "Avg straggler(ms)": 1.0,
    }
    within = {"Total Latency(ms)": 40.0, "Total straggler(ms)": 10.0} | plain
    for text in (comms(plain), comms(plain) + "Breakdown with straggler effect\n" + comms(second), comms(within)):
        (row,) = read(tmp_path / "log", text).rows
        assert (row.kind, row.ranks, row.count, row.seconds) == ("all_reduce", 8, 10, 4e-3)


@pytest.mark.parametrize(
    "line", ["     1048576        262144     float     sum", "# Rank 0", "hosta:1:2 [0] NCCL INFO x"]
)
def test_a_line_without_a_prefix_stays_as_it_is(tmp_path: Path, line: str):
    path = tmp_path / "log"
    path.write_text(line + "\n")
    assert list(prefixes.lines(path, r"\s*(?:#|\d+\s+\d+\s+[a-z]\w*\s|\S+:\d+:\d+ \[)")) == [line]


def test_a_long_line_without_end_takes_no_long_time(tmp_path: Path):
    path = tmp_path / "log"
    path.write_text("ab.cd: " * 20000 + "\n" + "[a] (b) 0: " * 20000 + "\n" + NEW)
    assert len(traces.read(path, format="nccl_tests")) == 2


# ---- versions of the table -------------------------------------------------------------------------------------------

BANNER = "# nThread 1 nGpus 1 minBytes 8 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 validation: 1\n"
FULL = "#  size  count  type  redop  root  time  algbw  busbw #wrong  time  algbw  busbw #wrong\n"
ALONE = "#  size  count  type  redop  root  time  algbw  busbw #wrong\n"
FIRST = "#  bytes  N  type  op  time  algbw  busbw  res  time  algbw  busbw  res\n"
NO_ROOT = "#  size  count  type  redop  time  algbw  busbw  error  time  algbw  busbw  error\n"
SMALL = "  8388608  2097152  float  sum  -1  100.0  83.89  125.83"
BEHIND = " 99.0  84.73  127.10"


@pytest.mark.parametrize(
    ("header", "row"),
    [
        (FULL, f"{SMALL} 0 {BEHIND} 0"),
        (FULL, f"{SMALL} N/A {BEHIND} N/A"),
        (FULL, f"{SMALL} 0"),
        (ALONE, f"{SMALL} 0"),
        (ALONE, f"{SMALL} N/A"),
        (FULL.replace("#wrong", "error"), f"{SMALL} 0e+00 {BEHIND} 0e+00"),
        (NO_ROOT, f"{SMALL.replace('-1  ', '')} 0e+00 {BEHIND} 0e+00"),
        (NO_ROOT, f"{SMALL.replace('-1  ', '')} N/A {BEHIND} N/A"),
        (FIRST, f"{SMALL.replace('-1  ', '')} 0e+00 {BEHIND} 0e+00"),
    ],
)
@pytest.mark.parametrize("ranks", [RANKS, RANKS.replace("Group  0 ", ""), re.sub(r"Group  0 Pid \d+ ", "", RANKS)])
def test_tables_of_every_version_are_read(tmp_path: Path, header: str, row: str, ranks: str):
    samples = read(tmp_path / "log", f"# all_reduce_perf\n{BANNER}# Using devices\n{ranks}#\n{header}{row}\n")
    assert not samples.skipped
    (one,) = samples.rows
    assert (one.kind, one.nbytes, one.ranks, one.redop) == ("all_reduce", 8388608.0, 4, "sum")
    assert one.seconds == pytest.approx(100e-6)


@pytest.mark.parametrize("program", ["all_reduce_test", "all_reduce_perf"])
@pytest.mark.parametrize("small", [False, True])
def test_tables_without_units_are_in_milliseconds(tmp_path: Path, program: str, small: bool):
    listed = "".join(f"#   Rank  {i} uses device  {i} [0x0{i}] Tesla P100-SXM2-16GB\n" for i in range(2))
    rows = [(8, 0.031, 0.0), (10000000, 0.732, 13.66)][: 1 if small else 2]
    body = "".join(
        f" {size} {size} char sum {ms:.3f} {bw:.2f} {bw:.2f} 0e+00 {ms:.3f} {bw:.2f} {bw:.2f} 0e+00\n"
        for size, ms, bw in rows
    )
    samples = read(tmp_path / "log", f"$ ./{program} 10000000\n# Using devices\n{listed}\n{FIRST}{body}")
    assert not samples.skipped
    assert [row.seconds for row in samples.rows] == pytest.approx([ms * 1e-3 for _, ms, _ in rows])
    assert {(row.kind, row.ranks, row.nbytes) for row in samples.rows} == {
        ("all_reduce", 2, float(n)) for n, *_ in rows
    }


@pytest.mark.parametrize("gone", ["time", "algbw"])
def test_a_table_without_units_that_lost_a_column_is_no_traceback(tmp_path: Path, gone: str):
    row = f"{SMALL.replace('-1  ', '')} 0e+00 {BEHIND} 0e+00\n"
    (tmp_path / "log").write_text(f"# all_reduce_perf\n{RANKS}{FIRST.replace(gone, 'word', 1)}{row}")
    samples = traces.read(tmp_path / "log", format="nccl_tests")
    assert all(one.seconds == pytest.approx(99.5e-6, rel=0.01) for one in samples.rows)  # of what is left


def test_a_page_that_took_the_marks_for_headings_still_lists_its_ranks(tmp_path: Path):
    text = f"# all_reduce_perf\n{BANNER}# Using devices\n{RANKS}#\n{FULL}{SMALL} 0 {BEHIND} 0\n"
    bare, whole = (read(tmp_path / "log", one) for one in (text.replace("#", ""), text))
    assert not bare.notes
    assert [(row.ranks, row.nodes, row.device) for row in bare.rows] == [
        (row.ranks, row.nodes, row.device) for row in whole.rows
    ]


def test_a_log_that_lists_its_last_ranks_alone_is_of_all(tmp_path: Path):
    tail = "#  Rank 71 Group  0 Pid 7 on host17 device  3 [0x01] NVIDIA GB200\n"
    row = " 8589934592 2147483648 float sum -1 20299 423.16 834.57 0 20006 429.37 846.82 0\n"
    for above in ("", "# all_reduce_perf\n"):
        samples = read(tmp_path / "log", f"{above}{tail}#\n{FULL}{row}")
        assert [(one.kind, one.ranks) for one in samples.rows] == [("all_reduce", 72)]
        assert not any("one rank ran alone" in note for note in samples.notes)


def test_what_a_command_sets_is_its_own_and_what_is_exported_stays(tmp_path: Path):
    run = f"{BANNER}# Using devices\n{RANKS}#\n{FULL}{SMALL} 0 {BEHIND} 0\n"
    text = (
        f"export NCCL_PROTO=Simple\nNCCL_ALGO=Ring ./all_reduce_perf -g 4\n{run}"
        f"NCCL_ALGO=Tree ./all_reduce_perf -g 4\n{run}./all_reduce_perf -g 4\n{run}"
    )
    told = [row.env for row in read(tmp_path / "log", text).rows]
    assert told == ["NCCL_PROTO=Simple NCCL_ALGO=Ring", "NCCL_PROTO=Simple NCCL_ALGO=Tree", "NCCL_PROTO=Simple"]


def test_blank_redop_and_root_of_old_versions_are_none(tmp_path: Path):
    row = "  8388608  524288  float  100.0  83.89  62.91  0e+00  99.0  84.73  63.55  0e+00\n"
    for header in (NO_ROOT, FULL.replace("#wrong", "error")):
        (one,) = read(tmp_path / "log", f"# all_gather_perf\n{BANNER}{RANKS}{header}{row}").rows
        assert (one.kind, one.redop, one.seconds_in_place) == ("all_gather", "", pytest.approx(99e-6))


def test_rccls_version_is_told(tmp_path: Path):
    text = NEW.replace("nccl-headers=22809 nccl-library=22809", "").replace("#\n", "RCCL version : 2.22.3-HEAD\n#\n", 1)
    assert {row.version for row in read(tmp_path / "log", text).rows} == {"2.22.3"}


# ---- a table that does not say what it is of -------------------------------------------------------------------------


def table(kind: str, ranks: int, listed: bool = True, in_place: str = "0") -> str:
    """Sizes from 8 bytes to 64 MiB at 20 us and 10 GB/s, with the bandwidths as nccl-tests prints them."""
    from clustersim.collectives.base import bus_factor

    redop = "sum" if kind in ("all_reduce", "reduce_scatter", "reduce") else "none"
    root = 0 if kind in ("broadcast", "reduce") else -1
    lines = [BANNER]
    if listed:
        lines += [
            f"#  Rank {r} Group 0 Pid {r} on node device {r} [0x0a] NVIDIA H100 80GB HBM3\n" for r in range(ranks)
        ]
    lines.append(FULL)
    for power in range(3, 27):
        size = 2**power
        micros = 20.0 + size / 10e3
        algbw = size / micros * 1e-3
        busbw = algbw * bus_factor(kind, ranks)
        body = f"{micros:.2f} {algbw:.2f} {busbw:.2f}"
        lines.append(f" {size} {size // 4} float {redop} {root} {body} 0 {body} {in_place}\n")
    return "".join(lines)


@pytest.mark.parametrize(
    ("kind", "in_place"),
    [
        ("all_reduce", "0"),
        ("reduce_scatter", "0"),
        ("all_gather", "0"),
        ("all_to_all", "N/A"),
        ("broadcast", "0"),
        ("reduce", "0"),
    ],
)
def test_a_table_without_its_command_keeps_its_small_rows(tmp_path: Path, kind: str, in_place: str):
    samples = read(tmp_path / "log", table(kind, 8, in_place=in_place))
    assert samples.skipped == {}
    assert {(row.kind, row.ranks) for row in samples.rows} == {(kind, 8)}
    assert len(samples) == 24
    assert any("does not name its collective" in note for note in samples.notes)


@pytest.mark.parametrize(
    ("kind", "ranks"), [("all_reduce", 2), ("all_reduce", 8), ("all_reduce", 16), ("all_gather", 8)]
)
def test_a_table_alone_tells_its_ranks_by_its_bus_bandwidth(tmp_path: Path, kind: str, ranks: int):
    samples = read(tmp_path / "log", table(kind, ranks, listed=False))
    assert samples.skipped == {}
    assert {(row.kind, row.ranks) for row in samples.rows} == {(kind, ranks)}


def test_in_place_results_that_are_not_checked_tell_a_sendrecv_from_an_all_reduce_of_two(tmp_path: Path):
    text = table("all_reduce", 2, in_place="N/A")
    assert {(row.kind, row.ranks) for row in read(tmp_path / "log", text).rows} == {("sendrecv", 2)}
    unchecked = text.replace(" 0 ", " N/A ")
    assert len(read(tmp_path / "log", unchecked)) == 0


def test_ranks_that_ran_alone_are_told(tmp_path: Path):
    """nccl-tests built without MPI: every process of mpirun is a job of one rank."""
    text = BANNER + "#   Rank  0 Pid 1 on a device  0 [0x00] V100\n" + NO_ROOT
    text += "  8388608  2097152  float  sum  100.0  83.89  0.00  0e+00  1.0  8388  0.00  0e+00\n"
    assert "built with MPI=1" in " ".join(read(tmp_path / "log", text).notes)


def test_what_a_table_leaves_open_is_not_guessed(tmp_path: Path):
    open_kind = table("all_gather", 8).replace(" 0 ", " N/A ").replace(" 0\n", " N/A\n")
    assert set(read(tmp_path / "log", open_kind).skipped) == {
        "a collective the log does not name (write the command, such as all_gather_perf, above)"
    }


# ---- rccl-tests' own files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("where", "values"), [("gpus", "8"), ("nodes,ranks,ranksPerNode,gpusPerRank", "2,8,4,1")])
def test_rccl_tests_csv_is_a_table(tmp_path: Path, where: str, values: str):
    text = f"numCycle,collective,{where},size,type,redop,inplace,time,algbw,busbw,#wrong\n"
    for place in (0, 1):
        text += f"0,AllReduce,{values},8388608,float,sum,{place},100.0,83.89,146.8,0\n"
    (row,) = read(tmp_path / "log.csv", text).rows
    assert (row.kind, row.ranks, row.nodes) == ("all_reduce", 8, 2 if "," in where else 0)
    assert row.seconds == pytest.approx(100e-6)


def test_rccl_tests_json_of_several_nodes_counts_every_gpu(tmp_path: Path):
    where = {"nodes": 2, "ranks": 4, "ranksPerNode": 2, "gpusPerRank": 2}
    timed = {"inPlace": 0, "time": 100.0, "algBw": 83.89, "busBw": 146.8, "#wrong": "0"}
    row = where | timed | {"name": "AllReduce", "redop": "sum", "size": 8388608, "type": "float"}
    (one,) = read(tmp_path / "log.json", json.dumps(row)).rows
    assert (one.ranks, one.nodes) == (8, 2)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_lines_of_json_are_read_behind_prefixes(tmp_path: Path, prefix: str):
    timed = {"inPlace": 0, "time": 100.0, "algBw": 83.89, "busBw": 146.8, "#wrong": "0"}
    row = timed | {"gpus": 8, "name": "AllReduce", "redop": "sum", "size": 8388608, "type": "float"}
    samples = read(tmp_path / "log.json", 3 * f"{prefix}{json.dumps(row)}\n")
    assert [(each.kind, each.ranks) for each in samples.rows] == [("all_reduce", 8)] * 3
