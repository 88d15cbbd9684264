"""A rank that skipped a collective calls what others call one later: it is told as missing one, not as of another size.

The dumps are Flight Recorder's JSON, as PyTorch documents its fields.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from clustersim.app.cli import cli
from clustersim.files import traces

ODD = 5
Step = tuple[int, str, int]
"""A line of code, and the collective and elements that it calls there."""
PROGRAM: list[Step] = [(100 + k, "all_reduce", 64 if k == 15 else 1000 * k) for k in range(1, 22)]


def dumped(folder: Path, calls: dict[int, list[Step]], hangs_from: int) -> Path:
    """A dump of each rank, whose calls from a number on have not ended."""
    for rank, steps in calls.items():
        entries = []
        for seq, (line, kind, elements) in enumerate(steps, 1):
            done = seq < hangs_from
            created = 10**18 + seq * 10**8
            entries.append(
                {
                    "record_id": seq,
                    "pg_id": 0,
                    "process_group": ["0", "default_pg"],
                    "collective_seq_id": seq,
                    "p2p_seq_id": 0,
                    "op_id": seq,
                    "profiling_name": f"nccl:{kind}",
                    "time_created_ns": created,
                    "time_discovered_started_ns": created + 1000 if seq <= hangs_from else None,
                    "time_discovered_completed_ns": created + 9000 if done else None,
                    "input_sizes": [[elements]],
                    "input_dtypes": ["Float"],
                    "output_sizes": [[elements]],
                    "output_dtypes": ["Float"],
                    "state": "completed" if done else "started" if seq == hangs_from else "scheduled",
                    "retired": done,
                    "timeout_ms": 600000,
                    "is_p2p": False,
                    "frames": [{"name": "step", "filename": "train.py", "line": line}],
                }
            )
        members = {"0": {"name": "0", "desc": "default_pg", "ranks": str(sorted(calls))}}
        dump = {"version": "2.10", "pg_config": members, "pg_status": {}, "entries": entries}
        (folder / f"nccl_trace_rank_{rank}.json").write_text(json.dumps(dump))
    return folder


def of_odd(folder: Path, odd_steps: list[Step], usual: list[Step] = PROGRAM, hangs_from: int = 15) -> Path:
    return dumped(folder, {rank: odd_steps if rank == ODD else usual for rank in range(8)}, hangs_from)


def test_a_rank_that_skipped_a_collective_is_told_as_missing_it(tmp_path: Path):
    """Its next bucket stood beside the others' one, and the answer was another size: look at shapes and padding."""
    folder = of_odd(tmp_path, PROGRAM[:14] + PROGRAM[15:])
    (fault,) = traces.read(sorted(folder.iterdir())).faults
    assert (fault.cause, fault.differs_in, fault.look_at, fault.seq) == ("differs", "skipped", [ODD], 15)
    assert "rank 5 skipped it: what it calls from 15 on is what others call from 16 on" in fault.text
    answer = json.loads(CliRunner().invoke(cli, ["diagnose", str(folder), "--json"]).stdout)
    text = CliRunner().invoke(cli, ["diagnose", str(folder)]).stdout
    assert text.startswith("diagnosis: missing_call of rank 5"), answer


@pytest.mark.parametrize(
    ("odd_steps", "how"),
    [
        ([*PROGRAM[:14], (999, "broadcast", 8), *PROGRAM[14:]], "extra"),
        ([*PROGRAM[:14], (115, "all_reduce", 63), *PROGRAM[15:]], "size"),
        ([*PROGRAM[:14], (115, "all_gather", 64), *PROGRAM[15:]], "kind"),
        ([*PROGRAM[:14], PROGRAM[15], PROGRAM[14], *PROGRAM[16:]], "order"),
        ([*PROGRAM[:14], PROGRAM[15], PROGRAM[14]], "order"),
    ],
)
def test_calls_that_differ_in_themselves_or_in_order_are_not_told_as_skipped(tmp_path: Path, odd_steps, how):
    (fault,) = traces.read(sorted(of_odd(tmp_path, odd_steps).iterdir())).faults
    assert (fault.differs_in, fault.look_at) == (how, [ODD])


def test_a_call_of_another_line_is_not_the_others_next_one(tmp_path: Path):
    """It has the size of what others call next and comes from elsewhere: nothing says that it skipped anything."""
    odd_steps = [*PROGRAM[:14], (700, "all_reduce", 16000)]
    (fault,) = traces.read(sorted(of_odd(tmp_path, odd_steps).iterdir())).faults
    assert fault.differs_in == "size"


def test_of_calls_that_alternate_one_that_is_skipped_is_no_change_of_order(tmp_path: Path):
    usual = [(10 + k % 2, "all_reduce", 100 + k % 2) for k in range(20)]
    (fault,) = traces.read(sorted(of_odd(tmp_path, usual[:14] + usual[15:], usual).iterdir())).faults
    assert fault.differs_in == "skipped"


def test_what_dumps_say_names_both_calls_that_differ(tmp_path: Path):
    """The sentence ended before the second one, which is the one to look at."""
    odd_steps = [*PROGRAM[:14], (115, "all_reduce", 63), *PROGRAM[15:]]
    text = CliRunner().invoke(cli, ["diagnose", str(of_odd(tmp_path, odd_steps))]).stdout
    assert "rank 5: nccl:all_reduce of [[63]]" in text
