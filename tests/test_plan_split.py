"""Plans over split models: the sieves are the stages' own figures and lower bounds, the front is the exhaustive one."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest
from hostile_documents import MOE_CONFIG

from clustersim.app import plots
from clustersim.app.report.plan import plan_page
from clustersim.core.dims import Dims
from clustersim.core.errors import ScenarioError
from clustersim.core.mesh import Mesh
from clustersim.scenario.result.trust import trust
from clustersim.scenario.run.held import held
from clustersim.scenario.run.parts import shape_of
from clustersim.studies import plan as planner
from clustersim.studies.plan.candidates import candidates, scenario_of
from clustersim.studies.plan.form import RefusedOption
from clustersim.studies.plan.knobs import combinations
from clustersim.studies.plan.options import rule
from clustersim.studies.plan.robust import _errors_apart
from clustersim.studies.plan.searching import SearchOptions, search
from clustersim.studies.plan.seen import FINALISTS, ROUGH, KnownCandidates
from clustersim.studies.plan.sieve import OptionSieve, kept
from clustersim.studies.plan.sites import machines_of, tried_parallel
from clustersim.studies.plan.spec import from_table
from clustersim.studies.plan.traffic import first_group
from clustersim.studies.plan.verdict import left_over
from clustersim.studies.plan.why import alternatives, rule_told, what_limits
from clustersim.studies.what_if.folded import folded
from clustersim.training.parallel import ModelShape, ParallelConfig, check

DENSE = {
    "title": "GPT-2 medium of eight layers, split",
    "model": {
        "name": "gpt2-medium",
        "seq_len": 1024,
        "dtype": "bf16",
        "implementation": "fused",
        "options": {"layers": 8},
    },
    "machines": [{"topology": "hgx-a100", "nodes": [1, 2], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": [32, 64]},
    "try": {
        "micro_batch_size": [1, 4],
        "activation_checkpointing": ["none", "full"],
        "strategies": [
            {"kind": "ddp", "param_dtype": "bf16"},
            {"kind": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32"},
        ],
        "parallel": {
            "tp": "search",
            "pp": [1, 2, 4],
            "vpp": [1, 2],
            "cp": [1, 2],
            "sequence_parallel": True,
            "use_distributed_optimizer": [False, True],
            "overlap_grad_reduce": [False, True],
            "schedule": [None, "zb_h1"],
            "order": "search",
        },
    },
    # Bounds know what GPUs compute and exchange; without graphs the host paces steps this small.
    "run": {"steps": 2, "cuda_graph": ["full_iteration"]},
}
EXPERTS = DENSE | {
    "model": {
        "name": "mixtral-8x7b",
        "seq_len": 1024,
        "dtype": "bf16",
        "implementation": "fused",
        "options": {"layers": 4},
    },
    "try": {
        "micro_batch_size": [1, 2],
        "activation_checkpointing": ["none", "full"],
        "strategies": [{"kind": "ddp", "param_dtype": "bf16"}],
        "parallel": {
            "tp": [1, 2],
            "pp": [1, 2],
            "ep": "search",
            "etp": [1],
            "sequence_parallel": True,
            "dispatcher": ["allgather", "alltoall"],
            "use_distributed_optimizer": True,
            "overlap_param_gather": [False, True],
        },
    },
}


def sieved(table, number, seed=0):
    """Options that came through the sieve, some of them at random, with their bounds."""
    read = from_table(table)
    machines, _ = machines_of(read, "plan.toml")
    tables = combinations(read.tried.parallel, shape(read), 8, "plan.toml")
    gpus = {place: mesh.world_size for place, (_, mesh) in machines.items()}
    every = [option for option in candidates(read, gpus, tables) if option.form.split]
    every_by = {option.number: option for option in every}
    chosen = random.Random(seed).sample(every, min(number, len(every)))
    found = OptionSieve(read, "plan.toml", machines).look(chosen)
    return read, [(every_by[number], what) for number, what in found if not isinstance(what, RefusedOption)]


def shape(read):
    from clustersim import scenario
    from clustersim.studies.plan.candidates import base

    return shape_of(scenario.from_table(base(read), "plan.toml"))


@pytest.mark.parametrize("table", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_what_the_sieve_says_a_stage_holds_is_what_the_stage_holds(table):
    read, found = sieved(table, 60)
    assert found
    for option, bound in found:
        own = [use.total for use in held(scenario_of(read, "plan.toml", option)).uses]
        assert np.allclose(bound.held, own, rtol=1e-12), option.label()


@pytest.mark.parametrize(("table", "number"), [(DENSE, 150), (EXPERTS, 60)], ids=["dense", "experts"])
def test_no_folded_step_beats_its_bound(table, number):
    read, found = sieved(table, number, seed=1)
    ratios = []
    for option, bound in found:
        step = folded(scenario_of(read, "plan.toml", option), roughly=True).step_time_s
        assert bound.step_s <= step, option.label()
        assert bound.compute_s <= bound.step_s
        ratios.append(step / bound.step_s)
    # A bound that is far from its step prunes nothing.
    assert np.median(ratios) < 1.4


@pytest.mark.parametrize(
    ("schedule", "vpp", "more"),
    [
        ("gpipe", 1, {"defer_embedding_wgrad_compute": True}),
        ("1f1b", 1, {"num_microbatches_with_partial_activation_checkpoints": 1}),
        ("zb_2p", 1, {}),
        ("zbv", 2, {}),
        ("v_half", 2, {}),
        ("looped_bfs", 2, {}),
        ("interleaved_zero_bubble", 2, {}),
        ("dualpipe", 2, {}),
        ("dualpipev", 2, {}),
    ],
)
def test_every_schedule_has_the_stages_own_memory_and_a_step_above_its_bound(schedule, vpp, more):
    parallel = {"pp": [2, 4], "vpp": [vpp], "schedule": schedule, "overlap_grad_reduce": True, **more}
    read, found = sieved(
        DENSE
        | {
            "batch": {"samples": 64},
            "machines": [{"topology": "hgx-a100", "nodes": [1]}],
            "try": {
                "micro_batch_size": [4],
                "activation_checkpointing": ["none"],
                "strategies": [{"kind": "ddp", "param_dtype": "bf16"}],
                "parallel": parallel,
            },
        },
        3,
    )
    assert found
    for option, bound in found:
        one = scenario_of(read, "plan.toml", option)
        assert np.allclose(bound.held, [use.total for use in held(one).uses], rtol=1e-12)
        assert bound.step_s <= folded(one, roughly=True).step_time_s


SMALL = DENSE | {
    "machines": [{"topology": "hgx-a100", "nodes": [1], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": 32},
    "try": {
        "micro_batch_size": [2],
        "activation_checkpointing": ["none"],
        "strategies": [{"kind": "ddp", "param_dtype": "bf16"}],
        "parallel": {
            "tp": [1, 2, 8],
            "pp": [1, 2],
            "vpp": [1, 2],
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": [False, True],
        },
    },
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("split")
    read = from_table(SMALL)
    return read, folder, search(read, "plan.toml", folder, SearchOptions(jobs=1))


def figures(found):
    return [(planner.title(one.candidate), one.objectives) for one in found.front]


def test_the_front_over_split_models_is_the_exhaustive_one(small, tmp_path):
    read, _, found = small
    every = search(read, "plan.toml", tmp_path, SearchOptions(jobs=1, exhaustive=True))
    assert figures(found) == figures(every)
    whole = [sum(one.state == "simulated" for one in each.options) for each in (found, every)]
    assert whole[0] < whole[1]


def test_a_rough_run_is_as_near_the_whole_one_as_the_search_takes_it_to_be(small, tmp_path):
    read, _, found = small
    for one in found.options:
        if one.state == "simulated" and one.candidate.form.split:
            rough = folded(scenario_of(read, "plan.toml", one.candidate), roughly=True).step_time_s
            assert abs(rough / one.step_s - 1) < ROUGH


HUNDREDS = DENSE | {
    "model": {"name": "gpt2", "seq_len": 256, "dtype": "bf16", "implementation": "fused", "options": {"layers": 4}},
    "machines": [{"topology": "hgx-a100", "nodes": [1], "usd_per_gpu_hour": 2.0}],
    "batch": {"samples": [16, 32]},
    "try": {
        "micro_batch_size": [1, 2, 4],
        "activation_checkpointing": ["none"],
        "strategies": [{"kind": "ddp", "param_dtype": "bf16"}],
        "parallel": {
            "tp": [1, 2, 4],
            "pp": [1, 2, 4],
            "vpp": [1, 2],
            "cp": [1, 2],
            "sequence_parallel": True,
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": [False, True],
        },
    },
}


@pytest.mark.slow
def test_over_hundreds_of_options_the_front_is_the_exhaustive_one_and_no_sketch_is_off_by_more_than_is_taken(tmp_path):
    read = from_table(HUNDREDS)
    found = search(read, "plan.toml", tmp_path, SearchOptions(jobs=1))
    # In the same folder, so that what the first has simulated is not simulated again.
    every = search(read, "plan.toml", tmp_path, SearchOptions(jobs=1, exhaustive=True))
    assert len(every.options) > 200
    assert figures(found) == figures(every)
    ran = [one for one in every.options if one.state == "simulated"]
    assert len(ran) > 4 * sum(one.state in {"simulated", "rough"} for one in found.options)
    for one in random.Random(0).sample([one for one in ran if one.candidate.form.split], 30):
        sketch = folded(scenario_of(read, "plan.toml", one.candidate), roughly=True, sketched=True).step_time_s
        assert abs(sketch / one.step_s - 1) < ROUGH, one.candidate.label()


def test_an_interrupted_plan_over_split_models_goes_on_where_it_was(small, monkeypatch):
    read, folder, before = small
    for name in ("compute", "roughly"):
        monkeypatch.setattr(f"clustersim.studies.plan.rounds.{name}", lambda *_: pytest.fail("simulated again"))
    assert figures(search(read, "plan.toml", folder, SearchOptions(jobs=1))) == figures(before)


def test_what_the_sieve_said_is_kept_and_of_another_plan_it_is_not(small, monkeypatch):
    read, folder, _ = small
    options = [option.candidate for option in search(read, "plan.toml", folder, SearchOptions(jobs=1)).options]
    sieve = OptionSieve(read, "plan.toml", machines_of(read, "plan.toml")[0])
    said = dict(sieve.look(options))
    monkeypatch.setattr(OptionSieve, "look", lambda *_: pytest.fail("sieved again"))
    assert dict(kept(sieve, options, folder)) == said
    sieve.plan = from_table(SMALL | {"limits": {"memory_margin": 0.5}})
    with pytest.raises(pytest.fail.Exception, match="sieved again"):
        dict(kept(sieve, options, folder))


def test_an_answer_says_what_limits_an_option_what_stages_hold_and_what_the_rule_costs(small):
    read, _, found = small
    said = planner.told(read, found)
    assert all(row.limited_by and row.stage_bytes for row in said.front)
    assert {(cell.tp, cell.pp) for cell in said.landscape} >= {(1, 1), (8, 1), (2, 2)}
    assert sum(cell.best for cell in said.landscape) == 1
    assert all(row.why for row in said.alternatives)
    ((_, taken),) = rule(found.options).items()
    assert taken.candidate.form.degrees["tp"] == 8
    assert "TP 8" in rule_told(found) or taken.candidate.number == found.front[0].candidate.number
    page = plan_page(said)
    assert [name for name, _ in page.figures] == ["tokens/s", "MFU", "GPUs"]
    assert "tp 8" in plots.alt_text(plots.degrees(said.landscape))


def test_knobs_that_the_front_shares_are_told_once_and_names_stay_apart(small):
    read, _, found = small
    said = planner.told(read, found)
    assert found.common
    for knob in found.common:
        assert said.verdict.count(knob) == 1
        assert not any(knob in row.option or knob in row.why for row in said.front)
    names = [row.option for row in said.options]
    assert len(set(names)) == len(names)
    other = {one.candidate.knobs for one in found.options} - {tuple(found.front[0].candidate.knobs)}
    assert all(any(knob in name for name in names) for knobs in other for knob in set(knobs) - found.common)


def test_of_a_large_space_what_was_not_simulated_is_told_with_what_it_could_have_given(monkeypatch, tmp_path):
    monkeypatch.setattr("clustersim.studies.plan.seen.EXACT", 5)
    read = from_table(SMALL | {"try": SMALL["try"] | {"simulations": 8}})
    found = search(read, "plan.toml", tmp_path, SearchOptions(jobs=1))
    left = [one for one in found.options if one.state == "left"]
    assert left
    assert found.front
    rows = (tmp_path / "results.jsonl").read_text().splitlines()
    assert sum('"fidelity":"sketched"' in row for row in rows) == 8  # as many as the plan says
    assert len(rows) <= 8 + FINALISTS
    assert f"{len(left):,} options were not simulated" in left_over(found)
    assert all(one.bound is not None for one in left)


def test_each_strategy_with_each_arithmetic_has_its_turn_before_a_large_space_is_used_up():
    strategies = DENSE["try"]["strategies"]
    wanted = {"recipe": {"dtype": ["bf16", "fp8"]}, "strategies": strategies, "parallel": {"tp": [1, 2]}}
    machine = {"topology": "hgx-h100", "nodes": [1], "usd_per_gpu_hour": 2.0}
    read = from_table(DENSE | {"machines": [machine], "try": {"micro_batch_size": [1, 2], **wanted}})
    seen = KnownCandidates(read, "plan.toml", *machines_of(read, "plan.toml"))
    turns = [seen.options[number].candidate.form.sort for number in seen.waiting(seen.open(), rough=True)]
    sorts = {"ddp bf16", "ddp fp8", "fsdp bf16", "fsdp fp8"}
    assert set(turns) == sorts
    assert set(turns[: len(sorts)]) == sorts


def test_alternatives_differ_from_the_fastest_in_a_degree(small):
    _, _, found = small
    chosen = found.front[0].candidate.form.degrees
    for one in alternatives(found):
        assert one.candidate.form.degrees != chosen
        assert one.state in {"error", "limits", "memory"} or what_limits(one)


# ---- the robust choice -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def robust(small):
    read, folder, _ = small
    return search(read, "plan.toml", folder, SearchOptions(jobs=1, robust=True))


def test_the_robust_choice_has_the_least_of_the_worst_regrets_and_somebody_is_best_at_every_corner(small, robust):
    said = planner.told(small[0], robust).robust
    regrets = np.array([row.regrets for row in said.rows])
    assert regrets.shape == (len(said.rows), len(said.corners))
    assert (regrets.min(axis=0) == 0).all()
    assert [row.regret for row in said.rows] == regrets.max(axis=1).tolist()
    assert [row.robust for row in said.rows].index(True) == regrets.max(axis=1).argmin()
    rates = np.array([row.rate for row in said.rows])
    assert regrets[:, 0] == pytest.approx(rates.max() / rates - 1)


def test_a_robust_choice_that_is_known_less_well_than_the_fastest_says_that_its_kind_is_not_turned(small, robust):
    """The verdict said of FSDP's "predicted to +-12% only: measure it", and the robust choice "no single measurement
    would change that" of the same option."""
    fastest = robust.front[0]
    vaguer, surer = (msgspec.structs.replace(fastest, kind="fsdp", error=error) for error in (0.5, 0.0))
    assert "is not among these numbers: time a step of the robust choice" in _errors_apart(fastest, vaguer)
    assert _errors_apart(fastest, surer) == _errors_apart(fastest, fastest) == ""


def test_who_knows_on_which_side_a_number_is_regrets_no_more(small, robust):
    said = planner.told(small[0], robust).robust
    regrets = np.array([row.regrets for row in said.rows])
    worst = min(row.regret for row in said.rows)
    assert [one.name for one in said.uncertain] == ["links inside a node", "kernels"]  # one node: no network
    for one in said.measure:
        assert 0 <= one.worth <= worst
        assert set(one.choice.values()) <= {row.option for row in said.rows}
    for name in ("inside", "kernels"):
        for end in {corner[name] for corner in said.corners[1:]}:
            there = [k for k, corner in enumerate(said.corners) if corner.get(name) == end]
            assert regrets[:, there].max(axis=1).min() <= worst


def test_a_step_on_a_machine_with_other_rates_is_the_rerun_that_sensitivity_makes(small, robust):
    from clustersim.studies.what_if.rerun import rerun_step, rerun_with

    one = scenario_of(small[0], "plan.toml", robust.front[0].candidate)
    for knob in ("inside", "kernels"):
        assert rerun_with(one, {knob: 0.8}) == rerun_step(one.prepare(), knob, 0.8)
    both = rerun_with(one, {"inside": 0.8, "kernels": 0.8})
    assert both > rerun_with(one, {"kernels": 0.8}) > rerun_with(one, {})
    rough = folded(one, roughly=True, sketched=True, factors={"inside": 0.8, "kernels": 0.8}).step_time_s
    assert rough == pytest.approx(both, rel=ROUGH)


def test_a_robust_search_goes_on_where_it_was_and_its_page_has_the_table(small, robust, monkeypatch):
    read, folder, _ = small
    for name in ("compute", "roughly"):
        monkeypatch.setattr(f"clustersim.studies.plan.rounds.{name}", lambda *_: pytest.fail("simulated again"))
    again = search(read, "plan.toml", folder, SearchOptions(jobs=1, robust=True))
    assert again.turned == robust.turned
    said = planner.told(read, again)
    (part,) = [one for one in plan_page(said).sections if one.id == "robust"]
    assert said.robust.verdict in part.words
    assert len(part.grid.rows) == len(said.robust.rows)


# ---- the space -------------------------------------------------------------------------------------------------------

SHAPE = ModelShape(12, 1024, 768, 50257, 12, 12, 64, 3072)


def test_a_knob_is_a_value_a_list_a_range_or_searched():
    asked = {"tp": "search", "pp": {"from": 1, "to": 4, "times": 2}, "cp": [1], "overlap_grad_reduce": True}
    found = combinations(asked, SHAPE, 8, "plan.toml")
    assert {table["tp"] for table in found} == {1, 2, 4, 8}
    assert {table["pp"] for table in found} == {1, 2, 4}
    assert all(table["overlap_grad_reduce"] for table in found)


def test_a_knob_of_a_dimension_that_is_not_split_is_left_out_and_no_table_is_twice():
    found = combinations({"tp": [1, 2], "sequence_parallel": [True, False]}, SHAPE, 8, "plan.toml")
    assert [("tp", 1) in table.items() for table in found].count(True) == 1
    assert len(found) == 3


@pytest.mark.parametrize(
    ("model", "nodes"),
    [("qwen3-14b", 8), ("mixtral-8x7b", 4), ("qwen3-30b-a3b", 16), ("llama3-70b", 3), ("gpt-oss-120b", 8)],
)
def test_a_new_plan_writes_no_option_that_cannot_run(tmp_path, clustersim, model, nodes):
    """It wrote vpp 2 beside pp 8 of a model of 40 layers, and experts over more ranks than a stage has."""
    file = tmp_path / "plan.toml"
    assert not clustersim("new", "plan", file, "--gpu", "H100", "--nodes", nodes, "--model", model).returncode
    read, path = planner.load(file)
    machines = machines_of(read, path)[0]
    tables = tried_parallel(read, path, machines)
    gpus = {place: mesh.world_size for place, (_, mesh) in machines.items()}
    made = list(candidates(read, gpus, tables))
    for candidate in {(one.form.number, one.gpus): one for one in made}.values():
        found = scenario_of(read, path, candidate)
        check(found.file.parallel or ParallelConfig(), shape_of(found), candidate.gpus)
    for name in ("tp", "pp", "vpp", "cp", "ep"):
        values = read.tried.parallel.get(name, [1])
        assert {one.form.parallel.get(name) or 1 for one in made} >= set(values)


def test_of_lists_beside_each_other_only_what_the_model_allows_is_tried_and_a_value_that_never_works_is_told():
    forty = ModelShape(40, 1024, 1024, 16, 16, 4096)
    tables = combinations({"pp": [1, 4, 8], "vpp": [1, 2, 5]}, forty, 8, "f")
    assert [(table["pp"], table.get("vpp", 1)) for table in tables] == [
        *((1, 1), (4, 1), (4, 2), (4, 5)),
        *((8, 1), (8, 5)),
    ]
    never = combinations({"pp": [4], "vpp": [1, 3]}, forty, 8, "f")
    assert {"pp": 4, "vpp": 3} in never  # for its option to say why not


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"tpp": 2}, "unknown field 'tpp'"),
        ({"tp": {"from": 1, "to": 8}}, "a range is written"),
        ({"tp": {"from": 1, "to": 8, "times": 1}}, "a range is written"),
        ({"layout": "search"}, "cannot be left to the search"),
        ({"pp": "-1 GB/s", "ep": 2}, "pp = '-1 GB/s': expected a whole number"),
        ({"tp": [1, True]}, "tp = True: expected a whole number"),
    ],
)
def test_what_cannot_be_tried_is_one_clear_error(asked, words):
    with pytest.raises(ScenarioError, match=words):
        combinations(asked, SHAPE, 8, "plan.toml")


@pytest.mark.parametrize("names", [("tp",), ("cp",), ("dp", "cp"), ("ep",), ("edp",)])
@pytest.mark.parametrize("order", ["megatron", "llama3"])
def test_the_first_group_of_dimensions_is_the_meshs_first(names, order):
    # Llama 3's order has no experts whose pipelines would be others.
    experts = {"ep": 8, "etp": 1} if order == "megatron" else {}
    dims = Dims(tp=2, cp=2, pp=2, dp=4, order=order, **experts)
    mesh = Mesh(np.arange(dims.world), 8, dims=dims)
    assert first_group(dims, *names).tolist() == mesh.groups(*names)[0].tolist()


def test_tensor_parallelism_leaves_a_node_only_where_the_plan_allows_it():
    table = DENSE | {
        "try": DENSE["try"] | {"parallel": {"tp": [16]}},
        "model": {"name": "llama3-8b", "seq_len": 1024, "dtype": "bf16"},
    }
    _, none = sieved(table, 10)
    _, some = sieved(table | {"limits": {"tp_across_nodes": True}}, 10)
    assert not none
    assert some


MIXTURE = {
    "model": {"hf_config": "moe.json", "seq_len": 64, "implementation": "fused", "attention": "flash"},
    "machines": [{"topology": "hgx-b300", "nodes": [1]}, {"topology": "hgx-h100", "nodes": [1]}],
    "batch": {"samples": 16},
    "try": {
        "micro_batch_size": [1],
        "activation_checkpointing": ["none"],
        "strategies": [{"kind": "ddp"}],
        "recipe": {"dtype": ["bf16"]},
        "parallel": {"ep": [1, 4]},
    },
}


def test_an_option_is_known_as_well_as_its_own_run_says(tmp_path):
    """A plan's +- and a run's trust are one figure: of experts, and of a generation that no published step ran on."""
    (tmp_path / "moe.json").write_text(json.dumps(MOE_CONFIG))
    read = from_table(MIXTURE)
    file = tmp_path / "plan.toml"
    found = search(read, file, tmp_path / "out", SearchOptions(jobs=1, exhaustive=True))
    ran = [option for option in found.options if option.state == "simulated"]
    assert {option.kind for option in ran} == {"experts", "thin experts"}  # what is not split has no host of its own
    assert len({(option.kind, option.error) for option in ran}) == 4
    for option in ran:
        prepared = scenario_of(read, file, option.candidate).prepare()
        assert option.error == pytest.approx(trust(prepared).p50)
