"""Calls within a group of NCCL's: their own lines stay "scheduled" for good, and what closes them tells how it went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_traces_hangs import WORLD, Entry, as_json, as_pickle, dump, entry, message

from clustersim.files import traces
from clustersim.files.traces.told import HangReport

GATHER = "nccl:_all_gather_base"


def closing(seq: int, state: str, *, of_messages: bool) -> Entry:
    """What ``ncclGroupEnd`` records: no sizes, and the state of the whole."""
    shared = {"is_p2p": True, "p2p_seq_id": seq} if of_messages else {}
    return entry(0 if of_messages else seq, state, "nccl:coalesced", inputs=(), **shared)


def batch(rank: int, seq: int, state: str) -> list[Entry]:
    """``batch_isend_irecv`` with the rank beside."""
    peer = rank ^ 1
    sent = message(f"nccl:send {rank}->{peer}", seq, "scheduled")
    received = message(f"nccl:recv {rank}<-{peer}", seq, "scheduled")
    return [sent, received, closing(seq, state, of_messages=True)]


def gathers(seq: int, state: str, elements: Sequence[int] = (1000, 5)) -> list[Entry]:
    """``_coalescing_manager`` with a gather of each of some sizes."""
    parts = [entry(seq, "scheduled", GATHER, inputs=((count,),)) for count in elements]
    return [*parts, closing(seq, state, of_messages=False)]


def numbered(entries: list[Entry]) -> list[Entry]:
    """In the order in which they were recorded."""
    return [each | {"record_id": i, "time_created_ns": 10**18 + i * 10**9} for i, each in enumerate(entries)]


def read(folder: Path, ranks: list[list[Entry]], write: Any = as_pickle) -> HangReport:
    for rank, entries in enumerate(ranks):
        write(folder / f"trace_{rank}", dump(numbered(entries), [WORLD]))
    report = traces.read(sorted(folder.glob("trace_*")))
    assert isinstance(report, HangReport)
    return report


@pytest.mark.parametrize("write", [as_pickle, as_json])
def test_batches_that_ended_are_no_hang(tmp_path: Path, write: Any) -> None:
    ranks = [[entry(1), *batch(r, 1, "completed"), *batch(r, 2, "completed")] for r in range(4)]
    report = read(tmp_path, ranks, write)
    assert not report.faults
    assert not report.skipped


def test_a_batch_that_one_rank_never_called_is_told(tmp_path: Path) -> None:
    ranks = [[entry(1), *batch(r, 1, "completed"), *batch(r, 2, "started")] for r in range(4)]
    ranks[1] = ranks[1][:4]
    ranks[2:] = [ranks[r][:4] for r in (2, 3)]
    (fault,) = read(tmp_path, ranks).faults
    assert (fault.cause, fault.missing, fault.waiting) == ("no_peer", [1], [0])


def test_gathers_of_a_group_that_ended_are_not_waited_in(tmp_path: Path) -> None:
    ranks = [[*gathers(1, "completed"), *([entry(2, "started")] if r != 2 else [])] for r in range(4)]
    report = read(tmp_path, ranks)
    (fault,) = report.faults
    assert (fault.cause, fault.missing, fault.seq) == ("never_called", [2], 2)
    assert "which has not ended" not in " ".join(report.lines)
    assert f"its last call there is 1, {GATHER} of [[1000]], [[5]]" in fault.advice


def test_sizes_within_a_group_are_compared(tmp_path: Path) -> None:
    ranks = [gathers(1, "started", (2000, 5) if r == 2 else (1000, 5)) for r in range(4)]
    (fault,) = read(tmp_path, ranks).faults
    assert (fault.cause, fault.look_at, fault.differs_in) == ("differs", [2], "size")


def test_a_group_that_is_not_closed_yet_is_waited_in(tmp_path: Path) -> None:
    ranks = [[entry(1), *batch(r, 1, "completed")[:-1]] for r in range(4)]
    assert {fault.cause for fault in read(tmp_path, ranks).faults} == {"stuck_together"}


def test_batches_whose_own_lines_are_overwritten_are_counted(tmp_path: Path) -> None:
    ranks = [[closing(1, "completed", of_messages=True), entry(1)] for r in range(4)]
    assert sum(read(tmp_path, ranks).skipped.values()) == 4
