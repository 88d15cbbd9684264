"""What NCCL's own lines in a benchmark's log say was set is what the log's rows are played with."""

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.calibrate.beside_machine import beside_machine
from clustersim.files import traces
from clustersim.files.traces.nccl_tests_log import OWN_LINES

HOST = "h100-1:100:200 [0] NCCL INFO "
NVLS = ("nvls", "nvls_tree")
ENABLED = "8 coll channels, 0 collnet channels, 16 nvls channels, 8 p2p channels, 1 p2p channels per peer"
WITHOUT = ENABLED.replace("16 nvls", "0 nvls")


def log(path, *own_lines, first_line="# nccl-tests version 2.17.6 nccl-headers=22105 nccl-library=22105"):
    """A log of nccl-tests of eight ranks, with lines of the library's own above the table."""
    lines = [first_line, "# nThread 1 nGpus 1 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 5 iters: 20"]
    lines += [f"#  Rank  {rank} Group  0 Pid  {rank} on h100-1 device  {rank} [0x1b] NVIDIA H100" for rank in range(8)]
    lines += [HOST + line for line in own_lines]
    lines += ["#       size         count      type   redop    root     time   algbw   busbw #wrong"]
    for nbytes, microseconds in ((1 << 24, 120.0), (1 << 28, 1100.0), (1 << 30, 4200.0)):
        algbw = nbytes / microseconds / 1e3
        lines.append(f"{nbytes} {nbytes // 4} float sum -1 {microseconds:.2f} {algbw:.2f} {algbw * 1.75:.2f} 0")
    path.write_text("\n".join(["$ all_reduce_perf", *lines]) + "\n", encoding="utf-8")
    return path


def expected(path, machine="hgx-h100"):
    return beside_machine(traces.read(path), machine)


def test_without_a_word_of_it_nvls_is_expected(tmp_path):
    for path in (log(tmp_path / "plain.log"), log(tmp_path / "own.log", ENABLED)):
        assert {row.algorithm for row in expected(path).rows} & set(NVLS)


@pytest.mark.parametrize("line", ["NCCL_NVLS_ENABLE set by environment to 0.", WITHOUT])
def test_nvls_that_the_log_says_is_off_is_not_expected(tmp_path, line):
    beside = expected(log(tmp_path / "off.log", line))
    assert not {row.algorithm for row in beside.rows} & set(NVLS)
    assert sum("NVLS) is off: played so" in doubt for doubt in beside.doubts) == 1
    assert any("what its script set (NCCL_ALGO, NCCL_PROTO)" in doubt for doubt in beside.doubts)


def test_an_algorithm_that_the_library_found_set_is_expected(tmp_path):
    beside = expected(log(tmp_path / "tree.log", "NCCL_ALGO set by environment to Tree"))
    assert {row.algorithm for row in beside.rows} == {"tree"}
    assert not any("what its script set" in doubt for doubt in beside.doubts)


def test_a_setting_that_is_not_played_is_said(tmp_path):
    doubts = expected(log(tmp_path / "p2p.log", "NCCL_MAX_NCHANNELS set by environment to 1.")).doubts
    assert any("NCCL_MAX_NCHANNELS=1 is not played" in doubt for doubt in doubts)


def test_rccl_says_its_version_as_nccl_does(tmp_path):
    first_line = "# rccl-tests version 2.17.9-develop:4a65e8d rccl-headers=22707 rccl-library=22707"
    path = log(tmp_path / "rccl.log", first_line=first_line)
    assert {row.version for row in traces.read(path).rows} == {"2.27.7"}
    assert not any("does not say its NCCL" in doubt for doubt in expected(path, "hgx-mi300x").doubts)


def test_what_trace_tells_below_the_rows_is_announced_by_others_alone(tmp_path):
    """`clustersim trace` said that `clustersim trace` tells below the rows what NCCL's lines say."""
    path = log(tmp_path / "own.log", "comm 0x1 rank 0 nranks 8 cudaDev 0 - Init COMPLETE", ENABLED)
    assert any(OWN_LINES in note for note in traces.read(path).notes)
    for words in ((), ("--topology", "hgx-h100")):
        told = CliRunner().invoke(cli, ["trace", str(path), *words]).output
        assert OWN_LINES not in told
        assert "16 nvls" in told
