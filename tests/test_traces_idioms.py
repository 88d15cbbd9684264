"""Profiles and logs as people have them: lists of events, quoted numbers, files cut off, rows that NCCL's lines cut."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from clustersim.core.errors import TraceError
from clustersim.files import traces

KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def events(steps: int = 3) -> list[dict]:
    """A step each millisecond: a launch, a product of 500 us and an all_reduce of 200 us."""
    made = []
    for step in range(steps):
        at = 1000.0 * (step + 1)
        told = {"Collective name": "allreduce", "In msg nelems": 1000, "Group size": 2, "dtype": "Float"}
        call = {"correlation": step}
        made += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 900.0},
            {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 5.0, "args": call},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": at + 50, "dur": 500.0, "args": {"stream": 7, **call}},
            {"ph": "X", "cat": "kernel", "name": KERNEL, "ts": at + 600, "dur": 200.0, "args": {"stream": 20, **told}},
        ]
    return made


def profile(entries: list[dict]) -> dict:
    return {"schemaVersion": 1, "deviceProperties": [{"name": "NVIDIA H100 80GB HBM3"}], "traceEvents": entries}


def read(folder: Path, data: bytes, name: str = "trace.json"):
    path = folder / name
    path.write_bytes(data)
    return traces.read(path)


# ---- profiles --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(events()).encode(),
        b"\xef\xbb\xbf" + json.dumps({"traceEvents": events()}).encode(),
        json.dumps({"traceEvents": [{**e, "ts": str(e["ts"]), "dur": str(e["dur"])} for e in events()]}).encode(),
        json.dumps({"traceEvents": [*events(), {**events()[2], "ts": 9e3, "dur": -4.0}]}).encode(),
        gzip.compress(json.dumps({"traceEvents": events()}).encode()) + b"\0" * 512,
    ],
    ids=["a list", "a byte order mark", "numbers in quotes", "a negative duration", "padded gzip"],
)
def test_a_profile_in_another_dress_is_the_same_profile(tmp_path: Path, data: bytes):
    plain = read(tmp_path, json.dumps({"traceEvents": events()}).encode())
    dressed = read(tmp_path, data)
    assert len(dressed.row_op) == len(plain.row_op)
    assert dressed.makespan == pytest.approx(plain.makespan)
    assert any("ends before it begins" in word for word in dressed.stats) == (b"-4.0" in data)


@pytest.mark.parametrize("packed", [False, True])
def test_a_profile_that_is_cut_off_is_read_up_to_its_last_event_and_says_so(tmp_path: Path, packed: bool):
    many = json.dumps(profile(events(400))).encode()
    data = gzip.compress(many) if packed else many
    whole = read(tmp_path, data)
    part = read(tmp_path, data[: len(data) * 2 // 3])
    assert 0.5 < len(part.row_op) / len(whole.row_op) < 0.9
    assert any("the end of a file that is cut off" in word for word in part.stats)
    assert not any("cut off" in word for word in whole.stats)


def test_a_profile_that_is_cut_off_before_its_kernels_is_not_one_of_a_cpu(tmp_path: Path):
    entries = sorted(events(200), key=lambda event: event["cat"] == "kernel")
    entries.insert(0, {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1000.0, "dur": 9.0})
    data = json.dumps(profile(entries)).encode()
    with pytest.raises(TraceError, match="cut off before the kernels of its GPU"):
        read(tmp_path, data[: len(data) // 4])


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"[{}]",
        b'[{"name": 1, "ph": 2}]',
        b'{"traceEvents": [{"ph": "X", "ts": "NaN?"}]}',
        b'[{"name": "a", "ph"',
    ],
)
def test_lists_that_are_no_profile_are_one_clear_error(tmp_path: Path, data: bytes):
    with pytest.raises(TraceError) as wrong:
        read(tmp_path, data)
    assert "\n" not in str(wrong.value)


# ---- logs ------------------------------------------------------------------------------------------------------------

HEAD = """# nThread 1 nGpus 2 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20 graph: 0
#  Rank  0 Group  0 Pid   1 on      nodea device  0 [0000:0a:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid   1 on      nodea device  1 [0000:18:00] NVIDIA H100 80GB HBM3
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
"""


def row(size: int, us: float) -> tuple[str, str]:
    """A row's two halves; with two ranks the bus has what the algorithm has."""
    rate = f"{size / us / 1e3:.2f}"
    first = f"{size:12d} {size // 4:12d}     float     sum      -1"
    return first, f" {us:8.2f}  {rate}  {rate}      0  {us:8.2f}  {rate}  {rate}      0"


ROWS = [row(1048576, 28.0), row(2097152, 40.0)]
OWN = "ip-10-0-0-1:1:2 [0] NCCL INFO Channel 00/1 : 0[0] -> 1[1] via P2P/CUMEM"


@pytest.mark.parametrize("prefix", ["", "[1,0]<stdout>:", "nodea: 0: ", "> ", "1721317265123 ", "1721317265.12 "])
@pytest.mark.parametrize("between", ["", f"{OWN}\n", f" {OWN}\n{OWN}\n", "\n"])
def test_rows_are_read_whatever_the_library_prints_between_their_halves(tmp_path: Path, prefix: str, between: str):
    text = HEAD + "".join(f"{first}{between}{second}\n" for first, second in ROWS)
    text = "".join(f"{prefix}{line}\n" for line in text.splitlines())
    log = read(tmp_path, text.encode(), "log.txt")
    assert [(row.kind, row.ranks, row.nbytes, row.seconds) for row in log.rows] == [
        ("all_reduce", 2, 1048576, pytest.approx(28e-6)),
        ("all_reduce", 2, 2097152, pytest.approx(40e-6)),
    ]
    assert not log.skipped


def test_a_half_of_a_row_without_the_other_is_no_row(tmp_path: Path):
    text = HEAD + f"{ROWS[0][0]}{OWN}\n" + "".join(ROWS[1]) + "\n" + ROWS[0][1] + "\n"
    log = read(tmp_path, text.encode(), "log.txt")
    assert [row.nbytes for row in log.rows] == [2097152]
    assert log.rows[0].kind == "all_reduce"


def test_a_compressed_log_that_is_cut_off_is_read_and_says_so(tmp_path: Path):
    rows = "".join(" ".join(row(1024 * i, 10 + i / 7)) + "\n" for i in range(1, 4000))
    packed = gzip.compress((HEAD + rows).encode())
    whole = read(tmp_path, packed, "log.txt.gz")
    part = read(tmp_path, packed[: len(packed) // 2], "log.txt.gz")
    assert 0 < len(part.rows) < len(whole.rows)
    assert any("cut off" in reason for reason in part.skipped)
