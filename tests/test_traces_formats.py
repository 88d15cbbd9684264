"""Any file of any format is known for what it is, whatever words of other formats stand near its head."""

from __future__ import annotations

import csv
import gzip
import io
import json
import pickle
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from test_execution_trace import node
from test_step_timers import RANGES, megatron
from test_traces_hangs import timeout
from test_traces_kernel_csv import SUMS
from test_traces_kernel_csv import TRACE as GPU_TRACE
from test_traces_kineto import gemm, kernel
from test_traces_samples import LINE, NEW, OLD, PER_ITERATION
from test_traces_told import LOG, inspected

from clustersim.app.cli import cli
from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces import FORMATS
from clustersim.testing import check_reader

DATA = Path(__file__).parent / "data"
Table = dict[str, Any]

TELLING: Table = {
    "nccl_version": "2.21.5",
    "args": ["./all_reduce_perf"],
    "config": {},
    "results": [],
    "pg_config": {"0": {"ranks": "[0]"}},
    "pg_status": {},
    "collective_seq_id": 1,
    "entries": [],
    "traceEvents": [],
    "schemaVersion": 1,
    "deviceProperties": [],
    "schema": "1.1.1-chakra.0.0.4",
    "nodes": [],
    "clustersim_capture": 1,
    "part": "collectives",
    "coll_perf": {},
    "algBw": 1,
    "busBw": 1,
    "gpus": 1,
    "out-of-place": "# nThread",
    "comm op:": "Comm. Op Message Size",
    "words": " NCCL INFO ",
}
"""What each format's files have near their heads, but holding nothing that only they hold."""


def profile(pg_config: Any, **more: Any) -> Table:
    """A profile as PyTorch 2.3 and later write it of an NCCL job."""
    about = {"backend": "nccl", "rank": 0, "world_size": 1, "pg_config": pg_config, "nccl_version": "2.21.5"}
    return {"schemaVersion": 1, "distributedInfo": about, "traceEvents": gemm(10, 5, 1, 1), **more}


def report() -> Table:
    """What nccl-tests -J writes."""
    device = {"rank": 0, "group": 0, "pid": 1, "hostname": "a", "device_info": "NVIDIA H100 80GB HBM3"}
    timed = {"time": 100.0, "alg_bw": 83.89, "bus_bw": 0.0, "nwrong": 0.0}
    result = {"size": 8388608, "count": 2097152, "type": "float", "redop": "sum", "root": "-1", "out_of_place": timed}
    return {
        "version": 2,
        "args": ["./all_reduce_perf"],
        "env": [],
        "nccl_version": 22809,
        "config": {"nthreads": 1, "ngpus": 1, "devices": [device]},
        "results": [result],
    }


def benched() -> Table:
    """A line of rccl-tests."""
    return {
        "#wrong": "0",
        "algBw": 0.0533,
        "busBw": 0.0800,
        "gpus": 4,
        "inPlace": 0,
        "name": "AllReduce",
        "redop": "sum",
        "size": 1024,
        "time": 19.18415,
        "type": "float",
    }


def dump(rank: int = 0) -> Table:
    return json.loads((DATA / "flight_recorder" / f"json_{rank}.json").read_text())


def lines(name: str) -> list[Table]:
    text = (DATA / "gloo" / "2_ranks" / name).read_text()
    return [json.loads(line) for line in text.splitlines()]


FAILED = """train.py FAILED
Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  host      : node1
  rank      : 5 (local_rank: 1)
  exitcode  : -9 (pid: 4005)
"""
PORTS = """node_infiniband_state_id{device="mlx5_0",port="1"} 4
node_infiniband_rate_bytes_per_second{device="mlx5_0",port="1"} 5e+10
"""
GPUS = """DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-1",Hostname="node0"} 1410
DCGM_FI_DEV_GPU_TEMP{gpu="0",UUID="GPU-1",Hostname="node0"} 61
"""
CABLES = """CA     1  1 0xb859f00000000001 4x HDR - SW     9  1 0xb859f00000000009 ( 'node0 mlx5_0' - 'leaf0' )
CA     2  1 0xb859f00000000002 4x HDR - SW     9  2 0xb859f00000000009 ( 'node1 mlx5_0' - 'leaf0' )
"""

GROUPS = [{"pg_name": str(i), "pg_desc": "mesh", "ranks": list(range(500))} for i in range(60)]

OBJECTS: dict[str, tuple[str, Table]] = {
    "profile": ("kineto", profile([{"pg_name": "0", "ranks": [0]}])),
    "profile with long groups": ("kineto", profile(GROUPS)),
    "profile without steps": ("kineto", {"traceEvents": [kernel(0, 10, 1)]}),
    "execution trace": ("kineto", {"schema": "1.1.1-chakra.0.0.4", "pid": 1, "nodes": [node(2, "aten::mm", [])]}),
    "nccl-tests -J": ("nccl_tests_json", report()),
    "Flight Recorder": ("flight_recorder", dump()),
    "Flight Recorder with long groups": ("flight_recorder", {"pg_config": GROUPS} | dump()),
    "provenance": ("capture", json.loads((DATA / "gloo" / "2_ranks" / "provenance.json").read_text())),
}
FIRST_LINES: dict[str, tuple[str, list[Table]]] = {
    "capture": ("capture", lines("collectives.jsonl")),
    "capture of steps": ("capture", lines("steps.jsonl")),
    "inspector": ("json_lines", [json.loads(inspected(2, "AllReduce", 1 << 30, 61974, 485.1))]),
    "rccl-tests": ("json_lines", [benched()]),
    "metrics of steps": ("step_table", [{"step": i, "step_time_s": 0.25, "loss": 2.0} for i in range(4)]),
}
TEXTS: dict[str, tuple[str, str]] = {
    "new table": ("nccl_tests", NEW),
    "old table": ("nccl_tests", OLD),
    "table by iteration": ("nccl_tests", PER_ITERATION),
    "table after NCCL's own lines": ("nccl_tests", LOG * 200 + NEW),
    "NCCL_DEBUG": ("nccl_debug", LOG),
    "Megatron-LM": ("step_timers", megatron(RANGES)),
    "watchdog": ("watchdog", timeout(0, 4)),
    "torchrun": ("watchdog", FAILED),
    "counters of NICs": ("link_counters", PORTS),
    "counters of GPUs": ("link_counters", GPUS),
    "cables": ("ib_ports", CABLES),
    "DeepSpeed": ("deepspeed", LINE.format(op="all_reduce", ms="1", size="1.0 MB", alg="1", bus="1")),
}
COLUMNS: dict[str, tuple[str, str]] = {
    "nccl_tests.csv": ("table", "collective,size_bytes,time_us,ranks\nall_reduce,1024,10,4\n"),
    "sweep": ("table", "size(B),count,type,time(ns),busbw(GB/s)\n1048576,262144,float,100000,15\n"),
    "ops.csv": ("pipeline", (DATA / "traces" / "pipeline_2x2" / "ops.csv").read_text()),
    "steps.csv": ("pipeline", (DATA / "traces" / "pipeline_2x2" / "steps.csv").read_text()),
    "cuda_gpu_kern_sum": ("kernel_csv", SUMS),
    "table of steps": ("step_table", "iteration,step_time_ms,loss\n1,500,2\n2,250,2\n3,260,2\n4,250,1\n"),
    "cuda_gpu_trace": ("kernel_csv", GPU_TRACE),
}


def name_of(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    return traces.sniff(path).name


def beside(own: Table, more: Table) -> Table:
    """The telling keys before a document's own, which stay what they are."""
    return {key: value for key, value in more.items() if key not in own} | own


PLACES: dict[str, Callable[[Table], Table]] = {
    "as they are": lambda own: own,
    "before": lambda own: beside(own, TELLING),
    "inside": lambda own: beside(own, {"about": TELLING}),
    "listed": lambda own: beside(own, {"about": [TELLING["args"], {"nccl_version": 1}]}),
    "alone": lambda own: beside(own, {"nccl_version": "2.21.5", "args": {}}),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("which", OBJECTS)
def test_a_json_document_is_what_it_holds_and_not_what_its_keys_are_called(tmp_path: Path, which: str, place: str):
    expected, own = OBJECTS[which]
    said = PLACES[place](own)
    assert name_of(tmp_path / "t.json", json.dumps(said).encode()) == expected
    assert name_of(tmp_path / "t.json.gz", gzip.compress(json.dumps(said, indent=1).encode())) == expected


@pytest.mark.parametrize("place", ["as they are", "before", "inside", "alone"])
@pytest.mark.parametrize("which", FIRST_LINES)
def test_lines_of_json_are_what_the_first_holds(tmp_path: Path, which: str, place: str):
    expected, own = FIRST_LINES[which]
    rows = [PLACES[place](own[0]), *own[1:]]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert name_of(tmp_path / "t.log", text.encode()) == expected


@pytest.mark.parametrize("word", [*TELLING, *map(str, TELLING.values())])
@pytest.mark.parametrize("which", TEXTS)
def test_a_log_is_what_its_lines_are(tmp_path: Path, which: str, word: str):
    expected, text = TEXTS[which]
    assert name_of(tmp_path / "t.log", f"{word}\n{text}".encode()) == expected
    assert name_of(tmp_path / "t.log", text.replace("\n", f"\n{word}\n", 1).encode()) == expected


@pytest.mark.parametrize("which", COLUMNS)
def test_a_table_is_what_its_columns_are(tmp_path: Path, which: str):
    expected, text = COLUMNS[which]
    rows = list(csv.reader(text.splitlines()))
    out = io.StringIO()
    words = [str(key) for key in TELLING]
    csv.writer(out).writerows([[*words, *rows[0]], *([*("1" for _ in words), *row] for row in rows[1:])])
    assert name_of(tmp_path / "t.csv", text.encode()) == expected
    assert name_of(tmp_path / "t.csv", out.getvalue().encode()) == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickled_dump_is_known_with_long_groups_and_other_keys(tmp_path: Path, protocol: int):
    for said in (dump(), {"pg_config": GROUPS} | dump(), beside(dump(), TELLING), {"x": "y" * 2**18} | dump()):
        assert name_of(tmp_path / "trace_0", pickle.dumps(said, protocol)) == "flight_recorder"


def shipped() -> list[tuple[str, Path]]:
    folders = {
        "traces/gloo*/**/*.json.gz": "kineto",
        "traces/pipeline*/*.csv": "pipeline",
        "mpi/*": "capture",
        "flight_recorder/*": "flight_recorder",
        "gloo/*_ranks/*": "capture",
    }
    return [(name, path) for pattern, name in folders.items() for path in sorted(DATA.glob(pattern))]


@pytest.mark.parametrize(("name", "path"), shipped(), ids=lambda value: str(getattr(value, "name", value)))
def test_every_shipped_file_is_known(name: str, path: Path):
    assert traces.sniff(path).name == name


def test_every_format_that_is_read_is_in_this_contract(tmp_path: Path):
    with sqlite3.connect(tmp_path / "x.sqlite") as base:
        base.execute("create table StringIds (id int, value text)")
    base.close()
    assert traces.sniff(tmp_path / "x.sqlite").name == "nsys"
    tested = {name for table in (OBJECTS, FIRST_LINES, TEXTS, COLUMNS) for name, _ in table.values()}
    assert {name for name, row in FORMATS.items() if row.read} == tested | OWN_TESTS, (
        "a format needs a text that it is known by in OBJECTS, FIRST_LINES, TEXTS or COLUMNS of this file"
    )


OWN_TESTS = {"nsys", "run", "tensorboard"}
"""Formats whose files are bases, archives or folders of events: their own tests make them."""


def examples():
    """The smallest shipped file of each format, and a text of each other: a log, a table, a document."""
    texts = dict(TEXTS.values()) | dict(COLUMNS.values())
    texts |= {name: json.dumps(own) for name, own in OBJECTS.values()}
    texts |= {name: "".join(json.dumps(row) + "\n" for row in rows) for name, rows in FIRST_LINES.values()}
    by_size = sorted(shipped(), key=lambda pair: -pair[1].stat().st_size)
    files = {name: path for name, path in by_size if path.is_file()}
    whole = {"pipeline": DATA / "traces" / "pipeline_2x2", "capture": DATA / "gloo" / "2_ranks"}
    return texts | files | whole


def test_every_format_that_is_read_has_an_example_in_the_public_contract():
    assert {name for name, row in FORMATS.items() if row.read} == set(examples()) | OWN_TESTS, (
        "a format needs an example: a text in this file, or a file under tests/data and its pattern in shipped()"
    )


@pytest.mark.parametrize("name", examples())
def test_a_reader_keeps_the_public_contract(tmp_path: Path, name: str):
    example = examples()[name]
    if isinstance(example, str):
        (tmp_path / "t.log").write_text(example)
        example = tmp_path / "t.log"
    check_reader(FORMATS[name], example)


# ---- handing on ------------------------------------------------------------------------------------------------------


def test_a_reader_that_refuses_hands_on_to_the_next(tmp_path: Path):
    path = tmp_path / "t.json"
    results = {"config": {}, "results": [{"size": 1, "type": "no type"}], "nccl_version": "x"}
    path.write_text(json.dumps(results | profile(GROUPS[:1])))
    assert traces.sniff(path).name == "nccl_tests_json"
    assert traces.read(path).world_size == 1


def test_where_all_readers_refuse_the_error_says_why_each_did(tmp_path: Path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"nccl_version": 1, "args": [], "traceEvents": []}))
    with pytest.raises(TraceError) as wrong:
        traces.read(path)
    text = str(wrong.value)
    assert "as a nccl-tests -J: not a whole" in text
    assert "as a PyTorch profiler trace: a trace without PyTorch operators" in text
    assert "--format names one" in text
    assert "\n" not in text


def test_a_header_without_rows_in_another_log_is_no_table(tmp_path: Path):
    path = tmp_path / "t.log"
    header = next(line for line in NEW.splitlines() if " size " in line)
    path.write_text(f"{header}\n{LOG}")
    assert traces.read(path).ranks == 16


# ---- --format --------------------------------------------------------------------------------------------------------

READERS = [
    ("trace", "{}"),
    ("replay", "{}"),
    ("explain", "{}"),
    ("report", "{}", "-o", "{}.html"),
    ("compare", "{}", "{}"),
    ("plot", "gantt", "{}", "{}.png"),
    ("calibrate", "{}", "--topology", "dgx-h100", "-o", "{}.toml"),
]


@pytest.mark.parametrize("words", READERS, ids=lambda words: words[0])
def test_every_command_that_reads_traces_takes_their_format(tmp_path: Path, words: tuple[str, ...]):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(profile([])))
    given = [word.replace("{}", str(path)) for word in words]
    done = CliRunner().invoke(cli, [*given, "--format", "nccl_debug"])
    assert isinstance(done.exception, TraceError), done.output
    assert "no communicator in this log" in str(done.exception)
    unknown = CliRunner().invoke(cli, [*given, "--format", "kinto"])
    assert "did you mean 'kineto'?" in str(unknown.exception)
    if words[0] != "calibrate":
        assert CliRunner().invoke(cli, [*given, "--format", "kineto"]).exit_code == 0


# ---- folders that commands wrote to ----------------------------------------------------------------------------------


def test_traces_are_compared_with_the_folder_of_their_replay(tmp_path: Path):
    folder = tmp_path / "traces"
    out = tmp_path / "out"
    folder.mkdir()
    (folder / "t.json").write_text(json.dumps(profile([])))
    assert CliRunner().invoke(cli, ["replay", str(folder), "--out", str(out)]).exit_code == 0
    done = CliRunner().invoke(cli, ["compare", str(folder), str(out)])
    assert done.exit_code == 0, done.exception
    assert "B: simulated.npz" in done.output


def test_what_a_command_left_in_a_folder_of_traces_is_not_read_as_one(tmp_path: Path):
    (tmp_path / "t.json").write_text(json.dumps(profile([])))
    assert CliRunner().invoke(cli, ["replay", str(tmp_path), "--out", str(tmp_path)]).exit_code == 0
    assert (tmp_path / "clustersim.json").is_file()
    assert traces.read(tmp_path).world_size == 1


# ---- files that are cut off ------------------------------------------------------------------------------------------


def whole_files() -> dict[str, bytes]:
    """A file of each format that others write."""
    found = {which: json.dumps(own, indent=1).encode() for which, (_, own) in OBJECTS.items()}
    found |= {
        which: "".join(json.dumps(row) + "\n" for row in rows).encode() for which, (_, rows) in FIRST_LINES.items()
    }
    found |= {which: text.encode() for which, (_, text) in TEXTS.items()}
    return found | {"pickled dump": (DATA / "flight_recorder" / "trace_0").read_bytes()}


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("which", whole_files())
def test_a_file_cut_anywhere_is_read_as_far_as_it_is_whole_or_is_one_clear_error(
    tmp_path: Path, which: str, packed: bool, share: float
):
    data = whole_files()[which]
    data = gzip.compress(data) if packed else data
    path = tmp_path / "trace_0"
    path.write_bytes(data[: int(share * len(data))])
    said = ""
    answer = None
    try:
        answer = traces.read(path)
    except TraceError as error:
        said = str(error)
    if said:
        assert str(path) in said
        assert "\n" not in said
        assert not packed or "cut off" in said
    else:
        left = answer.stats if isinstance(answer, Timeline) else answer.skipped
        told = any("cut off" in word for word in left)
        assert told or (not packed and (which in TEXTS or which in FIRST_LINES))
