"""What people write is read in one place: whatever a file holds, the answer is one line that says file and place."""

from __future__ import annotations

import json
import os

import pytest
from hostile_documents import CAMPAIGN, SCENARIO
from hostile_values import toml_file

from clustersim import scenario
from clustersim.app.cli import main
from clustersim.cluster import files as fabrics
from clustersim.cluster.files.names import expand
from clustersim.core import limits
from clustersim.core.errors import ClusterSimError, ScenarioError, TopologyError, UnitError
from clustersim.core.paths import data_path
from clustersim.core.texts import json_table, toml
from clustersim.files.traces.saved import load_run
from clustersim.scenario.file import reading
from clustersim.scenario.file.campaign_units import Rate
from clustersim.studies import plan as planner
from clustersim.studies import sweep as sweeps

BASE = "ddp_resnet50_1x8_v100"
WHOLE = (data_path("scenarios") / f"{BASE}.toml").read_text()
SMALL = {"model.name": "resnet18", "cluster.gpus_per_node": 2, "run.steps": 2}


def command(capsys, *words):
    """Exit code and stderr of a command line."""
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code, capsys.readouterr().err


HOSTILE = {
    "deep": (b"x = " + b"[" * 3000 + b"]" * 3000, "deep"),
    "deep but parsed": (b"x = " + b"[" * 100 + b"]" * 100, "deep"),
    "a number of thousands of digits": (b"x = " + b"9" * 5000, "thousands of digits"),
    "a hexadecimal number without end": (b"x = 0x" + b"f" * 5000, "larger than any number"),
    "a number beyond 64 bits": (b"x = 99999999999999999999", "larger than any number"),
    "infinity": (b"x = inf", "not a number that a field can hold"),
    "not a number": (b"x = nan", "not a number that a field can hold"),
    "a factor of 1e300": (b"x = 1e300", "not a number that a field can hold"),
    "NUL in a word": (b'x = "a\\u0000b"', "NUL"),
    "NUL": (b"x = 1\0", "not TOML"),
    "lone CR": (b"x = 1\ry = 2", "not TOML"),
    "broken UTF-8": (b"x = 1\ny = '\xff'", r"UTF-8.*line 2"),
}


@pytest.mark.parametrize("reader", [scenario.load, fabrics.load, sweeps.load, planner.load])
@pytest.mark.parametrize("case", HOSTILE)
def test_every_reader_of_toml_says_what_is_wrong_in_one_line(case, reader, tmp_path):
    text, words = HOSTILE[case]
    (tmp_path / "mine.toml").write_bytes(text)
    with pytest.raises(ClusterSimError, match=words) as wrong:
        reader(str(tmp_path / "mine.toml"))
    assert "mine.toml" in str(wrong.value)
    assert len(str(wrong.value)) < 1000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"hidden_size": 1, "hidden_size": 2}', "'hidden_size' is there twice"),
        ('{"a": ' * 2000, "deep"),
        ("[" * 100 + "]" * 100, "not an object"),
        ('{"a": ' + "9" * 5000 + "}", "thousands of digits"),
        ('{"a": NaN}', "not a number that a field can hold"),
    ],
)
def test_a_config_that_is_none_is_one_line(text, words, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ClusterSimError, match=words):
        scenario.load(BASE, {"model.hf_config": str(tmp_path / "config.json")}).run()
    with pytest.raises(ScenarioError, match=words):
        json_table(text, "config.json", ScenarioError)


def test_paths_that_are_no_files_say_what_they_are(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.toml")
    os.mkfifo(tmp_path / "run.npz")
    for words in (
        ("run", tmp_path / "pipe.toml"),
        ("check", tmp_path / "pipe.toml"),
        ("sweep", tmp_path / "pipe.toml", "--out", tmp_path / "o"),
        ("report", tmp_path / "run.npz"),
        ("report", tmp_path),
        ("trace", tmp_path / "run.npz"),
        ("validate", "nccl", tmp_path / "run.npz"),
    ):
        code, said = command(capsys, *words)
        assert code == 2
        assert "is a pipe" in said
    for name in ("x/" * 3000, "a" * 5000, "/dev/zero"):
        for words in (("run", name), ("check", name), ("report", name), ("trace", name)):
            code, said = command(capsys, *words)
            assert code == 2
            assert len(said.strip().splitlines()) == 1
            assert len(said) < 2000


def test_values_are_echoed_shortened(capsys):
    for words in (("run", BASE, "--set", "model.name=" + "x" * 9000), ("run", BASE, "--set", "x" * 9000)):
        code, said = command(capsys, *words)
        assert code == 2
        assert len(said) < 1600


# ---- changes from the command line -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [["ddp"], {"a": 1}, 3])
def test_a_strategy_that_is_no_word_is_one_line(kind):
    with pytest.raises(ScenarioError, match=r"unknown strategy .*; .*\(at \$\.strategy\.kind\)"):
        scenario.load(BASE, {"strategy.kind": kind})


def test_setting_one_of_two_that_exclude_each_other_takes_the_other_away(tmp_path, monkeypatch):
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "tiny.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)  # the scenario lies elsewhere
    changed = scenario.load(BASE, scenario.parse_overrides(["model.hf_config=tiny.json"]))
    assert changed.file.model.name is None
    assert changed.prepare().model.parameters < 1e6
    back = changed.changed({"model.name": "resnet18"})
    assert (back.file.model.hf_config, back.file.model.name) == (None, "resnet18")


def test_nothing_after_the_sign_takes_a_field_away():
    assert "seed = 0" in WHOLE
    assert scenario.load(BASE, scenario.parse_overrides(["run.jitter="])).file.run.jitter is None
    with pytest.raises(ScenarioError, match="missing field 'topology'"):
        scenario.load(BASE, scenario.parse_overrides(["cluster.topology="]))


def test_another_strategy_says_how_the_fields_of_the_files_own_are_taken_away():
    told = "gradient_as_bucket_view' = True; .*; --set strategy.gradient_as_bucket_view= takes it away"
    with pytest.raises(ScenarioError, match=told):
        scenario.load("ddp_gpt2_xl_2x8_a100", scenario.parse_overrides(["strategy.kind=fsdp"]))
    told = "gradient_as_bucket_view' = True; .*; changes strategy.gradient_as_bucket_view = None takes it away"
    with pytest.raises(ScenarioError, match=told):
        scenario.load("ddp_gpt2_xl_2x8_a100", {"strategy.kind": "fsdp"})
    changes = scenario.parse_overrides(["strategy.kind=fsdp", "strategy.gradient_as_bucket_view="])
    assert scenario.load("ddp_gpt2_xl_2x8_a100", changes).file.strategy["kind"] == "fsdp"


def test_nothing_after_the_sign_takes_a_table_or_an_item_of_an_array_away_too():
    whole = {"cluster": {"changes": [{"match": "a"}, {"match": "b"}, {"match": "c"}]}, "campaign": {"duration": "2 d"}}
    for texts, left in (
        (["campaign="], {"cluster": whole["cluster"]}),
        (["campaign=", "cluster.changes="], {"cluster": {}}),
        (["campaign=", "cluster.changes.0=", "cluster.changes.1="], {"cluster": {"changes": [{"match": "c"}]}}),
        (["campaign=", "parallel.routing.kind=", "run="], {"cluster": whole["cluster"]}),  # what is not there
    ):
        assert reading.override(whole, reading.parse_overrides(texts)) == left
    for text in ("campaign=5", "=", "cluster.=", ".="):
        with pytest.raises(ScenarioError, match=r"write it as table\.key=value"):
            reading.parse_overrides([text])
    with pytest.raises(ScenarioError, match="'3' is not an index of an array of 3"):
        reading.override(whole, {"cluster.changes.3": None})


def test_a_campaign_that_is_taken_away_is_no_campaign(tmp_path):
    tables = toml_file(SCENARIO | {"campaign": CAMPAIGN})
    (tmp_path / "mine.toml").write_bytes(tables)
    made = scenario.load(tmp_path / "mine.toml", scenario.parse_overrides(["campaign=", "cluster.changes="]))
    assert made.file.campaign is None
    assert made.file.cluster.changes == ()


def test_a_path_that_is_set_starts_at_the_working_folder_and_then_beside_the_scenario(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "there" / "mine.toml").write_text(WHOLE)
    for folder, name in (("there", "beside"), ("work", "here")):
        (tmp_path / folder / f"{name}.toml").write_text(f'name = "{name}"\nextends = "dgx-1v"\n')
    monkeypatch.chdir(tmp_path / "work")

    def machine(name):
        mine = scenario.load(tmp_path / "there" / "mine.toml", {"cluster.topology": name})
        return mine.prepare().topology.name

    assert machine("here.toml") == "here"
    assert machine("beside.toml") == "beside"
    with pytest.raises(ScenarioError, match=r"neither in the working folder nor beside mine\.toml"):
        machine("nowhere.toml")


def test_an_error_from_extends_names_file_and_field(tmp_path):
    (tmp_path / "mine.toml").write_text('name = "mine"\nextends = "dgx-1w"\n')
    with pytest.raises(TopologyError, match=r"mine\.toml: \$\.extends: unknown topology 'dgx-1w'; did you mean"):
        fabrics.load(str(tmp_path / "mine.toml"))


# ---- sizes -----------------------------------------------------------------------------------------------------------


def test_names_are_counted_before_they_are_made():
    for names in ("gpu[0-99999999999]", "n[0-9999]/gpu[0-9999]", "gpu[0-" + "9" * 250 + "]"):
        with pytest.raises(TopologyError, match="at most 1,000,000 are made"):
            expand(names)


def test_a_topology_that_does_not_fit_in_memory_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(limits, "free_memory", lambda: 2.0**30)
    with pytest.raises(TopologyError, match=r"for a topology of 1,000,000 nodes.*1 GiB are free; use fewer nodes"):
        fabrics.load("hgx-h100", nodes=1_000_000)


def test_passes_and_layers_that_do_not_fit_in_memory_are_refused_before_they_are_made(tmp_path, monkeypatch):
    with pytest.raises(ClusterSimError, match=r"10,000,000 passes, forward and backward.*use fewer"):
        scenario.load(BASE, {"run.steps": 10_000_000}).prepare()
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 10**9, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClusterSimError, match=r"'n_layer': 1e\+09 are asked for; at most 100,000 are made"):
        scenario.load(BASE, {"model.hf_config": str(tmp_path / "config.json")}).prepare()


def test_a_grid_is_counted_and_a_sample_of_it_is_drawn_without_listing_it():
    axes = [
        {"key": key, "range": {"start": 1, "stop": 100_000, "step": 1}}
        for key in ("run.steps", "strategy.micro_batch_size", "cluster.nodes", "strategy.bucket_cap_mb", "run.seed")
    ]
    with pytest.raises(ScenarioError, match=r"scenarios of the grid.*1e\+25 are asked for; at most 1,000,000"):
        sweeps.from_table({"base": BASE, "axes": axes})
    drawn = sweeps.from_table({"base": BASE, "axes": axes, "sample": 3})
    assert drawn.total == 10**25
    assert len({tuple(case.axes.values()) for case in drawn.cases()}) == 3
    again = sweeps.from_table({"base": BASE, "axes": axes, "sample": 3})
    assert list(again.cases()) == list(drawn.cases())


@pytest.mark.parametrize(
    "axis",
    [
        {"range": {"start": 0, "stop": 10**15, "step": 1}},
        {"range": {"start": 0, "stop": 1, "num": 10**9}},
        {"log": {"start": 1, "stop": 2, "factor": 1.0000000001}},
        {"log": {"start": 1, "stop": 2, "num": 10**9}},
    ],
)
def test_an_axis_without_end_is_refused(axis):
    with pytest.raises(ScenarioError, match=r"(?=.*axes\[0\]).*100,?000"):
        sweeps.from_table({"base": BASE, "axes": [{"key": "run.seed", **axis}]})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run.jitter": 100}, "<= 1"),
        ({"run.seed": -1}, ">= 0"),
        ({"run.steps": 10**12}, "<= 10000000"),
        ({"cluster.slow": [{"ranks": [0], "speed": 1e9}]}, "<= 1000"),
        ({"cluster.changes": [{"match": "node0/gpu0", "factor": 1e30}]}, "<= 1000000"),
    ],
)
def test_numbers_that_cannot_be_name_the_range(change, words):
    with pytest.raises(ScenarioError, match=words):
        scenario.load(BASE, change)


# ---- damaged files of our own ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    axes = [{"key": "strategy.micro_batch_size", "values": [1, 2]}]
    sweeps.sweep(sweeps.from_table({"base": BASE, "set": SMALL, "axes": axes}, "mine.toml"), folder, jobs=1)
    return folder


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("results.jsonl", b'"step_time_s":', b'"step_time_s":-'),
        ("results.jsonl", b'"samples_per_s"', b'"samples"'),
        ("results.jsonl", b'"gpus":2', b'"gpus":"two"'),
        ("results.jsonl", b'"result":', b'"outcome":'),
        ("cases.jsonl", b'"axes"', b'"axis"'),
        ("sweep.json", b'"axes"', b'"axis"'),
    ],
)
def test_a_damaged_table_is_one_line(file, old, new, swept, tmp_path, capsys):
    for path in swept.iterdir():
        text = path.read_bytes()
        (tmp_path / path.name).write_bytes(text.replace(old, new) if path.name == file else text)
    for words in (("report", tmp_path, "-o", tmp_path / "r.html"), ("export", tmp_path, tmp_path / "t.csv")):
        code, said = command(capsys, *words)
        assert code == 2
        assert "damaged" in said
        assert len(said.splitlines()) == 1


def test_a_run_whose_spans_cannot_be_is_no_run(tmp_path):
    import numpy as np

    run = scenario.load(BASE, SMALL).run()
    run.save(tmp_path / "run.npz")
    with np.load(tmp_path / "run.npz") as data:
        whole = dict(data)
    load_run(tmp_path / "run.npz")
    for name in ("row_op", "row_set"):
        np.savez(tmp_path / "bad.npz", **(whole | {name: whole[name] + 10**6}))
        with pytest.raises(ClusterSimError, match="not a run that clustersim saved"):
            load_run(tmp_path / "bad.npz")


def test_an_archive_that_unpacks_without_end_is_refused(tmp_path, monkeypatch):
    import numpy as np

    monkeypatch.setattr("clustersim.files.traces.saved.LARGEST", 10**6)
    np.savez_compressed(tmp_path / "bomb.npz", words=np.zeros(10**7, dtype=np.uint8))
    assert (tmp_path / "bomb.npz").stat().st_size < 10**5
    with pytest.raises(ClusterSimError, match=r"unpacks to 9\.537 MiB"):
        load_run(tmp_path / "bomb.npz")


def test_toml_of_people_is_still_read():
    assert toml("a = 1\r\n[b]\r\nc = 'x'\r\n", "x.toml", ScenarioError) == {"a": 1, "b": {"c": "x"}}


def test_no_picture_reads_a_name_as_mathematics(swept, tmp_path):
    from clustersim.app import plots

    name = r"$\frac{1}{$"
    table = sweeps.read(swept)
    table = {key: column for key, column in table.items() if not key.startswith("strategy.")}
    table[name] = table["key"].copy()
    table[name][:] = [name, name + "2"]
    run = scenario.load(BASE, SMALL).run()
    pictures = {
        "curves": plots.sweep_curves(table, [name], name),
        "front": plots.front([plots.FrontDot(name, name, 1.0, 2.0, True)], x=name, y=name, title=name),
        "gantt": plots.gantt(run.timeline, title=name),
        "scaling": plots.scaling({name: ([1, 2], [1.0, 2.0])}, unit=name),
    }
    for kind, figure in pictures.items():
        for suffix in ("png", "svg", "pdf"):
            plots.save(figure, tmp_path / f"{kind}.{suffix}", 60)
    assert name in (tmp_path / "front.svg").read_text() or r"\frac" in plots.alt_text(pictures["front"])


def test_a_machine_without_a_gpu_is_checked(tmp_path, capsys):
    (tmp_path / "m.toml").write_text(
        'name = "m"\n[fabric]\nkind = "one_switch"\nsource = "made"\n[node]\ndevice = "A100-SXM4-80GB"\n'
        '[[node.vertices]]\nnames = "nic0"\nkind = "nic"\nbandwidth = "25 GB/s"\nsource = "made"\n'
    )
    code, said = command(capsys, "check", tmp_path / "m.toml")
    assert (code, said) == (0, "")


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.csv", b'"a": [[1]]\n1,2\n', ("trace",)),
        ("d/clustersim.json", b'{"kind": "sweep", "name": "sweep\x9b", "digest": 1}', ("run", "ps_async_1x8", "--out")),
    ],
)
def test_a_broken_head_of_a_file_is_one_line(name, data, words, tmp_path, capsys):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    code, said = command(capsys, *words, path if name == "t.csv" else path.parent)
    assert (code, len(said.splitlines())) == (2, 1)


def test_a_rate_that_cannot_be_read_is_echoed_shortened():
    with pytest.raises(UnitError) as caught:
        Rate.read("1 per 3" + "{" * 3000)
    assert len(str(caught.value)) < 300
