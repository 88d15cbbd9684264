"""A scenario file: what it may say, and the one clear error when it says something else."""

from __future__ import annotations

import json

import pytest

from clustersim import scenario
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.scenario.file.reading import override, parse_overrides

GOOD = """
[cluster]
topology = "dgx-1v"
nodes = 1
gpus_per_node = 8

[model]
name = "resnet50"
dtype = "fp32"

[strategy]
kind = "ddp"
micro_batch_size = 64

[run]
steps = 4
"""

# What is changed in GOOD, and what the error must say: the field path, the value, what would be right.
WRONG = {
    "misspelt field": ("nodes = 1", "nods = 1", ["'nods' = 1", "did you mean 'nodes'?", "$.cluster.nods"]),
    "misspelt table": ("[run]", "[rum]", ["'rum'", "did you mean 'run'?", "$.rum"]),
    "field of another table": (
        'name = "resnet50"',
        'name = "resnet50"\nmicro_batch_size = 2',
        [
            "'micro_batch_size' = 2",
            "it is a field of [strategy]",
            "$.model.micro_batch_size",
        ],
    ),
    "field like none": ("nodes = 1", "watchd = 1", ["'watchd' = 1", "known: changes,", "$.cluster.watchd"]),
    "missing field": ('topology = "dgx-1v"', "", ["missing field 'topology'", "$.cluster"]),
    "missing table": ('[strategy]\nkind = "ddp"\nmicro_batch_size = 64', "", ["missing field 'strategy'"]),
    "text for a number": ("nodes = 1", 'nodes = "one"', ["'one'", "a whole number", "$.cluster.nodes"]),
    "number too small": ("nodes = 1", "nodes = 0", ["0 does not fit", ">= 1", "$.cluster.nodes"]),
    "wrong choice": ('"fp32"', '"fp23"', ["'fp23'", "did you mean 'fp32'?", "$.model.dtype"]),
    "two models": (
        'name = "resnet50"',
        'name = "resnet50"\nhf_config = "x"',
        ["one of hf_config, file and name", "$.model"],
    ),
    "unknown strategy": ('"ddp"', '"dpd"', ["'dpd'", "did you mean 'ddp'?", "$.strategy.kind"]),
    "strategy knob": (
        "micro_batch_size = 64",
        "micro_batch_sise = 64",
        ["'micro_batch_sise' = 64", "did you mean 'micro_batch_size'?", "$.strategy.micro_batch_sise"],
    ),
    "strategy value": ("micro_batch_size = 64", "micro_batch_size = 6.5", ["6.5", "$.strategy.micro_batch_size"]),
    "bare bandwidth": (
        "[model]",
        '[[cluster.changes]]\nmatch = "node0/nic0"\nbandwidth = 100\n[model]',
        ["100 is a bare number", "'400 Gb/s' or '50 GB/s'", "$.cluster.changes[0].bandwidth"],
    ),
    "unreadable bandwidth": (
        "[model]",
        '[[cluster.changes]]\nmatch = "node0/nic0"\nbandwidth = "400 Gigs"\n[model]',
        ["'400 Gigs' as a bandwidth", "$.cluster.changes[0].bandwidth"],
    ),
    "field of an array": (
        "[model]",
        '[[cluster.changes]]\nmach = "node0/nic0"\n[model]',
        ["'mach'", "did you mean 'match'?", "$.cluster.changes[0].mach"],
    ),
    "NCCL version": ("steps = 4", 'nccl_version = "two"', ["'two'", "'2.28'", "$.run.nccl_version"]),
    "NCCL version as a number": ("steps = 4", "nccl_version = 2.30", ["2.3", "in quotes", "$.run.nccl_version"]),
    "not TOML": ("nodes = 1", "nodes = ", ["is not TOML", "line 4"]),
}

# Errors that need the machine, the model or the strategy: they too name the file and the field.
WRONG_LATER = {
    "unknown topology": ('"dgx-1v"', '"dgx-1w"', ["'dgx-1w'", "'dgx-1v'", "$.cluster.topology"]),
    "missing topology file": ('"dgx-1v"', '"./mine.toml"', ["mine.toml", "$.cluster.topology"]),
    "unknown device": ("nodes = 1", 'device = "H1000"', ["'H1000'", "$.cluster.device"]),
    "too many GPUs": ("gpus_per_node = 8", "gpus_per_node = 9", ["9 GPUs", "has 8", "$.cluster.gpus_per_node"]),
    "change that meets nothing": (
        "[model]",
        '[[cluster.changes]]\nmatch = "node0/nic99"\nfactor = 0.5\n[model]',
        ["node0/nic99", "$.cluster.changes[0]"],
    ),
    "unknown model": ('"resnet50"', '"resnet500"', ["'resnet500'", "did you mean", "$.model.name"]),
    "missing config.json": ('name = "resnet50"', 'hf_config = "nowhere"', ["nowhere", "$.model.hf_config"]),
    "unknown optimizer": ("steps = 4", 'optimizer = "adm"', ["'adm'", "did you mean", "$.run.optimizer"]),
    "single on many": ('"ddp"', '"single"', ["one GPU", "$.strategy.kind"]),
}


def write(folder, text):
    path = folder / "mine.scenario.toml"
    path.write_text(text)
    return path


def read_error(path, action):
    with pytest.raises(ClusterSimError) as raised:
        action(path)
    text = str(raised.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_gives_one_error_with_file_path_value_and_remedy(case, tmp_path):
    old, new, parts = WRONG[case]
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    text = read_error(path, scenario.load)
    for part in [str(path), *parts]:
        assert part in text


@pytest.mark.parametrize("case", WRONG_LATER)
def test_what_the_machine_or_model_refuses_names_the_file_and_field(case, tmp_path):
    old, new, parts = WRONG_LATER[case]
    assert old in GOOD
    path = write(tmp_path, GOOD.replace(old, new))
    text = read_error(path, lambda path: scenario.load(path).prepare())
    for part in [str(path), *parts]:
        assert part in text


def test_a_missing_file_is_named():
    assert "nowhere.toml" in read_error("nowhere.toml", scenario.load)


def test_a_misspelt_shipped_name_gets_the_nearest():
    assert "did you mean 'ddp_resnet50_1x8_v100'?" in read_error("ddp_resnet50_1x8_v10", scenario.load)


@pytest.mark.parametrize("name", scenario.names())
def test_every_shipped_scenario_says_what_it_teaches_and_builds_a_program_that_checks(name):
    loaded = scenario.load(name)
    assert "Teaches:" in loaded.path.read_text()
    prepared = loaded.prepare()
    prepared.program.check()
    assert prepared.program.world_size == prepared.mesh.world_size


def test_the_shipped_scenarios_of_the_readme_exist():
    expected = {"ddp_resnet50_1x8_v100", "ddp_gpt2_xl_2x8_a100", "ddp_llama3_8b_128x8_h100"}
    assert expected <= set(scenario.names())


def test_set_values_are_toml_and_bare_words_are_text():
    texts = ["a.b=4", "a.c=0.5", "a.d=true", "a.e=fp32", "a.f='x y'", "a.g=[1, 2]", "a.h=400 Gb/s"]
    read = parse_overrides(texts)
    assert list(read.values()) == [4, 0.5, True, "fp32", "x y", [1, 2], "400 Gb/s"]


@pytest.mark.parametrize("text", ["nodes=4", "cluster.nodes", "=4", "cluster.=3", "a.b=[1", 'a.b="x', "a.b=1\nc=2"])
def test_a_set_that_is_not_a_path_and_a_value_is_refused(text):
    with pytest.raises(ScenarioError, match="--set"):
        parse_overrides([text])


def test_set_replaces_one_value_and_leaves_the_file_alone(tmp_path):
    path = write(tmp_path, GOOD)
    loaded = scenario.load(path, {"cluster.gpus_per_node": 4, "run.fidelity": "chunk"})
    assert (loaded.file.cluster.gpus_per_node, loaded.file.run.fidelity, loaded.file.run.steps) == (4, "chunk", 4)
    assert path.read_text() == GOOD
    assert "cluster.gpus_per_node=4" in loaded.title


def test_set_reaches_into_arrays():
    table = {"cluster": {"changes": [{"match": "a"}, {"match": "b"}]}}
    changed = override(table, {"cluster.changes.1.match": "c"})
    assert [c["match"] for c in changed["cluster"]["changes"]] == ["a", "c"]
    assert table["cluster"]["changes"][1]["match"] == "b"


@pytest.mark.parametrize("key", ["cluster.nodes.x", "cluster.changes.7.match"])
def test_set_into_what_is_no_table_is_refused(key):
    with pytest.raises(ScenarioError, match=f"^changes {key}: "):
        override({"cluster": {"nodes": 1, "changes": []}}, {key: 1})
    with pytest.raises(ScenarioError, match=f"^--set {key}: "):
        override({"cluster": {"nodes": 1, "changes": []}}, parse_overrides([f"{key}=1"]))


def test_an_error_of_a_set_value_names_the_option_and_not_the_file(tmp_path):
    path = write(tmp_path, GOOD)
    text = read_error(path, lambda path: scenario.load(path, {"cluster.nods": 2}))
    assert text.startswith("changes cluster.nods: ")
    assert str(path) not in text


def test_a_config_json_without_a_key_names_the_file_the_key_and_what_it_is_for(tmp_path):
    config = '{"model_type": "gpt2", "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_layers": 12}'
    (tmp_path / "config.json").write_text(config)
    path = write(tmp_path, GOOD.replace('name = "resnet50"', 'hf_config = "config.json"'))
    text = read_error(path, lambda path: scenario.load(path).prepare())
    for part in (str(path), "config.json", "'n_layer'", "blocks", "did you mean 'n_layers'?", "$.model.hf_config"):
        assert part in text


def test_an_error_inside_a_set_value_or_of_a_lower_layer_names_the_option_too(tmp_path):
    path = write(tmp_path, GOOD)
    changes = {"cluster.changes": [{"match": "node0/gpu0", "bandwidth": 100}]}
    assert read_error(path, lambda path: scenario.load(path, changes)).startswith(
        "changes cluster.changes: 100 is a bare"
    )
    for key, value in (("strategy.kind", "single"), ("cluster.topology", "nowhere"), ("run.optimizer", "adm")):
        text = read_error(path, lambda path, key=key, value=value: scenario.load(path, {key: value}).prepare())
        assert text.startswith(f"changes {key}: ")
        of_option = scenario.parse_overrides([f"{key}={value}"])
        text = read_error(path, lambda path, key=key, options=of_option: scenario.load(path, options).prepare())
        assert text.startswith(f"--set {key}: ")


def test_of_two_who_changed_a_field_the_later_is_named(tmp_path):
    path = write(tmp_path, GOOD)
    option = scenario.parse_overrides(["run.optimizer=adm"])
    own = {"run.optimizer": "adm"}
    loaded = scenario.load(path, {"run.optimizer": "sgd"})
    assert read_error(path, lambda _: loaded.changed(option).prepare()).startswith("--set run.optimizer: ")
    loaded = scenario.load(path, scenario.parse_overrides(["run.optimizer=sgd"]))
    assert read_error(path, lambda _: loaded.changed(own).prepare()).startswith("changes run.optimizer: ")


def test_paths_in_a_scenario_start_at_its_file(tmp_path, monkeypatch):
    (tmp_path / "machine.toml").write_text('name = "mine"\nextends = "dgx-1v"\n')
    path = write(tmp_path, GOOD.replace('"dgx-1v"', '"machine.toml"'))
    monkeypatch.chdir("/")
    assert scenario.load(path).prepare().topology.name == "mine"


def test_a_change_in_the_scenario_slows_the_link_it_names(tmp_path):
    changes = '[[cluster.changes]]\nmatch = "node0/gpu0"\nfactor = 0.5\n[model]'
    plain = scenario.load(write(tmp_path, GOOD)).prepare().topology
    slowed = scenario.load(write(tmp_path, GOOD.replace("[model]", changes))).prepare().topology
    gpu = plain.vertex("node0/gpu0")
    touched = (plain.link_src == gpu) | (plain.link_dst == gpu)
    assert touched.any()
    assert (slowed.link_bandwidth[touched] == plain.link_bandwidth[touched] / 2).all()
    assert (slowed.link_bandwidth[~touched] == plain.link_bandwidth[~touched]).all()


@pytest.mark.parametrize("changes", [{"clustr.nodes": 2}, {"clustr": {"nodes": 2}}])
def test_a_table_that_a_change_misspells_is_blamed_on_the_change(changes):
    (key,) = changes
    with pytest.raises(ScenarioError, match=f"^changes {key}: unknown field 'clustr'.*did you mean 'cluster'"):
        scenario.load("ddp_gpt2_xl_2x8_a100", changes)


@pytest.mark.parametrize(
    ("key", "value", "missing"), [("campaign.tokens", 1e11, "failures"), ("model.adapter.rank", 16, "target_modules")]
)
def test_what_a_table_that_a_change_begins_lacks_is_blamed_on_the_change(key, value, missing):
    """It was said of the file, which has no such table."""
    with pytest.raises(ScenarioError, match=f"^changes {key}: beside it, missing field '{missing}'; a table here"):
        scenario.load("ddp_gpt2_xl_2x8_a100", {key: value})


def test_a_table_of_set_that_is_misspelt_names_the_option(clustersim):
    done = clustersim("run", "ddp_gpt2_xl_2x8_a100", "--set", "clustr.nodes=2")
    assert done.returncode == 2
    assert done.stderr.startswith("error: --set clustr.nodes: unknown field 'clustr'")


@pytest.mark.parametrize("table", ["cluster", "model", "run"])
def test_a_table_of_changes_leaves_the_files_other_fields_as_they_are(table):
    name = "ddp_gpt2_xl_2x8_a100"
    fields = {"cluster": {"nodes": 4}, "model": {"seq_len": 512}, "run": {"steps": 7}}[table]
    dotted = {f"{table}.{field}": value for field, value in fields.items()}
    wanted = scenario.load(name, dotted).inputs()
    assert scenario.load(name, {table: fields}).inputs() == wanted
    assert scenario.load(name).changed({table: fields}).inputs() == wanted


def test_a_scenario_is_loaded_from_its_tables_which_stay_as_they_are():
    """A dict was taken for a name, and all shipped scenarios were listed."""
    tables = {
        "cluster": {"topology": "dgx-1v"},
        "model": {"name": "resnet50"},
        "strategy": {"kind": "ddp", "micro_batch_size": 8},
    }
    before = json.dumps(tables)
    loaded = scenario.load(tables, {"cluster.gpus_per_node": 2})
    assert (loaded.file.cluster.gpus_per_node, loaded.config.micro_batch_size) == (2, 8)
    assert json.dumps(tables) == before
    with pytest.raises(ScenarioError, match="unknown field 'nodez'"):
        scenario.load(tables | {"cluster": {"topology": "dgx-1v", "nodez": 2}})
