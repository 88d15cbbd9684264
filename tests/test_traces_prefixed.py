"""Logs that are told by blocks of lines, behind what launchers and collectors of logs put before each line."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_traces_formats import FAILED, PORTS, TEXTS

from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.told import HangReport

BEFORE = ("2025-11-19T10:11:12.123456789Z ", "[pod/job-worker-0/pytorch] ", "[1,0]<stdout>:", "node1: ")


@pytest.mark.parametrize("before", BEFORE)
def test_torchruns_block_is_read_behind_a_prefix(tmp_path: Path, before: str):
    (tmp_path / "t.log").write_text("".join(f"{before}{line}\n" for line in FAILED.splitlines()))
    assert exits(tmp_path / "t.log") == exits_of(tmp_path, FAILED)


@pytest.mark.parametrize("end", ["\r\n", "  \n"])
def test_torchruns_block_is_read_with_other_ends_of_lines(tmp_path: Path, end: str):
    (tmp_path / "t.log").write_bytes(FAILED.replace("\n", end).encode())
    assert exits(tmp_path / "t.log") == exits_of(tmp_path, FAILED)


def exits(path: Path):
    told = traces.read(path)
    assert isinstance(told, HangReport)
    assert told.exits
    return told.exits


def exits_of(folder: Path, text: str):
    (folder / "plain.log").write_text(text)
    return exits(folder / "plain.log")


@pytest.mark.parametrize("value", ["NaN", "Inf", "1e999"])
def test_a_counter_without_end_is_one_clear_error(tmp_path: Path, value: str):
    (tmp_path / "p.prom").write_text(PORTS.replace('port="1"} 4\n', f'port="1"}} {value}\n'))
    with pytest.raises(TraceError, match=f"state_id is {value}, which no counter is"):
        traces.read(tmp_path / "p.prom")


PAGES = ("counters of NICs", "counters of GPUs", "cables")
"""What tools print alone, which no launcher runs."""


OTHERS = (
    *("[default0]:", "0: ", "(Worker pid=12, ip=10.0.0.1) ", "worker-1  | ", "2025-11-19T10:11:12.123Z,"),
    *("[2025-11-19 10:11:12] [rank=0] || ", "<info>    [2025-11-19T10:11:12.123Z] 1234abcd || "),
    "2025-11-19 10:11:12.123 | INFO     | nccl.run:main:12 - ",
)


@pytest.mark.parametrize("before", [*BEFORE, *OTHERS])
@pytest.mark.parametrize("which", [name for name in TEXTS if name not in PAGES])
def test_a_log_says_the_same_behind_a_prefix(tmp_path: Path, which: str, before: str):
    path = tmp_path / "t.log"
    path.write_text(TEXTS[which][1])
    plain = repr(traces.read(path))
    path.write_text("".join(f"{before}{line}\n" for line in TEXTS[which][1].splitlines()))
    assert repr(traces.read(path)) == plain
