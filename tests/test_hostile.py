"""Hostile input that the harness or a hand found, each with the one line that it now gets, or the answer."""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sqlite3
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hostile_documents import CAMPAIGN, CAPTURED, COMMS, CONFIG, MOE_CONFIG, PLAN, SCENARIO, SPLIT, TRACE
from hostile_values import json_file, toml_file

from clustersim import model as models
from clustersim import scenario
from clustersim.app import plots
from clustersim.app.cli.collective import sizes
from clustersim.app.cli.common import rank_list
from clustersim.core import limits
from clustersim.core.errors import ClusterSimError, ModelError, ScenarioError, TraceError
from clustersim.files import traces
from clustersim.files.traces.saved import load_run, save_run
from clustersim.studies.campaign.axis import SaveKind, axis
from clustersim.studies.replay.replay_scale import Scale
from clustersim.studies.replay.trace_replay import replay
from clustersim.studies.what_if.spread import spread
from clustersim.training.parallel.layout import stages_of
from clustersim.training.schedules.torch_csv import from_csv

TINY = Path(__file__).parent / "data" / "traces" / "pipeline_2x2"
PIPELINE = "1f1b_gpt2_xl_1x8_a100"
MOE = "ep8_mixtral_8x7b_8x8_h100"
SMALL = {"model.name": "resnet18", "cluster.gpus_per_node": 2, "run.steps": 2}


def trace(world):
    """A profile of one kernel that says how many ranks there were."""
    kernel = {
        "ph": "X",
        "cat": "kernel",
        "name": "gemm",
        "pid": 0,
        "tid": 7,
        "ts": 1.0,
        "dur": 40.0,
        "args": {"stream": 7, "device": 0, "correlation": 3},
    }
    info = {"backend": "nccl", "rank": 0, "world_size": world}
    return json.dumps({"schemaVersion": 1, "distributedInfo": info, "traceEvents": [kernel]})


# ---- what is no table, and long words -------------------------------------------------------------------------------


def test_times_of_a_report_that_are_no_table_are_left_out(tmp_path):
    row = {"size": 8, "count": 2, "type": "float", "redop": "sum", "root": "-1"}
    report = {"version": 2, "args": ["./all_reduce_perf"], "nccl_version": 22809, "config": {"nthreads": 1, "ngpus": 2}}
    right = {"time": 20.0, "alg_bw": 1.0, "bus_bw": 1.0}
    rows = [row | {"out_of_place": -9.5, "in_place": right}, row | {"out_of_place": [1], "in_place": "x"}]
    (tmp_path / "r.json").write_text(json.dumps(report | {"results": rows}))
    found = traces.read([tmp_path / "r.json"])
    assert [(sample.nbytes, sample.seconds) for sample in found.rows] == [(8, pytest.approx(20e-6))]


@pytest.mark.parametrize("rank", ["fsdp", None, []])
def test_a_report_whose_ranks_are_no_numbers_is_refused(tmp_path, rank):
    config = {"nthreads": 1, "ngpus": 1, "devices": [{"rank": rank, "hostname": "a"}]}
    row = {"size": 8, "type": "float", "redop": "sum", "root": "-1", "out_of_place": {"time": 20.0}}
    report = {"version": 2, "args": ["./all_reduce_perf"], "nccl_version": 22809, "config": config, "results": [row]}
    (tmp_path / "r.json").write_text(json.dumps(report))
    with pytest.raises(TraceError, match="not a whole nccl-tests -J report"):
        traces.read([tmp_path / "r.json"], "nccl_tests_json")


def test_a_word_of_a_log_that_is_very_long_is_read_at_once(tmp_path):
    head = "# nThread 1 nGpus 8 minBytes 8 maxBytes 1024\n# size count type redop root time algbw busbw #wrong\n"
    row = "8 2 float sum -1 20.51 0.00 0.00 "
    (tmp_path / "log.txt").write_text(f"{head}{row}0\n{row}{'9' * 20_000}\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    traces.read([tmp_path / "log.txt"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 2.0


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_ranks_that_a_trace_declares_are_counted_before_anything_is_made_for_them(tmp_path, monkeypatch):
    (tmp_path / "many.json").write_text(trace(2_000_000_000))
    with pytest.raises(TraceError, match=r"many\.json: ranks of the run: 2e\+09 are asked for; at most 10,000,000"):
        traces.read(tmp_path / "many.json")
    (tmp_path / "fewer.json").write_text(trace(2_000_000))
    run = traces.read(tmp_path / "fewer.json")
    monkeypatch.setattr(limits, "free_memory", lambda: 2.0**28)
    with pytest.raises(TraceError, match=r"for a replay of 2,000,000 ranks, 256 MiB are free; use fewer"):
        replay(run)
    with pytest.raises(TraceError, match=r"for a replay of 2,000,000,000,000 ranks"):
        replay(run, scale=Scale(times=1_000_000))


def test_sizes_of_a_table_of_collectives_are_counted():
    asked = SimpleNamespace(size=None, minbytes="1", maxbytes="5", stepbytes="1", stepfactor=None)
    assert list(sizes(asked)) == [1, 2, 3, 4, 5]
    asked.maxbytes = "1T"
    with pytest.raises(ClusterSimError, match=r"sizes: 1\.1e\+12 are asked for; at most 100,000"):
        list(sizes(asked))


def test_ranks_of_an_option_are_counted_whatever_their_digits():
    assert rank_list(("0-2,7",)) == [0, 1, 2, 7]
    for text in ("0-99999999999", "9" * 5000, "0-" + "9" * 5000):
        with pytest.raises(ClusterSimError) as wrong:
            rank_list((text,))
        assert len(str(wrong.value)) < 200


def test_a_limit_on_the_address_space_is_memory_that_is_not_there():
    before = resource.getrlimit(resource.RLIMIT_AS)
    unlimited = limits.free_memory()
    try:
        resource.setrlimit(resource.RLIMIT_AS, (2**45, before[1]))
        assert limits.free_memory() == unlimited or abs(limits.free_memory() - unlimited) < 2**32
        used = 2**45 - limits._allowed()
        resource.setrlimit(resource.RLIMIT_AS, (int(used) + 2**29, before[1]))
        assert limits.free_memory() <= 2**29
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize(
    "layout", ["E(t*9999999|)*9999999L", "Et*99999999999999999999L", "E((((t*999)*999)*999)*999)L"]
)
def test_layers_that_a_layout_repeats_are_counted_before_they_are_written_out(layout):
    with pytest.raises(ScenarioError, match=r"layers of a layout .* are asked for; at most 100,000"):
        stages_of(layout)


def test_experts_are_counted_before_each_has_its_tensors(tmp_path):
    (tmp_path / "moe.json").write_bytes(json_file(MOE_CONFIG | {"num_local_experts": 626025}))
    (tmp_path / "split.toml").write_bytes(toml_file(SPLIT))
    with pytest.raises(ClusterSimError, match=r"experts of all layers: 2\.504e\+06 are asked for; at most 100,000"):
        scenario.load(tmp_path / "split.toml").prepare()


@pytest.mark.parametrize("key", ["parallel.microbatches", "parallel.global_batch_size"])
def test_micro_batches_of_a_split_model_are_counted_before_their_ops_are_made(key):
    changes = {"parallel.microbatches": None, "parallel.global_batch_size": None, key: 8_000_000}
    with pytest.raises(ClusterSimError, match=rf"micro-batches of a step \(at \$.{key}\): .* at most 10,000"):
        scenario.load(PIPELINE, changes).prepare()


def test_saves_of_a_campaign_are_counted_before_they_are_made():
    assert axis(10.0, [SaveKind(5.0, 1.0, 1.0)]).behind[0].tolist() == [6.0, 12.0]
    with pytest.raises(ScenarioError, match=r"saves and evaluations .*: 1e\+15 are asked for; at most 5,000,000"):
        axis(1e15, [SaveKind(1.0, 0.0, 0.0)], [(1e9, 1.0)])


# ---- files that are damaged ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A small run's file."""
    path = tmp_path_factory.mktemp("saved") / "run.npz"
    run = scenario.load("ddp_resnet50_1x8_v100", SMALL).run()
    save_run(run.timeline, path, run.prepared.topology, run.facts())
    return path


@pytest.mark.parametrize("member", ["words", "row_op", "row_end", "block_op", "block_ranks_items", "topology_link_src"])
def test_a_run_in_which_anything_was_changed_is_no_run(member, saved, tmp_path):
    load_run(saved)
    with np.load(saved) as data:
        arrays = dict(data)
    if member == "words":
        words = json.loads(arrays["words"].tobytes())
        words["facts"]["memory_course"]["moments"].append("one more")
        arrays["words"] = np.frombuffer(json.dumps(words).encode(), dtype=np.uint8)
    else:
        arrays[member] = arrays[member] * 2
    out = io.BytesIO()
    np.savez(out, **arrays)
    (tmp_path / "run.npz").write_bytes(out.getvalue())
    with pytest.raises(
        TraceError, match=r"run\.npz: not a run that clustersim saved, .* or changed since; run it again"
    ):
        load_run(tmp_path / "run.npz")


@pytest.mark.parametrize("cell", [None, "soon", 2.5e300])
@pytest.mark.parametrize("column", ["start", "end", "correlationId", "shortName", "globalPid"])
def test_a_cell_of_another_type_in_an_nsight_export_is_one_line_or_no_matter(column, cell, tmp_path):
    columns = {
        "globalPid": 1 << 24,
        "start": 100,
        "end": 200,
        "correlationId": 1,
        "shortName": 1,
        "deviceId": 0,
        "streamId": 7,
    }
    with sqlite3.connect(tmp_path / "p.sqlite") as base:
        base.execute("create table StringIds (id, value)")
        base.execute(f"create table CUPTI_ACTIVITY_KIND_KERNEL ({', '.join(columns)})")
        base.executemany("insert into StringIds values (?, ?)", [(1, "gemm"), (2, None)])
        for row in (columns, columns | {column: cell}):
            base.execute("insert into CUPTI_ACTIVITY_KIND_KERNEL values (?, ?, ?, ?, ?, ?, ?)", list(row.values()))
    base.close()
    with contextlib.suppress(TraceError):
        assert traces.read(tmp_path / "p.sqlite").world_size >= 1


@pytest.mark.parametrize("event", [b"ncclDevKernel", b"cudaLaunchKernel", b"record_param_comms"])
def test_broken_text_inside_an_events_args_is_one_line(event, tmp_path):
    cat = {b"ncclDevKernel": "kernel", b"cudaLaunchKernel": "cuda_runtime"}.get(event, "cpu_op")
    added = {
        "ph": "X",
        "cat": cat,
        "name": event.decode(),
        "pid": 0,
        "tid": 7,
        "ts": 2.0,
        "dur": 1.0,
        "args": {"a": "#"},
    }
    trace = TRACE | {"traceEvents": [*TRACE["traceEvents"], added]}
    (tmp_path / "trace.json").write_bytes(json_file(trace).replace(b'"#"', b'"\x9a"'))
    with contextlib.suppress(TraceError):
        assert traces.read(tmp_path / "trace.json").world_size == 1


def test_a_log_with_a_number_of_thousands_of_digits_is_one_line(tmp_path):
    (tmp_path / "comms.log").write_bytes(COMMS.replace(b"    100   ", b"    " + b"9" * 6000 + b"   "))
    with pytest.raises(TraceError, match=r"comms\.log: not a .*: a whole number has thousands of digits"):
        traces.read(tmp_path / "comms.log")


@pytest.mark.parametrize("form", [None, "table", "pipeline"])
def test_a_first_line_that_is_none_of_a_table_is_one_line(form, tmp_path):
    (tmp_path / "t.csv").write_bytes(b"rank,\ra\r,step,op\n1,2,3,4\n")
    with pytest.raises(TraceError, match=r"t\.csv"):
        traces.read(tmp_path / "t.csv", **({} if form is None else {"format": form}))


@pytest.mark.parametrize("file", ["ops.csv", "steps.csv"])
@pytest.mark.parametrize("number", ["9" * 30, "9" * 6000, "1e300"])
def test_numbers_that_no_table_has_are_one_line(file, number, tmp_path):
    for name in ("ops.csv", "steps.csv"):
        text = (TINY / name).read_text()
        (tmp_path / name).write_text(text.replace("\n12,", f"\n{number},", 1) if name == file else text)
    with pytest.raises(TraceError, match=rf"{file}:\d+: step is .*, not a whole number"):
        traces.read(tmp_path)


def test_steps_that_took_no_time_have_no_share_of_it(tmp_path):
    for name in ("ops.csv", "steps.csv"):
        (tmp_path / name).write_text((TINY / name).read_text())
    rows = [line.split(",") for line in (TINY / "ops.csv").read_text().splitlines()]
    still = [[*row[:7], "0.0", "0.0"] for row in rows[1:]]
    (tmp_path / "ops.csv").write_text("\n".join(",".join(row) for row in [rows[0], *still]) + "\n")
    (tmp_path / "steps.csv").write_text("step,step_s\n10,0.0\n12,0.0\n")
    assert replay(traces.read(tmp_path)).stages == ()


def test_a_bandwidth_that_is_a_word_is_a_row_left_out(tmp_path):
    good, bad = CAPTURED.splitlines()[1:] * 2
    (tmp_path / "collectives.jsonl").write_bytes(
        b"\n".join([CAPTURED.splitlines()[0], good, bad.replace(b'"busbw": 36.3', b'"busbw": "fast"')])
    )
    found = traces.read(tmp_path / "collectives.jsonl")
    assert len(found) == 1


@pytest.mark.parametrize("ranks", [b"[]", b"[null]", b"-8", b"1.5", b"true"])
def test_a_captured_row_whose_ranks_are_no_number_is_left_out(tmp_path, ranks):
    head, good = CAPTURED.splitlines()[:2]
    bad = good.replace(b'"ranks": 8', b'"ranks": ' + ranks)
    assert bad != good
    (tmp_path / "collectives.jsonl").write_bytes(b"\n".join([head, good, bad]))
    found = traces.read(tmp_path / "collectives.jsonl")
    assert len(found) == 1
    assert "ranks is " in " ".join(found.skipped)


def test_a_campaign_that_trains_nothing_is_refused(tmp_path):
    table = SCENARIO | {"campaign": CAMPAIGN | {"duration": "0 s"}}
    table["campaign"].pop("tokens", None)
    table["campaign"].pop("steps", None)
    with pytest.raises(ScenarioError, match=r"a duration of 0 s trains nothing"):
        scenario.from_table(table, tmp_path / "s.toml")


# ---- split models ----------------------------------------------------------------------------------------------------


def test_an_error_says_its_file_or_option_once_and_the_key_that_was_written(tmp_path):
    (tmp_path / "s.csv").write_text("0B0,0F0\n,1F0,1B0\n")
    for changes in (
        {"parallel.schedule": "1f2b"},
        {"parallel.schedule_csv": str(tmp_path / "s.csv"), "parallel.pp": 2},
    ):
        options = scenario.parse_overrides([f"{name}={value}" for name, value in changes.items()])
        for source, written in (("changes", changes), ("--set", options)):
            with pytest.raises(ScenarioError) as wrong:
                scenario.load(PIPELINE, written).prepare()
            (key,) = [name for name in changes if name != "parallel.pp"]
            assert str(wrong.value).count(f"{source} ") == 1
            assert str(wrong.value).startswith(f"{source} {key}: ")
            assert str(wrong.value).endswith(f"(at $.{key})") or f"(at $.{key})" in str(wrong.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8,0,0,0,0,0,0,0\n", "has tokens for 1 experts, and each token visits 2"),
        ("1e300,1e300,1,1,1,1,1,1\n", "tokens per expert must be numbers from 0 to 1e"),
        ("1,1,1,1,1,1,1,nan\n", "tokens per expert must be numbers from 0 to 1e"),
    ],
)
def test_a_histogram_that_no_router_makes_is_refused_at_its_field(text, words, tmp_path):
    (tmp_path / "h.csv").write_text(text)
    routing = {"kind": "histogram", "file": str(tmp_path / "h.csv")}
    with pytest.raises(ScenarioError, match=words) as wrong:
        scenario.load(MOE, {"parallel.routing": routing}).prepare()
    assert "(at $.parallel.routing.file)" in str(wrong.value)


def test_steps_in_which_nothing_varies_are_as_long_as_each_other():
    found = spread(scenario.load("ddp_resnet50_1x8_v100", {**SMALL, "run.variation": {"gpu_cv": 0.0}}), 2, 3)
    assert found.times.shape == (2, 3)
    assert set(found.times.ravel()) == {found.still}


@pytest.mark.parametrize("kind", ["uniform", "skewed", "balanced"])
def test_the_memory_of_unevenly_visited_experts_is_that_of_the_rank_visited_most(kind):
    routing = {"kind": kind, **({"skew": 2.0} if kind == "skewed" else {})}
    found = scenario.load(MOE, {"parallel.routing": routing}).prepare()
    assert ("the rank whose experts get most tokens" in str(found.memory.fits(found.device))) == (kind != "balanced")


def test_delayed_weight_gradients_shorten_a_step_without_a_pipeline_too():
    changes = {
        "parallel.dispatcher": "alltoall",
        "parallel.ep_overlap": True,
        "parallel.microbatches": 4,
        "parallel.overlap_grad_reduce": False,  # buckets of experts would wait for the delayed gradients
        "parallel.recompute_granularity": None,
        "parallel.recompute_method": None,
        "parallel.recompute_num_layers": None,
    }
    at_once, delayed = (
        scenario.load(MOE, changes | {"parallel.delay_wgrad_compute": late}).run().summary["step_time_s"]
        for late in (False, True)
    )
    assert delayed < at_once


def test_context_parallel_ranks_that_see_unequal_parts_are_said_to_be_told_as_compute():
    changes = {"parallel.cp": 2, "parallel.cp_load_balancer": "none"}
    notes = scenario.load("tp8_pp4_llama3_70b_32x8_h100", changes).prepare().notes
    assert any("would wait is told as compute" in note for note in notes)


def test_digits_without_end_in_a_schedule_are_one_line(tmp_path):
    (tmp_path / "s.csv").write_text("0F" + "9" * 6000 + ",0B0\n")
    with pytest.raises(ScenarioError, match=r"row 0, cell 0: cannot read"):
        from_csv(tmp_path / "s.csv")


def test_a_model_type_that_is_a_list_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": ["llama"]}))
    with pytest.raises(ModelError, match="missing 'model_type'"):
        models.from_hf(tmp_path / "config.json")


def test_a_plan_of_which_nothing_divides_says_so_in_one_line(clustersim, tmp_path):
    (tmp_path / "plan.toml").write_bytes(toml_file(PLAN | {"batch": {"samples": [17, 17]}}))
    done = clustersim("plan", tmp_path / "plan.toml", "--out", tmp_path / "out", "--jobs", "1")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no combination of nodes" in done.stderr


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_the_same_figure_is_the_same_bytes_in_every_format(suffix, saved, tmp_path, monkeypatch):
    run = load_run(saved)
    for number, moment in enumerate(("1700000000", "1800000000")):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", moment)  # what a picture would take for now
        plots.save(plots.picture("breakdown", run, None), tmp_path / f"{number}.{suffix}")
    assert (tmp_path / f"0.{suffix}").read_bytes() == (tmp_path / f"1.{suffix}").read_bytes()
