"""Every option of a framework is judged: read, told as not played, refused, or known to change nothing."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
import pytest
from test_launch_kinds import megatron

from clustersim.core.errors import ScenarioError
from clustersim.files import launch as exchange
from clustersim.files.launch import torchtitan, verl
from clustersim.files.launch.files import document
from clustersim.files.launch.table import NAMES, load
from clustersim.training.strategies.fsdp_config import FSDPConfig

DATA = Path(__file__).parent / "data"
OPTIONS = DATA / "megatron_options.txt"


def judged(option: str, framework: str = "megatron") -> bool:
    """Whether a row, a reason or a list of a framework's table is about an option."""
    table = load(framework)
    valued = (glob.partition("=")[0] for glob in (*table.refused, *table.unsized, *table.unplayed))
    rows = (name for row in table.every() for name in row.option.split("+"))
    globs = (*rows, *table.ignored, *valued)
    return any(fnmatchcase(table.aliases.get(option, option), glob) for glob in globs)


def test_no_option_of_megatron_is_unjudged() -> None:
    listed = [line for line in OPTIONS.read_text("utf-8").splitlines() if not line.startswith("#")]
    assert len(listed) > 600
    assert [option for option in listed if not judged(option)] == []
    assert not judged("an_option_of_nobody")


def test_a_quick_geglu_of_megatron_multiplies_two_projections() -> None:
    gated, plain = megatron("--quick-geglu"), megatron("")
    assert exchange.canonical(gated.scenario)["shape.gated"] is True
    assert not exchange.canonical(plain.scenario).get("shape.gated")


def test_mindspeeds_list_of_layers_is_a_layout_of_stages() -> None:
    made = megatron("--pipeline-model-parallel-size 2 --num-layer-list 3,1")
    assert made.scenario.file.parallel.layout == "Ettt|tL"
    with pytest.raises(ScenarioError, match=r"--num-layer-list: '3,x' does not fit: expected layers of each pipeline"):
        megatron("--pipeline-model-parallel-size 2 --num-layer-list 3,x")


@pytest.mark.parametrize(
    "words",
    [
        "--use-mup",
        "--softmax-type vanilla",
        "--softmax-type off-by-one",
        "--glu-linear-offset 1.0",
        "--num-zero-experts 0",
    ],
)
def test_what_changes_neither_products_nor_bytes_is_known_and_changes_nothing(words: str) -> None:
    made = megatron(words)
    assert (made.unknown, dict(made.unplayed)) == ((), {})
    assert exchange.canonical(made.scenario) == exchange.canonical(megatron("").scenario)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--softmax-type learnable", "a learned score in each head's softmax"),
        ("--num-zero-experts 256", "has experts that compute nothing"),
        ("--n-shared-experts 2", "has shared experts in the words of a fork"),
        ("--enable-hyper-connections", "hands on several streams between its blocks"),
        ("--hybrid-override-pattern M-M*-", "has state-space layers"),
        ("--qk-l2-norm", "has norms of queries and keys without weights"),
        ("--moe-tp-extend-ep", "spreads experts over the ranks of tensor parallelism"),
        ("--noop-layers 60,61", "has layers that do nothing on some stages"),
        ("--perform-rl-step", "trains by reinforcement learning"),
        ("--use-mp-args-from-checkpoint-args", "takes its degrees from a checkpoint"),
    ],
)
def test_what_makes_another_model_or_another_split_is_refused(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        megatron(words)


# ---- torchtitan ------------------------------------------------------------------------------------------------------


def test_no_option_of_torchtitan_is_unjudged() -> None:
    lines = (DATA / "torchtitan_options.txt").read_text("utf-8").splitlines()
    listed = [line.partition(":")[0] for line in lines if not line.startswith("#")]
    assert len(listed) > 250
    assert [name for name in listed if not (judged(name, "torchtitan") or name in torchtitan.TRANSLATED)] == []
    assert not judged("parallelism.option_of_nobody", "torchtitan")


def test_no_option_of_verls_finetuning_is_unjudged() -> None:
    lines = (DATA / "verl_options.txt").read_text("utf-8").splitlines()
    listed = [line.partition(":")[0] for line in lines if not line.startswith("#")]
    assert len(listed) > 150
    read_apart = [name for name in listed if name in verl.TRANSLATED or name.startswith(verl.OF_MEGATRON)]
    assert [name for name in listed if not (judged(name, "verl") or name in read_apart)] == []
    assert not judged("engine.option_of_nobody", "verl")


TITAN = """[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
seq_len = 4096
"""
REGISTRY = """def own() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("8B"{kinds}), training=TrainingConfig({training}), {more})
"""


def toml(more: str) -> exchange.LaunchImport:
    return exchange.read([document(TITAN + more, "own.toml")], {"topology": "hgx-h100", "nodes": 1})


def registry(more: str = "", kinds: str = "", training: str = "local_batch_size=2") -> exchange.LaunchImport:
    text = REGISTRY.format(more=more, kinds=kinds, training=training)
    return exchange.read([document(text, "llama3/config_registry.py")], {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ('[comm]\nmode = "fake_backend"\n', "comm.mode 'fake_backend' sends nothing"),
        ("[memory_estimation]\nenabled = true\n", "estimates memory and trains nothing"),
        ("[fault_tolerance]\nenable = true\n", "averages replicas over torchft"),
        ("[checkpoint]\ncreate_seed_checkpoint = true\n", "writes a first checkpoint and trains nothing"),
        ("[quantize.linear.float8]\nemulate = true\n", "computes products of 8 bits by wider ones"),
        (
            '[compile]\nenable = true\nbackend = "aot_eager"\n',
            "compile.backend 'aot_eager' is not played; say inductor",
        ),
        (
            '[parallelism]\npipeline_parallel_schedule = "DualPipeV"\n'
            "pipeline_parallel_expert_parallel_overlap = false\n",
            "false beside DualPipeV is not played",
        ),
    ],
)
def test_runs_of_torchtitan_that_have_no_step_that_is_played_are_refused(more: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        toml(more)


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ("[debug]\ndeterministic = true\n", "debug.deterministic"),
        ("[debug]\ndetect_anomaly = true\n", "debug.detect_anomaly"),
        ('[comm]\nmode = "torchcomms"\n', "comm.mode"),
        ('[job]\ncustom_config_module = "own.job_config"\n', "job.custom_config_module"),
        ('[quantize.linear.float8]\nfilter_fqns = ["output", "attention.wk"]\n', "quantize.linear.float8.filter_fqns"),
    ],
)
def test_what_changes_a_step_of_torchtitan_and_is_not_played_is_told(more: str, name: str) -> None:
    made = toml(more)
    assert name in made.unplayed
    assert made.unknown == ()


@pytest.mark.parametrize(
    "more",
    [
        '[comm]\nmode = "default"\n[compile]\nbackend = "aot_eager"\n',
        '[job]\ncustom_config_module = ""\n[debug]\ndeterministic = false\n',
        '[quantize.linear.float8]\nfilter_fqns = ["output"]\n[checkpoint]\ncreate_seed_checkpoint = false\n',
        "[training.dataloader]\nnum_workers = 4\n",
    ],
)
def test_what_leaves_a_step_of_torchtitan_as_it_is_says_nothing(more: str) -> None:
    made = toml(more)
    assert (dict(made.unplayed), made.unknown) == ({}, ())
    assert exchange.canonical(made.scenario) == exchange.canonical(toml("").scenario)


def test_float8_of_early_2024_is_float8() -> None:
    first = exchange.read(
        [document(TITAN.replace("local_batch", 'fp8_linear = "dynamic"\nlocal_batch'), "own.toml")],
        {"topology": "hgx-h100", "nodes": 1},
    )
    assert exchange.canonical(first.scenario)["model.dtype"] == "fp8"


def test_replicas_without_shards_are_said_to_be_ddp_in_older_releases() -> None:
    degrees = "[parallelism]\ndata_parallel_replicate_degree = {}\ndata_parallel_shard_degree = {}\n"
    assert any("0.1 and 0.2 wrap it in DDP" in note for note in toml(degrees.format(8, 1)).notes)
    assert not any("wrap it in DDP" in note for note in toml(degrees.format(2, 4)).notes)


def test_converters_of_python_say_their_recipe_wherever_they_stand() -> None:
    own = "model_converters=ModelConvertersContainer.Config(converters=[{}])"
    before = exchange.canonical(registry(own.format("Float8LinearConverter.Config()")).scenario)
    assert before["model.dtype"] == "fp8"
    assert before.get("model.float8_recipe", "tensorwise") == "tensorwise"
    wider = registry(own.format('Float8LinearConverter.Config(recipe_name="rowwise_with_gw_hp")'))
    assert exchange.canonical(wider.scenario)["model.float8_recipe"] == "rowwise_with_gw_hp"
    released = registry(
        kinds=", converters=[Float8LinearConverter.Config()]"
    )  # 0.3.0, components/quantization/float8.py
    assert exchange.canonical(released.scenario)["model.float8_recipe"] == "rowwise"
    earlier = registry(kinds=", quantization=[Float8LinearConverter.Config()]")
    assert exchange.canonical(earlier.scenario) == exchange.canonical(released.scenario)
    with pytest.raises(ScenarioError, match="computes products of 8 bits by wider ones"):
        registry(kinds=", converters=[Float8LinearConverter.Config(emulate=True)]")


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ('override=OverrideConfig(imports=[OverrideImport("own.fused")])', "override.imports"),
        ("loss=ChunkedLossWrapper.Config(num_chunks=16)", "loss.num_chunks"),
        ("parallelism=ParallelismConfig(spmd_backend=backend_of(1))", "parallelism.spmd_backend"),
    ],
)
def test_what_is_no_constant_of_torchtitans_python_is_judged_by_its_name(more: str, name: str) -> None:
    assert name in registry(more).unplayed


def test_classes_of_torchtitans_python_are_read_as_they_were_before_03() -> None:
    older = registry(
        'activation_checkpoint=ActivationCheckpointConfig(mode="full"), optimizer=OptimizersContainer.Config()'
    )
    newer = registry("activation_checkpoint=FullAC.Config(), optimizer=default_adamw(lr=1e-4)")
    assert exchange.canonical(older.scenario) == exchange.canonical(newer.scenario)
    group = 'ParamGroupConfig(pattern="own", optimizer_name="{}")'
    both = ", ".join(group.format(name) for name in ("AdamW", "Muon"))
    with pytest.raises(ScenarioError, match=r"optimizer.name: 'AdamW and Muon' is not a choice"):
        registry(f"optimizer=OptimizersContainer.Config(param_groups=[{both}])")
    alone = registry(f"optimizer=OptimizersContainer.Config(param_groups=[{group.format('AdamW')}])")
    assert exchange.canonical(alone.scenario) == exchange.canonical(registry("optimizer=default_adamw(lr=1)").scenario)
    with pytest.raises(ScenarioError, match=r"optimizer.name: 'own_groups' is not a choice"):
        registry("optimizer=OptimizersContainer.Config(param_groups=own_groups(3))")


def test_a_loss_in_chunks_of_torchtitans_python_has_two_names() -> None:
    chunked = [
        exchange.canonical(registry(f"loss={name}.Config()").scenario)
        for name in ("ChunkedLossWrapper", "ChunkedCELoss")
    ]
    assert chunked[0] == chunked[1]
    assert chunked[0]["model.loss"] == "chunked"


@pytest.mark.parametrize("base", ["llama3_8b_of_elsewhere()", '_base(model_registry("8B"))'])
def test_values_of_torchtitans_python_that_another_file_or_arguments_hold_are_asked_for(base: str) -> None:
    text = f"from torchtitan.trainer import Trainer\ndef own() -> Trainer.Config:\n    config = {base}\n"
    text += "    config.training.seq_len = 4096\n    return config\n"
    with pytest.raises(
        ScenarioError, match=f"own takes its values of {base.partition('(')[0]}, which the file does not"
    ):
        exchange.read([document(text, "config_registry.py")], {"topology": "hgx-h100", "nodes": 1}, model="llama3-8b")


def test_attention_that_torchtitan_03_takes_by_itself_is_told() -> None:
    told = [
        any("no attn_backend: torchtitan 0.3 takes FlexAttention" in note for note in made.notes)
        for made in (registry(), registry(kinds=', attn_backend="flex"'))
    ]
    assert told == [True, False]
    assert "model_spec.attn_backend" in registry(kinds=', attn_backend="flex"').unplayed


def test_no_load_balancer_of_torchtitans_python_is_none() -> None:
    split = "parallelism=ParallelismConfig(context_parallel_degree=2, context_parallel_load_balancer={})"
    assert exchange.canonical(registry(split.format("None")).scenario)["parallel.cp_load_balancer"] == "none"
    balanced = exchange.canonical(registry(split.format('"headtail"')).scenario)
    assert balanced.get("parallel.cp_load_balancer", "headtail") == "headtail"


def test_tokens_of_torchtitan_after_03_are_whole_samples() -> None:
    tokens = "max_context_length=4096, num_tokens_per_microbatch_per_dp_rank=8192, num_tokens_per_train_step={}"
    split = "parallelism=ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4), compile=CompileConfig()"
    made = exchange.canonical(registry(split, training=tokens.format(8192 * 4 * 4)).scenario)
    assert made["model.seq_len"] == 4096
    assert made["batch.micro"] == 2
    assert made["batch.count"] == 4
    assert made["model.implementation"] == "fused"
    with pytest.raises(ScenarioError, match=r"4,097 tokens are not whole samples of 4,096"):
        registry(training="max_context_length=4096, num_tokens_per_microbatch_per_dp_rank=4097")


def test_the_table_of_each_framework_is_read_once() -> None:
    """Whoever tells framework from framework asks for all in turn: a memory for fewer would keep none of them."""
    tables = [load(name) for name in NAMES]
    assert all(load(name) is table for name, table in zip(NAMES, tables, strict=True))


def test_fully_sharded_replicas_of_megatron_are_refused_with_what_they_keep_and_a_strategy_that_is_nearest() -> None:
    with pytest.raises(ScenarioError, match=r"--use-torch-fsdp2.*fp32 copies beside them") as refused:
        megatron("--use-torch-fsdp2 --untie-embeddings-and-output-weights --no-gradient-accumulation-fusion")
    for word in ('kind = "fsdp"', 'param_dtype = "bf16"', "ends_apart = true"):
        assert word in str(refused.value)
    nearest = {"kind": "fsdp", "param_dtype": "bf16", "ends_apart": True}
    config = msgspec.convert(nearest, FSDPConfig)
    assert (config.version, config.param_dtype, config.wire_dtype, config.orig_dtype) == (2, "bf16", "bf16", "fp32")
