"""Capture runs for real on Gloo, and survives: a rank that dies, a full disk, sizes that do not fit, a short budget."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import CAPTURE_SECONDS, Captured

from clustersim.calibrate.capture import collectives, slurm, steps, world
from clustersim.calibrate.capture.parts import Budget, CaptureFile, write_whole
from clustersim.calibrate.capture.world import repeats_for
from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.core.timeline import Timeline
from clustersim.files import traces
from clustersim.files.traces import Samples, captured
from clustersim.files.traces.digest import of_run

torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch (the capture extra)")
MODULE = "clustersim.calibrate.capture"


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---- for real -------------------------------------------------------------------------------------------------------


WHOLE = pytest.mark.parametrize("run", [2], indirect=True)


@pytest.fixture(params=[2, 4])
def run(request: pytest.FixtureRequest, captured_by: Callable[[int], Captured]) -> Captured:
    """A whole capture of 2 ranks of this machine, and the collectives of 4."""
    return captured_by(request.param)


@torch
def test_every_kind_of_collective_is_measured_and_right(run):
    found = traces.read(run.folder)
    assert isinstance(found, Samples)
    assert {row.kind for row in found.rows if row.ranks == run.ranks} == set(collectives.KINDS)
    assert not found.skipped  # no wrong result, no impossible bandwidth
    measured = [row for row in rows(run.folder / "collectives.jsonl") if "kind" in row]
    checked = {row["kind"] for row in measured if row["#wrong"] == 0}
    assert checked >= {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "scatter"}
    for row in measured:
        assert 0 < row["time_min"] <= row["time"] <= row["time_max"]
        assert len(row["rank_times"]) == run.ranks


@torch
def test_groups_that_run_at_once_are_kept_apart_from_groups_alone(run):
    found = traces.read(run.folder)
    assert isinstance(found, Samples)
    assert {row.at_once for row in found.rows} == {1, 2}
    if run.ranks == 4:
        names = {row["layout"] for row in rows(run.folder / "collectives.jsonl") if "layout" in row}
        assert {"one half", "every half"} <= names


@torch
@WHOLE
def test_compute_and_steps_are_measured_and_what_was_not_is_said(run):
    compute = rows(run.folder / "compute.jsonl")
    steps = rows(run.folder / "steps.jsonl")
    assert {"gemm", "attention", "layer_norm", "launch", "host_to_host"} <= {row.get("op") for row in compute}
    assert all(row["time"] > 0 for row in compute if "time" in row)
    modes = {row["mode"]: row for row in steps[1:]}
    assert "GPU" in modes["data_parallel"]["skipped"] or "budget" in modes["data_parallel"]["skipped"]
    ran = {mode for mode, row in modes.items() if "step_time" in row}
    assert {"single", "ddp"} <= ran
    for mode in ran:
        assert len(list((run.folder / "traces" / mode).glob("rank*.json.gz"))) == run.ranks


@torch
@WHOLE
def test_the_profiles_of_a_step_are_joined_over_its_ranks(run):
    found = traces.read(run.folder / "traces" / "ddp")
    assert isinstance(found, Timeline)
    assert found.world_size == run.ranks
    said = of_run(found)
    parameters = next(row["parameters"] for row in rows(run.folder / "steps.jsonl") if row.get("mode") == "ddp")
    reduced = sum(row.count * row.nbytes for row in said.collectives if row.kind == "all_reduce")
    assert reduced == 2 * 4 * parameters  # two profiled steps of fp32 gradients
    assert not said.skipped
    assert all(0 < share < 1 for share in said.compute_share)


@torch
def test_the_budget_is_kept_and_the_machine_described(run):
    measured = [row for row in rows(run.folder / "collectives.jsonl") if "kind" in row]
    assert 0 < sum(row["time"] * 1e-6 * row["iterations"] for row in measured) < CAPTURE_SECONDS[run.ranks]
    said = json.loads((run.folder / "provenance.json").read_text())
    (machine,) = said["machines"]
    assert machine["versions"]["torch"]
    assert machine["cores"] >= 1
    assert machine["memory"] > 2**30
    assert all(
        name.split("_")[0] + "_"
        in {"NCCL_", "GLOO_", "OMP_", "MKL_", "TORCH_", "PYTORCH_", "CUDA_", "UCX_", "FI_", "OFI_", "KMP_"}
        for name in machine["settings"]
    )
    assert "collectives 1/" in run.said
    assert not list(run.folder.glob("*.partial"))


# ---- what goes wrong ------------------------------------------------------------------------------------------------


def start_ranks(folder: Path, n: int, *words: str) -> list[subprocess.Popen[str]]:
    """Ranks without a launcher that would restart or stop them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", MODULE, "--out", str(folder), "--device", "cpu", *words]
    said = {"WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            command, env={**os.environ, **said, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(n)
    ]


@torch
def test_a_rank_that_dies_leaves_what_was_measured_readable(tmp_path):
    folder = tmp_path / "out"
    first, second = start_ranks(folder, 2, "--budget", "5min", "--largest", "1M", "--parts", "collectives")
    partial = folder / "collectives.jsonl.partial"
    end = time.monotonic() + 90
    while time.monotonic() < end and not (partial.exists() and len(partial.read_text().splitlines()) > 5):
        time.sleep(0.2)
    second.send_signal(signal.SIGKILL)
    _, said = first.communicate(timeout=150)
    assert second.wait() == -signal.SIGKILL
    assert first.returncode == 2
    assert "error: rank 0" in said
    found = traces.read(folder)
    assert isinstance(found, Samples)
    assert len(found) >= 4
    assert any("before this part was finished" in note for note in found.notes)


@torch
def test_an_interrupted_run_leaves_what_was_measured_readable(tmp_path):
    folder = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "clustersim",
        "capture",
        "--out",
        str(folder),
        "--nproc-per-node",
        "2",
        "--device",
        "cpu",
        "--budget",
        "5min",
        "--largest",
        "1M",
        "--parts",
        "collectives",
    ]
    run = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    partial = folder / "collectives.jsonl.partial"
    end = time.monotonic() + 120
    while time.monotonic() < end and not (partial.exists() and len(partial.read_text().splitlines()) > 5):
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    assert f"interrupted; what was measured before is in {folder}" in said
    found = traces.read(folder)
    assert isinstance(found, Samples)
    assert len(found) >= 4
    assert any("before this part was finished" in note for note in found.notes)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error_that_says_what_remains(tmp_path):
    (tmp_path / "p.jsonl.partial").symlink_to("/dev/full")
    with pytest.raises(TraceError, match="No space left"):
        CaptureFile(tmp_path, "p", {})
    with pytest.raises(TraceError, match="cannot be written"):
        write_whole(tmp_path / "p.jsonl.partial" / "x", b"")


def test_a_part_gets_its_name_when_it_is_whole(tmp_path):
    part = CaptureFile(tmp_path, "collectives", {"backend": "gloo"})
    part.write({"skipped": "x"})
    assert [p.name for p in tmp_path.iterdir()] == ["collectives.jsonl.partial"]
    part.done()
    assert [p.name for p in tmp_path.iterdir()] == ["collectives.jsonl"]
    assert captured.lines(tmp_path / "collectives.jsonl")[0][1] == {"skipped": "x"}


def test_an_interrupted_line_is_counted_and_a_newer_layout_refused(tmp_path):
    path = tmp_path / "collectives.jsonl.partial"
    row = {
        "kind": "all_reduce",
        "size": 4096,
        "type": "float",
        "redop": "sum",
        "time": 10.0,
        "time_min": 9.0,
        "ranks": 2,
        "nodes": 1,
        "groups_at_once": 1,
        "iterations": 5,
        "layout": "world",
        "busbw": 0.4096,
        "#wrong": 0,
    }
    lines = [json.dumps({"clustersim_capture": 1, "part": "collectives"}), json.dumps(row), json.dumps(row)]
    path.write_text("\n".join(lines)[:-20])
    found = traces.read(path)
    assert isinstance(found, Samples)
    assert (len(found), found.skipped) == (1, {"a line that is cut off": 1})
    assert (found.rows[0].seconds, found.rows[0].fastest) == pytest.approx((10e-6, 9e-6))
    path.write_text("\n".join([lines[0].replace("1", "9", 1), *lines[1:]]))
    with pytest.raises(TraceError, match="layout 9"):
        traces.read(path)


@torch
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--budget", "soon"), "cannot read 'soon' as a time"),
        (("--parts", "colectives"), "no part 'colectives'"),
        (("--backend", "nccl"), "nccl needs --device cuda"),
        (("--largest", "big"), "cannot read 'big'"),
    ],
)
def test_what_cannot_be_measured_is_one_line(tmp_path, words, message):
    command = [sys.executable, "-m", MODULE, "--out", str(tmp_path / "o"), "--device", "cpu", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# ---- decisions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "local"), [(2, 2), (4, 4), (4, 2), (16, 8), (4, 1)])
def test_layouts_are_nodes_and_rails_or_halves_and_no_rank_is_twice_in_one(size, local):
    found = {layout.name: layout for layout in collectives.layouts(size, local)}
    for layout in found.values():
        members = [rank for group in layout.groups for rank in group]
        assert len(members) == len(set(members))
        assert set(members) <= set(range(size))
        assert len({len(group) for group in layout.groups}) == 1
    if size > local > 1:
        assert found["every rail"].groups[1] == tuple(range(1, size, local))
        assert found["every node"].groups[1] == tuple(range(local, 2 * local))


def test_repeats_fill_the_time_within_bounds():
    assert repeats_for(1e-3, 0.1) == 100
    assert repeats_for(1.0, 0.1) == 2
    assert repeats_for(1e-9, 1.0) == 200


def test_a_budget_shares_what_is_left():
    budget = Budget(10.0)
    assert 2.4 < budget.share(4) <= 2.5
    assert Budget(0.0).left == 0.0


# ---- GPUs, as far as they can be faked ------------------------------------------------------------------------------


class FakeTorch(SimpleNamespace):
    """As much of torch as joining a world touches: so many cards, and what was asked of torch.distributed."""

    def __init__(self, cards: int) -> None:
        self.asked: dict[str, Any] = {}
        cuda = SimpleNamespace(
            device_count=lambda: cards, is_available=lambda: cards > 0, set_device=lambda i: self.asked.update(card=i)
        )
        dist = SimpleNamespace(
            init_process_group=lambda backend, timeout: self.asked.update(
                backend=backend, timeout=timeout, env={k: v for k, v in os.environ.items() if k.startswith("NCCL_")}
            ),
            new_group=lambda backend, timeout: self.asked.update(control=backend, patience=timeout) or "control",
        )
        super().__init__(
            cuda=cuda, distributed=dist, device=lambda kind, index=0: SimpleNamespace(type=kind, index=index)
        )


def join(monkeypatch: pytest.MonkeyPatch, cards: int, local: int, *, share: bool) -> tuple[world.World, FakeTorch]:
    fake = FakeTorch(cards)
    monkeypatch.setitem(sys.modules, "torch", fake)
    for name, value in {"RANK": local, "LOCAL_RANK": local, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("NCCL_HOSTID", *world.SHARED_CARD):
        monkeypatch.setenv(name, "")  # restored after the test
    return world.join_world("nccl", "cuda", share, patience=600.0), fake


def test_ranks_that_share_a_card_look_like_two_hosts_to_nccl(monkeypatch):
    names = set()
    for local in (0, 1):
        joined, fake = join(monkeypatch, 1, local, share=True)
        assert (joined.device.index, fake.asked["card"], fake.asked["backend"]) == (0, 0, "nccl")
        assert {k: fake.asked["env"][k] for k in world.SHARED_CARD} == world.SHARED_CARD
        names.add(fake.asked["env"]["NCCL_HOSTID"])
    assert len(names) == 2
    with pytest.raises(ClusterSimError, match=r"2 ranks on 1 GPU\(s\).*--share-gpu"):
        join(monkeypatch, 1, 1, share=False)
    with pytest.raises(ClusterSimError, match="sees no GPU"):
        join(monkeypatch, 0, 0, share=False)


def test_ranks_with_a_card_each_wait_as_long_as_the_budget_for_the_one_that_measures_alone(monkeypatch):
    joined, fake = join(monkeypatch, 2, 1, share=False)
    assert joined.device.index == 1
    assert not fake.asked["env"]["NCCL_HOSTID"]
    assert fake.asked["patience"].total_seconds() >= 600 + fake.asked["timeout"].total_seconds()


def alone(rank: int = 0, others: str = "") -> Any:
    """A world of two on GPUs, whose other rank has this to say wherever ranks agree."""
    torch = SimpleNamespace(
        cuda=SimpleNamespace(device_count=lambda: 2),
        nn=SimpleNamespace(DataParallel=lambda model: model),
    )
    return SimpleNamespace(
        torch=torch,
        rank=rank,
        size=2,
        on_gpu=True,
        device=None,
        sync=lambda: None,
        gather=lambda mine: [mine, others],
        told=lambda value: value,
    )


def test_data_parallel_is_one_process_with_every_card(monkeypatch):
    fed: list[Any] = []
    tokens = SimpleNamespace(repeat=lambda *times: times)
    monkeypatch.setattr(steps.gpt, "build", lambda *_: "model")
    monkeypatch.setattr(steps, "_plain", lambda world, model, batch: lambda: fed.append((model, batch)))
    steps.data_parallel(alone(0), steps.gpt.ON_GPU, tokens)()
    assert fed == [("model", (2, 1))]  # a micro-batch for each card
    assert steps.data_parallel(alone(1), steps.gpt.ON_GPU, tokens)() is None
    assert len(fed) == 1


@pytest.mark.parametrize(("mine", "others"), [("out of memory", ""), ("", "out of memory")])
def test_a_mode_that_fails_on_one_rank_is_skipped_on_all(mine, others, tmp_path):
    def build(*_: Any) -> Any:
        if mine:
            raise RuntimeError(f"{mine}\nat a long stack")
        return lambda: None

    row = steps._mode(alone(others=others), build, steps.gpt.ON_CPU, None, tmp_path, 1.0)
    assert row == {"skipped": "out of memory"}


def test_a_trace_that_cannot_be_written_costs_the_trace_alone():
    def full() -> None:
        raise OSError(28, "No space left on device")

    made, problem = steps.agreed(alone(), steps.FAILURES, full)
    assert made is None
    assert "No space left" in problem


@pytest.mark.parametrize("others", ["", "not there either"])
def test_a_collective_that_a_backend_does_not_have_is_skipped_with_its_words(others):
    def call() -> None:
        raise RuntimeError("ProcessGroupGloo does not support alltoall on CUDA\nsecond line")

    assert collectives._first(alone(others=others), (call, lambda: None)) == (
        "ProcessGroupGloo does not support alltoall on CUDA"
    )
    assert collectives._first(alone(others=others), (lambda: None, lambda: None)) == others


# ---- srun and machines without a GPU ---------------------------------------------------------------------------------


def step_of(task: int, tasks: int = 2) -> dict[str, str]:
    """What srun puts into a task's environment, on one machine."""
    return {
        "SLURM_STEP_NUM_TASKS": str(tasks),
        "SLURM_STEP_TASKS_PER_NODE": str(tasks),
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_STEP_NODELIST": "here",
        "SLURM_JOB_ID": str(os.getpid() % 1000),
    }


def test_tasks_of_srun_are_ranks_and_a_batch_script_is_none():
    two = slurm.as_torchrun(
        {**step_of(5, 16), "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_STEP_NODELIST": "gpu[07,9]"}
    )
    assert (two["RANK"], two["WORLD_SIZE"], two["LOCAL_WORLD_SIZE"], two["MASTER_ADDR"]) == ("5", "16", "8", "gpu07")
    assert slurm.as_torchrun(step_of(0, 1)) == {}
    assert slurm.as_torchrun({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}) == {}
    assert slurm.as_torchrun({**step_of(0), "RANK": "3", "WORLD_SIZE": "4"}) == {}
    with pytest.raises(ClusterSimError, match="as many on each"):
        slurm.as_torchrun({**step_of(0, 3), "SLURM_STEP_TASKS_PER_NODE": "2,1"})


@torch
def test_two_tasks_of_srun_write_one_capture_of_two_ranks(tmp_path):
    words = ("--out", str(tmp_path / "o"), "--device", "cpu", "--budget", "1s", "--largest", "64", "--quiet")
    command = [sys.executable, "-m", MODULE, *words, "--parts", "collectives"]
    tasks = [subprocess.Popen(command, env=os.environ | step_of(task), stderr=subprocess.PIPE) for task in (0, 1)]
    ends = [(task.communicate(timeout=60)[1], task.returncode) for task in tasks]
    assert [code for _, code in ends] == [0, 0], ends
    assert json.loads((tmp_path / "o" / "provenance.json").read_text())["ranks"] == 2


@torch
def test_a_machine_without_a_gpu_is_one_line_and_no_folder(tmp_path):
    command = [sys.executable, "-m", "clustersim", "capture", "--out", str(tmp_path / "o")]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["error: this PyTorch sees no GPU; use --device cpu --backend gloo"]
    assert not (tmp_path / "o").exists()


def test_a_task_that_slurm_gives_one_gpu_uses_it(monkeypatch):
    monkeypatch.setattr(os, "environ", dict(os.environ) | step_of(1) | {"SLURM_GPUS_PER_TASK": "1"})
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    fake = FakeTorch(1)
    monkeypatch.setitem(sys.modules, "torch", fake)
    joined = world.join_world("nccl", "cuda", False, patience=600.0)
    assert (joined.rank, joined.size, joined.device.index) == (1, 2, 0)


def test_a_row_whose_kind_is_no_word_is_left_out_and_said(tmp_path):
    """Its bandwidth was asked of a table that no object can be a key of."""
    source = Path(__file__).parent / "data" / "gloo" / "2_ranks" / "collectives.jsonl"
    lines = source.read_text().splitlines()
    row = json.loads(lines[1]) | {"kind": {"a": 1}}
    (tmp_path / "collectives.jsonl").write_text("\n\n".join([lines[0], json.dumps(row), *lines[2:5]]) + "\n")
    samples = traces.read(tmp_path / "collectives.jsonl")
    assert len(samples.rows) == 3
    assert list(samples.skipped.values()) == [1]


@pytest.mark.parametrize(
    ("key", "value"), [("machines", 1.5), ("machines", [[]]), ("machines", [{"versions": 3}]), ("ranks", "two")]
)
def test_a_provenance_of_another_shape_is_one_clear_error(tmp_path, key, value):
    about = json.loads((Path(__file__).parent / "data" / "gloo" / "2_ranks" / "provenance.json").read_text())
    (tmp_path / "provenance.json").write_text(json.dumps(about | {key: value}))
    with pytest.raises(TraceError, match=rf"provenance.json: \$\.{key} is"):
        captured.provenance(tmp_path / "provenance.json")
