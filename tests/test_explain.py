"""``clustersim explain`` names what a scenario plants, and its bounds hold against real re-runs."""

from __future__ import annotations

import json
import re

import pytest

import clustersim as package
from clustersim.core.errors import ScenarioError
from clustersim.core.facts import Memory, RunFacts
from clustersim.core.units import format_time
from clustersim.explain.bounds import warnings
from clustersim.explain.breakdown import breakdown
from clustersim.explain.explain import explain
from clustersim.explain.knobs import KNOB_TABLE, KNOBS
from clustersim.explain.pace import skews
from clustersim.explain.stalls import causes, stalls
from clustersim.explain.verdict import came_to
from clustersim.explain.whatif import _text, unused, whatif
from clustersim.studies.what_if.otherwise import each_change
from clustersim.studies.what_if.rerun import RERUNS, rerun_saving, step_time

PLANTED = {
    "why_slow_gpu": ("slow rank", "rank 3"),
    "why_oversubscribed_spine": ("link", "leaf# -> spine#"),
    "why_tiny_buckets": ("latency", "all_reduce bucket #"),
    "why_parameter_server": ("parameter server", "server"),
    "why_late_first_bucket": ("late start", "backward"),
    "why_launch_bound": ("launch", "kernels"),
}
HEALED = {
    "why_slow_gpu": {"cluster.slow": []},
    "why_oversubscribed_spine": {"cluster.topology": "hgx-a100"},
    "why_tiny_buckets": {"strategy.bucket_cap_mb": 25},
    "why_late_first_bucket": {"strategy.first_bucket_bytes": 2**20},
    "why_launch_bound": {"strategy.micro_batch_size": 64},
}
"""What each scenario's own comment says heals it."""

_RUNS: dict[str, object] = {}


def result(name):
    if name not in _RUNS:
        _RUNS[name] = package.load(name).run()
    return _RUNS[name]


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_first(name):
    table = stalls(causes(result(name).timeline))
    assert (table["cause"][0], table["subject"][0]) == PLANTED[name]
    assert table["share"][0] > 0.1
    if len(table["share"]) > 1:
        assert table["share"][0] > 2 * table["share"][1]


def printed_shares(line):
    """Every share of a line that is in no parentheses, in percent, by its word."""
    flat = re.sub(r" \([^)]*\)", "", line.partition(", of a ")[0])
    return {word: float(share) for word, share in re.findall(r"([a-z][a-z -]*?) ([\d.]+)%", flat)}


@pytest.mark.parametrize("name", ["why_tiny_buckets", "why_launch_bound", "1f1b_gpt2_xl_1x8_a100"])
def test_shares_of_a_step_add_up_as_printed(name):
    shares = printed_shares(explain(result(name).timeline, bounded=False).shares)
    assert sum(shares.values()) == pytest.approx(100.0, abs=0.05 * len(shares))


def test_parts_of_a_bubble_add_up_as_printed():
    line = explain(result("1f1b_gpt2_xl_1x8_a100").timeline, bounded=False).shares
    whole, inside = re.search(r"bubble ([\d.]+)% \((.*?)\)", line).groups()
    parts = [float(share) for share in re.findall(r"([\d.]+)%", inside)]
    assert sum(parts) == pytest.approx(float(whole), abs=0.05 * (len(parts) + 1))


def test_a_launch_bound_run_has_one_share_of_launching():
    """It was 48.8% in the verdict, kernels' own work included, and 41.9% on the next line."""
    explained = explain(result("why_launch_bound").timeline, bounded=False)
    launching = printed_shares(explained.shares)["launch-bound"]
    assert f"{launching:.1f}% of the step is lost because it is launch-bound" in explained.verdict
    assert f"({launching:.1f}%), mean over 8 GPUs" in explained.causes[0]


HOST_BOUND = {"cluster.nodes": 1, "model.name": "gpt2", "parallel": {"tp": 4}, "strategy.micro_batch_size": 1}


def test_what_the_host_costs_in_two_ways_is_told_by_way():
    """The verdict added up calls and launches, which no table has together."""
    run = package.load("ddp_gpt2_xl_2x8_a100", HOST_BOUND).run()
    explained = explain(run.timeline, run.saved.facts, bounded=False)
    told = re.search(r"([\d.]+)% of the step is lost \((.*?)\) because it is host-bound", explained.verdict)
    parts = dict(re.findall(r"([a-z][a-z ]+) ([\d.]+)%", told[2]))
    assert set(parts) == {"calling layers", "launching kernels"}
    assert sum(map(float, parts.values())) == pytest.approx(float(told[1]), abs=0.11)
    assert f"({parts['calling layers']}%), mean over" in explained.causes[0]


@pytest.mark.parametrize("name", HEALED)
def test_what_the_scenario_says_heals_it(name):
    table = stalls(causes(package.load(name, HEALED[name]).run().timeline))
    found = list(zip(table["cause"].tolist(), table["subject"].tolist(), strict=True))
    cost = dict(zip(found, table["share"].tolist(), strict=True)).get(PLANTED[name], 0.0)
    assert cost < 0.25 * stalls(causes(result(name).timeline))["share"][0]


@pytest.mark.parametrize("name", PLANTED)
def test_no_knob_saves_more_than_its_bound(name):
    run = result(name)
    now = step_time(run.timeline)
    table = whatif(run.timeline, peak_flops=run.summary["peak_flops"])
    assert set(table["knob"].tolist()) >= {"compute speed", "NVLink", "NIC", "latency", "bucket size", "batch"}
    for knob, bound in zip(table["knob"].tolist(), table["saving"].tolist(), strict=True):
        saving = rerun_saving(run.prepared, knob, 2.0, now)
        assert saving is not None, knob
        assert knob == "batch" or saving <= bound + 1e-9, knob


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("why_launch_bound", {}),
        ("why_slow_gpu", {}),
        ("why_tiny_buckets", {}),
        ("why_late_first_bucket", {}),
        ("why_oversubscribed_spine", {}),
        ("single_gpt2_1x1_a100", {}),
        ("zero3_llama3_8b_2x8_a100", {}),
        ("1f1b_gpt2_xl_1x8_a100", {}),  # messages between stages grow with the samples
        (
            "ep8_mixtral_8x7b_8x8_h100",
            {"cluster.nodes": 1, "parallel.global_batch_size": 16},
        ),  # and tokens on their way to experts
        (
            "tp8_pp4_llama3_70b_32x8_h100",
            {"cluster.nodes": 4, "model.options": {"layers": 20}, "parallel.global_batch_size": 32},
        ),  # and what tensor parallelism sends
    ],
)
def test_more_samples_save_about_what_a_run_with_them_saves(name, changes):
    run = package.load(name, changes).run() if changes else result(name)
    table = whatif(run.timeline, knobs=("batch",), peak_flops=run.summary["peak_flops"])
    saving = rerun_saving(run.prepared, "batch", 2.0, step_time(run.timeline))
    # Within 3 points, and 4 where more samples no longer fit the cache that elementwise kernels read from.
    within = 0.04 if name == "why_tiny_buckets" else 0.03
    assert float(table["saving"][0]) == pytest.approx(saving, abs=within)


def test_buckets_of_a_parameter_server_are_bounded_too():
    run = package.load("why_parameter_server", {"strategy.bucket_cap_mb": 1000}).run()
    (bound,) = whatif(run.timeline, knobs=("bucket size",))["saving"].tolist()
    saving = rerun_saving(run.prepared, "bucket size", 2.0, step_time(run.timeline))
    assert 0.3 < saving <= bound


def test_another_bucket_size_saves_nothing_of_an_optimizer_on_the_host():
    """It began before backward ended once gradients could travel early: 21.5 % of a step were said to be saved."""
    away = {
        "strategy.zero_optimization.offload_optimizer": {"device": "cpu", "pin_memory": True},
        "strategy.dram_bandwidth": "200 GB/s",
        "strategy.pcie_bandwidth": "50 GB/s",
    }
    run = package.load("zero2_llama3_8b_2x8_a100", {**away, "model.options": {"layers": 8}}).run()
    (adam,) = {op.duration for op in run.prepared.program.roles[0].ops if op.name == "optimizer on the CPU"}
    backward = run.summary["compute_s"]
    step = step_time(run.timeline)
    assert adam > 0.2 * step  # what begins early could save as much
    assert backward > 0.2 * step
    (bound,) = whatif(run.timeline, knobs=("bucket size",))["saving"].tolist()
    assert bound < 0.1


def test_a_faster_gpu_copies_no_faster_to_its_host():
    away = {"strategy.zero_optimization.offload_optimizer.device": "cpu", "strategy.pcie_bandwidth": "1 GB/s"}
    run = package.load("zero2_llama3_8b_2x8_a100", {**away, "model.options": {"layers": 2}}).run()
    assert run.summary["compute_s"] < 0.3 * step_time(run.timeline)  # the rest is copies
    (bound,) = whatif(run.timeline, knobs=("compute speed",))["saving"].tolist()
    assert bound < 0.2


def test_a_knob_that_saves_next_to_nothing_is_said_to():
    said = explain(result("why_slow_gpu").timeline).bounds
    assert "latency /2 would save nothing" in said


def test_no_knob_of_an_unused_part_is_listed():
    said = " ".join(explain(result("why_slow_gpu").timeline).bounds)  # one machine: nothing crosses a NIC
    assert "NVLink" in said
    assert "NIC" not in said
    assert "between switches" not in said


@pytest.mark.parametrize(
    ("name", "knobs"),
    [
        ("zero3_llama3_8b_2x8_a100", ("NIC", "NVLink", "compute speed")),
    ],
)
def test_no_knob_saves_more_than_its_bound_where_a_run_takes_longer(name, knobs):
    run = result(name)
    now = step_time(run.timeline)
    table = whatif(run.timeline, knobs=knobs, factor=3.0)
    for knob, bound in zip(table["knob"].tolist(), table["saving"].tolist(), strict=True):
        saving = rerun_saving(run.prepared, knob, 3.0, now)
        assert saving is None or saving <= bound + 1e-9, knob


def test_the_bound_is_near_what_the_run_says_where_nothing_else_changes():
    run = result("why_slow_gpu")
    (bound,) = whatif(run.timeline, knobs=("compute speed",))["saving"].tolist()
    assert bound == pytest.approx(rerun_saving(run.prepared, "compute speed", 2.0, step_time(run.timeline)), abs=0.01)


@pytest.mark.parametrize(("topology", "links"), [("hgx-mi300x", "xGMI"), ("hgx-a100", "NVLink")])
def test_links_inside_a_node_have_the_name_that_the_machine_gives_them(topology, links):
    alone = {"cluster.topology": topology, "cluster.nodes": 1, "run.steps": 1}
    timeline = package.load("ddp_gpt2_xl_2x8_a100").changed(alone).run().timeline
    texts = whatif(timeline, knobs=("NVLink",))["text"].tolist()
    assert texts[0].startswith(f"{links} bandwidth x2 would save")


def test_unknown_knobs_are_named():
    with pytest.raises(ScenarioError, match="did you mean 'NVLink'"):
        rerun_saving(result("why_slow_gpu").prepared, "nvlnk", 2.0, 1.0)
    assert set(whatif(result("why_slow_gpu").timeline)["knob"].tolist()) == set(KNOBS)


def test_an_explanation_holds_verdict_causes_path_bounds_and_warnings():
    run = result("why_slow_gpu")
    found = explain(run.timeline, RunFacts.of(run.to_dict()), top=3)
    came_to = "resnet50 on 8 V100-SXM2-16GB (ddp): 237.3 ms a step, 2,158.0 samples per second at 41.7% of peak"
    assert found.verdict == f"{came_to}; 17.6% of the step is lost because rank 3 is slow, and everybody waits for it."
    assert 1 < len(found.causes) <= 3
    assert "1.25 times the median" in found.causes[0]
    assert found.path[0].startswith("compute-bound")
    assert any(text.startswith("compute speed x2 would save at most") for text in found.bounds)
    assert found.warnings == ["rank 3 is 25% slower than the median of its peers"]
    json.dumps(found.to_dict()["causes"])


def test_of_a_run_that_seldom_waits_is_said_what_its_step_goes_to():
    found = explain(result("single_gpt2_1x1_a100").timeline)
    said = "41.29 ms a step; 52.6% of the step goes to compute-bound kernels and 34.2% to memory-bound kernels, "
    # Whatever takes over a quarter is named.
    assert found.verdict.startswith(f"{said}and the largest wait is small, 2.4%: ")
    assert "compute-bound 52.6%" in found.shares


def test_the_sentence_is_one_wherever_it_is_said(clustersim, tmp_path):
    name = "why_oversubscribed_spine"
    said = result(name).in_words
    assert said == result(name).explain().verdict
    assert "lost because links such as leaf0 -> spine0 cannot carry more" in said
    page = tmp_path / "r.html"
    ran = clustersim("run", name, "--report", page).stdout
    assert f"verdict   {said}\n" in ran
    assert ran.index("strategy  ") < ran.index(said) < ran.index("step time") < ran.index("trust: ")
    assert said.replace("->", "→") in page.read_text()
    assert clustersim("explain", name).stdout.startswith(f"{name}: {said}\n")


def test_a_long_run_says_where_its_losses_are_told(monkeypatch):
    from clustersim.scenario import result as results

    monkeypatch.setattr(results, "BLAMED", 10)
    said = package.load("why_slow_gpu").run().in_words
    assert said.startswith("resnet50 on 8 V100-SXM2-16GB (ddp): 237.3 ms a step")
    assert said.endswith("`clustersim explain` says what it loses most by.")
    assert "slow" not in said


def test_a_long_run_says_that_it_is_host_bound_where_the_host_costs_most(monkeypatch):
    from clustersim.scenario import result as results

    monkeypatch.setattr(results, "BLAMED", 10)
    run = package.load("single_gpt2_1x1_a100", {"strategy.micro_batch_size": 1}).run()
    share = run.summary["idle_s"] / run.summary["step_time_s"]
    assert share > 0.03
    said = f"; it is host-bound: {share:.1%} of the step GPUs wait for the host, the largest loss; `clustersim explain`"
    assert said in run.in_words
    assert "host-bound" not in package.load("ddp_resnet50_1x8_v100").run().in_words


def test_a_run_of_many_ranks_says_what_it_loses_most_by():
    """512 GPUs take a tenth of a second."""
    assert "of the step goes to" in package.load("fsdp_llama3_8b_64x8_h100").run().in_words


def test_what_a_run_came_to_says_what_is_missing():
    full = {"model": "m", "gpus": 8, "device": "D", "strategy": "ddp", "mfu": 0.4}
    assert came_to(RunFacts.of(full), 0.2) == "m on 8 D (ddp): 200 ms a step at 40.0% of peak"
    missing = RunFacts.of(full | {"fits": False, "memory": {"missing_bytes": 2**31}})
    assert (
        "m on 8 D (ddp): does not fit, it needs 2 GiB more memory than a GPU has; if it fitted, 200 ms a step"
        in came_to(missing, 0.2)
    )
    assert came_to(RunFacts(), 0.2) == "200 ms a step"


def test_what_a_run_came_to_says_how_likely_a_gpu_runs_out_as_its_memory_line_does():
    run = package.load("ddp_gpt2_xl_2x8_a100", {"strategy.micro_batch_size": 7}).run()
    said = "likelihood of running out 39%"
    assert said in str(run.verdict)
    assert f"at 44.1% of peak, if memory lasts ({said}); " in run.in_words
    assert "lasts" not in package.load("ddp_gpt2_xl_2x8_a100").run().in_words


def test_a_slow_rank_beyond_the_world_is_one_clear_error():
    changes = {"cluster.slow": [{"ranks": [8], "speed": 0.5}]}
    with pytest.raises(ScenarioError, match=r"no rank 8: the run has ranks 0..7 \(at \$.cluster.slow\[0\].ranks\)"):
        package.load("ddp_resnet50_1x8_v100", changes).run()


def test_half_the_speed_doubles_kernels_and_leaves_the_host_alone():
    changes = {"cluster.slow": [{"ranks": [0], "speed": 0.5}], "run.jitter": 0.0}
    program = package.load("ddp_resnet50_1x8_v100", changes).program()
    usual = package.load("ddp_resnet50_1x8_v100", {"run.jitter": 0.0}).program()
    for op, was in zip(program.roles[0].ops, usual.roles[0].ops, strict=True):
        if getattr(op, "bound", "") in {"compute", "memory"}:
            assert op.duration == pytest.approx([2 * was.duration] + [was.duration] * 7)
        elif hasattr(was, "duration"):
            assert op.duration == was.duration


def test_a_change_that_changed_nothing_says_why():
    name = "single_gpt2_1x1_a100"
    scenario = package.load(name, {"strategy.gradient_accumulation_steps": 1, "run.nccl_version": "2.20"})
    _, said = each_change(scenario, result(name).timeline)
    assert said[0].endswith("changed nothing: it is what the scenario says anyway")
    assert said[1].endswith("changed nothing: no step of this run depends on it")
    scenario = package.load(name, {"strategy.micro_batch_size": 2})
    run = scenario.run().timeline
    assert each_change(scenario, run)[1] == []


def test_what_a_change_costs_is_measured_by_a_run_without_it():
    # A cause's cost is a mean over ranks; a slow one holds all of them, so that mending it gives back more.
    name = "ddp_resnet50_1x8_v100"
    slow = package.load(name, {"cluster.slow": [{"ranks": [0], "speed": 0.5}], "run.jitter": 0.0})
    before = step_time(package.load(name, {"run.jitter": 0.0}).run().timeline)
    now = slow.run().timeline
    did, _ = each_change(slow, now)
    assert did[0].startswith("without cluster.slow=")
    assert did[0].endswith(f"a step takes {format_time(before)}, {1 - before / step_time(now):.1%} less (run again)")


def test_memory_near_its_limit_is_a_warning():
    timeline = result("why_slow_gpu").timeline
    told = [
        warnings(timeline, RunFacts(peak_memory_bytes=used, memory=Memory(device_bytes=100.0)))
        for used in (90.0, 96.0, 101.0)
    ]
    assert [["memory" in text for text in texts] for texts in told] == [[False], [False, True], [False, True]]


def test_the_command_explains_a_scenario_and_a_saved_run_alike(clustersim, tmp_path):
    done = clustersim("run", "why_slow_gpu", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    saved = clustersim("explain", tmp_path / "out")
    fresh = clustersim("explain", "why_slow_gpu")
    assert saved.returncode == 0, saved.stderr
    told = [[line for line in one.stdout.splitlines() if "what if: " not in line] for one in (saved, fresh)]
    assert told[0] == told[1]
    bounds, again = ([line for line in one.stdout.splitlines() if "what if: " in line] for one in (saved, fresh))
    # A run that is over cannot be run again, so that it has bounds; of the same knobs.
    assert all(knob in " ".join(lines) for knob in ("compute speed x2", "latency /2") for lines in (bounds, again))
    assert all("at most" in line or "nothing" in line or "about" in line for line in bounds)
    *again, most = again
    assert all("(run again)" in line for line in again)
    # Both say the same bounds: a run one a line, a scenario all in a line behind what was run again.
    for line in bounds:
        if "at most" in line:
            assert re.sub(" would save at most| of the .*", "", line.removeprefix("what if: ")) in most
    assert most.startswith("what if: would save at most: of the step compute speed x2 ")
    assert "samples" not in most  # more samples are told by an estimate, and by a run
    (samples,) = (line for line in bounds if "samples" in line)
    assert samples.endswith("of the time per sample, kernels at the rates they have")
    assert "17.6% of the step is lost because rank 3 is slow" in saved.stdout.splitlines()[0]
    assert "\n 1. Rank 3 is slow" in saved.stdout


def test_the_command_prints_json_and_one_line_errors(clustersim, tmp_path):
    told = json.loads(clustersim("explain", "why_slow_gpu", "--json", "--top", "2").stdout)
    assert told["run"] == "why_slow_gpu"
    assert told["stalls"]["cause"][0] == "slow rank"
    for arguments, text in (
        (("explain", "nonsense"), "no scenario 'nonsense'"),
        (("explain", tmp_path), "an empty folder"),
        (("explain", tmp_path, "--set", "run.steps=3"), "this is a run that is over"),
    ):
        done = clustersim(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith("error: ")
        assert text in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_real_trace_is_found_launch_bound_and_skewed(shared):
    from clustersim.files import traces

    timeline = traces.read(shared / "measurements" / "traces" / "dlrm_8xv100_kineto")
    found = explain(timeline)
    assert "launch-bound" in found.verdict
    assert found.stalls["cause"].tolist()[:2] == ["idle device", "late launch"]
    table = breakdown(timeline)
    compute = table.shares[:, table.states.index("compute-bound")]
    assert compute.mean() == pytest.approx(0.0563, abs=5e-4)  # of the one window, as `trace` says
    spread = skews(timeline)
    spread = spread[spread == spread]
    assert (round(spread.min() * 1e6), round(spread.max() * 1e6)) == (125, 7624)


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel.tp": 2, "parallel.sequence_parallel": True},
        {"parallel.pp": 2, "parallel.vpp": 2, "parallel.microbatches": 8},
    ],
)
def test_settings_that_need_each_other_are_left_out_together(changes, tmp_path):
    path = tmp_path / "s.toml"
    path.write_text(
        '[cluster]\ntopology = "hgx-h100"\nnodes = 1\n[model]\nname = "llama3.2-1b"\nseq_len = 512\ndtype = "bf16"\n'
        '[parallel]\nmicrobatches = 4\n[strategy]\nkind = "ddp"\nparam_dtype = "bf16"\n[run]\nsteps = 2\n'
    )
    made = package.load(path, changes)
    did, idle = each_change(made, made.run().timeline)
    first = next(iter(changes))
    assert any(line.startswith(f"without {first}=2 and parallel.") for line in did)
    assert len(did) + len(idle) == len(changes)
    assert not any("cannot" in line for line in idle)


def test_every_knob_has_a_bound_and_a_run_that_shows_what_it_really_saves():
    assert set(KNOBS) <= set(RERUNS)
    assert len(set(KNOBS)) == len(KNOB_TABLE)
    for knob in KNOB_TABLE:
        assert "{" not in knob.words(2.0)
        assert bool(knob.widens) == bool(knob.link_kinds)


def test_another_bucket_size_saves_no_more_than_gradients_cost():
    """Exchanges of experts are reduce_scatters too, and were taken for gradients: all of what a step lost to
    them was promised."""
    small = {"cluster.nodes": 2, "parallel.global_batch_size": 32, "parallel.dispatcher": "allgather"}
    run = package.load("ep8_mixtral_8x7b_8x8_h100", small).run()
    (bound,) = whatif(run.timeline, knobs=("bucket size",))["saving"].tolist()
    assert bound * step_time(run.timeline) < 0.35 * run.summary["exposed_transfer_s"]


def test_pcie_is_a_knob_of_what_crosses_it_and_of_copies_to_the_host(tmp_path):
    """Cards without NVLink had no what-if for the one link that they have, nor had copies between host and GPU."""
    path = tmp_path / "offloaded.toml"
    path.write_text(
        """
        cluster = {topology = "pcie-rtx4090", nodes = 1, gpus_per_node = 2}
        model = {name = "gpt2-medium", seq_len = 256}
        run = {steps = 3}
        [strategy]
        kind = "zero"
        param_dtype = "bf16"
        zero_optimization = {stage = 2, offload_optimizer = {device = "cpu"}}
        """
    )
    run = package.load(str(path)).run()
    said = " ".join(explain(run.timeline).bounds)
    assert "PCIe bandwidth x2" in said
    (bound,) = whatif(run.timeline, knobs=("PCIe",))["saving"].tolist()
    saving = rerun_saving(run.prepared, "PCIe", 2.0, step_time(run.timeline))
    assert 0.01 < saving <= bound + 1e-9
    assert "PCIe" not in " ".join(explain(result("why_slow_gpu").timeline).bounds)
    alone = package.load(str(path), {"cluster.gpus_per_node": 1}).run()  # nothing but copies crosses PCIe
    assert "PCIe" not in unused(alone.timeline)


def test_more_samples_that_save_nothing_by_an_estimate_are_told_per_sample_all_the_same():
    """A run saved 3.5% "of the step" beside "at most 0.4%": the estimate's nothing lost what it is nothing of."""
    assert _text("batch", 2.0, 0.004, ()).endswith("would save nothing of the time per sample")
    assert _text("host speed", 2.0, 0.004, ()).endswith("would save nothing")
