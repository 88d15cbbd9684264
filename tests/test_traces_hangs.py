"""Of a hang the verdict names the rank, the line of code, the group, and what to look at there."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.core.errors import TraceError
from clustersim.files import traces
from clustersim.files.traces.told import HangReport

Entry = dict[str, Any]
Dump = dict[str, Any]
WORLD = ("0", "default_pg", [0, 1, 2, 3])
ADDRESS = "/usr/lib/python3/dist-packages/torch/distributed/distributed_c10d.py"


def entry(
    seq: int, state: str = "completed", name: str = "nccl:all_reduce", inputs: Any = ((1000,),), **more: Any
) -> Entry:
    """A call of the default group, as NCCL's process group records it: library frames come before the job's."""
    sizes = [list(shape) for shape in inputs]
    done = state == "completed"
    born = 10**18 + seq * 10**9
    frames = [
        {"name": "wrapper", "filename": ADDRESS, "line": 80},
        {"name": "step", "filename": "/home/me/pytorch/train.py", "line": 100 + seq},
    ]
    said = {
        "frames": frames,
        "record_id": seq,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": seq,
        "p2p_seq_id": 0,
        "op_id": seq,
        "profiling_name": name,
        "time_created_ns": born,
        "input_sizes": sizes,
        "input_dtypes": ["Float"],
        "output_sizes": sizes,
        "output_dtypes": ["Float"],
        "state": state,
        "time_discovered_started_ns": born + 1 if state != "scheduled" else None,
        "time_discovered_completed_ns": born + 2 if done else None,
        "retired": done,
        "timeout_ms": 600000,
        "is_p2p": False,
    }
    said["record_id"] -= 1
    return said | more


def of_group(name: str, about: str, seq: int, state: str = "completed", at: int = 0, **more: Any) -> Entry:
    """A call of another group; ``at`` orders it among the calls of all groups."""
    born = 10**18 + at * 10**9
    frames = [{"name": "step", "filename": f"{about}.py", "line": 10 + seq}]
    return entry(seq, state, process_group=(name, about), frames=frames, time_created_ns=born, pg_id=1) | more


def message(name: str, seq: int, state: str = "completed", **more: Any) -> Entry:
    return entry(0, state, name, is_p2p=True, p2p_seq_id=seq, record_id=seq - 1, **more)


def dump(entries: list[Entry], groups: list[tuple[str, str, list[int]]], version: str = "2.10") -> Dump:
    config = {name: {"name": name, "desc": about, "ranks": str(ranks)} for name, about, ranks in groups}
    library = "comm_lib_version" if version == "2.10" else "nccl_version"
    return {"version": version, library: "2.27.5", "pg_config": config, "pg_status": {}, "entries": entries}


def as_pickle(path: Path, said: Dump) -> None:
    path.write_bytes(pickle.dumps(said, 2))


def as_json(path: Path, said: Dump) -> None:
    path.write_text(json.dumps(said, sort_keys=True))


def hang(
    folder: Path,
    ranks: dict[int, list[Entry]],
    groups: list[tuple[str, str, list[int]]] | None = None,
    write: Callable[[Path, Dump], None] = as_pickle,
    version: str = "2.10",
) -> HangReport:
    for rank, entries in ranks.items():
        write(folder / f"nccl_trace_rank_{rank}", dump(entries, groups or [WORLD], version))
    told = traces.read(folder)
    assert isinstance(told, HangReport)
    return told


def calls(last: Entry | None, before: int = 3) -> list[Entry]:
    done = [entry(seq) for seq in range(1, before + 1)]
    return done if last is None else [*done, last]


@pytest.mark.parametrize("write", [as_pickle, as_json])
@pytest.mark.parametrize("version", ["2.4", "2.5", "2.9", "2.10"])
def test_who_enqueued_and_did_not_start_what_others_started(tmp_path: Path, write: Any, version: str):
    ranks = {rank: calls(entry(4, "scheduled" if rank == 2 else "started")) for rank in range(4)}
    told = hang(tmp_path, ranks, write=write, version=version)
    (fault,) = told.faults
    assert (fault.cause, fault.look_at, fault.where) == ("not_started", [2], "train.py:104")
    assert "group '0 default_pg', collective 4, nccl:all_reduce" in told.lines[0]
    assert "(train.py:104): rank 2 enqueued it and did not start it; ranks 0, 1, 3 did" in told.lines[0]
    assert told.lines[1].startswith("look at rank 2: the GPU is busy")


def test_all_started_and_none_ended_is_the_network_or_a_gpu(tmp_path: Path):
    told = hang(tmp_path, {rank: calls(entry(4, "started")) for rank in range(4)})
    (fault,) = told.faults
    assert (fault.cause, fault.missing, fault.look_at) == ("stuck_together", [], [])
    assert "all ranks started it and none ended it" in told.lines[0]
    assert told.lines[1].startswith("look at the network and the GPUs")
    assert "600 s" in told.lines[1]


def test_all_enqueued_and_none_started_is_what_comes_before(tmp_path: Path):
    (fault,) = hang(tmp_path, {rank: calls(entry(4, "scheduled")) for rank in range(4)}).faults
    assert fault.cause == "none_started"


def test_where_no_start_was_recorded_nobody_is_said_not_to_have_started(tmp_path: Path):
    """PyTorch records starts with TORCH_NCCL_ENABLE_TIMING alone: it was "none started it", of a kernel before it."""
    ranks = {rank: calls(entry(4, "scheduled")) for rank in range(4)}
    for entries in ranks.values():
        for call in entries:
            call["time_discovered_started_ns"] = None
    (fault,) = hang(tmp_path, ranks).faults
    assert fault.cause == "stuck_together"
    assert "all ranks called it and none ended it" in fault.text


def test_a_start_on_one_rank_says_that_starts_are_recorded(tmp_path: Path):
    ranks = {rank: calls(entry(4, "scheduled" if rank == 2 else "started")) for rank in range(4)}
    for call in ranks[2]:
        call["time_discovered_started_ns"] = None
    (fault,) = hang(tmp_path, ranks).faults
    assert (fault.cause, fault.look_at) == ("not_started", [2])


def test_who_did_not_end_what_others_ended(tmp_path: Path):
    ranks = {rank: calls(entry(4, "started" if rank == 1 else "completed")) for rank in range(4)}
    (fault,) = hang(tmp_path, ranks).faults
    assert (fault.cause, fault.look_at) == ("not_ended", [1])
    assert "rank 1 started it and did not end it; ranks 0, 2, 3 did" in fault.text


def test_what_ended_elsewhere_and_needs_all_ranks_has_started_whatever_a_dump_says(tmp_path: Path):
    states = ("scheduled", "completed", "started", "started")
    (fault,) = hang(tmp_path, {rank: calls(entry(4, state)) for rank, state in enumerate(states)}).faults
    assert (fault.cause, fault.look_at) == ("not_ended", [0])
    assert "rank 1 ended it, which takes all ranks" in fault.text
    assert "dump was taken earlier" in fault.advice


def test_who_is_a_collective_behind_and_where_it_should_be(tmp_path: Path):
    ahead = [*calls(entry(4, "started")), entry(5, "scheduled"), entry(6, "scheduled")]
    told = hang(tmp_path, {rank: calls(None) if rank == 2 else ahead for rank in range(4)})
    (fault,) = told.faults
    assert (fault.cause, fault.seq, fault.missing, fault.look_at) == ("never_called", 4, [2], [2])
    assert "rank 2 never called it; ranks 0, 1, 3 wait" in told.lines[0]
    assert told.lines[1].startswith("look at rank 2 before train.py:104")
    assert "its last call there is 3, nccl:all_reduce of [[1000]] Float (train.py:103)" in told.lines[1]


def test_sizes_that_differ_are_told_beside_a_rank_that_never_called(tmp_path: Path):
    odd = calls(entry(4, "started", inputs=[[900]]))
    usual = calls(entry(4, "started"))
    told = hang(tmp_path, {0: usual, 1: odd, 2: calls(None), 3: usual, 4: usual}, [("0", "default_pg", list(range(5)))])
    (fault,) = told.faults
    assert (fault.cause, fault.missing) == ("never_called", [2])
    assert "ranks 0, 1, 3, 4 wait, and differ: " in told.lines[0]
    assert "rank 1: nccl:all_reduce of [[900]]" in told.lines[0]


def test_whose_dump_is_missing_where_all_others_wait(tmp_path: Path):
    told = hang(tmp_path, {rank: calls(entry(4, "started")) for rank in (0, 1, 3)})
    (fault,) = told.faults
    assert (fault.cause, fault.no_dump, fault.look_at) == ("no_dump", [2], [2])
    assert told.lines[1].startswith("look at rank 2, of which there is no dump")


def test_a_gap_between_dumps_is_a_missing_dump_where_no_group_is_listed(tmp_path: Path):
    ranks = {rank: calls(entry(4, "started")) for rank in (0, 1, 3)}
    assert hang(tmp_path, ranks, [("", "", [])]).faults[0].no_dump == [2]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        (entry(4, "started", inputs=[[900]]), "rank 2: nccl:all_reduce of [[900]]"),
        (entry(4, "started", "nccl:broadcast"), "rank 2: nccl:broadcast"),
        (entry(4, "started", input_dtypes=["BFloat16"]), "rank 2: nccl:all_reduce of [[1000]] BFloat16"),
    ],
)
def test_sizes_types_and_kinds_that_differ_name_the_odd_rank(tmp_path: Path, odd: Entry, said: str):
    told = hang(tmp_path, {rank: calls(odd if rank == 2 else entry(4, "started")) for rank in range(4)})
    (fault,) = told.faults
    assert (fault.cause, fault.look_at, fault.where) == ("differs", [2], "train.py:104")
    assert said in told.lines[0]
    assert "look at rank 2 at train.py:104" in told.lines[1]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("nccl:all_to_all", [[100], [200]], [[300], [400]]),
        ("nccl:scatter", [[], [1000]], [[500], [500]]),
        ("nccl:gather", [[500], [500]], [[], [1000]]),
        ("nccl:all_reduce", [[10, 100], [1000]], [[10, 100], [1000]]),
    ],
)
def test_what_may_differ_between_ranks_is_no_fault(tmp_path: Path, name: str, inputs: Any, outputs: Any):
    ranks = {
        rank: [entry(1, "started", name, inputs=[inputs[rank % 2]], output_sizes=[outputs[rank % 2]])]
        for rank in range(4)
    }
    assert hang(tmp_path, ranks).faults[0].cause == "stuck_together"


GROUPS = [WORLD, ("1", "tp", [0, 1]), ("2", "tp", [2, 3]), ("3", "dp", [0, 2]), ("4", "dp", [1, 3])]


def test_the_cause_comes_before_what_follows_from_it(tmp_path: Path):
    """Rank 3 never entered its tensor-parallel call; 2 waits for it there, and 0 for 2 in the data-parallel group."""
    ranks = {
        0: [of_group("1", "tp", 1, at=1), of_group("3", "dp", 1, "started", at=2)],
        1: [of_group("1", "tp", 1, at=1), of_group("4", "dp", 1, "started", at=2)],
        2: [of_group("2", "tp", 1, "started", at=1)],
        3: [],
    }
    told = hang(tmp_path, ranks, GROUPS)
    assert [fault.look_at for fault in told.faults] == [[3], [3], [2]]
    assert told.faults[0].group == "2 tp" or told.faults[1].group == "2 tp"
    follows = told.faults[2]
    assert (follows.group, follows.missing) == ("3 dp", [2])
    assert "rank 2: it called nothing there; it waits itself in group '2 tp', collective 1" in follows.advice


def test_groups_called_in_different_orders_are_a_circle(tmp_path: Path):
    groups = [WORLD, ("1", "a", [0, 1]), ("2", "b", [0, 1])]
    ranks = {0: [of_group("1", "a", 1, "started", at=1)], 1: [of_group("2", "b", 1, "started", at=1)]}
    assert any("in a circle: groups '1 a', '2 b'" in line for line in hang(tmp_path, ranks, groups).lines)


def test_groups_enqueued_in_different_orders_are_a_circle_as_well(tmp_path: Path):
    """Each rank has started one group's call, and the other's stands behind it."""
    groups = [WORLD, ("1", "a", [0, 1]), ("2", "b", [0, 1])]
    orders = {0: ["1 a", "2 b"], 1: ["2 b", "1 a"]}
    ranks = {
        rank: [
            of_group(*names.split(), 1, state, at=at)
            for at, (names, state) in enumerate(zip(order, ("started", "scheduled"), strict=True), 1)
        ]
        for rank, order in orders.items()
    }
    assert any("in a circle: groups '1 a', '2 b'" in line for line in hang(tmp_path, ranks, groups).lines)
    for made in ranks.values():  # rank 0's own second call is all that hangs: no circle
        made[0] = made[0] | {"state": "started"}
    ranks[1] = [of_group("1", "a", 1, "scheduled", at=1)]
    assert not any("in a circle" in line for line in hang(tmp_path, ranks, groups).lines)


def test_dumps_of_two_jobs_in_one_folder_are_told(tmp_path: Path):
    groups = [("0", "default_pg", [0, 1])]
    told = hang(tmp_path, {rank: calls(entry(4, "started")) for rank in (0, 1, 2)}, groups)
    assert told.lines[0].startswith("rank 2 is not in group '0 default_pg' as the dumps tell it (0, 1)")


def test_a_call_that_waits_behind_another_groups_says_so(tmp_path: Path):
    groups = [WORLD, ("1", "ep", [0, 1, 2, 3])]
    ranks = {rank: [*calls(None), of_group("1", "ep", 1, "started", at=3), entry(4, "started")] for rank in range(4)}
    ranks[2] = [*calls(None), of_group("1", "ep", 1, "started", at=3), entry(4, "scheduled")]
    told = hang(tmp_path, ranks, groups)
    behind = next(fault for fault in told.faults if fault.cause == "not_started")
    assert "on rank 2 nccl:all_reduce of [[1000]] Float (ep.py:11) of group '1 ep' has not ended" in behind.advice


def test_a_receive_that_nobody_sends_names_the_peer(tmp_path: Path):
    pipe = [WORLD, ("1", "pp", [1, 3])]
    group = {"process_group": ("1", "pp")}
    ranks = {
        0: calls(None),
        2: calls(None),
        1: [*calls(None), message("nccl:send 0->1", 1, **group)],
        3: [*calls(None), message("nccl:recv 1<-0", 1, **group), message("nccl:recv 1<-0", 2, "started", **group)],
    }
    (fault,) = hang(tmp_path, ranks, pipe).faults
    assert (fault.cause, fault.look_at, fault.waiting) == ("no_peer", [1], [3])
    assert "rank 3 waits for rank 1, which has not sent" in fault.text


def test_both_ends_of_a_message_that_hang_are_the_network(tmp_path: Path):
    ranks = {0: [message("nccl:send 0->1", 1, "started")], 1: [message("nccl:recv 1<-0", 1, "started")]}
    (fault,) = hang(tmp_path, ranks, [("0", "default_pg", [0, 1])]).faults
    assert (fault.cause, fault.look_at) == ("stuck_together", [0, 1])


def test_ends_of_a_message_that_differ_in_size_are_told(tmp_path: Path):
    ranks = {
        0: [message("nccl:send 0->1", 1, "started")],
        1: [message("nccl:recv 1<-0", 1, "started", inputs=[[900]])],
    }
    (fault,) = hang(tmp_path, ranks, [("0", "default_pg", [0, 1])]).faults
    assert (fault.cause, fault.look_at) == ("differs", [0, 1])


def test_a_rank_that_came_much_later_is_told(tmp_path: Path):
    ranks = {rank: calls(entry(4, "started")) for rank in range(4)}
    ranks[1][-1]["time_created_ns"] += 90 * 10**9
    assert "rank 1 called it 90 s after the first" in hang(tmp_path, ranks).faults[0].advice


def test_a_rank_that_calls_the_same_from_another_line_is_told(tmp_path: Path):
    ranks = {rank: calls(entry(4, "started")) for rank in range(4)}
    ranks[3][-1]["frames"] = [{"name": "evaluate", "filename": "/home/me/eval.py", "line": 7}]
    assert "rank 3 called it at eval.py:7, others at train.py:104" in hang(tmp_path, ranks).faults[0].advice


def test_a_dump_without_entries_still_tells_how_far_its_rank_is(tmp_path: Path):
    def status(enqueued: int, started: int, completed: int) -> Dump:
        last = {"enqueued": str(enqueued), "started": str(started), "completed": str(completed)}
        whole = dump([], [WORLD])
        whole["pg_status"] = {"0": {f"last_{word}_collective": n for word, n in last.items()}}
        return whole

    for rank in range(4):
        as_json(tmp_path / f"rank_{rank}.json", status(4, 4, 3) if rank != 2 else status(3, 3, 3))
    (fault,) = traces.read(tmp_path).faults
    assert (fault.cause, fault.missing) == ("never_called", [2])


@pytest.mark.parametrize(
    "name", ["nccl_trace_rank_{}", "trace_{}", "dump.{}.pickle", "rank_{}_1721310065", "fr-rank{}.pkl"]
)
def test_the_rank_is_found_in_every_usual_name(tmp_path: Path, name: str):
    for rank in (0, 1, 3):
        as_pickle(tmp_path / name.format(rank), dump(calls(entry(4, "started")), [WORLD]))
    read = traces.read(tmp_path)
    assert read.ranks == [0, 1, 3]
    assert read.faults[0].look_at == [2]


def test_fields_that_earlier_releases_lack_are_not_needed(tmp_path: Path):
    ranks = {rank: calls(entry(4, "scheduled" if rank == 2 else "started")) for rank in range(4)}
    for entries in ranks.values():
        for each in entries:
            each["seq_id"] = each.pop("collective_seq_id")
            for name in ("retired", "input_dtypes", "output_dtypes", "timeout_ms", "is_p2p", "frames"):
                each.pop(name)
    (fault,) = hang(tmp_path, ranks, version="2.3").faults
    assert (fault.cause, fault.look_at) == ("not_started", [2])


@pytest.mark.parametrize("field", ["time_created_ns", "record_id", "collective_seq_id", "output_sizes"])
def test_a_call_whose_number_has_no_end_is_left_out_and_said(tmp_path: Path, field: str):
    """JSON of Python may hold Infinity, which no whole number is."""
    entries = calls(entry(4, "started"))
    entries[0 if field == "record_id" else 1][field] = [[float("inf")]] if field == "output_sizes" else float("inf")
    as_json(tmp_path / "trace_0", dump(entries, [WORLD]))
    read = traces.read(tmp_path / "trace_0")
    assert isinstance(read, HangReport)
    assert read.skipped == {"a call whose fields are not Flight Recorder's": 1}


def test_finished_jobs_blame_nobody(tmp_path: Path):
    told = hang(tmp_path, {rank: calls(None) for rank in range(4)})
    assert told.faults == []
    assert told.lines[0].startswith("no rank is behind")


# ---- the watchdog's own lines ----------------------------------------------------------------------------------------


LATE = "Watchdog caught collective operation timeout: "
FAILED = "failure detected by watchdog at work sequence id: "


def timeout(rank: int, seq: int, name: str = "ALLREDUCE") -> str:
    work = f"WorkNCCL(SeqNum={seq}, OpType={name}, NumelIn=1000, NumelOut=1000, Timeout(ms)=600000)"
    at = f"[rank{rank}]:[E718 15:41:05.1 ProcessGroupNCCL.cpp:616] [Rank {rank}] "
    return f"{at}{LATE}{work} ran for 600029 milliseconds before timing out.\n"


def progress(rank: int, enqueued: int, completed: int, old: bool = False) -> str:
    word = "NCCL work" if old else "work"
    at = f"[rank{rank}]:[E718 15:41:06.1 ProcessGroupNCCL.cpp:684] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    last = f"last enqueued {word}: {enqueued}, last completed {word}: {completed}"
    return f"{at}{FAILED}{enqueued} PG status: {last}\n"


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("prefix", ["", "worker-0: ", "2024-07-18T15:41:05.1Z stderr F ", "[default0]:"])
def test_a_watchdogs_log_names_who_never_called(tmp_path: Path, old: bool, prefix: str):
    text = "".join(
        [timeout(0, 4), timeout(1, 4), progress(0, 5, 3, old), progress(1, 4, 3, old), progress(2, 3, 3, old)]
    )
    path = tmp_path / "job.log"
    path.write_text("".join(prefix + line for line in text.splitlines(keepends=True)))
    told = traces.read(path)
    (fault,) = told.faults
    assert (fault.cause, fault.seq, fault.missing, fault.waiting) == ("never_called", 4, [2], [0, 1])
    assert "nccl:allreduce" in fault.text


def test_a_watchdogs_log_of_ranks_that_all_wait_says_so(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_text("".join(timeout(rank, 7, "BROADCAST") + progress(rank, 7, 6) for rank in range(4)))
    assert traces.read(path).faults[0].cause == "stuck_together"
    path.write_text("".join(timeout(rank, 7, "BROADCAST") for rank in (0, 1, 3)))
    assert traces.read(path).faults[0].no_dump == [2]


@pytest.mark.parametrize("cut", [("timeout: ", "Work"), ("=600000)", " ran"), ("OpType=ALLREDUCE, ", "Numel")])
def test_a_watchdogs_line_that_an_editor_has_cut_is_whole(tmp_path: Path, cut: tuple[str, str]):
    path = tmp_path / "job.log"
    whole = "".join(timeout(rank, 7) for rank in range(4))
    assert "".join(cut) in whole
    path.write_text(whole.replace("".join(cut), f"{cut[0].rstrip()} \n{cut[1].lstrip()}"))
    (fault,) = traces.read(path).faults
    assert (fault.cause, fault.seq) == ("stuck_together", 7)


def test_a_watchdog_that_is_itself_stuck_is_told_where_nothing_else_is(tmp_path: Path):
    """It was no format that is known."""
    path = tmp_path / "job.log"
    path.write_text(
        "[rank3]:[E914 10:00:00.1 ProcessGroupNCCL.cpp:1683] [PG ID 0 PG GUID 0(default_pg) Rank 3] ProcessGroupNCCL's "
        "watchdog got stuck for 480 seconds without making progress in monitoring enqueued collectives.\n"
    )
    told = traces.read(path)
    assert told.faults == []
    assert told.lines == ["rank 3: its watchdog itself was stuck for 480 s: a call of CUDA or NCCL"]


def pg_line(rank: int, group: int, work: int, enqueued: int, completed: int) -> str:
    """PyTorch 2.5: the timeout names no group, the line after it does."""
    head = (
        f"[rank{rank}]:[E321 02:07:08.4 ProcessGroupNCCL.cpp:1664] [PG {group} Rank {rank}] Exception (either an error "
    )
    numbers = f"last enqueued NCCL work: {enqueued}, last completed NCCL work: {completed}"
    return f"{head}or timeout) detected by watchdog at work: {work}, {numbers}.\n"


def test_a_timeout_that_names_no_group_is_of_the_group_whose_numbers_hold_it(tmp_path: Path):
    """Rank 3's own timeout is not in the log, only how far it is: it did call it."""
    path = tmp_path / "job.log"
    path.write_text(
        "".join(
            [*(timeout(rank, 1580) for rank in (0, 2, 4)), *(pg_line(r, 1, 1580, 1582, 1579) for r in (0, 2, 3, 4))]
        )
    )
    (fault,) = traces.read(path).faults
    assert (fault.cause, fault.group, fault.seq, fault.missing, fault.no_dump) == ("stuck_together", "1", 1580, [], [])
    path.write_text(timeout(1, 5) + pg_line(1, 3, 5, 5, 4))
    (fault,) = traces.read(path).faults
    assert (fault.group, fault.no_dump, fault.look_at) == ("3", [], [])
    assert "which other ranks are in the group is not told" in fault.text


def test_a_timeout_that_names_no_group_in_a_log_of_several_blames_nobody(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_text(timeout(0, 100) + timeout(1, 57, "ALLGATHER") + pg_line(1, 1, 57, 60, 56))
    told = traces.read(path)
    assert {fault.cause for fault in told.faults} == {"no_dump"}
    assert not any(fault.missing for fault in told.faults)
    assert any("not named in the log" in line for line in told.lines)


def test_a_rank_at_a_later_number_is_not_one_that_waits_here(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_text(timeout(0, 100) + timeout(1, 57, "ALLGATHER"))
    fault = traces.read(path).faults[0]
    assert (fault.cause, fault.look_at) == ("not_ended", [1])
    assert "rank 0 waits at a later one" in fault.text
    assert "of different groups" in fault.advice


def test_a_timeout_that_a_terminal_has_cut_in_two_is_read(tmp_path: Path):
    path = tmp_path / "job.log"
    whole = "".join(timeout(rank, 4) for rank in (0, 1, 3))
    path.write_text(whole.replace("OpType", "OpTy\npe"))
    (fault,) = traces.read(path).faults
    assert (fault.waiting, fault.no_dump) == ([0, 1, 3], [2])
    assert "1000 in, 1000 out" in fault.text


def test_a_timeout_of_a_release_that_numbers_no_calls_is_told(tmp_path: Path):
    path = tmp_path / "job.log"
    path.write_text(timeout(3, 9, "ALLGATHER").replace("SeqNum=9, ", ""))
    told = traces.read(path)
    assert told.faults == []
    assert "rank 3: nccl:allgather did not end in time" in told.lines


def test_the_command_prints_the_verdict_first(tmp_path: Path):
    hang(tmp_path, {rank: calls(entry(4, "scheduled" if rank == 2 else "started")) for rank in range(4)})
    done = CliRunner().invoke(cli, ["trace", str(tmp_path)])
    assert "rank 2 enqueued it and did not start it" in done.output.splitlines()[0]
    said = json.loads(CliRunner().invoke(cli, ["trace", str(tmp_path), "--json"]).stdout)
    assert said["faults"][0]["cause"] == "not_started"


def test_a_pickle_that_is_no_dump_is_one_error(tmp_path: Path):
    (tmp_path / "trace_0").write_bytes(pickle.dumps({"segments": []}))
    with pytest.raises(TraceError, match="Flight Recorder"):
        traces.read(tmp_path)


def test_an_end_that_is_told_late_does_not_hide_a_call_that_differs(tmp_path: Path):
    """Gloo's threads: rank 0 ended a later call, and not yet, by its dump, the one before."""
    before = [entry(1), entry(2, "started"), entry(3)]
    ranks = {rank: [entry(1), entry(2), entry(3), entry(4, "started")] for rank in range(1, 4)}
    ranks[0] = [*before, entry(4, "started", "nccl:broadcast")]
    (fault,) = hang(tmp_path, ranks).faults
    assert (fault.cause, fault.look_at, fault.differs_in) == ("differs", [0], "kind")


def test_what_never_ends_is_told_even_where_a_later_call_did(tmp_path: Path):
    ranks = {rank: [entry(1), entry(2, "started" if rank == 1 else "completed"), entry(3)] for rank in range(4)}
    (fault,) = hang(tmp_path, ranks).faults
    assert (fault.cause, fault.look_at) == ("not_ended", [1])


def test_ended_calls_of_some_ranks_do_not_speak_for_a_rank_without_a_dump(tmp_path: Path):
    told = hang(tmp_path, {rank: calls(None) for rank in range(3)})
    assert not told.faults
    assert told.lines[1].startswith("no dump of rank 3, of which nothing is known")


def test_a_rank_that_ended_fewer_calls_is_named_though_all_of_its_own_ended(tmp_path: Path):
    """It was told that every rank called the same."""
    told = hang(tmp_path, {rank: calls(None, 2 if rank == 2 else 3) for rank in range(4)})
    assert "the last of rank 2 is 2 where others' is 3" in told.lines[0]
    assert "called the same" not in " ".join(told.lines)


def test_dumps_without_calls_do_not_say_that_all_called_the_same(tmp_path: Path):
    told = hang(tmp_path, {rank: [] for rank in range(4)})
    assert told.lines == ["the dumps hold no calls, so nothing of them tells who waits for whom"]


def test_a_json_dump_with_a_mark_before_it_is_read(tmp_path: Path):
    path = tmp_path / "dump_0.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(dump(calls(None), [("0", "default_pg", [0])])).encode())
    assert isinstance(traces.read(path), HangReport)


def test_a_rank_beyond_every_job_is_refused_before_it_fills_the_memory(tmp_path: Path):
    """A dump whose name ends in its date: a set of as many ranks was made."""
    said = dump(calls(entry(4, "started")), [])
    as_pickle(tmp_path / "dump_2025119", said)
    as_pickle(tmp_path / "dump_999999999", said)
    with pytest.raises(TraceError, match="rank 999999999 is told of, and no job has more than 10,000,000 ranks"):
        traces.read(tmp_path)
