"""A sweep: what its file may say, which scenarios that is, and what makes two of them the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import clustersim
from clustersim import scenario
from clustersim.cluster import files as fabrics
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.studies import sweep as sweeps
from clustersim.studies.sweep.axes import AxisTable, axis

ROOT = Path(__file__).parents[1]
BASE = "ddp_resnet50_1x8_v100"


def values(**table):
    """What an axis over one field takes."""
    points = axis(msgspec.convert({"key": "run.steps", **table}, AxisTable), "here").points
    return [point.changes["run.steps"] for point in points]


def plan(*axes, **more):
    return sweeps.from_table({"base": BASE, "axes": list(axes), **more}, "mine.toml")


def test_a_range_holds_its_stop_and_stays_whole():
    assert values(range={"start": 1, "stop": 8, "step": 3}) == [1, 4, 7]
    assert values(range={"start": 0, "stop": 1, "step": 0.1})[-1] == pytest.approx(1)
    assert values(range={"start": 4, "stop": 0, "step": -2}) == [4, 2, 0]
    assert values(range={"start": 1, "stop": 7, "num": 3}) == [1, 4, 7]
    assert values(range={"start": 1, "stop": 2, "num": 3}) == [1, 1.5, 2]
    assert all(isinstance(value, int) for value in values(range={"start": 1, "stop": 7, "num": 3}))


def test_a_logarithmic_axis_multiplies_and_whole_ends_give_whole_values_once():
    assert values(log={"start": 1, "stop": 64, "factor": 2}) == [1, 2, 4, 8, 16, 32, 64]
    assert values(log={"start": 8, "stop": 1, "factor": 0.5}) == [8, 4, 2, 1]
    assert values(log={"start": 0.5, "stop": 8.0, "num": 3}) == pytest.approx([0.5, 2, 8])
    assert values(log={"start": 1, "stop": 4, "num": 9}) == [1, 2, 3, 4]


def test_the_grid_is_every_combination_the_last_axis_fastest():
    two = plan({"key": "cluster.nodes", "values": [1, 2]}, {"key": "run.steps", "values": [3, 4, 5]})
    assert len(two) == 6
    assert [tuple(case.axes.values()) for case in two.cases()] == [(n, s) for n in (1, 2) for s in (3, 4, 5)]
    assert two.case(4).changes == {"cluster.nodes": 2, "run.steps": 4}


def test_a_zip_takes_its_fields_together_and_labels_name_what_is_shown():
    zipped = {"zip": {"cluster": {"nodes": [1, 2]}, "run.steps": [5, 3]}}
    assert [dict(case.axes) for case in plan(zipped).cases()] == [
        {"cluster.nodes": 1, "run.steps": 5},
        {"cluster.nodes": 2, "run.steps": 3},
    ]
    named = plan({**zipped, "name": "size", "labels": ["small", "large"]})
    assert [dict(case.axes) for case in named.cases()] == [{"size": "small"}, {"size": "large"}]
    assert named.case(1).changes == {"cluster.nodes": 2, "run.steps": 3}


def test_random_draws_are_the_same_for_a_seed_and_within_their_bounds():
    def drawn(seed):
        fields = {"run.steps": [3, 4], "strategy.bucket_cap_mb": {"low": 1.0, "high": 100.0, "log": True}}
        return [dict(case.changes) for case in plan({"random": fields, "num": 50, "seed": seed}).cases()]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {case["run.steps"] for case in drawn(1)} == {3, 4}
    caps = [case["strategy.bucket_cap_mb"] for case in drawn(1)]
    assert 1 <= min(caps) < 10 < max(caps) <= 100


def test_a_sample_of_the_grid_is_part_of_it_in_its_order():
    axes = (
        {"key": "cluster.nodes", "range": {"start": 1, "stop": 50, "step": 1}},
        {"key": "run.steps", "values": [3, 4]},
    )
    few = plan(*axes, sample=7, seed=3)
    whole = list(plan(*axes).cases())
    found = [whole.index(case) for case in few.cases()]
    assert len(found) == 7
    assert found == sorted(found)


def test_whole_strategies_are_alternatives_with_a_label():
    forms = {"all-reduce": {"kind": "ddp"}, "server": {"kind": "parameter_server", "servers": 2}}
    two = plan({"key": "strategy", "values": forms})
    assert [case.axes["strategy"] for case in two.cases()] == ["all-reduce", "server"]
    kinds = [two.scenario(case).file.strategy["kind"] for case in two.cases()]
    assert kinds == ["ddp", "parameter_server"]


def test_a_plus_makes_a_list_longer_whoever_wrote_it():
    half = {"match": "node0/nic0", "factor": 0.5}
    grid = plan(
        {"key": "cluster.changes+", "name": "a", "values": {"none": [], "half": [half]}},
        {
            "key": "cluster.changes+",
            "name": "b",
            "values": {"none": [], "double": {"match": "node0/nic1", "factor": 2}},
        },
        set={"cluster.changes": [{"match": "node0/nic2", "remove": True}]},
    )
    both = grid.case(3).changes["cluster.changes"]
    assert [one["match"] for one in both] == ["node0/nic2", "node0/nic0", "node0/nic1"]
    assert len(grid.case(0).changes["cluster.changes"]) == 1


# What a sweep says, and what the error must: the field path, the value, what would be right.
WRONG = {
    "unknown base": ({"base": "ddp_resnet50_1x8_v10"}, ["did you mean 'ddp_resnet50_1x8_v100'?", "$.base"]),
    "misspelt table": ({"axis": []}, ["'axis'", "did you mean 'axes'?"]),
    "misspelt form": ({"axes": [{"kee": "run.steps"}]}, ["'kee'", "did you mean 'key'?", "$.axes[0].kee"]),
    "no form": ({"axes": [{"values": [1]}]}, ["one of key, zip and random", "$.axes[0]"]),
    "key without values": ({"axes": [{"key": "run.steps"}]}, ["one of values, range and log", "$.axes[0]"]),
    "no values": ({"axes": [{"key": "run.steps", "values": []}]}, ["$.axes[0].values", "at least one"]),
    "unknown field": (
        {"axes": [{"key": "cluster.nods", "values": [1]}]},
        ["'cluster.nods'", "did you mean 'nodes'?", "$.axes[0]"],
    ),
    "unknown knob": (
        {"axes": [{"key": "strategy.bucket_cap", "values": [1]}]},
        ["'strategy.bucket_cap'", "did you mean 'bucket_cap_mb'?", "$.axes[0]"],
    ),
    "unknown fixed field": ({"set": {"runs": {"steps": 3}}}, ["'runs.steps'", "did you mean 'run'?", "$.set"]),
    "set twice": (
        {"set": {"run": {"steps": 3}}, "axes": [{"key": "run.steps", "values": [3]}]},
        ["'run.steps'", "$.set", "$.axes[0]"],
    ),
    "undone": (
        {
            "axes": [
                {"key": "strategy.micro_batch_size", "values": [1]},
                {"key": "strategy", "values": [{"kind": "ddp"}]},
            ]
        },
        ["would undo 'strategy.micro_batch_size'", "put it first", "$.axes[1]"],
    ),
    "uneven zip": (
        {"axes": [{"zip": {"cluster.nodes": [1, 2], "run.steps": [3]}}]},
        ["cluster.nodes has 2, run.steps has 1", "$.axes[0].zip"],
    ),
    "uneven labels": (
        {"axes": [{"key": "run.steps", "values": [3, 4], "labels": ["a"]}]},
        ["1 labels for 2 values", "$.axes[0].labels"],
    ),
    "a step that leads nowhere": (
        {"axes": [{"key": "run.steps", "range": {"start": 8, "stop": 1, "step": 1}}]},
        ["from 8 to 1", "$.axes[0].range"],
    ),
    "no way to draw": (
        {"axes": [{"random": {"run.steps": {"low": 5, "high": 3}}, "num": 2}]},
        ["from 5 to 3", "$.axes[0].random.run.steps"],
    ),
    "draws without a number": ({"axes": [{"random": {"run.steps": [3]}}]}, ["needs num", "$.axes[0]"]),
    "one column twice": (
        {"axes": [{"key": "cluster.changes+", "values": [[]]}, {"key": "cluster.changes+", "values": [[]]}]},
        ["'cluster.changes+'", "give one a name"],
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_gives_one_error_with_file_path_value_and_remedy(case):
    more, parts = WRONG[case]
    with pytest.raises(ScenarioError) as raised:
        sweeps.from_table({"base": BASE, **more}, "mine.toml")
    for part in ["mine.toml", *parts]:
        assert part in str(raised.value)


def test_a_key_is_of_what_decides_the_outcome_and_of_nothing_else(tmp_path):
    identity = sweeps.Fingerprints()
    one = identity(scenario.load(BASE))
    copy = tmp_path / "another_name.toml"
    copy.write_text("# a comment\n" + scenario.find(BASE).read_text().replace("seed = 0\n", ""))
    assert identity(scenario.load(copy)).key == one.key  # a default written out, another name: the same scenario
    assert identity(scenario.load(BASE, {"run.seed": 1})).key != one.key
    assert {name.split("/")[0] for name in one.files} == {"topology"}
    assert "model/llama3-8b.json" in identity(scenario.load("ddp_llama3_8b_128x8_h100")).files


def test_a_key_follows_the_content_of_the_topology_a_scenario_names(tmp_path):
    mine = tmp_path / "mine.toml"

    def key(oversubscription):
        mine.write_text(
            'name = "mine"\nextends = "hgx-h100"\n[fabric]\nkind = "fat_tree"\nsource = "test"\n'
            f"oversubscription = {oversubscription}\n"
        )
        return sweeps.Fingerprints()(scenario.load(BASE, {"cluster.topology": str(mine)}))

    two = key(2.0)
    three = key(3.0)
    assert two.inputs == three.inputs
    assert two.key != three.key == key(3.0).key
    assert set(two.files) == {"topology/mine.toml", "topology/hgx-h100.toml"}


def test_a_fabric_can_be_changed_or_replaced_from_a_scenario():
    def up(**fabric):
        topology = fabrics.load("hgx-h100", nodes=64, fabric=fabric)
        return sum(
            rate for i, rate in enumerate(topology.link_bandwidth) if topology.link_name(i).startswith("leaf0 -> spine")
        )

    whole = up()
    assert up(oversubscription=4) == pytest.approx(whole / 4)
    tree = fabrics.load("hgx-h100", nodes=4, fabric={"kind": "fat_tree", "radix": 16, "oversubscription": 2})
    assert tree.fabric == "fat_tree"
    with pytest.raises(ClusterSimError, match="did you mean 'oversubscription'"):
        up(oversubscribtion=4)
    with pytest.raises(ClusterSimError, match=r"oversubscription.*'4'|\$\.fabric\.oversubscription"):
        up(oversubscription="4")


SCRIPT = """
import clustersim

{guard}    clustersim.sweep({table!r}, {folder!r}, jobs={jobs})
"""


@pytest.mark.parametrize(
    ("guard", "jobs", "ran"),
    [("if True:\n", 2, False), ("if True:\n", 1, True), ('if __name__ == "__main__":\n', 2, True)],
)
def test_a_script_that_may_start_no_processes_is_told_so_in_one_error(tmp_path, guard, jobs, ran):
    table = tmp_path / "sweep_batches.toml"
    table.write_text(
        'base = "single_gpt2_1x1_a100"\n[[axes]]\nkey = "strategy.micro_batch_size"\nvalues = [1, 2]\n', "utf-8"
    )
    script = tmp_path / "mine.py"
    script.write_text(SCRIPT.format(guard=guard, table=str(table), folder=str(tmp_path / "rows"), jobs=jobs), "utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, cwd=ROOT)
    if ran:
        assert done.returncode == 0, done.stderr
        return
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert f"{script}:5: this starts processes" in last
    assert 'put the call under `if __name__ == "__main__":`, or give jobs=1' in last


def test_a_sweep_and_a_plan_are_read_from_their_tables_as_a_scenario_is(tmp_path):
    """A dict, which `load` takes, was "no sweep "{'base': ..."."""
    tables = {
        "base": "ddp_resnet50_1x8_v100",
        "set": {"run": {"steps": 2}},
        "axes": [{"key": "cluster.gpus_per_node", "values": [1, 2]}],
    }
    assert clustersim.sweep(tables, tmp_path / "sweep", jobs=1).computed == 2
    with pytest.raises(ScenarioError, match=r"^sweep.toml: .*axes"):
        clustersim.sweep(tables | {"axis": []}, tmp_path / "other", jobs=1)
    plan = {
        "model": {"name": "gpt2", "seq_len": 1024, "dtype": "bf16"},
        "machines": [{"topology": "hgx-a100", "nodes": [1]}],
        "batch": {"samples": [64, 64]},
        "try": {"micro_batch_size": [8], "strategies": [{"kind": "ddp"}]},
    }
    assert clustersim.plan(plan, tmp_path / "plan", jobs=1).front
