"""What a sweep leaves behind: rows, tables, pictures; and the command as a person runs it."""

from __future__ import annotations

import csv
import json
import shutil

import numpy as np
import pytest

from clustersim import scenario
from clustersim.app import plots
from clustersim.core.errors import ClusterSimError
from clustersim.core.paths import shipped
from clustersim.studies import sweep as sweeps

TOML = """
base = "ddp_resnet50_1x8_v100"
title = "two ways"
[set]
run.steps = 3
[[axes]]
name = "exchange"
key = "strategy"
[axes.values]
"all-reduce" = {kind = "ddp", micro_batch_size = 8}
"server" = {kind = "parameter_server", micro_batch_size = 8, servers = "${cluster.gpus_per_node}"}
"no worker left" = {kind = "parameter_server", micro_batch_size = 8, server = "gpu", servers = 2}
[[axes]]
key = "cluster.gpus_per_node"
values = [2, 1]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("sweep")
    (path / "mine.toml").write_text(TOML)
    sweeps.sweep(path / "mine.toml", path / "out", jobs=1)
    return path / "out"


def test_a_table_has_the_grids_order_and_the_figures_of_a_run(folder):
    table = sweeps.read(folder)
    assert list(table)[:2] == ["exchange", "cluster.gpus_per_node"]
    assert table["exchange"].tolist() == ["all-reduce"] * 2 + ["server"] * 2 + ["no worker left"] * 2
    assert table["cluster.gpus_per_node"].tolist() == [2, 1] * 3
    changes = {"run.steps": 3, "strategy": {"kind": "ddp", "micro_batch_size": 8}, "cluster.gpus_per_node": 2}
    alone = scenario.load("ddp_resnet50_1x8_v100", changes).run()
    for name in ("step_time_s", "samples_per_s", "mfu", "exposed_communication_s", "bytes_sent_per_gpu"):
        assert table[name][0] == alone.summary[name]
    assert table["peak_memory_bytes"][0] == alone.memory.total
    assert table["fits"][0] == alone.fits
    assert (table["busiest_link"][0], table["busiest_link_utilisation"][0]) == alone.summary["hottest_links"][0][:2]


def lines(folder):
    """Rows as they lie there."""
    return [json.loads(line) for _, line in sweeps.Store(folder).lines()]


def test_shares_of_a_row_are_of_the_whole_step(folder):
    table = sweeps.read(folder)
    good = table["error"] == ""
    total = sum(column for name, column in table.items() if name.startswith("share_"))
    assert total[good] == pytest.approx(np.ones(good.sum()), rel=1e-6)


def test_a_reference_takes_another_fields_value(folder):
    inputs = {row["key"]: row["inputs"] for row in lines(folder)}
    key = {(axes["exchange"], axes["cluster.gpus_per_node"]): row.key for axes, row in sweeps.rows(folder)}
    assert [inputs[key["server", n]]["strategy"]["servers"] for n in (2, 1)] == [2, 1]
    with pytest.raises(ClusterSimError, match=r"'\$\{cluster.nod\}' stands for a field"):
        list(sweeps.from_table({"base": "ddp_resnet50_1x8_v100", "set": {"run.steps": "${cluster.nod}"}}).cases())


def test_a_row_holds_inputs_version_and_nothing_of_the_place_it_ran_in(folder):
    for row in lines(folder):
        assert list(row)[:4] == ["key", "version", "inputs", "files"]
        assert row["inputs"]["run"]["nccl_version"]  # a default, written out
        assert str(folder.parent) not in json.dumps(row)
        assert ("result" in row) != ("error" in row)


def test_two_points_of_one_content_share_a_row(tmp_path):
    axis = {"key": "strategy", "values": {"short": {"kind": "ddp"}, "long": {"kind": "ddp", "static_graph": False}}}
    plan = sweeps.from_table({"base": "ddp_resnet50_1x8_v100", "set": {"cluster.gpus_per_node": 2}, "axes": [axis]})
    done = sweeps.sweep(plan, tmp_path, jobs=1)
    assert (done.cases, done.scenarios, done.computed) == (2, 1, 1)
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 1
    assert sweeps.read(tmp_path)["strategy"].tolist() == ["short", "long"]


def test_a_longer_sweep_in_the_same_folder_computes_what_is_new(tmp_path):
    def plan(most):
        axes = [{"key": "strategy.micro_batch_size", "range": {"start": 1, "stop": most, "step": 1}}]
        return sweeps.from_table({"base": "ddp_resnet50_1x8_v100", "set": {"cluster.gpus_per_node": 2}, "axes": axes})

    assert sweeps.sweep(plan(2), tmp_path, jobs=1).computed == 2
    done = sweeps.sweep(plan(3), tmp_path, jobs=1)
    assert (done.kept, done.computed) == (2, 1)
    assert sweeps.sweep(plan(1), tmp_path, jobs=1).computed == 0
    assert len(sweeps.read(tmp_path)["key"]) == 1  # the table is of the sweep, the rows are of the folder
    assert sweeps.sweep(plan(1), tmp_path, jobs=1, resume=False).computed == 1
    assert len(sweeps.Store(tmp_path).keys()) == 1


def test_a_value_that_no_scenario_can_have_is_told_before_anything_runs(tmp_path):
    axes = [{"key": "model.dtype", "values": ["fp32", "fp23"]}, {"key": "run.steps", "values": [3, 4]}]
    with pytest.raises(ClusterSimError, match=r"model.dtype = 'fp23'.*did you mean 'fp32'.*\$\.axes\[0\], value 1"):
        sweeps.sweep(sweeps.from_table({"base": "ddp_resnet50_1x8_v100", "axes": axes}), tmp_path, jobs=1)
    assert not list(tmp_path.iterdir())


def test_a_line_that_is_no_row_is_named(tmp_path):
    (tmp_path / "results.jsonl").write_text("step,time\n")
    with pytest.raises(ClusterSimError, match=r"results.jsonl: line 1 is no row of a sweep: b'step,time"):
        sweeps.Store(tmp_path).keys()


def test_a_whole_number_of_64_bits_keeps_every_digit(folder, tmp_path):
    """Such as a seed: it was a traceback, and would have been another one as a float."""
    copy = tmp_path / "out"
    shutil.copytree(folder, copy)
    cases = [json.loads(line) for line in (copy / "cases.jsonl").read_text().splitlines()]
    for case in cases:
        case["axes"]["cluster.gpus_per_node"] = 2**63
    (copy / "cases.jsonl").write_text("".join(json.dumps(case) + "\n" for case in cases))
    assert set(sweeps.read(copy)["cluster.gpus_per_node"]) == {str(2**63)}


def test_csv_holds_the_table(folder, tmp_path):
    table = sweeps.read(folder)
    sweeps.write(table, tmp_path / "t.csv")
    with (tmp_path / "t.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert list(lines[0]) == list(table)
    assert [float(line["step_time_s"]) for line in lines[:4]] == table["step_time_s"][:4].tolist()
    assert (lines[4]["step_time_s"], lines[4]["fits"], lines[0]["fits"]) == ("", "false", "true")
    with pytest.raises(ClusterSimError, match=r"a \.csv or a \.parquet"):
        sweeps.write(table, tmp_path / "t.xls")


def test_parquet_holds_the_table(folder, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow (the parquet extra)")
    table = sweeps.read(folder)
    sweeps.write(table, tmp_path / "t.parquet")
    read = parquet.read_table(tmp_path / "t.parquet")
    assert read.column_names == list(table)
    assert read["step_time_s"].to_pylist()[:4] == table["step_time_s"][:4].tolist()
    assert read["step_time_s"].to_pylist()[4:] == [None, None]


def test_curves_over_gpus_and_over_a_number_and_bars(folder):
    table = sweeps.read(folder)
    drawn = plots.sweep_curves(table, ["exchange", "cluster.gpus_per_node"], "two ways")
    assert "all-reduce: 1 to 2 GPUs" in plots.alt_text(drawn)
    half = {name: column[table["gpus"] == 2] for name, column in table.items()}
    assert "Step times" in plots.alt_text(plots.sweep_curves(half, ["exchange"]))
    half["x"] = np.arange(len(half["key"]))
    assert "Curves over x" in plots.alt_text(plots.sweep_curves(half, ["x"]))
    with pytest.raises(ClusterSimError, match="no row of this sweep has a result"):
        plots.sweep_curves({name: column[:0] for name, column in table.items()}, ["exchange"])


def test_the_command_tells_writes_and_goes_on(clustersim, tmp_path):
    (tmp_path / "mine.toml").write_text(TOML)
    done = clustersim("sweep", tmp_path / "mine.toml", "--out", tmp_path / "out", "--jobs", "1")
    assert done.returncode == 0
    assert "6 scenarios: 6 simulated, 0 kept" in done.stdout
    assert done.stdout.count("- 1 without a result: ScenarioError") == 2
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"results.jsonl", "table.csv", "curves.png"}
    again = clustersim("sweep", tmp_path / "mine.toml", "--out", tmp_path / "out", "--jobs", "1", "--json")
    said = json.loads(again.stdout)
    assert (said["kept"], said["computed"], len(said["rows"])) == (6, 0, 6)
    exported = clustersim("export", tmp_path / "out", tmp_path / "all.csv")
    assert "6 rows" in exported.stdout
    assert (tmp_path / "all.csv").read_bytes() == (tmp_path / "out" / "table.csv").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["sweep_oversubscription_fsdp_8", "--out", "x"], "did you mean 'sweep_oversubscription_fsdp_8b'?"),
        (["nowhere.toml", "--out", "x"], "nowhere.toml: no such file"),
        (["oversubscription_fsdp_8b", "--out", "x", "--executor", "dask"], "needs --address"),
        (["oversubscription_fsdp_8b", "--out", "x", "--address", "tcp://a:1"], "needs --executor dask"),
    ],
)
def test_what_the_command_cannot_use_is_one_line(clustersim, arguments, said):
    done = clustersim("sweep", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", [name for name in shipped("scenarios") if name.startswith("sweep_")])
def test_every_shipped_sweep_says_what_it_teaches_and_all_its_scenarios_read(name):
    plan = sweeps.load(name)
    assert "Teaches:" in plan.path.read_text()
    keys = {sweeps.Fingerprints()(plan.scenario(case)).key for case in plan.cases()}
    assert len(keys) == len(plan)
    plan.scenario(plan.case(len(plan) - 1)).prepare().program.check()
