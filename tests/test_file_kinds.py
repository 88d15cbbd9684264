"""A file of another kind than a command reads is told by its kind, not by the first of its fields that is unknown."""

from __future__ import annotations

import pytest

from clustersim.core.file_kinds import FILE_KINDS, taken_for

SCENARIO = """
cluster = {topology = "dgx-1v", nodes = 1}
model = {name = "alexnet"}
strategy = {kind = "ddp"}
"""
PLAN = """
model = {name = "alexnet"}
machines = [{topology = "dgx-1v", nodes = [1]}]
batch = {samples = [64, 64]}
try = {micro_batch_size = [8], strategies = [{kind = "ddp"}]}
"""
TOPOLOGY = """
name = "mine"
extends = "dgx-1v"
"""
SWEEP = """
base = "ddp_resnet50_1x8_v100"
axes = [{key = "cluster.nodes", values = [1]}]
"""
TEXTS = {"scenario": SCENARIO, "plan": PLAN, "topology": TOPOLOGY, "sweep": SWEEP}


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        (("check", "{}"), "scenario"),
        (("check", "{}"), "plan"),
        (("run", "{}"), "plan"),
        (("run", "{}"), "topology"),
        (("run", "{}"), "sweep"),
        (("plan", "{}", "--out", "out"), "scenario"),
        (("sweep", "{}", "--out", "out"), "scenario"),
    ],
)
def test_a_file_of_another_kind_is_named_with_the_command_that_reads_it(clustersim, tmp_path, command, kind):
    """`check` of a scenario said "unknown field 'cluster'", and of a plan "did you mean 'node'?"."""
    path = tmp_path / "file.toml"
    path.write_text(TEXTS[kind])
    words = [str(path) if word == "{}" else str(tmp_path / word) if word == "out" else word for word in command]
    done = clustersim(*words)
    assert done.returncode == 2
    (read_by,) = [row.read_by for row in FILE_KINDS if row.name == kind]
    assert done.stderr.strip() == f"error: {path}: this is a {kind}, which `{read_by}` reads"


def test_a_misspelt_field_of_the_right_kind_is_told_as_such():
    fields = ["cluster", "model", "strategy", "run"]
    assert taken_for({"cluster": {}, "model": {}, "strategy": {}, "fabric": {}}, fields) == ""
    assert taken_for({"clstr": {}}, fields) == ""
