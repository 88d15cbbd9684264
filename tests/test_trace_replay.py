"""Replay: a measured run played again on its own machine is itself; on another, only communication changes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

import clustersim
from clustersim.app.cli import cli
from clustersim.cluster import files as fabrics
from clustersim.core.device import device
from clustersim.core.errors import ClusterSimError, TraceError
from clustersim.core.timeline import WITHOUT_GPU, OpInfo, Timeline
from clustersim.explain.explain import explain
from clustersim.files import traces
from clustersim.files.traces.saved import load_run
from clustersim.studies.replay.replay_scale import Scale
from clustersim.studies.replay.trace_replay import replay


def machine(name: str, nodes: int, per_node: int):
    topology = fabrics.load(name, nodes=nodes)
    return topology, fabrics.mesh(topology, nproc_per_node=per_node)


def measured(scenario: str, **changes: object) -> tuple[Timeline, clustersim.Scenario]:
    """A simulated run as if a profiler had seen it: what waits for what is not told."""
    result = clustersim.load(scenario, {key.replace("__", "."): value for key, value in changes.items()}).run()
    ops = tuple(msgspec.structs.replace(op, after=()) for op in result.timeline.ops)
    return replace(result.timeline, ops=ops, source="measured"), result


@pytest.mark.parametrize(
    "scenario", ["ddp_resnet50_1x8_v100", "zero3_llama3_8b_2x8_a100", "why_late_first_bucket", "sgd_steps_1x8"]
)
def test_a_run_replayed_on_its_own_machine_takes_as_long_and_hides_as_much(scenario):
    run, result = measured(scenario, run__jitter=0.0)
    again = replay(run, result.prepared.topology, result.prepared.mesh)
    for key in ("window_s", "compute_s", "communication_s", "exposed_communication_s"):
        seen, played = again.totals[key]
        assert played == pytest.approx(seen, rel=0.02), key
    assert again.notes == ()
    assert [op.name for op in again.simulated.ops] == [op.name for op in run.ops]


def test_a_slower_network_makes_exposed_communication_longer_and_nothing_else():
    run, result = measured("ddp_gpt2_xl_2x8_a100", run__jitter=0.0, run__steps=2)
    slower = fabrics.change(result.prepared.topology, fabrics.Change("node*/nic*", factor=0.05))
    again = replay(run, slower, result.prepared.mesh)
    assert again.totals["compute_s"][1] == pytest.approx(again.totals["compute_s"][0], rel=1e-9)
    assert again.totals["exposed_communication_s"][1] > 2 * again.totals["exposed_communication_s"][0]
    assert again.totals["window_s"][1] > 1.2 * again.totals["window_s"][0]


def test_twice_the_ranks_keep_the_work_of_each_and_widen_the_groups():
    run, _ = measured("ddp_resnet50_1x8_v100", run__steps=2)
    again = replay(run, *machine("dgx-1v", 2, 8), scale=Scale(times=2))
    assert again.program.world_size == 16
    groups = [op.groups for role in again.program.roles for op in role.ops if hasattr(op, "groups")]
    assert {group.shape for group in groups} == {(1, 16)}
    assert again.totals["compute_s"][1] == pytest.approx(again.totals["compute_s"][0])
    assert again.totals["communication_s"][1] > again.totals["communication_s"][0]


@pytest.mark.parametrize(
    ("members", "purpose", "groups"),
    [
        ((0, 2), "", ((0, 2, 4, 6),)),
        ((0, 1), "", ((0, 1), (4, 5))),
        ((0, 1), "DATA_PARALLEL_GROUP", ((0, 1, 4, 5),)),
        ((0, 2), "mesh_tp", ((0, 2), (4, 6))),
    ],
)
def test_data_parallel_groups_grow_and_the_others_are_copied(members, purpose, groups):
    ops = (
        OpInfo(
            "all_reduce a",
            "all_reduce",
            "comm",
            "communication",
            "communication",
            1e6,
            detail={"group_size": 2, "members": members, "purpose": purpose, "transfer_s": 1e-4},
        ),
        OpInfo("all_reduce b", "all_reduce", "comm", "communication", "communication", 1e6, detail={"group_size": 2}),
    )
    times = np.array([[0.0, 0.0, 1e-4], [0.0, 0.0, 1e-4], [2e-4, 2e-4, 3e-4]])
    ranks = tuple(np.array([rank]) for rank in members)
    run = Timeline(4, ops, ranks, np.array([0, 0, 1]), np.array([0, 1, 0]), *times.T, source="x")
    again = replay(run, *machine("hgx-h100", 1, 8), scale=Scale(times=2))
    found = {
        tuple(map(tuple, op.groups.tolist()))
        for role in again.program.roles
        for op in role.ops
        if hasattr(op, "groups")
    }
    assert found == {groups}
    assert "kept as measured, 1: all_reduce of 2 ranks: which ones is not known" in again.notes
    assert "2 of 4 ranks were measured" in again.notes[-1]


def exposed_and_step(run: Timeline) -> tuple[float, float]:
    """What a run exposes and takes [s], as a replay counts it."""
    totals = replay(run).totals
    return totals["exposed_communication_s"][0], totals["window_s"][0]


@pytest.mark.parametrize(
    ("changes", "scale"),
    [
        ({"cluster__nodes": 4}, Scale(times=4)),
        ({"strategy__bucket_cap_mb": 5}, Scale(bucket=5 * 2**20)),
        ({"strategy__bucket_cap_mb": 100}, Scale(bucket=100 * 2**20)),
    ],
)
def test_a_run_predicted_from_a_smaller_one_or_other_buckets_is_the_run_itself(changes, scale):
    run, _ = measured("ddp_resnet50_1x8_v100", run__jitter=0.0, run__steps=2)
    aim, result = measured("ddp_resnet50_1x8_v100", run__jitter=0.0, run__steps=2, **changes)
    again = replay(run, result.prepared.topology, result.prepared.mesh, scale=scale)
    exposed, step = exposed_and_step(aim)
    assert again.totals["window_s"][1] == pytest.approx(step, rel=0.01)
    assert again.totals["exposed_communication_s"][1] == pytest.approx(exposed, abs=0.02 * step)


def test_copies_differ_as_measured_ranks_do_so_that_more_of_them_wait_longer():
    vary = {"run__steps": 4, "run__seed": 1, "run__variation": {"step_cv": 0.05, "draws": "independent"}}
    run, result = measured("ddp_resnet50_1x8_v100", **vary)
    aim, larger = measured("ddp_resnet50_1x8_v100", cluster__nodes=8, **vary)
    once = replay(run, result.prepared.topology, result.prepared.mesh)
    again = replay(run, larger.prepared.topology, larger.prepared.mesh, scale=Scale(times=8))
    waits = [answer.totals["peer_wait_s"][1] for answer in (once, again)]
    assert waits[1] > 1.2 * waits[0]
    assert waits[1] == pytest.approx(replay(aim).totals["peer_wait_s"][0], rel=0.3)
    assert again.totals["window_s"][1] == pytest.approx(exposed_and_step(aim)[1], rel=0.05)
    assert again.totals["compute_s"][1] == pytest.approx(once.totals["compute_s"][1])  # of the ranks that were measured
    assert any("8 replicas differ by" in note for note in again.notes)


def test_more_copies_end_no_step_earlier():
    """The ranks that were measured stay as they are, and a copy is the same in every larger run: so more wait longer. A
    step's own length may shrink, where the one before it ended later."""
    vary = {"run__steps": 4, "run__seed": 1, "run__variation": {"step_cv": 0.05, "draws": "independent"}}
    run, _ = measured("ddp_resnet50_1x8_v100", **vary)
    ends = [np.cumsum(replay(run, scale=Scale(times=times)).steps.simulated) for times in (1, 2, 4)]
    for fewer, more in pairwise(ends):
        assert (more >= fewer * (1 - 1e-9)).all()
    assert ends[-1][-1] > 1.01 * ends[0][-1]


def test_what_copies_of_a_lone_replica_would_differ_by_is_said_to_be_unknown():
    run, result = measured("single_gpt2_1x1_a100", run__steps=2)
    again = replay(run, *machine("hgx-a100", 1, 2), scale=Scale(times=2))
    assert any(
        note.startswith("not known: how much replicas differ: only one of them was measured") for note in again.notes
    )
    assert result.prepared.gpus == 1


def test_kernels_scale_by_class_and_the_host_stays():
    kinds = {"sgemm_128": ("other", "compute"), "elementwise": ("other", "compute"), "host": ("other", "host")}
    ops = tuple(OpInfo(name, "compute", "compute", *words) for name, words in kinds.items())
    times = np.array([[0.0, 0.0, 1e-3], [1e-3, 1e-3, 2e-3], [2e-3, 2e-3, 3e-3]])
    run = Timeline(1, ops, (np.array([0]),), np.arange(3), np.zeros(3, dtype=int), *times.T, source="x")
    was = device("V100-SXM2-16GB")
    gpu = device("A100-SXM4-40GB")
    again = replay(run, scale=Scale(was=was, gpu=gpu))
    took = [op.duration for op in again.program.roles[0].ops]
    assert took[0] == pytest.approx(1e-3 * was.matmul_rate("fp32") / gpu.matmul_rate("fp32"))
    assert took[1] == pytest.approx(1e-3 * was.stream_rate() / gpu.stream_rate())
    assert took[2] == pytest.approx(1e-3)
    assert sum(line.startswith("from the model: ") for line in again.notes) == 2


def test_a_simulated_run_and_a_mesh_of_another_size_are_refused():
    result = clustersim.load("ddp_resnet50_1x8_v100", {"run.steps": 1}).run()
    with pytest.raises(TraceError, match="simulated already"):
        replay(result.timeline, *machine("dgx-1v", 1, 8))
    run = replace(result.timeline, source="measured")
    with pytest.raises(TraceError, match="8 ranks, 2 time"):
        replay(run, *machine("dgx-1v", 1, 8), scale=Scale(times=2))


# ---- published traces ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "topology", "ranks", "within"),
    [
        ("dlrm_8xv100_kineto", "dgx-1v", 8, 0.02),
        ("dlrm_v100_kineto", "dgx-1v", 2, 0.03),
        ("ddp_2xrtx3090_nsys/profile.sqlite", "pcie-rtx3090", 2, 0.01),
    ],
)
def test_published_traces_replay_to_their_own_step_time(shared: Path, name, topology, ranks, within):
    run = traces.read(shared / "measurements" / "traces" / name)
    again = replay(run, *machine(topology, 1, ranks))
    seen, played = again.totals["window_s"]
    assert played == pytest.approx(seen, rel=within)
    exposed = again.totals["exposed_communication_s"]
    assert exposed[1] == pytest.approx(exposed[0], abs=0.03 * seen)
    assert again.totals["compute_s"][1] == pytest.approx(again.totals["compute_s"][0], rel=1e-3)
    large = [row for row in again.collectives if row.nbytes >= 2**20 and not row.waiting_included]
    reduced = [row for row in large if row.kind == "all_reduce"]
    assert all(0.7 < row.simulated_s / row.measured_s < 1.3 for row in reduced)


def test_small_sends_of_a_published_trace_take_their_kernels_time_and_not_their_hosts(shared: Path):
    run = traces.read(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    again = replay(run, *machine("dgx-1v", 1, 8))
    ratios = [row.simulated_s / row.measured_s for row in again.collectives if row.kind == "all_to_all"]
    assert len(ratios) == 4
    assert np.median(ratios) == pytest.approx(1.0, abs=0.2)
    assert max(ratios) < 1.5


def test_a_published_trace_on_twice_the_machines_communicates_longer(shared: Path):
    run = traces.read(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    once, twice = (replay(run, *machine("dgx-1v", n, 8), scale=Scale(times=n)) for n in (1, 2))
    assert twice.totals["communication_s"][1] > 1.3 * once.totals["communication_s"][1]
    assert twice.totals["window_s"][1] > once.totals["window_s"][1]


def test_the_command_prints_totals_and_keeps_both_runs(shared: Path, tmp_path: Path):
    files = str(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    out = tmp_path / "out"
    done = CliRunner().invoke(cli, ["replay", files, "--topology", "dgx-1v", "--out", str(out), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["ranks"] == 8
    assert said["totals"]["window_s"][1] == pytest.approx(said["totals"]["window_s"][0], rel=0.02)
    one, other = (load_run(out / f"{name}.npz") for name in ("measured", "simulated"))
    assert [op.name for op in one.timeline.ops] == [op.name for op in other.timeline.ops]
    told = CliRunner().invoke(cli, ["compare", str(out / "measured.npz"), str(out / "simulated.npz")])
    assert "a step takes 19.69 ms in A" in told.stdout


def test_times_of_collectives_are_no_run(tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text("kind,nbytes,seconds\n")
    done = CliRunner().invoke(cli, ["replay", str(log), "--topology", "dgx-1v"])
    assert isinstance(done.exception, ClusterSimError)


def test_the_command_scales_and_says_what_is_from_where(shared: Path):
    files = str(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    words = ["dp=16", "gpu=A100-SXM4-40GB", "bucket=1MiB"]
    args = [word for scale in words for word in ("--scale", scale)]
    done = CliRunner().invoke(cli, ["replay", files, "--topology", "dgx-1v", *args, "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["ranks"] == 16
    assert said["totals"]["compute_s"][1] < 0.9 * said["totals"]["compute_s"][0]
    assert {line.partition(":")[0] for line in said["notes"]} >= {"from the trace", "from the model", "not seen"}


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("dp=12", "the run has 8 data-parallel ranks"),
        ("dp=0", "8 data-parallel"),
        ("nodes=2", "once each: dp=64"),
        ("dtype=q", "--scale dtype"),
        ("gpu=Q9", "cannot tell which GPU"),
        ("bucket=3", "'3'"),
        ("bucket=1B", "million"),
    ],
)
def test_a_scale_that_cannot_be_is_said(shared: Path, word: str, said: str):
    files = str(shared / "measurements" / "traces" / "dlrm_8xv100_kineto" / "rank0.json.gz")
    scales = ["--scale", word, *(["--scale", "gpu=A100-SXM4-40GB"] if word.startswith("dtype") else [])]
    done = CliRunner().invoke(cli, ["replay", files, *scales])
    assert isinstance(done.exception, ClusterSimError)
    assert said in str(done.exception)


GLOO = Path(__file__).parent / "data" / "traces" / "gloo_2_ranks"


def test_the_backend_is_the_one_the_trace_names():
    assert traces.backend_of(traces.read(sorted(GLOO.iterdir()))) == "gloo"
    plain = CliRunner().invoke(cli, ["replay", str(GLOO), "--topology", "cpu-gloo"])
    asked = CliRunner().invoke(cli, ["replay", str(GLOO), "--topology", "cpu-gloo", "--backend", "gloo"])
    assert plain.output == asked.output


def test_a_collective_that_came_while_its_stream_was_busy_still_waits_for_what_it_sends():
    def op(name: str, kind: str, **more: object) -> OpInfo:
        return OpInfo(name, kind, "compute" if kind == "compute" else "comm", "communication", step=0, **more)

    met = {"nbytes": 4e6, "detail": {"group_size": 2, "dtype": "fp32"}}
    ops = (op("a", "compute"), op("b", "compute"), op("first", "all_reduce", **met), op("second", "all_reduce", **met))
    ready, start, end = np.array([[0.0, 0.0, 1.0], [1.0, 1.0, 4.0], [1.0, 1.0, 6.0], [4.25, 4.25, 8.0]]).T
    run = Timeline(2, ops, (np.arange(2),), np.arange(4), np.zeros(4, dtype=np.int64), ready, start, end, source="x")
    again = replay(run).simulated.spans()
    began = dict(zip(again["op"].tolist(), again["start"].tolist(), strict=True))
    assert began[2] == pytest.approx(1.0)
    assert began[3] == pytest.approx(4.25)  # its gradients are made at 4, and the host takes a quarter


def test_a_replay_of_ranks_without_a_gpu_is_explained_without_gpus():
    run = traces.read(sorted(GLOO.iterdir()))
    for times in (1, 2):
        again = replay(run, scale=Scale(times=times)).simulated
        assert again.stats[WITHOUT_GPU] == 2.0 * times
        assert not any("GPU" in text for text in explain(again).causes)


def profiled_without_shapes(tmp_path):
    """Two ranks of DDP over Gloo, profiled without record_shapes."""
    for rank in range(2):
        events = [
            {"ph": "X", "name": "ProfilerStep#1", "cat": "user_annotation", "ts": 0, "dur": 100, "pid": 1, "tid": 1},
            {"ph": "X", "name": "aten::mm", "cat": "cpu_op", "ts": 1, "dur": 50, "pid": 1, "tid": 1},
            {"ph": "X", "name": "gloo:all_reduce", "cat": "user_annotation", "ts": 60, "dur": 30, "pid": 1, "tid": 2},
        ]
        distributed = {"backend": "gloo", "rank": rank, "world_size": 2}
        table = {"schemaVersion": 1, "distributedInfo": distributed, "traceEvents": events}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(table))
    return str(tmp_path)


def test_of_collectives_that_were_left_out_no_share_is_told_and_a_warning_is(tmp_path):
    """0.0 % of the time was transferring, of steps of which a fifth was all_reduce."""
    folder = profiled_without_shapes(tmp_path)
    lines = CliRunner().invoke(cli, ["trace", folder]).output.splitlines()
    (transferring,) = [line for line in lines if "transferring" in line]
    assert "not known" in transferring
    assert json.loads(CliRunner().invoke(cli, ["trace", folder, "--json"]).output)["exposed_transfer_share"] == []
    assert any("collective without shapes" in warning for warning in explain(traces.read(folder)).warnings)


def test_what_a_reader_left_out_is_said_to_be_in_no_replay(tmp_path):
    """Three ranks of DDP profiled without record_shapes were replayed as twelve without one all_reduce, in silence."""
    arguments = ["replay", profiled_without_shapes(tmp_path), "--topology", "cpu-gloo", "--scale", "dp=8"]
    answer = " ".join(CliRunner().invoke(cli, arguments).output.split())
    assert "not played: 2 x a collective without shapes" in answer
    assert "neither a network nor more ranks change anything" in answer
    assert "2 ranks were measured, and no collective that was read tells" in answer
    assert "only one" not in answer


def test_a_replay_with_all_collectives_says_nothing_of_what_is_left_out():
    again = replay(traces.read(sorted(GLOO.iterdir())), scale=Scale(times=2))
    assert not any("not played" in note or "wait for nobody" in note for note in again.notes)


def test_a_trace_without_steps_is_told_no_step_time():
    said = CliRunner().invoke(cli, ["trace", str(GLOO)]).output
    assert "gloo, first span to last" in said
    assert "step time" not in said
    assert "step time" not in CliRunner().invoke(cli, ["replay", str(GLOO)]).output


@pytest.mark.parametrize("folder", ["gloo_2_ranks", "pipeline_2x2"])
def test_trace_and_replay_divide_a_run_alike(folder):
    path = str(GLOO.parent / folder)
    trace, replayed = (
        json.loads(CliRunner().invoke(cli, [name, path, "--json"]).stdout) for name in ("trace", "replay")
    )
    totals = {name: measured for name, (measured, _) in replayed["totals"].items()}
    assert trace["window_s"] == pytest.approx(totals["window_s"])
    for share, seconds in (
        ("compute_share", "compute_s"),
        ("communication_share", "communication_s"),
        ("peer_wait_share", "peer_wait_s"),
    ):
        assert np.mean(trace[share]) * trace["window_s"] == pytest.approx(totals[seconds])


PAIR = GLOO.parent / "gloo_1_2"


@pytest.mark.parametrize(
    ("source", "aim", "scale", "within"),
    [
        ("two", "two", Scale(), 0.03),
        ("one", "two", Scale(times=2), 0.08),
        ("two", "two_small", Scale(bucket=4 * 2**20), 0.06),
        ("two_small", "two", Scale(bucket=25 * 2**20), 0.02),
    ],
)
def test_a_recorded_job_is_predicted_from_itself_at_another_scale(source, aim, scale, within):
    topology = fabrics.load("cpu-gloo", nodes=1)
    mesh = fabrics.mesh(topology, nproc_per_node=2)
    again = replay(traces.read(PAIR / source), topology, mesh, scale=scale, backend="gloo")
    measured = replay(traces.read(PAIR / aim)).steps.medians()[0]
    assert again.steps.medians()[1] == pytest.approx(measured, rel=within)


def test_a_trace_without_a_backend_runs_on_gloo_where_there_is_no_gpu(shared):
    folder = str(shared / "measurements" / "traces" / "pipeline_1f1b_pp8")
    plain = CliRunner().invoke(cli, ["replay", folder, "--topology", "cpu-gloo"])
    asked = CliRunner().invoke(cli, ["replay", folder, "--topology", "cpu-gloo", "--backend", "gloo"])
    assert plain.exit_code == asked.exit_code == 0, plain.output
    assert plain.stdout == asked.stdout
    assert "gloo" in plain.stdout
