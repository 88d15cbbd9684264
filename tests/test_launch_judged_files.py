"""DeepSpeed's JSON, accelerate and the Trainer: every option is judged, and what changes a step is not left out."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from test_launch_judged import judged

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document
from clustersim.files.launch.launcher_sizes import STARTING, _accelerate_options
from clustersim.files.launch.options import _judged_below
from clustersim.files.launch.table import load
from clustersim.training.strategies.zero_config import Offload, ZeroOptimization

DATA = Path(__file__).parent / "data"
BLOCK = "zero_optimization."
MEGATRON = (
    "deepspeed --num_nodes 2 --num_gpus 8 pretrain_gpt.py --deepspeed --deepspeed_config ds.json --num-layers 24 "
    "--hidden-size 2048 --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --vocab-size 50304 "
    "--micro-batch-size 1 --bf16 --zero-stage {stage} --no-pipeline-parallel"
)
TRAINER = (
    "torchrun --nnodes 2 --nproc_per_node 8 run_clm.py --model_name_or_path Qwen/Qwen2-1.5B --deepspeed ds.json --bf16 "
    "--per_device_train_batch_size 1 --max_seq_length 2048 --gradient_accumulation_steps 1"
)


def listed(framework: str) -> list[str]:
    lines = (DATA / f"{framework}_options.txt").read_text("utf-8").splitlines()
    return [line.partition(":")[0] for line in lines if not line.startswith("#")]


def read(words: str = MEGATRON, stage: int = 3, **blocks: Any) -> exchange.LaunchImport:
    """A run of ZeRO, whose file has further blocks; ``zero_optimization`` adds to that of the stage."""
    block = {"stage": stage, **blocks.pop("zero_optimization", {})}
    given = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, BLOCK[:-1]: block, **blocks}
    files = [document(words.format(stage=stage), "run.sh"), document(json.dumps(given), "ds.json")]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 2})


def had(made: exchange.LaunchImport) -> Table:
    return exchange.canonical(made.scenario)


def test_no_option_of_deepspeeds_file_is_unjudged() -> None:
    names = listed("deepspeed")
    assert len(names) > 350
    assert [name for name in names if not judged(name, "deepspeed")] == []
    assert not judged("option_of_nobody", "deepspeed")


def test_every_field_of_deepspeeds_block_is_the_scenarios_or_is_told() -> None:
    """The row of the whole block takes any name, of which the scenario's own reader refuses what it does not know."""
    table = load("deepspeed")
    known = {BLOCK + name for name in ZeroOptimization.__struct_fields__}
    known |= {
        f"{BLOCK}{part}.{name}" for part in ("offload_param", "offload_optimizer") for name in Offload.__struct_fields__
    }
    known |= {row.option for row in table.rows}
    globs = [*_judged_below(table, BLOCK), *(glob.partition("=")[0] for glob in table.refused)]
    fields = [table.aliases.get(name, name) for name in listed("deepspeed") if name.startswith(BLOCK)]
    assert len(fields) >= 80
    assert [name for name in fields if name not in known and not any(fnmatchcase(name, glob) for glob in globs)] == []


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
@pytest.mark.parametrize(
    ("blocks", "name"),
    [
        ({"wall_clock_breakdown": True}, "wall_clock_breakdown"),
        ({"memory_breakdown": True}, "memory_breakdown"),
        ({"comms_logger": {"enabled": True}}, "comms_logger.enabled"),
        ({"data_efficiency": {"enabled": True}}, "data_efficiency.enabled"),
        ({"zero_force_ds_cpu_optimizer": False}, "zero_force_ds_cpu_optimizer"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention.mode"),
        ({"progressive_layer_drop": {"enabled": True}}, "progressive_layer_drop.enabled"),
        (
            {"zero_optimization": {"module_granularity_threshold": 1000}},
            "zero_optimization.module_granularity_threshold",
        ),
        ({"zero_optimization": {"leaf_module": {"names": ["mlp"]}}}, "zero_optimization.leaf_module.names"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "zero_optimization.round_robin_gradients"),
        (
            {"zero_optimization": {"zero_quantized_nontrainable_weights": True}},
            "zero_optimization.zero_quantized_nontrainable_weights",
        ),
    ],
)
def test_what_changes_a_step_of_deepspeed_and_is_not_played_is_told(words: str, blocks: Table, name: str) -> None:
    made = read(words, **blocks)
    assert name in made.unplayed
    assert made.unknown == ()
    assert had(made) == had(read(words))


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
def test_what_leaves_a_step_of_deepspeed_as_it_is_says_nothing(words: str) -> None:
    off = {
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": True,
        "comms_logger": {"enabled": False},
        "elasticity": {"enabled": False},
        "comet": {"enabled": True, "project": "own"},
        "disable_python_gc": True,
        "zero_optimization": {
            "compute_grad_norm": True,
            "stage3_module_granularity_threshold": 0,
            "enable_sanity_checks": False,
        },
    }
    made, plain = read(words, **off), read(words)
    assert (dict(made.unplayed), made.unknown) == (dict(plain.unplayed), plain.unknown)
    assert had(made) == had(plain)


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        ({"amp": {"enabled": True, "opt_level": "O1"}}, "is apex's mixed precision"),
        (
            {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
            "computes and sends in 16 bits what is kept in fp32",
        ),
        (
            {"elasticity": {"enabled": True, "micro_batch_sizes": [2, 4]}},
            "takes the batch from how many GPUs there are",
        ),
        ({"autotuning": {"enabled": True}}, "tries configurations one after the other"),
        ({"expert_parallel": {"enabled": True, "autoep_size": 4}}, "spreads experts over ranks by AutoEP"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, "is ZenFlow"),
        ({"zero_optimization": {"legacy_stage1": True}}, "is the stage 1 of DeepSpeed before 0.5.9"),
    ],
)
def test_runs_of_deepspeed_that_are_not_played_are_refused(words: str, blocks: Table, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        read(words, **blocks)


@pytest.mark.parametrize("words", [MEGATRON, TRAINER])
def test_torchs_own_adam_of_deepspeeds_file_has_torchs_kernels(words: str) -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert had(read(words, **adam))["run.optimizer_impl"] == "foreach"
    assert had(read(words))["run.optimizer_impl"] != "foreach"


def test_an_optimizer_of_deepspeeds_file_counts_against_the_trainers() -> None:
    adam = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}
    assert had(read(f"{TRAINER} --optim adamw_torch"))["run.optimizer_impl"] == "foreach"
    assert had(read(f"{TRAINER} --optim adamw_torch", **adam)) == had(read(TRAINER, **adam))
    with pytest.raises(ScenarioError, match="contradict each other"):
        read(f"{TRAINER} --optim adafactor", **adam)


def test_parameters_on_the_host_have_two_names_in_deepspeeds_file() -> None:
    for name in ("cpu_offload_param", "cpu_offload_params"):
        assert had(read(zero_optimization={name: True}))["strategy.zero_optimization.offload_param.device"] == "cpu"


def test_a_name_counts_against_the_family_that_changes_nothing() -> None:
    """``data_*`` of Megatron-LM's own arguments had ``data_efficiency`` of DeepSpeed's file left out without a word."""
    told = read(data_efficiency={"data_routing": {"enabled": True}}).unplayed
    assert "data_efficiency.data_routing.enabled" in told


# ---- accelerate and the Trainer --------------------------------------------------------------------------------------

PLAIN = "--model_name_or_path Qwen/Qwen2-1.5B --per_device_train_batch_size 1 --max_seq_length 2048"


def trained(
    arguments: str = "--bf16", launcher: str = "torchrun --nnodes 2 --nproc_per_node 8"
) -> exchange.LaunchImport:
    files = [document(f"{launcher} sft.py {PLAIN} {arguments}", "run.sh")]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 2})


def of_yaml(text: str) -> exchange.LaunchImport:
    usual = "model_name_or_path: Qwen/Qwen2-1.5B\nbf16: true\nper_device_train_batch_size: 1\nmax_seq_length: 2048\n"
    return exchange.read([document(usual + text, "train.yaml")], {"topology": "hgx-h100", "nodes": 2})


def test_no_option_of_the_trainer_is_unjudged() -> None:
    names = listed("trainer")
    read_first = {"activation_checkpointing", "fsdp", "fsdp_min_num_params", "use_peft"}
    assert len(names) > 180
    assert [name for name in names if not (judged(name, "accelerate") or name in read_first)] == []


def test_no_option_of_accelerate_is_unjudged() -> None:
    names = listed("accelerate")
    assert len(names) > 220
    places = {name: list(_accelerate_options({name: "x"})) or [name] for name in names}
    of_launcher = {name for name in names if name in STARTING}
    assert [name for name in names if not (judged(places[name][0], "accelerate") or name in of_launcher)] == []


def test_layers_are_computed_again_by_the_name_that_transformers_5_has() -> None:
    """``activation_checkpointing`` was told to be nothing that is played."""
    for words in ("--activation_checkpointing", "--activation_checkpointing True", "--gradient_checkpointing"):
        assert had(trained(f"--bf16 {words}"))["model.activation_checkpointing"] == "full"
    assert had(of_yaml("activation_checkpointing: true\n"))["model.activation_checkpointing"] == "full"
    newest = had(trained("--bf16 --activation_checkpointing False --gradient_checkpointing True"))
    assert newest["model.activation_checkpointing"] == "none"
    sparse = of_yaml(
        "activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 2, offload: true}\n"
    )
    assert {f"activation_checkpointing_kwargs.{name}" for name in ("every_n_layers", "offload")} == set(sparse.unplayed)
    usual = of_yaml(
        "activation_checkpointing: true\nactivation_checkpointing_kwargs: {every_n_layers: 1, offload: false}\n"
    )
    assert dict(usual.unplayed) == {}


@pytest.mark.parametrize(
    "words", ["--torch_compile_backend inductor", "--torch_compile_mode default", "--torch_compile"]
)
def test_a_backend_or_a_mode_alone_switches_compiling_on(words: str) -> None:
    assert had(trained(f"--bf16 {words}"))["model.implementation"] == "fused"
    with pytest.raises(ScenarioError, match=r"is a backend of torch\.compile that makes no kernels"):
        trained("--bf16 --torch_compile_backend aot_eager")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("--full_determinism", "--full_determinism"),
        ("--train_sampling_strategy group_by_length", "--train_sampling_strategy"),
        ("--debug underflow_overflow", "--debug"),
        ("--include_num_input_tokens_seen all", "--include_num_input_tokens_seen"),
        ("--loss_type dft", "--loss_type"),
        ("--dispatch_batches True", "--dispatch_batches"),
    ],
)
def test_what_changes_a_step_of_the_trainer_and_is_not_played_is_told(words: str, name: str) -> None:
    assert name in trained(f"--bf16 {words}").unplayed


@pytest.mark.parametrize(
    "words",
    [
        "--full_determinism False",
        "--train_sampling_strategy random",
        "--include_num_input_tokens_seen no",
        "--loss_type nll",
    ],
)
def test_what_leaves_a_step_of_the_trainer_as_it_is_says_nothing(words: str) -> None:
    made = trained(f"--bf16 {words}")
    assert (dict(made.unplayed), made.unknown) == ({}, ())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("--split_batches True", "shares per_device_train_batch_size out over the ranks"),
        ("--accelerator_config '{\"split_batches\": true}'", "shares per_device_train_batch_size out over the ranks"),
        ("--use_mps_device", "another maker's GPUs"),
        ("--ddp_backend ccl", "another library than NCCL"),
    ],
)
def test_runs_of_the_trainer_that_are_not_played_are_refused(words: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        trained(f"--bf16 {words}")


def test_a_split_in_the_trainers_own_table_is_accelerates() -> None:
    split = of_yaml(
        "fsdp: full_shard\nfsdp_config: {fsdp_version: 2}\nparallelism_config: {tp_size: 2, dp_shard_size: 8}\n"
    )
    assert had(split)["parallel.tp"] == 2
    for name in ("sp_size", "parallelism_config_sp_size"):
        with pytest.raises(ScenarioError, match="splits sequences by Ulysses"):
            of_yaml(f"parallelism_config: {{{name}: 2}}\n")


def test_attention_of_trls_model_is_read_where_its_own_table_says_it() -> None:
    assert had(of_yaml("model_init_kwargs: {attn_implementation: eager}\n"))["model.attention"] == "eager"


def test_logits_of_trls_command_are_said_to_be_whole() -> None:
    alone = exchange.read(
        [document(f"trl sft {PLAIN} --dataset_name own", "run.sh")], {"topology": "hgx-h100", "nodes": 1}
    )
    assert any("takes the loss in chunks of tokens" in note for note in alone.notes)
    assert not any("takes the loss in chunks of tokens" in note for note in trained().notes)


def test_words_of_a_launch_line_are_not_left_out() -> None:
    launcher = "accelerate launch --num_machines 2 --num_processes 16 --mixed_precision bf16 {}"
    told = trained("", launcher.format("--dynamo_backend inductor --dynamo_mode max-autotune")).unplayed
    assert "dynamo_config.dynamo_mode" in told
    assert trained("", launcher.format("--own_option 3")).unknown == ("own_option",)
    with pytest.raises(ScenarioError, match="splits sequences by Ulysses"):
        trained("", launcher.format("--use_fsdp --parallelism_config_sp_size 4"))


def test_fsdp1_shards_as_its_strategy_says_and_says_so() -> None:
    """``accelerate config`` writes the strategy of FSDP1 where accelerate reads that of FSDP2 alone."""
    config = "distributed_type: FSDP\nmixed_precision: bf16\nnum_machines: 2\nnum_processes: 16\nfsdp_config:\n"
    config += "  fsdp_version: {}\n  fsdp_reshard_after_forward: {}\n"

    def of_config(version: int, word: str) -> exchange.LaunchImport:
        launch = document(f"accelerate launch --config_file fsdp.yaml sft.py {PLAIN}", "run.sh")
        files = [launch, document(config.format(version, word), "fsdp.yaml")]
        return exchange.read(files, {"topology": "hgx-h100", "nodes": 2})

    note = "FSDP1 of accelerate shards as fsdp_sharding_strategy says"
    told = of_config(1, "SHARD_GRAD_OP")
    assert had(told)["strategy.sharding_strategy"] == "FULL_SHARD"
    assert any(note in one for one in told.notes)
    assert not any(note in one for one in (*of_config(1, "FULL_SHARD").notes, *of_config(2, "true").notes))


# ---- axolotl and LLaMA-Factory ---------------------------------------------------------------------------------------

AXOLOTL = (
    "base_model: Qwen/Qwen2-1.5B\nbf16: true\nmicro_batch_size: 1\nsequence_len: 2048\n"
    "datasets: [{path: own, type: alpaca}]\n"
)
FACTORY = (
    "model_name_or_path: Qwen/Qwen2-1.5B\nstage: sft\ndo_train: true\nfinetuning_type: full\n"
    "dataset: own\ntemplate: qwen\ncutoff_len: 2048\nper_device_train_batch_size: 1\nbf16: true\n"
)


def tuned(text: str, command: str) -> exchange.LaunchImport:
    files = [document(f"{command} own.yaml", "run.sh"), document(text, "own.yaml")]
    return exchange.read(files, {"topology": "hgx-h100", "nodes": 1})


@pytest.mark.parametrize(
    ("framework", "read_first"),
    [
        (
            "axolotl",
            "bfloat16 float16 fsdp fsdp_version max_packed_sequence_len context_parallel_size sequence_parallel_degree "
            "tensor_parallel_size dp_replicate_size dp_shard_size eager_attention flash_attention flex_attention "
            "sdp_attention xformers_attention",
        ),
        ("factory", "disable_gradient_checkpointing use_reentrant_gc"),
    ],
)
def test_no_option_of_programs_on_the_trainer_is_unjudged(framework: str, read_first: str) -> None:
    names = listed(framework)
    assert len(names) > 200
    assert [name for name in names if not (judged(name, "accelerate") or name in read_first.split())] == []


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (AXOLOTL + "s2_attention: true\n", "s2_attention"),
        (AXOLOTL + "layer_offloading: true\n", "layer_offloading"),
        (AXOLOTL + "batch_flattening: true\n", "batch_flattening"),
        (AXOLOTL + "overrides_of_model_config: {attention_bias: true}\n", "overrides_of_model_config.attention_bias"),
        (FACTORY + "shift_attn: true\n", "shift_attn"),
        (FACTORY + "use_unsloth_gc: true\n", "use_unsloth_gc"),
        (FACTORY + "resize_vocab: true\n", "resize_vocab"),
    ],
)
def test_what_changes_a_step_of_programs_on_the_trainer_is_told(text: str, name: str) -> None:
    command = "axolotl train" if "base_model" in text else "llamafactory-cli train"
    made = tuned(text, command)
    assert list(made.unplayed) == [name]
    assert made.unknown == ()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (AXOLOTL + "overrides_of_model_config: {num_hidden_layers: 2}\n", "has other sizes than its name says"),
        (AXOLOTL + "gptq: true\n", "GPTQ"),
        (AXOLOTL + "num_labels: 2\n", "another head than that over the vocabulary"),
        (FACTORY + "use_mca: true\n", "trains by Megatron-Core"),
        (FACTORY + "use_hyper_parallel: true\n", "trains by HyperParallel"),
    ],
)
def test_runs_of_programs_on_the_trainer_that_are_not_played_are_refused(text: str, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        tuned(text, "axolotl train" if "base_model" in text else "llamafactory-cli train")


def test_axolotls_switch_for_xformers_is_its_kernel() -> None:
    assert had(tuned(AXOLOTL + "xformers_attention: true\n", "axolotl train"))["model.attention"] == "efficient"


def test_kernels_and_recomputation_that_no_file_says_are_told_as_they_are_taken() -> None:
    attention, others, again = "attention is fused, by the kernel", "op by op", "no layer is computed again"
    alone = [document(json.dumps({"train_micro_batch_size_per_gpu": 1, BLOCK[:-1]: {"stage": 3}}), "ds.json")]
    place = {"topology": "hgx-h100", "nodes": 2}

    def told(made: exchange.LaunchImport) -> list[str]:
        return [text for text in (attention, others, again) if any(text in note for note in made.notes)]

    assert told(exchange.read(alone, place, model="gpt2-xl")) == [attention, others, again]
    assert told(exchange.read(alone, place, model="resnet50")) == [others, again]
    assert told(read(TRAINER)) == [attention, others, again]
    assert told(read(f"{TRAINER} --gradient_checkpointing")) == [attention, others]
    assert told(read(f"{TRAINER} --attn_implementation sdpa")) == [others, again]
    assert told(read(f"{TRAINER} --use_liger_kernel --attn_implementation sdpa --gradient_checkpointing")) == []
    assert told(read()) == []  # of Megatron-DeepSpeed's script, whose options say all of it
