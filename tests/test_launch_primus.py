"""Primus's experiments: modules, presets, variables and commands, over Megatron-LM and torchtitan."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import data_table
from clustersim.files import launch as exchange
from clustersim.files.launch import shell
from clustersim.files.launch.files import document
from clustersim.files.launch.table import load

pytest.importorskip("yaml", reason="YAML needs the extra 'exchange'")
MACHINE = {"topology": "hgx-mi300x", "nodes": 1}
DATA = Path(__file__).parent / "data"
DENSE = {"micro_batch_size": 2, "global_batch_size": 128, "seq_length": 8192, "overlap_grad_reduce": True}
EXPERTS = DENSE | {"expert_model_parallel_size": 8, "moe_shared_expert_overlap": False, "moe_router_dtype": "fp32"}
DEEPEP = EXPERTS | {"enable_primus_turbo": True, "use_turbo_deepep": True}


def shown(value):
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def experiment(overrides, model="llama3.1_8B.yaml", config="pre_trainer.yaml", framework="megatron"):
    """The text of an experiment whose ``overrides`` are lines of YAML, or options by name."""
    if isinstance(overrides, dict):
        overrides = "\n".join(f"{name}: {shown(value)}" for name, value in overrides.items())
    lines = "".join(f"      {line}\n" for line in overrides.splitlines())
    return (
        "work_group: ${TEAM:own}\nexp_name: ${NAME:run}\n\nmodules:\n  pre_trainer:\n"
        f"    framework: {framework}\n    config: {config}\n    model: {model}\n    overrides:\n{lines}"
    )


def read(*texts, machine=MACHINE, **kinds):
    return exchange.read([document(text, name) for name, text in texts], machine, **kinds)


def had(overrides, *, machine=MACHINE, **kinds):
    made = read(("a.yaml", experiment(overrides, **kinds)), machine=machine)
    assert not made.unknown
    return exchange.canonical(made.scenario) | {"model.name": made.scenario.file.model.name}


def test_an_experiment_has_the_defaults_of_primuss_presets_and_not_megatrons():
    made = read(("a.yaml", experiment(DENSE)))
    fields = exchange.canonical(made.scenario)
    assert made.framework.name == "primus"
    assert (made.scenario.file.model.name, fields["model.dtype"]) == ("llama3.1-8b", "bf16")
    assert fields["parallel.use_distributed_optimizer"] is True
    assert fields["parallel.overlap_grad_reduce"] is True
    assert not fields.get("parallel.overlap_param_gather")
    assert (fields["batch.micro"], fields["batch.count"], fields["model.seq_len"]) == (2, 8, 8192)
    split = had(DENSE | {"tensor_model_parallel_size": 2})
    assert split["parallel.sequence_parallel"] is True
    assert had(DENSE | {"use_distributed_optimizer": False}).get("parallel.use_distributed_optimizer") is not True


def test_samples_and_tokens_of_the_presets_are_told():
    made = read(("a.yaml", experiment("overlap_grad_reduce: true")))
    fields = exchange.canonical(made.scenario)
    assert (fields["batch.micro"], fields["batch.count"], fields["model.seq_len"]) == (2, 1, 1024)
    told = "the presets say micro_batch_size 2, global_batch_size 16, seq_length 1024, and nobody else"
    assert any(told in note for note in made.notes)
    assert any("pre_trainer.yaml, llama3.1_8B.yaml" in note for note in made.notes)
    said = read(("a.yaml", experiment(DENSE)))
    assert not any("the presets say" in note for note in said.notes)


def test_variables_have_their_defaults_unless_a_script_sets_them():
    text = experiment("tensor_model_parallel_size: ${TP:2}\nrecompute_granularity: ${AGAIN:null}")
    alone = read(("a.yaml", text))
    assert exchange.canonical(alone.scenario)["parallel.tp"] == 2
    assert any("no script sets these variables, which have the file's defaults: TP, AGAIN" in n for n in alone.notes)
    script = "export TP=4\nEXP=examples/a.yaml bash examples/run_pretrain.sh\n"
    made = read(("a.yaml", text), ("run.sh", script), machine={"topology": "hgx-mi300x"})
    assert exchange.canonical(made.scenario)["parallel.tp"] == 4
    with pytest.raises(ScenarioError, match="becomes the text 'false', which counts as true in Primus"):
        read(("a.yaml", experiment("overlap_grad_reduce: ${OVERLAP:false}")))


@pytest.mark.parametrize(
    ("command", "nodes", "gpus"),
    [
        ("EXP=examples/a.yaml bash ./examples/run_pretrain.sh --micro_batch_size 4", 1, 8),
        (
            "export EXP=a.yaml NNODES=2 GPUS_PER_NODE=4\nbash examples/run_slurm_pretrain.sh --micro_batch_size 4",
            2,
            4,
        ),
        ("./primus-cli direct -- train pretrain --config examples/a.yaml --micro_batch_size 4", 1, 8),
        ("bash runner/primus-cli direct --env NNODES=2 -- train pretrain --config a.yaml --micro_batch_size=4", 2, 8),
        ("primus-cli slurm srun -N 4 -p x -- container -- train pretrain --config a.yaml --micro_batch_size 4", 4, 8),
        ("env NNODES=2 EXP=a.yaml bash examples/run_local_pretrain.sh --micro_batch_size 4", 2, 8),
        ("srun -N 2 bash -c 'NNODES=2 ./primus-cli direct train pretrain --config a.yaml --micro_batch_size 4'", 2, 8),
        ("primus-cli slurm -N 2 -- train pretrain --config a.yaml --micro_batch_size 4", 2, 8),
        ("primus-cli container --image i -- train pretrain --config a.yaml --micro_batch_size 4", 1, 8),
        (
            "torchrun --nnodes 2 --nproc_per_node 8 primus/cli/main.py train pretrain --config a.yaml "
            "--micro_batch_size 4",
            2,
            8,
        ),
    ],
)
def test_commands_of_primus_say_ranks_and_count_against_the_experiment(command, nodes, gpus):
    made = read(("run.sh", command + "\n"), ("a.yaml", experiment(DENSE)), machine={"topology": "hgx-mi300x"})
    place = made.tables["cluster"]
    assert (place["nodes"], place["gpus_per_node"]) == (nodes, gpus)
    assert exchange.canonical(made.scenario)["batch.micro"] == 4
    with pytest.raises(ScenarioError, match=r"--config names .*a\.yaml; give that file too"):
        read(("run.sh", command + "\n"))


def test_a_script_of_that_name_is_primuss_where_it_is_told_an_experiment_and_not_given():
    for variables in ("", "EXP=one "):
        with pytest.raises(ScenarioError, match=r"reads run_pretrain\.sh, which was not given"):
            read(("run.sh", f"{variables}bash run_pretrain.sh\n"), ("a.yaml", experiment(DENSE)))
    own = "torchrun --nproc_per_node 4 pretrain_gpt.py --num-layers 2 --hidden-size 8 --num-attention-heads 2\n"
    script = shell.script("EXP=a.yaml bash run_pretrain.sh\n", "run.sh", {"run_pretrain.sh": own})
    assert script.command[:3] == ["torchrun", "--nproc_per_node", "4"]


def test_slurm_without_a_number_of_nodes_and_another_experiment_are_asked_for():
    command = "primus-cli slurm srun -p x -- train pretrain --config a.yaml\n"
    with pytest.raises(ScenarioError, match="nodes"):
        read(("run.sh", command), ("a.yaml", experiment(DENSE)), machine={"topology": "hgx-mi300x"})
    with pytest.raises(ScenarioError, match=r"names b\.yaml, and a\.yaml is given"):
        read(("run.sh", command.replace("a.yaml", "b.yaml")), ("a.yaml", experiment(DENSE)))
    with pytest.raises(ScenarioError, match="2 experiments of Primus"):
        read(("a.yaml", experiment(DENSE)), ("b.yaml", experiment(DENSE)))


def test_presets_are_read_where_they_lie_and_each_upon_those_that_it_extends(tmp_path):
    models = tmp_path / "primus" / "configs" / "models" / "megatron"
    modules = tmp_path / "primus" / "configs" / "modules" / "megatron"
    for folder in (models, modules, tmp_path / "examples"):
        folder.mkdir(parents=True)
    (models / "own_base.yaml").write_text(
        "extends: [language_model.yaml]\nnormalization: RMSNorm\nposition_embedding_type: rope\nhidden_dropout: 0.0\n"
        "attention_dropout: 0.0\nnum_layers: 30\ntokenizer_model: meta-llama/Llama-3.1-8B\n"
    )
    (models / "own.yaml").write_text(
        "includes:\n  - own_base.yaml\nnum_layers: 12\nhidden_size: 2048\nffn_hidden_size: 8192\n"
        "num_attention_heads: 16\ngroup_query_attention: true\nnum_query_groups: 4\n"
    )
    (modules / "mine.yaml").write_text("extends:\n  - pre_trainer.yaml\nseq_length: 4096\nglobal_batch_size: 64\n")
    path = tmp_path / "examples" / "a.yaml"
    path.write_text(experiment("micro_batch_size: 4", model="own.yaml", config="mine.yaml"))
    fields = exchange.canonical(exchange.read([path], MACHINE).scenario)
    assert (fields["shape.layers"], fields["shape.d_model"], fields["shape.kv_heads"]) == (12, 2048, 4)
    assert fields["shape.vocab"] == 128256
    assert (fields["model.seq_len"], fields["batch.micro"], fields["batch.count"]) == (4096, 4, 2)
    assert fields["parallel.use_distributed_optimizer"] is True


def test_a_preset_may_be_given_and_one_that_nobody_has_is_asked_for():
    own = ("own.yaml", "extends: [llama3.1_8B.yaml]\nnum_layers: 2\n")
    assert exchange.canonical(read(("a.yaml", experiment(DENSE, model="own.yaml")), own).scenario)["shape.layers"] == 2
    with pytest.raises(ScenarioError, match=r"model preset 'own\.yaml' is not known here; give primus/configs/models"):
        read(("a.yaml", experiment(DENSE, model="own.yaml")))
    with pytest.raises(ScenarioError, match=r"module preset 'own\.yaml' is not known here"):
        read(("a.yaml", experiment(DENSE, config="own.yaml")))
    with pytest.raises(ScenarioError, match="names no model"):
        read(("a.yaml", experiment(DENSE, model="../../own.yaml")))
    with pytest.raises(ScenarioError, match="extends itself"):
        read(("a.yaml", experiment(DENSE, model="own.yaml")), ("own.yaml", "extends: [own.yaml]\nnum_layers: 2\n"))


def test_what_a_preset_says_and_nobody_plays_is_told_and_its_plain_values_are_not():
    made = read(("a.yaml", experiment(EXPERTS, model="deepseek_v3.yaml")))
    assert set(made.unplayed) == {"mtp_num_layers"}
    plain = data_table("primus_presets")["megatron"]["plain"]
    assert not read(("a.yaml", experiment(DENSE | plain))).unplayed
    lines = "".join(f"{name}: {shown(value)}\n" for name, value in plain.items())
    files = ("a.yaml", experiment(DENSE, config="own.yaml")), ("own.yaml", f"extends: [pre_trainer.yaml]\n{lines}")
    assert not read(*files).unplayed
    changed = lines.replace("exp_avg_dtype: fp32", "exp_avg_dtype: bf16")
    assert set(read(files[0], ("own.yaml", changed)).unplayed) == {"exp_avg_dtype"}


def test_a_model_that_is_known_by_name_alone_is_not_changed_in_kind():
    assert had(DENSE | {"num_layers": 4})["shape.layers"] == 4
    with pytest.raises(ScenarioError, match=r"normalization 'LayerNorm' makes another kind of model than llama3.1-8b"):
        had(DENSE | {"normalization": "LayerNorm"})


def test_every_model_that_is_known_by_name_is_shipped_and_every_tabulated_preset_is_a_model():
    for name in data_table("primus_presets")["megatron"]["named"]:
        had(DENSE, model=name)
    for name, table in data_table("primus_presets")["megatron"]["models"].items():
        if "num_layers" in table:
            machine = {"topology": "hgx-mi300x", "nodes": 4}
            fields = had(EXPERTS if "num_experts" in table else DENSE, model=name, machine=machine)
            assert fields["shape.layers"] == table["num_layers"]
    for name in data_table("primus_presets")["torchtitan"]["models"]:
        assert had("training: {local_batch_size: 1}", model=name, framework="torchtitan")["model.seq_len"] == 2048


def test_experts_are_exchanged_by_deepep_where_turbo_is_on():
    fields = had(DEEPEP | {"turbo_deepep_num_cu": 64}, model="qwen3_30B_A3B.yaml")
    assert (fields["model.name"], fields["parallel.ep"]) == ("qwen3-30b-a3b", 8)
    assert (fields["parallel.dispatcher"], fields["parallel.flex_backend"]) == ("flex", "deepep")
    assert fields["parallel.deepep_num_sms"] == 64
    assert fields["parallel.permute_fusion"] is True
    assert had(DEEPEP, model="qwen3_30B_A3B.yaml")["parallel.deepep_num_sms"] == 32
    for change in ({"use_turbo_deepep": False}, {"enable_primus_turbo": False}, {"tensor_model_parallel_size": 2}):
        fields = had(DEEPEP | change, model="qwen3_30B_A3B.yaml", machine=MACHINE | {"nodes": 2})
        assert fields["parallel.dispatcher"] == "alltoall"
    with pytest.raises(ScenarioError, match="needs moe_router_dtype fp32, as Primus does"):
        had(DEEPEP | {"moe_router_dtype": None}, model="qwen3_30B_A3B.yaml")
    with pytest.raises(ScenarioError, match="needs moe_shared_expert_overlap false, as Primus does"):
        had(DEEPEP | {"moe_shared_expert_overlap": True}, model="deepseek_v2_lite.yaml")


def test_stages_without_waits_of_the_host_turn_on_what_primus_turns_on():
    on = EXPERTS | {"enable_primus_turbo": True, "fp8": "hybrid"}
    first = had(on | {"turbo_sync_free_moe_stage": 1}, model="deepseek_v2_lite.yaml")
    assert (first["parallel.router_fusion"], first["parallel.router_padding"]) == (True, True)
    assert first["parallel.dispatcher"] == "alltoall"
    second = had(on | {"turbo_sync_free_moe_stage": 2}, model="deepseek_v2_lite.yaml")
    assert second["parallel.dispatcher"] == "flex"
    with pytest.raises(ScenarioError, match="needs enable_primus_turbo, as Primus does"):
        had(EXPERTS | {"turbo_sync_free_moe_stage": 2}, model="deepseek_v2_lite.yaml")
    with pytest.raises(ScenarioError, match="has stages 1 to 3"):
        had(on | {"turbo_sync_free_moe_stage": 4}, model="deepseek_v2_lite.yaml")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("use_torch_fsdp2: true", "fully_shard.*fp32 copies beside them.*Nearest is kind"),
        ('recompute_layer_ids: "0,3,4"', "computes chosen layers again"),
        ("patch_zero_bubble: true", "zero-bubble pipeline"),
        ("patch_moe_overlap: true", "schedule of Primus's own"),
        ("patch_primus_pipeline: true\npp_algorithm: zbv-greedy", "Primus's own pipeline"),
        ("fp4: e2m1", "computes in 4 bits"),
        ("use_turbo_mega_moe: true", "joins experts' products and their exchange"),
        ("decoder_pipeline_manual_split_list: [8, 8, 8, 8]", "write pipeline_model_parallel_layout"),
        ("num_seq_splits: 2", "splits sequences along a pipeline"),
        ("spec: [megatron.core.models.mamba.mamba_layer_specs, mamba_stack_spec]", "has state-space layers"),
        ("use_sink_attention: true", "sinks"),
        ("lora: {enabled: true}", "trains adapters by Primus's own LoRA"),
        ("optimizer: muon", "muon"),
    ],
)
def test_what_is_not_played_is_refused(line, message):
    with pytest.raises(ScenarioError, match=message):
        read(("a.yaml", experiment(line)))


def test_what_is_off_and_a_pipeline_that_megatron_runs_too_are_not_refused():
    off = dict.fromkeys(["use_torch_fsdp2", "patch_zero_bubble", "patch_moe_overlap", "use_turbo_mega_moe"], False)
    had(DENSE | off | {"fp4": None, "recompute_layer_ids": None, "offload_chunk_num": 0, "num_seq_splits": 1})
    had(DENSE | {"patch_primus_pipeline": True, "pp_algorithm": "1f1b", "pipeline_model_parallel_size": 2})


def test_other_modules_and_frameworks_are_refused_by_name():
    with pytest.raises(ScenarioError, match="finetunes, which is not read of Primus's files"):
        read(("a.yaml", experiment(DENSE, config="sft_trainer.yaml")))
    with pytest.raises(ScenarioError, match="framework 'maxtext' is not read; known: megatron, torchtitan"):
        read(("a.yaml", experiment(DENSE, framework="maxtext")))
    with pytest.raises(ScenarioError, match="say --from primus, or nothing"):
        read(("a.yaml", experiment(DENSE)), framework="megatron")
    with pytest.raises(ScenarioError, match="is no experiment of Primus"):
        read(("a.yaml", "tensor_model_parallel_size: 2\n"), framework="primus")


def test_a_module_whose_name_yaml_reads_as_no_text_trains_all_the_same():
    text = experiment(DENSE)
    own = read(("a.yaml", text))
    for name in ("null", "1"):
        assert read(("a.yaml", text.replace("pre_trainer:\n", f"{name}:\n"))).scenario.file == own.scenario.file
        with pytest.raises(ScenarioError, match=f"modules has 2, {'None' if name == 'null' else name}, other"):
            read(("a.yaml", text.replace("  pre_trainer:", f"  {name}: {{framework: megatron}}\n  other:")))


def test_what_turbo_does_is_told_and_nothing_of_an_experiment_is_unknown():
    turbo = {"enable_primus_turbo": True, "use_turbo_attention": True, "no_fp8_weight_transpose_cache": True}
    kept = {"wandb_project": "own", "stderr_sink_level": "DEBUG", "log_avg_skip_iterations": 2, "train_iters": 50}
    made = read(("a.yaml", experiment(DENSE | turbo | kept | {"cross_entropy_fusion_impl": "te"})))
    told = {"enable_primus_turbo", "use_turbo_attention", "no_fp8_weight_transpose_cache", "cross_entropy_fusion_impl"}
    assert told == set(made.unplayed)
    assert not made.unknown
    assert "a_new_option" in read(("a.yaml", experiment(DENSE | {"a_new_option": 3}))).unknown


def test_no_option_that_primus_adds_is_unjudged():
    tables = [load("primus"), load("megatron")]
    rows = [row.option for row in load("primus").every()]
    globs = [*rows, *(glob for one in tables for glob in (*one.unplayed, *one.ignored))]
    globs += [glob.partition("=")[0] for one in tables for glob in (*one.refused, *one.unsized)]
    listed = [line for line in (DATA / "primus_options.txt").read_text("utf-8").splitlines() if line[:1] != "#"]
    assert len(listed) > 70
    assert [name for name in listed if not any(fnmatchcase(name, glob) for glob in globs)] == []
    assert not any(fnmatchcase("an_option_of_nobody", glob) for glob in globs)


TITAN = """training: {local_batch_size: 3, seq_len: 8192, steps: 50}
activation_checkpoint: {mode: full}
sink_level: null
file_sink_level: DEBUG
primus_turbo: {enable_primus_turbo: true, enable_attention_float8: false}
"""


def test_over_torchtitan_models_are_compiled_and_nothing_is_selected_unless_told():
    made = read(("a.yaml", experiment(TITAN, model="llama3.1_70B-fp8.yaml", framework="torchtitan")))
    fields = exchange.canonical(made.scenario)
    assert made.framework.name == "torchtitan"
    assert not made.unknown
    assert (made.scenario.file.model.name, fields["model.dtype"]) == ("llama3-70b", "fp8")
    assert (fields["model.implementation"], fields["strategy.kind"]) == ("fused", "fsdp")
    assert fields["model.activation_checkpointing"] == "full"
    assert (fields["batch.micro"], fields["model.seq_len"]) == (3, 8192)
    assert any("Primus-Turbo's kernels are the device's usual ones" in note for note in made.notes)
    plain = had("training: {local_batch_size: 1}", framework="torchtitan")
    assert (plain["model.implementation"], plain["model.activation_checkpointing"]) == ("fused", "none")
    command = ("run.sh", "EXP=a.yaml bash examples/run_pretrain.sh --training.local_batch_size 2\n")
    changed = read(command, ("a.yaml", experiment(TITAN, framework="torchtitan")), machine={"topology": "hgx-mi300x"})
    assert exchange.canonical(changed.scenario)["batch.micro"] == 2


def test_over_torchtitan_other_sizes_and_experts_alone_in_8_bits_are_refused():
    with pytest.raises(ScenarioError, match=r"model\.n_layers 1 changes the model of this flavor"):
        had("model: {n_layers: 1}", framework="torchtitan")
    preset = "model: {name: llama3, flavor: 8B, n_layers: 32}\n"
    files = ("a.yaml", experiment(TITAN, model="own.yaml", framework="torchtitan"))
    assert read(files, ("own.yaml", preset)).scenario.file.model.name == "llama3-8b"
    with pytest.raises(ScenarioError, match=r"model\.n_layers 2 changes the model of this flavor"):
        read(files, ("own.yaml", preset.replace("32", "2")))
    text = "training: {local_batch_size: 1}\nprimus_turbo: {use_turbo_grouped_mm: true}"
    with pytest.raises(ScenarioError, match="has experts alone in 8 bits"):
        had(text, model="deepseek_v3_16b.yaml", framework="torchtitan")
    had(text[:-1] + ", use_moe_fp8: false}", model="deepseek_v3_16b.yaml", framework="torchtitan")


def test_fused_attention_is_composable_kernel_s_on_amd_and_told():
    """It was cuDNN's, and the import failed by "$.run.optimizer"."""
    made = read(("a.yaml", experiment(DENSE | {"attention_backend": "fused"})))
    assert made.scenario.file.model.attention == "fa2"
    told = "attention_backend 'fused' is Composable Kernel's flash attention (fa2) on MI300X"
    assert any(told in note for note in made.notes)
    a100 = {"topology": "hgx-a100", "nodes": 1}
    with pytest.raises(ScenarioError, match=r"a\.yaml.*attention_backend 'fused'.*'cudnn' does not run on A100"):
        read(("a.yaml", experiment(DENSE | {"attention_backend": "fused"})), machine=a100)


def test_what_an_experiment_says_by_an_earlier_name_counts_against_the_presets():
    fields = had("training: {batch_size: 3}", model="llama3.1_70B.yaml", framework="torchtitan")
    assert fields["batch.micro"] == 3
