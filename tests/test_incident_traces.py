"""What a run would have left behind is read back by the readers of such files, and says of it what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clustersim import scenario as scenarios
from clustersim.core.errors import TraceError
from clustersim.core.timeline import Timeline, step_ends
from clustersim.engine.hang import Hang
from clustersim.files import traces
from clustersim.files.traces import (
    Samples,
    collective_writing,
    ib_ports,
    job_logs,
    link_counters,
    profile_writing,
    recorder_writing,
)
from clustersim.files.traces.job_logs import JobNics
from clustersim.files.traces.told import Cabling, GpuCounters, HangReport, LinkCounters, NcclLog, NicPort, TrainingLog
from clustersim.scenario.file.incident_table import KINDS

BASE = "ddp_gpt2_medium_2x4_v100"
ORIGIN = 1.8e9
HOSTS = ["node0"] * 4 + ["node1"] * 4
CAUSES = {
    "dead_link": ("stuck_together", [], ""),
    "dead_rank": ("no_dump", [4, 5, 6, 7], ""),
    "stopped_rank": ("no_dump", [5], ""),
    "stuck_kernel": ("not_started", [5], ""),
    "missing_call": ("never_called", [5], ""),
    "other_kind": ("differs", [5], "kind"),
    "other_size": ("differs", [5], "size"),
    "other_type": ("differs", [5], "type"),
    "other_order": ("differs", [5], "order"),
    "other_group": ("never_called", [5], ""),
    "uneven_batches": ("differs", [5], "kind"),
    "stuck_message": ("stuck_together", [5, 9], ""),
}
PIPELINE = {"cluster.nodes": 2, "parallel.pp": 4, "parallel.microbatches": 4}


def hang(kind: str) -> Hang:
    where: dict[str, Any] = {"link": "node0/nic0"} if KINDS[kind].where == "link" else {"rank": 5}
    at = {"uneven_batches": "0.2 s", "stuck_message": "0.3 s"}.get(kind, "0.42 s")
    name, more = ("1f1b_gpt2_xl_1x8_a100", PIPELINE) if kind == "stuck_message" else (BASE, {})
    answer = scenarios.load(name, {"run.steps": 3, **more, "incident": [{"kind": kind, "at": at, **where}]}).hang()
    assert answer is not None
    return answer


def read_lines(path: Path, lines: Any) -> Any:
    path.write_text("\n".join(lines) + "\n")
    return traces.read(path)


@pytest.fixture(scope="module")
def late_batches() -> Timeline:
    late = {"kind": "slow_data", "rank": 3, "pause": "50 ms", "at": "0.4 s"}
    return scenarios.load(BASE, {"run.steps": 5, "incident": [late]}).run().timeline


def test_every_kind_that_hangs_is_in_this_contract():
    assert set(CAUSES) == {name for name, kind in KINDS.items() if kind.hangs}


@pytest.mark.parametrize("kind", CAUSES)
@pytest.mark.parametrize("pickled", [False, True], ids=["json", "pickle"])
def test_dumps_say_what_happened(tmp_path, kind, pickled):
    answer = hang(kind)
    told = traces.read(recorder_writing.write_dumps(answer, tmp_path, range(answer.world_size), ORIGIN, pickled))
    assert isinstance(told, HangReport)
    fault = told.faults[0]
    assert (fault.cause, fault.look_at, fault.differs_in) == CAUSES[kind]
    assert not told.skipped


def test_a_dump_has_the_fields_of_torch(tmp_path):
    """Those that torch 2.13 writes as JSON, for a job with NCCL."""
    fields = """collective_seq_id input_dtypes input_sizes is_p2p op_id output_dtypes output_sizes p2p_seq_id pg_id
    process_group profiling_name record_id retired state time_created_ns time_discovered_completed_ns
    time_discovered_started_ns timeout_ms"""
    dump = recorder_writing.dump_of(hang("stuck_kernel"), 5, ORIGIN)
    assert {"comm_lib_version", "entries", "nccl_comm_state", "pg_config", "pg_status", "version"} <= dump.keys()
    assert all(set(entry) == set(fields.split()) for entry in dump["entries"])
    assert dump["pg_config"] == {"0": {"desc": "default_pg", "name": "0", "ranks": "[0, 1, 2, 3, 4, 5, 6, 7]"}}


def test_torch_itself_writes_these_fields():
    """The reference: a process group of this machine's torch, of one rank."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    import json
    import os
    import subprocess
    import sys

    program = """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
from torch._C._distributed_c10d import _dump_fr_trace_json
print("DUMP" + _dump_fr_trace_json(True, False).decode())
"""
    env = {**os.environ, "TORCH_FR_BUFFER_SIZE": "10"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    if "DUMP" not in done.stdout:
        pytest.skip(f"torch {torch.__version__} has no recorder for Gloo: {done.stderr[-80:]}")
    (entry, *_) = json.loads(done.stdout.partition("DUMP")[2])["entries"]
    ours = recorder_writing.dump_of(hang("stuck_kernel"), 5, ORIGIN)["entries"][0]
    assert set(ours) <= set(entry)
    assert all(type(entry[key]) in (type(ours[key]), int) for key in ours)


@pytest.mark.parametrize("kind", CAUSES)
def test_watchdogs_say_who_timed_out_and_who_was_only_told(tmp_path, kind):
    answer = hang(kind)
    told = read_lines(tmp_path / "job.log", job_logs.watchdog_lines(answer, ORIGIN))
    assert isinstance(told, HangReport)
    assert set(told.ranks) == {wait.rank for wait in answer.waits}
    assert told.told_to_dump == ([5] if kind == "missing_call" else [])


@pytest.mark.parametrize("kind", ["dead_rank", "missing_call"])
def test_launchers_say_whose_process_ended_first(tmp_path, kind):
    logs = job_logs.launcher_lines(hang(kind), HOSTS, ORIGIN)
    told = {host: read_lines(tmp_path / f"{host}.log", lines) for host, lines in logs.items()}
    ended = {e.rank: e.code for report in told.values() for e in report.exits if e.first}
    if kind == "dead_rank":
        assert ended[5] == -9
        assert told["node1"].lines == ["rank 5 on node1 ended with exit code -9, the first of its machine"]
    else:
        assert 5 not in ended
        assert set(ended.values()) == {-6}


def test_a_nccl_log_says_who_is_where_and_which_port_went_down(tmp_path):
    devices = {"node0": ["mlx5_0", "mlx5_1"], "node1": ["mlx5_0", "mlx5_1"]}
    told = read_lines(tmp_path / "nccl.log", job_logs.nccl_lines(HOSTS, JobNics(devices, "node1/mlx5_1")))
    assert isinstance(told, NcclLog)
    assert (told.ranks, told.nodes, told.hosts[5]) == (8, 2, "node1")
    assert [(cause.kind, cause.place) for cause in told.causes] == [("port_down", "node1/mlx5_1")]
    assert told.nics == devices
    assert read_lines(tmp_path / "well.log", job_logs.nccl_lines(HOSTS, JobNics(devices))).causes == []


@pytest.mark.parametrize(
    ("nics", "kind", "place"),
    [({"far": ("node1/mlx5_1",)}, "far_nic", "node1/mlx5_1"), ({"without_gdr": ("node1",)}, "gdr_off", "node1")],
)
def test_a_nccl_log_says_which_nic_or_machine_has_no_gpudirect(tmp_path, nics, kind, place):
    devices = {host: ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"] for host in ("node0", "node1")}
    told = read_lines(tmp_path / "nccl.log", job_logs.nccl_lines(HOSTS, JobNics(devices, **nics)))
    assert [(cause.kind, cause.place) for cause in told.causes] == [(kind, place)]


def test_a_nic_that_gave_up_is_no_port_that_went_down(tmp_path):
    lines = job_logs.nccl_lines(HOSTS, JobNics({"node0": [], "node1": []}, "node1/mlx5_1"))
    lost = [line for line in lines if "port error" not in line]
    assert [cause.kind for cause in read_lines(tmp_path / "nccl.log", lost).causes] == ["peer_lost"]


def test_profiles_of_hosts_with_their_own_clocks_are_one_run(tmp_path, late_batches):
    skew = {"node0": 0.0, "node1": -0.004}
    paths = profile_writing.write_profiles(late_batches, tmp_path, range(8), ORIGIN, HOSTS, skew)
    run = traces.read(paths)
    assert isinstance(run, Timeline)
    assert run.stats["clock_offset_s"] == pytest.approx(0.004, abs=1e-4)
    ends, ours = step_ends(run), step_ends(late_batches)
    assert np.allclose(np.diff(ends.max(axis=1)), np.diff(ours.max(axis=1)), atol=1e-3)
    transfers = [op.detail["transfer_s"] for op in run.ops if op.kind == "all_reduce"]
    assert len(transfers) == sum(op.kind == "all_reduce" for op in late_batches.ops)
    spans = late_batches.spans([0])
    all_reduce = np.array([op.kind == "all_reduce" for op in late_batches.ops])[spans["op"]]
    assert sum(transfers) == pytest.approx((spans["end"] - spans["start"])[all_reduce].sum(), rel=1e-3)


def test_step_logs_have_the_played_steps_and_who_waits_for_a_batch(tmp_path, late_batches):
    took = np.diff(step_ends(late_batches).max(axis=1), prepend=0.0)
    told = read_lines(tmp_path / "megatron.log", job_logs.megatron_steps(late_batches, 5, ORIGIN))
    assert isinstance(told, TrainingLog)
    assert [seconds for _, seconds in told.times] == pytest.approx(took.tolist(), abs=1e-4)
    batches = next(part for part in told.parts if part.name == "batch-generator")
    assert max(most - least for least, most in batches.course) == pytest.approx(0.05, rel=0.1)
    titan = read_lines(tmp_path / "titan.log", job_logs.torchtitan_steps(late_batches, 5, ORIGIN))
    assert [seconds for _, seconds in titan.times] == pytest.approx(took[1:].tolist(), abs=2e-3)


def test_step_logs_say_when_checkpoints_were_saved(tmp_path):
    saving = {"kind": "blocking_checkpoint", "pause": "50 ms", "interval": 2}
    run = scenarios.load(BASE, {"run.steps": 5, "incident": [saving]}).run().timeline
    took = np.diff(step_ends(run).max(axis=1), prepend=0.0)
    for lines, within in ((job_logs.megatron_steps, 1e-4), (job_logs.torchtitan_steps, 6e-3)):
        told = read_lines(tmp_path / "steps.log", lines(run, 5, ORIGIN, saves=True))
        saves = next(part for part in told.parts if part.name == "save-checkpoint")
        assert [most for _, most in saves.course] == pytest.approx([0.05] * 3, abs=within)
    megatron = read_lines(tmp_path / "steps.log", job_logs.megatron_steps(run, 5, ORIGIN, saves=True))
    paused = np.array([0.05, 0.0, 0.05, 0.0, 0.05])  # Megatron-LM stops its timer of iterations while it saves
    assert [seconds for _, seconds in megatron.times] == pytest.approx((took - paused).tolist(), abs=1e-4)


def test_the_inspector_says_which_rank_came_last_and_how_long_the_transfer_took(tmp_path, late_batches):
    paths = collective_writing.write_inspected(late_batches, tmp_path, range(8), HOSTS, 0.01, ORIGIN)
    told = traces.read(paths)
    assert isinstance(told, Samples)
    assert not told.skipped
    late = [row for row in told.rows if row.skew > 0.02]
    assert late
    assert {row.last for row in late} == {3}
    played = {op.nbytes for op in late_batches.ops if op.kind == "all_reduce"}
    assert {row.nbytes for row in told.rows} <= played


def test_a_table_of_nccl_tests_has_its_rows(tmp_path):
    rows = [(2**20, 1e-4), (2**29, 0.05)]
    told = read_lines(tmp_path / "now.log", collective_writing.nccl_tests_lines("all_reduce", HOSTS, "A100", rows))
    assert [(row.nbytes, row.seconds, row.ranks, row.nodes) for row in told.rows] == [
        (float(size), pytest.approx(seconds, rel=1e-3), 8, 2) for size, seconds in rows
    ]


def test_cables_say_which_nic_is_on_another_switch_than_the_others_of_its_number(tmp_path):
    right = {f"node{n}/mlx5_{i}": f"leaf{i}" for n in range(3) for i in range(2)}
    told = traces.read(ib_ports.write_cabling(right, tmp_path / "cables"))
    assert isinstance(told, Cabling)
    assert (told.switches, told.odd) == (right, [])
    wrong = right | {"node1/mlx5_0": "leaf1", "node1/mlx5_1": "leaf0"}
    assert traces.read(ib_ports.write_cabling(wrong, tmp_path / "cables")).odd == ["node1/mlx5_0", "node1/mlx5_1"]
    two = {name: switch for name, switch in wrong.items() if name[4] in "01"}
    assert traces.read(ib_ports.write_cabling(two, tmp_path / "cables")).odd == []  # of two that differ none is most


def test_counters_of_gpus_name_the_slow_the_hot_and_the_mended(tmp_path):
    gpus = [GpuCounters("node0", i, 1410.0, 60.0) for i in range(3)]
    gpus += [GpuCounters("node1", 0, 1100.0, 88.0), GpuCounters("node1", 1, 1410.0, 61.0, 1, 63)]
    told = traces.read(link_counters.write_gpus(gpus, tmp_path))
    assert isinstance(told, LinkCounters)
    assert told.gpus == gpus
    assert told.lines == [
        "node1/gpu0 runs at 1100 MHz and 88 deg C",
        "node1/gpu1 has remapped 1 row(s) of its memory; its last Xid is 63",
    ]
    assert traces.read(link_counters.write_gpus(gpus[:3], tmp_path)[:1]).lines == [
        "all 3 GPUs run alike, and none has mended its memory"
    ]


PORT = NicPort("node0", "mlx5_0", 1, link_counters.ACTIVE, 50e9, 0, 1e9, 1e9)


def test_counters_name_the_port_that_is_down_slow_or_flapping(tmp_path):
    def said(**odd: Any) -> LinkCounters:
        odd_port = {name: odd.get(name, getattr(PORT, name)) for name in ("state", "rate", "downs")}
        ports = [
            NicPort(
                host, device, 1, **(odd_port if (host, device) == ("node1", "mlx5_2") else plain), sent=1, received=2
            )
            for plain in [{"state": PORT.state, "rate": PORT.rate, "downs": 0}]
            for host in ("node0", "node1")
            for device in ("mlx5_0", "mlx5_1", "mlx5_2")
        ]
        told = traces.read(link_counters.write_counters(ports, tmp_path))
        assert isinstance(told, LinkCounters)
        assert list(told.ports) == ports
        return told

    assert said().lines == ["all 6 ports are up, at one rate, and none went down"]
    assert said(state=link_counters.DOWN).lines[0].startswith("node1/mlx5_2 is down")
    assert said(downs=3).lines[0].startswith("node1/mlx5_2: its link went down 3 time(s)")
    assert "node1/mlx5_2 runs at 12.5 GB/s, most at 50 GB/s" in said(rate=12.5e9).lines[0]


def test_a_page_without_a_ports_rate_is_an_error(tmp_path):
    path = tmp_path / "node0.prom"
    path.write_text('node_infiniband_state_id{device="mlx5_0",port="1"} 4\n')
    with pytest.raises(TraceError, match="mlx5_0:1 has no state_id or no rate_bytes_per_second"):
        traces.read(path)
