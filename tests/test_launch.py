"""Launch files in and out: what each framework's options come to, and that what is written is read as it was."""

from __future__ import annotations

import json
import sys
import tomllib
from fnmatch import fnmatchcase
from typing import ClassVar

import pytest
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from clustersim import scenario
from clustersim.core.errors import ClusterSimError, ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import batches, shapes, shell
from clustersim.files.launch.files import document, documents
from clustersim.files.launch.table import LaunchOption, load
from clustersim.files.launch.whose import framework_of
from clustersim.studies.what_if.folded import folded
from clustersim.training.parallel import FIELDS
from clustersim.training.strategies import STRATEGIES
from clustersim.training.strategies.zero_config import ZeroOptimization

yaml = pytest.importorskip("yaml", reason="needs pyyaml (the exchange extra)")

DATA = ROOT / "tests" / "data" / "launch"
MACHINE = {"topology": "dgx-h100", "nodes": 4}
WRITE = tuple(name for name in exchange.NAMES if load(name).writes)
LAUNCHES = {
    "megatron": ("megatron_llama3_70b.sh",),
    "megatron as yaml": ("megatron_mixtral_8x7b.yaml",),
    "torchtitan": ("torchtitan_llama3_70b.toml",),
    "deepspeed": ("deepspeed_zero3.json", "deepspeed_llama2_7b.sh"),
    "accelerate": ("accelerate_fsdp.yaml", "accelerate_llama3_8b.sh"),
    "nemo": ("nemo_llama3_8b.yaml",),
}
MEANS = {
    "megatron": {
        "parallel.tp": 8,
        "parallel.pp": 4,
        "parallel.layers_per_virtual_stage": 5,
        "parallel.sequence_parallel": True,
        "parallel.use_distributed_optimizer": True,
        "batch.global": 16,
        "batch.count": 16,
        "model.dtype": "bf16",
        "model.seq_len": 8192,
        "shape.layers": 80,
        "shape.kv_heads": 8,
        "strategy.param_dtype": "bf16",
    },
    "megatron as yaml": {
        "parallel.ep": 8,
        "parallel.etp": 1,
        "parallel.dispatcher": "alltoall",
        "parallel.routing.kind": "balanced",
        "parallel.recompute_modules": ("moe_act", "layernorm"),
        "shape.experts.count": 8,
        "batch.count": 8,
    },
    "torchtitan": {
        "strategy.kind": "fsdp",
        "parallel.tp": 8,
        "parallel.tp_overlap": "async_tp",
        "parallel.float8_tp": True,
        "parallel.sequence_parallel": True,
        "model.dtype": "fp8",
        "model.activation_checkpointing": "full",
        "strategy.float8_all_gather": True,
        "batch.micro": 8,
        "batch.count": 1,
        "model.implementation": "fused",
    },
    "deepspeed": {
        "strategy.kind": "zero",
        "strategy.zero_optimization.stage": 3,
        "batch.micro": 2,
        "batch.count": 2,
        "strategy.zero_optimization.offload_optimizer.device": "cpu",
        "model.activation_checkpointing": "full",
        "strategy.gradient_clipping": 1.0,
        "shape.layers": 32,
        "model.seq_len": 4096,
    },
    "accelerate": {
        "strategy.kind": "fsdp",
        "strategy.version": 2,
        "strategy.param_dtype": "bf16",
        "batch.micro": 1,
        "batch.count": 4,
        "model.attention": "fa2",
        "model.activation_checkpointing": "full",
        "model.seq_len": 4096,
    },
    "nemo": {
        "parallel.tp": 2,
        "parallel.cp": 2,
        "parallel.tp_overlap": "userbuffers",
        "batch.global": 32,
        "parallel.grad_reduce_in_fp32": True,
        "parallel.overlap_param_gather": True,
        "shape.d_ff": 14336,
    },
}
"""What the files of tests/data/launch say, in a scenario's words."""


def paths(name):
    return [DATA / file for file in LAUNCHES[name]]


# ---- tables ----------------------------------------------------------------------------------------------------------


def fields():
    """Every field that a row may be about."""
    from msgspec.structs import fields as of

    from clustersim.scenario.file.schema import Model, Run

    known = (
        {f"parallel.{name}" for name in FIELDS}
        | {"parallel.routing.kind", "model.options.experts_implementation"}
        | {f"batch.{n}" for n in ("micro", "local", "count", "global", "capped")}
    )
    known |= {f"{table}.{one.name}" for table, kind in (("model", Model), ("run", Run)) for one in of(kind)}
    known |= {f"strategy.{one.name}" for row in STRATEGIES.values() for one in of(row.config)} | {"strategy.kind"}
    known |= {f"strategy.zero_optimization.{one.name}" for one in of(ZeroOptimization)}
    known |= {"strategy.zero_optimization.*"}
    offloaded = [(what, leaf) for what in ("param", "optimizer") for leaf in ("device", "pin_memory")]
    known |= {f"strategy.zero_optimization.offload_{what}.{leaf}" for what, leaf in offloaded}
    known |= {f"shape.{leaf}" for one in shapes._shipped().values() for leaf in (*one, "out_bias", *shapes.WHERE_SAID)}
    return known | {"cluster.nodes", "cluster.gpus_per_node", "cluster.world", "graphs.impl"}


@pytest.mark.parametrize("name", exchange.NAMES)
def test_every_row_is_about_a_field_there_is_and_its_default_is_a_value_it_can_have(name):
    table = load(name)
    known = fields()
    for row in table.every():
        assert row.field in known, row
        if row.default is not None:
            row.read(row.default)


@pytest.mark.parametrize("name", exchange.NAMES)
def test_a_value_that_a_row_writes_is_read_as_the_same_field(name):
    for row in load(name).every():
        for pair in row.map or ():
            value = row.read(pair[0])
            if row.write and value is not None:
                assert row.read(row.written(value)) == value, row


@pytest.mark.parametrize("name", exchange.NAMES)
def test_no_option_is_both_mapped_and_left_out_for_good(name):
    table = load(name)
    assert table.version
    for row in table.rows:
        assert not any(fnmatchcase(row.option, glob) for glob in table.ignored if "*" not in glob), row.option


@pytest.mark.parametrize(
    ("row", "option", "field"),
    [
        (LaunchOption("o", "f", "int"), "8", 8),
        (LaunchOption("o", "f", "number"), "1e-5", 1e-5),
        (LaunchOption("o", "f", "flag"), [], True),
        (LaunchOption("o", "f", "flag"), "False", False),
        (LaunchOption("o", "f", "texts"), "a", ["a"]),
        (LaunchOption("o", "f", "each"), ["a"], "a"),
        (LaunchOption("o", "f", "each"), ["a", "b"], ["a", "b"]),
        (LaunchOption("o", "f", "ints"), ["2", "4"], [2, 4]),
        (LaunchOption("o", "f", "positive"), 0.1, True),
        (LaunchOption("o", "f", "flag", map=((True, "x"), (False,))), "true", "x"),
        (LaunchOption("o", "f", "flag", map=((True, "x"), (False,))), False, None),
        (LaunchOption("o", "f", map=(("a", "b"),), open=True), "c", "c"),
    ],
)
def test_a_row_reads_words_of_scripts_and_values_of_files(row, option, field):
    assert row.read(option) == field


@pytest.mark.parametrize(
    ("row", "option"),
    [
        (LaunchOption("o", "f", "int"), "8.5"),
        (LaunchOption("o", "f", "int"), True),
        (LaunchOption("o", "f", "number"), "nan"),
        (LaunchOption("o", "f", "number"), "1e999"),
        (LaunchOption("o", "f", "flag"), "maybe"),
        (LaunchOption("o", "f"), "${X}"),
        (LaunchOption("o", "f", map=(("a", "b"),)), "c"),
        (LaunchOption("o", "f", "ints"), ["2", "x"]),
        (LaunchOption("o", "f", "int"), "9" * 40),
    ],
)
def test_a_value_of_another_type_is_an_error_with_the_value(row, option):
    with pytest.raises(ScenarioError, match=r"does not fit|is not a choice|is set nowhere"):
        row.read(option)


# ---- in --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LAUNCHES)
def test_a_launch_of_each_framework_is_known_by_content_and_means_what_it_says(name):
    read = documents(paths(name))
    assert framework_of(read) == name.split()[0]
    found = exchange.read(paths(name), MACHINE)
    assert not found.unknown
    leaves = exchange.canonical(found.scenario)
    assert {field: value for field, value in MEANS[name].items() if leaves.get(field) != value} == {}


@pytest.mark.parametrize("name", LAUNCHES)
def test_two_commands_run_a_launch(clustersim, tmp_path, name):
    made = clustersim("import", *paths(name), "-o", tmp_path / "s.toml", "--topology", "dgx-h100", "--nodes", "4")
    assert made.returncode == 0, made.stderr
    done = clustersim("run", tmp_path / "s.toml", "--set", "run.steps=1", "--json")
    assert done.returncode == 0, done.stderr
    values = json.loads(done.stdout)
    assert (values["gpus"], values["step_time_s"] > 0) == (32, True)


def test_what_is_read_is_what_the_file_that_is_written_says(clustersim, tmp_path):
    file = tmp_path / "s.toml"
    done = clustersim("import", *paths("megatron"), "-o", file, "--topology", "dgx-h100", "--json")
    told = json.loads(done.stdout)
    assert tomllib.loads(file.read_text()) == told["scenario"]
    assert scenario.load(file).inputs() == exchange.read(paths("megatron"), MACHINE, path=file).scenario.inputs() | {
        "cluster": scenario.load(file).inputs()["cluster"]
    }
    assert told["not_played"].keys() == {"--manual-gc"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=8\ntorchrun x.py --num-layers $A", "8"),
        ("A=${1:-8}\ntorchrun x.py --num-layers ${A}", "8"),
        ("A=2\nB=$((A * 3 + 2))\ntorchrun x.py --num-layers $B", "8"),
        ('A="--num-layers 8 --bf16"\ntorchrun x.py $A', "8"),
        ('A=(\n  --num-layers 8 # so many\n  # --num-layers 9\n)\nB+=("${A[@]}")\ntorchrun x.py "${B[@]}"', "8"),
        ("A=1\nif [ $A -eq 1 ]; then\n  N=8\nelse\n  N=9\nfi\ntorchrun x.py --num-layers $N", "8"),
        ('A=x\nif [[ "$A" == "y" ]]; then\n  N=7\nelif [[ -n $A ]]; then\n  N=8\nfi\nrun x.py --num-layers $N', "8"),
        ("torchrun x.py \\\n  --bf16 \\\n  --num-layers=8", "8"),
        ("N=8\nif [ -f file ]; then\n  N=9\nfi\nfor i in 1 8; do\n  N=$i\ndone\ntorchrun x.py --num-layers $N", "8"),
        ("--num-layers 8 --bf16", "8"),
    ],
)
def test_a_scripts_variables_lists_and_conditions_are_followed(text, value):
    assert document(text, "x.sh").options["args", "num_layers"].value == value


def test_what_a_script_leaves_to_its_surroundings_is_said():
    read = document("if [ -f x ]; then\nA=1\nfi\ntorchrun --nnodes 2 x.py --bf16 $MORE --num-layers 8 $EXTRA", "x.sh")
    said = " ".join(read.notes)
    assert (read.machine["cluster.nodes"].value, len(read.notes)) == ("2", 3)
    assert ("MORE" in said, "EXTRA" in said, "no --nproc_per_node" in said) == (True, True, True)


def test_nothing_in_a_script_is_run(tmp_path):
    shell.script(f"A=$(touch {tmp_path}/made)\nB=`touch {tmp_path}/made`\ntorchrun x.py --num-layers $A", "x.sh")
    assert list(tmp_path.iterdir()) == []


def megatron(**changed):
    """The words of a small script, some changed; None leaves one out."""
    said = {
        "num-layers": 32,
        "hidden-size": 4096,
        "num-attention-heads": 32,
        "seq-length": 2048,
        "swiglu": "",
        "normalization": "RMSNorm",
        "position-embedding-type": "rope",
        "untie-embeddings-and-output-weights": "",
        "disable-bias-linear": "",
        "bf16": "",
        "micro-batch-size": 1,
        "global-batch-size": 64,
    }
    said |= {name.replace("_", "-"): value for name, value in changed.items()}
    words = (f"--{name} {value}" for name, value in said.items() if value is not None)
    return document("torchrun x.py " + " ".join(words), "x.sh")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tensor_model_parallel_size": 3}, "x.sh.*--tensor-model-parallel-size '3'.*use 2 or 4"),
        ({"tensor_model_parallel_size": 8, "context_parallel_size": 8}, "--context-parallel-size '8'.*cp = 8 does not"),
        ({"global_batch_size": 33}, "x.sh.*--global-batch-size 33 .*use 32"),
        ({"overlap_param_gather": ""}, "--overlap-param-gather .*needs use_distributed_optimizer"),
        ({"recompute_activations": "", "recompute_granularity": "full"}, "contradict each other.*leave one out"),
        ({"num_layers": "many"}, "x.sh.*--num-layers: 'many' does not fit: expected a whole number"),
        ({"seq_length": "$SEQ"}, "--seq-length: '.{.?SEQ.*is set nowhere in the script"),
        ({"num_layres": 4}, "no option --num-layres; did you mean --num-layers"),
        ({"num_layers": None}, "x.sh: does not say what model it is.*--model"),
        ({"num_experts": 5, "disable_bias_linear": None}, "no shipped model is of this kind"),
        (
            {"moe_token_dispatcher_type": "pigeon", "num_experts": 8},
            "'pigeon' is not a choice that is played; known: allgather",
        ),
        ({"micro_batch_size": 0}, "--micro-batch-size"),
        ({"pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 3}, "layers_per_virtual_stage"),
    ],
)
def test_what_contradicts_is_one_line_with_file_and_option(changed, words):
    with pytest.raises(ScenarioError, match=words) as wrong:
        exchange.read([megatron(**changed)], MACHINE)
    assert "\n" not in str(wrong.value)


def test_options_that_nobody_knows_are_counted_and_named_and_those_not_played_have_a_reason():
    found = exchange.read([megatron(frobnicate=3, zap="", use_sharp="", lr="1e-4")], MACHINE)
    assert found.unknown == ("--frobnicate", "--zap")
    assert (list(found.unplayed), found.ignored) == (["--use-sharp"], ("--lr",))


@pytest.mark.parametrize(
    ("stated", "graphs"),
    [
        ({}, ()),
        ({"cuda_graph_scope": "attn moe_router"}, ()),  # no implementation: none by Megatron-LM's default
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "attn"}, ()),
        ({"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn moe_router"}, ("attn", "moe_router")),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, ("full_iteration",)),
        ({"cuda_graph_impl": "local"}, ("attn", "mamba", "mlp", "moe")),
        ({"enable_cuda_graph": ""}, ("attn", "mamba", "mlp", "moe")),
        ({"external_cuda_graph": "", "cuda_graph_scope": "attn"}, ("attn",)),
    ],
)
def test_cuda_graphs_replay_what_the_scope_says_where_an_implementation_is_on(stated, graphs):
    assert exchange.read([megatron(**stated)], MACHINE).scenario.file.run.cuda_graph == graphs


def test_sizes_that_no_shipped_model_has_are_changes_to_the_nearest_of_its_kind():
    found = exchange.read([megatron(num_layers=30, ffn_hidden_size=11008, vocab_size=32000)], MACHINE)
    assert exchange.canonical(found.scenario)["shape.layers"] == 30
    assert any("layers = 30" in note for note in found.notes)


@pytest.mark.parametrize("name", shapes._shipped())
def test_a_shipped_model_is_found_by_its_sizes(name):
    leaves = shapes._shipped()[name]
    found = shapes.model_for("x", leaves)
    assert (shapes._shipped()[found.name], found.options) == (leaves, {})


HOSTILE = {
    "half": ("A=(\n --num-layers 3", "is a part missing"),
    "quote": ('torchrun x.py --a "b', "is a part missing"),
    "no command": ("#!/bin/bash\nA=3\necho hi", "no command with options"),
    "growing": ('A="' + "x" * 2000 + '"\n' + 'A="$A$A$A$A$A$A$A$A"\n' * 30 + "torchrun x.py --a $A", "at most 65,536"),
    "aliases of aliases": (
        "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]\n" for a, b in ("ab", "bc", "cd", "de")),
        "line 4: aliases stand for more than 2,000 values",
    ),
    "alias of itself": ("a: &a {b: *a}", "line 1 holds an alias inside itself"),
    "merge of no table": ("a: &a 3\nb: {<<: *a}", "not YAML of plain values"),
    "merged twice": ("a: &a {c: 3}\nb: {<<: *a, <<: *a}", "'<<' is there twice"),
    "tag": ('num_layers: !!python/object/apply:os.system ["ls"]', "not YAML of plain values"),
    "unknown alias": ("a: 1\nb: *c", "line 2 holds an alias of nothing above it"),
    "twice, null last": ("num_layers: 2\nnum_layers: null", "'num_layers' is there twice"),
    "twice": ("num_layers: 2\nnum_layers: 4", "'num_layers' is there twice"),
    "list": ("- 1\n- 2", "not keys with values"),
    "deep": ("a: " + "[" * 5000, "not YAML|too deep"),
    "large": ("a: 1\n" * 300_000, "more than"),
    "json twice": ('{"train_batch_size": 1, "train_batch_size": 2}', "there twice"),
    "empty": ("\n", "is empty"),
    "nul": ("num_layers: 1\0", "NUL"),
    "toml": ("[a]\nb = ", "is not TOML"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_one_line(name):
    text, words = HOSTILE[name]
    with pytest.raises(ScenarioError, match=words) as wrong:
        document(text, "x")
    assert "\n" not in str(wrong.value)


MERGED = """
base: &base {zero_stage: 2, offload_optimizer_device: none}
more: &more {<<: *base, zero_stage: 3}
deepspeed_config: {<<: *more, gradient_clipping: 1.0, offload_optimizer_device: cpu}
fsdp_config: {<<: [*base, *more]}
"""


def test_merge_keys_of_yaml_are_the_keys_they_stand_for():
    from clustersim.core.yamls import yaml_table

    table = yaml_table(MERGED, "x", ScenarioError)
    assert table["more"] == {"zero_stage": 3, "offload_optimizer_device": "none"}
    assert table["deepspeed_config"] == {
        "zero_stage": 3,
        "offload_optimizer_device": "cpu",
        "gradient_clipping": 1.0,
    }
    assert table["fsdp_config"]["zero_stage"] == 2  # the first of them counts
    assert document(MERGED, "x.yaml").options["config", "deepspeed_config.zero_stage"].value == 3


def test_tables_of_an_alias_are_not_one():
    from clustersim.core.yamls import yaml_table

    table = yaml_table("a: &a {b: [1]}\nc: *a", "x", ScenarioError)
    table["a"]["b"].append(2)
    assert table["c"] == {"b": [1]}


@settings(max_examples=150)
@given(st.data())
def test_whatever_is_done_to_a_launch_file_it_is_a_scenario_or_one_line(data):
    name = data.draw(st.sampled_from(sorted(LAUNCHES)))
    texts = [(path.read_text(), str(path)) for path in paths(name)]
    which = data.draw(st.integers(0, len(texts) - 1))
    text = texts[which][0]
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 200)))
    middle = data.draw(
        st.sampled_from(["", "$X", "'", '"', "(", ")", "{", "[", ": ", "--", "\n", "\0", "9" * 30, "é", "if ["])
    )
    texts[which] = (text[:at] + middle + text[end:], texts[which][1])
    try:
        found = exchange.read([document(*one) for one in texts], MACHINE)
    except ClusterSimError:
        return
    assert found.mapped


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["megatron_mixtral_8x7b.yaml", "--topology", "dgx-h100"], "give --nodes"),
        (["megatron_mixtral_8x7b.yaml", "--nodes", "4"], "give --topology"),
        (["deepspeed_llama2_7b.sh", "--topology", "dgx-h100"], "deepspeed_zero3.json; give that file too"),
        (["megatron_llama3_70b.sh", "--topology", "dgx-h100", "--from", "torchtitan"], "another framework's"),
        (["megatron_llama3_70b.sh", "torchtitan_llama3_70b.toml", "--topology", "dgx-h100"], "say --from"),
        ([".", "--topology", "dgx-h100"], "it is a folder"),
        (["nope.sh", "--topology", "dgx-h100"], "No such file"),
        (["megatron_llama3_70b.sh", "--topology", "nope"], "nope"),
    ],
)
def test_a_command_that_cannot_import_is_one_line_and_no_file(clustersim, tmp_path, arguments, words):
    done = clustersim("import", *arguments, "-o", tmp_path / "s.toml", cwd=DATA)
    assert (done.returncode, len(done.stderr.splitlines()), list(tmp_path.iterdir())) == (2, 1, [])
    assert words in done.stderr


def test_without_yaml_one_line_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ScenarioError, match=r"clustersim\[exchange\]"):
        document("num_layers: 2", "x.yaml")
    assert document("torchrun x.py --num-layers 2", "x.sh").options


# ---- batches ---------------------------------------------------------------------------------------------------------


class Saying(dict):
    by: ClassVar[dict] = {}


@given(micro=st.integers(1, 8), count=st.integers(1, 8), dp=st.integers(1, 8), pp=st.sampled_from([1, 2]))
def test_any_two_of_a_batchs_numbers_give_the_others(micro, count, dp, pp):
    told = batches.told(micro, count, dp, pp > 1)
    world = dp * pp
    for names in (("micro", "count"), ("micro", "global"), ("micro", "count", "global"), ("local", "global", "micro")):
        found = batches.said(
            Saying({f"batch.{name}": told[f"batch.{name}"] for name in names} | {"parallel.pp": pp}), world, False
        )
        assert found == {"strategy.micro_batch_size": micro, "strategy.gradient_accumulation_steps": count}


# ---- out and back ----------------------------------------------------------------------------------------------------

EXACT = {
    "megatron": {
        "ep8_mixtral_8x7b_8x8_h100",
        "tp8_pp4_llama3_70b_32x8_h100",
        "tp8_pp8_gpt3_175b_16x8_a100",
        "tp8_pp16_llama3_405b_2048x8_h100",
        "tp8_cp16_pp16_llama3_405b_2048x8_h100",
    },
    "torchtitan": {
        "fsdp_llama3_8b_64x8_h100",
        "fsdp_llama3_405b_2048x8_h100",
        "fsdp_tp8_llama3_70b_32x8_h100",
        "hsdp_llama3_70b_32x8_h100",
        "hsdp_llama3_405b_2048x8_h100",
    },
    "deepspeed": {"zero1_llama3_8b_2x8_a100", "zero2_llama3_8b_2x8_a100", "zero3_llama3_8b_2x8_a100"},
    "accelerate": {"zero1_llama3_8b_2x8_a100", "zero2_llama3_8b_2x8_a100", "zero3_llama3_8b_2x8_a100"},
}
"""Shipped scenarios for every setting of which a framework has a word."""
REFUSED = {("model_parallel_resnet50_1x2_v100", "megatron"), ("pp16_ep64_deepseek_v3_256x8_h800", "megatron")}
"""Their layers do not divide over the stages without a layout by numbers, which Megatron-LM has no word for."""


def back(made, found):
    """The scenario that a scenario's launch files are read as, by whoever knows its machine."""
    read = [document(text, name) for name, text in found.texts.items()]
    cluster = {key: value for key, value in made.inputs()["cluster"].items() if value}
    run = {key: made.inputs()["run"][key] for key in ("steps", "seed", "jitter", "fidelity")}
    return exchange.read(read, cluster, framework=found.framework.name, path=made.path, run=run).scenario


@pytest.mark.parametrize("to", WRITE)
@pytest.mark.parametrize("name", scenario.names())
def test_a_shipped_scenario_is_written_and_read_back_as_itself_but_for_what_is_named(name, to):
    made = scenario.load(name)
    kind = made.file.strategy["kind"]
    parallel = made.file.parallel
    able = kind in load(to).kinds and not (to == "megatron" and parallel is None)
    if not able or (name, to) in REFUSED or (to == "accelerate" and parallel and parallel.pp * parallel.ep > 1):
        with pytest.raises(ScenarioError, match=r"does not launch|no word for|replicas of its own|be told"):
            exchange.written(made, to)
        return
    found = exchange.written(made, to)
    assert (not found.wordless) == (name in EXACT[to]), found.wordless
    if name in EXACT[to]:
        again = back(made, found)
        assert exchange.canonical(again) == exchange.canonical(made)
        assert exchange.written(again, to).texts == found.texts


def test_what_was_written_and_read_back_takes_the_same_time():
    made = scenario.load("ep8_mixtral_8x7b_8x8_h100", {"run.steps": 1, "parallel.global_batch_size": 64})
    found = exchange.written(made, "megatron")
    assert folded(back(made, found)).step_time_s == folded(made).step_time_s
    # Else Megatron-LM would call a rank's experts one after the other, which nothing here was played as.
    assert "--moe-grouped-gemm" in found.texts["launch.sh"]
    dense = exchange.written(scenario.load("tp8_pp4_llama3_70b_32x8_h100"), "megatron")
    assert "grouped" not in dense.texts["launch.sh"]


@st.composite
def split(draw):
    """Settings of ``[parallel]`` for Llama-3-8B on 32 GPUs that Megatron-LM has words for."""
    tp = draw(st.sampled_from([1, 2, 4, 8]))
    pp = draw(st.sampled_from([1, 2, 4]))
    cp = draw(st.sampled_from([1, 2]))
    if tp * pp * cp > 32:
        cp = 1
    some = {"tp": tp, "pp": pp, "cp": cp}
    if pp > 1 and draw(st.booleans()):
        some["vpp"] = draw(st.sampled_from([2, 4]))
        some |= draw(
            st.sampled_from(
                [
                    {},
                    {"overlap_p2p_communication": False} if pp > 2 else {},
                    {"overlap_p2p_communication_warmup_flush": True},
                ]
            )
        )
    if tp > 1 and draw(st.booleans()):
        some |= {"sequence_parallel": True} | draw(st.sampled_from([{}, {"tp_overlap": "userbuffers"}]))
    if cp > 1:
        some["cp_comm_type"] = draw(st.sampled_from(["p2p", "all_gather"]))
    some |= draw(
        st.sampled_from(
            [
                {},
                {"recompute_granularity": "selective"},
                {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            ]
        )
    )
    if draw(st.booleans()):
        some |= {"use_distributed_optimizer": True, "overlap_grad_reduce": draw(st.booleans())}
        some["overlap_param_gather"] = some["overlap_grad_reduce"] and draw(st.booleans())
    some |= draw(st.sampled_from([{}, {"ddp_bucket_size": 10**7}, {"grad_reduce_in_fp32": False}, {"order": "llama3"}]))
    some["microbatches"] = pp * draw(st.sampled_from([1, 2, 8]))
    return some


@settings(max_examples=80)
@given(split())
def test_settings_that_megatron_has_words_for_come_back_as_they_were(parallel):
    tables = {
        "cluster": {"topology": "dgx-h100", "nodes": 4},
        "parallel": parallel,
        "model": {"name": "llama3-8b", "seq_len": 4096, "dtype": "bf16", "implementation": "fused"},
        "strategy": {"kind": "ddp", "framework": "megatron", "param_dtype": "bf16"},
        "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
    }
    found = exchange.written(scenario.from_table(tables), "megatron")
    assert found.wordless == ()


@settings(max_examples=60)
@given(
    tp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    replicas=st.sampled_from([None, 2]),
    micro=st.sampled_from([1, 2]),
    count=st.sampled_from([1, 3]),
    keep=st.sampled_from([None, True, False]),
    again=st.sampled_from(["none", "selective", "full"]),
    fused=st.booleans(),
    offload=st.booleans(),
)
def test_settings_that_torchtitan_has_words_for_come_back_as_they_were(
    tp, cp, replicas, micro, count, keep, again, fused, offload
):
    strategy = {
        "kind": "fsdp",
        "micro_batch_size": micro,
        "gradient_accumulation_steps": count,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "clip_grad_norm": True,
        "cpu_offload": offload and max(tp, cp) == 1,  # no run of a model that is split has it
    }
    strategy |= {"data_parallel_replicate_degree": replicas} if replicas else {}
    strategy |= {} if keep is None else {"reshard_after_forward": keep}
    model = {"name": "llama3-8b", "seq_len": 4096, "dtype": "bf16", "activation_checkpointing": again}
    tables = {
        "cluster": {"topology": "dgx-h100", "nodes": 4},
        "strategy": strategy,
        "model": model | ({"implementation": "fused"} if fused else {}),
        "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
    }
    if max(tp, cp) > 1:
        tables["parallel"] = {"framework": "torchtitan", "tp": tp, "cp": cp}
    assert exchange.written(scenario.from_table(tables), "torchtitan").wordless == ()


@pytest.mark.parametrize("again", ["none", "selective", "full"])
def test_torchtitans_file_says_what_time_and_memory_depend_on_where_it_is_the_default_too(again):
    """A release may have other defaults; selective_ac_option's is "2" in 0.2, and "op" is what is played;
    early_stop's is false."""
    tables = {
        "cluster": {"topology": "hgx-h100", "nodes": 2},
        "strategy": {"kind": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32", "clip_grad_norm": True},
        "model": {"name": "llama3-8b", "seq_len": 2048, "dtype": "bf16", "activation_checkpointing": again},
        "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
    }
    said = tomllib.loads(exchange.written(scenario.from_table(tables), "torchtitan").texts["launch.toml"])
    assert (
        said["training"].items()
        >= {
            "seq_len": 2048,
            "max_norm": 1.0,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
            "mixed_precision_reduce": "float32",
        }.items()
    )
    assert said["optimizer"] == {"name": "AdamW", "implementation": "fused"}
    degrees = ("tensor_parallel", "context_parallel", "pipeline_parallel", "expert_parallel", "data_parallel_replicate")
    assert {said["parallelism"][f"{name}_degree"] for name in degrees} == {1}
    assert said["parallelism"]["fsdp_reshard_after_forward"] == "default"
    option = {"selective": {"selective_ac_option": "op"}, "full": {"early_stop": True}}.get(again, {})
    assert said["activation_checkpoint"] == {"mode": again} | option


def test_a_setting_without_a_word_is_named_with_what_it_would_be():
    found = exchange.written(scenario.load("zb_gpt2_xl_1x8_a100", {"model.implementation": "fused"}), "megatron")
    assert found.wordless == ("parallel.schedule = zb_h1: it would be 1f1b",)


@pytest.mark.parametrize("to", WRITE)
def test_files_are_written_whole_and_never_over_others(clustersim, tmp_path, to):
    name = {"megatron": "tp8_pp4_llama3_70b_32x8_h100", "torchtitan": "fsdp_llama3_8b_64x8_h100"}.get(
        to, "zero3_llama3_8b_2x8_a100"
    )
    suffix = {"megatron": "sh", "torchtitan": "toml", "deepspeed": "json", "accelerate": "yaml"}[to]
    out = tmp_path / f"mine.{suffix}"
    assert clustersim("export-config", name, "--to", to, "-o", out).returncode == 0
    wrote = sorted(path.name for path in tmp_path.iterdir())
    assert wrote == sorted({f"mine.{suffix}"} | ({"mine.sh"} if to != "torchtitan" else set()))
    again = clustersim("export-config", name, "--to", to, "-o", out)
    assert (again.returncode, len(again.stderr.splitlines())) == (2, 1)
    nodes = ("--nodes", "64") if to == "torchtitan" else ()  # which no launcher of its own says
    read = clustersim("import", *tmp_path.iterdir(), "-o", tmp_path / "s.toml", "--topology", "hgx-h100", *nodes)
    assert read.returncode == 0, read.stderr


def test_an_option_of_a_plans_front_is_written(clustersim, tmp_path):
    front = [
        {"scenario": scenario.load(name).table, "path": "plan.toml"}
        for name in ("tp8_pp8_gpt3_175b_16x8_a100", "tp8_pp4_llama3_70b_32x8_h100")
    ]
    (tmp_path / "plan.json").write_text(json.dumps({"front": front}))
    done = clustersim("export-config", tmp_path, "--to", "megatron", "--option", "2")
    assert (done.returncode, "--num-layers 80" in done.stdout) == (0, True)
    assert "not written, as no scenario has them: data, tokenizer, " in done.stderr  # the script alone does not start
    wrong = clustersim("export-config", tmp_path, "--to", "megatron", "--option", "3")
    assert (wrong.returncode, "there is no 3: options 1 to 2 " in wrong.stderr) == (2, True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("why_parameter_server", "--to", "megatron"), "does not launch strategy 'parameter_server'"),
        (("ddp_resnet50_1x8_v100", "--to", "megatron"), "at $.parallel"),
        (("1f1b_gpt2_xl_1x8_a100", "--to", "accelerate"), "no word for pp = 8"),
        (("tp8_pp4_llama3_70b_32x8_h100", "--to", "megatron", "-o", "x.toml"), "end in .sh"),
        (("tp8_pp4_llama3_70b_32x8_h100", "--to", "megatron", "--option", "1"), "no folder"),
        (("/tmp", "--to", "megatron"), "plan.json"),
    ],
)
def test_what_cannot_be_written_is_one_line(clustersim, tmp_path, words, said):
    done = clustersim("export-config", *words, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines()), list(tmp_path.iterdir())) == (2, 1, [])
    assert said in done.stderr


def test_a_whole_model_of_megatron_has_megatrons_data_parallelism_and_pytorchs_is_named():
    own = scenario.load("ddp_gpt2_xl_2x8_a100", {"parallel.tp": 1})
    found = exchange.written(own, "megatron")
    assert "strategy.framework = pytorch: it would be megatron" in found.wordless
    again = back(own, found)
    assert again.config.framework == "megatron"
    split = own.changed({"parallel.pp": 2, "strategy.framework": "megatron"})
    for made in (again, split, own.changed({"parallel.pp": 2})):
        assert not any("framework" in line for line in exchange.written(made, "megatron").wordless)


MOE = {
    "cluster": {"topology": "hgx-b200", "nodes": 2},
    "model": {"name": "qwen3-30b-a3b", "seq_len": 2048, "dtype": "fp8", "implementation": "fused"},
    "strategy": {"kind": "fsdp", "param_dtype": "bf16", "reduce_dtype": "fp32"},
    "parallel": {"framework": "torchtitan", "ep": 8},
    "run": {"optimizer": "adamw", "optimizer_impl": "fused"},
}


@pytest.mark.parametrize(("recipe", "family"), [("tensorwise", "float8"), ("rowwise", "float8"), ("mxfp8", "mx")])
def test_experts_in_8_bits_have_their_converter_in_torchtitans_file_and_come_back(recipe, family):
    """A converter of linears leaves experts' grouped products in 16 bits, which the play does not."""
    made = scenario.from_table(MOE).changed({"model.float8_recipe": recipe})
    found = exchange.written(made, "torchtitan")
    said = tomllib.loads(found.texts["launch.toml"])
    assert said["model"]["converters"] == [f"quantize.linear.{family}", f"quantize.grouped_mm.{family}"]
    assert said["quantize"]["grouped_mm"][family]["fqns"] == ["experts"]
    assert said["quantize"].get("linear", {}) == ({"float8": {"recipe_name": recipe}} if recipe == "rowwise" else {})
    assert found.wordless == ()
    assert exchange.canonical(back(made, found)) == exchange.canonical(made)


def test_experts_that_no_converter_takes_are_told_out_and_in():
    made = scenario.from_table(MOE).changed({"parallel.cp": 2})
    found = exchange.written(made, "torchtitan")
    assert tomllib.loads(found.texts["launch.toml"])["model"]["converters"] == ["quantize.linear.float8"]
    assert any(line.startswith("experts in 8 bits beside cp = 2") for line in found.wordless)
    read = [document(text, name) for name, text in found.texts.items()]
    imported = exchange.read(read, {"topology": "hgx-b200", "nodes": 2}, framework="torchtitan")
    assert any("experts' grouped products are played in 8 bits" in note for note in imported.notes)


@pytest.mark.parametrize(("to", "name"), [("megatron", "tp8_pp4_llama3_70b_32x8_h100"), ("torchtitan", None)])
def test_fused_attention_by_its_usual_kernel_is_what_a_framework_has_anyway(to, name):
    made = scenario.load(name) if name else scenario.from_table(MOE)
    found = exchange.written(made.changed({"model.attention": "flash"}), to)
    assert found.texts == exchange.written(made, to).texts
    assert found.wordless == ()
    if to == "megatron":
        assert "--attention-backend auto" in found.texts["launch.sh"]


def test_megatrons_recipe_of_8_bits_is_written_and_read():
    made = scenario.load("tp8_pp4_llama3_70b_32x8_h100", {"model.dtype": "fp8", "model.float8_recipe": "blockwise"})
    found = exchange.written(made, "megatron")
    assert "--fp8-recipe blockwise" in found.texts["launch.sh"]
    assert found.wordless == ()
    assert back(made, found).file.model.float8_recipe == "blockwise"
