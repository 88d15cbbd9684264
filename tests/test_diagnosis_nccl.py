"""What a log of NCCL shows to be off for the whole job is in what ``diagnose`` says of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.files.traces.told import Cause, NcclLog
from clustersim.studies import diagnosis
from clustersim.studies.diagnosis.answer import judged

RANKS = 16


def log_of(path: Path, inside: str, between: str, *network: str) -> Path:
    """A ring of two machines of eight, as NCCL_DEBUG=INFO writes it."""
    lines = []
    for rank in range(RANKS):
        following = (rank + 1) % RANKS
        same_node = rank // 8 == following // 8
        via = f"via {inside}" if same_node else f"[send] via {between}"
        head = f"node{rank // 8}:{1000 + rank}:{2000 + rank} [{rank % 8}] NCCL INFO"
        texts = (
            f"comm 0x55d0{rank:04x} rank {rank} nRanks {RANKS} nNodes 2 localRanks 8 localRank {rank % 8} MNNVL 0",
            *network,
            f"Channel 00/0 : {rank}[{rank % 8}] -> {following}[{following % 8}] {via}",
        )
        lines += [f"{head} {text}" for text in texts]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("inside", "between", "network", "conclusion"),
    [
        ("P2P/CUMEM/read", "NET/Socket/0", ("NET/IB : No device found.", "Using network Socket"), "TCP sockets carry"),
        ("SHM/direct/direct", "NET/IB/0/GDRDMA", ("NCCL_P2P_DISABLE set by environment to 1.",), "P2P is off"),
        ("P2P/CUMEM/read", "NET/IB/0", ("Using network IB",), "GPUDirect RDMA is off"),
    ],
)
def test_what_is_off_for_the_whole_job_is_told_and_its_contrary_is_not(tmp_path, inside, between, network, conclusion):
    """A log of TCP sockets, or without GPUDirect, was said to show that every NIC reaches GPU memory."""
    path = log_of(tmp_path / "nccl.log", inside, between, *network)
    answer = " ".join(CliRunner().invoke(cli, ["diagnose", str(path)]).stdout.split())
    assert f"NCCL, of the whole job and no one place: {conclusion}" in answer
    assert "reaches GPU memory" not in answer
    # What is certain heads the answer, and what to do of it; "nothing is wrong" was said above it.
    assert answer.startswith(f"diagnosis: the whole job is slower than it need be: {conclusion}")
    assert " why: " in answer  # it was told to look at "the log does not say"
    assert "look at:" not in answer
    assert "nothing is wrong" not in answer
    assert "nothing here" not in answer
    assert diagnosis.diagnose([path]).to_dict()["whole_job"][0]["text"].startswith(conclusion)


def test_one_place_that_is_sure_comes_before_what_slows_the_whole_job(tmp_path):
    """GPUDirect is off on one machine of many, and NVLS on all: both are told, the sure place first."""
    log = NcclLog(
        "nccl",
        [],
        [],
        16,
        2,
        {},
        {},
        {},
        [],
        causes=[
            Cause("gdr_off", "GPUDirect RDMA is off on node1, and on for others", "nvidia-peermem", "node1"),
            Cause("nvls_off", "NVLink SHARP (NVLS) is off", "the environment says so"),
        ],
        hosts={rank: f"node{rank // 8}" for rank in range(16)},
    )
    answer = judged([("nccl_debug", log)])
    verdict = answer.verdict
    assert verdict.startswith("gdr_off of machine node1 (")
    assert verdict.endswith("beside that, the whole job is slower than it need be: NVLink SHARP (NVLS) is off")


def test_a_log_in_which_nothing_is_off_says_so(tmp_path):
    path = log_of(tmp_path / "nccl.log", "P2P/CUMEM/read", "NET/IB/0/GDRDMA", "Using network IB")
    answer = " ".join(CliRunner().invoke(cli, ["diagnose", str(path)]).stdout.split())
    assert "NCCL: every NIC is there and reaches GPU memory" in answer
    assert "nothing is wrong" in answer
    assert "whole job is slower" not in answer
