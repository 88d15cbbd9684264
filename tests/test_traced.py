"""A model file is read without torch, strictly, and runs like any other model; what a trace does not say is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

import clustersim
from clustersim.core.errors import ClusterSimError, ModelError
from clustersim.core.model import AUTOCAST, FULL, HALF
from clustersim.model import model
from clustersim.model.traced import LayerRow, TensorRow, folded, read_model_file, read_traced
from clustersim.model.traced.folding import unfolded

FILE = Path(__file__).parent / "data" / "traced" / "small_gpt.model.json"
SCENARIO = """
[cluster]
topology = "hgx-h100"
nodes = 2

[model]
file = "small_gpt.model.json"
dtype = "bf16"

[strategy]
kind = "ddp"
micro_batch_size = 4

[run]
steps = 3
"""
LAYERS, WIDTH, VOCAB, CONTEXT = 4, 128, 512, 64


@pytest.fixture
def path(tmp_path):
    (tmp_path / FILE.name).write_bytes(FILE.read_bytes())
    file = tmp_path / "mine.toml"
    file.write_text(SCENARIO)
    return file


def test_layers_tensors_and_flops_are_those_of_the_module():
    read = read_traced(FILE)
    block = 12 * WIDTH**2 + 9 * WIDTH  # qkv and out without biases, two norms, up and down with theirs
    assert read.parameters == (VOCAB + CONTEXT) * WIDTH + LAYERS * block + 2 * WIDTH
    assert [layer.name for layer in read.layers] == ["embedding", *(f"blocks.{i}" for i in range(LAYERS)), "head"]
    assert [layer.kind for layer in read.layers] == ["embedding", *["block"] * LAYERS, "head"]
    assert [t.tied_to for layer in read.layers for t in layer.tensors if t.tied_to] == ["words.weight"]
    matrices = LAYERS * 12 * WIDTH**2 + VOCAB * WIDTH
    assert read.flops_per_sample() == 6.0 * CONTEXT * matrices + 12.0 * LAYERS * WIDTH * CONTEXT**2
    assert (read.seq_len, read.hidden, read.heads, read.vocab, read.n_blocks) == (CONTEXT, WIDTH, 4, VOCAB, LAYERS)


def test_each_setting_of_types_has_its_own_bytes():
    half, autocast, full = (read_traced(FILE, types) for types in (HALF, AUTOCAST, FULL))
    kept = [sum(k.kept_bytes(HALF) for layer in m.layers for k in layer.kernels) for m in (half, autocast, full)]
    assert kept[0] < kept[1] < kept[2] < 2.01 * kept[0]
    assert half.flops_per_sample() == autocast.flops_per_sample() == full.flops_per_sample()
    assert half.layers[1].boundary_bytes == autocast.layers[1].boundary_bytes == CONTEXT * WIDTH


def test_reading_needs_no_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from clustersim.model import model; assert model({str(FILE)!r}).parameters > 0\n"
        "assert not [name for name in sys.modules if name.startswith('clustersim.model.tracing')]"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_tracing_without_torch_names_the_extra():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from clustersim.app.cli import main; main(['trace-model', 'my.py:build', '--input', 'tokens[1, 2]'])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "pip install 'clustersim[torch]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"strategy.kind": "fsdp"},
        {"strategy.kind": "zero", "strategy.zero_optimization": {"stage": 2}},
        {"strategy.kind": "fsdp", "strategy.param_dtype": "bf16"},
        {"model.dtype": "fp32"},
        {"parallel.pp": 2, "parallel.microbatches": 4},
        {"model.activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_it_runs_on_many_gpus(path, changes):
    result = clustersim.load(path, changes).run()
    assert result.prepared.gpus == 16
    assert 0 < result.summary["step_time_s"] < 1
    assert result.fits
    assert any("traced from small_gpt.py:build" in note for note in result.prepared.model.notes)


def test_checkpointing_costs_time_and_saves_memory(path):
    whole, less = (
        clustersim.load(path, {"model.activation_checkpointing": kept, "cluster.nodes": 1}).run()
        for kept in ("none", "full")
    )
    assert less.summary["step_time_s"] > whole.summary["step_time_s"]
    assert less.memory.activations < whole.memory.activations


REFUSED = {
    "tp": ({"parallel.tp": 2}, ["tp = 2", "was traced", "$.parallel.tp"]),
    "cp": ({"parallel.cp": 2}, ["cp = 2", "was traced", "$.parallel.cp"]),
    "ep": ({"parallel.ep": 2}, ["ep = 2", "$.parallel.ep"]),
    "length": ({"model.seq_len": 128}, ["128", "traced with 64", "$.model.seq_len"]),
    "fused": ({"model.implementation": "fused"}, ["op by op", "$.model"]),
    "eager": ({"model.attention": "eager"}, ["attention that was traced", "$.model"]),
    "options": ({"model.options": {"layers": 2}}, ["trace it again", "$.model"]),
    "modules": (
        {"parallel.pp": 2, "parallel.microbatches": 4, "parallel.recompute_granularity": "selective"},
        ["was traced", "recompute", "$.parallel.recompute_granularity"],
    ),
    "graphs": ({"run.cuda_graph": ["attn"], "parallel.pp": 2}, ["attn", "was traced", "$.run.cuda_graph"]),
    "missing": ({"model.file": "none.model.json"}, ["none.model.json", "$.model.file"]),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_trace_does_not_say_is_refused(path, case):
    changes, parts = REFUSED[case]
    with pytest.raises(ClusterSimError) as error:
        clustersim.load(path, changes).run()
    for part in parts:
        assert part in str(error.value)


def test_a_batch_that_was_not_traced_is_said(path):
    notes = clustersim.load(path, {"strategy.micro_batch_size": 2}).run().prepared.model.notes
    assert any("2 samples, and 4 were traced" in note for note in notes)


def test_a_pipeline_is_refused_where_layers_are_no_chain(path):
    file = path.parent / FILE.name
    file.write_text(json.dumps(json.loads(FILE.read_text()) | {"chained": False}))
    with pytest.raises(ClusterSimError, match=r"takes more than the one before it gives.*\$\.parallel\.pp"):
        clustersim.load(path, {"parallel.pp": 2, "parallel.microbatches": 4}).run()


def test_a_scenario_is_written_for_it(path, tmp_path):
    from clustersim.app.cli import cli

    new = tmp_path / "new.toml"
    words = ["new", "scenario", str(new), "--model", str(tmp_path / FILE.name), "--gpu", "H100"]
    cli.main(args=words, standalone_mode=False)
    assert 'file = "small_gpt.model.json"' in new.read_text()
    assert clustersim.load(new).run().prepared.gpus == 8


def test_other_frameworks_have_no_word_for_it(path):
    from clustersim.files.launch.writing import written

    with pytest.raises(ClusterSimError, match=r"traced from a module of its own.*\$\.model\.file"):
        written(clustersim.load(path), "megatron")


def test_a_sweep_knows_a_changed_file(path):
    from clustersim.scenario.run.identity import Fingerprints

    before = Fingerprints()(clustersim.load(path)).key
    file = path.parent / FILE.name
    file.write_text(FILE.read_text() + "\n")
    assert Fingerprints()(clustersim.load(path)).key != before


def damaged(change):
    table = json.loads(FILE.read_text())
    change(table)
    return json.dumps(table)


DAMAGED = {
    "no json": ("{", ["is not JSON"]),
    "a config": ('{"model_type": "llama"}', ["no model file", "hf_config", "$.format"]),
    "version": (damaged(lambda t: t.update(version=2)), ["version is 2", "trace the model again", "$.version"]),
    "unknown field": (damaged(lambda t: t.update(lyers=[])), ["'lyers'", "did you mean 'layers'", "$.lyers"]),
    "negative": (damaged(lambda t: t["layers"][0]["tensors"][0].update(numel=-1)), ["-1", ">= 1", "numel"]),
    "text": (damaged(lambda t: t.update(batch="four")), ["'four'", "int", "$.batch"]),
    "no work": (damaged(lambda t: t["layers"][0].update(work=99)), ["work 99", "$.layers[0].work"]),
    "no layers": (damaged(lambda t: t.update(layers=[])), ["no layer", "$.layers"]),
    "many": (damaged(lambda t: t["layers"][1].update(count=10**7)), ["layers", "at most"]),
    "one name": (damaged(lambda t: t["layers"][0].update(count=3)), ["braces", "$.layers[0]"]),
    "twice": (damaged(lambda t: t["layers"].append(t["layers"][0])), ["words.weight", "twice"]),
    "tied": (damaged(lambda t: t["layers"][-1]["tensors"][-1].update(tied_to="x")), ["tied to 'x'"]),
    "rows": (damaged(lambda t: t["layers"][0]["tensors"][0].update(width=7)), ["no rows of 7"]),
    "kind": (damaged(lambda t: t["works"][0]["bf16"]["kernels"][0].update(kind="gem")), ["'gem'", "kind"]),
    "types": (damaged(lambda t: [w.pop("bf16") for w in t["works"]]), ["not in bf16", "--types bf16"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_one_clear_error(tmp_path, case):
    text, parts = DAMAGED[case]
    file = tmp_path / "x.model.json"
    file.write_text(text)
    with pytest.raises(ModelError) as error:
        read_traced(file, HALF)
    for part in (str(file), *parts):
        assert part in str(error.value)


def test_a_named_model_file_takes_no_options():
    with pytest.raises(ModelError, match="seq_len = 5"):
        model(FILE, seq_len=5)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=12))
def test_folding_and_unfolding_give_the_same_layers(pairs):
    rows = []
    for place, (work, gap) in enumerate(pairs):
        name = f"h.{place + gap}.1"
        tensors = (TensorRow(name=f"{name}.w", numel=work + 1), TensorRow(name=f"shared{place}", numel=2))
        rows.append(LayerRow(name=name, kind="block", work=work, tensors=tensors[: 1 + work % 2]))
    assert list(unfolded(folded(rows))) == rows


def test_equal_blocks_are_written_once():
    file = read_model_file(FILE)
    assert [(row.name, row.count) for row in file.layers] == [("embedding", 1), ("blocks.{}", LAYERS), ("head", 1)]
    assert len(file.works) == 3
    assert msgspec.convert(msgspec.to_builtins(file), type(file)) == file


@pytest.mark.parametrize("name", ["heads", "head_dim", "seq"])
def test_attention_with_work_and_no_sizes_is_refused(tmp_path, name):
    text = (Path(__file__).parent / "data" / "traced" / "small_gpt.model.json").read_text()
    table = json.loads(text)

    def rows(part):
        children = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
        if isinstance(part, dict) and part.get("kind") == "attention":
            yield part
        for child in children:
            yield from rows(child)

    next(rows(table))[name] = 0
    (tmp_path / "x.model.json").write_text(json.dumps(table))
    with pytest.raises(ModelError, match="an attention kernel that has FLOPs has heads, head_dim and seq above 0"):
        read_model_file(tmp_path / "x.model.json")
