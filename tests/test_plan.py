"""Plans: bounds prune nothing that belongs on the front, limits are kept, and the answer says why."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import clustersim
from clustersim.app import plots
from clustersim.app.cli import cli
from clustersim.app.report.plan import front_figure, plan_page
from clustersim.cluster import files as fabrics
from clustersim.collectives.base import Group, Request
from clustersim.collectives.bounds import lower_bound
from clustersim.core import topology as topology_nouns
from clustersim.core.device import device
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.core.paths import data_path, shipped
from clustersim.core.program import COMPUTE_STREAM, Collective, Compute, seconds
from clustersim.core.ranges import of_step
from clustersim.model import named_models
from clustersim.scenario.run.held import held
from clustersim.scenario.run.parts import placed, smallest_card
from clustersim.studies import plan as planner
from clustersim.studies.plan.answer import assumptions, told
from clustersim.studies.plan.candidates import (
    DEGREES,
    PlanCandidate,
    StrategyForm,
    base,
    candidates,
    expanded,
    scenario_of,
)
from clustersim.studies.plan.limits import SLACK, SampledSteps, step_bound, too_much
from clustersim.studies.plan.options import PlanOption, SearchResult
from clustersim.studies.plan.places import best_of_places
from clustersim.studies.plan.spec import from_table
from clustersim.studies.plan.untried import untried
from clustersim.studies.plan.verdict import verdict
from clustersim.studies.plan.why import alternatives, fit_of, pace, where_it_goes, why_lost, why_on_front, why_tempting
from clustersim.studies.plan.work_left import FIRST_RUNS, LAST_RUNS, LOOKS, WorkLeft
from clustersim.studies.sweep.row import FullestMemory, HotLink, SweepFigures

PLAN = {
    "title": "GPT-2 XL",
    "model": {"name": "gpt2-xl", "seq_len": 1024, "dtype": "bf16"},
    "machines": [
        {"topology": "hgx-a100", "nodes": [1, 2], "usd_per_gpu_hour": 2.0},
        {"topology": "hgx-h100", "nodes": [1], "usd_per_gpu_hour": 4.0},
    ],
    "batch": {"samples": [64, 128]},
    "try": {
        "micro_batch_size": [2, 8],
        "activation_checkpointing": ["none", "full"],
        "strategies": [{"kind": "ddp"}, {"kind": "fsdp", "param_dtype": "bf16"}],
    },
    "run": {"steps": 2},
}


def plan(**changes):
    return from_table(PLAN | changes)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ({"kind": "fdsp"}, r"unknown strategy 'fdsp'; did you mean 'fsdp'\? \(at \$.try.strategies\[1\].kind\)"),
        ({}, r"missing field 'kind'; .*\(at \$.try.strategies\[1\].kind\)"),
        (
            {"kind": "ddp", "buket_cap_mb": 3},
            r"'buket_cap_mb' = 3; did you mean 'bucket_cap_mb'\? \(at \$.try.strategies\[1\]",
        ),
        ({"kind": "ddp", "tensor_model_parallel_size": 2}, r"write try.parallel.tp \(at \$.try.strategies\[1\]"),
    ],
)
def test_a_kind_or_a_knob_that_there_is_not_is_refused_where_it_is_written(strategy, words):
    """A misspelt knob was a plan of which nothing works, with exit status 0; a kind was refused at $.strategy.kind."""
    with pytest.raises(ScenarioError, match=rf"^plan.toml: .*{words}"):
        plan(**{"try": PLAN["try"] | {"strategies": [{"kind": "ddp"}, strategy]}})


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    read = plan()
    return read, folder, planner.search(read, "plan.toml", folder, planner.SearchOptions(jobs=1))


@pytest.fixture(scope="module")
def every(small, tmp_path_factory):
    """All options of the small plan, simulated."""
    return planner.search(
        small[0], "plan.toml", tmp_path_factory.mktemp("every"), planner.SearchOptions(jobs=1, exhaustive=True)
    )


def figures(found):
    return [(planner.title(one.candidate), one.objectives) for one in found.front]


def test_the_command_that_an_answer_names_writes_launch_files_of_its_option(small, tmp_path, monkeypatch):
    read, folder, _ = small
    monkeypatch.setattr(planner, "load", lambda _: (read, Path("plan.toml")))
    done = CliRunner().invoke(cli, ["plan", "small", "--out", str(folder), "--jobs", "1"])
    (words,) = [line for line in done.output.splitlines() if line.startswith("launch it: clustersim ")]
    monkeypatch.chdir(tmp_path)
    wrote = CliRunner().invoke(cli, words.removeprefix("launch it: clustersim ").split())
    assert wrote.exit_code == 0, wrote.output
    chosen = json.loads((folder / "plan.json").read_text())["front"][0]["scenario"]["strategy"]
    files = {file.name: file.read_text() for file in tmp_path.iterdir()}
    assert files
    assert str(chosen["micro_batch_size"]) in "".join(files.values())


# ---- the search ------------------------------------------------------------------------------------------------------


def test_the_pruned_search_finds_exactly_the_exhaustive_front(small, every):
    _, _, pruned = small
    assert [name for name, _ in figures(pruned)] == [name for name, _ in figures(every)]
    for (_, of_few), (_, of_all) in zip(figures(pruned), figures(every), strict=True):
        assert of_few == pytest.approx(of_all, rel=1e-12)
    assert sum(one.state == "simulated" for one in every.options) > sum(
        one.state == "simulated" for one in pruned.options
    )


def test_no_run_beats_the_bounds_it_is_pruned_by(small, every):
    read, _, _ = small
    for one in (one for one in every.options if one.state == "simulated"):
        bound = step_bound(scenario_of(read, "plan.toml", one.candidate).prepare())
        assert bound.step_s <= one.step_s
        assert bound.compute_s <= one.result.compute_s


def test_a_bound_adds_up_every_op_of_the_last_step(small):
    """Alike ops are asked once and counted: one by one, they add up to the same."""
    read, _, before = small
    for option in before.options:
        made = scenario_of(read, "plan.toml", option.candidate).prepare()
        (role,) = made.program.roles
        last = max(op.step for op in role.ops)
        ops = [op for op in role.ops if op.step == last]
        busy = sum(seconds(role, op) for op in ops if isinstance(op, Compute) and op.stream == COMPUTE_STREAM)
        streams = defaultdict(float)
        for op in ops:
            if isinstance(op, Collective):
                group = Group(made.topology, made.mesh.gpus[op.groups[0]], made.scenario.file.run.launch)
                streams[op.stream] += lower_bound(Request(op.kind, op.nbytes, root=op.root), group)
        bound = step_bound(made)
        assert bound.compute_s == pytest.approx(SLACK * np.min(busy), rel=1e-12)
        longest = max(np.min(busy), *streams.values())
        assert bound.step_s == pytest.approx(SLACK * longest, rel=1e-12)


@pytest.mark.parametrize(
    "strategy",
    [
        {"kind": "ddp"},
        {"kind": "ddp", "gradient_accumulation_steps": 3},
        {"kind": "fsdp", "param_dtype": "bf16"},
        {"kind": "fsdp", "gradient_accumulation_steps": 2, "data_parallel_replicate_degree": 2},
        *({"kind": "zero", "zero_optimization": {"stage": stage}} for stage in (1, 2, 3)),
        {"kind": "zero", "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 3}},
        {"kind": "zero", "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"kind": "parameter_server"},
    ],
    ids=str,
)
def test_two_steps_say_the_bound_of_as_many_as_are_played(strategy, monkeypatch):
    made = clustersim.scenario.load(
        "ddp_gpt2_xl_2x8_a100", {"strategy": strategy, "model.name": "gpt2", "run.steps": 5, "run.jitter": 0.03}
    )
    looked = []
    monkeypatch.setattr("clustersim.studies.plan.limits.step_bound", lambda one: looked.append(one) or step_bound(one))
    sampled, whole = SampledSteps().bound(held(made)), step_bound(made.prepare())
    assert len(looked) == (strategy["kind"] == "parameter_server")
    looked.clear()
    monkeypatch.setattr("clustersim.studies.plan.limits.sampled_step", lambda parts: None)  # as of a strategy of others
    for bound in (sampled, SampledSteps().bound(held(made))):
        assert bound.compute_s == pytest.approx(whole.compute_s, rel=1e-12)
        assert bound.step_s == pytest.approx(whole.step_s, rel=1e-12)
    steps = 1 + max(op.step for op in looked[0].program.roles[0].ops)
    assert steps == (5 if strategy["kind"] == "parameter_server" else 2)


def test_an_interrupted_plan_goes_on_where_it_was(small, monkeypatch):
    read, folder, before = small
    monkeypatch.setattr("clustersim.studies.plan.rounds.compute", lambda *_: pytest.fail("simulated again"))
    assert figures(planner.search(read, "plan.toml", folder, planner.SearchOptions(jobs=1))) == figures(before)


def test_processes_and_one_process_give_the_same_answer(small, tmp_path):
    read, _, before = small
    after = planner.search(read, "plan.toml", tmp_path, planner.SearchOptions(jobs=2))
    assert planner.told(read, after) == planner.told(read, before)


def test_memory_rules_out_what_does_not_fit_and_says_what_fills_it():
    read = plan(
        machines=[{"topology": "hgx-v100-4gpu-4x100g", "nodes": [1]}],
        batch={"samples": [1, 4096]},
        **{"try": {"micro_batch_size": [32], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]}},
    )
    (one, *_) = candidates(read, {(0, 1): 4})
    made = scenario_of(read, "plan.toml", one)
    assert "needs" in too_much(held(made), 0.05)
    assert too_much(held(made), 0.0).startswith("needs")


@pytest.mark.parametrize(
    ("limits", "word"),
    [({"tokens": 1e9, "deadline": "1 h"}, "days"), ({"tokens": 1e9, "budget_usd": 1.0}, "USD"), ({"gpus": 8}, "")],
)
def test_limits_are_kept_and_what_breaks_one_says_which(limits, word, tmp_path):
    found = planner.search(plan(limits=limits), "plan.toml", tmp_path, planner.SearchOptions(jobs=1))
    if "gpus" in limits:
        assert max(one.candidate.gpus for one in found.options) == 8
        return
    reasons = [one.reason for one in found.options if one.state in {"limits", "simulated"} and one.reason]
    assert reasons
    assert all(word in reason and "allowed" in reason for reason in reasons)
    assert not any(one.on_front for one in found.options if one.reason)


def test_a_deadline_of_images_is_told_in_samples(tmp_path):
    images = plan(limits={"tokens": 1e12, "deadline": "1 h"}, model={"name": "resnet18", "dtype": "bf16"})
    found = planner.search(images, "plan.toml", tmp_path, planner.SearchOptions(jobs=1))
    reasons = [one.reason for one in found.options if "allowed" in one.reason]
    assert reasons
    assert all("for 1e+12 samples" in reason for reason in reasons)


def test_a_step_has_as_many_samples_as_the_plan_says():
    read = plan()
    for one in candidates(read, {(0, 1): 8, (0, 2): 16, (1, 1): 8}):
        strategy = one.changes["strategy"]
        assert 64 <= one.batch <= 128
        assert one.batch == one.gpus * strategy["micro_batch_size"] * strategy["gradient_accumulation_steps"]


def test_every_list_of_a_strategy_is_a_choice():
    table = {"kind": "zero", "zero_optimization": {"stage": [1, 2, 3], "overlap_comm": True}, "param_dtype": ["bf16"]}
    assert [one["zero_optimization"]["stage"] for one in expanded(table)] == [1, 2, 3]


# ---- the front -------------------------------------------------------------------------------------------------------

points = st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=12)


@settings(deadline=None)
@given(points)
def test_nothing_on_the_front_is_beaten_and_everything_off_it_is_beaten_or_equal(found):
    kept = planner.front(found)
    for i, point in enumerate(found):
        beaten = any(planner.dominates(other, point) for other in found)
        equal = any(found[k] == point for k in kept)
        assert (i in kept) <= (not beaten)
        assert i in kept or beaten or equal


def test_every_option_on_the_front_says_why_and_the_best_of_each_kind_off_it_says_who_beats_it(small):
    _, _, found = small
    said = [why_on_front(one, found) for one in found.front]
    assert any("the fastest" in text for text in said)
    assert any("the cheapest per token" in text for text in said)
    for one in alternatives(found):
        assert why_lost(one, found)


# ---- money and power -------------------------------------------------------------------------------------------------


def test_cost_and_energy_are_the_closed_form():
    known = planner.rates(
        "H100-SXM5-80GB", 3.0, {"compute": 1.0, "communication": 0.5, "idle": 0.1, "rest_of_machine": 0.5, "pue": 1.2}
    )
    watts = 700 * (0.6 * 1.0 + 0.3 * 0.5 + 0.1 * 0.1 + 0.5) * 1.2
    assert planner.watts_per_gpu(known, 1.0, 0.6, 0.3) == pytest.approx(watts)
    spent = planner.costs(known, 16, 1000.0, watts)
    assert spent.usd_per_hour == 48.0
    assert spent.usd_per_sample == pytest.approx(48.0 / 3600 / 1000)
    assert spent.kwh_per_sample == pytest.approx(16 * watts / 1000 / 3.6e6)


def test_a_machine_of_h100s_in_kernels_all_the_time_draws_what_was_measured():
    """8.4 kW at most, without the building: arXiv:2412.08602."""
    known = planner.rates("H100-SXM5-80GB", power={"pue": 1.0})
    assert 8 * planner.watts_per_gpu(known, 1.0, 1.0, 0.0) == pytest.approx(8400.0)


def test_every_figure_of_the_data_has_its_source():
    data = tomllib.loads((data_path("data") / "economics.toml").read_text())
    assert all(row["source"] and row["date"] for row in data["price"].values())
    assert len({row["date"] for row in data["price"].values()}) == 1  # prices of one day are compared
    assert all(f"{name}_source" in data["power"] for name in data["power"] if not name.endswith("_source"))


def test_without_any_price_no_cost_is_told_and_none_is_compared(tmp_path):
    read = plan(
        machines=[{"topology": "pcie-rtx3090", "nodes": [1]}],
        model={"name": "resnet50"},
        **{"try": {"micro_batch_size": [32], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]}},
        batch={"samples": [32, 256]},
    )
    found = planner.search(read, "plan.toml", tmp_path, planner.SearchOptions(jobs=1))
    said = planner.told(read, found)
    assert said.unit == "samples"
    assert said.front[0].usd_per_1e9 is None
    assert any("no price" in line for line in said.assumptions)
    assert "nothing is said of cost" in said.verdict
    assert "cheapest" not in said.front[0].why
    assert "kWh" in plots.alt_text(front_figure(said))


def test_a_machine_without_a_price_is_never_ranked_by_cost(tmp_path):
    machines = [
        {"topology": "hgx-a100", "nodes": [1], "usd_per_gpu_hour": 2.0},
        {"topology": "pcie-a100", "nodes": [1]},
    ]
    found = planner.search(
        plan(machines=machines), "plan.toml", tmp_path, planner.SearchOptions(jobs=1, exhaustive=True)
    )
    unpriced = [one for one in found.options if one.counts and one.candidate.machine.label == "pcie-a100"]
    assert unpriced
    for one in unpriced:
        assert not one.priced
        assert one.costs.usd_per_sample is None
    said = planner.told(plan(machines=machines), found)
    for row in (*said.front, *said.alternatives, *said.tempting):
        if row.machine == "pcie-a100":
            assert "cheap" not in row.why
            assert "dearer" not in row.why
    assert "among those with a price (pcie-a100 has none)" in said.verdict
    assert "pcie-a100: no price" in plots.alt_text(front_figure(said))
    dear = planner.search(
        plan(machines=machines, limits={"tokens": 1e9, "budget_usd": 1e9}),
        "plan.toml",
        tmp_path,
        planner.SearchOptions(jobs=1),
    )
    reasons = {
        one.reason for one in dear.options if one.candidate.machine.label == "pcie-a100" and one.state == "limits"
    }
    assert reasons == {"has no price, so nobody knows whether it keeps the budget: give usd_per_gpu_hour"}


@pytest.fixture(scope="module")
def two_machines(tmp_path_factory):
    """A search over a fast machine without a price, and one that has a price."""
    read = plan(
        machines=[{"topology": "alps-gh200", "nodes": [1, 2]}, {"topology": "hgx-a100", "nodes": [1, 2]}],
        model={"name": "resnet50"},
        batch={"samples": [256, 1024]},
        **{"try": {"micro_batch_size": [64], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]}},
    )
    return read, planner.search(read, "plan.toml", tmp_path_factory.mktemp("two"), planner.SearchOptions(jobs=1))


def test_what_a_price_alone_brings_to_the_front_is_not_praised_for_energy(two_machines):
    """It once drew "-34.1% less energy" than a faster machine without a price."""
    _, found = two_machines
    assert not found.front[0].priced
    reasons = [why_on_front(one, found) for one in found.front]
    assert "the fastest with a price" in reasons
    assert not any("-" in reason.split(" than ")[0] for reason in reasons)


def test_efficiency_over_more_gpus_compares_a_machine_with_itself(two_machines):
    """16 A100 were 42 % efficient beside 4 GH200."""
    page = plan_page(planner.told(*two_machines))
    (scaling,) = (part for part in page.sections if part.id == "scaling")
    assert "each machine" in scaling.words[0]
    (drawing,) = scaling.svgs
    efficient = [int(share) for share in re.findall(r"(\d+)% efficient", str(drawing))]
    assert len(efficient) == 4  # wide, and as a phone shows it
    assert efficient[:2] == efficient[2:]
    assert min(efficient) > 90


# ---- errors ----------------------------------------------------------------------------------------------------------


def option(number, kind, rate, gpus=8, usd=1.0):
    """An option that was simulated, of made figures."""
    form = StrategyForm({"kind": kind}, {}, kind, (), (False, False), 0, False, dict.fromkeys(DEGREES, 1))
    candidate = PlanCandidate(number, plan().machines[0], 1, gpus, form, (64 // gpus, 1), "none")
    result = SweepFigures(
        step_time_s=64 / rate,
        samples_per_s=rate,
        compute_s=0.0,
        exposed_communication_s=0.0,
        gpus=gpus,
        peak_memory_bytes=0.0,
        fits=True,
        phase_shares={"forward": 0.3, "exposed_communication": 0.31},
        hottest_links=[HotLink("node3/nic0 -> leaf0", 0.9)],
    )
    objectives = (-rate, usd * gpus / rate, float(gpus), gpus / rate)
    return PlanOption(candidate, "simulated", result=result, rate=rate, objectives=objectives, kind=kind)


def test_where_a_step_goes_is_said_with_the_busiest_sort_of_link():
    said = "31% of the step is exposed communication (busiest: nic -> leaf, 90% of its line rate)"
    assert where_it_goes(option(0, "fsdp", 100.0)) == said


def judged(*options):
    """What a search makes of options, with errors of 3 % for fsdp and 36 % for zero."""
    errors = {"fsdp": 0.03, "zero": 0.36}
    options = tuple(msgspec.structs.replace(one, error=errors[one.kind]) for one in options)
    return SearchResult(options, (planner.rates("A100-SXM4-80GB", 1.0),) * 2, True).judged()


def test_the_fewest_gpus_are_no_reason_where_every_option_has_as_many():
    """Each of a front on 64 GPUs was told to be the fewest GPUs, and some nothing else."""
    cheaper = msgspec.structs.replace(option(1, "fsdp", 90.0), objectives=(-90.0, 0.05, 8.0, 0.05))
    same = judged(option(0, "fsdp", 100.0), cheaper)
    assert not any("fewest" in why_on_front(one, same) for one in same.front)
    larger = judged(option(0, "fsdp", 180.0, gpus=16), option(1, "fsdp", 100.0))
    assert [("fewest" in why_on_front(one, larger)) for one in larger.front] == [False, True]


def test_of_options_on_the_fewest_gpus_the_fastest_alone_is_worth_having_for_that():
    """Of two on 64 GPUs, beside 192, one was slower and dearer and was there for "the fewest GPUs" as well."""
    frugal = msgspec.structs.replace(option(2, "fsdp", 96.0), objectives=(-96.0, 0.085, 8.0, 0.07))
    found = judged(option(0, "fsdp", 180.0, gpus=16), option(1, "fsdp", 100.0), frugal)
    reasons = [why_on_front(one, found) for one in found.front]
    assert [reason.count("the fewest GPUs") for reason in reasons] == [0, 1, 0]
    assert reasons[2] == "the least energy per token"


def test_a_small_advantage_that_is_not_certain_is_tempting_and_a_large_one_is_taken():
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0))
    assert [one.kind for one in found.front] == ["fsdp"]
    assert [one.kind for one in found.tempting] == ["zero"]
    said = why_tempting(found.tempting[0], found)
    assert "4.0% faster" in said
    assert "+-36%" in said
    assert "less than 640 ms" in said  # 64 samples at 100 a second
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 150.0))
    assert [one.kind for one in found.front] == ["zero"]
    assert not found.tempting


def test_the_verdict_takes_what_is_certain_and_names_what_is_tempting():
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0))
    said = verdict(plan(), found)
    assert said.startswith("Take 8 GPUs (hgx-a100) with fsdp")
    assert "zero looks 4.0% faster, but is predicted to +-36% only: measure it" in said


def test_of_one_kind_the_verdict_names_the_best_alone_as_what_looks_faster():
    """Two of FSDP's were named, 4.7% and 4.8% ahead, the first to be measured beside and the second before."""
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0), option(2, "zero", 103.9))
    said = verdict(plan(), found)
    assert said.count("zero") == 1
    assert said.count("looks") == 1


def test_what_is_cheapest_at_the_worse_end_of_its_range_alone_has_no_negative_saving():
    """It once was "the cheapest per token, by -4.2%"."""
    found = judged(option(0, "fsdp", 96.0, gpus=8), option(1, "zero", 200.0, gpus=16))
    said = verdict(plan(), found)
    assert "Should each be as bad as its range allows, the cheapest per token is 8 GPUs" in said
    assert "as predicted 4.2% dearer, less than predictions are off (+-36%), and 2.1 times as long" in said


def test_what_another_option_looks_faster_than_is_the_fastest_by_errors_counted_alone():
    """Once told of an option that the front beats, and not of one that the other tables beat."""
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0))
    assert [one.kind for one in found.front] == ["fsdp"]
    assert why_on_front(found.front[0], found).endswith(", errors counted")
    alone = judged(option(0, "fsdp", 100.0), option(1, "zero", 90.0))
    assert "errors counted" not in why_on_front(alone.front[0], alone)


def test_what_a_rough_run_is_ahead_of_is_not_flatly_the_fastest_nor_the_other_known_less_well():
    """It once said so of two options of one kind, whose predictions have one error."""
    ahead = msgspec.structs.replace(option(1, "fsdp", 102.0), state="rough")
    found = judged(option(0, "fsdp", 100.0), ahead)
    why = why_lost(found.options[1], found)
    assert "2% faster than the fastest" in why
    assert "rough run alone" in why
    assert "known less well" not in why
    assert "the fastest of what was run whole" in why_on_front(found.front[0], found)
    assert "the fastest of what was run whole" in verdict(plan(), found)
    vague = msgspec.structs.replace(option(1, "zero", 102.0), state="rough")
    found = judged(option(0, "fsdp", 100.0), vague)
    assert "known less well" in why_lost(found.options[1], found)
    behind = msgspec.structs.replace(option(1, "fsdp", 98.0), state="rough")
    found = judged(option(0, "fsdp", 100.0), behind)
    assert "run whole" not in why_on_front(found.front[0], found) + verdict(plan(), found)


def test_why_options_cannot_be_run_is_said_with_counts():
    """A plan once counted them, and gave no reason."""
    reasons = ["tp 3 does not divide 32 heads", "tp 5 does not divide 32 heads", "the GPU has no fp8"]
    failed = [PlanOption(option(i, "fsdp", 1.0).candidate, "error", why) for i, why in enumerate(reasons, 1)]
    failed = [msgspec.structs.replace(each, kind="fsdp") for each in failed]
    kinds = [SimpleNamespace(device=name, gpu=device(name)) for name in ("A100-SXM4-80GB", "H100-SXM5-80GB")]
    made = {("hgx-a100", 1): SimpleNamespace(node_types=kinds)}
    found = replace(judged(option(0, "fsdp", 100.0), *failed), topologies=made)
    (why,) = (line for line in told(plan(), found).warnings if "cannot be run" in line)
    assert why == ("3 options cannot be run, by reason 2: tp 3 does not divide 32 heads; 1: the GPU has no fp8")
    alone = replace(judged(option(0, "fsdp", 100.0)), topologies=made)
    assert not any("cannot be run" in line for line in told(plan(), alone).warnings)


def of_degree(number, rate, passes, tp, usd=1.0):
    """An option of a split model, with so many passes."""
    made = option(number, "fsdp", rate, usd=usd)
    degrees = {**dict.fromkeys(DEGREES, 1), "tp": tp}
    fields = {"number": tp, "split": True, "family": f"fsdp, tp {tp}", "degrees": degrees}
    form = msgspec.structs.replace(made.candidate.form, **fields)
    candidate = msgspec.structs.replace(made.candidate, form=form, played=(2, passes))
    return msgspec.structs.replace(made, candidate=candidate)


def test_an_option_that_is_told_is_no_alternative_with_other_passes():
    """Of a degree on the front the same option once came again, with other passes."""
    found = judged(
        of_degree(0, 100.0, 4, 1),
        of_degree(1, 80.0, 4, 2, usd=0.5),
        of_degree(2, 79.0, 8, 2),
        of_degree(3, 60.0, 4, 4),
        of_degree(4, 59.0, 8, 4),
    )
    assert [each.candidate.number for each in found.front] == [0, 1]
    assert [each.candidate.number for each in alternatives(found)] == [3]


def test_what_has_room_is_told_and_numbered_beside_what_may_run_out_of_memory():
    """Of FSDP in fp8 the verdict named two, one to measure and one with room: neither had a number to run it by, and
    the table had neither."""
    tight = msgspec.structs.replace(of_degree(1, 104.0, 4, 2), kind="zero")
    memory = FullestMemory(80 * 2**30, 80 * 2**30, (70 * 2**30, 92 * 2**30))
    tight = msgspec.structs.replace(tight, result=msgspec.structs.replace(tight.result, memory=memory))
    roomy = msgspec.structs.replace(of_degree(2, 99.0, 8, 2), kind="zero")
    found = judged(of_degree(0, 100.0, 4, 1), tight, roomy)
    assert [each.rate for each in found.tempting] == [104.0]
    assert [each.rate for each in alternatives(found)] == [99.0]
    name = "A100-SXM4-80GB"
    made = {("hgx-a100", 1): SimpleNamespace(node_types=[SimpleNamespace(device=name, gpu=device(name))])}
    answer = told(plan(), replace(found, topologies=made))
    assert [(number, row.rate) for number, row in answer.numbered_others()] == [(2, 104.0), (3, 99.0)]


def test_nothing_is_a_negative_share_slower():
    """It once printed "-1% slower" of what looks faster and is known less well, and "0% slower" of equals."""
    assert pace(100.9, 100.0) == "1% faster as predicted, but known less well"
    assert pace(100.0, 100.1) == pace(100.1, 100.0) == "as fast"
    assert pace(90.0, 100.0) == "10% slower"
    found = judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0))
    assert "-4%" not in why_lost(found.options[1], found)
    assert "4% faster as predicted, but known less well than" in why_lost(found.options[1], found)


def test_the_verdict_first_says_what_to_take_and_then_why_a_sentence_each():
    """One sentence of 104 words had "the fastest of what was tried with room in memory of what was run whole at the
    worse end of its range"."""
    rough = msgspec.structs.replace(option(2, "fsdp", 102.0), state="rough")
    found = replace(judged(option(0, "fsdp", 100.0), option(1, "zero", 104.0), rough), untried=("a pipeline",))
    first, second, *_ = verdict(plan(), found).split(". ")
    assert first == "Take 8 GPUs (hgx-a100) with fsdp (100 tokens/s +-3%)"
    assert second == (
        "Should each be as bad as its range allows, "
        "it is the fastest of what was tried and run whole, and the cheapest per token"
    )


def test_of_what_computes_in_8_bits_the_verdict_names_the_fastest_that_does_not():
    """Mistral Small on 64 H200: 355,171 tokens/s in fp8 were to be taken, and nothing was said of the loss, nor that
    bf16 has 252,331."""
    narrow = option(0, "fsdp", 140.0)
    form = msgspec.structs.replace(narrow.candidate.form, recipe={"dtype": "fp8"})
    candidate = msgspec.structs.replace(narrow.candidate, form=form)
    found = judged(msgspec.structs.replace(narrow, candidate=candidate), option(1, "fsdp", 100.0))
    said = verdict(plan(), found)
    assert "Whether the loss is as good in fp8 is not predicted; the fastest found without is 8 GPUs" in said
    assert "(100 tokens/s" in said
    assert "the loss" not in verdict(plan(), judged(option(0, "fsdp", 100.0)))


def test_what_beats_the_fastest_of_a_place_by_errors_counted_alone_is_told_so():
    """Of 180,446 tokens/s it was said that an option of 178,787 is no worse in anything."""
    vague, sure = option(1, "zero", 104.0), option(0, "fsdp", 100.0)
    found = replace(judged(sure, vague), gpus={("hgx-a100", 1): 8})
    ((_, best, why),) = best_of_places(plan(), found)
    assert best.kind == "zero"
    assert why.endswith("is no worse in anything, errors counted")


def test_the_verdict_says_where_memory_may_run_out():
    one = option(0, "fsdp", 100.0)
    for shown, said in ((79, False), (83, True)):
        memory = FullestMemory(80 * 2**30, shown * 2**30)
        result = msgspec.structs.replace(one.result, peak_memory_bytes=72 * 2**30, memory=memory)
        tight = msgspec.structs.replace(one, result=result)
        sentence = "needs 72 GiB, and with the allocator's and NCCL's own about 83 GiB of 80 GiB: it may run out"
        assert (sentence in verdict(plan(), judged(tight))) == said
    memory = FullestMemory(80 * 2**30, 76 * 2**30, (70 * 2**30, 92 * 2**30))
    result = msgspec.structs.replace(one.result, peak_memory_bytes=68 * 2**30, memory=memory)
    tight = msgspec.structs.replace(one, result=result)
    assert "of 80 GiB: it may run out (likelihood of running out 38%)" in verdict(plan(), judged(tight))
    assert (fit_of(tight), fit_of(one)) == ("may run out (likelihood of running out 38%)", "")
    roomy = option(1, "fsdp", 90.0)
    memory = FullestMemory(80 * 2**30, 50 * 2**30, (45 * 2**30, 60 * 2**30))
    result = msgspec.structs.replace(roomy.result, peak_memory_bytes=45 * 2**30, memory=memory)
    roomy = msgspec.structs.replace(roomy, result=result)
    found = judged(tight, roomy)
    first, taken, *more = verdict(plan(), found).split(". ")
    assert found.front[0].candidate.number == 1  # what is launched, and run as option 1
    assert first == "Take 8 GPUs (hgx-a100) with fsdp (90 tokens/s +-3%)"
    assert taken.startswith("It is the fastest with room in memory")
    # Of two options on one machine the faster is the cheaper: "why these" calls that one the cheapest.
    assert "the fastest with room in memory, and the cheapest per token" in taken
    looks = "looks 11.1% faster, but may run out of memory (likelihood of running out 38%)"
    assert any(looks in sentence for sentence in more)
    assert why_on_front(found.front[0], found).startswith("the fastest with room in memory")
    assert why_on_front(found.front[1], found).endswith("may run out (likelihood of running out 38%)")
    alone = verdict(plan(), judged(tight)).split(". ")[0]
    assert "of those with room" not in alone
    # On the first line, where nothing is safer.
    assert "which may run out of memory (likelihood of running out 38%)" in alone


def test_nobody_is_told_to_take_what_is_likely_to_run_out_where_what_has_room_breaks_a_limit_by_little():
    """Qwen3-32B on 48 A100 of 40 GB: "take" what runs out with 74 %, "nothing that was run leaves more room", and what
    fits took 30.1 days of 30."""
    memory = FullestMemory(80 * 2**30, 86 * 2**30, (76 * 2**30, 96 * 2**30))
    tight = option(0, "fsdp", 100.0)
    result = msgspec.structs.replace(tight.result, peak_memory_bytes=72 * 2**30, memory=memory)
    tight = msgspec.structs.replace(tight, result=result)
    roomy = msgspec.structs.replace(option(1, "fsdp", 90.0), reason="takes 30.1 days for 1e+11 tokens; 30.0 allowed")
    said = verdict(plan(), judged(tight, roomy))
    assert said.startswith("Nothing that keeps the limits is likely to fit. To try is 8 GPUs")
    assert "; with room, 8 GPUs (hgx-a100) with fsdp (90 tokens/s +-3%) takes 30.1 days" in said
    assert "nothing that was run leaves more room" in verdict(plan(), judged(tight))


def test_the_next_best_with_room_is_not_called_the_next_best_of_all():
    """Of Gemma 3 on 320 B200 the table had 2.85 million tokens/s where the next best was said to have 2.53 million."""
    risky = option(2, "zero", 95.0)
    memory = FullestMemory(80 * 2**30, 76 * 2**30, (70 * 2**30, 92 * 2**30))
    result = msgspec.structs.replace(risky.result, peak_memory_bytes=68 * 2**30, memory=memory)
    risky = msgspec.structs.replace(risky, result=result)
    first, roomy = option(0, "fsdp", 100.0), option(1, "zero", 80.0)
    assert "the next best of another kind with room in memory, " in verdict(plan(), judged(first, roomy, risky))
    assert "the next best of another kind, " in verdict(plan(), judged(first, roomy))


def test_a_rough_run_with_room_is_set_beside_the_fastest_that_has_room():
    """1 % slower than what was taken, it was "16 % slower than the fastest", which was likelier than not to run out."""
    memory = FullestMemory(80 * 2**30, 86 * 2**30, (76 * 2**30, 96 * 2**30))
    risky = option(0, "fsdp", 120.0)
    result = msgspec.structs.replace(risky.result, peak_memory_bytes=72 * 2**30, memory=memory)
    risky = msgspec.structs.replace(risky, result=result)
    rough = msgspec.structs.replace(option(2, "zero", 97.0), state="rough")
    found = judged(risky, option(1, "fsdp", 100.0), rough)
    assert len(found.front) == 2
    assert why_lost(rough, found).startswith("3% slower than the fastest with room, roughly")
    alone = judged(option(0, "fsdp", 120.0), rough)
    assert why_lost(rough, alone).startswith("19% slower than the fastest, roughly")


def test_what_is_slower_on_fewer_gpus_says_on_how_many():
    """On 64 H100s it was "90% slower than the fastest", which were 192 B200s."""
    rough = msgspec.structs.replace(option(1, "fsdp", 100.0), state="rough")
    found = judged(option(0, "fsdp", 180.0, gpus=16), rough)
    assert "the fastest (16 GPUs, and this has 8), roughly" in why_lost(rough, found)


@pytest.mark.parametrize(
    ("rate", "words"),
    [(97.0, "3.1% faster than the next best of another kind"), (70.0, "42.9% faster"), (104.0, "looks 4.0% faster")],
)
def test_the_verdict_says_by_how_much_it_wins_and_whether_that_can_be_told(rate, words):
    """An option that was run roughly alone is a rival too: its rate is printed beside the winner's."""
    zero = msgspec.structs.replace(option(1, "zero", rate), state="rough")
    found = judged(option(0, "fsdp", 100.0), zero)
    said = verdict(plan(), found)
    fsdp, zero = found.options
    slow, fast = sorted((fsdp, zero), key=lambda each: each.rate)
    overlap = fast.rate / (1 + fast.error) <= slow.rate * (1 + slow.error)
    assert words in said
    assert ("their ranges overlap: measure both" in said) == overlap
    assert ("their ranges do not overlap" in said) == (not overlap)
    assert ", run roughly" in said


row = st.tuples(st.sampled_from(["fsdp", "zero"]), st.integers(50, 150), st.sampled_from([8, 16]))


@settings(deadline=None, max_examples=50)
@given(st.lists(row, min_size=1))
def test_every_option_is_on_the_front_or_tempting_or_beaten_by_one_that_is_certain(rows):
    found = judged(*(option(i, kind, float(rate), gpus) for i, (kind, rate, gpus) in enumerate(rows)))
    assert found.front
    for one in found.options:
        assert one.on_front or any(
            all(x <= y for x, y in zip(best.robust, one.robust, strict=True)) for best in found.front
        )
        assert not (one.on_front and one.tempting)
    assert not any("-" in why_on_front(one, found).replace("+-", "") for one in found.front)
    looks = max(one.rate for one in found.options) / found.front[0].rate - 1
    assert (f"looks {looks:.1%} faster" in verdict(plan(), found)) == (looks > 0)


def test_validations_error_is_carried_into_every_figure(small):
    read, _, found = small
    said = planner.told(read, found)
    for row in said.front:
        assert row.error == of_step(row.kind).p50 > 0


# ---- files and the command -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in shipped("scenarios") if name.startswith("plan_")])
def test_shipped_plans_are_read_and_their_options_can_be_said(name):
    read, path = planner.load(name)
    gpus = {(m, nodes): 8 * nodes for m, one in enumerate(read.machines) for nodes in one.nodes}
    found = list(candidates(read, gpus))
    assert found
    assert base(read)["model"] == read.model
    scenario_of(read, path, found[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": {"samples": [8, 4]}}, "at least, at most"),
        ({"limits": {"deadline": "3 d"}}, "needs tokens"),
        ({"machine": []}, "unknown field"),
        ({"try": {"strategies": []}}, "length"),
        ({"machines": [{"topology": "hgx-a100", "nodes": [0]}]}, "nodes"),
    ],
)
def test_what_cannot_be_planned_is_one_clear_error(changes, words):
    with pytest.raises(ScenarioError, match=words):
        plan(**changes)


def test_a_batch_that_no_machine_makes_is_an_error(tmp_path):
    with pytest.raises(ClusterSimError, match=r"\$\.batch\.samples"):
        planner.search(plan(batch={"samples": 3}), "plan.toml", tmp_path, planner.SearchOptions(jobs=1))


def test_the_command_prints_the_front_and_writes_the_answer(tmp_path: Path):
    file = tmp_path / "plan.toml"
    file.write_text(
        'title = "R"\n[model]\nname = "resnet50"\n[[machines]]\ntopology = "dgx-1v"\nnodes = [1, 2]\n'
        "usd_per_gpu_hour = 2.0\n[batch]\nsamples = [256, 512]\n[limits]\ntokens = 1e9\n"
        '[try]\nmicro_batch_size = [32]\nactivation_checkpointing = ["none"]\n[[try.strategies]]\nkind = "ddp"\n'
        "bucket_cap_mb = [1, 25]\n"
    )
    done = CliRunner().invoke(cli, ["plan", str(file), "--out", str(tmp_path / "out"), "--jobs", "1"])
    assert done.exit_code == 0, done.output
    for words in ("why these", "the fastest", "assumed: dgx-1v: 2 USD", "options:"):
        assert words in done.stdout
    said = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert said["front"][0]["usd"] > 0
    again = CliRunner().invoke(cli, ["plan", str(file), "--out", str(tmp_path / "out"), "--jobs", "1", "--json"])
    assert json.loads(again.stdout) == said


def test_from_python_the_answer_is_the_commands(small, tmp_path):
    read, folder, found = small
    assert clustersim.plan(read, folder, jobs=1) == planner.told(read, found)


# ---- what an answer owes its reader ----------------------------------------------------------------------------------

SMALL = {
    "model": {"name": "gpt2", "seq_len": 1024, "dtype": "bf16", "implementation": "fused"},
    "machines": [{"topology": "hgx-h100", "nodes": [1, 2, 8]}, {"topology": "hgx-b200", "nodes": [1]}],
    "batch": {"samples": [64, 128]},
    "limits": {"gpus": 16},
    "try": {"micro_batch_size": [8], "activation_checkpointing": ["none"], "strategies": [{"kind": "ddp"}]},
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    return planner.plan(from_table(SMALL), tmp_path_factory.mktemp("places"), jobs=1)


def test_every_machine_and_size_has_its_best_option_or_a_reason(places):
    """Of "256 H100 or 128 B200?" the answer left out the H100s."""
    assert [(row.machine, row.nodes) for row in places.places] == [
        ("hgx-h100", 1),
        ("hgx-h100", 2),
        ("hgx-h100", 8),
        ("hgx-b200", 1),
    ]
    *possible, last = (places.places[i] for i in (0, 1, 3, 2))
    assert all(row.best is not None and row.best.rate for row in possible)
    assert all(row.usd_per_gpu_hour and "list of" in row.source for row in places.places)
    assert last.best is None
    assert "64 GPUs are more than the 16" in last.why


def test_rows_say_mfu_as_a_run_does(places):
    for row in places.front:
        ran = clustersim.scenario.from_table(row.scenario).run()
        assert row.mfu == pytest.approx(ran.summary["mfu"], rel=1e-6)


def test_fp8_is_tried_where_the_gpu_has_it_and_named(tmp_path):
    machines = [{"topology": "hgx-a100", "nodes": [1]}, {"topology": "hgx-h100", "nodes": [1]}]
    tried = SMALL["try"] | {"recipe": {"dtype": ["bf16", "fp8"]}}
    said = planner.plan(from_table(SMALL | {"machines": machines, "try": tried}), tmp_path, jobs=1)
    ran = {(row.machine, row.dtype) for row in said.options if row.counts}
    assert ran == {("hgx-a100", "bf16"), ("hgx-h100", "bf16"), ("hgx-h100", "fp8")}
    refused = [row.reason for row in said.options if row.machine == "hgx-a100" and row.dtype == "fp8"]
    assert refused == ["A100-SXM4-80GB has no fp8"] * len(refused)
    assert refused


def test_a_recipe_says_how_a_model_is_computed_and_not_which(tmp_path):
    tried = SMALL["try"] | {"recipe": {"seq_len": [1024, 2048]}}
    with pytest.raises(ScenarioError, match=r"recipe\.seq_len"):
        from_table(SMALL | {"try": tried})


@pytest.mark.parametrize(("dtypes", "told"), [(("bf16", "fp8"), True), (("fp8", "fp8"), False)])
def test_what_mfu_is_a_share_of_is_said_where_options_differ_in_it(dtypes, told):
    options = [
        SimpleNamespace(counts=True, candidate=SimpleNamespace(form=SimpleNamespace(recipe={"dtype": dtype})))
        for dtype in dtypes
    ]
    searched = SimpleNamespace(rates=(), split=False, dtype="bf16", options=options, topologies={})
    sentences = list(assumptions(SimpleNamespace(machines=(), campaign=None, run={}), searched))
    assert any("peak of what an option computes in (bf16, fp8)" in sentence for sentence in sentences) == told


@pytest.mark.parametrize(("machine", "told"), [("hgx-mi355x", True), ("hgx-mi300x", False)])
def test_a_plan_says_what_of_a_dtype_nobody_measured(machine, told):
    options = [SimpleNamespace(counts=True, candidate=SimpleNamespace(form=SimpleNamespace(recipe={"dtype": "fp8"})))]
    topologies = {(machine, 1): fabrics.load(machine, nodes=1)}
    searched = SimpleNamespace(rates=(), split=False, dtype="bf16", options=options, topologies=topologies)
    sentences = list(assumptions(SimpleNamespace(machines=(), campaign=None, run={}), searched))
    said = [
        sentence for sentence in sentences if "products in fp8 at 50% of a MI355X's peak is no measurement" in sentence
    ]
    assert len(said) == told
    assert all("its +- is wider" in sentence for sentence in said)


def test_a_plan_of_a_gpu_that_is_not_shipped_is_answered(tmp_path):
    """Its units and its peak are its own file's; a look among the shipped ones refused every such plan."""
    file = tmp_path / "gpu.toml"
    file.write_text('[device]\nname = "H100-NEW"\nextends = "H100-SXM5-80GB"\nmemory = "96 GiB"\n')
    read = plan(machines=[{"topology": "hgx-h100", "device": str(file), "nodes": [1], "usd_per_gpu_hour": 3.0}])
    tried = msgspec.structs.replace(read.tried, recipe={"dtype": ["bf16", "fp8"]})
    read = msgspec.structs.replace(read, tried=tried)
    found = planner.search(read, tmp_path / "plan.toml", tmp_path / "out", planner.SearchOptions(jobs=1))
    answer = planner.told(read, found, tmp_path / "plan.toml")
    assert answer.front
    assert not answer.counts["cannot be run"]
    assert all(row.mfu for row in answer.front)


@pytest.mark.parametrize(("run", "told"), [({}, True), ({"jitter": 0.0}, True), ({"jitter": 0.01}, False)])
def test_a_plan_whose_options_are_played_without_jitter_says_so_beside_its_ranges(run, told):
    searched = SimpleNamespace(rates=(), split=False, dtype="bf16", options=[], topologies={})
    *_, last = assumptions(SimpleNamespace(machines=(), campaign=None, run=run), searched)
    assert "not counted" in last
    assert (
        last.endswith(
            "; options are played without jitter, every GPU at its usual pace: `jitter` in the plan's [run] plays it"
        )
        == told
    )


def test_a_strategy_has_fields_of_parallel_for_itself_alone():
    strategies = [
        {"kind": "ddp", "parallel": {"use_distributed_optimizer": True}},
        {"kind": "fsdp", "parallel": {"framework": "torchtitan"}},
    ]
    read = from_table(SMALL | {"try": SMALL["try"] | {"strategies": strategies}})
    options = list(candidates(read, {(0, read.machines[0].nodes[0]): 16}, [{"tp": 2}]))
    tables = {option.form.strategy["kind"]: option.form.parallel for option in options}
    assert tables["ddp"] == {"tp": 2, "use_distributed_optimizer": True}
    assert tables["fsdp"] == {"tp": 2, "framework": "torchtitan"}
    assert not any("parallel" in option.changes["strategy"] for option in options)


@pytest.mark.parametrize(
    ("own", "right"),
    [
        (3, "a table of fields"),
        ({"tp": 2}, r"\[try\.parallel\]"),
        ({"frame": "x"}, "framework"),
        ({"framework": "torchtitam"}, "torchtitan"),
    ],
)
def test_a_strategy_says_what_its_own_parallel_may_hold(own, right):
    read = from_table(SMALL | {"try": SMALL["try"] | {"strategies": [{"kind": "fsdp", "parallel": own}]}})
    with pytest.raises(ScenarioError, match=right):
        scenario_of(read, "plan.toml", next(candidates(read, {(0, read.machines[0].nodes[0]): 16}, [{}])))


@pytest.mark.parametrize(
    ("model", "tried", "left_out"),
    [
        ({"dtype": "bf16"}, {}, ["tensor", "pipeline", "states shared out", "fused", "fp8"]),
        ({"dtype": "bf16", "implementation": "fused"}, {"strategies": [{"kind": "fsdp"}]}, ["16-bit parameters"]),
        (
            {"dtype": "bf16", "implementation": "fused"},
            {
                "strategies": [{"kind": "fsdp", "param_dtype": "bf16"}, {"kind": "ddp", "param_dtype": "bf16"}],
                "parallel": {"tp": [1, 8], "pp": [1, 2], "use_distributed_optimizer": True},
                "recipe": {"dtype": ["bf16", "fp8"]},
            },
            ["weights gathered in 8 bits"],
        ),
        (
            {"dtype": "fp8", "implementation": "fused"},
            {
                "strategies": [{"kind": "fsdp", "param_dtype": "bf16", "float8_all_gather": [False, True]}],
                "parallel": {"tp": [1, 8], "pp": [1, 2]},
            },
            [],
        ),
        (
            {"dtype": "fp8", "implementation": "fused", "float8_recipe": "rowwise"},
            {
                "strategies": [{"kind": "fsdp", "param_dtype": "bf16"}],
                "parallel": {"tp": [1, 8], "pp": [1, 2]},
            },
            [],
        ),
    ],
)
def test_the_best_is_the_fastest_only_where_the_usual_alternatives_were_tried(model, tried, left_out):
    table = SMALL | {"model": {"name": "llama3-8b", **model}, "try": SMALL["try"] | tried}
    read = from_table(table | {"machines": [{"topology": "hgx-h100", "nodes": [2]}]})
    machines = {(0, 2): 16}
    own = {"use_distributed_optimizer": True} if "use_distributed_optimizer" in tried.get("parallel", {}) else {}
    tables = [{}] if "parallel" not in tried else [{"tp": 8, "pp": 2, **own}]
    options = list(candidates(read, machines, tables))
    words = untried(read, "plan.toml", options, [device("H100-SXM5-80GB")])
    assert all(any(part in word for word in words) for part in left_out)
    assert bool(words) == bool(left_out)
    assert SearchResult((), (), True, untried=tuple(words)).fastest == (
        "the fastest of what was tried" if left_out else "the fastest"
    )


def test_progress_of_a_plan_is_the_part_of_its_seconds_that_are_over():
    """A round of whole runs takes minutes and each run moves what is told; options stood at 43 % meanwhile."""
    told = []
    now = [0.0]
    left = WorkLeft(lambda done, total: told.append(done / total), lambda: now[0])
    left.expect(FIRST_RUNS, 10)
    left.expect(LAST_RUNS, 4)
    all_seconds = 100 * 0.1 + 10 * 2.0 + 4 * 20.0
    true = []

    def work(seconds, tell):
        now[0] += seconds
        tell()
        true.append(now[0] / all_seconds)

    left.begin(LOOKS, 100)
    for _ in range(100):
        work(0.1, lambda: left.ended(1))
    left.begin(FIRST_RUNS, 10)
    for _ in range(10):
        work(2.0, lambda: left.ended(1))
    left.begin(LAST_RUNS, 4)
    left.running(0, 4)
    for _ in range(4):
        work(20.0, lambda: left.ended(1))
    left.round_over()
    assert told == sorted(told)
    assert told[-1] == 1.0
    last_runs = told[-5:-1]
    assert last_runs == pytest.approx(true[-4:], abs=0.01)
    assert len(set(told)) > 50


def test_what_need_not_be_run_counts_as_done_and_what_ran_never_past_its_round():
    told = []
    now = [0.0]
    left = WorkLeft(lambda done, total: told.append(done), lambda: now[0])
    left.begin(FIRST_RUNS, 10)
    left.running(6, 2)  # two of four were ruled out
    now[0] = 1.0
    left.ended(1)
    left.ended(5)
    assert left.stages[FIRST_RUNS].over == 4
    left.begin(LAST_RUNS, 2)
    assert left.stages[FIRST_RUNS].left == 0.0
    left.running(0, 2)
    left.round_over()
    assert told == sorted(told)


def test_options_of_a_plan_read_their_model_once(monkeypatch):
    """Of 240 options each read and counted the config of the same 70B anew: a sixth of the time of the sieve."""
    read = []
    plain = named_models.from_hf
    monkeypatch.setattr(named_models, "from_hf", lambda *args, **named: read.append(1) or plain(*args, **named))
    named_models._shipped.cache_clear()
    models = [named_models.model("gpt2", seq_len=length) for length in (512, 512, 1024, 512)]
    assert len(read) == 2
    assert models[0] is models[1] is models[3]
    assert models[2].tokens == 1024
    few = named_models.model("mixtral-8x7b", experts={"count": 4})
    assert few.parameters < named_models.model("mixtral-8x7b").parameters


def test_the_smallest_gpu_is_looked_for_node_by_node_not_gpu_by_gpu(monkeypatch):
    topology, mesh = placed(clustersim.load("ddp_gpt2_xl_2x8_a100"))
    asked = []
    plain = topology_nouns.device
    monkeypatch.setattr(topology_nouns, "device", lambda name: asked.append(name) or plain(name))
    assert smallest_card(topology, mesh) is device("A100-SXM4-80GB")
    assert len(asked) == 2
