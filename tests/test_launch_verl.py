"""verl's supervised finetuning: both trainers, by commands and by YAML."""

from __future__ import annotations

import pytest

from clustersim.core.errors import ScenarioError
from clustersim.core.texts import Table
from clustersim.files import launch as exchange
from clustersim.files.launch.files import document

MACHINE = {"topology": "hgx-h100"}
FIRST = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer "
    "data.train_files=own.parquet data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct "
)
SECOND = (
    "torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.sft_trainer "
    "data.train_files=own.parquet model.path=Qwen/Qwen3-8B data.max_length=2048 "
)


def read(words: str, *, first: bool = True) -> exchange.LaunchImport:
    return exchange.read([document((FIRST if first else SECOND) + words, "run.sh")], MACHINE)


def had(made: exchange.LaunchImport) -> Table:
    return exchange.canonical(made.scenario)


def test_finetuning_of_verl_is_fsdp2_in_16_bits_over_masters_in_fp32() -> None:
    made = read("")
    fields = had(made)
    assert made.framework.name == "verl"
    assert made.unknown == ()
    assert (fields["strategy.kind"], fields["strategy.version"]) == ("fsdp", 2)
    assert (fields["strategy.param_dtype"], fields["strategy.reduce_dtype"]) == ("bf16", "fp32")
    assert (fields["model.dtype"], fields["model.attention"], fields["model.seq_len"]) == ("bf16", "fa2", 1024)
    assert fields["model.activation_checkpointing"] == "full"
    assert (fields["batch.micro"], fields["batch.count"]) == (4, 256 // 8 // 4)
    assert any("0.2 and 0.3 had fsdp" in note for note in made.notes)
    assert not any("had fsdp" in note for note in read("model.strategy=fsdp").notes)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("model.strategy=fsdp", "strategy.version", 1),
        ("model.fsdp_config.model_dtype=bf16", "strategy.orig_dtype", "bf16"),
        ("model.enable_gradient_checkpointing=False", "model.activation_checkpointing", "none"),
        ("model.use_liger=True", "model.implementation", "liger"),
        ("data.max_length=4096", "model.seq_len", 4096),
        ("+data.train_batch_size=64", "batch.count", 2),
        ("model.fsdp_config.cpu_offload=True", "strategy.cpu_offload", True),
        ("optim.clip_grad=0", "strategy.clip_grad_norm", False),
    ],
)
def test_a_word_of_verls_first_trainer_changes_what_it_says(words: str, field: str, value: object) -> None:
    assert had(read("")).get(field) != value
    assert had(read(words))[field] == value


def test_units_of_fsdp1_may_be_of_so_many_parameters() -> None:
    words = "model.strategy=fsdp model.fsdp_config.wrap_policy.min_num_params=100000000"
    assert read(words).tables["strategy"]["min_num_params"] == 100_000_000
    told = read("model.override_config.num_hidden_layers=2 model.external_lib=own").unplayed
    assert {"model.override_config.num_hidden_layers", "model.external_lib"} == set(told)


def test_fsdp1s_offload_of_no_parameters_moves_nothing() -> None:
    offload = "model.strategy=fsdp model.fsdp_config.cpu_offload=True"
    assert not had(read(offload)).get("strategy.cpu_offload")
    assert had(read(f"{offload} model.fsdp_config.offload_params=True"))["strategy.cpu_offload"] is True


def test_ulysses_splits_sequences_by_all_to_all() -> None:
    made = read("ulysses_sequence_parallel_size=2 use_remove_padding=true model.strategy=fsdp")
    fields = had(made)
    assert (fields["parallel.cp"], fields["parallel.cp_comm_type"]) == (2, "a2a")
    assert fields["parallel.cp_load_balancer"] == "none"
    assert fields["batch.count"] == 256 // 4 // 4
    assert any("FSDP1 beside Ulysses: played as FSDP2's" in note for note in made.notes)


def test_adapters_of_verl_are_pefts() -> None:
    fields = had(read("model.lora_rank=32 model.lora_alpha=16 model.target_modules=[q_proj,v_proj]"))
    assert fields["model.adapter.rank"] == 32
    assert list(fields["model.adapter.target_modules"]) == ["q_proj", "v_proj"]
    assert list(had(read("model.lora_rank=8"))["model.adapter.target_modules"]) == ["all-linear"]
    assert "model.adapter.rank" not in had(read("model.lora_rank=0"))


def test_passes_of_the_trainer_of_engines_are_filled_with_tokens() -> None:
    usual = had(read("", first=False))
    assert usual["strategy.version"] == 1
    assert usual["batch.micro"] == 8192 // 2048
    assert had(read("data.max_token_len_per_gpu=16384", first=False))["batch.micro"] == 8
    assert had(read("data.use_dynamic_bsz=False data.micro_batch_size_per_gpu=2", first=False))["batch.micro"] == 2
    assert had(read("data.train_batch_size=8", first=False))["batch.micro"] == 1  # what a replica has of the step
    split = had(read("engine.ulysses_sequence_parallel_size=4 engine.strategy=fsdp2", first=False))
    assert (split["parallel.cp"], split["batch.micro"]) == (4, 16)


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        ("engine.reshard_after_forward=False", "strategy.sharding_strategy", "SHARD_GRAD_OP"),
        ("engine.strategy=fsdp2 engine.reshard_after_forward=False", "strategy.reshard_after_forward", False),
        ("engine.strategy=fsdp2 engine.offload_policy=True", "strategy.cpu_offload", True),
        ("engine.use_no_sync_for_gradient_accumulation=True", "strategy.no_sync", True),
        ("engine.model_dtype=bfloat16", "strategy.orig_dtype", "bf16"),
    ],
)
def test_a_word_of_verls_engine_changes_what_it_says(words: str, field: str, value: object) -> None:
    section, _, name = field.partition(".")
    assert read("", first=False).tables[section].get(name) != value
    assert read(f"engine=fsdp {words}", first=False).tables[section][name] == value


def test_verls_own_configuration_need_not_be_given_and_another_must() -> None:
    assert had(read("--config-name sft_trainer_engine", first=False)) == had(read("", first=False))
    with pytest.raises(ScenarioError, match="--config-name names own; give that file too"):
        read("--config-name own", first=False)


def test_verls_yaml_counts_until_its_command_says_otherwise() -> None:
    text = "data: {train_batch_size: 64, micro_batch_size: null, micro_batch_size_per_gpu: 2, max_length: 2048}\n"
    text += "model: {partial_pretrain: meta-llama/Meta-Llama-3-8B, strategy: fsdp2}\ntrainer: {nnodes: 1}\n"
    alone = exchange.read([document(text, "sft.yaml")], {**MACHINE, "nodes": 1})
    assert had(alone)["batch.micro"] == 2
    assert alone.tables["model"]["name"] == "llama3-8b"
    both = exchange.read([document(FIRST, "run.sh"), document(text, "sft.yaml")], MACHINE)
    assert (had(both)["batch.micro"], had(both)["model.seq_len"]) == (4, 2048)


@pytest.mark.parametrize(
    ("words", "first", "why"),
    [
        ("engine=megatron", False, "trains by Megatron-LM"),
        ("engine=veomni", False, "trains by an engine that is not read"),
        ("engine.param_offload=True", False, "moves the model to the host between steps"),
        ("engine.fsdp_size=4", False, "shards in groups of ranks"),
        ("engine.offload_policy=True", False, "is FSDP2's"),
        ("model.lora_adapter_path=own/adapter", True, "describes adapters; say model.lora_rank"),
        ("data.micro_batch_size_per_gpu=no", True, "data.micro_batch_size_per_gpu: 'no' does not fit"),
    ],
)
def test_what_verl_does_otherwise_is_refused_with_what_to_do(words: str, first: bool, why: str) -> None:
    with pytest.raises(ScenarioError, match=why):
        read(words, first=first)


def test_samples_of_a_pass_that_releases_read_otherwise_are_asked_for() -> None:
    with pytest.raises(ScenarioError, match=r"data.micro_batch_size 8 is of all ranks together in verl 0\.1"):
        exchange.read([document(FIRST.replace("size_per_gpu=4", "size=8"), "run.sh")], MACHINE)


def test_verls_reinforcement_learning_is_refused() -> None:
    with pytest.raises(ScenarioError, match="made of generated text and several models"):
        exchange.read([document("python3 -m verl.trainer.main_ppo data.train_batch_size=1024", "run.sh")], MACHINE)
    with pytest.raises(ScenarioError, match="made of generated text and several models"):
        read("actor_rollout_ref.model.path=Qwen/Qwen3-8B")


def test_a_models_path_below_a_variable_names_the_model() -> None:
    made = exchange.read([document(FIRST.replace("Qwen/Qwen2.5-0.5B", "$HOME/models/Qwen2.5-0.5B"), "run.sh")], MACHINE)
    assert made.tables["model"]["name"] == "qwen2.5-0.5b"
    with pytest.raises(ScenarioError, match="is set nowhere in the script"):
        exchange.read([document(FIRST.replace("Qwen/Qwen2.5-0.5B-Instruct", "$MODEL"), "run.sh")], MACHINE)


def test_torchruns_flag_for_a_module_may_stand_ahead_of_its_options() -> None:
    behind = FIRST.replace("-m verl", "verl").replace("torchrun ", "torchrun -m ")
    machine = {"topology": "hgx-h100"}
    moved, usual = (exchange.read([document(text, "run.sh")], machine) for text in (behind, FIRST))
    assert moved.framework.name == "verl"
    assert had(moved) == had(usual)
